"""Ours in the place of torch's function: the same results, gradients and refusals, corner by corner."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as theirs

from clearhead.torch import replacement, scaled_dot_product_attention

CAPS = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


@pytest.fixture
def only_ours(monkeypatch):
    """torch's own function is out of reach: what is asked for is done by ours."""

    def refuse(*_, **__):
        raise AssertionError("torch's own function was called")

    monkeypatch.setattr(replacement, "_torchs", refuse)


def tensors(*shapes, dtype=torch.float64, grad=True):
    made = torch.Generator().manual_seed(sum(map(sum, shapes)))
    return [torch.randn(shape, generator=made, dtype=torch.float64).to(dtype).requires_grad_(grad) for shape in shapes]


def unfused(*given, **options):
    """torch's function by matrices: right where its fused kernel is not."""
    with sdpa_kernel(SDPBackend.MATH):
        return theirs(*given, **options)


def same(given, reference=theirs, **options):
    """Output and every gradient are those of torch's function, in its dtype and shape."""
    learned = [t for t in (*given, options.get("attn_mask")) if t is not None and t.requires_grad]
    found, wanted = scaled_dot_product_attention(*given, **options), reference(*given, **options)
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    pairs = [(found, wanted)]
    if learned:
        grad = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        both = [torch.autograd.grad(o, learned, grad.to(o.dtype), materialize_grads=True) for o in (found, wanted)]
        pairs += list(zip(*both, strict=True))
    for got, expected in pairs:
        most = expected.abs().max().item() if expected.numel() else 0
        torch.testing.assert_close(got, expected, rtol=0, atol=CAPS[given[0].dtype] * max(1, most))


# query, key, value
SHAPES = {
    "usual": ((2, 4, 5, 8), (2, 4, 6, 8), (2, 4, 6, 8)),
    "without an axis of heads": ((4, 5, 8), (4, 6, 8), (4, 6, 8)),
    "two axes": ((5, 8), (6, 8), (6, 8)),
    "five axes": ((2, 3, 4, 5, 8), (2, 3, 4, 6, 8), (2, 3, 4, 6, 8)),
    "six axes": ((2, 1, 3, 4, 5, 8), (2, 2, 3, 4, 6, 8), (2, 2, 1, 4, 6, 9)),
    "value dim": ((2, 4, 5, 8), (2, 4, 6, 8), (2, 4, 6, 3)),
    "one dim": ((2, 4, 5, 1), (2, 4, 6, 1), (2, 4, 6, 1)),
    "many dims": ((1, 2, 5, 300), (1, 2, 6, 300), (1, 2, 6, 300)),
    "batch of the query 1": ((1, 4, 5, 8), (2, 4, 6, 8), (2, 4, 6, 8)),
    "batch of key and value 1": ((2, 4, 5, 8), (1, 4, 6, 8), (1, 4, 6, 8)),
    "batch of the key 1": ((2, 4, 5, 8), (1, 4, 6, 8), (2, 4, 6, 8)),
    "batch of the value alone": ((1, 4, 5, 8), (1, 4, 6, 8), (2, 4, 6, 8)),
    "heads of the query 1": ((2, 1, 5, 8), (2, 4, 6, 8), (2, 4, 6, 8)),
    "heads of key and value 1": ((2, 4, 5, 8), (2, 1, 6, 8), (2, 1, 6, 8)),
    "heads of the key 1": ((2, 4, 5, 8), (2, 1, 6, 8), (2, 4, 6, 8)),
    "ranks 3 and 4": ((4, 5, 8), (2, 4, 6, 8), (2, 4, 6, 8)),
    "ranks 4 and 3": ((2, 4, 5, 8), (4, 6, 8), (4, 6, 8)),
    "ranks 2 and 4": ((5, 8), (2, 4, 6, 8), (2, 4, 6, 8)),
    "ranks 4 and 2": ((2, 4, 5, 8), (6, 8), (6, 8)),
    "ranks 3 and 2": ((4, 5, 8), (6, 8), (6, 8)),
    "no keys": ((2, 4, 5, 8), (2, 4, 0, 8), (2, 4, 0, 8)),
    "no queries": ((2, 4, 0, 8), (2, 4, 6, 8), (2, 4, 6, 8)),
    "no batch": ((0, 4, 5, 8), (0, 4, 6, 8), (0, 4, 6, 8)),
    "no heads": ((2, 0, 5, 8), (2, 0, 6, 8), (2, 0, 6, 8)),
    "no dim": ((2, 4, 5, 0), (2, 4, 6, 0), (2, 4, 6, 8)),
    "no value dim": ((2, 4, 5, 8), (2, 4, 6, 8), (2, 4, 6, 0)),
    "no keys, three axes": ((4, 5, 8), (4, 0, 8), (4, 0, 8)),
}
GROUPED = {
    "8 on 2": ((2, 8, 5, 8), (2, 2, 6, 8), (2, 2, 6, 8)),
    "8 on 1": ((2, 8, 5, 8), (2, 1, 6, 8), (2, 1, 6, 8)),
    "8 on 8": ((2, 8, 5, 8), (2, 8, 6, 8), (2, 8, 6, 8)),
    "8 on 2 and 4": ((2, 8, 5, 8), (2, 2, 6, 8), (2, 4, 6, 8)),
    "8 on 8 and 2": ((2, 8, 5, 8), (2, 8, 6, 8), (2, 2, 6, 8)),
    "three axes": ((8, 5, 8), (2, 6, 8), (2, 6, 8)),
    "five axes": ((2, 3, 8, 5, 8), (2, 3, 2, 6, 8), (2, 3, 2, 6, 8)),
    "batch of keys 1": ((2, 8, 5, 8), (1, 2, 6, 8), (1, 2, 6, 8)),
    "ranks 3 and 4": ((8, 5, 8), (2, 2, 6, 8), (2, 2, 6, 8)),
    "none on 2": ((2, 0, 5, 8), (2, 2, 6, 8), (2, 2, 6, 8)),
}


