"""What people complain of in public, and what a trace does there. Names say what; comments say where.

hf = huggingface/transformers, pt = pytorch/pytorch, fa = Dao-AILab/flash-attention."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch

import clearhead as ch
from clearhead.trace import Trace, TraceError

IDS = torch.randint(2, 320, (1, 40), generator=torch.Generator().manual_seed(7))


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_models.build("llama")


def test_fused_attention_gives_its_weights(model: Any) -> None:
    """pt#98505, pt#119811, fa#159, fa#1824: rows and statistics from queries, keys and one number a row."""
    assert model.config._attn_implementation == "sdpa"
    weights = ch.trace(model, {"input_ids": IDS}).weights(1)
    assert weights.logsumexp.shape == (6, 40)
    assert np.asarray(weights).sum(axis=-1) == pytest.approx(1, abs=1e-5)


def test_row_statistics_and_the_largest_weight_with_its_key(model: Any) -> None:
    """pt#159770, pt#176837."""
    weights = ch.trace(model, {"input_ids": IDS}).weights(1)
    found, dense = weights.measure("entropy", "largest", top=3), np.asarray(weights)
    assert found.largest == pytest.approx(dense.max(axis=-1), abs=1e-6)
    assert np.array_equal(found.top.keys[..., 0], dense.argmax(axis=-1))


def test_normalized_rows_of_the_exact_shape(model: Any) -> None:
    """fa#902: not padded, not coded by sign, not unnormalized."""
    dense = np.asarray(ch.trace(model, {"input_ids": IDS[:, :37]}).weights(0))
    assert dense.shape == (6, 37, 37)
    assert (dense >= 0).all()


def test_the_backend_is_not_changed_to_look(model: Any) -> None:
    """hf#38750, hf PR#40597: output_attentions under sdpa is an error, or silently None."""
    inside = []
    handle = model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, inputs: inside.append(module.config._attn_implementation)
    )
    try:
        trace = ch.trace(model, {"input_ids": IDS})
    finally:
        handle.remove()
    assert inside == ["sdpa"]
    assert trace.model.attention == "sdpa"
    assert trace.weights(0).shape == (6, 40, 40)


@pytest.mark.parametrize("family", tiny_models.CAUSAL)
def test_the_future_has_no_weight(family: str) -> None:
    """hf PR#30652: a fallback to eager dropped the causal mask. It is looked at, and the result recorded."""
    trace = ch.trace(tiny_models.build(family), {"input_ids": IDS})
    for layer in trace.layers:
        assert not np.triu(np.asarray(trace.weights(layer)), 1).any()
    assert all(site.causal for site in trace.sites)
    assert [check.hidden for check in trace.checks.sites] == [0.0] * len(trace.sites)


def test_a_causal_model_that_sees_the_future_is_noticed(model: Any) -> None:
    """The same, the other way round: a mask that lets everyone see everything is recorded as what it is."""
    everyone = torch.ones(1, 1, 40, 40, dtype=torch.bool)
    trace = ch.trace(model, {"input_ids": IDS, "attention_mask": everyone})
    assert max(check.hidden for check in trace.checks.sites) > 0
    assert not trace.checks.passed


def test_some_layers_and_heads_alone(model: Any) -> None:
    """hf PR#43213, resemble-ai/chatterbox#398: only some layers are wanted, and all are paid for."""
    whole = ch.trace(model, {"input_ids": IDS})
    some = ch.trace(model, {"input_ids": IDS}, layers=[1], heads=[3])
    assert some.nbytes < whole.nbytes / 8
    assert np.array_equal(some.weights(1, 3)[0], whole.weights(1, 3)[0])


def test_memory_is_linear_in_length(model: Any, tmp_path: Path) -> None:
    """hf PR#43213, inseq#279: more than 80 GB above 2.5k tokens. Here no matrix is made, and no layer is kept."""
    big = tiny_models.build("llama", max_position_embeddings=4096)
    ids = torch.randint(2, 320, (1, 2048), generator=torch.Generator().manual_seed(7))
    ch.trace(big, {"input_ids": ids[:, :64], "use_cache": False}, tmp_path / "warm")
    tracemalloc.start()
    try:
        trace = ch.trace(big, {"input_ids": ids, "use_cache": False}, tmp_path / "t")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    one_head = 2048 * 2048 * 4
    assert trace.dense_nbytes == 18 * one_head
    assert peak < one_head / 2


def test_cross_attention_for_word_timestamps_is_reduced_not_kept() -> None:
    """hf#27834, hf PR#33732: Whisper keeps every step's cross attention. Here measures of each, or one record."""
    model = tiny_models.build("whisper")
    sound = {"input_features": tiny_models.inputs("whisper")["input_features"]}
    options = {"max_new_tokens": 8, "min_new_tokens": 8}
    with ch.tracing(model, kinds=["cross"], only_measures=True) as trace:
        model.generate(**sound, **options)
    with ch.tracing(model, kinds=["cross"]) as whole:
        model.generate(**sound, **options)
    assert trace.measures(1).pooled.shape == (6, 8, 30)
    assert trace.measures(1).pooled == pytest.approx(np.asarray(whole.weights(1)), abs=1e-6)
    assert "query" not in trace.arrays(1)


def test_a_generation_is_one_record(model: Any) -> None:
    """hf#26174, hf#33296, bertviz#116, bertviz#133: the first step is n x n, the others 1 x k, and viewers crash."""
    with ch.tracing(model) as trace:
        written = model.generate(input_ids=IDS, max_new_tokens=5, min_new_tokens=5)
    assert written.shape == (1, 45)
    assert trace.weights(0).shape == (6, 44, 44)
    assert trace.text.ids == tuple(written[0, :-1].tolist())


