"""Slopes of users' functions: every operation of dual numbers against mpmath's derivative, and whole functions."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import mpmath
import numba
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import clearhead as ch
import everything  # noqa: F401  (the profile of Hypothesis)
from clearhead.core_backward import gradients
from clearhead.kernels import dual

Slope = Callable[..., float]
BIT = 1e-12

# Functions that are one and the same, the same for mpmath, and between which numbers they are tried.
ONE: list[tuple[tuple[Any, ...], Any, float, float]] = [
    ((operator.pos, np.positive, float), lambda x: x, -9, 9),
    ((operator.neg, np.negative), lambda x: -x, -9, 9),
    ((abs, math.fabs, np.absolute, np.fabs), abs, -9, -1e-6),
    ((abs, math.fabs, np.absolute, np.fabs), abs, 1e-6, 9),
    ((np.square,), lambda x: x * x, -9, 9),
    ((np.reciprocal,), lambda x: 1 / x, 0.1, 9),
    ((math.sqrt, np.sqrt), mpmath.sqrt, 0.1, 9),
    ((np.cbrt,), mpmath.cbrt, 0.1, 9),
    ((math.exp, np.exp), mpmath.exp, -9, 3),
    ((np.exp2,), lambda x: mpmath.mpf(2) ** x, -9, 3),
    ((math.expm1, np.expm1), mpmath.expm1, -9, 3),
    ((math.log, np.log), mpmath.log, 0.1, 9),
    ((math.log2, np.log2), lambda x: mpmath.log(x, 2), 0.1, 9),
    ((math.log10, np.log10), mpmath.log10, 0.1, 9),
    ((math.log1p, np.log1p), mpmath.log1p, -0.9, 9),
    ((math.sin, np.sin), mpmath.sin, -9, 9),
    ((math.cos, np.cos), mpmath.cos, -9, 9),
    ((math.tan, np.tan), mpmath.tan, -1.4, 1.4),
    ((math.asin, np.arcsin), mpmath.asin, -0.95, 0.95),
    ((math.acos, np.arccos), mpmath.acos, -0.95, 0.95),
    ((math.atan, np.arctan), mpmath.atan, -9, 9),
    ((math.sinh, np.sinh), mpmath.sinh, -3, 3),
    ((math.cosh, np.cosh), mpmath.cosh, -3, 3),
    ((math.tanh, np.tanh), mpmath.tanh, -9, 9),
    ((math.asinh, np.arcsinh), mpmath.asinh, -9, 9),
    ((math.acosh, np.arccosh), mpmath.acosh, 1.1, 9),
    ((math.atanh, np.arctanh), mpmath.atanh, -0.95, 0.95),
    ((math.erf,), mpmath.erf, -4, 4),
    ((math.erfc,), mpmath.erfc, -4, 4),
    ((math.degrees, np.degrees, np.rad2deg), mpmath.degrees, -9, 9),
    ((math.radians, np.radians, np.deg2rad), mpmath.radians, -9, 9),
]
TWO: list[tuple[tuple[Any, ...], Any, float, float]] = [
    ((operator.add, operator.iadd, np.add), operator.add, -9, 9),
    ((operator.sub, operator.isub, np.subtract), operator.sub, -9, 9),
    ((operator.mul, operator.imul, np.multiply), operator.mul, -9, 9),
    ((operator.truediv, operator.itruediv, np.true_divide), operator.truediv, 0.3, 9),
    ((operator.pow, operator.ipow, pow, math.pow, np.power), operator.pow, 0.3, 3),
    ((operator.mod, operator.imod, np.remainder), lambda x, y: x - y * mpmath.floor(x / y), 0.3, 9),
    ((np.logaddexp,), lambda x, y: mpmath.log(mpmath.exp(x) + mpmath.exp(y)), -9, 9),
    ((np.fmod,), lambda x, y: x - y * mpmath.floor(x / y), 0.3, 9),  # of positive numbers, the same
    ((math.hypot, np.hypot), mpmath.hypot, 0.1, 9),
    ((math.atan2, np.arctan2), mpmath.atan2, 0.1, 9),
    ((math.copysign, np.copysign), lambda x, y: abs(x) * mpmath.sign(y), -9, -0.1),
    ((max, np.maximum, np.fmax), max, -9, 9),
    ((min, np.minimum, np.fmin), min, -9, 9),
]


def named(table: list[tuple[tuple[Any, ...], Any, float, float]]) -> Any:
    return pytest.mark.parametrize(
        ("function", "truth", "low", "high"),
        [
            pytest.param(f, truth, low, high, id=f"{getattr(f, '__module__', None) or 'numpy'}.{f.__name__} {low}")
            for functions, truth, low, high in table
            for f in functions
        ],
    )


@cache
def slope(function: Any) -> Slope:
    """slope(x, y, dx, dy) of ``function(x, y)`` where x moves by dx and y by dy; dx is 1 and dy 0 if not given."""
    cell = numba.njit(error_model="numpy")(function)

    @numba.njit(error_model="numpy")
    def along(x, y, dx=1.0, dy=0.0):  # type: ignore[no-untyped-def]
        return dual.slope_of(cell(dual.dual(x, dx), dual.dual(y, dy)))

    return along  # type: ignore[no-any-return]


def is_exact(found: float, truth: Callable[[Any], Any], x: float) -> None:
    with mpmath.workdps(50):
        right = float(mpmath.diff(truth, mpmath.mpf(x)))
    assert abs(found - right) <= BIT * max(1, abs(right))


@named(ONE)
def test_functions_of_one_number(function: Any, truth: Any, low: float, high: float) -> None:
    along = slope(lambda x, y: function(x))

    @settings(max_examples=50)
    @given(st.floats(low, high))
    def check(x: float) -> None:
        is_exact(along(x, 0.0), truth, x)

    check()


REMAINDERS = (operator.mod, operator.imod, np.remainder, np.fmod)


@named(TWO)
def test_functions_of_two_numbers(function: Any, truth: Any, low: float, high: float) -> None:
    along = slope(lambda x, y: function(x, y))

    @settings(max_examples=50)
    @given(st.floats(low, high), st.floats(low, high))
    def check(x: float, y: float) -> None:
        if function in REMAINDERS:
            assume(abs(x / y - round(x / y)) > 1e-6)
        if truth in (max, min):
            assume(abs(x - y) > 1e-6)
        is_exact(along(x, y), lambda t: truth(t, mpmath.mpf(y)), x)
        is_exact(along(x, y, 0.0, 1.0), lambda t: truth(mpmath.mpf(x), t), y)
        is_exact(along(x, y, 1.0, 2.0), lambda t: truth(t, y + 2 * (t - x)), x)

    check()


@pytest.mark.parametrize("other", [3, True, np.float32(0.1)], ids=["int", "bool", "float32"])
@pytest.mark.parametrize("function", [operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, max])
def test_numbers_of_other_types(function: Any, other: Any) -> None:
    cell, number = numba.njit(error_model="numpy")(lambda x, y: function(x, y)), float(other)
    by_first = numba.njit(lambda x, y: dual.slope_of(cell(dual.dual(x, 1.0), y)))
    by_second = numba.njit(lambda x, y: dual.slope_of(cell(x, dual.dual(y, 1.0))))
    for x in (0.4, 2.5):
        is_exact(by_first(x, other), lambda t: function(t, mpmath.mpf(number)), x)
        is_exact(by_second(other, x), lambda t: function(mpmath.mpf(number), t), x)


JUMPS = (int, round, math.floor, math.ceil, math.trunc, np.floor, np.ceil, np.trunc, np.rint, np.sign)


@pytest.mark.parametrize("function", JUMPS, ids=lambda f: f.__name__)
def test_what_jumps_is_an_ordinary_number(function: Any) -> None:
    along = slope(lambda x, y: x * function(x))
    for x in (-1.7, -0.2, 0.3, 2.6):
        assert along(x, 0.0) == function(x)


@pytest.mark.parametrize("function", [math.isnan, math.isinf, math.isfinite, np.isnan, np.isinf, np.isfinite])
def test_what_is_no_number_is_told(function: Any) -> None:
    along = slope(lambda x, y: 2 * x if function(x) else 3 * x)
    for x in (1.0, np.inf, np.nan):
        assert along(x, 0.0) == (2 if function(x) else 3)


@pytest.mark.parametrize(
    "compare", [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne], ids=lambda f: f.__name__
)
def test_comparisons_are_of_values(compare: Any) -> None:
    along = slope(lambda x, y: 2 * (x - y) if compare(x, y) else 5 * (x - y))
    for x, y in ((1.0, 2.0), (2.0, 2.0), (3.0, 2.0)):
        assert along(x, y) == (2 if compare(x, y) else 5)


def test_kinks_have_the_slope_of_the_side_that_is_taken() -> None:
    assert slope(lambda x, y: max(x, y))(1.0, 1.0) == 1  # of equal ones the first
    assert slope(lambda x, y: max(y, x))(1.0, 1.0) == 0
    assert slope(lambda x, y: max(y, -1.0, 3, x, 2))(4.0, 1.0) == 1  # of several, too
    assert slope(lambda x, y: min(y, x, 3))(4.0, 1.0) == 0
    assert slope(lambda x, y: abs(x))(0.0, 0.0) == 0
    assert slope(lambda x, y: x if x > 0 else 0.0)(0.0, 0.0) == 0


def test_a_number_is_true_or_false() -> None:
    for x in (0.0, 2.0):
        assert slope(lambda x, y: 2 * x if x else 3 * x)(x, 0.0) == (2 if x else 3)
        assert slope(lambda x, y: 2 * x if not x else 3 * x)(x, 0.0) == (2 if not x else 3)
        assert slope(lambda x, y: 2 * x if x > 1 and x else 3 * x)(x, 0.0) == (2 if x > 1 else 3)


def test_casts_keep_the_slope() -> None:
    assert slope(lambda x, y: np.float32(2 * x) + np.float64(x) + np.float32(y))(1.0, 1.0) == 3


def test_a_branch_that_is_not_taken_leaves_no_nan() -> None:
    for function in (
        lambda x, y: math.sqrt(min(max(x, 0.0), 1.0)),  # its slope at 0 is infinite, but nothing moves there
        lambda x, y: np.where(x > 0, np.sqrt(x), 0.0),
        lambda x, y: np.clip(x, 0.0, 1.0) ** 0.5,
        lambda x, y: (x if x > 0 else 0.0) ** y,
    ):
        assert slope(function)(-1.0, 0.5) == 0
        assert slope(function)(0.25, 0.5) == 1


def fade(score, batch, head, query, key):  # type: ignore[no-untyped-def]
    """Whatever people write."""
    distance = abs(query - key)
    if key > query:
        return -math.inf
    if distance < 2:
        return score
    total = 0.0
    for n in range(1, 4):
        total += score**n / n
    weight = 1.0 if head % 2 else math.exp(-0.1 * distance)
    total *= weight
    return min(max(total, -4.0), 4.0) if not batch else 5 * math.tanh(score / 5) * (score >= 0) + 0.1 * float(score)


def fade_slope(score: float, batch: int, head: int, query: int, key: int) -> float:
    distance = abs(query - key)
    if key > query:
        return 0
    if distance < 2:
        return 1
    weight = 1.0 if head % 2 else math.exp(-0.1 * distance)
    total = weight * (score + score**2 / 2 + score**3 / 3)
    if not batch:
        return weight * (1 + score + score**2) if -4 <= total <= 4 else 0
    return (score >= 0) / math.cosh(score / 5) ** 2 + 0.1


@settings(max_examples=200)
@given(st.floats(-3, 3), st.integers(0, 1), st.integers(0, 1), st.integers(0, 9), st.integers(0, 9))
def test_a_whole_function(score: float, batch: int, head: int, query: int, key: int) -> None:
    found, right = FADE(score, batch, head, query, key), fade_slope(score, batch, head, query, key)
    assert abs(found - right) <= BIT * max(1, abs(right))


FADE = dual.derivative(numba.njit(error_model="numpy")(fade))
HELPER = numba.njit(lambda x: x * x)
TABLE = np.array([0.5, 2.0, 3.0])
USERS: dict[str, tuple[Any, Any]] = {
    "relative": (lambda s, b, h, q, k: s + 0.1 * (q - k), lambda s, b, h, q, k: 1.0),
    "softcap": (lambda s, b, h, q, k: 3 * math.tanh(s / 3), lambda s, b, h, q, k: 1 - math.tanh(s / 3) ** 2),
    "a helper of one's own": (lambda s, b, h, q, k: 0.1 * HELPER(s), lambda s, b, h, q, k: 0.2 * s),
    "a table": (lambda s, b, h, q, k: s * TABLE[(q + k) % 3], lambda s, b, h, q, k: TABLE[(q + k) % 3]),
    "where": (lambda s, b, h, q, k: np.where(q > k, s, 0.5 * s), lambda s, b, h, q, k: 1.0 if q > k else 0.5),
    "types fixed": (
        numba.njit("float64(float64, int64, int64, int64, int64)")(lambda s, b, h, q, k: s * s * 0.2),
        lambda s, b, h, q, k: 0.4 * s,
    ),
    "no score at all": (lambda s, b, h, q, k: 0.1 * (q - k), lambda s, b, h, q, k: 0.0),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", USERS)
def test_gradients_through_a_users_function_are_those_of_its_derivative(name: str, dtype: str) -> None:
    function, derivative = USERS[name]
    q, k, v, grad = np.random.default_rng(0).standard_normal((4, 2, 60, 8)).astype(dtype)
    found = {}
    for slope_given in (None, derivative):
        score = ch.scores.dot(softcap=4.0, function=function, derivative=slope_given)
        _, vjp = ch.attention_vjp(q, k, v, mask=ch.masks.causal(), score=score)
        found[slope_given] = vjp(grad)
    truth = gradients(q, k, v, grad, mask=ch.masks.causal(), score=score, dtype=np.float64)
    for each in ("query", "key", "value", "softcap"):
        np.testing.assert_allclose(
            getattr(found[None], each), getattr(found[derivative], each), rtol=0, atol=4 * np.finfo(dtype).eps
        )
        size = max(1, np.abs(truth[each]).max())
        np.testing.assert_allclose(
            getattr(found[None], each) / size, truth[each] / size, rtol=0, atol=100 * np.finfo(dtype).eps
        )


def test_what_dual_numbers_cannot_go_through_is_said_once_and_differentiated_all_the_same() -> None:
    def bent(score, batch, head, query, key):  # type: ignore[no-untyped-def]
        return math.lgamma(score * score + 1)

    q, k, v, grad = np.random.default_rng(0).standard_normal((4, 1, 20, 8))
    score = ch.scores.dot(function=bent)
    _, vjp = ch.attention_vjp(q, k, v, score=score)
    with pytest.warns(RuntimeWarning, match="'bent' is differentiated by central differences.*derivative=") as warned:
        found = vjp(grad)
    assert len(warned) == 1
    vjp(grad)
    truth = gradients(q, k, v, grad, score=score, dtype=np.float64)
    np.testing.assert_allclose(found.query, truth["query"], rtol=0, atol=1e-8)


def test_a_derivative_is_compiled_where_it_is_needed() -> None:
    def derivative(score, batch, head, query, key):  # type: ignore[no-untyped-def]
        return unheard_of(score)  # type: ignore[name-defined]  # noqa: F821

    q, k, v, grad = np.random.default_rng(0).standard_normal((4, 1, 20, 8))
    score = ch.scores.dot(function=lambda s, b, h, q, k: s, derivative=derivative, sinks=np.zeros(1))
    _, vjp = ch.attention_vjp(q, k, v, score=score)
    assert np.isfinite(vjp(grad, wanted=("value", "sinks")).value).all()
    with pytest.raises(TypeError, match="the derivative function 'derivative' cannot be compiled by Numba"):
        vjp(grad, wanted=("query",))
