"""What can be asked of a whole trace, beside its weights: the methods that Trace has from here, each a file's work."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from clearhead.trace.errors import TraceError

if TYPE_CHECKING:
    from clearhead.trace.alignment import Links
    from clearhead.trace.marks import Marks
    from clearhead.trace.reader import Trace
    from clearhead.trace.segments import Segments
    from clearhead.weights import AttentionWeights


class Questions:
    """A trace asked about its text. Everything here is computed when it is called, in memory linear in length."""

    _marks: Marks | None = None

    def mark(
        self, segments: Mapping[str, Any], side: str | None = None, text: int = 0, characters: bool = False
    ) -> None:
        """Name parts of a text, and keep them with the trace (in its folder, as ``segments.json``).

        segments : names and ranges of tokens, ``{"question": (0, 12), "names": [(3, 5), (9, 11)]}``, each half-open; or
            of characters, which become tokens. ``clearhead.trace.segments`` finds turns, documents and sentences.
        side : whose tokens: "self", or "encoder" or "decoder" ...; the queries' of the first kind when None.

        Names that are known already get the new ranges. Raises TraceError for ranges beyond the text.
        """
        from clearhead.trace.marks import write_marks
        from clearhead.trace.segments import checked, in_tokens

        trace = _trace(self)
        name = self._side_name(side)
        texts = trace.texts_of(name)
        if not 0 <= text < len(texts):
            raise TraceError(f"the trace holds texts 0 to {len(texts) - 1}, there is no text {text}")
        tokens = texts[text]
        ranges = in_tokens(tokens, segments) if characters else checked(segments, len(tokens))
        marks = self._all_marks()
        marks.setdefault(name, {}).setdefault(text, {}).update(ranges)
        if trace.path is not None:
            write_marks(trace.path, marks, {side: len(trace.texts_of(side)) for side in marks})

    def segments(self, side: str | None = None, text: int = 0) -> Segments:
        """The segments that were marked: name to ranges of tokens."""
        return dict(self._all_marks().get(self._side_name(side), {}).get(text, {}))

    def between(
        self,
        rows: str,
        keys: str,
        kind: str | None = None,
        text: int = 0,
        segments: Mapping[str, Any] | None = None,
    ) -> NDArray[np.float64]:
        """How much of their weight the rows of one segment give to the keys of another: (layers, heads) float64.

        The mean, over the rows of ``rows`` that see anything, of the weight on all keys of ``keys`` together, 0 to 1.
        A name stands for all segments numbered under it: "user" for "user 1", "user 2" ... ``segments`` : ranges of
        tokens by name, in place of those that were marked. NaN where no row sees anything, or a layer has fewer heads.

        Costs the weights of those rows and keys, once. Raises TraceError for a name that is not known.

        >>> import clearhead as ch
        >>> weights = np.tril(np.ones((1, 1, 4, 4))) / np.array([[1.0], [2.0], [3.0], [4.0]])
        >>> trace = ch.from_attentions([weights], ["Who", "?", " I", "."])
        >>> trace.between("answer", "question", segments={"question": (0, 2), "answer": (2, 4)}).round(3).tolist()
        [[0.583]]
        """
        from clearhead.trace.between import masses
        from clearhead.trace.segments import checked, named

        trace = _trace(self)
        sites = trace.sites_of(kind)
        site = sites[0]
        given = (
            [self.segments(side, text) for side in (site.query_side, site.key_side)]
            if segments is None
            else [checked(segments), checked(segments)]
        )
        chosen = [named(some, name) for some, name in zip(given, (rows, keys), strict=True)]
        checked({rows: chosen[0]}, site.queries)
        checked({keys: chosen[1]}, site.keys)
        found = np.full((len(sites), max(site.heads for site in sites)), np.nan)
        for place, one in enumerate(sites):
            weights = trace.weights(one.layer, kind=one.kind, text=text)
            found[place, : one.heads] = masses(weights, [chosen[0]], [chosen[1]])[:, 0, 0]
        return found

    def over(
        self,
        segment: str,
        *names: str,
        kind: str | None = None,
        text: int = 0,
        segments: Mapping[str, Any] | None = None,
    ) -> dict[str, NDArray[np.float64]]:
        """Measures of one segment: name to (layers, heads) float64, in the units of :mod:`clearhead.measures`.

        names : of rows ("entropy", "distance", "sink", "largest" ...), whose mean is over the segment's rows that see
            anything; and "received", whose mean is over its keys: of cross attention, those of the key side's segment.

        ``segment`` and ``segments`` are as ``rows`` and ``segments`` of ``between``. NaN where no row sees anything,
        or a layer has fewer heads.

        Costs a pass over the scores of each layer. Raises TraceError for a name that is not known, for positions where
        keys are not the queries' own text, and where the trace holds measures only.

        >>> import clearhead as ch
        >>> weights = np.tril(np.ones((1, 1, 4, 4))) / np.array([[1.0], [2.0], [3.0], [4.0]])
        >>> trace = ch.from_attentions([weights], ["Who", "?", " I", "."])
        >>> found = trace.over("answer", "entropy", "distance", segments={"answer": (2, 4)})
        >>> {name: values.round(3).tolist() for name, values in found.items()}  # ln 3 and ln 4; 1 and 1.5 tokens
        {'entropy': [[1.242]], 'distance': [[1.25]]}
        """
        from clearhead.asked import KEY_MEASURES
        from clearhead.trace.over import check_names, means
        from clearhead.trace.recompute import site_visible
        from clearhead.trace.segments import checked, named

        trace = _trace(self)
        sites = trace.sites_of(kind)
        site = sites[0]
        check_names(names, site)
        ranges: dict[str, Any] = {"rows": (), "keys": ()}
        for of, side, count in (("rows", site.query_side, site.queries), ("keys", site.key_side, site.keys)):
            if any((name in KEY_MEASURES) == (of == "keys") for name in names):
                given = self.segments(side, text) if segments is None else checked(segments)
                ranges[of] = named(given, segment)
                checked({segment: ranges[of]}, count)
        found = {name: np.full((len(sites), max(site.heads for site in sites)), np.nan) for name in names}
        for place, one in enumerate(sites):
            weights = trace.weights(one.layer, kind=one.kind, text=text)
            seen = site_visible(one, trace.arrays(one.layer, one.kind), text)
            for name, values in means(weights, seen, names, **ranges).items():
                found[name][place, : one.heads] = values
        return found

    def weights_without(
        self, keys: int | Sequence[int], layer: int, head: int | None = None, kind: str | None = None, text: int = 0
    ) -> AttentionWeights:
        """Weights as they are among the other keys: those of ``keys`` are left out, and rows sum to 1 without them.

        keys : how many first keys, or the places of keys. Most heads of a language model rest on its first token, a
        sink whose weight says little (Xiao et al., "Efficient Streaming Language Models with Attention Sinks", ICLR
        2024); ``weights.measure("sink")`` says how much it is, and this shows the rest. A row that sees nothing else is
        empty.
        """
        return _trace(self).weights(layer, head, kind, text, without=range(keys) if isinstance(keys, int) else keys)

    def rollout(
        self, rows: ArrayLike, kind: str | None = None, text: int = 0, residual: float = 0.5
    ) -> NDArray[np.float64]:
        """How much of each token at the input reaches some rows of the last recorded layer: (n, tokens) float64.

        rows : which queries, negative ones from the end. Attention rollout (Abnar & Zuidema 2020) without a matrix: see
        :func:`clearhead.rollout`. Layers that the trace leaves out are as if they moved nothing.

        >>> import clearhead as ch
        >>> layer = np.tril(np.ones((1, 1, 3, 3))) / np.array([[1.0], [2.0], [3.0]])
        >>> ch.from_attentions([layer, layer]).rollout([1]).round(4).tolist()
        [[0.4375, 0.5625, 0.0]]
        """
        from clearhead.flow import rollout

        trace = _trace(self)
        layers = [trace.weights(site.layer, kind=site.kind, text=text) for site in trace.sites_of(kind)]
        if layers[0].shape[-1] != layers[0].shape[-2]:
            raise TraceError(
                f"{trace.sites_of(kind)[0].kind} attention looks from {layers[0].shape[-2]} tokens at "
                f"{layers[0].shape[-1]} others: rollout follows a text through its own layers"
            )
        return rollout(layers, rows, residual=residual)

    def map(self, layer: int, head: int, cells: int, kind: str | None = None, text: int = 0) -> NDArray[Any]:
        """A head's weights, pooled to at most so many rows and columns: their means, as of ``weights.pooled``.

        Of a trace of measures it is the map that was recorded, 64 x 64 at most.

        >>> import clearhead as ch
        >>> ch.from_attentions([np.full((1, 1, 4, 4), 0.25)]).map(0, 0, 2).tolist()
        [[0.25, 0.25], [0.25, 0.25]]
        """
        trace = _trace(self)
        site = trace.facts(layer, kind)
        if site.kept == "measures":
            place = trace.place_of(site, head)
            return np.asarray(trace.measures(layer, kind=site.kind, text=text).pooled[place])
        return np.asarray(trace.weights(layer, head, kind=site.kind, text=text).pooled(cells, cells)[0])

    def hidden(
        self, layer: int, head: int, rows: int, columns: int, kind: str | None = None, text: int = 0
    ) -> NDArray[np.bool_] | None:
        """Which blocks of a map of so many rows and columns hold no cell that may be seen: there its 0 says nothing.

        None where that is not known: a trace of measures keeps no masks but the plainest.

        >>> import clearhead as ch
        >>> layer = np.tril(np.ones((1, 1, 4, 4))) / np.array([[1.0], [2.0], [3.0], [4.0]])
        >>> ch.from_attentions([layer]).hidden(0, 0, 2, 2).tolist()
        [[False, True], [False, False]]
        """
        from clearhead.trace.recompute import site_visible
        from clearhead.trace.visible import hidden_blocks

        trace = _trace(self)
        site = trace.facts(layer, kind)
        place = trace.place_of(site, head)
        if site.kept == "measures" and site.mask in ("intervals", "array"):
            return None
        seen = site_visible(site, trace.arrays(layer, site.kind), text, slice(place, place + 1))
        return hidden_blocks(seen, site.queries, site.keys, rows, columns)

    def alignment(
        self,
        layer: int | None = None,
        head: int | None = None,
        text: int = 0,
        step: Literal["output", "input"] = "output",
        words: bool = False,
    ) -> Links:
        """(source, target) links by cross attention: see :func:`clearhead.trace.alignment.align`."""
        from clearhead.trace.alignment import align

        return align(_trace(self), layer, head, text=text, step=step, words=words)

    def to_bertviz(
        self, kind: str | None = None, layers: Collection[int] | None = None, text: int = 0
    ) -> dict[str, Any]:
        """What BertViz draws: ``head_view(**trace.to_bertviz())``. See :func:`clearhead.trace.bertviz.to_bertviz`."""
        from clearhead.trace.bertviz import to_bertviz

        return to_bertviz(_trace(self), kind, layers, text)

    def _all_marks(self) -> Marks:
        from clearhead.trace.marks import read_marks

        if self._marks is None:
            trace = _trace(self)
            lengths = {side: [len(tokens) for tokens in trace.texts_of(side)] for side in trace.side_names}
            self._marks = {} if trace.path is None else read_marks(trace.path, lengths)
        return self._marks

    def _side_name(self, side: str | None) -> str:
        names = _trace(self).side_names
        if side is not None and side not in names:
            raise TraceError(f"this trace has no side {side!r}, only {', '.join(names)}")
        return names[0] if side is None else side


def _trace(questions: Questions) -> Trace:
    return cast("Trace", questions)
