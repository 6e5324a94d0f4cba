"""Measures in one pass over the scores: of rows, of keys, of blocks of the matrix, the largest weights, and the user's.

Each is a fold: something is kept for every row, key or block, a tile of weights is added to it, and parts are joined.
Definitions: ``clearhead.measures``; what may be asked for: ``measure_asked``; of blocks: ``measure_grid``.

A work item is a chunk of a head's tiles of queries. What is kept for keys and blocks is kept by chunk, so that chunks
can be done by any thread, and is joined in their order afterwards. How a head is cut into chunks depends on nothing
but its number of queries.
"""

import numpy as np

from clearhead.kernels.addresses import address_of, call_fold, pointer
from clearhead.kernels.arguments import COMPUTED, unpack
from clearhead.kernels.cache import kernel, step
from clearhead.kernels.folds import (
    any_above,
    keep_largest,
    largest_of_keys,
    sum_rows,
    weigh2_and_fold,
    weigh_and_fold,
)
from clearhead.kernels.measure_asked import (
    DATA,
    DISTANCE,
    ENTROPY,
    FOLD,
    FUNCTION,
    KEEPS,
    KEPT,
    LARGEST,
    MASS,
    OFFSETS,
    SEES,
    SHAPE,
    SINK,
    SPREAD,
    asked_for,
    desk,
)
from clearhead.kernels.measure_grid import add_strip, finish_grid
from clearhead.kernels.microkernels import weigh2_tile, weigh_tile
from clearhead.kernels.tiles import (
    FLOAT64,
    FOLDS,
    HIGH,
    INT64,
    LOW,
    OLD_TOP,
    REACH_HIGH,
    REACH_LOW,
    TOP,
    fill,
    find_reach,
    is_natural,
    keys_of,
    load_queries,
    look,
    room,
    row_of,
    score_keys,
    take_tile,
)
from clearhead.kernels.vectors import LN2
from clearhead.kernels.visible import BLOCK, HIDDEN, WHOLLY
from clearhead.kernels.weights import load_logsumexp


@kernel
def measure(numbers, likes, places, desk_places, index_like, asked, first_item, last_item, first_tile, last_tile):
    """Items first_item ... last_item-1: chunk ``item % chunks`` of head ``item // chunks`` of the flattened batch; of
    each the tiles first_tile ... last_tile-1, counted from its first.

    Reads x.logsumexp, writes x.output (batch, heads, queries, OFFSETS + offsets), float64, and what is ``asked``.
    """
    x, w = unpack(pointer(numbers, 0), likes), room(places, likes[COMPUTED])
    a, d = asked_for(pointer(asked, 0)), desk(desk_places, likes[COMPUTED], index_like)
    tiles = (x.queries + x.rows - 1) // x.rows
    for item in range(first_item, last_item):
        sequence, chunk = item // a.chunks, item % a.chunks
        begin, end = tiles * chunk // a.chunks, tiles * (chunk + 1) // a.chunks
        for tile in range(begin + first_tile, min(begin + last_tile, end)):
            here = start_rows(x, w, a, d, sequence, tile)
            if a.factors and not any_factor(x, a, d):
                continue  # where nothing else is asked for
            for first in range(w.reach[REACH_LOW], w.reach[REACH_HIGH], BLOCK):
                measure_block(x, w, a, d, sequence, chunk, here, first, min(BLOCK, w.reach[REACH_HIGH] - first))
            finish_rows(x, w, a, d, sequence, here)
            if a.grid:
                finish_grid(x, w, a, d, sequence, chunk, here)
            if a.top:
                finish_top(x, w, a, d, sequence, here)


