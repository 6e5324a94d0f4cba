"""What weights cost: references instead of copies, and only the cells that are asked for."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

import clearhead as ch
from clearhead import launch, memory

MB = 1_000_000


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many cells each call of the kernel computes."""
    cells: list[int] = []
    weigh = launch.weigh

    def counting(plan: Any, batch: int, head: int, queries: Any, low: int, high: int, *rest: Any) -> Any:
        cells.append(len(queries) * (high - low))
        return weigh(plan, batch, head, queries, low, high, *rest)

    monkeypatch.setattr(launch, "weigh", counting)
    return cells


def peak(run: Any) -> int:
    """The most bytes that were held at once."""
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def weights() -> ch.AttentionWeights:
    x = np.random.default_rng(0).standard_normal((4, 1000, 16), dtype=np.float32)
    made = ch.attention_weights(x, x)
    made.logsumexp  # noqa: B018  the one pass over all scores is done
    return made


@pytest.mark.parametrize(
    ("index", "cells"),
    [
        ((3, 999, 17), 1),
        ((0, 5), 1000),
        ((0, slice(10, 20), slice(100, 107)), 70),
        ((2, slice(None), 500), 1000),
        ((slice(None), 4, slice(0, 10)), 40),
        ((1, [3, 4, 5], [10, 20, 30]), 3),
        ((0, slice(None, None, 100), slice(0, 2)), 20),
        ((0, slice(0, 0)), 0),
    ],
    ids=str,
)
def test_indexing_computes_what_is_asked_for(
    weights: ch.AttentionWeights, counted: list[int], index: Any, cells: int
) -> None:
    assert np.size(weights[index]) == cells
    assert sum(counted) == cells


def test_few_keys_far_apart_are_computed_one_by_one(counted: list[int]) -> None:
    x = np.zeros((5000, 4))
    made = ch.attention_weights(x[:3], x)
    assert made[1, [0, 4999]].shape == (2,)
    assert sum(counted) == 2


def test_reductions_compute_each_cell_once(weights: ch.AttentionWeights, counted: list[int]) -> None:
    for reduce in (
        lambda: weights.sum(axis=0), lambda: weights.min(), lambda: weights.max(axis=0),
        lambda: weights.argmax(axis=-1), lambda: weights @ np.zeros((1000, 3), np.float32),
    ):  # fmt: skip
        counted.clear()
        reduce()
        assert sum(counted) == weights.size


def test_making_weights_computes_none(counted: list[int]) -> None:
    x = np.zeros((3, 50, 4))
    _, made = ch.scaled_dot_product_attention(x, x, x)
    made.measure("entropy")
    assert made.shape == (3, 50, 50)
    assert made.logsumexp.shape == (3, 50)
    assert not counted


def test_weights_of_100_000_tokens_are_made_in_less_than_5_mb() -> None:
    x = np.random.default_rng(0).standard_normal((100_000, 8), dtype=np.float32)
    mask = ch.masks.causal() & ch.masks.window(left=63)

    def make() -> None:
        made = ch.attention_weights(x, x, mask=mask)
        assert made[99_999, -64:].sum() == pytest.approx(1, abs=1e-5)

    make()  # compiles
    assert peak(make) < 5 * MB


def test_all_measures_of_100_000_tokens_take_memory_linear_in_them() -> None:
    x = np.random.default_rng(0).standard_normal((100_000, 8), dtype=np.float32)
    made = ch.attention_weights(x, x, mask=ch.masks.causal() & ch.masks.window(left=63))
    found: Any = None

    def measure() -> None:
        nonlocal found
        found = made.measure("entropy", "received", "self", "distance", top=8, pooled=(512, 512))

    assert peak(measure) < 80 * MB  # of which a quarter is the result; the matrix has 40 GB
    assert found.received.sum() == pytest.approx(100_000, rel=1e-5)
    assert found.pooled.sum() * (100_000 / 512) ** 2 == pytest.approx(100_000, rel=1e-2)


def test_weights_refer_to_queries_and_keys() -> None:
    """No copies, whatever the strides: what is changed there is seen here."""
    q, k = np.random.default_rng(0).standard_normal((2, 40, 3, 8)).swapaxes(1, 2)
    made = ch.attention_weights(q, k, logsumexp=np.zeros((3, 40)))
    k[0, 7] = 0
    np.testing.assert_allclose(made[0, :, 7], 1, rtol=1e-15)


def test_reductions_hold_a_block_of_rows_not_the_matrix() -> None:
    x = np.zeros((8, 2000, 4), np.float32)  # 128 MB of weights
    made = ch.attention_weights(x, x)
    made.logsumexp  # noqa: B018
    for reduce in (
        lambda: made.sum(axis=-1), lambda: made.mean(axis=(0, 1)), lambda: made.max(), lambda: made.argmax(axis=-1),
        lambda: made.pooled(100, 100), lambda: made.measure("entropy", "received", top=8), lambda: made.received(),
        lambda: made @ np.zeros((8, 2000, 1)),
    ):  # fmt: skip
        assert peak(reduce) < 40 * MB


def test_asking_by_numbers_is_refused_before_numbers_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.zeros((3000, 4), np.float32)
    made = ch.attention_weights(x, x)
    monkeypatch.setattr(memory, "available", lambda: MB)

    def ask() -> None:
        with pytest.raises(MemoryError, match="this part of 3,000 x 3,000 float32 weights takes"):
            made[np.arange(2000)]

    assert peak(ask) < MB


def test_a_large_index_array_costs_little_more_than_its_result() -> None:
    x = np.zeros((3000, 4), np.float32)
    made = ch.attention_weights(x, x)
    made.logsumexp  # noqa: B018
    result = 1500 * 3000 * 4
    assert peak(lambda: made[np.arange(0, 3000, 2)]) < 4 * result
