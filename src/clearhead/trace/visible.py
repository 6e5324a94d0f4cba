"""Which keys each query of a site may see: found in what the model handed to its attention, kept in a trace.

Nearly every mask of a language model lets a token see one unbroken run of earlier tokens: all of them, or
those within a sliding window. Two integers a row say that exactly. Whatever else a model does is kept as it
is, one boolean per cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from clearhead import masks
from clearhead.algebra import runs

Kind = Literal["full", "causal", "intervals", "array"]
KINDS: tuple[Kind, ...] = ("full", "causal", "intervals", "array")
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Visible:
    """Who may look at whom in one site, for one text or, with a first axis, for several.

    kind : "full" (everyone at everyone), "causal" (at oneself and the past), "intervals" or "array";
    start, stop : (..., queries) int64, for intervals: row i sees keys ``start[i] <= j < stop[i]``;
    array : (..., 1 or heads, queries, keys) bool, True where the query sees the key.
    """

    kind: Kind
    start: Ints | None = None
    stop: Ints | None = None
    array: Bools | None = None

    def mask(self) -> masks.Mask | None:
        """The same as a mask of :mod:`clearhead.masks`, of one text."""
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

    def of(self, text: int) -> Visible:
        """The part of one text."""
        return Visible(self.kind, *(None if x is None else x[text] for x in (self.start, self.stop, self.array)))

    def sees(self) -> Bools | None:
        """(..., 1 or heads, queries): which rows see something; None where all do."""
        if self.kind in ("full", "causal"):
            return None
        if self.array is not None:
            return np.asarray(self.array.any(axis=-1))
        assert self.start is not None
        assert self.stop is not None
        return np.asarray(self.start < self.stop)[..., None, :]

    def tensors(self) -> dict[str, NDArray[Any]]:
        """The arrays to keep in the site's file."""
        found = {"start": self.start, "stop": self.stop, "mask": self.array}
        return {name: array for name, array in found.items() if array is not None}

    def runs(self, texts: int, queries: int, keys: int) -> tuple[Ints, Ints] | None:
        """(start, stop), each (texts, queries), if every row of every head sees one unbroken run of keys."""
        if self.kind == "array":
            return None
        if self.kind == "intervals":
            assert self.start is not None
            assert self.stop is not None
            return self.start, self.stop
        shape = (texts, queries)
        stop = np.full(queries, keys) if self.kind == "full" else np.minimum(np.arange(1, queries + 1), keys)
        return np.zeros(shape, np.int64), np.broadcast_to(stop.astype(np.int64), shape)

    def cells(self, texts: int, queries: int, keys: int) -> Bools:
        """(texts, 1 or heads, queries, keys) booleans."""
        if self.array is not None:
            return self.array
        runs = self.runs(texts, queries, keys)
        assert runs is not None
        key = np.arange(keys)
        return np.asarray((runs[0][..., None] <= key) & (key < runs[1][..., None]))[:, None]


def describe(allowed: Bools) -> Visible:
    """The shortest true description of a boolean mask (texts, 1 or heads, queries, keys).

    >>> describe(np.tril(np.ones((1, 1, 3, 3), bool))).kind
    'causal'
    >>> seen = describe(np.array([[[[True, True, False], [False, True, True]]]]))
    >>> seen.start.tolist(), seen.stop.tolist()
    ([[0, 1]], [[2, 3]])
    """
    _, heads, _, keys = allowed.shape
    if heads != 1 or not keys:
        return Visible("array", array=allowed)
    found = runs(allowed[:, 0])
    return Visible("array", array=allowed) if found is None else shortest(*found, keys)


def shortest(start: Ints, stop: Ints, keys: int) -> Visible:
    """The shortest description of runs of keys, each (texts, queries)."""
    if (start == 0).all() and (stop == keys).all():
        return Visible("full")
    queries = start.shape[-1]
    if queries == keys and (start == 0).all() and (stop == np.arange(1, keys + 1)).all():
        return Visible("causal")
    return Visible("intervals", start=start, stop=stop)


