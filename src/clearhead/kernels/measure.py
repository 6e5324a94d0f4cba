"""Row measures in one pass over the scores: entropy, distance, and the mass on chosen keys.

Nothing but a few numbers a row is kept. Definitions: ``clearhead.measures``.
"""

import numpy as np

from clearhead.kernels.addresses import pointer
from clearhead.kernels.arguments import COMPUTED, unpack
from clearhead.kernels.cache import kernel
from clearhead.kernels.microkernels import fold_tile
from clearhead.kernels.tiles import (
    FOLDS,
    REACH_HIGH,
    REACH_LOW,
    TOP,
    fill,
    find_reach,
    load_queries,
    room,
    row_of,
    take_tile,
)
from clearhead.kernels.vectors import LN2
from clearhead.kernels.visible import BLOCK
from clearhead.kernels.weights import load_logsumexp, weigh_block

ENTROPY, DISTANCE, SINK, PREVIOUS, SELF, SEES = range(6)  # the last: 1 if the row sees anything, else 0
MEASURES = 6


@kernel
def measure_rows(numbers, likes, places, first_item, last_item, sink, aligned):
    """Work items as in ``forward.attend``, whose x.logsumexp this reads.

    Adds to x.output (batch, heads, queries, MEASURES), float64.

    sink : how many first keys count as the sink. Query i stands at key i + aligned.
    """
    x, w = unpack(pointer(numbers, 0), likes), room(places, likes[COMPUTED])
    rows = x.rows
    tiles = (x.queries + rows - 1) // rows
    for item in range(first_item, last_item):
        sequence = item // tiles
        batch, head = sequence // x.heads, sequence % x.heads
        here = take_tile(x, w, item % tiles)
        load_queries(x, w, batch, head)
        find_reach(x, w, batch, head, here)
        load_logsumexp(x, w, batch, head, here)
        fill(pointer(w.lanes, TOP * rows), rows, -np.inf)
        for first in range(w.reach[REACH_LOW], w.reach[REACH_HIGH], BLOCK):
            keys = min(BLOCK, w.reach[REACH_HIGH] - first)
            if not weigh_block(x, w, batch, head, first, keys):
                continue
            fill(pointer(w.lanes, FOLDS * rows), 3 * rows, 0.0)
            fold_tile(w.scores, w.extra, keys, pointer(w.lanes, FOLDS * rows))
            bits, places = pointer(w.lanes, FOLDS * rows), pointer(w.lanes, (FOLDS + 1) * rows)
            mass = pointer(w.lanes, (FOLDS + 2) * rows)
            for r in range(here):
                measured, weights = row_of(x.output, batch, head, w.queries[r]), pointer(w.scores, r)
                place = w.queries[r] + aligned - first  # of this query, counted from the tile's first key
                measured[ENTROPY] += bits[r] * LN2
                measured[DISTANCE] += mass[r] * float(place) - places[r]
                for j in range(min(keys, sink - first)):
                    measured[SINK] += weights[j * rows]
                if 1 <= place <= keys:
                    measured[PREVIOUS] += weights[(place - 1) * rows]
                if 0 <= place < keys:
                    measured[SELF] += weights[place * rows]
        for r in range(here):
            measured = row_of(x.output, batch, head, w.queries[r])
            # A row of NaN has no largest score, but it does see something.
            measured[SEES] = w.lanes[TOP * rows + r] > -np.inf or measured[ENTROPY] != measured[ENTROPY]
