"""What is measured of a site when it is recorded, in one pass: numbers of each head, what keys received, a small map.

Means are over the rows that see something, in the units of :mod:`clearhead.measures`. Where queries and keys are
the same text, in order, two more say where a head looks: ``far`` is ``distance`` less the first token's part, and
``previous`` leaves out the first row, which has no token before it.

Where measures alone are kept, maps and what keys received are stored in 16 bits, which halves the file, but for short
texts, whose maps are the weights themselves. They are looked at and ranked, for which three digits do; means, and with
``mass`` what keys received in all, stay in 64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from clearhead.trace.format import Site
from clearhead.trace.visible import Visible

if TYPE_CHECKING:
    from clearhead.weights import AttentionWeights

PREFIX = "measure."
POSITIONS = ("distance", "previous", "self", "diagonality")
MAP = 64  # rows and columns of each head's map, at most
HALVED = ("pooled", "received")  # in 16 bits where measures alone are kept,
LARGEST_HALF = 60000.0  # unless a number is larger: float16 ends at 65,504
_OTHERS = ("pooled", "received", "rows")  # what is kept beside means
IN_ORDER = ("self", "encoder", "decoder", "text", "audio")  # kinds whose keys are the queries' own text, in order

Arrays = dict[str, NDArray[Any]]


class SiteMeasures:
    """The measures of all heads of one site, for one text. Made by ``trace.measures``."""

    def __init__(self, values: Arrays) -> None:
        self._values = values

    def __iter__(self) -> Iterator[str]:
        """The names that ``mean`` knows."""
        return (name for name in self._values if name not in _OTHERS)

    def mean(self, name: str) -> NDArray[np.float64]:
        """The mean of a measure over the rows that see something: (heads,) float64. Coverage is a head's own."""
        if name.rstrip("_") not in tuple(self):
            raise AttributeError(f"{name!r} was not measured, only {', '.join(self)}")
        return np.asarray(self._values[name.rstrip("_")], np.float64)

    @property
    def rows(self) -> NDArray[np.int64]:
        """How many rows of each head see something: (heads,)."""
        return np.asarray(self._values["rows"])

    @property
    def received(self) -> NDArray[np.float32]:
        """The sum of the weights on each key: (heads, keys)."""
        return np.asarray(self._values["received"], np.float32)

    @property
    def pooled(self) -> NDArray[np.float32]:
        """A small map of each head: (heads, rows, columns), as of ``weights.pooled``."""
        return np.asarray(self._values["pooled"], np.float32)

    def to_dict(self) -> Arrays:
        """Name to array."""
        return dict(self._values)


def measure(site: Site, weights: AttentionWeights, visible: Visible) -> Arrays:
    """The measures of one text: name to (heads, ...)."""
    in_order = site.kind in IN_ORDER and site.queries == site.keys
    names = ["entropy", "largest", "sink", "mass", *(POSITIONS if in_order else ())]
    found = weights.measure(*names, "received", "coverage", sink=1, pooled=(MAP, MAP))
    sees = visible.sees()
    seeing = np.broadcast_to(True if sees is None else sees, (site.heads, site.queries))
    values = {name: _mean(found.to_dict()[name], seeing) for name in names if name != "previous"}
    if in_order:
        position = np.arange(site.queries)
        values["previous"] = _mean(found.previous, seeing & (position > 0))
        # Distance is a sum over keys, so the first key's part of it is its weight times its distance.
        values["far"] = _mean(found.distance - found.sink * position, seeing)
    values["coverage"] = found.coverage
    values["received"] = found.received.astype(np.float32)
    values["rows"] = seeing.sum(axis=-1).astype(np.int64)
    return values | {"pooled": found.pooled.astype(np.float32)}


def recorded(arrays: Arrays, text: int) -> SiteMeasures | None:
    """The measures that a site's file holds, or None."""
    values = {name.removeprefix(PREFIX): array[text] for name, array in arrays.items() if name.startswith(PREFIX)}
    return SiteMeasures(values) if values else None


def tensors(texts: list[Arrays], alone: bool = False) -> Arrays:
    """What to keep of the measures of each text, by its name in the site's file. ``alone`` : there is nothing else."""
    found = {name: np.stack([values[name] for values in texts]) for name in texts[0]}
    long = MAP in found["pooled"].shape[-2:]
    for name in HALVED if alone and long else ():
        if not (found[name] > LARGEST_HALF).any():
            found[name] = found[name].astype(np.float16)
    return {PREFIX + name: values for name, values in found.items()}


def _mean(values: NDArray[Any], rows: NDArray[np.bool_]) -> NDArray[np.float64]:
    count = rows.sum(axis=-1)
    total = np.where(rows, values, 0).sum(axis=-1, dtype=np.float64)
    return np.asarray(np.where(count > 0, total / np.maximum(count, 1), 0.0))
