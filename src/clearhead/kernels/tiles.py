"""One tile of scores, shared by every kernel: pick up the queries, score them with some keys, hide what is hidden.

``Arguments`` say what the problem is, ``Scratch`` what a thread works in, 0.43 MB at dim 64.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import DTypeLike, NDArray

from clearhead.kernels.addresses import address_of, call_at, holds, largest, number_for, pointer, widen
from clearhead.kernels.cache import step
from clearhead.kernels.microkernels import additive_tile, score_tile, turn_in
from clearhead.kernels.modify import add_tile, cap_tile, hide_outside, hide_tile, slope_tile, top_tile
from clearhead.kernels.packed import Packed
from clearhead.kernels.target import host
from clearhead.kernels.vectors import LOG2E, i64
from clearhead.kernels.visible import BLOCK, PARTLY, WHOLLY, run_program

# Tiles of queries that meet each block of keys together. Keys and values that exceed the second-level cache are then
# fetched from the third, and converted from 16 bits, an eighth as often: with 4,096 keys of dim 128, that was a fifth
# of the time.
TOGETHER = 8
INT64, FLOAT64 = np.int64(0), np.float64(0)


class Scratch(NamedTuple):
    """What one thread works in, as pointers; tiles are (keys, rows), one query a column."""

    query: Any  # (TOGETHER, dim, rows), scaled
    scores: Any  # (BLOCK, rows)
    extra: Any  # (BLOCK, rows): bias, or the weights' logarithms, or weights as pairs
    output: Any  # (TOGETHER, columns, rows): columns is value dim, made up to whole micro-tiles
    key: Any  # (BLOCK, dim), where keys cannot be read in place
    value: Any  # (BLOCK, columns), likewise
    lanes: Any  # (TOGETHER, LANES, rows): one number for each query, named below
    visible: Any  # (depth, BLOCK, rows), bytes: the stack of a mask's program
    shown: Any  # (depth,), int64: how much of each entry is visible
    bounds: Any  # (TOGETHER, 2, rows), int32: start, stop
    spans: Any  # (2, rows), int64: those of a leaf of the program, or ids
    queries: Any  # (TOGETHER, rows), int64: which queries the lanes hold
    reach: Any  # (TOGETHER, REACH), int64, named below
    odd: Any  # (BLOCK,), bytes: which keys a matrix unit cannot do
    failed: Any  # (1,), int64: not 0 once a function of the user's has raised an error


_OWN = ("query", "output", "lanes", "bounds", "queries", "reach")  # of each tile; the rest serves them in turn
_KINDS = {"visible": types.uint8, "shown": types.int64, "bounds": types.int32, "spans": types.int64,
          "queries": types.int64, "reach": types.int64, "odd": types.uint8, "failed": types.int64}  # fmt: skip
TOP, OLD_TOP, TOTAL, CHANGE, POSITION, HIGH, LOW, FACTOR, FOLDS = range(9)  # of Scratch.lanes; there are three folds
LANES = FOLDS + 3
# Of Scratch.reach. Keys outside low ... high-1 are hidden from all of a tile's queries, keys in full_low ...
# full_high-1 from none; here is how many queries the tile has.
REACH_LOW, REACH_HIGH, FULL_LOW, FULL_HIGH, HERE = range(5)
REACH = HERE + 1


@dataclass(frozen=True)
class Workspace:
    """One thread's scratch: the addresses of its parts, in the order of ``Scratch``, as each of TOGETHER tiles sees
    them, and what they are in. ``failed`` is an array on the place of that name.
    """

    places: NDArray[np.int64]
    failed: NDArray[np.int64]
    buffer: NDArray[np.uint8]


def workspace(dtype: DTypeLike, dim: int, value_dim: int, depth: int) -> Workspace:
    """Room for one thread computing in ``dtype``, with a stack of ``depth``; each part begins on a cache line."""
    target, kind = host(), np.dtype(dtype)
    rows, columns, dim = target.rows(kind), -(-value_dim // target.keys) * target.keys, max(dim, 1)
    parts = {
        "query": TOGETHER * dim * rows * kind.itemsize,
        "scores": BLOCK * rows * kind.itemsize,
        "extra": BLOCK * rows * kind.itemsize,
        "output": TOGETHER * columns * rows * kind.itemsize,
        "key": BLOCK * dim * kind.itemsize,
        "value": BLOCK * columns * kind.itemsize,
        "lanes": TOGETHER * LANES * rows * kind.itemsize,
        "visible": depth * BLOCK * rows,
        "shown": depth * 8,
        "bounds": TOGETHER * 2 * rows * 4,
        "spans": 2 * rows * 8,
        "queries": TOGETHER * rows * 8,
        "reach": TOGETHER * REACH * 8,
        "odd": BLOCK,
        "failed": 8,
    }
    places, buffer = lay_out([parts[name] for name in Scratch._fields])
    apart = [parts[name] // TOGETHER if name in _OWN else 0 for name in Scratch._fields]
    failed = buffer[places[-1] - buffer.ctypes.data :][:8].view(np.int64)
    return Workspace((places + np.arange(TOGETHER)[:, None] * np.array(apart)).reshape(-1), failed, buffer)


def lay_out(sizes: Iterable[int]) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """(where parts of so many bytes lie, the memory that they lie in): zeros; each begins on a cache line."""
    sizes = tuple(sizes)
    buffer = np.zeros(sum(size + 63 for size in sizes) + 64, np.uint8)
    places, place = [], buffer.ctypes.data
    for size in sizes:
        place = -(-place // 64) * 64
        places.append(place)
        place += size
    return np.array(places, np.int64), buffer


@intrinsic
def room(typingctx, places, like):
    """A workspace's places as pointers, by name: its first tile's room. ``like`` : of the type computed in."""
    kinds = {name: types.CPointer(_KINDS.get(name, like)) for name in Scratch._fields}
    whole = Packed(kinds.items())

    def generate(context, b, signature, arguments):
        return context.make_array(signature.args[0])(context, b, arguments[0]).data

    return whole(places, like), generate


@intrinsic
def tile_room(typingctx, w, t):
    """The room as tile t of those that work together sees it."""
    size = w.size
    return w(w, types.int64), lambda context, b, signature, arguments: b.gep(
        arguments[0], [b.mul(arguments[1], ir.Constant(i64, size))]
    )


@step
def columns(x):
    """The value's dim, made up to whole micro-tiles."""
    return (x.value_dim + x.micro - 1) // x.micro * x.micro


