"""What users of other libraries reported about gradients and the function in torch: each report as a test.

Named as in ``tests/test_reports.py``, which has the rest. pt = pytorch/pytorch, fa = Dao-AILab/flash-attention.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import clearhead as ch
from clearhead.torch import attention, enabled, scaled_dot_product_attention

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def tensors(*shapes, dtype=torch.float64):
    made = torch.Generator().manual_seed(sum(map(sum, shapes)))
    return [torch.randn(shape, generator=made).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("shape", [(5, 6), (1, 6), (3, 5, 6), (2, 1, 5, 1), (1, 1)], ids=str)
def test_pytorch_188302_a_bias_alone_may_want_a_gradient(shape):
    """pt#188302; the gradient is summed over the axes along which the bias was broadcast."""
    query, key, value = (t.detach() for t in tensors((2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 4)))
    (bias,) = tensors(shape)
    for call in (
        lambda bias: scaled_dot_product_attention(query, key, value, bias),
        lambda bias: attention(query, key, value, bias=bias),
    ):
        assert gradcheck(call, bias)
        whole = bias.detach().expand(2, 3, 5, 6).clone().requires_grad_()
        (of_each,) = torch.autograd.grad(call(whole).sin().sum(), whole)
        (summed,) = torch.autograd.grad(call(bias).sin().sum(), bias)
        torch.testing.assert_close(summed, of_each.sum_to_size(shape), rtol=0, atol=1e-13)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # torch's own, in its forward mode
def test_pytorch_116350_second_derivatives_and_forward_mode_work():
    """pt#116350 and pt#128971 (second order), fa#1672 (jvp)."""
    given = tensors((2, 3, 4), (2, 3, 4), (2, 3, 4))

    def call(query, key, value):
        return scaled_dot_product_attention(query, key, value, is_causal=True)

    assert gradgradcheck(call, given)
    plain = tuple(t.detach() for t in given)
    along = tuple(torch.randn(t.shape, generator=torch.Generator().manual_seed(2), dtype=t.dtype) for t in plain)
    output, change = torch.func.jvp(call, plain, along)
    step = 1e-6
    up, down = (call(*(t + sign * step * d for t, d in zip(plain, along, strict=True))) for sign in (1, -1))
    torch.testing.assert_close(output, call(*plain), rtol=0, atol=1e-13)
    torch.testing.assert_close(change, (up - down) / (2 * step), rtol=0, atol=1e-8)
    with enabled():
        (first,) = torch.autograd.grad(
            torch.nn.functional.scaled_dot_product_attention(*given).square().sum(), given[0], create_graph=True
        )
        (second,) = torch.autograd.grad(first.square().sum(), given[1])
    assert second.abs().max() > 1e-3


