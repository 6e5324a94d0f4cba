"""The user's arguments, checked once: whatever is wrong with them is said here, and nowhere later.

``check`` turns (query, key, value, mask, score) into one frozen Problem with arrays of shape
(*lead, heads, tokens, dim), one dtype, and a mask and score that are known to fit. Nothing is copied unless
dtypes differ.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from clearhead import masks, scores
from clearhead.algebra import Extent, Mask, check_broadcast
from clearhead.scores import FLOATS, Additive, Dot, General, Score

Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True, eq=False)
class Problem:
    """One attention, ready to be computed.

    query : (*lead, heads, queries, dim); key : (*lead, key heads, keys, dim); value : (*lead, key heads, keys,
    value dim) or None where only weights are wanted. Query head h reads key head ``h // group``.
    """

    query: Floats
    key: Floats
    value: Floats | None
    mask: Mask | None
    score: Score
    extent: Extent
    single: bool  # the user gave 2-D arrays, and gets results without a heads axis

    @property
    def dtype(self) -> np.dtype[Any]:
        """That of the result."""
        return np.dtype(self.query.dtype)

    @property
    def compute_dtype(self) -> np.dtype[Any]:
        """That of products and sums: float64 for float64, else float32."""
        return np.dtype(np.float64 if self.dtype == np.float64 else np.float32)

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return max(1, self.extent.heads // max(1, int(self.key.shape[-3])))

    @property
    def scale(self) -> float:
        return self.score.scale_for(self.query.shape[-1])

    def as_given(self, result: NDArray[Any], axis: int) -> NDArray[Any]:
        """A result with the axes that the user's arrays had: ``axis`` is that of the heads."""
        return result.squeeze(axis) if self.single else result


def check(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike | None,
    mask: Mask | ArrayLike | None = None,
    score: Score | None = None,
) -> Problem:
    """The Problem that these arguments state, or a TypeError or ValueError that says what is wrong with them."""
    given = {"query": np.asarray(query), "key": np.asarray(key)}
    if value is not None:
        given["value"] = np.asarray(value)
    dtype = _common_dtype(given)
    arrays = {name: array.astype(dtype, copy=False) for name, array in given.items()}
    _check_ranks(arrays)
    single = arrays["query"].ndim == 2
    if single:
        arrays = {name: array[None] for name, array in arrays.items()}
    arrays = _broadcast_lead(arrays)
    q, k, v = arrays["query"], arrays["key"], arrays.get("value")
    _check_sizes(q, k, v)
    extent = Extent(q.shape[:-3], q.shape[-3], q.shape[-2], k.shape[-2])
    mask, score = _mask_and_score(mask, score)
    _check_score(score, q, k, extent)
    if mask is not None:
        mask.check(extent)
    return Problem(q, k, v, mask, score, extent, single)


def _common_dtype(arrays: dict[str, NDArray[Any]]) -> np.dtype[Any]:
    for name, array in arrays.items():
        if array.dtype.name not in FLOATS:
            raise TypeError(
                f"{name} has dtype {array.dtype}, attention needs one of {', '.join(FLOATS)}: "
                f"convert it, for example {name}.astype(np.float32)"
            )
    dtypes = {array.dtype for array in arrays.values()}
    try:
        return dtypes.pop() if len(dtypes) == 1 and array.dtype.isnative else np.result_type(*dtypes).newbyteorder("=")
    except TypeError:  # float16 and bfloat16 have no common 16-bit type
        return np.result_type(np.float32, *(dtype for dtype in dtypes if dtype.itemsize > 2))


def _check_ranks(arrays: dict[str, NDArray[Any]]) -> None:
    shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
    if min(array.ndim for array in arrays.values()) < 2:
        raise ValueError(f"query, key and value must be (tokens, dim) or (..., heads, tokens, dim), got {shapes}")
    if len({array.ndim > 2 for array in arrays.values()}) > 1:
        raise ValueError(
            f"query, key and value must all be (tokens, dim) or all have a heads axis, (..., heads, tokens, dim), "
            f"got {shapes}"
        )


def _broadcast_lead(arrays: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    leads = {array.shape[:-3] for array in arrays.values()}
    if len(leads) == 1:
        return arrays
    try:
        lead = np.broadcast_shapes(*leads)
    except ValueError:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise ValueError(f"the leading axes do not broadcast: {shapes}") from None
    return {name: np.broadcast_to(array, (*lead, *array.shape[-3:])) for name, array in arrays.items()}


def _check_sizes(query: Floats, key: Floats, value: Floats | None) -> None:
    heads, key_heads = query.shape[-3], key.shape[-3]
    if value is not None and value.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"key has {key.shape[-2]} tokens and value has {value.shape[-2]}: each key needs exactly one value"
        )
    if value is not None and value.shape[-3] != key_heads:
        raise ValueError(f"key has {key_heads} heads and value has {value.shape[-3]}: they must be equal")
    if heads % key_heads if key_heads else heads:
        raise ValueError(
            f"key has {key_heads} heads and query has {heads}: {heads} is not a multiple of {key_heads}. "
            f"Grouped-query attention needs the same number of query heads for each key head"
        )


def _mask_and_score(mask: Mask | ArrayLike | None, score: Score | None) -> tuple[Mask | None, Score]:
    if score is not None and not isinstance(score, Score):
        raise TypeError(f"score must be made by scores.dot, scores.general or scores.additive, got {score!r}")
    score = score or scores.dot()
    if mask is None or isinstance(mask, Mask):
        return mask, score
    array = np.asarray(mask)
    if array.dtype.name not in FLOATS:
        return masks.array(array), score
    if score.bias is not None:
        raise ValueError("mask is an array of numbers to add, and score has a bias already: add the two yourself")
    return None, replace(score, bias=array)


def _check_score(score: Score, query: Floats, key: Floats, extent: Extent) -> None:
    dim, key_dim = query.shape[-1], key.shape[-1]
    match score.base:
        case Dot():
            if dim != key_dim:
                raise ValueError(
                    f"query has dim {dim} and key has dim {key_dim}: a dot product needs equal dims; "
                    f"scores.general(W) matches unequal ones"
                )
        case General(weight):
            if weight.shape[-2:] != (dim, key_dim) or (weight.ndim == 3 and weight.shape[0] != extent.heads):
                raise ValueError(
                    f"general: weight has shape {weight.shape}, query dim {dim}, key dim {key_dim} and "
                    f"{extent.heads} heads need ({dim}, {key_dim}) or ({extent.heads}, {dim}, {key_dim})"
                )
        case Additive(query_weight, key_weight, _):
            for name, weight, size in (("query", query_weight, dim), ("key", key_weight, key_dim)):
                if weight.shape[0] != size:
                    raise ValueError(
                        f"additive: {name}_weight has shape {weight.shape}, {name} has dim {size}: "
                        f"it must be ({size}, hidden)"
                    )
    if score.bias is not None:
        check_broadcast("bias", score.bias.shape, extent.shape, "(..., heads, queries, keys)")
    for name, per_head in (("alibi", score.slopes), ("sinks", score.sinks)):
        if per_head is not None and per_head.shape not in ((), (1,), (extent.heads,)):
            raise ValueError(f"{name} needs one number per head, ({extent.heads},), got shape {per_head.shape}")
    if score.slopes is not None:
        extent.offset(score.align, "alibi")
