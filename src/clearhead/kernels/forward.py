"""The forward pass: output and logsumexp of each query, one tile of queries at a time, memory independent of length.

For each tile of keys: score, raise the running maximum, exponentiate, rescale what was summed under the old
maximum, add the values so weighted. This is the online softmax of Milakov & Gimelshein 2018 (algorithm 3) in the
blocked form of Dao et al. 2022, *FlashAttention* (algorithm 1: m is TOP, l is TOTAL, O is output).
"""

import math

import numpy as np

from clearhead.kernels.addresses import address_of, narrow, pointer, widen
from clearhead.kernels.arguments import COMPUTED, unpack
from clearhead.kernels.cache import kernel, step
from clearhead.kernels.microkernels import exp2_tile, exp_tile, finite_row, mix_tile, turn_out
from clearhead.kernels.riding import finish_ride, ride_of, start_ride, to_weights_and_ride
from clearhead.kernels.tiles import (
    CHANGE,
    FACTOR,
    FLOAT64,
    HERE,
    OLD_TOP,
    REACH_HIGH,
    REACH_LOW,
    TOGETHER,
    TOP,
    TOTAL,
    columns,
    copy_finite,
    copy_rows,
    fill,
    find_reach,
    in_place,
    is_natural,
    keys_of,
    load_queries,
    look,
    part_seen,
    place_of,
    room,
    row_of,
    score_keys,
    take_tile,
    tile_room,
    whole_micro,
)
from clearhead.kernels.visible import BLOCK, HIDDEN, WHOLLY


@kernel
def attend(numbers, likes, places, first, last):
    """Work items first ... last-1: item t is tile ``t % tiles`` of head ``t // tiles`` of the flattened batch.

    Arguments are packed, places are a workspace's. Writes x.output (batch, heads, queries, value dim) and x.logsumexp
    (batch, heads, queries, 2), float64: the largest score, in x.unit, and the natural logarithm of the sum relative to
    it. They are kept apart because of scores so large that their sum would lose the second.
    """
    attend_items(unpack(pointer(numbers, 0), likes), room(places, likes[COMPUTED]), first, last, None)


@kernel
def attend_and_measure(numbers, likes, places, ride, sums, first, last):
    """As ``attend``, to the bit, with measures of rows beside: five numbers and the address of sums, see ``riding``."""
    x, w = unpack(pointer(numbers, 0), likes), room(places, likes[COMPUTED])
    attend_items(x, w, first, last, ride_of(pointer(ride, 0), sums, likes[COMPUTED]))


