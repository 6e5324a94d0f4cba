"""Gradients by the textbook in float64, one head at a time and in blocks of its rows: what results are compared with.

With weights P, output gradient dO and values V: dV = P^T dO, dP = dO V^T, dS = P (dP - rowsum(P dP)), and the scores'
gradients dS go back through what the scores were made of.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from workload import Workload

Floats = NDArray[np.float64]
BLOCK = 256  # rows at a time


def head(workload: Workload, batch: int, head: int) -> Floats:
    """(tokens, 4 dim): output, and gradients of query, key and value, of a head that has its own keys."""
    arrays = (*workload.arrays()[0], workload.grad_output())
    query, key, value, grad = (array[batch, head].astype(np.float64) for array in arrays)
    output, of_query, of_key, of_value = (np.zeros_like(array) for array in (value, query, key, value))
    for start in range(0, len(query), BLOCK):
        rows = np.arange(start, min(start + BLOCK, len(query)))
        scores, back = _matched(workload, query[rows], key)
        scores = np.where(workload.sees(batch, rows), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        output[rows] = weights @ value
        of_value += weights.T @ grad[rows]
        changes = grad[rows] @ value.T
        changes = weights * (changes - (weights * changes).sum(axis=-1, keepdims=True))
        own, others = back(changes)
        of_query[rows] = own
        of_key += others
    return np.concatenate([output, of_query, of_key, of_value], axis=-1)


def _matched(workload: Workload, query: Floats, key: Floats):  # type: ignore[no-untyped-def]
    """Scores of some queries, and the function from their gradients to those of these queries and of the keys."""
    if workload.score == "additive":
        W_q, W_k, v = (array.astype(np.float64) for array in workload.learned())
        bent = np.tanh((query @ W_q)[:, None] + key @ W_k)

        def back(changes: Floats) -> tuple[Floats, Floats]:
            each = changes[..., None] * v * (1 - bent**2)
            return each.sum(axis=1) @ W_q.T, each.sum(axis=0) @ W_k.T

        return bent @ v, back
    scale = 1 / np.sqrt(workload.dim)
    return query @ key.T * scale, lambda changes: (changes @ key * scale, changes.T @ query * scale)
