"""A call like one before is answered from what is known of its layout: the same bits, and nothing of its arrays."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import clearhead as ch
from clearhead import again
from clearhead.again import recall


@pytest.fixture(autouse=True)
def forgotten() -> None:
    again._known.clear()


def random(*shape: int, seed: int = 0, dtype: Any = np.float32) -> NDArray[Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def anew(*arrays: NDArray[Any], **options: Any) -> NDArray[Any]:
    """The same call with nothing remembered."""
    again._known.clear()
    return ch.attention(*arrays, **options)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("mask", [None, ch.masks.causal(), ch.masks.window(left=3)], ids=["none", "causal", "window"])
def test_the_second_call_has_the_bits_of_a_first(dtype: str, mask: Any) -> None:
    for seed in range(3):
        arrays = [random(2, 3, 4, 20, 8, seed=10 * seed + n, dtype=dtype) for n in range(3)]
        output, weights = ch.scaled_dot_product_attention(*arrays, mask=mask)
        repeated = ch.attention(*arrays, mask=mask)
        assert len(again._known) == 1
        dense = np.asarray(weights)
        np.testing.assert_array_equal(repeated, output)
        np.testing.assert_array_equal(anew(*arrays, mask=mask), output)
        np.testing.assert_array_equal(np.asarray(ch.attention_weights(*arrays[:2], mask=mask)), dense)


def test_layouts_are_told_apart() -> None:
    x = random(6, 20, 20)
    views = [x, x.swapaxes(-1, -2), x[::-1], x[:, ::2, ::2], x[:1], x[0], np.broadcast_to(x[:1], x.shape)]
    results = [ch.attention(view, view, view) for view in views]
    assert len(again._known) == len(views)
    for view, result in zip(views, results, strict=True):
        np.testing.assert_array_equal(anew(view.copy(), view.copy(), view.copy()), result)


def test_masks_of_equal_value_are_one_layout_and_others_are_not() -> None:
    x = random(20, 8)
    for _ in range(3):
        ch.attention(x, x, x, mask=ch.masks.window(left=3))
    assert len(again._known) == 1
    ch.attention(x, x, x, mask=ch.masks.window(left=4))
    assert len(again._known) == 2


def test_nothing_of_the_users_is_kept() -> None:
    x = random(50, 8)
    ch.attention(x, x, x)
    seen = weakref.ref(x)
    del x
    gc.collect()
    assert again._known
    assert seen() is None


def test_the_number_of_layouts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "MOST", 3)
    for tokens in range(10, 20):
        x = random(tokens, 8)
        ch.attention(x, x, x)
    assert len(again._known) <= 3


def misaligned(array: NDArray[Any]) -> NDArray[Any]:
    raw = np.zeros(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape)
    raw[...] = array
    return raw


def odd_stride(array: NDArray[Any]) -> NDArray[Any]:
    """Rows that lie no whole number of elements apart."""
    rows = np.zeros(array.shape[0], [("row", array.dtype, array.shape[1]), ("more", np.int16)])["row"]
    rows[...] = array
    return rows


@pytest.mark.parametrize("made", [
    misaligned, odd_stride, lambda x: x.astype(x.dtype.newbyteorder()), lambda x: x.astype(np.float64), list,
    lambda x: x.view(np.memmap),
])  # fmt: skip
def test_what_must_be_converted_first_is_never_read_from_a_stand_in(made: Any) -> None:
    """Planning on stand-ins may not touch their memory, which is not there."""
    x = random(20, 8)
    for _ in range(2):
        np.testing.assert_allclose(ch.attention(made(x), x, x), ch.attention(x, x, x), rtol=1e-6, atol=1e-7)
        assert recall(made(x), x, x, None, None) is None


def test_what_holds_arrays_is_looked_at_anew() -> None:
    x, lengths = random(1, 1, 20, 8), np.array([5])
    assert recall(x, x, x, ch.masks.lengths(lengths), None) is None
    assert recall(x, x, x, None, ch.scores.dot(sinks=np.zeros(1))) is None
    assert recall(x, x, x, None, None) is not None


def test_wrong_shapes_are_wrong_every_time() -> None:
    x = random(20, 8)
    for _ in range(2):
        with pytest.raises(ValueError, match="key has 20 tokens and value has 19"):
            ch.attention(x, x, x[:19])


@pytest.mark.parametrize("score", [ch.scores.dot(scale=0.3), ch.scores.dot(softcap=2.0)], ids=["scale", "softcap"])
def test_scores_of_numbers_alone_are_known_by_them(score: Any) -> None:
    x = random(2, 20, 8)
    plain, ours = ch.attention(x, x, x), ch.attention(x, x, x, score=score)
    assert not np.array_equal(plain, ours)
    assert len(again._known) == 2
    np.testing.assert_array_equal(ch.attention(x, x, x, score=score), ours)
    assert len(again._known) == 2
    np.testing.assert_array_equal(anew(x, x, x, score=score), ours)


def test_few_intervals_are_known_by_the_mask_itself() -> None:
    x = random(3, 2, 1, 8, seed=1)
    key = random(3, 2, 20, 8, seed=2)
    start = np.array([0, 5, 20])[:, None, None]
    mask = ch.masks.intervals(start, np.full_like(start, 20))
    first = ch.attention(x, key, key, mask=mask)
    assert len(again._known) == 1
    np.testing.assert_array_equal(ch.attention(x, key, key, mask=mask), first)
    assert len(again._known) == 1
    np.testing.assert_array_equal(anew(x, key, key, mask=mask), first)
    assert not first[2].any()
    other = ch.attention(x, key, key, mask=ch.masks.intervals(start * 0, np.full_like(start, 20)))
    assert not np.array_equal(other[1], first[1])


def test_many_intervals_are_not_kept() -> None:
    x = random(3000, 8)
    mask = ch.masks.intervals(np.zeros(3000, int), np.arange(3000) + 1)
    assert recall(x, x, x, mask, None) is None
