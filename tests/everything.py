"""Problems for Hypothesis with everything at once, and which of their cells are seen.

Beside ``clearhead.testing.strategies``: sizes of 70 along any axis, learned scores and users' functions, deeper trees
of masks, and a memory layout of its own for each array.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

import clearhead as ch
from clearhead.algebra import Extent, Mask
from clearhead.testing.cases import DTYPES, LEARNED_DTYPES, Shape, as_dtype, every_third, relative
from clearhead.testing.strategies import LAYOUTS, any_masks, any_scores, layouts

settings.register_profile(
    "stable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("stable")
SEEDS = st.integers(0, 2**32 - 1)
RANDOM = SEEDS.map(np.random.default_rng)
NAMES = ("query", "key", "value")


def diagonal_blocks(batch: int, head: int, query: int, key: int) -> bool:
    return query // 9 == key // 9 or (batch + head) % 2 == 0


def far_is_dim(score: float, batch: int, head: int, query: int, key: int) -> float:
    return score - 0.05 * abs(query - key) if key > 3 else score


@st.composite
def any_shapes(draw: st.DrawFn) -> Shape:
    """Any sizes from 0 to 70, also of batch and heads: 8,000 cells and 100 heads in all, or fewer."""
    sizes, cells, heads = [1] * 4, 8_000, 100  # batch, heads, queries, keys; the oracle takes a head at a time
    for axis in draw(st.permutations(range(4))):
        room = min(cells, heads) if axis < 2 else cells
        sizes[axis] = draw(st.integers(1, min(70, room)) | st.just(1))
        cells = max(1, cells // max(1, sizes[axis]))
        heads = max(1, heads // max(1, sizes[axis])) if axis < 2 else heads
    if draw(st.sampled_from([False] * 9 + [True])):  # rare, as there is nothing to compute then
        sizes[draw(st.sampled_from(range(4)))] = 0
    batch, heads, queries, keys = sizes
    dim, value_dim = draw(st.tuples(*[st.integers(0, 70)] * 2) | st.sampled_from([(16, 16), (64, 16), (16, 32)]))
    if batch == heads == 1 and draw(st.booleans()):
        return Shape(queries, keys, dim, value_dim)  # 2-D
    group = draw(st.sampled_from([d for d in range(1, heads + 1) if heads % d == 0] or [1]))
    return Shape(queries, keys, dim, value_dim, heads=heads, key_heads=heads // group, lead=(batch,))


@st.composite
def all_masks(draw: st.DrawFn, extent: Extent) -> Mask:
    """``any_masks`` and what it leaves out: padded queries, other functions, arrays of any layout, deeper trees."""
    random = draw(RANDOM)
    more = [
        ch.masks.lengths(*(random.integers(0, n + 1, extent.lead) for n in (extent.keys, extent.queries))),
        ch.masks.function(diagonal_blocks),
        ch.masks.function(every_third),
        ch.masks.array(LAYOUTS[draw(layouts())](random.random(extent.shape) < 0.7)),
        ch.masks.array(np.broadcast_to(random.random(extent.keys) < 0.7, extent.shape)),
    ]
    mask = draw(any_masks(extent))
    for n in draw(st.lists(st.sampled_from(range(len(more))), max_size=3)):
        mask = draw(st.sampled_from([mask & more[n], more[n] | mask, ~mask & more[n]]))
    return mask


@st.composite
def all_scores(draw: st.DrawFn, shape: Shape, dtype: str) -> ch.scores.Score:
    """Every base with any modifiers, a user's function among them."""
    extent, random = shape.extent, draw(RANDOM)
    score = draw(any_scores(extent, dtype))
    if score.bias is not None and score.bias.ndim:
        score = replace(score, bias=LAYOUTS[draw(layouts())](np.atleast_2d(score.bias)))
    score = replace(score, function=draw(st.sampled_from([None, relative, far_is_dim])))
    base = draw(st.sampled_from(["dot", "general", "by head", "additive"] if dtype in LEARNED_DTYPES else ["dot"]))
    hidden = draw(st.integers(1, 70))
    makers = {
        "dot": lambda: score.base,
        "general": lambda: ch.scores.general(random.standard_normal((shape.dim, shape.dim)) / 8).base,
        "by head": lambda: ch.scores.general(random.standard_normal((extent.heads, shape.dim, shape.dim)) / 8).base,
        "additive": lambda: (
            ch.scores.additive(
                *(random.standard_normal((2, shape.dim, hidden)) / 8), random.standard_normal(hidden)
            ).base
        ),
    }
    return replace(score, base=makers[base]())


@st.composite
def all_problems(draw: st.DrawFn) -> dict[str, Any]:
    """Everything at once, every array in a memory layout of its own."""
    shape, dtype = draw(any_shapes()), draw(st.sampled_from(DTYPES))
    arrays = shape.arrays(as_dtype(dtype), draw(RANDOM))
    arranged = [LAYOUTS[draw(layouts())](x) if x.size else x for x in arrays]
    return {
        **dict(zip(NAMES, arranged, strict=True)),
        "mask": draw(all_masks(shape.extent)) if draw(st.sampled_from([True, True, False])) else None,
        "score": draw(all_scores(shape, dtype)),
    }


def special(number: float | str, dtype: np.dtype[Any]) -> Any:
    info = ml_dtypes.finfo(dtype)
    named = {"largest": info.max, "smallest normal": info.tiny, "smallest": info.smallest_subnormal}
    return named[number] if isinstance(number, str) else number


def seen_by(problem: dict[str, Any]) -> tuple[Any, Any]:
    """Which cells the mask lets be seen (*lead, heads, queries, keys), and which keys some query of their group."""
    query, key = (problem[name] if problem[name].ndim > 2 else problem[name][None] for name in ("query", "key"))
    extent = Extent(query.shape[:-3], query.shape[-3], query.shape[-2], key.shape[-2])
    mask = problem["mask"] if problem["mask"] is not None else ch.masks.intervals(0, extent.keys)
    seen = mask.dense(extent.queries, extent.keys, extent.heads, extent.lead).reshape(extent.shape)
    group = extent.heads // max(1, key.shape[-3])
    return seen, seen.reshape(*extent.lead, key.shape[-3], group, *extent.shape[-2:]).any(axis=(-3, -2))
