"""PyTorch's fused attention: ``torch.nn.functional.scaled_dot_product_attention``, eager; gradients by its autograd.

Additive scores it has none of: there it runs what is usually written, a tanh of all queries beside all keys.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention

import tensors
from workload import Workload

name = "torch"
version = torch.__version__


def set_threads(count: int) -> bool:
    torch.set_num_threads(count)
    return True


def lacks(workload: Workload) -> str | None:
    return "it has ALiBi as an array for every cell alone" if workload.score == "alibi" else None


def prepare(workload: Workload) -> Callable[[], Any]:
    if workload.way == "both":
        fused = partial(scaled_dot_product_attention, is_causal=workload.mask == "causal")
        return tensors.both_ways(workload, _additive if workload.score == "additive" else fused)
    turns = itertools.cycle([[tensors.of(array) for array in arrays] for arrays in workload.arrays()])
    if workload.score == "additive":
        learned = list(map(tensors.of, workload.learned()))
        return torch.inference_mode()(lambda: _additive(*next(turns), *learned))
    causal, grouped = workload.mask == "causal", workload.group > 1
    visible = None if causal else workload.visible()  # a window it takes as an array of booleans only
    mask = None if visible is None else torch.from_numpy(visible)

    @torch.inference_mode()
    def attention() -> torch.Tensor:
        query, key, value = next(turns)
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=grouped)

    return attention


def _additive(query: Any, key: Any, value: Any, W_q: Any, W_k: Any, v: Any) -> Any:
    asked, offered = query @ W_q, key @ W_k
    scores = torch.tanh(asked[..., :, None, :] + offered[..., None, :, :]) @ v
    return torch.softmax(scores, dim=-1) @ value


def numbers(result: Any) -> NDArray[np.float64]:
    return tensors.numbers(result)
