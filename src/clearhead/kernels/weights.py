"""Weights on demand: exp(score - logsumexp) for any rows and any run of keys.

Scores are computed by the same code, in the same order of operations, as in the forward pass.
"""

import numpy as np

from clearhead.kernels.addresses import number_for, pointer
from clearhead.kernels.arguments import COMPUTED, unpack
from clearhead.kernels.cache import kernel, step
from clearhead.kernels.microkernels import weigh2_tile, weigh_tile
from clearhead.kernels.tiles import (
    HIGH,
    LOW,
    REACH_HIGH,
    REACH_LOW,
    fill,
    find_reach,
    is_natural,
    keys_of,
    load_queries,
    look,
    room,
    row_of,
    score_keys,
)
from clearhead.kernels.visible import BLOCK, HIDDEN


@kernel
def weigh(numbers, likes, places, batch, head, queries, first_row, last_row, low, high):
    """x.output[0, 0, row, key - low] = weight of queries[row] on keys low ... high-1, for some of the rows.

    Arguments as in ``forward.attend``, whose x.logsumexp this reads; x.output is zeros before.
    """
    x, w = unpack(pointer(numbers, 0), likes), room(places, likes[COMPUTED])
    rows = x.rows
    for begin in range(first_row, last_row, rows):
        here = min(rows, last_row - begin)
        for r in range(rows):
            w.queries[r] = queries[begin + min(r, here - 1)]
        load_queries(x, w, batch, head)
        find_reach(x, w, batch, head, here)
        load_logsumexp(x, w, batch, head, here)
        last = min(high, w.reach[REACH_HIGH])
        for first in range(max(low, w.reach[REACH_LOW]), last, BLOCK):
            keys = min(BLOCK, last - first)
            if not weigh_block(x, w, batch, head, first, keys):
                continue
            for r in range(here):
                row = pointer(row_of(x.output, 0, 0, begin + r), first - low)
                for j in range(keys):
                    row[j] = w.scores[j * rows + r]


@step
def load_logsumexp(x, w, batch, head, here):
    """Each row's logsumexp in the scores' unit, as a high and a low part. A row that sees nothing gets +inf."""
    high, low = pointer(w.lanes, HIGH * x.rows), pointer(w.lanes, LOW * x.rows)
    fill(high, x.rows, np.inf)
    fill(low, x.rows, 0.0)
    for r in range(here):
        parts = row_of(x.logsumexp, batch, head, w.queries[r])
        top = parts[0]
        if top == -np.inf:
            continue
        big = number_for(high, top)
        high[r] = big
        low[r] = parts[1] / x.unit + (top - big if -np.inf < big < np.inf else 0)


@step
def weigh_block(x, w, batch, head, first, keys):
    """w.scores = the loaded queries' weights on these keys, w.extra their logarithms to base 2; False if all hidden."""
    shown, marked = look(x, w, batch, head, first, keys)
    if marked == HIDDEN:
        return False
    key, step = keys_of(x, w, batch, head, first, keys)
    score_keys(x, w, batch, head, first, keys, key, step, key, step, shown, marked, None)
    high, low = pointer(w.lanes, HIGH * x.rows), pointer(w.lanes, LOW * x.rows)
    if is_natural(x):
        weigh_tile(w.scores, keys, high, low, w.extra)
    else:
        weigh2_tile(w.scores, keys, high, low, w.extra)
    return True