@pytest.mark.usefixtures("only_ours")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_any_shape(shape, causal):
    same(tensors(*SHAPES[shape]), is_causal=causal)
    same(tensors(*SHAPES[shape], grad=False), is_causal=causal)


@pytest.mark.usefixtures("only_ours")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", GROUPED)
def test_groups_of_heads(shape, causal):
    same(tensors(*GROUPED[shape]), is_causal=causal, enable_gqa=True)


@pytest.mark.usefixtures("only_ours")
@pytest.mark.parametrize("dtype", CAPS, ids=str)
def test_any_dtype(dtype):
    same(tensors(*SHAPES["usual"], dtype=dtype), is_causal=True)
    same(tensors(*SHAPES["usual"], dtype=dtype), attn_mask=torch.randn(5, 6).requires_grad_())
    same(tensors(*SHAPES["usual"], dtype=dtype), attn_mask=torch.randn(2, 1, 5, 6).to(dtype))


MASKS = [(5, 6), (1, 6), (5, 1), (1, 1), (4, 5, 6), (1, 5, 6), (2, 4, 5, 6), (2, 1, 1, 6), (1, 4, 5, 1)]


@pytest.mark.usefixtures("only_ours")
@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_any_mask(shape):
    given, made = tensors(*SHAPES["usual"]), torch.Generator().manual_seed(2)
    same(given, attn_mask=torch.rand(shape, generator=made) < 0.6)
    numbers = torch.randn(shape, generator=made, dtype=torch.float64)
    same(given, attn_mask=numbers)
    same(given, attn_mask=numbers.clone().requires_grad_())
    same([x.detach() for x in given], attn_mask=numbers.clone().requires_grad_())
    same(given, attn_mask=numbers.masked_fill(torch.rand(shape, generator=made) < 0.4, -torch.inf))


@pytest.mark.usefixtures("only_ours")
@pytest.mark.parametrize("shape", [(), (6,), (1,), (5, 6)], ids=str)
def test_masks_of_few_axes(shape):
    """torch takes these where its unfused road runs."""
    for rank in ("two axes", "without an axis of heads"):
        same(tensors(*SHAPES[rank]), attn_mask=torch.randn(shape, dtype=torch.float64))


