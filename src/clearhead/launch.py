"""From a plan to its results: which kernel runs on what, shared out over threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clearhead.kernels import measure as measure_kernels
from clearhead.kernels import weights as weight_kernels
from clearhead.kernels.forward import attend
from clearhead.kernels.target import host
from clearhead.kernels.threads import get_num_threads, share
from clearhead.kernels.tiles import Inputs, Scratch, Strided, scratch
from clearhead.plan import Plan, blocks, part, strided

Floats = NDArray[np.floating[Any]]
# Arithmetic in one share of work, in multiply-adds: some 50 microseconds, far above what handing it over costs.
GRAIN = 4_000_000


def forward(plan: Plan) -> tuple[Floats, Floats]:
    """(output (batch, heads, queries, value dim) in the compute dtype, logsumexp (batch, heads, queries) float64)."""
    extent = plan.problem.extent
    output = np.zeros((extent.batch, extent.heads, extent.queries, plan.inputs.value_dim), plan.problem.compute_dtype)
    logsumexp = np.full((*output.shape[:-1], 1), -np.inf)
    _each_tile(plan, attend, (strided(output), strided(logsumexp)))
    return output, logsumexp[..., 0]


def measure(plan: Plan, logsumexp: Floats, sink: int, aligned: int) -> Floats:
    """All row measures: (batch, heads, queries, measures) float64, in the order of ``kernels.measure``."""
    extent = plan.problem.extent
    out = np.zeros((extent.batch, extent.heads, extent.queries, measure_kernels.MEASURES))

    def run(x: Inputs, w: Scratch, first: int, last: int, logs: Strided, measured: Strided, shift: int = 0) -> None:
        measure_kernels.measure_rows(x, w, first, last, logs, sink, aligned + shift, measured)

    _each_tile(plan, run, (strided(logsumexp[..., None]), strided(out)), shifted=True)
    return out


def weigh(plan: Plan, batch: int, head: int, queries: NDArray[np.int64], low: int, high: int,
          logsumexp: Floats) -> Floats:  # fmt: skip
    """Weights of these queries of one head on keys low ... high-1: (len(queries), high - low)."""
    out = np.zeros((len(queries), high - low), plan.problem.compute_dtype)
    if out.size == 0:
        return out
    into, logs = strided(out[None]), strided(logsumexp[..., None])

    def rows(first: int, last: int) -> None:
        some = queries[first:last]
        if not plan.by_block:
            here = part(into, 0, 0, first)
            weight_kernels.weigh(plan.inputs, _room(plan), batch, head, some, low, high, logs, here)
            return
        for begin, end in _runs(some, plan.block_rows):
            rows = slice(int(some[begin]), int(some[end - 1]) + 1)
            inputs, _kept = plan.block(batch, head, rows)
            here, seen = part(into, 0, 0, first + begin), part(logs, batch, head, rows.start)
            picked = some[begin:end] - rows.start
            weight_kernels.weigh(inputs, _room(plan), 0, 0, picked, low, high, seen, here)

    tile = host().rows(plan.problem.compute_dtype)
    share(rows, len(queries), tile * max(1, GRAIN // (tile * (high - low) * (plan.inputs.dim + 8))))
    return out


def _each_tile(plan: Plan, run: Callable[..., None], results: tuple[Strided, ...], shifted: bool = False) -> None:
    """run(inputs, scratch, first, last, *results) over all tiles of queries, on all threads."""
    extent = plan.problem.extent
    if 0 in (extent.batch, extent.heads, extent.queries):
        return
    rows = host().rows(plan.problem.compute_dtype)
    if not plan.by_block:
        items = extent.batch * extent.heads * -(-extent.queries // rows)
        share(
            lambda first, last: run(plan.inputs, _room(plan), first, last, *results),
            items,
            _grain(plan, items),
        )
        return
    places = list(blocks(plan))

    def some_blocks(first: int, last: int) -> None:
        for batch, head, queries in places[first:last]:
            inputs, _kept = plan.block(batch, head, queries)
            here = (part(result, batch, head, queries.start) for result in results)
            extra = {"shift": queries.start} if shifted else {}
            run(inputs, _room(plan), 0, -(-inputs.queries // rows), *here, **extra)

    share(some_blocks, len(places))


_rooms = threading.local()


def _room(plan: Plan) -> Scratch:
    """This thread's scratch: kept from its last call if that was of the same size."""
    needed = (plan.problem.compute_dtype, plan.inputs.dim, plan.inputs.value_dim)
    if getattr(_rooms, "size", None) != needed:
        _rooms.size, _rooms.scratch = needed, scratch(*needed)
    room: Scratch = _rooms.scratch
    return room


def _grain(plan: Plan, items: int) -> int:
    """Tiles in one share: enough to be worth it, and enough shares that the threads end together."""
    x = plan.inputs
    one = host().rows(plan.problem.compute_dtype) * max(1, x.keys) * (x.dim + x.value_dim + 8)
    return max(1, min(GRAIN // one, items // (4 * get_num_threads())))


def _runs(queries: NDArray[np.int64], longest: int) -> list[tuple[int, int]]:
    """Cut ascending stretches of queries into pieces that span at most ``longest`` rows."""
    cuts, begin = [], 0
    for n in range(1, len(queries) + 1):
        if n == len(queries) or queries[n] < queries[n - 1] or queries[n] - queries[begin] >= longest:
            cuts.append((begin, n))
            begin = n
    return cuts
