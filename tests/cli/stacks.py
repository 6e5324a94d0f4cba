"""A trace of an encoder and a decoder, in a folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from clearhead import from_attentions
from clearhead.trace import Trace

SOURCE, TARGET = ["das", " Haus", " ist", " klein"], ["the", " house", " is", " small", "!"]


def weights(queries: int, keys: int, layers: int = 2, texts: int = 2) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.dirichlet(np.full(keys, 0.3), (texts, 3, queries)).astype(np.float32) for _ in range(layers)]


def save(path: Path) -> Trace:
    parts = {"encoder": weights(4, 4), "decoder": weights(5, 5), "cross": weights(5, 4)}
    return from_attentions(parts, {"encoder": [SOURCE] * 2, "decoder": [TARGET] * 2}).save(path)
