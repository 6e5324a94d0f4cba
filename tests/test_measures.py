"""Measures against their definitions, on dense float64 weights: of rows, keys, blocks, and the largest weights."""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import clearhead as ch
import measure_definitions as definitions
from clearhead.measures import ROW_MEASURES
from clearhead.testing.cases import SHAPES, Case
from clearhead.testing.strategies import problems

ALL = (*ROW_MEASURES, "offset(7)", "offset(-2)", "received", "coverage")
CASES = [
    Case(SHAPES["plain"], "causal_end"),
    Case(SHAPES["grouped"], "intervals"),
    Case(SHAPES["several_tiles"], "padded_causal"),
    Case(SHAPES["several_tiles"], "window", "softcap"),
    Case(SHAPES["several_tiles"], "nested", "all_modifiers"),
    Case(SHAPES["several_tiles"], "scattered_documents", dtype="float16"),
    Case(SHAPES["five_axes"], "array", "sinks"),
    Case(SHAPES["five_axes"], "both_lengths", "bias", dtype="bfloat16"),
    Case(SHAPES["more_queries"], "function", "additive"),
    Case(SHAPES["decode_group"], "none"),
    Case(SHAPES["decode_group"], "union", "alibi", dtype="float64"),
    Case(SHAPES["square"], "documents", dtype="float64"),
    Case(SHAPES["one_key_head"], "window", "bias_that_hides", dtype="float64"),
    Case(SHAPES["several_tiles"], "array_of_nothing"),
    Case(SHAPES["no_keys"]),
    Case(SHAPES["no_queries"]),
]


def made(problem: dict[str, Any]) -> ch.AttentionWeights:
    return ch.attention_weights(**{name: given for name, given in problem.items() if name != "value"})


def tolerance(problem: dict[str, Any]) -> float:
    return 1e-13 if np.asarray(problem["query"]).dtype == np.float64 else 5e-6


def are_as_defined(problem: dict[str, Any], found: Any, sink: int, align: str, grid: tuple[int, ...], k: int) -> None:
    """All of ``ALL``, ``pooled`` and ``top``, at once."""
    weights, visible = definitions.dense(problem)
    near = tolerance(problem)
    scores = problem["score"]
    for name, expected in definitions.of_rows(weights, sink, align).items():
        size = weights.shape[-1] if name == "distance" else np.maximum(1, expected) if name == "perplexity" else 1
        value = found[name]
        assert value.dtype == np.float64
        assert value.shape == expected.shape
        assert (abs(value - expected) <= 2 * near * (size + abs(expected))).all(), name
    if scores is None or scores.sinks is None:
        assert not found.learned_sink.any()
    else:
        np.testing.assert_allclose(found.learned_sink, 1 - weights.sum(axis=-1), atol=2 * near)
    keys = definitions.of_keys(weights, visible)
    np.testing.assert_array_equal(found.seen, keys["seen"])
    np.testing.assert_allclose(found.received, keys["received"], rtol=2 * near, atol=2 * near)
    np.testing.assert_allclose(found.coverage, keys["coverage"], rtol=2 * near, atol=2 * near)
    expected = definitions.pooled(weights, *grid)
    assert found.pooled.shape == expected.shape
    np.testing.assert_allclose(found.pooled, expected, rtol=2 * near, atol=2 * near)
    are_the_largest(found.top, weights, visible, k, near)


def are_the_largest(found: Any, weights: Any, visible: Any, k: int, near: float) -> None:
    """The same weights; and the same keys, but where two weights lie so near that rounding may exchange them."""
    keys, expected = definitions.top(weights, visible, k)
    assert found.keys.shape == found.weights.shape == expected.shape
    np.testing.assert_allclose(found.weights, expected, rtol=2 * near, atol=2 * near)
    np.testing.assert_array_equal(found.keys < 0, keys < 0)
    if weights.shape[-1] == 0:
        return
    there = np.where(found.keys < 0, 0, np.take_along_axis(weights, np.maximum(found.keys, 0), axis=-1))
    np.testing.assert_allclose(there, expected, rtol=2 * near, atol=2 * near)
    ordered = np.sort(np.where(found.keys < 0, -1 - np.arange(k), found.keys), axis=-1)
    assert (np.diff(ordered, axis=-1) != 0).all()  # none twice


