"""attn-gym's masks, by import and unchanged, compiled into the kernels.

Those that are plain arithmetic on (batch, head, query, key) are taken as they are. torch's ``and_masks`` and
``or_masks``, of which some are made, call tensor methods; here their parts are taken out and joined by ``&`` and ``|``.
The reference is torch's own evaluation of the same function as a dense mask.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import clearhead as ch

pytest.importorskip("attn_gym", reason="these are attn-gym's masks (extra: test)")
torch = pytest.importorskip("torch", reason="attn-gym needs torch (extra: torch)")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import attn_gym.masks as gym
    from torch.nn.attention.flex_attention import create_mask

MASKS = {
    "causal": lambda: gym.causal_mask,
    "sliding window": lambda: gym.generate_sliding_window(20),
    "prefix": lambda: gym.generate_prefix_lm_mask(30),
}
# These call functions of torch on tensors: not plain arithmetic, and refused in words.
NOT_ARITHMETIC = {
    "dilated sliding window": lambda: gym.generate_dilated_sliding_window(24, 3),
    "neighbourhood": lambda: gym.generate_natten(10, 13, 3, 3),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    mask_mod = MASKS[name]()
    queries = keys = 130
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dense = create_mask(mask_mod, 2, 3, queries, keys, device="cpu").numpy()
    assert 0 < dense.mean() < 1
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 3, queries, 16))
    found, weights = ch.scaled_dot_product_attention(q, k, v, mask=translate(mask_mod))
    wanted, expected, _ = ch.core.attend(q, k, v, mask=ch.masks.array(dense))
    np.testing.assert_allclose(found, wanted, atol=1e-13)
    np.testing.assert_allclose(weights, expected, atol=1e-13)
    assert (np.asarray(weights)[~dense] == 0).all()


@pytest.mark.parametrize("name", NOT_ARITHMETIC)
def test_tensors_are_refused(name: str) -> None:
    x = np.zeros((1, 130, 4))
    with pytest.raises(TypeError, match="cannot be compiled by Numba: write it in plain arithmetic"):
        ch.attention(x, x, x, mask=translate(NOT_ARITHMETIC[name]()))


def translate(mask_mod: Callable[..., Any]) -> ch.masks.Mask:
    """A mask_mod as a mask: torch's combinations by their parts, everything else as it is."""
    name = mask_mod.__qualname__
    if name.startswith(("and_masks.", "or_masks.")):
        parts = [translate(part) for part in inspect.getclosurevars(mask_mod).nonlocals["mask_mods"]]
        whole = parts[0]
        for part in parts[1:]:
            whole = whole & part if name.startswith("and_masks.") else whole | part
        return whole
    return ch.masks.function(mask_mod)
