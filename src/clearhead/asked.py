"""Which measures are wanted: their names, what is asked of each, checked once. Definitions: ``clearhead.measures``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clearhead import masks
from clearhead.algebra import Align
from clearhead.fold import Fold
from clearhead.kernels import measure_asked as kernels
from clearhead.measuring import Wanted
from clearhead.plan import Plan

# Names, and where the kernel keeps the numbers that they follow from.
SUMS = {
    "entropy": kernels.ENTROPY, "mass": kernels.MASS, "distance": kernels.DISTANCE, "sink": kernels.SINK,
    "largest": kernels.LARGEST,
}  # fmt: skip
OFFSETS = {"self": 0, "previous": 1}
ROW_MEASURES = (*SUMS, *OFFSETS, "perplexity", "learned_sink", "diagonality")
KEY_MEASURES, HEAD_MEASURES = ("received",), ("coverage",)
POSITIONAL = ("distance", "diagonality", *OFFSETS)
_OFFSET = re.compile(r"offset\((-?\d+)\)")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Which measures, as ``weights.measure`` takes them; ``ask`` makes one for ``attention(measure=...)``."""

    names: tuple[str, ...]
    top: int | None = None
    pooled: tuple[int, int] | tuple[int, int, str] | None = None
    folds: Mapping[str, Fold] = field(default_factory=dict)
    sink: int = 1
    normalized: bool = False
    align: Align = None
    first_query: int | None = None
    first_key: int = 0

    def __post_init__(self) -> None:
        known = (*ROW_MEASURES, *KEY_MEASURES, *HEAD_MEASURES)
        unknown = [name for name in self.names if name not in known and self._offset_of(name) is None]
        nothing = not self.names and self.top is None and self.pooled is None and not self.folds
        if unknown or nothing:
            raise ValueError(
                f"measure: {', '.join(map(repr, unknown)) or 'nothing'} asked for, known are {', '.join(known)}, "
                f"offset(d), and top=k, pooled=(rows, columns), folds={{...}}"
            )
        if self.sink < 0:
            raise ValueError(f"sink must be a number of keys, 0 or more, got {self.sink}")
        if self.top is not None and self.top < 1:
            raise ValueError(f"top must be how many of the largest weights are wanted, 1 or more, got {self.top}")
        if self.pooled is not None:
            rows, columns, *how = self.pooled
            if min(rows, columns) < 1:
                raise ValueError(f"pooled(rows, columns) needs at least one block each way, got {rows} x {columns}")
            if how not in ([], ["mean"], ["max"]):
                raise ValueError(f"pooled=(rows, columns, {how[0]!r}): blocks give their 'mean' or their 'max'")
        for name, fold in self.folds.items():
            if not isinstance(fold, Fold):
                raise TypeError(f"folds: {name!r} must be a clearhead.Fold, got {fold!r}")
            if name in known or _OFFSET.fullmatch(name) or name in ("top", "pooled"):
                raise ValueError(f"folds: {name!r} is the name of a measure that is built in")
        masks.checked_align(self.align)

    @staticmethod
    def _offset_of(name: str) -> int | None:
        """How many keys back, of a name that says so."""
        found = _OFFSET.fullmatch(name)
        return int(found[1]) if found else OFFSETS.get(name)

    @property
    def offsets(self) -> dict[str, int]:
        """Names of masses at an offset, and how many keys back each is."""
        return {name: back for name in self.names if (back := self._offset_of(name)) is not None}

    @property
    def rides(self) -> bool:
        """Whether all of it follows from sums over rows that a forward pass can keep beside its own."""
        apart = {*KEY_MEASURES, *HEAD_MEASURES, "diagonality"} & set(self.names)
        return not (apart or self.top or self.pooled or self.folds)

    def aligned(self, plan: Plan) -> int:
        """At which of these keys query 0 stands."""
        positional = [name for name in self.names if name in POSITIONAL or _OFFSET.fullmatch(name)]
        if self.first_query is not None:
            return self.first_query - self.first_key
        if not positional:
            return 0
        if self.first_key:
            raise ValueError(
                f"measure({positional[0]!r}) with first_key={self.first_key}: these keys are a part of all, say also "
                f"first_query, the number of the first query among all"
            )
        return plan.problem.extent.offset(masks.checked_align(self.align), f"measure({positional[0]!r})")

    def wanted(self, plan: Plan) -> Wanted:
        """The same in the pass's terms."""
        extent = plan.problem.extent
        rows, columns, *how = self.pooled or (0, 0)
        grid = min(rows, extent.queries), min(columns, extent.keys)
        return Wanted(
            aligned=self.aligned(plan),
            sink=self.sink,
            spread="diagonality" in self.names,
            offsets=tuple(self.offsets.values()),
            received=bool({*KEY_MEASURES, *HEAD_MEASURES} & set(self.names)),
            grid=grid if min(grid) > 0 else None,
            grid_largest=how == ["max"],
            top=self.top or 0,
            folds=tuple(self.folds.values()),
            first_query=self.first_query or 0,
            first_key=self.first_key,
        )


def ask(*names: str, **options: Any) -> Asked:
    """Names and options of ``weights.measure``, for ``attention(..., measure=ask(...))``.

    >>> ask("entropy", "sink", sink=4).rides
    True
    """
    return Asked(names=names, **options)


def asked_for(measure: str | Sequence[str] | Asked | None) -> Asked | None:
    """What ``attention(measure=...)`` was given, as one thing."""
    if measure is None or isinstance(measure, Asked):
        return measure
    return ask(measure) if isinstance(measure, str) else ask(*measure)
