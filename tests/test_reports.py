"""What users of other libraries reported: each report as a test of what would have been right.

A test is named after the first report of its kind; its docstring names the others. hf = huggingface/transformers,
pt = pytorch/pytorch, ort = microsoft/onnxruntime, fa = Dao-AILab/flash-attention, fi = flashinfer-ai/flashinfer.
Speed (pt#151441, pt#115151) is a matter of test_assembly.py and of `make bench`. Gradients (pt#188302, pt#116350,
pt#128971, fa#1672, pt#148752, and those of reports that are here too) are in tests/torch/test_reports_of_gradients.py.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

import clearhead as ch
from clearhead.testing.budget import Oracle
from clearhead.testing.cases import DTYPES, as_dtype

RANDOM = np.random.default_rng(0)
# Enough for several tiles of queries and keys, and few queries that stream by.
MANY = tuple(RANDOM.standard_normal((2, n, 16)).astype(np.float32) for n in (150, 300, 300))
FEW = tuple(RANDOM.standard_normal((2, n, 16)).astype(np.float32) for n in (2, 1500, 1500))
ATOL = {"float64": 1e-14, "float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2}


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> np.dtype[Any]:
    return as_dtype(request.param)


@pytest.fixture(params=[MANY, FEW], ids=["many queries", "few queries"])
def qkv(request: pytest.FixtureRequest, dtype: np.dtype[Any]) -> Any:
    """query (2, n, 16), key and value of each dtype, on each kernel; read-only, as tests share nothing."""
    arrays = tuple(x.astype(dtype) for x in request.param)
    for x in arrays:
        x.flags.writeable = False
    return arrays


def computed_in(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """What products and sums are, and so what a bias may be without a kernel of its own."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def is_close(found: np.ndarray, expected: np.ndarray) -> None:
    """Equal but for some roundings of numbers near 1 in found's dtype."""
    np.testing.assert_allclose(found.astype(float), expected.astype(float), rtol=0, atol=ATOL[found.dtype.name])


def is_nothing(output: np.ndarray, weights: Any, rows: Any = slice(None)) -> None:
    """Output 0, weights 0, logsumexp -inf in these rows."""
    assert not output[:, rows].any()
    assert not np.asarray(weights)[:, rows].any()
    assert np.isneginf(weights.logsumexp[:, rows]).all()


HIDE_ALL: dict[str, Any] = {
    "array": np.zeros((1, 1), bool),
    "intervals": ch.masks.intervals(0, 0),
    "padding": ch.masks.lengths(0),
    "function": ch.masks.function(lambda batch, head, query, key: False),
    "bias": np.full((1, 1), -np.inf, np.float32),
}


@pytest.mark.parametrize("how", HIDE_ALL)
def test_pytorch_103963_a_fully_masked_row_is_not_nan(qkv: Any, how: str) -> None:
    """pt#103963, pt#41508, openvino#35959."""
    is_nothing(*ch.scaled_dot_product_attention(*qkv, mask=HIDE_ALL[how]))


def test_onnxruntime_28904_a_fully_masked_row_is_not_the_mean_of_the_values(qkv: Any) -> None:
    """ort#28904."""
    q, k, v = qkv
    seen = np.ones((q.shape[1], k.shape[1]), bool)
    seen[1] = False
    output, weights = ch.scaled_dot_product_attention(q, k, v, mask=seen)
    is_nothing(output, weights, 1)
    is_close(output[:, :1], ch.attention(q[:, :1], k, v))


@pytest.mark.parametrize("first", [1, 48, 128, 200, 256, 299])
def test_pytorch_127055_leading_tiles_that_are_hidden_do_not_poison_later_ones(first: int, qkv: Any) -> None:
    """pt#127055: the first tile of keys all -inf, a later one valid."""
    q, k, v = (x[:, :300] for x in qkv)
    expected = ch.attention(q, k[:, first:], v[:, first:])
    bias = np.where(np.arange(300) < first, -np.inf, 0).astype(np.float32)
    for hidden in (ch.masks.intervals(first, 300), np.arange(300) >= first, bias):
        is_close(ch.attention(q, k, v, mask=hidden), expected)


