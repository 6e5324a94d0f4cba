"""MultiHeadAttention: the definition, gradients of every parameter, torch's modes, and what is refused."""

import copy
import pickle

import pytest
import torch

import clearhead as ch
from clearhead.torch import MultiHeadAttention
from clearhead.torch.modules.rotary import rotated


def dense(layer, query, key=None, value=None, hidden=None, positions=None):
    """The definition, with whole matrices; ``hidden``: True where the mask hides."""
    key = query if key is None else key
    value = key if value is None else value
    heads = []
    for projection, x in ((layer.q_proj, query), (layer.k_proj, key), (layer.v_proj, value)):
        heads.append(projection(x).unflatten(-1, (-1, layer.head_dim)).transpose(-3, -2))
    q, k, v = heads
    if layer.rotary:
        q, k = (rotated(x, torch.arange(x.shape[-2]) if positions is None else positions, layer.rotary) for x in (q, k))
    group = layer.num_heads // layer.key_heads
    k, v = k.repeat_interleave(group, dim=-3), v.repeat_interleave(group, dim=-3)
    score = q @ k.mT / layer.head_dim**0.5
    if hidden is not None:
        score = score.masked_fill(hidden, -torch.inf)
    weights = score.softmax(-1)
    return layer.out_proj((weights @ v).transpose(-3, -2).flatten(-2)), weights


def seeded(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


def later(queries, keys):
    return torch.ones(queries, keys, dtype=torch.bool).triu(1)


MADE = {
    "plain": {},
    "groups": {"key_heads": 2},
    "one key head": {"key_heads": 1, "bias": False},
    "own dim": {"head_dim": 6},
    "rotary": {"rotary": 100.0, "key_heads": 2},
}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("causal", [False, True])
def test_it_is_the_definition(made, causal):
    layer, x = MultiHeadAttention(16, 4, **MADE[made], dtype=torch.float64), seeded(3, 7, 16)
    output, weights = layer(x, mask=ch.masks.causal() if causal else None, return_weights=True)
    wanted, right = dense(layer, x, hidden=later(7, 7) if causal else None)
    torch.testing.assert_close(output, wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.from_numpy(weights[:]), right, rtol=0, atol=1e-12)


def test_across_with_dims_of_their_own():
    layer = MultiHeadAttention(16, 4, kdim=5, vdim=9, dtype=torch.float64)
    query, key, value = seeded(2, 3, 16), seeded(2, 8, 5), seeded(2, 8, 9)
    padded = torch.arange(8) >= torch.tensor([8, 5])[:, None, None, None]
    wanted, _ = dense(layer, query, key, value, padded)
    torch.testing.assert_close(layer(query, key, value, mask=ch.masks.lengths([8, 5])), wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(layer(query, key, value, mask=~padded), wanted, rtol=0, atol=1e-12)
    numbers = torch.zeros(padded.shape, dtype=torch.float64).masked_fill(padded, -torch.inf)
    torch.testing.assert_close(layer(query, key, value, mask=numbers), wanted, rtol=0, atol=1e-12)


def test_one_text_needs_no_batch():
    layer, x = MultiHeadAttention(16, 4, rotary=10.0), seeded(7, 16, dtype=torch.float32)
    torch.testing.assert_close(layer(x), layer(x[None])[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("made", MADE)
def test_gradients_of_every_parameter_agree_with_finite_differences(made):
    layer, x = MultiHeadAttention(8, 4, **MADE[made], dtype=torch.float64), seeded(2, 3, 8).requires_grad_()
    names, values = zip(*layer.named_parameters(), strict=True)

    def run(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), x, {"mask": ch.masks.causal()})

    assert torch.autograd.gradcheck(run, (x, *values))


def test_parts_of_the_score_have_gradients_too():
    layer, x = MultiHeadAttention(8, 2, dtype=torch.float64), seeded(2, 3, 8)
    sinks, bias = seeded(2).requires_grad_(), seeded(3, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda sinks, bias: layer(x, sinks=sinks, bias=bias, softcap=2.0), (sinks, bias))


def test_a_row_that_sees_nothing_is_the_bias_of_the_last_projection():
    layer, x = MultiHeadAttention(8, 2), seeded(2, 3, 8, dtype=torch.float32)
    torch.nn.init.normal_(layer.out_proj.bias)
    output = layer(x, mask=ch.masks.lengths([0, 3]))
    assert torch.equal(output[0], layer.out_proj.bias.expand(3, 8))
    output.sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_positions_are_those_given():
    layer, x = MultiHeadAttention(16, 4, rotary=10.0, dtype=torch.float64), seeded(2, 5, 16)
    positions = torch.tensor([[0, 1, 2, 3, 4], [0, 0, 0, 1, 2]])
    wanted, _ = dense(layer, x, positions=positions)
    torch.testing.assert_close(layer(x, positions=positions), wanted, rtol=0, atol=1e-12)
    whole = layer(x, mask=ch.masks.causal())
    last = layer(
        x[:, 3:], x, positions=torch.tensor([3, 4]), key_positions=torch.arange(5), mask=ch.masks.causal("end")
    )
    torch.testing.assert_close(last, whole[:, 3:], rtol=0, atol=1e-12)


def test_state_goes_and_comes_back():
    one, other = (MultiHeadAttention(16, 4, key_heads=2) for _ in range(2))
    x = seeded(2, 5, 16, dtype=torch.float32)
    assert not torch.equal(one(x), other(x))
    assert [*one.state_dict()] == [f"{p}_proj.{n}" for p in ("q", "k", "v", "out") for n in ("weight", "bias")]
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(x), other(x))


@pytest.mark.parametrize(
    "made", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))], ids=["copy", "pickle"]
)
def test_copies_are_the_same_and_apart(made):
    layer, x = MultiHeadAttention(16, 4, rotary=10.0), seeded(2, 5, 16, dtype=torch.float32)
    copied = made(layer)
    assert torch.equal(copied(x), layer(x))
    with torch.no_grad():
        copied.v_proj.weight.zero_()
    assert not torch.equal(copied(x), layer(x))


