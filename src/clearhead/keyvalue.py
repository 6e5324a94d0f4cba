"""KeyValueCache: the keys and values of what a model has read so far, which grow without moving.

Tokens are kept in pages of fixed size. Appending fills the last page and makes new ones; nothing that was written is
copied again, and attention over few queries reads the pages where they lie.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from clearhead.kernels.decode import CHUNK
from clearhead.plan import readable
from clearhead.scores import FLOATS

PAGE = CHUNK  # tokens


class KeyValueCache:
    """Keys and values (batch, heads, tokens, dim) that grow at the end.

    Parameters
    ----------
    batch, heads, dim : int
        heads are those of the keys; query heads may be a multiple.
    capacity : int
        Tokens to make room for at once; more are made room for when they come.
    dtype : float16, bfloat16 (ml_dtypes), float32 or float64
    value_dim : int, optional
        dim when None.

    Notes
    -----
    Memory: batch * heads * (dim + value_dim) numbers a token, in pages of 1,024 tokens. Appending costs what is
    appended, whatever is there.

    >>> import numpy as np, clearhead as ch
    >>> cache = ch.KeyValueCache(batch=1, heads=2, dim=16)
    >>> for token in np.random.default_rng(0).standard_normal((3, 1, 2, 1, 16), dtype=np.float32):
    ...     cache.append(token, token)
    >>> len(cache), ch.attention(token, cache).shape
    (3, (1, 2, 1, 16))
    """

    def __init__(
        self, batch: int, heads: int, dim: int, capacity: int = 0, dtype: DTypeLike = np.float32, *,
        value_dim: int | None = None,
    ) -> None:  # fmt: skip
        self.dtype = np.dtype(dtype)
        if self.dtype.name not in FLOATS:
            raise TypeError(f"dtype is {self.dtype}, a cache holds one of {', '.join(FLOATS)}")
        for name, size in (("batch", batch), ("heads", heads), ("dim", dim), ("capacity", capacity)):
            if size < 0:
                raise ValueError(f"{name} must be 0 or more, got {size}")
        self.batch, self.heads, self.dim = batch, heads, dim
        self.value_dim = dim if value_dim is None else value_dim
        self._keys: list[NDArray[Any]] = []
        self._values: list[NDArray[Any]] = []
        self._length = 0
        self._make_room(capacity)

    def __len__(self) -> int:
        """How many tokens there are."""
        return self._length

    def __repr__(self) -> str:
        return (
            f"<KeyValueCache {self._length:,} tokens, batch {self.batch}, {self.heads} heads, "
            f"dim {self.dim}, {self.dtype}>"
        )

    @property
    def capacity(self) -> int:
        """How many tokens there is room for."""
        return len(self._keys) * PAGE

    @property
    def nbytes(self) -> int:
        """Bytes taken, room that is not filled yet included."""
        return sum(page.nbytes for page in self._keys + self._values)

    @property
    def key(self) -> NDArray[Any]:
        """All keys in one array (batch, heads, tokens, dim): a copy."""
        return self._whole(self._keys, self.dim)

    @property
    def value(self) -> NDArray[Any]:
        """All values in one array (batch, heads, tokens, value dim): a copy."""
        return self._whole(self._values, self.value_dim)

    def append(self, key: ArrayLike, value: ArrayLike) -> None:
        """Add tokens at the end: key (batch, heads, tokens, dim) and value (batch, heads, tokens, value dim).

        Numbers are converted to the cache's dtype. Raises ValueError if a shape does not fit; nothing is added then.
        """
        key, value = np.asarray(key), np.asarray(value)
        for name, array, dim in (("key", key, self.dim), ("value", value, self.value_dim)):
            if array.dtype.name not in FLOATS:
                raise TypeError(f"{name} has dtype {array.dtype}, a cache takes one of {', '.join(FLOATS)}")
            if array.ndim != 4 or array.shape[:2] != (self.batch, self.heads) or array.shape[3] != dim:
                raise ValueError(
                    f"{name} has shape {array.shape}, this cache takes ({self.batch}, {self.heads}, tokens, {dim})"
                )
        tokens = key.shape[2]
        if value.shape[2] != tokens:
            raise ValueError(
                f"key has {tokens} tokens and value has {value.shape[2]}: each key needs exactly one value"
            )
        self._make_room(self._length + tokens)
        done = 0
        while done < tokens:
            page, place = divmod(self._length + done, PAGE)
            some = min(tokens - done, PAGE - place)
            self._keys[page][:, :, place : place + some] = key[:, :, done : done + some]
            self._values[page][:, :, place : place + some] = value[:, :, done : done + some]
            done += some
        self._length += tokens

    def paging(self) -> tuple[int, NDArray[np.int64], NDArray[np.int64]]:
        """Tokens in a page; where the pages of keys and of values lie, (batch, pages): elements from the first."""
        return PAGE, self._offsets(self._keys), self._offsets(self._values)

    mask = None  # all sequences are of one length

    def first_pages(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """The pages that ``paging`` counts from."""
        return readable(self._keys[0]), readable(self._values[0])

    def _offsets(self, pages: list[NDArray[Any]]) -> NDArray[np.int64]:
        """(batch, pages)"""
        places = np.array([page.__array_interface__["data"][0] for page in pages], np.int64)
        within = np.arange(self.batch) * (pages[0].strides[0] // self.dtype.itemsize)
        return np.asarray(within[:, None] + (places - places[0]) // self.dtype.itemsize)

    def _make_room(self, tokens: int) -> None:
        while self.capacity < tokens:
            self._keys.append(_aligned((self.batch, self.heads, PAGE, self.dim), self.dtype))
            self._values.append(_aligned((self.batch, self.heads, PAGE, self.value_dim), self.dtype))

    def _whole(self, pages: list[NDArray[Any]], dim: int) -> NDArray[Any]:
        if not pages:
            return np.zeros((self.batch, self.heads, 0, dim), self.dtype)
        return np.concatenate(pages, axis=2)[:, :, : self._length]


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Zeros that begin on a cache line: pages then lie whole elements apart, and vectors do not straddle lines."""
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)
