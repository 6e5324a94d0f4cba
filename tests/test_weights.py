"""Weights act like the matrix they stand for, and compute only what is looked at."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

import clearhead as ch
from clearhead import launch, memory
from clearhead.testing.cases import SHAPES, Case

CASES = {
    "2-D": Case(SHAPES["plain"], "causal_end"),
    "heads": Case(SHAPES["grouped"], "array", "sinks"),
    "batch": Case(SHAPES["one_key_head"], "padded_causal"),
    "five axes": Case(SHAPES["five_axes"], "lengths", "all_modifiers"),
    "programs": Case(SHAPES["more_queries"], "nested", "additive"),
    "few queries": Case(SHAPES["one_query"], "none"),
    "float64": Case(SHAPES["square"], "window", dtype="float64"),
}


def make(case: Case) -> ch.AttentionWeights:
    problem = case.problem()
    del problem["value"]
    return ch.attention_weights(**problem)


@pytest.fixture(params=CASES, scope="module")
def pair(request: pytest.FixtureRequest) -> tuple[ch.AttentionWeights, np.ndarray]:
    """Weights, and the same as an array from the oracle's mouth: dense, and checked against it."""
    case = CASES[request.param]
    weights = make(case)
    truth = ch.core.attend(**case.problem(), dtype=np.float64)[1]
    dense = np.array(weights)
    np.testing.assert_allclose(dense, truth, rtol=2e-4, atol=1e-6)
    return weights, dense


