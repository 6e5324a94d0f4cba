"""MultiplicativeAttention: Luong's attention, one of four scores and one of three windows. A torch.nn.Module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from clearhead.algebra import Mask
from clearhead.torch.modules import checks, matching, windows
from clearhead.torch.modules.keras import numbers
from clearhead.torch.modules.reweighted import reweighted
from clearhead.torch.modules.single_head import Lengths, attend, both, joined, padding

SCORES = ("dot", "general", "concat", "location")
WINDOWS = ("global", "local-m", "local-p")


class MultiplicativeAttention(nn.Module):
    """A decoder's look at its source: softmax of a score, over all source positions or those near one.

    Parameters
    ----------
    query_dim : int
        Numbers of a query, the decoder's state h_t.
    key_dim : int, optional
        Numbers of a key, the encoder's state; query_dim when None.
    score : "dot", "general", "concat" or "location"
        q.k (dims must be equal); q.W.k; v.tanh(W [q; k]); or (W q)_s, which depends on the position s alone.
    window : "global", "local-m" or "local-p"
        All positions; those within ``reach`` of the query's own; those within ``reach`` of one that the query predicts,
        weighted by a Gaussian around it. See ``clearhead.torch.modules.windows``.
    reach : int, optional
        D: how far a local window reaches to either side; 10 when None, as in the paper.
    hidden_dim : int, optional
        Numbers of the hidden layer of "concat"; query_dim when None.
    max_keys : int
        Of "location": the longest source.
    scale : float
        What scores are multiplied with.
    learn_scale : bool
        Whether ``scale`` is a parameter that begins there.
    dropout : float
        The probability for each weight to be dropped while training.
    device, dtype
        Of the parameters, as in torch's modules.

    Attributes
    ----------
    matching : module with the score's parameters
        "general": weight (query_dim, key_dim); "concat": query_weight (query_dim, hidden_dim), key_weight (key_dim,
        hidden_dim), vector (hidden_dim,); "location": weight (max_keys, query_dim).
    window : module with the window's parameters
        "local-p": weight (query_dim, query_dim), vector (query_dim,).
    scale : Parameter () or float

    Notes
    -----
    All but "local-p" is one call of ``clearhead.torch.attention``: memory is linear in tokens, and what local-m hides
    is not computed. The factor of local-p follows the softmax, so its weights sum to less than 1; it takes two passes
    and a matrix of queries x keys (``clearhead.torch.modules.reweighted``). What becomes of the output, tanh(W_c [c_t;
    h_t]) in equation 5, is the decoder's affair.

    References
    ----------
    Luong, Pham & Manning 2015, *Effective Approaches to Attention-based Neural Machine Translation*, arXiv 1508.04025,
    sections 3.1 and 3.2: h_t is a query, h_s (with a bar) a key and a value, a_t a row of weights, c_t the output.

    >>> import torch
    >>> align = MultiplicativeAttention(8, 12, score="general", window="local-p", reach=2)
    >>> states, source = torch.randn(2, 3, 8), torch.randn(2, 9, 12)
    >>> context, weights = align(states, source, lengths=[9, 6], return_weights=True)
    >>> context.shape, weights.shape, bool((weights.sum(axis=-1) < 1).all())
    (torch.Size([2, 3, 12]), (2, 1, 3, 9), True)
    """

    def __init__(
        self, query_dim: int, key_dim: int | None = None, *, score: str = "general", window: str = "global",
        reach: int | None = None, hidden_dim: int | None = None, max_keys: int | None = None, scale: float = 1.0,
        learn_scale: bool = False, dropout: float = 0.0, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.query_dim = checks.whole("query_dim", query_dim)
        self.key_dim = query_dim if key_dim is None else checks.whole("key_dim", key_dim)
        self.score = checks.one_of("score", score, SCORES)
        self.where = checks.one_of("window", window, WINDOWS)
        self.dropout = checks.probability("dropout", dropout)
        checks.only_with("hidden_dim", hidden_dim, score == "concat", "with score='concat'")
        checks.only_with("max_keys", max_keys, score == "location", "with score='location'")
        checks.only_with("reach", reach, window != "global", "with window='local-m' or 'local-p'")
        reach = 10 if reach is None else checks.whole("reach", reach)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.matching: nn.Module
        if score == "dot":
            if self.query_dim != self.key_dim:
                raise ValueError(
                    f"score is 'dot', which needs equal dims, and query_dim is {self.query_dim}, key_dim "
                    f"{self.key_dim}: score='general' matches unequal ones"
                )
            self.matching = matching.Dot()
        elif score == "general":
            self.matching = matching.General(self.query_dim, self.key_dim, **factory)
        elif score == "concat":
            hidden = self.query_dim if hidden_dim is None else checks.whole("hidden_dim", hidden_dim)
            self.matching = matching.Concat(self.query_dim, self.key_dim, hidden, **factory)
        else:
            if max_keys is None:
                raise ValueError("score is 'location', which has weights for each source position: say max_keys")
            self.matching = matching.Location(self.query_dim, checks.whole("max_keys", max_keys), **factory)
        self.window: nn.Module
        if window == "global":
            self.window = windows.Everywhere()
        elif window == "local-m":
            self.window = windows.Monotonic(reach)
        else:
            self.window = windows.Predictive(reach, self.query_dim, **factory)
        self.scale: nn.Parameter | float
        self._scale = float(scale)
        self.scale = nn.Parameter(torch.empty((), **factory)) if learn_scale else self._scale
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the learned numbers anew, from torch's generator; a learned scale is what it was at first."""
        self.matching.reset_parameters()  # type: ignore[operator]
        self.window.reset_parameters()  # type: ignore[operator]
        if isinstance(self.scale, nn.Parameter):
            nn.init.constant_(self.scale, self._scale)

    @classmethod
    def from_keras(
        cls, weights: Sequence[ArrayLike], dim: int, *, score_mode: str = "dot", use_scale: bool = False,
        dropout: float = 0.0,
    ) -> MultiplicativeAttention:  # fmt: skip
        """One that gives what ``keras.layers.Attention(use_scale, score_mode, dropout)`` gives.

        weights : ``layer.get_weights()``: the scale if use_scale, then w of "concat", one number each. See
        ``clearhead.torch.modules.keras`` for the mapping, of arguments too.

        >>> MultiplicativeAttention.from_keras([], dim=4)
        MultiplicativeAttention(
          4, 4, score='dot', window='global'
          (matching): Dot()
          (window): Everywhere()
        )
        """
        concat = checks.one_of("score_mode", score_mode, ("dot", "concat")) == "concat"
        names: dict[str, tuple[int, ...]] = {"scale": ()} if use_scale else {}
        given = numbers(weights, {**names, "concat_score_weight": ()} if concat else names)
        dtype = next((number.dtype for number in given.values()), None)
        made = cls(dim, score=score_mode, learn_scale=use_scale and not concat, dropout=dropout, dtype=dtype)
        with torch.no_grad():
            if isinstance(made.scale, nn.Parameter):
                made.scale.copy_(given["scale"])
            if isinstance(made.matching, matching.Concat):
                same = torch.eye(dim, dtype=dtype) * given.get("scale", 1.0)
                made.matching.query_weight.copy_(same)
                made.matching.key_weight.copy_(same)
                made.matching.vector.fill_(given["concat_score_weight"])
        return made

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor | None = None, *, mask: Mask | Tensor | None = None,
        lengths: Lengths = None, positions: Tensor | None = None, return_weights: bool = False,
    ) -> Any:  # fmt: skip
        """Attention of queries to keys.

        Parameters
        ----------
        query : tensor (batch, queries, query_dim), or with any other leading axes
        key : tensor (batch, keys, key_dim)
        value : tensor (batch, keys, value dim), optional
            key when None.
        mask : Mask or tensor, optional
            As in ``clearhead.torch.attention``; a tensor broadcasts over (batch, 1, queries, keys).
        lengths : integers (batch,), optional
            How many keys of each batch entry are real: the others are hidden, and S of local-p is this. 0 is allowed.
        positions : tensor (queries,) or (batch, queries) of whole numbers, optional
            t of local-m: where queries stand. 0, 1, 2 ... when None; one alone must say it, as a decoder's step.
        return_weights : bool
            Also give the weights (batch, 1, queries, keys), before dropout: an ``AttentionWeights``.

        Returns
        -------
        tensor (batch, queries, value dim); with ``return_weights`` a tuple of it and the weights. A row that may attend
        to nothing is 0.

        Raises
        ------
        TypeError, ValueError
            If a tensor, mask, length or position does not fit, or the source is longer than max_keys: the message
            names it.
        """
        one = next(self.parameters(), None)
        checks.tokens("query", query, self.query_dim, "query_dim", one)
        checks.tokens("key", key, self.key_dim, "key_dim", one)
        checks.only_with("positions", positions, self.where == "local-m", "with window='local-m'")
        value = key if value is None else value
        real = padding(lengths, query, key)
        seen, log_factor = self.window(query, key.shape[-2], lengths, positions)
        allowed, bias = joined(mask, both(real, seen))
        matched, score = self.matching(key)
        options = {
            "mask": allowed, "bias": bias, "scale": self.scale, "return_weights": return_weights,
            "dropout": self.dropout if self.training else 0.0, **score,
        }  # fmt: skip
        if log_factor is None:
            return attend(query, matched, value, **options)
        return reweighted(query, matched, value, log_factor, **options)

    def extra_repr(self) -> str:
        """What it was made with."""
        shown = [f"{self.query_dim}, {self.key_dim}, score={self.score!r}, window={self.where!r}"]
        if self.where != "global":
            shown.append(f"reach={self.window.reach}")
        if isinstance(self.scale, nn.Parameter):
            shown.append("learn_scale=True")
        elif self.scale != 1.0:
            shown.append(f"scale={self.scale}")
        if self.dropout:
            shown.append(f"dropout={self.dropout}")
        return ", ".join(shown)
