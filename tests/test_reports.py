"""What users of other libraries reported: each report as a test of what would have been right.

hf = huggingface/transformers, pt = pytorch/pytorch, ort = microsoft/onnxruntime, fa = Dao-AILab/flash-attention,
fi = flashinfer-ai/flashinfer. Reports that are about speed or gradients have no test here.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

import clearhead as ch
from clearhead.testing.budget import Oracle

RANDOM = np.random.default_rng(0)
# Enough for several tiles of queries and keys, and few queries that stream by.
MANY = tuple(RANDOM.standard_normal((2, n, 16)).astype(np.float32) for n in (150, 300, 300))
FEW = tuple(RANDOM.standard_normal((2, n, 16)).astype(np.float32) for n in (2, 1500, 1500))


@pytest.fixture(params=[MANY, FEW], ids=["many queries", "few queries"])
def qkv(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_a_fully_masked_row_is_not_nan(qkv: Any) -> None:
    """pt#103963, pt#41508, openvino#35959."""
    q, k, v = qkv
    output, weights = ch.scaled_dot_product_attention(q, k, v, mask=np.zeros((1, 1), bool))
    assert not output.any()
    assert not np.asarray(weights).any()
    assert np.isneginf(weights.logsumexp).all()


def test_a_fully_masked_row_is_not_the_mean_of_the_values(qkv: Any) -> None:
    """ort#28904."""
    q, k, v = qkv
    seen = np.ones((q.shape[1], k.shape[1]), bool)
    seen[1] = False
    output = ch.attention(q, k, v, mask=seen)
    assert not output[:, 1].any()
    assert output[:, 0].any()


@pytest.mark.parametrize("first", [1, 48, 128, 200, 256, 299])
def test_leading_tiles_that_are_hidden_do_not_poison_later_ones(first: int) -> None:
    """pt#127055: the first tile of keys all -inf, a later one valid."""
    q, k, v = MANY
    expected = ch.attention(q, k[:, first:], v[:, first:])
    bias = np.where(np.arange(300) < first, -np.inf, 0).astype(np.float32)
    for hidden in (ch.masks.intervals(first, 300), np.arange(300) >= first, bias):
        np.testing.assert_allclose(ch.attention(q, k, v, mask=hidden), expected, rtol=0, atol=1e-6)


def test_two_masks_do_not_add_up_to_minus_infinity() -> None:
    """hf#27114: two masks of finfo.min, added, were -inf, and rows hidden by both were NaN. Masks are not added."""
    q, k, v = MANY
    padding, causal = np.arange(300) >= 5, ch.masks.causal("start")
    output, weights = ch.scaled_dot_product_attention(q, k, v, mask=causal & padding & padding)
    assert not output[:, :5].any()
    assert np.isneginf(weights.logsumexp[:, :5]).all()
    Oracle({"query": q, "key": k, "value": v, "mask": causal & padding}).check(output=output, weights=weights)


def test_causal_with_unequal_lengths_must_say_which(qkv: Any) -> None:
    """pt#103082, mlx#2835, ort#29020."""
    q, k, v = qkv
    with pytest.raises(ValueError, match="can mean two things"):
        ch.attention(q, k, v, mask=ch.masks.causal())
    start, end = (ch.attention(q, k, v, mask=ch.masks.causal(align)) for align in ("start", "end"))
    np.testing.assert_allclose(start[:, 0], v[:, 0], rtol=0, atol=1e-6)
    np.testing.assert_allclose(end[:, -1], ch.attention(q[:, -1:], k, v)[:, 0], rtol=0, atol=1e-6)


