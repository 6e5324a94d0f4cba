"""Rotary positions: pairs of a vector's numbers, turned by angles that grow with the token's position.

    (x_n, x_{n + dim/2})  turned by  position * base^(-2n/dim)

The product of a turned query and a turned key depends on how far apart they stand, and not on where. Pairs are made of
the first and the second half, as in Llama's weights; the paper pairs neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotated(x: Tensor, positions: Tensor, base: float = 10_000.0) -> Tensor:
    """x, each token turned to its position.

    Parameters
    ----------
    x : tensor (..., heads, tokens, dim), dim even
        float16, bfloat16, float32 or float64: the dtype of the result. 16 bits are turned in float32 and rounded once.
    positions : tensor (tokens,) or (..., tokens)
        Whole numbers; leading axes broadcast against those of x.
    base : float
        theta of the paper: the larger, the slower the last pairs turn.

    Notes
    -----
    Angles are found in float32, as transformers finds them, with which weights have been trained; in float64 for
    float64. They are made anew at each call, tokens x dim/2 numbers, and no state is kept.

    References
    ----------
    Su et al. 2021, *RoFormer: Enhanced Transformer with Rotary Position Embedding*, section 3.2.2, equation 15:
    theta_i is ``base ** (-2 i / dim)``, m is ``positions``.

    >>> rotated(torch.ones(1, 2, 4), torch.tensor([0, 1]), base=100.0)[0].numpy().round(3)
    array([[ 1.   ,  1.   ,  1.   ,  1.   ],
           [-0.301,  0.895,  1.382,  1.095]], dtype=float32)
    """
    dim = x.shape[-1]
    at = torch.float64 if x.dtype == torch.float64 else torch.float32
    speed = 1.0 / (base ** (torch.arange(0, dim, 2, device=x.device).to(at) / dim))
    angle = (positions.to(x.device)[..., None].to(at) * speed)[..., None, :, :]  # one more axis, for the heads
    cosine, sine = angle.cos(), angle.sin()
    first, second = x[..., : dim // 2].to(at), x[..., dim // 2 :].to(at)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1).to(x.dtype)
