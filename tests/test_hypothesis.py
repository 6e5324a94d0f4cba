"""What must hold for every problem, whatever its shape, mask, score, dtype and memory layout."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import clearhead as ch
from clearhead.testing.budget import Oracle
from clearhead.testing.cases import DTYPES, as_dtype
from clearhead.testing.strategies import LAYOUTS, any_masks, layouts, problems, shapes
from everything import SEEDS, all_problems, any_shapes
from sensitivity import is_within_the_budget


@settings(max_examples=300)
@given(problems())
def test_every_problem_is_within_the_budget(problem: dict[str, Any]) -> None:
    output, weights = ch.scaled_dot_product_attention(**problem)
    Oracle(problem).check(output=output, weights=np.asarray(weights), logsumexp=weights.logsumexp)


@settings(max_examples=300)
@given(all_problems())
def test_everything_at_once_is_within_the_budget(problem: dict[str, Any]) -> None:
    output, weights = ch.scaled_dot_product_attention(**problem)
    is_within_the_budget(problem, output=output, weights=np.asarray(weights), logsumexp=weights.logsumexp)


@settings(max_examples=250)
@given(problems(), st.tuples(layouts(), layouts(), layouts()))
def test_no_memory_layout_changes_a_bit(problem: dict[str, Any], chosen: tuple[str, str, str]) -> None:
    expected, weights = ch.scaled_dot_product_attention(**problem)
    names = ("query", "key", "value")
    laid = {name: LAYOUTS[layout](problem[name]) for name, layout in zip(names, chosen, strict=True)}
    output, found = ch.scaled_dot_product_attention(**problem | laid)
    np.testing.assert_array_equal(output, expected)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(weights))
    np.testing.assert_array_equal(found.logsumexp, weights.logsumexp)


@settings(max_examples=100)
@given(any_shapes(), st.sampled_from(DTYPES), st.tuples(layouts(), layouts()), SEEDS)
def test_no_memory_layout_of_masks_and_biases_changes_a_bit(
    shape: Any, dtype: str, chosen: tuple[str, str], seed: int
) -> None:
    random = np.random.default_rng(seed)
    q, k, v = shape.arrays(as_dtype(dtype), random)
    mask = random.random(shape.extent.shape) < 0.7
    bias = random.standard_normal(shape.extent.shape).astype("f8" if dtype == "float64" else "f4")
    expected = ch.attention(q, k, v, mask=mask, score=ch.scores.dot(bias=bias))
    laid = (LAYOUTS[layout](x) for layout, x in zip(chosen, (mask, bias), strict=True))
    found = ch.attention(q, k, v, mask=next(laid), score=ch.scores.dot(bias=next(laid)))
    np.testing.assert_array_equal(found, expected)


@settings(max_examples=60)
@given(problems(), st.sampled_from(["query", "key", "value"]))
def test_broadcast_inputs_are_as_if_repeated(problem: dict[str, Any], name: str) -> None:
    """Strides of 0: one token, one head or one batch entry that stands for all."""
    x = problem[name]
    assume(x.size)
    broadcast = np.broadcast_to(x[..., :1, :], x.shape)
    assert 0 in broadcast.strides or 1 in x.shape
    np.testing.assert_array_equal(
        ch.attention(**problem | {name: broadcast}), ch.attention(**problem | {name: broadcast.copy()})
    )


@settings(max_examples=60)
@given(problems())
def test_inputs_are_never_written_and_outputs_never_alias_them(problem: dict[str, Any]) -> None:
    score, mask = problem["score"], problem["mask"]
    inputs = [problem[name] for name in ("query", "key", "value")]
    inputs += [] if score is None else [x for x in (score.bias, score.slopes, score.sinks) if x is not None]
    inputs += [] if not hasattr(mask, "allowed") else [mask.allowed]
    before = [x.copy() for x in inputs]
    output, weights = ch.scaled_dot_product_attention(**problem)
    state = ch.attention_state(**problem)
    results = [output, weights[...], weights.logsumexp, weights.logsumexp64, state.output, state.logsumexp]
    kept = np.array(weights)
    for result in results:
        assert not any(np.shares_memory(result, x) for x in inputs)
        result[...] = 7
    for x, was in zip(inputs, before, strict=True):
        np.testing.assert_array_equal(x, was)
    np.testing.assert_array_equal(np.asarray(weights), kept)


@settings(max_examples=150)
@given(shapes(), st.data())
def test_masks_are_told_alike_by_cells_and_by_kernels(shape: Any, data: st.DataObject) -> None:
    """Scores of 0: each visible key weighs one over how many are seen."""
    extent = shape.extent
    mask = data.draw(any_masks(extent))
    q, k, _ = shape.arrays(np.float32, np.random.default_rng(0))
    weights = np.asarray(ch.attention_weights(q, k, mask=mask, score=ch.scores.dot(scale=0.0)))
    seen = mask.dense(extent.queries, extent.keys, extent.heads, extent.lead).reshape(weights.shape)
    count = seen.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(weights, seen / np.maximum(count, 1), rtol=1e-6, atol=0)


@settings(max_examples=100)
@given(shapes(), st.data())
def test_the_algebra_of_masks_is_that_of_booleans(shape: Any, data: st.DataObject) -> None:
    extent = shape.extent
    a, b, c = (data.draw(any_masks(extent)) for _ in range(3))
    size = (extent.queries, extent.keys, extent.heads, extent.lead)
    for one, other in (
        (~(a & b), ~a | ~b),
        (~(a | b), ~a & ~b),
        (a & (b | c), (a & b) | (a & c)),
        (~~a, a),
        (a & b, b & a),
    ):
        np.testing.assert_array_equal(one.dense(*size), other.dense(*size))
    np.testing.assert_array_equal((a & b).dense(*size), a.dense(*size) & b.dense(*size))
    np.testing.assert_array_equal((a | b).dense(*size), a.dense(*size) | b.dense(*size))


@settings(max_examples=40)
@given(SEEDS, st.integers(1, 70), st.integers(1, 5), st.sampled_from(DTYPES), st.integers(0, 70))
def test_any_split_of_keys_merges_to_the_whole(seed: int, keys: int, parts: int, dtype: str, dim: int) -> None:
    random = np.random.default_rng(seed)
    q, k, v = (random.standard_normal((2, n, dim)).astype(as_dtype(dtype)) for n in (9, keys, keys))
    edges = [0, *sorted(random.integers(0, keys + 1, parts - 1).tolist()), keys]
    merged = ch.attention_state(q, k[:, :0], v[:, :0])
    for low, high in pairwise(edges):
        merged = ch.merge(merged, ch.attention_state(q, k[:, low:high], v[:, low:high]))
    whole = ch.attention_state(q, k, v)
    tolerance = {"float64": 1e-14, "float32": 3e-6, "float16": 4e-3, "bfloat16": 4e-2}[dtype]
    np.testing.assert_allclose(
        merged.output.astype(np.float64), whole.output.astype(np.float64), rtol=0, atol=tolerance
    )
    np.testing.assert_allclose(merged.logsumexp, whole.logsumexp, rtol=1e-5, atol=1e-6)


@settings(max_examples=60)
@given(problems(dtypes=("float32",)), st.data())
def test_a_cell_is_the_same_however_it_is_asked_for(problem: dict[str, Any], data: st.DataObject) -> None:
    weights = ch.attention_weights(problem["query"], problem["key"], mask=problem["mask"], score=problem["score"])
    dense = np.asarray(weights)
    assume(dense.size)
    cell = tuple(data.draw(st.integers(-n, n - 1)) for n in dense.shape)
    assert weights[cell] == dense[cell]
    np.testing.assert_array_equal(weights[cell[:-1]], dense[cell[:-1]])
    step = data.draw(st.sampled_from([-3, -1, 1, 2]))
    np.testing.assert_array_equal(weights[..., ::step, cell[-1] :: -step], dense[..., ::step, cell[-1] :: -step])