def test_causal_end_with_more_queries_than_keys_leaves_leading_rows_empty() -> None:
    """fa#1778, fa#443."""
    k, q, v = MANY[0], MANY[1], MANY[2][:, :150]
    output, weights = ch.scaled_dot_product_attention(q, k, v, mask=ch.masks.causal("end"))
    assert not output[:, :150].any()
    assert np.isneginf(weights.logsumexp[:, :150]).all()
    np.testing.assert_allclose(output[:, 150], v[:, 0], rtol=0, atol=1e-6)
    Oracle({"query": q, "key": k, "value": v, "mask": ch.masks.causal("end")}).check(output=output, weights=weights)


@pytest.mark.parametrize("hide", ["bias", "mask"])
def test_the_softcap_comes_before_the_mask(qkv: Any, hide: str) -> None:
    """onnx#7867, ort#28379: capped after the mask, -inf turned into -cap, and hidden keys were seen."""
    q, k, _ = qkv
    seen = np.arange(k.shape[1]) < 7
    bias = np.where(seen, 0, -np.inf).astype(np.float32) if hide == "bias" else None
    score = ch.scores.dot(softcap=1.0, bias=bias)
    weights = ch.attention_weights(q, k, mask=None if hide == "bias" else seen, score=score)
    assert not weights[..., 7:].any()
    np.testing.assert_allclose(weights[..., :7].sum(axis=-1), 1, rtol=0, atol=1e-6)


def test_nan_in_hidden_keys_and_values_does_not_leak(qkv: Any) -> None:
    """pt#101967, fa#2374, vllm#936, fi#941: padding may hold anything."""
    q, k, v = (x.copy() for x in qkv)
    expected = ch.attention(q, k, v, mask=ch.masks.lengths(100))
    k[:, 100:], v[:, 100:] = np.nan, np.nan
    np.testing.assert_array_equal(ch.attention(q, k, v, mask=ch.masks.lengths(100)), expected)


def test_empty_sequences_do_not_crash() -> None:
    """pt#141219, pt#174939."""
    q, k, v = FEW
    assert ch.attention(q[:, :0], k, v).shape == (2, 0, 16)
    assert not ch.attention(q, k[:, :0], v[:, :0]).any()
    assert ch.attention(q[:0], k[:0], v[:0]).shape == (0, 2, 16)


def test_values_shorter_than_keys_are_not_read_past_their_end() -> None:
    """pt#193728, xformers#1122."""
    q, k, v = MANY
    with pytest.raises(ValueError, match="key has 300 tokens and value has 299"):
        ch.attention(q, k, v[:, :299])


def test_an_inner_stride_other_than_one_is_read_right(qkv: Any) -> None:
    """pt#187506: silent garbage."""
    q, k, v = qkv
    expected = ch.attention(q, k, v)
    turned = [np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2) for x in (q, k, v)]
    assert all(x.strides[-1] != x.itemsize for x in turned)
    np.testing.assert_array_equal(ch.attention(*turned), expected)


def test_true_attends_everywhere() -> None:
    """pt#170415: polarity differed between two functions of one library."""
    q, k, v = MANY
    only = np.arange(300) == 42
    for mask in (only, ch.masks.array(only), ch.masks.function(lambda batch, head, query, key: key == 42)):
        np.testing.assert_allclose(ch.attention(q, k, v, mask=mask)[:, 0], v[:, 42], rtol=0, atol=1e-6)
        np.testing.assert_allclose(ch.core.attend(q, k, v, mask=mask)[0][:, 0], v[:, 42], rtol=0, atol=1e-6)


def test_windows_include_both_ends() -> None:
    """hf#39408, jax#32300: off by one; ignored."""
    q, k, _ = MANY
    weights = ch.attention_weights(q, k[:, :150], mask=ch.masks.window(left=3, right=2))
    seen = np.asarray(weights)[0] > 0
    for i in (0, 3, 75, 147, 149):
        assert np.flatnonzero(seen[i]).tolist() == list(range(max(0, i - 3), min(150, i + 3)))


def test_two_empty_parts_merge_to_nothing() -> None:
    """fi#4051, vllm#39148."""
    q, k, v = FEW
    nothing = ch.attention_state(q, k, v, mask=ch.masks.intervals(0, 0))
    output, logsumexp = ch.merge(nothing, nothing)
    assert not output.any()
    assert np.isneginf(logsumexp).all()


