"""What weights say, in numbers: of rows, of keys, of blocks of the matrix. Many in one pass over the scores.

For row i with weights w over the keys it may see, at position i (positions aligned, see ``masks.causal``), natural
logarithms. A row that sees nothing has 0 everywhere (a learned sink takes all of it), takes no part in averages and
is counted (``empty_rows``).

    of rows, (..., heads, queries)
    entropy       -sum w ln w: how widely it looks; 0 for one key, ln n for n alike        nats
    perplexity    exp(entropy): how many keys share the attention                          keys
    mass          sum w: 1, less what a learned sink takes                                 weight
    learned_sink  the share of the learned sink (``scores.dot(sinks=...)``), which has     weight
                  no key: 1 - mass
    sink          w on the first ``sink`` keys of all                                      weight
    distance      sum w (i - j): how far back it looks                                     tokens
    previous      w on the key one back: offset(1)                                         weight
    self          w on the key at i itself: offset(0)                                      weight
    offset(d)     w on the key d back; ahead where d is negative                           weight
    largest       the largest w                                                            weight
    diagonality   1 - (sum w |i - j|) / (the farthest that a key of the matrix lies        1: all on itself
                  from i); Zhang et al. 2021, section 4 (there: centrality, of which
                  diagonality is the mean over rows)

    of keys, (..., heads, keys)
    received      sum over rows of w on this key; ``normalized``: over how many rows may   weight
                  see it, NaN where none may

    of heads, (..., heads)
    coverage      the mean over keys that some row may see of min(received, 1): how much   0 to 1
                  of the text is looked at in all; the sum inside the logarithm of the
                  coverage penalty in Wu et al. 2016, equation 14

``top=k`` adds the k largest weights of each row with their keys, ``pooled=(rows, columns)`` the mean weight in each
block of a grid, ``folds={...}`` measures of your own (``clearhead.Fold``).

References
----------
Zhang, Loweimi, Bell, Renals 2021, *On the Usefulness of Self-Attention for Automatic Speech Recognition with
Transformers*. Wu et al. 2016, *Google's Neural Machine Translation System*. Xiao et al. 2023, *Efficient Streaming
Language Models with Attention Sinks*: the first keys as sinks. Clark et al. 2019, *What Does BERT Look At?*, section 3:
entropy of heads, and the mass on previous and own tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from clearhead import masks, measuring
from clearhead.algebra import Align
from clearhead.fold import Fold, add, information, largest
from clearhead.kernels import measure as kernels
from clearhead.measuring import Kept, Wanted
from clearhead.plan import Plan, in_nats

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
# Names, and where the kernel keeps the numbers that they follow from.
SUMS = {
    "entropy": kernels.ENTROPY, "mass": kernels.MASS, "distance": kernels.DISTANCE, "sink": kernels.SINK,
    "largest": kernels.LARGEST,
}  # fmt: skip
OFFSETS = {"self": 0, "previous": 1}
ROW_MEASURES = (*SUMS, *OFFSETS, "perplexity", "learned_sink", "diagonality")
KEY_MEASURES, HEAD_MEASURES = ("received",), ("coverage",)
POSITIONAL = ("distance", "diagonality", *OFFSETS)
_OFFSET = re.compile(r"offset\((-?\d+)\)")


class Top(NamedTuple):
    """The largest weights of each row, the largest first; ties go to the smaller key.

    keys : (..., heads, queries, k) int64, -1 where a row sees fewer. weights : likewise, 0 there.
    """

    keys: Ints
    weights: NDArray[np.floating[Any]]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Which measures, as ``weights.measure`` takes them; ``ask`` makes one for ``attention(measure=...)``."""

    names: tuple[str, ...]
    top: int | None = None
    pooled: tuple[int, int] | tuple[int, int, str] | None = None
    folds: Mapping[str, Fold] = field(default_factory=dict)
    sink: int = 1
    normalized: bool = False
    align: Align = None
    first_query: int | None = None
    first_key: int = 0

    def __post_init__(self) -> None:
        known = (*ROW_MEASURES, *KEY_MEASURES, *HEAD_MEASURES)
        unknown = [name for name in self.names if name not in known and self._offset_of(name) is None]
        nothing = not self.names and self.top is None and self.pooled is None and not self.folds
        if unknown or nothing:
            raise ValueError(
                f"measure: {', '.join(map(repr, unknown)) or 'nothing'} asked for, known are {', '.join(known)}, "
                f"offset(d), and top=k, pooled=(rows, columns), folds={{...}}"
            )
        if self.sink < 0:
            raise ValueError(f"sink must be a number of keys, 0 or more, got {self.sink}")
        if self.top is not None and self.top < 1:
            raise ValueError(f"top must be how many of the largest weights are wanted, 1 or more, got {self.top}")
        if self.pooled is not None:
            rows, columns, *how = self.pooled
            if min(rows, columns) < 1:
                raise ValueError(f"pooled(rows, columns) needs at least one block each way, got {rows} x {columns}")
            if how not in ([], ["mean"], ["max"]):
                raise ValueError(f"pooled=(rows, columns, {how[0]!r}): blocks give their 'mean' or their 'max'")
        for name, fold in self.folds.items():
            if not isinstance(fold, Fold):
                raise TypeError(f"folds: {name!r} must be a clearhead.Fold, got {fold!r}")
            if name in known or _OFFSET.fullmatch(name) or name in ("top", "pooled"):
                raise ValueError(f"folds: {name!r} is the name of a measure that is built in")
        masks.checked_align(self.align)

    @staticmethod
    def _offset_of(name: str) -> int | None:
        """How many keys back, of a name that says so."""
        found = _OFFSET.fullmatch(name)
        return int(found[1]) if found else OFFSETS.get(name)

    @property
    def offsets(self) -> dict[str, int]:
        """Names of masses at an offset, and how many keys back each is."""
        return {name: back for name in self.names if (back := self._offset_of(name)) is not None}

    @property
    def rides(self) -> bool:
        """Whether all of it follows from sums over rows that a forward pass can keep beside its own."""
        apart = {*KEY_MEASURES, *HEAD_MEASURES, "diagonality"} & set(self.names)
        return not (apart or self.top or self.pooled or self.folds)

    def aligned(self, plan: Plan) -> int:
        """At which of these keys query 0 stands."""
        positional = [name for name in self.names if name in POSITIONAL or _OFFSET.fullmatch(name)]
        if self.first_query is not None:
            return self.first_query - self.first_key
        if not positional:
            return 0
        if self.first_key:
            raise ValueError(
                f"measure({positional[0]!r}) with first_key={self.first_key}: these keys are a part of all, say also "
                f"first_query, the number of the first query among all"
            )
        return plan.problem.extent.offset(masks.checked_align(self.align), f"measure({positional[0]!r})")

    def wanted(self, plan: Plan) -> Wanted:
        """The same in the pass's terms."""
        extent = plan.problem.extent
        rows, columns, *how = self.pooled or (0, 0)
        grid = min(rows, extent.queries), min(columns, extent.keys)
        return Wanted(
            aligned=self.aligned(plan),
            sink=self.sink,
            spread="diagonality" in self.names,
            offsets=tuple(self.offsets.values()),
            received=bool({*KEY_MEASURES, *HEAD_MEASURES} & set(self.names)),
            grid=grid if min(grid) > 0 else None,
            grid_largest=how == ["max"],
            top=self.top or 0,
            folds=tuple(self.folds.values()),
            first_query=self.first_query or 0,
            first_key=self.first_key,
        )


