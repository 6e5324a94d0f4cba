"""The user's own functions of (score, batch, head, query, key) and (batch, head, query, key), compiled to act on tiles;
and those of folds, which update what a row keeps.

Each of the former becomes a C function ``f(tile, lanes, queries, first, keys, batch, head)`` that the kernels call by
address, where the tile is hot in the cache: scores (keys, lanes) are replaced, or bytes (keys, lanes) written that say
what is visible. Lane r holds query ``queries[r]``, row j key ``first + j``. It returns 1; if it raised an error, its
caller finds 0. Arithmetic is IEEE's: a division by zero is infinite or NaN, no error. A function is compiled once per
process, and with it the plain functions that it calls by name.
"""

import re
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from types import CellType, FunctionType
from typing import Any

import numba
import numpy as np
from numba import types
from numba.core.registry import cpu_target
from numpy.typing import DTypeLike

whole = types.int64


@lru_cache(maxsize=256)
def score(function: Callable[..., Any], dtype: DTypeLike) -> Any:
    """The compiled form of ``function(score, batch, head, query, key) -> score``; its address is ``.address``."""
    return _explained(lambda: _on_scores(_compiled(function), dtype), function, "score")


@lru_cache(maxsize=256)
def slope(function: Callable[..., Any], derivative: Callable[..., Any] | None, dtype: DTypeLike) -> Any:
    """The compiled form, likewise, of the derivative of a score function by its score.

    The one given, or the function's own at dual numbers, which is exact. What dual numbers cannot go through gets
    central differences in float64, with one warning.
    """
    if derivative is not None:
        return _explained(lambda: _on_scores(_compiled(derivative), dtype), derivative, "derivative")
    from clearhead.kernels import dual  # teaches Numba, which none must wait for who has no use of it

    try:
        return _on_scores(dual.derivative(_anew(function)), dtype)
    except (numba.core.errors.NumbaError, NotImplementedError) as error:
        warnings.warn(
            f"the score function {_name(function)!r} is differentiated by central differences, right to some 1e-9, as "
            f"it uses what dual numbers cannot go through: give its derivative to the score (derivative=...), or use "
            f"numbers, + - * / **, comparisons, if, min, max and math.* alone. Numba says: {_reason(error)}",
            RuntimeWarning,
            stacklevel=2,
        )
    return _on_scores(_differences(_compiled(function)), dtype)


def _on_scores(cell: Any, dtype: DTypeLike) -> Any:
    """A compiled function of (score, batch, head, query, key), to act on tiles."""
    kind = numba.from_dtype(np.dtype(dtype))

    @numba.cfunc(_signature(kind), error_model="numpy")
    def tile(tile, lanes, queries, first, keys, batch, head):
        scores, query = numba.carray(tile, (keys, lanes)), numba.carray(queries, (lanes,))
        for j in range(keys):
            for r in range(lanes):
                scores[j, r] = cell(scores[j, r], batch, head, query[r], first + j)
        return 1

    return tile


def _differences(cell: Any) -> Any:
    @numba.njit(error_model="numpy")
    def slope(score, batch, head, query, key):
        at = np.float64(score)
        step = 1e-6 * max(1.0, abs(at))
        above, below = cell(at + step, batch, head, query, key), cell(at - step, batch, head, query, key)
        return (above - below) / (2.0 * step)

    return slope


@lru_cache(maxsize=256)
def visible(function: Callable[..., Any]) -> Any:
    """The compiled form of ``function(batch, head, query, key) -> bool``; its address is ``.address``."""

    def build():
        cell = _compiled(function)

        @numba.cfunc(_signature(types.uint8), error_model="numpy")
        def tile(tile, lanes, queries, first, keys, batch, head):
            seen, query = numba.carray(tile, (keys, lanes)), numba.carray(queries, (lanes,))
            for j in range(keys):
                for r in range(lanes):
                    seen[j, r] = 1 if cell(batch, head, query[r], first + j) else 0
            return 1

        return tile

    return _explained(build, function, "mask")


