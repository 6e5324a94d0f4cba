"""Weights by another road: attention is linear in V, so attention over a block of the identity gives its columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from test_families import check_equal

import clearhead as ch
from clearhead.trace import load, smollm2, tokenize

WORDS = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness. "


def columns_by_sdpa(
    query: np.ndarray, key: np.ndarray, causal: bool, allowed: torch.Tensor | None = None
) -> np.ndarray:
    """(heads, queries, keys): torch's own attention, with columns of the identity in the place of values."""
    q, k = (torch.from_numpy(np.array(x))[None] for x in (query, key))
    tokens, dim = key.shape[1:]
    found = []
    for first in range(0, tokens, dim):
        block = torch.eye(tokens)[:, first : first + dim].expand(1, len(key), -1, -1).contiguous()
        found.append(
            torch.nn.functional.scaled_dot_product_attention(
                q, k, block, attn_mask=allowed, is_causal=causal, enable_gqa=len(query) != len(key)
            )
        )
    return torch.cat(found, dim=-1)[0].numpy()


def loaded(name: str, writing: bool = False) -> Any:
    if name == "smollm2":
        try:
            smollm2.package_folder()
        except ValueError as error:
            pytest.skip(f"the model comes as a package of its own: {error}")
    return load(name, writing=writing)


def traced(name: str, text: str, count: int, layer: int) -> Any:
    model = loaded(name)
    inputs = {"input_ids": torch.tensor([tokenize(model.tokenizer, text, count).ids])}
    return ch.trace(model.network, inputs, layers=[layer])


def test_smollm2() -> None:
    trace = traced("smollm2", WORDS * 12, 256, layer=11)
    arrays = trace.arrays(11)
    expected = columns_by_sdpa(arrays["query"][0], arrays["key"][0], causal=True)
    assert np.abs(np.asarray(trace.weights(11)) - expected).max() < 1e-5


def test_minilm() -> None:
    trace = traced("minilm", WORDS * 6, 128, layer=3)
    arrays = trace.arrays(3)
    expected = columns_by_sdpa(arrays["query"][0], arrays["key"][0], causal=False)
    assert np.abs(np.asarray(trace.weights(3)) - expected).max() < 1e-5


@pytest.mark.parametrize(("name", "side"), [("smollm2", "left"), ("minilm", "right")])
def test_real_models_give_what_their_eager_attention_does(name: str, side: str) -> None:
    """Three texts, two of them padded; not a bit of the model's own output is another."""
    model = loaded(name, writing=name == "smollm2")
    network = model.network
    texts = [tokenize(model.tokenizer, WORDS * 6, count).ids for count in (90, 61, 12)]
    ids, mask = torch.zeros(3, 90, dtype=torch.long), torch.zeros(3, 90, dtype=torch.long)
    for text, known in enumerate(texts):
        place = slice(90 - len(known), 90) if side == "left" else slice(0, len(known))
        ids[text, place], mask[text, place] = torch.tensor(known), 1
    inputs = {"input_ids": ids, "attention_mask": mask}
    with torch.inference_mode():
        before = network(**inputs)[0]
        with ch.tracing(network) as trace:
            assert torch.equal(network(**inputs)[0], before)
    assert trace.checks.passed
    assert [len(trace.side(text=text).padding) for text in range(3)] == [0, 29, 78]
    check_equal(trace.trace, tiny_models.eager_attentions(network, inputs))


def test_a_padded_batch() -> None:
    trace = ch.trace(tiny_models.build("bert"), tiny_models.inputs("bert"))
    arrays = trace.arrays(0)
    for text in range(3):
        allowed = torch.ones(1, 1, 17, 17, dtype=torch.bool)
        allowed[..., list(trace.side(text=text).padding)] = False
        expected = columns_by_sdpa(arrays["query"][text], arrays["key"][text], causal=False, allowed=allowed)
        rows = sorted(set(range(17)) - set(trace.side(text=text).padding))
        assert np.abs(np.asarray(trace.weights(0, text=text)) - expected)[:, rows].max() < 1e-5
