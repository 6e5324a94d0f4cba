"""A mask that looks like a tensor of booleans and holds none: it goes through a model untouched.

Models hand the mask that they were given on to their attention. Here that is a rule instead of a matrix; what looks
into it, or changes it, gets the matrix after all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from clearhead.algebra import Mask


class LazyMask(Tensor):
    """(batch, 1, queries, keys) booleans, True where the query may look at the key, as transformers hands them on.

    mask : what it says, of :mod:`clearhead.masks`; None shows everything.

    Any operation on it but moving it around makes the tensor that it stands for, in a byte a cell.

    >>> import torch
    >>> from clearhead import masks
    >>> lazy = LazyMask(masks.causal(), 1, 3, 3)
    >>> lazy.shape, lazy.dtype, lazy
    (torch.Size([1, 1, 3, 3]), torch.bool, <LazyMask 1 x 1 x 3 x 3: Causal(align=None)>)
    >>> lazy[0, 0].tolist()
    [[True, False, False], [True, True, False], [True, True, True]]
    """

    mask: Mask | None

    @staticmethod
    def __new__(cls, mask: Mask | None, batch: int, queries: int, keys: int) -> LazyMask:
        made: LazyMask = Tensor._make_wrapper_subclass(cls, (batch, 1, queries, keys), dtype=torch.bool)
        made.mask = mask
        return made

    def dense(self) -> Tensor:
        """The tensor that it stands for."""
        batch, _, queries, keys = self.shape
        if self.mask is None:
            return torch.ones((batch, 1, queries, keys), dtype=torch.bool)
        return torch.from_numpy(np.array(self.mask.dense(queries, keys, lead=(batch,))))

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        del types
        return func(*_dense(args), **_dense(kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        del tensor_contents
        return f"<LazyMask {' x '.join(map(str, self.shape))}: {'all' if self.mask is None else self.mask}>"


def _dense(arguments: Any) -> Any:
    return tree_map_only(LazyMask, LazyMask.dense, arguments)
