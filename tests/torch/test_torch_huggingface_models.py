"""Real models on Clearhead's attention, and one that is trained: what sdpa gives, and where it leads."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models
import torch

from clearhead.torch import huggingface
from clearhead.trace import load, minilm, smollm2

WORDS = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness. "


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    huggingface.register()


@pytest.fixture(scope="module")
def smol() -> Any:
    return loaded("smollm2", smollm2)


def loaded(name: str, package: Any) -> Any:
    try:
        package.package_folder()
    except ValueError as error:
        pytest.skip(f"the model comes as a package of its own: {error}")
    return load(name, writing=name == "smollm2")


def batch(tokenizer: Any, side: str) -> Any:
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer([WORDS * 2, "The cat"], return_tensors="pt", padding=True, padding_side=side)


def test_smollm2(smol: Any) -> None:
    model, given = smol.network, batch(smol.tokenizer, "left")
    found = {}
    for one in ("sdpa", "clearhead"):
        model.set_attn_implementation(one)
        with torch.no_grad():
            logits = model(**given).logits[given["attention_mask"].bool()]
            found[one] = logits, model.generate(**given, do_sample=False, max_new_tokens=12)
    torch.testing.assert_close(found["clearhead"][0], found["sdpa"][0], rtol=0, atol=1e-4)
    assert torch.equal(found["clearhead"][1], found["sdpa"][1])


def test_minilm() -> None:
    model = loaded("minilm", minilm)
    given, found = batch(model.tokenizer, "right"), {}
    for one in ("sdpa", "clearhead"):
        model.network.set_attn_implementation(one)
        with torch.no_grad():
            found[one] = model.network(**given).last_hidden_state[given["attention_mask"].bool()]
    torch.testing.assert_close(found["clearhead"], found["sdpa"], rtol=0, atol=1e-4)


def test_smollm2_in_bfloat16_is_as_near_as_with_sdpa(smol: Any) -> None:
    given, model, found = batch(smol.tokenizer, "left"), smol.network, {}
    where = given["attention_mask"].bool()
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        right = model(**given).logits[where]
        model.to(torch.bfloat16)
        for one in ("sdpa", "clearhead"):
            model.set_attn_implementation(one)
            found[one] = (model(**given).logits[where].float() - right).norm()
    assert found["clearhead"] <= 1.25 * found["sdpa"]  # over ten texts: between 0.84 and 1.09 times


def test_fine_tuning_bert_leads_to_the_same_loss() -> None:
    """Of which half of the vocabulary a text's second token is, learned from 50 batches with padding."""
    losses: dict[str, list[float]] = {}
    for one in ("sdpa", "clearhead"):
        chance = torch.Generator().manual_seed(0)
        model = tiny_models.build(
            "bert",
            attn_implementation=one,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.05,
        ).train()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            head = torch.nn.Linear(48, 2)
        optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=3e-3)
        losses[one] = []
        for _ in range(50):
            ids = torch.randint(2, 12, (16, 12), generator=chance)
            mask = torch.arange(12) < torch.randint(4, 13, (16, 1), generator=chance)
            ids = torch.where(mask, ids, 1)
            label = (ids[:, 1] > 6).long()
            state = model(input_ids=ids, attention_mask=mask.long()).last_hidden_state[:, 0]
            loss = torch.nn.functional.cross_entropy(head(state), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[one].append(loss.item())
    ours, theirs = torch.tensor(losses["clearhead"]), torch.tensor(losses["sdpa"])
    assert theirs[-10:].mean() < 0.5 * theirs[:10].mean()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3)
