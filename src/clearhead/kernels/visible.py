"""Who may look at whom, tile by tile: a mask's program, run over one tile of cells.

A mask that is not one run of keys per row comes as a program for a stack: leaves push what the tile's queries may
see, NOT, BOTH and EITHER combine what is there. An entry is HIDDEN or WHOLLY where that is known without
looking at cells, else PARTLY, with a byte for each cell; so a union of windows still skips what neither sees.

A program is a table of int64, one step a row: code and, for leaves, up to two arrays as address and steps (the
columns of ``Leaf``); each array's offsets by batch entry lie at another address.
"""

from typing import NamedTuple

import numpy as np

from clearhead.kernels.addresses import address_of, call_at, pointer
from clearhead.kernels.cache import step
from clearhead.kernels.modify import some_and_all, turn_bytes

BLOCK = 128  # keys in a tile: with 64 queries, scores take 32 KB and stay in the first-level cache
HIDDEN, PARTLY, WHOLLY = 0, 1, 2
INTERVALS, ARRAY, EQUAL, FUNCTION, NOT, BOTH, EITHER = range(7)
_INT64, _UINT8 = np.int64(0), np.uint8(0)


class Leaf(NamedTuple):
    """The columns of a program. INTERVALS: start and stop by (head, query). ARRAY: booleans by (head, query, key).
    EQUAL: ids of queries and of keys, by (head, token). FUNCTION: the first address is that of the compiled function.
    """

    code: int
    address: int = 0
    offsets: int = 0
    head: int = 0
    token: int = 0
    key: int = 0
    other_address: int = 0
    other_offsets: int = 0
    other_head: int = 0
    other_token: int = 0


CODE, ADDRESS, OFFSETS, HEAD, TOKEN, KEY, OTHER_ADDRESS, OTHER_OFFSETS, OTHER_HEAD, OTHER_TOKEN = range(10)
_COLUMNS = 10


@step
def run_program(x, w, batch, head, first, keys):
    """How much of the tile is visible; where PARTLY, the first entry of w.visible says which cells."""
    depth, size = 0, BLOCK * x.rows  # of an entry
    for s in range(x.steps):
        leaf = address_of(x.program, s * _COLUMNS, _INT64)
        code = leaf[CODE]
        if code == NOT:
            negate(x, w, depth - 1, keys)
        elif code in (BOTH, EITHER):
            combine(x, w, depth - 2, depth - 1, keys, code == BOTH)
            depth -= 1
        else:
            seen = pointer(w.visible, depth * size)
            if code == INTERVALS:
                w.shown[depth] = push_intervals(x, leaf, w, seen, batch, head, first, keys)
            elif code == ARRAY:
                w.shown[depth] = push_array(x, leaf, w, seen, batch, head, first, keys)
            elif code == EQUAL:
                w.shown[depth] = push_equal(x, leaf, w, seen, batch, head, first, keys)
            else:
                if call_at(leaf[ADDRESS], seen, x.rows, w.queries, first, keys, batch, head) != 1:
                    w.failed[0] = 1
                w.shown[depth] = PARTLY
            depth += 1
    return w.shown[0] if w.shown[0] != PARTLY else how_much(w, w.visible, keys)


@step
def how_much(w, seen, keys):
    """Of a tile of bytes, how much is visible. (Lanes beyond the last query repeat it.)"""
    some, every = some_and_all(seen, keys, w.scores)
    if not some:
        return HIDDEN
    return WHOLLY if every else PARTLY


@step
def offset_of(leaf, batch, other):
    """How far this batch entry lies from the leaf's first."""
    return address_of(leaf[OTHER_OFFSETS if other else OFFSETS], batch, _INT64)[0]


@step
def push_intervals(x, leaf, w, seen, batch, head, first, keys):
    """start <= key < stop"""
    base = offset_of(leaf, batch, False) + head * leaf[HEAD]
    other = offset_of(leaf, batch, True) + head * leaf[OTHER_HEAD]
    low, high, full_low, full_high = first + keys, 0, 0, first + keys
    for r in range(x.rows):
        i = w.queries[r]
        start = address_of(leaf[ADDRESS], base + i * leaf[TOKEN], _INT64)[0]
        stop = address_of(leaf[OTHER_ADDRESS], other + i * leaf[OTHER_TOKEN], _INT64)[0]
        w.spans[r], w.spans[x.rows + r] = start, stop
        if stop > start:
            low, high = min(low, start), max(high, stop)
        full_low, full_high = max(full_low, start), min(full_high, stop)
    if high <= first or low >= first + keys:
        return HIDDEN
    if full_low <= first and full_high >= first + keys:
        return WHOLLY
    for j in range(keys):
        for r in range(x.rows):
            seen[j * x.rows + r] = w.spans[r] <= first + j < w.spans[x.rows + r]
    return PARTLY


@step
def push_array(x, leaf, w, seen, batch, head, first, keys):
    """A boolean array's tile, turned so that queries lie along the lanes."""
    step = leaf[KEY]
    base = offset_of(leaf, batch, False) + head * leaf[HEAD] + first * step
    done = 0
    if step == 1:
        done = turn_bytes(address_of(leaf[ADDRESS], base, _UINT8), leaf[TOKEN], w.queries, seen, keys, w.scores)
    for r in range(x.rows):
        row = address_of(leaf[ADDRESS], base + w.queries[r] * leaf[TOKEN], _UINT8)
        for j in range(done, keys):
            seen[j * x.rows + r] = row[j * step]
    return how_much(w, seen, keys)


@step
def push_equal(x, leaf, w, seen, batch, head, first, keys):
    """id of the query == id of the key"""
    base = offset_of(leaf, batch, False) + head * leaf[HEAD]
    other = offset_of(leaf, batch, True) + head * leaf[OTHER_HEAD]
    for r in range(x.rows):
        w.spans[r] = address_of(leaf[ADDRESS], base + w.queries[r] * leaf[TOKEN], _INT64)[0]
    for j in range(keys):
        key = address_of(leaf[OTHER_ADDRESS], other + (first + j) * leaf[OTHER_TOKEN], _INT64)[0]
        for r in range(x.rows):
            seen[j * x.rows + r] = np.uint8(w.spans[r] == key)
    return how_much(w, seen, keys)


@step
def negate(x, w, at, keys):
    """~a"""
    w.shown[at] = 2 - w.shown[at]
    if w.shown[at] == PARTLY:
        seen = pointer(w.visible, at * BLOCK * x.rows)
        for i in range(keys * x.rows):
            seen[i] = 1 - seen[i]


@step
def combine(x, w, first, second, keys, both):
    """a & b, or a | b, into the first"""
    one, other = w.shown[first], w.shown[second]
    decided, neutral = (HIDDEN, WHOLLY) if both else (WHOLLY, HIDDEN)
    if one == decided or other == neutral:
        return
    w.shown[first] = other
    if other == decided:
        return
    copy = one == neutral
    if not copy:
        w.shown[first] = PARTLY
    a, b = pointer(w.visible, first * BLOCK * x.rows), pointer(w.visible, second * BLOCK * x.rows)
    for i in range(keys * x.rows):
        a[i] = b[i] if copy else (a[i] & b[i] if both else a[i] | b[i])