def test_pytorch_148752_score_functions_train_on_the_cpu():
    """pt#148752: FlexAttention had no gradients on CPUs; here for a user's function and what it is a function of."""

    def bent(score, batch, head, query, key):
        return score - 0.1 * (query - key) * (query - key) * (1 + 0.05 * score * score) / (1 + head)

    query, key, value = tensors((2, 5, 4), (2, 6, 4), (2, 6, 4))

    def call(query, key, value):
        return attention(query, key, value, function=bent)

    assert gradcheck(call, (query, key, value), atol=1e-6)
    row, column = torch.arange(5)[:, None], torch.arange(6)
    score = query @ key.mT / 2
    head = torch.arange(2)[:, None, None]
    dense = (score - 0.1 * (row - column) ** 2 * (1 + 0.05 * score**2) / (1 + head)).softmax(-1) @ value
    both = [torch.autograd.grad(out.sin().sum(), (query, key, value)) for out in (call(query, key, value), dense)]
    for ours, right in zip(*both, strict=True):
        torch.testing.assert_close(ours, right, rtol=0, atol=1e-8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_flashattention_1778_causal_end_with_more_queries_than_keys_has_no_nan_gradients(dtype):
    """fa#1778, fa#443: rows that see nothing get the gradient 0, and give none."""
    query, key, value = tensors((2, 9, 8), (2, 4, 8), (2, 4, 8), dtype=dtype)
    output = attention(query, key, value, mask=ch.masks.causal(align="end"))
    assert not output[:, :5].any()
    grads = torch.autograd.grad(output, (query, key, value), torch.ones_like(output))
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[0][:, :5].any()
    seen = attention(query[:, 5:], key, value, mask=ch.masks.causal())
    of_seen = torch.autograd.grad(seen, (query, key, value), torch.ones_like(seen))
    for ours, right in zip(grads, of_seen, strict=True):
        torch.testing.assert_close(ours, right, rtol=0, atol=0.02 if dtype.itemsize == 2 else 1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["boolean", "numbers"])
def test_pytorch_103963_a_fully_masked_row_has_the_gradient_zero(kind, dtype):
    """pt#103963, pt#41508: the gradients of every argument are finite, that of the row is 0."""
    query, key, value = tensors((1, 2, 5, 8), (1, 2, 6, 8), (1, 2, 6, 8), dtype=dtype)
    mask = torch.ones(5, 6, dtype=torch.bool)
    mask[2] = False
    if kind == "numbers":
        mask = torch.zeros(5, 6, dtype=dtype).masked_fill(~mask, -torch.inf).requires_grad_()
    output = scaled_dot_product_attention(query, key, value, mask)
    learned = [query, key, value, *([mask] if mask.requires_grad else [])]
    grads = torch.autograd.grad(output, learned, torch.ones_like(output))
    assert not output[..., 2, :].any()
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[0][..., 2, :].any()
    if kind == "numbers":
        assert not grads[3][2].any()


@pytest.mark.parametrize("strange", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pytorch_101967_hidden_nan_does_not_leak_into_gradients(dtype, strange):
    """pt#101967: neither from hidden keys and values, nor from the gradient of a row that sees nothing of them."""
    clean = tensors((1, 2, 5, 8), (1, 2, 6, 8), (1, 2, 6, 8), dtype=dtype)
    dirty = [t.detach().clone() for t in clean]
    dirty[1][..., 5, :], dirty[2][..., 5, :] = strange, strange
    dirty = [t.requires_grad_() for t in dirty]
    grads = []
    for given in (clean, dirty):
        output = scaled_dot_product_attention(*given, is_causal=True)
        grads.append((output, *torch.autograd.grad(output, given, torch.ones_like(output))))
    assert torch.equal(grads[0][0], grads[1][0])
    for right, ours in zip(*grads, strict=True):  # sums may be rounded in another order
        torch.testing.assert_close(ours, right, rtol=0, atol=4 * torch.finfo(dtype).eps)
    assert not grads[1][2][..., 5, :].any()


@pytest.mark.parametrize("shape", [(0, 2, 5, 8), (2, 0, 5, 8), (2, 2, 0, 8)], ids=str)
@pytest.mark.parametrize("keys", [0, 6])
def test_pytorch_141219_empty_sequences_have_empty_gradients(shape, keys):
    """pt#141219, pt#174939"""
    query, key, value = tensors(shape, (*shape[:2], keys, 8), (*shape[:2], keys, 8))
    output = scaled_dot_product_attention(query, key, value)
    for given, grad in zip((query, key, value), torch.autograd.grad(output.sum(), (query, key, value)), strict=True):
        assert grad.shape == given.shape
        assert not grad.any()


def test_pytorch_187506_gradients_of_views_are_those_of_copies():
    """pt#187506: inner strides other than one, reversed and broadcast tensors."""
    query, key, value = tensors((2, 6, 5), (2, 6, 5), (2, 6, 5))
    views = (lambda t: t.mT, lambda t: t.flip(-1).mT, lambda t: t[..., ::2].mT, lambda t: t[:1].expand(2, 6, 5))
    for view in views:
        grads = []
        for copy in (lambda t: t, torch.Tensor.contiguous):
            output = scaled_dot_product_attention(*(copy(view(t)) for t in (query, key, value)), is_causal=True)
            grads.append((output, *torch.autograd.grad(output.sin().sum(), (query, key, value))))
        assert all(torch.equal(ours, right) for ours, right in zip(*grads, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pytorch_133458_any_number_of_leading_axes_has_gradients(dtype):
    """pt#133458: 5-D inputs"""
    given = tensors((2, 1, 2, 7, 8), (2, 2, 2, 7, 8), (1, 2, 2, 7, 8), dtype=dtype)
    output = scaled_dot_product_attention(*given, is_causal=True)
    wide = [t.detach().double().requires_grad_() for t in given]
    right = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True)
    into = torch.randn(output.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    grads = [torch.autograd.grad(out, t, into.to(out.dtype)) for out, t in ((output, given), (right, wide))]
    cap = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 0.2}[dtype]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=cap)
