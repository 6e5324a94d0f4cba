"""A trace for other programs: weights as NPZ, measures as CSV or Parquet, alignments in Pharaoh's format.

Every file is written whole or not at all, one layer of weights in memory at a time."""

from __future__ import annotations

import csv
import io
import zipfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from clearhead import memory
from clearhead.trace.alignment import align, pharaoh
from clearhead.trace.diff import numbers
from clearhead.trace.errors import TraceError
from clearhead.trace.format import Site
from clearhead.trace.measured import IN_ORDER, POSITIONS
from clearhead.trace.reader import Trace
from clearhead.trace.whole import whole_file

WAYS = {".npz": "weights", ".csv": "measures", ".parquet": "measures", ".align": "alignments", ".pharaoh": "alignments"}
ROW_MEASURES = ("entropy", "sink", "distance", "previous", "self")
Progress = Callable[[int], None]
Table = dict[str, list[Any]]


@dataclass(frozen=True)
class Part:
    """What of a trace is meant: None is all. ``rows`` are queries."""

    kind: str | None = None
    layers: Collection[int] | None = None
    heads: Collection[int] | None = None
    rows: Collection[int] | None = None
    text: int | None = None

    def sites(self, trace: Trace) -> list[Site]:
        """Its sites. Raises TraceError if there are none."""
        sites = trace.sites if self.kind is None else trace.sites_of(self.kind)
        if self.layers is not None and (beyond := sorted(set(self.layers) - {site.layer for site in sites})):
            raise TraceError(f"layer {beyond[0]} is not in the trace: it holds {_listed({s.layer for s in sites})}")
        return [site for site in sites if self.layers is None or site.layer in self.layers]

    def heads_of(self, site: Site) -> list[int]:
        """The chosen heads of a site, by their numbers. Raises TraceError for one that it lacks."""
        known = numbers(site)
        if self.heads is not None and (beyond := sorted(set(self.heads) - set(known))):
            raise TraceError(f"{site} has heads {_listed(set(known))}, there is no head {beyond[0]}")
        return [head for head in known if self.heads is None or head in self.heads]

    def rows_of(self, site: Site) -> list[int]:
        """The chosen rows of a site. Raises TraceError for one that it lacks."""
        rows = range(site.queries) if self.rows is None else sorted(set(self.rows))
        if rows and rows[-1] >= site.queries:
            raise TraceError(f"{site} has rows 0 to {site.queries - 1}, there is no row {rows[-1]}")
        return list(rows)


def way(path: Path) -> str:
    """What a file's name asks for: "weights", "measures" or "alignments". Raises TraceError if it says nothing."""
    if path.suffix.lower() not in WAYS:
        raise TraceError(f"{path} must end in {', '.join(WAYS)}: that says what to export")
    return WAYS[path.suffix.lower()]


