"""Measures of rows that ride along in the forward pass: what it computes anyway, summed once more.

While a pass goes through the keys, weights are relative to the largest score so far, e = exp(s - top). Sums of them are
scaled down when it rises, as outputs are; and so is sum e (s - top), of which entropy is made:

    sum e' (s - top')  =  exp(top - top') (sum e (s - top)  +  (top - top') sum e)
    entropy            =  ln total - sum e (s - top) / total
"""

import math
from typing import Any, NamedTuple

import numpy as np

from clearhead.kernels.addresses import address_of, number_for, pointer
from clearhead.kernels.cache import step
from clearhead.kernels.folds import exp2_and_fold, exp_and_fold
from clearhead.kernels.measure_asked import DISTANCE, ENTROPY, LARGEST, MASS, OFFSETS, SEES, SINK
from clearhead.kernels.tiles import (
    CHANGE,
    FLOAT64,
    HERE,
    INT64,
    OLD_TOP,
    POSITION,
    TOP,
    TOTAL,
    fill,
    is_natural,
    row_of,
    whole_micro,
)


class Ride(NamedTuple):
    """What rides along.

    sums : (TOGETHER, RIDES + offsets, rows), in the type computed in: what rows keep, in the order below.
    rows : address of (batch * heads, queries, OFFSETS + offsets), float64, where it goes.
    The rest is as in ``measure.Asked``.
    """

    sums: Any
    rows: int
    aligned: int
    sink: int
    offsets: int
    offset_count: int


TERMS, PLACES, FIRST_KEYS, RIDES = range(4)  # sum e (s - top), sum e (i - j), sum e over the first keys; then offsets
RIDE = 5  # numbers of a Ride beside its sums


@step
def ride_of(numbers, place, like):
    """A Ride from five numbers and the address of its sums."""
    return Ride(address_of(place, 0, like), numbers[0], numbers[1], numbers[2], numbers[3], numbers[4])


@step
def sums_of(x, ride, t):
    """Those of tile t of the tiles that work together."""
    return pointer(ride.sums, t * (RIDES + ride.offset_count) * x.rows)


@step
def start_ride(x, w, ride, t):
    """Nothing is kept yet."""
    fill(sums_of(x, ride, t), (RIDES + ride.offset_count) * x.rows, 0.0)


@step
def to_weights_and_ride(x, w, ride, t, first, keys):
    """As ``forward.to_weights``, to the bit; and the tile's weights join the sums."""
    sums, rows = sums_of(x, ride, t), x.rows
    change, total = pointer(w.lanes, CHANGE * rows), pointer(w.lanes, TOTAL * rows)
    top, old_top = pointer(w.lanes, TOP * rows), pointer(w.lanes, OLD_TOP * rows)
    terms, places, position = pointer(sums, 0), pointer(sums, PLACES * rows), pointer(w.lanes, POSITION * rows)
    away = number_for(terms, ride.aligned - x.offset - first)  # what positions lack, counted from the tile's first key
    padded = whole_micro(x, keys)
    if is_natural(x):
        exp_and_fold(w.scores, padded, old_top, top, total, change, terms, places, position, away)
    else:
        exp2_and_fold(w.scores, padded, old_top, top, total, change, terms, places, position, away)
    held = pointer(sums, FIRST_KEYS * rows)
    for r in range((1 + ride.offset_count) * rows):
        held[r] *= change[r % rows]
    for j in range(min(keys, ride.sink - first)):
        for r in range(rows):
            held[r] += w.scores[j * rows + r]
    near, far = w.queries[0] + ride.aligned - first, w.queries[w.reach[HERE] - 1] + ride.aligned - first
    for n in range(ride.offset_count):
        back = address_of(ride.offsets, n, INT64)[0]
        if near - back >= keys or far - back < 0:
            continue
        held = pointer(sums, (RIDES + n) * rows)
        for r in range(w.reach[HERE]):
            place = w.queries[r] + ride.aligned - first - back
            if 0 <= place < keys:
                held[r] += w.scores[place * rows + r]


@step
def finish_ride(x, w, ride, t, batch, head):
    """Write what rows have kept, once their logsumexp is known."""
    sums, rows = sums_of(x, ride, t), x.rows
    columns = OFFSETS + ride.offset_count
    for r in range(w.reach[HERE]):
        out = address_of(ride.rows, ((batch * x.heads + head) * x.queries + w.queries[r]) * columns, FLOAT64)
        fill(out, columns, 0.0)
        top, total = np.float64(w.lanes[TOP * rows + r]), np.float64(w.lanes[TOTAL * rows + r])
        if total == 0.0:
            continue
        log = row_of(x.logsumexp, batch, head, w.queries[r])
        # The logarithm of what e becomes a weight by. (A learned sink may be larger than top.)
        less = (top - log[0]) * x.unit - log[1] if top != log[0] else -log[1]
        factor = math.exp(less)
        entropy = -factor * (sums[TERMS * rows + r] * x.unit + total * less)
        out[ENTROPY] = 0.0 if entropy < 0.0 else entropy
        out[MASS], out[LARGEST], out[SEES] = total * factor, factor, 1.0
        out[DISTANCE], out[SINK] = sums[PLACES * rows + r] * factor, sums[FIRST_KEYS * rows + r] * factor
        for n in range(ride.offset_count):
            out[OFFSETS + n] = sums[(RIDES + n) * rows + r] * factor
