"""MultiHeadAttention with a cache: token by token is the whole at once, and errors leave the cache as it was."""

import pytest
import torch

import clearhead as ch
from clearhead.torch import MultiHeadAttention

END = ch.masks.causal(align="end")


def seeded(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("made", [{}, {"key_heads": 2, "rotary": 10_000.0}])
def test_token_by_token_is_the_whole_at_once(dtype, made):
    layer, x = MultiHeadAttention(16, 4, dtype=dtype, **made), seeded(2, 9, 16, dtype=dtype)
    cache = layer.new_cache(batch=2)
    with torch.inference_mode():
        steps = [layer(part, mask=END, cache=cache) for part in x.split([4, 1, 3, 1], dim=1)]
        whole = layer(x, mask=END)
    bound = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 8e-3}[dtype]
    found = torch.cat(steps, dim=1)
    assert found.dtype == dtype
    torch.testing.assert_close(found, whole, rtol=0, atol=bound)
    assert len(cache) == 9


def test_padding_on_the_left_with_positions():
    layer, x = MultiHeadAttention(16, 4, rotary=10_000.0), seeded(2, 6, 16)
    first = torch.tensor([0, 2])  # where each text begins
    places = (torch.arange(6) - first[:, None]).clamp(min=0)
    real = (torch.arange(6) >= first[:, None])[:, None, None]
    cache, steps = layer.new_cache(2), []
    with torch.no_grad():
        for a, b in ((0, 4), (4, 5), (5, 6)):
            past = torch.ones(6, 6, dtype=torch.bool).tril()[a:b, :b]
            steps.append(layer(x[:, a:b], mask=real[..., :b] & past, positions=places[:, a:b], cache=cache))
        alone = layer(x[1:, 2:], mask=END)
    torch.testing.assert_close(torch.cat(steps, dim=1)[1:, 2:], alone, rtol=0, atol=1e-6)


def test_parts_of_the_score_act():
    layer, x, slopes = MultiHeadAttention(16, 4), seeded(1, 5, 16), torch.tensor([0.5, 0.25, 0.1, 0.0])
    parts = {"alibi": slopes, "align": "end", "softcap": torch.tensor(3.0), "sinks": [0.1, 0.2, 0.3, 0.4]}
    cache = layer.new_cache(1)
    with torch.no_grad():
        steps = [layer(x[:, n : n + 1], mask=END, cache=cache, **parts) for n in range(5)]
        torch.testing.assert_close(torch.cat(steps, dim=1), layer(x, mask=END, **parts), rtol=0, atol=1e-6)
        cache = layer.new_cache(1)
        layer(x[:, :4], mask=END, cache=cache)
        last = layer(x[:, 4:], cache=cache, score=ch.scores.dot(scale=0.1))
        torch.testing.assert_close(last, layer(x, scale=0.1)[:, 4:], rtol=0, atol=1e-6)


def test_weights_come_with_each_step():
    layer, x = MultiHeadAttention(16, 4), seeded(1, 5, 16)
    cache = layer.new_cache(1)
    with torch.no_grad():
        layer(x[:, :4], mask=END, cache=cache)
        _, weights = layer(x[:, 4:], mask=END, cache=cache, return_weights=True)
        _, whole = layer(x, mask=END, return_weights=True)
    torch.testing.assert_close(torch.from_numpy(weights[:]), torch.from_numpy(whole[:, :, 4:]), rtol=0, atol=1e-6)


def test_a_cache_of_few_bits_may_serve_a_module_of_more():
    layer, x = MultiHeadAttention(16, 4), seeded(1, 5, 16)
    cache = layer.new_cache(1, capacity=5, dtype="float16")
    with torch.no_grad():
        found = [layer(x[:, n : n + 1], mask=END, cache=cache) for n in range(5)]
        torch.testing.assert_close(torch.cat(found, dim=1), layer(x, mask=END), rtol=0, atol=2e-3)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"mask": torch.ones(3, 3, dtype=torch.bool)}, ValueError, "mask has shape"),
        ({"mask": ch.masks.causal()}, ValueError, "can mean two things"),
        ({"sinks": [1.0, 2.0]}, ValueError, "sinks needs one number per head"),
        ({"query": torch.zeros(3, 1, 16)}, ValueError, "cache holds batch 2, 4 key heads, dim 4"),
        ({"query": torch.zeros(1, 16)}, ValueError, "cache holds batch 2, 4 key heads, dim 4"),
        ({"score": ch.scores.dot(), "softcap": 2.0}, ValueError, "give one or the other"),
    ],
)
def test_what_does_not_fit_leaves_the_cache_as_it_was(given, error, words):
    layer, x = MultiHeadAttention(16, 4), seeded(2, 3, 16)
    cache = layer.new_cache(2)
    with torch.no_grad():
        layer(x, cache=cache)
        with pytest.raises(error, match=words):
            layer(**{"query": x[:, :1], "cache": cache, **given})
    assert len(cache) == 3


def test_gradients_do_not_flow_through_a_cache_and_that_is_said():
    layer, x = MultiHeadAttention(16, 4), seeded(2, 3, 16)
    with pytest.raises(RuntimeError, match=r"none flow through a cache: call under torch.no_grad\(\)"):
        layer(x, cache=layer.new_cache(2))


def test_nothing_is_dropped_silently():
    layer, x = MultiHeadAttention(16, 4, dropout=0.1), seeded(2, 3, 16)
    with torch.no_grad(), pytest.raises(RuntimeError, match="while training with dropout"):
        layer(x, cache=layer.new_cache(2))
