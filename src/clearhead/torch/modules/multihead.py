"""MultiHeadAttention: project to heads, attend, project back. A torch.nn.Module with torch's conventions.

query W_q, key W_k, value W_v  ->  (..., heads, tokens, dim)  ->  turned to positions  ->  attention  ->  W_o
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypedDict, Unpack

import torch
from numpy.typing import ArrayLike, DTypeLike
from torch import Tensor, nn

from clearhead.algebra import Align, Mask
from clearhead.keyvalue import KeyValueCache
from clearhead.scores import Score
from clearhead.torch.arrays import stand_in
from clearhead.torch.attention import attention
from clearhead.torch.modules import checks, decoding, from_torch
from clearhead.torch.modules.rotary import rotated


class ScoreParts(TypedDict, total=False):
    """What may be done to a score: see ``clearhead.torch.attention``."""

    score: Score | None
    scale: float | Tensor | None
    softcap: float | Tensor | None
    bias: Tensor | ArrayLike | None
    alibi: Tensor | ArrayLike | None
    align: Align
    sinks: Tensor | ArrayLike | None
    function: Callable[..., Any] | None
    derivative: Callable[..., Any] | None


class MultiHeadAttention(nn.Module):
    """Several attentions side by side: each head looks through its own projections; what they find is projected back.

    Parameters
    ----------
    embed_dim, num_heads : int
    key_heads : int, optional
        Fewer heads of keys and values, each read by ``num_heads // key_heads`` query heads. num_heads when None.
    head_dim : int, optional
        Numbers of a head; ``embed_dim // num_heads`` when None.
    kdim, vdim : int, optional
        Numbers of a token of key and of value; embed_dim when None.
    bias : bool
        Whether the four projections add one.
    dropout : float
        The probability for each weight to be dropped while training.
    rotary : float, optional
        The base of rotary positions (10,000 in the paper, 500,000 in Llama 3); head_dim must be even. None: without.
    device, dtype
        Of the parameters, as in torch's modules.

    Attributes
    ----------
    q_proj, k_proj, v_proj, out_proj : nn.Linear
        weight (heads * head_dim, embed_dim), (key heads * head_dim, kdim), (key heads * head_dim, vdim) and
        (embed_dim, heads * head_dim). Llama's attention in transformers has o_proj for out_proj, else these names.

    Notes
    -----
    Costs four projections and one call of ``clearhead.torch.attention``, whose dtypes and devices it has: memory is
    linear in tokens, both ways. ``torch.compile`` makes it one graph, without a cache.

    Learned weights begin as in ``nn.MultiheadAttention``: q, k and v by Glorot's uniform law, biases 0.
    ``load_state_dict`` takes the state dict of one, too, also in the middle of a larger model: see
    ``clearhead.torch.modules.from_torch`` for which name becomes which. Two of its habits are not shared: batches come
    first, and True in a mask means *attend*.

    References
    ----------
    Vaswani et al. 2017, *Attention Is All You Need*, section 3.2.2: W_i^Q, W_i^K, W_i^V are the rows of head i in
    ``q_proj.weight`` and so on, transposed; W^O is ``out_proj.weight``, transposed; h is num_heads, d_model embed_dim.
    Ainslie et al. 2023, *GQA*, section 2.2: ``key_heads`` is G.

    >>> import torch, clearhead as ch
    >>> layer = MultiHeadAttention(64, 8, key_heads=2, rotary=10_000.0)
    >>> x = torch.randn(3, 10, 64)
    >>> output, weights = layer(x, mask=ch.masks.causal(), return_weights=True)
    >>> output.shape, weights.shape
    (torch.Size([3, 10, 64]), (3, 8, 10, 10))
    """

    def __init__(
        self, embed_dim: int, num_heads: int, *, key_heads: int | None = None, head_dim: int | None = None,
        kdim: int | None = None, vdim: int | None = None, bias: bool = True, dropout: float = 0.0,
        rotary: float | None = None, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embed_dim = checks.whole("embed_dim", embed_dim)
        self.num_heads = checks.whole("num_heads", num_heads)
        self.key_heads = num_heads if key_heads is None else checks.whole("key_heads", key_heads)
        if num_heads % self.key_heads:
            raise ValueError(f"num_heads is {num_heads}, which is not a multiple of key_heads = {key_heads}")
        if head_dim is None and embed_dim % num_heads:
            raise ValueError(
                f"embed_dim is {embed_dim}, which is not a multiple of num_heads = {num_heads}: say head_dim"
            )
        self.head_dim = embed_dim // num_heads if head_dim is None else checks.whole("head_dim", head_dim)
        self.kdim = embed_dim if kdim is None else checks.whole("kdim", kdim)
        self.vdim = embed_dim if vdim is None else checks.whole("vdim", vdim)
        self.dropout = checks.probability("dropout", dropout)
        self.rotary = _base(rotary, self.head_dim)
        inner, outer = num_heads * self.head_dim, self.key_heads * self.head_dim
        self.q_proj = nn.Linear(embed_dim, inner, bias, device, dtype)
        self.k_proj = nn.Linear(self.kdim, outer, bias, device, dtype)
        self.v_proj = nn.Linear(self.vdim, outer, bias, device, dtype)
        self.out_proj = nn.Linear(inner, embed_dim, bias, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the learned weights anew, from torch's generator."""
        for projection in (self.q_proj, self.k_proj, self.v_proj):
            nn.init.xavier_uniform_(projection.weight)
        self.out_proj.reset_parameters()
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention) -> MultiHeadAttention:
        """One with the weights, dropout and mode of an ``nn.MultiheadAttention``, which keeps its own.

        Raises ValueError if it has add_bias_kv or add_zero_attn, TypeError if it is something else.

        >>> theirs = nn.MultiheadAttention(16, 4, batch_first=True)
        >>> ours, x = MultiHeadAttention.from_torch(theirs), torch.randn(2, 5, 16)
        >>> torch.allclose(ours(x), theirs(x, x, x)[0], atol=1e-6)
        True
        """
        made = cls(**from_torch.options(module))
        made.load_state_dict(module.state_dict())
        for ours, theirs in zip(made.parameters(), _in_order(module), strict=True):
            ours.requires_grad_(theirs.requires_grad)
        return made.train(module.training)

    def forward(
        self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, *,
        mask: Mask | Tensor | None = None, positions: Tensor | None = None, key_positions: Tensor | None = None,
        cache: KeyValueCache | None = None, return_weights: bool = False, **score: Unpack[ScoreParts],
    ) -> Any:  # fmt: skip
        """Attention of queries to keys; to themselves if query comes alone.

        Parameters
        ----------
        query : tensor (batch, queries, embed_dim), or with any other leading axes
        key : tensor (batch, keys, kdim), optional
            query when None.
        value : tensor (batch, keys, vdim), optional
            key when None.
        mask : Mask or tensor, optional
            As in ``clearhead.torch.attention``: made by ``clearhead.masks``, or a tensor that broadcasts over
            (batch, heads, queries, keys), booleans with True where attending is allowed, or numbers to add. Padding is
            ``clearhead.masks.lengths(...)``.
        positions, key_positions : tensor (tokens,) or (batch, tokens) of whole numbers, optional
            Where queries and keys stand, for rotary positions. When None they count from 0, or from what the cache
            holds; keys stand where queries do. To be said where they are different in number.
        cache : KeyValueCache, optional
            Keys and values are appended to it, and queries look at all that it then holds; masks lie over all of it.
            Not while gradients are recorded. See ``new_cache``.
        return_weights : bool
            Also give the weights (batch, heads, queries, keys), before dropout: an ``AttentionWeights``, computed where
            looked at.
        **score
            What may be done to the score, as in ``clearhead.torch.attention``: scale, softcap, bias, alibi, align,
            sinks, function, derivative; or score.

        Returns
        -------
        tensor (batch, queries, embed_dim); with ``return_weights`` a tuple of it and the weights. A row that may attend
        to nothing is ``out_proj`` of zeros.

        Raises
        ------
        TypeError, ValueError
            If a tensor, mask, position, cache or part of the score does not fit: the message names it.
        RuntimeError
            If a cache is given while gradients are recorded, or while training with dropout.
        """
        self._check(query, key, value)
        alone = key is None
        key = query if key is None else key
        value = key if value is None else value
        asked = self._heads(self.q_proj(query), self.num_heads)
        keys, values = (
            self._heads(projection(x), self.key_heads) for projection, x in ((self.k_proj, key), (self.v_proj, value))
        )
        if self.rotary is not None:
            at, key_at = _places(query, key, alone, cache, positions, key_positions)
            asked, keys = rotated(asked, at, self.rotary), rotated(keys, key_at, self.rotary)
        elif positions is not None or key_positions is not None:
            raise ValueError("positions were given, and this module was made without rotary: they would do nothing")
        dropout = self.dropout if self.training else 0.0
        weights = None
        if cache is not None:
            if dropout:
                raise RuntimeError(f"cache was given while training with dropout {dropout}: call module.eval() first")
            found, weights = decoding.attend(cache, asked, keys, values, mask, dict(score), return_weights)
        elif return_weights:
            found, weights = attention(asked, keys, values, mask=mask, dropout=dropout, return_weights=True, **score)
        else:
            found = attention(asked, keys, values, mask=mask, dropout=dropout, **score)
        output = self.out_proj(found.transpose(-3, -2).flatten(-2))
        return (output, weights) if return_weights else output

    def new_cache(self, batch: int, capacity: int = 0, dtype: DTypeLike | None = None) -> KeyValueCache:
        """An empty cache for keys and values of this module, in its dtype when None, with room for some tokens.

        Decoding gives each call what is new:

        >>> import torch, clearhead as ch
        >>> layer, x = MultiHeadAttention(16, 4, rotary=10_000.0), torch.randn(1, 6, 16)
        >>> cache, mask = layer.new_cache(batch=1), ch.masks.causal(align="end")
        >>> with torch.no_grad():
        ...     steps = [layer(part, mask=mask, cache=cache) for part in x.split([4, 1, 1], dim=1)]
        ...     print(torch.allclose(torch.cat(steps, dim=1), layer(x, mask=mask), atol=1e-6))
        True

        Across, the memory is given once, and none of it afterwards:

        >>> layer, memory = MultiHeadAttention(16, 4), torch.randn(1, 9, 16)
        >>> cache = layer.new_cache(batch=1)
        >>> with torch.no_grad():
        ...     first = layer(x[:, :1], memory, cache=cache)
        ...     second = layer(x[:, 1:2], memory[:, :0], cache=cache)
        ...     print(torch.allclose(second, layer(x[:, 1:2], memory), atol=1e-6))
        True
        """
        own = stand_in(self.k_proj.weight.detach()[:0]).dtype if dtype is None else dtype
        return KeyValueCache(batch, self.key_heads, self.head_dim, capacity, own)

    def extra_repr(self) -> str:
        """What it was made with."""
        shown = [f"{self.embed_dim}, {self.num_heads}"]
        for name, usual in (
            ("key_heads", self.num_heads), ("head_dim", self.embed_dim // self.num_heads), ("kdim", self.embed_dim),
            ("vdim", self.embed_dim), ("dropout", 0.0), ("rotary", None),
        ):  # fmt: skip
            if getattr(self, name) != usual:
                shown.append(f"{name}={getattr(self, name)}")
        return ", ".join(shown)

    def _heads(self, x: Tensor, heads: int) -> Tensor:
        """(..., heads, tokens, head_dim) from (..., tokens, heads * head_dim), on the same memory."""
        split: Tensor = x.unflatten(-1, (heads, self.head_dim))
        return split.transpose(-3, -2)

    def _check(self, query: Any, key: Any, value: Any) -> None:
        if value is not None and key is None:
            raise ValueError("value was given without key: give both, or query alone")
        weight = getattr(self.q_proj, "weight", None)
        checks.tokens("query", query, self.embed_dim, "embed_dim", weight)
        if key is None and (self.kdim, self.vdim) != (self.embed_dim, self.embed_dim):
            raise ValueError(
                f"query came alone, and this module has embed_dim {self.embed_dim}, kdim {self.kdim} and vdim "
                f"{self.vdim}: give key and value"
            )
        if key is not None:
            checks.tokens("key", key, self.kdim, "kdim", weight)
            checks.tokens("value", key if value is None else value, self.vdim, "vdim", weight)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        from_torch.rename(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *others)


def _base(rotary: float | None, head_dim: int) -> float | None:
    if rotary is None:
        return None
    if isinstance(rotary, bool) or not (math.isfinite(rotary) and rotary > 0):
        raise ValueError(
            f"rotary is the base of the angles, a positive number such as 10_000.0, or None; got {rotary!r}"
        )
    if head_dim % 2:
        raise ValueError(f"rotary turns pairs of numbers, and head_dim is {head_dim}: it must be even")
    return float(rotary)


def _places(query: Tensor, key: Tensor, alone: bool, cache: KeyValueCache | None, positions: Any,
            key_positions: Any) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Where queries and keys stand; silence only where it can mean one thing."""
    even = query.shape[-2] == key.shape[-2]
    if positions is None and (alone or (cache is None and even)):
        start = 0 if cache is None else len(cache)
        positions = torch.arange(start, start + query.shape[-2], device=query.device)
    if key_positions is None and even:
        key_positions = positions
    if positions is None or key_positions is None:
        raise ValueError(
            f"query has {query.shape[-2]} tokens and key has {key.shape[-2]}, and where they stand was not said: "
            f"rotary positions need positions=... and key_positions=..."
        )
    return checks.places("positions", positions, query), checks.places("key_positions", key_positions, key)


def _in_order(module: nn.MultiheadAttention) -> list[Tensor]:
    """Its parameters, as those of ours stand: weight and bias of q, k, v and out."""
    whole: Tensor | None = module.in_proj_weight
    weights = [whole] * 3 if whole is not None else [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    pairs = [(weight, module.in_proj_bias) for weight in weights] + [(module.out_proj.weight, module.out_proj.bias)]
    return [tensor for pair in pairs for tensor in pair if tensor is not None]
