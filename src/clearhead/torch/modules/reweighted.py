"""Weights that are multiplied by a factor after the softmax, by kernels that know nothing of it.

With l(s) the logsumexp of scores s, and g the factor of each cell:

    sum of softmax(s) g v  =  (sum of softmax(s + ln g) v) exp(l(s + ln g) - l(s))
    softmax(s) g           =  exp(s + ln g - l(s))

So the factor goes in as a bias, and what the softmax divided away comes back from two logsumexps. Both sides are equal,
and so are their gradients. It costs a second pass over the scores, and ln g, queries x keys numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from clearhead import scores
from clearhead.algebra import Mask
from clearhead.attend import attention_weights
from clearhead.scores import Score
from clearhead.torch.arrays import array_of
from clearhead.torch.attention import attention, lowered


def reweighted(query: Tensor, key: Tensor, value: Tensor, log_factor: Tensor, *, mask: Mask | None,
               bias: Tensor | None, dropout: float, return_weights: bool, **score: Any) -> Any:  # fmt: skip
    """As ``single_head.attend``, the weights multiplied by exp(log_factor), (..., 1, queries, keys).

    Rows that see nothing are 0. Weights then sum to less than 1 where the factor is less.
    """
    raised = log_factor if bias is None else log_factor + bias
    query, key, value = lowered(query, key, value)
    asked, keys, values = (x.unsqueeze(-3) for x in (query, key, value))
    output, after = attention(
        asked, keys, values, mask=mask, bias=raised, dropout=dropout, return_logsumexp=True, **score
    )
    # Only the logsumexp is wanted: one number of each value will do.
    _, before, *plain = attention(
        asked,
        keys,
        values[..., :1],
        mask=mask,
        bias=bias,
        return_logsumexp=True,
        return_weights=return_weights,
        **score,
    )
    seen = ~after.isneginf()
    factor = torch.where(seen, torch.where(seen, after, 0) - torch.where(seen, before, 0), 0).exp()
    output = (output * factor.unsqueeze(-1)).to(value.dtype).squeeze(-3)
    if not return_weights:
        return output
    with torch.no_grad():
        logsumexp = plain[0].logsumexp64
        score_then = _score(raised, **score)
        return output, attention_weights(
            _numbers(asked), _numbers(keys), mask=mask, score=score_then, logsumexp=logsumexp
        )


def _score(bias: Tensor, general: Tensor | None = None, additive: tuple[Tensor, Tensor, Tensor] | None = None,
           scale: Tensor | float | None = None) -> Score:  # fmt: skip
    options: dict[str, Any] = {"scale": None if scale is None else float(scale), "bias": _numbers(bias)}
    if general is not None:
        return scores.general(_numbers(general), **options)
    if additive is not None:
        return scores.additive(*(_numbers(part) for part in additive), **options)
    return scores.dot(**options)


def _numbers(tensor: Tensor) -> Any:
    return array_of(tensor.detach().cpu())