def test_huggingface_27114_two_masks_do_not_add_up_to_minus_infinity(qkv: Any) -> None:
    """hf#27114: two masks of finfo.min, added, were -inf, and rows hidden by both were NaN. Masks are not added."""
    q, k, v = qkv
    padding, causal = np.arange(k.shape[1]) >= 5, ch.masks.causal("start")
    output, weights = ch.scaled_dot_product_attention(q, k, v, mask=causal & padding & padding)
    is_nothing(output, weights, slice(5))
    Oracle({"query": q, "key": k, "value": v, "mask": causal & padding}).check(output=output, weights=weights)


def test_huggingface_27114_the_lowest_number_beside_a_mask_stays_a_number(qkv: Any) -> None:
    """hf#27114: finfo.min in a bias where a mask hides the rest: what is left is an ordinary softmax, not NaN."""
    q, k, v = qkv
    lowest = np.finfo(computed_in(q.dtype)).min
    score = ch.scores.dot(bias=np.full((1, 1), lowest))
    problem = {"query": q, "key": k, "value": v, "mask": ch.masks.intervals(0, 7), "score": score}
    output, weights = ch.scaled_dot_product_attention(**problem)
    Oracle(problem).check(output=output, weights=weights, logsumexp=weights.logsumexp)
    assert np.isfinite(weights.logsumexp).all()


def test_pytorch_103082_causal_with_unequal_lengths_must_say_which(qkv: Any) -> None:
    """pt#103082, mlx#2835, ort#29020: two conventions, chosen silently."""
    q, k, v = qkv
    with pytest.raises(ValueError, match="can mean two things"):
        ch.attention(q, k, v, mask=ch.masks.causal())
    start, end = (ch.attention(q, k, v, mask=ch.masks.causal(align)) for align in ("start", "end"))
    is_close(start[:, 0], v[:, 0])
    is_close(end[:, -1], ch.attention(q[:, -1:], k, v)[:, 0])


def test_flashattention_1778_causal_end_with_more_queries_than_keys_leaves_leading_rows_empty(dtype: Any) -> None:
    """fa#1778, fa#443."""
    q, k, v = (x.astype(dtype) for x in (MANY[1], MANY[0], MANY[2][:, :150]))
    output, weights = ch.scaled_dot_product_attention(q, k, v, mask=ch.masks.causal("end"))
    is_nothing(output, weights, slice(150))
    is_close(output[:, 150], v[:, 0])
    Oracle({"query": q, "key": k, "value": v, "mask": ch.masks.causal("end")}).check(output=output, weights=weights)


@pytest.mark.parametrize("hide", ["bias", "mask"])
def test_onnx_7867_the_softcap_comes_before_the_mask(qkv: Any, hide: str) -> None:
    """onnx#7867, ort#28379: capped after the mask, -inf turned into -cap, and hidden keys were seen."""
    q, k, _ = qkv
    seen = np.arange(k.shape[1]) < 7
    bias = np.where(seen, 0, -np.inf).astype(np.float32) if hide == "bias" else None
    score = ch.scores.dot(softcap=1.0, bias=bias)
    weights = ch.attention_weights(q, k, mask=None if hide == "bias" else seen, score=score)
    assert not weights[..., 7:].any()
    np.testing.assert_allclose(weights[..., :7].sum(axis=-1), 1, rtol=0, atol=1e-6)


@pytest.mark.parametrize("strange", [np.nan, np.inf, -np.inf])
def test_pytorch_101967_nan_in_hidden_keys_and_values_does_not_leak(qkv: Any, strange: float) -> None:
    """pt#101967, fa#2374, vllm#936, fi#941: padding may hold anything."""
    q, k, v = (x.copy() for x in qkv)
    expected = ch.attention(q, k, v, mask=ch.masks.lengths(100))
    k[:, 100:], v[:, 100:] = strange, strange
    np.testing.assert_array_equal(ch.attention(q, k, v, mask=ch.masks.lengths(100)), expected)


def test_pytorch_141219_empty_sequences_do_not_crash(qkv: Any) -> None:
    """pt#141219, pt#174939."""
    q, k, v = qkv
    assert ch.attention(q[:, :0], k, v).shape == (2, 0, 16)
    assert not ch.attention(q, k[:, :0], v[:, :0]).any()
    assert ch.attention(q[:0], k[:0], v[:0]).shape == (0, q.shape[1], 16)
    packed = ch.attention(q[None], k[None], v[None], mask=ch.masks.lengths([0], queries=[0]))
    assert packed.shape == (1, *q.shape)
    assert not packed.any()


