"""Open a trace and look at it: rows, blocks and measures of any head, computed as they are asked for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from clearhead.trace import format as layout
from clearhead.trace.errors import TraceError
from clearhead.trace.format import Checks, Index, ModelFacts, Side, Site, SiteCheck, Tokens
from clearhead.trace.holding import check_holding
from clearhead.trace.measured import SiteMeasures
from clearhead.trace.opening import read_index
from clearhead.trace.questions import Questions
from clearhead.trace.recompute import site_visible, site_weights
from clearhead.trace.tensors import read_header, read_tensors

if TYPE_CHECKING:
    from clearhead.weights import AttentionWeights

Arrays = dict[str, NDArray[Any]]


class Trace(Questions):
    """The attention of a model over one or more texts, recorded by ``clearhead trace`` or ``ch.trace``.

    path : where it lies, None in memory; model : facts about the model; sites : its attentions, each of a kind and a
    layer; texts : how many texts; checks : what was found when it was recorded. ``len(trace)`` is the number of sites.

    A site's kind is "self" in models of one stack, else "encoder", "decoder", "cross", "text", "vision" or "audio".
    Wherever a kind can be given it may be left out if the trace has only one."""

    def __init__(self, index: Index, path: Path | None = None, held: Mapping[str, Arrays] | None = None) -> None:
        """``held`` : the arrays of each site's file, by its name, if they are in memory."""
        self.path = path
        self._index, self._held = index, held
        self._sites = {(site.kind, site.layer): site for site in index.sites}

    @classmethod
    def open(cls, path: str | PathLike[str]) -> Trace:
        """Read the index of a trace and check every site's file against it. No numbers are read yet.

        Raises TraceError, saying what is wrong, where the folder is no trace, was cut short, or is of a newer
        format."""
        path = Path(path)
        trace = cls(read_index(path), path)
        for site in trace.sites:
            file = trace._file(site)
            entries = {name: (entry.dtype, entry.shape) for name, entry in read_header(file).items()}
            if trace._index.version == 1:
                entries = {
                    name: (dtype, shape if name in _SHARED else (1, *shape)) for name, (dtype, shape) in entries.items()
                }
            check_holding(file, entries, site, len(trace._side(site, "query").texts))
        return trace

    @property
    def model(self) -> ModelFacts:
        return self._index.model

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of sites that there are."""
        return tuple(kind for kind in layout.KINDS if any(site.kind == kind for site in self._index.sites))

    @property
    def sites(self) -> tuple[Site, ...]:
        """All sites: kinds in the order of ``kinds``, layers ascending."""
        return tuple(sorted(self._index.sites, key=lambda site: (layout.KINDS.index(site.kind), site.layer)))

    @property
    def layers(self) -> tuple[int, ...]:
        """The numbers of the recorded layers, of any kind, ascending."""
        return tuple(sorted({site.layer for site in self._index.sites}))

    @property
    def texts(self) -> int:
        """How many texts were read at once, on the query side of the first kind."""
        return len(self._side(self._first(self.kinds[0]), "query").texts)

    @property
    def checks(self) -> Checks:
        """What was found about row sums, hidden keys and outputs when the trace was recorded."""
        return self._index.checks

    @property
    def text(self) -> Tokens:
        """The tokens of the first text, on the query side of the first kind."""
        return self.side(self.kinds[0])

    @property
    def tokens(self) -> tuple[str, ...]:
        """The pieces of text that the tokens of ``text`` came from."""
        return self.text.text

    def side(self, kind: str | None = None, of: str = "query", text: int = 0) -> Tokens:
        """The tokens that the queries (``of="query"``) or keys (``of="key"``) of a kind stand for."""
        site = self._first(kind)
        if of not in ("query", "key"):
            raise TraceError(f"a site has a query side and a key side, not {of!r}")
        return self._side(site, of).texts[self._text(text, site)]

    def grid(self, kind: str | None = None, of: str = "query") -> tuple[int, int] | None:
        """(rows, columns) of an image's places, which are the last tokens of that side; None for what is no image."""
        return self._side(self._first(kind), of).grid

    @property
    def side_names(self) -> tuple[str, ...]:
        """The names of the sides: "self", "encoder", "decoder" ..."""
        return tuple(dict.fromkeys(name for site in self.sites for name in (site.query_side, site.key_side)))

    def texts_of(self, side: str) -> tuple[Tokens, ...]:
        """The tokens of all texts of a side."""
        return self._index.side(side).texts

    def sites_of(self, kind: str | None = None) -> tuple[Site, ...]:
        """The sites of a kind, layers ascending."""
        name = self._first(kind).kind
        return tuple(site for site in self.sites if site.kind == name)

    @property
    def nbytes(self) -> int:
        """What the trace takes on disk, or in memory, in bytes."""
        if self.path is not None:
            return sum(file.stat().st_size for file in self.path.iterdir())
        return sum(array.nbytes for arrays in (self._held or {}).values() for array in arrays.values())

    @property
    def dense_nbytes(self) -> int:
        """What the weights of the recorded sites would take as float32 matrices, in bytes."""
        return sum(
            len(self._side(site, "query").texts) * site.heads * site.queries * site.keys * 4 for site in self.sites
        )

    def facts(self, layer: int, kind: str | None = None) -> Site:
        """How a layer makes its scores: heads, dim, scale, softcap, mask."""
        kind = self._first(kind).kind
        if (kind, layer) not in self._sites:
            kept = ", ".join(str(site.layer) for site in self.sites if site.kind == kind)
            what = f"layer {layer}" if len(self.kinds) == 1 else f"{kind} layer {layer}"
            raise TraceError(f"{what} is not in the trace{self._where()}: it holds {kept}")
        return self._sites[kind, layer]

    def arrays(self, layer: int, kind: str | None = None) -> Arrays:
        """What is kept of a site, read-only and mapped into memory: query, key, logsumexp, any mask, measures.

        Each has a first axis for the texts, but ``sinks`` (heads,)."""
        site = self.facts(layer, kind)
        if self._held is not None:
            return dict(self._held[layout.site_file(site.kind, site.layer)])
        arrays = read_tensors(self._file(site))
        if self._index.version == 1:
            arrays = {name: array if name in _SHARED else array[None] for name, array in arrays.items()}
        return arrays

    def weights(
        self,
        layer: int,
        head: int | None = None,
        kind: str | None = None,
        text: int = 0,
        without: Collection[int] = (),
    ) -> AttentionWeights:
        """The weights of a layer, (heads, queries, keys), or of one of its heads, (1, queries, keys).

        Nothing is computed until it is looked at: ``trace.weights(3)[0, 100]`` computes one row. ``without`` : places
        of keys that are hidden beside those that the model hides; rows then sum to 1 over the others.

        Raises TraceError where the trace has no such site, head or text, or only what was measured of it.
        """
        site = self.facts(layer, kind)
        self._text(text, site)
        if site.kept == "measures":
            raise TraceError(
                f"the trace{self._where()} was recorded with measures only: {site} has no queries and keys to compute "
                f"weights from. trace.measures({layer}) has what was measured; record it anew without measures-only"
            )
        place = None if head is None else self.place_of(site, head)
        return site_weights(site, self.arrays(layer, site.kind), text, place, without=without)

    def measures(self, layer: int, kind: str | None = None, text: int = 0) -> SiteMeasures:
        """What every head of a layer does, in a few numbers: as recorded, else computed now in one pass."""
        from clearhead.trace.measured import measure, recorded

        site = self.facts(layer, kind)
        self._text(text, site)
        arrays = self.arrays(layer, site.kind)
        if (found := recorded(arrays, text)) is not None:
            return found
        seen = site_visible(site, arrays, text)
        return SiteMeasures(measure(site, site_weights(site, arrays, text), seen))

    def check(self) -> Checks:
        """Look at some rows of every site again: row sums, and weights on hidden or future keys.

        Outputs cannot be compared again, since values are not kept: ``output`` is what was found when recorded. So are
        rows where measures alone are kept: what their keys received is held against what their rows can have given.
        """
        from clearhead.trace.faithful import look_at_measures, look_at_rows

        then = {(check.kind, check.layer): check for check in self.checks.sites}
        found = []
        for site in self.sites:
            texts = range(len(self._side(site, "query").texts))
            if site.kept == "measures":
                known = [self.measures(site.layer, site.kind, text) for text in texts]
                recorded = then[site.kind, site.layer]
                more = max(look_at_measures(measures) for measures in known)
                found += [replace(recorded, row_sum=max(recorded.row_sum, more))]
                continue
            arrays = self.arrays(site.layer, site.kind)
            looked = [look_at_rows(site, arrays, text, site_weights(site, arrays, text)) for text in texts]
            before = then.get((site.kind, site.layer))
            dtype, output = (site.dtype, None) if before is None else (before.dtype, before.output)
            rows, sums, hidden = zip(*looked, strict=True)
            found.append(SiteCheck(site.kind, site.layer, dtype, sum(rows), max(sums), max(hidden), output))
        return Checks(tuple(found), self.checks.missing)

    def save(self, path: str | PathLike[str]) -> Trace:
        """Write the trace to a folder, and give it as it lies there.

        Raises TraceError if something that is not a trace lies at ``path``, or the disk is full."""
        from clearhead.trace.writer import writing

        checks = {(check.kind, check.layer): check for check in self.checks.sites}
        with writing(Path(path), {"model": self.model.name, "of": str(len(self))}) as writer:
            for site in self.sites:
                unknown = SiteCheck(site.kind, site.layer, site.dtype, 0, 0.0, 0.0, None)  # of a trace of version 1
                check = checks.get((site.kind, site.layer), unknown)
                writer.add(site, check, self.arrays(site.layer, site.kind))
            writer.finish(self._index)
        return Trace.open(path)

    def _first(self, kind: str | None) -> Site:
        """The first site of a kind."""
        if kind is None and len(self.kinds) > 1:
            raise TraceError(f"this trace holds {', '.join(self.kinds)}: say which with kind=")
        kind = self.kinds[0] if kind is None else kind
        if kind not in self.kinds:
            raise TraceError(f"this trace holds no {kind!r} attention, only {', '.join(self.kinds)}")
        return next(site for site in self.sites if site.kind == kind)

    def _side(self, site: Site, of: str) -> Side:
        return self._index.side(site.query_side if of == "query" else site.key_side)

    def _text(self, text: int, site: Site) -> int:
        count = len(self._side(site, "query").texts)
        if not 0 <= text < count:
            raise TraceError(f"the trace holds texts 0 to {count - 1}, there is no text {text}")
        return text

    def place_of(self, site: Site, head: int) -> int:
        """Where a head stands among those that are kept of a site. Raises TraceError if it is none of them."""
        numbers = site.numbers or tuple(range(site.heads))
        if head not in numbers:
            held = f"heads 0 to {site.heads - 1}" if not site.numbers else f"heads {', '.join(map(str, numbers))}"
            what = f"layer {site.layer}" if len(self.kinds) == 1 else str(site)
            raise TraceError(f"{what} has {held}, there is no head {head}")
        return numbers.index(head)

    def _file(self, site: Site) -> Path:
        assert self.path is not None
        name = layout.site_file("layer" if self._index.version == 1 else site.kind, site.layer)
        return self.path / name

    def _where(self) -> str:
        return "" if self.path is None else f" {self.path}"

    def __len__(self) -> int:
        return len(self._sites)

    def __repr__(self) -> str:
        where = "in memory" if self.path is None else repr(str(self.path))
        texts = "" if self.texts == 1 else f"{self.texts} texts of "
        kinds = "" if self.kinds == ("self",) else f" of {', '.join(self.kinds)} attention"
        return f"Trace({where}: {self.model.name}, {texts}{len(self.tokens):,} tokens, {len(self)} layers{kinds})"


_SHARED = ("sinks",)  # by all texts