@step
def start_rows(x, w, a, d, sequence, tile):
    """Load a tile's queries, and find what they see; nothing is kept yet. How many there are."""
    batch, head = sequence // x.heads, sequence % x.heads
    here = take_tile(x, w, tile)
    load_queries(x, w, batch, head)
    find_reach(x, w, batch, head, here)
    load_logsumexp(x, w, batch, head, here)
    fill(pointer(w.lanes, OLD_TOP * x.rows), x.rows, -np.inf)
    fill(d.sums, (OFFSETS + a.offset_count) * x.rows, 0.0)
    fill(d.best, a.top * x.rows, -np.inf)
    fill(d.places, a.top * x.rows, -1)
    if a.received:
        for n in range(a.vectors):
            for r in range(x.rows):
                d.factors[n * x.rows + r] = 1.0
            if a.factors:
                own = address_of(a.factors, (sequence * a.vectors + n) * x.queries, d.factors)
                for r in range(x.rows):
                    d.factors[n * x.rows + r] = own[w.queries[r]]
    at = 0
    for n in range(a.fold_count):
        keeps = address_of(a.folds, n * FOLD, INT64)[KEEPS]
        fill(pointer(d.kept, at), keeps * x.rows, 0.0)
        at += keeps * x.rows
    return here


@step
def any_factor(x, a, d):
    """Whether any of the tile's rows has a factor that is not 0."""
    found = False
    for i in range(a.vectors * x.rows):
        found = found or d.factors[i] != 0
    return found


@step
def measure_block(x, w, a, d, sequence, chunk, here, first, keys):
    """Add keys first ... first+keys-1 to all that is kept."""
    batch, head = sequence // x.heads, sequence % x.heads
    shown, marked = look(x, w, batch, head, first, keys)
    if marked == HIDDEN:
        return
    key, key_step = keys_of(x, w, batch, head, first, keys)
    top = pointer(w.lanes, TOP * x.rows)
    fill(top, x.rows, -np.inf)
    shown = score_keys(x, w, batch, head, first, keys, key, key_step, key, key_step, shown, marked, None)
    largest_of_keys(top, 1, pointer(w.lanes, OLD_TOP * x.rows))
    if a.seen:
        count_seen(x, w, a, sequence * a.chunks + chunk, here, first, keys, shown)
    if a.top and any_above(top, pointer(d.best, (a.top - 1) * x.rows)):
        keep_largest(w.scores, keys, first, d.best, d.places, a.top)
    high, low, folds = pointer(w.lanes, HIGH * x.rows), pointer(w.lanes, LOW * x.rows), pointer(w.lanes, FOLDS * x.rows)
    if is_natural(x):
        weigh_and_fold(w.scores, keys, high, low, folds)
    else:
        weigh2_and_fold(w.scores, keys, high, low, folds)
    add_rows(x, w, a, d, here, first, keys)
    if a.received:
        add_received(x, w, a, d, sequence * a.chunks + chunk, first, keys)
    if a.grid:
        add_strip(x, w, a, d, first, keys)
    at = 0
    for n in range(a.fold_count):
        fold = address_of(a.folds, n * FOLD, INT64)
        kept = pointer(d.kept, at)
        at += fold[KEEPS] * x.rows
        if call_fold(fold[FUNCTION], w.scores, x.rows, here, w.queries, a.first_query, first, keys, a.first_key, batch,
                     head, kept, fold[DATA], fold[SHAPE]) != 1:  # fmt: skip
            w.failed[0] = 1


@step
def add_rows(x, w, a, d, here, first, keys):
    """The tile's weights, to the sums of each row; w.lanes has three of them by now."""
    rows, weights = x.rows, w.scores
    entropy, mass, distance = pointer(d.sums, 0), pointer(d.sums, MASS * rows), pointer(d.sums, DISTANCE * rows)
    bits, places, part = (
        pointer(w.lanes, FOLDS * rows),
        pointer(w.lanes, (FOLDS + 1) * rows),
        pointer(w.lanes, (FOLDS + 2) * rows),
    )
    for r in range(rows):
        entropy[r] += bits[r]
        mass[r] += part[r]
        distance[r] += np.float64(part[r]) * (w.queries[r] + a.aligned - first) - places[r]
    # Where the first and the last query stand, counted from the tile's first key.
    near, far = w.queries[0] + a.aligned - first, w.queries[here - 1] + a.aligned - first
    if a.spread:
        spread = pointer(d.sums, SPREAD * rows)
        if near < keys - 1 and far > 0:
            for j in range(keys):
                for r in range(rows):
                    spread[r] += np.float64(weights[j * rows + r]) * abs(w.queries[r] + a.aligned - first - j)
        else:
            sign = 1.0 if near >= keys - 1 else -1.0
            for r in range(rows):
                away = np.float64(part[r]) * (w.queries[r] + a.aligned - first) - places[r]
                spread[r] += sign * away
    sink = pointer(d.sums, SINK * rows)
    for j in range(min(keys, a.sink - first)):
        for r in range(rows):
            sink[r] += weights[j * rows + r]
    for n in range(a.offset_count):
        back = address_of(a.offsets, n, INT64)[0]
        if near - back >= keys or far - back < 0:
            continue
        held = pointer(d.sums, (OFFSETS + n) * rows)
        for r in range(here):
            place = w.queries[r] + a.aligned - first - back
            if 0 <= place < keys:
                held[r] = weights[place * rows + r]


