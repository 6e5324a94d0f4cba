"""From a plan to its results: which kernel runs on what, shared out over threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clearhead.kernels import decode
from clearhead.kernels import measure as measure_kernels
from clearhead.kernels import weights as weight_kernels
from clearhead.kernels.forward import attend
from clearhead.kernels.target import host
from clearhead.kernels.threads import get_num_threads, share
from clearhead.kernels.tiles import Scratch, Strided, scratch
from clearhead.plan import Plan, readable, strided

Floats = NDArray[np.floating[Any]]
# In multiply-adds. What takes under 60 microseconds is not shared out; no share takes longer than some 15 milliseconds,
# after which Ctrl-C is heard; and each thread gets about so many shares.
GRAIN, LONGEST, SHARES = 4_000_000, 1_000_000_000, 8


def forward(plan: Plan) -> tuple[Floats, Floats]:
    """Output (batch, heads, queries, value dim) in the compute dtype, and logsumexp (batch, heads, queries, 2).

    The latter in two parts, see ``kernels.forward``.
    """
    extent = plan.problem.extent
    output = np.zeros((extent.batch, extent.heads, extent.queries, plan.inputs.value_dim), plan.problem.compute_dtype)
    logsumexp = np.zeros((*output.shape[:-1], 2))
    logsumexp[..., 0] = -np.inf
    into = strided(output), strided(logsumexp)
    _each_tile(plan, lambda w, first, last: attend(plan.inputs, w, first, last, *into))
    return output, logsumexp


def can_stream(plan: Plan) -> bool:
    """Whether the few-queries kernel can do this: plain scores, runs of keys, dims of whole vectors.

    The memory layout has no say: how a problem is stored must not change a bit of its result.
    """
    x, lanes = plan.inputs, host().lanes(plan.problem.compute_dtype)
    plain = not (x.program.size or x.bias.size or x.slopes.size or x.vector.size or x.function or x.softcap)
    return (
        plain
        and x.dim % lanes == 0 == x.value_dim % lanes
        and 0 < x.queries * x.group <= decode.ROWS
        and 0 not in (x.dim, x.value_dim, x.keys)
    )


def stream(plan: Plan, pages: decode.Pages | None = None) -> tuple[Floats, Floats]:
    """As ``forward``, where ``can_stream``: keys and values are read once for all rows of a group of heads.

    ``pages`` says where they lie, if not one after the other.
    """
    extent, x, dtype = plan.problem.extent, plan.inputs, plan.problem.compute_dtype
    if x.key.steps[2] != 1 or x.value.steps[2] != 1:
        # Rows whose numbers do not lie side by side cannot be read by vectors: this once, a copy.
        assert plan.problem.value is not None
        kept = [np.ascontiguousarray(readable(array)) for array in (plan.problem.key, plan.problem.value)]
        x = x._replace(key=strided(kept[0]), value=strided(kept[1]))
    chunks = -(-x.keys // decode.CHUNK)
    items = extent.batch * (x.heads // x.group) * chunks
    rows = 1 << (x.queries * x.group - 1).bit_length()
    partial = np.empty((items, rows, x.value_dim), dtype)
    top, total = np.empty((items, rows), dtype), np.empty((items, rows), dtype)
    pages = pages or decode.Pages(decode.CHUNK, _chunks(x.key, chunks), _chunks(x.value, chunks))
    output = np.empty((extent.batch, extent.heads, extent.queries, x.value_dim), dtype)
    logsumexp = np.empty((*output.shape[:-1], 2))

    def some(first: int, last: int) -> None:
        room = decode.decode_scratch(dtype, x.dim, x.value_dim)
        decode.decode_chunks(x, pages, room, first, last, chunks, partial, top, total)

    share(some, items, max(1, items // (4 * get_num_threads())))
    decode.merge_chunks(x, chunks, partial, top, total, strided(output), strided(logsumexp))
    return output, logsumexp


def _chunks(array: Strided, chunks: int) -> NDArray[np.int64]:
    """Where each chunk of each batch entry begins, in elements from the first."""
    return array.offset[:, None] + np.arange(chunks) * (decode.CHUNK * array.steps[1])


def measure(plan: Plan, logsumexp: Floats, sink: int, aligned: int) -> Floats:
    """All row measures: (batch, heads, queries, measures) float64, in the order of ``kernels.measure``."""
    extent = plan.problem.extent
    out = np.zeros((extent.batch, extent.heads, extent.queries, measure_kernels.MEASURES))
    logs, into = strided(logsumexp), strided(out)

    def tiles(w: Scratch, first: int, last: int) -> None:
        measure_kernels.measure_rows(plan.inputs, w, first, last, logs, sink, aligned, into)

    _each_tile(plan, tiles)
    return out


def weigh(plan: Plan, batch: int, head: int, queries: NDArray[np.int64], low: int, high: int,
          logsumexp: Floats) -> Floats:  # fmt: skip
    """Weights of these queries of one head on keys low ... high-1: (len(queries), high - low)."""
    out = np.zeros((len(queries), high - low), plan.problem.compute_dtype)
    if out.size == 0:
        return out
    logs = strided(logsumexp)

    def rows(first: int, last: int) -> None:
        into: Strided = strided(out[None, first:last])
        room = _room(plan)
        weight_kernels.weigh(plan.inputs, room, batch, head, queries[first:last], low, high, logs, into)
        _check_functions(room)

    tile = host().rows(plan.problem.compute_dtype)
    share(rows, len(queries), tile * max(1, GRAIN // (tile * (high - low) * (plan.inputs.dim + 8))))
    return out


def _each_tile(plan: Plan, run: Callable[[Scratch, int, int], None]) -> None:
    """run(scratch, first, last) over all tiles of queries, on all threads."""
    extent = plan.problem.extent
    if 0 in (extent.batch, extent.heads, extent.queries):
        return
    items = extent.batch * extent.heads * -(-extent.queries // host().rows(plan.problem.compute_dtype))

    def tiles(first: int, last: int) -> None:
        room = _room(plan)
        run(room, first, last)
        _check_functions(room)

    share(tiles, items, _grain(plan, items))


_rooms = threading.local()


def scratch_bytes(plan: Plan) -> int:
    """What a call needs beside its inputs and outputs, on all threads."""
    x, dtype = plan.inputs, plan.problem.compute_dtype
    if can_stream(plan):
        rooms = decode.decode_scratch(dtype, x.dim, x.value_dim)
        items = plan.problem.extent.batch * (x.heads // x.group) * -(-x.keys // decode.CHUNK)
        beside = items * (1 << (x.queries * x.group - 1).bit_length()) * (x.value_dim + 2) * dtype.itemsize
        return get_num_threads() * sum(array.nbytes for array in rooms) + beside
    rows = 16 * plan.problem.extent.batch * plan.problem.extent.heads * plan.problem.extent.queries  # logsumexp
    return get_num_threads() * sum(array.nbytes for array in scratch(dtype, x.dim, x.value_dim, plan.depth)) + rows


def _room(plan: Plan) -> Scratch:
    """This thread's scratch: kept from its last call if that was of the same size."""
    needed = (plan.problem.compute_dtype, plan.inputs.dim, plan.inputs.value_dim, plan.depth)
    if getattr(_rooms, "size", None) != needed:
        _rooms.size, _rooms.scratch = needed, scratch(*needed)
    room: Scratch = _rooms.scratch
    return room


def _check_functions(room: Scratch) -> None:
    """Raise if the user's function did, where no error could come out."""
    if room.failed[0]:
        room.failed[0] = 0
        raise RuntimeError("a score or mask function raised an error while it ran: see the message above this one")


def _grain(plan: Plan, items: int) -> int:
    """Tiles in one share: many, as each share costs some 20 microseconds, but not so many that a thread ends late."""
    x = plan.inputs
    one = host().rows(plan.problem.compute_dtype) * max(1, x.keys) * (x.dim + x.value_dim + 8)
    if one * items <= GRAIN:
        return items
    return max(1, min(LONGEST // one, -(-items // (SHARES * get_num_threads()))))
