"""The pass of measures: what it writes, and how it is shared out over threads. See ``kernels.measure``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clearhead import launch
from clearhead.fold import Fold
from clearhead.kernels import functions, riding
from clearhead.kernels import measure as kernels
from clearhead.kernels.arguments import likes, pack
from clearhead.kernels.forward import attend_and_measure
from clearhead.kernels.measure_asked import FOLD, OFFSETS, Asked
from clearhead.kernels.target import host
from clearhead.kernels.tiles import TOGETHER, lay_out
from clearhead.kernels.visible import BLOCK
from clearhead.plan import Plan, address, strided

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]
MOST_CHUNKS, SMALLEST_CHUNK = 8, 8  # of a head; tiles of queries


@dataclass(frozen=True)
class Wanted:
    """What a pass should find beside the sums of rows: see ``kernels.measure_asked.Asked``. Where ``top`` or a count is
    0, it is not wanted.

    factors : (batch * heads, vectors, queries) in the type computed in; None: what keys receive is not wanted, but if
    ``received`` it is the sum over all rows.
    """

    aligned: int = 0
    sink: int = 0
    spread: bool = False
    offsets: tuple[int, ...] = ()
    received: bool = False
    factors: Floats | None = None
    grid: tuple[int, int] | None = None
    grid_largest: bool = False
    top: int = 0
    folds: tuple[Fold, ...] = ()
    first_query: int = 0
    first_key: int = 0


@dataclass(frozen=True)
class Kept:
    """What a pass has found; leading axes are (batch * heads).

    rows : (queries, OFFSETS + offsets); received : (vectors, keys); seen : (keys,), by how many rows; grid : sums or
    largest, (grid rows, grid columns); top : (weights, keys), each (queries, top); folds : (queries, keeps) each.
    """

    rows: NDArray[np.float64]
    received: NDArray[np.float64] | None = None
    seen: Ints | None = None
    grid: NDArray[np.float64] | None = None
    top: tuple[Floats, Ints] | None = None
    folds: list[NDArray[np.float64]] = field(default_factory=list)


def run(plan: Plan, logsumexp: Floats, wanted: Wanted) -> Kept:
    """One pass over the scores; logsumexp (batch, heads, queries, 2), see ``kernels.forward``.

    Beside its results it needs 8 numbers a key and head where keys or blocks are asked for, and some 0.4 MB a thread.
    """
    extent, at = plan.problem.extent, plan.problem.compute_dtype
    heads, queries, keys = extent.batch * extent.heads, extent.queries, extent.keys
    tiles = -(-queries // host().rows(at))
    # Cut by the number of queries alone: sums are then rounded alike whatever else is computed with them.
    chunks = max(1, min(MOST_CHUNKS, tiles // SMALLEST_CHUNK))
    rows = np.zeros((heads, queries, OFFSETS + len(wanted.offsets)))
    offsets = np.array(wanted.offsets, np.int64)
    vectors = 0 if not wanted.received else 1 if wanted.factors is None else wanted.factors.shape[1]
    received = np.zeros((heads, chunks, vectors, keys))
    seen = np.zeros((heads, chunks if wanted.received and wanted.factors is None else 0, keys), np.int64)
    height, width = wanted.grid or (0, 0)
    grid = np.zeros((heads, height + chunks if wanted.grid else 0, width))
    top = np.zeros((heads, queries, wanted.top), at), np.zeros((heads, queries, wanted.top), np.int64)
    kept = [np.zeros((heads, queries, fold.keeps)) for fold in wanted.folds]
    table, compiled = _table(wanted.folds, kept, at)
    asked = Asked(
        chunks=chunks,
        aligned=wanted.aligned,
        sink=max(0, wanted.sink - wanted.first_key),
        spread=wanted.spread,
        offsets=address(offsets),
        offset_count=len(offsets),
        received=address(received) if vectors else 0,
        vectors=vectors,
        factors=0 if wanted.factors is None else address(wanted.factors),
        seen=address(seen) if seen.size else 0,
        grid=address(grid) if grid.size else 0,
        grid_rows=height,
        grid_columns=width,
        grid_largest=wanted.grid_largest,
        top=wanted.top,
        top_weights=address(top[0]),
        top_keys=address(top[1]),
        folds=address(table),
        fold_count=len(wanted.folds),
        first_query=wanted.first_query,
        first_key=wanted.first_key,
    )
    numbers = np.array(asked, np.int64)
    _go_through(plan, logsumexp, rows, numbers, chunks, tiles, _Room(plan, asked, sum(f.keeps for f in wanted.folds)))
    del compiled
    tile, found_grid = host().rows(at), None
    if wanted.grid:
        found_grid = _joined(grid, chunks, queries, height, wanted.grid_largest, tile)
    return Kept(
        rows=rows,
        received=received.sum(axis=1) if vectors else None,
        seen=seen.sum(axis=1) if seen.shape[1] else None,
        grid=found_grid,
        top=top if wanted.top else None,
        folds=kept,
    )


class Riding(launch.Forward):
    """A forward pass along which sums of rows ride: see ``kernels.riding``. ``rows`` is filled by ``run``."""

    def __init__(self, plan: Plan, wanted: Wanted) -> None:
        super().__init__(plan)
        extent, self._at = plan.problem.extent, plan.problem.compute_dtype
        columns = OFFSETS + len(wanted.offsets)
        self.rows = np.zeros((extent.batch * extent.heads, extent.queries, columns))
        self._offsets = np.array(wanted.offsets, np.int64)
        sink = max(0, wanted.sink - wanted.first_key)
        self._ride = np.array(
            [address(self.rows), wanted.aligned, sink, address(self._offsets), len(wanted.offsets)], np.int64
        )
        self._size = TOGETHER * (riding.RIDES + len(wanted.offsets)) * host().rows(self._at)

    def _compute(self, numbers: Ints, output: Floats, logsumexp: Floats) -> None:
        def some(places: Ints, first: int, last: int) -> None:
            sums = np.empty(self._size, self._at)
            attend_and_measure(numbers, self._likes, places, self._ride, address(sums), first, last)

        self._tiles.run(some)


class _Room:
    """How large a thread's desk is, see ``kernels.measure_asked.Desk``."""

    def __init__(self, plan: Plan, asked: Asked, keeps: int) -> None:
        kind = plan.problem.compute_dtype
        rows, lanes, size = host().rows(kind), host().lanes(kind), kind.itemsize
        columns = asked.grid_columns + lanes
        self.index_like = np.int32(0) if size == 4 else np.int64(0)
        self._parts = (
            (OFFSETS + asked.offset_count) * rows * 8,
            asked.vectors * rows * size,
            BLOCK * size,
            asked.top * rows * size,
            asked.top * rows * size,
            columns * rows * size if asked.grid else 0,
            columns * rows * size if asked.grid else 0,
            keeps * rows * 8,
        )

    def desk(self) -> tuple[Ints, NDArray[np.uint8]]:
        """(where its parts lie, the memory): zeros."""
        return lay_out(self._parts)


