"""JAX: ``jax.nn.dot_product_attention``, compiled by XLA.

XLA's threads are as many as its client has when it starts: another number means another client. Arrays are laid out
as it wants them beforehand, (batch, tokens, heads, dim).
"""

import itertools
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.extend import backend
from numpy.typing import NDArray

from peers import LARGEST
from workload import Workload

name = "JAX"
version = jax.__version__

jax.config.update("jax_platforms", "cpu")


def set_threads(count: int) -> bool:
    os.environ["NPROC"] = str(count)  # heeded by XLA when a client starts
    backend.clear_backends()
    return True


def lacks(workload: Workload) -> str | None:
    if workload.way != "forward":
        return "its gradients are not measured"
    if workload.dtype == "float16":
        return "it multiplies no float16 matrices on CPUs"
    if workload.dtype == "float64":
        return "its softmax is that of float32, whatever the inputs"
    if workload.score != "dot":
        return f"the function has no {workload.score} score"
    if workload.dense_nbytes > LARGEST:
        return f"it holds all scores, {workload.dense_nbytes / 1e9:.1f} GB"
    return None


def prepare(workload: Workload) -> Callable[[], Any]:
    turns = itertools.cycle(
        [[jnp.asarray(np.swapaxes(array, 1, 2)) for array in arrays] for arrays in workload.arrays()]
    )
    causal = workload.mask == "causal"
    visible = None if causal else workload.visible()
    mask = None if visible is None else jnp.asarray(visible.reshape(-1, 1, *visible.shape[-2:]))

    @jax.jit
    def attention(query: Any, key: Any, value: Any, mask: Any) -> Any:
        return jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=causal, implementation="xla")

    return lambda: attention(*next(turns), mask).block_until_ready()


def numbers(result: Any) -> NDArray[np.float64]:
    return np.swapaxes(np.asarray(result).astype(np.float64), 1, 2)