MASKS = {
    "none": lambda: None,
    "causal": lambda: ch.masks.causal(),
    "lengths": lambda: ch.masks.lengths([5, 3]),
    "boolean": lambda: torch.arange(5) < torch.tensor([5, 3])[:, None, None, None],
    "numbers": lambda: seeded(2, 1, 5, 5, dtype=torch.float32),
}


@pytest.mark.parametrize("mask", MASKS)
def test_compiled_it_is_one_graph_with_the_same_numbers(mask):
    layer, x, mask = (
        MultiHeadAttention(16, 4, key_heads=2, rotary=10.0),
        seeded(2, 5, 16, dtype=torch.float32),
        MASKS[mask](),
    )
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    ours, wanted = compiled(x, mask=mask), layer(x, mask=mask)
    torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-6)
    found = torch.autograd.grad(ours.square().sum(), [*layer.parameters()])
    for got, right in zip(found, torch.autograd.grad(wanted.square().sum(), [*layer.parameters()]), strict=True):
        torch.testing.assert_close(got, right, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_computes_in_its_dtype_and_learns_in_float32(dtype):
    layer, x = MultiHeadAttention(16, 4, rotary=10.0), seeded(2, 5, 16, dtype=torch.float32)
    with torch.autocast("cpu", dtype):
        output = layer(x, mask=ch.masks.causal())
    assert output.dtype == dtype
    torch.testing.assert_close(output.float(), layer(x, mask=ch.masks.causal()), rtol=0, atol=2e-2)
    output.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())


def test_weights_are_dropped_while_training_alone():
    layer, x = MultiHeadAttention(16, 4, dropout=0.5), seeded(2, 5, 16, dtype=torch.float32)
    plain = dense(layer, x)[0]
    assert not torch.allclose(layer(x), plain, atol=1e-3)
    torch.testing.assert_close(layer.eval()(x), plain, rtol=0, atol=1e-6)


