"""OpenVINO's ``ScaledDotProductAttention``, compiled for latency.

It is told in which precision to compute, that of the inputs: by default it computes float32 in bfloat16 where the
processor has matrix units for that, and errs by 3e-3. Pinning threads to cores is off, because the other peers' threads
share the process.
"""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import openvino
from numpy.typing import NDArray
from openvino import opset13, properties
from openvino.properties import hint

from workload import Workload

name = "OpenVINO"
version = openvino.__version__.split("-")[0]

TYPES = {"float32": openvino.Type.f32, "float16": openvino.Type.f16, "bfloat16": openvino.Type.bf16}
_threads = 1


def set_threads(count: int) -> bool:
    global _threads
    _threads = count
    return True


def lacks(workload: Workload) -> str | None:
    if workload.way != "forward":
        return "the operator has no gradients"
    if workload.dtype not in TYPES:
        return f"it computes {workload.dtype} in less precision"
    if workload.score != "dot":
        return f"the operator has no {workload.score} score"
    return None


def prepare(workload: Workload) -> Callable[[], Any]:
    precision, causal = TYPES[workload.dtype], workload.mask == "causal"
    visible = None if causal else workload.visible()
    turns = [[_grouped(array, workload) for array in arrays] for arrays in workload.arrays()]
    parameters = [opset13.parameter(array.shape, precision) for array in turns[0]]
    tensors = [[openvino.Tensor(*_raw(array, precision)) for array in arrays] for arrays in turns]
    if visible is not None:
        parameters.append(opset13.parameter(visible.shape, openvino.Type.boolean))
        for arrays in tensors:
            arrays.append(openvino.Tensor(visible, shared_memory=True))
    node = opset13.scaled_dot_product_attention(*parameters, causal=causal)
    compiled = openvino.Core().compile_model(openvino.Model([node], parameters, "attention"), "CPU", {
        hint.performance_mode(): hint.PerformanceMode.LATENCY,
        hint.inference_precision(): precision,
        hint.enable_cpu_pinning(): False,
        properties.inference_num_threads(): _threads,
    })  # fmt: skip
    # The arrays are kept beside the requests, which read them where they lie and hold no reference.
    requests = itertools.cycle([(_request(compiled, found), turns, visible) for found in tensors])

    def attention() -> Any:
        request, *_ = next(requests)
        request.infer()
        return request

    return attention


def numbers(result: Any) -> NDArray[np.float64]:
    found = result.get_output_tensor().data
    if result.get_output_tensor().element_type == openvino.Type.bf16 and found.dtype.name != "bfloat16":
        found = (found.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.asarray(found).astype(np.float64)


def _request(compiled: Any, tensors: list[Any]) -> Any:
    request = compiled.create_infer_request()
    for place, tensor in enumerate(tensors):
        request.set_input_tensor(place, tensor)
    return request


def _grouped(array: NDArray[Any], workload: Workload) -> NDArray[Any]:
    """The query heads that share a key head as rows of one matrix: the operator has no groups."""
    return array.reshape(workload.batch, workload.key_heads or workload.heads, -1, workload.dim)


def _raw(array: NDArray[Any], precision: Any) -> tuple[Any, ...]:
    """What a tensor is made from, in place."""
    if precision == openvino.Type.bf16:
        return array.view(np.uint16), array.shape, precision
    return array, True
