"""transformers models on Clearhead's attention: the numbers of sdpa (of eager, where sdpa cannot), and lazy weights."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models
import torch

import clearhead as ch
from clearhead.torch import huggingface

FAMILIES = [name for name in tiny_models.FAMILIES if name not in ("bloom", "xlnet")]
NO_SDPA = ("gemma2", "gpt_oss")  # softcap and sinks, which sdpa does not have

# Models without dropout, to be trained alike.
STILL: dict[str, dict[str, float]] = {
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "t5": {"dropout_rate": 0.0},
}


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    huggingface.register()


def reference(family: str) -> str:
    return "eager" if family in NO_SDPA else "sdpa"


def run(model: Any, implementation: str, given: dict[str, Any], **options: Any) -> Any:
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(**given, **options)


def real(given: dict[str, Any], kind: str) -> Any:
    """Which texts and tokens of a stack are no padding."""
    mask = given.get("decoder_attention_mask") if kind in ("decoder", "cross") else given.get("attention_mask")
    return ... if mask is None or kind == "vision" else mask.bool()


def numbers(output: Any, given: dict[str, Any]) -> torch.Tensor:
    """What a model makes of each token that is no padding."""
    if "text_model_output" in output:
        output = output.text_model_output
    kind = "decoder" if "decoder_input_ids" in given else "self"
    found: torch.Tensor = output.logits if "logits" in output else output.last_hidden_state
    return found[real(given, kind)]


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_are_those_of_sdpa(family: str) -> None:
    model, given = tiny_models.build(family), tiny_models.inputs(family)
    right, ours = (numbers(run(model, one, given), given) for one in (reference(family), "clearhead"))
    assert right.abs().max() > 0.1
    torch.testing.assert_close(ours, right, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_lazy_and_those_of_eager(family: str) -> None:
    model, given = tiny_models.build(family), tiny_models.inputs(family)
    wanted = tiny_models.eager_attentions(model, given)
    found = tiny_models.attentions_of(run(model, "clearhead", given, output_attentions=True))
    assert found.keys() == wanted.keys()
    for kind, layers in wanted.items():
        assert len(found[kind]) == len(layers) > 0
        for ours, theirs in zip(found[kind], layers, strict=True):
            assert isinstance(ours, ch.AttentionWeights)
            dense = torch.from_numpy(ours[:])
            assert dense.shape == theirs.shape
            found_rows, right_rows = (weights.transpose(1, 2)[real(given, kind)] for weights in (dense, theirs))
            torch.testing.assert_close(found_rows, right_rows, rtol=0, atol=5e-5)  # scores are in the tens


def test_without_being_asked_there_are_no_weights() -> None:
    model, given = tiny_models.build("bert"), tiny_models.inputs("bert")
    assert run(model, "clearhead", given).attentions is None


def test_it_is_chosen_when_a_model_is_loaded(tmp_path: Any) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_models.save(tmp_path / "tiny")
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="clearhead")
    assert model.config._attn_implementation == "clearhead"
    given = tiny_models.inputs("llama")
    with torch.no_grad():
        found = numbers(model(**given), given)
    torch.testing.assert_close(found, numbers(run(model, "sdpa", given), given), rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3", "bert", "t5"])
def test_models_in_16_bits_are_as_near_as_those_of_sdpa(family: str, dtype: torch.dtype) -> None:
    exact, given = tiny_models.build(family), tiny_models.inputs(family)
    right = numbers(run(exact, "sdpa", given), given)
    model = exact.to(dtype)
    theirs, ours = ((numbers(run(model, one, given), given).float() - right).norm() for one in ("sdpa", "clearhead"))
    assert ours <= 1.25 * theirs


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "bert", "t5", "gpt_oss"])
def test_gradients_of_a_training_step_are_those_of_sdpa(family: str) -> None:
    given = tiny_models.inputs(family)
    found = []
    for one in (reference(family), "clearhead"):
        model = tiny_models.build(family, attn_implementation=one, **STILL.get(family, {})).train()
        loss = numbers(model(**given), given).square().mean()
        loss.backward()
        found.append((loss, {name: p.grad for name, p in model.named_parameters()}))
    (right, wanted), (loss, grads) = found
    torch.testing.assert_close(loss, right, rtol=1e-5, atol=0)
    for name, grad in wanted.items():
        if grad is None:
            assert grads[name] is None
        else:
            bound = 1e-4 * max(1.0, float(grad.abs().max()))
            assert (grads[name] - grad).abs().max() <= bound, name


def test_a_compiled_model_gives_the_same() -> None:
    model, given = tiny_models.build("llama", num_hidden_layers=1), tiny_models.inputs("llama")
    right = numbers(run(model, "sdpa", given), given)
    model.set_attn_implementation("clearhead")
    with torch.no_grad():
        found = torch.compile(model, backend="aot_eager", fullgraph=True)(**given)
    torch.testing.assert_close(numbers(found, given), right, rtol=0, atol=1e-4)


def test_tokens_packed_into_one_text_are_apart() -> None:
    """Without a mask, positions that begin anew begin a text: transformers' way to train without padding."""
    model = tiny_models.build("llama")
    ids = torch.randint(2, 320, (1, 12), generator=torch.Generator().manual_seed(3))
    places = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
    packed = run(model, "clearhead", {"input_ids": ids, "position_ids": places, "use_cache": False}).logits
    alone = run(model, "clearhead", {"input_ids": ids[:, 5:], "use_cache": False}).logits
    torch.testing.assert_close(packed[:, 5:], alone, rtol=0, atol=1e-4)