@pytest.mark.usefixtures("only_ours")
@pytest.mark.parametrize("dtype", CAPS, ids=str)
@pytest.mark.parametrize("kind", ["boolean", "-inf", "least"])
def test_a_row_that_sees_nothing(kind, dtype):
    hidden = torch.zeros(5, 6, dtype=torch.bool)
    hidden[2] = True
    mask = ~hidden
    if kind != "boolean":
        fill = -math.inf if kind == "-inf" else torch.finfo(dtype).min
        mask = torch.zeros(5, 6, dtype=dtype).masked_fill(hidden, fill)
    # In a row of the least number alone torch's fused backward takes weights of 1, not 1/6.
    same(tensors(*SHAPES["usual"], dtype=dtype), unfused if kind == "least" else theirs, attn_mask=mask)
    same(tensors(*SHAPES["usual"], dtype=dtype, grad=False), attn_mask=mask)


@pytest.mark.usefixtures("only_ours")
def test_a_mask_and_is_causal_are_both_heeded():
    mask = torch.rand(5, 6, generator=torch.Generator().manual_seed(3)) < 0.6
    same(tensors(*SHAPES["usual"]), attn_mask=mask, is_causal=True)
    same(tensors(*SHAPES["usual"]), attn_mask=torch.randn(5, 6, dtype=torch.float64), is_causal=True)


@pytest.mark.usefixtures("only_ours")
@pytest.mark.parametrize("scale", [0.0, 0, 1, -0.5, 30.0, True, torch.tensor(0.5), np.float32(0.25)], ids=repr)
def test_any_scale(scale):
    same(tensors(*SHAPES["usual"]), scale=scale)
    same(tensors(*SHAPES["usual"]), unfused, scale=scale, is_causal=True)  # fused, a scale of 0 turns -inf into NaN


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_is_not_done_here_goes_to_torch():
    query, key, value = tensors(*SHAPES["usual"], dtype=torch.float32, grad=False)
    for scale in (math.inf, -math.inf, math.nan):
        found, wanted = (f(query, key, value, scale=scale) for f in (scaled_dot_product_attention, theirs))
        assert torch.equal(found.isnan(), wanted.isnan())
    bias = causal_lower_right(5, 6)
    found, wanted = (f(query, key, value, bias) for f in (scaled_dot_product_attention, theirs))
    assert torch.equal(found, wanted)
    assert scaled_dot_product_attention(query.to("meta"), key.to("meta"), value.to("meta")).device.type == "meta"
    nested = torch.nested.nested_tensor([x.transpose(0, 1) for x in query], layout=torch.jagged).transpose(1, 2)
    found, wanted = (f(nested, nested, nested) for f in (scaled_dot_product_attention, theirs))
    assert torch.equal(found.values(), wanted.values())
    sparse = query[0, 0].to_sparse()
    found, wanted = (f(sparse, key[0, 0], value[0, 0]) for f in (scaled_dot_product_attention, theirs))
    assert torch.equal(found, wanted)


def test_hidden_nan_has_no_effect_and_a_visible_one_stays_in_its_row():
    query, key, value = tensors((1, 2, 5, 8), (1, 2, 6, 8), (1, 2, 6, 8), grad=False)
    clean = scaled_dot_product_attention(query, key, value, is_causal=True)
    key[..., 5, :], value[..., 5, :] = torch.nan, torch.inf
    assert torch.equal(scaled_dot_product_attention(query, key, value, is_causal=True), clean)
    query[0, 0, 3, 1], value[0, 1, 4, 0] = torch.nan, torch.nan
    found = scaled_dot_product_attention(query, key, value, is_causal=True).isnan()
    wanted = torch.zeros_like(found)
    wanted[0, 0, 3], wanted[0, 1, 4, 0] = True, True
    assert torch.equal(found, wanted)


def test_nan_in_a_mask_is_that_of_its_row():
    given, mask = tensors(*SHAPES["usual"], grad=False), torch.zeros(5, 6, dtype=torch.float64)
    mask[1, 2] = torch.nan
    found, wanted = (f(*given, mask) for f in (scaled_dot_product_attention, theirs))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-13, equal_nan=True)
    assert found.isnan().any()


