"""Masks of transformers as rules: each says what transformers' own matrix says, and none is made needlessly."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from transformers import masking_utils as theirs

from clearhead import masks
from clearhead.algebra import Extent
from clearhead.torch.huggingface_masks import clearhead_mask, understood
from clearhead.torch.lazy_mask import LazyMask

FUNCTIONS = {
    "causal": theirs.causal_mask_function,
    "both ways": theirs.bidirectional_mask_function,
    "window": theirs.sliding_window_causal_mask_function(4),
    "window both ways": theirs.sliding_window_bidirectional_mask_function(2),
    "chunks": theirs.chunked_causal_mask_function(3, torch.tensor([0, 2])),
    "documents": theirs.and_masks(
        theirs.causal_mask_function, theirs.packed_sequence_mask_function(torch.arange(24).repeat(2, 1) // 5)
    ),
    "every second": theirs.and_masks(theirs.causal_mask_function, lambda b, h, q, k: (q + k) % 2 == 0),
}
PADDING = {
    "none": None,
    "all real": [[1] * 24, [1] * 24],
    "left": [[0] * 3 + [1] * 21, [1] * 24],
    "right": [[1] * 7 + [0] * 17, [1] * 24],
    "in between": [[1, 0] * 12, [1] * 24],
    "not all there yet": [[1] * 9, [0] * 2 + [1] * 7],
    "nothing real": [[0] * 24, [1] * 24],
}
# (queries, keys, position of the first query, position of the first key)
PLACES = {
    "a prompt": (9, 9, 0, 0),
    "a step": (1, 9, 8, 0),
    "a prompt into a static cache": (5, 20, 0, 0),
    "a step into a static cache": (1, 20, 7, 0),
    "more of a prompt": (4, 9, 5, 0),
    "within a static cache": (4, 20, 5, 0),
    "the end of a sliding cache": (1, 4, 15, 12),
    "more after a sliding cache": (3, 6, 15, 12),
}


def matrix(mask: Any, queries: int, keys: int, causal: bool) -> torch.Tensor:
    """What the attention function makes of a mask, as booleans."""
    if mask is None:  # transformers' own rule
        rule = masks.causal("start") if causal and queries > 1 else None
        mask = LazyMask(rule, 2, queries, keys)
    return torch.ones((2, 1, queries, keys), dtype=torch.bool) & mask


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("place", PLACES)
def test_what_is_seen_is_what_transformers_says(function: str, place: str) -> None:
    queries, keys, first, offset = PLACES[place]
    for (padding, some), skip in itertools.product(PADDING.items(), ("causal", "bidirectional", "never")):
        given = {
            "batch_size": 2, "q_length": queries, "kv_length": keys, "q_offset": first, "kv_offset": offset,
            "mask_function": FUNCTIONS[function],
            "attention_mask": None if some is None else torch.tensor(some, dtype=torch.bool),
        }  # fmt: skip
        right = theirs.sdpa_mask(**given, allow_is_causal_skip=False)
        found = clearhead_mask(
            **given, allow_is_causal_skip=skip == "causal", allow_is_bidirectional_skip=skip == "bidirectional"
        )
        assert found is not None or skip != "never"
        assert torch.equal(matrix(found, queries, keys, skip == "causal"), right.expand(2, 1, queries, keys))
        gaps = function == "every second" or (padding == "in between" and function in ("chunks", "documents"))
        assert gaps or found is None or isinstance(found, LazyMask)


def test_an_offset_may_be_a_tensor_as_static_caches_have() -> None:
    found = clearhead_mask(1, 2, 8, q_offset=torch.tensor(3))
    assert isinstance(found, LazyMask)
    assert found[0, 0].sum(dim=-1).tolist() == [4, 5]


def test_what_is_known_is_a_rule() -> None:
    window = theirs.sliding_window_causal_mask_function(4)
    found = clearhead_mask(1, 1 << 20, 1 << 20, mask_function=window)  # as a matrix, it would take a terabyte
    assert isinstance(found, LazyMask)
    assert found.mask == masks.window(3, 0, "start")


def test_padding_with_gaps_takes_a_row_of_booleans() -> None:
    real = torch.tensor([[True, False, True] * 2000])
    found = clearhead_mask(1, 6000, 6000, attention_mask=real)
    assert isinstance(found, LazyMask)
    assert found.mask is not None
    assert found.mask.intervals(Extent((1,), 1, 6000, 6000)) is None
    assert found[0, 0, 5, :7].tolist() == [True, False, True, True, False, True, False]


def test_matrices_are_runs_where_they_can_be_and_read_once() -> None:
    lower = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    first, bias = understood(lower, 5)
    assert isinstance(first, masks.Mask)
    assert bias is None
    assert understood(lower, 5)[0] is first
    lower[0, 0, 4, 2] = False
    changed, _ = understood(lower, 5)
    assert isinstance(changed, torch.Tensor)
    assert torch.equal(changed, lower)


def test_numbers_that_hide_are_a_mask_and_others_are_added() -> None:
    least = torch.finfo(torch.float32).min
    numbers = torch.tensor([[[[0.0, least], [0.0, 0.0]]]])
    mask, bias = understood(numbers, 2)
    assert bias is None
    assert isinstance(mask, masks.Mask)
    assert mask.dense(2, 2, lead=(1,))[0, 0].tolist() == [[True, False], [True, True]]
    mask, bias = understood(torch.tensor([[[[0.5, least], [0.0, -3.0]]]]), 2)
    assert isinstance(mask, masks.Mask)
    assert bias is not None
    assert bias[0, 0].tolist() == [[0.5, 0.0], [0.0, -3.0]]


def test_numbers_that_learn_are_added_as_they_are() -> None:
    numbers = torch.zeros(1, 1, 2, 2, requires_grad=True)
    mask, bias = understood(numbers, 2)
    assert mask is None
    assert bias is not None
    assert bias.requires_grad


def test_a_mask_longer_than_the_keys_is_cut() -> None:
    lower = torch.ones(1, 1, 3, 8, dtype=torch.bool).tril()
    mask, _ = understood(lower, 3)
    assert isinstance(mask, masks.Mask)
    assert mask.dense(3, 3, lead=(1,))[0, 0].tolist() == lower[0, 0, :, :3].tolist()


def test_a_lazy_mask_is_a_tensor_to_who_looks() -> None:
    lazy = LazyMask(masks.causal(), 2, 3, 3)
    right = torch.ones(2, 1, 3, 3, dtype=torch.bool).tril()
    assert lazy.shape == right.shape
    assert torch.equal(lazy[:, :, -1:], right[:, :, -1:])
    assert torch.equal(lazy & right, right)
    assert torch.equal(torch.where(lazy, 0.0, 1.0), torch.where(right, 0.0, 1.0))
    assert torch.equal(lazy.repeat_interleave(2, dim=0), right.repeat_interleave(2, dim=0))
    assert "Causal" in repr(lazy)
