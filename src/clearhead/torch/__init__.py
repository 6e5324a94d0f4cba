"""Attention in torch: faster on CPUs, differentiable in every argument, and with its weights in view.

    attention.py      the call, and which road it takes
      call.py           its tensors in order, and what else is fixed
      autograd.py       a node of autograd's graph
      library.py        operators for torch.compile, fake tensors, modes     words.py   masks in its words
      fused.py          by the kernels           arrays.py   tensors and arrays on the same memory
      operations.py     by torch's operations    products.py, dropping.py
    modules/          torch.nn.Modules: MultiHeadAttention, AdditiveAttention, MultiplicativeAttention
    huggingface.py    the attention of transformers models
      huggingface_masks.py, lazy_mask.py    their masks, without matrices
      huggingface_models.py                 models that have attention of their own
    replacement.py    torch's function of its own name, by ours
      signature.py      its arguments as a call of ours    repeated.py   a call like one before
    enabling.py       torch's function is ours in a block

>>> import torch, clearhead.torch
>>> x = torch.randn(3, 4)
>>> clearhead.torch.attention(x, x, x).shape
torch.Size([3, 4])
"""

from importlib import import_module
from typing import Any

from clearhead.torch.attention import attention
from clearhead.torch.enabling import enabled
from clearhead.torch.modules import AdditiveAttention, MultiHeadAttention, MultiplicativeAttention
from clearhead.torch.replacement import scaled_dot_product_attention

__all__ = [
    "AdditiveAttention",
    "MultiHeadAttention",
    "MultiplicativeAttention",
    "attention",
    "enabled",
    "scaled_dot_product_attention",
]


def __getattr__(name: str) -> Any:
    """``clearhead.torch.huggingface`` imports transformers, so it is loaded when it is first asked for."""
    if name == "huggingface":
        return import_module("clearhead.torch.huggingface")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
