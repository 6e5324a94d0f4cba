"""The oracle itself, against the definitions written out cell by cell: whoever guards must be guarded."""

from __future__ import annotations

import math

import numpy as np
import pytest

import clearhead as ch

RANDOM = np.random.default_rng(0)


def test_softmax_is_stable_and_takes_any_axis() -> None:
    x = RANDOM.standard_normal((3, 4, 5))
    for axis in (0, 1, 2, -1, -2):
        expected = np.exp(x) / np.exp(x).sum(axis=axis, keepdims=True)
        np.testing.assert_allclose(ch.softmax(x, axis=axis), expected, rtol=1e-14)
    np.testing.assert_array_equal(ch.softmax([1e4, 1e4, -1e4]), [0.5, 0.5, 0.0])
    assert ch.softmax(np.zeros((2, 3), np.float32)).dtype == np.float32


def test_create_qkv_multiplies_whatever_leads() -> None:
    x, (W_q, W_k, W_v) = RANDOM.standard_normal((2, 3, 4)), RANDOM.standard_normal((3, 4, 5))
    for made, weight in zip(ch.create_qkv(x, W_q, W_k, W_v), (W_q, W_k, W_v), strict=True):
        np.testing.assert_array_equal(made, x @ weight)
    Q, _, _ = ch.create_qkv([[1, 2]], [[1], [10]], [[1], [1]], [[1], [1]])
    np.testing.assert_array_equal(Q, [[21]])


def test_the_dense_tutorial_function_keeps_leading_axes() -> None:
    q, k, v = (RANDOM.standard_normal((2, 3, n, d)) for n, d in ((4, 6), (5, 6), (5, 7)))
    output, weights = ch.core.scaled_dot_product_attention(q, k, v)
    assert output.shape == (2, 3, 4, 7)
    assert weights.shape == (2, 3, 4, 5)
    lone, _ = ch.core.scaled_dot_product_attention(q[1, 2], k[1, 2], v[1, 2])
    np.testing.assert_allclose(output[1, 2], lone, rtol=0, atol=1e-14)


def by_hand(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: ch.masks.Mask, head: int) -> tuple[list[float], float]:
    """One row's output and logsumexp for the score below, in plain Python, in the order that semantics prescribe."""
    queries, keys = len(q), len(k)
    i, scores = 1, []
    for j in range(keys):
        s = 0.5 * sum(float(a) * float(b) for a, b in zip(q[i], k[j], strict=True))
        s = 2.0 * math.tanh(s / 2.0)
        s += 0.25 * j
        s -= 0.125 * abs(i + keys - queries - j)
        s = s * 2 - head
        scores.append(s if mask.dense(queries, keys)[i, j] else -math.inf)
    sink = 0.75
    top = max([sink, *scores])
    total = sum(math.exp(s - top) for s in [sink, *scores])
    weights = [math.exp(s - top) / total for s in scores]
    output = [sum(w * float(x) for w, x in zip(weights, v[:, c], strict=True)) for c in range(v.shape[1])]
    return output, top + math.log(total)


def test_every_step_comes_in_its_order() -> None:
    """scale, softcap, bias, ALiBi, the user's function, mask, sinks: as if written out by hand."""
    q, k, v = (RANDOM.standard_normal((2, n, d)) for n, d in ((3, 4), (5, 4), (5, 2)))
    mask = ch.masks.causal(align="end")
    score = ch.scores.dot(
        scale=0.5,
        softcap=2.0,
        bias=0.25 * np.arange(5.0),
        alibi=np.array([0.125, 0.125]),
        align="end",
        function=lambda score, batch, head, query, key: score * 2 - head,
        sinks=np.array([0.75, 0.75]),
    )
    output, weights, logsumexp = ch.core.attend(q, k, v, mask=mask, score=score, dtype=np.float64)
    for head in range(2):
        row, log = by_hand(q[head], k[head], v[head], mask, head)
        np.testing.assert_allclose(output[head, 1], row, rtol=1e-13)
        assert logsumexp[head, 1] == pytest.approx(log, rel=1e-14)
        assert weights[head, 1, 4] == 0


def test_general_and_additive_scores_are_luongs_and_bahdanaus() -> None:
    q, k, v = (RANDOM.standard_normal((n, d)) for n, d in ((2, 3), (4, 5), (4, 2)))
    W = RANDOM.standard_normal((3, 5))
    _, weights, _ = ch.core.attend(q, k, v, score=ch.scores.general(W))
    scores = np.array([[q[i] @ W @ k[j] for j in range(4)] for i in range(2)])
    np.testing.assert_allclose(weights, ch.softmax(scores), rtol=1e-13)
    W_q, W_k, vector = RANDOM.standard_normal((3, 6)), RANDOM.standard_normal((5, 6)), RANDOM.standard_normal(6)
    _, weights, _ = ch.core.attend(q, k, v, score=ch.scores.additive(W_q, W_k, vector))
    scores = np.array([[vector @ np.tanh(q[i] @ W_q + k[j] @ W_k) for j in range(4)] for i in range(2)])
    np.testing.assert_allclose(weights, ch.softmax(scores), rtol=1e-13)


def test_query_head_h_reads_key_head_h_over_group() -> None:
    q, k, v = (RANDOM.standard_normal((h, 3, 4)) for h in (6, 2, 2))
    output, _, _ = ch.core.attend(q, k, v)
    for head in range(6):
        lone, _, _ = ch.core.attend(q[head], k[head // 3], v[head // 3])
        np.testing.assert_allclose(output[head], lone, rtol=0, atol=1e-15)


def test_a_row_of_nothing_is_zero_and_its_logsumexp_minus_infinity() -> None:
    q = RANDOM.standard_normal((3, 4))
    output, weights, logsumexp = ch.core.attend(q, q, q, mask=ch.masks.intervals([0, 2, 0], [3, 2, 1]))
    assert not output[1].any()
    assert not weights[1].any()
    assert logsumexp[1] == -np.inf
    np.testing.assert_allclose(output[2], q[0], rtol=0, atol=1e-15)


def test_what_is_hidden_cannot_touch_the_output() -> None:
    query, key, value = RANDOM.standard_normal((3, 4, 3))
    expected = ch.core.attend(query, key, value, mask=ch.masks.lengths(2))
    key[2:], value[2], value[3] = np.nan, np.inf, np.nan
    for found, clean in zip(ch.core.attend(query, key, value, mask=ch.masks.lengths(2)), expected, strict=True):
        np.testing.assert_array_equal(found, clean)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.longdouble])
def test_the_oracle_computes_in_the_dtype_asked_for(dtype: type) -> None:
    x = RANDOM.standard_normal((4, 3)).astype(np.float32)
    assert {result.dtype for result in ch.core.attend(x, x, x, dtype=dtype)} == {np.dtype(dtype)}
    assert ch.core.attend(x, x, x)[0].dtype == np.float32
    assert ch.core.attend(x, x, x.astype(np.float64))[0].dtype == np.float64
