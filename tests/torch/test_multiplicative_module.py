"""MultiplicativeAttention: Luong's four scores in three windows, Keras's layer, gradients, and what is refused."""

import copy
import itertools
import pickle

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.torch import MultiplicativeAttention

SCORES = {
    "dot": {},
    "general": {"key_dim": 5},
    "concat": {"key_dim": 5, "hidden_dim": 3},
    "location": {"key_dim": 5, "max_keys": 12},
}
WINDOWS = ("global", "local-m", "local-p")
GRID = list(itertools.product(SCORES, WINDOWS))


def seeded(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def make(score, window, **options):
    reach = {} if window == "global" else {"reach": 2}
    return MultiplicativeAttention(4, score=score, window=window, **SCORES[score], **reach, **options)


def score_of(layer, query, key):
    """Equations 7 and 8."""
    match layer.score:
        case "dot":
            return query @ key.mT
        case "general":
            return query @ layer.matching.weight @ key.mT
        case "concat":
            shape = (*query.shape[:2], key.shape[1])
            pairs = torch.cat([query[:, :, None].expand(*shape, -1), key[:, None].expand(*shape, -1)], dim=-1)
            whole = torch.cat([layer.matching.query_weight, layer.matching.key_weight])
            return torch.tanh(pairs @ whole) @ layer.matching.vector
        case _:
            return (query @ layer.matching.weight.T)[..., : key.shape[1]]


def dense(layer, query, key, value, lengths, positions=None, more=None):
    """Sections 3.1 and 3.2, with whole matrices: the softmax over a window, then the Gaussian of equation 10."""
    source = torch.arange(key.shape[1])
    seen = source < lengths[:, None, None]
    factor = 1.0
    if layer.where == "local-m":
        place = torch.arange(query.shape[1]) if positions is None else positions
        seen = seen & ((source - place[..., None]).abs() <= layer.window.reach)
    if layer.where == "local-p":
        inside = torch.tanh(query @ layer.window.weight) @ layer.window.vector
        place = (lengths[:, None] * torch.sigmoid(inside))[..., None]
        deviation = layer.window.reach / 2
        seen = seen & ((source - place).abs() <= layer.window.reach)
        factor = torch.exp(-((source - place) ** 2) / (2 * deviation**2))
    score = layer.scale * score_of(layer, query, key)
    if more is not None:
        score = score + more
    weights = score.masked_fill(~seen, -torch.inf).softmax(-1) * factor
    return weights @ value, weights


@pytest.mark.parametrize(("score", "window"), GRID)
def test_it_is_the_definition(score, window):
    layer = make(score, window, dtype=torch.float64)
    query, key, value = seeded(2, 6, 4), seeded(2, 9, layer.key_dim), seeded(2, 9, 7)
    lengths = torch.tensor([9, 7])
    output, weights = layer(query, key, value, lengths=lengths, return_weights=True)
    wanted, right = dense(layer, query, key, value, lengths)
    torch.testing.assert_close(output, wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.from_numpy(weights[:, 0]), right.detach(), rtol=0, atol=1e-12)
    assert torch.equal(layer(query, key, value, lengths=lengths), output)


@pytest.mark.parametrize(("score", "window"), GRID)
def test_gradients_of_every_parameter_agree_with_finite_differences(score, window):
    layer = make(score, window, learn_scale=True, scale=0.7, dtype=torch.float64)
    query, key = seeded(2, 3, 4).requires_grad_(), seeded(2, 6, layer.key_dim).requires_grad_()
    names, values = zip(*layer.named_parameters(), strict=True)

    def run(query, key, *values):
        parameters = dict(zip(names, values, strict=True))
        return torch.func.functional_call(layer, parameters, (query, key), {"lengths": [6, 4]})

    assert torch.autograd.gradcheck(run, (query, key, *values))


@pytest.mark.parametrize("score", SCORES)
def test_the_place_of_local_p_learns(score):
    """Through the Gaussian alone, as the dense formula's: the window's edges have no gradient."""
    layer = make(score, "local-p", dtype=torch.float64)
    query, key = seeded(2, 6, 4), seeded(2, 9, layer.key_dim)
    lengths, grad = torch.tensor([9, 7]), seeded(2, 6, layer.key_dim)
    parameters = [*layer.parameters()]
    found = torch.autograd.grad(layer(query, key, lengths=lengths), parameters, grad)
    wanted = torch.autograd.grad(dense(layer, query, key, key, lengths)[0], parameters, grad)
    assert layer.window.vector.shape == (4,)
    for ours, right in zip(found, wanted, strict=True):
        assert right.any()
        torch.testing.assert_close(ours, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("score", "window"), GRID)
def test_more_masks_and_numbers_join(score, window):
    layer = make(score, window, dtype=torch.float64)
    query, key = seeded(2, 6, 4), seeded(2, 9, layer.key_dim)
    lengths, bias = torch.tensor([9, 7]), seeded(6, 9)
    wanted, right = dense(layer, query, key, key, lengths, more=bias)
    output, weights = layer(query, key, mask=bias, lengths=lengths, return_weights=True)
    torch.testing.assert_close(output, wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.from_numpy(weights[:, 0]), right.detach(), rtol=0, atol=1e-12)
    odd = torch.arange(9) % 2 == 1
    without = torch.zeros(9, dtype=torch.float64).masked_fill(~odd, -torch.inf)
    wanted, _ = dense(layer, query, key, key, lengths, more=without)
    wanted = wanted.nan_to_num()
    for mask in (odd, ch.masks.array(odd.numpy())):
        torch.testing.assert_close(layer(query, key, mask=mask, lengths=lengths), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("score", "window"), GRID)
def test_step_by_step_is_all_at_once(score, window):
    layer = make(score, window, dtype=torch.float64)
    query, key = seeded(2, 6, 4), seeded(2, 9, layer.key_dim)
    whole = layer(query, key, lengths=[9, 7])
    for t in range(6):
        said = {"positions": torch.tensor([t])} if window == "local-m" else {}
        step = layer(query[:, t : t + 1], key, lengths=[9, 7], **said)
        torch.testing.assert_close(step, whole[:, t : t + 1], rtol=0, atol=1e-13)


def test_positions_may_differ_in_a_batch():
    layer = make("dot", "local-m", dtype=torch.float64)
    query, key, positions = seeded(2, 3, 4), seeded(2, 9, 4), torch.tensor([[0, 1, 2], [8, 4, 0]])
    wanted, _ = dense(layer, query, key, key, torch.tensor([9, 9]), positions)
    torch.testing.assert_close(layer(query, key, positions=positions), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("score", "window"), GRID)
def test_a_sentence_alone_is_the_sentence_in_a_batch(score, window):
    layer = make(score, window, dtype=torch.float64)
    query, key = seeded(2, 3, 4), seeded(2, 8, layer.key_dim)
    batch = layer(query, key, lengths=[8, 5])
    torch.testing.assert_close(batch[1], layer(query[1], key[1, :5]), rtol=0, atol=1e-14)


@pytest.mark.parametrize(("score", "window"), GRID)
def test_no_words_at_all_give_zeros_and_no_nan(score, window):
    layer = make(score, window)
    query, key = (seeded(2, n, d, dtype=torch.float32).requires_grad_() for n, d in ((3, 4), (8, layer.key_dim)))
    output, weights = layer(query, key, lengths=[0, 8], return_weights=True)
    assert not output[0].any()
    assert not weights[0].any()
    output.sum().backward()
    assert not key.grad[0].any()
    assert all(p.grad.isfinite().all() for p in (query, *layer.parameters()))


@pytest.mark.parametrize("window", WINDOWS)
def test_nan_in_a_query_stays_in_its_row(window):
    layer = make("general", window)
    query, key = seeded(1, 3, 4, dtype=torch.float32), seeded(1, 8, 5, dtype=torch.float32)
    query[0, 1, 2] = torch.nan
    output = layer(query, key)
    assert output[0, 1].isnan().all()
    assert output[0, ::2].isfinite().all()


def test_a_window_of_the_paper_reaches_ten():
    assert "reach=10" in repr(MultiplicativeAttention(4, window="local-p"))


def numpy_keras(query, value, key, scale, weight, mode, value_mask, causal):
    """keras.layers.Attention by its documentation."""
    if mode == "dot":
        scores = scale * (query @ np.swapaxes(key, 1, 2))
    else:
        scores = weight * np.sum(np.tanh(scale * (query[:, :, None, :] + key[:, None, :, :])), axis=-1)
    visible = np.broadcast_to(value_mask[:, None], scores.shape)
    if causal:
        visible = visible & np.tril(np.ones(scores.shape[1:], bool))
    scores = np.where(visible, scores, scores - 1e9)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights @ value, weights


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("use_scale", [True, False])
@pytest.mark.parametrize("mode", ["dot", "concat"])
def test_weights_of_keras_give_what_keras_gives(mode, use_scale, causal):
    query, value, key = (seeded(2, n, 4).numpy() for n in (5, 8, 8))
    key = key[:, ::-1].copy()
    scale, weight, real = np.float64(0.6), np.float64(-1.3), np.arange(8) < np.array([[8], [3]])
    given = ([scale] if use_scale else []) + ([weight] if mode == "concat" else [])
    layer = MultiplicativeAttention.from_keras(given, 4, score_mode=mode, use_scale=use_scale).double()
    wanted, right = numpy_keras(query, value, key, scale if use_scale else 1.0, weight, mode, real, causal)
    mask = torch.from_numpy(real)[:, None, None, :]  # as docs say
    mask = ch.masks.array(mask.numpy()) & ch.masks.causal(align="start") if causal else mask
    output, weights = layer(*map(torch.from_numpy, (query, key, value)), mask=mask, return_weights=True)
    np.testing.assert_allclose(output.detach().numpy(), wanted, rtol=0, atol=1e-12)
    np.testing.assert_allclose(weights[:, 0], right, rtol=0, atol=1e-12)


def test_a_scale_that_is_learned_is_a_parameter_that_begins_there():
    layer = make("dot", "global", scale=0.5, learn_scale=True)
    assert [(name, p.item()) for name, p in layer.named_parameters()] == [("scale", 0.5)]
    assert not [*make("dot", "global", scale=0.5).parameters()]


@pytest.mark.parametrize(("score", "window"), GRID)
def test_state_copies_and_pickles(score, window):
    one, other = make(score, window, learn_scale=True), make(score, window, learn_scale=True)
    with torch.no_grad():
        one.scale.fill_(0.3)
    query, key = (seeded(2, n, d, dtype=torch.float32) for n, d in ((3, 4), (8, one.key_dim)))
    assert not torch.equal(one(query, key), other(query, key))
    other.load_state_dict(one.state_dict())
    for same in (other, copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert torch.equal(one(query, key), same(query, key))


@pytest.mark.parametrize(("score", "window"), GRID)
def test_autocast_computes_in_its_dtype(score, window):
    layer = make(score, window)
    query, key = (seeded(2, n, d, dtype=torch.float32).requires_grad_() for n, d in ((3, 4), (8, layer.key_dim)))
    with torch.autocast("cpu", torch.bfloat16):
        output, weights = layer(query, key, return_weights=True)
    wanted, right = layer(query, key, return_weights=True)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), wanted, rtol=0, atol=5e-2)
    np.testing.assert_allclose(weights[:], right[:], rtol=0, atol=3e-2)
    output.float().sum().backward()
    assert {p.grad.dtype for p in (query, key, *layer.parameters())} == {torch.float32}


