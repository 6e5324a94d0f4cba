"""A Problem in the kernels' terms: places and numbers.

Masks become intervals (two integers a row) and, for what intervals cannot say, a program that the kernels run on each
tile. Scores become a dot product, or the additive score's projections, and what is added or done to them. Nothing
quadratic is made here, and arrays are referred to, not copied.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clearhead.algebra import Array, Both, Either, Extent, Mask, Not, split
from clearhead.kernels import functions, visible
from clearhead.kernels.arguments import Arguments, Strided
from clearhead.kernels.target import host
from clearhead.kernels.vectors import LN2
from clearhead.kernels.visible import Leaf
from clearhead.masks import Documents, Function
from clearhead.problem import Problem
from clearhead.scores import Additive, Dot, General, Score

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]
_ZERO = np.zeros(1, np.int64)
_NO_PROGRAM = np.zeros((0, len(Leaf._fields)), np.int64)


@dataclass(frozen=True, eq=False)
class Plan:
    """What the kernels need to know of a problem."""

    problem: Problem
    arguments: Arguments
    start: Ints  # (*lead, heads, queries, 1), the first visible key of each row ...
    stop: Ints  # ... and one past the last: what ``arguments`` have as places
    program: Ints  # the rest of the mask, (steps, columns of ``visible.Leaf``)
    depth: int  # of the stack that it needs
    kept: tuple[Any, ...]  # what the arguments point into

    def on(self, *arrays: NDArray[Any]) -> Plan:
        """The same for other (query, key, value) that lie in memory like these."""
        own = (self.problem.query, self.problem.key, self.problem.value)
        query, key, value = (np.broadcast_to(a, b.shape) for a, b in zip(arrays, own, strict=True) if b is not None)
        x = self.arguments
        places = {name: getattr(x, name)._replace(address=address(array))
                  for name, array in zip(("query", "key", "value"), arrays, strict=True)}  # fmt: skip
        problem = replace(self.problem, query=query, key=key, value=value)
        return replace(self, problem=problem, arguments=x._replace(**places), kept=(*self.kept, *arrays))


def plan(problem: Problem) -> Plan:
    """The plan for a problem. Cost: linear in the number of tokens."""
    score, extent, at = problem.score, problem.extent, problem.compute_dtype
    query, key, vector = problem.query, problem.key, None
    # What a mask hides may be anything: no warnings about it.
    with np.errstate(over="ignore", invalid="ignore"):
        if isinstance(score.base, General):
            # q.W.k is the dot product of q.W with k.
            query = np.matmul(query.astype(at), score.base.weight.astype(at))
        if isinstance(score.base, Additive):
            query = np.matmul(query.astype(at), score.base.query_weight.astype(at))
            key = np.matmul(key.astype(at), score.base.key_weight.astype(at))
            vector = np.ascontiguousarray(score.base.vector.astype(at) * at.type(problem.scale))
    start, stop, rest = _masked(problem)
    program = _Program(extent)
    if rest is not None:
        program.add(rest)
    table = program.table()
    bias = None if score.bias is None else np.broadcast_to(score.bias, extent.shape)
    kept: list[Any] = [table, program.kept, vector]

    def place(array: NDArray[Any] | None) -> Strided:
        if array is None:
            return _absent(at)
        array = readable(array)
        found, offsets = strided(array)
        kept.extend((array, offsets))
        return found

    function = None if score.function is None else functions.score(score.function, at)
    slopes, sinks = _per_head(score.slopes, extent.heads), _per_head(score.sinks, extent.heads)
    kept += [function, slopes, sinks]
    arguments = Arguments(
        query=place(query),
        key=place(key),
        value=place(problem.value),
        start=place(start[..., None]),
        stop=place(stop[..., None]),
        bias=place(bias),
        output=_absent(at),
        logsumexp=_absent(np.dtype(np.float64)),
        program=address(table) if len(table) else 0,
        steps=len(table),
        slopes=0 if slopes is None else address(slopes),
        sinks=0 if sinks is None else address(sinks),
        vector=0 if vector is None else address(vector),
        function=0 if function is None else function.address,
        unit=_unit(score),
        scale=problem.scale,
        softcap=0.0 if score.softcap is None else score.softcap,
        offset=0 if score.slopes is None else extent.offset(score.align, "alibi"),
        heads=extent.heads,
        group=problem.group,
        queries=extent.queries,
        keys=extent.keys,
        dim=key.shape[-1],
        value_dim=0 if problem.value is None else problem.value.shape[-1],
        rows=host().rows(at),
        micro=host().keys,
        lanes=host().lanes(at),
    )
    return Plan(problem, arguments, start[..., None], stop[..., None], table, program.depth, tuple(kept))


def in_nats(plan: Plan, logsumexp: Floats) -> NDArray[np.float64]:
    """(..., 2), as the kernels leave it, as one natural logarithm (...)."""
    return np.asarray(logsumexp[..., 0] * plan.arguments.unit + logsumexp[..., 1])


def without_value(plan: Plan) -> Plan:
    """The same scores with nothing to mix: for their logsumexp alone."""
    return replace(plan, arguments=plan.arguments._replace(value=_absent(plan.problem.compute_dtype), value_dim=0))


def strided(array: NDArray[Any]) -> tuple[Strided, Ints]:
    """(*lead, a, b, c) as the kernels see it, and the offsets that it points at. No copy: whoever calls keeps both."""
    size, lead, strides = array.itemsize, array.shape[:-3], array.strides
    offsets = _ZERO
    for length, stride in zip(lead, strides, strict=False):
        offsets = (offsets[:, None] + np.arange(length) * (stride // size)).reshape(-1)
    steps = (strides[-3] // size, strides[-2] // size, strides[-1] // size)
    return Strided(_like(array.dtype), address(array), address(offsets), steps, array.size), offsets


def address(array: NDArray[Any]) -> int:
    """Where an array's first element lies."""
    place: int = array.__array_interface__["data"][0]
    return place


