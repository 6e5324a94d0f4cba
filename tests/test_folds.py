"""Folds of the user's, and how what parts of the keys keep is joined."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import clearhead as ch
import measure_definitions as definitions
from clearhead.measures import ROW_MEASURES
from clearhead.testing.cases import SHAPES, Case

TOKENS = np.tile(np.random.default_rng(0).integers(0, 9, 150), 2)


def induction(kept: Any, weight: float, batch: int, head: int, query: int, key: int, tokens: Any) -> None:
    if key > 0 and tokens[key - 1] == tokens[query]:
        kept[0] += weight


def moments(kept: Any, weight: float, batch: int, head: int, query: int, key: int, data: Any) -> None:
    kept[0] += weight * key
    kept[1] += weight * key * key
    kept[2] += weight * (batch + 10 * head + 100 * query)


def most(kept: Any, weight: float, batch: int, head: int, query: int, key: int, data: Any) -> None:
    kept[0] = max(kept[0], weight)


def larger(a: Any, p: Any, b: Any, q: Any) -> Any:
    return np.maximum(a * p, b * q)


def made(problem: dict[str, Any]) -> ch.AttentionWeights:
    return ch.attention_weights(**{name: given for name, given in problem.items() if name != "value"})


@pytest.mark.parametrize(
    ("mask", "score", "dtype"),
    [("causal_end", "dot", "float32"), ("nested", "all_modifiers", "float32"), ("window", "sinks", "float64")],
)
def test_a_fold_is_called_for_every_weight(mask: str, score: str, dtype: str) -> None:
    problem = Case(SHAPES["several_tiles"], mask, score, dtype).problem()
    weights, _ = definitions.dense(problem)
    near = 1e-12 if dtype == "float64" else 1e-5
    found = made(problem).measure(
        "entropy",
        folds={
            "induction": ch.Fold(induction, data=TOKENS),
            "moments": ch.Fold(moments, keeps=3),
            "most": ch.Fold(most),
        },
    )
    key, query, head = np.arange(300), np.arange(300)[:, None], np.arange(2)[:, None, None]
    follows = (np.roll(TOKENS, 1) == TOKENS[:, None]) & (key > 0)
    np.testing.assert_allclose(found["induction"], (weights * follows).sum(axis=-1), atol=near)
    expected = np.stack([(weights * x).sum(axis=-1) for x in (key, key**2, 10 * head + 100 * query)], axis=-1)
    np.testing.assert_allclose(found["moments"], expected, rtol=10 * near, atol=1000 * near)
    np.testing.assert_allclose(found["most"], weights.max(axis=-1), rtol=10 * near, atol=near)
    assert found.mean("moments").shape == (2, 3)
    np.testing.assert_array_equal(found.entropy, made(problem).entropy())


@pytest.mark.parametrize("data", [np.eye(4, dtype=bool), np.arange(4, dtype=np.int32), np.ones((2, 2, 4)), [1.5, 2.5]])
def test_data_is_of_any_numbers_and_axes(data: Any) -> None:
    axes = np.ndim(data)

    def first(kept: Any, weight: float, batch: int, head: int, query: int, key: int, data: Any) -> None:
        kept[0] += weight * data.flat[0] if axes > 1 else weight * data[0]

    found = ch.attention_weights(np.zeros((2, 3)), np.zeros((4, 3))).measure(folds={"first": ch.Fold(first, data=data)})
    np.testing.assert_allclose(found["first"], np.ravel(data)[0])


def test_folds_know_batch_head_and_numbers_among_all() -> None:
    def where(kept: Any, weight: float, batch: int, head: int, query: int, key: int, data: Any) -> None:
        kept[0], kept[1], kept[2], kept[3] = batch, head, query, key

    x = np.zeros((2, 3, 5, 4))
    found = ch.attention_weights(x, x).measure(
        folds={"where": ch.Fold(where, keeps=4)}, first_query=100, first_key=1000
    )
    assert found["where"][1, 2, 3].tolist() == [1, 2, 103, 1004]


def test_a_value_is_made_of_what_was_kept() -> None:
    spread = ch.Fold(moments, keeps=3, value=lambda kept: np.sqrt(kept[..., 1] - kept[..., 0] ** 2))
    found = ch.attention_weights(np.zeros((1, 4)), np.zeros((5, 4))).measure(folds={"spread": spread})
    np.testing.assert_allclose(found["spread"], [np.sqrt(2)])
    np.testing.assert_allclose(found.mean("spread"), np.sqrt(2))
    assert "spread" in found.to_dict()


def test_a_fold_that_cannot_be_compiled_is_named() -> None:
    table = {0: 1.0}

    def lookup(kept: Any, weight: float, batch: int, head: int, query: int, key: int, data: Any) -> None:
        kept[0] += table[key]

    with pytest.raises(TypeError, match=r"^the fold function 'lookup' cannot be compiled by Numba: write it in plain"):
        ch.attention_weights(np.zeros((1, 4)), np.zeros((5, 4))).measure(folds={"lookup": ch.Fold(lookup)})


def test_what_is_no_fold_is_refused() -> None:
    x = np.zeros((2, 4))
    with pytest.raises(TypeError, match=r"^folds: 'mine' must be a clearhead.Fold, got <function"):
        ch.attention_weights(x, x).measure(folds={"mine": induction})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match=r"^fold: data has dtype <U1, functions are compiled for numbers and booleans$"):
        ch.Fold(induction, data=["a"])
    with pytest.raises(
        TypeError, match=r"^fold: update must be a function \(kept, weight, batch, head, query, key, data\)"
    ):
        ch.Fold(3)  # type: ignore[arg-type]


def test_any_number_of_threads_gives_the_same_bits() -> None:
    q, k = np.random.default_rng(0).standard_normal((2, 2, 1500, 64)).astype(np.float32)
    found = []
    for count in (1, 3):
        ch.set_num_threads(count)
        found.append(ch.attention_weights(q, k).measure(folds={"moments": ch.Fold(moments, keeps=3)})["moments"])
    np.testing.assert_array_equal(*found)


# Parts


def parts_of(problem: dict[str, Any], cuts: list[int], sinks_in: int, **options: Any) -> list[Any]:
    """The measures of each run of keys; the learned sink is in one of them."""
    keys, found = problem["key"].shape[-2], []
    for n, (first, last) in enumerate(zip([0, *cuts], [*cuts, keys], strict=True)):
        score = ch.scores.dot(softcap=3.0, sinks=problem["sinks"] if n == sinks_in else None)
        weights = ch.attention_weights(
            problem["query"], problem["key"][..., first:last, :], mask=problem["mask"][..., first:last], score=score
        )
        found.append(weights.measure(*NAMES, first_query=0, first_key=first, **options))
    return found


NAMES = (*(name for name in ROW_MEASURES if name != "diagonality"), "offset(40)")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("cuts", [[100], [1, 2, 250], [128, 256], [0, 300]])
def test_parts_of_the_keys_merge_to_the_whole(cuts: list[int], dtype: str) -> None:
    random = np.random.default_rng(0)
    q, k = random.standard_normal((2, 2, 300, 16)).astype(dtype)
    mask = random.random((2, 300, 300)) < 0.3
    mask[:, 20:30], mask[:, 40:50, :100] = False, False  # rows that see nothing, or nothing in the first part
    problem = {"query": q, "key": k, "mask": mask, "sinks": np.array([0.5, 3.0])}
    folds = {"moments": ch.Fold(moments, keeps=3), "most": ch.Fold(most, join=larger)}
    options: dict[str, Any] = {"sink": 130, "top": 5, "folds": folds}
    first, *rest = parts_of(problem, cuts, sinks_in=len(cuts), **options)
    whole = parts_of(problem, [], sinks_in=0, **options)[0]
    for part in rest:
        first = first.merge(part)
    near = 1e-12 if dtype == "float64" else 1e-5
    np.testing.assert_allclose(first.logsumexp, whole.logsumexp, atol=near)
    np.testing.assert_array_equal(first.empty_rows, whole.empty_rows)
    for name, value in whole.to_dict().items():
        if name != "top_keys":
            np.testing.assert_allclose(first.to_dict()[name], value, rtol=10 * near, atol=10 * near, err_msg=name)
    np.testing.assert_array_equal(first.top.keys[:, 50:], whole.top.keys[:, 50:])


def test_measures_that_rode_merge_too() -> None:
    from clearhead.measures import ask

    q, k = np.random.default_rng(0).standard_normal((2, 2, 300, 16))
    parts = [
        ch.attention(q, k[:, s], k[:, s], measure=ask("entropy", "self", first_query=0, first_key=s.start))[1]
        for s in (slice(0, 90), slice(90, 300))
    ]
    whole = ch.attention(q, k, k, measure=("entropy", "self"))[1]
    merged = parts[0].merge(parts[1])
    np.testing.assert_allclose(merged.entropy, whole.entropy, rtol=1e-12)
    np.testing.assert_allclose(merged.self_, whole.self_, rtol=1e-12)


def test_what_keys_receive_from_parts_stands_side_by_side_under_the_logsumexp_of_all() -> None:
    q, k = np.random.default_rng(0).standard_normal((2, 2, 300, 16))
    total = ch.attention_weights(q, k).logsumexp64
    parts = [ch.attention_weights(q, k[:, s], logsumexp=total) for s in (slice(0, 90), slice(90, 300))]
    received = np.concatenate([part.received() for part in parts], axis=-1)
    np.testing.assert_allclose(received, ch.attention_weights(q, k).received(), rtol=1e-12)


def test_what_does_not_merge_is_said() -> None:
    x = np.zeros((2, 4))
    weights = ch.attention_weights(x, x)
    for name in ("received", "coverage", "diagonality"):
        with pytest.raises(ValueError, match=rf"^{name} cannot be merged: rows are summed in it already"):
            weights.measure(name).merge(weights.measure(name))
    with pytest.raises(ValueError, match=r"^pooled cannot be merged"):
        weights.measure(pooled=(1, 1)).merge(weights.measure(pooled=(1, 1)))
    with pytest.raises(
        ValueError, match=r"^parts to merge must have the same rows and measures: got Measures\(entropy;"
    ):
        weights.measure("entropy").merge(weights.measure("self"))
    with pytest.raises(TypeError, match=r"^measures merge with measures of other keys, got 3$"):
        weights.measure("entropy").merge(3)  # type: ignore[arg-type]
