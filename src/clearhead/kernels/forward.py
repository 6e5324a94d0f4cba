"""The forward pass: output and logsumexp of each query, one tile of queries at a time, memory independent of length.

For each tile of keys: score, raise the running maximum, exponentiate, rescale what was summed under the old
maximum, add the values so weighted. This is the online softmax of Milakov & Gimelshein 2018 (algorithm 3) in the
blocked form of Dao et al. 2022, *FlashAttention* (algorithm 1: m is TOP, l is TOTAL, O is output).
"""

import math

import numpy as np

from clearhead.kernels.cache import kernel, part, step
from clearhead.kernels.microkernels import exp2_tile, exp_tile, finite_row, mix_tile, turn_out
from clearhead.kernels.tiles import (
    BLOCK,
    CHANGE,
    FACTOR,
    OLD_TOP,
    TOP,
    TOTAL,
    copy_finite,
    copy_rows,
    fill,
    in_place,
    is_natural,
    load_queries,
    row_of,
    score_keys,
    take_tile,
)
from clearhead.kernels.vectors import address_of, pointer, widen
from clearhead.kernels.visible import HIDDEN, WHOLLY


@kernel
def attend(x, w, first, last, output, logsumexp):
    """Work items first ... last-1: item t is tile ``t % tiles`` of head ``t // tiles`` of the flattened batch.

    Writes output (batch, heads, queries, value dim) and logsumexp (batch, heads, queries, 2), float64: the largest
    score, in x.unit, and the natural logarithm of the sum relative to it. They are kept apart because of scores so
    large that their sum would lose the second.
    """
    tiles = (x.queries + len(w.queries) - 1) // len(w.queries)
    for item in range(first, last):
        sequence = item // tiles
        batch, head = sequence // x.heads, sequence % x.heads
        here = take_tile(x, w, item % tiles)
        attend_tile(x, w, batch, head, here)
        finish_tile(x, w, batch, head, here, output, logsumexp)


@part
def attend_tile(x, w, batch, head, here):
    """Sum over all keys that w.queries[:here] see: w.output and the lanes TOP and TOTAL."""
    rows = len(w.queries)
    low, high, full_low, full_high = load_queries(x, w, batch, head)
    fill(w.lanes, TOP, OLD_TOP + 1, -np.inf)
    fill(w.lanes, TOTAL, TOTAL + 1, 0.0)
    fill(w.output, 0, w.output.shape[0], 0.0)
    scores, change, total = (
        pointer(w.scores, 0),
        pointer(w.lanes, CHANGE * rows),
        pointer(w.lanes, TOTAL * rows),
    )
    top, old_top = pointer(w.lanes, TOP * rows), pointer(w.lanes, OLD_TOP * rows)
    natural = is_natural(x)
    for first in range(low, high, BLOCK):
        keys = min(BLOCK, high - first)
        shown = score_keys(x, w, batch, head, here, first, keys, full_low, full_high)
        if shown == HIDDEN:
            continue
        # A hidden value, times its weight of 0, is nothing: but only if it is finite.
        careful = shown != WHOLLY and not values_finite(x, w, batch, head, first, keys)
        if careful:
            mark_visible(w, keys)
        padded = (keys + x.micro - 1) // x.micro * x.micro
        if natural:
            exp_tile(scores, padded, old_top, top, total, change)
        else:
            exp2_tile(scores, padded, old_top, top, total, change)
        if careful:
            mix_visible(x, w, batch, head, first, keys)
        else:
            mix_values(x, w, batch, head, first, keys)


@step
def mix_values(x, w, batch, head, first, keys):
    """w.output = w.output*CHANGE + values, weighted by w.scores: read in place if they can be, else from a copy."""
    rows, columns, scores = len(w.queries), w.output.shape[0], pointer(w.scores, 0)
    value, step = pointer(w.value, 0), columns
    if in_place(x.value, w.scores) and columns == x.value_dim:
        offset = x.value.offset[batch] + head // x.group * x.value.steps[0] + first * x.value.steps[1]
        value, step = address_of(x.value.address, offset, w.scores), x.value.steps[1]
    else:
        copy_rows(x.value, batch, head // x.group, first, keys, x.value_dim, w.value)
    for i in range(0, columns, x.micro):
        mix_tile(value, i, step, scores, pointer(w.output, i * rows), keys, pointer(w.lanes, CHANGE * rows))


@step
def values_finite(x, w, batch, head, first, keys):
    """Whether a tile's values are all finite."""
    copied = not in_place(x.value, w.scores)
    if copied:
        copy_rows(x.value, batch, head // x.group, first, keys, x.value_dim, w.value)
    offset = x.value.offset[batch] + head // x.group * x.value.steps[0] + first * x.value.steps[1]
    all_finite = True
    for j in range(keys):
        there = address_of(x.value.address, offset + j * x.value.steps[1], w.scores)
        row = pointer(w.value, j * w.value.shape[1]) if copied else there
        all_finite = all_finite and finite_row(row, x.value_dim)
    return all_finite


@step
def mark_visible(w, keys):
    """Remember, before scores become weights, which cells are hidden (-inf)."""
    for j in range(keys):
        for r in range(len(w.queries)):
            w.visible[0, j, r] = w.scores[j, r] != -np.inf


@step
def mix_visible(x, w, batch, head, first, keys):
    """As mix_values, for tiles in which a hidden value is NaN or infinite: finite values as ever, then the strange ones
    for the rows that see them. So what is hidden changes not even the last bit."""
    copy_finite(x.value, batch, head // x.group, first, keys, x.value_dim, w.value)
    rows, columns = len(w.queries), w.output.shape[0]
    scores, change = pointer(w.scores, 0), pointer(w.lanes, CHANGE * rows)
    for i in range(0, columns, x.micro):
        mix_tile(pointer(w.value, 0), i, columns, scores, pointer(w.output, i * rows), keys, change)
    step = x.value.steps[2]
    for j in range(keys):
        row = row_of(x.value, batch, head // x.group, first + j)
        for i in range(x.value_dim):
            number = widen(row[i * step])
            if not np.isfinite(number):
                for r in range(rows):
                    if w.visible[0, j, r]:
                        w.output[i, r] += w.scores[j, r] * number


@step
def finish_tile(x, w, batch, head, here, output, logsumexp):
    """Let the sink join, divide by the total, and write the results."""
    rows = len(w.queries)
    for r in range(rows):
        top, total = np.float64(w.lanes[TOP, r]), np.float64(w.lanes[TOTAL, r])
        share = 1.0
        if x.sinks.size:
            sink = x.sinks[head] / x.unit
            highest = max(top, sink)
            if highest > -np.inf:
                share = math.exp((top - highest) * x.unit)
                total = total * share + math.exp((sink - highest) * x.unit)
                top = highest
        log = row_of(logsumexp, batch, head, w.queries[r])
        log[0], log[1] = (-np.inf, 0.0) if total == 0.0 else (top, math.log(total))
        w.lanes[FACTOR, r] = 0.0 if total == 0.0 else share / total
    done = x.value_dim // x.lanes * x.lanes
    factor, step = pointer(w.lanes, FACTOR * rows), output.steps[1]
    place = row_of(output, batch, head, 0)
    turn_out(pointer(w.output, 0), factor, pointer(w.queries, 0), place, step, done)
    for r in range(here):
        out = row_of(output, batch, head, w.queries[r])
        for i in range(done, x.value_dim):
            out[i] = w.output[i, r] * w.lanes[FACTOR, r]
