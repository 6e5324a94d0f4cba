"""Where a layer's tokens come from, through the layers below: attention rollout, without a matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from clearhead.weights import AttentionWeights

AT_ONCE = 16  # rows that go through the layers together: what is held is linear in tokens


def rollout(weights: Sequence[AttentionWeights], rows: ArrayLike, *, residual: float = 0.5) -> NDArray[np.float64]:
    """How much of each token at the input reaches the chosen rows of the last layer, if attention alone moved it.

    The rows of A_L ... A_2 A_1, where A_l = residual I + (1 - residual) mean over heads of W_l. A W would be
    tokens x tokens numbers a head; here a row goes through the layers from the last to the first, as a vector times a
    matrix whose weights are computed where they are needed.

    Parameters
    ----------
    weights : one AttentionWeights a layer, the first layer first
        (..., heads, tokens, tokens), or (tokens, tokens); all of a shape but for the heads.
    rows : (n,) integers
        Which queries of the last layer; negative ones count from the end.
    residual : from 0 to 1
        The share of the residual connection. The paper's is 0.5.

    Returns
    -------
    array (..., n, tokens) float64. Rows sum to 1, less what learned sinks take. A head's row that sees nothing
    passes on what it holds.

    Raises
    ------
    ValueError
        If there is no layer, a layer's matrix is not square or of another shape than the first's, a row does not
        exist, or residual is not a share.

    Notes
    -----
    A pass over the scores of each layer for every 16 rows; memory linear in tokens. Rows that see no later token need
    only the scores up to the last row asked for.

    References
    ----------
    Abnar & Zuidema 2020, *Quantifying Attention Flow in Transformers*, section 3, equation 1: A is 0.5 W_att + 0.5 I.

    Examples
    --------
    >>> import numpy as np, clearhead as ch
    >>> x = np.zeros((3, 2))
    >>> layer = ch.attention_weights(x, x, mask=ch.masks.causal())
    >>> rollout([layer, layer], [1]).round(4).tolist()  # a half, then a quarter of the rest stays at 1
    [[0.4375, 0.5625, 0.0]]
    """
    tokens, lead = _checked(weights, residual)
    chosen = np.atleast_1d(np.asarray(rows))
    if chosen.ndim != 1 or not np.issubdtype(chosen.dtype, np.integer):
        raise ValueError(f"rollout: rows must be integers, (n,), got {chosen.dtype} of shape {chosen.shape}")
    if chosen.size and not (-tokens <= chosen.min() and chosen.max() < tokens):
        raise ValueError(f"rollout: rows must lie between {-tokens} and {tokens - 1}, got {chosen.tolist()}")
    out = np.zeros((*lead, len(chosen), tokens))
    for first in range(0, len(chosen), AT_ONCE):
        some = chosen[first : first + AT_ONCE] % tokens
        held = np.zeros((*lead, len(some), tokens))
        held[..., np.arange(len(some)), some] = 1
        for layer in reversed(weights):
            held = residual * held + (1 - residual) * _through(layer, held)
        out[..., first : first + AT_ONCE, :] = held
    return out


def _through(layer: AttentionWeights, held: NDArray[np.float64]) -> NDArray[np.float64]:
    """held (..., n, tokens) @ the mean over heads of the weights, in which rows that see nothing are those of I."""
    empty = np.isneginf(layer.logsumexp64)
    if layer.ndim == 2:
        return np.asarray(held.astype(layer.dtype) @ layer + held * empty)
    by_head = held[..., None, :, :]
    moved: Any = by_head.astype(layer.dtype) @ layer
    return np.asarray((moved + by_head * empty[..., None, :]).mean(axis=-3, dtype=np.float64))


def _checked(weights: Sequence[AttentionWeights], residual: float) -> tuple[int, tuple[int, ...]]:
    """(tokens, batch axes)"""
    if not weights:
        raise ValueError("rollout needs the weights of at least one layer")
    if not 0 <= residual <= 1:
        raise ValueError(f"rollout: residual is a share, from 0 to 1, got {residual}")
    first = weights[0].shape
    for n, layer in enumerate(weights):
        if layer.shape[-1] != layer.shape[-2]:
            raise ValueError(
                f"rollout: layer {n} has weights {layer.shape}: tokens must attend to themselves, in a square"
            )
        if (*layer.shape[:-3], *layer.shape[-2:]) != (*first[:-3], *first[-2:]):
            raise ValueError(
                f"rollout: layer {n} has weights {layer.shape}, layer 0 has {first}: only heads may differ"
            )
    return first[-1], first[:-3]