def test_pytorch_193728_values_shorter_than_keys_are_not_read_past_their_end(qkv: Any) -> None:
    """pt#193728, xformers#1122."""
    q, k, v = qkv
    keys = k.shape[1]
    with pytest.raises(ValueError, match=f"key has {keys} tokens and value has {keys - 1}"):
        ch.attention(q, k, v[:, :-1])
    with pytest.raises(ValueError, match=f"key has {keys - 1} tokens and value has {keys}"):
        ch.attention(q, k[:, :-1], v)


def test_pytorch_187506_an_inner_stride_other_than_one_is_read_right(qkv: Any) -> None:
    """pt#187506: silent garbage."""
    q, k, v = qkv
    expected = ch.attention(q, k, v)
    turned = [np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2) for x in (q, k, v)]
    assert all(x.strides[-1] != x.itemsize for x in turned)
    np.testing.assert_array_equal(ch.attention(*turned), expected)


def test_pytorch_170415_true_attends_everywhere(qkv: Any) -> None:
    """pt#170415: polarity differed between two functions of one library."""
    q, k, v = qkv
    only = np.arange(k.shape[1]) == 42
    for mask in (only, ch.masks.array(only), ch.masks.function(lambda batch, head, query, key: key == 42)):
        np.testing.assert_array_equal(ch.attention(q, k, v, mask=mask)[:, 0], v[:, 42])
        np.testing.assert_array_equal(ch.attention_weights(q, k, mask=mask)[0, 0], only)
        np.testing.assert_array_equal(ch.core.attend(q, k, v, mask=mask)[0][:, 0], v[:, 42])


@pytest.mark.parametrize("queries", [2, 150])
def test_huggingface_39408_windows_include_both_ends(dtype: Any, queries: int) -> None:
    """hf#39408, jax#32300: off by one; ignored."""
    q, k, v = (x[:, :150].astype(dtype) for x in MANY)
    mask = ch.masks.window(left=3, right=2, align="start")
    output, weights = ch.scaled_dot_product_attention(q[:, :queries], k, v, mask=mask)
    seen = np.asarray(weights)[0] > 0
    for i in {0, 1, 3, 75, 147, 149} & set(range(queries)):
        low, high = max(0, i - 3), min(150, i + 3)
        assert np.flatnonzero(seen[i]).tolist() == list(range(low, high))
        is_close(output[:, i : i + 1], ch.attention(q[:, i : i + 1], k[:, low:high], v[:, low:high]))


def test_flashinfer_4051_two_empty_parts_merge_to_nothing(qkv: Any) -> None:
    """fi#4051, vllm#39148."""
    nothing = ch.attention_state(*qkv, mask=ch.masks.intervals(0, 0))
    output, logsumexp = ch.merge(nothing, nothing)
    assert not output.any()
    assert np.isneginf(logsumexp).all()


def test_pytorch_181645_logsumexp_is_natural(qkv: Any) -> None:
    """pt#181645: off by ln 2."""
    q, k, v = qkv
    expected = np.log(np.exp(q.astype(float) @ k.astype(float).swapaxes(-1, -2) / 4).sum(axis=-1))
    np.testing.assert_allclose(ch.attention_state(q, k, v).logsumexp, expected, rtol=1e-6)
    np.testing.assert_allclose(ch.attention_weights(q, k).logsumexp, expected, rtol=1e-6)


@pytest.mark.parametrize("queries", [1, 60])
def test_pytorch_119131_float16_products_do_not_overflow(queries: int) -> None:
    """pt#119131: 65,504 squared, 16 times over, is a number in float32, and so are all sums of such values."""
    largest = np.float16(65504)
    q, k = np.full((1, queries, 16), largest), np.full((1, 200, 16), largest)
    k[:, ::2] = -largest
    output, weights = ch.scaled_dot_product_attention(q, k, k)
    np.testing.assert_array_equal(output, np.full_like(q, largest))
    np.testing.assert_allclose(weights.logsumexp, 4 * 65504.0**2 + np.log(100), rtol=1e-6)


