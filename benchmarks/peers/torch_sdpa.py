"""PyTorch's fused attention: ``torch.nn.functional.scaled_dot_product_attention``, eager, without gradients.

Additive scores it has none of: there it runs what is usually written, a tanh of all queries beside all keys.
"""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention

from workload import Workload

name = "torch"
version = torch.__version__


def set_threads(count: int) -> bool:
    torch.set_num_threads(count)
    return True


def lacks(workload: Workload) -> str | None:
    return "it has ALiBi as an array for every cell alone" if workload.score == "alibi" else None


def prepare(workload: Workload) -> Callable[[], Any]:
    turns = itertools.cycle([[_tensor(array) for array in arrays] for arrays in workload.arrays()])
    if workload.score == "additive":
        return _additive(turns, *map(_tensor, workload.learned()))
    causal, grouped = workload.mask == "causal", workload.group > 1
    visible = None if causal else workload.visible()  # a window it takes as an array of booleans only
    mask = None if visible is None else torch.from_numpy(visible)

    @torch.inference_mode()
    def attention() -> torch.Tensor:
        query, key, value = next(turns)
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=grouped)

    return attention


def _additive(turns: Any, W_q: torch.Tensor, W_k: torch.Tensor, v: torch.Tensor) -> Callable[[], Any]:
    @torch.inference_mode()
    def attention() -> torch.Tensor:
        query, key, value = next(turns)
        asked, offered = query @ W_q, key @ W_k
        scores = torch.tanh(asked[..., :, None, :] + offered[..., None, :, :]) @ v
        return torch.softmax(scores, dim=-1) @ value

    return attention


def numbers(result: Any) -> NDArray[np.float64]:
    return np.asarray(result.to(torch.float64).numpy())


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
