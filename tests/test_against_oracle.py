"""Every fast path against the dense oracle, over the whole table of cases."""

from __future__ import annotations

import numpy as np
import pytest

import clearhead as ch
from clearhead import launch
from clearhead.plan import plan
from clearhead.problem import check
from clearhead.testing.budget import ROW_SUM, Oracle
from clearhead.testing.cases import DTYPES, SHAPES, Case, as_dtype, grid

GRID = dict(grid())


@pytest.mark.parametrize("case", GRID.values(), ids=GRID)
def test_output_weights_and_logsumexp_lie_within_the_budget(case: Case) -> None:
    problem = case.problem()
    output, weights = ch.scaled_dot_product_attention(**problem)
    dense, logsumexp = np.asarray(weights), weights.logsumexp
    assert output.dtype == as_dtype(case.dtype)
    assert dense.dtype == logsumexp.dtype == (np.float64 if case.dtype == "float64" else np.float32)
    Oracle(problem).check(output=output, weights=dense, logsumexp=logsumexp)
    if problem["score"].sinks is None:
        full = ~np.isneginf(logsumexp)
        np.testing.assert_allclose(dense.sum(axis=-1, dtype=np.float64)[full], 1, rtol=0, atol=ROW_SUM)
        assert not dense[~full].any()
        assert not output[~full].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ["grouped", "several_tiles", "decode_group", "no_keys", "no_value_dim"])
def test_the_entry_points_agree(shape: str, dtype: str) -> None:
    """keras#23038: asking for the weights must change nothing."""
    problem = Case(SHAPES[shape], "padded_causal", dtype=dtype).problem()
    output, weights = ch.scaled_dot_product_attention(**problem)
    state = ch.attention_state(**problem)
    np.testing.assert_array_equal(ch.attention(**problem), output)
    np.testing.assert_array_equal(state.output, output)
    Oracle(problem).check(logsumexp=state.logsumexp)
    value = problem.pop("value")
    alone = ch.attention_weights(**problem)
    # A matrix unit adds up its products in another order than the vectors by which weights are made.
    order = 2e-6 if launch.by_amx(plan(check(**problem, value=value))) else 0
    np.testing.assert_allclose(np.asarray(alone), np.asarray(weights), rtol=order, atol=0)
    stored = ch.attention_weights(**problem, logsumexp=alone.logsumexp64)
    Oracle(problem | {"value": value}).check(weights=stored)


@pytest.mark.parametrize("shape", ["grouped", "several_tiles", "decode_group"])
@pytest.mark.parametrize("bias", ["float16", "float64"])
def test_a_bias_of_another_dtype_is_read_as_it_is(bias: str, shape: str) -> None:
    case = Case(SHAPES[shape], "causal_end")
    problem = case.problem()
    values = np.random.default_rng(0).standard_normal(case.shape.extent.shape[-2:]).astype(bias)
    problem["score"] = ch.scores.dot(bias=values)
    Oracle(problem).check(output=ch.attention(**problem))
