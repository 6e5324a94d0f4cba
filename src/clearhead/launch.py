"""From a plan to its results: which kernel runs on what, shared out over threads."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clearhead.kernels import amx, decode, visible
from clearhead.kernels import weights as weight_kernels
from clearhead.kernels.arguments import ADDRESS, MICRO, Arguments, Likes, Strided, likes, pack
from clearhead.kernels.forward import attend
from clearhead.kernels.forward_amx import attend_amx
from clearhead.kernels.target import converts_float16, host
from clearhead.kernels.threads import get_num_threads, share
from clearhead.kernels.tiles import Workspace, lay_out, workspace
from clearhead.plan import Plan, address, readable, strided
from clearhead.plan import plan as plan_for

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]
# (tokens in a page, where the pages of keys lie, where those of values lie), both (batch, pages) in elements from the
# first: see ``kernels.decode.Pages``.
Paging = tuple[int, Ints, Ints]
_PLACES = tuple(ADDRESS[name] for name in ("query", "key", "value"))
_OUTPUT, _LOGSUMEXP = ADDRESS["output"], ADDRESS["logsumexp"]
# In multiply-adds. What takes under 60 microseconds is not shared out; no share takes longer than some 15 milliseconds,
# after which Ctrl-C is heard; and each thread gets about so many shares.
GRAIN, LONGEST, SHARES = 4_000_000, 1_000_000_000, 8
STREAMED = 1 << 20  # numbers of keys and values that one thread reads in some 100 microseconds, from a cache


def run(plan: Plan) -> tuple[Floats, Floats]:
    """Output (batch, heads, queries, value dim) in ``stored_dtype``, and logsumexp (batch, heads, queries, 2).

    The latter in two parts, see ``kernels.forward``.
    """
    return ready(plan if lies_ready(plan) else _laid_out(plan)).run()


def stored_dtype(plan: Plan) -> np.dtype[Any]:
    """That of the output: the problem's, or the one computed in, where no instruction rounds to float16."""
    keep = plan.problem.dtype != np.float16 or converts_float16()
    return plan.problem.dtype if keep else plan.problem.compute_dtype


def ready(plan: Plan) -> Pass:
    """The pass that does this."""
    return Stream(plan) if can_stream(plan) else Forward(plan)


def lies_ready(plan: Plan) -> bool:
    """Whether the arrays can be read where they lie: those that vectors or matrix units load need whole rows."""
    x = plan.arguments
    few, steps = can_stream(plan), (x.query.steps[2], x.key.steps[2], x.value.steps[2])
    return all(step == 1 for step in steps[few:]) if few or by_amx(plan) else True


def _laid_out(plan: Plan) -> Plan:
    """The same on copies whose rows lie in one piece."""
    problem = plan.problem
    assert problem.value is not None
    query, key, value = map(np.ascontiguousarray, (problem.query, problem.key, problem.value))
    return plan_for(replace(problem, query=query, key=key, value=value))


def _address_of_new(array: Any) -> int:
    """``address`` of an array that was just made, in a quarter of its time: a small call's comes down by a tenth."""
    if array.itemsize == 2 or array.size == 0:  # no buffer is given of bfloat16, nor of nothing
        return address(array)
    return ctypes.addressof(ctypes.c_char.from_buffer(array))


