"""The two products of attention, each over what is visible alone, and differentiable any number of times.

    match   S_ij = q_i . k_j              where j is visible to i, else 0
    mix     O_i  = sum of W_ij v_j        over the j that are visible to i

The gradients of each are calls of the two, so what is hidden stays without effect in derivatives of any order: NaN or
infinity in a hidden key, value, or output gradient reaches nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def match(query: Tensor, key: Tensor, seen: Tensor) -> Tensor:
    """(..., rows, keys) from query (..., rows, dim), key (..., keys, dim), seen (..., rows, keys) booleans."""
    found: Tensor = _Match.apply(query, key, seen)
    return found


def mix(weights: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """(..., rows, dim) from weights (..., rows, keys), value (..., keys, dim), seen (..., rows, keys) booleans."""
    found: Tensor = _Mix.apply(weights, value, seen)
    return found


class _Product(Function):
    """What the two have in common: both are linear in their first and second argument."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, *arguments: Tensor) -> tuple[Any, int]:
        """The mapped axis becomes the first of the leading ones."""
        del info
        moved = [a[None] if axis is None else a.movedim(axis, 0) for a, axis in zip(arguments, in_dims, strict=True)]
        return cls.apply(*moved), 0


class _Match(_Product):
    @staticmethod
    def forward(query: Tensor, key: Tensor, seen: Tensor) -> Tensor:
        return torch.where(seen, query @ key.mT, 0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, seen = ctx.saved_tensors
        return mix(grads[0], key, seen), mix(grads[0].mT, query, seen.mT), None

    @staticmethod
    def jvp(ctx: Any, *changes: Any) -> Any:
        query, key, seen = ctx.saved_tensors
        return match(changes[0], key, seen) + match(query, changes[1], seen)


class _Mix(_Product):
    @staticmethod
    def forward(weights: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        weights = torch.where(seen, weights, 0)
        found = weights @ value
        return found if found.isfinite().all() else _strange(found, weights, value, seen)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        weights, value, seen = ctx.saved_tensors
        return match(grads[0], value, seen), mix(weights.mT, grads[0], seen.mT), None

    @staticmethod
    def jvp(ctx: Any, *changes: Any) -> Any:
        weights, value, seen = ctx.saved_tensors
        return mix(changes[0], value, seen) + mix(weights, changes[1], seen)


def _strange(found: Tensor, weights: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """The same where some number is not finite: rows that it touched are summed again over what they see."""
    lead = found.shape[:-2]
    whole = [a.expand(*lead, *a.shape[-2:]).flatten(0, -3) if lead else a[None] for a in (found, weights, value, seen)]
    for out, weight, mixed, visible in zip(*whole, strict=True):
        for row in (~out.isfinite()).any(dim=-1).nonzero()[:, 0].tolist():
            own = visible[row].expand(weight.shape[-1]).nonzero()[:, 0]
            out[row] = (weight[row, own, None] * mixed[own]).sum(dim=0)
    return whole[0].reshape(found.shape)
