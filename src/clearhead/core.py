"""Attention, in NumPy: score, normalize, aggregate.

    score      how well does this query match every key?      s = q.k / sqrt(dim)
    normalize  turn scores into weights that sum to 1          w = softmax(s)
    aggregate  mix the values by those weights                 o = w.v

The first three functions are the tutorial's: all of attention for arrays that fit in memory. Below them is the
same with every mask, score and corner case, dense and slow, in float64 if asked: the oracle that each fast path
of this library is tested against.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from clearhead.algebra import Cells, Mask
from clearhead.problem import Problem, check
from clearhead.scores import Additive, Dot, General, Score

Floats = NDArray[np.floating[Any]]


def create_qkv(x: ArrayLike, W_q: ArrayLike, W_k: ArrayLike, W_v: ArrayLike) -> tuple[Floats, Floats, Floats]:
    """What each token asks (Q), offers (K) and says (V): ``x @ W_q, x @ W_k, x @ W_v``. x: (..., tokens, dim)."""
    x = np.asarray(x)
    return x @ np.asarray(W_q), x @ np.asarray(W_k), x @ np.asarray(W_v)


def softmax(x: ArrayLike, axis: int = -1) -> Floats:
    """exp(x) / sum(exp(x)) along an axis, stable: the maximum is subtracted first.

    >>> softmax([1000.0, 1000.0]).tolist()
    [0.5, 0.5]
    """
    x = np.asarray(x)
    e = np.exp(x - np.max(x, axis=axis, keepdims=True))
    return np.asarray(e / np.sum(e, axis=axis, keepdims=True))


def scaled_dot_product_attention(Q: ArrayLike, K: ArrayLike, V: ArrayLike) -> tuple[Floats, Floats]:
    """softmax(Q K^T / sqrt(d_k)) V, and the weights. Q: (..., queries, d_k), K: (..., keys, d_k), V: (..., keys, d_v).

    Vaswani et al. 2017, *Attention Is All You Need*, equation 1. Memory: queries x keys. The function of the same
    name at the top level takes the same arguments, keeps memory linear, and returns weights that act alike.
    """
    Q, K, V = np.asarray(Q), np.asarray(K), np.asarray(V)
    scores = Q @ np.swapaxes(K, -1, -2) / math.sqrt(Q.shape[-1])
    weights = softmax(scores)
    return weights @ V, weights


def attend(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    mask: Mask | ArrayLike | None = None,
    score: Score | None = None,
    dtype: DTypeLike | None = None,
) -> tuple[Floats, Floats, Floats]:
    """The oracle: (output, weights, logsumexp) by dense NumPy, computed in ``dtype`` (default: as the kernels do).

    Takes what :func:`clearhead.attention` takes, and costs queries x keys of memory.
    """
    problem = check(query, key, value, mask, score)
    at = np.dtype(dtype or problem.compute_dtype)
    extent, lead = problem.extent, problem.extent.lead
    assert problem.value is not None
    weights, logsumexp = np.zeros(extent.shape, at), np.zeros(extent.shape[:-1], at)
    output = np.zeros((*extent.shape[:-1], problem.value.shape[-1]), at)
    with np.errstate(all="ignore"):
        for place in np.ndindex(*lead, extent.heads):
            batch = int(np.ravel_multi_index(place[:-1], lead)) if lead else 0
            scores = score_block(problem, batch, place[-1], np.arange(extent.queries), np.arange(extent.keys), at)
            sink = None if problem.score.sinks is None else at_head(problem.score.sinks, place[-1])
            weights[place], logsumexp[place] = normalize(scores, sink)
            v = problem.value[(*place[:-1], place[-1] // problem.group)].astype(at)
            output[place] = aggregate(weights[place], v, visible=scores != -np.inf)
    return problem.as_given(output, -3), problem.as_given(weights, -3), problem.as_given(logsumexp, -2)


def score_block(
    problem: Problem, batch: int, head: int, queries: NDArray[Any], keys: NDArray[Any], dtype: DTypeLike
) -> Floats:
    """Scores (queries, keys) of a block of one head, modifiers and mask applied: hidden cells are -inf."""
    cells, extent, score = Cells.of_head(batch, head, queries, keys), problem.extent, problem.score
    lead = np.unravel_index(batch, extent.lead) if extent.lead else ()
    q = problem.query[(*lead, head)][queries].astype(dtype)
    k = problem.key[(*lead, head // problem.group)][keys].astype(dtype)
    s = match(score, q, k, head) * np.asarray(problem.scale, dtype)
    if score.softcap is not None:
        s = score.softcap * np.tanh(s / score.softcap)
    if score.bias is not None:
        s = s + still_finite(at_cells(score.bias, cells, problem), dtype)
    if score.slopes is not None:
        distance = np.abs(cells.query + extent.offset(score.align, "alibi") - cells.key)
        s = s - np.asarray(at_head(score.slopes, head), dtype) * distance.astype(dtype)
    if score.function is not None and s.size:
        index = np.broadcast_arrays(s, cells.batch, cells.head, cells.query, cells.key)
        s = np.vectorize(score.function, otypes=[dtype])(*index)
    if problem.mask is not None:
        s = np.where(problem.mask.visible(cells, extent), s, -np.inf)
    return np.asarray(s, dtype)


def match(score: Score, q: Floats, k: Floats, head: int) -> Floats:
    """The base score of every query with every key: (queries, keys)."""
    match score.base:
        case Dot():
            return np.asarray(q @ k.T)
        case General(weight):
            return np.asarray(q @ (weight if weight.ndim == 2 else weight[head]).astype(q.dtype) @ k.T)
        case Additive(query_weight, key_weight, vector):
            asked, offered = q @ query_weight.astype(q.dtype), k @ key_weight.astype(q.dtype)
            out = np.empty((len(q), len(k)), q.dtype)
            for i in range(len(q)):  # one query at a time: all at once would take queries x keys x hidden
                out[i] = np.tanh(asked[i] + offered) @ vector.astype(q.dtype)
            return out


def normalize(scores: Floats, sink: float | None = None) -> tuple[Floats, Floats]:
    """(weights, logsumexp) of each row; hidden cells (-inf) get 0, and a row of nothing else is 0 with -inf."""
    top = np.max(scores, axis=-1, initial=-np.inf if sink is None else sink)
    base = np.where(np.isneginf(top), 0, top).astype(scores.dtype)
    e = np.where(np.isneginf(scores), 0, np.exp(scores - base[..., None]))
    total = np.sum(e, axis=-1) + (0 if sink is None else np.exp(np.asarray(sink - base)))
    empty = total == 0
    weights = e / np.where(empty, 1, total)[..., None]
    return weights, np.where(empty, -np.inf, base + np.log(np.where(empty, 1, total)))


def aggregate(weights: Floats, value: Floats, visible: NDArray[np.bool_]) -> Floats:
    """``weights @ value``, in which what a row may not see cannot touch it, NaN and infinity included."""
    finite = np.isfinite(value)
    output = weights @ np.where(finite, value, 0)
    for key in np.flatnonzero(~finite.all(axis=-1)):
        strange = np.where(finite[key], 0, value[key])
        output += np.where(visible[:, key, None] & ~finite[key], weights[:, key, None] * strange, 0)
    return np.asarray(output)


def still_finite(values: Floats, dtype: DTypeLike) -> Floats:
    """In another dtype, where a finite number too large for it becomes its largest instead of infinity."""
    limit = np.finfo(np.dtype(dtype)).max
    return np.asarray(np.where(np.isfinite(values), np.clip(values, -limit, limit), values)).astype(dtype)


def at_head(values: Floats, head: int) -> float:
    """The number of one head, where one may stand for all."""
    return float(values.reshape(-1)[head if values.size > 1 else 0])


def at_cells(values: Floats, cells: Cells, problem: Problem) -> Floats:
    """An array that broadcasts to the matrix, looked up at each cell."""
    full = np.broadcast_to(values, problem.extent.shape)
    lead = np.unravel_index(cells.batch, problem.extent.lead) if problem.extent.lead else ()
    return np.asarray(full[(*lead, cells.head, cells.query, cells.key)])