@lru_cache(maxsize=256)
def fold(function: Callable[..., Any], keeps: int, dtype: DTypeLike, data: DTypeLike, axes: int) -> Any:
    """The compiled form of ``function(kept, weight, batch, head, query, key, data)``, for weights of one
    dtype and data of another with so many axes: it is called for each key of a row that has a weight, in order. See
    ``addresses.call_fold``.
    """
    kind, of_data = numba.from_dtype(np.dtype(dtype)), numba.from_dtype(np.dtype(data))
    signature = whole(
        types.CPointer(kind), whole, whole, types.CPointer(whole), whole, whole, whole, whole, whole, whole,
        types.CPointer(types.float64), types.CPointer(of_data), types.CPointer(types.UniTuple(whole, axes)),
    )  # fmt: skip

    def build():
        update = _compiled(function)

        @numba.cfunc(signature, error_model="numpy")
        def tile(tile, rows, here, queries, first_query, first, keys, first_key, batch, head, kept, data, shape):
            weights, query = numba.carray(tile, (keys, rows)), numba.carray(queries, (rows,))
            own, given = numba.carray(kept, (rows, keeps)), numba.carray(data, shape[0])
            for r in range(here):
                row = own[r]
                for j in range(keys):
                    weight = weights[j, r]
                    if weight != 0:
                        update(row, weight, batch, head, first_query + query[r], first_key + first + j, given)
            return 1

        return tile

    return _explained(build, function, "fold")


def _compiled(function: Callable[..., Any]) -> Any:
    """The function as one that compiled code can call; it may be compiled already."""
    return function if hasattr(function, "py_func") else _jit(function)


def _anew(function: Callable[..., Any]) -> Any:
    """The same for arguments of any type: whoever compiled it may have fixed them."""
    return _jit(getattr(function, "py_func", function), **getattr(function, "targetoptions", {}))


def _jit(function: Callable[..., Any], **options: Any) -> Any:
    """Compiled, as are the plain functions that it calls by name, which Numba alone would refuse.

    Each is compiled as a copy that finds the others' compiled forms, whoever calls whom.
    """
    done: dict[Any, Any] = {}
    waiting: list[tuple[Any, Any]] = []

    def compiled(given: Any, **options: Any) -> Any:
        if given not in done:
            cells = tuple(CellType() for _ in given.__closure__ or ()) or None
            own = FunctionType(given.__code__, dict(given.__globals__), given.__name__, given.__defaults__, cells)
            done[given] = numba.jit(**{"error_model": "numpy", "nopython": True} | options)(own)
            waiting.append((given, own))
        return done[given]

    compiled(function, **options)
    while waiting:
        given, own = waiting.pop()
        names = own.__globals__
        for name in given.__code__.co_names:
            if _is_plain(names.get(name)):
                names[name] = compiled(names[name])
        for cell, room in zip(given.__closure__ or (), own.__closure__ or (), strict=True):
            with suppress(ValueError):  # nothing is in it yet
                value = cell.cell_contents
                room.cell_contents = compiled(value) if _is_plain(value) else value
    return done[function]


def _is_plain(value: Any) -> bool:
    """Whether this is a function that Numba does not know: neither compiled already nor one that it stands in for."""
    if not isinstance(value, FunctionType):
        return False
    context = cpu_target.typing_context
    context.refresh()
    try:
        context.resolve_value_type(value)
    except (ValueError, TypeError, numba.core.errors.NumbaError):
        return True
    return False


def _signature(element: Any) -> Any:
    return whole(types.CPointer(element), whole, types.CPointer(whole), whole, whole, whole, whole)


def _explained(build: Callable[[], Any], function: Callable[..., Any], what: str) -> Any:
    """What ``build`` compiles; the compiler's errors say which function could not be compiled, and why."""
    try:
        return build()
    except numba.core.errors.NumbaError as error:
        raise TypeError(
            f"the {what} function {_name(function)!r} cannot be compiled by Numba: write it in plain arithmetic on "
            f"numbers (+ - * / comparisons, if, math.*), without arrays or tensors. Numba says: {_reason(error)}"
        ) from error


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", repr(function))


def _reason(error: Exception) -> str:
    """The line of the compiler's error that says what is wrong."""
    said = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines()
    lines = [line.strip() for line in said if line.strip() and not line.startswith("Failed in ")]
    return lines[0] if lines else type(error).__name__