def _unit(score: Score) -> float:
    """What a score of 1 is in the kernels, in nats: see ``Arguments.unit``."""
    changed = score.softcap, score.bias, score.slopes, score.function
    return LN2 if isinstance(score.base, Dot | General) and all(change is None for change in changed) else 1.0


class _Program:
    """A mask as a program for ``kernels.visible``: leaves first, then what combines them."""

    def __init__(self, extent: Extent) -> None:
        self.extent = extent
        self.steps: list[Leaf] = []
        self.kept: list[Any] = []
        self.depth = 1

    def table(self) -> NDArray[np.int64]:
        return np.array(self.steps, np.int64) if self.steps else _NO_PROGRAM

    def add(self, mask: Mask, below: int = 0) -> None:
        """The steps that push this mask onto a stack which already holds ``below`` entries."""
        self.depth = max(self.depth, below + 1)
        found = mask.intervals(self.extent)
        if found is not None:
            shape = self.extent.shape[:-1]
            start, stop = (self._place(np.broadcast_to(bound, shape)[..., None]) for bound in found)
            self._leaf(visible.INTERVALS, start, stop)
        elif isinstance(mask, Both | Either):
            # The operands commute: the deeper one goes first, and a chain of any length needs two entries.
            first, second = sorted((mask.first, mask.second), key=_height, reverse=True)
            self.add(first, below)
            self.add(second, below + 1)
            self.steps.append(Leaf(visible.BOTH if isinstance(mask, Both) else visible.EITHER))
        elif isinstance(mask, Not):
            self.add(mask.inner, below)
            self.steps.append(Leaf(visible.NOT))
        elif isinstance(mask, Array):
            self._leaf(visible.ARRAY, self._place(np.broadcast_to(mask.allowed, self.extent.shape)))
        elif isinstance(mask, Documents):
            query = np.broadcast_to(mask.query[..., None, :, None], (*self.extent.shape[:-1], 1))
            key = np.broadcast_to(mask.key[..., None, :, None], (*self.extent.shape[:-2], self.extent.keys, 1))
            self._leaf(visible.EQUAL, self._place(query), self._place(key))
        elif isinstance(mask, Function):
            compiled = functions.visible(mask.function)
            self.kept.append(compiled)
            self.steps.append(Leaf(visible.FUNCTION, compiled.address))
        else:
            raise TypeError(f"a mask is made by clearhead.masks, got {mask!r}")

    def _place(self, array: NDArray[Any]) -> Strided:
        array = readable(array)
        place, offsets = strided(array)
        self.kept += [array, offsets]
        return place

    def _leaf(self, code: int, one: Strided, other: Strided | None = None) -> None:
        other = one if other is None else other
        self.steps.append(
            Leaf(code, one.address, one.offsets, *one.steps, other.address, other.offsets, *other.steps[:2])
        )


def _height(mask: Mask) -> int:
    if isinstance(mask, Both | Either):
        return 1 + max(_height(mask.first), _height(mask.second))
    return _height(mask.inner) if isinstance(mask, Not) else 0


def _masked(problem: Problem) -> tuple[Ints, Ints, Mask | None]:
    """The mask as (start, stop, what is left), start and stop broadcast to (*lead, heads, queries)."""
    extent, rest = problem.extent, None
    start, stop = np.zeros(1, np.int64), np.full(1, extent.keys, np.int64)
    if problem.mask is not None:
        found, rest = split(problem.mask, extent)
        if found is not None:
            start, stop = np.clip(found[0], 0, extent.keys), np.clip(found[1], 0, extent.keys)
            empty = start >= stop
            start, stop = np.where(empty, 0, start), np.where(empty, 0, stop)
    return np.broadcast_to(start, extent.shape[:-1]), np.broadcast_to(stop, extent.shape[:-1]), rest


def _per_head(values: Floats | None, heads: int) -> NDArray[np.float64] | None:
    return None if values is None else np.broadcast_to(values, heads).astype(np.float64)


@cache
def _like(dtype: np.dtype[Any]) -> np.generic:
    """By which kernels know the type of what they point at."""
    like: np.generic = dtype.type(0)
    return like


@cache
def _absent(dtype: np.dtype[Any]) -> Strided:
    return Strided(_like(dtype), 0, address(_ZERO), (0, 0, 0), 0)


def readable(array: NDArray[Any]) -> NDArray[Any]:
    """An array that kernels can read: native, aligned, elements at whole multiples of their size.

    16 bits go under the name of integers, so that Numba knows the two apart: see ``kernels.addresses.widen``.
    """
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if not array.flags.aligned or any(stride % array.itemsize for stride in array.strides):
        array = array.copy()
    if array.itemsize == 2:
        return array.view(np.int16 if array.dtype == np.float16 else np.uint16)
    return array