@pytest.mark.parametrize(("score", "window"), GRID)
def test_weights_are_dropped_while_training_alone(score, window):
    layer = make(score, window, dtype=torch.float64, dropout=0.5)
    query, key, lengths = seeded(2, 6, 4), seeded(2, 9, layer.key_dim), torch.tensor([9, 9])
    wanted = dense(layer, query, key, key, lengths)[0]
    assert not torch.allclose(layer(query, key), wanted, atol=1e-3)
    torch.testing.assert_close(layer.eval()(query, key), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("score", "window"), GRID)
def test_parameters_are_made_where_and_as_asked_and_drawn_anew(score, window):
    layer = make(score, window, device="meta", dtype=torch.float16)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} <= {("meta", torch.float16)}
    layer = make(score, window)
    before = [p.clone() for p in layer.parameters()]
    layer.reset_parameters()
    assert not any(torch.equal(p, was) for p, was in zip(layer.parameters(), before, strict=True))


Q, K = torch.zeros(2, 3, 4), torch.zeros(2, 8, 4)
Luong = MultiplicativeAttention


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: Luong(4, score="cosine"), ValueError, "score must be one of 'dot', 'general', 'concat', "),
        (lambda: Luong(4, window="local"), ValueError, "window must be one of .*, got 'local'"),
        (lambda: Luong(4, 5, score="dot"), ValueError, "score is 'dot', which needs equal dims"),
        (lambda: Luong(4, score="location"), ValueError, "say max_keys"),
        (lambda: Luong(4, max_keys=9), ValueError, "max_keys was given, and acts only with score='location'"),
        (lambda: Luong(4, hidden_dim=9), ValueError, "hidden_dim was given, and acts only with score='concat'"),
        (lambda: Luong(4, reach=9), ValueError, "reach was given, and acts only with window='local-m' or"),
        (lambda: Luong(4, window="local-p", reach=0), ValueError, "reach must be 1 or more, got 0"),
        (lambda: Luong(4, score="location", max_keys=7)(Q, K), ValueError, "key has 8 tokens, and .* max_keys = 7"),
        (lambda: Luong(4)(Q, K, positions=[1, 2, 3]), ValueError, "positions was given, and acts only with window="),
        (lambda: Luong(4, window="local-m")(Q[:, :1], K), ValueError, r"query has one token, .* positions=\[t\]"),
        (lambda: Luong(4, window="local-m")(Q, K, positions=[1, 2]), ValueError, r"positions has shape \(2,\)"),
        (lambda: Luong(4)(Q, K[..., :3]), ValueError, r"key has shape \(2, 8, 3\)"),
        (lambda: Luong(4)(Q.double(), K.double()), TypeError, "query has dtype torch.float64"),
        (lambda: Luong(4)(Q, K, lengths=[9, 1]), ValueError, r"lengths\(keys=...\) must lie between 0 and the 8 keys"),
        (lambda: Luong(4, window="local-p")(Q, K, lengths=[9, 1]), ValueError, r"lengths\(keys=...\) must lie between"),
        (lambda: Luong.from_keras([1.0], 4), ValueError, r"weights have shapes \[\(\)\].*gives: none"),
        (lambda: Luong.from_keras([], 4, score_mode="general"), ValueError, "score_mode must be one of"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(call, error, words):
    with pytest.raises(error, match=words):
        call()
