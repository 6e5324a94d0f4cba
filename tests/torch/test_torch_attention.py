"""attention on tensors: torch's own numbers, gradients by finite differences, and what is refused."""

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as theirs

import clearhead as ch
from clearhead.torch import attention

BOUND = {torch.float32: 1e-5, torch.float64: 1e-12, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def tensors(*shape, dtype=torch.float32, seed=0):
    made = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=made).to(dtype).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_output_and_gradients_are_those_of_torch(dtype, causal):
    query, key, value = tensors(2, 3, 40, 16, dtype=dtype)
    mask = ch.masks.causal() if causal else None
    ours, right = attention(query, key, value, mask=mask), theirs(query, key, value, is_causal=causal)
    grad = torch.randn(right.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = torch.autograd.grad(ours, (query, key, value), grad)
    wanted = torch.autograd.grad(right, (query, key, value), grad)
    for got, expected in zip((ours, *found), (right, *wanted), strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got, expected, rtol=0, atol=BOUND[dtype] * max(1, expected.abs().max().item()))


def number(*shape):
    return torch.from_numpy(np.random.default_rng(sum(shape)).standard_normal(shape)).requires_grad_()


PARTS = {
    "plain": {},
    "scale": {"scale": torch.tensor(0.3, dtype=torch.float64, requires_grad=True)},
    "softcap": {"softcap": torch.tensor(2.0, dtype=torch.float64, requires_grad=True)},
    "bias": {"bias": number(1, 5)},
    "alibi": {"alibi": number(2), "align": "end"},
    "sinks": {"sinks": number(2)},
    "general": {"general": number(4, 4)},
    "additive": {"additive": (number(4, 3), number(4, 3), number(3))},
}


@pytest.mark.parametrize("check", [torch.autograd.gradcheck, torch.autograd.gradgradcheck])
@pytest.mark.parametrize("part", PARTS)
def test_gradients_agree_with_finite_differences(check, part):
    query, key, value = tensors(2, 5, 4, dtype=torch.float64)
    names, given = zip(*PARTS[part].items(), strict=True) if PARTS[part] else ((), ())
    learned = [x for one in given for x in (one if isinstance(one, tuple) else (one,)) if torch.is_tensor(x)]

    def both(query, key, value, *own):
        own, parts = iter(own), {}
        for name, one in zip(names, given, strict=True):
            whole = tuple(next(own) for _ in one) if isinstance(one, tuple) else None
            parts[name] = whole or (next(own) if torch.is_tensor(one) else one)
        return attention(query, key, value, mask=ch.masks.causal(), return_logsumexp=True, **parts)

    assert check(both, (query, key, value, *learned))


def test_weights_come_with_the_output():
    query, key, value = tensors(2, 5, 4)
    output, weights = attention(query, key, value, return_weights=True)
    torch.testing.assert_close(torch.from_numpy(weights[:]) @ value.detach(), output.detach(), rtol=0, atol=1e-6)


def test_a_tensor_changed_between_forward_and_backward_is_an_error():
    query, key, value = tensors(2, 5, 4)
    inside = query * 1
    output = attention(inside, key, value)
    with torch.no_grad():
        inside.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_what_is_no_tensor_is_refused_by_name():
    query, key, _ = tensors(2, 5, 4)
    with pytest.raises(TypeError, match="value"):
        attention(query, key, np.zeros((2, 5, 4), np.float32))


def test_dropout_is_that_of_the_generator():
    query, key, value = tensors(2, 5, 4)
    found = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        found.append(attention(query, key, value, dropout=0.5))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
