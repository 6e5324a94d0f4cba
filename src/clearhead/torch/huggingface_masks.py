"""Who may look at whom in a transformers model: as a rule where its mask is one, else as the run of keys that each row
sees, and only where rows see no runs as a matrix.

transformers makes the mask of a forward pass out of small functions of batch, head, query and key: causal, a sliding
window, padding. Those are known here. Others are asked for their matrix, a block of rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary
from transformers import masking_utils as theirs

from clearhead import masks
from clearhead.algebra import HIDDEN, Align, Extent, Intervals, Mask, runs
from clearhead.torch.arrays import array_of
from clearhead.torch.huggingface_models import check_interface
from clearhead.torch.lazy_mask import LazyMask

BLOCK_CELLS = 1 << 24  # of the matrix of a function that is not known, looked at together
Sides = tuple[int | None, int | None]  # how many keys back and ahead a query sees; None is no limit


def clearhead_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = theirs.causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **others: Any,
) -> Tensor | None:
    """The mask of one forward pass, from what transformers calls ``sdpa_mask`` with, in memory linear in tokens.

    Gives a ``LazyMask``, or None where the rule that transformers has for None says the same, or a boolean matrix where
    some row sees keys with gaps; on other devices, and under torch.compile and export, what ``sdpa_mask`` makes. Raises
    ValueError for a model whose attention is its own, and could not read it.

    >>> clearhead_mask(1, 4, 4) is None  # causal, as None is for decoders
    True
    >>> clearhead_mask(1, 4, 4, mask_function=theirs.sliding_window_causal_mask_function(2))
    <LazyMask 1 x 1 x 4 x 4: Window(left=1, right=0, align='start')>
    """
    given: dict[str, Any] = {
        "batch_size": batch_size, "kv_length": kv_length, "kv_offset": kv_offset, "mask_function": mask_function,
        "attention_mask": attention_mask, "use_vmap": use_vmap, "device": device, **others,
    }  # fmt: skip
    if not torch.compiler.is_compiling():
        check_interface(others.get("config"))
    if torch.device(device).type != "cpu" or _unreadable(attention_mask, q_offset):
        return theirs.sdpa_mask(
            q_length=q_length, q_offset=q_offset,  # type: ignore[arg-type]
            local_size=local_size, allow_is_causal_skip=allow_is_causal_skip,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip, **given,
        )  # fmt: skip
    sides = _sides(mask_function)
    if sides is None:
        return _by_blocks(given, q_length, int(q_offset))
    extent = Extent((batch_size,), 1, q_length, kv_length)
    mask = _within(sides, int(q_offset) - kv_offset, extent)
    padding = _padding(attention_mask, kv_length, kv_offset)
    if padding is not None:
        mask = padding if mask is None else mask & padding
    seen = (0, kv_length) if mask is None else mask.intervals(extent)
    if seen is not None:
        start, stop = np.clip(seen[0], 0, kv_length), np.clip(seen[1], 0, kv_length)
        if _says_none(start, stop, extent, allow_is_causal_skip, allow_is_bidirectional_skip):
            return None
        if padding is not None:
            mask = masks.intervals(start, stop)
    return LazyMask(mask, batch_size, q_length, kv_length)


def _unreadable(*given: Any) -> bool:
    """Whether numbers cannot be looked at, or should not: a graph is being recorded."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state():
        return True
    return any(isinstance(one, Tensor) and (type(one) is not Tensor or one.device.type != "cpu") for one in given)


def _says_none(start: Any, stop: Any, extent: Extent, causal: bool, bidirectional: bool) -> bool:
    """Whether the attention function takes None for these runs of keys: for all of them where there is one query or the
    module is no decoder, else for causal, the first query at the first key."""
    if (start > 0).any():
        return False
    if (bidirectional or (causal and extent.queries == 1)) and (stop == extent.keys).all():
        return True
    if not causal or extent.queries == 1:
        return False
    return bool((stop == np.minimum(np.arange(1, extent.queries + 1), extent.keys)).all())


def _within(sides: Sides, first: int, extent: Extent) -> Mask | None:
    """The mask that shows so many keys to either side, query 0 standing at key ``first``."""
    left, right = sides
    if left is None is right:
        return None
    align: Align = "start" if first == 0 else "end" if first == extent.keys - extent.queries else None
    if align is not None:
        return masks.causal(align) if left is None and right == 0 else masks.window(left, right, align)
    position = np.arange(extent.queries) + first
    return masks.intervals(
        np.zeros_like(position) if left is None else position - left,
        np.full_like(position, extent.keys) if right is None else position + right + 1,
    )


