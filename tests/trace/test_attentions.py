"""Weights that are at hand as matrices, as transformers gives and BertViz takes them, become a trace."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny_models
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import clearhead as ch
from clearhead import from_attentions
from clearhead.trace import TraceError
from clearhead.trace.generation import merge_steps


def made(*shape: int, dtype: Any = np.float32, causal: bool = False) -> Any:
    weights = np.random.default_rng(0).random(shape)
    weights = np.tril(weights) if causal else weights
    return (weights / weights.sum(axis=-1, keepdims=True)).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_rows_come_back_as_they_were_given(dtype: Any) -> None:
    bound = 1e-7
    given = made(2, 3, 7, 7, dtype=dtype, causal=True)
    trace = from_attentions((given, given[::-1]), [list("abcdefg")] * 2)
    assert (trace.texts, trace.layers, trace.kinds) == (2, (0, 1), ("self",))
    for layer, text, whole in ((0, 0, given[0]), (0, 1, given[1]), (1, 0, given[1])):
        weights = trace.weights(layer, text=text)
        assert weights.shape == (3, 7, 7)
        assert np.abs(np.asarray(weights) - whole.astype(np.float64)).max() < bound
        assert np.abs(np.asarray(trace.weights(layer, 2, text=text))[0] - whole[2].astype(np.float64)).max() < bound
    assert np.count_nonzero(np.asarray(trace.weights(0))) == 3 * 28  # what was 0 is 0
    assert trace.sites[0].causal
    assert trace.tokens == tuple("abcdefg")


@given(
    arrays(np.float32, st.tuples(*[st.integers(1, 5)] * 4), elements=st.floats(0, 1, width=32, allow_subnormal=False))
)
def test_any_weights(given: np.ndarray) -> None:
    """Whether rows sum to 1 or not, and where they are empty."""
    trace = from_attentions({"cross": [given]})
    assert np.abs(np.asarray(trace.weights(0)) - given[0]).max() <= 1e-6
    seen = given.sum(axis=-1, dtype=np.float64)
    off = np.abs(seen - 1)[seen > 0]
    assert trace.checks.sites[0].row_sum == pytest.approx(off.max(initial=0), abs=1e-12)


def test_measures_are_those_of_the_matrix() -> None:
    weights = made(1, 2, 40, 40, causal=True)
    found = from_attentions([weights]).weights(0).measure("entropy", "distance", "previous")
    w = weights[0].astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        assert np.abs(found.entropy + np.nansum(w * np.log(w), axis=-1)).max() < 1e-5
    back = np.arange(40)[:, None] - np.arange(40)
    assert np.abs(found.distance - (w * back).sum(axis=-1)).max() < 1e-4
    assert np.abs(found.previous[:, 1:] - np.diagonal(w, -1, 1, 2)).max() < 1e-6


def test_torch_tensors_of_any_float_dtype() -> None:
    import torch

    weights = torch.from_numpy(made(1, 2, 4, 4)).requires_grad_()
    for dtype, bound in ((torch.float32, 1e-7), (torch.float64, 1e-7), (torch.bfloat16, 4e-3)):
        found = np.asarray(from_attentions((weights.to(dtype),)).weights(0))
        assert np.abs(found - weights.detach().numpy()[0]).max() < bound


def test_after_dropout_rows_do_not_sum_to_1_and_that_is_said() -> None:
    """transformers#31468: the number is given as it is, and checked."""
    kept = np.random.default_rng(0).random((1, 2, 8, 8)) < 0.9
    trace = from_attentions([made(1, 2, 8, 8) * kept / 0.9])
    assert not trace.checks.passed
    assert from_attentions([made(1, 2, 8, 8)]).checks.passed


def test_several_stacks() -> None:
    parts = {"encoder": [made(1, 2, 4, 4)], "decoder": [made(1, 2, 6, 6)] * 2, "cross": [made(1, 2, 6, 4)] * 2}
    trace = from_attentions(parts, {"encoder": list("wxyz"), "decoder": list("abcdef")})
    assert trace.kinds == ("encoder", "decoder", "cross")
    assert trace.side("cross", "key").text == tuple("wxyz")
    assert trace.side("cross").text == tuple("abcdef")
    assert trace.weights(1, kind="cross").shape == (2, 6, 4)


