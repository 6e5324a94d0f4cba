"""Measures of one part of a text: the mean over its rows of what is measured of rows, over its keys of what of keys.

Rows that see nothing take no part, as in a head's own mean; a part that is the whole text has that mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from clearhead.asked import KEY_MEASURES, POSITIONAL, ROW_MEASURES
from clearhead.trace.errors import TraceError
from clearhead.trace.format import Site
from clearhead.trace.measured import IN_ORDER
from clearhead.trace.segments import Ranges

if TYPE_CHECKING:
    from clearhead.trace.visible import Visible
    from clearhead.weights import AttentionWeights

KNOWN = (*ROW_MEASURES, *KEY_MEASURES)


def check_names(names: Sequence[str], site: Site) -> None:
    """Raise TraceError unless each is a measure of rows or keys, and of positions only where tokens are in order."""
    for name in names:
        if name not in KNOWN:
            raise TraceError(f"{name!r} has no mean over a segment; there are {', '.join(KNOWN)}")
        if name in POSITIONAL and not (site.kind in IN_ORDER and site.queries == site.keys):
            raise TraceError(
                f"{name!r} is of positions, and keys of {site.kind} attention are not the queries' own text"
            )
    if not names:
        raise TraceError(f"say which measures are wanted: {', '.join(KNOWN)}")


def means(
    weights: AttentionWeights, visible: Visible, names: Sequence[str], rows: Ranges, keys: Ranges
) -> dict[str, NDArray[np.float64]]:
    """The mean of each measure over the rows (or keys) of a part: name to (heads,) float64, NaN where there are none.

    weights : (heads, queries, keys); visible : who may look at whom in them; rows, keys : ranges of the part.

    >>> import clearhead as ch
    >>> from clearhead.trace.visible import Visible
    >>> weights = ch.attention_weights(np.zeros((1, 4, 2)), np.zeros((1, 4, 2)), mask=ch.masks.causal())
    >>> found = means(weights, Visible("causal"), ["largest", "received"], rows=((2, 4),), keys=((0, 1),))
    >>> {name: values.round(3).tolist() for name, values in found.items()}  # 1/3 and 1/4; 1 + 1/2 + 1/3 + 1/4
    {'largest': [0.292], 'received': [2.083]}
    """
    found = weights.measure(*names)
    sees = visible.sees()
    seeing = np.broadcast_to(True if sees is None else sees, weights.shape[:2])
    return {
        name: _mean(found[name], np.ones_like(found[name], bool), keys)
        if name in KEY_MEASURES
        else _mean(found[name], seeing, rows)
        for name in names
    }


def _mean(values: NDArray[np.float64], counts: NDArray[np.bool_], ranges: Ranges) -> NDArray[np.float64]:
    """The mean over those places in the ranges that count: (heads, places) to (heads,)."""
    places = np.concatenate([np.arange(0), *(np.arange(start, stop) for start, stop in ranges)])
    counts = counts[:, places]
    total, count = np.where(counts, values[:, places], 0).sum(axis=-1), counts.sum(axis=-1)
    return np.asarray(np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0))