def indices(shape: tuple[int, ...]) -> dict[str, Any]:
    """Every kind of index that NumPy knows, for a matrix of that shape."""
    random = np.random.default_rng(0)
    queries, keys = shape[-2:]
    some = random.integers(-keys, keys, 5)
    rows = random.integers(0, queries, (2, 3))
    return {
        "all": ...,
        "nothing": (),
        "an integer": -1,
        "a cell": tuple(n // 2 for n in shape),
        "a row": (*(0 for _ in shape[:-2]), queries // 2),
        "a column": (..., keys - 1),
        "a slice of keys": (..., slice(3, 20)),
        "every other row backwards": (..., slice(None, None, -2), slice(None)),
        "keys backwards": (..., slice(None, None, -1)),
        "steps both ways": (..., slice(-1, 0, -3), slice(1, None, 5)),
        "an empty slice": (..., slice(4, 4), slice(None)),
        "new axes": (None, ..., None, slice(0, 4)),
        "keys by number": (..., some),
        "far keys by number": (..., np.array([0, keys - 1])),
        "rows by number": (..., rows, slice(None)),
        "a list": [0, 0],
        "pairs": (..., random.integers(0, queries, 4), random.integers(-keys, 0, 4)),
        "an outer product": (..., np.arange(0, queries, 7)[:, None], np.arange(0, keys, 5)),
        "a number and numbers": (..., 0, some),
        "rows by truth": (..., np.arange(queries) % 3 == 0, slice(None)),
        "keys by truth": (..., np.arange(keys) % 2 == 0),
        "cells by truth": random.random(shape) < 0.1,
        "no truth": np.zeros(shape, bool),
        "numbers around a slice": (0, ..., some),
        "NumPy integers": (..., np.int64(0), np.uint8(0)),
    }


@pytest.mark.parametrize("name", indices((2, 2)))
def test_every_index_gives_what_the_array_gives(pair: tuple[ch.AttentionWeights, np.ndarray], name: str) -> None:
    weights, dense = pair
    index = indices(weights.shape)[name]
    found, expected = weights[index], dense[index]
    assert np.shape(found) == np.shape(expected)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("index", [99, (0, 999), (0, 0, 0, 0, 0, 0, 0), "keys", 1.5, [[0], [0, 1]]], ids=str)
def test_indices_that_an_array_refuses_are_refused(index: Any) -> None:
    weights = make(CASES["heads"])
    with pytest.raises((IndexError, ValueError)) as of_array:
        np.array(weights)[index]
    with pytest.raises(of_array.type):
        weights[index]


AXES = [None, -1, 0, -2, (-2, -1), (0, -1), "lead"]


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axis", AXES, ids=str)
@pytest.mark.parametrize("name", ["sum", "mean", "max", "min"])
def test_reductions_are_the_arrays(pair: tuple[ch.AttentionWeights, np.ndarray], name: str, axis: Any, keepdims: bool):  # type: ignore[no-untyped-def]
    weights, dense = pair
    axis = tuple(range(dense.ndim - 2)) if axis == "lead" else axis
    expected = getattr(dense.astype(np.float64), name)(axis=axis, keepdims=keepdims)
    for found in (
        getattr(weights, name)(axis=axis, keepdims=keepdims),
        getattr(np, name)(weights, axis=axis, keepdims=keepdims),
    ):
        assert np.shape(found) == np.shape(expected)
        assert found.dtype == weights.dtype
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axis", [None, -1, 0])
def test_argmax_is_the_arrays(pair: tuple[ch.AttentionWeights, np.ndarray], axis: Any, keepdims: bool) -> None:
    weights, dense = pair
    expected = dense.argmax(axis=axis, keepdims=keepdims)
    np.testing.assert_array_equal(weights.argmax(axis=axis, keepdims=keepdims), expected)
    np.testing.assert_array_equal(np.argmax(weights, axis=axis, keepdims=keepdims), expected)


def test_sums_may_be_asked_for_in_another_dtype() -> None:
    weights = make(CASES["2-D"])
    for found in (weights.sum(axis=-1, dtype=np.float64), weights.mean(dtype=np.float64)):
        assert found.dtype == np.float64


def test_numpy_functions_take_weights(pair: tuple[ch.AttentionWeights, np.ndarray]) -> None:
    weights, dense = pair
    for function in (
        lambda w: np.round(w, 3), lambda w: w.round(2), lambda w: np.log1p(w), lambda w: w * 2 + 1, lambda w: 1 - w,
        lambda w: w > 0.1, lambda w: -w, lambda w: np.maximum(w, 0.1), lambda w: np.add.reduce(w, axis=-1),
        lambda w: np.concatenate([w, w]), lambda w: np.where(w > 0.1, w, 0), lambda w: np.argsort(w, axis=-1),
        lambda w: np.swapaxes(w, -1, -2), lambda w: w.T, lambda w: np.transpose(w), lambda w: np.any(w > 0.2),
        lambda w: np.cumsum(w, axis=-1), lambda w: np.std(w), lambda w: np.array_equal(w, w), lambda w: w == w,
        lambda w: w.astype(np.float16), lambda w: np.asarray(w, dtype=np.float64), lambda w: np.count_nonzero(w),
        lambda w: np.einsum("...ij->...i", w), lambda w: np.quantile(w, 0.5, axis=-1), lambda w: np.isfinite(w).all(),
    ):  # fmt: skip
        np.testing.assert_array_equal(function(weights), function(dense))


def test_matrix_products_from_both_sides(pair: tuple[ch.AttentionWeights, np.ndarray]) -> None:
    weights, dense = pair
    random = np.random.default_rng(0)
    queries, keys = weights.shape[-2:]
    rights = [(keys,), (keys, 3), (*weights.shape[:-2], keys, 3), (1,) * (weights.ndim - 2) + (keys, 0)]
    if weights.ndim == 3:
        rights.append((2, *weights.shape[:-2], keys, 3))  # more leading axes than the weights have
    for shape in rights:
        values = random.standard_normal(shape)
        np.testing.assert_allclose(weights @ values, dense @ values, rtol=1e-9, atol=1e-7)
        np.testing.assert_allclose(np.matmul(weights, values), dense @ values, rtol=1e-9, atol=1e-7)
    for shape in ((queries,), (3, queries)):
        values = random.standard_normal(shape)
        np.testing.assert_allclose(values @ weights, values @ dense, rtol=1e-9, atol=1e-7)
        np.testing.assert_allclose(np.matmul(values, weights), values @ dense, rtol=1e-9, atol=1e-7)
    np.testing.assert_allclose(weights @ weights.T if weights.ndim == 2 else weights @ np.swapaxes(weights, -1, -2),
                               dense @ np.swapaxes(dense, -1, -2), rtol=1e-5, atol=1e-7)  # fmt: skip
    assert (weights @ np.zeros((keys, 1), np.float32)).dtype == weights.dtype


def test_attributes_length_and_iteration_are_the_arrays(pair: tuple[ch.AttentionWeights, np.ndarray]) -> None:
    weights, dense = pair
    for name in ("shape", "dtype", "ndim", "size", "nbytes"):
        assert getattr(weights, name) == getattr(dense, name)
    assert len(weights) == len(dense)
    for found, expected in zip(weights, dense, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_small_weights_print_as_arrays_and_large_ones_say_what_they_are() -> None:
    x = np.eye(2)
    small = ch.attention_weights(x, x, score=ch.scores.dot(scale=0.0))
    assert str(small) == "[[0.5 0.5]\n [0.5 0.5]]"
    assert repr(small) == "AttentionWeights([[0.5, 0.5],\n       [0.5, 0.5]])"
    assert f"{small}" == str(small)
    large = ch.attention_weights(np.zeros((30, 4, 1001, 8), np.float32), np.zeros((30, 2, 1000, 8), np.float32))
    assert repr(large) == str(large)
    assert repr(large) == "<AttentionWeights 30 x 4 x 1,001 x 1,000 float32: 480.5 MB, computed where looked at>"


def test_weights_are_read_only() -> None:
    weights = make(CASES["2-D"])
    with pytest.raises(TypeError, match="does not support item assignment"):
        weights[0, 0] = 1
    with pytest.raises(TypeError, match="weights are read-only"):
        weights += 1
    with pytest.raises(TypeError, match="weights are read-only"):
        np.multiply(weights, 2, out=weights)
    with pytest.raises(AttributeError):
        weights.shape = (1,)
    before = np.array(weights)
    for part in (weights[...], np.asarray(weights), weights.logsumexp, weights.logsumexp64):
        part[...] = 7  # what is handed out is the user's own
    np.testing.assert_array_equal(np.asarray(weights), before)


@pytest.mark.parametrize("rows", [1, 3, 7, 1000])
@pytest.mark.parametrize("columns", [1, 5, 16, 1000])
def test_pooled_is_the_mean_of_each_block(
    pair: tuple[ch.AttentionWeights, np.ndarray], rows: int, columns: int
) -> None:
    weights, dense = pair
    queries, keys = dense.shape[-2:]
    rows_cut, columns_cut = min(rows, queries), min(columns, keys)
    expected = np.empty((*dense.shape[:-2], rows_cut, columns_cut))
    for r in range(rows_cut):
        for c in range(columns_cut):
            down = slice(r * queries // rows_cut, (r + 1) * queries // rows_cut)
            across = slice(c * keys // columns_cut, (c + 1) * keys // columns_cut)
            expected[..., r, c] = dense[..., down, across].mean(axis=(-2, -1), dtype=np.float64)
    np.testing.assert_allclose(weights.pooled(rows, columns), expected, rtol=1e-6, atol=1e-12)


def test_a_matrix_that_does_not_fit_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its size, what is free, and what to do instead."""
    q = np.zeros((30, 9, 8192, 4), np.float32)
    weights = ch.attention_weights(q, q[:, :3], mask=ch.masks.window(left=3))
    monkeypatch.setattr(memory, "available", lambda: 19_800_000_000)
    monkeypatch.setattr(launch, "weigh", None)  # whatever is computed now fails
    for ask in (np.asarray, lambda w: w[...], lambda w: w * 2, lambda w: w.T, lambda w: w.argmax(axis=0)):
        with pytest.raises(MemoryError) as refused:
            ask(weights)
        assert str(refused.value) == (
            "the full matrix of 30 x 9 x 8,192 x 8,192 float32 weights takes 72.5 GB, 19.8 GB are free: ask for rows "
            "(weights[..., i, :]), for a map (.pooled(512, 512)) or for .measure('entropy', ...)"
        )
    with pytest.raises(
        MemoryError, match=r"^this part of 30 x 9 x 8,192 x 8,192 float32 weights takes 36\.2 GB, 19\.8"
    ):
        weights[:15]
    assert repr(weights).startswith("<AttentionWeights 30 x 9 x 8,192 x 8,192 float32: 72.5 GB")


def test_what_fits_is_given_where_memory_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda: None)
    assert np.asarray(make(CASES["2-D"])).shape == make(CASES["2-D"]).shape


def test_copies_are_weights_too() -> None:
    weights = make(CASES["heads"])
    np.testing.assert_array_equal(np.asarray(copy.copy(weights)), np.asarray(weights))