@pytest.mark.parametrize(
    ("attentions", "tokens", "words"),
    [
        ((None, None), None, r"self attentions hold None in a layer's place: .*attn_implementation='eager'"),
        ((), None, "there are no self attentions: run the model with output_attentions=True"),
        (None, None, "there are no self attentions"),
        ({}, None, "attentions are given for no kind"),
        ({"both": [np.eye(2)]}, None, "attentions are given for 'both': the kinds are self, encoder"),
        ([np.ones((2, 3, 3))], None, r"array \(2, 3, 3\), not \(texts, heads, queries, keys\): flex_attention puts"),
        ([np.ones((3, 3))], None, r"array \(3, 3\), not \(texts, heads, queries, keys\)$"),
        ([np.ones((1, 1, 2, 2), int)], None, "self attentions are int64: weights are floating-point numbers"),
        ([np.full((1, 1, 2, 2), -1.0)], None, "negative or infinite numbers: these are no weights, but perhaps scores"),
        ([np.full((1, 1, 2, 2), np.nan)], None, "negative or infinite numbers"),
        ([np.zeros((1, 0, 2, 2))], None, r"an empty array \(1, 0, 2, 2\) in layer 0"),
        ([made(1, 1, 2, 2), made(2, 1, 2, 2)], None, "batches of 1, 2 texts: give those of one run"),
        ([made(1, 1, 2, 2), made(1, 1, 3, 3)], None, "attentions hold 2, 3 self tokens"),
        ([made(1, 1, 2, 2)], ["a"], "tokens are 1 lists of 1 self tokens, the attentions 1 texts of 2"),
        ([made(2, 1, 2, 2)], [["a", "b"]], "tokens are 1 lists of 2 self tokens, the attentions 2 texts of 2"),
        ([made(1, 1, 2, 2)], {"encoder": ["a", "b"]}, "tokens are given for 'encoder': the attentions look at self"),
    ],
)
def test_what_cannot_be_weights(attentions: Any, tokens: Any, words: str) -> None:
    with pytest.raises(TraceError, match=words):
        from_attentions(attentions, tokens)


@pytest.mark.parametrize("cache", ["growing", "static", "sliding"])
def test_bertviz_116_a_generation_is_one_record(cache: str) -> None:
    """transformers#26174, #33296; bertviz#116, #133: first n x n, then 1 x k, and viewers crash on it."""
    whole = made(2, 3, 9, 9, causal=True)
    if cache == "sliding":
        whole = whole * (np.subtract.outer(np.arange(9), np.arange(9)) < 4)
    steps = []
    for start, stop in [(0, 5), (5, 6), (6, 7), (7, 9)]:  # the last step reads two at once
        first, last = {"growing": (0, stop), "static": (0, 9), "sliding": (0, stop)}[cache]
        if cache == "sliding" and start:
            first = max(0, start - 3)
        steps.append((whole[:, :, start:stop, first:last],) * 2)
    trace = from_attentions(steps, [list("abcdefghi")] * 2)
    assert trace.layers == (0, 1)
    for text in (0, 1):
        assert np.abs(np.asarray(trace.weights(1, text=text)) - whole[text]).max() < 1e-7


def test_bertviz_116_what_transformers_gives_of_a_generation() -> None:
    """Against one pass over the whole text that the generation became."""
    import torch

    model = tiny_models.build("llama", attn_implementation="eager")
    prompt = torch.arange(3, 9)[None]
    made = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=4,
        do_sample=False,
        eos_token_id=None,
        output_attentions=True,
        return_dict_in_generate=True,
    )
    with torch.inference_mode():
        expected = model(made.sequences[:, :-1], output_attentions=True).attentions
    trace = from_attentions(made.attentions)
    assert len(trace.tokens) == made.sequences.shape[1] - 1
    for layer, weights in enumerate(expected):
        assert np.abs(np.asarray(trace.weights(layer)) - weights[0].numpy()).max() < 1e-5


