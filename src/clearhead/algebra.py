"""How masks combine: what every mask can be asked, ``&``, ``|`` and ``~``, and the matrix that masks lie over.

The masks themselves, and how to use them, are in ``clearhead.masks``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Align = Literal["start", "end"] | None
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Intervals = tuple[Ints, Ints]
HIDDEN = -1e4  # what models add to scores to hide: numbers below this, finfo.min of any dtype and -inf among them


@dataclass(frozen=True)
class Extent:
    """The size of an attention matrix: leading axes, heads, queries, keys."""

    lead: tuple[int, ...]
    heads: int
    queries: int
    keys: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.lead, self.heads, self.queries, self.keys)

    @property
    def batch(self) -> int:
        return math.prod(self.lead)

    def offset(self, align: Align, what: str) -> int:
        """How far query 0 stands from key 0, in keys: position of query i is ``i + offset``."""
        if align == "start" or self.queries == self.keys:
            return 0
        if align == "end":
            return self.keys - self.queries
        raise ValueError(
            f"{what} with {self.queries} queries and {self.keys} keys can mean two things: say "
            f"align='start' (query i stands at key i) or align='end' (the last query stands at the last key)"
        )


@dataclass(frozen=True)
class Cells:
    """Index arrays that broadcast against each other, naming cells of the matrix. Leading axes are flat."""

    batch: Ints
    head: Ints
    query: Ints
    key: Ints

    @staticmethod
    def of_head(batch: int, head: int, queries: Ints, keys: Ints) -> Cells:
        """The block queries x keys of one head."""
        return Cells(np.int64(batch), np.int64(head), queries[:, None], keys[None, :])  # type: ignore[arg-type]


class Mask:
    """Base of all masks: an algebra (``& | ~``) over ``visible``."""

    def check(self, extent: Extent) -> None:
        """Raise ValueError if this mask does not fit a matrix of that size."""

    def visible(self, cells: Cells, extent: Extent) -> Bools:
        """Whether each of the cells may be attended to."""
        raise NotImplementedError

    def intervals(self, extent: Extent) -> Intervals | None:
        """(first visible key, one past the last) for each row, broadcastable to (*lead, heads, queries).

        None when some row's visible keys may have gaps.
        """
        return None

    def dense(self, queries: int, keys: int, heads: int = 1, lead: tuple[int, ...] = ()) -> Bools:
        """The whole mask as a boolean array (queries, keys), or (*lead, heads, queries, keys). For looking at."""
        extent = Extent(lead, heads, queries, keys)
        self.check(extent)
        batch, head = np.arange(extent.batch), np.arange(heads)
        query, key = np.arange(queries), np.arange(keys)
        cells = Cells(batch[:, None, None, None], head[:, None, None], query[:, None], key)
        full = np.broadcast_to(self.visible(cells, extent), (extent.batch, heads, queries, keys))
        return full.reshape(queries, keys) if heads == 1 and not lead else full.reshape(extent.shape)

    def __and__(self, other: Mask) -> Mask:
        return Both(self, _mask(other))

    def __or__(self, other: Mask) -> Mask:
        return Either(self, _mask(other))

    def __rand__(self, other: ArrayLike) -> Mask:
        return Both(_mask(other), self)

    def __ror__(self, other: ArrayLike) -> Mask:
        return Either(_mask(other), self)

    def __invert__(self) -> Mask:
        return Not(self)

    # An array on the left of & or | must leave the work to the mask instead of trying it cell by cell.
    __array_ufunc__ = None


class _Pair(Mask):
    """Two masks that combine."""

    first: Mask
    second: Mask

    def check(self, extent: Extent) -> None:
        self.first.check(extent)
        self.second.check(extent)


@dataclass(frozen=True, eq=False)
class Both(_Pair):
    """``a & b``"""

    first: Mask
    second: Mask

    def visible(self, cells: Cells, extent: Extent) -> Bools:
        return self.first.visible(cells, extent) & self.second.visible(cells, extent)

    def intervals(self, extent: Extent) -> Intervals | None:
        one, other = self.first.intervals(extent), self.second.intervals(extent)
        if one is None or other is None:
            return None
        return np.maximum(one[0], other[0]), np.minimum(one[1], other[1])


@dataclass(frozen=True, eq=False)
class Either(_Pair):
    """``a | b``"""

    first: Mask
    second: Mask

    def visible(self, cells: Cells, extent: Extent) -> Bools:
        return self.first.visible(cells, extent) | self.second.visible(cells, extent)


@dataclass(frozen=True, eq=False)
class Not(Mask):
    """``~a``"""

    inner: Mask

    def check(self, extent: Extent) -> None:
        self.inner.check(extent)

    def visible(self, cells: Cells, extent: Extent) -> Bools:
        return ~self.inner.visible(cells, extent)


@dataclass(frozen=True, eq=False)
class Array(Mask):
    """A boolean array, broadcast over leading axes, heads and queries. Made by ``masks.array``."""

    allowed: Bools

    def check(self, extent: Extent) -> None:
        check_broadcast("mask", self.allowed.shape, extent.shape, "(..., heads, queries, keys)")

    def visible(self, cells: Cells, extent: Extent) -> Bools:
        full = np.broadcast_to(self.allowed, extent.shape)
        lead = np.unravel_index(cells.batch, extent.lead) if extent.lead else ()
        return np.asarray(full[(*lead, cells.head, cells.query, cells.key)])


def array(allowed: ArrayLike) -> Mask:
    """A boolean array, True where the query may attend, broadcast over (..., heads, queries, keys) as in NumPy."""
    allowed = np.asarray(allowed)
    if allowed.dtype != np.bool_:
        raise TypeError(
            f"mask has dtype {allowed.dtype}: a mask is boolean, True where attending is allowed. Convert it with "
            f"mask.astype(bool), or, if it holds numbers to add to the scores, give it as scores.dot(bias=...)"
        )
    return Array(allowed)


def runs(allowed: Bools) -> Intervals | None:
    """(first visible key, one past the last), each (..., rows), of booleans (..., rows, keys); None if a row has gaps.

    >>> start, stop = runs(np.array([[False, True, True], [False, False, False]]))
    >>> start.tolist(), stop.tolist()
    ([1, 0], [3, 0])
    """
    keys = allowed.shape[-1]
    count = allowed.sum(axis=-1, dtype=np.int64)
    if not keys:
        return count, count
    start = np.where(count > 0, allowed.argmax(axis=-1), 0).astype(np.int64)
    # A run of `count` cells from the first visible one is unbroken exactly if the last of it is the last visible.
    last = np.where(count > 0, keys - allowed[..., ::-1].argmax(axis=-1), 0)
    return None if (last != start + count).any() else (start, start + count)


def split(mask: Mask, extent: Extent) -> tuple[Intervals | None, Mask | None]:
    """The mask as ``intervals & rest``: what is cheap, and what must be asked cell by cell."""
    found = mask.intervals(extent)
    if found is not None:
        return found, None
    if not isinstance(mask, Both):
        return None, mask
    (one, rest), (other, more) = split(mask.first, extent), split(mask.second, extent)
    if one is not None and other is not None:
        one = np.maximum(one[0], other[0]), np.minimum(one[1], other[1])
    return (one if one is not None else other), (Both(rest, more) if rest and more else rest or more)


def _mask(value: Any) -> Mask:
    return value if isinstance(value, Mask) else array(value)


def check_broadcast(what: str, shape: tuple[int, ...], target: tuple[int, ...], meaning: str) -> None:
    """Raise ValueError unless an array of this shape broadcasts to ``target``, which is named by ``meaning``."""
    try:
        fits = np.broadcast_shapes(shape, target) == target
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"{what} has shape {shape}, which does not broadcast to {meaning} = {target}")
