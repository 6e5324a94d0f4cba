"""Torch's tensors as NumPy's arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def array(tensor: Any) -> NDArray[Any]:
    """A tensor's numbers as an array, on the same memory if that is the CPU's; bfloat16 as ml_dtypes spells it."""
    import torch

    tensor = tensor.detach().cpu()
    if tensor.dtype != torch.bfloat16:
        return np.asarray(tensor.numpy())
    from ml_dtypes import bfloat16

    return np.asarray(tensor.view(torch.int16).numpy()).view(bfloat16)
