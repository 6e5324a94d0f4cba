"""Few queries against many keys, as when a model writes: bound by reading K and V once, so here dim rides the lanes.

The query heads that share a key head are one group, whose K and V are read once for all of its rows. Keys are cut
into chunks of fixed size; each leaves (output, top, total), and chunks are merged in order, so that the bits depend
neither on the threads nor on the batch. Merging is the rule of ``clearhead.state``, in units of log2.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from clearhead.kernels.cache import kernel, step
from clearhead.kernels.streaming import exp_row, match_1, match_2, match_4, match_8, mix_1, mix_2, mix_4, mix_8
from clearhead.kernels.tiles import row_of
from clearhead.kernels.vectors import LN2, LOG2E, address_of, pointer, widen

CHUNK = 1024  # keys in a share of work: 0.5 MB of keys at dim 128, and scores of 4 KB a row
ROWS = 8  # most rows (query heads of a group, times queries) at once
BLOCK = 32  # keys whose values stay in the first-level cache while each part of dim is mixed


class DecodeScratch(NamedTuple):
    """What one thread needs: its rows' queries (rows, dim), scores (rows, CHUNK and a vector more), and
    values (BLOCK, value dim) where some must be left out."""

    query: NDArray[Any]
    scores: NDArray[Any]
    value: NDArray[Any]


def decode_scratch(dtype: DTypeLike, dim: int, value_dim: int) -> DecodeScratch:
    """Room for one thread."""
    return DecodeScratch(
        np.zeros((ROWS, dim), dtype), np.zeros((ROWS, CHUNK + 64), dtype), np.zeros((BLOCK, value_dim), dtype)
    )


class Pages(NamedTuple):
    """Where keys and values lie: token j of batch entry b in page j // size, whose first element lies key[b, page] (or
    value[b, page]) elements from the array's address. Contiguous arrays are pages that happen to follow one another.
    """

    size: int
    key: NDArray[np.int64]
    value: NDArray[np.int64]


@kernel
def decode_chunks(x, pages, w, first, last, chunks, partial, top, total):
    """Work items first ... last-1: item t is chunk ``t % chunks`` of key head ``t // chunks`` of the batch.

    partial : (items, rows, value dim), top and total : (items, rows) of what each chunk leaves, rows a power of two; a
    row that sees nothing of it leaves (0, -inf, 0).
    """
    key_heads, rows = x.heads // x.group, x.group * x.queries
    for item in range(first, last):
        batch, key_head = item // chunks // key_heads, item // chunks % key_heads
        start = item % chunks * CHUNK
        stop = min(x.keys, start + CHUNK)
        low, high, mixed = stop, start, False
        for r in range(rows):
            row_low, row_high = span(x, batch, key_head, r, start, stop)
            if row_high > row_low:
                low, high = min(low, row_low), max(high, row_high)
        for r in range(rows):
            row_low, row_high = span(x, batch, key_head, r, start, stop)
            mixed = mixed or row_low != low or row_high != high
            top[item, r], total[item, r] = -np.inf, 0
            for i in range(x.value_dim):
                partial[item, r, i] = 0
        if high <= low:
            continue
        load_rows(x, w.query, batch, key_head, rows)
        match_keys(x, pages, w, batch, key_head, rows, low, high)
        for r in range(rows):
            row_low, row_high = span(x, batch, key_head, r, start, stop)
            top[item, r], total[item, r] = normalize_row(w.scores, r, row_low - low, row_high - low, high - low)
        # A hidden value, times its weight of 0, is nothing: but only if it is finite.
        careful = mixed and not values_finite(x, pages, batch, key_head, low, high)
        mix_values(x, pages, w, batch, key_head, rows, low, high, careful, partial, item)
        if careful:
            mix_strange(x, pages, batch, key_head, w.scores, low, start, stop, partial, item)


@step
def token(array, table, batch, head, j, size):
    """A pointer to the first number of token j."""
    offset = table[batch, j // size] + head * array.steps[0] + j % size * array.steps[1]
    return address_of(array.address, offset, array.like)


@step
def span(x, batch, key_head, row, start, stop):
    """Which keys of start ... stop-1 this row of the group sees."""
    head, i = key_head * x.group + row // x.queries, row % x.queries
    return max(start, row_of(x.start, batch, head, i)[0]), min(stop, row_of(x.stop, batch, head, i)[0])


@step
def load_rows(x, query, batch, key_head, rows):
    """The group's queries, scaled to units of log2; rows that only fill up are 0."""
    factor = query.dtype.type(x.scale * LOG2E)
    inner = x.query.steps[2]
    for r in range(rows):
        row = row_of(x.query, batch, key_head * x.group + r // x.queries, r % x.queries)
        for i in range(x.dim):
            query[r, i] = widen(row[i * inner]) * factor
    for r in range(rows, ROWS):
        for i in range(x.dim):
            query[r, i] = 0


@step
def match_keys(x, pages, w, batch, key_head, rows, low, high):
    """w.scores[r, j - low] = query r . key j, for as many rows at once as a power of two holds them."""
    stride, query, room = x.key.steps[1], pointer(w.query, 0), w.scores.shape[1]
    first = low
    while first < high:
        count = min(high, (first // pages.size + 1) * pages.size) - first
        key = token(x.key, pages.key, batch, key_head, first, pages.size)
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
def mix_values(x, pages, w, batch, key_head, rows, low, high, careful, partial, item):
    """partial[item, r] += sum over j of w.scores[r, j - low] * value j; if careful, of finite numbers alone."""
    room, dim, inner = w.scores.shape[1], x.value_dim, x.value.steps[2]
    out = pointer(partial, item * partial.shape[1] * dim)
    first = low
    while first < high:
        count = min(min(high, first + BLOCK), (first // pages.size + 1) * pages.size) - first
        value = token(x.value, pages.value, batch, key_head, first, pages.size)
        weights = pointer(w.scores, first - low)
        if careful:
            for j in range(count):
                row = token(x.value, pages.value, batch, key_head, first + j, pages.size)
                for i in range(dim):
                    number = widen(row[i * inner])
                    w.value[j, i] = number if math.isfinite(number) else 0
            mix_rows(pointer(w.value, 0), dim, count, weights, room, out, dim, rows)
        else:
            mix_rows(value, x.value.steps[1], count, weights, room, out, dim, rows)
        first += count


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
def normalize_row(scores, r, low, high, count):
    """Scores of one row to weights against their own maximum: (top, total). Outside low ... high-1: 0."""
    low, high = min(max(low, 0), count), min(max(high, 0), count)
    for j in range(low):
        scores[r, j] = -np.inf
    for j in range(high, count + 64):
        scores[r, j] = -np.inf
    return exp_row(pointer(scores, r * scores.shape[1]), count)


@step
def values_finite(x, pages, batch, key_head, low, high):
    """Whether these values are all finite."""
    inner = x.value.steps[2]
    for j in range(low, high):
        row = token(x.value, pages.value, batch, key_head, j, pages.size)
        for i in range(x.value_dim):
            if not math.isfinite(widen(row[i * inner])):
                return False
    return True


@step
def mix_strange(x, pages, batch, key_head, scores, low, start, stop, partial, item):
    """What mix_values left out: NaN and infinity, for the rows that see them."""
    inner = x.value.steps[2]
    for r in range(x.group * x.queries):
        row_low, row_high = span(x, batch, key_head, r, start, stop)
        for j in range(row_low, row_high):
            row = token(x.value, pages.value, batch, key_head, j, pages.size)
            for i in range(x.value_dim):
                number = widen(row[i * inner])
                if not math.isfinite(number):
                    partial[item, r, i] += scores[r, j - low] * number


@kernel
def merge_chunks(x, chunks, partial, top, total, output, logsumexp):
    """What the chunks left, merged in order, with the sinks: output and logsumexp as in ``forward.attend``."""
    rows = x.group * x.queries
    for sequence in range(partial.shape[0] // chunks):
        batch, key_head = sequence // (x.heads // x.group), sequence % (x.heads // x.group)
        for r in range(rows):
            head, i = key_head * x.group + r // x.queries, r % x.queries
            highest = x.sinks[head] / LN2 if x.sinks.size else -np.inf
            for c in range(chunks):
                highest = max(highest, np.float64(top[sequence * chunks + c, r]))
            out, log = row_of(output, batch, head, i), row_of(logsumexp, batch, head, i)
            base = highest if highest > -np.inf else 0.0
            whole = 2.0 ** (x.sinks[head] / LN2 - base) if x.sinks.size else 0.0
            for c in range(chunks):
                n = sequence * chunks + c
                whole += total[n, r] * 2.0 ** (top[n, r] - base)
            for d in range(x.value_dim):
                out[d] = 0
            log[0], log[1] = (-np.inf, 0.0) if whole == 0.0 else (base, math.log(whole))
            for c in range(chunks):
                n = sequence * chunks + c
                if total[n, r] == 0:
                    continue
                share = partial.dtype.type(2.0 ** (top[n, r] - base) / whole)
                for d in range(x.value_dim):
                    out[d] += share * partial[n, r, d]
