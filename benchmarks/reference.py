"""Whether results are right, before anything is timed: some of their rows beside the three lines in float64.

A row costs one line of the matrix, so that any size can be checked, and any mask and score, by the same few lines. Of
gradients, one head is looked at whole: see ``reference_backward``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

import asked as asked_of
import reference_backward
from workload import Workload

# How far results may lie from the reference, as norm(difference) / norm(reference).
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}
SAMPLED = 64  # rows, of all heads and batch entries together

Floats = NDArray[np.float64]


def difference(workload: Workload, result: NDArray[Any]) -> float:
    """norm(result - reference) / norm(reference), over the rows that are looked at."""
    found = result.reshape(*workload.shape[:3], -1)
    if workload.way == "both":
        place = workload.batch - 1, workload.heads - 1
        return max(map(_apart, *(np.split(each, 4, axis=-1) for each in (found[place], _head(workload, *place)))))
    rows = list(_rows(workload))
    expected = np.stack([row(workload, *place) for place in rows])
    got = np.stack([found[place] for place in rows]).astype(np.float64)
    return _apart(got, expected)


def _apart(got: NDArray[Any], expected: Floats) -> float:
    return float(np.linalg.norm(got.astype(np.float64) - expected) / np.linalg.norm(expected))


@lru_cache(maxsize=1)
def _head(workload: Workload, batch: int, head: int) -> Floats:
    return reference_backward.head(workload, batch, head)


def row(workload: Workload, batch: int, head: int, query: int) -> Floats:
    """One row of the output, (dim,): zeros where it sees nothing. Or what is asked of the row, see ``asked``."""
    asked, keys, values = (
        np.asarray(array).reshape(-1, workload.heads // share, *array.shape[-2:])[batch, head // share]
        for array, share in zip(workload.arrays()[0], (1, workload.group, workload.group), strict=True)
    )
    scores = _match(workload, asked[query].astype(np.float64), keys.astype(np.float64))
    if workload.score == "alibi":
        scores = scores - workload.slopes[head] * np.abs(query - np.arange(workload.tokens))
    scores = np.where(workload.sees(batch, np.array([query]))[0], scores, -np.inf)
    if scores.max() == -np.inf:
        return np.zeros(workload.dim)
    weights = np.exp(scores - scores.max())
    weights = weights / weights.sum()
    mixed: Floats = weights @ values.astype(np.float64)
    return asked_of.of_row(workload, query, weights, mixed) if workload.asks else mixed


def _match(workload: Workload, query: Floats, keys: Floats) -> Floats:
    if workload.score == "additive":
        W_q, W_k, v = (array.astype(np.float64) for array in workload.learned())
        return np.asarray(np.tanh(query @ W_q + keys @ W_k) @ v)
    return np.asarray(keys @ query / np.sqrt(workload.dim))


def _rows(workload: Workload) -> list[tuple[int, int, int]]:
    """(batch, head, query) of the first row, the last, and others at random; each once."""
    random = np.random.default_rng(0)
    size = workload.batch, workload.heads, workload.rows
    chosen = [0, int(np.prod(size)) - 1, *random.integers(np.prod(size), size=SAMPLED - 2)]
    return [tuple(int(n) for n in np.unravel_index(place, size)) for place in dict.fromkeys(chosen)]  # type: ignore[misc]
