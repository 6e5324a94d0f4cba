"""One table of cases: shapes x masks x scores x dtypes. Tests run all of it, benchmarks pick from it.

    >>> case = Case(SHAPES["grouped"], mask="causal_end", dtype="float32")
    >>> problem = case.problem()
    >>> sorted(problem), problem["query"].shape, problem["key"].shape
    (['key', 'mask', 'query', 'score', 'value'], (4, 7, 5), (2, 48, 5))

Tiles hold some tens of queries and 128 keys, so lengths stand one below, on and one above 48 and 128.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from clearhead import masks, scores
from clearhead.algebra import Extent, Mask
from clearhead.scores import Score

Floats = NDArray[np.floating[Any]]
DTYPES = ("float32", "float64", "float16", "bfloat16")


@dataclass(frozen=True)
class Shape:
    """Sizes of one problem. ``heads`` None: 2-D arrays; ``key_dim`` None: as ``dim``."""

    queries: int
    keys: int
    dim: int
    value_dim: int
    heads: int | None = None
    key_heads: int | None = None
    lead: tuple[int, ...] = ()
    key_dim: int | None = None

    @property
    def extent(self) -> Extent:
        return Extent(self.lead, 1 if self.heads is None else self.heads, self.queries, self.keys)

    def arrays(self, dtype: DTypeLike, random: np.random.Generator) -> tuple[Floats, Floats, Floats]:
        """query, key and value: normal random numbers, rounded to ``dtype``."""
        key_dim = self.dim if self.key_dim is None else self.key_dim
        sizes = ((self.queries, self.dim), (self.keys, key_dim), (self.keys, self.value_dim))
        if self.heads is not None:
            key_heads = self.heads if self.key_heads is None else self.key_heads
            sizes = tuple((*self.lead, h, *size) for h, size in zip((self.heads, key_heads, key_heads), sizes))  # type: ignore[assignment]  # noqa: B905
        query, key, value = (random.standard_normal(size).astype(dtype) for size in sizes)
        return query, key, value


SHAPES = {
    "nothing": Shape(0, 0, 4, 4),
    "no_queries": Shape(0, 7, 4, 4),
    "no_keys": Shape(7, 0, 4, 3, heads=2),
    "no_heads": Shape(5, 5, 4, 4, heads=0),
    "no_batch": Shape(5, 5, 4, 4, heads=2, lead=(0,)),
    "one": Shape(1, 1, 1, 1),
    "one_query": Shape(1, 300, 64, 64, heads=2, key_heads=1, lead=(2,)),
    "one_key": Shape(300, 1, 16, 16, heads=1),
    "plain": Shape(47, 127, 1, 1),
    "grouped": Shape(7, 48, 5, 3, heads=4, key_heads=2),
    "one_key_head": Shape(47, 49, 64, 32, heads=4, key_heads=1, lead=(2,)),
    "square": Shape(48, 48, 64, 64, heads=2),
    "more_queries": Shape(48, 47, 7, 64, heads=2),
    "five_axes": Shape(49, 128, 16, 8, heads=2, key_heads=1, lead=(2, 3)),
    "odd_dims": Shape(127, 129, 33, 65, heads=3),
    "one_tile": Shape(128, 127, 64, 64, heads=1),
    "long_dim": Shape(129, 128, 300, 5, heads=2),
    "no_dim": Shape(48, 48, 0, 16, heads=2),
    "no_value_dim": Shape(49, 129, 16, 0, heads=2),
    "several_tiles": Shape(300, 300, 64, 64, heads=2, key_heads=1),
    # Few queries: keys stream by, in chunks of 1,024.
    "decode_one": Shape(1, 1025, 16, 64, heads=2),
    "decode_group": Shape(3, 2100, 64, 32, heads=4, key_heads=2, lead=(2,)),
    "decode_eight": Shape(2, 1024, 128, 16, heads=4, key_heads=1),
}
# Of these, every mask and score is tried in every dtype; of the others in float32.
CHOSEN = ("grouped", "five_axes", "several_tiles", "decode_group")
# Queries and keys of different dims: for scores that learn to match them.
UNEQUAL = Shape(49, 130, 5, 8, heads=4, key_heads=2, lead=(2,), key_dim=7)

MakeMask = Callable[[Extent, np.random.Generator], Any]
MakeScore = Callable[[Extent, int, int, np.random.Generator], Score]


def every_third(batch: int, head: int, query: int, key: int) -> bool:
    """A user's mask of no simpler form."""
    return (batch + head + query + 2 * key) % 3 != 0


def relative(score: float, batch: int, head: int, query: int, key: int) -> float:
    """A user's score that depends on everything it is told."""
    return score * 0.5 + 0.3 * ((query + 2 * key) % 7) - 0.1 * head + 0.2 * batch


