"""A call like one before: all but the addresses of its arrays is known already, checked and planned.

Calls repeat, layer by layer and step by step, and what Python does around a small one takes ten times as long as its
arithmetic. What is remembered depends on the arrays' layout alone: it is planned on stand-ins that hold no memory.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import numpy as np
from numpy.typing import ArrayLike, NDArray

from clearhead import launch
from clearhead.launch import Pass
from clearhead.masks import Causal, Mask, Spans, Window
from clearhead.plan import plan
from clearhead.problem import check
from clearhead.scores import FLOATS, Dot, Score

Arrays = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]
MOST = 256  # layouts; the next one makes room by forgetting all
MOST_ROWS = 2048  # of a mask of given intervals that is kept with them
_known: dict[Any, Pass | None] = {}


def recall(
    query: ArrayLike, key: ArrayLike, value: ArrayLike | None, mask: Mask | ArrayLike | None, score: Score | None
) -> tuple[Pass, Arrays] | None:
    """The pass of arrays laid out like these, and they; None where each call must be looked at anew.

    Such are calls whose scores are more than numbers or whose masks hold arrays (but for the intervals of few rows, as
    of one step of a generation, which all layers share), and those whose arrays cannot be used as they are.
    """
    if type(query) is not np.ndarray or type(key) is not np.ndarray or type(value) is not np.ndarray:
        return None
    if not _lasting(mask):
        return None
    numbers = None
    if score is not None:
        if type(score) is not Score or not _plain(score):
            return None
        numbers = score.scale, score.softcap
    if not (query.flags.aligned and key.flags.aligned and value.flags.aligned):
        return None
    layout = (
        query.shape, query.strides, query.dtype, key.shape, key.strides, key.dtype,
        value.shape, value.strides, value.dtype, mask, numbers,
    )  # fmt: skip
    arrays = (query, key, value)
    try:
        found = _known[layout]
    except KeyError:
        if len(_known) >= MOST:
            _known.clear()
        found = _known[layout] = _plan(arrays, mask, score)
    return None if found is None else (found, arrays)


def _lasting(mask: Mask | ArrayLike | None) -> TypeGuard[Mask | None]:
    """Whether a mask is known by its value or, one of few intervals, by itself."""
    if type(mask) is Spans:
        return max(mask.start.size, mask.stop.size) <= MOST_ROWS
    return mask is None or type(mask) is Causal or type(mask) is Window


def _plain(score: Score) -> bool:
    """Whether it is a dot product with numbers alone: what a plan has copied of arrays may have changed since."""
    arrays = score.bias, score.slopes, score.function, score.sinks
    return type(score.base) is Dot and all(one is None for one in arrays)


def _plan(arrays: Arrays, mask: Mask | None, score: Score | None) -> Pass | None:
    if not _used_as_they_are(arrays):
        return None
    query, key, value = (stand_in(array) for array in arrays)
    planned = plan(check(query, key, value, mask, score))
    return launch.ready(planned) if launch.lies_ready(planned) else None


def _used_as_they_are(arrays: Arrays) -> bool:
    """Whether checking and planning would neither convert nor copy them: stand-ins must not be read."""
    dtype = arrays[0].dtype
    return dtype.name in FLOATS and all(
        array.dtype == dtype and dtype.isnative and not any(stride % dtype.itemsize for stride in array.strides)
        for array in arrays
    )


def stand_in(array: NDArray[Any]) -> NDArray[Any]:
    """An array of this layout that must not be read."""
    one = np.zeros(1, array.dtype)
    return np.lib.stride_tricks.as_strided(one, array.shape, array.strides, writeable=False)