def test_a_mask_of_ones_own_is_understood() -> None:
    """Four axes, of numbers to add: -inf and finfo.min hide alike, and the model's own mask is not added to it."""
    model, given = tiny_models.build("llama"), {"input_ids": tiny_models.inputs("llama")["input_ids"][:1]}
    seen = torch.ones(17, 17, dtype=torch.bool).tril()
    seen[:, 3] = seen[:, :4].all(dim=-1) & (torch.arange(17) == 3)
    for hidden in (-torch.inf, torch.finfo(torch.float32).min):
        own = torch.zeros(1, 1, 17, 17).masked_fill(~seen, hidden)
        right, found = (run(model, one, given | {"attention_mask": own}).logits for one in ("sdpa", "clearhead"))
        torch.testing.assert_close(found, right, rtol=0, atol=1e-4)


def test_a_traced_model_may_run_on_it() -> None:
    model, given = tiny_models.build("gemma3"), tiny_models.inputs("gemma3")
    model.set_attn_implementation("clearhead")
    trace = ch.trace(model, given)
    assert trace.check().passed
    right = tiny_models.eager_attentions(model, given)["self"]
    seen = given["attention_mask"][2].bool()
    for layer, theirs in enumerate(right):
        ours = torch.from_numpy(trace.weights(layer, text=2)[:])
        n = int(seen.sum())
        torch.testing.assert_close(ours[:, :n, :n], theirs[2, :, :n, :n], rtol=0, atol=5e-5)


def test_inference_mode_and_checkpointed_gradients() -> None:
    """Both keep tensors in ways of their own, and masks that hold nothing with them."""
    model, given = tiny_models.build("gemma3"), tiny_models.inputs("gemma3")
    model.set_attn_implementation("clearhead")
    plain = numbers(model(**given), given)
    with torch.inference_mode():
        assert torch.equal(numbers(model(**given), given), plain)
    (wanted,) = torch.autograd.grad(plain.square().mean(), model.model.embed_tokens.weight)
    for reentrant in (False, True):
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        model.train().enable_input_require_grads()
        model.zero_grad()
        numbers(model(**given), given).square().mean().backward()
        torch.testing.assert_close(model.model.embed_tokens.weight.grad, wanted, rtol=0, atol=1e-6)
        model.disable_input_require_grads()


LONG = """
import resource, sys, torch
from transformers import LlamaConfig, LlamaModel
from clearhead.torch import huggingface
huggingface.register()
model = LlamaModel(LlamaConfig(vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                               num_attention_heads=1, attn_implementation="clearhead")).eval()
def most(tokens):
    mask = torch.ones(1, tokens, dtype=torch.long)
    mask[:, :9] = 0
    with torch.no_grad():
        model(input_ids=torch.ones_like(mask), attention_mask=mask, use_cache=False)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
before = most(1024)
print(most(20_000) - before)
"""


def test_a_long_padded_prompt_takes_no_matrix(python: Any) -> None:
    """As booleans, its mask alone would take 400 MB."""
    assert int(python(LONG)) < 100e6


def test_a_model_that_would_misread_a_mask_is_refused() -> None:
    """BLOOM would add booleans to its scores, or nothing where causal is meant, and say nothing."""
    model = tiny_models.build("bloom")
    model.config._attn_implementation = "clearhead"
    with pytest.raises(ValueError, match=r"attention of bloom does not go through .* attn_implementation='eager'"):
        model(**tiny_models.inputs("llama"))


def test_a_model_that_makes_its_own_masks_runs_as_ever() -> None:
    model, given = tiny_models.build("xlnet"), tiny_models.inputs("llama")
    right = model(**given).last_hidden_state
    model.config._attn_implementation = "clearhead"
    assert torch.equal(model(**given).last_hidden_state, right)