def test_quantities_have_names(model: Any) -> None:
    """hf#36096: flex attention fills the weights' slot with logsumexp."""
    weights = ch.trace(model, {"input_ids": IDS}).weights(0)
    assert weights.shape == (6, 40, 40)
    assert weights.logsumexp.shape == (6, 40)


def test_training_mode_is_refused() -> None:
    """hf#31468, pt#42929: in training mode weights are given after dropout, and rows do not sum to 1."""
    model = tiny_models.build("llama", attention_dropout=0.5).train()
    with pytest.raises(TraceError, match=r"weights are dropped at random: call model\.eval\(\) first"):
        ch.trace(model, {"input_ids": IDS})
    assert ch.trace(model.eval(), {"input_ids": IDS}).check().passed


def test_the_first_token_as_a_sink(model: Any) -> None:
    """hf#2975, streaming-llm#82, #86: is it broken that the first token is always the largest? A measure says."""
    trace = ch.trace(model, {"input_ids": IDS})
    dense = np.asarray(trace.weights(2), np.float64)
    found = trace.measures(2)
    assert found.mean("sink") == pytest.approx(dense[:, :, 0].mean(axis=-1), abs=1e-6)
    position = np.arange(40)[:, None] - np.arange(40)
    without = (dense * position)[:, :, 1:].sum(axis=-1).mean(axis=-1)
    assert found.mean("far") == pytest.approx(without, abs=1e-5)  # and where a head looks besides
    rest = np.asarray(trace.weights_without(1, layer=2), np.float64)
    shares = dense[:, 1:, 1:] / dense[:, 1:, 1:].sum(axis=-1, keepdims=True)
    assert np.abs(rest[:, 1:, 1:] - shares).max() < 1e-5  # what is left, with rows that sum to 1
    assert not rest[:, :, 0].any()
    assert not rest[:, 0].any()  # the first row saw nothing else


@pytest.mark.parametrize("family", ["llama", "bert", "gemma2"])
def test_the_model_looked_at_is_the_model_deployed(family: str) -> None:
    """LLaVA-NeXT#254: accuracy drops on eager. Looking changes no bit of any output."""
    model = tiny_models.build(family)
    with torch.inference_mode():
        before = model(input_ids=IDS, output_hidden_states=True)
        with ch.tracing(model):
            during = model(input_ids=IDS, output_hidden_states=True)
    assert torch.equal(before[0], during[0])
    assert all(torch.equal(*pair) for pair in zip(before.hidden_states, during.hidden_states, strict=True))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_left_padding_is_empty_rows_and_no_nan(family: str) -> None:
    """pt#103749, TransformerLens PR#389: NaN spreads from rows that see nothing. They are zero, and not averaged."""
    mask = torch.ones_like(IDS)
    mask[:, :9] = 0
    inputs = {"input_ids": IDS, "attention_mask": mask}
    trace = ch.trace(tiny_models.build(family), inputs)
    for layer in trace.layers:
        weights = trace.weights(layer)
        dense = np.asarray(weights)
        assert np.isfinite(dense).all()
        assert not dense[:, :9].any()
        assert np.isneginf(weights.logsumexp[:, :9]).all()
        assert (trace.measures(layer).rows == 31).all()
        assert dense[:, 9:].sum(axis=-1) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("hidden", [torch.finfo(torch.float32).min, -torch.inf, -1e4, -1e9])
@pytest.mark.parametrize("times", [1, 2])
def test_large_negative_numbers_hide(hidden: float, times: int, model: Any) -> None:
    """hf#27114: masks of finfo.min, or two of them added. A row of nothing else is empty, and not uniform."""
    added = torch.zeros(1, 1, 40, 40).masked_fill(torch.ones(40, 40, dtype=torch.bool).triu(1), hidden)
    added[..., 5, :] = hidden
    trace = ch.trace(model, {"input_ids": IDS, "attention_mask": added * times})
    assert trace.facts(0).bias == "none"
    dense = np.asarray(trace.weights(0))
    assert not dense[:, 5].any()
    assert np.isneginf(trace.weights(0).logsumexp[:, 5]).all()
    assert not np.triu(dense, 1).any()


def test_numbers_that_are_added_to_scores_are_kept(model: Any) -> None:
    """A mask with other numbers than 0 and "hidden" is a bias: kept cell by cell, or by offset."""
    chance = torch.Generator().manual_seed(3)
    future = torch.ones(40, 40, dtype=torch.bool).triu(1)
    offsets = torch.randn(79, generator=chance)
    cells = torch.randn(1, 1, 40, 40, generator=chance)
    by_offset = offsets[torch.arange(40)[None] - torch.arange(40)[:, None] + 39][None, None]
    for added, kind in ((cells, "dense"), (by_offset, "offsets")):
        inputs = {"input_ids": IDS, "attention_mask": added.masked_fill(future, torch.finfo(torch.float32).min)}
        trace = ch.trace(model, inputs)
        assert {site.bias for site in trace.sites} == {kind}
        (expected,) = tiny_models.eager_attentions(model, inputs).values()
        for layer in trace.layers:
            assert np.abs(np.asarray(trace.weights(layer)) - expected[layer][0].numpy()).max() < 1e-5


def test_opening_asks_for_no_torch(model: Any, tmp_path: Path) -> None:
    """Whoever looks at weights need not have what made them."""
    import subprocess
    import sys

    ch.trace(model, {"input_ids": IDS}, tmp_path / "t")
    code = (
        f"import sys, clearhead as ch; t = ch.trace.Trace.open({str(tmp_path / 't')!r}); t.weights(0)[0, 3]; "
        "t.measures(0).mean('entropy'); t.check(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert isinstance(Trace.open(tmp_path / "t"), Trace)
