"""What modules are made with and called with, checked once: whatever is wrong is said here, by the argument's name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def whole(name: str, number: Any) -> int:
    """A size, 1 or more."""
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"{name} must be a whole number, got {number!r}")
    if number < 1:
        raise ValueError(f"{name} must be 1 or more, got {number}")
    return number


def probability(name: str, number: float) -> float:
    """Between 0 and 1."""
    if not 0 <= number <= 1:
        raise ValueError(f"{name} is a probability, between 0 and 1, got {number}")
    return float(number)


def one_of(name: str, given: Any, choices: tuple[str, ...]) -> str:
    """A word out of several."""
    if given not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {given!r}")
    return str(given)


def only_with(name: str, given: Any, acts: bool, where: str) -> None:
    """An option acts or is refused."""
    if given is not None and not acts:
        raise ValueError(f"{name} was given, and acts only {where}: leave it out")


def tokens(name: str, given: Any, dim: int, meaning: str, weight: Any = None) -> None:
    """A tensor (..., tokens, dim) in the dtype of ``weight``; under autocast, in any."""
    if not isinstance(given, Tensor):
        raise TypeError(f"{name} is {type(given).__name__}, the module takes tensors: torch.as_tensor({name})")
    if given.ndim < 2 or given.shape[-1] != dim:
        raise ValueError(f"{name} has shape {tuple(given.shape)}, it must be (..., tokens, {dim}): {meaning} is {dim}")
    if not isinstance(weight, Tensor) or torch.is_autocast_enabled(given.device.type):
        return
    if given.dtype != weight.dtype:
        raise TypeError(
            f"{name} has dtype {given.dtype} and the module's weights have {weight.dtype}: "
            f"{name}.to({weight.dtype}), or module.to({given.dtype})"
        )


def places(name: str, given: Any, x: Tensor) -> Tensor:
    """Whole numbers (tokens,) or (..., tokens), one for each token of x (..., tokens, dim)."""
    found = torch.as_tensor(given)
    if found.is_floating_point() or found.is_complex() or found.dtype == torch.bool:
        raise TypeError(f"{name} must hold whole numbers, got dtype {found.dtype}")
    lead = tuple(x.shape[:-1])
    short = lead[len(lead) - found.ndim :] if 0 < found.ndim <= len(lead) else ()
    if (
        not short
        or found.shape[-1] != lead[-1]
        or any(a not in (1, b) for a, b in zip(found.shape, short, strict=True))
    ):
        raise ValueError(
            f"{name} has shape {tuple(found.shape)}, it must have one number for each token: ({lead[-1]},) or {lead}"
        )
    return found
