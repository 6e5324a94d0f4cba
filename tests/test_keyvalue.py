"""The cache of keys and values: what was appended is what is attended to, and nothing moves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import clearhead as ch
from clearhead.keyvalue import PAGE
from clearhead.testing.cases import as_dtype


def filled(dtype: str, heads: int = 2, parts: tuple[int, ...] = (5, 1, PAGE + 400, 1, 700)) -> tuple[Any, Any, Any]:
    """A cache appended to in parts, and the same keys and values in one piece."""
    random = np.random.default_rng(0)
    cache = ch.KeyValueCache(batch=2, heads=heads, dim=64, value_dim=32, dtype=as_dtype(dtype))
    keys = [random.standard_normal((2, heads, n, 64)).astype(as_dtype(dtype)) for n in parts]
    values = [random.standard_normal((2, heads, n, 32)).astype(as_dtype(dtype)) for n in parts]
    for key, value in zip(keys, values, strict=True):
        cache.append(key, value)
    return cache, np.concatenate(keys, axis=2), np.concatenate(values, axis=2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize(
    ("queries", "mask"),
    [
        (1, None),
        (2, ch.masks.causal(align="end")),
        (1, ch.masks.lengths([1100, 3])),
        (1, ch.masks.lengths([0, 2107])),
        (1, ch.masks.window(left=PAGE - 1, align="end")),
        (40, ch.masks.causal(align="end")),
    ],
    ids=["one", "two, causal", "lengths", "an empty entry", "window over pages", "many"],
)
def test_attention_over_a_cache_is_that_over_arrays(dtype: str, group: int, queries: int, mask: Any) -> None:
    cache, key, value = filled(dtype)
    query = np.random.default_rng(1).standard_normal((2, 2 * group, queries, 64)).astype(as_dtype(dtype))
    found = ch.attention(query, cache, mask=mask)
    np.testing.assert_array_equal(found, ch.attention(query, key, value, mask=mask))
    truth, _, _ = ch.core.attend(query, key, value, mask=mask, dtype=np.float64)
    limit = {"float32": 2e-6, "bfloat16": 8e-3}[dtype]
    assert np.linalg.norm(found.astype(float) - truth) <= limit * np.linalg.norm(truth)


def test_other_scores_and_dtypes_work_too() -> None:
    cache, key, value = filled("float32")
    query = np.random.default_rng(1).standard_normal((2, 4, 1, 64))
    score = ch.scores.dot(softcap=5.0)
    np.testing.assert_array_equal(ch.attention(query, cache, score=score), ch.attention(query, key, value, score=score))
    assert ch.attention(query, cache).dtype == np.float64


def test_what_was_appended_is_there() -> None:
    cache, key, value = filled("float32")
    assert len(cache) == key.shape[2] == 2131
    np.testing.assert_array_equal(cache.key, key)
    np.testing.assert_array_equal(cache.value, value)
    assert cache.capacity == 3 * PAGE
    assert cache.nbytes == 3 * PAGE * 2 * 2 * (64 + 32) * 4
    assert repr(cache) == "<KeyValueCache 2,131 tokens, batch 2, 2 heads, dim 64, float32>"


def test_growth_moves_nothing() -> None:
    cache, _, _ = filled("float32", parts=(PAGE,))
    before = cache.paging()[1][0, 0], cache.first_pages()[0].ctypes.data
    cache.append(np.ones((2, 2, 3 * PAGE, 64)), np.ones((2, 2, 3 * PAGE, 32)))
    assert (cache.paging()[1][0, 0], cache.first_pages()[0].ctypes.data) == before


def test_an_empty_cache_gives_zeros() -> None:
    cache = ch.KeyValueCache(batch=1, heads=2, dim=16, capacity=10)
    assert len(cache) == 0
    assert cache.capacity == PAGE
    assert (ch.attention(np.ones((1, 2, 1, 16), np.float32), cache) == np.zeros((1, 2, 1, 16))).all()


CACHE = ch.KeyValueCache(batch=1, heads=2, dim=16)
TOKEN = np.zeros((1, 2, 1, 16), np.float32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: CACHE.append(TOKEN[0], TOKEN), ValueError,
         "key has shape (2, 1, 16), this cache takes (1, 2, tokens, 16)"),
        (lambda: CACHE.append(TOKEN, TOKEN[..., :8]), ValueError,
         "value has shape (1, 2, 1, 8), this cache takes (1, 2, tokens, 16)"),
        (lambda: CACHE.append(TOKEN, np.repeat(TOKEN, 2, axis=2)), ValueError,
         "key has 1 tokens and value has 2: each key needs exactly one value"),
        (lambda: CACHE.append(TOKEN.astype(int), TOKEN), TypeError,
         "key has dtype int64, a cache takes one of float16, bfloat16, float32, float64"),
        (lambda: ch.KeyValueCache(1, 2, 16, dtype=int), TypeError,
         "dtype is int64, a cache holds one of float16, bfloat16, float32, float64"),
        (lambda: ch.KeyValueCache(1, 2, 16, capacity=-1), ValueError, "capacity must be 0 or more, got -1"),
        (lambda: ch.attention(TOKEN, CACHE, TOKEN), ValueError,
         "value was given beside a KeyValueCache, which holds the values: leave it out"),
        (lambda: ch.attention(TOKEN, TOKEN), ValueError,
         "value is missing: attention(query, key, value), or attention(query, cache)"),
    ],
)  # fmt: skip
def test_errors(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message
    assert len(CACHE) == 0