@step
def finish_rows(x, w, a, d, sequence, here):
    """Write what rows have kept."""
    batch, head, rows = sequence // x.heads, sequence % x.heads, x.rows
    top = pointer(w.lanes, OLD_TOP * rows)
    fill(pointer(w.lanes, TOP * rows), rows, 0.0)
    for r in range(rows):
        # A row of NaN has no largest score, but it does see something.
        d.sums[SEES * rows + r] = top[r] > -np.inf or d.sums[MASS * rows + r] != d.sums[MASS * rows + r]
    to_weights(x, w, top, 1)
    for r in range(here):
        out = row_of(x.output, batch, head, w.queries[r])
        for n in range(OFFSETS + a.offset_count):
            out[n] = d.sums[n * rows + r]
        out[LARGEST] = top[r] if out[MASS] == out[MASS] else out[MASS]
        entropy = out[ENTROPY] * LN2
        out[ENTROPY] = 0.0 if entropy < 0.0 else entropy  # of one weight of 1, rounded up
    at = 0
    for n in range(a.fold_count):
        fold = address_of(a.folds, n * FOLD, INT64)
        keeps = fold[KEEPS]
        for r in range(here):
            out = address_of(fold[KEPT], (sequence * x.queries + w.queries[r]) * keeps, FLOAT64)
            for i in range(keeps):
                out[i] = d.kept[at + r * keeps + i]
        at += keeps * rows


@step
def to_weights(x, w, scores, count):
    """A few scores of each row, (count, rows), as weights."""
    high, low = pointer(w.lanes, HIGH * x.rows), pointer(w.lanes, LOW * x.rows)
    for first in range(0, count, BLOCK):
        part, some = pointer(scores, first * x.rows), min(BLOCK, count - first)
        if is_natural(x):
            weigh_tile(part, some, high, low, w.extra)
        else:
            weigh2_tile(part, some, high, low, w.extra)


@step
def count_seen(x, w, a, place, here, first, keys, shown):
    """How many rows may see each key: their scores are not -inf."""
    seen = address_of(a.seen, place * x.keys + first, INT64)
    for j in range(keys):
        count = here
        if shown != WHOLLY:
            count = 0
            row = pointer(w.scores, j * x.rows)
            for r in range(here):
                count += row[r] != -np.inf
        seen[j] += count


@step
def add_received(x, w, a, d, place, first, keys):
    """What each key receives, weighted by the rows' factors."""
    for n in range(a.vectors):
        sum_rows(w.scores, keys, pointer(d.factors, n * x.rows), d.columns)
        received = address_of(a.received, (place * a.vectors + n) * x.keys + first, FLOAT64)
        for j in range(keys):
            received[j] += d.columns[j]


@step
def finish_top(x, w, a, d, sequence, here):
    """Write the largest weights and their keys."""
    to_weights(x, w, d.best, a.top)
    for r in range(here):
        place = (sequence * x.queries + w.queries[r]) * a.top
        weights, keys = address_of(a.top_weights, place, d.best), address_of(a.top_keys, place, INT64)
        for n in range(a.top):
            key = d.places[n * x.rows + r]
            weights[n] = d.best[n * x.rows + r]
            keys[n] = key + a.first_key if key >= 0 else -1
