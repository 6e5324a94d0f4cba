"""Strategies for Hypothesis: arrays of any memory layout, masks of any nesting, problems of any shape.

    >>> from hypothesis import given
    >>> @given(problems())
    ... def test_mine(problem):
    ...     mine(**problem)

Needs Hypothesis, which nothing else in the package imports.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from clearhead import masks, scores
from clearhead.algebra import Extent, Mask
from clearhead.scores import Score
from clearhead.testing.cases import DTYPES, Shape, as_dtype, every_third

Array = NDArray[Any]

# Each takes an array and gives an equal one that lies differently in memory.
LAYOUTS: dict[str, Callable[[Array], Array]] = {
    "contiguous": lambda x: x.copy(),
    "read-only": lambda x: _read_only(x.copy()),
    "reversed tokens": lambda x: x[..., ::-1, :].copy()[..., ::-1, :],
    "reversed dims": lambda x: x[..., ::-1].copy()[..., ::-1],
    "reversed heads": lambda x: x[::-1].copy()[::-1],
    "transposed": lambda x: x.swapaxes(-1, -2).copy().swapaxes(-1, -2),
    "tokens before heads": lambda x: x.swapaxes(-2, 0).copy().swapaxes(-2, 0),
    "every other dim": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "every third token": lambda x: np.repeat(x, 3, axis=-2)[..., ::3, :],
    "part of a wider array": lambda x: np.pad(x, [(0, 0)] * (x.ndim - 1) + [(3, 5)])[..., 3 : 3 + x.shape[-1]],
    "misaligned": lambda x: _misaligned(x),
    "big-endian": lambda x: x if x.dtype.name == "bfloat16" else x.astype(x.dtype.newbyteorder(">")),
}


def _read_only(x: Array) -> Array:
    x.flags.writeable = False
    return x


def _misaligned(x: Array) -> Array:
    """Its first byte at an odd address."""
    raw = np.zeros(x.nbytes + 1, np.uint8)
    raw[1:] = np.frombuffer(np.ascontiguousarray(x).tobytes(), np.uint8)
    return np.ndarray(x.shape, x.dtype, raw, 1)


def layouts() -> st.SearchStrategy[str]:
    """A name in ``LAYOUTS``."""
    return st.sampled_from(list(LAYOUTS))


@st.composite
def shapes(draw: st.DrawFn, longest: int = 70, few: bool = False) -> Shape:
    """Any sizes from 0 up, in 2-D to 5-D, with groups of query heads. ``few``: what the few-queries kernel takes."""
    # Hypothesis likes the ends of a range; where one size is 0 there is nothing to compute, so 0 is made rare.
    tokens = st.integers(1, longest) | st.sampled_from([0, 1, 8, 47, 48, 49, 64])
    dims = st.sampled_from([16, 32, 64]) if few else tokens
    heads = draw(st.sampled_from([None, 1, 2, 3, 0]))
    group = draw(st.integers(1, 3))
    return Shape(
        queries=draw(st.integers(1, 2) if few else tokens),
        keys=draw(tokens),
        dim=draw(dims),
        value_dim=draw(dims),
        heads=None if heads is None else heads * group,
        key_heads=heads,
        lead=() if heads is None else tuple(draw(st.lists(st.sampled_from([1, 2, 3, 1, 2, 0]), max_size=2))),
    )


def any_masks(extent: Extent) -> st.SearchStrategy[Mask]:
    """Any mask of that size: leaves of every kind under ``&``, ``|`` and ``~``."""
    seeds = st.integers(0, 2**32 - 1).map(np.random.default_rng)
    aligns = st.sampled_from(["start", "end"])
    sizes = st.none() | st.integers(0, extent.keys + 2)
    leaves: list[st.SearchStrategy[Mask]] = [
        aligns.map(lambda align: masks.causal(align)),  # type: ignore[arg-type]
        st.builds(masks.window, sizes, sizes, aligns),
        seeds.map(lambda random: masks.lengths(random.integers(0, extent.keys + 1, extent.lead))),
        seeds.map(lambda random: _documents(extent, random)),
        seeds.map(lambda random: masks.intervals(*random.integers(-2, extent.keys + 3, (2, *extent.shape[:-1])))),
        seeds.map(lambda random: masks.array(random.random(_some_axes(extent.shape, random)) < random.random())),
        st.just(masks.function(every_third)),
    ]
    return st.recursive(
        st.one_of(leaves),
        lambda inner: st.one_of(
            st.tuples(inner, inner).map(lambda pair: pair[0] & pair[1]),
            st.tuples(inner, inner).map(lambda pair: pair[0] | pair[1]),
            inner.map(lambda mask: ~mask),
        ),
        max_leaves=6,
    )


def _documents(extent: Extent, random: np.random.Generator) -> Mask:
    ids = [random.integers(0, 3, (*extent.lead, tokens)) for tokens in (extent.queries, extent.keys)]
    return masks.documents(*(np.sort(i) if random.random() < 0.5 else i for i in ids))


def _some_axes(shape: tuple[int, ...], random: np.random.Generator) -> tuple[int, ...]:
    """A shape that broadcasts to this one: trailing axes, some of them 1."""
    kept = shape[random.integers(0, len(shape) + 1) :]
    return tuple(1 if random.random() < 0.3 else size for size in kept)


@st.composite
def any_scores(draw: st.DrawFn, extent: Extent, dtype: str = "float32") -> Score:
    """The dot product with any of its modifiers, the user's function left aside (each would be compiled)."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    bias = random.standard_normal(_some_axes(extent.shape, random)).astype("f8" if dtype == "float64" else "f4")
    bias[random.random(bias.shape) < 0.2] = -np.inf
    return scores.dot(
        draw(st.none() | st.floats(-2, 2)),
        softcap=draw(st.none() | st.floats(0.5, 30)),
        bias=draw(st.none() | st.just(bias)),
        alibi=draw(st.none() | st.just(random.random(extent.heads))),
        align=draw(st.sampled_from(["start", "end"])),
        sinks=draw(st.none() | st.just(random.standard_normal(extent.heads))),
    )


