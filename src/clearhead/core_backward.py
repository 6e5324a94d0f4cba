"""The gradients of attention, in NumPy: dense, slow, in float64 if asked. What each fast path is tested against.

With weights w = softmax(s) of a row, output o = w.v and logsumexp l, a loss L changes with the scores by

    dL/ds_j = w_j * (dL/do . v_j  -  dL/do . o  +  dL/dl)

and with what scores are made of by the chain rule, backwards through the order of ``scores``: your function, ALiBi and
bias, softcap, scale, match. (Dao et al. 2022, *FlashAttention*, appendix B.2: D_i is dL/do . o. dL/dl is ours.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from clearhead.algebra import Cells, Mask
from clearhead.core import Floats, at_cells, at_head, normalize, still_finite
from clearhead.core import match as base_match
from clearhead.problem import Problem, check
from clearhead.scores import Additive, Dot, General, Score


def gradients(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    grad_output: ArrayLike,
    grad_logsumexp: ArrayLike | None = None,
    *,
    mask: Mask | ArrayLike | None = None,
    score: Score | None = None,
    dtype: DTypeLike | None = None,
) -> dict[str, Floats]:
    """The oracle: gradients by the names of ``clearhead.gradients.Gradients``, computed in ``dtype``.

    grad_output : shaped like the output; grad_logsumexp : like logsumexp, 0 when None.
    """
    problem = check(query, key, value, mask, score)
    found = gradients_of(problem, grad_output, grad_logsumexp, np.dtype(dtype or problem.compute_dtype))
    for name, given in (("query", query), ("key", key), ("value", value)):
        shape = np.shape(given)
        found[name] = problem.as_given(summed_to(found[name], (1, *shape) if problem.single else shape), -3)
    return found


def gradients_of(
    problem: Problem, grad_output: ArrayLike, grad_logsumexp: ArrayLike | None, at: np.dtype[Any]
) -> dict[str, Floats]:
    """The same for a Problem, in its arrays' shapes."""
    extent, lead = problem.extent, problem.extent.lead
    assert problem.value is not None
    full = (*extent.shape[:-1], problem.value.shape[-1])
    grad_out = np.asarray(grad_output).astype(at).reshape(full)
    grad_log = np.zeros(full[:-1], at) if grad_logsumexp is None else np.asarray(grad_logsumexp).astype(at)
    arrays = {"query": problem.query, "key": problem.key, "value": problem.value} | parameters(problem.score)
    found = {name: np.zeros(np.shape(array), at) for name, array in arrays.items()}
    found["scale"] = np.zeros((), at)
    with np.errstate(all="ignore"):
        for place in np.ndindex(*lead, extent.heads):
            batch = int(np.ravel_multi_index(place[:-1], lead)) if lead else 0
            _one_head(problem, batch, place, grad_out[place], grad_log.reshape(full[:-1])[place], found)
    return found


def parameters(score: Score) -> dict[str, Any]:
    """What of a score can have a gradient beside its scale, by name."""
    found: dict[str, Any] = {"softcap": score.softcap, "bias": score.bias, "alibi": score.slopes, "sinks": score.sinks}
    match score.base:
        case General(weight):
            found["weight"] = weight
        case Additive(query_weight, key_weight, vector):
            found |= {"query_weight": query_weight, "key_weight": key_weight, "vector": vector}
    return {name: array for name, array in found.items() if array is not None}


def summed_to(array: Floats, shape: tuple[int, ...]) -> Floats:
    """The sum over all axes along which ``shape`` was broadcast to the array's."""
    extra = array.ndim - len(shape)
    like = (1,) * extra + shape
    axes = tuple(n for n, size in enumerate(array.shape) if size != like[n])
    return (np.asarray(array.sum(axis=axes)) if axes else array).reshape(shape)


