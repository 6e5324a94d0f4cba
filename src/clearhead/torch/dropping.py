"""Which weights dropout drops: decided by where they stand, so that backward finds the same without keeping them.

A hash of (seed, head of the batch, query, key) gives each weight 32 bits; it is dropped if they are below p * 2^32, and
what is kept is divided by 1 - p. The order of computing, blocks and threads have no say. (Salmon et al. 2011, *Parallel
Random Numbers: As Easy as 1, 2, 3*: random numbers as a function of a counter.)
"""

from __future__ import annotations

import torch
from torch import Tensor

BITS = 0xFFFFFFFF


def kept(seed: Tensor, p: float, batch: int, heads: int, rows: range, keys: int) -> Tensor:
    """(batch, heads, rows, keys) booleans: which weights stay.

    seed : one 64-bit integer.

    >>> found = kept(torch.tensor(1), 0.25, 1, 8, range(64), 64)
    >>> abs(found.float().mean().item() - 0.75) < 0.01
    True
    """
    device = seed.device
    place = torch.arange(batch * heads, device=device).view(batch, heads, 1)
    row = torch.arange(rows.start, rows.stop, device=device)
    low, high = seed & BITS, (seed >> 32) & BITS
    first = _mixed(_mixed(_mixed(low ^ 0x5BD1E995) ^ place) + row)
    second = _mixed(_mixed(_mixed(high ^ 0x27D4EB2F) + place) ^ row)
    key = torch.arange(keys, device=device)
    bits = _mixed(_mixed(key ^ first[..., None]) + second[..., None])
    return bits >= round(p * 2**32)


def _mixed(bits: Tensor) -> Tensor:
    """32 bits in which each bit of the argument's lowest 32 changes about half: a finalizer of Murmur's kind."""
    bits = bits & BITS
    bits = ((bits ^ (bits >> 16)) * 0x85EBCA6B) & BITS
    bits = ((bits ^ (bits >> 13)) * 0xC2B2AE35) & BITS
    return bits ^ (bits >> 16)
