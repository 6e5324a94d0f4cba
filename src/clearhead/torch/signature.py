"""The arguments of torch's scaled_dot_product_attention as a call of ours: what does not fit is said here.

torch broadcasts every leading axis, heads too, and takes tensors of unequal rank; here one axis is the heads', and a
group of query heads may share a key head. Tensors are viewed so that both mean the same; nothing is copied, but for
grouped heads of which keys and values have unequal numbers. Errors are of the class that torch's are.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead import masks
from clearhead.torch.arrays import FLOATS
from clearhead.torch.attention import draw, lowered
from clearhead.torch.call import Fixed, Tensors, in_order

_CAUSAL = masks.causal(align="start")
_NO_OVERRIDE = torch._C._disabled_torch_function_impl


def is_ours(tensors: tuple[Any, ...], dropout_p: Any, is_causal: Any, scale: Any, enable_gqa: Any) -> bool:
    """Whether this can be a call of ours; if not, torch's own function does it, or says what is wrong."""
    if not all(isinstance(t, Tensor) and not overrides(t) for t in tensors):
        return False
    if not all(t.layout is torch.strided and t.device.type == "cpu" and not t.is_nested for t in tensors):
        return False
    if tensors[0].dtype not in FLOATS or type(is_causal) is not bool or type(enable_gqa) is not bool:
        return False
    return _is_number(dropout_p) and (scale is None or (_is_number(scale) and math.isfinite(scale)))


def overrides(tensor: Tensor) -> bool:
    """Whether a tensor's class says itself what functions do with it, as nested and distributed ones."""
    kind = type(tensor)
    return kind is not Tensor and kind.__torch_function__ is not _NO_OVERRIDE


def ordered(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool,
            scale: float | None, enable_gqa: bool) -> tuple[Fixed, Tensors]:  # fmt: skip
    """The call, checked."""
    query, key, value = lowered(query, key, value)
    if attn_mask is not None and attn_mask.dtype is not torch.bool:
        (attn_mask,) = lowered(attn_mask)
    _check(query, key, value, attn_mask, enable_gqa)
    if not 0 <= dropout_p <= 1:
        raise RuntimeError(f"dropout_p is a probability, between 0 and 1, got {dropout_p}")
    query, key, value = _aligned(query, key, value, enable_gqa)
    bias, allowed = (None, attn_mask) if attn_mask is None or attn_mask.dtype is torch.bool else (attn_mask, None)
    fixed = Fixed(_CAUSAL if is_causal else None, None if scale is None else float(scale), dropout=float(dropout_p))
    seed = draw(fixed.dropout, query)
    return fixed, in_order(query=query, key=key, value=value, bias=bias, allowed=allowed, seed=seed)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.ndim == 0 and not value.requires_grad and not value.is_complex()
    return isinstance(value, int | float | np.floating | np.integer)


def _check(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, grouped: bool) -> None:
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    ranks = query.ndim, key.ndim, value.ndim
    if min(ranks) < 2:
        raise RuntimeError(f"query, key and value must be (..., tokens, dim), with two axes or more, got {shapes}")
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype != query.dtype:
            raise RuntimeError(
                f"query has dtype {query.dtype} and {name} has {tensor.dtype}: they must agree, {name}.to(query.dtype)"
            )
    if query.shape[-1] != key.shape[-1]:
        raise RuntimeError(f"query has dim {query.shape[-1]} and key has dim {key.shape[-1]}: they must be equal")
    if key.shape[-2] != value.shape[-2]:
        raise RuntimeError(
            f"key has {key.shape[-2]} tokens and value has {value.shape[-2]}: each key needs exactly one value"
        )
    if grouped and min(ranks) < 3:
        raise IndexError(f"enable_gqa=True needs an axis of heads, (..., heads, tokens, dim), got {shapes}")
    if grouped:
        for name, tensor in (("key", key), ("value", value)):
            _check_heads(name, tensor.shape[-3], query.shape[-3])
    try:
        lead = torch.broadcast_shapes(*(t.shape[: -3 if grouped else -2] for t in (query, key, value)))
    except RuntimeError:
        hint = "" if grouped else "; heads of which several queries' share a key's need enable_gqa=True"
        raise RuntimeError(f"the leading axes do not broadcast: {shapes}{hint}") from None
    if mask is not None:
        heads = query.shape[-3:-2] if grouped else ()
        _check_mask(mask, query.dtype, (*lead, *heads, query.shape[-2], key.shape[-2]))


def _check_heads(name: str, own: int, heads: int) -> None:
    if heads % own if own else heads:
        raise RuntimeError(
            f"{name} has {own} heads and query has {heads}: with enable_gqa=True each head of {name} serves as many "
            f"query heads, {heads} is not a multiple of {own}"
        )


def _check_mask(mask: Tensor, dtype: torch.dtype, scores: tuple[int, ...]) -> None:
    if mask.dtype not in (torch.bool, torch.float32, dtype):
        raise RuntimeError(
            f"attn_mask has dtype {mask.dtype}: it must be boolean, True where attending is allowed, or hold numbers "
            f"to add to the scores, in torch.float32 or query's {dtype}"
        )
    fits = mask.ndim <= len(scores) and all(
        own in (1, full) for own, full in zip(reversed(mask.shape), reversed(scores), strict=False)
    )
    if not fits:
        raise RuntimeError(
            f"attn_mask has shape {tuple(mask.shape)}, which does not broadcast to (..., queries, keys) = {scores}"
        )


def _aligned(query: Tensor, key: Tensor, value: Tensor, grouped: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The same with an axis of heads each, or none: query heads a multiple of those that key and value have."""
    if max(query.ndim, key.ndim, value.ndim) == 2:
        return query, key, value
    query, key, value = (t[None] if t.ndim == 2 else t for t in (query, key, value))
    heads, key_heads, value_heads = (t.shape[-3] for t in (query, key, value))
    if key_heads == value_heads and (grouped or heads == key_heads or key_heads == 1):
        return query, key, value
    if grouped:
        key, value = (t.repeat_interleave(heads // max(1, t.shape[-3]), dim=-3) for t in (key, value))
        return query, key, value
    most = max(heads, key_heads, value_heads) if min(heads, key_heads, value_heads) else 0
    query, key, value = (t.expand(*t.shape[:-3], most, *t.shape[-2:]) for t in (query, key, value))
    return query, key, value
