"""generate() on Clearhead's attention writes the tokens that sdpa's writes, whatever the cache."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models
import torch

import clearhead as ch
from clearhead.torch import huggingface

NO_SDPA = ("gemma2", "gpt_oss")
UNTIED = {"tie_word_embeddings": False}  # where a random model would write one token over and over
CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "none": {"use_cache": False},
}


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    huggingface.register()


def written(model: Any, implementation: str, given: dict[str, Any], **options: Any) -> Any:
    model.set_attn_implementation(implementation)
    return model.generate(**given, do_sample=False, max_new_tokens=12, min_new_tokens=12, **options)


def prompts() -> dict[str, Any]:
    """A batch of three, padded on the left."""
    chance = torch.Generator().manual_seed(2)
    ids, mask = torch.randint(2, 320, (3, 10), generator=chance), torch.ones(3, 10, dtype=torch.long)
    mask[1, :4], mask[2, :9] = 0, 0
    return {"input_ids": torch.where(mask == 1, ids, 1), "attention_mask": mask}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gemma3", "gpt_oss", "gpt2"])
def test_tokens_are_those_of_sdpa(family: str, cache: str) -> None:
    """Mistral, Gemma and gpt-oss have sliding windows of 8 tokens, which prompt and text outgrow."""
    model = tiny_models.build(family, **(UNTIED if family.startswith("gemma") else {}))
    right = written(model, "eager" if family in NO_SDPA else "sdpa", prompts(), **CACHES[cache])
    found = written(model, "clearhead", prompts(), **CACHES[cache])
    assert len(torch.unique(right[:, 10:])) > 5
    assert torch.equal(found, right)


@pytest.mark.parametrize("family", ["t5", "whisper"])
def test_encoders_and_decoders_write_the_same(family: str) -> None:
    model = tiny_models.build(family)
    given = {name: one for name, one in tiny_models.inputs(family).items() if not name.startswith("decoder")}
    assert torch.equal(written(model, "clearhead", given), written(model, "sdpa", given))


def test_beams_write_the_same() -> None:
    model = tiny_models.build("llama")
    assert torch.equal(*(written(model, one, prompts(), num_beams=3) for one in ("clearhead", "sdpa")))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_weights_of_each_step_outlive_the_cache(family: str, cache: str) -> None:
    model, options = tiny_models.build(family), {"output_attentions": True, "return_dict_in_generate": True}
    right = written(model, "eager", prompts(), **options, **CACHES[cache]).attentions
    found = written(model, "clearhead", prompts(), **options, **CACHES[cache]).attentions
    assert len(found) == len(right) == 12
    for step, wanted in zip(found, right, strict=True):
        for ours, theirs in zip(step, wanted, strict=True):
            assert isinstance(ours, ch.AttentionWeights)
            dense = torch.from_numpy(ours[:])
            sees = dense.sum(dim=-1, keepdim=True) > 0
            torch.testing.assert_close(dense, torch.where(sees, theirs, 0), rtol=0, atol=5e-5)
