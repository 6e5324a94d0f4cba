"""Weights of nn.MultiheadAttention: the same outputs, and the same gradients of every parameter."""

import pytest
import torch
from torch import nn

import clearhead as ch
from clearhead.torch import MultiHeadAttention

BATCH, QUERIES, KEYS, EMBED, HEADS = 2, 5, 7, 16, 4


def seeded(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def padded(keys):
    return torch.arange(keys) >= torch.tensor([keys, keys - 2])[:, None]  # True is padding, for torch


def none(queries, keys):
    return {}, {}


def causal(queries, keys):
    later = torch.ones(queries, keys, dtype=torch.bool).triu(1)
    return {"attn_mask": later}, {"mask": ch.masks.causal(align="start")}


def padding(queries, keys):
    return {"key_padding_mask": padded(keys)}, {"mask": ch.masks.lengths([keys, keys - 2])}


def numbers(queries, keys):
    bias = seeded(queries, keys)
    return {"attn_mask": bias}, {"mask": bias}


def each_head(queries, keys):
    hidden = seeded(BATCH, HEADS, queries, keys) > 0.5
    hidden[..., 0] = False
    return {"attn_mask": hidden.flatten(0, 1)}, {"mask": ~hidden}


def both(queries, keys):
    later = torch.ones(queries, keys, dtype=torch.bool).triu(1)
    theirs = {"attn_mask": later, "key_padding_mask": padded(keys)}
    return theirs, {"mask": ch.masks.causal(align="start") & ch.masks.lengths([keys, keys - 2])}


def of_theirs(module):
    """Their gradients under our names."""
    grads = {name: parameter.grad for name, parameter in module.named_parameters()}
    for kind in ("weight", "bias"):
        whole = grads.pop(f"in_proj_{kind}", None)
        if whole is not None:
            grads.update({f"{part}_proj.{kind}": rows for part, rows in zip("qkv", whole.split(EMBED), strict=True)})
    return {name.replace("_proj_weight", "_proj.weight"): grad for name, grad in grads.items()}


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("mask", [none, causal, padding, numbers, each_head, both])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 6, "vdim": 10}], ids=str)
def test_outputs_weights_and_gradients_are_those_of_torch(options, mask, batch_first, need_weights):
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(EMBED, HEADS, batch_first=batch_first, dtype=torch.float64, **options)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)  # biases, too
    ours = MultiHeadAttention.from_torch(theirs)
    query = seeded(BATCH, QUERIES, EMBED)
    key, value = (seeded(BATCH, KEYS, options.get(name, EMBED)) for name in ("kdim", "vdim"))
    for_them, for_us = mask(QUERIES, KEYS)

    given = (query, key, value) if batch_first else tuple(x.transpose(0, 1) for x in (query, key, value))
    wanted, right = theirs(*given, need_weights=need_weights, average_attn_weights=False, **for_them)
    wanted = wanted if batch_first else wanted.transpose(0, 1)
    output, weights = ours(query, key, value, return_weights=True, **for_us)
    torch.testing.assert_close(output, wanted, rtol=0, atol=1e-12)
    if need_weights:
        torch.testing.assert_close(torch.from_numpy(weights[:]), right.detach(), rtol=0, atol=1e-12)

    grad = seeded(*output.shape)
    output.backward(grad)
    wanted.backward(grad)
    found, expected = {name: p.grad for name, p in ours.named_parameters()}, of_theirs(theirs)
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(
            found[name], expected[name], rtol=0, atol=1e-11, msg=lambda said, name=name: f"{name}: {said}"
        )


class Model(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.layers = nn.ModuleList([attention(), attention()])


def test_a_checkpoint_of_a_whole_model_loads():
    theirs, ours = Model(lambda: nn.MultiheadAttention(16, 4)), Model(lambda: MultiHeadAttention(16, 4))
    state = theirs.state_dict()
    missing, unexpected = ours.load_state_dict(state)
    assert not missing
    assert not unexpected
    assert "layers.1.in_proj_weight" in state  # theirs is left alone
    assert torch.equal(ours.layers[1].v_proj.weight, theirs.layers[1].in_proj_weight[32:])


def test_mode_dropout_and_what_learns_come_along():
    theirs = nn.MultiheadAttention(16, 4, dropout=0.3).eval()
    theirs.out_proj.weight.requires_grad_(False)
    ours = MultiHeadAttention.from_torch(theirs)
    assert (ours.dropout, ours.training) == (0.3, False)
    assert [name for name, p in ours.named_parameters() if not p.requires_grad] == ["out_proj.weight"]
    with torch.no_grad():
        ours.q_proj.weight.zero_()
    assert theirs.in_proj_weight[:16].any()  # theirs stay its own


def test_what_has_no_counterpart_is_refused():
    with pytest.raises(ValueError, match="state_dict has bias_k: a learned key and value"):
        MultiHeadAttention.from_torch(nn.MultiheadAttention(16, 4, add_bias_kv=True))
    with pytest.raises(ValueError, match=r"state_dict has layers\.0\.bias_k"):
        Model(lambda: MultiHeadAttention(16, 4)).load_state_dict(
            Model(lambda: nn.MultiheadAttention(16, 4, add_bias_kv=True)).state_dict()
        )
    with pytest.raises(ValueError, match="module has add_zero_attn=True"):
        MultiHeadAttention.from_torch(nn.MultiheadAttention(16, 4, add_zero_attn=True))
    with pytest.raises(TypeError, match="module is Linear"):
        MultiHeadAttention.from_torch(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match=r"size mismatch for k_proj\.weight"):
        MultiHeadAttention(16, 4, key_heads=2).load_state_dict(nn.MultiheadAttention(16, 4).state_dict())


def test_zeros_after_the_last_token_are_a_sink_of_0():
    """What the refusal of add_zero_attn says is true."""
    theirs = nn.MultiheadAttention(16, 4, add_zero_attn=True, batch_first=True, dtype=torch.float64)
    ours, x = MultiHeadAttention(16, 4, dtype=torch.float64), seeded(2, 5, 16)
    ours.load_state_dict(theirs.state_dict())
    wanted = theirs(x, x, x)[0]
    torch.testing.assert_close(ours(x, sinks=torch.zeros(4)), wanted, rtol=0, atol=1e-12)
