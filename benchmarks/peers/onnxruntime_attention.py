"""ONNX Runtime's ``Attention``, the operator of ONNX itself (opset 23 and later)."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import helper

from peers import LARGEST, onnxruntime_session
from workload import Workload

name = "ONNX Runtime, Attention"
version = onnxruntime_session.version

_threads = 1


def set_threads(count: int) -> bool:
    global _threads
    _threads = count
    return True


def lacks(workload: Workload) -> str | None:
    if workload.way != "forward":
        return "the operator has no gradients"
    if workload.dtype == "float64":
        return "its scale is a float32, and results err by 4e-8"
    if workload.dtype not in ("float16", "float32"):
        return f"its kernel for CPUs takes no {workload.dtype}"
    if workload.score != "dot":
        return f"the operator has no {workload.score} score"
    if workload.dense_nbytes > LARGEST:
        return f"it holds all scores, {workload.dense_nbytes / 1e9:.1f} GB"
    return None


def prepare(workload: Workload) -> Callable[[], Any]:
    causal = workload.mask == "causal"
    visible = None if causal else workload.visible()
    masks = {} if visible is None else {"mask": visible}
    inputs = [dict(zip(("query", "key", "value"), arrays, strict=True)) | masks for arrays in workload.arrays()]
    node = helper.make_node("Attention", list(inputs[0]), ["output"], is_causal=int(causal))
    return onnxruntime_session.prepared(node, inputs, _threads)


def numbers(result: Any) -> NDArray[np.float64]:
    return onnxruntime_session.numbers(result)
