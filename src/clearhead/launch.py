"""From a plan to its results: which kernel runs on what, shared out over threads."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clearhead.kernels import decode
from clearhead.kernels import measure as measure_kernels
from clearhead.kernels import weights as weight_kernels
from clearhead.kernels.arguments import ADDRESS, Arguments, Strided, likes, pack
from clearhead.kernels.forward import attend
from clearhead.kernels.target import host
from clearhead.kernels.threads import get_num_threads, share
from clearhead.kernels.tiles import Workspace, workspace
from clearhead.plan import Plan, address, readable, strided

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]
# (tokens in a page, where the pages of keys lie, where those of values lie), both (batch, pages) in elements from the
# first: see ``kernels.decode.Pages``.
Paging = tuple[int, Ints, Ints]
# In multiply-adds. What takes under 60 microseconds is not shared out; no share takes longer than some 15 milliseconds,
# after which Ctrl-C is heard; and each thread gets about so many shares.
_PLACES = tuple(ADDRESS[name] for name in ("query", "key", "value"))
GRAIN, LONGEST, SHARES = 4_000_000, 1_000_000_000, 8


def forward(plan: Plan) -> tuple[Floats, Floats]:
    """Output (batch, heads, queries, value dim) in the compute dtype, and logsumexp (batch, heads, queries, 2).

    The latter in two parts, see ``kernels.forward``.
    """
    return Forward(plan).run()


class Forward:
    """The forward pass of a plan, ready to run: on the plan's arrays, or others that lie in memory like them."""

    def __init__(self, plan: Plan) -> None:
        extent, x = plan.problem.extent, plan.arguments
        self.plan, self._dtype = plan, plan.problem.compute_dtype
        self._shape = (extent.batch, extent.heads, extent.queries, x.value_dim)
        (output, kept), (logs, also) = (strided(array) for array in self._results())
        x = x._replace(output=output, logsumexp=logs)
        self._numbers, self._likes, self._kept = pack(x), likes(x, self._dtype), (kept, also)
        self._tiles = _Tiles(plan)

    def run(self, *arrays: NDArray[Any]) -> tuple[Floats, Floats]:
        """(output, logsumexp) as ``forward``; arrays are query, key and value instead of the plan's."""
        numbers, kinds = self._numbers.copy(), self._likes
        for place, array in zip(_PLACES, arrays, strict=False):
            numbers[place] = address(array)
        output, logsumexp = self._results()
        numbers[ADDRESS["output"]], numbers[ADDRESS["logsumexp"]] = address(output), address(logsumexp)
        self._tiles.run(lambda places, first, last: attend(numbers, kinds, places, first, last))
        return output, logsumexp

    def _results(self) -> tuple[Floats, Floats]:
        return np.empty(self._shape, self._dtype), np.empty((*self._shape[:-1], 2))


def can_stream(plan: Plan) -> bool:
    """Whether the few-queries kernel can do this: plain scores, runs of keys, dims of whole vectors.

    The memory layout has no say: how a problem is stored must not change a bit of its result.
    """
    x, lanes = plan.arguments, host().lanes(plan.problem.compute_dtype)
    plain = not (x.program or x.bias.size or x.slopes or x.vector or x.function or x.softcap)
    return (
        plain
        and x.dim % lanes == 0 == x.value_dim % lanes
        and 0 < x.queries * x.group <= decode.ROWS
        and 0 not in (x.dim, x.value_dim, x.keys)
    )