@dataclass(frozen=True, eq=False)
class Rows:
    """What some rows of a longer record see: ``visible`` is (texts, ..., queries, keys), key 0 of it is ``offset``."""

    visible: Visible
    queries: int
    keys: int
    offset: int = 0


def join(parts: Sequence[Rows], texts: int, keys: int) -> Visible:
    """All rows of a record, one part below the other, over all its keys."""
    if len(parts) == 1 and parts[0].offset == 0 and parts[0].keys == keys:
        return parts[0].visible
    runs = [part.visible.runs(texts, part.queries, part.keys) for part in parts]
    known = [one for one in runs if one is not None]
    if len(known) == len(parts):
        shifted = [
            tuple(np.where(start < stop, bound + part.offset, 0) for bound in (start, stop))
            for part, (start, stop) in zip(parts, known, strict=True)
        ]
        start, stop = (np.concatenate([bounds[i] for bounds in shifted], axis=-1) for i in (0, 1))
        return shortest(start, stop, keys)
    dense = [part.visible.cells(texts, part.queries, part.keys) for part in parts]
    heads = max(cells.shape[1] for cells in dense)
    whole = np.zeros((texts, heads, sum(part.queries for part in parts), keys), bool)
    first = 0
    for part, cells in zip(parts, dense, strict=True):
        whole[:, :, first : first + part.queries, part.offset : part.offset + part.keys] = cells
        first += part.queries
    return Visible("array", array=whole)


def unseen(visible: Visible, texts: int, queries: int, keys: int) -> Bools | None:
    """(texts, keys): True for the keys that no query sees, not even their own; None if there are none."""
    runs = visible.runs(texts, queries, keys)
    if visible.kind in ("full", "causal"):
        return None
    if runs is None:
        found = ~visible.cells(texts, queries, keys).any(axis=(1, 2))
    else:
        # Runs open and close along the keys: where none is open, nothing looks.
        open_ = np.zeros((texts, keys + 1), np.int64)
        text = np.broadcast_to(np.arange(texts)[:, None], runs[0].shape)
        np.add.at(open_, (text, runs[0]), 1)
        np.add.at(open_, (text, runs[1]), -1)
        found = open_.cumsum(axis=-1)[:, :-1] == 0
    return np.asarray(found) if found.any() else None


def hidden_blocks(visible: Visible, queries: int, keys: int, rows: int, columns: int) -> Bools:
    """(rows, columns): which blocks of a grid, laid as in ``weights.pooled``, hold no cell that may be seen.

    visible : of one text, and where it has several heads' masks, a block is hidden if it is for all of them.

    >>> hidden_blocks(Visible("causal"), 4, 4, 2, 2).tolist()
    [[False, True], [False, False]]
    """
    first_query, first_key = (np.arange(parts) * count // parts for parts, count in ((rows, queries), (columns, keys)))
    runs = visible.runs(1, queries, keys)
    if runs is None:
        seen = np.asarray(visible.array).any(axis=0)
        return np.asarray(~np.logical_or.reduceat(np.logical_or.reduceat(seen, first_query), first_key, axis=1))
    start, stop = (np.clip(bound.reshape(queries), 0, keys) for bound in runs)
    some = start < stop
    row = np.searchsorted(first_query, np.flatnonzero(some), side="right") - 1
    # Runs open in the column of their first key, and close after that of their last.
    open_ = np.zeros((rows, columns + 1), np.int64)
    np.add.at(open_, (row, np.searchsorted(first_key, start[some], side="right") - 1), 1)
    np.add.at(open_, (row, np.searchsorted(first_key, stop[some] - 1, side="right")), -1)
    return np.asarray(open_.cumsum(axis=-1)[:, :-1] == 0)


def without_rows(visible: Visible, rows: Bools, queries: int, keys: int) -> Visible:
    """The same, but the marked rows (texts, queries) see nothing."""
    runs = visible.runs(len(rows), queries, keys)
    if runs is None:
        return Visible("array", array=visible.cells(len(rows), queries, keys) & ~rows[:, None, :, None])
    start, stop = (np.where(rows, 0, bound) for bound in runs)
    return shortest(start, stop, keys)