def ask(*names: str, **options: Any) -> Asked:
    """Names and options of ``weights.measure``, for ``attention(..., measure=ask(...))``.

    >>> ask("entropy", "sink", sink=4).rides
    True
    """
    return Asked(names=names, **options)


def asked_for(measure: str | Sequence[str] | Asked | None) -> Asked | None:
    """What ``attention(measure=...)`` was given, as one thing."""
    if measure is None or isinstance(measure, Asked):
        return measure
    return ask(measure) if isinstance(measure, str) else ask(*measure)


class Measures:
    """Named measures: attributes (``self`` is spelled ``self_``) or items; shapes are in ``clearhead.measures``.

    All are float64 but the weights of ``top``. Beside what was asked for: ``empty_rows``; where keys are measured
    ``seen``, (..., heads, keys), how many rows may see each.
    """

    def __init__(self, asked: Asked, logsumexp: Floats, sums: dict[str, Floats], sees: NDArray[np.bool_],
                 kept: dict[str, Floats], others: dict[str, Any]) -> None:  # fmt: skip
        """sums : what rows keep, by name. kept : what the user's folds have. others : what is not of rows."""
        self._asked, self._logsumexp, self._sums, self._sees = asked, logsumexp, sums, sees
        self._kept, self._others = kept, others
        self._values = {name: self._find(name) for name in (*asked.names, *asked.folds)}
        self._values |= {name: others[name] for name in ("top", "pooled") if name in others}

    def _find(self, name: str) -> Any:
        if name in self._kept:
            return self._asked.folds[name].of(self._kept[name])
        if name == "perplexity":
            return np.where(self._sees, np.exp(self._sums["entropy"]), 0.0)
        return self._sums[name] if name in self._sums else self._others[name]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked for by copy and pickle before there are values
            raise AttributeError(name)
        if name == "seen" and name in self._others:
            return self._others[name]
        try:
            return self[name.rstrip("_")]
        except KeyError:
            raise AttributeError(f"{name!r} was not measured, only {', '.join(self._values)}") from None

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __repr__(self) -> str:
        return f"Measures({', '.join(self._values)}; of {' x '.join(f'{n:,}' for n in self._sees.shape)} rows)"

    @property
    def empty_rows(self) -> Ints:
        """How many rows of each head see nothing: (..., heads)."""
        return np.asarray((~self._sees).sum(axis=-1))

    @property
    def logsumexp(self) -> Floats:
        """Of each row, (..., heads, queries): what the parts of the keys are merged by."""
        return self._logsumexp

    def mean(self, name: str) -> Floats:
        """The average of a row measure over the rows that see something: (..., heads, ...). NaN where none does."""
        values, sees = self._values[name.rstrip("_")], self._sees
        axis = sees.ndim - 1
        if not isinstance(values, np.ndarray) or values.shape[: axis + 1] != sees.shape or not self._of_rows(name):
            raise ValueError(f"mean({name!r}): averages are over rows, and {name!r} is not a measure of rows")
        sees = sees.reshape(*sees.shape, *(1,) * (values.ndim - sees.ndim))
        count = sees.sum(axis=axis)
        total = np.where(sees, values, 0).sum(axis=axis)
        return np.asarray(np.where(count > 0, total / np.maximum(count, 1), np.nan))

    def to_dict(self) -> dict[str, Any]:
        """Name to array, as asked for; ``top`` as two arrays, ``top_keys`` and ``top_weights``."""
        found = dict(self._values)
        if "top" in found:
            top = found.pop("top")
            found |= {"top_keys": top.keys, "top_weights": top.weights}
        return found

    def to_pandas(self, of: str = "rows") -> Any:
        """A table of the measures ``of`` "rows", "keys" or "heads", or of "top", one line each; needs pandas.

        Its index names the axes before: batch axes where there are any, head, then query or key (and rank).

        Raises
        ------
        ImportError
            If pandas is not installed.
        ValueError
            If nothing of the kind was measured.
        """
        try:
            import pandas
        except ImportError:
            raise ImportError("to_pandas needs the package pandas: pip install pandas, or use to_dict()") from None
        columns, axes = self._columns(of)
        if not columns:
            raise ValueError(f"to_pandas({of!r}): nothing of {of} was measured, only {', '.join(self._values)}")
        shape = next(iter(columns.values())).shape
        names = [f"batch{n}" for n in range(len(shape) - len(axes))] + axes if len(shape) >= len(axes) else axes[1:]
        index = pandas.MultiIndex.from_product([range(n) for n in shape], names=names)
        return pandas.DataFrame({name: array.reshape(-1) for name, array in columns.items()}, index=index)

    def merge(self, other: Measures) -> Measures:
        """The measures over the keys of both parts, as if they had been seen at once.

        Two passes over disjoint keys, asked for the same; both with ``first_key`` (and ``first_query``, where a measure
        depends on positions), so that keys are numbered alike. A part's weights count by its share of the row,
        exp(its logsumexp - that of both), as outputs do in :func:`clearhead.merge`: sums of weights and top weights
        are scaled by it, entropy follows as p H + q H' - p ln p - q ln q. A learned sink must be in one part only.

        Raises
        ------
        ValueError
            If the two do not fit, or have measures that are no longer by row: ``received``, ``coverage``, ``pooled``,
            ``diagonality``. Measure those of each part with the logsumexp of all the keys: then what keys receive are
            the numbers themselves, to be put side by side.

        >>> import numpy as np, clearhead as ch
        >>> q, k = np.random.default_rng(0).standard_normal((2, 6, 4))
        >>> first = ch.attention_weights(q, k[:4]).measure("entropy", top=2)
        >>> second = ch.attention_weights(q, k[4:]).measure("entropy", top=2, first_key=4)
        >>> whole = ch.attention_weights(q, k).measure("entropy", top=2)
        >>> merged = first.merge(second)
        >>> np.allclose(merged.entropy, whole.entropy), np.array_equal(merged.top.keys, whole.top.keys)
        (True, True)
        """
        self._refuse_to_merge(other)
        left, right = self._logsumexp, other._logsumexp
        total = np.logaddexp(left, right)
        base = np.where(np.isneginf(total), 0, total)
        p, q = np.exp(left - base), np.exp(right - base)
        sums = {}
        for name, mine in self._sums.items():
            joined = (largest if name == "largest" else add)(mine, p, other._sums[name], q)
            if name == "entropy":
                joined += information(p) * self._sums["mass"] + information(q) * other._sums["mass"]
            sums[name] = joined
        kept = {
            name: fold.join(self._kept[name], p[..., None], other._kept[name], q[..., None])
            for name, fold in self._asked.folds.items()
        }
        others = {"top": _best_of(self.top, p, other.top, q)} if self._asked.top else {}
        return Measures(self._asked, total, sums, self._sees | other._sees, kept, others)

    def _refuse_to_merge(self, other: Measures) -> None:
        if not isinstance(other, Measures):
            raise TypeError(f"measures merge with measures of other keys, got {other!r}")
        if set(self._values) != set(other._values) or self._sees.shape != other._sees.shape:
            raise ValueError(f"parts to merge must have the same rows and measures: got {self!r} and {other!r}")
        fixed = [name for name in ("received", "coverage", "pooled", "diagonality") if name in self._values]
        if fixed:
            raise ValueError(
                f"{fixed[0]} cannot be merged: rows are summed in it already, each by its own logsumexp. Measure each "
                f"part with that of all keys, attention_weights(query, part, logsumexp=...): what keys receive then "
                f"stands side by side"
            )

    def _of_rows(self, name: str) -> bool:
        return name.rstrip("_") in (*self._sums, *self._kept, "perplexity", "diagonality", "learned_sink")

    def _columns(self, of: str) -> tuple[dict[str, NDArray[Any]], list[str]]:
        """The arrays of a kind, all of a shape, and what their axes are called."""
        values = self._values
        match of:
            case "rows":
                rows = {name: values[name] for name in values if self._of_rows(name)}
                return {n: a for n, a in rows.items() if a.shape == self._sees.shape}, ["head", "query"]
            case "keys":
                return ({"received": values["received"], "seen": self.seen} if "received" in values else {}), [
                    "head",
                    "key",
                ]
            case "heads":
                return {name: values[name] for name in HEAD_MEASURES if name in values}, ["head"]
            case "top":
                top = values.get("top")
                return ({} if top is None else {"key": top.keys, "weight": top.weights}), ["head", "query", "rank"]
        raise ValueError(f"to_pandas(of) is 'rows', 'keys', 'heads' or 'top', got {of!r}")


