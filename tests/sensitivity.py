"""How far each single number of a result may lie from the truth: as far as rounding its scores can take it.

A score of size s is off by some roundings of s, and changes its row by ``weight * (value - output)`` for each unit:
nothing where one key has all the weight, or the values agree. So a score of 1e30 is no excuse, neither for its own row,
where the softmax is one key or a tie, nor for others. What counts as size is what was added up: it may have cancelled.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from clearhead import core, problem
from clearhead.algebra import Cells
from clearhead.problem import Problem
from clearhead.scores import Additive, Dot, General
from clearhead.testing.budget import ROUNDING, wider

SLACK = 8  # roundings of each score, of each sum, and of the result


def is_within_the_budget(given: dict[str, Any], **results: Any) -> None:
    """Assert that every number of ``output``, ``weights`` or ``logsumexp`` lies within its own limit."""
    limits = _limits(given)
    for name, result in results.items():
        result, (truth, limit) = np.asarray(result), limits[name]
        assert result.shape == truth.shape, name
        found, finite = result.astype(truth.dtype), np.isfinite(truth)
        np.testing.assert_array_equal(found[~finite], truth[~finite], err_msg=name)
        if result.dtype.itemsize == 2:  # rounded once more; steps between the smallest numbers do not shrink
            smallest = float(ml_dtypes.finfo(result.dtype).smallest_subnormal)
            limit = limit + ROUNDING[result.dtype.name] * (np.abs(truth) + limit) + smallest
            if result.dtype.name == "bfloat16":  # a matrix unit takes weights as sums of two numbers
                limit = limit + 2.0**-16 * limits["mixed"][0]
        assert np.isfinite(found[finite]).all(), name
        excess = np.abs(found[finite] - truth[finite]) - limit[finite]
        assert (excess <= 0).all(), f"{name}: {excess.max():.3g} beyond the limit"


def _limits(given: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """(truth, limit) of each result, and what was mixed: weights @ abs(values)."""
    checked = problem.check(given["query"], given["key"], given["value"], given["mask"], given["score"])
    assert checked.value is not None
    at, extent = wider(checked.compute_dtype), checked.extent
    one = ROUNDING[checked.compute_dtype.name]
    tiny = float(np.finfo(checked.compute_dtype).tiny)  # weights below are 0
    sums = SLACK + np.sqrt(extent.keys)
    truth = dict(zip(("output", "weights", "logsumexp"), core.attend(**given, dtype=at), strict=True))
    full = {name: np.zeros(shape, at) for name, shape in (
        ("output", (*extent.shape[:-1], checked.value.shape[-1])), ("weights", extent.shape),
        ("logsumexp", extent.shape[:-1]), ("mixed", (*extent.shape[:-1], checked.value.shape[-1])))}  # fmt: skip
    with np.errstate(all="ignore"):
        for place in np.ndindex(*extent.lead, extent.heads):
            weights, output, logs = (
                truth[name].reshape(full[name].shape)[place] for name in ("weights", "output", "logsumexp")
            )
            batch = int(np.ravel_multi_index(place[:-1], extent.lead)) if extent.lead else 0
            scores, size = _scores(checked, batch, place[-1], at)
            seen, off = ~np.isneginf(scores), SLACK * one * (1 + size)
            of_sum, sink_moves = _of_sums(checked, place[-1], scores, off, logs, one)
            off = off + of_sum[:, None]
            moves = np.where(seen, _change(scores - logs[:, None], off), 0)
            value = checked.value[(*place[:-1], place[-1] // checked.group)].astype(at)
            apart = np.abs(value - output[:, None])  # (queries, keys, value dim)
            full["output"][place] = np.where(moves[..., None] > 0, moves[..., None] * apart, 0).sum(axis=1)
            full["output"][place] += sink_moves[:, None] * np.abs(output)
            mixed = np.where(seen[..., None], weights[..., None] * np.abs(value), 0).sum(axis=1)
            lost = np.where(seen[..., None], tiny * np.abs(value), 0).sum(axis=1)
            full["output"][place] += sums * one * mixed + lost
            full["mixed"][place] = mixed
            full["weights"][place] = moves + sums * one * weights + tiny
            full["logsumexp"][place] = of_sum + sums * one * (1 + np.abs(logs))
    limits = {name: (truth[name], full[name].reshape(truth[name].shape)) for name in truth}
    return limits | {"mixed": (full["mixed"].reshape(truth["output"].shape), None)}


def _of_sums(checked: Problem, head: int, scores: Any, off: Any, logs: Any, one: float) -> tuple[Any, Any]:
    """By how much each row's logarithm of the sum may be off, and the weight of its sink."""
    if checked.score.sinks is not None:  # like a key, but never hidden
        sink = np.full((len(scores), 1), core.at_head(checked.score.sinks, head), scores.dtype)
        scores, off = np.hstack([scores, sink]), np.hstack([off, SLACK * one * (1 + np.abs(sink))])
    if not scores.shape[1]:
        return np.zeros(len(scores), scores.dtype), np.zeros(len(scores), scores.dtype)
    hidden = np.isneginf(scores)
    least = np.where(hidden, -np.inf, scores - off).max(axis=1)  # what the largest is at the least
    counts = ~hidden & (scores + off >= least[:, None] - 800)
    of_sum = np.where(counts, off, 0).max(axis=1)
    if checked.score.sinks is None:
        return of_sum, np.zeros_like(of_sum)
    return of_sum, np.where(hidden[:, -1], 0, _change(scores[:, -1] - logs, off[:, -1] + of_sum))


def _change(logarithm: Any, off: Any) -> Any:
    """By how much a weight may change whose logarithm is off by ``off``."""
    return np.minimum(1, np.exp(logarithm + off)) * np.minimum(1, np.expm1(off))


def _scores(checked: Problem, batch: int, head: int, at: Any) -> tuple[Any, Any]:
    """(scores, size of what was added up for each): (queries, keys) of one head."""
    extent, score = checked.extent, checked.score
    rows, columns = np.arange(extent.queries), np.arange(extent.keys)
    scores = core.score_block(checked, batch, head, rows, columns, at)
    lead = np.unravel_index(batch, extent.lead) if extent.lead else ()
    q, k = (checked.query[(*lead, head)].astype(at), checked.key[(*lead, head // checked.group)].astype(at))
    match score.base:
        case Dot():
            size = np.abs(q) @ np.abs(k).T
        case General(weight):
            size = np.abs(q) @ np.abs(weight if weight.ndim == 2 else weight[head]).astype(at) @ np.abs(k).T
        case Additive():
            size = np.full(scores.shape, np.abs(score.base.vector).sum(), at)
    size = size * abs(checked.scale)
    if score.softcap is not None:
        flat = np.cosh(core.match(score, q, k, head) * np.asarray(checked.scale, at) / score.softcap) ** -2.0
        size = np.where(flat > 0, size * flat, 0) + score.softcap
    cells = Cells.of_head(batch, head, rows, columns)
    if score.bias is not None:
        size = size + np.abs(core.still_finite(core.at_cells(score.bias, cells, checked), at))
    if score.slopes is not None:
        distance = np.abs(cells.query + extent.offset(score.align, "alibi") - cells.key)
        size = size + np.abs(core.at_head(score.slopes, head) * distance)
    return scores, size + np.where(np.isfinite(scores), np.abs(scores), 0)
