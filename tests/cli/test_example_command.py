"""The worked example prints the tutorial's numbers in three steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

WEIGHTS = [[0.332, 0.542, 0.126], [0.305, 0.362, 0.333], [0.275, 0.200, 0.525]]
OUTPUT = [[-0.707, 0.276, 0.653, 0.902], [-0.379, 0.082, 0.443, 0.515], [-0.072, -0.094, 0.252, 0.155]]


def test_three_steps(run: Callable[..., Any]) -> None:
    result = run("example")
    assert result.exit_code == 0
    places = [
        result.stdout.index(f"{number}  {step}") for number, step in enumerate(("score", "normalize", "aggregate"), 1)
    ]
    assert places == sorted(places)
    for row in WEIGHTS + OUTPUT:
        assert any(line.split()[2:] == [f"{number:.3f}" for number in row] for line in result.stdout.splitlines())
    assert "How to read a row" in result.stdout
    assert "33.2 %" in result.stdout
    assert result.stderr == ""


def test_json(run: Callable[..., Any]) -> None:
    data = json.loads(run("example", "--json").stdout)
    assert np.round(data["weights"], 3).tolist() == WEIGHTS
    assert np.round(data["output"], 3).tolist() == OUTPUT
    assert np.shape(data["x"]) == (3, 4)


def test_the_global_random_state_is_left_alone() -> None:
    from clearhead.lessons.worked_example import worked_example

    np.random.seed(7)
    expected = np.random.randn()
    np.random.seed(7)
    worked_example()
    assert np.random.randn() == expected
