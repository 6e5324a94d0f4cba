"""attention under torch's other modes: compiled, checked as an operator, autocast, transformed, with dropout."""

import pytest
import torch

import clearhead as ch
from clearhead.torch import attention
from clearhead.torch.dropping import kept


def tensors(*shape, dtype=torch.float64):
    made = torch.Generator().manual_seed(sum(shape))
    return [torch.randn(shape, generator=made, dtype=dtype).requires_grad_() for _ in range(3)]


def causal(query, key, value):
    return attention(query, key, value, mask=ch.masks.causal())


def test_a_compiled_call_is_one_graph_with_the_same_numbers():
    given = tensors(2, 6, 4)
    compiled = torch.compile(causal, fullgraph=True, backend="aot_eager")
    ours, plain = compiled(*given), causal(*given)
    assert torch.equal(ours, plain)
    for found, wanted in zip(
        torch.autograd.grad(ours.sum(), given), torch.autograd.grad(plain.sum(), given), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-14)


MADE_INSIDE = {
    "aligned": lambda: ch.masks.causal(align="end"),
    "window": lambda: ch.masks.window(left=1, align="start"),
    "both": lambda: ch.masks.window(1, 2, align="end") & ch.masks.causal(align="end"),
    "either": lambda: ch.masks.window(0, 0, align="start") | ch.masks.causal(align="end"),
}


@pytest.mark.parametrize("mask", MADE_INSIDE)
def test_a_mask_made_inside_of_what_is_compiled_is_the_mask(mask):
    query, key, value = tensors(2, 3, 4)[0], *tensors(2, 7, 4)[1:]
    make = MADE_INSIDE[mask]

    def run(query, key, value):
        return attention(query, key, value, mask=make())

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(query, key, value), run(query, key, value))


def test_masks_given_to_what_is_compiled_may_change():
    query, key, value = tensors(2, 6, 4)
    compiled = torch.compile(lambda *given, mask: attention(*given, mask=mask), fullgraph=True, backend="aot_eager")
    for mask in (ch.masks.lengths(4), ch.masks.lengths(2), ch.masks.causal(), ch.masks.window(1, 0), ch.masks.window(2),
                 ch.masks.causal() & ch.masks.lengths(3), ch.masks.causal() & ch.masks.lengths(5), None):  # fmt: skip
        assert torch.equal(compiled(query, key, value, mask=mask), attention(query, key, value, mask=mask))


def test_a_mask_of_arrays_made_inside_is_refused():
    query, key, value = tensors(2, 6, 4)
    compiled = torch.compile(
        lambda *given: attention(*given, mask=ch.masks.function(lambda b, h, i, j: i == j)), backend="aot_eager"
    )
    with pytest.raises(Exception, match="make it outside, and give it to the function"):
        compiled(query, key, value)


def test_equal_masks_are_kept_once():
    from clearhead.torch import library

    numbers = {
        library.handle(ch.masks.window(3) & ch.masks.causal(), None, None, None),
        library.handle(ch.masks.window(3) & ch.masks.causal(), None, None, None),
    }
    assert len(numbers) == 1


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_operator_passes_the_checks_of_torch(dropout):
    from clearhead.torch import library

    query, key, value = tensors(2, 6, 4)
    number = library.handle(ch.masks.causal(), None, None, None)
    sinks = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    seed = torch.tensor(5) if dropout else None
    given = (number, None, None, dropout, query, key, value, None, None, None, None, sinks, *(None,) * 5, seed)
    assert set(torch.library.opcheck(library.attend, given).values()) == {"SUCCESS"}


def test_fake_tensors_have_the_shapes_of_real_ones():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        query, key, value = torch.empty(3, 4, 7, 8), torch.empty(3, 2, 9, 8), torch.empty(3, 2, 9, 5)
        output, logsumexp = attention(query, key, value, return_logsumexp=True)
    assert output.shape == (3, 4, 7, 5)
    assert logsumexp.shape == (3, 4, 7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_rounds_as_for_the_function_of_torch(dtype):
    given = tensors(2, 6, 4, dtype=torch.float32)
    with torch.autocast("cpu", dtype):
        output = attention(*given)
    assert output.dtype == dtype
    assert torch.equal(output, attention(*(x.to(dtype) for x in given)))
    output.float().sum().backward()
    assert all(x.grad.dtype == torch.float32 for x in given)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # torch's own, in its forward mode
def test_forward_mode_is_the_product_with_the_jacobian():
    given = tuple(x.detach() for x in tensors(2, 5, 4))
    along = tuple(torch.randn_like(x) for x in given)
    output, found = torch.func.jvp(causal, given, along)
    torch.testing.assert_close(output, causal(*given), rtol=0, atol=1e-14)
    step = 1e-6
    up, down = (causal(*(x + sign * step * d for x, d in zip(given, along, strict=True))) for sign in (1, -1))
    torch.testing.assert_close(found, (up - down) / (2 * step), rtol=0, atol=1e-8)


def test_vmap_is_a_loop():
    query, key, value = (x.detach() for x in tensors(3, 2, 5, 4))
    found = torch.func.vmap(causal)(query, key, value)
    wanted = torch.stack([causal(*one) for one in zip(query, key, value, strict=True)])
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-14)


def test_gradients_of_func_are_those_of_backward():
    given = tensors(2, 5, 4)
    found = torch.func.grad(lambda *x: causal(*x).square().sum(), argnums=(0, 1, 2))(*(x.detach() for x in given))
    wanted = torch.autograd.grad(causal(*given).square().sum(), given)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dropout", [0.0, 0.4, 1.0])
def test_dropped_weights_are_gone_both_ways(dropout):
    given = tensors(2, 5, 4)
    torch.manual_seed(11)
    output = attention(*given, dropout=dropout)
    torch.manual_seed(11)
    seed = torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64)
    stay = kept(seed, dropout, 1, 2, range(5), 5)[0]
    query, key, value = given
    weights = (query @ key.mT / 2).softmax(-1) * stay / max(1 - dropout, 1e-9)
    torch.testing.assert_close(output, weights @ value, rtol=0, atol=1e-13)
    grad = torch.randn_like(output)
    for ours, theirs in zip(
        torch.autograd.grad(output, given, grad), torch.autograd.grad(weights @ value, given, grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)
