"""What attention over a part of the keys leaves behind, and how parts merge.

Attention over a set of keys is (output, logsumexp). Two disjoint sets merge exactly:

    logsumexp = log(exp(l1) + exp(l2))        output = o1 * exp(l1 - logsumexp) + o2 * exp(l2 - logsumexp)

so keys may be split over tiles, threads or machines, in any order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]


class State(NamedTuple):
    """Attention over a part of the keys.

    output : (..., queries, value dim); logsumexp : (..., queries), natural log. A row that saw nothing is (0, -inf).
    """

    output: Floats
    logsumexp: Floats


def merge(first: State, second: State) -> State:
    """Attention over the keys of both parts, as if they had been seen at once.

    Milakov & Gimelshein 2018, *Online normalizer calculation for softmax*, section 3.1 (m and d are kept together
    here as logsumexp = m + log d).

    >>> import numpy as np
    >>> empty = State(np.zeros((1, 2)), np.array([-np.inf]))
    >>> merge(empty, empty)
    State(output=array([[0., 0.]]), logsumexp=array([-inf]))
    """
    (one, left), (other, right) = first, second
    if one.shape != other.shape or left.shape != right.shape or left.shape != one.shape[:-1]:
        raise ValueError(
            f"parts to merge must have equal shapes, logsumexp that of output without its last axis: "
            f"got {one.shape} with {left.shape}, and {other.shape} with {right.shape}"
        )
    top = np.maximum(left, right)
    base = np.where(np.isneginf(top), 0, top).astype(top.dtype)
    p, q = np.exp(left - base), np.exp(right - base)
    total = p + q
    nothing = total == 0
    share = 1 / np.where(nothing, 1, total)
    with np.errstate(divide="ignore"):
        logsumexp = np.where(nothing, -np.inf, base + np.log(total)).astype(top.dtype)
    # A part of weight 0 is left out by selection: whatever stands in its output must not spread.
    parts = [(w * share)[..., None] * np.where((w == 0)[..., None], 0, o) for w, o in ((p, one), (q, other))]
    return State((parts[0] + parts[1]).astype(one.dtype), logsumexp)