def _one_head(
    problem: Problem, batch: int, place: tuple[int, ...], grad_out: Floats, grad_log: Floats, found: dict[str, Floats]
) -> None:
    """Add what one head contributes."""
    score, extent, head = problem.score, problem.extent, place[-1]
    key_place, at = (*place[:-1], head // problem.group), grad_out.dtype
    assert problem.value is not None
    q, k, v = (a[p].astype(at) for a, p in ((problem.query, place), (problem.key, key_place),
                                            (problem.value, key_place)))  # fmt: skip
    cells = Cells.of_head(batch, head, np.arange(extent.queries), np.arange(extent.keys))
    matched = base_match(score, q, k, head)
    scaled = matched * np.asarray(problem.scale, at)
    bent = scaled if score.softcap is None else score.softcap * np.tanh(scaled / score.softcap)
    added = bent if score.bias is None else bent + still_finite(at_cells(score.bias, cells, problem), at)
    distance = np.zeros((1, 1))
    if score.slopes is not None:
        distance = np.abs(cells.query + extent.offset(score.align, "alibi") - cells.key).astype(at)
        added = added - np.asarray(at_head(score.slopes, head), at) * distance
    last, slope = added, np.ones_like(added)
    if score.function is not None and added.size:
        index = np.broadcast_arrays(added, cells.batch, cells.head, cells.query, cells.key)
        last = np.vectorize(score.function, otypes=[at])(*index)
        slope = _slope(score.function, index, at) if score.derivative is None else (
            np.vectorize(score.derivative, otypes=[at])(*index))  # fmt: skip
    visible = np.ones(added.shape, bool) if problem.mask is None else problem.mask.visible(cells, extent)
    hidden = np.broadcast_to(~np.asarray(visible), added.shape) | np.isneginf(last)
    sink = None if score.sinks is None else at_head(score.sinks, head)
    weights, logsumexp = normalize(np.where(hidden, -np.inf, last), sink)

    mixed = _product(grad_out, v.T, ~hidden)
    # What a row hides has no part in its output.
    own = np.sum(np.where(hidden, 0, weights * mixed), axis=-1)
    change = np.where(hidden | (weights == 0), 0, weights * (mixed - own[:, None] + grad_log[:, None]))
    found["value"][key_place] += _product(weights.T, grad_out, ~hidden.T)
    if sink is not None:
        shares = np.where(np.isneginf(logsumexp), 0, np.exp(sink - logsumexp)) * (grad_log - own)
        _add_at_head(found["sinks"], head, shares.sum())
    change = np.where(change == 0, 0, change * slope)
    if score.slopes is not None:
        _add_at_head(found["alibi"], head, -np.sum(np.where(change == 0, 0, change * distance)))
    if score.bias is not None:
        whole = np.zeros((*extent.lead, extent.heads, *change.shape), at)
        whole[place] = change
        found["bias"] += summed_to(whole, found["bias"].shape)
    if score.softcap is not None:
        ratio = bent / score.softcap
        flat = 1 - ratio**2
        found["softcap"] += np.sum(np.where(change == 0, 0, change * (ratio - scaled / score.softcap * flat)))
        change = np.where(change == 0, 0, change * flat)
    found["scale"] += np.sum(np.where(change == 0, 0, change * matched))
    change = change * np.asarray(problem.scale, at)
    _through_match(score, q, k, head, change, ~hidden, place, key_place, found)


def _through_match(
    score: Score, q: Floats, k: Floats, head: int, change: Floats, seen: NDArray[np.bool_], place: tuple[int, ...],
    key_place: tuple[int, ...], found: dict[str, Floats],
) -> None:  # fmt: skip
    """From the gradient of each match to those of query, key and the learned parts of the base."""
    match score.base:
        case Dot():
            found["query"][place] += _product(change, k, seen)
            found["key"][key_place] += _product(change.T, q, seen.T)
        case General(weight):
            own = (weight if weight.ndim == 2 else weight[head]).astype(q.dtype)
            asked, offered = q @ own, _product(change, k, seen)
            found["query"][place] += offered @ own.T
            found["key"][key_place] += _product(change.T, asked, seen.T)
            into = found["weight"] if weight.ndim == 2 else found["weight"][head]
            into += q.T @ offered
        case Additive(query_weight, key_weight, vector):
            query_weight, key_weight, vector = (a.astype(q.dtype) for a in (query_weight, key_weight, vector))
            asked, offered = q @ query_weight, k @ key_weight
            grad_asked, grad_offered = np.zeros_like(asked), np.zeros_like(offered)
            for i in range(len(q)):
                bent = np.tanh(asked[i] + offered)
                part = np.where(change[i, :, None] == 0, 0, change[i, :, None] * (1 - bent**2) * vector)
                grad_asked[i], grad_offered = part.sum(axis=0), grad_offered + part
                found["vector"] += np.where(change[i, :, None] == 0, 0, change[i, :, None] * bent).sum(axis=0)
            found["query"][place] += grad_asked @ query_weight.T
            found["key"][key_place] += grad_offered @ key_weight.T
            found["query_weight"] += q.T @ grad_asked
            found["key_weight"] += k.T @ grad_offered


def _product(left: Floats, right: Floats, seen: NDArray[np.bool_]) -> Floats:
    """left @ right, in which a number that is not finite reaches only what is seen: ``seen`` is like the one of the
    two that has both queries and keys, or like the product."""
    if np.isfinite(right).all() and np.isfinite(left).all():
        return np.asarray(left @ right)
    if seen.shape == left.shape:
        # Sum over what each row sees.
        return np.stack([np.sum(np.where(s[:, None], row[:, None] * right, 0), axis=0)
                         for row, s in zip(left, seen, strict=True)])  # fmt: skip
    return np.where(seen, left @ right, 0)


def _add_at_head(array: Floats, head: int, number: Any) -> None:
    array.reshape(-1)[head if array.size > 1 else 0] += number


def _slope(function: Callable[..., Any], index: Any, at: np.dtype[Any]) -> Floats:
    """Central differences: right to some 1e-9 in float64."""
    s = index[0].astype(np.float64)
    step = 1e-6 * np.maximum(1, np.abs(s))
    call = np.vectorize(function, otypes=[np.float64])
    return np.asarray((call(s + step, *index[1:]) - call(s - step, *index[1:])) / (2 * step)).astype(at)
