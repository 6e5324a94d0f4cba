"""What was measured: arrays by name, their means and tables, and how the measures of two parts of keys are joined."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from clearhead.asked import HEAD_MEASURES, Asked
from clearhead.fold import add, information, largest

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Top(NamedTuple):
    """The largest weights of each row, the largest first; ties go to the smaller key.

    keys : (..., heads, queries, k) int64, -1 where a row sees fewer. weights : likewise, 0 there.
    """

    keys: Ints
    weights: NDArray[np.floating[Any]]


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
