"""One attention's record, as its calls come in: one pass over whole texts, or a prompt and then step by step.

Positions are absolute: a record has one row for each token that the model read and one column for each key. A
cache that grows hands over all keys so far; a static one, places beyond them too; a sliding one, the last few; and
without a cache all rows are computed again. What is new is told apart by counting, and what is old is compared with
what was seen before: a cache that no longer holds it was reordered or cut, and the record is refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clearhead.trace.capture import Call
from clearhead.trace.errors import TraceError
from clearhead.trace.sites import Attention
from clearhead.trace.visible import Rows, Visible, join

SAME = 1e-2  # how far keys that are computed again may stray, in units of the largest


@dataclass(frozen=True, eq=False)
class Gathered:
    """All calls of one attention as one.

    query : (texts, heads, queries, dim) and key : (texts, key heads, keys, dim), torch tensors; visible : for all
    texts; offsets or bias : what is added to scores, float32; call : the last call, for what does not change."""

    query: Any
    key: Any
    visible: Visible
    offsets: NDArray[np.float32] | None
    bias: NDArray[np.float32] | None
    call: Call


@dataclass(eq=False)
class Gathering:
    """What one attention was given so far."""

    site: Attention
    queries: int = 0
    query: list[Any] = field(default_factory=list)
    key: list[Any] = field(default_factory=list)
    move: bool = True  # what comes from another device to the CPU, as it comes
    rows: list[Rows] = field(default_factory=list)
    biases: list[tuple[Any, int]] = field(default_factory=list)  # and the absolute position of each one's first key
    call: Call | None = None

    def add(self, call: Call) -> Call:
        """Take in a call. Gives the part of it that is new: its last rows, with the keys that those may see."""
        texts, _, count, _ = call.query.shape
        keys = call.key.shape[2]
        if self.key and texts != self.key[0].shape[0]:
            raise self._torn(f"had {self.key[0].shape[0]} texts and now has {texts}")
        offset, fresh, new_keys = self._place(call, count, keys)
        self._compare(call.key, offset, self.queries + fresh)
        part = _last_rows(call, fresh)
        if call.key.shape[2] > (known := self.queries + fresh - offset) and self.site.kind != "cross":
            part = _first_keys(part, known)
        self.query.append(self._copied(part.query))
        if new_keys:
            self.key.append(self._copied(part.key[:, :, part.key.shape[2] - new_keys :]))
        self.rows.append(Rows(part.visible, fresh, part.key.shape[2], offset))
        self.biases.append((part.bias, offset))
        self.queries += fresh
        self.call = _without_tensors(part)
        return part

    def _copied(self, tensor: Any) -> Any:
        return tensor.to("cpu" if self.move else tensor.device, copy=True)

    def _place(self, call: Call, count: int, keys: int) -> tuple[int, int, int]:
        """(absolute position of the first key, how many of the last rows are new, how many keys are new)."""
        past = self.queries
        if self.site.kind == "cross":  # the keys stay; without a cache all queries come again
            return 0, count - past if count > past else count, keys if not past else 0
        if not past or keys >= past + count:  # the first call, or a cache that keeps everything
            if not past and keys > count and _sees_beyond(call, count):
                raise TraceError(
                    f"{self.site.kind} layer {self.site.layer} has {count} queries and {keys} keys: it was given a "
                    f"cache of what it read before. Trace from the beginning, without that cache"
                )
            return 0, count, count
        if keys == count and count > past:  # no cache: everything again, and a little more
            return 0, count - past, count - past
        if keys == count:
            raise self._torn("was given other tokens")
        return past + count - keys, count, count

    def _compare(self, key: Any, offset: int, total: int) -> None:
        """Raise TraceError unless a cache still holds the last key that was seen."""
        if not self.key:
            return
        if self.site.kind == "cross":
            place, last = key.shape[2] - 1, self.key[-1][:, :, -1]
        else:
            place, last = self.queries - 1 - offset, self.key[-1][:, :, -1]
        if not 0 <= place < key.shape[2]:
            return
        now = key[:, :, place].to(last.device)
        if now.shape != last.shape or not (now - last).abs().max() <= SAME * last.abs().max():
            raise self._torn("no longer has the keys that it had")

    def _torn(self, what: str) -> TraceError:
        return TraceError(
            f"{self.site.kind} layer {self.site.layer} ran again and {what}: a trace holds one pass over its texts or "
            f"one generation, greedy or sampled. Beams and assisted decoding reorder or cut what was read, and cannot "
            f"be traced: set num_beams=1, and trace each call of the model by itself"
        )

    def whole(self) -> Gathered:
        """Everything so far as one record."""
        import torch

        assert self.call is not None
        query = self.query[0] if len(self.query) == 1 else torch.cat(self.query, dim=2)
        key = self.key[0] if len(self.key) == 1 else torch.cat(self.key, dim=2)
        self.query, self.key = [query], [key]
        texts, keys = query.shape[0], key.shape[2]
        offsets, bias = _joined(self.biases, self.rows, keys)
        return Gathered(query, key, join(self.rows, texts, keys), offsets, bias, self.call)


def _last_rows(call: Call, count: int) -> Call:
    queries = call.query.shape[2]
    if count == queries:
        return call
    texts, keys = call.query.shape[0], call.key.shape[2]
    runs = call.visible.runs(texts, queries, keys)
    if runs is None:
        visible = Visible("array", array=call.visible.cells(texts, queries, keys)[:, :, -count:])
    else:
        visible = Visible("intervals", runs[0][:, -count:], runs[1][:, -count:])
    return _replaced(
        call,
        query=call.query[:, :, -count:],
        output=call.output[:, :, -count:],
        visible=visible,
        bias=None if call.bias is None else call.bias[:, :, -count:],
    )


def _first_keys(call: Call, count: int) -> Call:
    """Without places of a static cache that nothing was written to yet."""
    texts, queries, keys = call.query.shape[0], call.query.shape[2], call.key.shape[2]
    runs = call.visible.runs(texts, queries, keys)
    if runs is None:
        visible = Visible("array", array=call.visible.cells(texts, queries, keys)[..., :count])
    else:
        visible = Visible("intervals", np.minimum(runs[0], count), np.minimum(runs[1], count))
    return _replaced(
        call,
        key=call.key[:, :, :count],
        value=call.value[:, :, :count],
        visible=visible,
        bias=None if call.bias is None else call.bias[..., :count],
    )


def _sees_beyond(call: Call, count: int) -> bool:
    texts, queries, keys = call.query.shape[0], call.query.shape[2], call.key.shape[2]
    runs = call.visible.runs(texts, queries, keys)
    if runs is not None:
        return bool((runs[1] > count).any())
    return bool(call.visible.cells(texts, queries, keys)[..., count:].any())


def _replaced(call: Call, **changes: Any) -> Call:
    return Call(**{**vars(call), **changes})


def _without_tensors(call: Call) -> Call:
    return _replaced(call, query=None, key=None, value=None, output=None, bias=None)


def _joined(
    biases: list[tuple[Any, int]], rows: list[Rows], keys: int
) -> tuple[NDArray[np.float32] | None, NDArray[np.float32] | None]:
    """(one number per head and offset, or one per head and cell) of what was added to scores; None where nothing was.

    The first is (texts or 1, heads or 1, queries + keys - 1), see ``recompute.by_offset``."""
    arrays = [None if bias is None or not bias.any() else _float32(bias) for bias, _ in biases]
    if all(array is None for array in arrays):
        return None, None
    queries = sum(part.queries for part in rows)
    shape = np.broadcast_shapes(*(array.shape[:2] for array in arrays if array is not None))
    offsets = np.zeros((*shape, queries + keys - 1), np.float32)
    known = np.zeros(queries + keys - 1, bool)
    first, dense = 0, False
    for array, part in zip(arrays, rows, strict=True):
        found = np.zeros((*shape, part.queries, part.keys), np.float32) if array is None else array
        run = _offsets(found)
        # Offset o, key minus query, lies at o + queries - 1; the part's own start at its last row and first key.
        start = part.offset - (first + part.queries - 1) + queries - 1
        place = slice(start, start + part.queries + part.keys - 1)
        if run is None or (offsets[..., place] != run)[..., known[place]].any():
            dense = True
            break
        offsets[..., place], known[place] = run, True
        first += part.queries
    if not dense:
        return offsets, None
    whole = np.zeros((*shape, queries, keys), np.float32)
    first = 0
    for array, part in zip(arrays, rows, strict=True):
        if array is not None:
            whole[..., first : first + part.queries, part.offset : part.offset + part.keys] = array
        first += part.queries
    return None, whole


def _offsets(bias: NDArray[np.float32]) -> NDArray[np.float32] | None:
    """The numbers of the offsets -(queries - 1) to keys - 1, if each diagonal has one number."""
    if (bias[..., 1:, 1:] != bias[..., :-1, :-1]).any():
        return None
    return np.concatenate([bias[..., ::-1, 0], bias[..., 0, 1:]], axis=-1)


def _float32(tensor: Any) -> NDArray[np.float32]:
    return np.asarray(tensor.detach().float().cpu().numpy())
