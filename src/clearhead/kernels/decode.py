"""Few queries against many keys, as when a model writes: bound by reading K and V once, so here dim rides the lanes.

The query heads that share a key head are one group, whose K and V are read once for all of its rows. Keys are cut
into chunks of fixed size; each leaves (output, top, total), and chunks are merged in order, so that the bits depend
neither on the threads nor on the batch. Merging is the rule of ``clearhead.state``, in units of log2.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from clearhead.kernels.addresses import address_of, narrow, number_for, pointer, widen
from clearhead.kernels.arguments import unpack
from clearhead.kernels.cache import kernel, step
from clearhead.kernels.streaming import exp_row, match_1, match_2, match_4, match_8, mix_1, mix_2, mix_4, mix_8
from clearhead.kernels.tiles import FLOAT64, fill, row_of
from clearhead.kernels.vectors import LN2, LOG2E

CHUNK = 1024  # keys in a share of work: 0.5 MB of keys at dim 128, and scores of 4 KB a row
ROWS = 8  # most rows (query heads of a group, times queries) at once
ROOM = CHUNK + 64  # scores of a row, and a vector more
BLOCK = 32  # keys whose values stay in the first-level cache while each part of dim is mixed


class DecodeScratch(NamedTuple):
    """What one thread works in, as pointers: its rows' queries (rows, dim), scores (rows, ROOM), and values
    (BLOCK, value dim) where some must be left out."""

    query: Any
    scores: Any
    value: Any


def room_size(dim: int, value_dim: int) -> int:
    """How many numbers one thread works in."""
    return ROWS * dim + ROWS * ROOM + BLOCK * value_dim


class Pages(NamedTuple):
    """Where keys and values lie: token j of batch entry b in page n = j // size, whose first element lies
    key[b * count + n] (or value[b * count + n]) elements from the array's address; key and value point at 64-bit
    integers. Contiguous arrays are pages that happen to follow one another.
    """

    size: Any
    count: Any
    key: Any
    value: Any


class Partial(NamedTuple):
    """What each chunk leaves, as pointers: output (items, rows, value dim), top and total (items, rows).

    rows is a power of two, and a row that sees nothing of a chunk leaves (0, -inf, 0)."""

    output: Any
    top: Any
    total: Any
    rows: Any


@step
def partial_at(x, rows, partial, place):
    """One array holds all three, for all items."""
    items = len(partial) // (rows * (x.value_dim + 2))
    size = items * rows
    return Partial(
        pointer(partial, place * rows * x.value_dim),
        pointer(partial, size * x.value_dim + place * rows),
        pointer(partial, size * (x.value_dim + 1) + place * rows),
        rows,
    )


@kernel
def decode_chunks(numbers, likes, size, key_pages, value_pages, room, first, last, chunks, partial):
    """Work items first ... last-1: item t is chunk ``t % chunks`` of key head ``t // chunks`` of the batch.

    Arguments are packed. key_pages, value_pages : (batch, pages), int64, see Pages, of ``size`` tokens. room : numbers
    to work in. partial : as many numbers as all items of ``Partial`` take.
    """
    x = unpack(pointer(numbers, 0), likes)
    pages = Pages(size, key_pages.shape[1], pointer(key_pages, 0), pointer(value_pages, 0))
    w = DecodeScratch(pointer(room, 0), pointer(room, ROWS * x.dim), pointer(room, ROWS * (x.dim + ROOM)))
    key_heads, rows = x.heads // x.group, x.group * x.queries
    wide = power_of_two(rows)
    for item in range(first, last):
        batch, key_head = item // chunks // key_heads, item // chunks % key_heads
        start = item % chunks * CHUNK
        stop = min(x.keys, start + CHUNK)
        low, high, mixed = stop, start, False
        for r in range(rows):
            row_low, row_high = span(x, batch, key_head, r, start, stop)
            if row_high > row_low:
                low, high = min(low, row_low), max(high, row_high)
        left = partial_at(x, wide, partial, item)
        out, top, total = left.output, left.top, left.total
        for r in range(rows):
            row_low, row_high = span(x, batch, key_head, r, start, stop)
            mixed = mixed or row_low != low or row_high != high
            top[r], total[r] = -np.inf, 0
        for i in range(wide * x.value_dim):
            out[i] = 0
        if high <= low:
            continue
        load_rows(x, w.query, batch, key_head, rows)
        match_keys(x, pages, w, batch, key_head, rows, low, high)
        for r in range(rows):
            row_low, row_high = span(x, batch, key_head, r, start, stop)
            top[r], total[r] = normalize_row(pointer(w.scores, r * ROOM), row_low - low, row_high - low, high - low)
        # A hidden value, times its weight of 0, is nothing: but only if it is finite.
        careful = mixed and not values_finite(x, pages, batch, key_head, low, high)
        mix_values(x, pages, w, batch, key_head, rows, low, high, careful, out)
        if careful:
            mix_strange(x, pages, batch, key_head, w.scores, low, start, stop, out)


@step
def power_of_two(count):
    """The smallest one that is no smaller."""
    power = 1
    while power < count:
        power *= 2
    return power


@step
def token(array, table, pages, batch, head, j):
    """A pointer to the first number of token j."""
    page = table[batch * pages.count + j // pages.size]
    return address_of(array.address, page + head * array.steps[0] + j % pages.size * array.steps[1], array.like)


@step
def span(x, batch, key_head, row, start, stop):
    """Which keys of start ... stop-1 this row of the group sees."""
    head, i = key_head * x.group + row // x.queries, row % x.queries
    return max(start, row_of(x.start, batch, head, i)[0]), min(stop, row_of(x.stop, batch, head, i)[0])


@step
def load_rows(x, query, batch, key_head, rows):
    """The group's queries, scaled to units of log2; rows that only fill up are 0."""
    factor = number_for(query, x.scale * LOG2E)
    inner = x.query.steps[2]
    for r in range(rows):
        row = row_of(x.query, batch, key_head * x.group + r // x.queries, r % x.queries)
        for i in range(x.dim):
            query[r * x.dim + i] = widen(row[i * inner]) * factor
    for i in range(rows * x.dim, ROWS * x.dim):
        query[i] = 0


@step
def match_keys(x, pages, w, batch, key_head, rows, low, high):
    """w.scores[r, j - low] = query r . key j, for as many rows at once as a power of two holds them."""
    stride, query, room = x.key.steps[1], w.query, ROOM
    first = low
    while first < high:
        count = min(high, (first // pages.size + 1) * pages.size) - first
        key = token(x.key, pages.key, pages, batch, key_head, first)
        scores = pointer(w.scores, first - low)
        if rows == 1:
            match_1(key, stride, count, query, x.dim, scores, room)
        elif rows == 2:
            match_2(key, stride, count, query, x.dim, scores, room)
        elif rows <= 4:
            match_4(key, stride, count, query, x.dim, scores, room)
        else:
            match_8(key, stride, count, query, x.dim, scores, room)
        first += count


@step
def mix_values(x, pages, w, batch, key_head, rows, low, high, careful, out):
    """out[r] += sum over j of w.scores[r, j - low] * value j; if careful, of finite numbers alone."""
    room, dim, inner = ROOM, x.value_dim, x.value.steps[2]
    # Blocks do not depend on where pages end, so that neither does the order of additions.
    for first in range(low, high, BLOCK):
        count = min(high - first, BLOCK)
        value = token(x.value, pages.value, pages, batch, key_head, first)
        weights = pointer(w.scores, first - low)
        if careful or first // pages.size != (first + count - 1) // pages.size:
            for j in range(count):
                row = token(x.value, pages.value, pages, batch, key_head, first + j)
                for i in range(dim):
                    number = widen(row[i * inner])
                    w.value[j * dim + i] = 0 if careful and not math.isfinite(number) else number
            mix_rows(w.value, dim, count, weights, room, out, dim, rows)
        else:
            mix_rows(value, x.value.steps[1], count, weights, room, out, dim, rows)


@step
def mix_rows(value, stride, count, weights, room, out, dim, rows):
    """Mix for as many rows at once as a power of two holds them."""
    if rows == 1:
        mix_1(value, stride, count, weights, room, out, dim)
    elif rows == 2:
        mix_2(value, stride, count, weights, room, out, dim)
    elif rows <= 4:
        mix_4(value, stride, count, weights, room, out, dim)
    else:
        mix_8(value, stride, count, weights, room, out, dim)


@step
def normalize_row(scores, low, high, count):
    """Scores of one row to weights against their own maximum: (top, total). Outside low ... high-1: 0."""
    low, high = min(max(low, 0), count), min(max(high, 0), count)
    fill(scores, low, -np.inf)
    fill(pointer(scores, high), count + ROOM - CHUNK - high, -np.inf)
    return exp_row(scores, count)


@step
def values_finite(x, pages, batch, key_head, low, high):
    """Whether these values are all finite."""
    inner = x.value.steps[2]
    for j in range(low, high):
        row = token(x.value, pages.value, pages, batch, key_head, j)
        for i in range(x.value_dim):
            if not math.isfinite(widen(row[i * inner])):
                return False
    return True


@step
def mix_strange(x, pages, batch, key_head, scores, low, start, stop, out):
    """What mix_values left out: NaN and infinity, for the rows that see them."""
    inner = x.value.steps[2]
    for r in range(x.group * x.queries):
        row_low, row_high = span(x, batch, key_head, r, start, stop)
        for j in range(row_low, row_high):
            row = token(x.value, pages.value, pages, batch, key_head, j)
            for i in range(x.value_dim):
                number = widen(row[i * inner])
                if not math.isfinite(number):
                    out[r * x.value_dim + i] += scores[r * ROOM + j - low] * number


@kernel
def merge_chunks(numbers, likes, chunks, sequences, partial):
    """What the chunks left, merged in order, with the sinks: x.output and x.logsumexp as in ``forward.attend``.

    sequences : batch entries times key heads.
    """
    x = unpack(pointer(numbers, 0), likes)
    rows = x.group * x.queries
    wide = power_of_two(rows)
    for sequence in range(sequences):
        batch, key_head = sequence // (x.heads // x.group), sequence % (x.heads // x.group)
        for r in range(rows):
            head, i = key_head * x.group + r // x.queries, r % x.queries
            left = partial_at(x, wide, partial, sequence * chunks)
            top, total = pointer(left.top, r), pointer(left.total, r)
            parts = pointer(left.output, r * x.value_dim)
            sink = address_of(x.sinks, head, FLOAT64)[0] / LN2 if x.sinks else -np.inf
            highest = sink
            for c in range(chunks):
                highest = max(highest, np.float64(top[c * wide]))
            out, log = row_of(x.output, batch, head, i), row_of(x.logsumexp, batch, head, i)
            base = highest if highest > -np.inf else 0.0
            whole = 2.0 ** (sink - base) if x.sinks else 0.0
            for c in range(chunks):
                whole += total[c * wide] * 2.0 ** (top[c * wide] - base)
            log[0], log[1] = (-np.inf, 0.0) if whole == 0.0 else (base, math.log(whole))
            # Summed into what the first chunk left.
            for c in range(chunks):
                n = c * wide
                share = number_for(parts, 0 if total[n] == 0 else 2.0 ** (top[n] - base) / whole)
                if c == 0:
                    for d in range(x.value_dim):
                        parts[d] = share * parts[d] if share != 0 else 0
                elif share != 0:
                    for d in range(x.value_dim):
                        parts[d] += share * parts[n * x.value_dim + d]
            for d in range(x.value_dim):
                out[d] = narrow(out, parts[d])