def write_weights(trace: Trace, path: Path, part: Part, progress: Progress | None = None) -> int:
    """Write rows of weights as NPZ, and give how many sites. ``np.load`` reads it without pickle:

    ``self-003`` : (heads, rows, keys) float32, by kind and layer; ``self-003-heads`` : their numbers; ``rows`` : if
    not all; ``self-query-tokens``, ``self-key-tokens`` : the tokens' texts.

    Raises TraceError where the weights of a layer do not fit into memory, before anything is written."""
    sites, text = part.sites(trace), part.text or 0
    texts = max(len(trace.texts_of(site.query_side)) for site in sites)
    if part.text is None and texts > 1:
        raise TraceError(
            f"the trace holds texts 0 to {texts - 1}, and a file of weights is of one: choose it, --text 0"
        )
    largest = max(4 * len(part.heads_of(site)) * len(part.rows_of(site)) * site.keys for site in sites)
    free = memory.available()
    if free is not None and largest > free:
        raise TraceError(
            f"the weights of a layer take {memory.written(largest)}, {memory.written(free)} are free: choose rows with "
            f"--rows or heads with --heads"
        )
    with whole_file(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for site in sites:
            heads, rows = part.heads_of(site), part.rows_of(site)
            weights = np.empty((len(heads), len(rows), site.keys), np.float32)
            for place, head in enumerate(heads):
                weights[place] = trace.weights(site.layer, head, kind=site.kind, text=text)[0, rows]
            name = f"{site.kind}-{site.layer:03d}"
            _put(archive, name, weights)
            _put(archive, f"{name}-heads", np.array(heads))
            if progress is not None:
                progress(site.layer)
        if part.rows is not None:
            _put(archive, "rows", np.array(sorted(set(part.rows))))
        for kind in dict.fromkeys(site.kind for site in sites):
            for of in ("query", "key"):
                _put(archive, f"{kind}-{of}-tokens", np.array(trace.side(kind, of, text).text))
    return len(sites)


def _put(archive: zipfile.ZipFile, name: str, array: Any) -> None:
    with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
        np.lib.format.write_array(file, np.asanyarray(array), allow_pickle=False)


def write_measures(trace: Trace, path: Path, part: Part, progress: Progress | None = None) -> int:
    """Write measures as CSV or Parquet, and give how many lines: one a head with its means, or where rows are chosen
    one a row.

    Raises ModuleNotFoundError for Parquet without pyarrow, before anything is computed."""
    parquet = path.suffix.lower() == ".parquet"
    if parquet:
        _pyarrow()
    table = _table(_lines(trace, part, progress))
    with whole_file(path) as file:
        if parquet:
            arrow = _pyarrow()
            arrow.parquet.write_table(arrow.table(table), file)
        else:
            words = io.TextIOWrapper(file, encoding="utf-8", newline="")
            writer = csv.writer(words)
            writer.writerow(table)
            writer.writerows(zip(*table.values(), strict=True))
            words.detach()
    return len(next(iter(table.values())))


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise TraceError(
            "Parquet needs the package pyarrow: pip install pyarrow, or give a name that ends in .csv"
        ) from None
    return pyarrow


def _lines(trace: Trace, part: Part, progress: Progress | None) -> Iterator[dict[str, Any]]:
    for site in part.sites(trace):
        heads = part.heads_of(site)
        texts = range(len(trace.texts_of(site.query_side))) if part.text is None else [part.text]
        for text in texts:
            yield from (
                _of_rows(trace, site, heads, text, part)
                if part.rows is not None
                else _of_heads(trace, site, heads, text)
            )
        if progress is not None:
            progress(site.layer)


def _of_heads(trace: Trace, site: Site, heads: Sequence[int], text: int) -> Iterator[dict[str, Any]]:
    found = trace.measures(site.layer, kind=site.kind, text=text)
    names = [name for name in found if in_order(trace, site) or name not in (*POSITIONS, "far")]
    means = {name: found.mean(name) for name in names}
    for head in heads:
        place = numbers(site).index(head)
        line: dict[str, Any] = {
            "text": text,
            "kind": site.kind,
            "layer": site.layer,
            "head": head,
            "rows": int(found.rows[place]),
        }
        yield line | {name: float(values[place]) for name, values in means.items()}


def in_order(trace: Trace, site: Site) -> bool:
    """Whether a site's keys are its queries, one after another: tokens of an image lie in rows and columns."""
    return site.kind in IN_ORDER and site.queries == site.keys and trace.grid(site.kind, "key") is None


def _of_rows(trace: Trace, site: Site, heads: Sequence[int], text: int, part: Part) -> Iterator[dict[str, Any]]:
    rows, tokens = part.rows_of(site), trace.side(site.kind, "query", text).text
    names = ROW_MEASURES if in_order(trace, site) else ROW_MEASURES[:2]
    for head in heads:
        weights = trace.weights(site.layer, head, kind=site.kind, text=text)
        values = {name: array[0] for name, array in weights.measure(*names).to_dict().items() if name in names}
        logsumexp = weights.logsumexp64[0]
        for row in rows:
            line: dict[str, Any] = {"text": text, "kind": site.kind, "layer": site.layer, "head": head, "row": row}
            line |= {"token": tokens[row], "logsumexp": float(logsumexp[row])}
            yield line | {name: float(array[row]) for name, array in values.items()}


def _table(lines: Iterator[dict[str, Any]]) -> Table:
    """Lines as columns; a measure that a line lacks is None."""
    found = list(lines)
    names = list(dict.fromkeys(name for line in found for name in line))
    return {name: [line.get(name) for line in found] for name in names}


def write_alignments(
    trace: Trace, path: Path, part: Part, step: Literal["output", "input"] = "output", words: bool = False
) -> int:
    """Write a line of ``i-j`` links for each text (see :mod:`clearhead.trace.alignment`), and give how many.

    Raises TraceError if more than one layer or head is chosen, or there is no cross attention."""
    layer, head = (_one(chosen, name) for chosen, name in ((part.layers, "--layers"), (part.heads, "--heads")))
    texts = range(trace.texts) if part.text is None else [part.text]
    lines = [pharaoh(align(trace, layer, head, text=text, step=step, words=words)) for text in texts]
    with whole_file(path) as file:
        file.write("".join(line + "\n" for line in lines).encode())
    return len(lines)


def _one(chosen: Collection[int] | None, option: str) -> int | None:
    if chosen is not None and len(chosen) != 1:
        raise TraceError(f"alignments are made of one layer, and one of its heads or all: {option} takes one number")
    return None if chosen is None else next(iter(chosen))


def _listed(values: set[int]) -> str:
    whole = sorted(values)
    return f"{whole[0]} to {whole[-1]}" if whole == list(range(whole[0], whole[-1] + 1)) else ", ".join(map(str, whole))
