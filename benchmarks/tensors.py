"""Tensors on the memory of a workload's arrays, and a call with its gradients, for each library that speaks torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from workload import Workload


def of(array: NDArray[Any]) -> torch.Tensor:
    """The tensor on an array's memory."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def both_ways(workload: Workload, attention: Callable[..., torch.Tensor]) -> Callable[[], Any]:
    """A function that gives (output, gradients of query, key, value and what an additive score has learned)."""
    learned = workload.learned() if workload.score == "additive" else ()
    given = [of(array).requires_grad_() for array in (*workload.arrays()[0], *learned)]
    grad = of(workload.grad_output())

    def call() -> Any:
        output = attention(*given)
        return (output.detach(), *torch.autograd.grad(output, given, grad))

    return call


def numbers(result: Any) -> NDArray[np.float64]:
    """Output, or side by side with the gradients of query, key and value, to compare."""
    parts = result[:4] if isinstance(result, tuple) else (result,)
    return np.concatenate([part.detach().to(torch.float64).numpy() for part in parts], axis=-1)
