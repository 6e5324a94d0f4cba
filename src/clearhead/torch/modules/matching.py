"""Luong's four scores, each as a module that says what ``clearhead.torch.attention`` is to be called with.

    dot        q . k                      nothing is learned
    general    q . W . k
    concat     v . tanh(W [q; k])         W in two parts: W_q q + W_k k
    location   (W q)_s, s a position      the key has no say: row s of W takes its place, in the plain dot product

Each gives (key, arguments): the key to be matched, and the base of the score. Luong et al. 2015, *Effective Approaches
to Attention-based Neural Machine Translation*, section 3.1, equations 7 and 8.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

Match = tuple[Tensor, dict[str, Any]]


class Dot(nn.Module):
    """q . k"""

    def reset_parameters(self) -> None:
        """Nothing is learned."""

    def forward(self, key: Tensor) -> Match:
        return key, {}


class General(nn.Module):
    """q . W . k; weight (query_dim, key_dim): W_a."""

    def __init__(self, query_dim: int, key_dim: int, **factory: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(query_dim, key_dim, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.weight)

    def forward(self, key: Tensor) -> Match:
        return key, {"general": self.weight}


class Concat(nn.Module):
    """v . tanh(W_q q + W_k k); query_weight (query_dim, hidden) over key_weight (key_dim, hidden) is W_a transposed."""

    def __init__(self, query_dim: int, key_dim: int, hidden: int, **factory: Any) -> None:
        super().__init__()
        self.query_weight = nn.Parameter(torch.empty(query_dim, hidden, **factory))
        self.key_weight = nn.Parameter(torch.empty(key_dim, hidden, **factory))
        self.vector = nn.Parameter(torch.empty(hidden, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = (6 / (self.query_weight.shape[0] + self.key_weight.shape[0] + len(self.vector))) ** 0.5
        nn.init.uniform_(self.query_weight, -bound, bound)  # Glorot's law for the two as one matrix
        nn.init.uniform_(self.key_weight, -bound, bound)
        nn.init.uniform_(self.vector, -(len(self.vector) ** -0.5), len(self.vector) ** -0.5)

    def forward(self, key: Tensor) -> Match:
        return key, {"additive": (self.query_weight, self.key_weight, self.vector)}


class Location(nn.Module):
    """(W q)_s; weight (max_keys, query_dim): W_a. Sources may be shorter, not longer."""

    def __init__(self, query_dim: int, max_keys: int, **factory: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(max_keys, query_dim, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.weight)

    def forward(self, key: Tensor) -> Match:
        keys = key.shape[-2]
        if keys > len(self.weight):
            raise ValueError(
                f"key has {keys} tokens, and the score 'location' was made for max_keys = {len(self.weight)}"
            )
        rows = self.weight[:keys].to(key.dtype)
        return rows.expand(*key.shape[:-2], *rows.shape), {}
