"""How much of their weight the rows of one part of a text give to the keys of another, in every head.

For a row i and a part of the keys B, mass(i, B) = sum of w_ij over j in B: between 0 and 1. A head's number is its
mean over the rows of the first part that see anything at all. Blocks of rows are computed, added up and forgotten, so
memory is linear in length, and what neither part touches is not computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from clearhead.trace.segments import Ranges

if TYPE_CHECKING:
    from clearhead.weights import AttentionWeights

BLOCK_CELLS = 1 << 22  # computed at once


def masses(weights: AttentionWeights, rows: Sequence[Ranges], keys: Sequence[Ranges]) -> NDArray[np.float64]:
    """The mean weight that each part of the rows gives to each part of the keys: (heads, parts, parts) float64.

    weights : (heads, queries, keys); rows, keys : for each part its ranges. NaN where no row of a part sees anything.

    >>> import clearhead as ch
    >>> weights = ch.attention_weights(np.zeros((1, 4, 2)), np.zeros((1, 4, 2)), mask=ch.masks.causal())
    >>> masses(weights, [((0, 2),), ((2, 4),)], [((0, 1),), ((1, 4),)]).round(3).tolist()  # rows 0, 1 and rows 2, 3
    [[[0.75, 0.25], [0.292, 0.708]]]
    """
    seeing = ~np.isneginf(weights.logsumexp64)
    low = min((start for part in keys for start, _ in part), default=0)
    high = max((stop for part in keys for _, stop in part), default=0)
    step = max(1, BLOCK_CELLS // max(1, len(weights) * (high - low)))
    found = np.full((len(weights), len(rows), len(keys)), np.nan)
    for number, part in enumerate(rows):
        total, count = np.zeros((len(weights), len(keys))), np.zeros(len(weights))
        for start, stop in part:
            count += seeing[:, start:stop].sum(axis=-1)
            for first in range(start, stop, step):
                block = weights[:, first : min(first + step, stop), low:high]
                for column, ranges in enumerate(keys):
                    for a, b in ranges:
                        total[:, column] += block[:, :, a - low : b - low].sum(axis=(1, 2), dtype=np.float64)
        np.divide(total, count[:, None], out=found[:, number], where=count[:, None] > 0)
    return found
