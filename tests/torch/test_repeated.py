"""Calls laid out like one before: the same results for other numbers, nothing kept, and only where nothing else is."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as theirs

from clearhead.torch import repeated, scaled_dot_product_attention

CAPS = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


@pytest.fixture(autouse=True)
def known():
    repeated._known.clear()
    yield repeated._known
    repeated._known.clear()


def numbers(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def booleans(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.6


CALLS = {
    "plain": lambda seed: {},
    "causal": lambda seed: {"is_causal": True},
    "scale": lambda seed: {"scale": 0.5},
    "booleans": lambda seed: {"attn_mask": booleans(3, 7, 9, seed=seed)},
    "booleans of keys": lambda seed: {"attn_mask": booleans(2, 1, 1, 9, seed=seed)},
    "booleans and causal": lambda seed: {"attn_mask": booleans(7, 9, seed=seed), "is_causal": True},
    "numbers": lambda seed: {"attn_mask": numbers(2, 3, 7, 9, seed=seed)},
    "numbers, causal, scale": lambda seed: {"attn_mask": numbers(7, 1, seed=seed), "is_causal": True, "scale": 2},
}


@pytest.mark.parametrize("dtype", CAPS, ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_other_numbers_have_their_own_results(known, call, dtype):
    for seed in range(3):
        query, key, value = (numbers(2, 3, n, 16, seed=seed + n, dtype=dtype) for n in (7, 9, 9))
        options = CALLS[call](seed)
        found, wanted = (f(query, key, value, **options) for f in (scaled_dot_product_attention, theirs))
        assert found.dtype == dtype
        torch.testing.assert_close(found, wanted, rtol=0, atol=CAPS[dtype])
    assert len(known) == 1
    assert None not in known.values()


@pytest.mark.parametrize("queries", [1, 7])
def test_groups_of_heads(known, queries):
    for seed in range(2):
        query, key, value = (numbers(2, h, n, 64, seed=seed + h) for h, n in ((8, queries), (2, 1500), (2, 1500)))
        found, wanted = (f(query, key, value, enable_gqa=True) for f in (scaled_dot_product_attention, theirs))
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    assert len(known) == 1
    assert None not in known.values()


def test_every_layout_is_its_own(known):
    wide = numbers(2, 3, 9, 32)
    views = [wide[..., :16], wide[..., ::2], wide.transpose(1, 2)[..., :16], wide[:1].expand(2, 3, 9, 32), wide[0]]
    views.append(wide[0, 0])
    for again in range(2):
        for view in views:
            found, wanted = (f(view, view, view + again) for f in (scaled_dot_product_attention, theirs))
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    assert len(known) == len(views)


def test_nothing_of_the_users_is_kept():
    query, mask = numbers(2, 3, 7, 16), numbers(7, 7)
    scaled_dot_product_attention(query, query, query, mask)
    held = [weakref.ref(t.untyped_storage()) for t in (query, mask)]
    del query, mask
    gc.collect()
    assert [ref() for ref in held] == [None, None]


def test_what_is_known_is_bounded(known, monkeypatch):
    monkeypatch.setattr(repeated, "MOST", 3)
    for tokens in range(1, 9):
        x = numbers(tokens, 4)
        torch.testing.assert_close(scaled_dot_product_attention(x, x, x), theirs(x, x, x), rtol=0, atol=1e-5)
        assert len(known) <= 3


def test_a_call_that_is_known_is_refused_all_the_same_where_types_are_wrong():
    x = numbers(2, 3, 7, 16)
    scaled_dot_product_attention(x, x, x, is_causal=True, scale=1.0)
    for wrong in ({"is_causal": 1}, {"is_causal": True, "enable_gqa": 0}, {"is_causal": True, "scale": "1"}):
        with pytest.raises(TypeError):
            scaled_dot_product_attention(x, x, x, **wrong)


def test_it_steps_aside_where_more_is_wanted_than_numbers(known):
    x = numbers(2, 3, 7, 16)
    output = repeated.output(x, x, x, None, False, None, False)
    assert output is not None
    learned = x.clone().requires_grad_()
    assert repeated.output(x, learned, x, None, False, None, False) is None
    with torch.no_grad():
        assert torch.equal(repeated.output(x, learned, x, None, False, None, False), output)
    assert repeated.output(x, x, x, learned[0, 0, :, :7], False, None, False) is None
    with torch.autocast("cpu"):
        assert repeated.output(x, x, x, None, False, None, False) is None
        assert scaled_dot_product_attention(x, x, x).dtype == torch.bfloat16
    seen = []

    def mapped(query):
        seen.append(repeated.output(query, x, x, None, False, None, False))
        return query

    torch.func.vmap(mapped)(x[None])
    assert seen == [None]
    odd = [torch._neg_view(x), x.to("meta"), x.to_sparse(), torch._efficientzerotensor(2, 3, 7, 16)]
    assert [repeated.output(t, x, x, None, False, None, False) for t in odd] == [None] * 4
    with torch.inference_mode():
        assert torch.equal(repeated.output(x.clone(), x.clone(), x.clone(), None, False, None, False), output)


def test_threads_share_what_is_known():
    given = [[numbers(2, 3, 9, 16, seed=seed + n) for n in range(3)] for seed in range(8)]
    wanted, found = [theirs(*x) for x in given], [[] for _ in given]

    def work(n):
        for _ in range(30):
            found[n].append(scaled_dot_product_attention(*given[n]))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for own, right in zip(found, wanted, strict=True):
        assert len(own) == 30
        for output in own:
            torch.testing.assert_close(output, right, rtol=0, atol=1e-5)
