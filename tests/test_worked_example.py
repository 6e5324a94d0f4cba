"""The tutorial's three tokens: its code, unchanged, must give its numbers, and its weights must act like its array."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import clearhead as ch
from clearhead.lessons.worked_example import worked_example

WEIGHTS = [[0.332, 0.542, 0.126], [0.305, 0.362, 0.333], [0.275, 0.200, 0.525]]
OUTPUT = [[-0.707, 0.276, 0.653, 0.902], [-0.379, 0.082, 0.443, 0.515], [-0.072, -0.094, 0.252, 0.155]]


@pytest.fixture(params=["core", "top level"])
def place(request: pytest.FixtureRequest) -> Any:
    """Where the tutorial's functions are found: dense NumPy, and the fast ones of the same names."""
    return ch.core if request.param == "core" else ch


def tutorial(place: ModuleType) -> tuple[Any, Any, Any]:
    """The tutorial's code, to the letter; (V, output, weights)."""
    np.random.seed(42)
    x = np.random.randn(3, 4)
    W_q = np.random.randn(4, 4) * 0.5
    W_k = np.random.randn(4, 4) * 0.5
    W_v = np.random.randn(4, 4) * 0.5
    Q, K, V = place.create_qkv(x, W_q, W_k, W_v)
    output, weights = place.scaled_dot_product_attention(Q, K, V)
    return V, output, weights


def test_it_gives_the_tutorials_numbers(place: Any) -> None:
    _, output, weights = tutorial(place)
    np.testing.assert_array_equal(np.round(weights, 3), WEIGHTS)
    np.testing.assert_array_equal(np.round(output, 3), OUTPUT)


def test_rows_sum_to_one(place: Any) -> None:
    _, _, weights = tutorial(place)
    np.testing.assert_allclose(weights.sum(axis=-1), [1, 1, 1], rtol=0, atol=1e-15)
    np.testing.assert_allclose(np.sum(weights, axis=1), [1, 1, 1], rtol=0, atol=1e-15)


def test_weights_print_as_an_array(place: Any, capsys: pytest.CaptureFixture[str]) -> None:
    _, _, weights = tutorial(place)
    print(weights)
    printed = capsys.readouterr().out
    assert printed == str(np.asarray(weights)) + "\n"
    numbers = np.array(re.findall(r"\d\.\d+", printed), float).reshape(3, 3)
    np.testing.assert_array_equal(numbers.round(3), WEIGHTS)


def test_weights_slice_as_an_array(place: Any) -> None:
    _, _, weights = tutorial(place)
    assert round(float(weights[0, 1]), 3) == 0.542
    np.testing.assert_array_equal(np.round(weights[0], 3), WEIGHTS[0])
    np.testing.assert_array_equal(np.round(weights[:, 2], 3), np.array(WEIGHTS)[:, 2])
    np.testing.assert_array_equal(np.round(weights[1:, ::-1], 3), np.array(WEIGHTS)[1:, ::-1])
    assert [round(float(row.max()), 3) for row in weights] == [0.542, 0.362, 0.525]


def test_weights_multiply_as_an_array(place: Any) -> None:
    V, output, weights = tutorial(place)
    np.testing.assert_allclose(weights @ V, output, rtol=0, atol=1e-15)
    np.testing.assert_array_equal(np.round(weights @ V, 3), OUTPUT)
    np.testing.assert_allclose(weights * 2, np.asarray(weights) * 2)


def test_the_lesson_shows_the_same_and_leaves_the_random_state_alone() -> None:
    np.random.seed(7)
    expected = np.random.rand()
    np.random.seed(7)
    example = worked_example()
    assert np.random.rand() == expected
    np.testing.assert_array_equal(np.round(example.weights, 3), WEIGHTS)
    np.testing.assert_array_equal(np.round(example.output, 3), OUTPUT)
    np.testing.assert_allclose(ch.softmax(example.scores), example.weights, rtol=0, atol=1e-15)
