"""From the arrays that a trace keeps of a site to its weights: mask, score and queries and keys put together again."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from clearhead import masks, scores
from clearhead.trace.errors import TraceError
from clearhead.trace.format import Site
from clearhead.trace.visible import Visible

if TYPE_CHECKING:
    from clearhead.weights import AttentionWeights

Arrays = dict[str, NDArray[Any]]


def site_weights(
    site: Site,
    arrays: Arrays,
    text: int,
    place: int | None = None,
    with_logsumexp: bool = True,
    without: Collection[int] = (),
) -> AttentionWeights:
    """The weights of one text from a site's arrays; of one head alone, if its place among them is given."""
    from clearhead import attention_weights  # loads the kernels: opening a trace does not need them

    heads, key_heads = slice(None), slice(None)
    if place is not None:
        heads = slice(place, place + 1)
        key_head = place // (site.heads // site.key_heads)
        key_heads = slice(key_head, key_head + 1)
    mask = site_visible(site, arrays, text, heads).mask()
    if without:
        rest = _without(without, site.keys)
        mask = rest if mask is None else mask & rest
    return attention_weights(
        arrays["query"][text, heads],
        arrays["key"][text, key_heads],
        mask=mask,
        score=_score(site, arrays, text, heads),
        logsumexp=arrays["logsumexp"][text, heads] if with_logsumexp and not without else None,
    )


def _without(keys: Collection[int], count: int) -> masks.Mask:
    """All keys but some."""
    places = sorted(set(keys))
    if places[0] < 0 or places[-1] >= count:
        raise TraceError(f"keys {places[0]} to {places[-1]} are to be left out, and there are {count}, from 0")
    if places == list(range(len(places))):
        return masks.intervals(len(places), count)
    kept = np.ones((1, count), bool)
    kept[0, places] = False
    return masks.array(kept)


def site_visible(site: Site, arrays: Arrays, text: int, heads: slice = slice(None)) -> Visible:
    """Who may look at whom in one text."""
    array = arrays.get("mask")
    if array is not None:
        array = array[text, heads] if array.shape[1] > 1 else array[text]
    start, stop = (arrays[name][text] if name in arrays else None for name in ("start", "stop"))
    return Visible(site.mask, start, stop, array)


def _score(site: Site, arrays: Arrays, text: int, heads: slice) -> scores.Score:
    sinks = arrays["sinks"][heads] if "sinks" in arrays else None
    return scores.dot(scale=site.scale, softcap=site.softcap, bias=site_bias(site, arrays, text, heads), sinks=sinks)


def site_bias(site: Site, arrays: Arrays, text: int, heads: slice = slice(None)) -> NDArray[Any] | None:
    """What is added to the scores of one text: (1 or heads, queries, keys), or None."""
    if site.bias == "none":
        return None
    kept = arrays["bias" if site.bias == "dense" else "offsets"]
    kept = kept[text if len(kept) > 1 else 0]
    kept = kept[heads] if len(kept) > 1 else kept
    return kept if site.bias == "dense" else by_offset(kept, site.queries)


def by_offset(offsets: NDArray[Any], queries: int) -> NDArray[Any]:
    """(heads, queries, keys) from one number per head and offset: a view that takes no memory of its own.

    offsets : (heads, queries + keys - 1), of key minus query from ``1 - queries`` to ``keys - 1``.

    >>> by_offset(np.array([[-1, 0, 1, 2]]), queries=2).tolist()
    [[[0, 1, 2], [-1, 0, 1]]]
    """
    keys = offsets.shape[-1] - queries + 1
    step = offsets.strides[-1]
    return np.lib.stride_tricks.as_strided(
        offsets[:, queries - 1 :], (len(offsets), queries, keys), (offsets.strides[0], -step, step), writeable=False
    )