def _bools(*axes: str) -> MakeMask:
    """A random boolean array over these axes of the matrix, 1 along the others."""

    def make(extent: Extent, random: np.random.Generator) -> NDArray[np.bool_]:
        return np.asarray(random.random(_over(axes, extent)) < 0.6)

    return make


def _over(axes: tuple[str, ...], extent: Extent) -> tuple[int, ...]:
    heads, queries, keys = (
        size if axis in axes else 1
        for axis, size in (("heads", extent.heads), ("queries", extent.queries), ("keys", extent.keys))
    )
    return (*(extent.lead if "lead" in axes else ()), heads, queries, keys)


def _lengths(extent: Extent, random: np.random.Generator) -> Mask:
    return masks.lengths(random.integers(0, extent.keys + 1, extent.lead))


def _both_lengths(extent: Extent, random: np.random.Generator) -> Mask:
    keys, queries = (random.integers(0, n + 1, extent.lead) for n in (extent.keys, extent.queries))
    return masks.lengths(keys, queries)


def _documents(extent: Extent, random: np.random.Generator) -> Mask:
    """Packed texts: ids ascend, so each document is one run."""
    query, key = (np.sort(random.integers(0, 4, (*extent.lead, n))) for n in (extent.queries, extent.keys))
    return masks.documents(query, key)


def _scattered(extent: Extent, random: np.random.Generator) -> Mask:
    """Documents in several pieces."""
    return masks.documents(*(random.integers(0, 3, (*extent.lead, n)) for n in (extent.queries, extent.keys)))


def _intervals(extent: Extent, random: np.random.Generator) -> Mask:
    """Another run for each row, some empty and some reaching over the ends."""
    start, stop = (random.integers(-3, extent.keys + 4, extent.shape[:-1]) for _ in range(2))
    return masks.intervals(start, stop)


