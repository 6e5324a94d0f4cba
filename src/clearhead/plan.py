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
from clearhead.kernels.target import host
from clearhead.kernels.tiles import Inputs, Strided
from clearhead.kernels.vectors import LN2
from clearhead.kernels.visible import Leaf
from clearhead.masks import Documents, Function
from clearhead.problem import Problem
from clearhead.scores import Additive, Dot, General, Score

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]
_ZERO, _NONE = np.zeros(1, np.int64), np.zeros(0)
_NO_PROGRAM = np.zeros((0, len(Leaf._fields)), np.int64)


@dataclass(frozen=True, eq=False)
class Plan:
    """What the kernels need to know of a problem."""

    problem: Problem
    inputs: Inputs
    start: Ints  # (*lead, heads, queries, 1), the first visible key of each row ...
    stop: Ints  # ... and one past the last: what ``inputs`` has as places
    depth: int  # of the stack that the mask's program needs
    kept: tuple[Any, ...]  # what the inputs point into


def plan(problem: Problem) -> Plan:
    """The plan for a problem. Cost: linear in the number of tokens."""
    score, extent, at = problem.score, problem.extent, problem.compute_dtype
    query, key, vector = problem.query, problem.key, _NONE.astype(at)
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
    arrays: dict[str, NDArray[Any]] = {"query": query, "key": key, "start": start[..., None], "stop": stop[..., None]}
    if problem.value is not None:
        arrays["value"] = problem.value
    if score.bias is not None:
        arrays["bias"] = np.broadcast_to(score.bias, extent.shape)
    arrays = {name: readable(values) for name, values in arrays.items()}
    places = {"value": _absent(at), "bias": _absent(at)}
    places |= {name: strided(values) for name, values in arrays.items()}
    function = None if score.function is None else functions.score(score.function, at)
    inputs = Inputs(
        **places,
        program=program.table(),
        slopes=_per_head(score.slopes, extent.heads),
        sinks=_per_head(score.sinks, extent.heads),
        vector=vector,
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
        micro=host().keys,
        lanes=host().lanes(at),
    )
    return Plan(
        problem, inputs, arrays["start"], arrays["stop"], program.depth, (*arrays.values(), *program.kept, function)
    )


def in_nats(plan: Plan, logsumexp: Floats) -> NDArray[np.float64]:
    """(..., 2), as the kernels leave it, as one natural logarithm (...)."""
    return np.asarray(logsumexp[..., 0] * plan.inputs.unit + logsumexp[..., 1])


def without_value(plan: Plan) -> Plan:
    """The same scores with nothing to mix: for their logsumexp alone."""
    return replace(plan, inputs=plan.inputs._replace(value=_absent(plan.problem.compute_dtype), value_dim=0))


def strided(array: NDArray[Any]) -> Strided:
    """(*lead, a, b, c) as the kernels see it. No copy: whoever calls must keep the array."""
    size, lead, strides = array.itemsize, array.shape[:-3], array.strides
    offset = _ZERO
    for length, stride in zip(lead, strides, strict=False):
        offset = (offset[:, None] + np.arange(length) * (stride // size)).reshape(-1)
    steps = (strides[-3] // size, strides[-2] // size, strides[-1] // size)
    return Strided(_like(array.dtype), array.__array_interface__["data"][0], offset, steps, array.size)


def _unit(score: Score) -> float:
    """What a score of 1 is in the kernels, in nats: see ``Inputs.unit``."""
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
        place = strided(array)
        self.kept += [array, place.offset]
        return place

    def _leaf(self, code: int, one: Strided, other: Strided | None = None) -> None:
        other = one if other is None else other
        offsets = (place.offset.__array_interface__["data"][0] for place in (one, other))
        first, second = offsets
        self.steps.append(
            Leaf(code, one.address, first, *one.steps, other.address, second, other.steps[0], other.steps[1])
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


def _per_head(values: Floats | None, heads: int) -> NDArray[np.float64]:
    return _NONE if values is None else np.broadcast_to(values, heads).astype(np.float64)


@cache
def _like(dtype: np.dtype[Any]) -> NDArray[Any]:
    """By which kernels know the type of what they point at."""
    return np.zeros(1, dtype)


@cache
def _absent(dtype: np.dtype[Any]) -> Strided:
    return Strided(_like(dtype), 0, _ZERO, (0, 0, 0), 0)


def readable(array: NDArray[Any]) -> NDArray[Any]:
    """An array that kernels can read: native, aligned, elements at whole multiples of their size.

    16 bits go under the name of integers, so that Numba knows the two apart: see ``kernels.vectors.widen``.
    """
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if not array.flags.aligned or any(stride % array.itemsize for stride in array.strides):
        array = array.copy()
    if array.itemsize == 2:
        return array.view(np.int16 if array.dtype == np.float16 else np.uint16)
    return array
