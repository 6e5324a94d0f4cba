"""Three tokens, four numbers each: all of attention, small enough to check by hand.

>>> import numpy as np
>>> example = worked_example()
>>> np.round(example.weights, 3).tolist()
[[0.332, 0.542, 0.126], [0.305, 0.362, 0.333], [0.275, 0.2, 0.525]]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clearhead import core

Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True, eq=False)
class WorkedExample:
    """The input ``x`` (3 tokens, 4), what each token asks, offers and says, and the three steps: scores
    (queries, keys), weights (queries, keys), output (queries, 4)."""

    x: Floats
    query: Floats
    key: Floats
    value: Floats
    scores: Floats
    weights: Floats
    output: Floats


def worked_example() -> WorkedExample:
    """The tutorial's numbers, from NumPy's legacy seed 42. The global random state is left alone."""
    random = np.random.RandomState(42)
    x = random.randn(3, 4)
    W_q, W_k, W_v = (random.randn(4, 4) * 0.5 for _ in range(3))
    query, key, value = core.create_qkv(x, W_q, W_k, W_v)
    scores = query @ key.T / np.sqrt(query.shape[-1])
    weights = core.softmax(scores)
    return WorkedExample(x, query, key, value, scores, weights, weights @ value)
