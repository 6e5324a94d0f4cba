"""One tile of scores, shared by every kernel: pick up the queries, score them with some keys, hide what is hidden.

``Inputs`` is the problem as places and numbers; ``Scratch`` what a thread works in, 0.2 MB at dim 64.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from clearhead.kernels.cache import part, step
from clearhead.kernels.microkernels import additive_tile, score_tile, turn_in
from clearhead.kernels.modify import add_tile, cap_tile, hide_outside, hide_tile, slope_tile, top_tile
from clearhead.kernels.target import host
from clearhead.kernels.vectors import LOG2E, address_of, call_at, pointer, widen
from clearhead.kernels.visible import HIDDEN, PARTLY, WHOLLY, run_program

BLOCK = 128  # keys in a tile: with 48 queries, scores take 24 KB and stay in the first-level cache


class Strided(NamedTuple):
    """An array (batch, a, b, c) of any strides, as the kernels see it: one type for every memory layout.

    Element (n, i, j, k) lies ``offset[n] + i*steps[0] + j*steps[1] + k*steps[2]`` elements from ``address``.
    ``like`` is an array of one element of its type: float32, float64, bool, int64, or 16 bits as uint16 (bfloat16) and
    int16 (float16). ``size`` 0: there is none.
    """

    like: NDArray[Any]
    address: int
    offset: NDArray[np.int64]
    steps: tuple[int, int, int]
    size: int


class Inputs(NamedTuple):
    """A problem in the kernels' terms. What is optional has size 0, a softcap of 0 is none.

    query, key, value : (batch, heads, tokens, dim). start, stop : (batch, heads, queries, 1), the first visible key and
    one past the last; (0, 0) sees nothing. program : the rest of the mask, see ``visible``.
    bias : (batch, heads, queries, keys). slopes, sinks : (heads,). vector : (dim,), of the additive score, whose
    projected queries and keys are query and key. function : the address of the user's score function.
    unit : of scores, in nats: ln 2 where log2(e) can be folded into the query, 1 where scores are bent or added to.
    scale : of the match. offset : of query 0 among the keys. micro : keys in a micro-tile. lanes : of a vector.
    """

    query: Strided
    key: Strided
    value: Strided
    start: Strided
    stop: Strided
    program: NDArray[np.int64]
    bias: Strided
    slopes: NDArray[np.float64]
    sinks: NDArray[np.float64]
    vector: NDArray[Any]
    function: int
    unit: float
    scale: float
    softcap: float
    offset: int
    heads: int
    group: int
    queries: int
    keys: int
    dim: int
    value_dim: int
    micro: int
    lanes: int


class Scratch(NamedTuple):
    """What one thread needs beside the inputs and outputs; tiles are (keys, rows), one query a column."""

    query: NDArray[Any]  # (dim, rows), scaled
    scores: NDArray[Any]  # (BLOCK, rows)
    extra: NDArray[Any]  # (BLOCK, rows): bias, or the weights' logarithms
    output: NDArray[Any]  # (value dim, rows)
    key: NDArray[Any]  # (BLOCK, dim), where keys cannot be read in place
    value: NDArray[Any]  # (BLOCK, value dim), likewise
    lanes: NDArray[Any]  # (11, rows): one number for each query, named below
    visible: NDArray[np.uint8]  # (depth, BLOCK, rows): the stack of a mask's program
    shown: NDArray[np.int64]  # (depth,): how much of each entry is visible
    bounds: NDArray[np.int32]  # (2, rows): start, stop
    spans: NDArray[np.int64]  # (2, rows): those of a leaf of the program, or ids
    queries: NDArray[np.int64]  # (rows,): which queries the lanes hold
    failed: NDArray[np.int64]  # (1,): not 0 once a function of the user's has raised an error


TOP, OLD_TOP, TOTAL, CHANGE, POSITION, HIGH, LOW, FACTOR, FOLDS = range(9)  # of Scratch.lanes; there are three folds


def scratch(dtype: DTypeLike, dim: int, value_dim: int, depth: int) -> Scratch:
    """Room for one thread computing in ``dtype``, with a stack of ``depth``; rows begin on cache lines."""
    target = host()
    rows, columns = target.rows(dtype), -(-value_dim // target.keys) * target.keys
    dim = max(dim, 1)

    def room(shape: tuple[int, ...], kind: DTypeLike = dtype) -> NDArray[Any]:
        size = math.prod(shape) * np.dtype(kind).itemsize
        raw = np.zeros(size + 64, np.uint8)
        start = -raw.ctypes.data % 64
        return raw[start : start + size].view(kind).reshape(shape)

    return Scratch(
        room((dim, rows)),
        room((BLOCK, rows)),
        room((BLOCK, rows)),
        room((columns, rows)),
        room((BLOCK, dim)),
        room((BLOCK, columns)),
        room((11, rows)),
        room((depth, BLOCK, rows), np.uint8),
        room((depth,), np.int64),
        room((2, rows), np.int32),
        room((2, rows), np.int64),
        room((rows,), np.int64),
        room((1,), np.int64),
    )


@step
def row_of(array, batch, first, second):
    """A pointer to element (batch, first, second, 0)."""
    offset = array.offset[batch] + first * array.steps[0] + second * array.steps[1]
    return address_of(array.address, offset, array.like)


@step
def in_place(array, stored_like):
    """Whether its rows can be read as they lie: elements side by side, in the type that is computed in."""
    return array.like.itemsize == stored_like.itemsize and array.steps[2] == 1


@step
def is_natural(x):
    """Whether scores are in natural units instead of units of log2."""
    return x.unit == 1.0


@step
def take_tile(x, w, tile):
    """w.queries = the queries of this tile; how many. Lanes beyond them repeat the last one, and give what it gives."""
    rows = len(w.queries)
    here = min(rows, x.queries - tile * rows)
    for r in range(rows):
        w.queries[r] = tile * rows + min(r, here - 1)
    return here


@step
def load_queries(x, w, batch, head):
    """Put w.queries into the lanes, transposed and scaled, with the keys each may see.

    Returns (low, high, full_low, full_high): keys outside low ... high-1 are hidden from all of them, keys in
    full_low ... full_high-1 from none.
    """
    rows, step, inner = len(w.queries), x.query.steps[1], x.query.steps[2]
    scale = 1.0 if x.vector.size else x.scale if is_natural(x) else x.scale * LOG2E
    factor = w.scores.dtype.type(scale)
    done = 0
    if inner == 1:
        done = x.dim // x.lanes * x.lanes
        place = row_of(x.query, batch, head, 0)
        turn_in(place, step, pointer(w.queries, 0), pointer(w.query, 0), done, factor)
    if x.dim == 0:
        fill(w.query, 0, 1, 0.0)
    low, high, full_low, full_high = x.keys, 0, 0, x.keys
    for r in range(rows):
        i = w.queries[r]
        row = row_of(x.query, batch, head, i)
        for d in range(done, x.dim):
            w.query[d, r] = widen(row[d * inner]) * factor
        start, stop = row_of(x.start, batch, head, i)[0], row_of(x.stop, batch, head, i)[0]
        w.bounds[0, r], w.bounds[1, r] = start, stop
        w.lanes[POSITION, r] = i + x.offset
        if stop > start:
            low, high = min(low, start), max(high, stop)
        full_low, full_high = max(full_low, start), min(full_high, stop)
    return low, high, full_low, full_high


@part
def score_keys(x, w, batch, head, here, first, keys, full_low, full_high):
    """Scores of the loaded queries with keys first ... first+keys-1, raising TOP; how much of the tile is visible.

    w.scores then holds -inf where a key is hidden; where the result is HIDDEN it holds nothing.
    """
    rows = len(w.queries)
    padded = (keys + x.micro - 1) // x.micro * x.micro
    marked = WHOLLY
    shown = WHOLLY if first >= full_low and first + padded <= full_high else PARTLY
    if x.program.size:
        marked = run_program(x.program, w, batch, head, here, first, keys)
        if marked == HIDDEN:
            return HIDDEN
        shown = min(shown, marked)
    direct = shown == WHOLLY and not is_natural(x)
    top, scores = pointer(w.lanes, TOP * rows), pointer(w.scores, 0)
    # Scores that will still change raise a top that nobody reads.
    raised = top if direct else pointer(w.lanes, CHANGE * rows)
    where, step = pointer(w.key, 0), w.key.shape[1]
    if in_place(x.key, w.scores) and x.dim > 0 and first + padded <= x.keys:
        offset = x.key.offset[batch] + head // x.group * x.key.steps[0] + first * x.key.steps[1]
        where, step = address_of(x.key.address, offset, w.scores), x.key.steps[1]
    else:
        copy_rows(x.key, batch, head // x.group, first, keys, x.dim, w.key)
        fill(w.key, 0 if x.dim == 0 else keys, padded, 0.0)
    if x.vector.size:
        additive_tile(where, step, pointer(w.query, 0), pointer(x.vector, 0), scores, x.dim, padded)
    else:
        score_tile(where, step, pointer(w.query, 0), scores, max(x.dim, 1), padded, raised)
    if direct:
        return WHOLLY
    if x.softcap > 0:
        cap_tile(scores, padded, w.scores.dtype.type(x.softcap))
    if x.bias.size:
        gather_bias(x, w, batch, head, first, keys)
        add_tile(scores, padded, pointer(w.extra, 0))
    if x.slopes.size:
        slope = w.scores.dtype.type(x.slopes[head])
        slope_tile(scores, padded, first, pointer(w.lanes, POSITION * rows), slope)
    if x.function and call_at(x.function, scores, rows, pointer(w.queries, 0), first, keys, batch, head) != 1:
        w.failed[0] = 1
    if shown == PARTLY:
        hide_outside(scores, padded, first, pointer(w.bounds, 0), pointer(w.bounds, rows))
        if x.program.size and marked == PARTLY:
            hide_tile(scores, keys, pointer(w.visible, 0))
    top_tile(scores, padded, top)
    return PARTLY if x.bias.size else shown


@step
def fill(array, first, last, value):
    """array[first:last] = value. (A loop: Numba's slice assignment brings error texts that take seconds to compile.)"""
    for i in range(first, last):
        for j in range(array.shape[1]):
            array[i, j] = value


@step
def copy_rows(array, batch, head, first, count, dim, out):
    """out[:count, :dim] = rows first ... first+count-1, as numbers to compute with."""
    step = array.steps[2]
    for j in range(count):
        row = row_of(array, batch, head, first + j)
        if step == 1:
            for i in range(dim):
                out[j, i] = widen(row[i])
        else:
            for i in range(dim):
                out[j, i] = widen(row[i * step])


@step
def copy_finite(array, batch, head, first, count, dim, out):
    """As copy_rows, with 0 for what is not finite."""
    step = array.steps[2]
    for j in range(count):
        row = row_of(array, batch, head, first + j)
        for i in range(dim):
            number = widen(row[i * step])
            out[j, i] = number if np.isfinite(number) else 0


@step
def gather_bias(x, w, batch, head, first, keys):
    """The bias's tile, turned likewise. A finite number too large for the type computed in stays finite."""
    step = x.bias.steps[2]
    limit = np.finfo(w.scores.dtype).max
    for r in range(len(w.queries)):
        row = row_of(x.bias, batch, head, w.queries[r])
        for j in range(keys):
            number = widen(row[(first + j) * step])
            if -np.inf < number < np.inf:
                number = min(max(number, -limit), limit)
            w.extra[j, r] = number
