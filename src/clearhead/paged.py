"""PagedKeyValues: keys and values in blocks of somebody else's, found by a table, as servers of models keep them.

Source: Kwon et al. 2023, *Efficient Memory Management for Large Language Model Serving with PagedAttention*, section 4.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from clearhead import masks
from clearhead.masks import Mask
from clearhead.plan import readable
from clearhead.scores import FLOATS


class PagedKeyValues:
    """Keys and values of a batch of sequences: token j lies in block ``table[b, j // size]``, row ``j % size``.

    Parameters
    ----------
    key, value : arrays (blocks, heads, size, dim) and (blocks, heads, size, value dim)
        Blocks of ``size`` tokens, of any strides: ``np.moveaxis`` gives other orders of the axes. They are read where
        they lie, never copied for few queries; write to them as you like between calls. (Misaligned arrays are copied
        here, once.)
    table : integers (batch, blocks of a sequence)
        Entries past a sequence's length are not looked at.
    lengths : integers (batch,)
        Tokens of each sequence.

    Raises
    ------
    TypeError
        If a dtype is not a float, or table or lengths are not integers.
    ValueError
        If shapes do not fit each other, or the table names a block that is not there.

    >>> import numpy as np, clearhead as ch
    >>> blocks = np.random.default_rng(0).standard_normal((4, 2, 16, 8), dtype=np.float32)
    >>> cache = ch.PagedKeyValues(blocks, blocks, table=[[2, 0], [3, -1]], lengths=[20, 5])
    >>> ch.attention(np.ones((2, 2, 1, 8), np.float32), cache).shape
    (2, 2, 1, 8)
    """

    def __init__(self, key: NDArray[Any], value: NDArray[Any], table: ArrayLike, lengths: ArrayLike) -> None:
        self._table, self._lengths = _integers("table", table, 2), _integers("lengths", lengths, 1)
        for name, array in (("key", key), ("value", value)):
            if array.dtype.name not in FLOATS:
                raise TypeError(f"{name} has dtype {array.dtype}, blocks hold one of {', '.join(FLOATS)}")
            if array.ndim != 4:
                raise ValueError(f"{name} has shape {array.shape}, expected (blocks, heads, size, dim)")
        if key.dtype != value.dtype:
            raise TypeError(f"key has dtype {key.dtype} and value {value.dtype}: blocks must hold the same")
        if key.shape[:3] != value.shape[:3]:
            raise ValueError(f"key has shape {key.shape} and value {value.shape}: all but the last axis must be equal")
        if self._lengths.shape != self._table.shape[:1]:
            raise ValueError(f"table is for {len(self._table)} sequences, lengths for {len(self._lengths)}")
        room = self._table.shape[1] * key.shape[2]
        if self._lengths.size and not 0 <= self._lengths.min() <= self._lengths.max() <= room:
            raise ValueError(f"lengths must lie between 0 and the {room} tokens of a row of table, got {self._lengths}")
        self._blocks_key, self._blocks_value = key, value
        # What kernels cannot read where it lies is copied, all of it: blocks are found from the first one's address.
        self._readable = readable(key), readable(value)
        self.batch, self.dtype = len(self._table), key.dtype
        self.heads, self.size, self.dim, self.value_dim = *key.shape[1:], value.shape[3]
        used = np.arange(self._table.shape[1]) * self.size < self._lengths[:, None]
        self._pages = np.where(used, self._table, 0)[:, : -(-len(self) // self.size) if self.size else 0]
        if self._pages.size and not 0 <= self._pages.min() <= self._pages.max() < len(key):
            raise ValueError(
                f"table must name blocks from 0 to {len(key) - 1}, got {self._pages.min()} to {self._pages.max()}"
            )

    def __len__(self) -> int:
        """Tokens of the longest sequence."""
        return int(self._lengths.max(initial=0))

    def __repr__(self) -> str:
        return (
            f"<PagedKeyValues {self.batch} sequences of up to {len(self):,} tokens in blocks of {self.size}, "
            f"{self.heads} heads, dim {self.dim}, {self.dtype}>"
        )

    @property
    def mask(self) -> Mask:
        """Each sequence's own tokens."""
        return masks.lengths(self._lengths)

    @property
    def key(self) -> NDArray[Any]:
        """All keys in one array (batch, heads, tokens, dim), whatever lies past a sequence's length: a copy."""
        return self._whole(self._blocks_key)

    @property
    def value(self) -> NDArray[Any]:
        """All values in one array (batch, heads, tokens, value dim), likewise: a copy."""
        return self._whole(self._blocks_value)

    def paging(self) -> tuple[int, NDArray[np.int64], NDArray[np.int64]]:
        """Tokens in a block; where the blocks of keys and of values lie, (batch, blocks): elements from the first."""
        steps = (array.strides[0] // array.itemsize for array in self._readable)
        key, value = (np.ascontiguousarray(self._pages * step) for step in steps)
        return self.size, key, value

    def first_pages(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """The blocks that ``paging`` counts from."""
        key, value = self._readable
        return key[:1], value[:1]

    def _whole(self, blocks: NDArray[Any]) -> NDArray[Any]:
        found = np.moveaxis(blocks[self._pages], 2, 1)  # (batch, heads, blocks, size, dim)
        batch, heads, count, size, dim = found.shape
        return found.reshape(batch, heads, count * size, dim)[:, :, : len(self)]


def _integers(name: str, given: ArrayLike, rank: int) -> NDArray[np.int64]:
    array = np.asarray(given)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {array.dtype}, expected integers")
    if array.ndim != rank:
        raise ValueError(f"{name} has shape {array.shape}, expected {rank} ax{'e' if rank > 1 else 'i'}s")
    return array.astype(np.int64)
