"""Attention as one node of autograd's graph: output now, gradients when they are asked for.

What is kept between the two are the tensors that came in, the output and two numbers a row: memory is linear in
tokens. Autograd itself notices if one of them was changed in place meanwhile. A backward pass through which gradients
are to flow once more (``create_graph=True``) goes by torch's own operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, is_grad_enabled
from torch.autograd import Function

from clearhead.torch import fused, operations
from clearhead.torch.call import NAMES, VALUE, Fixed, Tensors

COUNT = len(NAMES)


def forward(fixed: Fixed, tensors: Tensors, with_logsumexp: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(output, logsumexp if wanted, rows if there are any): by the kernels if they can, else by torch's operations."""
    if by_kernels(fixed, tensors):
        output, rows = fused.forward(fixed, tensors)
        return output, fused.logsumexp(fixed, tensors, rows) if with_logsumexp else None, rows
    output, logsumexp = operations.forward(fixed, tensors)
    return output, logsumexp, None


def gradients(fixed: Fixed, tensors: Tensors, output: Tensor, rows: Tensor | None, grad_output: Tensor | None,
              grad_logsumexp: Tensor | None, wanted: Sequence[str]) -> list[Tensor]:  # fmt: skip
    """Of what is wanted, on the road that ``forward`` took."""
    if rows is None:
        return operations.gradients(fixed, tensors, grad_output, grad_logsumexp, wanted)
    return fused.gradients(fixed, tensors, output, rows, grad_output, grad_logsumexp, wanted)


def by_kernels(fixed: Fixed, tensors: Tensors) -> bool:
    """Whether the kernels know how: CPU tensors, no dropout."""
    value = tensors[VALUE]
    return fixed.dropout == 0 and value is not None and value.device.type == "cpu"


class Attend(Function):
    """apply(fixed, whether logsumexp is wanted, *tensors) gives the output, or (output, logsumexp)."""

    @staticmethod
    def forward(ctx: Any, fixed: Fixed, with_logsumexp: bool, *tensors: Tensor | None) -> Any:
        output, logsumexp, rows = forward(fixed, tensors, with_logsumexp)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, output, rows)
        ctx.fixed = fixed
        return (output, logsumexp) if with_logsumexp else output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        *tensors, output, rows = ctx.saved_tensors
        grad_output, grad_logsumexp = (*grads, None)[:2]
        if grad_output is None is grad_logsumexp:
            return (None,) * (2 + COUNT)
        wanted = [name for name, needed in zip(NAMES, ctx.needs_input_grad[2:], strict=True) if needed]
        if is_grad_enabled():
            found = operations.differentiable_gradients(ctx.fixed, tensors, grad_output, grad_logsumexp, wanted)
        else:
            found = gradients(ctx.fixed, tensors, output, rows, grad_output, grad_logsumexp, wanted)
        of = dict(zip(wanted, found, strict=True))
        return None, None, *(of.get(name) for name in NAMES)
