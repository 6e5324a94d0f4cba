"""What every head of a trace does, in a few numbers, and the strongest head of each sort shown as text.

All are means over the rows that see something. For a row (a query) with weights w over the keys it may see:

    entropy     -sum w ln w: how widely it looks         nats
    sink        the weight on the first token            weight
    distance    sum w (i - j): how far back it looks     tokens
    previous    the weight on the token just before      weight; the first row has none and is left out
    self        the weight on the token itself           weight

The last three are there where queries and keys are the same text, in order: not in cross attention nor in images.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clearhead.trace.diff import numbers
from clearhead.trace.errors import TraceError
from clearhead.trace.format import Site, Tokens
from clearhead.trace.reader import Trace

UNITS = {"entropy": "nats", "sink": "weight", "distance": "tokens", "previous": "weight", "self": "weight"}

# Sorts of heads, the measure that says how strong one is, and what makes the strongest.
SORTS = {
    "broad": ("entropy", "looks most widely: the highest entropy"),
    "narrow": ("narrowness", "looks most narrowly: the lowest entropy"),
    "sink": ("sink", "rests on the first token most"),
    "far": ("far", "looks back farthest: the largest mean distance, not counting the first token"),
    "previous": ("previous", "looks at the token before most"),
    "self": ("self_", "looks at the token itself most"),
}
KINDS = {sort: meaning for sort, (_, meaning) in SORTS.items()}
EXAMPLES = 3  # rows shown for each sort
SHOWN = 4  # keys shown for each row


@dataclass(frozen=True)
class Head:
    """The means of one head over its non-empty rows, None where it has none. ``far`` is ``distance`` less the first
    token's part."""

    kind: str
    layer: int
    head: int
    rows: int
    entropy: float
    sink: float
    distance: float | None = None
    previous: float | None = None
    self_: float | None = None
    far: float | None = None

    @property
    def narrowness(self) -> float | None:
        """Less entropy is more; None where a head looks along its own text, which many do at its first token alone."""
        return -self.entropy if self.far is None else None

    def to_dict(self) -> dict[str, Any]:
        return {name.rstrip("_"): value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Example:
    """One row of a head: a query's token and the keys it looks at most, as (key, token, weight)."""

    query: int
    token: str
    keys: tuple[tuple[int, str, float], ...]

    def to_dict(self) -> dict[str, Any]:
        keys = [{"key": key, "token": token, "weight": weight} for key, token, weight in self.keys]
        return {"query": self.query, "token": self.token, "keys": keys}


@dataclass(frozen=True)
class Strongest:
    """The head of a kind of attention that is the most of its sort. A trace of measures has no examples."""

    kind: str  # its sort: "broad", "sink" ...
    head: Head
    value: float
    examples: tuple[Example, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "meaning": KINDS[self.kind],
            "attention": self.head.kind,
            "layer": self.head.layer,
            "head": self.head.head,
            "value": self.value,
            "examples": [example.to_dict() for example in self.examples],
        }


@dataclass(frozen=True)
class Report:
    """All heads of a trace over one of its texts, and for each kind of attention the strongest of each sort."""

    trace: Trace
    heads: tuple[Head, ...]
    strongest: tuple[Strongest, ...]
    text: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, for JSON."""
        return {
            "trace": None if self.trace.path is None else str(self.trace.path),
            "model": self.trace.model.name,
            "text": self.text,
            "tokens": len(self.trace.side(self.heads[0].kind, "query", self.text)),
            "units": UNITS | {"far": "tokens"},
            "heads": [head.to_dict() for head in self.heads],
            "strongest": [strongest.to_dict() for strongest in self.strongest],
        }


def summarize(
    trace: Trace,
    progress: Callable[[int], None] | None = None,
    *,
    kind: str | None = None,
    text: int = 0,
    without: int = 0,
) -> Report:
    """Measure every head of a trace over one text, in one pass over each layer; ``progress`` is called after each.

    kind : of attention, all when None; without : how many first keys the examples leave out, whose weights then sum
    to 1 over the others (the measures do not change).

    Raises TraceError if no row of the trace sees anything, or ``without`` is given where there are no examples.
    """
    sites = trace.sites if kind is None else trace.sites_of(kind)
    if without and all(site.kept == "measures" for site in sites):
        raise TraceError("the trace was recorded with measures only: it has no examples to leave first keys out of")
    heads: list[Head] = []
    for site in sites:
        heads += measure_site(trace, site, text)
        if progress is not None:
            progress(site.layer)
    if not any(head.rows for head in heads):
        raise TraceError(f"no token in {trace.path or 'the trace'} sees anything: there is nothing to report")
    strongest = [
        Strongest(sort, best, abs(_strength(best, sort) or 0.0), _examples(trace, best, text, without))
        for name in dict.fromkeys(site.kind for site in sites)
        for sort in SORTS
        if (best := _best([head for head in heads if head.kind == name], sort)) is not None
    ]
    return Report(trace, tuple(heads), tuple(strongest), text)


def measure_site(trace: Trace, site: Site, text: int = 0) -> list[Head]:
    """The heads of one site."""
    found = trace.measures(site.layer, kind=site.kind, text=text)
    image = trace.grid(site.kind, "key") is not None  # its tokens lie in rows and columns: none is "before" another
    names = [name for name in found if name in (("entropy", "sink") if image else (*UNITS, "far"))]
    means = {name: found.mean(name).tolist() for name in names}
    return [
        Head(
            site.kind,
            site.layer,
            head,
            int(found.rows[place]),
            **{"self_" if name == "self" else name: values[place] for name, values in means.items()},
        )
        for place, head in enumerate(numbers(site))
    ]


def _strength(head: Head, sort: str) -> float | None:
    value: float | None = getattr(head, SORTS[sort][0])
    return value


def _best(heads: list[Head], sort: str) -> Head | None:
    strengths = {head: strength for head in heads if head.rows and (strength := _strength(head, sort)) is not None}
    return max(strengths, key=strengths.__getitem__, default=None)


def _examples(trace: Trace, head: Head, text: int, without: int) -> tuple[Example, ...]:
    """Rows spread evenly over the text, each moved on to the next token that has letters or digits in it."""
    site = trace.facts(head.layer, head.kind)
    if site.kept == "measures":
        return ()
    weights = trace.weights(head.layer, head.head, kind=head.kind, text=text, without=range(without))
    queries, keys = (trace.side(head.kind, of, text) for of in ("query", "key"))
    seeing = np.flatnonzero(~np.isneginf(weights.logsumexp64[0]))
    spread = seeing[(len(seeing) * np.arange(1, EXAMPLES + 1)) // (EXAMPLES + 1)] if len(seeing) else seeing
    rows = sorted({_next_word(queries.text, int(row), set(map(int, seeing))) for row in spread})
    return tuple(_example(queries, keys, np.asarray(weights[0, row]), row) for row in rows)


def _next_word(tokens: tuple[str, ...], row: int, seeing: set[int]) -> int:
    for place in range(row, min(row + 32, len(tokens))):
        if place in seeing and any(character.isalnum() for character in tokens[place]):
            return place
    return row


def _example(queries: Tokens, keys: Tokens, row: NDArray[Any], query: int) -> Example:
    order = np.argsort(-row, kind="stable")[:SHOWN]
    found = tuple((int(key), keys.text[key], float(row[key])) for key in order if row[key] > 0)
    return Example(query, queries.text[query], found)
