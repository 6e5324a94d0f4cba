"""Attention as tutorials write it: three lines of NumPy, and all of the matrix in memory.

16-bit inputs are converted to float32 first, outside of what is timed: NumPy multiplies 16-bit matrices without BLAS,
hundreds of times slower, and nobody does that twice.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import blas
from workloads import Workload

name = "naive NumPy"
version = np.__version__

LARGEST = 1_000_000_000  # bytes of one matrix; three such are alive at once


def set_threads(count: int) -> bool:
    return blas.set_threads(count)


def lacks(workload: Workload) -> str | None:
    size = workload.dense_nbytes
    return f"one matrix takes {size / 1e9:.1f} GB" if size > LARGEST else None


def prepare(workload: Workload) -> Callable[[], Any]:
    at = np.float64 if workload.dtype == "float64" else np.float32
    query, key, value = (np.asarray(array, dtype=at) for array in workload.arrays())
    visible, root = workload.visible(), math.sqrt(workload.dim)  # a NumPy float64 would turn float32 into float64

    def attention() -> Any:
        scores = query @ np.swapaxes(key, -1, -2) / root
        if visible is not None:
            scores = np.where(visible, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights = weights / weights.sum(axis=-1, keepdims=True)
        return weights @ value

    return attention


def numbers(result: Any) -> NDArray[np.float64]:
    return np.asarray(result, dtype=np.float64)
