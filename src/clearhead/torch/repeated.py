"""A call like one before, on plain tensors of which no gradient is asked: straight to a pass that is ready.

What Python does around a small call takes longer than its arithmetic; here are left a look at what could be in the
way, the layout that a pass is known by, and addresses. See ``clearhead.again``, which does the same for arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from clearhead import launch
from clearhead.again import stand_in
from clearhead.plan import plan
from clearhead.torch.arrays import array_of, tensor_of
from clearhead.torch.call import NAMES, problem_of
from clearhead.torch.signature import is_ours, ordered

MOST = 256  # layouts; the next one makes room by forgetting all
# What computes it, the output's shape, and its dtype if that is not the one that is stored.
Ready = tuple[Callable[..., Any], tuple[int, ...], Any]
_known: dict[Any, Ready | None] = {}


def _keys(tensor: Tensor) -> int:
    """Whom torch asks what to do with a tensor, as bits."""
    bits: int = torch._C._dispatch_keys(tensor).raw_repr()
    return bits


def _plain_keys() -> frozenset[int]:
    with torch.inference_mode():
        made = torch.empty(0)
    return frozenset((_keys(torch.empty(0)), _keys(made)))


_PLAIN = _plain_keys()  # of tensors that are memory on the CPU and nothing else: not nested, sparse, fake, negated ...


def output(query: Any, key: Any, value: Any, mask: Any, is_causal: Any, scale: Any, enable_gqa: Any) -> Tensor | None:
    """The output of the call without dropout; None where it must be looked at more closely."""
    if _something_watches():
        return None
    tensors = (query, key, value) if mask is None else (query, key, value, mask)
    for tensor in tensors:
        if type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter:
            return None
        if _keys(tensor) not in _PLAIN or (tensor.requires_grad and torch.is_grad_enabled()):
            return None
    if type(is_causal) is not bool or type(enable_gqa) is not bool or type(scale) not in (type(None), float, int):
        return None
    layout = (
        query.shape, query.stride(), query.dtype, key.shape, key.stride(), key.dtype,
        value.shape, value.stride(), value.dtype, is_causal, scale, enable_gqa,
        None if mask is None else (mask.shape, mask.stride(), mask.dtype),
    )  # fmt: skip
    try:
        known = _known[layout]
    except KeyError:
        if len(_known) >= MOST:
            _known.clear()
        known = _known[layout] = _made_ready(tensors, is_causal, scale, enable_gqa)
    places = query.data_ptr(), key.data_ptr(), value.data_ptr()
    if known is None or (places[0] | places[1] | places[2]) % query.itemsize:
        return None
    compute, shape, dtype = known
    if mask is None:
        found, _ = compute(*places)
    elif mask.dtype is torch.bool:
        found, _ = compute(*places, allowed=mask.data_ptr())
    elif mask.data_ptr() % mask.itemsize == 0:
        found, _ = compute(*places, bias=mask.data_ptr())
    else:
        return None
    return tensor_of(found.reshape(shape) if dtype is None else found.reshape(shape).astype(dtype))


def _something_watches() -> bool:
    """Whether more is wanted than numbers: a graph, a transform, another dtype."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._get_tracing_state()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._is_any_autocast_enabled()
    )


def _made_ready(tensors: Any, is_causal: bool, scale: float | None, enable_gqa: bool) -> Ready | None:
    """What does calls laid out like this one, if such need not be looked at."""
    if not is_ours(tensors, 0.0, is_causal, scale, enable_gqa):
        return None
    query, key, value, *mask = tensors
    fixed, found = ordered(query, key, value, mask[0] if mask else None, 0.0, is_causal, scale, enable_gqa)
    own = {name: tensor for name, tensor in zip(NAMES, found, strict=True) if tensor is not None}
    if any(tensor.data_ptr() != given.data_ptr() for tensor, given in zip(own.values(), tensors, strict=True)):
        return None  # copied
    problem = problem_of(fixed, {name: stand_in(array_of(tensor)) for name, tensor in own.items()})
    planned = plan(problem)
    if not launch.lies_ready(planned):
        return None
    shape = problem.as_given(np.empty((*problem.extent.shape[:-1], value.shape[-1])), -3).shape
    dtype = None if launch.stored_dtype(planned) == problem.dtype else problem.dtype
    return launch.ready(planned).at, shape, dtype