def stream(plan: Plan, paging: Paging | None = None) -> tuple[Floats, Floats]:
    """As ``forward``, where ``can_stream``: keys and values are read once for all rows of a group of heads.

    ``paging`` says where they lie, if not one after the other.
    """
    extent, x, dtype = plan.problem.extent, plan.arguments, plan.problem.compute_dtype
    if x.key.steps[2] != 1 or x.value.steps[2] != 1:
        # Rows whose numbers do not lie side by side cannot be read by vectors: this once, a copy.
        assert plan.problem.value is not None
        copies = [np.ascontiguousarray(readable(array)) for array in (plan.problem.key, plan.problem.value)]
        (key, _key_offsets), (value, _value_offsets) = map(strided, copies)
        x = x._replace(key=key, value=value)
    chunks = -(-x.keys // decode.CHUNK)
    sequences = extent.batch * (x.heads // x.group)
    items = sequences * chunks
    rows = 1 << (x.queries * x.group - 1).bit_length()
    partial = np.empty(items * rows * (x.value_dim + 2), dtype)
    if paging is None:
        paging = decode.CHUNK, _chunks(x.key, extent.batch, chunks), _chunks(x.value, extent.batch, chunks)
    size, key_pages, value_pages = paging
    output = np.empty((extent.batch, extent.heads, extent.queries, x.value_dim), dtype)
    logsumexp = np.empty((*output.shape[:-1], 2))
    (out, _out_offsets), (logs, _log_offsets) = strided(output), strided(logsumexp)
    x = x._replace(output=out, logsumexp=logs)
    numbers, kinds = pack(x), likes(x, dtype)

    def some(first: int, last: int) -> None:
        room = np.empty(decode.room_size(x.dim, x.value_dim), dtype)
        decode.decode_chunks(numbers, kinds, size, key_pages, value_pages, room, first, last, chunks, partial)

    longest = max(1, LONGEST // (rows * decode.CHUNK * (x.dim + x.value_dim)))
    share(some, items, max(1, min(longest, items // (4 * get_num_threads()))))
    decode.merge_chunks(numbers, kinds, chunks, sequences, partial)
    return output, logsumexp


def _chunks(array: Strided, batch: int, chunks: int) -> NDArray[np.int64]:
    """(batch, chunks): where each chunk of each batch entry begins, in elements from the first."""
    offsets = np.ctypeslib.as_array((ctypes.c_int64 * batch).from_address(array.offsets))
    return np.asarray(offsets[:, None] + np.arange(chunks) * (decode.CHUNK * array.steps[1]))


def measure(plan: Plan, logsumexp: Floats, sink: int, aligned: int) -> Floats:
    """All row measures: (batch, heads, queries, measures) float64, in the order of ``kernels.measure``."""
    extent = plan.problem.extent
    out = np.zeros((extent.batch, extent.heads, extent.queries, measure_kernels.MEASURES))
    (logs, _kept), (into, _also) = strided(logsumexp), strided(out)
    x = plan.arguments._replace(output=into, logsumexp=logs)
    numbers, kinds = pack(x), likes(x, plan.problem.compute_dtype)

    def tiles(places: Ints, first: int, last: int) -> None:
        measure_kernels.measure_rows(numbers, kinds, places, first, last, sink, aligned)

    _Tiles(plan).run(tiles)
    return out


def weigh(plan: Plan, batch: int, head: int, queries: NDArray[np.int64], low: int, high: int,
          logsumexp: Floats) -> Floats:  # fmt: skip
    """Weights of these queries of one head on keys low ... high-1: (len(queries), high - low)."""
    out = np.zeros((len(queries), high - low), plan.problem.compute_dtype)
    if out.size == 0:
        return out
    queries = np.ascontiguousarray(queries, np.int64)
    (logs, _kept), (into, _also) = strided(logsumexp), strided(out[None])
    x = plan.arguments._replace(output=into, logsumexp=logs)
    numbers, kinds = pack(x), likes(x, plan.problem.compute_dtype)
    needed = (plan.problem.compute_dtype, x.dim, x.value_dim, plan.depth)

    def rows(first: int, last: int) -> None:
        room = _room(needed)
        weight_kernels.weigh(numbers, kinds, room.places, batch, head, queries, first, last, low, high)
        _check_functions(room)

    tile = host().rows(plan.problem.compute_dtype)
    share(rows, len(queries), tile * max(1, GRAIN // (tile * (high - low) * (plan.arguments.dim + 8))))
    return out


class _Tiles:
    """All tiles of queries of a plan, to be gone through on all threads."""

    def __init__(self, plan: Plan) -> None:
        extent, dtype = plan.problem.extent, plan.problem.compute_dtype
        self._count = extent.batch * extent.heads * -(-extent.queries // host().rows(dtype))
        self._room = (dtype, plan.arguments.dim, plan.arguments.value_dim, plan.depth)
        self._grain = partial(_grain, plan.arguments, self._count)

    def run(self, kernel: Callable[[Ints, int, int], None]) -> None:
        """kernel(places, first, last) over all of them, ``places`` the thread's workspace's."""

        def tiles(first: int, last: int) -> None:
            room = _room(self._room)
            kernel(room.places, first, last)
            _check_functions(room)

        share(tiles, self._count, self._grain())


_rooms = threading.local()


def scratch_bytes(plan: Plan) -> int:
    """What a call needs beside its inputs and outputs, on all threads."""
    x, dtype = plan.arguments, plan.problem.compute_dtype
    if can_stream(plan):
        items = plan.problem.extent.batch * (x.heads // x.group) * -(-x.keys // decode.CHUNK)
        beside = items * (1 << (x.queries * x.group - 1).bit_length()) * (x.value_dim + 2) * dtype.itemsize
        return get_num_threads() * decode.room_size(x.dim, x.value_dim) * dtype.itemsize + beside
    rows = 16 * plan.problem.extent.batch * plan.problem.extent.heads * plan.problem.extent.queries  # logsumexp
    return get_num_threads() * workspace(dtype, x.dim, x.value_dim, plan.depth).buffer.nbytes + rows


def _room(needed: tuple[np.dtype[Any], int, int, int]) -> Workspace:
    """This thread's workspace: kept from its last call if that needed the same."""
    if getattr(_rooms, "needed", None) != needed:
        _rooms.needed, _rooms.workspace = needed, workspace(*needed)
    room: Workspace = _rooms.workspace
    return room


def _check_functions(room: Workspace) -> None:
    """Raise if the user's function did, where no error could come out."""
    if room.failed[0]:
        room.failed[0] = 0
        raise RuntimeError("a score or mask function raised an error while it ran: see the message above this one")


def _grain(x: Arguments, items: int) -> int:
    """Tiles in one share: many, as each share costs some 20 microseconds, but not so many that a thread ends late."""
    one = x.rows * max(1, x.keys) * (x.dim + x.value_dim + 8)
    if one * items <= GRAIN:
        return max(1, items)
    return max(1, min(LONGEST // one, -(-items // (SHARES * get_num_threads()))))
