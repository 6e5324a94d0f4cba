"""Attention as tutorials write it: three lines of NumPy, and all of the matrix in memory.

16-bit inputs are converted to float32 first, outside of what is timed: NumPy multiplies 16-bit matrices without BLAS,
hundreds of times slower, and nobody does that twice.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import asked
import blas
from peers import LARGEST
from workload import Workload

name = "naive NumPy"
version = np.__version__


def set_threads(count: int) -> bool:
    return blas.set_threads(count)


def lacks(workload: Workload) -> str | None:
    if workload.way != "forward":
        return "the three lines have no gradients"
    if workload.score != "dot":
        return f"the three lines have no {workload.score} score"
    if workload.mask == "lengths":
        return "rows that see nothing come out as NaN"
    size = workload.dense_nbytes
    return f"one matrix takes {size / 1e9:.1f} GB" if size > LARGEST else None


def prepare(workload: Workload) -> Callable[[], Any]:
    at = np.float64 if workload.dtype == "float64" else np.float32
    turns = itertools.cycle([[np.asarray(array, dtype=at) for array in arrays] for arrays in workload.arrays()])
    visible, root = workload.visible(), math.sqrt(workload.dim)  # a NumPy float64 would turn float32 into float64

    def attention() -> Any:
        query, key, value = next(turns)
        shape = query.shape
        if workload.group > 1:  # the heads that share a key head, as rows of one matrix
            query = query.reshape(*key.shape[:2], -1, shape[-1])
        scores = query @ np.swapaxes(key, -1, -2) / root
        if visible is not None:
            scores = np.where(visible, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights = weights / weights.sum(axis=-1, keepdims=True)
        if not workload.asks:
            return (weights @ value).reshape(shape)
        rows, top = asked.of_matrix(workload, weights)
        return asked.side_by_side(workload, rows, top, weights @ value if workload.asks == "riding" else None)

    return attention


def numbers(result: Any) -> NDArray[np.float64]:
    return np.asarray(result, dtype=np.float64)