def test_logsumexp_is_natural(qkv: Any) -> None:
    """pt#181645: off by ln 2."""
    q, k, v = qkv
    expected = np.log(np.exp(q.astype(float) @ k.astype(float).swapaxes(-1, -2) / 4).sum(axis=-1))
    np.testing.assert_allclose(ch.attention_state(q, k, v).logsumexp, expected, rtol=1e-6)
    np.testing.assert_allclose(ch.attention_weights(q, k).logsumexp, expected, rtol=1e-6)


def test_a_scale_of_zero_is_honoured(qkv: Any) -> None:
    """ort#20805: 0 meant "default"."""
    q, k, v = qkv
    output = ch.attention(q, k, v, score=ch.scores.dot(scale=0))
    np.testing.assert_allclose(output, np.broadcast_to(v.mean(axis=1, keepdims=True), output.shape), atol=1e-6)


def test_asking_for_weights_changes_nothing(qkv: Any) -> None:
    """keras#23038: it dropped the causal mask."""
    q, k, v = qkv
    mask = ch.masks.causal("end")
    output, weights = ch.scaled_dot_product_attention(q, k, v, mask=mask)
    np.testing.assert_array_equal(output, ch.attention(q, k, v, mask=mask))
    assert not np.asarray(weights)[~np.broadcast_to(mask.dense(q.shape[1], k.shape[1]), weights.shape)].any()


@pytest.mark.parametrize("lead", [(), (2,), (1, 3), (2, 1, 2), (1, 1, 1, 2)])
def test_any_number_of_leading_axes(lead: tuple[int, ...]) -> None:
    """pt#133458: 5-D inputs took a slow path."""
    q, k, v = (RANDOM.standard_normal((*lead, 2, n, 16)) for n in (9, 20, 20))
    output = ch.attention(q, k, v)
    for place in np.ndindex(*lead):
        np.testing.assert_array_equal(output[place], ch.attention(q[place], k[place], v[place]))


def test_padding_changes_nothing_about_what_is_real() -> None:
    """OpenNMT-py#272, pytorch/tutorials#593: batches of padded sequences decoded worse than single sentences."""
    q, k, v = (RANDOM.standard_normal((3, 2, n, 16)) for n in (20, 130, 130))
    lengths = [130, 5, 60]
    output = ch.attention(q, k, v, mask=ch.masks.lengths(lengths))
    for entry, length in enumerate(lengths):
        lone = ch.attention(q[entry], k[entry, :, :length], v[entry, :, :length])
        np.testing.assert_allclose(output[entry], lone, rtol=0, atol=1e-14)


def test_softmax_is_over_the_keys() -> None:
    """PyTorch-NLP#2, keon/seq2seq PR#6."""
    q, k, _ = MANY
    weights = np.asarray(ch.attention_weights(q, k))
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=0, atol=1e-5)
    assert np.abs(weights.sum(axis=-2) - 1).max() > 0.1


def test_every_option_acts_or_is_refused() -> None:
    """OpenNMT-py#179: an option that is silently unused. Each modifier of a score changes the output."""
    q, k, v = (x[:, :40] for x in MANY)
    options: dict[str, Any] = {
        "scale": 0.1,
        "softcap": 0.5,
        "bias": np.linspace(0, 1, 40),
        "alibi": np.array([0.1, 0.2]),
        "function": lambda score, batch, head, query, key: score * 2,
        "sinks": np.zeros(2),
    }
    assert {*options, "align"} == set(inspect.signature(ch.scores.dot).parameters)
    plain = ch.attention(q, k, v)
    for name, value in options.items():
        assert np.abs(ch.attention(q, k, v, score=ch.scores.dot(**{name: value})) - plain).max() > 1e-3, name
