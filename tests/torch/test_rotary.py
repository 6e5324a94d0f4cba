"""Rotary positions: those of transformers' Llama, and what makes them positions."""

import pytest
import torch
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from clearhead.torch.modules.rotary import rotated


@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
@pytest.mark.parametrize("start", [0, 5000])
def test_they_are_those_of_llama(base, start):
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=2, rope_parameters={"rope_type": "default", "rope_theta": base}
    )
    x = torch.randn(2, 2, 300, 32, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(start, start + 300)[None]
    cosine, sine = LlamaRotaryEmbedding(config)(x, positions)
    wanted, _ = apply_rotary_pos_emb(x, x, cosine, sine)
    torch.testing.assert_close(rotated(x, positions, base), wanted, rtol=0, atol=1e-6)


def test_products_depend_on_the_distance_alone():
    x, y = torch.randn(2, 1, 7, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    here, there = (rotated(x, torch.arange(7) + n) @ rotated(y, torch.arange(7) + n).mT for n in (0, 1000))
    torch.testing.assert_close(here, there, rtol=0, atol=1e-12)
    assert not torch.allclose(here, x @ y.mT, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bits_are_rounded_once(dtype):
    x, positions = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(2)).to(dtype), torch.arange(5)
    assert torch.equal(rotated(x, positions), rotated(x.float(), positions).to(dtype))


def test_each_text_of_a_batch_may_have_its_own():
    x = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(3))
    positions = torch.stack([torch.arange(5), torch.arange(5) + 7])
    wanted = torch.stack([rotated(x[n], positions[n]) for n in range(2)])
    assert torch.equal(rotated(x, positions), wanted)