def _go_through(plan: Plan, logsumexp: Floats, rows: Floats, asked: Ints, chunks: int, tiles: int, room: _Room) -> None:
    """Run the kernel over all chunks of all heads."""
    extent = plan.problem.extent
    (logs, _kept), (into, _also) = (
        strided(logsumexp),
        strided(rows.reshape(extent.batch, extent.heads, *rows.shape[1:])),
    )
    x = plan.arguments._replace(output=into, logsumexp=logs)
    numbers, kinds, longest = pack(x), likes(x, plan.problem.compute_dtype), launch.tiles_in_a_share(plan)
    of_chunk, items = max(1, -(-tiles // chunks)), len(rows) * chunks
    # Chunks that take long are done in rounds, so that Ctrl-C is heard between them.
    step = max(1, min(of_chunk, longest))
    for begin in range(0, of_chunk, step):

        def some(places: Ints, first: int, last: int, begin: int = begin) -> None:
            desk, _buffer = room.desk()
            # From the last: under a causal mask a head's last chunk is the most work, and should not end late.
            low, high, end = items - last, items - first, begin + step
            kernels.measure(numbers, kinds, places, desk, room.index_like, asked, low, high, begin, end)

        launch.each(plan, some, items, max(1, longest // of_chunk))


def _table(folds: tuple[Fold, ...], kept: list[NDArray[np.float64]], at: np.dtype[Any]) -> tuple[Ints, list[Any]]:
    """(The user's folds as ``kernels.measure`` takes them, what its addresses point at.)"""
    rows, compiled = [], []
    for fold, numbers in zip(folds, kept, strict=True):
        data = np.asarray(fold.data)
        shape = np.array(data.shape, np.int64)
        function = functions.fold(fold.update, fold.keeps, at, data.dtype, data.ndim)
        rows.append((function.address, fold.keeps, address(numbers), address(data), address(shape)))
        compiled += [function, data, shape]
    return np.array(rows, np.int64).reshape(-1, FOLD), compiled


def _joined(grid: NDArray[np.float64], chunks: int, queries: int, height: int, largest: bool,
            tile: int) -> NDArray[np.float64]:  # fmt: skip
    """The grid of all chunks, in place: each has its first row apart, see ``kernels.measure_asked.Asked``.

    tile : how many queries are in one.
    """
    tiles, join = -(-queries // tile), np.maximum if largest else np.add
    for c in range(chunks):
        row = grid[:, ((tiles * c // chunks * tile + 1) * height - 1) // queries]
        join(row, grid[:, height + c], out=row)
    return grid[:, :height]
