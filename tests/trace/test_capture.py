"""Listening changes no bit of what a model computes, and hears the very weights that its eager attention gives."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch

from clearhead import core, scores
from clearhead.trace import Layer, TraceError, capture
from clearhead.trace.capture import check_heard

CAUSAL = ["llama", "mistral", "gemma3", "gemma2", "gpt_oss", "gpt2"]
EAGER_ONLY = ("gemma2", "gpt_oss")


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(2, 320, (1, 37), generator=torch.Generator().manual_seed(1))


def listen(model: Any, ids: torch.Tensor, layers: Any = None) -> tuple[torch.Tensor, dict[int, Layer]]:
    heard: dict[int, Layer] = {}
    with torch.inference_mode(), capture(model, lambda layer: heard.update({layer.layer: layer}), layers):
        return model(input_ids=ids, use_cache=False)[0], heard


def dense_weights(layer: Layer) -> np.ndarray:
    score = scores.dot(scale=layer.scale, softcap=layer.softcap, sinks=layer.sinks)
    weights = core.attend(
        layer.query, layer.key, layer.value, mask=layer.visible.mask(), score=score, dtype=np.float64
    )[1]
    return np.asarray(weights)


@pytest.mark.parametrize("family", [*CAUSAL, "bert"])
def test_outputs_are_bit_identical(family: str, ids: torch.Tensor) -> None:
    model = tiny_models.build(family)
    assert model.config._attn_implementation == ("eager" if family in EAGER_ONLY else "sdpa")
    with torch.inference_mode():
        before = model(input_ids=ids, use_cache=False)[0]
        during, heard = listen(model, ids)
        after = model(input_ids=ids, use_cache=False)[0]
    assert torch.equal(before, during)
    assert torch.equal(before, after)
    assert sorted(heard) == [0, 1, 2]


@pytest.mark.parametrize("family", [*CAUSAL, "bert"])
def test_weights_are_those_of_eager_attention(family: str, ids: torch.Tensor) -> None:
    model = tiny_models.build(family)
    _, heard = listen(model, ids)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        attentions = model(input_ids=ids, output_attentions=True, use_cache=False).attentions
    for layer, expected in enumerate(attentions):
        found = dense_weights(heard[layer])
        assert np.abs(found - expected[0].numpy()).max() < 1e-5


@pytest.mark.parametrize("family", CAUSAL)
def test_the_future_has_no_weight_at_all(family: str, ids: torch.Tensor) -> None:
    for layer in listen(tiny_models.build(family), ids)[1].values():
        assert not np.triu(dense_weights(layer), 1).any()


def test_what_each_layer_may_see(ids: torch.Tensor) -> None:
    def kinds(family: str) -> list[str]:
        return [layer.visible.kind for layer in listen(tiny_models.build(family), ids)[1].values()]

    assert kinds("llama") == ["causal"] * 3
    assert kinds("mistral") == ["intervals"] * 3
    assert kinds("gemma3") == ["intervals", "causal", "intervals"]
    assert kinds("bert") == ["full"] * 3
    window = listen(tiny_models.build("mistral"), ids)[1][0]
    assert window.window == 8
    assert window.visible.stop is not None
    assert window.visible.start is not None
    assert (window.visible.stop - window.visible.start).max() == 8


def test_a_window_wider_than_the_text_is_causal(ids: torch.Tensor) -> None:
    assert listen(tiny_models.build("mistral", sliding_window=100), ids)[1][0].visible.kind == "causal"


def test_grouped_heads_keep_their_order(ids: torch.Tensor) -> None:
    layer = listen(tiny_models.build("llama"), ids)[1][1]
    assert layer.query.shape == (6, 37, 8)
    assert layer.key.shape == (2, 37, 8)
    one = np.stack([layer.query[4], layer.query[5]]), layer.key[1:]  # heads 3, 4, 5 read key head 1
    causal = layer.visible.mask()
    alone = core.attend(*one, layer.value[1:], mask=causal, score=scores.dot(layer.scale), dtype=np.float64)[1]
    assert np.array_equal(alone, dense_weights(layer)[4:])


def test_a_mask_with_gaps_is_kept_cell_by_cell(ids: torch.Tensor) -> None:
    model = tiny_models.build("llama")
    allowed = torch.ones(37, 37, dtype=torch.bool).tril()
    allowed[10:, 3] = False
    heard: list[Layer] = []
    with torch.inference_mode(), capture(model, heard.append):
        model(input_ids=ids, attention_mask=allowed[None, None], use_cache=False)
    assert heard[0].visible.kind == "array"
    assert not dense_weights(heard[0])[:, 10:, 3].any()


def test_padding_on_the_left(ids: torch.Tensor) -> None:
    model = tiny_models.build("llama")
    padding = torch.ones_like(ids)
    padding[:, :4] = 0
    heard: list[Layer] = []
    with torch.inference_mode(), capture(model, heard.append):
        model(input_ids=ids, attention_mask=padding, use_cache=False)
    assert heard[0].visible.kind == "intervals"
    weights = dense_weights(heard[0])
    assert not weights[:, :, :4].any()
    assert not weights[:, :4].any()


def test_chosen_layers_alone(ids: torch.Tensor) -> None:
    assert sorted(listen(tiny_models.build("llama"), ids, layers=[2, 0])[1]) == [0, 2]


def test_the_implementation_is_restored_even_after_an_error(ids: torch.Tensor) -> None:
    model = tiny_models.build("llama")

    def fails(layer: Layer) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), capture(model, fails):
        model(input_ids=ids)
    assert model.config._attn_implementation == "sdpa"
    assert model.model.config._attn_implementation == "sdpa"


def test_bfloat16_keeps_its_bits(ids: torch.Tensor) -> None:
    model = tiny_models.build("llama").to(torch.bfloat16)
    layer = listen(model, ids)[1][0]
    assert layer.query.dtype.name == "bfloat16"
    assert layer.query.astype(np.float32).any()


def test_one_token(ids: torch.Tensor) -> None:
    layer = listen(tiny_models.build("llama"), ids[:, :1])[1][0]
    assert dense_weights(layer).tolist() == [[[1.0]]] * 6


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("batch", "the batch holds 2 texts: one at a time can be traced"),
        ("training", r"the model is in training mode.*call model\.eval\(\) first"),
        ("twice", "layer 0 ran twice: one trace holds one pass over one text"),
        ("bias", "layer 0 adds a bias to its scores"),
        ("cache", r"layer 0 has 1 queries and 38 keys.*use_cache=False"),
        ("flex", r"the model runs attention 'flex_attention': load it with attn_implementation='sdpa'"),
    ],
)
def test_what_cannot_be_traced_is_said(change: str, words: str, ids: torch.Tensor) -> None:
    model = tiny_models.build("llama", attention_dropout=0.5)
    if change == "flex":
        model.config._attn_implementation = "flex_attention"
    cache = model(input_ids=ids, use_cache=True).past_key_values if change == "cache" else None
    runs = {
        "batch": lambda: model(input_ids=ids.repeat(2, 1)),
        "training": lambda: model.train()(input_ids=ids),
        "twice": lambda: [model(input_ids=ids) for _ in range(2)],
        "bias": lambda: model(input_ids=ids, attention_mask=torch.rand(1, 1, 37, 37)),
        "cache": lambda: model(input_ids=ids[:, :1], cache=cache),
        "flex": lambda: None,
    }
    with pytest.raises(TraceError, match=words), capture(model, lambda layer: None):
        runs[change]()


def test_a_model_with_its_own_attention_is_refused() -> None:
    model = tiny_models.build("bloom")
    with pytest.raises(TraceError, match="BloomForCausalLM does not run its attention through"):  # noqa: SIM117
        with capture(model, lambda layer: None):
            raise AssertionError("it must be refused before it runs")
    with pytest.raises(TraceError, match="does not run its attention through"):
        check_heard(model, set(), None)


def test_layers_without_attention_are_named() -> None:
    with pytest.raises(TraceError, match="layer 1, 3 has no attention that can be traced; those that have: 0, 2"):
        check_heard(None, {0, 2}, [0, 1, 2, 3])


def test_other_threads_are_not_listened_to(ids: torch.Tensor) -> None:
    model, other = tiny_models.build("llama"), tiny_models.build("llama")
    heard: list[Layer] = []
    with capture(model, heard.append):
        thread = threading.Thread(target=lambda: other(input_ids=ids))
        thread.start()
        thread.join()
    assert heard == []
