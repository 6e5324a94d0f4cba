"""Row measures against their definitions, on dense float64 weights."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

import clearhead as ch
from clearhead.measures import ROW_MEASURES
from clearhead.testing.cases import SHAPES, Case

CASES = [
    Case(SHAPES["plain"], "causal_end"),
    Case(SHAPES["grouped"], "intervals"),
    Case(SHAPES["several_tiles"], "padded_causal"),
    Case(SHAPES["several_tiles"], "nested", "all_modifiers"),
    Case(SHAPES["five_axes"], "array", "sinks"),
    Case(SHAPES["more_queries"], "function", "additive"),
    Case(SHAPES["decode_group"], "none"),
    Case(SHAPES["square"], "documents", dtype="float64"),
    Case(SHAPES["one_key_head"], "window", "bias_that_hides", dtype="float64"),
    Case(SHAPES["no_keys"]),
]


def defined(weights: np.ndarray, sink: int, align: str) -> dict[str, np.ndarray]:
    """The table of measures, written out."""
    queries, keys = weights.shape[-2:]
    position = np.arange(queries) + (keys - queries if align == "end" else 0)
    key = np.arange(keys)

    def back(distance: int) -> np.ndarray:
        return np.where(position[:, None] - distance == key, weights, 0).sum(axis=-1)

    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(weights > 0, -weights * np.log(weights), 0)
    return {
        "entropy": terms.sum(axis=-1),
        "distance": (weights * (position[:, None] - key)).sum(axis=-1),
        "sink": weights[..., :sink].sum(axis=-1),
        "previous": back(1),
        "self": back(0),
    }


@pytest.mark.parametrize("align", ["start", "end"])
@pytest.mark.parametrize("sink", [0, 1, 4, 200, 5000])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_measures_are_as_defined(case: Case, sink: int, align: Any) -> None:
    problem = case.problem()
    _, weights, _ = ch.core.attend(**problem, dtype=np.float64)
    del problem["value"]
    found = ch.attention_weights(**problem).measure(*ROW_MEASURES, sink=sink, align=align)
    tolerance = 1e-13 if case.dtype == "float64" else 5e-6
    for name, expected in defined(weights, sink, align).items():
        value = getattr(found, name + "_")
        assert value.dtype == np.float64
        size = case.shape.keys if name == "distance" else 1  # what weights of 1 could sum to
        np.testing.assert_allclose(value, expected, rtol=tolerance, atol=tolerance * size, err_msg=name)


@pytest.mark.parametrize("sinks", [None, np.array([0.0, 1.0])])
def test_rows_that_see_nothing_take_no_part_in_averages_and_are_counted(sinks: Any) -> None:
    """pt#103749, TransformerLens PR#389: left-padded rows. A learned sink has no key that could be seen."""
    x = np.random.default_rng(0).standard_normal((2, 60, 8))
    mask = ch.masks.intervals(np.arange(60) // 20 % 2 * 60, 60)  # rows 20 ... 39 see nothing
    found = ch.attention_weights(x, x, mask=mask, score=ch.scores.dot(sinks=sinks)).measure(*ROW_MEASURES)
    assert found.empty_rows.tolist() == [20, 20]
    for name in ROW_MEASURES:
        values = found.to_dict()[name]
        assert not values[:, 20:40].any()
        seen = np.delete(values, np.s_[20:40], axis=1)
        np.testing.assert_allclose(found.mean(name), seen.mean(axis=1), rtol=1e-12)


def test_where_no_row_sees_anything_there_is_no_average() -> None:
    x = np.zeros((2, 5, 4))
    found = ch.attention_weights(x, x, mask=np.zeros((5, 5), bool)).measure("entropy")
    assert np.isnan(found.mean("entropy")).all()
    assert found.empty_rows.tolist() == [5, 5]


def test_simple_rows_have_known_measures() -> None:
    x = np.zeros((8, 2))
    found = ch.attention_weights(x, x, mask=ch.masks.causal()).measure(*ROW_MEASURES)
    np.testing.assert_allclose(found.entropy, np.log(np.arange(1, 9)), rtol=1e-12)
    np.testing.assert_allclose(found.distance, np.arange(8) / 2, rtol=1e-12)
    np.testing.assert_allclose(found.sink, 1 / np.arange(1, 9), rtol=1e-12)
    np.testing.assert_allclose(found.self_, 1 / np.arange(1, 9), rtol=1e-12)
    np.testing.assert_allclose(found.previous, [0, *(1 / np.arange(2, 9))], rtol=1e-12)


def test_entropy_of_large_scores_is_that_of_their_softmax() -> None:
    random = np.random.default_rng(0)
    q, k = random.standard_normal((2, 100, 16)).astype(np.float32)
    problem: dict[str, Any] = {"query": q, "key": k, "score": ch.scores.dot(scale=200.0)}
    _, weights, _ = ch.core.attend(**problem, value=k, dtype=np.float64)
    found = ch.attention_weights(**problem).measure("entropy").entropy
    np.testing.assert_allclose(found, defined(weights, 0, "end")["entropy"], rtol=1e-3, atol=1e-4)
    assert (found >= 0).all()


def test_a_position_needs_no_word_where_lengths_agree_or_nothing_depends_on_it() -> None:
    x, y = np.zeros((3, 4)), np.zeros((5, 4))
    ch.attention_weights(x, x).measure("self", "distance")
    assert list(ch.attention_weights(x, y).measure("entropy", "sink")) == ["entropy", "sink"]


def test_what_was_not_measured_is_said() -> None:
    found = ch.attention_weights(np.zeros((3, 4)), np.zeros((3, 4))).measure("entropy", "self")
    with pytest.raises(AttributeError, match=r"^'sink' was not measured, only entropy, self$"):
        found.sink  # noqa: B018
    assert repr(found) == "Measures(entropy, self; each (3,))"
    assert set(found.to_dict()) == {"entropy", "self"}


def test_measures_can_be_copied_and_pickled() -> None:
    found = ch.attention_weights(np.eye(3), np.eye(3)).measure("entropy")
    for twin in (copy.copy(found), copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        np.testing.assert_array_equal(twin.entropy, found.entropy)
