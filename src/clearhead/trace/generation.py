"""The weights of a generation, step by step, as one record in absolute positions.

transformers gives a tuple of steps, each a tuple of layers. The first step reads the prompt: n queries by n keys; each
after it reads what was written last: 1 query by n + 1, n + 2 ... keys. Viewers that expect one square per layer crash
on it (huggingface/transformers#26174, bertviz#116)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clearhead.trace.errors import TraceError

Floats = NDArray[np.floating[Any]]


def merge_steps(steps: Sequence[Sequence[Floats]], cross: bool = False) -> list[Floats]:
    """One array (texts, heads, queries, keys) a layer, from arrays (texts, heads, queries of the step, keys) by step.

    Rows follow each other in the order of the steps. Keys are an encoder's, the same in each step, if ``cross``. Else
    they are the cache's: where they grow with the queries they stand where they are; where a static cache shows all
    its places from the beginning, those past the last query are empty and are cut off; where a sliding cache shows
    the last ones only, these stand at the end of what has been read.

    Raises TraceError where steps do not fit each other.
    """
    counts = {len(step) for step in steps}
    if len(counts) != 1:
        raise TraceError(f"the steps of this generation have {_listed(counts)} layers: give all of each step's")
    return [_merge(layer, [step[layer] for step in steps], cross) for layer in range(counts.pop())]


def _merge(layer: int, parts: list[Floats], cross: bool) -> Floats:
    if len(outer := {part.shape[:2] for part in parts}) != 1:
        raise TraceError(f"layer {layer} has {_listed(outer)} texts and heads in the steps of one generation")
    if cross:
        if len(keys := {part.shape[3] for part in parts}) != 1:
            raise TraceError(
                f"layer {layer} looks at {_listed(keys)} keys of the encoder in the steps of one generation"
            )
        return np.concatenate(parts, axis=2)
    ends = np.cumsum([part.shape[2] for part in parts]).tolist()  # how much has been read after each step
    merged = np.zeros((*parts[0].shape[:2], ends[-1], ends[-1]), np.result_type(*parts))
    for part, end in zip(parts, ends, strict=True):
        rows, count = slice(end - part.shape[2], end), part.shape[3]
        if part[..., end:].any():
            raise TraceError(
                f"layer {layer} looks at {count} keys when {end} tokens have been read: what was in the cache before "
                f"is not among these steps"
            )
        merged[:, :, rows, max(0, end - count) : end] = part[..., :end]
    return merged


def _listed(values: set[Any]) -> str:
    return ", ".join(map(str, sorted(values)))
