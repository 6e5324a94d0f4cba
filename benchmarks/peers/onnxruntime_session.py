"""What the two operators of ONNX Runtime share: a model of one node, and a session that runs it.

Its threads spin within a call, as by default, and are told to stop when the call ends: otherwise they spin on, 37 ms of
the 50 that follow, while the next peer is measured. Without any spinning the calls themselves may be slower. Inputs are
bound where they lie; nothing is copied in the call.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnx import ModelProto, helper

version = onnxruntime.__version__


def model(node: Any, dtypes: dict[str, str]) -> ModelProto:
    """A model of one node. ``dtypes``: the type of each input by its name; the output has that of the first."""
    values = [helper.make_tensor_value_info(name, _type(dtype), None) for name, dtype in dtypes.items()]
    output = helper.make_tensor_value_info(node.output[0], _type(next(iter(dtypes.values()))), None)
    graph = helper.make_graph([node], node.op_type, values, [output])
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=11)


def prepared(node: Any, inputs: Sequence[dict[str, NDArray[Any]]], threads: int) -> Callable[[], Any]:
    """A function that runs the node on the next of the inputs, given by name."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.force_spinning_stop", "1")
    dtypes = {name: array.dtype.name for name, array in inputs[0].items()}
    built = model(node, dtypes).SerializeToString()
    session = onnxruntime.InferenceSession(built, options, providers=["CPUExecutionProvider"])
    turns = itertools.cycle([_bound(session, node.output[0], arrays) for arrays in inputs])

    def run() -> Any:
        binding, _ = next(turns)
        session.run_with_iobinding(binding)
        return binding

    return run


def _bound(session: Any, output: str, arrays: dict[str, NDArray[Any]]) -> tuple[Any, Any]:
    """A binding, and what it reads where it lies, to be kept as long."""
    binding = session.io_binding()
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in arrays.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output(output, "cpu")
    return binding, values


def numbers(result: Any) -> NDArray[np.float64]:
    return np.asarray(result.copy_outputs_to_cpu()[0], dtype=np.float64)


def _type(dtype: str) -> int:
    found: int = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return found
