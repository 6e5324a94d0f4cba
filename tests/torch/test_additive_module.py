"""AdditiveAttention: Bahdanau's definition and Keras's, gradients of every parameter, and what is refused."""

import copy
import pickle

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.torch import AdditiveAttention


def seeded(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def dense(layer, query, key, value, seen=None):
    """e_ij = v . tanh(W_q q_i + W_k k_j + b), as the paper has it, with everything in memory."""
    asked = query if layer.query_weight is None else query @ layer.query_weight
    offered = key if layer.key_weight is None else key @ layer.key_weight
    hidden = asked[..., :, None, :] + offered[..., None, :, :]
    hidden = torch.tanh(hidden if layer.bias is None else hidden + layer.bias)
    energy = hidden.sum(-1) if layer.vector is None else hidden @ layer.vector
    if seen is not None:
        energy = energy.masked_fill(~seen, -torch.inf)
    weights = energy.softmax(-1)
    return weights @ value, weights


MADE = {
    "plain": {},
    "bias": {"bias": True},
    "no projections": {"project": False, "key_dim": 4, "hidden_dim": 4},
    "no vector": {"learn_vector": False},
    "nothing learned": {"project": False, "learn_vector": False, "key_dim": 4, "hidden_dim": 4},
}


def make(made, **options):
    layer = AdditiveAttention(4, **{"key_dim": 5, "hidden_dim": 3, **MADE[made]}, **options)
    if layer.bias is not None:
        torch.nn.init.normal_(layer.bias)
    return layer


@pytest.mark.parametrize("made", MADE)
def test_it_is_the_definition(made):
    layer = make(made, dtype=torch.float64)
    query, key, value = seeded(2, 6, 4), seeded(2, 9, layer.key_dim), seeded(2, 9, 7)
    seen = torch.arange(9) < torch.tensor([9, 4])[:, None, None]
    output, weights = layer(query, key, value, lengths=torch.tensor([9, 4]), return_weights=True)
    wanted, right = dense(layer, query, key, value, seen)
    torch.testing.assert_close(output, wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.from_numpy(weights[:, 0]), right.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(layer(query, key, value, lengths=[9, 4]), output, rtol=0, atol=0)  # either way


@pytest.mark.parametrize("made", MADE)
def test_gradients_of_every_parameter_agree_with_finite_differences(made):
    layer = make(made, dtype=torch.float64)
    query, key = seeded(2, 3, 4).requires_grad_(), seeded(2, 4, layer.key_dim).requires_grad_()
    names, values = zip(*layer.named_parameters(), strict=True) if [*layer.parameters()] else ((), ())

    def run(query, key, *values):
        parameters = dict(zip(names, values, strict=True))
        return torch.func.functional_call(layer, parameters, (query, key), {"lengths": [4, 2]})

    assert torch.autograd.gradcheck(run, (query, key, *values))


def test_masks_of_every_sort_join_the_lengths():
    layer = make("plain", dtype=torch.float64)
    query, key = seeded(2, 6, 4), seeded(2, 6, 5)
    past = torch.ones(6, 6, dtype=torch.bool).tril()
    seen = past & (torch.arange(6) < torch.tensor([6, 3])[:, None, None])
    wanted, _ = dense(layer, query, key, key, seen)
    numbers = torch.zeros(6, 6, dtype=torch.float64).masked_fill(~past, -torch.inf)
    for mask in (ch.masks.causal(), past, numbers):
        torch.testing.assert_close(layer(query, key, mask=mask, lengths=[6, 3]), wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(layer(query, key, mask=seen[:, None]), wanted, rtol=0, atol=1e-12)


def test_a_sentence_alone_is_the_sentence_in_a_batch():
    layer = make("plain", dtype=torch.float64)
    query, key = seeded(2, 3, 4), seeded(2, 8, 5)
    batch = layer(query, key, lengths=[8, 5])
    torch.testing.assert_close(batch[1], layer(query[1], key[1, :5]), rtol=0, atol=1e-14)
    torch.testing.assert_close(batch[1], layer(query[1], key[1], lengths=5), rtol=0, atol=1e-14)


def test_no_words_at_all_give_zeros_and_no_nan():
    layer = make("bias")
    query, key = seeded(2, 3, 4, dtype=torch.float32), seeded(2, 8, 5, dtype=torch.float32).requires_grad_()
    output = layer(query, key, lengths=[0, 8])
    assert not output[0].any()
    output.sum().backward()
    assert not key.grad[0].any()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def numpy_keras(query, value, key, scale, value_mask=None, causal=False):
    """keras.layers.AdditiveAttention by its documentation: reduce_sum(scale * tanh(query + key), axis=-1)."""
    scores = np.sum(scale * np.tanh(query[:, :, None, :] + key[:, None, :, :]), axis=-1)
    visible = np.ones(scores.shape, bool) if value_mask is None else np.broadcast_to(value_mask[:, None], scores.shape)
    if causal:
        visible = visible & np.tril(np.ones(scores.shape[1:], bool))
    scores = np.where(visible, scores, scores - 1e9)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights @ value, weights


@pytest.mark.parametrize("use_scale", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_weights_of_keras_give_what_keras_gives(use_scale, causal):
    query, value, key = (seeded(2, n, 4).numpy() for n in (5, 8, 8))
    key = key[:, ::-1].copy()
    scale, real = np.linspace(-1, 2, 4), np.arange(8) < np.array([[8], [3]])
    layer = AdditiveAttention.from_keras([scale] if use_scale else [], 4, use_scale=use_scale)
    wanted, right = numpy_keras(query, value, key, scale if use_scale else 1.0, real, causal)
    mask = ch.masks.array(real[:, None, None])
    mask = mask & ch.masks.causal(align="start") if causal else mask
    output, weights = layer(*map(torch.from_numpy, (query, key, value)), mask=mask, return_weights=True)
    np.testing.assert_allclose(output.detach().numpy(), wanted, rtol=0, atol=1e-12)
    np.testing.assert_allclose(weights[:, 0], right, rtol=0, atol=1e-12)
    without = layer(*map(torch.from_numpy, (query, key, value)), mask=mask)
    assert torch.equal(without, output)  # whether weights are asked for changes nothing
    assert [p.shape for p in layer.parameters()] == ([(4,)] if use_scale else [])


def test_state_copies_and_pickles():
    one, other = make("bias"), make("bias")
    query, key = seeded(2, 3, 4, dtype=torch.float32), seeded(2, 8, 5, dtype=torch.float32)
    assert not torch.equal(one(query, key), other(query, key))
    other.load_state_dict(one.state_dict())
    for same in (other, copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert torch.equal(one(query, key), same(query, key))


@pytest.mark.parametrize("made", MADE)
def test_autocast_computes_in_its_dtype(made):
    layer = make(made)
    query, key = (seeded(2, n, d, dtype=torch.float32).requires_grad_() for n, d in ((3, 4), (8, layer.key_dim)))
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(query, key)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), layer(query, key), rtol=0, atol=3e-2)
    output.float().sum().backward()
    assert {p.grad.dtype for p in (query, key, *layer.parameters())} == {torch.float32}


def test_weights_are_dropped_while_training_alone():
    layer = make("plain", dtype=torch.float64, dropout=0.5)
    query, key = seeded(2, 6, 4), seeded(2, 9, 5)
    wanted = dense(layer, query, key, key)[0]
    assert not torch.allclose(layer(query, key), wanted, atol=1e-3)
    torch.testing.assert_close(layer.eval()(query, key), wanted, rtol=0, atol=1e-12)


def test_parameters_are_made_where_and_as_asked_and_drawn_anew():
    layer = make("plain", device="meta", dtype=torch.float16)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.float16)}
    layer = make("bias")
    before = [p.clone() for p in layer.parameters()]
    layer.reset_parameters()
    assert not any(torch.equal(p, was) for p, was in zip(layer.parameters(), before, strict=True))
    assert repr(layer) == "AdditiveAttention(4, 5, 3, bias=True)"


Q, K = torch.zeros(2, 3, 4), torch.zeros(2, 8, 5)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: AdditiveAttention(0), ValueError, "query_dim must be 1 or more, got 0"),
        (lambda: AdditiveAttention(4, hidden_dim="3"), TypeError, "hidden_dim must be a whole number, got '3'"),
        (lambda: AdditiveAttention(4, 5, project=False), ValueError, "query_dim, key_dim, hidden_dim must be equal"),
        (lambda: AdditiveAttention(4, bias=True, project=False), ValueError, "that has no bias"),
        (lambda: AdditiveAttention(4, dropout=-1), ValueError, "dropout is a probability"),
        (lambda: AdditiveAttention.from_keras([], 4), ValueError, r"weights have shapes \[\].*scale \(4,\)"),
        (lambda: AdditiveAttention(4, 5)(Q.numpy(), K), TypeError, "query is ndarray"),
        (lambda: AdditiveAttention(4, 5)(Q, Q), ValueError, r"key has shape \(2, 3, 4\), it must be .* 5\)"),
        (lambda: AdditiveAttention(4, 5)(Q, K.double()), TypeError, "key has dtype torch.float64"),
        (lambda: AdditiveAttention(4, 5)(Q, K, K[:, :7]), ValueError, "key has 8 tokens and value has 7"),
        (
            lambda: AdditiveAttention(4, 5)(Q, K, lengths=[9, 1]),
            ValueError,
            r"lengths\(keys=...\) must lie between 0 and",
        ),
        (lambda: AdditiveAttention(4, 5)(Q, K, lengths=[8, 1, 1]), ValueError, r"lengths\(keys=...\) has shape \(3,\)"),
        (lambda: AdditiveAttention(4, 5)(Q, K, lengths=[1.5, 1.0]), TypeError, "must hold whole numbers"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(call, error, words):
    with pytest.raises(error, match=words):
        call()
