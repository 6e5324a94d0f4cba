"""Measures that ride along in the forward pass: the definitions' values, and not a bit of the output changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import clearhead as ch
import measure_definitions as definitions
from clearhead import launch
from clearhead.measures import ROW_MEASURES, ask
from clearhead.testing.cases import SHAPES, Case
from clearhead.testing.strategies import problems

RIDE = (*(name for name in ROW_MEASURES if name != "diagonality"), "offset(7)", "offset(-2)")
CASES = [
    Case(SHAPES["plain"], "causal_end"),
    Case(SHAPES["grouped"], "intervals"),
    Case(SHAPES["several_tiles"], "padded_causal", "sinks"),
    Case(SHAPES["several_tiles"], "nested", "all_modifiers"),
    Case(SHAPES["several_tiles"], "array", dtype="float16"),
    Case(SHAPES["five_axes"], "array", "softcap"),
    Case(SHAPES["five_axes"], "both_lengths", "bias", dtype="bfloat16"),
    Case(SHAPES["more_queries"], "function", "additive"),
    Case(SHAPES["decode_group"], "none"),
    Case(SHAPES["square"], "window", "alibi", dtype="float64"),
    Case(SHAPES["one_key_head"], "window", "bias_that_hides", dtype="float64"),
    Case(SHAPES["several_tiles"], "array_of_nothing", "sinks"),
    Case(SHAPES["no_keys"]),
    Case(SHAPES["no_queries"]),
]


def are_as_defined(problem: dict[str, Any], found: Any, sink: int, align: str) -> None:
    weights, visible = definitions.dense(problem)
    near = 2e-13 if np.asarray(problem["query"]).dtype == np.float64 else 1e-5
    expected = definitions.of_rows(weights, sink, align)
    for name in set(RIDE) - {"learned_sink"}:
        size = weights.shape[-1] if name == "distance" else np.maximum(1, expected[name]) if name == "perplexity" else 1
        assert found[name].shape == expected[name].shape
        assert found[name].dtype == np.float64
        assert (abs(found[name] - expected[name]) <= near * (size + abs(expected[name]))).all(), name
    if problem["score"] is not None and problem["score"].sinks is not None:
        np.testing.assert_allclose(found.learned_sink, 1 - weights.sum(axis=-1), atol=near)
    np.testing.assert_array_equal(found.empty_rows, (~visible.any(axis=-1)).sum(axis=-1))


@pytest.mark.parametrize("sink", [0, 4, 200])
@pytest.mark.parametrize("align", ["start", "end"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_measures_that_ride_are_as_defined(case: Case, sink: int, align: Any) -> None:
    problem = case.problem()
    output, found = ch.attention(**problem, measure=ask(*RIDE, sink=sink, align=align))
    np.testing.assert_array_equal(output, ch.attention(**problem))
    are_as_defined(problem, found, sink, align)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(problems(), st.sampled_from(["start", "end"]), st.integers(0, 80))
def test_measures_that_ride_are_as_defined_for_any_problem(problem: Any, align: Any, sink: int) -> None:
    output, found = ch.attention(**problem, measure=ask(*RIDE, sink=sink, align=align))
    np.testing.assert_array_equal(output, ch.attention(**problem))
    are_as_defined(problem, found, sink, align)


def test_only_sums_of_rows_ride_and_the_rest_is_found_all_the_same() -> None:
    assert ask(*RIDE).rides
    x = np.random.default_rng(0).standard_normal((2, 100, 8)).astype(np.float32)
    weights = ch.attention_weights(x, x)
    fold = ch.Fold(lambda kept, weight, batch, head, query, key, data: None)
    for asked in (
        ask("received"), ask("entropy", "coverage"), ask("diagonality"), ask("entropy", top=3),
        ask("entropy", pooled=(3, 4)), ask("entropy", folds={"nothing": fold}),
    ):  # fmt: skip
        assert not asked.rides
        output, found = ch.attention(x, x, x, measure=asked)
        np.testing.assert_array_equal(output, ch.attention(x, x, x))
        options = {name: getattr(asked, name) for name in ("top", "pooled", "folds")}
        for name, value in weights.measure(*asked.names, **options).to_dict().items():
            np.testing.assert_array_equal(found.to_dict()[name], value)


def test_the_pass_that_rides_reads_scores_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain forward pass, or one of measures alone, would be a second one."""
    x = np.random.default_rng(0).standard_normal((2, 100, 8)).astype(np.float32)

    def refuse(*_: Any) -> Any:
        raise AssertionError("a second pass")

    monkeypatch.setattr(launch, "run", refuse)
    monkeypatch.setattr(launch, "each", refuse)
    _, found = ch.attention(x, x, x, measure=RIDE)
    assert set(found) == set(RIDE)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_any_number_of_threads_gives_the_same_bits(dtype: str) -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, 3, 1500, 64)).astype(dtype)
    found = []
    for count in (1, 2, 5):
        ch.set_num_threads(count)
        output, measures = ch.attention(q, k, v, mask=ch.masks.causal(), measure=RIDE)
        found.append({"output": output} | measures.to_dict())
    for other in found[1:]:
        for name, value in found[0].items():
            np.testing.assert_array_equal(other[name], value, err_msg=name)


def test_a_rising_maximum_rescales_what_was_summed() -> None:
    """Each block of keys is far above the one before, or far below."""
    q = np.ones((100, 1), np.float32)
    for sign in (1, -1):
        k = sign * (np.arange(1000, dtype=np.float32)[:, None] // 128) * 40 + np.linspace(0, 1, 1000)[:, None]
        problem = {"query": q, "key": k.astype(np.float32), "value": k.astype(np.float32), "mask": None, "score": None}
        _, found = ch.attention(**problem, measure=ask(*RIDE, align="end"))
        are_as_defined(problem, found, 1, "end")


def test_a_name_or_names_are_enough_and_wrong_ones_are_named() -> None:
    x = np.eye(3)
    assert list(ch.attention(x, x, x, measure="entropy")[1]) == ["entropy"]
    assert list(ch.attention(x, x, x, measure=["self", "entropy"])[1]) == ["self", "entropy"]
    with pytest.raises(ValueError, match=r"^measure: 'entrophy' asked for, known are entropy, "):
        ch.attention(x, x, x, measure="entrophy")


def test_a_nan_stays_in_its_row() -> None:
    q, k = np.random.default_rng(0).standard_normal((2, 130, 8)).astype(np.float32)
    q[7] = np.nan
    _, found = ch.attention(q, k, k, measure=("entropy", "distance", "largest", "mass"))
    for value in found.to_dict().values():
        assert np.flatnonzero(np.isnan(value)).tolist() == [7]
    assert not found.empty_rows


def test_over_a_cache_measures_are_those_of_its_keys() -> None:
    random = np.random.default_rng(0)
    k, v = random.standard_normal((2, 1, 2, 70, 16)).astype(np.float32)
    cache = ch.KeyValueCache(batch=1, heads=2, dim=16)
    cache.append(k, v)
    for queries in (1, 70):
        q = random.standard_normal((1, 2, queries, 16)).astype(np.float32)
        output, found = ch.attention(q, cache, measure=ask("entropy", top=2))
        np.testing.assert_allclose(output, ch.attention(q, k, v), rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(found.entropy, ch.attention_weights(q, k).entropy())
