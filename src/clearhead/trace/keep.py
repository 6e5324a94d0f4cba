"""What is kept of one attention: its arrays, its facts, and what was found when some of its rows were looked at."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from clearhead.trace.arrays import array
from clearhead.trace.errors import TraceError
from clearhead.trace.faithful import look_at_rows
from clearhead.trace.format import Site, SiteCheck
from clearhead.trace.gather import Gathered
from clearhead.trace.measured import measure, tensors
from clearhead.trace.recompute import site_bias, site_weights
from clearhead.trace.tensors import format_name
from clearhead.trace.there import measure_there
from clearhead.trace.visible import Visible, without_rows

Store = Literal["float16", "bfloat16"]
STORES = ("float16", "bfloat16")
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Keeping:
    """What to keep of a site. heads : their numbers, None for all; store : the dtype of queries and keys, None for the
    model's own, which is kept where it has 16 bits already; only_measures : keep no queries and keys; there : where
    only measures are kept, measure on the model's own device, None for devices other than the CPU."""

    heads: Collection[int] | None = None
    store: Store | None = None
    only_measures: bool = False
    there: bool | None = None

    def measures_there(self, device: str) -> bool:
        """Whether queries and keys on a device of this type stay there."""
        return self.only_measures and (device != "cpu" if self.there is None else self.there)


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
    chosen = list(numbers) if numbers else slice(None)
    if visible.array is not None and visible.array.shape[1] > 1:
        visible = Visible("array", array=visible.array[:, chosen])
    arrays: Arrays = visible.tensors()
    for name, values in (("offsets", gathered.offsets), ("bias", gathered.bias)):
        if values is not None:
            arrays[name] = values[:, chosen] if values.shape[1] > 1 else values
    site = Site(
        kind=call.site.kind,
        layer=call.site.layer,
        heads=heads,
        key_heads=key.shape[1],
        queries=queries,
        keys=key.shape[2],
        dim=dim,
        dtype=_dtype_name(query),
        mask=visible.kind,
        scale=call.scale,
        softcap=call.softcap,
        window=call.window,
        bias="offsets" if "offsets" in arrays else "dense" if "bias" in arrays else "none",
        causal=call.causal,
        numbers=numbers,
    )
    sinks = None if call.sinks is None else call.sinks.float()[chosen]
    measured, found = [], []
    if keeping.measures_there(query.device.type):
        for text in range(texts):
            bias = site_bias(site, arrays, text)
            one, looked = measure_there(site, query[text], key[text], visible.of(text), bias, sinks)
            measured.append(one)
            found.append(looked)
    else:
        arrays |= {"query": np.ascontiguousarray(array(query)), "key": np.ascontiguousarray(array(key))}
        if sinks is not None:
            arrays["sinks"] = array(sinks)
        arrays["logsumexp"] = np.empty((texts, heads, queries))
        for text in range(texts):
            weights = site_weights(site, arrays, text, with_logsumexp=False)
            arrays["logsumexp"][text] = weights.logsumexp64
            measured.append(measure(site, weights, visible.of(text)))
            found.append(look_at_rows(site, arrays, text, weights))
    rows, sums, hidden = zip(*found, strict=True)
    check = SiteCheck(site.kind, site.layer, _dtype_name(gathered.query), sum(rows), max(sums), max(hidden), deviation)
    if keeping.only_measures:
        return replace(site, kept="measures"), tensors(measured, alone=True), check
    return site, arrays | tensors(measured), check


def _dtype_name(tensor: Any) -> str:
    return format_name(array(tensor[:1, :1, :1]).dtype)


def _chosen(gathered: Gathered, keeping: Keeping) -> tuple[Any, Any, tuple[int, ...]]:
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
    return query, key, numbers
