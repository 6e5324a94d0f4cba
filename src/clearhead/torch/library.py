"""Attention as operators of torch's own library, for everything that looks at operators instead of running them:
torch.compile and export, fake and meta tensors, modes and subclasses.

Operators take tensors and numbers alone. What else a call has, its mask and functions, is kept here and goes by a
number (``handle``), which a compiled graph has as a constant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from clearhead.torch import autograd, operations
from clearhead.torch.call import NAMES, Fixed
from clearhead.torch.words import mask_of, words_of

_kept: list[tuple[Any, ...]] = []
_handles: dict[Any, int] = {}


def handle(mask: Any, align: Any, function: Any, derivative: Any) -> int:
    """The number of these, the same for the same. They are kept for good, as graphs may hold the number."""
    number: int = _number(align, function, derivative, *words_of(mask))
    return number


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _number(*entry: Any) -> int:
    if entry not in _handles:
        align, function, derivative, *words = entry
        _kept.append((mask_of(tuple(words)), align, function, derivative))
        _handles[entry] = len(_kept) - 1
    return _handles[entry]


def _fixed(number: int, scale: float | None, softcap: float | None, dropout: float) -> Fixed:
    mask, align, function, derivative = _kept[number]
    return Fixed(mask, scale, softcap, align, function, derivative, dropout)


@torch.library.custom_op("clearhead::attend", mutates_args=())
def attend(number: int, scale: float | None, softcap: float | None, dropout: float,
           query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale_tensor: Tensor | None,
           softcap_tensor: Tensor | None, alibi: Tensor | None, sinks: Tensor | None, weight: Tensor | None,
           query_weight: Tensor | None, key_weight: Tensor | None, vector: Tensor | None, allowed: Tensor | None,
           seed: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(output, logsumexp, rows); rows is empty where the kernels had no part."""
    fixed = _fixed(number, scale, softcap, dropout)
    tensors = (query, key, value, bias, scale_tensor, softcap_tensor, alibi, sinks, weight, query_weight, key_weight,
               vector, allowed, seed)  # fmt: skip
    output, logsumexp, rows = autograd.forward(fixed, tensors, True)
    assert logsumexp is not None
    return output, logsumexp, query.new_empty(0, dtype=torch.float64) if rows is None else rows


@attend.register_fake
def _(number: int, scale: float | None, softcap: float | None, dropout: float,
      query: Tensor, key: Tensor, value: Tensor, *others: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    lead = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    rows = (*lead, *query.shape[-3:-1])
    logs = query.new_empty(rows, dtype=torch.float64 if query.dtype == torch.float64 else torch.float32)
    kernels = autograd.by_kernels(_fixed(number, None, None, dropout), (query, key, value, *others)) or (
        dropout == 0 and query.device.type == "meta"
    )
    heads = query.shape[-3] if query.ndim > 2 else 1
    kept = (math.prod(lead), heads, query.shape[-2], 2) if kernels else (0,)
    return query.new_empty((*rows, value.shape[-1])), logs, query.new_empty(kept, dtype=torch.float64)


@torch.library.custom_op("clearhead::attend_backward", mutates_args=())
def attend_backward(number: int, scale: float | None, softcap: float | None, dropout: float, wanted: Sequence[int],
                    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale_tensor: Tensor | None,
                    softcap_tensor: Tensor | None, alibi: Tensor | None, sinks: Tensor | None, weight: Tensor | None,
                    query_weight: Tensor | None, key_weight: Tensor | None, vector: Tensor | None,
                    allowed: Tensor | None, seed: Tensor | None, output: Tensor, rows: Tensor,
                    grad_output: Tensor | None, grad_logsumexp: Tensor | None) -> list[Tensor]:  # fmt: skip
    """Gradients of the tensors whose places are wanted."""
    fixed = _fixed(number, scale, softcap, dropout)
    tensors = (query, key, value, bias, scale_tensor, softcap_tensor, alibi, sinks, weight, query_weight, key_weight,
               vector, allowed, seed)  # fmt: skip
    kept = rows if autograd.by_kernels(fixed, tensors) else None
    names = [NAMES[place] for place in wanted]
    return autograd.gradients(fixed, tensors, output, kept, grad_output, grad_logsumexp, names)


@attend_backward.register_fake
def _(number: int, scale: float | None, softcap: float | None, dropout: float, wanted: Sequence[int],
      *others: Any) -> list[Tensor]:  # fmt: skip
    return [others[place].new_empty(others[place].shape) for place in wanted]


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.numbers, tensors = inputs[:4], inputs[4:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, output[0], output[2])


def _backward(ctx: Any, grad_output: Tensor | None, grad_logsumexp: Tensor | None, _: Any) -> Any:
    nothing = (None,) * 4
    *tensors, output, rows = ctx.saved_tensors
    if grad_output is None is grad_logsumexp:
        return (*nothing, *(None for _ in tensors))
    wanted = [place for place, needed in enumerate(ctx.needs_input_grad[4:]) if needed]
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        names = [NAMES[place] for place in wanted]
        found = operations.differentiable_gradients(_fixed(*ctx.numbers), tensors, grad_output, grad_logsumexp, names)
    else:
        found = attend_backward(*ctx.numbers, wanted, *tensors, output, rows, grad_output, grad_logsumexp)
    of = dict(zip(wanted, found, strict=True))
    return (*nothing, *(of.get(place) for place in range(len(tensors))))


attend.register_autograd(_backward, setup_context=_keep)
