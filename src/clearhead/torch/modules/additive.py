"""AdditiveAttention: a small network scores how a query matches a key, v.tanh(W_q q + W_k k). A torch.nn.Module.

Nothing of size queries x keys x hidden is made, forward or backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from clearhead.algebra import Mask
from clearhead.torch.modules import checks
from clearhead.torch.modules.keras import numbers
from clearhead.torch.modules.single_head import Lengths, attend, joined, padding


class AdditiveAttention(nn.Module):
    """softmax over keys of v.tanh(W_q q + W_k k), times the values.

    Parameters
    ----------
    query_dim : int
        Numbers of a query, the decoder's state.
    key_dim : int, optional
        Numbers of a key, an encoder's annotation; query_dim when None.
    hidden_dim : int, optional
        Numbers of the hidden layer; query_dim when None.
    bias : bool
        Whether the hidden layer adds one, b in v.tanh(W_q q + W_k k + b).
    project : bool
        False: no W_q, W_k, and the score is v.tanh(q + k), as in Keras. All three dims are then one.
    learn_vector : bool
        False: no v, the hidden layer's numbers are summed.
    dropout : float
        The probability for each weight to be dropped while training.
    device, dtype
        Of the parameters, as in torch's modules.

    Attributes
    ----------
    query_weight : Parameter (query_dim, hidden_dim), key_weight : Parameter (key_dim, hidden_dim)
    vector : Parameter (hidden_dim,)
    bias : Parameter (hidden_dim,)
        None where there is none. They are the arguments of ``clearhead.scores.additive``, and those of two
        ``nn.Linear`` transposed: ``query_weight`` is ``linear.weight.T``.

    Notes
    -----
    Costs queries x keys x hidden_dim tanh, and memory linear in tokens, both ways. Dtypes are those of
    ``clearhead.torch.attention``.

    Matrices begin by Glorot's uniform law, v uniform within 1/sqrt(hidden_dim), b at 0. (The paper draws matrices from
    a normal law of deviation 0.001, and begins with v and b at 0: appendix B.1.)

    References
    ----------
    Bahdanau, Cho & Bengio 2015, *Neural Machine Translation by Jointly Learning to Align and Translate*, section 3.1
    and appendix A.1.2, e_ij = v_a . tanh(W_a s_{i-1} + U_a h_j): s_{i-1} is a query, h_j a key and a value, c_i the
    output; W_a is ``query_weight``, U_a ``key_weight``, both transposed, v_a ``vector``.

    >>> import torch
    >>> align = AdditiveAttention(query_dim=8, key_dim=12, hidden_dim=10)
    >>> state, annotations = torch.randn(2, 1, 8), torch.randn(2, 7, 12)
    >>> context, weights = align(state, annotations, lengths=[7, 4], return_weights=True)
    >>> context.shape, weights.shape, weights[1, 0, 0, 4:].tolist()  # the second sentence has four words
    (torch.Size([2, 1, 12]), (2, 1, 1, 7), [0.0, 0.0, 0.0])
    """

    def __init__(
        self, query_dim: int, key_dim: int | None = None, hidden_dim: int | None = None, *, bias: bool = False,
        project: bool = True, learn_vector: bool = True, dropout: float = 0.0,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.query_dim = checks.whole("query_dim", query_dim)
        self.key_dim = query_dim if key_dim is None else checks.whole("key_dim", key_dim)
        self.hidden_dim = query_dim if hidden_dim is None else checks.whole("hidden_dim", hidden_dim)
        self.dropout = checks.probability("dropout", dropout)
        if not project and (bias or not self.query_dim == self.key_dim == self.hidden_dim):
            raise ValueError(
                f"project is False, v.tanh(q + k): that has no bias, and query_dim, key_dim, hidden_dim must be equal; "
                f"got bias={bias}, {self.query_dim}, {self.key_dim} and {self.hidden_dim}"
            )

        def parameter(wanted: bool, *shape: int) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) if wanted else None

        self.query_weight = parameter(project, self.query_dim, self.hidden_dim)
        self.key_weight = parameter(project, self.key_dim, self.hidden_dim)
        self.vector = parameter(learn_vector, self.hidden_dim)
        self.bias = parameter(bias, self.hidden_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the learned numbers anew, from torch's generator."""
        for weight in (self.query_weight, self.key_weight):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        if self.vector is not None:
            nn.init.uniform_(self.vector, -(self.hidden_dim**-0.5), self.hidden_dim**-0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @classmethod
    def from_keras(
        cls, weights: Sequence[ArrayLike], dim: int, *, use_scale: bool = True, dropout: float = 0.0
    ) -> AdditiveAttention:
        """One that gives what ``keras.layers.AdditiveAttention(use_scale, dropout)`` gives.

        weights : ``layer.get_weights()``: the scale (dim,) if use_scale, else nothing. See
        ``clearhead.torch.modules.keras`` for the mapping, of arguments too.

        >>> import numpy as np
        >>> AdditiveAttention.from_keras([np.ones(4, np.float32)], dim=4)
        AdditiveAttention(4, 4, 4, project=False)
        """
        given = numbers(weights, {"scale": (dim,)} if use_scale else {})
        dtype = given["scale"].dtype if use_scale else None
        made = cls(dim, project=False, learn_vector=use_scale, dropout=dropout, dtype=dtype)
        if made.vector is not None:
            made.vector.data.copy_(given["scale"])
        return made

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor | None = None, *, mask: Mask | Tensor | None = None,
        lengths: Lengths = None, return_weights: bool = False,
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
            How many keys of each batch entry are real: the others are hidden. 0 is allowed.
        return_weights : bool
            Also give the weights (batch, 1, queries, keys), before dropout: an ``AttentionWeights``.

        Returns
        -------
        tensor (batch, queries, value dim); with ``return_weights`` a tuple of it and the weights. A row that may attend
        to nothing is 0.

        Raises
        ------
        TypeError, ValueError
            If a tensor, mask or length does not fit: the message names it.
        """
        one = next(self.parameters(), None)
        checks.tokens("query", query, self.query_dim, "query_dim", one)
        checks.tokens("key", key, self.key_dim, "key_dim", one)
        value = key if value is None else value
        allowed, bias = joined(mask, padding(lengths, query, key))
        return attend(
            self._with_one(query), key, value, mask=allowed, bias=bias, additive=self._score(query),
            dropout=self.dropout if self.training else 0.0, return_weights=return_weights,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """What it was made with."""
        shown = [f"{self.query_dim}, {self.key_dim}, {self.hidden_dim}"]
        for name, usual, now in (
            ("bias", False, self.bias is not None), ("project", True, self.query_weight is not None),
            ("learn_vector", True, self.vector is not None), ("dropout", 0.0, self.dropout),
        ):  # fmt: skip
            if now != usual:
                shown.append(f"{name}={now}")
        return ", ".join(shown)

    def _with_one(self, query: Tensor) -> Tensor:
        """The bias is a row of W_q that a query of 1 meets."""
        return query if self.bias is None else torch.cat([query, torch.ones_like(query[..., :1])], dim=-1)

    def _score(self, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """W_q, W_k and v; those that are not learned are the identity, and ones."""
        vector = query.new_ones(self.hidden_dim) if self.vector is None else self.vector
        if self.query_weight is None or self.key_weight is None:
            same = torch.eye(self.hidden_dim, dtype=query.dtype, device=query.device)
            return same, same, vector
        if self.bias is None:
            return self.query_weight, self.key_weight, vector
        return torch.cat([self.query_weight, self.bias[None]]), self.key_weight, vector
