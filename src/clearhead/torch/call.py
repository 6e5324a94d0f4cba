"""One call: its tensors, and what else is fixed about it.

Tensors stand in one order everywhere, that of NAMES: what may have a gradient, as ``clearhead.Gradients`` names it,
then ``allowed``, a mask of booleans, and ``seed``, from which dropped weights follow. Absent ones are None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from clearhead import masks, scores
from clearhead.algebra import Align, Mask
from clearhead.gradients import NAMES as DIFFERENTIABLE
from clearhead.problem import Problem, check
from clearhead.scores import Score

NAMES = (*DIFFERENTIABLE, "allowed", "seed")
QUERY, KEY, VALUE = range(3)
ALLOWED, SEED = NAMES.index("allowed"), NAMES.index("seed")
Tensors = Sequence[Tensor | None]


@dataclass(frozen=True)
class Fixed:
    """What a call has beside tensors. scale and softcap are here as numbers where they are no tensors."""

    mask: Mask | None = None
    scale: float | None = None
    softcap: float | None = None
    align: Align = None
    function: Callable[..., Any] | None = None
    derivative: Callable[..., Any] | None = None
    dropout: float = 0.0


_ONLY = frozenset({"query", "key", "value", "allowed", "seed"})


def named(tensors: Tensors) -> dict[str, Tensor]:
    """Those that there are, by name."""
    return {name: tensor for name, tensor in zip(NAMES, tensors, strict=True) if tensor is not None}


def in_order(**tensors: Tensor | None) -> Tensors:
    """Tensors by name, as they stand in a call."""
    return tuple(tensors.get(name) for name in NAMES)


def problem_of(fixed: Fixed, arrays: dict[str, NDArray[Any]], read: bool = True) -> Problem:
    """The checked Problem of arrays by the names of tensors; ``read`` False: they are stand-ins, only sizes count."""
    return check(arrays["query"], arrays["key"], arrays["value"], mask_of(fixed, arrays), score_of(fixed, arrays, read))


def mask_of(fixed: Fixed, arrays: dict[str, NDArray[Any]]) -> Mask | None:
    allowed = arrays.get("allowed")
    if allowed is None:
        return fixed.mask
    return masks.array(allowed) if fixed.mask is None else fixed.mask & masks.array(allowed)


def score_of(fixed: Fixed, arrays: dict[str, NDArray[Any]], read: bool = True) -> Score | None:
    """The score that the arrays and numbers state; None for the plain dot product."""
    if arrays.keys() <= _ONLY and fixed.scale is None is fixed.softcap and fixed.function is None:
        return None
    options: dict[str, Any] = {
        "scale": _number("scale", fixed.scale, arrays, read),
        "softcap": _number("softcap", fixed.softcap, arrays, read),
        "bias": arrays.get("bias"), "alibi": arrays.get("alibi"), "align": fixed.align, "function": fixed.function,
        "sinks": arrays.get("sinks"), "derivative": fixed.derivative,
    }  # fmt: skip
    if "weight" in arrays:
        return scores.general(arrays["weight"], **options)
    if "vector" in arrays:
        return scores.additive(arrays["query_weight"], arrays["key_weight"], arrays["vector"], **options)
    return scores.dot(**options)


def _number(name: str, fixed: float | None, arrays: dict[str, NDArray[Any]], read: bool) -> float | None:
    """One number: as fixed, or of an array of one."""
    if name not in arrays:
        return fixed
    if arrays[name].size != 1:
        raise ValueError(f"{name} must be one number, got a tensor of shape {arrays[name].shape}")
    return float(np.asarray(arrays[name]).reshape(())) if read else 1.0
