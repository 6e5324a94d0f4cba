"""Attention of transformers models by Clearhead: register, and load a model with ``attn_implementation="clearhead"``.

>>> import clearhead.torch.huggingface as huggingface
>>> huggingface.register()
>>> from transformers import GPT2Config, GPT2LMHeadModel
>>> config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, attn_implementation="clearhead")
>>> model = GPT2LMHeadModel(config).eval()
>>> output = model(torch.arange(10)[None], output_attentions=True)
>>> output.attentions[1][0, 3, 0]  # of layer 1, text 0, head 3: whom the first token looks at
array([1., 0., 0., 0., 0., 0., 0., 0., 0., 0.], dtype=float32)

What goes in and comes out is what transformers has for its own "sdpa"; whatever a model hands to its attention is
understood, padding, sliding windows, softcaps, sinks and learned biases among it. Masks are kept as rules
(``huggingface_masks``), so that a long prompt takes memory linear in its length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils.output_capturing import _active_collector

from clearhead import masks
from clearhead.torch.attention import attention
from clearhead.torch.huggingface_masks import clearhead_mask, understood
from clearhead.weights import AttentionWeights

NAME = "clearhead"


def register() -> None:
    """Make transformers know the attention implementation "clearhead". Doing it again changes nothing.

    Then ``from_pretrained(..., attn_implementation="clearhead")``, a configuration's ``attn_implementation``, or
    ``model.set_attn_implementation("clearhead")`` choose it, for models whose attention goes through transformers'
    AttentionInterface.
    """
    AttentionInterface.register(NAME, clearhead_attention_forward)
    AttentionMaskInterface.register(NAME, clearhead_mask)


def clearhead_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    output_attentions: bool = False,
    **others: Any,
) -> tuple[Tensor, AttentionWeights | None]:
    """What transformers calls for each attention of a model.

    Parameters
    ----------
    module : the attention's; it says whether it ``is_causal``, where that is not given
    query : tensor (batch, heads, queries, dim); key, value : (batch, key heads, keys, dim)
    attention_mask : tensor that broadcasts over (batch, heads, queries, keys): booleans, True where attending is
        allowed; or numbers to add, where those below -10,000 hide; or a ``LazyMask``. None is causal where the module
        is, the first query at the first key, unless there is one query; else everything is seen.
    dropout, scaling, softcap : numbers; position_bias : tensor to add to scores; s_aux : tensor (heads,), the sinks
    output_attentions : bool
        Also give the weights: of a row that sees something they sum to 1 (less with sinks), dropout or not.

    Returns
    -------
    (output (batch, queries, heads, dim), weights or None). The weights are an ``AttentionWeights``, computed where they
    are looked at; queries and keys are copied for them, as a cache may overwrite the keys.
    """
    if query.device.type != "cpu" and softcap is None and s_aux is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal,
            position_bias=position_bias, output_attentions=output_attentions, **others,
        )  # fmt: skip
    keys = key.shape[2]
    bias: Tensor | None
    if attention_mask is not None:
        mask, bias = understood(attention_mask, keys)
    else:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        mask, bias = _CAUSAL if causal and query.shape[2] > 1 else None, None
    if position_bias is not None:
        position_bias = position_bias[..., :keys]
        bias = position_bias if bias is None else position_bias + bias
    wanted = output_attentions or _recorded()
    if wanted:
        query, key = query.clone(), key.clone()
    weights = None
    output = attention(
        query, key, value, mask=mask, bias=bias, scale=_scale(scaling, query), softcap=softcap, sinks=s_aux,
        dropout=dropout, return_weights=wanted,
    )  # fmt: skip
    if wanted:
        output, weights = output
    return output.transpose(1, 2).contiguous(), weights


_CAUSAL = masks.causal("start")


def _recorded() -> bool:
    """Whether the model that runs collects its attentions' weights: not every model passes ``output_attentions`` on."""
    collected = _active_collector.get()
    return collected is not None and any(name.endswith("attentions") for name in collected)


def _scale(scaling: float | None, query: Tensor) -> float | None:
    """None for the usual scale: calls that say nothing of their score are known again."""
    return None if scaling == query.shape[-1] ** -0.5 else scaling
