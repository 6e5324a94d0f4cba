"""The backward kernels against the dense float64 oracle: every feature, the dtypes, the edges, numbers not finite."""

import ml_dtypes
import numpy as np
import pytest

import clearhead as ch
from clearhead import masks, scores
from clearhead.core_backward import gradients

ROWS, KEYS, DIM = 37, 45, 16
BOUND = {"float32": 1e-5, "float64": 1e-12, "float16": 5e-3, "bfloat16": 4e-2}


def number(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def arrays(heads=2, key_heads=None, rows=ROWS, keys=KEYS, dim=DIM, value_dim=None, dtype=np.float32, lead=()):
    """query, key, value, and gradients of output and logsumexp."""
    r, key_heads, value_dim = np.random.default_rng(7), key_heads or heads, dim if value_dim is None else value_dim
    shapes = [(heads, rows, dim), (key_heads, keys, dim), (key_heads, keys, value_dim), (heads, rows, value_dim)]
    given = [r.standard_normal((*lead, *shape)).astype(dtype) for shape in shapes]
    return *given, r.standard_normal((*lead, heads, rows)).astype(np.float32)


def agree(query, key, value, grad_output, grad_logsumexp, mask=None, score=None):
    with np.errstate(all="ignore"):
        _, vjp = ch.attention_vjp(query, key, value, mask=mask, score=score)
        found = vjp(grad_output, grad_logsumexp)
        wanted = gradients(query, key, value, grad_output, grad_logsumexp, mask=mask, score=score, dtype=np.float64)
    bound = BOUND[np.dtype(query.dtype).name]
    for name, right in wanted.items():
        got = np.asarray(getattr(found, name), np.float64)
        right = np.asarray(right).reshape(got.shape)
        finite = np.isfinite(right)
        np.testing.assert_array_equal(got[~finite], right[~finite], err_msg=name)
        # Numbers summed over all cells err with the size of what is summed.
        several = 10 if name in ("scale", "softcap", "alibi", "sinks") else 1
        size = max(1, np.abs(right[finite]).max(initial=0))
        np.testing.assert_allclose(got[finite] / size, right[finite] / size, rtol=0, atol=several * bound, err_msg=name)


SHAPES = {
    "plain": {}, "long": {"rows": 300, "keys": 1100, "dim": 64}, "grouped": {"heads": 6, "key_heads": 2},
    "odd dims": {"dim": 5, "value_dim": 7}, "wide": {"dim": 33, "value_dim": 80}, "dim 128": {"dim": 128, "rows": 130},
    "no dim": {"dim": 0, "value_dim": 3}, "no value dim": {"value_dim": 0}, "no keys": {"keys": 0},
    "no queries": {"rows": 0}, "batch": {"lead": (2, 3)}, "no batch": {"lead": (0,)}, "one": {"rows": 1, "keys": 1},
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mask", [None, masks.causal(align="end")], ids=["full", "causal"])
def test_shapes(shape, mask):
    agree(*arrays(**SHAPES[shape]), mask=mask)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16])
def test_dtypes(dtype):
    agree(*arrays(rows=200, keys=300, dtype=dtype), mask=masks.causal(align="end"))


MASKS = {
    "start": masks.causal(align="start"),
    "window": masks.window(5, align="end"),
    "array": np.random.default_rng(1).random((ROWS, KEYS)) > 0.5,
    "function": masks.function(lambda batch, head, query, key: (query + key) % 3 != 0),
    "empty rows": np.arange(ROWS)[:, None] > 3,
}


@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask):
    agree(*arrays(), mask=MASKS[mask])


