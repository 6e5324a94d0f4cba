"""AttentionWeights: shaped like the matrix, computed where looked at.

What is kept is the queries, the keys and one number per row (logsumexp); weight (i, j) is exp(score(i, j) -
logsumexp(i)). Indexing computes the cells asked for (see ``matrix``), reductions go through the rows in blocks, and
whatever needs the whole matrix is refused before it starts if the matrix would not fit in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import ArrayLike, DTypeLike, NDArray

from clearhead import launch, measuring, memory
from clearhead.algebra import Align
from clearhead.fold import Fold
from clearhead.matrix import Matrix
from clearhead.measures import Asked, Measures, Top, find
from clearhead.measuring import Wanted
from clearhead.plan import Plan, in_nats, without_value

Floats = NDArray[np.floating[Any]]
SHOWN = 1_000_000  # cells that print() may compute, as many as NumPy would summarize anyway


class AttentionWeights(NDArrayOperatorsMixin):
    """The weights of one attention, (..., heads, queries, keys), as an array that is computed on demand.

    Made by ``scaled_dot_product_attention`` and ``attention_weights``. Behaves as a read-only array: ``weights[0, 3]``,
    ``np.round(weights, 3)``, ``weights.sum(axis=-1)``, ``weights @ values``, ``np.asarray(weights)``. It refers to the
    queries and keys it was made of; change those and it changes.

    >>> import numpy as np, clearhead as ch
    >>> x = np.random.default_rng(0).standard_normal((100_000, 16), dtype=np.float32)
    >>> weights = ch.attention_weights(x[:1000], x)
    >>> weights.shape, weights[7, :3].shape
    ((1000, 100000), (3,))
    """

    def __init__(self, plan: Plan, logsumexp: Floats | None = None, arrays: tuple[Floats, ...] = ()) -> None:
        """``arrays`` : (query, key, value) if they are not the plan's own but others that lie like them."""
        self._like, self._arrays, self._given = plan, arrays, logsumexp
        self._extent, self._problem = plan.problem.extent, plan.problem

    @cached_property
    def _plan(self) -> Plan:
        return self._like.on(*self._arrays) if self._arrays else self._like

    @cached_property
    def _logsumexp(self) -> Floats:
        """(batch, heads, queries, 2), see ``kernels.forward``: as given, else one pass over the scores, if needed."""
        return launch.run(without_value(self._plan))[1] if self._given is None else self._given

    @cached_property
    def _matrix(self) -> Matrix:
        return Matrix(self._plan, self._logsumexp)

    # what it is

    @property
    def shape(self) -> tuple[int, ...]:
        return self._extent.shape[-2:] if self._problem.single else self._extent.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """float64 for float64 inputs, else float32."""
        return self._problem.compute_dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod([int(n) for n in self.shape], dtype=object))

    @property
    def nbytes(self) -> int:
        """What the whole matrix would take."""
        return self.size * self.dtype.itemsize

    @property
    def logsumexp(self) -> Floats:
        """ln sum exp(scores) of each row, sinks included: (..., heads, queries), -inf where a row sees nothing."""
        return self.logsumexp64.astype(self.dtype, copy=False)

    @property
    def logsumexp64(self) -> NDArray[np.float64]:
        """The same in float64, as it is kept: what to store if weights are to be recomputed to the last digit."""
        whole = in_nats(self._plan, self._logsumexp).reshape(self._extent.shape[:-1])
        return np.asarray(self._problem.as_given(whole, -2))

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Floats]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        size = " x ".join(f"{n:,}" for n in self.shape)
        if self.size > SHOWN:
            return f"<AttentionWeights {size} {self.dtype}: {memory.written(self.nbytes)}, computed where looked at>"
        return repr(np.asarray(self)).replace("array(", "AttentionWeights(", 1)

    def __str__(self) -> str:
        return repr(self) if self.size > SHOWN else str(np.asarray(self))

    # looking

    def __getitem__(self, index: Any) -> Any:
        """Those cells, as an ndarray: integers, slices, ellipsis, None, integer and boolean arrays, as in NumPy."""
        # Beside 4 or 8 bytes of result, index arrays take some 16 a cell while they are sorted out.
        basic = all(
            isinstance(i, int | slice | None | type(...)) for i in (index if isinstance(index, tuple) else (index,))
        )
        # An array whose elements take no bytes is asked for the result's shape.
        shape = np.broadcast_to(np.empty((), "V0"), self.shape)[index].shape
        self._refuse_if_too_large(math.prod(shape), beside=0 if basic else 16)
        # Read-only arrays that say where each cell stands, of which NumPy's own indexing picks. They take no memory
        # (their strides are 0 but for one axis); what is picked from them by index arrays is as large as the result.
        full = self._extent.shape
        axes = [
            np.broadcast_to(np.arange(n, dtype=np.min_scalar_type(n)).reshape(-1, *(1,) * (len(full) - 1 - axis)), full)
            for axis, n in enumerate(full)
        ]
        if self._problem.single:
            axes = [axis[0] for axis in axes]
        places = [axis[index] for axis in axes]
        out = np.zeros(shape, self.dtype)
        if out.size:
            self._matrix.fill(out, [np.broadcast_to(place, shape) for place in places])
        return out if shape else out[()]

    # all of it

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        """The whole matrix, if it fits in memory."""
        if copy is False:
            raise ValueError("weights are computed when asked for: np.asarray(weights) always makes a new array")
        return np.asarray(self[...], dtype=dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if ufunc is np.matmul and method == "__call__" and not options:
            return inputs[0] @ inputs[1] if inputs[0] is self else self._pull(np.asarray(inputs[0]))
        if any(isinstance(target, AttentionWeights) for target in options.get("out", ())):
            raise TypeError("weights are read-only: they follow from queries and keys")
        arrays = [np.asarray(x) if isinstance(x, AttentionWeights) else x for x in inputs]
        return getattr(ufunc, method)(*arrays, **options)

    def __matmul__(self, values: ArrayLike) -> Any:
        """``weights @ values``, (..., keys, n) -> (..., queries, n), row block by row block."""
        values = np.asarray(values)
        if values.ndim < 2 or values.ndim > self.ndim:
            return np.matmul(np.asarray(self), values)
        if values.shape[-2] != self.shape[-1]:
            raise ValueError(
                f"weights {self.shape} @ values {values.shape}: {self.shape[-1]} keys, not {values.shape[-2]}"
            )
        lead = np.broadcast_shapes(self.shape[:-2], values.shape[:-2])
        if lead != self.shape[:-2]:
            return np.matmul(np.asarray(self), values)
        values = np.broadcast_to(values, (*lead, *values.shape[-2:]))
        out = np.zeros((*self.shape[:-1], values.shape[-1]), np.result_type(self.dtype, values.dtype))
        for place, rows, keys, block in self._matrix.visible_blocks():
            into: tuple[Any, ...] = (*place, rows)
            out[into] = block @ values[place][keys]
        return out

    def _pull(self, vectors: NDArray[Any]) -> Any:
        """``vectors @ weights``, (..., n, queries) -> (..., n, keys): in one pass over the scores where the result has
        the weights' dtype, else row block by row block."""
        lead = self.shape[:-2]
        plain = vectors.dtype.kind in "biuf" and vectors.ndim >= 2 and vectors.shape[-1] == self.shape[-2]
        if not plain or np.broadcast_shapes(lead, vectors.shape[:-2]) != lead:
            return np.matmul(vectors, np.asarray(self))
        vectors = np.broadcast_to(vectors, (*lead, *vectors.shape[-2:]))
        if np.result_type(self.dtype, vectors.dtype) != self.dtype:
            out = np.zeros((*vectors.shape[:-1], self.shape[-1]), np.result_type(self.dtype, vectors.dtype))
            for place, rows, keys, block in self._matrix.visible_blocks():
                taken: tuple[Any, ...] = (*place, slice(None), rows)
                into: tuple[Any, ...] = (*place, slice(None), keys)
                out[into] += vectors[taken] @ block
            return out
        factors = vectors.astype(self.dtype)
        factors = np.ascontiguousarray(factors).reshape(math.prod(lead), *factors.shape[-2:])
        found = measuring.run(self._plan, self._logsumexp, Wanted(received=True, factors=factors)).received
        assert found is not None
        return found.reshape(*lead, *found.shape[1:]).astype(self.dtype, copy=False)

    def round(self, decimals: int = 0) -> Floats:
        """The whole matrix, rounded."""
        return np.asarray(self).round(decimals)

    def astype(self, dtype: DTypeLike) -> NDArray[Any]:
        """The whole matrix in another dtype."""
        return np.asarray(self, dtype=dtype)

    @property
    def T(self) -> Floats:
        """The whole matrix, transposed as NumPy's ``.T`` does."""
        return np.asarray(self).T

    # reductions, in memory of one block of rows

    def sum(self, axis: int | tuple[int, ...] | None = None, dtype: DTypeLike | None = None, out: Any = None,
            keepdims: bool = False) -> Any:  # fmt: skip
        """Sums over axes: over keys 1 for each row that sees something, over queries what each key received."""
        _refuse_out(out)
        axes = self._axes(axis)
        if self.ndim - 1 in axes:
            return self._over(np.sum, self.measure("mass").mass[..., None], axes, dtype, keepdims)
        if self.ndim - 2 in axes:
            return self._over(np.sum, self.received()[..., None, :], axes, dtype, keepdims)
        return self._reduce(np.sum, np.add, 0.0, axis, dtype, keepdims)

    def mean(self, axis: int | tuple[int, ...] | None = None, dtype: DTypeLike | None = None, out: Any = None,
             keepdims: bool = False) -> Any:  # fmt: skip
        _refuse_out(out)
        total = self.sum(axis, dtype=np.float64, keepdims=keepdims)
        count = int(np.prod([self.shape[a] for a in self._axes(axis)], dtype=np.int64))
        return np.divide(total, count).astype(dtype or self.dtype)[()]

    def max(self, axis: int | tuple[int, ...] | None = None, out: Any = None, keepdims: bool = False) -> Any:
        _refuse_out(out)
        axes = self._axes(axis)
        if self.ndim - 1 in axes and 0 not in self.shape:
            return self._over(np.max, self.measure("largest").largest[..., None], axes, None, keepdims)
        return self._reduce(np.max, np.maximum, -np.inf, axis, None, keepdims)

    def min(self, axis: int | tuple[int, ...] | None = None, out: Any = None, keepdims: bool = False) -> Any:
        _refuse_out(out)
        return self._reduce(np.min, np.minimum, np.inf, axis, None, keepdims)

    def argmax(self, axis: int | None = None, out: Any = None, keepdims: bool = False) -> Any:
        """The first place of the largest weight, as NumPy's; over the keys without the whole matrix."""
        _refuse_out(out)
        if axis is None or range(self.ndim)[axis] != self.ndim - 1:
            return np.argmax(np.asarray(self), axis, keepdims=keepdims)
        best = np.zeros(self.shape[:-1], np.intp)
        for place, rows, block in self._matrix.blocks():
            into: tuple[Any, ...] = (*place, rows)
            best[into] = block.argmax(axis=-1)
        return best[..., None] if keepdims else best

    # measures, all in one pass over the scores

    def measure(
        self,
        *names: str,
        top: int | None = None,
        pooled: tuple[int, int] | tuple[int, int, str] | None = None,
        folds: Mapping[str, Fold] | None = None,
        sink: int = 1,
        normalized: bool = False,
        align: Align = None,
        first_query: int | None = None,
        first_key: int = 0,
    ) -> Measures:
        """Many measures in one pass over the scores, without the matrix; ``clearhead.measures`` defines each.

        Parameters
        ----------
        names : "entropy", "perplexity", "mass", "learned_sink", "sink", "distance", "previous", "self", "offset(3)",
            "largest", "diagonality", "received", "coverage"
        top : int, optional
            So many of each row's largest weights, with their keys.
        pooled : (rows, columns) or (rows, columns, "max"), optional
            The mean, or largest, weight in each block of a grid laid over the matrix.
        folds : dict of name to Fold, optional
            Measures of your own.
        sink : int
            How many first keys count as the sink.
        normalized : bool
            Divide what a key received by how many rows may see it.
        align : "start" or "end"
            Needed for positions where queries and keys differ in number: see ``masks.causal``.
        first_query, first_key : int, optional
            Numbers of the first query and key among all, where these are a part: results are then of the whole's
            positions, and parts can be merged (``Measures.merge``). first_query takes the place of ``align``.

        Returns
        -------
        Measures, whose attributes are of rows (..., heads, queries), keys (..., heads, keys), heads or blocks.

        Notes
        -----
        Costs the scores, their exponentials and some instructions a cell, less than a forward pass; where the
        logsumexp is not known yet, one pass over the scores more. Memory is linear in tokens: 8 numbers a row and, for
        keys and grids, for each key. Results do not depend on the number of threads.

        >>> import numpy as np, clearhead as ch
        >>> x = np.zeros((4, 2))
        >>> found = ch.attention_weights(x, x).measure("entropy", "received", top=2)
        >>> found.entropy.round(3).tolist(), found.received.tolist()  # ln 4
        ([1.386, 1.386, 1.386, 1.386], [1.0, 1.0, 1.0, 1.0])
        >>> found.top.keys[0].tolist(), found.top.weights[0].tolist()
        ([0, 1], [0.25, 0.25])
        """
        asked = Asked(
            names=names, top=top, pooled=pooled, folds=folds or {}, sink=sink, normalized=normalized, align=align,
            first_query=first_query, first_key=first_key,
        )  # fmt: skip
        return find(self._plan, self._logsumexp, asked)

    def entropy(self) -> NDArray[np.float64]:
        """-sum w ln w of each row, in nats: (..., heads, queries). Clark et al. 2019, section 3."""
        return np.asarray(self.measure("entropy").entropy)

    def received(self, normalized: bool = False) -> NDArray[np.float64]:
        """What each key received, summed over rows: (..., heads, keys).

        Zhang et al. 2023 (H2O), section 3, there the accumulated attention score.

        normalized : over how many rows may see it, NaN where none may.

        >>> import numpy as np, clearhead as ch
        >>> x = np.zeros((4, 2))
        >>> ch.attention_weights(x, x, mask=ch.masks.causal()).received(normalized=True).round(3).tolist()
        [0.521, 0.361, 0.292, 0.25]
        """
        return np.asarray(self.measure("received", normalized=normalized).received)

    def top(self, k: int) -> Top:
        """The k largest weights of each row and their keys, (keys, weights), each (..., heads, queries, k).

        Ties go to the smaller key; where a row sees fewer keys, (-1, 0). Gupta et al. 2021, section 2, attend to no
        others; here all keys take part in the weights.

        >>> import numpy as np, clearhead as ch
        >>> x = np.eye(3)
        >>> keys, weights = ch.attention_weights(x, x, mask=ch.masks.causal()).top(2)
        >>> keys.tolist(), weights.round(2).tolist()
        ([[0, -1], [1, 0], [2, 0]], [[1.0, 0.0], [0.64, 0.36], [0.47, 0.26]])
        """
        found: Top = self.measure(top=k).top
        return found

    def pooled(self, rows: int, columns: int, max: bool = False) -> NDArray[np.float64]:
        """The mean weight in each block of a grid laid over the matrix: (..., rows, columns), hidden cells count 0.

        Block (r, c) covers queries ``r*queries//rows`` up to the next block's first, and keys alike. A grid finer than
        the matrix is cut down to it. max : each block's largest weight instead. A picture made smaller; no paper's.
        """
        return np.asarray(self.measure(pooled=(rows, columns, "max" if max else "mean")).pooled)

    def _axes(self, axis: int | tuple[int, ...] | None) -> tuple[int, ...]:
        if axis is None:
            return tuple(range(self.ndim))
        return np.lib.array_utils.normalize_axis_tuple(axis, self.ndim)

    def _reduce(self, within: Callable[..., Any], between: np.ufunc, start: float, axis: int | tuple[int, ...] | None,
                dtype: DTypeLike | None, keepdims: bool) -> Any:  # fmt: skip
        """Reduce each block over what it has of the axes, then join it to what other blocks gave."""
        axes, ndim = self._axes(axis), self.ndim
        if within is not np.sum and any(self.shape[a] == 0 for a in axes):
            raise ValueError(f"weights {self.shape} have no {within.__name__} over axis {axis}: it is empty")
        kept = [1 if a in axes else n for a, n in enumerate(self.shape)]
        out = np.full(kept, start, np.float64 if within is np.sum else self.dtype)
        inner = tuple(a - ndim for a in axes if a >= ndim - 2)
        for place, rows, block in self._matrix.blocks():
            part = within(block, axis=inner, keepdims=True, **({"dtype": np.float64} if within is np.sum else {}))
            at = tuple(0 if a in axes else i for a, i in enumerate(place))
            into: tuple[int | slice, ...] = (*at, slice(None) if ndim - 2 in axes else rows)
            out[into] = between(out[into], part)
        out = out if keepdims else out.squeeze(axes)
        return out.astype(dtype or self.dtype)[()]

    def _over(self, within: Callable[..., Any], reduced: Floats, axes: tuple[int, ...], dtype: DTypeLike | None,
              keepdims: bool) -> Any:  # fmt: skip
        """What is reduced along one axis already, along the others too."""
        return np.asarray(within(reduced, axis=axes, keepdims=keepdims)).astype(dtype or self.dtype)[()]

    def _refuse_if_too_large(self, cells: int, beside: int = 0) -> None:
        size, free = cells * (self.dtype.itemsize + beside), memory.available()
        if free is not None and size > free:
            what = "the full matrix" if cells == self.size else "this part"
            shape = " x ".join(f"{n:,}" for n in self.shape)
            raise MemoryError(
                f"{what} of {shape} {self.dtype} weights takes {memory.written(size)}, "
                f"{memory.written(free)} are free: ask for rows (weights[..., i, :]), for a map (.pooled(512, 512)) "
                f"or for .measure('entropy', ...)"
            )


def _refuse_out(out: Any) -> None:
    if out is not None:
        raise TypeError("out= is not supported by weights: use the result, or np.asarray(weights) first")
