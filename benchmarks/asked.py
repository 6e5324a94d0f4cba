"""What rows of measures ask for, as Clearhead is asked and as three lines of NumPy go on to find it in the matrix.

To compare results, what was found of rows becomes numbers side by side, all of a size: entropy over its largest,
distance over the number of tokens. What keys and blocks have is checked by the tests.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from workload import Workload

ROWS = ("entropy", "sink", "distance", "previous", "self")
SINK, TOP, GRID = 4, 8, 512

Floats = NDArray[Any]


def side_by_side(workload: Workload, rows: dict[str, Floats], top: Floats | None, output: Floats | None) -> Floats:
    """(..., 5 + top + dim): measures of rows, their largest weights, their outputs, as far as there are any."""
    sizes = {"entropy": np.log(workload.tokens), "distance": workload.tokens}
    columns = [(np.asarray(rows[name]) / sizes.get(name, 1))[..., None] for name in ROWS]
    columns += [np.asarray(part) for part in (top, output) if part is not None]
    return np.concatenate([column.astype(np.float64) for column in columns], axis=-1)


def of_matrix(workload: Workload, weights: Floats) -> tuple[dict[str, Floats], Floats | None]:
    """(measures of rows, and for "all" the largest weights) of dense weights (..., queries, keys).

    For "all" also what keys receive and the map, which are computed and left.
    """
    queries, keys = weights.shape[-2:]
    position = np.arange(queries, dtype=weights.dtype)
    logs = np.log(np.where(weights > 0, weights, 1))
    rows = {
        "entropy": -(weights * logs).sum(axis=-1),
        "sink": weights[..., :SINK].sum(axis=-1),
        "distance": weights.sum(axis=-1) * position - weights @ np.arange(keys, dtype=weights.dtype),
        "previous": np.pad(np.diagonal(weights, -1, -2, -1), [(0, 0)] * (weights.ndim - 2) + [(1, 0)]),
        "self": np.diagonal(weights, 0, -2, -1),
    }
    if workload.asks == "riding":
        return rows, None
    weights.sum(axis=-2)
    across = np.add.reduceat(weights, _edges(queries), axis=-2)
    np.add.reduceat(across, _edges(keys), axis=-1)
    order = np.argpartition(weights, keys - TOP, axis=-1)[..., keys - TOP :]
    return rows, -np.sort(-np.take_along_axis(weights, order, axis=-1), axis=-1)


def of_row(workload: Workload, query: int, weights: Floats, output: Floats) -> Floats:
    """What is to be compared of one row: its numbers side by side."""
    keys = np.arange(workload.tokens)
    seen = weights[weights > 0]
    rows = {
        "entropy": -(seen * np.log(seen)).sum(),
        "sink": weights[:SINK].sum(),
        "distance": (weights * (query - keys)).sum(),
        "previous": weights[query - 1] if query else 0.0,
        "self": weights[query],
    }
    riding = workload.asks == "riding"
    given = {name: np.asarray(value) for name, value in rows.items()}
    return side_by_side(workload, given, None if riding else -np.sort(-weights)[:TOP], output if riding else None)


def _edges(tokens: int) -> NDArray[np.int64]:
    blocks = min(GRID, tokens)
    return np.arange(blocks) * tokens // blocks
