"""In a block, torch's scaled_dot_product_attention is ours, for code that cannot be edited.

torch asks a mode, which a thread may have, before it runs one of its functions: so nothing is replaced anywhere, other
threads see nothing of it, and it makes no difference under which name, and when, the function was imported.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from clearhead.torch.replacement import scaled_dot_product_attention


def enabled() -> AbstractContextManager[Any]:
    """``with enabled():`` calls of ``torch.nn.functional.scaled_dot_product_attention`` go to ours.

    In this thread, in the block, also in what is called there: ``torch.nn.MultiheadAttention``,
    ``nn.TransformerEncoderLayer``, other people's models. What ours does not do, torch's own function does: see
    ``clearhead.torch.scaled_dot_product_attention``. Blocks may be nested, and an error ends one as usual.

    Notes
    -----
    Modules of torch take their Python road in the block, not their fused one for inference
    (``torch._transformer_encoder_layer_fwd``), and each call of a function of torch costs some 3 microseconds more.
    Attention that does not call the function is left alone: ``nn.MultiheadAttention`` with ``need_weights=True``, code
    in C++ and TorchScript. Where activations are recomputed (``torch.utils.checkpoint``), ``backward`` belongs into the
    block too: torch notices if it is not.

    Examples
    --------
    >>> import torch, clearhead.torch
    >>> layer = torch.nn.TransformerEncoderLayer(d_model=32, nhead=4, dropout=0.0, batch_first=True)
    >>> x = torch.randn(2, 7, 32)
    >>> with clearhead.torch.enabled():
    ...     found = layer(x)
    >>> torch.allclose(found, layer(x), atol=1e-5)
    True
    """
    return _Enabled()


_torchs = torch._C._nn.scaled_dot_product_attention


class _Enabled(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _REPLACED.get(func, func)(*args, **(kwargs or {}))


# torch asks the mode about some functions as a whole, and no more about what is called in them: these are here as they
# would be if their module had other things under some names.


def _as_if(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    assert isinstance(function, FunctionType)
    module = {**function.__globals__, **names}
    del module["__name__"]  # torch.compile would look names up in the module of this name
    made = FunctionType(function.__code__, module, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    module[function.__name__] = made
    return made


def _run_backward(*args: Any, **kwargs: Any) -> Any:
    """What is recomputed on the way back is ours too."""
    with _Enabled():
        return graph._engine_run_backward(*args, **kwargs)


_backward = _as_if(torch.autograd.backward, _engine_run_backward=_run_backward)


def _tensor_backward(self: Tensor, gradient: Any = None, *args: Any, **kwargs: Any) -> None:
    _backward(self, gradient, *args, **kwargs)


_REPLACED: dict[Any, Callable[..., Any]] = {
    _torchs: scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention: scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default: scaled_dot_product_attention,
    functional.multi_head_attention_forward: _as_if(
        functional.multi_head_attention_forward, scaled_dot_product_attention=scaled_dot_product_attention
    ),
    torch.autograd.grad: _as_if(torch.autograd.grad, _engine_run_backward=_run_backward),
    torch.autograd.backward: _backward,
    Tensor.backward: _tensor_backward,
}