def _best_of(first: Top, share: Floats, second: Top, other_share: Floats) -> Top:
    """The largest of both parts."""
    keys = np.concatenate([first.keys, second.keys], axis=-1)
    weights = np.concatenate([first.weights * share[..., None], second.weights * other_share[..., None]], axis=-1)
    missing = keys < 0
    order = np.lexsort((keys, -weights, missing), axis=-1)[..., : first.keys.shape[-1]]
    best = np.take_along_axis(weights, order, axis=-1).astype(first.weights.dtype)
    return Top(np.take_along_axis(keys, order, axis=-1), best)


def find(plan: Plan, logsumexp: NDArray[Any], asked: Asked) -> Measures:
    """What is asked for, in one pass over the scores; logsumexp (batch, heads, queries, 2)."""
    return gather(plan, logsumexp, asked, measuring.run(plan, logsumexp, asked.wanted(plan)))


def gather(plan: Plan, logsumexp: NDArray[Any], asked: Asked, kept: Kept) -> Measures:
    """What a pass has kept, as measures with the axes of the user's arrays."""
    problem, extent = plan.problem, plan.problem.extent
    lead = (*extent.lead, extent.heads)

    def given(array: NDArray[Any]) -> NDArray[Any]:
        """(batch * heads, ...) with the user's axes."""
        return problem.as_given(array.reshape(*lead, *array.shape[1:]), len(lead) - 1)

    rows = {name: kept.rows[..., place] for name, place in SUMS.items()}
    sees = kept.rows[..., kernels.SEES] > 0
    for n, name in enumerate(asked.offsets):
        rows[name] = kept.rows[..., kernels.OFFSETS + n]
    nats = in_nats(plan, logsumexp).reshape(extent.batch * extent.heads, extent.queries)
    rows["learned_sink"] = _learned_sink(plan, nats)
    needed = {*asked.names, "entropy", "mass"} & set(rows)
    others: dict[str, Any] = {}
    if "diagonality" in asked.names:
        others["diagonality"] = given(_diagonality(plan, kept.rows[..., kernels.SPREAD], sees, asked.aligned(plan)))
    if kept.received is not None and kept.seen is not None:
        received, seen = kept.received[:, 0], kept.seen
        others["seen"] = given(seen)
        with np.errstate(invalid="ignore", divide="ignore"):
            others["received"] = given(received / seen if asked.normalized else received)
            covered = np.where(seen > 0, np.minimum(received, 1), 0).sum(axis=-1)
            others["coverage"] = given(covered / (seen > 0).sum(axis=-1))
    if kept.top is not None:
        weights, keys = kept.top
        others["top"] = Top(given(keys), given(weights))
    if asked.pooled is not None:
        others["pooled"] = given(_means(plan, asked, kept.grid))
    folds = {name: given(numbers) for name, numbers in zip(asked.folds, kept.folds, strict=True)}
    sums = {name: given(np.ascontiguousarray(rows[name])) for name in needed}
    return Measures(asked, given(nats), sums, given(sees), folds, others)


