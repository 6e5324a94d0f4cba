"""Blocks found by a table: what they hold is attended to where it lies, with the bits of arrays in one piece."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import clearhead as ch
from clearhead.testing.cases import DTYPES, as_dtype


def blocks(dtype: str, size: int, dim: int = 32, value_dim: int = 48) -> tuple[Any, Any, Any, Any]:
    """key, value, table, lengths: three sequences in shuffled blocks; one fills them, one does not, one is empty."""
    random = np.random.default_rng(0)
    key, value = (random.standard_normal((40, 2, size, d)).astype(as_dtype(dtype)) for d in (dim, value_dim))
    table, lengths = random.permutation(40)[:18].reshape(3, 6), np.array([6 * size, 3 * size - 2, 0])
    table[1, 3:], table[2] = -1, 99
    return key, value, table, lengths


def queries(dtype: str, count: int, dim: int = 32) -> Any:
    return np.random.default_rng(1).standard_normal((3, 4, count, dim)).astype(as_dtype(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [7, 16, 32, 512])
@pytest.mark.parametrize("count", [1, 2, 60])
def test_where_tokens_lie_changes_no_bit(dtype: str, size: int, count: int) -> None:
    """Few queries read the blocks in place, many a copy; 512 tokens fill more than one chunk of the decode kernel."""
    key, value, table, lengths = blocks(dtype, size)
    cache, q = ch.PagedKeyValues(key, value, table, lengths), queries(dtype, count)
    whole = ch.attention(q, cache.key, cache.value, mask=ch.masks.lengths(lengths))
    np.testing.assert_array_equal(ch.attention(q, cache), whole)
    for b, length in enumerate(lengths):
        order = [table[b, j // size] * size + j % size for j in range(length)]
        k, v = (np.moveaxis(x, 1, 0).reshape(2, -1, x.shape[-1])[:, order] for x in (key, value))
        np.testing.assert_array_equal(cache.key[b, :, :length], k)
        np.testing.assert_allclose(whole[b].astype(float), ch.attention(q[b], k, v).astype(float), rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("dim", [5, 32])
def test_any_order_of_axes_and_any_dim(dim: int) -> None:
    """Blocks (blocks, size, heads, dim), and rows whose numbers do not lie side by side."""
    key, value, table, lengths = blocks("float32", 16, dim)
    q = queries("float32", 1, dim)
    expected = ch.attention(q, ch.PagedKeyValues(key, value, table, lengths))
    for axes in ((0, 2, 1, 3), (3, 0, 1, 2), (2, 3, 1, 0)):
        turned = [np.ascontiguousarray(x.transpose(axes)).transpose(np.argsort(axes)) for x in (key, value)]
        np.testing.assert_array_equal(ch.attention(q, ch.PagedKeyValues(*turned, table, lengths)), expected)


@pytest.mark.parametrize("count", [1, 60])
def test_masks_and_scores_join(count: int) -> None:
    key, value, table, lengths = blocks("float32", 16)
    lengths[2], table[2, 0] = 1, table[0, 0]
    cache, q = ch.PagedKeyValues(key, value, table, lengths), queries("float32", count)
    mask, score = ch.masks.window(left=20, align="end"), ch.scores.dot(sinks=[1.0, 2, 3, 4])
    np.testing.assert_array_equal(
        ch.attention(q, cache, mask=mask, score=score),
        ch.attention(q, cache.key, cache.value, mask=mask & ch.masks.lengths(lengths), score=score),
    )


def test_blocks_are_referred_to() -> None:
    key, value, table, lengths = blocks("float32", 16)
    cache, q = ch.PagedKeyValues(key, value, table, lengths), queries("float32", 1)
    before = ch.attention(q, cache)
    value *= 2
    np.testing.assert_allclose(ch.attention(q, cache), 2 * before, rtol=1e-6)


@pytest.mark.parametrize("count", [1, 60])
def test_misaligned_blocks_are_read_whole(count: int) -> None:
    """What kernels cannot read in place is copied before blocks are looked for from the first one's address."""
    key, value, table, lengths = blocks("float32", 16)
    q = queries("float32", count)
    expected = ch.attention(q, ch.PagedKeyValues(key, value, table, lengths))
    shifted = []
    for x in (key, value):
        raw = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
        raw[...] = x
        shifted.append(raw)
    np.testing.assert_array_equal(ch.attention(q, ch.PagedKeyValues(*shifted, table, lengths)), expected)


def test_nan_past_a_sequences_end_and_in_others_blocks_is_nothing() -> None:
    key, value, table, lengths = blocks("float32", 16)
    q = queries("float32", 1)
    clean = ch.attention(q, ch.PagedKeyValues(key, value, table, lengths))
    unused = np.setdiff1d(np.arange(40), np.r_[table[0], table[1, :3]])
    for x in (key, value):
        x[unused] = np.nan
        x[table[1, 2], :, 14:] = np.nan
    np.testing.assert_array_equal(ch.attention(q, ch.PagedKeyValues(key, value, table, lengths)), clean)


def test_no_sequence_and_no_token() -> None:
    key, value, table, lengths = blocks("float32", 16)
    assert ch.attention(queries("float32", 2)[:0], ch.PagedKeyValues(key, value, table[:0], lengths[:0])).size == 0
    nothing = ch.PagedKeyValues(key, value, table, np.zeros(3, int))
    assert len(nothing) == 0
    np.testing.assert_array_equal(ch.attention(queries("float32", 2), nothing), np.zeros((3, 4, 2, 48), np.float32))


def test_it_says_what_it_is() -> None:
    text = repr(ch.PagedKeyValues(*blocks("float32", 16)))
    assert text == "<PagedKeyValues 3 sequences of up to 96 tokens in blocks of 16, 2 heads, dim 32, float32>"


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"table": [[0.5]]}, TypeError, "table has dtype float64, expected integers"),
    ({"lengths": [[1]]}, ValueError, r"lengths has shape \(1, 1\), expected 1 axis"),
    ({"table": [1, 2]}, ValueError, r"table has shape \(2,\), expected 2 axes"),
    ({"lengths": [1, 2]}, ValueError, "table is for 3 sequences, lengths for 2"),
    ({"lengths": [97, 0, 0]}, ValueError, "between 0 and the 96 tokens of a row of table"),
    ({"lengths": [1, 1, 1]}, ValueError, "table must name blocks from 0 to 39, got .* to 99"),
    ({"key": np.zeros((40, 2, 16, 32), int)}, TypeError, "key has dtype int64, blocks hold one of"),
    ({"key": np.zeros((2, 16, 32), np.float32)}, ValueError, "expected .blocks, heads, size, dim"),
    ({"key": np.zeros((40, 2, 16, 32))}, TypeError, "key has dtype float64 and value float32"),
    ({"key": np.zeros((40, 2, 15, 32), np.float32)}, ValueError, "all but the last axis must be equal"),
])  # fmt: skip
def test_what_does_not_fit_is_named(change: dict[str, Any], error: type[Exception], message: str) -> None:
    given = dict(zip(("key", "value", "table", "lengths"), blocks("float32", 16), strict=True))
    with pytest.raises(error, match=message):
        ch.PagedKeyValues(**given | change)


def test_a_value_beside_it_is_an_error() -> None:
    cache = ch.PagedKeyValues(*blocks("float32", 16))
    with pytest.raises(ValueError, match="value was given beside a PagedKeyValues"):
        ch.attention(queries("float32", 1), cache, np.ones(3))
