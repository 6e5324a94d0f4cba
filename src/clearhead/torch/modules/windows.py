"""Where Luong's queries may look: everywhere, around their own place, or around a place that they predict.

    global     every source position
    local-m    t - D ... t + D, t the query's own position (monotonic)
    local-p    p - D ... p + D, p = S sigmoid(v_p . tanh(W_p h)), a real number between 0 and the source's length S;
               what the softmax gives is multiplied by exp(-(s - p)^2 / (2 (D/2)^2))

Each gives (mask, logarithm of the factor), or None for either. Positions s of the source count from 0; what a window
has beyond the source's ends is ignored. The window's edges are whole numbers and have no gradient, so p learns through
the factor alone. Luong et al. 2015, section 3.2, equations 9 and 10: D is ``reach``, sigma is D/2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from clearhead import masks
from clearhead.algebra import Mask
from clearhead.torch.modules.checks import places
from clearhead.torch.modules.single_head import Lengths

Seen = tuple[Mask | None, Tensor | None]


class Everywhere(nn.Module):
    """global"""

    def reset_parameters(self) -> None:
        """Nothing is learned."""

    def forward(self, query: Tensor, keys: int, lengths: Lengths, positions: Tensor | None) -> Seen:
        del query, keys, lengths, positions
        return None, None


class Monotonic(nn.Module):
    """local-m; queries stand at 0, 1, 2 ... where positions are not given. One alone must say."""

    def __init__(self, reach: int) -> None:
        super().__init__()
        self.reach = reach

    def reset_parameters(self) -> None:
        """Nothing is learned."""

    def forward(self, query: Tensor, keys: int, lengths: Lengths, positions: Tensor | None) -> Seen:
        del lengths
        if positions is None:
            if query.shape[-2] == 1 < keys:
                raise ValueError(
                    "query has one token, and where it stands was not said: window='local-m' needs positions=[t] "
                    "of a decoder that goes step by step, [0] if it is the first or the only one"
                )
            return masks.window(self.reach, self.reach, align="start"), None
        at = places("positions", positions, query).cpu().unsqueeze(-2).numpy()
        return masks.intervals(at - self.reach, at + self.reach + 1), None


class Predictive(nn.Module):
    """local-p; weight (query_dim, query_dim): W_p transposed, vector (query_dim,): v_p."""

    def __init__(self, reach: int, query_dim: int, **factory: Any) -> None:
        super().__init__()
        self.reach = reach
        self.weight = nn.Parameter(torch.empty(query_dim, query_dim, **factory))
        self.vector = nn.Parameter(torch.empty(query_dim, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.weight)
        nn.init.uniform_(self.vector, -(len(self.vector) ** -0.5), len(self.vector) ** -0.5)

    def place(self, query: Tensor, keys: int, lengths: Lengths = None) -> Tensor:
        """p, (..., queries), in float32 or wider."""
        raw = torch.tanh(query @ self.weight) @ self.vector
        share = (raw if raw.dtype == torch.float64 else raw.float()).sigmoid()
        if lengths is None:
            return share * keys
        return share * torch.as_tensor(lengths, device=query.device).to(share.dtype).unsqueeze(-1)

    def forward(self, query: Tensor, keys: int, lengths: Lengths, positions: Tensor | None) -> Seen:
        del positions
        place = self.place(query, keys, lengths).unsqueeze(-2)  # one more axis, for the head
        known = place.detach().nan_to_num().cpu()
        start, stop = (known - self.reach).ceil().long(), (known + self.reach).floor().long() + 1
        source = torch.arange(keys, device=query.device)
        factor = -((source - place.unsqueeze(-1)) ** 2) * (2 / self.reach**2)
        return masks.intervals(start.numpy(), stop.numpy()), factor
