"""The forward pass on a matrix unit, for bfloat16: as ``forward``, with its products from ``amx``.

Keys are matched as they lie; values are turned, once for the tiles of queries that meet them. Queries and weights come
as pairs. Scores are scaled once they are sums, so that products are exact. Numbers that the unit might round to 0 or
sum to infinity, and those that are not finite, are odd: it is given 0 instead, and rows that see one are left to
``forward``.
"""

import numpy as np

from clearhead.kernels.addresses import number_for, pointer, seen_as
from clearhead.kernels.amx import (
    CALM_HIGH,
    CALM_LOW,
    calm,
    configure,
    exp2_pairs,
    exp_pairs,
    match_pairs,
    mix_pairs,
    release,
    scale_rows,
    turn_pairs,
    turn_values,
)
from clearhead.kernels.arguments import COMPUTED, unpack
from clearhead.kernels.cache import kernel, step
from clearhead.kernels.forward import clear_sums, finish_tile
from clearhead.kernels.tiles import (
    CHANGE,
    HERE,
    LANES,
    OLD_TOP,
    REACH_HIGH,
    REACH_LOW,
    TOGETHER,
    TOP,
    TOTAL,
    bend_scores,
    columns,
    fill,
    find_reach,
    is_natural,
    look,
    part_seen,
    raised_by,
    room,
    row_of,
    take_tile,
    tile_room,
    whole_micro,
)
from clearhead.kernels.vectors import LOG2E
from clearhead.kernels.visible import BLOCK, HIDDEN

UINT16, UINT32 = np.uint16(0), np.uint32(0)
ODD = LANES - 1  # of Scratch.lanes: not 0 for queries that are odd or see an odd key


@kernel
def attend_amx(numbers, likes, places, told, strange, first, last):
    """Work items, arguments and results as in ``forward.attend``; micro-tiles have ``amx.DEPTH`` keys.

    told : ``amx.configuration()``. strange : (batch, heads, queries), bytes, set to 1 for rows that are ``attend``'s.
    """
    x, w = unpack(pointer(numbers, 0), likes), room(places, likes[COMPUTED])
    tiles = (x.queries + x.rows - 1) // x.rows
    configure(pointer(told, 0))
    item = first
    while item < last:
        sequence, tile = item // tiles, item % tiles
        batch, head = sequence // x.heads, sequence % x.heads
        count = min(TOGETHER, last - item, tiles - tile)
        low, high = x.keys, 0
        for t in range(count):
            own = tile_room(w, t)
            here = take_tile(x, own, tile + t)
            find_reach(x, own, batch, head, here)
            load_pairs(x, own, batch, head)
            clear_sums(x, own)
            low, high = min(low, own.reach[REACH_LOW]), max(high, own.reach[REACH_HIGH])
        for block in range(low // BLOCK * BLOCK, high, BLOCK):
            attend_block(x, w, batch, head, count, block, min(BLOCK, high - block))
        for t in range(count):
            own = tile_room(w, t)
            for r in range(own.reach[HERE]):
                strange[sequence * x.queries + own.queries[r]] = own.lanes[ODD * x.rows + r] != 0
            finish_tile(x, own, batch, head)
        item += count
    release()


@step
def load_pairs(x, w, batch, head):
    """Put w.queries into the lanes as pairs (dim / 2, rows), as they are."""
    turn_pairs(row_of(x.query, batch, head, 0), x.query.steps[1], w.queries, seen_as(w.query, UINT32), x.dim, w.query)
    for r in range(x.rows):
        w.lanes[ODD * x.rows + r] = 0 if calm(row_of(x.query, batch, head, w.queries[r]), 0, 1, x.dim) else 1


@step
def attend_block(x, room, batch, head, count, block, keys):
    """Add a block of keys and values to each of the tiles, as in ``forward``."""
    key, key_step, there, all_calm = seen_as(room.key, UINT16), x.dim, False, True
    turned = seen_as(room.value, UINT16)
    high = seen_as(room.extra, UINT32)
    low = pointer(high, BLOCK // 2 * x.rows)
    for t in range(count):
        w = tile_room(room, t)
        begin, some = part_seen(x, w, block, keys)
        if some <= 0:
            continue
        first = block + begin
        shown, marked = look(x, w, batch, head, first, some)
        if marked == HIDDEN:
            continue
        if not there:
            fill(w.odd, keys, 0)
            key, key_step, calm_keys = calm_rows(x, x.key, w.odd, batch, head, block, keys, x.dim, key)
            rest = pointer(turned, BLOCK * x.value_dim)
            value, value_step, calm_values = calm_rows(x, x.value, w.odd, batch, head, block, keys, x.value_dim, rest)
            turn_values(value, value_step, whole_micro(x, keys), x.value_dim, turned, BLOCK)
            there, all_calm = True, calm_keys and calm_values
        padded = whole_micro(x, some)
        factor = number_for(w.scores, x.scale if is_natural(x) else x.scale * LOG2E)
        match_pairs(
            pointer(key, begin * key_step), key_step, seen_as(w.query, UINT32), w.scores, x.dim, padded, factor,
            raised_by(x, w, shown, marked),
        )  # fmt: skip
        bend_scores(x, w, batch, head, first, some, shown, marked, None)
        if not all_calm:
            find_odd(x, w, begin, some)
        if to_pairs(x, w, padded, high, low):
            scale_rows(w.output, columns(x), pointer(w.lanes, CHANGE * x.rows))
        mix_pairs(pointer(turned, begin), BLOCK, high, low, w.output, columns(x), padded)


@step
def calm_rows(x, array, odd, batch, head, first, keys, dim, out):
    """(pointer, step, whether all are calm) of a block of rows: where they lie, if they are and none of a whole
    micro-tile lies past the end; else a copy, with 0 for what is not, and odd[j] = 1 for such rows."""
    padded, key_head = whole_micro(x, keys), head // x.group
    there = row_of(array, batch, key_head, first)
    all_calm = calm(there, array.steps[1], keys, dim)
    if all_calm and first + padded <= x.keys:
        return there, array.steps[1], True
    for j in range(padded):
        to = pointer(out, j * dim)
        if j >= keys:
            fill(to, dim, 0)
            continue
        row = row_of(array, batch, key_head, first + j)
        strange = not calm(row, 0, 1, dim)
        if strange:
            odd[j] = 1
        for i in range(dim):
            exponent = row[i] >> 7 & 0xFF
            to[i] = row[i] if CALM_LOW <= exponent <= CALM_HIGH else 0
    return out, dim, all_calm


@step
def find_odd(x, w, begin, keys):
    """Mark the queries that see an odd key."""
    for j in range(keys):
        if w.odd[begin + j]:
            for r in range(x.rows):
                if w.scores[j * x.rows + r] != -np.inf:
                    w.lanes[ODD * x.rows + r] = 1


@step
def to_pairs(x, w, keys, high, low):
    """w.scores to weights, as pairs; whether what was summed before must be scaled by CHANGE."""
    change, total = pointer(w.lanes, CHANGE * x.rows), pointer(w.lanes, TOTAL * x.rows)
    top, old_top = pointer(w.lanes, TOP * x.rows), pointer(w.lanes, OLD_TOP * x.rows)
    if is_natural(x):
        return exp_pairs(w.scores, keys, old_top, top, total, change, high, low)
    return exp2_pairs(w.scores, keys, old_top, top, total, change, high, low)
