"""The inputs that torch tests its own scaled_dot_product_attention with, forward, without dropout.

``attend`` takes torch's arguments and makes a call of this library of them; torch's own result, computed in float64,
is the reference.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import clearhead as ch

torch = pytest.importorskip("torch", reason="these are torch's own samples (extra: torch)")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import sample_inputs_scaled_dot_product_attention

CAPS = {torch.float32: 2e-6, torch.float64: 1e-14, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def samples(dtype: Any) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = list(sample_inputs_scaled_dot_product_attention(None, "cpu", dtype, requires_grad=False))
    return [sample for sample in found if not sample.kwargs.get("dropout_p")]


@pytest.mark.parametrize("dtype", list(CAPS), ids=str)
def test_samples(dtype: Any) -> None:
    cases = samples(dtype)
    assert len(cases) >= 10
    for sample in cases:
        tensors = (sample.input, *sample.args)
        found = attend(*(as_array(t) for t in tensors), **sample.kwargs)
        options = {k: v for k, v in sample.kwargs.items() if k != "dropout_p"}
        if options.get("attn_mask") is not None and options["attn_mask"].dtype != torch.bool:
            options["attn_mask"] = options["attn_mask"].double()
        wanted = torch.nn.functional.scaled_dot_product_attention(*(t.double() for t in tensors), **options).numpy()
        assert found.shape == wanted.shape
        error = np.linalg.norm(found.astype(np.float64) - wanted) / max(np.linalg.norm(wanted), 1e-300)
        assert error <= CAPS[dtype], (sample.kwargs, [t.shape for t in tensors], error)


def attend(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
           scale: float | None = None, enable_gqa: bool = False) -> Any:  # fmt: skip
    """torch.nn.functional.scaled_dot_product_attention in this library's terms: its causal begins at the start."""
    mask = ch.masks.causal(align="start") if is_causal else None
    if attn_mask is not None:
        mask = as_array(attn_mask)
    return ch.attention(query, key, value, mask=mask, score=ch.scores.dot(scale))


def as_array(tensor: Any) -> Any:
    if tensor.dtype != torch.bfloat16:
        return tensor.detach().numpy()
    from ml_dtypes import bfloat16

    return tensor.detach().view(torch.int16).numpy().view(bfloat16)
