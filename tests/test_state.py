"""Attention over parts of the keys merges to attention over all of them, however they were cut."""

from __future__ import annotations

from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import clearhead as ch
from clearhead.testing.budget import Oracle
from clearhead.testing.cases import as_dtype

EMPTY = -np.inf


def parts(query: np.ndarray, key: np.ndarray, value: np.ndarray, cuts: list[int]) -> list[ch.State]:
    edges = [0, *cuts, key.shape[-2]]
    return [ch.attention_state(query, key[..., low:high, :], value[..., low:high, :]) for low, high in pairwise(edges)]


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("cuts", [[], [150], [1, 2, 3], [0, 0, 300, 300], [48, 128, 129, 250]])
def test_any_split_of_the_keys_gives_the_whole(cuts: list[int], dtype: str) -> None:
    random = np.random.default_rng(0)
    query, key, value = (random.standard_normal((2, n, 16)).astype(as_dtype(dtype)) for n in (20, 300, 300))
    merged = reduce(ch.merge, parts(query, key, value, cuts))
    whole = ch.attention_state(query, key, value)
    assert merged.output.dtype == query.dtype
    assert merged.logsumexp.dtype == (np.float64 if dtype == "float64" else np.float32)
    eps = {"float32": 1e-6, "float64": 3e-15, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
    np.testing.assert_allclose(
        merged.output.astype(np.float64), whole.output.astype(np.float64), rtol=0, atol=eps * np.sqrt(len(cuts) + 1)
    )
    np.testing.assert_allclose(merged.logsumexp, whole.logsumexp, rtol=2e-6 if dtype != "float64" else 1e-14)


def test_the_order_of_merging_does_not_matter() -> None:
    x = np.random.default_rng(0).standard_normal((40, 8))
    a, b, c = parts(x, x, x, [10, 25])
    problem: dict[str, Any] = {"query": x, "key": x, "value": x}
    for merged in (ch.merge(ch.merge(a, b), c), ch.merge(a, ch.merge(b, c)), ch.merge(c, ch.merge(b, a))):
        Oracle(problem).check(output=merged.output, logsumexp=merged.logsumexp)


def test_two_empty_parts_are_zero_and_minus_infinity() -> None:
    """fi#4051, vllm#39148: not NaN."""
    x = np.ones((3, 4), np.float32)
    nothing = ch.attention_state(x, x[:0], x[:0])
    assert not nothing.output.any()
    np.testing.assert_array_equal(nothing.logsumexp, [EMPTY] * 3)
    merged = ch.merge(nothing, nothing)
    np.testing.assert_array_equal(merged.output, np.zeros((3, 4)))
    np.testing.assert_array_equal(merged.logsumexp, [EMPTY] * 3)


def test_merging_with_an_empty_part_changes_nothing() -> None:
    x = np.random.default_rng(0).standard_normal((5, 4))
    state, nothing = ch.attention_state(x, x, x), ch.attention_state(x, x[:0], x[:0])
    for merged in (ch.merge(state, nothing), ch.merge(nothing, state)):
        np.testing.assert_array_equal(merged.output, state.output)
        np.testing.assert_array_equal(merged.logsumexp, state.logsumexp)


@pytest.mark.parametrize("left_over", [np.nan, np.inf, -np.inf])
def test_what_stands_in_an_empty_parts_output_does_not_spread(left_over: float) -> None:
    full = ch.State(np.array([[1.0, 2.0]]), np.array([0.5]))
    empty = ch.State(np.full((1, 2), left_over), np.array([EMPTY]))
    for merged in (ch.merge(full, empty), ch.merge(empty, full)):
        np.testing.assert_array_equal(merged.output, full.output)
        np.testing.assert_array_equal(merged.logsumexp, full.logsumexp)
    both = ch.merge(empty, empty)
    np.testing.assert_array_equal(both.output, [[0, 0]])
    np.testing.assert_array_equal(both.logsumexp, [EMPTY])


def test_a_part_too_light_to_count_does_not_spread_what_it_holds() -> None:
    heavy = ch.State(np.array([[1.0]]), np.array([1000.0]))
    light = ch.State(np.array([[np.inf]]), np.array([-1000.0]))
    np.testing.assert_array_equal(ch.merge(heavy, light).output, [[1.0]])


def test_nan_in_a_part_that_counts_reaches_its_row_alone() -> None:
    good = ch.State(np.ones((2, 1)), np.zeros(2))
    bad = ch.State(np.array([[np.nan], [3.0]]), np.array([np.nan, 0.0]))
    merged = ch.merge(good, bad)
    np.testing.assert_array_equal(merged.output, [[np.nan], [2.0]])
    assert np.isnan(merged.logsumexp[0])
    assert merged.logsumexp[1] == pytest.approx(np.log(2))


@pytest.mark.parametrize("offset", [-1e4, 0.0, 1e4])
def test_merging_is_stable_for_logsumexps_of_any_size(offset: float) -> None:
    one, other = (ch.State(np.array([[v]]), np.array([offset + log])) for v, log in ((1.0, np.log(3)), (5.0, 0.0)))
    merged = ch.merge(one, other)
    assert merged.output[0, 0] == pytest.approx(2.0, rel=1e-11)
    assert merged.logsumexp[0] == pytest.approx(offset + np.log(4), rel=1e-15)


def test_masked_parts_merge_row_by_row() -> None:
    """Each part has its own mask; a row may be empty in one, in the other, or in both."""
    x = np.random.default_rng(0).standard_normal((6, 4))
    start, stop = np.array([0, 3, 5, 2, 6, 0]), np.array([2, 5, 6, 4, 6, 6])
    states = [
        ch.attention_state(x, x[low:high], x[low:high], mask=ch.masks.intervals(start - low, stop - low))
        for low, high in ((0, 3), (3, 6))
    ]
    merged = ch.merge(*states)
    problem: dict[str, Any] = {"query": x, "key": x, "value": x, "mask": ch.masks.intervals(start, stop)}
    Oracle(problem).check(output=merged.output, logsumexp=merged.logsumexp)


def test_parts_of_other_shapes_are_refused() -> None:
    one = ch.State(np.zeros((3, 2)), np.zeros(3))
    for other in (
        ch.State(np.zeros((2, 2)), np.zeros(2)),
        ch.State(np.zeros((3, 4)), np.zeros(3)),
        ch.State(np.zeros((3, 2)), np.zeros((3, 1))),
    ):
        with pytest.raises(ValueError, match="parts to merge must have equal shapes"):
            ch.merge(one, other)


def test_merging_writes_to_neither_part() -> None:
    one, other = (ch.State(np.full((1, 2), n), np.array([n])) for n in (1.0, 2.0))
    merged = ch.merge(one, other)
    merged.output[...], merged.logsumexp[...] = 9, 9
    assert one.output.tolist() == [[1, 1]]
    assert other.logsumexp.tolist() == [2]
