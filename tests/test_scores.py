"""How a query matches a key: scales, slopes, and what a user's own function may and may not do."""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
import pytest

import clearhead as ch
from clearhead.testing.budget import Oracle

X = np.random.default_rng(0).standard_normal((2, 50, 16)).astype(np.float32)


def test_the_default_scale_is_one_over_the_root_of_dim_for_dots_and_one_for_learned_scores() -> None:
    assert ch.scores.dot().scale_for(16) == 0.25
    assert ch.scores.dot().scale_for(0) == 1.0
    assert ch.scores.dot(scale=0.0).scale_for(16) == 0.0
    assert ch.scores.general(np.eye(2)).scale_for(16) == 1.0
    assert ch.scores.additive(np.eye(2), np.eye(2), np.ones(2)).scale_for(16) == 1.0
    assert ch.scores.general(np.eye(2), scale=-2.0).scale_for(16) == -2.0


def test_general_with_the_identity_is_the_dot_product() -> None:
    dot = ch.attention(X, X, X, score=ch.scores.dot(scale=1.0))
    np.testing.assert_allclose(ch.attention(X, X, X, score=ch.scores.general(np.eye(16))), dot, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (1, [2**-8]),
        (2, [2**-4, 2**-8]),
        (8, [2.0**-n for n in range(1, 9)]),
        (3, [2**-4, 2**-8, 2**-2]),
        (12, [2.0**-n for n in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]),
    ],
)
def test_alibi_slopes_are_the_papers(heads: int, slopes: list[float]) -> None:
    np.testing.assert_allclose(ch.scores.alibi_slopes(heads), slopes, rtol=1e-15)


def test_no_heads_have_no_slopes() -> None:
    assert ch.scores.alibi_slopes(0).shape == (0,)


def test_a_bias_may_be_given_as_the_mask() -> None:
    bias = np.random.default_rng(1).standard_normal((50, 50)).astype(np.float32)
    as_mask = ch.attention(X, X, X, mask=bias)
    np.testing.assert_array_equal(as_mask, ch.attention(X, X, X, score=ch.scores.dot(bias=bias)))
    assert np.abs(as_mask - ch.attention(X, X, X)).max() > 0.01


def test_one_sink_or_slope_may_stand_for_all_heads() -> None:
    for name in ("sinks", "alibi"):
        one, each = ({name: np.full(shape, 0.5)} for shape in ((), (2,)))
        np.testing.assert_array_equal(
            ch.attention(X, X, X, score=ch.scores.dot(**one)), ch.attention(X, X, X, score=ch.scores.dot(**each))
        )


def test_a_functions_arithmetic_is_ieees() -> None:
    """A division by zero is infinite or NaN, as in NumPy: not an error, and no tile left half written."""

    def inverse_distance(score: float, batch: int, head: int, query: int, key: int) -> float:
        return score - 1 / (query - key)

    distance = np.subtract.outer(np.arange(50), np.arange(50)).astype(np.float32)
    with np.errstate(divide="ignore"):
        bias = -1 / distance
    np.fill_diagonal(bias, -np.inf)  # 1/0 is +inf, taken away
    found = ch.attention(X, X, X, score=ch.scores.dot(function=inverse_distance))
    np.testing.assert_allclose(found, ch.attention(X, X, X, mask=bias), rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # where an error cannot come out, ...
def test_an_error_in_a_users_function_comes_out(capfd: pytest.CaptureFixture[str]) -> None:
    def refuses(score: float, batch: int, head: int, query: int, key: int) -> float:
        if query == 30:
            raise ValueError("no thirty")
        return score

    with pytest.raises(RuntimeError, match="a score or mask function raised an error"):
        ch.attention(X, X, X, score=ch.scores.dot(function=refuses))
    capfd.readouterr()  # ... Python prints it
    assert np.isfinite(ch.attention(X, X, X)).all()


def test_functions_may_use_math_branches_and_constants() -> None:
    limit = 7

    def bent(score: float, batch: int, head: int, query: int, key: int) -> float:
        if abs(query - key) > limit:
            return -math.inf
        return math.sin(score) + min(query, key) / 100

    problem: dict[str, Any] = {"query": X, "key": X, "value": X, "score": ch.scores.dot(function=bent)}
    output, weights = ch.scaled_dot_product_attention(**problem)
    Oracle(problem).check(output=output, weights=weights, logsumexp=weights.logsumexp)
    assert weights[0, 0, 8] == 0


def half(score: float, by: float = 2.0) -> float:
    return score / by


def is_even(n: int) -> bool:
    return n == 0 or is_odd(n - 1)


def is_odd(n: int) -> bool:
    return n != 0 and is_even(n - 1)


def test_functions_may_call_functions() -> None:
    """By a global name or one of the function around them, with defaults, and in circles; gradients go through too."""
    x = np.random.default_rng(0).standard_normal((2, 20, 4))

    def rule(part: Any, size: int) -> Any:
        return lambda batch, head, query, key: part(query, size) == part(key, size) or is_even(key)

    def bent(score: float, batch: int, head: int, query: int, key: int) -> float:
        return half(score) * half(score, 3.0)

    given: dict[str, Any] = {
        "mask": ch.masks.function(rule(lambda n, size: n // size, 7)),
        "score": ch.scores.dot(function=bent),
    }
    expected, _, _ = ch.core.attend(x, x, x, **given)
    output, vjp = ch.attention_vjp(x, x, x, **given)
    np.testing.assert_allclose(output, expected, rtol=0, atol=1e-14)
    plain = ch.scores.dot(function=lambda score, batch, head, query, key: score * score / 6)
    _, right = ch.attention_vjp(x, x, x, mask=given["mask"], score=plain)
    np.testing.assert_allclose(vjp(output).query, right(output).query, rtol=0, atol=1e-13)
    assert half(1.0) == 0.5  # as it was: what is compiled is a copy


def test_a_function_that_numba_knows_is_left_to_it() -> None:
    """np.isscalar is a plain function, for which Numba has another."""
    isscalar, x = np.isscalar, np.ones((3, 4))
    mask = ch.masks.function(lambda batch, head, query, key: isscalar(query))
    np.testing.assert_allclose(ch.attention(x, x, x, mask=mask), x, rtol=0, atol=1e-14)


def test_functions_may_be_compiled_already() -> None:
    def shifted(score: float, batch: int, head: int, query: int, key: int) -> float:
        return score + key * 0.1

    plain, compiled = (ch.scores.dot(function=f) for f in (shifted, numba.njit(shifted)))
    np.testing.assert_array_equal(ch.attention(X, X, X, score=plain), ch.attention(X, X, X, score=compiled))


def test_a_mask_function_may_return_any_number() -> None:
    mask = ch.masks.function(lambda batch, head, query, key: (query + key) % 3)
    seen = np.add.outer(np.arange(50), np.arange(50)) % 3 != 0
    np.testing.assert_array_equal(ch.attention(X, X, X, mask=mask), ch.attention(X, X, X, mask=seen))
    np.testing.assert_array_equal(mask.dense(50, 50), seen)
