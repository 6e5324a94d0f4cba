"""What changed between two traces, head by head: another dtype, another version, another model of the same shape.

By weights, the change of a row is the total variation distance of its weights, 1/2 sum |w - w'|: 0 if they are the
same, 1 if no key has weight in both, 1/2 if it is empty in one. A head's change is the mean over the rows that see
something in either. By a measure, it is the difference of
the head's means, in the measure's own unit; the texts may then differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from clearhead.trace.errors import TraceError

if TYPE_CHECKING:
    from clearhead.trace.format import Site
    from clearhead.trace.reader import Trace

BLOCK_CELLS = 1 << 21  # computed at once, of each trace
MEASURES = ("entropy", "sink", "distance", "previous", "self")


@dataclass(frozen=True)
class Change:
    """What changed in one head. ``row`` changed most, by ``largest``, in text ``text``; None where measures are
    compared."""

    kind: str
    layer: int
    head: int
    change: float
    largest: float | None = None
    row: int | None = None
    text: int | None = None


@dataclass(frozen=True)
class Difference:
    """All heads that both traces have, the most changed first, and ``missing``: in words, what only one of them has."""

    by: str
    changes: tuple[Change, ...]
    missing: tuple[str, ...]

    @property
    def largest(self) -> float:
        """The largest change of a head; 0 if they share none."""
        return max((change.change for change in self.changes), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """The difference as plain data, for JSON."""
        return {
            "by": self.by,
            "largest": self.largest,
            "missing": list(self.missing),
            "heads": [asdict(change) for change in self.changes],
        }


def compare(
    first: Trace, second: Trace, by: str = "weights", progress: Callable[[int], None] | None = None
) -> Difference:
    """Compare two traces, head by head, in memory linear in length; ``progress`` is called after each layer.

    by : "weights", or the name of a measure: "entropy" (nats), "sink", "distance" (tokens), "previous", "self".

    Raises TraceError if they have no head in common; and, by weights, if they read different tokens or one of them
    holds measures only.
    """
    if by not in ("weights", *MEASURES):
        raise TraceError(f"traces are compared by weights or by {', '.join(MEASURES)}, not by {by!r}")
    sites, missing = _common(first, second)
    if by == "weights":
        _check_same_text(first, second)
    changes: list[Change] = []
    for one, other in sites:
        heads = [head for head in numbers(one) if head in numbers(other)]
        changes += _by_weights(first, second, one, heads) if by == "weights" else _by(by, first, second, one, other)
        if progress is not None:
            progress(one.layer)
    if not changes:
        raise TraceError(f"{_named(first)} and {_named(second)} have no head in common that can be compared by {by}")
    order = sorted(changes, key=lambda found: (-found.change, found.kind, found.layer, found.head))
    return Difference(by, tuple(order), tuple(missing))


def numbers(site: Site) -> tuple[int, ...]:
    """The numbers in the model of the heads that a site keeps."""
    return site.numbers or tuple(range(site.heads))


def _common(first: Trace, second: Trace) -> tuple[list[tuple[Site, Site]], list[str]]:
    """The sites that both have, and what only one of them has."""
    ours = {(site.kind, site.layer): site for site in first.sites}
    theirs = {(site.kind, site.layer): site for site in second.sites}
    missing = []
    for mine, others, trace in ((ours, theirs, first), (theirs, ours, second)):
        for place, site in mine.items():
            lost = set(numbers(site)) - (set(numbers(others[place])) if place in others else set())
            if lost:
                heads = f"heads {', '.join(map(str, sorted(lost)))}" if place in others else "all heads"
                missing.append(f"{site.kind} layer {site.layer}, {heads}: in {_named(trace)} only")
    return [(ours[place], theirs[place]) for place in ours if place in theirs], missing


def _check_same_text(first: Trace, second: Trace) -> None:
    """Raise TraceError unless both read the same tokens: rows and keys would not be the same ones."""
    if first.texts != second.texts:
        raise TraceError(f"{_named(first)} holds {first.texts} texts and {_named(second)} {second.texts}")
    for kind in (kind for kind in first.kinds if kind in second.kinds):
        for text in range(first.texts):
            for of in ("query", "key"):
                ours, theirs = (trace.side(kind, of, text) for trace in (first, second))
                pairs = zip(
                    zip(ours.ids, ours.text, strict=True), zip(theirs.ids, theirs.text, strict=True), strict=False
                )
                place = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
                if place is None and len(ours) == len(theirs):
                    continue
                if place is None:
                    what = f"{len(ours):,} tokens and {len(theirs):,}"
                else:
                    what = f"token {place} is {ours.text[place]!r} in one and {theirs.text[place]!r} in the other"
                raise TraceError(
                    f"{_named(first)} and {_named(second)} read different texts: {what}. Compare them by a measure, "
                    f"such as entropy"
                )


def _by_weights(first: Trace, second: Trace, site: Site, heads: list[int]) -> list[Change]:
    total, count = np.zeros(len(heads)), np.zeros(len(heads))
    largest, where = np.full(len(heads), -1.0), [(0, 0)] * len(heads)
    step = max(1, BLOCK_CELLS // site.keys)
    for text in range(first.texts):
        for place, head in enumerate(heads):
            one, other = (trace.weights(site.layer, head, kind=site.kind, text=text) for trace in (first, second))
            seen = ~(np.isneginf(one.logsumexp64[0]) & np.isneginf(other.logsumexp64[0]))
            count[place] += seen.sum()
            for start in range(0, site.queries, step):
                rows = slice(start, min(start + step, site.queries))
                distance = np.abs(one[0, rows] - other[0, rows]).sum(axis=-1, dtype=np.float64) / 2
                total[place] += distance.sum()
                if distance.max() > largest[place]:
                    largest[place], where[place] = distance.max(), (text, start + int(distance.argmax()))
    mean = total / np.maximum(count, 1)
    return [
        Change(site.kind, site.layer, head, float(mean[place]), float(largest[place]), row, text)
        for (place, head), (text, row) in zip(enumerate(heads), where, strict=True)
    ]


def _by(measure: str, first: Trace, second: Trace, one: Site, other: Site) -> list[Change]:
    """The difference of the means over all texts of each trace, if both sites have the measure."""
    means: list[dict[int, float]] = []
    for trace, site in ((first, one), (second, other)):
        found = [trace.measures(site.layer, kind=site.kind, text=text) for text in range(trace.texts)]
        if any(measure not in tuple(some) for some in found):
            return []
        mean = np.mean([some.mean(measure) for some in found], axis=0)
        means.append(dict(zip(numbers(site), mean.tolist(), strict=True)))
    ours, theirs = means
    return [
        Change(one.kind, one.layer, head, abs(ours[head] - theirs[head])) for head in numbers(one) if head in theirs
    ]


def _named(trace: Trace) -> str:
    return f"a trace of {trace.model.name}" if trace.path is None else str(trace.path)
