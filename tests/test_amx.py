"""bfloat16 on the matrix unit: exact products, weights to 2**-16, and what it cannot do is left to the other kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16
from numpy.typing import NDArray

import clearhead as ch
from clearhead import launch
from clearhead.kernels import amx
from clearhead.plan import plan
from clearhead.problem import check

pytestmark = pytest.mark.skipif(not amx.available(), reason="this processor has no matrix unit")
Arrays = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]


@pytest.fixture(autouse=True)
def unrounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results in float32, before they are rounded to bfloat16."""
    monkeypatch.setattr(launch, "stored_dtype", lambda planned: planned.problem.compute_dtype)


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """What the other kernel gives."""

    def run(*arrays: NDArray[Any], **options: Any) -> NDArray[Any]:
        with monkeypatch.context() as patch:
            patch.setattr(launch, "by_amx", lambda planned: False)
            return launch.run(plan(check(*arrays, **options)))[0]

    return run


def inputs(queries: int = 300, keys: int = 300, dim: int = 64, value_dim: int = 96) -> Arrays:
    random = np.random.default_rng(0)
    shapes = (2, 4, queries, dim), (2, 2, keys, dim), (2, 2, keys, value_dim)
    q, k, v = (random.standard_normal(shape).astype(bfloat16) for shape in shapes)
    return q, k, v


def by_amx(*arrays: NDArray[Any], **options: Any) -> NDArray[Any]:
    planned = plan(check(*arrays, **options))
    assert launch.by_amx(planned)
    return launch.run(planned)[0]


def far(one: NDArray[Any], other: NDArray[Any]) -> float:
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


@pytest.mark.parametrize("queries", [9, 48, 49, 200])
@pytest.mark.parametrize("keys", [1, 16, 31, 32, 33, 127, 128, 129, 300])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_every_remainder_is_right(without: Any, queries: int, keys: int, dim: int) -> None:
    q, k, v = inputs(queries, keys, dim)
    assert far(by_amx(q, k, v), without(q, k, v)) < 2e-5


@pytest.mark.parametrize("mask", [
    ch.masks.causal("end"),
    ch.masks.causal("start") & ch.masks.window(left=20, align="start"),
    ch.masks.lengths([7, 300]),
    ch.masks.causal("start") | ch.masks.array(np.arange(300) % 3 == 0),
    ~ch.masks.intervals(np.full(300, 100), np.full(300, 228)),
], ids=["causal", "window", "lengths", "union", "hole"])  # fmt: skip
def test_masks(without: Any, mask: Any) -> None:
    arrays = inputs()
    assert far(by_amx(*arrays, mask=mask), without(*arrays, mask=mask)) < 2e-5


@pytest.mark.parametrize("score", [
    ch.scores.dot(scale=3.0),
    ch.scores.dot(softcap=2.0, sinks=[0.5, 1, 2, 3]),
    ch.scores.dot(alibi=[0.1, 0.2, 0.3, 0.4]),
    ch.scores.dot(bias=np.random.default_rng(1).standard_normal((300, 300)).astype(np.float32)),
    ch.scores.dot(function=lambda s, b, h, i, j: s * 2 if i > j else s),
], ids=["scale", "softcap", "alibi", "bias", "function"])  # fmt: skip
def test_scores(without: Any, score: Any) -> None:
    arrays = inputs()
    assert far(by_amx(*arrays, score=score), without(*arrays, score=score)) < 2e-5


def test_logsumexp_is_exact_where_the_largest_score_was_not_followed() -> None:
    """Scores that creep up by less than the kernel's threshold a block."""
    q = np.ones((1, 1, 60, 32), bfloat16)
    k = np.zeros((1, 1, 1024, 32), bfloat16)
    k[..., 0] = np.arange(1024) // 128 * 4
    state = ch.attention_state(q, k, k, score=ch.scores.dot(scale=1.0))
    expected = np.log(np.exp(k[0, 0, :, 0].astype(float)).sum())
    np.testing.assert_allclose(state.logsumexp, expected, rtol=1e-6)


@pytest.mark.parametrize("where", ["query", "key", "value"])
@pytest.mark.parametrize("number", [np.nan, np.inf, 3e38, 1e-39, 1e-25])
def test_what_the_unit_would_round_away_is_left_to_the_other_kernel(without: Any, where: str, number: float) -> None:
    """And it alone: rows that do not see it have the bits that they have without it."""
    q, k, v = inputs()
    place = {"query": q, "key": k, "value": v}[where]
    place[1, 1, 200, 3] = number
    found, plain = by_amx(q, k, v, mask=ch.masks.causal()), without(q, k, v, mask=ch.masks.causal())
    heads = slice(1, 2) if where == "query" else slice(2, 4)
    rows = slice(200, 201) if where == "query" else slice(200, None)
    np.testing.assert_array_equal(found[1, heads, rows], plain[1, heads, rows])
    expected = by_amx(*inputs(), mask=ch.masks.causal())
    expected[1, heads, rows] = found[1, heads, rows]
    np.testing.assert_array_equal(found, expected)


def test_bits_depend_neither_on_threads_nor_on_the_batch_nor_on_the_layout() -> None:
    q, k, v = inputs(1000, 1000)
    v[1, 1, 500, 5] = np.inf
    whole = ch.attention(q, k, v)
    threads = ch.get_num_threads()
    try:
        for count in (1, 2, 5):
            ch.set_num_threads(count)
            np.testing.assert_array_equal(ch.attention(q, k, v), whole)
    finally:
        ch.set_num_threads(threads)
    np.testing.assert_array_equal(ch.attention(q[:1, 2:], k[:1, 1:], v[:1, 1:]), whole[:1, 2:])
    turned = [np.ascontiguousarray(array.swapaxes(-1, -2)).swapaxes(-1, -2) for array in (q, k, v)]
    np.testing.assert_array_equal(ch.attention(*turned), whole)
    reversed_rows = [np.ascontiguousarray(array[..., ::-1, :])[..., ::-1, :] for array in (q, k, v)]
    np.testing.assert_array_equal(ch.attention(*reversed_rows), whole)
