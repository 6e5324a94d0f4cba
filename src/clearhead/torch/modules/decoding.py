"""Attention over a KeyValueCache, as tensors: what a module does at each step of writing token by token.

A cache holds numbers, through which no gradient flows. The kernels read its pages where they lie.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clearhead import scores
from clearhead.algebra import Mask
from clearhead.attend import attention, attention_weights
from clearhead.keyvalue import KeyValueCache
from clearhead.problem import check
from clearhead.scores import Score
from clearhead.torch.arrays import array_of, stand_in, tensor_of
from clearhead.weights import AttentionWeights


def attend(cache: KeyValueCache, query: Tensor, key: Tensor, value: Tensor, mask: Mask | Tensor | None,
           parts: dict[str, Any], with_weights: bool) -> tuple[Tensor, AttentionWeights | None]:  # fmt: skip
    """Append key and value (batch, key heads, tokens, dim), then look at all that there is.

    Where something does not fit, an error says so, and the cache is as it was.
    """
    _check(cache, query, key, value)
    allowed = array_of(mask.cpu()) if isinstance(mask, Tensor) else mask
    score = _score(parts)
    if allowed is not None or score is not None:
        tokens = len(cache) + key.shape[-2]
        keys, values = (
            np.broadcast_to(np.zeros((), cache.dtype), (cache.batch, cache.heads, tokens, dim))
            for dim in (cache.dim, cache.value_dim)
        )
        check(stand_in(query), keys, values, allowed, score)
    cache.append(array_of(key), array_of(value))
    asked = array_of(query)
    output = tensor_of(np.ascontiguousarray(attention(asked, cache, mask=allowed, score=score))).to(value.dtype)
    return output, attention_weights(asked, cache.key, mask=allowed, score=score) if with_weights else None


def _check(cache: Any, query: Tensor, key: Tensor, value: Tensor) -> None:
    if not isinstance(cache, KeyValueCache):
        raise TypeError(
            f"cache is {type(cache).__name__}, it must be a clearhead.KeyValueCache: module.new_cache(batch)"
        )
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value)):
        raise RuntimeError(
            "cache was given while gradients are recorded, and none flow through a cache: "
            "call under torch.no_grad() or torch.inference_mode()"
        )
    if query.device.type != "cpu":
        raise ValueError(f"cache was given and query is on {query.device}: a cache lies in the CPU's memory")
    batch, heads, _, dim = key.shape if key.ndim == 4 else (0, *key.shape[-3:])
    if key.ndim != 4 or (batch, heads, dim, value.shape[-1]) != (cache.batch, cache.heads, cache.dim, cache.value_dim):
        raise ValueError(
            f"cache holds batch {cache.batch}, {cache.heads} key heads, dim {cache.dim}; this call has keys of shape "
            f"{tuple(key.shape)}, and a cache takes (batch, key heads, tokens, dim): module.new_cache(batch)"
        )
    if query.shape[0] != batch:
        raise ValueError(f"query has batch {query.shape[0]} and the cache {batch}: they must be equal")


def _score(parts: dict[str, Any]) -> Score | None:
    """The score that these parts state; None for the plain dot product."""
    given: dict[str, Any] = {name: _array(part) for name, part in parts.items() if part is not None}
    if "score" in given:
        if len(given) > 1:
            raise ValueError("score was given and parts of a score beside it: give one or the other")
        score: Score = given["score"]
        return score
    for name in ("scale", "softcap"):
        if name in given:
            given[name] = float(given[name])
    return scores.dot(**given) if given else None


def _array(part: Any) -> NDArray[Any] | Any:
    return array_of(part.cpu()) if isinstance(part, Tensor) else part
