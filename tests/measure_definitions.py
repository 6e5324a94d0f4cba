"""What measures are, written out over dense weights in float64: the table in ``clearhead.measures``, slow and plain."""

from __future__ import annotations

from typing import Any

import numpy as np

import clearhead as ch
from clearhead.core import score_block
from clearhead.problem import check

Dense = np.ndarray[Any, Any]


def dense(problem: dict[str, Any]) -> tuple[Dense, Dense]:
    """(weights in float64, which cells are visible), both (..., heads, queries, keys), of a problem with values."""
    _, weights, _ = ch.core.attend(**problem, dtype=np.float64)
    checked = check(**problem)
    extent, visible = checked.extent, np.zeros(checked.extent.shape, bool)
    with np.errstate(all="ignore"):
        for place in np.ndindex(*extent.lead, extent.heads):
            batch = int(np.ravel_multi_index(place[:-1], extent.lead)) if extent.lead else 0
            cells = np.arange(extent.queries), np.arange(extent.keys)
            visible[place] = score_block(checked, batch, place[-1], *cells, np.dtype(np.float64)) != -np.inf
    return weights, checked.as_given(visible, -3)


def positions(queries: int, keys: int, align: str) -> Dense:
    """Where each query stands among the keys."""
    return np.arange(queries) + (keys - queries if align == "end" else 0)


def of_rows(weights: Dense, sink: int, align: str) -> dict[str, Dense]:
    queries, keys = weights.shape[-2:]
    position, key = positions(queries, keys, align)[:, None], np.arange(keys)
    terms = np.where(weights > 0, -weights * np.log(np.where(weights > 0, weights, 1)), 0)
    sees = (weights > 0).any(axis=-1)
    farthest = np.maximum(abs(position), abs(position - (keys - 1)))[:, 0] if keys else np.zeros(queries)

    def back(distance: int) -> Dense:
        return np.where(position - distance == key, weights, 0).sum(axis=-1)

    entropy = terms.sum(axis=-1)
    return {
        "entropy": entropy,
        "perplexity": np.where(sees, np.exp(entropy), 0),
        "mass": weights.sum(axis=-1),
        "distance": (weights * (position - key)).sum(axis=-1),
        "sink": weights[..., :sink].sum(axis=-1),
        "previous": back(1),
        "self": back(0),
        "offset(7)": back(7),
        "offset(-2)": back(-2),
        "largest": weights.max(axis=-1, initial=0),
        "diagonality": np.where(sees, 1 - (weights * abs(position - key)).sum(axis=-1) / np.maximum(farthest, 1), 0),
    }


def of_keys(weights: Dense, visible: Dense) -> dict[str, Dense]:
    """What keys receive, in all and on average, and the share of them that is covered."""
    received, seen = weights.sum(axis=-2), visible.sum(axis=-2)
    with np.errstate(invalid="ignore", divide="ignore"):
        covered = np.where(seen > 0, np.minimum(received, 1), 0).sum(axis=-1) / (seen > 0).sum(axis=-1)
        return {"received": received, "seen": seen, "normalized": received / seen, "coverage": covered}


def pooled(weights: Dense, rows: int, columns: int, largest: bool = False) -> Dense:
    """The mean, or the largest, of each block of a grid."""
    *lead, queries, keys = weights.shape
    rows, columns = min(rows, queries), min(columns, keys)
    out = np.zeros((*lead, rows, columns))
    for r in range(rows):
        for c in range(columns):
            block = weights[
                ..., r * queries // rows : (r + 1) * queries // rows, c * keys // columns : (c + 1) * keys // columns
            ]
            out[..., r, c] = block.max(axis=(-2, -1)) if largest else block.mean(axis=(-2, -1))
    return out


def top(weights: Dense, visible: Dense, k: int) -> tuple[Dense, Dense]:
    """(keys, weights) of the k largest, ties to the smaller key, (-1, 0) where there are fewer."""
    keys = weights.shape[-1]
    order = np.lexsort((np.broadcast_to(np.arange(keys), weights.shape), -weights, ~visible), axis=-1)[..., :k]
    found, seen = np.take_along_axis(weights, order, -1), np.take_along_axis(visible, order, -1)
    missing = [(0, 0)] * (weights.ndim - 1) + [(0, max(0, k - keys))]
    return (
        np.pad(np.where(seen, order, -1), missing, constant_values=-1),
        np.pad(np.where(seen, found, 0), missing),
    )
