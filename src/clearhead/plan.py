"""A Problem in the kernels' terms: places and numbers, and what cannot be put so, block by block.

Most problems become one ``Inputs``: dot products under intervals, boolean arrays, bias, softcap, ALiBi and sinks. A
mask or score with no such form (unions, negations, the user's functions, additive scores) is worked out for a run of
queries of one head at a time and handed over as arrays, so that memory stays linear in the number of keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clearhead import core, masks
from clearhead.kernels import functions
from clearhead.kernels.target import host
from clearhead.kernels.tiles import Inputs, Strided
from clearhead.masks import Array, Cells, Extent, Function, Mask
from clearhead.problem import Problem
from clearhead.scores import Additive, General

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]
_ZERO, _NONE = np.zeros(1, np.int64), np.zeros(0)
BLOCK_CELLS = 1 << 20  # of a block worked out in NumPy: 4 MB of float32 scores


@dataclass(frozen=True, eq=False)
class Plan:
    """``inputs`` as far as they are the same for all rows; what is left is worked out ``by_block``."""

    problem: Problem
    inputs: Inputs
    rest: Mask | None  # of the mask, beyond intervals and one array
    scored: bool  # whether scores must be worked out before the kernel
    kept: tuple[NDArray[Any], ...]  # arrays that the inputs point into

    @property
    def by_block(self) -> bool:
        return self.rest is not None or self.scored

    @property
    def block_rows(self) -> int:
        """Queries to work out at once where ``by_block``."""
        return max(1, min(self.problem.extent.queries, BLOCK_CELLS // max(1, self.problem.extent.keys)))

    def block(self, batch: int, head: int, rows: slice) -> tuple[Inputs, tuple[NDArray[Any], ...]]:
        """The inputs for these queries of one head alone, with everything worked out, and the arrays to keep."""
        x, problem = self.inputs, self.problem
        queries, keys = np.arange(rows.start, rows.stop), np.arange(problem.extent.keys)
        first = rows.start
        inputs = x._replace(
            query=part(x.query, batch, head, first),
            key=part(x.key, batch, head // x.group, 0),
            value=part(x.value, batch, head // x.group, 0),
            start=part(x.start, batch, head, first),
            stop=part(x.stop, batch, head, first),
            allowed=part(x.allowed, batch, head, first),
            bias=part(x.bias, batch, head, first),
            slopes=x.slopes[head : head + 1],
            sinks=x.sinks[head : head + 1],
            offset=x.offset + first,
            heads=1,
            group=1,
            queries=len(queries),
        )
        kept: list[NDArray[Any]] = []
        if self.rest is not None:
            cells = Cells.of_head(batch, head, queries, keys)
            seen = np.broadcast_to(self.rest.visible(cells, problem.extent), (len(queries), len(keys)))
            kept.append(np.ascontiguousarray(seen))
            inputs = inputs._replace(allowed=strided(kept[-1][None]))
        if self.scored:
            bare = replace(problem, mask=None, score=replace(problem.score, function=None))
            with np.errstate(all="ignore"):
                scores = core.score_block(bare, batch, head, queries, keys, problem.compute_dtype)
            if problem.score.function is not None:
                scores = functions.score(problem.score.function)(scores, batch, head, first)
            kept.append(np.ascontiguousarray(scores))
            # Scores stand in as the bias of a dot product over no dimensions, which is 0.
            inputs = inputs._replace(dim=0, bias=strided(kept[-1][None]))
        return inputs, tuple(kept)


def plan(problem: Problem) -> Plan:
    """What the kernels need to know of the problem."""
    score, extent, at = problem.score, problem.extent, problem.compute_dtype
    scored = isinstance(score.base, Additive) or score.function is not None
    query = problem.query
    if isinstance(score.base, General) and not scored:
        # q.W.k is the dot product of q.W with k.
        query = np.matmul(query.astype(at), score.base.weight.astype(at))
    start, stop, array, rest = _masked(problem)
    arrays = {"query": query, "key": problem.key, "start": start[..., None], "stop": stop[..., None]}
    if problem.value is not None:
        arrays["value"] = problem.value
    if array is not None:
        arrays["allowed"] = np.broadcast_to(array.allowed, extent.shape)
    if score.bias is not None and not scored:
        arrays["bias"] = np.broadcast_to(score.bias, extent.shape)
    arrays = {name: _readable(values) for name, values in arrays.items()}
    places = {"value": _absent(at), "allowed": _absent(np.dtype(bool)), "bias": _absent(at)}
    places |= {name: strided(values) for name, values in arrays.items()}
    inputs = Inputs(
        **places,
        slopes=_per_head(None if scored else score.slopes, extent.heads),
        sinks=_per_head(score.sinks, extent.heads),
        scale=problem.scale,
        softcap=0.0 if score.softcap is None or scored else score.softcap,
        offset=0 if score.slopes is None else extent.offset(score.align, "alibi"),
        heads=extent.heads,
        group=problem.group,
        queries=extent.queries,
        keys=extent.keys,
        dim=query.shape[-1] if not isinstance(score.base, General) else problem.key.shape[-1],
        value_dim=0 if problem.value is None else problem.value.shape[-1],
        micro=host().keys,
    )
    return Plan(problem, inputs, rest, scored, tuple(arrays.values()))


def strided(array: NDArray[Any]) -> Strided:
    """(*lead, a, b, c) as the kernels see it. No copy: whoever calls must keep the array."""
    size, lead, strides = array.itemsize, array.shape[:-3], array.strides
    offset = _ZERO
    for length, stride in zip(lead, strides, strict=False):
        offset = (offset[:, None] + np.arange(length) * (stride // size)).reshape(-1)
    steps = (strides[-3] // size, strides[-2] // size, strides[-1] // size)
    return Strided(_like(array.dtype), array.__array_interface__["data"][0], offset, steps, array.size)


@cache
def _like(dtype: np.dtype[Any]) -> NDArray[Any]:
    """By which kernels know the type of what they point at."""
    return np.zeros(1, dtype)


@cache
def _absent(dtype: np.dtype[Any]) -> Strided:
    return Strided(_like(dtype), 0, _ZERO, (0, 0, 0), 0)


def part(array: Strided, batch: int, first: int, second: int) -> Strided:
    """The same array from element (batch, first, second, 0) on, as a batch of one."""
    if not array.size:
        return array
    place = array.offset[batch] + first * array.steps[0] + second * array.steps[1]
    return array._replace(offset=np.full(1, place))


def blocks(plan: Plan) -> Iterator[tuple[int, int, slice]]:
    """(batch, head, queries) of every block, in order."""
    extent = plan.problem.extent
    for batch in range(extent.batch):
        for head in range(extent.heads):
            for first in range(0, extent.queries, plan.block_rows):
                yield batch, head, slice(first, min(first + plan.block_rows, extent.queries))


def _per_head(values: Floats | None, heads: int) -> NDArray[np.float64]:
    return _NONE if values is None else np.broadcast_to(values, heads).astype(np.float64)


def _masked(problem: Problem) -> tuple[Ints, Ints, Array | None, Mask | None]:
    """The mask as (start, stop, one array, what is left), start and stop broadcast to (*lead, heads, queries)."""
    extent, rest = problem.extent, None
    start, stop = np.zeros(1, np.int64), np.full(1, extent.keys, np.int64)
    if problem.mask is not None:
        found, rest = masks.split(problem.mask, extent)
        if found is not None:
            start, stop = np.clip(found[0], 0, extent.keys), np.clip(found[1], 0, extent.keys)
            empty = start >= stop
            start, stop = np.where(empty, 0, start), np.where(empty, 0, stop)
    start, stop = (np.broadcast_to(bound, extent.shape[:-1]) for bound in (start, stop))
    if isinstance(rest, Array):
        return start, stop, rest, None
    return start, stop, None, None if rest is None else rest.map(_compiled)


def _compiled(leaf: Mask) -> Mask:
    """A leaf that can be asked quickly: the user's function is compiled."""
    return _Compiled(leaf.function) if isinstance(leaf, Function) else leaf


class _Compiled(Function):
    """The user's function, asked by compiled code instead of by Python."""

    def visible(self, cells: Cells, extent: Extent) -> NDArray[np.bool_]:
        index = np.broadcast_arrays(cells.batch, cells.head, cells.query, cells.key)
        flat = functions.visible(self.function)(*(np.ascontiguousarray(i).reshape(-1) for i in index))
        return flat.reshape(index[0].shape)


def _readable(array: NDArray[Any]) -> NDArray[Any]:
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