def test_documents():
    agree(*arrays(rows=KEYS), mask=masks.documents(np.repeat([0, 1, 2], KEYS // 3)))


SCORES = {
    "scale": scores.dot(scale=0.3),
    "softcap": scores.dot(softcap=2.0),
    "alibi": scores.dot(alibi=np.abs(number(4)), align="end"),
    "sinks": scores.dot(sinks=number(4)),
    "function": scores.dot(function=lambda s, batch, head, query, key: s * s * 0.1 + 0.01 * (query - key)),
    "derivative": scores.dot(
        function=lambda s, batch, head, query, key: s * s * 0.1, derivative=lambda s, batch, head, query, key: s * 0.2
    ),
    "general": scores.general(number(DIM, DIM) / 4),
    "general, by head": scores.general(number(4, DIM, DIM) / 4),
    "additive": scores.additive(number(DIM, 24) / 4, number(DIM, 24) / 4, number(24)),
    "all at once": scores.dot(
        softcap=3.0, bias=number(4, ROWS, KEYS), alibi=np.abs(number(4)), sinks=number(4), align="end"
    ),
}


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("mask", [None, masks.causal(align="end")], ids=["full", "causal"])
def test_scores(score, mask):
    agree(*arrays(heads=4, key_heads=2), mask=mask, score=SCORES[score])


@pytest.mark.parametrize(
    "shape",
    [(ROWS, KEYS), (2, ROWS, KEYS), (2, 1, KEYS), (2, ROWS, 1), (1, 1), (3, 2, ROWS, KEYS), (1, 2, ROWS, KEYS),
     (3, 1, 1, KEYS), (3, 2, ROWS, 1)],
    ids=str,
)  # fmt: skip
def test_a_bias_gets_the_sum_over_the_axes_that_it_was_broadcast_along(shape):
    agree(*arrays(lead=(3,)), score=scores.dot(bias=number(*shape)))


def test_a_bias_of_queries_over_several_parts_of_the_keys():
    agree(*arrays(rows=100, keys=1100), score=scores.dot(bias=number(100, 1)))


@pytest.mark.parametrize("hide", [np.arange(KEYS)[None] < KEYS - 1, None], ids=["hidden", "seen"])
def test_a_key_of_nan_and_a_value_of_inf_reach_only_those_that_see_them(hide):
    query, key, value, grad, log = arrays(rows=KEYS)
    key[:, -1], value[:, -1] = np.nan, np.inf
    mask = masks.causal(align="start") if hide is None else hide
    agree(query, key, value, grad, log, mask=mask)
    _, vjp = ch.attention_vjp(query, key, value, mask=mask)
    assert np.isfinite(vjp(grad).query[:, :-1]).all()


def test_a_row_of_nan_reaches_only_what_it_sees():
    query, key, value, grad, log = arrays(rows=KEYS)
    grad[:, 3], query[:, 5] = np.nan, np.nan
    agree(query, key, value, grad, log, mask=masks.causal(align="start"))
    _, vjp = ch.attention_vjp(query, key, value, mask=masks.causal(align="start"))
    assert np.isfinite(vjp(grad).key[:, 6:]).all()


def test_the_bits_do_not_depend_on_the_number_of_threads():
    query, key, value, grad, log = arrays(heads=3, rows=700, keys=1100, dim=32)
    score = scores.dot(softcap=5.0, bias=number(700, 1), sinks=number(3))
    _, vjp = ch.attention_vjp(query, key, value, mask=masks.causal(align="end"), score=score)
    found = []
    try:
        for threads in (1, 2, 5):
            ch.set_num_threads(threads)
            found.append(vjp(grad, log))
    finally:
        ch.set_num_threads(None)
    for name in ("query", "key", "value", "bias", "sinks", "softcap", "scale"):
        one, two, five = (getattr(each, name).tobytes() for each in found)
        assert one == two == five, name


@pytest.mark.parametrize(
    "score",
    [scores.general(number(DIM, DIM + 3)), scores.additive(number(DIM, 5), number(DIM + 3, 5), number(5))],
    ids=["general", "additive"],
)
def test_what_is_asked_for_alone_is_the_same(score):
    query, _, value, grad, logs = arrays()
    key = number(2, KEYS, DIM + 3)
    _, vjp = ch.attention_vjp(query, key, value, score=score)
    whole = vjp(grad, logs)
    names = [name for name in ("query", "key", "value", "scale", "weight", "query_weight", "key_weight", "vector")
             if getattr(whole, name) is not None]  # fmt: skip
    assert len(names) >= 5
    for name in names:
        np.testing.assert_array_equal(getattr(vjp(grad, logs, [name]), name), getattr(whole, name), err_msg=name)
