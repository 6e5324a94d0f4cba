"""Which dtypes come in, are computed in, and go out."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

import clearhead as ch
from clearhead.testing.cases import DTYPES, as_dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_have_the_inputs_dtype_and_logsumexp_is_float32_or_float64(dtype: str) -> None:
    x = np.ones((3, 5, 4), as_dtype(dtype))
    output, weights = ch.scaled_dot_product_attention(x, x, x)
    state = ch.attention_state(x, x, x)
    wide = np.float64 if dtype == "float64" else np.float32
    assert output.dtype == state.output.dtype == x.dtype
    assert weights.dtype == weights.logsumexp.dtype == state.logsumexp.dtype == weights[0, 0].dtype == wide
    np.testing.assert_allclose(weights.logsumexp, 2 + np.log(5), rtol=1e-6)  # 4 / sqrt(4), natural


@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES, repeat=3)), ids="-".join)
def test_mixed_floats_are_promoted_as_by_numpy(dtypes: tuple[str, str, str]) -> None:
    """float16 with bfloat16, for which NumPy knows no common type, becomes float32: the smallest that holds both."""
    arrays = [np.ones((2, 3), as_dtype(dtype)) for dtype in dtypes]
    if "float64" in dtypes:
        expected = np.dtype(np.float64)
    elif len(set(dtypes)) == 1:
        expected = as_dtype(dtypes[0])
    else:
        expected = np.dtype(np.float32)
    assert ch.core.attend(*arrays)[0].dtype == np.promote_types(expected, np.float32)
    if len(set(dtypes)) > 1:
        assert ch.attention(*arrays).dtype == expected


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_16_bit_products_do_not_overflow(dtype: type) -> None:
    """pt#119131: q.k of 65,504 and more is a number in float32."""
    x = np.full((2, 60, 64), 200, dtype)
    x[:, ::2] = -200
    output, weights = ch.scaled_dot_product_attention(x, x, x, score=ch.scores.dot(scale=1.0))
    assert weights.logsumexp.max() == pytest.approx(64 * 200.0**2 + np.log(30))
    np.testing.assert_array_equal(output, x)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_results_are_float32s_rounded_once(dtype: str) -> None:
    x = np.random.default_rng(0).standard_normal((3, 2, 70, 24)).astype(as_dtype(dtype))
    wide = ch.attention(*x.astype(np.float32))
    np.testing.assert_array_equal(ch.attention(*x), wide.astype(as_dtype(dtype)))


def test_every_16_bit_number_is_read_right() -> None:
    """All of them pass through a value: normal, subnormal, both zeros, infinities and NaN."""
    for dtype in (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)):
        value = np.arange(1 << 16, dtype=np.uint16).view(dtype).reshape(1, -1)
        zero = np.zeros((1, 4), dtype)
        output = ch.attention(np.zeros((50, 4), dtype), zero, value)
        np.testing.assert_array_equal(output[0].astype(np.float32), value[0].astype(np.float32))


def test_float64_is_float64_throughout() -> None:
    """Weights that differ by 1e-12 are told apart, which nothing in float32 could."""
    q, k = np.array([[1.0]]), np.array([[0.0], [1e-12]])
    weights = ch.attention_weights(q, k)
    assert weights[0, 1] - weights[0, 0] == pytest.approx(5e-13, rel=1e-3)


def test_big_endian_numbers_are_read_right() -> None:
    x = np.random.default_rng(0).standard_normal((2, 60, 8)).astype(np.float32)
    swapped = x.astype(x.dtype.newbyteorder())
    found = ch.attention(swapped, swapped, swapped, score=ch.scores.dot(bias=swapped[0, :, 0]))
    assert found.dtype.isnative
    np.testing.assert_array_equal(found, ch.attention(x, x, x, score=ch.scores.dot(bias=x[0, :, 0])))


def test_lists_are_arrays() -> None:
    rows = [[1.0, 0.0], [0.0, 1.0]]
    np.testing.assert_array_equal(ch.attention(rows, rows, rows), ch.attention(*np.array([rows] * 3)))


def test_every_nonzero_byte_of_a_boolean_is_true() -> None:
    """A boolean array may be a view of bytes that another program wrote."""
    x = np.random.default_rng(0).standard_normal((50, 8)).astype(np.float32)
    some = np.tri(50, dtype=np.uint8)
    np.testing.assert_array_equal(
        ch.attention(x, x, x, mask=(some * 254).view(bool)), ch.attention(x, x, x, mask=some.astype(bool))
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_number_of_16_bits_is_read_and_written_as_itself(dtype: str) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(as_dtype(dtype)).reshape(1024, 64)
    zeros = np.zeros((1024, 1, 16), every.dtype)
    with np.errstate(invalid="ignore"):
        expected = every.astype(np.float64)
        for queries in (1, 9):
            found = ch.attention(np.broadcast_to(zeros, (1024, queries, 16)), zeros, every[:, None])[:, -1]
            np.testing.assert_array_equal(found.astype(np.float64), expected)


def test_rounding_to_16_bits_is_that_of_the_type() -> None:
    """Against NumPy's and ml_dtypes' own rounding of what float32 gives: means of values that lie between numbers."""
    random = np.random.default_rng(0)
    for dtype in ("float16", "bfloat16"):
        q, k, v = (random.standard_normal((4, 60, 32)).astype(as_dtype(dtype)) for _ in range(3))
        exact = ch.core.attend(q, k, v, dtype=np.float64)[0]
        rounded, found = exact.astype(as_dtype(dtype)), ch.attention(q, k, v)
        assert (rounded == found).mean() > 0.98  # but for those that lie halfway, nearly
        np.testing.assert_allclose(found.astype(float), rounded.astype(float), rtol=2**-6, atol=1e-5)
