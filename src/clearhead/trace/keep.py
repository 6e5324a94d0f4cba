"""What is kept of one attention: its arrays, its facts, and what was found when some of its rows were looked at."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from clearhead.trace.arrays import array
from clearhead.trace.errors import TraceError
from clearhead.trace.faithful import look_at_rows
from clearhead.trace.format import Site, SiteCheck
from clearhead.trace.gather import Gathered
from clearhead.trace.measured import measure, tensors
from clearhead.trace.reader import site_weights
from clearhead.trace.tensors import format_name
from clearhead.trace.visible import Visible, without_rows

if TYPE_CHECKING:
    from clearhead.weights import AttentionWeights

Store = Literal["float16", "bfloat16"]
STORES = ("float16", "bfloat16")
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Keeping:
    """What to keep of a site. heads : their numbers, None for all; store : the dtype of queries and keys, None for the
    model's own; only_measures : keep no queries and keys."""

    heads: Collection[int] | None = None
    store: Store | None = None
    only_measures: bool = False


def check_store(store: Any) -> None:
    """Raise TraceError unless queries and keys can be stored so."""
    if store is not None and store not in STORES:
        raise TraceError(
            f"store takes {' or '.join(map(repr, STORES))}, or None for the model's own dtype, not {store!r}"
        )


def keep(
    gathered: Gathered, keeping: Keeping, padding: NDArray[np.bool_] | None, deviation: float
) -> tuple[Site, Arrays, SiteCheck]:
    """The facts of a site, the arrays of its file, and its check.

    padding : (texts, queries), True where a query is padding and sees nothing; deviation : of weights times values
    from the model's own output, as found while it ran."""
    call = gathered.call
    query, key, numbers = _chosen(gathered, keeping)
    texts, heads, queries, dim = query.shape
    visible = gathered.visible
    if padding is not None:
        visible = without_rows(visible, padding, queries, key.shape[2])
    arrays: Arrays = {"query": query, "key": key, **visible.tensors()}
    if "mask" in arrays and arrays["mask"].shape[1] > 1 and numbers:
        arrays["mask"] = arrays["mask"][:, list(numbers)]
        visible = Visible("array", array=arrays["mask"])
    for name, values in (("offsets", gathered.offsets), ("bias", gathered.bias)):
        if values is not None:
            arrays[name] = values[:, list(numbers)] if numbers and values.shape[1] > 1 else values
    if call.sinks is not None:
        sinks = array(call.sinks.float())
        arrays["sinks"] = sinks[list(numbers)] if numbers else sinks
    site = Site(
        kind=call.site.kind,
        layer=call.site.layer,
        heads=heads,
        key_heads=key.shape[1],
        queries=queries,
        keys=key.shape[2],
        dim=dim,
        dtype=format_name(query.dtype),
        mask=visible.kind,
        scale=call.scale,
        softcap=call.softcap,
        window=call.window,
        bias="offsets" if "offsets" in arrays else "dense" if "bias" in arrays else "none",
        causal=call.causal,
        numbers=numbers,
    )
    arrays["logsumexp"] = np.empty((texts, heads, queries))
    weights: list[AttentionWeights] = []
    for text in range(texts):
        weights.append(site_weights(site, arrays, text, with_logsumexp=False))
        arrays["logsumexp"][text] = weights[text].logsumexp64
    found = [look_at_rows(site, arrays, text, weights[text]) for text in range(texts)]
    check = SiteCheck(
        site.kind,
        site.layer,
        format_name(array(gathered.query[:1, :1, :1]).dtype),
        sum(rows for rows, _, _ in found),
        max(row_sum for _, row_sum, _ in found),
        max(hidden for _, _, hidden in found),
        deviation,
    )
    measured = tensors([measure(site, one, visible.of(text)) for text, one in enumerate(weights)])
    if keeping.only_measures:
        return replace(site, kept="measures"), measured, check
    return site, arrays | measured, check


def _chosen(gathered: Gathered, keeping: Keeping) -> tuple[NDArray[Any], NDArray[Any], tuple[int, ...]]:
    """(query, key, numbers of the heads): key heads go with the heads that read them, one each where some are left
    out. No numbers mean all."""
    query, key = gathered.query, gathered.key
    if keeping.store is not None:
        import torch

        dtype = getattr(torch, keeping.store)
        query, key = (x.to(dtype) if x.dtype.itemsize > 2 else x for x in (query, key))
    numbers: tuple[int, ...] = ()
    if keeping.heads is not None:
        count, group = query.shape[1], query.shape[1] // key.shape[1]
        numbers = tuple(sorted(set(keeping.heads)))
        if beyond := [head for head in numbers if not 0 <= head < count]:
            site = gathered.call.site
            raise TraceError(f"{site.kind} layer {site.layer} has heads 0 to {count - 1}: there is no head {beyond[0]}")
        query = query[:, list(numbers)]
        key = key[:, [head // group for head in numbers]]
    return np.ascontiguousarray(array(query)), np.ascontiguousarray(array(key)), numbers
