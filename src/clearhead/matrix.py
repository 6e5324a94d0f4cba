"""Cells of the matrix of weights, wherever they are: scattered, in rows, in runs of keys, or block by block.

A weight is exp(score - logsumexp of its row). What is asked for is brought into blocks of queries and unbroken runs of
keys, which the kernels compute; nothing else is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clearhead import launch
from clearhead.plan import Plan

Floats = NDArray[np.floating[Any]]
BLOCK_CELLS = 1 << 22  # of a block of whole rows: 16 MB of float32


class Matrix:
    """Weights of a plan, (*lead, heads, queries, keys), recomputed from logsumexp (batch, heads, queries, 2)."""

    def __init__(self, plan: Plan, logsumexp: Floats) -> None:
        self._plan, self._logsumexp, self._extent = plan, logsumexp, plan.problem.extent
        self._dtype = plan.problem.compute_dtype

    def fill(self, out: Floats, places: list[NDArray[Any]]) -> None:
        """out[n] = the weight at (lead..., head, query, key) = places[...][n], row by row or block by block."""
        *outer, query, key = places
        kind = np.min_scalar_type(math.prod(self._extent.shape[:-2]))
        lead_and_head: NDArray[Any] = np.zeros((), kind)
        for size, axis in zip(self._extent.shape[:-2], outer, strict=True):
            lead_and_head = lead_and_head * kind.type(size) + axis.astype(kind, copy=False)
        lead_and_head = np.broadcast_to(lead_and_head, key.shape)
        # An axis along which no place but the key changes holds runs of keys of one row.
        if out.ndim and not any(_varies(place, -1) for place in (lead_and_head, query)):
            if (
                out.ndim > 1
                and not _varies(lead_and_head, -2)
                and not any(_varies(key, axis) for axis in range(out.ndim - 1))
            ):
                return self._fill_blocks(
                    out, lead_and_head[..., 0, 0], query[..., 0], key.reshape(-1, out.shape[-1])[0]
                )
            for place in np.ndindex(*out.shape[:-1]):
                keys = key[place]
                self._fill_row(out[place], int(lead_and_head[place][0]), int(query[place][0]), keys)
            return None
        flat = out.reshape(-1) if out.ndim else out.reshape(1)
        heads, queries, keys = (place.reshape(-1) for place in (lead_and_head, query, key))
        order = np.lexsort((keys, queries, heads))
        rows = np.flatnonzero(np.diff(heads[order]) | np.diff(queries[order])) + 1
        for some in np.split(order, rows):
            cells = np.empty(len(some), self._dtype)
            self._fill_row(cells, int(heads[some[0]]), int(queries[some[0]]), keys[some])
            flat[some] = cells
        if out.ndim == 0:
            out[()] = flat[0]
        elif not np.shares_memory(flat, out):
            out[...] = flat.reshape(out.shape)
        return None

    def _fill_blocks(self, out: Floats, heads: NDArray[Any], queries: NDArray[Any], keys: NDArray[Any]) -> None:
        for place in np.ndindex(*out.shape[:-2]):
            out[place] = self._block(int(heads[place]), queries[place], keys)

    def _fill_row(self, out: Floats, head: int, query: int, keys: NDArray[Any]) -> None:
        out[...] = self._block(head, np.array([query]), keys)[0]

    def _block(self, place: int, queries: NDArray[Any], keys: NDArray[Any]) -> Floats:
        """Weights of some queries and keys of one head (counted over the batch): (len(queries), len(keys))."""
        if not len(keys) or not len(queries):
            return np.zeros((len(queries), len(keys)), self._dtype)
        ends = np.flatnonzero(np.diff(keys.astype(np.int64)) != 1) + 1
        if len(ends) < 64:
            # Each unbroken run of keys in turn: what lies between is not computed.
            runs = [(int(run[0]), int(run[-1]) + 1) for run in np.split(keys, ends)]
            blocks = [self._run(place, queries, low, high) for low, high in runs]
            return blocks[0] if len(blocks) == 1 else np.concatenate(blocks, axis=1)
        low, high = int(keys.min()), int(keys.max()) + 1
        if high - low > 64 * len(keys):
            return np.concatenate([self._run(place, queries, int(key), int(key) + 1) for key in keys], axis=1)
        return self._run(place, queries, low, high)[:, keys.astype(np.int64) - low]

    def _run(self, place: int, queries: NDArray[Any], low: int, high: int) -> Floats:
        batch, head = divmod(place, self._extent.heads)
        queries = np.ascontiguousarray(queries, dtype=np.int64)
        return launch.weigh(self._plan, batch, head, queries, low, high, self._logsumexp)

    def blocks(self) -> Iterator[tuple[tuple[int, ...], slice, Floats]]:
        """Every head's rows in blocks: (place of the head, rows, weights (rows, keys))."""
        for place, rows, _, block in self.visible_blocks(whole=True):
            yield place, rows, block

    def visible_blocks(self, whole: bool = False) -> Iterator[tuple[tuple[int, ...], slice, slice, Floats]]:
        """The same with the keys that a block holds: those from the first that any of its rows sees to the last."""
        heads, keys = self._extent.shape[:-2], slice(0, self._extent.keys)
        step = max(1, BLOCK_CELLS // max(1, self._extent.keys))
        if not whole:
            step = min(step, 1024)  # a window shows few rows at once few keys
        for number, place in enumerate(np.ndindex(*heads)):
            for first in range(0, self._extent.queries, step):
                rows = slice(first, min(first + step, self._extent.queries))
                if not whole:
                    start, stop = (bound[(*place, rows, 0)] for bound in (self._plan.start, self._plan.stop))
                    seen = stop > start
                    keys = slice(int(start[seen].min()), int(stop[seen].max())) if seen.any() else slice(0, 0)
                block = self._run(number, np.arange(rows.start, rows.stop), keys.start, keys.stop)
                yield (() if self._plan.problem.single else place), rows, keys, block


def _varies(place: NDArray[Any], axis: int) -> bool:
    """Whether the numbers differ along an axis, told by the strides if possible."""
    if place.shape[axis] <= 1 or place.strides[axis] == 0:
        return False
    return bool((place != place.take([0], axis=axis)).any())
