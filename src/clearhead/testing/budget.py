"""How far a result may lie from the truth.

The truth is the dense oracle, ``clearhead.core.attend``, on the same (already rounded) inputs, computed in a wider
type: float64, and extended precision for float64. The measure is ``norm(result - truth) / norm(truth)``. Two limits:

    any problem        2 x what the same dense lines err in the type that is computed in, plus 8 roundings of 1 and of
                       the largest score that has weight, and for 16-bit results one rounding of the result: there
                       everything before it is float32
    4,096 normal keys  2 x what the three naive lines err in the inputs' own type, and never above ``CAPS``

The 8 roundings are what is left of luck where few numbers are summed: one query, one key, one dimension. A score of
size s that is rounded once is off by s roundings of 1, and so is its weight: how often it is rounded, and to which
side, is luck of the order of adding up, of the dense lines' BLAS and of ours. A mistake in a mask, a score or a stride
is 1,000 times larger.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from clearhead import core

Floats = NDArray[np.floating[Any]]
CAPS = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3, "float64": 1e-14}
ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8, "float64": 2.0**-53}
ROW_SUM = 1e-5  # how far the weights of a row may lie from 1 in sum


def relative_error(result: ArrayLike, truth: ArrayLike) -> float:
    """norm(result - truth) / norm(truth); infinite if shapes differ, or NaN or infinity stands where it should not.

    >>> relative_error([1.0, np.inf], [1.0, np.inf]), relative_error([1.0, np.nan], [1.0, 2.0])
    (0.0, inf)
    """
    result, truth = (np.asarray(x).astype(np.longdouble) for x in (result, truth))
    if result.shape != truth.shape:
        return np.inf
    finite = np.isfinite(truth)
    if not np.array_equal(result[~finite], truth[~finite], equal_nan=True) or not np.isfinite(result[finite]).all():
        return np.inf
    distance, size = (float(np.linalg.norm(x)) for x in (result[finite] - truth[finite], truth[finite]))
    return 0.0 if distance == 0 else distance / size if size else np.inf


def wider(dtype: DTypeLike) -> np.dtype[Any]:
    """The type in which the truth about a result of this type is computed."""
    return np.dtype(np.longdouble if np.dtype(dtype) == np.float64 else np.float64)


def three_lines(query: Floats, key: Floats, value: Floats) -> Floats:
    """softmax(query key^T / sqrt(dim)) value in NumPy, every line's result in the inputs' own type."""
    dtype = query.dtype
    scores = (query @ np.swapaxes(key, -1, -2) / np.sqrt(np.asarray(query.shape[-1], dtype))).astype(dtype)
    weights = core.softmax(scores).astype(dtype)
    return np.asarray((weights @ value).astype(dtype))


class Oracle:
    """The truth about one problem, and whether results are within the first of the two limits.

    problem : query, key, value, and optionally mask and score, as ``clearhead.attention`` takes them.

    >>> import clearhead as ch
    >>> x = np.random.default_rng(0).standard_normal((3, 5, 4), dtype=np.float32)
    >>> Oracle({"query": x, "key": x, "value": x}).check(output=ch.attention(x, x, x))
    """

    def __init__(self, problem: dict[str, Any]) -> None:
        self.problem = problem
        dtypes = [np.asarray(problem[name]).dtype for name in ("query", "key", "value")]
        self.compute = np.dtype(np.float64 if np.float64 in dtypes else np.float32)

    @cached_property
    def truth(self) -> dict[str, Floats]:
        """output, weights and logsumexp, in the wider type."""
        return self._dense(wider(self.compute))

    @cached_property
    def naive(self) -> dict[str, Floats]:
        """The same by the same dense lines in the type that is computed in."""
        return self._dense(self.compute)

    @cached_property
    def largest_score(self) -> float:
        """The size of the largest score whose weight counts, in nats: scores are ln weight + logsumexp."""
        weights, logsumexp = self.truth["weights"], self.truth["logsumexp"]
        place = np.nonzero(weights > ROUNDING[self.compute.name])
        scores = np.abs(np.log(weights[place]) + logsumexp[place[:-1]])
        scores = scores[np.isfinite(scores)]
        return float(scores.max()) if scores.size else 0.0

    def check(self, **results: Any) -> None:
        """Raise AssertionError if ``output``, ``weights`` or ``logsumexp`` lies outside the limit."""
        for name, result in results.items():
            result, truth = np.asarray(result), self.truth[name]
            error = relative_error(result, truth)
            rounding = ROUNDING[self.compute.name]
            limit = 8 * rounding * (1 + self.largest_score)
            limit += ROUNDING[result.dtype.name] if result.dtype.itemsize == 2 else 0
            if error > limit:  # the naive lines cost as much as the truth: they are asked only if it matters
                limit += 2 * relative_error(self.naive[name], truth)
            assert error <= limit, (
                f"{name} errs by {error:.3g}, allowed are {limit:.3g} "
                f"({error / rounding:.1f} and {limit / rounding:.1f} roundings of {self.compute})"
            )

    def _dense(self, dtype: np.dtype[Any]) -> dict[str, Floats]:
        return dict(zip(("output", "weights", "logsumexp"), core.attend(**self.problem, dtype=dtype), strict=True))
