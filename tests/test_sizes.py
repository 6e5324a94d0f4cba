"""Large problems: 131,072 tokens, matrices of more than 2**31 cells, arrays longer than that, and very many heads.

What does not matter has stride 0 or is never touched, so each takes seconds and little memory; some rows are checked
against softmax(q K^T) V in float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import clearhead as ch
from clearhead.testing.budget import relative_error
from clearhead.testing.cases import as_dtype

TOKENS = 131_072
SIDE = 65_536  # SIDE * SIDE cells are 2**32
ROWS = (0, 1, 47, 48, 4_095, 32_768, 65_535)


def inputs(*shape: int, dtype: str = "float32") -> Any:
    return np.random.default_rng(0).standard_normal((3, *shape)).astype(as_dtype(dtype))


def truth(query: Any, key: Any, value: Any, extra: Any = 0.0) -> Any:
    """One row by hand, in float64: query (dim,) over key (keys, dim) and value (keys, value dim)."""
    scores = key.astype(float) @ query.astype(float) / np.sqrt(len(query)) + extra
    weights = np.exp(scores - scores.max())
    return weights @ value.astype(float) / weights.sum()


def is_right(found: Any, expected: Any) -> None:
    assert relative_error(found, expected) < {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}[found.dtype.name]


def test_131_072_tokens_causal() -> None:
    q, k, v = inputs(TOKENS, 8)
    output, weights = ch.scaled_dot_product_attention(q, k, v, mask=ch.masks.causal())
    for i in (*ROWS, TOKENS - 2, TOKENS - 1):
        is_right(output[i], truth(q[i], k[: i + 1], v[: i + 1]))
    assert weights.size == 2**34
    assert weights[TOKENS - 1].sum() == pytest.approx(1, abs=1e-5)
    assert not weights[TOKENS - 2, TOKENS - 1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_131_072_tokens_in_a_window(dtype: str) -> None:
    q, k, v = inputs(TOKENS, 8, dtype=dtype)
    output = ch.attention(q, k, v, mask=ch.masks.window(left=1000, right=3))
    for i in (*ROWS, TOKENS - 2, TOKENS - 1):
        seen = slice(max(0, i - 1000), i + 4)
        is_right(output[i], truth(q[i], k[seen], v[seen]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_one_query_over_131_072_keys(dtype: str) -> None:
    q, k, v = inputs(TOKENS, 16, dtype=dtype)
    is_right(ch.attention(q[:1], k, v)[0], truth(q[0], k, v))


def test_a_bias_of_keys_over_2_to_the_32_cells() -> None:
    """One row of numbers, repeated by a stride of 0."""
    q, k, v = inputs(SIDE, 8)
    bias = np.random.default_rng(1).standard_normal(SIDE).astype(np.float32)
    output = ch.attention(q, k, v, mask=ch.masks.window(left=100), score=ch.scores.dot(bias=bias))
    for i in ROWS:
        seen = slice(max(0, i - 100), None)
        is_right(output[i], truth(q[i], k[seen], v[seen], bias[seen]))


def test_a_bias_by_distance_over_2_to_the_32_cells() -> None:
    """bias[i, j] = numbers[i - j + SIDE - 1], a view of strides (1, -1)."""
    q, k, v = inputs(SIDE, 8)
    numbers = np.random.default_rng(1).standard_normal(2 * SIDE - 1).astype(np.float32)
    bias = np.lib.stride_tricks.as_strided(numbers[SIDE - 1 :], (SIDE, SIDE), (4, -4))
    window = ch.masks.window(left=300, right=2)
    output = ch.attention(q, k, v, mask=window, score=ch.scores.dot(bias=bias))
    for i in ROWS:
        seen = slice(max(0, i - 300), min(SIDE, i + 3))
        is_right(output[i], truth(q[i], k[seen], v[seen], bias[i, seen]))


def test_a_boolean_array_over_2_to_the_32_cells() -> None:
    """No run of keys helps here: each of 2**32 cells is looked up, and few are visible."""
    q, k, v = inputs(SIDE, 8)
    seen = np.zeros(SIDE, bool)
    seen[[3, 130, 40_000, 40_001, SIDE - 1]] = True
    output = ch.attention(q, k, v, mask=seen)
    for i in ROWS:
        is_right(output[i], truth(q[i], k[seen], v[seen]))


def test_a_boolean_array_of_more_than_2_to_the_31_bytes() -> None:
    """Its last rows lie more than 2**31 bytes from its first. Nothing is stored of rows that nobody looks at."""
    side = 47_000
    q, k, v = inputs(side, 8)
    mask = np.zeros((side, side), bool)
    mask[-50:] = np.random.default_rng(1).random((50, side)) < 0.5
    rows = ch.masks.intervals(0, np.where(np.arange(side) < side - 50, 0, side))
    output = ch.attention(q, k, v, mask=ch.masks.array(mask) & rows)
    assert not output[:-50].any()
    for i in (side - 50, side - 49, side - 2, side - 1):
        is_right(output[i], truth(q[i], k[mask[i]], v[mask[i]]))


@pytest.mark.parametrize("queries", [1, 60], ids=["few queries", "many queries"])
def test_keys_that_lie_more_than_2_to_the_31_elements_away(queries: int) -> None:
    last, tokens = 500, 2**27 + 1000
    q, near, _ = inputs(last, 16, dtype="float16")
    far = np.zeros((tokens, 16), np.float16)
    far[-last:] = near
    output = ch.attention(q[:queries], far, far, mask=ch.masks.intervals(tokens - last, tokens))
    for i in {0, queries - 1}:
        is_right(output[i], truth(q[i], near, near))


@pytest.mark.parametrize("dim", [4, 16], ids=["tiles", "streaming"])
@pytest.mark.parametrize(
    ("lead", "heads", "key_heads"),
    [((70_000,), 1, 1), ((), 70_000, 70_000), ((), 70_000, 35_000), ((300,), 240, 240), ((2, 150, 100), 3, 1)],
    ids=["batch", "heads", "grouped", "both", "axes"],
)
def test_more_than_65_536_heads_in_all(lead: tuple[int, ...], heads: int, key_heads: int, dim: int) -> None:
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((*lead, h, n, dim), dtype=np.float32) for h, n in
               ((heads, 1), (key_heads, 3), (key_heads, 3)))  # fmt: skip
    output = ch.attention(q, k, v)
    wide_k, wide_v = (np.repeat(x, heads // key_heads, axis=-3).astype(float) for x in (k, v))
    weights = ch.softmax(q.astype(float) @ wide_k.swapaxes(-1, -2) / np.sqrt(dim))
    is_right(output, weights @ wide_v)