@step
def place_of(array, batch, first, second):
    """How many elements from the array's address (batch, first, second, 0) lies."""
    return address_of(array.offsets, batch, INT64)[0] + first * array.steps[0] + second * array.steps[1]


@step
def row_of(array, batch, first, second):
    """A pointer to element (batch, first, second, 0)."""
    return address_of(array.address, place_of(array, batch, first, second), array.like)


@step
def in_place(array, computed):
    """Whether its rows can be read as they lie: elements side by side, in the type that is computed in."""
    return holds(array.like, computed) and array.steps[2] == 1


@step
def is_natural(x):
    """Whether scores are in natural units instead of units of log2."""
    return x.unit == 1.0


@step
def whole_micro(x, keys):
    """This many keys, made up to whole micro-tiles."""
    return (keys + x.micro - 1) // x.micro * x.micro


@step
def take_tile(x, w, tile):
    """w.queries = the queries of this tile; how many. Lanes beyond them repeat the last one, and give what it gives."""
    here = min(x.rows, x.queries - tile * x.rows)
    for r in range(x.rows):
        w.queries[r] = tile * x.rows + min(r, here - 1)
    return here


@step
def load_queries(x, w, batch, head):
    """Put w.queries into the lanes, transposed and scaled."""
    step, inner = x.query.steps[1], x.query.steps[2]
    scale = 1.0 if x.vector else x.scale if is_natural(x) else x.scale * LOG2E
    factor = number_for(w.query, scale)
    done = 0
    if inner == 1:
        done = x.dim // x.lanes * x.lanes
        place = row_of(x.query, batch, head, 0)
        turn_in(place, step, w.queries, w.query, done, factor)
    if x.dim == 0:
        fill(w.query, x.rows, 0.0)
    for r in range(x.rows):
        row = row_of(x.query, batch, head, w.queries[r])
        for d in range(done, x.dim):
            w.query[d * x.rows + r] = widen(row[d * inner]) * factor


@step
def find_reach(x, w, batch, head, here):
    """Which keys the loaded queries see: w.bounds of each, w.reach of all; and where each stands."""
    low, high, full_low, full_high = x.keys, 0, 0, x.keys
    for r in range(x.rows):
        i = w.queries[r]
        start, stop = row_of(x.start, batch, head, i)[0], row_of(x.stop, batch, head, i)[0]
        w.bounds[r], w.bounds[x.rows + r] = start, stop
        w.lanes[POSITION * x.rows + r] = i + x.offset
        if stop > start:
            low, high = min(low, start), max(high, stop)
        full_low, full_high = max(full_low, start), min(full_high, stop)
    w.reach[REACH_LOW], w.reach[REACH_HIGH] = low, high
    w.reach[FULL_LOW], w.reach[FULL_HIGH] = full_low, full_high
    w.reach[HERE] = here


@step
def part_seen(x, w, block, keys):
    """(begin, how many) of a block's keys, counted from its first, that any of the tile's queries may see; begin is at
    a whole micro-tile."""
    begin = max(0, w.reach[REACH_LOW] - block) // x.micro * x.micro
    return begin, min(keys, w.reach[REACH_HIGH] - block) - begin


@step
def look(x, w, batch, head, first, keys):
    """How much of this tile is visible, keys first ... first+keys-1: (by its runs of keys, by the mask's program)."""
    padded = whole_micro(x, keys)
    shown = WHOLLY if first >= w.reach[FULL_LOW] and first + padded <= w.reach[FULL_HIGH] else PARTLY
    marked = WHOLLY
    if x.program:
        marked = run_program(x, w, batch, head, first, keys)
    return shown, marked


