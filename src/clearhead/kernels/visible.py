"""Who may look at whom, tile by tile: a mask's program, run over one tile of cells.

A mask that is not one run of keys per row comes as a program for a stack: leaves push what the tile's queries may
see, NOT, BOTH and EITHER combine what is there. An entry is HIDDEN or WHOLLY where that is known without
looking at cells, else PARTLY, with a byte for each cell; so a union of windows still skips what neither sees.

A program is a table of int64, one step a row: code and, for leaves, up to two arrays as address and steps (the
columns of ``Leaf``); each array's offsets by batch entry lie at another address.
"""

from typing import NamedTuple

import numpy as np

from clearhead.kernels.cache import part, step
from clearhead.kernels.vectors import address_of, call_at, pointer

HIDDEN, PARTLY, WHOLLY = 0, 1, 2
INTERVALS, ARRAY, EQUAL, FUNCTION, NOT, BOTH, EITHER = range(7)
_INT64, _BOOL = np.zeros(1, np.int64), np.zeros(1, np.bool_)


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


@step
def run_program(program, w, batch, head, here, first, keys):
    """How much of the tile is visible; where PARTLY, w.visible[0] says which cells."""
    depth = 0
    for s in range(program.shape[0]):
        code = program[s, CODE]
        if code == NOT:
            negate(w, depth - 1, keys)
        elif code in (BOTH, EITHER):
            combine(w, depth - 2, depth - 1, keys, code == BOTH)
            depth -= 1
        else:
            if code == INTERVALS:
                w.shown[depth] = push_intervals(program, s, w, depth, batch, head, here, first, keys)
            elif code == ARRAY:
                w.shown[depth] = push_array(program, s, w, depth, batch, head, here, first, keys)
            elif code == EQUAL:
                w.shown[depth] = push_equal(program, s, w, depth, batch, head, here, first, keys)
            else:
                place = pointer(w.visible, depth * w.visible.shape[1] * w.visible.shape[2])
                lanes = len(w.queries)
                if call_at(program[s, ADDRESS], place, lanes, pointer(w.queries, 0), first, keys, batch, head) != 1:
                    w.failed[0] = 1
                w.shown[depth] = PARTLY
            depth += 1
    if w.shown[0] != PARTLY:
        return w.shown[0]
    count = 0
    for j in range(keys):
        for r in range(here):
            count += w.visible[0, j, r]
    if count == 0:
        return HIDDEN
    return WHOLLY if count == keys * here else PARTLY


@step
def offset_of(program, s, batch, other):
    """How far this batch entry lies from the leaf's first."""
    return address_of(program[s, OTHER_OFFSETS if other else OFFSETS], batch, _INT64)[0]


@part
def push_intervals(program, s, w, depth, batch, head, here, first, keys):
    """start <= key < stop"""
    rows = len(w.queries)
    base = offset_of(program, s, batch, False) + head * program[s, HEAD]
    other = offset_of(program, s, batch, True) + head * program[s, OTHER_HEAD]
    low, high, full_low, full_high = first + keys, 0, 0, first + keys
    for r in range(rows):
        i = w.queries[r]
        start = address_of(program[s, ADDRESS], base + i * program[s, TOKEN], _INT64)[0]
        stop = address_of(program[s, OTHER_ADDRESS], other + i * program[s, OTHER_TOKEN], _INT64)[0]
        w.spans[0, r], w.spans[1, r] = start, stop
        if stop > start:
            low, high = min(low, start), max(high, stop)
        full_low, full_high = max(full_low, start), min(full_high, stop)
    if high <= first or low >= first + keys:
        return HIDDEN
    if full_low <= first and full_high >= first + keys:
        return WHOLLY
    for j in range(keys):
        for r in range(rows):
            w.visible[depth, j, r] = w.spans[0, r] <= first + j < w.spans[1, r]
    return PARTLY


@part
def push_array(program, s, w, depth, batch, head, here, first, keys):
    """A boolean array's tile, turned so that queries lie along the lanes."""
    step = program[s, KEY]
    base = offset_of(program, s, batch, False) + head * program[s, HEAD] + first * step
    count = 0
    for r in range(len(w.queries)):
        row = address_of(program[s, ADDRESS], base + w.queries[r] * program[s, TOKEN], _BOOL)
        for j in range(keys):
            seen = np.uint8(row[j * step])
            w.visible[depth, j, r] = seen
            count += seen
    if count == 0:
        return HIDDEN
    return WHOLLY if count == keys * len(w.queries) else PARTLY


@part
def push_equal(program, s, w, depth, batch, head, here, first, keys):
    """id of the query == id of the key"""
    base = offset_of(program, s, batch, False) + head * program[s, HEAD]
    other = offset_of(program, s, batch, True) + head * program[s, OTHER_HEAD]
    for r in range(len(w.queries)):
        w.spans[0, r] = address_of(program[s, ADDRESS], base + w.queries[r] * program[s, TOKEN], _INT64)[0]
    count = 0
    for j in range(keys):
        key = address_of(program[s, OTHER_ADDRESS], other + (first + j) * program[s, OTHER_TOKEN], _INT64)[0]
        for r in range(len(w.queries)):
            seen = np.uint8(w.spans[0, r] == key)
            w.visible[depth, j, r] = seen
            count += seen
    if count == 0:
        return HIDDEN
    return WHOLLY if count == keys * len(w.queries) else PARTLY


@part
def negate(w, at, keys):
    """~a"""
    w.shown[at] = 2 - w.shown[at]
    if w.shown[at] == PARTLY:
        for j in range(keys):
            for r in range(len(w.queries)):
                w.visible[at, j, r] = 1 - w.visible[at, j, r]


@part
def combine(w, first, second, keys, both):
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
    for j in range(keys):
        for r in range(len(w.queries)):
            a, b = w.visible[first, j, r], w.visible[second, j, r]
            w.visible[first, j, r] = b if copy else (a & b if both else a | b)