def _prefix(extent: Extent, random: np.random.Generator) -> Mask:
    """The prefix sees itself both ways, the rest is causal."""
    return masks.causal("end") | masks.intervals(0, extent.keys // 3)


MASKS: dict[str, MakeMask] = {
    "none": lambda extent, random: None,
    "causal_start": lambda extent, random: masks.causal("start"),
    "causal_end": lambda extent, random: masks.causal("end"),
    "window": lambda extent, random: masks.window(left=9, right=4, align="end"),
    "window_past": lambda extent, random: masks.causal("start") & masks.window(left=20, align="start"),
    "window_future": lambda extent, random: masks.window(right=0, align="end"),
    "lengths": _lengths,
    "both_lengths": _both_lengths,
    "padded_causal": lambda extent, random: _lengths(extent, random) & masks.causal("end"),
    "documents": _documents,
    "scattered_documents": _scattered,
    "intervals": _intervals,
    "array": _bools("lead", "heads", "queries", "keys"),
    "array_of_keys": lambda extent, random: random.random(extent.keys) < 0.6,
    "array_of_queries": lambda extent, random: random.random((extent.queries, 1)) < 0.6,
    "array_of_heads": _bools("heads"),
    "array_by_batch": _bools("lead", "keys"),
    "array_of_one": lambda extent, random: np.True_,
    "array_of_nothing": lambda extent, random: np.zeros((1, 1), bool),
    "array_and_causal": lambda extent, random: _bools("queries", "keys")(extent, random) & masks.causal("end"),
    "union": _prefix,
    "negation": lambda extent, random: ~masks.window(left=5, right=5, align="start"),
    "function": lambda extent, random: masks.function(every_third),
    "nested": lambda extent, random: (
        ~(_scattered(extent, random) | _bools("heads", "keys")(extent, random))
        | (masks.function(every_third) & masks.causal("end"))
    ),
}


def _bias(*axes: str, low: float | None = None) -> MakeScore:
    """A normal random bias over these axes; a third of it ``low``, if that is given."""

    def make(extent: Extent, dim: int, key_dim: int, random: np.random.Generator) -> Score:
        bias = random.standard_normal(_over(axes, extent))
        if low is not None:
            bias[random.random(bias.shape) < 0.3] = low
        return scores.dot(bias=bias)

    return make


def _general(*heads: str) -> MakeScore:
    def make(extent: Extent, dim: int, key_dim: int, random: np.random.Generator) -> Score:
        weight = random.standard_normal((*((extent.heads,) if heads else ()), dim, key_dim))
        return scores.general(weight / np.sqrt(max(1, dim)))

    return make


def _additive(extent: Extent, dim: int, key_dim: int, random: np.random.Generator, **modifiers: Any) -> Score:
    hidden = 11
    return scores.additive(
        random.standard_normal((dim, hidden)) / 2,
        random.standard_normal((key_dim, hidden)) / 2,
        random.standard_normal(hidden),
        **modifiers,
    )


def _modifiers(extent: Extent, random: np.random.Generator) -> dict[str, Any]:
    """All of them at once: their order shows."""
    return {
        "scale": -0.7,
        "softcap": 3.0,
        "bias": random.standard_normal((extent.queries, extent.keys)),
        "alibi": random.random(extent.heads) / 8,
        "align": "end",
        "function": relative,
        "sinks": random.standard_normal(extent.heads),
    }


SCORES: dict[str, MakeScore] = {
    "dot": lambda extent, dim, key_dim, random: scores.dot(),
    "scale_of_0": lambda extent, dim, key_dim, random: scores.dot(scale=0.0),
    "negative_scale": lambda extent, dim, key_dim, random: scores.dot(scale=-0.3),
    "softcap": lambda extent, dim, key_dim, random: scores.dot(softcap=2.0),
    "bias": _bias("lead", "heads", "queries", "keys"),
    "bias_of_keys": _bias("keys"),
    "bias_of_queries": _bias("queries"),
    "bias_of_heads": _bias("heads"),
    "bias_that_hides": _bias("heads", "queries", "keys", low=-np.inf),
    "bias_far_down": _bias("queries", "keys", low=-1e30),
    "alibi": lambda extent, dim, key_dim, random: scores.dot(alibi=scores.alibi_slopes(extent.heads), align="end"),
    "function": lambda extent, dim, key_dim, random: scores.dot(function=relative),
    "sinks": lambda extent, dim, key_dim, random: scores.dot(sinks=random.standard_normal(extent.heads)),
    "general": _general(),
    "general_by_head": _general("by head"),
    "additive": _additive,
    "all_modifiers": lambda extent, dim, key_dim, random: scores.dot(**_modifiers(extent, random)),
    "additive_with_all": lambda extent, dim, key_dim, random: _additive(
        extent, dim, key_dim, random, **_modifiers(extent, random)
    ),
}
LEARNED = ("general", "general_by_head", "additive", "additive_with_all")  # match dims that differ
# What is learned is projected to float32 first; one 16-bit dtype shows that, and each costs half a minute to compile.
LEARNED_DTYPES = ("float32", "float64", "float16")


@dataclass(frozen=True)
class Case:
    """One entry of the grid: names in the tables above, and what they make."""

    shape: Shape
    mask: str = "none"
    score: str = "dot"
    dtype: str = "float32"

    def problem(self) -> dict[str, Any]:
        """query, key, value, mask and score, as ``clearhead.attention`` takes them; the same at each call."""
        random = np.random.default_rng(zlib.crc32(repr(self).encode()))
        query, key, value = self.shape.arrays(as_dtype(self.dtype), random)
        extent, key_dim = self.shape.extent, self.shape.dim if self.shape.key_dim is None else self.shape.key_dim
        # A 16-bit problem is computed in float32, and so is what is added to its scores.
        score = _rounded(SCORES[self.score](extent, self.shape.dim, key_dim, random), self.dtype)
        return {"query": query, "key": key, "value": value, "mask": MASKS[self.mask](extent, random), "score": score}


def as_dtype(name: str) -> np.dtype[Any]:
    """A dtype by name. bfloat16 needs the package ml_dtypes."""
    if name == "bfloat16":
        import ml_dtypes

        name = ml_dtypes.bfloat16
    return np.dtype(name)


def grid() -> Iterator[tuple[str, Case]]:
    """(name, case) of all that is tested: every shape with every mask, and every score under masks of each kind.

    float32 has all of it; the other dtypes differ in how numbers are read and written, and have the chosen shapes.
    """
    for dtype in DTYPES:
        full = dtype == "float32"
        for name, shape in SHAPES.items():
            for mask in MASKS if full or name in CHOSEN else ("none", "padded_causal", "array"):
                yield f"{dtype}-{name}-{mask}", Case(shape, mask=mask, dtype=dtype)
        for name in ("one", "no_keys", "no_dim", *CHOSEN) if full else CHOSEN:
            for score in SCORES if dtype in LEARNED_DTYPES else [s for s in SCORES if s not in LEARNED]:
                for mask in ("none", "causal_end", "padded_causal", "nested") if full else ("none", "padded_causal"):
                    yield f"{dtype}-{name}-{mask}-{score}", Case(SHAPES[name], mask, score, dtype)
        for score in LEARNED if dtype in LEARNED_DTYPES else ():
            yield f"{dtype}-unequal-{score}", Case(UNEQUAL, "causal_end", score, dtype)


def _rounded(score: Score, dtype: str) -> Score:
    from dataclasses import replace

    bias = score.bias
    return score if bias is None or dtype == "float64" else replace(score, bias=bias.astype(np.float32))