def test_steps_that_do_not_fit() -> None:
    one = made(1, 2, 3, 3, causal=True)
    with pytest.raises(TraceError, match="the steps of this generation have 1, 2 layers"):
        merge_steps([(one,), (one, one)])
    with pytest.raises(TraceError, match=r"layer 0 has \(1, 2\), \(1, 3\) texts and heads"):
        merge_steps([(one,), (made(1, 3, 1, 4),)])
    with pytest.raises(TraceError, match="layer 0 looks at 4 keys when 3 tokens have been read: what was in the cache"):
        merge_steps([(made(1, 2, 3, 4),)])
    with pytest.raises(TraceError, match="looks at 4, 5 keys of the encoder"):
        merge_steps([(made(1, 2, 1, 4),), (made(1, 2, 1, 5),)], cross=True)


def test_cross_attention_of_a_generation_looks_at_one_encoder() -> None:
    whole = made(1, 2, 4, 3)
    steps = [(whole[:, :, row : row + 1],) for row in range(4)]
    trace = from_attentions({"cross": steps})
    assert np.abs(np.asarray(trace.weights(0)) - whole[0]).max() < 1e-7


def test_fa_902_rows_are_normalized_and_of_exact_shape(recorded: Any) -> None:
    """flash-attention#902: return_attn_probs gives padded, sign-coded, unnormalized blocks."""
    tokens = len(recorded.tokens)
    for layer in recorded.layers:
        weights = recorded.weights(layer)
        row = weights[2, tokens - 1]
        assert weights.shape == (6, tokens, tokens)
        assert row.shape == (tokens,)
        assert (row >= 0).all()
        assert np.abs(np.asarray(weights).sum(axis=-1) - 1).max() < 1e-5


@pytest.mark.parametrize("keys", [1, 3, [0, 4], [2, 7, 8]])
def test_hf_2975_a_view_without_sinks(recorded: Any, keys: Any) -> None:
    """transformers#2975, streaming-llm#82: what is left of a head when its sinks are left out."""
    left = list(range(keys)) if isinstance(keys, int) else keys
    for head in (None, 4):
        whole = np.asarray(recorded.weights(1, head), np.float64)
        whole[:, :, left] = 0
        total = whole.sum(axis=-1, keepdims=True)
        expected = np.divide(whole, total, out=np.zeros_like(whole), where=total > 0)
        found = recorded.weights_without(keys, 1, head)
        assert np.abs(np.asarray(found) - expected).max() < 1e-5
        assert (np.isneginf(found.logsumexp) == (total[..., 0] == 0)).all()


def test_it_can_be_saved(tmp_path: Any) -> None:
    given = made(2, 3, 7, 7, causal=True)
    saved = from_attentions([given] * 2, [list("abcdefg")] * 2).save(tmp_path / "t")
    assert np.abs(np.asarray(saved.weights(1, text=1)) - given[1]).max() < 1e-7
    assert saved.check().passed


def test_keys_to_leave_out_that_are_not_there(recorded: Any) -> None:
    with pytest.raises(TraceError, match="keys 0 to 5000 are to be left out, and there are"):
        recorded.weights_without([0, 5000], 0)


def test_it_is_one_of_the_package(recorded: Any) -> None:
    assert ch.from_attentions is from_attentions


def test_rollout_is_the_product_of_the_layers(recorded: Any) -> None:
    """Abnar & Zuidema 2020, against the dense formula."""
    tokens = len(recorded.tokens)
    flow = np.eye(tokens)
    for layer in recorded.layers:
        flow = (0.5 * np.asarray(recorded.weights(layer), np.float64).mean(axis=0) + 0.5 * np.eye(tokens)) @ flow
    assert np.abs(recorded.rollout([3, -1]) - flow[[3, -1]]).max() < 1e-6
    with pytest.raises(TraceError, match="cross attention looks from 2 tokens at 3 others"):
        from_attentions({"cross": [made(1, 1, 2, 3)]}).rollout([0])
