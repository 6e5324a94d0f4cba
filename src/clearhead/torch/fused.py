"""A call by the kernels: forward, and backward from what forward left. CPU tensors, no weights dropped.

Tensors are seen as arrays on their own memory. What is kept between the two is a number and its correction for each
row (``rows``), as the kernels leave them; a plan is made anew, so that nothing but tensors has to be kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from clearhead import launch
from clearhead.again import recall
from clearhead.gradients import Vjp
from clearhead.plan import Plan, in_nats, plan
from clearhead.torch.arrays import array_of, tensor_of
from clearhead.torch.call import Fixed, Tensors, mask_of, named, problem_of, score_of
from clearhead.weights import AttentionWeights

Arrays = dict[str, NDArray[Any]]


def forward(fixed: Fixed, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """(output (..., heads, queries, value dim), rows (batch, heads, queries, 2) float64)."""
    arrays = _arrays(tensors)
    known = recall(arrays["query"], arrays["key"], arrays["value"], mask_of(fixed, arrays), score_of(fixed, arrays))
    if known is None:
        planned = plan(problem_of(fixed, arrays))
        output, rows = launch.run(planned)
    else:
        planned = known[0].plan
        output, rows = known[0].run(*known[1])
    problem = planned.problem
    output = problem.as_given(output.reshape(*problem.extent.shape[:-1], output.shape[-1]), -3)
    return tensor_of(output.astype(problem.dtype, copy=False)), tensor_of(rows)


def logsumexp(fixed: Fixed, tensors: Tensors, rows: Tensor) -> Tensor:
    """(..., heads, queries), natural log, of what ``forward`` left: float64 for float64, else float32."""
    planned = _plan(fixed, _arrays(tensors))
    problem = planned.problem
    found = in_nats(planned, rows.numpy()).reshape(problem.extent.shape[:-1]).astype(problem.compute_dtype)
    return tensor_of(problem.as_given(found, -2))


def weights(fixed: Fixed, tensors: Tensors, rows: Tensor) -> AttentionWeights:
    """The weights, computed where they are looked at."""
    planned = _plan(fixed, _arrays(tensors))
    return AttentionWeights(planned, None if launch.can_stream(planned) else rows.numpy())


def gradients(fixed: Fixed, tensors: Tensors, output: Tensor, rows: Tensor, grad_output: Tensor | None,
              grad_logsumexp: Tensor | None, wanted: Sequence[str]) -> list[Tensor]:  # fmt: skip
    """Of what is wanted, each shaped like the tensor it belongs to, in its dtype."""
    arrays = _arrays(tensors)
    planned = _plan(fixed, arrays)
    problem = planned.problem
    whole = array_of(output).reshape(*problem.extent.shape[:-1], output.shape[-1])
    vjp = Vjp(planned, {name: arrays[name] for name in ("query", "key", "value")}, whole, rows.numpy())
    grad = np.broadcast_to(np.zeros((), whole.dtype), output.shape) if grad_output is None else array_of(grad_output)
    # A gradient too large for 16 bits is infinite, as torch's.
    with np.errstate(over="ignore", invalid="ignore"):
        found = vjp(grad, None if grad_logsumexp is None else array_of(grad_logsumexp), wanted)
        return [_like(getattr(found, name), arrays[name]) for name in wanted]


def _like(gradient: NDArray[Any], array: NDArray[Any]) -> Tensor:
    return tensor_of(np.ascontiguousarray(gradient.astype(array.dtype, copy=False)).reshape(array.shape))


def _arrays(tensors: Tensors) -> Arrays:
    return {name: array_of(tensor) for name, tensor in named(tensors).items()}


def _plan(fixed: Fixed, arrays: Arrays) -> Plan:
    known = recall(arrays["query"], arrays["key"], arrays["value"], mask_of(fixed, arrays), score_of(fixed, arrays))
    return plan(problem_of(fixed, arrays)) if known is None else known[0].plan.on(*known[1])