@st.composite
def problems(draw: st.DrawFn, dtypes: tuple[str, ...] = DTYPES, longest: int = 70) -> dict[str, Any]:
    """query, key, value, mask and score, as ``clearhead.attention`` takes them: normal random numbers.

    A third of them is what the few-queries kernel takes.
    """
    few = draw(st.sampled_from([False, True, False]))
    shape, dtype = draw(shapes(longest, few)), draw(st.sampled_from(dtypes))
    arrays = shape.arrays(as_dtype(dtype), np.random.default_rng(draw(st.integers(0, 2**32 - 1))))
    mask = any_runs(shape.extent) if few else any_masks(shape.extent)
    score = any_plain_scores(shape.extent) if few else any_scores(shape.extent, dtype)
    return {
        **dict(zip(("query", "key", "value"), arrays, strict=True)),
        "mask": draw(st.none() | mask),
        "score": draw(st.none() | score),
    }


def any_runs(extent: Extent) -> st.SearchStrategy[Mask]:
    """A mask in which each row sees one run of keys."""
    seeds = st.integers(0, 2**32 - 1).map(np.random.default_rng)
    return st.one_of(
        st.just(masks.causal("end")),
        seeds.map(lambda random: masks.lengths(random.integers(0, extent.keys + 1, extent.lead))),
        seeds.map(lambda random: masks.intervals(*random.integers(-2, extent.keys + 3, (2, *extent.shape[:-1])))),
    )


@st.composite
def any_plain_scores(draw: st.DrawFn, extent: Extent) -> Score:
    """The dot product with any scale and sinks."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return scores.dot(
        draw(st.none() | st.floats(-2, 2)), sinks=draw(st.none() | st.just(random.standard_normal(extent.heads)))
    )