@pytest.mark.parametrize("queries", [2, 60])
def test_funes_160_weights_that_underflow_are_zero_and_never_subnormal(dtype: Any, queries: int) -> None:
    """funes#160: arithmetic on subnormal numbers is many times slower."""
    q, k = (x[:, :n].astype(dtype) for x, n in ((MANY[0], queries), (MANY[1], 300)))
    gentle = np.linspace(0, -800, 300).astype(computed_in(dtype))
    for score in (ch.scores.dot(scale=40.0), ch.scores.dot(scale=0.0, bias=gentle)):
        weights = np.asarray(ch.attention_weights(q, k, score=score))
        assert (weights == 0).any()
        assert (weights[weights != 0] >= np.finfo(weights.dtype).tiny).all()


def test_onnxruntime_20805_a_scale_of_zero_is_honoured(qkv: Any) -> None:
    """ort#20805: 0 meant "default"."""
    q, k, v = qkv
    output, weights = ch.scaled_dot_product_attention(q, k, v, score=ch.scores.dot(scale=0))
    np.testing.assert_allclose(weights, np.full(weights.shape, 1 / k.shape[1]), rtol=1e-6)
    is_close(output, np.broadcast_to(v.astype(float).mean(axis=1, keepdims=True), output.shape))


def test_keras_23038_asking_for_weights_changes_nothing(qkv: Any) -> None:
    """keras#23038: it dropped the causal mask."""
    q, k, v = qkv
    mask = ch.masks.causal("end")
    output, weights = ch.scaled_dot_product_attention(q, k, v, mask=mask)
    np.testing.assert_array_equal(output, ch.attention(q, k, v, mask=mask))
    assert not np.asarray(weights)[~np.broadcast_to(mask.dense(q.shape[1], k.shape[1]), weights.shape)].any()


@pytest.mark.parametrize("lead", [(), (2,), (1, 3), (2, 1, 2), (1, 1, 1, 2)])
def test_pytorch_133458_any_number_of_leading_axes(dtype: Any, lead: tuple[int, ...]) -> None:
    """pt#133458: 5-D inputs took a slow path. The same kernel, and the same bits, for any number of axes."""
    q, k, v = (RANDOM.standard_normal((*lead, 2, n, 16)).astype(dtype) for n in (9, 20, 20))
    one = (0,) * len(lead)
    assert ch.explain(q, k, v).kernel == ch.explain(q[one], k[one], v[one]).kernel
    output = ch.attention(q, k, v)
    for place in np.ndindex(*lead):
        np.testing.assert_array_equal(output[place], ch.attention(q[place], k[place], v[place]))


# Sequence to sequence


def test_opennmt_272_padding_changes_nothing_about_what_is_real() -> None:
    """OpenNMT-py#272, pytorch/tutorials#593: batches of padded sequences decoded worse than single sentences."""
    q, k, v = (RANDOM.standard_normal((3, 2, n, 16)) for n in (20, 130, 130))
    lengths = [130, 5, 60]
    output = ch.attention(q, k, v, mask=ch.masks.lengths(lengths))
    for entry, length in enumerate(lengths):
        lone = ch.attention(q[entry], k[entry, :, :length], v[entry, :, :length])
        np.testing.assert_allclose(output[entry], lone, rtol=0, atol=1e-14)


def test_pytorch_nlp_2_softmax_is_over_the_keys() -> None:
    """PyTorch-NLP#2, keon/seq2seq PR#6."""
    q, k, _ = MANY
    weights = np.asarray(ch.attention_weights(q, k))
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=0, atol=1e-5)
    assert np.abs(weights.sum(axis=-2) - 1).max() > 0.1


def test_opennmt_179_every_option_acts_or_is_refused() -> None:
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
    # align says where ALiBi counts from, derivative what the gradient of ``function`` is: both act beside another.
    assert {*options, "align", "derivative"} == set(inspect.signature(ch.scores.dot).parameters)
    plain = ch.attention(q, k, v)
    for name, value in options.items():
        assert np.abs(ch.attention(q, k, v, score=ch.scores.dot(**{name: value})) - plain).max() > 1e-3, name

    def gradient(slope: float) -> Any:
        score = ch.scores.dot(function=options["function"], derivative=lambda *_: slope)
        output, vjp = ch.attention_vjp(q, k, v, score=score)
        return vjp(output).query

    assert np.abs(gradient(2.0) - gradient(1.0)).max() > 1e-3
