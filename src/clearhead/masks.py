"""Who may look at whom. A mask says, for every query and key, whether the query may attend to the key.

True means *attend*, everywhere. Masks combine with ``&`` (both allow it), ``|`` (either does) and ``~``:

>>> import clearhead as ch
>>> mask = ch.masks.causal() & ch.masks.window(left=1)
>>> mask.dense(queries=4, keys=4).astype(int).tolist()
[[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]

Most masks let each query see one unbroken run of keys: causal, windows, padding, packed documents and any
``&`` of those. Such a mask costs two integers a row (``intervals``) and its hidden tiles are never computed.
Every mask can also be asked cell by cell (``visible``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from clearhead.algebra import Align, Bools, Cells, Extent, Intervals, Ints, Mask, array, check_broadcast

__all__ = ["Mask", "array", "causal", "documents", "function", "intervals", "lengths", "window"]


class _IntervalMask(Mask):
    """A mask given by its intervals: cells are compared with them."""

    def visible(self, cells: Cells, extent: Extent) -> Bools:
        found = self.intervals(extent)
        assert found is not None
        start, stop = (_at(bound, (*extent.lead, extent.heads, extent.queries), cells, extent) for bound in found)
        return (start <= cells.key) & (cells.key < stop)


@dataclass(frozen=True)
class Causal(_IntervalMask):
    """Query i sees key j only if j is not in its future. Made by :func:`causal`."""

    align: Align = None

    def check(self, extent: Extent) -> None:
        extent.offset(self.align, "causal")

    def intervals(self, extent: Extent) -> Intervals:
        position = np.arange(extent.queries) + extent.offset(self.align, "causal")
        return np.zeros_like(position), position + 1


@dataclass(frozen=True)
class Window(_IntervalMask):
    """Query i sees keys i-left ... i+right. Made by :func:`window`."""

    left: int | None = None
    right: int | None = None
    align: Align = None

    def check(self, extent: Extent) -> None:
        extent.offset(self.align, "window")

    def intervals(self, extent: Extent) -> Intervals:
        position = np.arange(extent.queries) + extent.offset(self.align, "window")
        most = extent.queries + extent.keys  # a window wider than this sees everything
        start = np.zeros_like(position) if self.left is None else position - min(self.left, most)
        stop = np.full_like(position, extent.keys) if self.right is None else position + min(self.right, most) + 1
        return start, stop


@dataclass(frozen=True, eq=False)
class Lengths(_IntervalMask):
    """Only the first ``keys[b]`` keys (and ``queries[b]`` queries) of a batch entry are real. See :func:`lengths`."""

    keys: Ints
    queries: Ints | None = None

    def check(self, extent: Extent) -> None:
        for name, lengths, block in (
            ("keys", self.keys, extent.keys),
            ("queries", self.queries, extent.queries),
        ):
            if lengths is None:
                continue
            check_broadcast(f"lengths({name}=...)", lengths.shape, extent.lead, "the leading axes")
            if lengths.size and (lengths.min() < 0 or lengths.max() > block):
                raise ValueError(
                    f"lengths({name}=...) must lie between 0 and the {block} {name} there are, "
                    f"got {lengths.min()} to {lengths.max()}"
                )

    def intervals(self, extent: Extent) -> Intervals:
        stop = np.broadcast_to(self.keys[..., None, None], (*extent.lead, 1, extent.queries))
        if self.queries is not None:
            stop = np.where(np.arange(extent.queries) < self.queries[..., None, None], stop, 0)
        return np.zeros((1, extent.queries), np.int64), stop


@dataclass(frozen=True, eq=False)
class Documents(Mask):
    """Queries see the keys of their own document alone. Made by :func:`documents`."""

    query: Ints
    key: Ints

    def check(self, extent: Extent) -> None:
        for name, ids, tokens in (
            ("query_ids", self.query, extent.queries),
            ("key_ids", self.key, extent.keys),
        ):
            if ids.shape[-1] != tokens:
                raise ValueError(f"documents: {name} names {ids.shape[-1]} tokens, there are {tokens}")
            check_broadcast(f"documents: {name}", ids.shape[:-1], extent.lead, "the leading axes")

    def visible(self, cells: Cells, extent: Extent) -> Bools:
        query = _at(self.query[..., None, :], (*extent.lead, 1, extent.queries), cells, extent, head=False)
        key = _at(self.key[..., None, :], (*extent.lead, 1, extent.keys), cells, extent, head=False, axis="key")
        return np.asarray(query == key)

    def intervals(self, extent: Extent) -> Intervals | None:
        lead = np.broadcast_shapes(self.query.shape[:-1], self.key.shape[:-1])
        batch = math.prod(lead)
        query = np.broadcast_to(self.query, (*lead, extent.queries)).reshape(batch, extent.queries)
        key = np.broadcast_to(self.key, (*lead, extent.keys)).reshape(batch, extent.keys)
        start, stop = np.zeros(query.shape, np.int64), np.zeros(query.shape, np.int64)
        for row in range(len(query)):
            bounds = np.flatnonzero(np.diff(key[row])) + 1
            first, last = np.r_[0, bounds][: extent.keys], np.r_[bounds, extent.keys][: extent.keys]
            ids = key[row][first]
            order = np.argsort(ids, kind="stable")
            if ids.size != np.unique(ids).size:
                return None  # some document is in several pieces
            place = np.searchsorted(ids[order], query[row])
            known = place < ids.size
            known[known] = ids[order][place[known]] == query[row][known]
            start[row, known] = first[order][place[known]]
            stop[row, known] = last[order][place[known]]
        shape = (*lead, 1, extent.queries)
        return start.reshape(shape), stop.reshape(shape)


@dataclass(frozen=True, eq=False)
class Spans(_IntervalMask):
    """Row i sees keys start[i] ... stop[i]-1. Made by :func:`intervals`."""

    start: Ints
    stop: Ints

    def check(self, extent: Extent) -> None:
        for name, bound in (("start", self.start), ("stop", self.stop)):
            check_broadcast(
                f"intervals: {name}",
                bound.shape,
                (*extent.lead, extent.heads, extent.queries),
                "(..., heads, queries)",
            )

    def intervals(self, extent: Extent) -> Intervals:
        return self.start, self.stop


@dataclass(frozen=True, eq=False)
class Function(Mask):
    """The user's own ``f(batch, head, query, key) -> bool``. Made by :func:`function`."""

    function: Callable[..., Any]

    def visible(self, cells: Cells, extent: Extent) -> Bools:
        index = np.broadcast_arrays(cells.batch, cells.head, cells.query, cells.key)
        return (
            np.vectorize(self.function, otypes=[np.bool_])(*index) if index[0].size else np.ones(index[0].shape, bool)
        )