def test_parameters_are_made_where_and_as_asked():
    layer = MultiHeadAttention(16, 4, device="meta", dtype=torch.float16)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.float16)}


def test_parameters_are_drawn_as_those_of_torch():
    torch.manual_seed(3)
    ours = MultiHeadAttention(32, 4)
    bound = (6 / 64) ** 0.5
    for projection in (ours.q_proj, ours.k_proj, ours.v_proj):
        assert 0.95 * bound < projection.weight.abs().max() <= bound
    assert all(not p.any() for name, p in ours.named_parameters() if name.endswith("bias"))
    before = ours.q_proj.weight.clone()
    ours.reset_parameters()
    assert not torch.equal(ours.q_proj.weight, before)


def test_it_says_what_it_is():
    shown = repr(MultiHeadAttention(16, 4, key_heads=2, rotary=10_000.0, dropout=0.1))
    assert "16, 4, key_heads=2, dropout=0.1, rotary=10000.0" in shown


@pytest.mark.parametrize(
    ("made", "error", "words"),
    [
        ({"embed_dim": 0}, ValueError, "embed_dim must be 1 or more, got 0"),
        ({"num_heads": 2.0}, TypeError, "num_heads must be a whole number, got 2.0"),
        ({"num_heads": 3}, ValueError, "embed_dim is 16, which is not a multiple of num_heads = 3: say head_dim"),
        ({"key_heads": 3}, ValueError, "num_heads is 4, which is not a multiple of key_heads = 3"),
        ({"dropout": 1.5}, ValueError, "dropout is a probability, between 0 and 1, got 1.5"),
        ({"rotary": True}, ValueError, "rotary is the base of the angles"),
        ({"rotary": -1.0}, ValueError, "rotary is the base of the angles"),
        ({"rotary": 10.0, "head_dim": 5}, ValueError, "head_dim is 5: it must be even"),
    ],
)
def test_what_cannot_be_made_is_refused(made, error, words):
    with pytest.raises(error, match=words):
        MultiHeadAttention(**{"embed_dim": 16, "num_heads": 4, **made})


X = torch.zeros(2, 5, 16)


@pytest.mark.parametrize(
    ("options", "given", "error", "words"),
    [
        ({}, {"query": X.numpy()}, TypeError, "query is ndarray"),
        ({}, {"query": X[..., :3]}, ValueError, r"query has shape \(2, 5, 3\), it must be \(..., tokens, 16\)"),
        ({}, {"query": X.double()}, TypeError, "query has dtype torch.float64 and the module's"),
        ({}, {"query": X, "value": X}, ValueError, "value was given without key"),
        ({}, {"query": X, "key": X[..., :3]}, ValueError, r"key has shape \(2, 5, 3\)"),
        ({"vdim": 3}, {"query": X, "key": X}, ValueError, r"value has shape .* vdim is 3"),
        ({"kdim": 3}, {"query": X}, ValueError, "query came alone, and this module has embed_dim 16, kdim 3"),
        ({}, {"query": X, "key": X, "value": X[:, :4]}, ValueError, "key has 5 tokens and value has 4"),
        ({}, {"query": X, "mask": [True]}, TypeError, "mask must be a tensor or made by clearhead.masks"),
        ({}, {"query": X, "positions": torch.arange(5)}, ValueError, "made without rotary"),
        ({"rotary": 9.0}, {"query": X, "positions": torch.arange(4)}, ValueError, r"positions has shape \(4,\)"),
        ({"rotary": 9.0}, {"query": X, "positions": torch.rand(5)}, TypeError, "positions must hold whole numbers"),
        ({"rotary": 9.0}, {"query": X, "key": X[:, :4]}, ValueError, "where they stand was not said"),
        ({}, {"query": X, "cache": []}, TypeError, "cache is list"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(options, given, error, words):
    with pytest.raises(error, match=words):
        MultiHeadAttention(16, 4, **options)(**given)
