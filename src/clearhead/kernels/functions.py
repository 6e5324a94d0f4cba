"""The user's own functions of (score, batch, head, query, key) and (batch, head, query, key), compiled.

Each is compiled once per process and applied cell by cell to a block, without the GIL.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray


@lru_cache(maxsize=256)
def score(function: Callable[..., Any]) -> Callable[..., NDArray[Any]]:
    """``apply(scores, batch, head, first query) -> scores`` for a block (queries, keys)."""
    cell = numba.njit(function)

    @numba.njit(nogil=True, error_model="numpy")
    def apply(scores, batch, head, first):
        out = np.empty_like(scores)
        for i in range(scores.shape[0]):
            for j in range(scores.shape[1]):
                out[i, j] = cell(scores[i, j], batch, head, first + i, j)
        return out

    return _explained(apply, function, "score")


@lru_cache(maxsize=256)
def visible(function: Callable[..., Any]) -> Callable[..., NDArray[np.bool_]]:
    """``apply(batch, head, query, key) -> bool`` on index arrays of equal shape, one axis each."""
    cell = numba.njit(function)

    @numba.njit(nogil=True, error_model="numpy")
    def apply(batch, head, query, key):
        out = np.empty(len(query), np.bool_)
        for i in range(len(query)):
            out[i] = cell(batch[i], head[i], query[i], key[i])
        return out

    return _explained(apply, function, "mask")


def _explained(compiled: Callable[..., Any], function: Callable[..., Any], what: str) -> Callable[..., Any]:
    """The compiled function, whose compiler's errors say which function could not be compiled, and why."""

    def call(*arguments: Any) -> Any:
        try:
            return compiled(*arguments)
        except numba.core.errors.NumbaError as error:
            name = getattr(function, "__name__", repr(function))
            reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
            raise TypeError(
                f"the {what} function {name!r} cannot be compiled by Numba: write it in plain arithmetic on numbers "
                f"(+ - * / comparisons, if, math.*), without arrays or tensors. Numba says: {reason}"
            ) from error

    return call
