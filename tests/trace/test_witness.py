"""Weights by another road: attention is linear in V, so attention over a block of the identity gives its columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny_models
import torch

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


def traced(name: str, text: str, count: int, layer: int) -> Any:
    model = load(name)
    inputs = {"input_ids": torch.tensor([tokenize(model.tokenizer, text, count).ids])}
    return ch.trace(model.network, inputs, layers=[layer])


def test_smollm2() -> None:
    try:
        smollm2.package_folder()
    except ValueError as error:
        pytest.skip(f"the model comes as a package of its own: {error}")
    trace = traced("smollm2", WORDS * 12, 256, layer=11)
    arrays = trace.arrays(11)
    expected = columns_by_sdpa(arrays["query"][0], arrays["key"][0], causal=True)
    assert np.abs(np.asarray(trace.weights(11)) - expected).max() < 1e-5


def test_minilm() -> None:
    trace = traced("minilm", WORDS * 6, 128, layer=3)
    arrays = trace.arrays(3)
    expected = columns_by_sdpa(arrays["query"][0], arrays["key"][0], causal=False)
    assert np.abs(np.asarray(trace.weights(3)) - expected).max() < 1e-5


def test_a_padded_batch() -> None:
    trace = ch.trace(tiny_models.build("bert"), tiny_models.inputs("bert"))
    arrays = trace.arrays(0)
    for text in range(3):
        allowed = torch.ones(1, 1, 17, 17, dtype=torch.bool)
        allowed[..., list(trace.side(text=text).padding)] = False
        expected = columns_by_sdpa(arrays["query"][text], arrays["key"][text], causal=False, allowed=allowed)
        rows = sorted(set(range(17)) - set(trace.side(text=text).padding))
        assert np.abs(np.asarray(trace.weights(0, text=text)) - expected)[:, rows].max() < 1e-5
