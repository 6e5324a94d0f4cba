"""Rollout against the dense formula of Abnar & Zuidema 2020, and ``vectors @ weights`` against NumPy's."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

import clearhead as ch
from clearhead.testing.cases import SHAPES, Case


def stack(lead: tuple[int, ...], heads: list[int | None], tokens: int, mask: Any, dtype: str) -> list[Any]:
    """Weights of several layers, each with its own heads."""
    random, layers = np.random.default_rng(0), []
    for n in heads:
        shape = (tokens, 16) if n is None else (*lead, n, tokens, 16)
        q, k = (2 * random.standard_normal((2, *shape))).astype(dtype)
        layers.append((q, k, ch.attention_weights(q, k, mask=mask)))
    return layers


def dense_rollout(layers: list[Any], mask: Any, residual: float) -> Any:
    """The products of the matrices, in float64."""
    product = None
    for q, k, _ in layers:
        weights = ch.core.attend(q, k, k, mask=mask, dtype=np.float64)[1]
        identity = np.eye(weights.shape[-1])
        weights = np.where((weights.sum(axis=-1) == 0)[..., None], identity, weights)
        mean = weights if weights.ndim == 2 else weights.mean(axis=-3)
        layer = residual * identity + (1 - residual) * mean
        product = layer if product is None else layer @ product
    return product


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("residual", [0.5, 0.0, 0.8, 1.0])
@pytest.mark.parametrize(
    ("lead", "heads"), [((), [3, 3, 3, 3]), ((2,), [1, 4]), ((2, 2), [2]), ((), [None, None])], ids=str
)
def test_rollout_is_the_dense_formula(
    lead: tuple[int, ...], heads: list[int | None], residual: float, dtype: str
) -> None:
    layers = stack(lead, heads, 130, ch.masks.causal(), dtype)
    rows = [129, 0, 64, -2, *range(40, 60)]
    found = ch.rollout([weights for *_, weights in layers], rows, residual=residual)
    expected = dense_rollout(layers, ch.masks.causal(), residual)[..., rows, :]
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13 if dtype == "float64" else 2e-6)
    np.testing.assert_allclose(found.sum(axis=-1), 1, atol=1e-5)


def test_rows_that_see_nothing_pass_on_what_they_hold() -> None:
    mask = ch.masks.causal() & ch.masks.intervals(np.arange(90) // 30 % 2 * 90, 90)  # rows 30 ... 59 are empty
    layers = stack((), [2, 2, 2], 90, mask, "float64")
    found = ch.rollout([weights for *_, weights in layers], range(90))
    np.testing.assert_allclose(found, dense_rollout(layers, mask, 0.5), atol=1e-13)
    np.testing.assert_allclose(found.sum(axis=-1), 1, rtol=1e-12)


def test_rollout_holds_no_matrix() -> None:
    x = np.random.default_rng(0).standard_normal((1, 6000, 8), dtype=np.float32)
    layer = ch.attention_weights(x, x, mask=ch.masks.causal() & ch.masks.window(left=200))
    ch.rollout([layer], [0])  # compiles
    tracemalloc.start()
    try:
        ch.rollout([layer, layer], [5999])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 5_000_000  # the matrix has 144 MB


@pytest.mark.parametrize(
    "case",
    [
        Case(SHAPES["plain"], "causal_end"), Case(SHAPES["several_tiles"], "nested", "all_modifiers"),
        Case(SHAPES["five_axes"], "array", "sinks"), Case(SHAPES["square"], "documents", dtype="float64"),
        Case(SHAPES["no_keys"]), Case(SHAPES["no_queries"]),
    ],
    ids=str,
)  # fmt: skip
def test_vectors_times_weights_are_numpys(case: Case) -> None:
    problem = case.problem()
    del problem["value"]
    weights = ch.attention_weights(**problem)
    dense, random = np.asarray(weights), np.random.default_rng(0)
    for shape in ((3, weights.shape[-2]), (*weights.shape[:-2], 20, weights.shape[-2])):
        vectors = random.standard_normal(shape).astype(weights.dtype)
        found, expected = vectors @ weights, vectors @ dense
        assert found.shape == expected.shape
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13 if case.dtype == "float64" else 2e-5)
    with pytest.raises(ValueError, match="matmul"):
        np.zeros((2, weights.shape[-2] + 1)) @ weights


def test_any_number_of_threads_gives_the_same_bits() -> None:
    layers = [weights for *_, weights in stack((), [2, 2], 1500, ch.masks.causal(), "float32")]
    found = []
    for count in (1, 2, 5):
        ch.set_num_threads(count)
        found.append(ch.rollout(layers, [1499, 700]))
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


def test_what_cannot_be_rolled_out_is_said() -> None:
    square, other = (ch.attention_weights(np.zeros((n, 4)), np.zeros((n, 4))) for n in (3, 5))
    cross = ch.attention_weights(np.zeros((3, 4)), np.zeros((5, 4)))
    for message, call in {
        r"rollout needs the weights of at least one layer": lambda: ch.rollout([], [0]),
        r"rollout: layer 0 has weights \(3, 5\): tokens must attend to themselves": lambda: ch.rollout([cross], [0]),
        r"rollout: layer 1 has weights \(5, 5\), layer 0 has \(3, 3\): only heads": lambda: ch.rollout(
            [square, other], [0]
        ),
        r"rollout: rows must lie between -3 and 2, got \[3\]": lambda: ch.rollout([square], [3]),
        r"rollout: rows must be integers, \(n,\), got float64": lambda: ch.rollout([square], [0.5]),
        r"rollout: residual is a share, from 0 to 1, got 2": lambda: ch.rollout([square], [0], residual=2),
    }.items():
        with pytest.raises(ValueError, match=f"^{message}"):
            call()
