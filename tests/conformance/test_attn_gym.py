"""attn-gym's masks and scores, by import and unchanged: compiled into the kernels, or refused in words.

What is plain arithmetic on (score, batch, head, query, key) is taken as it is. torch's ``and_masks`` and ``or_masks``,
of which some masks are made, call tensor methods; here their parts are taken out and joined by ``&`` and ``|``. The
reference is torch's own evaluation of the same function as a dense mask. What asks tensors for numbers, or calls
functions of torch, cannot be compiled, and is named with its reason; what to write instead is held against it.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import warnings
from collections.abc import Callable, Iterator
from math import exp, log, sqrt, tanh
from types import FunctionType
from typing import Any

import numpy as np
import pytest

import clearhead as ch

pytest.importorskip("attn_gym", reason="these are attn-gym's masks (extra: test)")
torch = pytest.importorskip("torch", reason="attn-gym needs torch (extra: torch)")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import attn_gym.masks as gym
    import attn_gym.mods as mods
    from attn_gym.masks import vsa
    from torch.nn.attention.flex_attention import _mask_mod_signature, _score_mod_signature, create_mask

TOKENS, HEADS = 130, 3
OFFSETS = torch.tensor([0, 30, 90, 130])
RANDOM = torch.Generator().manual_seed(0)

MASKS = {
    "causal_mask": lambda: gym.causal_mask,
    "generate_sliding_window": lambda: gym.generate_sliding_window(20),
    "generate_prefix_lm_mask": lambda: gym.generate_prefix_lm_mask(30),
    "generate_block_diffusion_mask": lambda: gym.generate_block_diffusion_mask(65, 8),
    "generate_jetspec_training_mask_mod": lambda: gym.generate_jetspec_training_mask_mod(30, 10),
    "batchify_mask_mod": lambda: gym.batchify_mask_mod(gym.causal_mask, 40),
}
TENSOR, FUNCTION, METHOD = "looks numbers up in a tensor", "calls a function of torch", "calls a method of tensors"
# name: (why it cannot be compiled, what the compiler stumbles over, an example)
REFUSED_MASKS: dict[str, tuple[str, str, Callable[[], Any]]] = {
    "generate_dilated_sliding_window": (FUNCTION, "'abs' of type Module", lambda:
        gym.generate_dilated_sliding_window(24, 3)),
    "generate_doc_mask_mod": (TENSOR, "'document_id'.*Tensor", lambda:
        gym.generate_doc_mask_mod(gym.causal_mask, OFFSETS)),
    "generate_packed_causal_doc_mask_mod": (TENSOR, "'offsets'.*Tensor", lambda:
        gym.generate_packed_causal_doc_mask_mod(OFFSETS)),
    "generate_vision_cross_attention_mask_mod": (TENSOR, "'image_boundaries'.*Tensor", lambda:
        gym.generate_vision_cross_attention_mask_mod(torch.tensor([[0, 50], [50, TOKENS]]), 65)),
    "generate_global_sliding_window": (METHOD, "'abs' of type int64", lambda:
        gym.generate_global_sliding_window(5, torch.arange(TOKENS) == 7)),
    "generate_jetspec_tree_causal_mask_mod": (TENSOR, "'ancestor_matrix'.*Tensor", lambda:
        gym.generate_jetspec_tree_causal_mask_mod(30, torch.eye(100).bool())),
    "generate_natten": (METHOD, "'clamp' of type int64", lambda: gym.generate_natten(10, 13, 3, 3)),
    "generate_tiled_natten": (METHOD, "'clamp' of type int64", lambda: gym.generate_tiled_natten(10, 13, 3, 3, 5, 13)),
    "generate_morton_natten": (METHOD, "'clamp' of type int64", lambda: gym.generate_morton_natten(16, 16, 3, 3)),
    "generate_shared_prefix_mask_mod": (TENSOR, "'document_id'.*Tensor", lambda:
        gym.generate_shared_prefix_mask_mod(OFFSETS, torch.tensor([0, 0, 2]))),
    "generate_sta_mask_mod_2d": (METHOD, "'clamp' of type int64", lambda:
        gym.generate_sta_mask_mod_2d((10, 13), (2, 13), (2, 13))),
    "generate_sta_mask_mod_3d": (METHOD, "'clamp' of type int64", lambda:
        gym.generate_sta_mask_mod_3d((1, 10, 13), (1, 2, 13), (1, 2, 13))),
    "generate_spatial_head_mask_mod": (FUNCTION, "'abs' of type Module", lambda:
        gym.generate_spatial_head_mask_mod(10, 4, 30, 1, False, 10)),
    "generate_temporal_head_mask_mod": (FUNCTION, "'abs' of type Module", lambda:
        gym.generate_temporal_head_mask_mod(10, 4, 30, 1)),
    "generate_vsa_mask_mod": (TENSOR, "'topk_indices'.*Tensor", lambda:
        gym.generate_vsa_mask_mod(torch.zeros(1, HEADS, 3, 1, dtype=torch.long), 64)),
    "generate_vsa_padding_mask_mod": (TENSOR, "'variable_block_sizes'.*Tensor", lambda:
        vsa.generate_vsa_padding_mask_mod(torch.tensor([64, 64, 2]), 64)),
}  # fmt: skip
ROPE = torch.randn((2, 1, HEADS, TOKENS, 4), generator=RANDOM, dtype=torch.float64)
BIAS = torch.randn((HEADS, 4, 5), generator=RANDOM, dtype=torch.float64)
PATHS = torch.randint(0, 4, (1, TOKENS, TOKENS, 5), generator=RANDOM)
LENGTHS, EDGES = PATHS[..., 0], PATHS[..., 1:]


def alibi(score: float, batch: int, head: int, query: int, key: int) -> float:
    return score + (key - query) * 2.0 ** (-8.0 * (head + 1) / HEADS)


def capped(score: float, batch: int, head: int, query: int, key: int) -> float:
    return 2 * tanh(score / 2)


def log_of_sigmoid(score: float, batch: int, head: int, query: int, key: int) -> float:
    return log(1 / (1 + exp(-score)) + 1)


def sandwich() -> Any:
    frequencies = 10_000.0 ** -(np.arange(64) / 64)
    distance = np.subtract.outer(np.arange(TOKENS), np.arange(TOKENS))
    return np.cos(distance[..., None] * frequencies).sum(-1) * (HEADS / 8 / np.arange(1, HEADS + 1))[:, None, None]


def edges() -> Any:
    heads = np.arange(HEADS)[:, None, None]
    each = [(LENGTHS[0] > n).numpy() * BIAS[:, n].numpy()[heads, EDGES[0, ..., n].numpy()] for n in range(4)]
    return sum(each) / LENGTHS[0].clamp(min=1).numpy()


# The same, and what to write instead: as a function, an argument of the score, or a bias.
REFUSED_SCORES: dict[str, tuple[str, str, Callable[[], Any], Callable[[], Any]]] = {
    "generate_activation_score_mod": (FUNCTION, "'activation'.*builtin_function", lambda:
        mods.generate_activation_score_mod(torch.sigmoid, 1.0), lambda: ch.scores.dot(function=log_of_sigmoid)),
    "generate_alibi_bias": (FUNCTION, "'exp2' of type Module", lambda:
        mods.generate_alibi_bias(HEADS), lambda: ch.scores.dot(function=alibi)),
    "generate_graphormer_edge_bias": (TENSOR, "'path_lengths'.*Tensor", lambda:
        mods.generate_graphormer_edge_bias(BIAS, EDGES, LENGTHS), lambda: ch.scores.dot(bias=edges())),
    "generate_graphormer_spatial_bias": (TENSOR, "'spatial_bias'.*Tensor", lambda:
        mods.generate_graphormer_spatial_bias(BIAS[:, 0], LENGTHS), lambda:
        ch.scores.dot(bias=BIAS[:, 0].numpy()[:, LENGTHS[0]])),
    "generate_mla_rope_score_mod": (TENSOR, "'query_rope'.*Tensor", lambda:
        mods.generate_mla_rope_score_mod(ROPE[0], ROPE[1], HEADS), lambda:
        ch.scores.dot(bias=(ROPE[0, 0] @ ROPE[1, 0, :1].mT).numpy())),
    "generate_sandwich_bias": (TENSOR, "'rel_bias'.*Tensor", lambda:
        mods.generate_sandwich_bias(HEADS, TOKENS), lambda: ch.scores.dot(bias=sandwich())),
    "generate_tanh_softcap": (FUNCTION, "'tanh'.*builtin_function", lambda:
        mods.generate_tanh_softcap(2), lambda: ch.scores.dot(function=capped)),
}  # fmt: skip


def arrays(tokens: int = TOKENS) -> Any:
    return np.random.default_rng(0).standard_normal((3, 1, HEADS, tokens, 16))


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    mask_mod = MASKS[name]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dense = create_mask(mask_mod, 2, HEADS, TOKENS, TOKENS, device="cpu").numpy()
    assert 0 < dense.mean() < 1
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, HEADS, TOKENS, 16))
    found, weights = ch.scaled_dot_product_attention(q, k, v, mask=translate(mask_mod))
    wanted, expected, _ = ch.core.attend(q, k, v, mask=ch.masks.array(dense))
    np.testing.assert_allclose(found, wanted, atol=1e-13)
    np.testing.assert_allclose(weights, expected, atol=1e-13)
    assert (np.asarray(weights)[~dense] == 0).all()


@pytest.mark.parametrize("name", REFUSED_MASKS)
def test_masks_of_tensors_are_refused(name: str) -> None:
    _, stumble, make = REFUSED_MASKS[name]
    with pytest.raises(TypeError, match="cannot be compiled by Numba: write it in plain arithmetic") as refusal:
        ch.attention(*arrays(), mask=translate(make()))
    refusal.match(stumble)


@pytest.mark.parametrize("name", REFUSED_SCORES)
def test_scores_of_tensors_are_refused(name: str) -> None:
    _, stumble, make, _ = REFUSED_SCORES[name]
    with pytest.raises(TypeError, match="cannot be compiled by Numba: write it in plain arithmetic") as refusal:
        ch.attention(*arrays(), score=ch.scores.dot(function=make()))
    refusal.match(stumble)


@pytest.mark.parametrize("name", REFUSED_SCORES)
def test_what_to_write_instead_is_the_same(name: str) -> None:
    _, _, make, instead = REFUSED_SCORES[name]
    q, k, v = (torch.from_numpy(x) for x in arrays())
    cells = make()
    for place in (4, 3, 2, 1):  # key, query, head, batch: from the inside
        cells = torch.vmap(cells, in_dims=(0, *[0 if n == place else None for n in (1, 2, 3, 4)]))
    size = [torch.arange(n) for n in (1, HEADS, TOKENS, TOKENS)]
    weights = cells(q @ k.mT / sqrt(16), *size).softmax(-1)
    found = ch.attention(q.numpy(), k.numpy(), v.numpy(), score=instead())
    np.testing.assert_allclose(found, (weights @ v).numpy(), rtol=0, atol=1e-5)  # some compute in float32


def public() -> Iterator[tuple[str, Any]]:
    """Functions of every module of masks and mods, by their public names."""
    for package in (gym, mods):
        names = [f"{package.__name__}.{module.name}" for module in pkgutil.iter_modules(package.__path__)]
        for module in (package, *map(importlib.import_module, names)):
            for name, value in vars(module).items():
                if isinstance(value, FunctionType) and not name.startswith("_") and "attn_gym" in value.__module__:
                    yield name, value


def test_every_mask_and_score_of_the_package_is_here() -> None:
    """What takes (b, h, query, key), with or without a score before, and what says that it returns such a function."""
    functions = dict(public())
    kinds = (_mask_mod_signature, _score_mod_signature)
    made = {name for name, f in functions.items() if inspect.signature(f).return_annotation in kinds}
    cell = {"b", "h", "q_idx", "kv_idx"}
    made |= {name for name, f in functions.items() if cell <= set(inspect.signature(f).parameters)}
    assert made == {*MASKS, *REFUSED_MASKS, *REFUSED_SCORES}
    assert {name for name in functions if name.startswith("generate_")} - made == {"generate_random_lengths"}


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