@step
def keys_of(x, w, batch, head, first, keys):
    """(pointer, step) of a block of keys: where they lie, if they can be read there, else a copy; whole micro-tiles."""
    padded = whole_micro(x, keys)
    if in_place(x.key, w.key) and x.dim > 0 and first + padded <= x.keys:
        return address_of(x.key.address, place_of(x.key, batch, head // x.group, first), w.key), x.key.steps[1]
    width = max(x.dim, 1)
    copy_rows(x.key, batch, head // x.group, first, keys, x.dim, w.key, width)
    begin = 0 if x.dim == 0 else keys
    fill(pointer(w.key, begin * width), (padded - begin) * width, 0.0)
    return w.key, width


@step
def score_keys(x, w, batch, head, first, keys, key, step, value, value_step, shown, marked, kept):
    """Scores of the loaded queries with these keys, raising TOP, where ``look`` has been before.

    w.scores then holds -inf where a key is hidden. Returns whether all are visible: WHOLLY or PARTLY. ``kept`` : None,
    or where to leave what scores were on the way, see ``bend_scores``.
    """
    padded, scores, raised = whole_micro(x, keys), w.scores, raised_by(x, w, shown, marked)
    if x.vector:
        additive_tile(key, step, w.query, address_of(x.vector, 0, w.query), scores, x.dim, padded)
    else:
        score_tile(key, step, value, value_step, w.query, scores, max(x.dim, 1), padded, raised)
    return bend_scores(x, w, batch, head, first, keys, shown, marked, kept)


@step
def raised_by(x, w, shown, marked):
    """Which lanes a match raises: TOP, or, where scores will still change, such as nobody reads."""
    direct = min(shown, marked) == WHOLLY and not is_natural(x)
    return pointer(w.lanes, (TOP if direct else CHANGE) * x.rows)


@step
def bend_scores(x, w, batch, head, first, keys, shown, marked, kept):
    """What follows a match: all that is done to scores, and what is hidden; then TOP, if it was not raised yet.

    ``kept`` : None, or tiles ``scaled`` and ``bent``, for scores before and after the softcap, and ``added``, before
    the user's function.
    """
    padded, scores = whole_micro(x, keys), w.scores
    shown = min(shown, marked)
    if shown == WHOLLY and not is_natural(x):
        return WHOLLY
    if x.softcap > 0:
        if kept is not None:
            copy(scores, padded * x.rows, kept.scaled)
        cap_tile(scores, padded, number_for(scores, x.softcap))
        if kept is not None:
            copy(scores, padded * x.rows, kept.bent)
    if x.bias.size:
        gather_bias(x, w, batch, head, first, keys)
        add_tile(scores, padded, w.extra)
    if x.slopes:
        slope = number_for(scores, address_of(x.slopes, head, FLOAT64)[0])
        slope_tile(scores, padded, first, pointer(w.lanes, POSITION * x.rows), slope)
    if kept is not None and x.function:
        copy(scores, padded * x.rows, kept.added)
    if x.function and call_at(x.function, scores, x.rows, w.queries, first, keys, batch, head) != 1:
        w.failed[0] = 1
    if shown == PARTLY:
        hide_outside(scores, padded, first, w.bounds, pointer(w.bounds, x.rows))
        if marked == PARTLY:
            hide_tile(scores, keys, w.visible)
    top_tile(scores, padded, pointer(w.lanes, TOP * x.rows))
    return PARTLY if x.bias.size or x.function else shown  # they may hide a key by -inf


@step
def copy(place, count, to):
    """to[i] = place[i] for count numbers"""
    for i in range(count):
        to[i] = place[i]


@step
def fill(place, count, value):
    """count numbers from here on = value"""
    for i in range(count):
        place[i] = value


@step
def copy_rows(array, batch, head, first, count, dim, out, width):
    """out[j, :dim] = rows first ... first+count-1, as numbers to compute with; rows of out are ``width`` apart."""
    step = array.steps[2]
    for j in range(count):
        row, to = row_of(array, batch, head, first + j), pointer(out, j * width)
        if step == 1:
            for i in range(dim):
                to[i] = widen(row[i])
        else:
            for i in range(dim):
                to[i] = widen(row[i * step])


@step
def copy_finite(array, batch, head, first, count, dim, out, width):
    """As copy_rows, with 0 for what is not finite."""
    step = array.steps[2]
    for j in range(count):
        row, to = row_of(array, batch, head, first + j), pointer(out, j * width)
        for i in range(dim):
            number = widen(row[i * step])
            to[i] = number if math.isfinite(number) else 0


@step
def gather_bias(x, w, batch, head, first, keys):
    """The bias's tile, turned likewise. A finite number too large for the type computed in stays finite."""
    step = x.bias.steps[2]
    limit = largest(w.extra)
    for r in range(x.rows):
        row = row_of(x.bias, batch, head, w.queries[r])
        for j in range(keys):
            number = widen(row[(first + j) * step])
            if -np.inf < number < np.inf:
                number = min(max(number, -limit), limit)
            w.extra[j * x.rows + r] = number
