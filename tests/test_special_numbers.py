"""NaN, infinity, the largest and the smallest numbers, anywhere: what is hidden has no effect, and on nobody else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import clearhead as ch
from clearhead.testing.strategies import problems
from everything import NAMES, RANDOM, SEEDS, all_problems, seen_by, special
from sensitivity import is_within_the_budget

# NumPy warns when it projects an infinite query or key of a learned score.
QUIET = pytest.mark.filterwarnings("ignore:.* encountered in matmul:RuntimeWarning")
SPECIAL = (np.nan, np.inf, -np.inf, "largest", "smallest normal", "smallest", -0.0)


@QUIET
@settings(max_examples=250)
@given(all_problems() | problems(), st.lists(st.sampled_from(SPECIAL), min_size=1, max_size=3), RANDOM)
def test_what_nobody_sees_changes_not_a_bit(problem: dict[str, Any], numbers: list[Any], random: Any) -> None:
    """Special numbers in keys, values and queries that the mask hides altogether, and in each hidden cell of a bias."""
    seen, keys = seen_by(problem)
    assume(not seen.all())
    single, score = problem["query"].ndim == 2, problem["score"]
    if score is not None and score.bias is not None:
        bias = np.broadcast_to(score.bias, seen.shape).copy()
        problem = problem | {"score": replace(score, bias=bias)}
    expected, weights = ch.scaled_dot_product_attention(**problem)
    hidden = {"query": ~seen.any(axis=-1), "key": ~keys, "value": ~keys}
    dirty = {name: np.array(problem[name]) for name in hidden}
    for name, rows in hidden.items():
        rows = rows[0] if single else rows
        fill = np.array([special(number, dirty[name].dtype.newbyteorder("=")) for number in numbers])
        dirty[name][rows] = random.choice(fill, dirty[name][rows].shape).astype(dirty[name].dtype)
    if score is not None and score.bias is not None:
        strange = np.array([special(number, bias.dtype.newbyteorder("=")) for number in numbers])
        dirty["score"] = replace(
            score, bias=np.where(seen, bias, random.choice(strange, seen.shape)).astype(bias.dtype)
        )
    output, found = ch.scaled_dot_product_attention(**problem | dirty)
    np.testing.assert_array_equal(output, expected)
    np.testing.assert_array_equal(found.logsumexp64, weights.logsumexp64)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(weights))


@QUIET
@settings(max_examples=250)
@given(all_problems() | problems(), st.sampled_from(["key", "value"]), st.sampled_from(SPECIAL), RANDOM)
def test_a_special_number_changes_not_a_bit_of_rows_that_do_not_see_it(
    problem: dict[str, Any], name: str, number: Any, random: Any
) -> None:
    """In one key, or the value of one: rows from which the mask hides it, and other heads and batch entries."""
    assume(problem[name].size)
    seen, _ = seen_by(problem)
    clean = ch.attention_state(**problem)
    dirty = np.array(problem[name])
    place = tuple(int(random.integers(0, n)) for n in dirty.shape)
    dirty[place] = special(number, dirty.dtype.newbyteorder("="))
    found = ch.attention_state(**problem | {name: dirty})
    heads, key_heads = seen.shape[-3], (dirty.shape[-3] if dirty.ndim > 2 else 1)
    reads = np.zeros(seen.shape[:-1], bool)
    lead, head = (place[:-3], place[-3]) if dirty.ndim > 2 else ((), 0)
    reads[(*lead, slice(head * heads // key_heads, (head + 1) * heads // key_heads))] = True
    others = ~(reads & seen[..., place[-2]]).reshape(found.logsumexp.shape)
    np.testing.assert_array_equal(found.output[others], clean.output[others])
    np.testing.assert_array_equal(found.logsumexp[others], clean.logsumexp[others])


@QUIET
@settings(max_examples=300)
@given(all_problems() | problems(), st.sampled_from([*NAMES, "bias"]), st.sampled_from(SPECIAL), RANDOM)
def test_special_numbers_do_what_float64_says(problem: dict[str, Any], name: str, number: Any, random: Any) -> None:
    """One special number anywhere, seen or not: NaN and infinity come out where they do in float64, nowhere else."""
    score = problem["score"]
    given = problem[name] if name in NAMES else getattr(score, "bias", None)
    assume(given is not None and given.size)
    array = np.array(given)
    # What passes the largest number of the type computed in is infinite: a query times a key, or float64's in a norm.
    if number == "largest" and (name in ("query", "key") or array.dtype.name == "float64"):
        number = number if array.dtype.name == "float16" else 1e30
    array[tuple(int(random.integers(0, n)) for n in array.shape)] = special(number, array.dtype.newbyteorder("="))
    problem = problem | ({name: array} if name in NAMES else {"score": replace(score, bias=array)})
    state = ch.attention_state(**problem)
    is_within_the_budget(problem, output=state.output, logsumexp=state.logsumexp)


@pytest.mark.parametrize("where", ["key", "query", "bias"])
def test_a_mistake_beside_the_largest_scores_would_be_seen(where: str) -> None:
    """Of a thousandth, in a row whose scores are of 1e30 and in one that has none: the limits do not grow with them."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 9, 8)).astype(np.float32)
    bias = np.zeros((9, 9), np.float32)
    {"key": k, "query": q, "bias": bias}[where][4, 5] = 1e30
    problem = {"query": q, "key": k, "value": v, "mask": None, "score": ch.scores.dot(bias=bias)}
    output = ch.attention(**problem)
    is_within_the_budget(problem, output=output)
    for row in (3, 4):
        wrong = output.copy()
        wrong[row, 2] += 1e-3
        with pytest.raises(AssertionError, match="beyond the limit"):
            is_within_the_budget(problem, output=wrong)


@settings(max_examples=150)
@given(problems(), SEEDS, st.sampled_from([np.nan, np.inf, -np.inf]))
def test_strange_numbers_reach_the_rows_that_see_them_alone(problem: dict[str, Any], seed: int, strange: float) -> None:
    """NaN or infinity in a value: rows that see it say so, all others are untouched."""
    value = problem["value"]
    assume(value.size)
    random = np.random.default_rng(seed)
    place = tuple(int(random.integers(0, n)) for n in value.shape)
    clean = ch.attention(**problem)
    dirty = value.copy()
    dirty[place] = strange
    found = ch.attention(**problem | {"value": dirty})
    _, weights, _ = ch.core.attend(**problem, dtype=np.float64)
    sees = weights[..., place[-2]] > 0 if weights.ndim else weights
    if value.ndim > 2:  # in the heads that read this key head
        reads = np.zeros(weights.shape[:-2], bool)
        group = weights.shape[-3] // value.shape[-3]
        reads[(*place[:-3], slice(place[-3] * group, (place[-3] + 1) * group))] = True
        sees = sees & reads[..., None]
    changed = np.zeros(found.shape, bool)
    changed[..., place[-1]] = sees
    tolerance = {"float64": 1e-13, "float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}[value.dtype.name]
    np.testing.assert_allclose(
        found[~changed].astype(np.float64), clean[~changed].astype(np.float64), rtol=0, atol=tolerance
    )
    reached = changed & (weights[..., place[-2]] > 1e-30)[..., None]
    assert not np.isfinite(found[reached].astype(np.float32)).any()