class Pass:
    """A plan, ready to be computed: on the plan's arrays, or others that lie in memory like them."""

    def __init__(self, plan: Plan) -> None:
        extent, x = plan.problem.extent, plan.arguments
        self.plan, self._dtype, self._stored = plan, plan.problem.compute_dtype, stored_dtype(plan)
        self._shape = (extent.batch, extent.heads, extent.queries, x.value_dim)
        (output, kept), (logs, also) = (strided(readable(array)) for array in self._results())
        x = x._replace(output=output, logsumexp=logs)
        self._numbers, self._likes, self._kept = pack(x), likes(x, self._dtype), (kept, also)

    def run(self, *arrays: NDArray[Any]) -> tuple[Floats, Floats]:
        """(output, logsumexp) as of ``run``; arrays are query, key and value instead of the plan's."""
        return self.at(*map(address, arrays))

    def at(self, *places: int, bias: int = 0, allowed: int = 0) -> tuple[Floats, Floats]:
        """The same; places are the addresses of query, key and value.

        bias, allowed : the addresses of the score's bias and of the array that is all of the plan's program, if others.
        """
        numbers = self._numbers.copy()
        for at, place in zip(_PLACES, places, strict=False):
            numbers[at] = place
        if bias:
            numbers[ADDRESS["bias"]] = bias
        if allowed:
            program = self.plan.program.copy()
            program[0, visible.ADDRESS] = allowed
            numbers[ADDRESS["program"]] = address(program)
        output, logsumexp = self._results()
        numbers[_OUTPUT], numbers[_LOGSUMEXP] = _address_of_new(output), _address_of_new(logsumexp)
        self._compute(numbers, output, logsumexp)
        return output, logsumexp

    def _results(self) -> tuple[Floats, Floats]:
        return np.empty(self._shape, self._stored), np.empty((*self._shape[:-1], 2))

    def _compute(self, numbers: Ints, output: Floats, logsumexp: Floats) -> None:
        """Fill both; ``numbers`` are the packed arguments, with the addresses of all arrays."""
        raise NotImplementedError


class Forward(Pass):
    """Tile by tile: see ``kernels.forward`` and ``kernels.forward_amx``."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._tiles, self._amx = _Tiles(plan), by_amx(plan)

    def _compute(self, numbers: Ints, output: Floats, logsumexp: Floats) -> None:
        kinds = self._likes
        if self._amx:
            self._tiles.run_amx(numbers, kinds, output, logsumexp)
        else:
            self._tiles.run(lambda places, first, last: attend(numbers, kinds, places, first, last))


class Stream(Pass):
    """Few queries, where ``can_stream``: keys and values are read once for all rows of a group of heads.

    ``paging`` says where they lie, if not one after the other. See ``kernels.decode``.
    """

    def __init__(self, plan: Plan, paging: Paging | None = None) -> None:
        super().__init__(plan)
        x, batch = plan.arguments, plan.problem.extent.batch
        self._chunks = chunks = -(-x.keys // decode.CHUNK)
        self._sequences = batch * (x.heads // x.group)
        rows = 1 << (x.queries * x.group - 1).bit_length()
        self._room, self._partial = decode.room_size(x.dim, x.value_dim), rows * (x.value_dim + 2)
        self._longest = max(1, LONGEST // (rows * decode.CHUNK * (x.dim + x.value_dim)))
        self._short = self._sequences * x.keys * (x.dim + x.value_dim) <= STREAMED
        self._paging = paging or (decode.CHUNK, _pages(x.key, batch, chunks), _pages(x.value, batch, chunks))

    def _compute(self, numbers: Ints, output: Floats, logsumexp: Floats) -> None:
        items = self._sequences * self._chunks
        partial, kinds = np.empty(items * self._partial, self._dtype), self._likes

        def some(first: int, last: int) -> None:
            room = np.empty(self._room, self._dtype)
            decode.decode_chunks(numbers, kinds, *self._paging, room, first, last, self._chunks, partial)

        grain = items if self._short else items // (4 * get_num_threads())
        share(some, items, max(1, min(self._longest, grain)))
        decode.merge_chunks(numbers, kinds, self._chunks, self._sequences, partial)


def by_amx(plan: Plan) -> bool:
    """Whether the matrix unit does this: bfloat16 throughout, in rows that are whole tiles long.

    As in ``can_stream``, how they lie in memory has no say.
    """
    x, bfloat16 = plan.arguments, np.uint16
    return (
        all(isinstance(array.like, bfloat16) for array in (x.query, x.key, x.value))
        and not x.vector
        and x.dim % amx.DEPTH == 0 == x.value_dim % amx.DEPTH
        and 0 not in (x.dim, x.value_dim)
        and amx.available()
    )


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


def _pages(array: Strided, batch: int, chunks: int) -> NDArray[np.int64]:
    """(batch, chunks): where each chunk of each batch entry begins, in elements from the first."""
    offsets = np.ctypeslib.as_array((ctypes.c_int64 * batch).from_address(array.offsets))
    return np.asarray(offsets[:, None] + np.arange(chunks) * (decode.CHUNK * array.steps[1]))


def each(plan: Plan, kernel: Callable[[Ints, int, int], None], items: int, grain: int) -> None:
    """kernel(places, first, last) over all items, ``places`` those of a workspace of the thread's, on all threads."""
    x = plan.arguments
    needed = (plan.problem.compute_dtype, x.dim, x.value_dim, plan.depth)

    def some(first: int, last: int) -> None:
        room = room_for(needed)
        kernel(room.places, first, last)
        check_functions(room)

    share(some, items, grain)


