"""Weights on demand: exp(score - logsumexp) for any rows and any run of keys.

Scores are computed by the same code, in the same order of operations, as in the forward pass.
"""

import numpy as np

from clearhead.kernels.cache import kernel, step
from clearhead.kernels.microkernels import weigh2_tile, weigh_tile
from clearhead.kernels.tiles import (
    BLOCK,
    HIGH,
    LOW,
    fill,
    is_natural,
    load_queries,
    row_of,
    score_keys,
)
from clearhead.kernels.vectors import pointer
from clearhead.kernels.visible import HIDDEN


@kernel
def weigh(x, w, batch, head, queries, low, high, logsumexp, out):
    """out[row, key - low] = weight of queries[row] on keys low ... high-1; out is zeros before.

    logsumexp : (batch, heads, queries, 2), as ``forward.attend`` leaves it. out : (1, 1, len(queries), high - low).
    """
    rows = len(w.queries)
    for begin in range(0, len(queries), rows):
        here = min(rows, len(queries) - begin)
        for r in range(rows):
            w.queries[r] = queries[begin + min(r, here - 1)]
        seen_low, seen_high, full_low, full_high = load_queries(x, w, batch, head)
        load_logsumexp(x, w, batch, head, here, logsumexp)
        last = min(high, seen_high)
        for first in range(max(low, seen_low), last, BLOCK):
            keys = min(BLOCK, last - first)
            if score_keys(x, w, batch, head, here, first, keys, full_low, full_high) == HIDDEN:
                continue
            to_weights(x, w, keys)
            for r in range(here):
                row = row_of(out, 0, 0, begin + r)
                for j in range(keys):
                    row[first - low + j] = w.scores[j, r]


@step
def load_logsumexp(x, w, batch, head, here, logsumexp):
    """Each row's logsumexp in the scores' unit, as a high and a low part. A row that sees nothing gets +inf."""
    fill(w.lanes, HIGH, HIGH + 1, np.inf)
    fill(w.lanes, LOW, LOW + 1, 0.0)
    for r in range(here):
        parts = row_of(logsumexp, batch, head, w.queries[r])
        top = parts[0]
        if top == -np.inf:
            continue
        high = w.scores.dtype.type(top)
        w.lanes[HIGH, r] = high
        w.lanes[LOW, r] = parts[1] / x.unit + (top - high if -np.inf < high < np.inf else 0)


@step
def to_weights(x, w, keys):
    """w.scores from scores to weights; w.extra to their logarithms to base 2."""
    rows = len(w.queries)
    high, low = pointer(w.lanes, HIGH * rows), pointer(w.lanes, LOW * rows)
    if is_natural(x):
        weigh_tile(pointer(w.scores, 0), keys, high, low, pointer(w.extra, 0))
    else:
        weigh2_tile(pointer(w.scores, 0), keys, high, low, pointer(w.extra, 0))
