"""torch's scaled_dot_product_attention, in whose place ours can stand: its arguments, its meaning, our kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from clearhead.torch import repeated
from clearhead.torch.attention import run
from clearhead.torch.signature import is_ours, ordered

_torchs = torch._C._nn.scaled_dot_product_attention


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(scale * q.k + mask) v: ``torch.nn.functional.scaled_dot_product_attention``, by our kernels.

    Parameters
    ----------
    query : tensor (..., heads, queries, dim) or (..., queries, dim)
        float16, bfloat16, float32 or float64 on the CPU; key and value of the same dtype. All leading axes broadcast.
    key : tensor (..., heads, keys, dim)
    value : tensor (..., heads, keys, value dim)
    attn_mask : tensor, broadcasts to (..., heads, queries, keys), optional
        Booleans, True where attending is allowed, or numbers to add to the scores, in float32 or query's dtype.
    dropout_p : float
        The probability for each weight to be dropped, always applied; which ones follows from torch's generator and
        from where a weight stands (``clearhead.torch.dropping``): other ones than torch's function would drop.
    is_causal : bool
        Query i sees key j if j <= i, also where their numbers differ. With attn_mask, what both allow.
    scale : float, optional
        1/sqrt(dim) when None; 0 and negative values are taken as given.
    enable_gqa : bool
        Query head h reads key head ``h // (heads // key heads)``.

    Returns
    -------
    tensor (..., heads, queries, value dim) in the inputs' dtype. A row that may attend to nothing is 0.

    Raises
    ------
    RuntimeError
        If shapes, dtypes or the mask do not fit each other, or dropout_p is no probability: as torch's, in words that
        say what to do. Also if key and value have unequal numbers of tokens, where torch reads past the end.
    IndexError
        If enable_gqa is asked for without an axis of heads.
    TypeError
        If an argument is of another type, by torch's own function.

    Notes
    -----
    torch's own function is called, with its results and errors, for what is not done here: tensors on other devices,
    nested and sparse ones, subclasses that override torch's functions (such as those of ``torch.nn.attention.bias``),
    other dtypes (integers, complex numbers, 8 bits), and a scale that is not finite.

    Gradients, ``torch.compile``, autocast and derivatives of other kinds are those of ``clearhead.torch.attention``;
    attn_mask has a gradient if it asks for one, summed over the axes along which it was broadcast. Memory is linear in
    tokens. What differs: NaN and infinity that the mask hides have no effect, in torch they spread; a query with NaN
    gives NaN, in torch sometimes zeros; attn_mask and is_causal together are an error in some of torch's cases. A
    choice of ``torch.nn.attention.sdpa_kernel`` says nothing here.

    References
    ----------
    Vaswani et al. 2017, *Attention Is All You Need*, equation 1; torch 2.13's documentation of the function.

    Examples
    --------
    >>> import torch, torch.nn.functional as F
    >>> from clearhead.torch import scaled_dot_product_attention
    >>> query, key, value = torch.randn(3, 2, 4, 6, 8).unbind()  # (batch, heads, tokens, dim)
    >>> ours = scaled_dot_product_attention(query, key, value, is_causal=True)
    >>> torch.allclose(ours, F.scaled_dot_product_attention(query, key, value, is_causal=True), atol=1e-5)
    True
    """
    if dropout_p == 0:
        known = repeated.output(query, key, value, attn_mask, is_causal, scale, enable_gqa)
        if known is not None:
            return known
    tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    if not is_ours(tensors, dropout_p, is_causal, scale, enable_gqa):
        return _torchs(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    found: Tensor = run(*ordered(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa))
    return found
