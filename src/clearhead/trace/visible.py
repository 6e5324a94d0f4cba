"""Which keys each query of a layer may see: found in what the model handed to its attention, kept in a trace.

Nearly every mask of a language model lets a token see one unbroken run of earlier tokens: all of them, or
those within a sliding window. Two integers a row say that exactly. Whatever else a model does is kept as it
is, one boolean per cell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from clearhead import masks

Kind = Literal["full", "causal", "intervals", "array"]
KINDS: tuple[Kind, ...] = ("full", "causal", "intervals", "array")


@dataclass(frozen=True, eq=False)
class Visible:
    """Who may look at whom in one layer.

    kind : "full" (everyone at everyone), "causal" (at oneself and the past), "intervals" or "array";
    start, stop : (queries,) int64, for intervals: row i sees keys ``start[i] <= j < stop[i]``;
    array : (1 or heads, queries, keys) bool, True where the query sees the key.
    """

    kind: Kind
    start: NDArray[np.int64] | None = None
    stop: NDArray[np.int64] | None = None
    array: NDArray[np.bool_] | None = None

    def mask(self) -> masks.Mask | None:
        """The same as a mask of :mod:`clearhead.masks`."""
        match self.kind:
            case "full":
                return None
            case "causal":
                return masks.causal()
            case "intervals":
                assert self.start is not None
                assert self.stop is not None
                return masks.intervals(self.start, self.stop)
            case "array":
                assert self.array is not None
                return masks.array(self.array)

    def tensors(self) -> dict[str, NDArray[Any]]:
        """The arrays to keep in the layer's file."""
        found = {"start": self.start, "stop": self.stop, "mask": self.array}
        return {name: array for name, array in found.items() if array is not None}


def describe(allowed: NDArray[np.bool_]) -> Visible:
    """The shortest true description of a boolean mask (1 or heads, queries, keys).

    >>> describe(np.tril(np.ones((1, 3, 3), bool))).kind
    'causal'
    >>> seen = describe(np.array([[[True, True, False], [False, True, True]]]))
    >>> seen.start.tolist(), seen.stop.tolist()
    ([0, 1], [2, 3])
    """
    heads, queries, keys = allowed.shape
    if heads != 1 or not keys:
        return Visible("array", array=allowed)
    rows = allowed[0]
    count = rows.sum(axis=-1, dtype=np.int64)
    start = np.where(count > 0, rows.argmax(axis=-1), 0).astype(np.int64)
    stop = start + count
    # A run of `count` cells from the first visible one is unbroken exactly if the last of it is the last
    # visible.
    last = np.where(count > 0, keys - rows[:, ::-1].argmax(axis=-1), 0)
    if (last != stop).any():
        return Visible("array", array=allowed)
    if (start == 0).all() and (stop == keys).all():
        return Visible("full")
    if queries == keys and (start == 0).all() and (stop == np.arange(1, keys + 1)).all():
        return Visible("causal")
    return Visible("intervals", start=start, stop=stop)
