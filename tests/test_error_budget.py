"""The error budget at 4,096 normal keys: at most twice the three naive lines in the same dtype, never above a cap."""

from __future__ import annotations

import numpy as np
import pytest

import clearhead as ch
from clearhead.testing.budget import CAPS, ROW_SUM, relative_error, three_lines, wider
from clearhead.testing.cases import as_dtype


@pytest.mark.parametrize("dtype", CAPS)
@pytest.mark.parametrize("queries", [1, 48])
@pytest.mark.parametrize("dim", [16, 64, 128])
def test_at_most_twice_the_three_naive_lines(dtype: str, queries: int, dim: int) -> None:
    random = np.random.default_rng(dim)
    heads = 16 if queries == 1 else 1
    query, key, value = (
        random.standard_normal((heads, tokens, dim)).astype(as_dtype(dtype)) for tokens in (queries, 4096, 4096)
    )
    truth = three_lines(*(x.astype(wider(x.dtype)) for x in (query, key, value)))
    output, weights = ch.scaled_dot_product_attention(query, key, value)
    error = relative_error(output, truth)
    assert error <= CAPS[dtype]
    assert error <= 2 * relative_error(three_lines(query, key, value), truth)
    np.testing.assert_allclose(np.asarray(weights).sum(axis=-1), 1, rtol=0, atol=ROW_SUM)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [1e4, -1e4, 1e6, 1e15, 1e30])
def test_rows_sum_to_one_however_large_the_scores(size: float, dtype: str) -> None:
    """Scores beyond exp's range are as exact as the softmax of the rounded scores."""
    random = np.random.default_rng(0)
    query, key = random.standard_normal((2, 200, 16)).astype(dtype)
    weights = ch.attention_weights(query, key, score=ch.scores.dot(scale=size))
    np.testing.assert_allclose(np.asarray(weights).sum(axis=-1), 1, rtol=0, atol=ROW_SUM)
    offset = ch.attention_weights(query, key, score=ch.scores.dot(bias=np.full((200, 200), size, dtype)))
    np.testing.assert_allclose(np.asarray(offset).sum(axis=-1), 1, rtol=0, atol=ROW_SUM)


def test_a_budget_is_missed_by_what_is_wrong() -> None:
    """The measure sees NaN, infinities, shapes and small errors: a budget that passes everything proves nothing."""
    truth = np.array([3.0, 4.0, np.inf])
    assert relative_error(truth, truth) == 0
    assert relative_error([3.0, 4.5, np.inf], truth) == pytest.approx(0.1)
    assert relative_error([3.0, 4.0, 5.0], truth) == np.inf
    assert relative_error([3.0, np.nan, np.inf], truth) == np.inf
    assert relative_error([3.0, 4.0], truth) == np.inf
    assert relative_error([1.0], [0.0]) == np.inf
