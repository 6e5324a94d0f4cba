"""Weights of ``torch.nn.MultiheadAttention`` under the names that ``MultiHeadAttention`` has for them.

nn.MultiheadAttention                        here
in_proj_weight (3 embed, embed)              q_proj.weight, k_proj.weight, v_proj.weight, stacked in this order
q_proj_weight, k_proj_weight, v_proj_weight  the same (torch has these where kdim or vdim differs from embed_dim)
in_proj_bias (3 embed,)                      q_proj.bias, k_proj.bias, v_proj.bias
out_proj.weight, out_proj.bias               the same
bias_k, bias_v (add_bias_kv)                 refused
add_zero_attn                                refused: it is an option, and leaves no trace in a state dict
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from torch import nn

PARTS = ("q_proj", "k_proj", "v_proj")


def rename(state: MutableMapping[str, Any], prefix: str = "") -> None:
    """In place, the entries of nn.MultiheadAttention at this prefix; all others stay.

    Raises ValueError where there is a bias_k or bias_v. Nothing is copied: parts are views of the whole.

    >>> state = dict(nn.MultiheadAttention(8, 2).state_dict())
    >>> rename(state)
    >>> sorted(state)[:4], state["k_proj.weight"].shape
    (['k_proj.bias', 'k_proj.weight', 'out_proj.bias', 'out_proj.weight'], torch.Size([8, 8]))
    """
    for name in ("bias_k", "bias_v"):
        if prefix + name in state:
            raise ValueError(
                f"state_dict has {prefix + name}: a learned key and value after the last token (add_bias_kv=True), "
                f"which MultiHeadAttention does not have"
            )
    for kind in ("weight", "bias"):
        whole = state.pop(f"{prefix}in_proj_{kind}", None)
        if whole is not None:
            for part, rows in zip(PARTS, whole.chunk(3), strict=True):
                state[f"{prefix}{part}.{kind}"] = rows
    for part in PARTS:
        if f"{prefix}{part}_weight" in state:
            state[f"{prefix}{part}.weight"] = state.pop(f"{prefix}{part}_weight")


def options(module: Any) -> dict[str, Any]:
    """The arguments with which a MultiHeadAttention like this nn.MultiheadAttention is made; or what stands against it.

    >>> options(nn.MultiheadAttention(8, 2, vdim=6))["vdim"]
    6
    """
    if not isinstance(module, nn.MultiheadAttention):
        raise TypeError(f"module is {type(module).__name__}, it must be a torch.nn.MultiheadAttention")
    if module.add_zero_attn:
        raise ValueError(
            "module has add_zero_attn=True, a key and value of zeros after the last token, which MultiHeadAttention "
            "does not have: sinks=torch.zeros(heads) gives the same weights, as that token's score and value are 0"
        )
    weight = module.out_proj.weight
    return {
        "embed_dim": module.embed_dim,
        "num_heads": module.num_heads,
        "kdim": module.kdim,
        "vdim": module.vdim,
        "bias": module.in_proj_bias is not None,
        "dropout": module.dropout,
        "device": weight.device,
        "dtype": weight.dtype,
    }
