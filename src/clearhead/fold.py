"""A measure of one's own: what is kept of each row, how a weight changes it, how two parts of the keys are joined.

The measures that are built in are folds too, whose updates are vectors' (``kernels.folds``); ``clearhead.measures`` has
how their parts are joined. A fold of the user's is compiled by Numba and runs in the same pass over the scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
NO_DATA = np.zeros(0)


def add(first: Floats, share: Floats, second: Floats, other_share: Floats) -> Floats:
    """How sums of weights are joined: those of each part count by its share."""
    return first * share + second * other_share


def largest(first: Floats, share: Floats, second: Floats, other_share: Floats) -> Floats:
    """How largest weights are joined."""
    return np.maximum(first * share, second * other_share)


def information(shares: Floats) -> Floats:
    """-p ln p of each, 0 for 0."""
    positive = np.where(shares > 0, shares, 1.0)
    return np.asarray(-positive * np.log(positive))


@dataclass(frozen=True, eq=False)
class Fold:
    """A measure of rows that is yours: ``weights.measure(folds={"name": Fold(update)})``.

    Parameters
    ----------
    update : function (kept, weight, batch, head, query, key, data) -> None
        Called for each key of a row whose weight is not 0, in order of the keys. Changes ``kept`` in place, an array
        of ``keeps`` float64 that are 0 before the first key. Compiled by Numba: plain arithmetic, no Python objects.
    keeps : int
        How many numbers are kept of each row.
    data : array, optional
        Whatever ``update`` has to look up, such as the text's tokens: numbers or booleans, 1 axis or more.
    join : function (kept, share, other kept, other share) -> kept, optional
        What two parts of the keys have kept, arrays (..., keeps), as one: each part's weights become ``share`` (..., 1)
        times what they were. Default: ``kept * share + other_kept * other_share``, right for sums of weights.
    value : function (kept) -> value, optional
        The measure, from arrays (..., keeps). Default: the numbers kept, without the last axis if there is one of them.

    Raises
    ------
    TypeError
        If ``update`` cannot be compiled, or data is not numbers.
    ValueError
        If keeps is not positive.

    Examples
    --------
    The weight on keys that hold the same token as the query:

    >>> import numpy as np, clearhead as ch
    >>> def same(kept, weight, batch, head, query, key, tokens):
    ...     if tokens[query] == tokens[key]:
    ...         kept[0] += weight
    >>> x = np.zeros((4, 2))
    >>> fold = ch.Fold(same, data=[7, 3, 7, 7])
    >>> ch.attention_weights(x, x).measure(folds={"same": fold})["same"].tolist()
    [0.75, 0.25, 0.75, 0.75]
    """

    update: Callable[..., None]
    keeps: int = 1
    data: ArrayLike | None = None
    join: Callable[[Floats, Floats, Floats, Floats], Floats] = add
    value: Callable[[Floats], NDArray[Any]] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.keeps, int | np.integer) or self.keeps < 1:
            raise ValueError(f"fold: keeps must be how many numbers a row keeps, 1 or more, got {self.keeps!r}")
        if not callable(self.update):
            raise TypeError(
                f"fold: update must be a function (kept, weight, batch, head, query, key, data), got {self.update!r}"
            )
        data = np.atleast_1d(np.ascontiguousarray(NO_DATA if self.data is None else self.data))
        if data.dtype.kind not in "biuf" or data.dtype.itemsize > 8:
            raise TypeError(f"fold: data has dtype {data.dtype}, functions are compiled for numbers and booleans")
        object.__setattr__(self, "data", data.astype(data.dtype.newbyteorder("="), copy=False))

    def of(self, kept: Floats) -> NDArray[Any]:
        """The measure, from what was kept (..., keeps)."""
        if self.value is not None:
            return np.asarray(self.value(kept))
        return kept[..., 0] if self.keeps == 1 else kept
