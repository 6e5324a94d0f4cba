"""In a block torch's function is ours: under every name, in this thread alone, for modules that know nothing of it."""

from __future__ import annotations

import copy
import itertools
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as imported_earlier

from clearhead.torch import enabled, enabling


@pytest.fixture
def calls(monkeypatch):
    """The calls that came to ours."""
    seen = []

    def counted(*args, **kwargs):
        seen.append(args)
        return enabling.scaled_dot_product_attention(*args, **kwargs)

    for name, function in enabling._REPLACED.items():
        if function is enabling.scaled_dot_product_attention:
            monkeypatch.setitem(enabling._REPLACED, name, counted)
    whole = enabling._REPLACED[F.multi_head_attention_forward]
    monkeypatch.setitem(whole.__globals__, "scaled_dot_product_attention", counted)
    return seen


def numbers(*shape, dtype=torch.float64):
    made = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=made, dtype=dtype)


def test_it_is_ours_under_every_name(calls):
    x = numbers(2, 3, 5, 8)
    names = [
        F.scaled_dot_product_attention, imported_earlier, torch._C._nn.scaled_dot_product_attention,
        torch.ops.aten.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default,
    ]  # fmt: skip
    wanted = imported_earlier(x, x, x)
    with enabled():
        for function in names:
            torch.testing.assert_close(function(x, x, x), wanted, rtol=0, atol=1e-13)
    assert len(calls) == len(names)
    assert torch.equal(imported_earlier(x, x, x), wanted)
    assert len(calls) == len(names)


def test_blocks_nest_and_errors_end_them(calls):
    x = numbers(2, 3, 5, 8)

    def fail():
        with enabled():
            with enabled():
                F.scaled_dot_product_attention(x, x, x)
            F.scaled_dot_product_attention(x, x, x)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert len(calls) == 2
    F.scaled_dot_product_attention(x, x, x)
    assert len(calls) == 2


def test_what_ours_does_not_do_is_torchs_also_in_nested_blocks(calls):
    x = numbers(2, 3, 5, 8)
    wanted = F.scaled_dot_product_attention(x, x, x, scale=float("nan"))
    with enabled(), enabled():
        assert torch.equal(F.scaled_dot_product_attention(x, x, x, scale=float("nan")), wanted)
    assert len(calls) == 2


def test_other_threads_are_left_alone(calls):
    x = numbers(2, 3, 5, 8)
    seen = {}

    def other(name):
        F.scaled_dot_product_attention(x, x, x)
        seen[name] = len(calls)

    with enabled():
        elsewhere = threading.Thread(target=other, args=("outside",))
        elsewhere.start()
        elsewhere.join()
    assert seen == {"outside": 0}
    turn, done = threading.Barrier(2, timeout=60), []

    def within():
        with enabled():
            turn.wait()
            F.scaled_dot_product_attention(x, x, x)
            done.append(len(calls))
            turn.wait()

    inside = threading.Thread(target=within)
    inside.start()
    turn.wait()
    F.scaled_dot_product_attention(x, x, x)
    turn.wait()
    inside.join()
    assert done == [1]
    assert len(calls) == 1


def test_with_a_default_device_inside_and_outside(calls):
    module, x = nn.MultiheadAttention(8, 2, batch_first=True).double(), numbers(2, 5, 8)
    with enabled(), torch.device("cpu"):
        module(x, x, x, need_weights=False)
    with torch.device("cpu"), enabled():
        module(x, x, x, need_weights=False)
    assert len(calls) == 2


def test_compiled_code_is_ours_in_the_block(calls):
    from clearhead.torch import library

    x = numbers(2, 3, 5, 8)
    graphs = []

    def backend(graph, _):
        graphs.append({node.target for node in graph.graph.nodes})
        return graph

    compiled = torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x) * 2, fullgraph=True, backend=backend)
    wanted = compiled(x)
    with enabled():
        torch.testing.assert_close(compiled(x), wanted, rtol=0, atol=1e-13)
    assert torch.equal(compiled(x), wanted)
    assert len(graphs) == 2
    ours = library.attend._opoverload
    assert [any(getattr(t, "default", t) is ours for t in targets) for targets in graphs] == [False, True]
    assert [F.scaled_dot_product_attention in targets for targets in graphs] == [True, False]


