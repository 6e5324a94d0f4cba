"""Listening changes nothing in a model, and hears exactly what its attention was given and made."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch

from clearhead import core, scores
from clearhead.trace import Call, TraceError, capture
from clearhead.trace.arrays import array
from clearhead.trace.recorder import check_heard


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(2, 320, (1, 37), generator=torch.Generator().manual_seed(1))


def listen(model: Any, ids: torch.Tensor, layers: Any = None) -> tuple[torch.Tensor, dict[int, Call]]:
    heard: dict[int, Call] = {}
    with torch.inference_mode(), capture(model, lambda call: heard.update({call.site.layer: call}), layers):
        return model(input_ids=ids, use_cache=False)[0], heard


def dense_weights(call: Call) -> np.ndarray:
    score = scores.dot(scale=call.scale, softcap=call.softcap, sinks=None if call.sinks is None else array(call.sinks))
    arrays = (array(tensor[0]) for tensor in (call.query, call.key, call.value))
    weights = core.attend(*arrays, mask=call.visible.of(0).mask(), score=score, dtype=np.float64)[1]
    return np.asarray(weights)


def test_what_each_layer_may_see(ids: torch.Tensor) -> None:
    def kinds(family: str) -> list[str]:
        return [call.visible.kind for call in listen(tiny_models.build(family), ids)[1].values()]

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
    assert layer.query.shape == (1, 6, 37, 8)
    assert layer.key.shape == (1, 2, 37, 8)
    query, key, value = (array(tensor[0]) for tensor in (layer.query, layer.key, layer.value))
    causal = layer.visible.mask()  # heads 3, 4, 5 read key head 1
    alone = core.attend(query[4:], key[1:], value[1:], mask=causal, score=scores.dot(layer.scale), dtype=np.float64)[1]
    assert np.array_equal(alone, dense_weights(layer)[4:])


def test_a_mask_with_gaps_is_kept_cell_by_cell(ids: torch.Tensor) -> None:
    model = tiny_models.build("llama")
    allowed = torch.ones(37, 37, dtype=torch.bool).tril()
    allowed[10:, 3] = False
    heard: list[Call] = []
    with torch.inference_mode(), capture(model, heard.append):
        model(input_ids=ids, attention_mask=allowed[None, None], use_cache=False)
    assert heard[0].visible.kind == "array"
    assert not dense_weights(heard[0])[:, 10:, 3].any()


def test_padding_on_the_left(ids: torch.Tensor) -> None:
    model = tiny_models.build("llama")
    padding = torch.ones_like(ids)
    padding[:, :4] = 0
    heard: list[Call] = []
    with torch.inference_mode(), capture(model, heard.append):
        model(input_ids=ids, attention_mask=padding, use_cache=False)
    assert heard[0].visible.kind == "intervals"
    weights = dense_weights(heard[0])
    assert not weights[:, :, :4].any()
    assert not weights[:, :4].any()


def test_chosen_layers_alone(ids: torch.Tensor) -> None:
    assert sorted(listen(tiny_models.build("llama"), ids, layers=[2, 0])[1]) == [0, 2]


def test_the_interface_is_restored_even_after_an_error(ids: torch.Tensor) -> None:
    from transformers import AttentionInterface

    before = AttentionInterface.get_interface
    model = tiny_models.build("llama")

    def fails(call: Call) -> None:
        assert model.config._attn_implementation == "sdpa"
        assert AttentionInterface.get_interface is not before
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), capture(model, fails):
        model(input_ids=ids)
    assert AttentionInterface.get_interface is before


def test_one_token(ids: torch.Tensor) -> None:
    layer = listen(tiny_models.build("llama"), ids[:, :1])[1][0]
    assert dense_weights(layer).tolist() == [[[1.0]]] * 6


@pytest.mark.parametrize("implementation", ["flex_attention"])
def test_other_implementations_are_refused(implementation: str, ids: torch.Tensor) -> None:
    model = tiny_models.build("llama")
    model.set_attn_implementation(implementation)
    words = r"the model runs attention 'flex_attention': load it with attn_implementation='sdpa'"
    with pytest.raises(TraceError, match=words):
        listen(model, ids)


def test_training_is_refused(ids: torch.Tensor) -> None:
    model = tiny_models.build("llama", attention_dropout=0.5).train()
    with pytest.raises(TraceError, match=r"the model is in training mode.*call model\.eval\(\) first"):
        listen(model, ids)


def test_a_model_with_its_own_attention_is_refused() -> None:
    model = tiny_models.build("bloom")
    words = "BloomForCausalLM does not run its attention through .*: BloomAttention at transformer.h.0.self_attention"
    with pytest.raises(TraceError, match=words):  # noqa: SIM117
        with capture(model, lambda call: None):
            raise AssertionError("it must be refused before it runs")


def test_a_model_that_does_not_run_is_refused() -> None:
    with capture(tiny_models.build("llama"), lambda call: None) as session:
        pass
    with pytest.raises(TraceError, match="the model did not run"):
        check_heard(session)


def test_layers_that_stay_silent_are_named(ids: torch.Tensor) -> None:
    model = tiny_models.build("llama")
    with torch.inference_mode(), capture(model, lambda call: None) as session:
        model(input_ids=ids)
    session.heard.discard(session.attentions.heard[2])
    with pytest.raises(TraceError, match="self layer 2 did not run"):
        check_heard(session)


@pytest.mark.parametrize("same", [True, False])
def test_other_threads_are_not_listened_to(same: bool, ids: torch.Tensor) -> None:
    model = tiny_models.build("llama")
    other = model if same else tiny_models.build("llama")
    heard: list[Call] = []
    with capture(model, heard.append):
        thread = threading.Thread(target=lambda: other(input_ids=ids))
        thread.start()
        thread.join()
    assert heard == []


def test_other_models_are_not_listened_to(ids: torch.Tensor) -> None:
    heard: list[Call] = []
    with capture(tiny_models.build("llama"), heard.append):
        tiny_models.build("llama")(input_ids=ids)
    assert heard == []