def shaped(*shapes, **options):
    return tensors(*shapes, dtype=torch.float32, grad=False), options


QUERY, KEY = SHAPES["usual"][:2]
REFUSED = {
    "one axis": (shaped((8,), (6, 8), (6, 8)), "two axes or more"),
    "dims": (shaped(QUERY, (2, 4, 6, 9), KEY), "query has dim 8 and key has dim 9"),
    "tokens": (shaped((4, 5, 8), (4, 6, 8), (4, 7, 8)), "key has 6 tokens and value has 7"),
    "batch": (shaped(QUERY, (3, 4, 6, 8), (3, 4, 6, 8)), "leading axes do not broadcast"),
    "heads": (shaped((2, 8, 5, 8), (2, 2, 6, 8), (2, 2, 6, 8)), "enable_gqa=True"),
    "groups": (shaped((2, 8, 5, 8), (2, 3, 6, 8), (2, 3, 6, 8), enable_gqa=True), "8 is not a multiple of 3"),
    "groups of the value": (shaped((2, 8, 5, 8), (2, 2, 6, 8), (2, 3, 6, 8), enable_gqa=True), "value has 3 heads"),
    "groups the other way": (shaped((2, 2, 5, 8), (2, 8, 6, 8), (2, 8, 6, 8), enable_gqa=True), "not a multiple"),
    "no axis of heads": (shaped((5, 8), (6, 8), (6, 8), enable_gqa=True), "axis of heads"),
    "mask of a wrong size": (shaped(QUERY, KEY, KEY, attn_mask=torch.ones(5, 7)), r"attn_mask has shape \(5, 7\)"),
    "mask of more axes": (shaped(QUERY, KEY, KEY, attn_mask=torch.ones(1, 2, 4, 5, 6)), "does not broadcast"),
    "mask of more heads": (shaped((2, 5, 8), (2, 6, 8), (2, 6, 8), attn_mask=torch.ones(4, 5, 6)), "broadcast"),
    "mask of integers": (shaped(QUERY, KEY, KEY, attn_mask=torch.ones(5, 6, dtype=torch.int64)), "torch.int64"),
    "mask of float64": (shaped(QUERY, KEY, KEY, attn_mask=torch.ones(5, 6, dtype=torch.float64)), "torch.float64"),
    "mask of bfloat16": (shaped(QUERY, KEY, KEY, attn_mask=torch.ones(5, 6, dtype=torch.bfloat16)), "torch.bfloat16"),
    "dropout below": (shaped(QUERY, KEY, KEY, dropout_p=-0.1), "dropout_p is a probability"),
    "dropout above": (shaped(QUERY, KEY, KEY, dropout_p=1.5), "dropout_p is a probability"),
    "dropout nan": (shaped(QUERY, KEY, KEY, dropout_p=math.nan), "dropout_p is a probability"),
    "dropout of letters": (shaped(QUERY, KEY, KEY, dropout_p="x"), "dropout_p"),
    "causal of a number": (shaped(QUERY, KEY, KEY, is_causal=1), "is_causal"),
    "groups of a number": (shaped(QUERY, KEY, KEY, enable_gqa=1), "enable_gqa"),
    "scale of letters": (shaped(QUERY, KEY, KEY, scale="x"), "scale"),
    "scale of a learned number": (shaped(QUERY, KEY, KEY, scale=torch.tensor(0.5, requires_grad=True)), "scale"),
    "scale of two numbers": (shaped(QUERY, KEY, KEY, scale=torch.ones(2)), "scale"),
    "mask of a list": (shaped(QUERY, KEY, KEY, attn_mask=[[0.0] * 6] * 5), "attn_mask"),
    "unknown": (shaped(QUERY, KEY, KEY, bias=torch.ones(5, 6)), "bias"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_torch_refuses_is_refused(case):
    (given, options), words = REFUSED[case]
    with pytest.raises((RuntimeError, TypeError, IndexError)) as refused:
        theirs(*given, **options)
    with pytest.raises(refused.type, match=words):
        scaled_dot_product_attention(*given, **options)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_dtypes_must_agree(place):
    given, _ = shaped(QUERY, KEY, KEY)
    given[place] = given[place].double()
    for function, words in ((theirs, "same dtype"), (scaled_dot_product_attention, r"torch.float64.*they must agree|")):
        with pytest.raises(RuntimeError, match=words):
            function(*given)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_other_dtypes_are_refused_as_by_torch(dtype):
    given = [x.to(dtype) for x in shaped(QUERY, KEY, KEY)[0]]
    with pytest.raises(RuntimeError) as refused:
        theirs(*given)
    with pytest.raises(refused.type):
        scaled_dot_product_attention(*given)


def test_keys_and_values_of_different_lengths_are_refused_where_torch_reads_past_the_end():
    given, _ = shaped(QUERY, KEY, (2, 4, 7, 8))
    with pytest.raises(RuntimeError, match="key has 6 tokens and value has 7"):
        scaled_dot_product_attention(*given)


def test_what_is_no_tensor_is_refused():
    query, key, value = shaped(QUERY, KEY, KEY)[0]
    for given in ((query.numpy(), key, value), (query, None, value), (query, key, [1.0])):
        with pytest.raises(TypeError, match="must be Tensor"):
            scaled_dot_product_attention(*given)
    with pytest.raises(TypeError, match="positional"):
        scaled_dot_product_attention(query, key, value, None, 0.0, False, 0.5)


@pytest.mark.parametrize("masked", [False, True])
def test_autocast_is_as_for_torch(masked):
    given = tensors(*SHAPES["usual"], dtype=torch.float32)
    mask = torch.randn(5, 6).requires_grad_() if masked else None
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = (f(*given, mask) for f in (scaled_dot_product_attention, theirs))
        mixed = scaled_dot_product_attention(given[0], given[1].half(), given[2].bfloat16())
    assert found.dtype == wanted.dtype == mixed.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted, rtol=0, atol=CAPS[torch.bfloat16])
    learned = [*given, mask] if masked else given
    for got, expected in zip(*(torch.autograd.grad(o.float().sum(), learned) for o in (found, wanted)), strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, expected, rtol=0, atol=0.2)


def test_dropout_is_that_of_the_generator_and_keeps_the_mean():
    query, key, value = tensors((2, 4, 16, 8), (2, 4, 64, 8), (2, 4, 64, 8), dtype=torch.float32)
    made = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        output = scaled_dot_product_attention(query, key, value, dropout_p=0.25)
        made.append((output, *torch.autograd.grad(output.sum(), (query, key, value))))
    assert all(torch.equal(one, other) for one, other in zip(made[0], made[1], strict=True))
    assert not torch.equal(made[0][0], made[2][0])
    ones = torch.ones_like(value)
    sums = scaled_dot_product_attention(query, key, ones, dropout_p=0.25)
    assert abs(sums.mean().item() - 1) < 0.02
    assert not scaled_dot_product_attention(query, key, value, dropout_p=1.0).any()


def test_views_that_torch_negates_later_are_negated():
    query, key, value = tensors(*SHAPES["usual"], grad=False)
    same([torch._neg_view(query), torch._neg_view(key), value])


@pytest.mark.parametrize("masked", [False, True])
def test_compiled_it_is_one_graph(masked):
    given = tensors(*SHAPES["usual"])
    mask = torch.randn(5, 6, dtype=torch.float64) if masked else None

    def call(query, key, value):
        return scaled_dot_product_attention(query, key, value, mask, is_causal=not masked, scale=0.3)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    found, wanted = compiled(*given), call(*given)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-14)
    both = (torch.autograd.grad(output.sum(), given) for output in (found, wanted))
    for got, expected in zip(*both, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-13)


def test_an_exported_program_has_the_operator():
    class Module(torch.nn.Module):
        def forward(self, query, key, value):
            return scaled_dot_product_attention(query, key, value, is_causal=True)

    given = tuple(tensors(*SHAPES["usual"], grad=False))
    program = torch.export.export(Module(), given)
    assert any("clearhead.attend" in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(*given), theirs(*given, is_causal=True), rtol=0, atol=1e-13)
