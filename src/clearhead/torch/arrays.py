"""A tensor and an array on the same memory: nothing is copied either way.

NumPy has no bfloat16 of its own; ml_dtypes gives it one, and the bits pass through as 16-bit integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def array_of(tensor: Tensor) -> NDArray[Any]:
    """The array that sees a CPU tensor's memory; no gradient flows through it.

    >>> x = torch.zeros(2)
    >>> array_of(x)[0] = 5
    >>> x.tolist()
    [5.0, 0.0]
    """
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    if tensor.dtype is not torch.bfloat16:
        return tensor.numpy()
    from ml_dtypes import bfloat16

    return tensor.view(torch.int16).numpy().view(bfloat16)


def tensor_of(array: NDArray[Any]) -> Tensor:
    """The tensor that sees an array's memory: of one that kernels have made, which no one else holds."""
    if array.itemsize == 2 and array.dtype.name == "bfloat16":  # a dtype's name takes a microsecond to make
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def stand_in(tensor: Tensor) -> NDArray[Any]:
    """An array of a tensor's shape and dtype that takes no memory and must not be read.

    What checks arguments looks at no more, and tensors that hold no numbers (fake ones, or those of torch.func) have no
    more.
    """
    if tensor.dtype is torch.bfloat16:
        from ml_dtypes import bfloat16

        dtype = np.dtype(bfloat16)
    else:
        dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))
    return np.broadcast_to(np.zeros((), dtype), tuple(tensor.shape))