def _padding(attention_mask: Tensor | None, keys: int, offset: int) -> Mask | None:
    """The mask of (batch, tokens) booleans: which keys there are. None if there are all."""
    if attention_mask is None:
        return None
    given = array_of(attention_mask)[:, offset : offset + keys]
    if given.shape[1] == keys and given.all():
        return None
    real = np.zeros((len(given), keys), bool)  # beyond what is given, there is nothing yet
    real[:, : given.shape[1]] = given
    found = runs(real)
    if found is None:
        return masks.array(real[:, None, None, :])
    return masks.intervals(*(bound[:, None, None] for bound in found))


def _by_blocks(given: dict[str, Any], queries: int, first: int) -> Tensor | None:
    """The mask that any function states: as runs of keys, else as its matrix."""
    step = max(1, BLOCK_CELLS // max(1, given["batch_size"] * given["kv_length"]))
    found: list[Intervals] = []
    for row in range(0, queries, step):
        part = theirs.sdpa_mask(
            q_length=min(step, queries - row), q_offset=first + row, allow_is_causal_skip=False, **given
        )
        seen = None if part is None else runs(array_of(part))
        if seen is None:
            break
        found.append(seen)
    else:
        start, stop = (np.concatenate(bounds, axis=-1) for bounds in zip(*found, strict=True))
        return LazyMask(masks.intervals(start, stop), given["batch_size"], queries, given["kv_length"])
    return theirs.sdpa_mask(q_length=queries, q_offset=first, allow_is_causal_skip=False, **given)


def _code(function: Callable[..., Any]) -> CodeType:
    return function.__code__


# What functions that transformers makes are made of: one code, whatever they close over.
_AND = _code(theirs.and_masks())
_WINDOW = _code(theirs.sliding_window_overlay(1))
_BOTH_WAYS = _code(theirs.sliding_window_bidirectional_overlay(1))


def _sides(function: Any) -> Sides | None:
    """How many keys back and ahead a mask function lets queries see; None if it is not one of those that are known."""
    code = getattr(function, "__code__", None)
    if function is theirs.causal_mask_function:
        return None, 0
    if function is theirs.bidirectional_mask_function:
        return None, None
    if code not in (_AND, _WINDOW, _BOTH_WAYS):
        return None
    holds = {name: cell.cell_contents for name, cell in zip(code.co_freevars, function.__closure__, strict=True)}
    if code is _WINDOW:
        return holds["sliding_window"] - 1, None
    if code is _BOTH_WAYS:
        return holds["sliding_window"], holds["sliding_window"]
    parts = [_sides(part) for part in holds["mask_functions"]]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    left, right = (
        min((side for side in one_side if side is not None), default=None) for one_side in zip(*known, strict=True)
    )
    return left, right


# What was made of masks that are matrices: layers share few. By the tensor itself, and how often it was changed.
_understood = WeakIdKeyDictionary()


def understood(mask: Tensor, keys: int) -> tuple[Mask | Tensor | None, Tensor | None]:
    """(who may look at whom, what is added to scores) of the mask that a model hands to its attention.

    mask : a LazyMask, booleans, or numbers to be added, of which those below ``HIDDEN`` hide.
    """
    if isinstance(mask, LazyMask) and mask.shape[-1] == keys:
        return mask.mask, None
    if mask.requires_grad:
        return None, mask[..., :keys]
    if _unreadable(mask):
        mask = mask[..., :keys]
        return (mask, None) if mask.dtype == torch.bool else (None, mask)
    if mask.is_inference():
        return _read(mask, keys)
    state = mask._version, keys
    known = _understood.get(mask)
    if known is None or known[0] != state:
        known = _understood[mask] = state, _read(mask, keys)
    return known[1]  # type: ignore[no-any-return]


def _read(mask: Tensor, keys: int) -> tuple[Mask | Tensor | None, Tensor | None]:
    mask, bias = mask.detach()[..., :keys], None
    if mask.dtype != torch.bool:
        allowed = mask > HIDDEN
        bias = torch.where(allowed, mask, 0)
        mask, bias = allowed, bias if bias.any() else None
    if mask.all():
        return None, bias
    found = runs(array_of(mask))
    return (mask if found is None else masks.intervals(*found)), bias