def causal(align: Align = None) -> Mask:
    """Every query sees itself and the past: key j is visible to query i if ``j <= i + offset``.

    With as many queries as keys the offset is 0. Otherwise say which is meant: ``align="start"``
    (offset 0: query i stands at key i) or ``align="end"`` (offset keys - queries: the last query stands
    at the last key, as when decoding with a cache). Silence is a ValueError when the mask is used.

    >>> causal(align="end").dense(queries=2, keys=3).astype(int).tolist()
    [[1, 1, 0], [1, 1, 1]]
    """
    return Causal(checked_align(align))


def window(left: int | None = None, right: int | None = None, align: Align = None) -> Mask:
    """Query i sees keys ``i - left <= j <= i + right``: both ends inclusive, None is no limit.

    Positions are aligned as in :func:`causal`.

    >>> window(left=1, right=0).dense(queries=3, keys=3).astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """
    for name, size in (("left", left), ("right", right)):
        if size is not None and (not isinstance(size, int | np.integer) or size < 0):
            raise ValueError(f"window({name}=...) must be a whole number of keys, 0 or more, or None; got {size!r}")
    return Window(left, right, checked_align(align))


def lengths(keys: ArrayLike, queries: ArrayLike | None = None) -> Mask:
    """Padding: of batch entry b only the first ``keys[b]`` keys are real (and the first ``queries[b]`` queries).

    Integers broadcast over the leading axes; 0 is allowed; more than there are is a ValueError.

    >>> lengths([2, 0]).dense(queries=1, keys=3, lead=(2,)).astype(int).tolist()
    [[[[1, 1, 0]]], [[[0, 0, 0]]]]
    """
    return Lengths(
        _integers("lengths(keys=...)", keys),
        None if queries is None else _integers("lengths(queries=...)", queries),
    )


