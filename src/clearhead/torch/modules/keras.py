"""Weights of Keras's attention layers, as ``layer.get_weights()`` gives them, and what its words are here.

    keras.layers.AdditiveAttention                    AdditiveAttention.from_keras(weights, dim, use_scale=...)
      sum(scale * tanh(q + k))                          project=False; scale (dim,) is vector
      use_scale=False: sum(tanh(q + k))                 learn_vector=False
    keras.layers.Attention                            MultiplicativeAttention.from_keras(weights, dim, score_mode=...,
      score_mode="dot": scale * (q . k)                 use_scale=...): score="dot"; scale () is scale, 1 without
      score_mode="concat":                              score="concat"; query_weight and key_weight are scale times the
        w * sum(tanh(scale * (q + k)))                  identity, vector is w in every place

    layer([query, value, key])                        module(query, key, value): the order differs
    layer([query, value])                             module(query, value): keys are the values
    mask=[query_mask, value_mask]                     mask=value_mask[:, None, None, :], True where attending is
                                                        allowed, as there; multiply the output by query_mask[..., None]
    use_causal_mask=True                              mask=clearhead.masks.causal(align="start")
    dropout=p, training=True                          dropout=p, module.train(); which weights are dropped differs
    return_attention_scores=True                      return_weights=True: (batch, 1, queries, keys); before dropout

The answers are the same, but where Keras's value_mask hides a whole row: it then attends to everything, here to
nothing. Where Keras learns one number ("concat") there are matrices here: trained on, they may become others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor


def numbers(weights: Sequence[ArrayLike], names: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Each of the arrays by its name, as a tensor; ValueError unless there are as many, of these shapes.

    >>> numbers([np.float32(2.0)], {"scale": ()})
    {'scale': tensor(2.)}
    """
    arrays = [np.asarray(weight) for weight in weights]
    shapes, wanted = [array.shape for array in arrays], list(names.values())
    if shapes != wanted:
        words = ", ".join(f"{name} {shape}" for name, shape in names.items()) or "none"
        raise ValueError(f"weights have shapes {shapes}, layer.get_weights() of such a layer gives: {words}")
    return {name: torch.tensor(array) for name, array in zip(names, arrays, strict=True)}
