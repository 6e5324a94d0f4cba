"""What rows of weights say, one number a row, computed in one pass without the matrix.

For a row i with weights w over the keys it may see (natural logs, positions aligned):

    entropy    -sum w ln w                    nats: 0 looks at one key, ln n at n keys alike
    sink       sum of w over the first keys   weight
    distance   sum w (i - j)                  tokens back, on average
    previous   w on the key one back          weight
    self       w on the key at i itself       weight

A row that sees nothing has 0 everywhere and takes no part in averages (``Measures.mean``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clearhead import launch, masks
from clearhead.plan import Plan

Floats = NDArray[np.float64]
ROW_MEASURES = ("entropy", "distance", "sink", "previous", "self")  # in the kernel's order


class Measures:
    """Named measures: attributes (``self`` is spelled ``self_``), each (..., heads, queries) float64."""

    def __init__(self, values: dict[str, Floats], sees: NDArray[np.bool_]) -> None:
        self._values, self._sees = values, sees

    def __getattr__(self, name: str) -> Floats:
        if name.startswith("_"):  # asked for by copy and pickle before there are values
            raise AttributeError(name)
        try:
            return self._values[name.rstrip("_")]
        except KeyError:
            raise AttributeError(f"{name!r} was not measured, only {', '.join(self._values)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __repr__(self) -> str:
        shape = self._sees.shape
        return f"Measures({', '.join(self._values)}; each {shape})"

    @property
    def empty_rows(self) -> NDArray[np.int64]:
        """How many rows of each head see nothing: (..., heads)."""
        return np.asarray((~self._sees).sum(axis=-1))

    def mean(self, name: str) -> Floats:
        """The average over the rows that see something: (..., heads). NaN where none does."""
        values, count = self._values[name.rstrip("_")], self._sees.sum(axis=-1)
        total = np.where(self._sees, values, 0).sum(axis=-1)
        return np.where(count > 0, total / np.maximum(count, 1), np.nan)

    def to_dict(self) -> dict[str, Floats]:
        """Name to array, as asked for."""
        return dict(self._values)


def measure_rows(plan: Plan, logsumexp: NDArray[Any], names: tuple[str, ...], sink: int, align: Any) -> Measures:
    """The named row measures; logsumexp (batch, heads, queries, 2). Costs one pass over the scores."""
    unknown = [name for name in names if name not in ROW_MEASURES]
    if unknown or not names:
        raise ValueError(
            f"measure: {', '.join(map(repr, unknown)) or 'nothing'} asked for, known are {', '.join(ROW_MEASURES)}"
        )
    if sink < 0:
        raise ValueError(f"sink must be a number of keys, 0 or more, got {sink}")
    align_checked = masks.checked_align(align)
    extent, problem = plan.problem.extent, plan.problem
    positional = {"distance", "previous", "self"} & set(names)
    aligned = extent.offset(align_checked, f"measure({sorted(positional)[0]!r})") if positional else 0
    everything = launch.measure(plan, logsumexp, sink, aligned)
    shape = (*extent.lead, extent.heads, extent.queries)
    values = {name: problem.as_given(everything[..., ROW_MEASURES.index(name)].reshape(shape), -2) for name in names}
    return Measures(values, problem.as_given((everything[..., -1] > 0).reshape(shape), -2))