@step
def attend_items(x, w, first, last, ride):
    """The same, and what rides along, see ``riding``; None: nothing does, and nothing of it is compiled."""
    tiles = (x.queries + x.rows - 1) // x.rows
    item = first
    while item < last:
        sequence, tile = item // tiles, item % tiles
        batch, head = sequence // x.heads, sequence % x.heads
        count = min(TOGETHER, last - item, tiles - tile)
        low, high = x.keys, 0
        for t in range(count):
            own = tile_room(w, t)
            start_tile(x, own, batch, head, tile + t)
            if ride is not None:
                start_ride(x, own, ride, t)
            low, high = min(low, own.reach[REACH_LOW]), max(high, own.reach[REACH_HIGH])
        # Blocks begin at whole multiples: what a tile gets does not depend on those that it shares them with.
        for block in range(low // BLOCK * BLOCK, high, BLOCK):
            attend_block(x, w, batch, head, count, block, min(BLOCK, high - block), ride)
        for t in range(count):
            finish_tile(x, tile_room(w, t), batch, head)
            if ride is not None:
                finish_ride(x, tile_room(w, t), ride, t, batch, head)
        item += count


@step
def start_tile(x, w, batch, head, tile):
    """Load its queries, and find what they see."""
    here = take_tile(x, w, tile)
    load_queries(x, w, batch, head)
    find_reach(x, w, batch, head, here)
    clear_sums(x, w)


@step
def clear_sums(x, w):
    """Nothing is summed yet."""
    fill(pointer(w.lanes, TOP * x.rows), x.rows, -np.inf)
    fill(pointer(w.lanes, OLD_TOP * x.rows), x.rows, -np.inf)
    fill(pointer(w.lanes, TOTAL * x.rows), x.rows, 0.0)
    fill(w.output, columns(x) * x.rows, 0.0)


@step
def attend_block(x, room, batch, head, count, block, keys, ride):
    """Add a block of keys and values to each of the tiles: to their output and the lanes TOP and TOTAL.

    Keys and values are fetched once, if any tile sees some of them: each skips what none of its own queries sees.
    """
    key, key_step, keys_there = room.key, 0, False
    value, value_step, values_there = room.value, 0, False
    finite, finite_known = True, False
    for t in range(count):
        w = tile_room(room, t)
        begin, some = part_seen(x, w, block, keys)
        if some <= 0:
            continue
        first = block + begin
        shown, marked = look(x, w, batch, head, first, some)
        if marked == HIDDEN:
            continue
        if not keys_there:
            key, key_step = keys_of(x, w, batch, head, block, keys)
            keys_there = True
        if not values_there:
            value, value_step = values_of(x, w, batch, head, block, keys)
            values_there = True
        own_key, own_value = pointer(key, begin * key_step), pointer(value, begin * value_step)
        shown = score_keys(
            x, w, batch, head, first, some, own_key, key_step, own_value, value_step, shown, marked, None
        )
        if shown != WHOLLY and not finite_known:
            finite, finite_known = values_finite(x, value, value_step, keys), True
        # A hidden value, times its weight of 0, is nothing: but only if it is finite.
        careful = shown != WHOLLY and not finite
        if careful:
            mark_visible(x, w, some)
        if ride is None:
            to_weights(x, w, whole_micro(x, some))
        else:
            to_weights_and_ride(x, w, ride, t, first, some)
        if careful:
            mix_visible(x, w, batch, head, first, some)
            values_there = False
        else:
            mix_values(x, w, own_value, value_step, some)


@step
def to_weights(x, w, keys):
    """w.scores from scores to weights against the new TOP; TOTAL and CHANGE follow."""
    change, total = pointer(w.lanes, CHANGE * x.rows), pointer(w.lanes, TOTAL * x.rows)
    top, old_top = pointer(w.lanes, TOP * x.rows), pointer(w.lanes, OLD_TOP * x.rows)
    if is_natural(x):
        exp_tile(w.scores, keys, old_top, top, total, change)
    else:
        exp2_tile(w.scores, keys, old_top, top, total, change)


@step
def values_of(x, w, batch, head, first, keys):
    """(pointer, step) of a block of values: where they lie, if they can be read there, else a copy."""
    if in_place(x.value, w.value) and columns(x) == x.value_dim:
        return address_of(x.value.address, place_of(x.value, batch, head // x.group, first), w.value), x.value.steps[1]
    copy_rows(x.value, batch, head // x.group, first, keys, x.value_dim, w.value, columns(x))
    return w.value, columns(x)


@step
def mix_values(x, w, value, step, keys):
    """w.output = w.output*CHANGE + values, weighted by w.scores."""
    for i in range(0, columns(x), x.micro):
        mix_tile(value, i, step, w.scores, pointer(w.output, i * x.rows), keys, pointer(w.lanes, CHANGE * x.rows))


@step
def values_finite(x, value, step, keys):
    """Whether a block's values are all finite."""
    all_finite = True
    for j in range(keys):
        all_finite = all_finite and finite_row(pointer(value, j * step), x.value_dim)
    return all_finite


@step
def mark_visible(x, w, keys):
    """Remember, before scores become weights, which cells are hidden (-inf)."""
    for i in range(keys * x.rows):
        w.visible[i] = w.scores[i] != -np.inf


@step
def mix_visible(x, w, batch, head, first, keys):
    """As mix_values, for tiles in which a hidden value is NaN or infinite: finite values as ever, then the strange ones
    for the rows that see them. So what is hidden changes not even the last bit."""
    copy_finite(x.value, batch, head // x.group, first, keys, x.value_dim, w.value, columns(x))
    mix_values(x, w, w.value, columns(x), keys)
    step = x.value.steps[2]
    for j in range(keys):
        row = row_of(x.value, batch, head // x.group, first + j)
        for i in range(x.value_dim):
            number = widen(row[i * step])
            if not math.isfinite(number):
                for r in range(x.rows):
                    if w.visible[j * x.rows + r]:
                        w.output[i * x.rows + r] += w.scores[j * x.rows + r] * number


@step
def finish_tile(x, w, batch, head):
    """Let the sink join, divide by the total, and write the results."""
    for r in range(x.rows):
        top, total = np.float64(w.lanes[TOP * x.rows + r]), np.float64(w.lanes[TOTAL * x.rows + r])
        share = 1.0
        if x.sinks:
            sink = address_of(x.sinks, head, FLOAT64)[0] / x.unit
            highest = max(top, sink)
            if highest > -np.inf:
                share = math.exp((top - highest) * x.unit)
                total = total * share + math.exp((sink - highest) * x.unit)
                top = highest
        log = row_of(x.logsumexp, batch, head, w.queries[r])
        log[0], log[1] = (-np.inf, 0.0) if total == 0.0 else (top, math.log(total))
        w.lanes[FACTOR * x.rows + r] = 0.0 if total == 0.0 else share / total
    done = x.value_dim // x.lanes * x.lanes
    factor, step = pointer(w.lanes, FACTOR * x.rows), x.output.steps[1]
    turn_out(w.output, factor, w.queries, row_of(x.output, batch, head, 0), step, done)
    for r in range(w.reach[HERE]):
        out = row_of(x.output, batch, head, w.queries[r])
        for i in range(done, x.value_dim):
            out[i] = narrow(out, w.output[i * x.rows + r] * w.lanes[FACTOR * x.rows + r])