def _learned_sink(plan: Plan, logsumexp: Floats) -> Floats:
    """The share of each row that the learned sink takes."""
    sinks, extent = plan.problem.score.sinks, plan.problem.extent
    if sinks is None:
        return np.zeros_like(logsumexp)
    per_head = np.broadcast_to(np.asarray(sinks, np.float64), extent.heads)
    return np.asarray(np.exp(np.tile(per_head, extent.batch)[:, None] - logsumexp))


def _diagonality(plan: Plan, spread: Floats, sees: NDArray[np.bool_], aligned: int) -> Floats:
    """1 - spread over the farthest that a key lies from each row."""
    extent = plan.problem.extent
    position = np.arange(extent.queries) + aligned
    farthest = np.maximum(abs(position), abs(position - (extent.keys - 1)))
    return np.where(sees, 1 - spread / np.maximum(farthest, 1), 0.0)


def _means(plan: Plan, asked: Asked, grid: Floats | None) -> Floats:
    """The grid, means of its blocks; a grid finer than the matrix is cut down to it."""
    assert asked.pooled is not None
    extent = plan.problem.extent
    rows, columns, *how = asked.pooled
    rows, columns = min(rows, extent.queries), min(columns, extent.keys)
    if grid is None:
        return np.zeros((extent.batch * extent.heads, rows, columns))
    if how == ["max"]:
        return grid
    height, width = (
        np.diff(np.r_[np.arange(n) * size // n, size]) for n, size in ((rows, extent.queries), (columns, extent.keys))
    )
    np.divide(grid, height[:, None] * width, out=grid)
    return grid
