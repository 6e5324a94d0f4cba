"""What a call would do, said before it is done: which kernel, on which tiles, how much of the matrix it skips."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from clearhead import launch, memory
from clearhead.kernels import decode, visible
from clearhead.kernels.target import host
from clearhead.kernels.threads import get_num_threads
from clearhead.masks import Mask
from clearhead.plan import Plan, plan
from clearhead.problem import check
from clearhead.scores import Score

STEPS = {
    visible.INTERVALS: "intervals",
    visible.ARRAY: "array",
    visible.EQUAL: "equal ids",
    visible.FUNCTION: "function",
    visible.NOT: "not",
    visible.BOTH: "and",
    visible.EITHER: "or",
}


@dataclass(frozen=True)
class Explanation:
    """How one call would be computed. ``print`` it, or read its fields.

    kernel : "tiles"; "matrix tiles" where a matrix unit multiplies them; "streaming" where few queries meet many keys.
    target : the vectors used. tile : (queries, keys) computed at once.
    dtype : that products and sums are computed in. threads : at most so many.
    skipped : the share of the matrix that is never computed, as far as runs of keys per row tell. program : what is
    asked tile by tile beside them, in order; tiles that it hides are skipped too, but known only on the way.
    flop : of the two products over what is not skipped. bytes : read and written at least once, and worked in.
    """

    kernel: str
    target: str
    tile: tuple[int, int]
    dtype: str
    threads: int
    skipped: float
    program: tuple[str, ...]
    flop: int
    input_bytes: int
    output_bytes: int
    scratch_bytes: int

    def __str__(self) -> str:
        size = memory.written
        lines = {
            "kernel": f"{self.kernel}, {self.target} vectors, computing in {self.dtype}",
            "tile": f"{self.tile[0]} queries x {self.tile[1]} keys",
            "threads": str(self.threads),
            "skipped": f"{100 * self.skipped:.1f} % of the matrix by runs of keys"
            + (f", and what these hide: {', '.join(self.program)}" if self.program else ""),
            "arithmetic": f"{self.flop / 1e9:.3g} GFLOP",
            "memory": f"{size(self.input_bytes)} in, {size(self.output_bytes)} out, {size(self.scratch_bytes)} beside",
        }
        return "\n".join(f"{name:<11} {text}" for name, text in lines.items())


def explain(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    mask: Mask | ArrayLike | None = None,
    score: Score | None = None,
) -> Explanation:
    """What :func:`clearhead.attention` would do with these arguments, which it takes and checks alike.

    >>> import numpy as np, clearhead as ch
    >>> x = np.zeros((8, 4096, 64), np.float32)
    >>> found = ch.explain(x, x, x, mask=ch.masks.causal())
    >>> found.kernel, 0.45 < found.skipped < 0.5
    ('tiles', True)
    """
    planned = plan(check(query, key, value, mask, score))
    x, extent, at = planned.arguments, planned.problem.extent, planned.problem.compute_dtype
    streaming = launch.can_stream(planned)
    rows = x.group * x.queries if streaming else host().rows(at)
    computed = _computed(planned, 1 if streaming else rows)
    cells = math.prod(extent.shape)
    kept = [array for array in (planned.problem.query, planned.problem.key, planned.problem.value) if array is not None]
    return Explanation(
        kernel="streaming" if streaming else "matrix tiles" if launch.by_amx(planned) else "tiles",
        target=host().name,
        tile=(rows, decode.CHUNK if streaming else visible.BLOCK),
        dtype=at.name,
        threads=get_num_threads(),
        skipped=1 - computed / cells if cells else 0.0,
        program=tuple(STEPS[int(step)] for step in planned.program[:, visible.CODE]),
        flop=2 * computed * (x.dim + x.value_dim),
        input_bytes=sum(array.nbytes for array in kept),
        output_bytes=math.prod(extent.shape[:-1]) * x.value_dim * planned.problem.dtype.itemsize,
        scratch_bytes=launch.scratch_bytes(planned),
    )


def _computed(planned: Plan, rows: int) -> int:
    """How many cells are computed: for each tile of queries, from the first key any of them sees to the last."""
    extent = planned.problem.extent
    if 0 in extent.shape:
        return 0
    start, stop = (_distinct(bound[..., 0]) for bound in (planned.start, planned.stop))
    seen = stop > start
    tiles = np.arange(0, extent.queries, rows)
    low = np.minimum.reduceat(np.where(seen, start, extent.keys), tiles, axis=-1)
    high = np.maximum.reduceat(np.where(seen, stop, 0), tiles, axis=-1)
    size = np.diff(np.r_[tiles, extent.queries])
    return int(np.mean((np.maximum(high - low, 0) * size).sum(axis=-1)) * extent.batch * extent.heads)


def _distinct(bound: NDArray[Any]) -> NDArray[Any]:
    """Without the axes along which nothing changes, but for the last."""
    for axis in range(bound.ndim - 1):
        if bound.strides[axis] == 0:
            bound = bound.take([0], axis=axis)
    return bound
