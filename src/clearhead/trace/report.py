"""What every head of a trace does, in five numbers, and the strongest head of each kind shown as text.

All are means over the rows that see something. For a row (a query) with weights w over the keys it may see:

    entropy     -sum w ln w: how widely it looks         nats
    sink        the weight on the text's first token     weight
    distance    sum w (i - j): how far back it looks     tokens
    previous    the weight on the token just before      weight; the first row has none and is left out
    self        the weight on the token itself           weight
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clearhead.trace.errors import TraceError
from clearhead.trace.reader import Trace

UNITS = {"entropy": "nats", "sink": "weight", "distance": "tokens", "previous": "weight", "self": "weight"}

# Kinds of heads, and what makes the strongest: see `_strength`.
KINDS = {
    "broad": "looks most widely: the highest entropy",
    "sink": "rests on the first token most",
    "far": "looks back farthest: the largest mean distance, not counting the first token",
    "previous": "looks at the token before most",
    "self": "looks at the token itself most",
}
EXAMPLES = 3  # rows shown for each kind
SHOWN = 4  # keys shown for each row


@dataclass(frozen=True)
class Head:
    """The means of one head over its non-empty rows. ``far`` is ``distance`` less the first token's part."""

    layer: int
    head: int
    rows: int
    entropy: float
    sink: float
    distance: float
    previous: float
    self_: float
    far: float

    def to_dict(self) -> dict[str, Any]:
        facts = asdict(self)
        return {name.rstrip("_"): value for name, value in facts.items()}


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
    """The head that is the most of its kind."""

    kind: str
    head: Head
    value: float
    examples: tuple[Example, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "meaning": KINDS[self.kind],
            "layer": self.head.layer,
            "head": self.head.head,
            "value": self.value,
            "examples": [example.to_dict() for example in self.examples],
        }


@dataclass(frozen=True)
class Report:
    """All heads of a trace, and the strongest of each kind."""

    trace: Trace
    heads: tuple[Head, ...]
    strongest: tuple[Strongest, ...]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, for JSON."""
        return {
            "trace": str(self.trace.path),
            "model": self.trace.model.name,
            "tokens": len(self.trace.tokens),
            "units": UNITS | {"far": "tokens"},
            "heads": [head.to_dict() for head in self.heads],
            "strongest": [strongest.to_dict() for strongest in self.strongest],
        }


def summarize(trace: Trace, progress: Callable[[int], None] | None = None) -> Report:
    """Measure every head of a trace, in one pass over each layer; ``progress`` is called after each.

    Raises TraceError if no row of the trace sees anything.
    """
    heads: list[Head] = []
    for layer in trace.layers:
        heads += measure_layer(trace, layer)
        if progress is not None:
            progress(layer)
    if not any(head.rows for head in heads):
        raise TraceError(f"no token in {trace.path} sees anything: there is nothing to report")
    return Report(trace, tuple(heads), tuple(_strongest(trace, heads, kind) for kind in KINDS))


def measure_layer(trace: Trace, layer: int) -> list[Head]:
    """The heads of one layer."""
    weights = trace.weights(layer)
    found = weights.measure("entropy", "sink", "distance", "previous", "self", sink=1)
    position = np.arange(len(trace.tokens))
    # Distance is a sum over keys, so the first key's part of it is its weight times its distance.
    far = found.distance - found.sink * position
    heads = []
    for head in range(weights.shape[0]):
        seeing = ~np.isneginf(weights.logsumexp64[head])
        heads.append(
            Head(
                layer=layer,
                head=head,
                rows=int(seeing.sum()),
                entropy=_mean(found.entropy[head], seeing),
                sink=_mean(found.sink[head], seeing),
                distance=_mean(found.distance[head], seeing),
                previous=_mean(found.previous[head], seeing & (position > 0)),
                self_=_mean(found.self_[head], seeing),
                far=_mean(far[head], seeing),
            )
        )
    return heads


def _mean(values: NDArray[Any], rows: NDArray[np.bool_]) -> float:
    return float(values[rows].mean()) if rows.any() else 0.0


def _strength(head: Head, kind: str) -> float:
    return {
        "broad": head.entropy,
        "sink": head.sink,
        "far": head.far,
        "previous": head.previous,
        "self": head.self_,
    }[kind]


def _strongest(trace: Trace, heads: list[Head], kind: str) -> Strongest:
    best = max((head for head in heads if head.rows), key=lambda head: _strength(head, kind))
    return Strongest(kind, best, _strength(best, kind), _examples(trace, best))


def _examples(trace: Trace, head: Head) -> tuple[Example, ...]:
    """Rows spread evenly over the text, each moved on to the next token that has letters or digits in it."""
    weights = trace.weights(head.layer, head.head)
    seeing = np.flatnonzero(~np.isneginf(weights.logsumexp64[0]))
    spread = seeing[(len(seeing) * np.arange(1, EXAMPLES + 1)) // (EXAMPLES + 1)]
    rows = sorted({_next_word(trace.tokens, int(row), set(map(int, seeing))) for row in spread})
    return tuple(_example(trace, np.asarray(weights[0, row]), row) for row in rows)


def _next_word(tokens: tuple[str, ...], row: int, seeing: set[int]) -> int:
    for place in range(row, min(row + 32, len(tokens))):
        if place in seeing and any(character.isalnum() for character in tokens[place]):
            return place
    return row


def _example(trace: Trace, row: NDArray[Any], query: int) -> Example:
    order = np.argsort(-row, kind="stable")[:SHOWN]
    keys = tuple((int(key), trace.tokens[key], float(row[key])) for key in order if row[key] > 0)
    return Example(query, trace.tokens[query], keys)
