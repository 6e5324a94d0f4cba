"""Row measures in one pass over the scores: entropy, distance, and the mass on chosen keys.

Nothing but a few numbers a row is kept. Definitions: ``clearhead.measures``.
"""

import numpy as np

from clearhead.kernels.cache import kernel
from clearhead.kernels.microkernels import fold_tile
from clearhead.kernels.tiles import BLOCK, FOLDS, TOP, fill, load_queries, row_of, score_keys, take_tile
from clearhead.kernels.vectors import LN2, pointer
from clearhead.kernels.visible import HIDDEN
from clearhead.kernels.weights import load_logsumexp, to_weights

ENTROPY, DISTANCE, SINK, PREVIOUS, SELF, SEES = range(6)  # the last: 1 if the row sees anything, else 0
MEASURES = 6


@kernel
def measure_rows(x, w, first_item, last_item, logsumexp, sink, aligned, out):
    """Work items as in ``forward.attend``. out : (batch, heads, queries, MEASURES), float64, zeros before.

    sink : how many first keys count as the sink. Query i stands at key i + aligned.
    """
    rows = len(w.queries)
    tiles = (x.queries + rows - 1) // rows
    for item in range(first_item, last_item):
        sequence = item // tiles
        batch, head = sequence // x.heads, sequence % x.heads
        here = take_tile(x, w, item % tiles)
        low, high, full_low, full_high = load_queries(x, w, batch, head)
        load_logsumexp(x, w, batch, head, here, logsumexp)
        fill(w.lanes, TOP, TOP + 1, -np.inf)
        for first in range(low, high, BLOCK):
            keys = min(BLOCK, high - first)
            if score_keys(x, w, batch, head, here, first, keys, full_low, full_high) == HIDDEN:
                continue
            to_weights(x, w, keys)
            fill(w.lanes, FOLDS, FOLDS + 3, 0.0)
            fold_tile(pointer(w.scores, 0), pointer(w.extra, 0), keys, pointer(w.lanes, FOLDS * rows))
            for r in range(here):
                measured = row_of(out, batch, head, w.queries[r])
                place = w.queries[r] + aligned - first  # of this query, counted from the tile's first key
                measured[ENTROPY] += w.lanes[FOLDS, r] * LN2
                measured[DISTANCE] += w.lanes[FOLDS + 2, r] * float(place) - w.lanes[FOLDS + 1, r]
                for j in range(min(keys, sink - first)):
                    measured[SINK] += w.scores[j, r]
                if 1 <= place <= keys:
                    measured[PREVIOUS] += w.scores[place - 1, r]
                if 0 <= place < keys:
                    measured[SELF] += w.scores[place, r]
        for r in range(here):
            measured = row_of(out, batch, head, w.queries[r])
            # A row of NaN has no largest score, but it does see something.
            measured[SEES] = w.lanes[TOP, r] > -np.inf or measured[ENTROPY] != measured[ENTROPY]
