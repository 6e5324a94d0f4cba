"""ONNX Runtime's ``MultiHeadAttention``, an operator of its own (com.microsoft).

It takes queries as (batch, tokens, heads * dim): they are laid out so beforehand, and the output is read back.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import helper

from peers import LARGEST, onnxruntime_session
from workload import Workload

name = "ONNX Runtime, MultiHeadAttention"
version = onnxruntime_session.version

_threads = 1


def set_threads(count: int) -> bool:
    global _threads
    _threads = count
    return True


def lacks(workload: Workload) -> str | None:
    if workload.way != "forward":
        return "the operator has no gradients"
    if workload.dtype != "float32":
        return f"its kernel for CPUs takes no {workload.dtype}"
    if workload.score != "dot" or workload.mask not in ("full", "causal"):
        return "the operator takes neither another score nor an array of booleans for each cell"
    if workload.group > 1:
        return "the operator has as many key heads as query heads"
    if workload.dense_nbytes > LARGEST:
        return f"it holds all scores, {workload.dense_nbytes / 1e9:.1f} GB"
    return None


def prepare(workload: Workload) -> Callable[[], Any]:
    inputs = [
        {name: _tokens_first(array) for name, array in zip(("query", "key", "value"), arrays, strict=True)}
        for arrays in workload.arrays()
    ]
    causal = int(workload.mask == "causal")
    node = helper.make_node("MultiHeadAttention", ["query", "key", "value"], ["output"], domain="com.microsoft",
                            num_heads=workload.heads, unidirectional=causal)  # fmt: skip
    run = onnxruntime_session.prepared(node, inputs, _threads)
    return lambda: (run(), workload.heads)


def numbers(result: Any) -> NDArray[np.float64]:
    binding, heads = result
    found = onnxruntime_session.numbers(binding)
    return np.swapaxes(found.reshape(*found.shape[:2], heads, -1), 1, 2)


def _tokens_first(array: NDArray[Any]) -> NDArray[Any]:
    batch, heads, tokens, dim = array.shape
    return np.ascontiguousarray(np.swapaxes(array, 1, 2)).reshape(batch, tokens, heads * dim)