@pytest.mark.parametrize("align", ["start", "end"])
@pytest.mark.parametrize(
    ("sink", "grid", "k"), [(1, (3, 5), 1), (4, (60, 41), 8), (200, (1, 1), 3), (5000, (999, 9999), 40)]
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_measures_are_as_defined(case: Case, sink: int, grid: tuple[int, int], k: int, align: Any) -> None:
    problem = case.problem()
    found = made(problem).measure(*ALL, sink=sink, align=align, pooled=grid, top=k)
    are_as_defined(problem, found, sink, align, grid, k)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(problems(), st.sampled_from(["start", "end"]), st.integers(0, 80), st.integers(1, 80), st.integers(1, 9))
def test_measures_of_any_problem_are_as_defined(problem: Any, align: Any, sink: int, blocks: int, k: int) -> None:
    found = made(problem).measure(*ALL, sink=sink, align=align, pooled=(blocks, 81 - blocks), top=k)
    are_as_defined(problem, found, sink, align, (blocks, 81 - blocks), k)


@pytest.mark.parametrize("case", CASES[:-2:3], ids=str)
def test_what_is_asked_for_alone_is_what_is_asked_for_together(case: Case) -> None:
    weights = made(case.problem())
    found = weights.measure(*ALL, "received", sink=4, align="end", pooled=(7, 9), top=5)
    for name in ALL:
        np.testing.assert_array_equal(weights.measure(name, sink=4, align="end")[name], found[name])
    np.testing.assert_array_equal(weights.entropy(), found.entropy)
    np.testing.assert_array_equal(weights.received(), found.received)
    np.testing.assert_array_equal(weights.pooled(7, 9), found.pooled)
    for one, other in zip(weights.top(5), found.top, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("case", [CASES[2], CASES[6], CASES[10]], ids=str)
def test_received_over_how_many_rows_may_see_each_key(case: Case) -> None:
    problem = case.problem()
    expected = definitions.of_keys(*definitions.dense(problem))["normalized"]
    found = made(problem).received(normalized=True)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(made(problem).measure("received", normalized=True).received, found)


@pytest.mark.parametrize("grid", [(1, 1), (5, 40), (47, 129), (1000, 1000)])
@pytest.mark.parametrize("case", [CASES[2], CASES[4], CASES[11], CASES[13]], ids=str)
def test_the_largest_weight_of_each_block(case: Case, grid: tuple[int, int]) -> None:
    problem = case.problem()
    weights, _ = definitions.dense(problem)
    near = tolerance(problem)
    found = made(problem)
    expected = definitions.pooled(weights, *grid, largest=True)
    np.testing.assert_allclose(found.pooled(*grid, max=True), expected, rtol=2 * near, atol=2 * near)
    np.testing.assert_array_equal(found.measure(pooled=(*grid, "max")).pooled, found.pooled(*grid, max=True))


def test_top_weights_are_the_bits_that_indexing_gives() -> None:
    weights = made(Case(SHAPES["several_tiles"], "padded_causal").problem())
    keys, found = weights.top(6)
    dense = np.asarray(weights)
    there = np.where(keys < 0, 0, np.take_along_axis(dense, np.maximum(keys, 0), axis=-1))
    np.testing.assert_array_equal(found, there)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("k", [1, 2, 7, 300, 1000])
def test_of_equal_weights_the_smaller_keys_are_taken(k: int, dtype: str) -> None:
    random = np.random.default_rng(0)
    q, k_ = np.ones((50, 1), dtype), random.integers(0, 4, (300, 1)).astype(dtype)  # four different scores
    keys, weights = ch.attention_weights(q, k_, mask=ch.masks.causal(align="start")).top(k)
    for i in range(50):
        order = np.lexsort((np.arange(i + 1), -k_[: i + 1, 0]))[:k]
        assert keys[i, : len(order)].tolist() == order.tolist()
        assert (keys[i, len(order) :] == -1).all()
        assert not weights[i, len(order) :].any()


@pytest.mark.parametrize("order", [1, -1])
def test_top_does_not_mind_in_which_order_weights_come(order: int) -> None:
    """Ever larger weights are the most work, and ever smaller ones the least."""
    q, k = np.ones((60, 1), np.float32), np.linspace(-3, 3, 700, dtype=np.float32)[::order, None]
    keys, _ = ch.attention_weights(q, k).top(4)
    expected = [699, 698, 697, 696] if order == 1 else [0, 1, 2, 3]
    assert (keys == expected).all()


@pytest.mark.parametrize("sinks", [None, np.array([0.0, 1.0])])
def test_rows_that_see_nothing_take_no_part_in_averages_and_are_counted(sinks: Any) -> None:
    """pt#103749, TransformerLens PR#389: left-padded rows. A learned sink has no key that could be seen."""
    x = np.random.default_rng(0).standard_normal((2, 60, 8))
    mask = ch.masks.intervals(np.arange(60) // 20 % 2 * 60, 60)  # rows 20 ... 39 see nothing
    found = ch.attention_weights(x, x, mask=mask, score=ch.scores.dot(sinks=sinks)).measure(*ALL, top=2)
    assert found.empty_rows.tolist() == [20, 20]
    assert (found.seen == 40).all()
    for name in ROW_MEASURES:
        values = found.to_dict()[name]
        assert name == "learned_sink" or not values[:, 20:40].any()
        seen = np.delete(values, np.s_[20:40], axis=1)
        np.testing.assert_allclose(found.mean(name), seen.mean(axis=1), rtol=1e-12)
    assert (found.top.keys[:, 20:40] == -1).all()


def test_where_no_row_sees_anything_there_is_no_average() -> None:
    x = np.zeros((2, 5, 4))
    found = ch.attention_weights(x, x, mask=np.zeros((5, 5), bool)).measure("entropy", "coverage", "received")
    assert np.isnan(found.mean("entropy")).all()
    assert np.isnan(found.coverage).all()
    assert not found.received.any()
    assert np.isnan(ch.attention_weights(x, x, mask=np.zeros((5, 5), bool)).received(normalized=True)).all()
    assert found.empty_rows.tolist() == [5, 5]


def test_simple_rows_have_known_measures() -> None:
    x = np.zeros((8, 2))
    found = ch.attention_weights(x, x, mask=ch.masks.causal()).measure(*ALL, top=1)
    n = np.arange(1, 9)
    np.testing.assert_allclose(found.entropy, np.log(n), rtol=1e-12)
    np.testing.assert_allclose(found.perplexity, n, rtol=1e-12)
    np.testing.assert_allclose(found.distance, np.arange(8) / 2, rtol=1e-12)
    for name in ("sink", "self", "largest"):
        np.testing.assert_allclose(found[name], 1 / n, rtol=1e-12)
    np.testing.assert_allclose(found.previous, [0, *(1 / n[1:])], rtol=1e-12)
    np.testing.assert_allclose(found.diagonality, 1 - np.arange(8) / 2 / np.maximum(np.arange(8), 7 - np.arange(8)))
    np.testing.assert_allclose(found.received, [(1 / n[j:]).sum() for j in range(8)], rtol=1e-12)
    assert found.seen.tolist() == list(range(8, 0, -1))


def test_attention_to_the_first_token_is_measured_and_can_be_left_out() -> None:
    """hf#2975, streaming-llm#82, #86: the first token is the largest everywhere; is it broken? It is a sink: measure
    it, and look at the weights without it."""
    random = np.random.default_rng(0)
    q, k = random.standard_normal((2, 2, 200, 16)).astype(np.float32)
    q[..., 0], k[:, 1:, 0], k[:, 0, 0] = 4, 0, 16  # every query finds the first key
    causal, without = ch.masks.causal(), ch.masks.intervals(1, 200)
    found = ch.attention_weights(q, k, mask=causal).measure("sink", top=1)
    assert (found.sink[:, 1:] > 0.9).mean() > 0.95
    assert (found.top.keys == 0).mean() > 0.95
    view = ch.attention_weights(q, k, mask=causal & without)
    whole, rest = np.asarray(ch.attention_weights(q, k, mask=causal)).astype(np.float64), np.asarray(view)
    share = 1 - found.sink[..., None]
    np.testing.assert_allclose(rest[:, 1:, 1:] * share[:, 1:], whole[:, 1:, 1:], atol=1e-6)
    assert view.measure("sink").sink.max() == 0
    assert view.measure("sink").empty_rows.tolist() == [1, 1]
    assert (view.top(1).keys[:, 1:] > 0).all()


def test_a_learned_sink_is_told_apart_from_the_first_key() -> None:
    q, k = np.random.default_rng(0).standard_normal((2, 3, 90, 8))
    score = ch.scores.dot(sinks=np.array([-np.inf, 0.0, 50.0]))
    found = ch.attention_weights(q, k, score=score).measure("learned_sink", "mass", "sink")
    np.testing.assert_allclose(found.learned_sink + found.mass, 1, rtol=1e-12)
    assert not found.learned_sink[0].any()
    assert (found.learned_sink[2] > 0.999).all()
    assert (found.sink <= found.mass).all()


def test_row_statistics_and_the_index_of_the_largest_weight() -> None:
    """pt#159770, pt#176837: FlexAttention's users want each row's statistics, and where its largest weight is."""
    q, k = np.random.default_rng(0).standard_normal((2, 2, 300, 16)).astype(np.float32)
    weights = ch.attention_weights(q, k, mask=ch.masks.causal())
    found = weights.measure("largest", "entropy", top=1)
    dense = np.asarray(weights)
    np.testing.assert_array_equal(found.top.keys[..., 0], dense.argmax(axis=-1))
    np.testing.assert_array_equal(found.top.keys[..., 0], weights.argmax(axis=-1))
    np.testing.assert_array_equal(found.largest, dense.max(axis=-1))
    np.testing.assert_array_equal(found.top.weights[..., 0], dense.max(axis=-1))


def test_quantities_have_names() -> None:
    """hf#36096: the place of the weights held the logsumexp. Here each is asked for by its name, and says it."""
    x = np.random.default_rng(0).standard_normal((2, 40, 8))
    weights = ch.attention_weights(x, x)
    found = weights.measure("entropy", "received", top=2)
    assert list(found) == ["entropy", "received", "top"]
    assert set(found.to_dict()) == {"entropy", "received", "top_keys", "top_weights"}
    np.testing.assert_array_equal(found.logsumexp, weights.logsumexp64)
    assert weights.shape == (2, 40, 40)
    assert weights.logsumexp.shape == (2, 40)
    assert repr(found) == "Measures(entropy, received, top; of 2 x 40 rows)"


def test_entropy_of_large_scores_is_that_of_their_softmax() -> None:
    random = np.random.default_rng(0)
    q, k = random.standard_normal((2, 100, 16)).astype(np.float32)
    problem: dict[str, Any] = {"query": q, "key": k, "value": k, "score": ch.scores.dot(scale=200.0)}
    weights, _ = definitions.dense(problem | {"mask": None})
    found = made(problem).measure("entropy").entropy
    np.testing.assert_allclose(found, definitions.of_rows(weights, 0, "end")["entropy"], rtol=1e-3, atol=1e-4)
    assert (found >= 0).all()


def test_a_nan_stays_in_its_row() -> None:
    q, k = np.random.default_rng(0).standard_normal((2, 130, 8)).astype(np.float32)
    q[7] = np.nan
    found = ch.attention_weights(q, k).measure("entropy", "distance", "largest", "mass", pooled=(130, 1), top=1)
    for name in ("entropy", "distance", "largest", "mass"):
        assert np.flatnonzero(np.isnan(found[name])).tolist() == [7]
    assert np.flatnonzero(np.isnan(found.pooled[:, 0])).tolist() == [7]
    assert not found.empty_rows
    worst = ch.attention_weights(q, k).pooled(130, 1, max=True)
    assert np.flatnonzero(np.isnan(worst[:, 0])).tolist() == [7]


def test_what_is_hidden_changes_no_bit() -> None:
    q, k = np.random.default_rng(0).standard_normal((2, 2, 260, 8)).astype(np.float32)
    mask = ch.masks.intervals(0, 200)
    before = ch.attention_weights(q, k, mask=mask).measure(*ALL, top=3, pooled=(9, 9)).to_dict()
    k[:, 200:] = [[np.nan]]
    k[:, 230:] = np.inf
    after = ch.attention_weights(q, k, mask=mask).measure(*ALL, top=3, pooled=(9, 9)).to_dict()
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("tokens", [700, 1999])
def test_any_number_of_threads_gives_the_same_bits(tokens: int, dtype: str) -> None:
    """What keys receive is summed by several threads, in an order that does not depend on them."""
    q, k = np.random.default_rng(0).standard_normal((2, 3, tokens, 64)).astype(dtype)
    found = []
    for count in (1, 2, 3, 7):
        ch.set_num_threads(count)
        weights = ch.attention_weights(q, k, mask=ch.masks.causal())
        found.append(weights.measure(*ALL, top=4, pooled=(40, 50)).to_dict())
    for other in found[1:]:
        for name, value in found[0].items():
            np.testing.assert_array_equal(other[name], value, err_msg=name)
    ch.set_num_threads(None)
    alone = ch.attention_weights(q[1:2], k[1:2], mask=ch.masks.causal()).measure(*ALL, top=4, pooled=(40, 50)).to_dict()
    for name, value in alone.items():  # nor on the heads beside
        np.testing.assert_array_equal(value[0], found[0][name][1], err_msg=name)


def test_a_position_needs_no_word_where_lengths_agree_or_nothing_depends_on_it() -> None:
    x, y = np.zeros((3, 4)), np.zeros((5, 4))
    ch.attention_weights(x, x).measure("self", "distance")
    assert list(ch.attention_weights(x, y).measure("entropy", "sink")) == ["entropy", "sink"]


def test_what_was_not_measured_is_said() -> None:
    found = ch.attention_weights(np.zeros((3, 4)), np.zeros((3, 4))).measure("entropy", "self")
    with pytest.raises(AttributeError, match=r"^'sink' was not measured, only entropy, self$"):
        found.sink  # noqa: B018
    with pytest.raises(AttributeError, match=r"^'seen' was not measured"):
        found.seen  # noqa: B018
    assert set(found.to_dict()) == {"entropy", "self"}


def test_averages_are_over_rows() -> None:
    found = ch.attention_weights(np.zeros((3, 4)), np.zeros((3, 4))).measure("received", "self")
    assert found.mean("self") == found.mean("self_")
    with pytest.raises(ValueError, match=r"^mean\('received'\): averages are over rows, and 'received' is not"):
        found.mean("received")


def test_measures_can_be_copied_and_pickled() -> None:
    found = ch.attention_weights(np.eye(3), np.eye(3)).measure("entropy", top=1)
    for twin in (copy.copy(found), copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        np.testing.assert_array_equal(twin.entropy, found.entropy)
        np.testing.assert_array_equal(twin.top.keys, found.top.keys)


def test_tables_name_their_axes() -> None:
    pytest.importorskip("pandas", reason="to_pandas needs pandas, which Clearhead does not")
    x = np.random.default_rng(0).standard_normal((2, 3, 5, 4))
    found = ch.attention_weights(x, x).measure("entropy", "self", "received", "coverage", top=2)
    rows = found.to_pandas()
    assert rows.index.names == ["batch0", "head", "query"]
    assert list(rows.columns) == ["entropy", "self"]
    assert rows.loc[(1, 2, 4), "self"] == found.self_[1, 2, 4]
    keys = found.to_pandas("keys")
    assert keys.loc[(0, 1, 3), "received"] == found.received[0, 1, 3]
    assert found.to_pandas("heads").loc[(1, 0), "coverage"] == found.coverage[1, 0]
    assert found.to_pandas("top").loc[(1, 2, 4, 1), "key"] == found.top.keys[1, 2, 4, 1]
    single = ch.attention_weights(x[0, 0], x[0, 0]).measure("entropy").to_pandas()
    assert single.index.names == ["query"]


def test_without_pandas_a_table_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    found = ch.attention_weights(np.eye(3), np.eye(3)).measure("entropy")
    with pytest.raises(
        ImportError, match=r"^to_pandas needs the package pandas: pip install pandas, or use to_dict\(\)$"
    ):
        found.to_pandas()