def tiles_in_a_share(plan: Plan) -> int:
    """How many tiles of queries of a head a thread should do at a time, where their share of the work can be chosen."""
    extent = plan.problem.extent
    return _grain(
        plan.arguments, extent.batch * extent.heads * -(-extent.queries // host().rows(plan.problem.compute_dtype))
    )


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
        room = room_for(needed)
        weight_kernels.weigh(numbers, kinds, room.places, batch, head, queries, first, last, low, high)
        check_functions(room)

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
            room = room_for(self._room)
            kernel(room.places, first, last)
            check_functions(room)

        share(tiles, self._count, self._grain())

    def run_amx(self, numbers: Ints, kinds: Likes, output: Floats, logsumexp: Floats) -> None:
        """The forward pass on the matrix unit; rows that it must leave aside by ``attend``."""
        own, told, strange = numbers.copy(), amx.configuration(), np.zeros(output.shape[:-1], np.uint8)
        own[MICRO], flat = amx.DEPTH, strange.reshape(-1)
        self.run(lambda places, first, last: attend_amx(own, kinds, places, told, flat, first, last))
        left = np.flatnonzero(strange)
        if len(left) == 0:
            return
        queries, rows = output.shape[2], host().rows(np.float32)
        tiles = -(-queries // rows)
        items = np.unique(left // queries * tiles + left % queries // rows)

        def again(first: int, last: int) -> None:
            for item in items[first:last].tolist():
                at = item // tiles, slice(item % tiles * rows, (item % tiles + 1) * rows)
                right = strange.reshape(-1, queries)[at] == 0
                parts = [array.reshape(-1, queries, array.shape[-1])[at] for array in (output, logsumexp)]
                kept = [part[right] for part in parts]
                attend(numbers, kinds, room_for(self._room).places, item, item + 1)
                for part, rows_kept in zip(parts, kept, strict=True):
                    part[right] = rows_kept

        share(again, len(items))


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


def room_for(needed: tuple[np.dtype[Any], int, int, int]) -> Workspace:
    """This thread's workspace: kept from its last call if that needed the same."""
    if getattr(_rooms, "needed", None) != needed:
        _rooms.needed, _rooms.workspace = needed, workspace(*needed)
    room: Workspace = _rooms.workspace
    return room


def desk_for(sizes: tuple[int, ...], dims: tuple[int, int]) -> NDArray[np.int64]:
    """This thread's desk, the places of parts of so many bytes: kept from its last call if that had the same, and the
    same dims, so that what fills rows up is still 0."""
    if getattr(_rooms, "kind", None) != (sizes, dims):
        _rooms.kind, _rooms.desk = (sizes, dims), lay_out(sizes)
    places: NDArray[np.int64] = _rooms.desk[0]
    return places


def check_functions(room: Workspace) -> None:
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
