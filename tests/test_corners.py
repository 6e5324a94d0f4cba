"""Every corner of what attention means here, on every path: the oracle, each dtype, few queries and many.

One test for each rule. What is an error stands in test_errors.py, dtypes in test_types.py, memory layouts in
test_hypothesis.py, and what others were seen to get wrong in test_reports.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import clearhead as ch
from clearhead.testing.budget import Oracle
from clearhead.testing.cases import DTYPES, as_dtype

KEYS, DIM = 300, 16
Results = tuple[np.ndarray, np.ndarray, np.ndarray]


class Path:
    """One way to compute: ``path.arrays()`` makes its inputs, ``path(q, k, v, ...)`` gives (output, weights, logs)."""

    def __init__(self, dtype: str, queries: int) -> None:
        self.oracle, self.queries = dtype == "oracle", queries
        self.dtype = as_dtype("float64" if self.oracle else dtype)

    def arrays(self, keys: int = KEYS, dim: int = DIM) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        random = np.random.default_rng(0)
        q, k, v = (random.standard_normal((2, n, dim)).astype(self.dtype) for n in (self.queries, keys, keys))
        return q, k, v

    def __call__(self, query: Any, key: Any, value: Any, **options: Any) -> Results:
        if self.oracle:
            return ch.core.attend(query, key, value, **options, dtype=np.float64)
        output, weights = ch.scaled_dot_product_attention(query, key, value, **options)
        return output.astype(np.float64), np.asarray(weights), weights.logsumexp


@pytest.fixture(params=[(dtype, queries) for dtype in ("oracle", *DTYPES) for queries in (3, 60)], ids=str)
def path(request: pytest.FixtureRequest) -> Path:
    return Path(*request.param)


def is_nothing(results: Results, rows: Any = slice(None)) -> None:
    """Output 0, weights 0, logsumexp -inf in these rows."""
    output, weights, logsumexp = results
    assert not output[:, rows].any()
    assert not weights[:, rows].any()
    assert np.isneginf(logsumexp[:, rows]).all()


NOTHING: dict[str, Callable[[int], dict[str, Any]]] = {
    "boolean array": lambda queries: {"mask": np.arange(queries)[:, None] != 1},
    "intervals": lambda queries: {"mask": ch.masks.intervals(np.where(np.arange(queries) == 1, 5, 0), [5] * queries)},
    "padding": lambda queries: {"mask": ch.masks.lengths(KEYS, queries=1)},
    "window past the end": lambda queries: {"mask": ch.masks.intervals(np.array([0] + [KEYS] * (queries - 1)), KEYS)},
    "union of nothing": lambda queries: {"mask": ch.masks.lengths(KEYS, queries=1) | np.zeros((1, 1), bool)},
    "function": lambda queries: {"mask": ch.masks.function(_all_but_row_one)},
    "bias of -inf": lambda queries: {"mask": np.where(np.arange(queries)[:, None] == 1, np.float32(-np.inf), 0)},
}


def _all_but_row_one(batch: int, head: int, query: int, key: int) -> bool:
    return query != 1


@pytest.mark.parametrize("why", NOTHING)
def test_a_row_that_may_attend_to_nothing_is_zero(path: Path, why: str) -> None:
    results = path(*path.arrays(), **NOTHING[why](path.queries))
    is_nothing(results, 1)
    assert np.isfinite(results[2][:, 0]).all()
    assert results[0][:, 0].any()


def test_no_keys_are_nothing_to_attend_to(path: Path) -> None:
    results = path(*path.arrays(keys=0))
    assert results[0].shape == (2, path.queries, DIM)
    assert results[1].shape == (2, path.queries, 0)
    is_nothing(results)


@pytest.mark.parametrize("shape", [(2, 0, 4), (0, 5, 4), (0, 2, 5, 4), (2, 0, 5, 4), (2, 3, 0, 4), (0, 0, 0, 0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_queries_heads_or_batch_give_shaped_zeros(shape: tuple[int, ...], dtype: str) -> None:
    x = np.zeros(shape, as_dtype(dtype))
    output, weights = ch.scaled_dot_product_attention(x, x, x, mask=ch.masks.causal())
    assert output.shape == shape
    assert weights.shape == np.asarray(weights).shape == (*shape[:-1], shape[-2])
    assert weights.logsumexp.shape == shape[:-1]
    assert weights.sum(axis=-1).shape == shape[:-1]
    assert weights.measure("entropy").entropy.shape == shape[:-1]


@pytest.mark.parametrize("low", ["-1e30", "smallest"])
def test_finite_stand_ins_for_minus_infinity_are_ordinary_numbers(path: Path, low: str) -> None:
    """A row of nothing else is the softmax of what is left; where others are seen, they are as good as hidden."""
    q, k, v = path.arrays()
    compute = np.float64 if path.dtype == np.float64 else np.float32
    bias = np.zeros((path.queries, KEYS), compute)
    bias[0], bias[1, 100:] = -1e30 if low == "-1e30" else np.finfo(compute).min, np.finfo(compute).min
    output, weights, logsumexp = path(q, k, v, score=ch.scores.dot(scale=0.0, bias=bias))
    np.testing.assert_allclose(weights[:, 0], 1 / KEYS, rtol=1e-5)
    np.testing.assert_allclose(output[:, 0], v.astype(float).mean(axis=1), rtol=0, atol=1e-2)
    np.testing.assert_allclose(weights[:, 1, :100], 0.01, rtol=1e-5)
    assert not weights[:, 1, 100:].any()
    assert (logsumexp[:, 0] < -1e29).all()
    assert np.isfinite(logsumexp).all()


@pytest.mark.parametrize("strange", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "mask",
    [
        ch.masks.intervals(0, 200),
        ch.masks.causal("start"),
        ch.masks.array(np.arange(KEYS) < 200),
        ch.masks.window(left=4, right=4, align="end") & ch.masks.intervals(0, 299),
        ~ch.masks.intervals(200, 300),
    ],
    ids=["intervals", "causal", "array", "window", "negation"],
)
def test_what_the_mask_hides_has_no_effect(path: Path, mask: ch.masks.Mask, strange: float) -> None:
    q, k, v = path.arrays()
    clean = path(q, k, v, mask=mask)
    seen = mask.dense(path.queries, KEYS)
    k[:, ~seen.any(axis=0)] = v[:, ~seen.any(axis=0)] = strange
    for dirty, expected in zip(path(q, k, v, mask=mask), clean, strict=True):
        np.testing.assert_array_equal(dirty, expected)


@pytest.mark.parametrize("strange", [np.nan, np.inf])
def test_what_is_hidden_from_some_rows_reaches_the_others_alone(path: Path, strange: float) -> None:
    q, k, v = path.arrays()
    clean, _, _ = path(q, k, v, mask=ch.masks.causal("start"))
    v[:, 1] = strange  # hidden from row 0
    output, weights, _ = path(q, k, v, mask=ch.masks.causal("start"))
    np.testing.assert_array_equal(output[:, 0], clean[:, 0])
    assert not np.isfinite(output[:, 1:]).any()
    assert np.isfinite(weights).all()


def test_nan_in_a_query_stays_in_its_row(path: Path) -> None:
    q, k, v = path.arrays()
    clean = path(q, k, v)
    q[:, 1, 3] = np.nan
    output, weights, logsumexp = path(q, k, v)
    assert np.isnan(output[:, 1]).all()
    assert np.isnan(weights[:, 1]).all()
    assert np.isnan(logsumexp[:, 1]).all()
    others = np.arange(path.queries) != 1
    for dirty, expected in zip((output, weights, logsumexp), clean, strict=True):
        np.testing.assert_array_equal(dirty[:, others], expected[:, others])


def test_nan_in_a_visible_key_reaches_the_rows_that_see_it(path: Path) -> None:
    q, k, v = path.arrays()
    mask = ch.masks.intervals(np.arange(path.queries) % 2 * 50, KEYS)  # odd rows begin at key 50
    clean = path(q, k, v, mask=mask)
    k[:, 10, 0] = np.nan
    dirty = path(q, k, v, mask=mask)
    for found, expected in zip(dirty, clean, strict=True):
        np.testing.assert_array_equal(found[:, 1::2], expected[:, 1::2])
    assert np.isnan(dirty[0][:, ::2]).all()
    assert np.isnan(dirty[2][:, ::2]).all()


@pytest.mark.parametrize("scale", [None, 0.0, -0.5, 2.0])
def test_the_scale_is_taken_as_given(path: Path, scale: float | None) -> None:
    q, k, v = path.arrays()
    output, _, logsumexp = path(q, k, v, score=ch.scores.dot(scale=scale))
    factor = 1 / np.sqrt(DIM) if scale is None else scale
    s = factor * (q.astype(float) @ np.swapaxes(k.astype(float), -1, -2))
    np.testing.assert_allclose(logsumexp, np.log(np.exp(s).sum(axis=-1)), rtol=1e-5)
    tolerance = 2e-5 if path.dtype.itemsize > 2 else 0.02
    np.testing.assert_allclose(output, ch.softmax(s) @ v.astype(float), rtol=0, atol=tolerance)


@pytest.mark.parametrize("dim", [0, 1, 7, 257, 300])
def test_any_dim_works(path: Path, dim: int) -> None:
    q, k, v = path.arrays(dim=dim)
    wide = np.concatenate([v, v[..., :1], v], axis=-1) if dim else v
    output, weights, _ = path(q, k, wide)
    assert output.shape == (2, path.queries, wide.shape[-1])
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=0, atol=1e-5)
    if not dim:
        np.testing.assert_allclose(weights, 1 / KEYS, rtol=1e-6)


def test_sinks_take_part_in_the_maximum_and_the_sum(path: Path) -> None:
    q, k, v = path.arrays()
    _, plain, logs = path(q, k, v)
    sinks = np.array([np.log(2.0), 1000.0])
    output, weights, logsumexp = path(q, k, v, score=ch.scores.dot(sinks=sinks))
    total = np.exp(logs[0].astype(float))
    np.testing.assert_allclose(weights[0].sum(axis=-1), total / (total + 2), rtol=1e-5)
    np.testing.assert_allclose(logsumexp[0], np.log(total + 2), rtol=1e-6)
    np.testing.assert_allclose(weights[0] / plain[0], np.broadcast_to((total / (total + 2))[:, None], plain[0].shape),
                               rtol=1e-4)  # fmt: skip
    np.testing.assert_allclose(logsumexp[1], 1000, rtol=1e-6)
    assert not weights[1].any()
    assert not output[1].any()


def test_a_sink_alone_leaves_a_row_of_nothing_at_zero(path: Path) -> None:
    hidden = ch.masks.intervals(0, 0)
    output, weights, _ = path(*path.arrays(), mask=hidden, score=ch.scores.dot(sinks=np.array([0.0, 3.0])))
    assert not output.any()
    assert not weights.any()


def test_scores_beyond_the_range_of_exp_are_exact(path: Path) -> None:
    """±1e4 and more: the softmax of the same scores, subtracted from their maximum in float64."""
    q, k, v = path.arrays()
    problem = {"query": q, "key": k, "value": v, "score": ch.scores.dot(scale=2500.0)}
    output, weights, logsumexp = path(**problem)
    assert np.abs(logsumexp).max() > 1e4
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=0, atol=1e-5)
    Oracle(problem).check(logsumexp=logsumexp, weights=weights)
    assert np.isfinite(output).all()


def _hides_key_five(score: float, batch: int, head: int, query: int, key: int) -> float:
    return -np.inf if key == 5 else score


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", [3, 60])
@pytest.mark.parametrize("strange", [np.nan, np.inf, -np.inf])
def test_what_a_score_function_sends_to_minus_infinity_is_hidden(dtype: str, queries: int, strange: float) -> None:
    """As a bias of -inf: what stands in the value there has no effect."""
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((2, n, 16)).astype(as_dtype(dtype)) for n in (queries, 200, 200))
    score = ch.scores.dot(function=_hides_key_five)
    clean = ch.attention(q, k, v, score=score)
    v[:, 5] = strange
    np.testing.assert_array_equal(ch.attention(q, k, v, score=score), clean)


@pytest.mark.parametrize("base", ["general", "additive"])
def test_infinity_in_hidden_keys_is_projected_without_a_warning(base: str) -> None:
    random = np.random.default_rng(0)
    q, k, v = random.standard_normal((3, 9, 4))
    weight = random.standard_normal((4, 4))
    score = ch.scores.general(weight) if base == "general" else ch.scores.additive(weight, weight, weight[0])
    clean = ch.attention(q, k, v, mask=ch.masks.lengths(8), score=score)
    k[8] = np.inf
    np.testing.assert_array_equal(ch.attention(q, k, v, mask=ch.masks.lengths(8), score=score), clean)
    q[0] = np.inf
    assert np.isfinite(ch.attention(q, k, v, mask=ch.masks.lengths(8), score=score)[1:]).all()