def test_compiled_modules_are_ours_in_the_block(calls):
    module, x = nn.MultiheadAttention(8, 2, batch_first=True).double(), numbers(2, 5, 8)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    wanted = module(x, x, x, need_weights=False)[0]
    with enabled():
        found = compiled(x, x, x, need_weights=False)[0]
    assert len(calls) == 1  # while it was traced
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-13)
    for ours, theirs in zip(gradients(module, found), gradients(module, wanted), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


MASKS = ["none", "boolean", "float", "padding", "boolean and padding", "causal"]


def masked(kind, batch, tokens):
    """What nn.MultiheadAttention takes: here True hides."""
    hidden = torch.rand(tokens, tokens, generator=torch.Generator().manual_seed(4)) < 0.4
    hidden.fill_diagonal_(False)
    padding = torch.arange(tokens) >= torch.tensor([tokens - n for n in range(batch)])[:, None]
    if kind == "causal":
        mask = nn.Transformer.generate_square_subsequent_mask(tokens, dtype=torch.float64)
        return {"attn_mask": mask, "is_causal": True}
    return {
        "none": {},
        "boolean": {"attn_mask": hidden},
        "float": {"attn_mask": numbers(tokens, tokens)},
        "padding": {"key_padding_mask": padding},
        "boolean and padding": {"attn_mask": torch.ones(tokens, tokens).triu(1).bool(), "key_padding_mask": padding},
    }[kind]


def gradients(module, output, *inputs):
    learned = [*inputs, *module.parameters()]
    return torch.autograd.grad(output.sin().sum(), learned, allow_unused=True)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", MASKS)
def test_multihead_attention_is_the_same(calls, kind, batch_first, need_weights, training):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(16, 4, batch_first=batch_first).double().train(training)
    x = numbers(3, 6, 16).requires_grad_()
    given = x if batch_first else x.transpose(0, 1)
    options = {"need_weights": need_weights, **masked(kind, 3, 6)}
    wanted, weights = module(given, given, given, **options)
    with enabled():
        found, also = module(given, given, given, **options)
    assert len(calls) == (not need_weights)  # with weights, torch computes them itself
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-13)
    if need_weights:
        torch.testing.assert_close(also, weights, rtol=0, atol=1e-13)
    for ours, theirs in zip(gradients(module, found, x), gradients(module, wanted, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    with torch.no_grad():  # torch has another road then, without the function
        plain = module(given, given, given, **options)[0]
        with enabled():
            torch.testing.assert_close(module(given, given, given, **options)[0], plain, rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", ["none", "boolean", "padding"])
def test_attention_to_other_tokens_with_other_dims_is_the_same(calls, kind):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(16, 4, kdim=10, vdim=12, add_bias_kv=True, add_zero_attn=True, batch_first=True)
    module = module.double()
    query, key, value = (numbers(3, n, dim).requires_grad_() for n, dim in ((5, 16), (7, 10), (7, 12)))
    options = {
        "none": {},
        "boolean": {"attn_mask": torch.ones(5, 7).triu(3).bool()},
        "padding": {"key_padding_mask": torch.arange(7) >= torch.tensor([7, 4, 2])[:, None]},
    }[kind]
    wanted = module(query, key, value, need_weights=False, **options)[0]
    with enabled():
        found = module(query, key, value, need_weights=False, **options)[0]
    assert len(calls) == 1
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-13)
    both = (gradients(module, output, query, key, value) for output in (found, wanted))
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("training", "grad", "norm_first"), list(itertools.product([True, False], [True, False], [True, False]))
)
def test_an_encoder_layer_is_the_same(calls, training, grad, norm_first):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, norm_first=norm_first)
    layer = layer.double().train(training)
    x = numbers(3, 6, 16).requires_grad_(grad)
    padding = torch.arange(6) >= torch.tensor([6, 4, 1])[:, None]
    for options in ({}, {"src_key_padding_mask": padding}):
        with torch.set_grad_enabled(grad):
            wanted = layer(x, **options)
            calls.clear()
            with enabled():
                found = layer(x, **options)
        assert len(calls) == 1
        real = ~padding if options else torch.ones_like(padding)
        torch.testing.assert_close(found[real], wanted[real], rtol=0, atol=1e-12)
        if grad:
            both = (gradients(layer, output[real], x) for output in (found, wanted))
            for ours, theirs in zip(*both, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


def test_an_encoder_and_a_decoder_are_the_same(calls):
    torch.manual_seed(0)
    model = nn.Transformer(16, 4, 2, 2, 32, dropout=0.0, batch_first=True).double()
    source, target = numbers(3, 7, 16), numbers(3, 5, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    wanted = model(source, target, tgt_mask=mask, tgt_is_causal=True)
    with enabled():
        found = model(source, target, tgt_mask=mask, tgt_is_causal=True)
    assert len(calls) == 6  # two layers with one, two with two
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    for ours, theirs in zip(gradients(model, found), gradients(model, wanted), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


class Block(nn.Module):
    """A block of a vision transformer, as timm writes it."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm, self.again = heads, nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, dim = x.shape
        qkv = self.qkv(self.norm(x)).reshape(batch, tokens, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=0.0)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, tokens, dim))
        return x + self.mlp(self.again(x))


def test_a_vision_transformer_trains_the_same(calls):
    torch.manual_seed(0)
    model = nn.Sequential(Block(32, 4), Block(32, 4)).double()
    other, x, goal = copy.deepcopy(model), numbers(2, 17, 32), numbers(2, 17, 32)

    def train(model):
        optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-2), []
        for _ in range(5):
            loss = F.mse_loss(model(x), goal)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    wanted = train(model)
    with enabled():
        found = train(other)
    assert len(calls) == 10
    assert wanted[-1] < wanted[0]
    assert found == pytest.approx(wanted, rel=1e-9)


def test_recomputed_activations_are_the_same_with_backward_in_the_block(calls):
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    block, x = Block(16, 2).double(), numbers(2, 9, 16).requires_grad_()
    wanted = gradients(block, block(x), x)
    with enabled():
        found = gradients(block, checkpoint(block, x, use_reentrant=False), x)
    assert len(calls) == 2
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("way", ["grad", "backward of all", "backward of one"])
def test_every_way_back_recomputes_with_ours(calls, way):
    from torch.utils.checkpoint import checkpoint

    x = numbers(2, 9, 16).requires_grad_()
    wanted = torch.autograd.grad(F.scaled_dot_product_attention(x, x, x), x, torch.ones_like(x))[0]
    with enabled():
        output = checkpoint(F.scaled_dot_product_attention, x, x, x, use_reentrant=False)
        if way == "grad":
            (found,) = torch.autograd.grad(output, x, torch.ones_like(x))
        elif way == "backward of all":
            torch.autograd.backward([output], [torch.ones_like(x)], inputs=[x])
        else:
            output.backward(torch.ones_like(x), inputs=[x])
    assert len(calls) == 2
    torch.testing.assert_close(found if way == "grad" else x.grad, wanted, rtol=0, atol=1e-13)