def documents(query_ids: ArrayLike, key_ids: ArrayLike | None = None) -> Mask:
    """Several texts packed into one sequence: a token sees those of its own document. ids: (..., tokens) integers.

    >>> documents([7, 7, 9]).dense(queries=3, keys=3).astype(int).tolist()
    [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    """
    query = _integers("documents(query_ids=...)", query_ids)
    key = query if key_ids is None else _integers("documents(key_ids=...)", key_ids)
    if query.ndim == 0 or key.ndim == 0:
        raise ValueError("documents: ids must have one entry per token, got a single number")
    return Documents(query, key)


def intervals(start: ArrayLike, stop: ArrayLike) -> Mask:
    """Each row sees keys ``start <= j < stop``: integers, broadcast over (..., heads, queries).

    >>> intervals([0, 1], [1, 3]).dense(queries=2, keys=3).astype(int).tolist()
    [[1, 0, 0], [0, 1, 1]]
    """
    return Spans(_integers("intervals: start", start), _integers("intervals: stop", stop))


def function(visible: Callable[..., Any]) -> Mask:
    """Your own rule: ``visible(batch, head, query, key) -> bool`` on whole numbers, compiled by Numba, and with it
    the plain functions that it calls by name.

    >>> function(lambda batch, head, query, key: (query + key) % 2 == 0).dense(2, 2).astype(int).tolist()
    [[1, 0], [0, 1]]
    """
    check_function("masks.function", visible, "(batch, head, query, key)")
    return Function(visible)


def check_function(what: str, function: Any, arguments: str) -> None:
    """Raise TypeError unless this is a function that can be compiled: def, lambda, or compiled by Numba already."""
    if not (isinstance(function, FunctionType) or hasattr(function, "py_func")):
        raise TypeError(
            f"{what} takes a plain function (def or lambda) of {arguments}, got {type(function).__name__}: "
            f"wrap it, for example lambda *cell: yours(*cell)"
            if callable(function)
            else f"{what} takes a function of {arguments}, got {type(function).__name__}"
        )


def checked_align(align: Any) -> Align:
    """``align``, or a ValueError."""
    if align not in (None, "start", "end"):
        raise ValueError(f"align must be 'start', 'end' or None, got {align!r}")
    return align  # type: ignore[no-any-return]


def _integers(what: str, values: ArrayLike) -> Ints:
    values = np.asarray(values)
    if not (np.issubdtype(values.dtype, np.integer) or values.size == 0):
        raise TypeError(f"{what} must hold whole numbers, got dtype {values.dtype}: convert with .astype(int)")
    return values.astype(np.int64)


def _at(
    values: NDArray[Any],
    shape: tuple[int, ...],
    cells: Cells,
    extent: Extent,
    *,
    head: bool = True,
    axis: Literal["query", "key"] = "query",
) -> NDArray[Any]:
    """values, broadcast to (*lead, heads or 1, tokens), looked up at each cell."""
    full = np.broadcast_to(values, shape)
    lead = np.unravel_index(cells.batch, extent.lead) if extent.lead else ()
    return np.asarray(full[(*lead, cells.head if head else 0, getattr(cells, axis))])
