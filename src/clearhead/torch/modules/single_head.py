"""One head over tensors (..., tokens, dim): what the modules of encoder-decoders have in common.

Masks and weights have an axis for heads all the same, of size 1, as everywhere else.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead import masks
from clearhead.algebra import Extent, Mask
from clearhead.torch.arrays import array_of
from clearhead.torch.attention import attention

Lengths = Tensor | list[int] | int | None


def attend(query: Tensor, key: Tensor, value: Tensor, *, return_weights: bool = False, **options: Any) -> Any:
    """``clearhead.torch.attention`` of one head: the output (..., queries, value dim), and the weights if wanted."""
    heads = (x.unsqueeze(-3) for x in (query, key, value))
    found = attention(*heads, return_weights=return_weights, **options)
    return (found[0].squeeze(-3), found[1]) if return_weights else found.squeeze(-3)


def both(first: Mask | None, second: Mask | None) -> Mask | None:
    """Where both allow it; None allows all."""
    if first is None or second is None:
        return first if second is None else second
    return first & second


def padding(lengths: Lengths, query: Tensor, key: Tensor) -> Mask | None:
    """Only the first ``lengths[b]`` keys are real: TypeError or ValueError unless there are as many."""
    if lengths is None:
        return None
    mask = masks.lengths(lengths.cpu().numpy() if isinstance(lengths, Tensor) else np.asarray(lengths))
    lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])
    mask.check(Extent(tuple(lead), 1, query.shape[-2], key.shape[-2]))
    return mask


def joined(given: Mask | Tensor | None, own: Mask | None) -> tuple[Mask | Tensor | None, Tensor | None]:
    """(mask, bias): what the caller hides and what the module hides; a tensor of numbers is a bias."""
    if isinstance(given, Tensor) and given.dtype is not torch.bool:
        return own, given
    if own is None:
        return given, None
    return both(masks.array(array_of(given.cpu())) if isinstance(given, Tensor) else given, own), None
