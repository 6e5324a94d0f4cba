"""What a piece of work is, as data: shapes, dtype, mask and score, and the arrays that follow from them.

The FLOP count is that of the two products over the cells that the mask leaves visible, the softmax not counted; with
gradients it is that of seven products: these two, and five on the way back (the scores again, and the gradients of
weights, values, queries and keys). Decoding is counted in bytes instead: those of the keys and values, each of which
must be read once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from targets import Target

LARGE = 1 << 30  # bytes: far more than any cache holds

Arrays = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]


@dataclass(frozen=True)
class Workload:
    """Attention on standard normal inputs of shape (batch, heads, tokens, dim).

    key_heads : as many as heads, where 0. queries : as many as tokens (which are the keys), where 0.
    mask : "full" (everyone sees everyone), "causal", "window" (causal, and ``left`` keys back), "documents"
        (so many, of random lengths), "random" (every second cell, at random), "lengths" (each batch entry has its own
        number of tokens, spread evenly from 16 to all).
    score : "dot", "alibi" (dot product and ALiBi), or "additive" (its hidden dim is dim).
    told : how Clearhead is told the mask or the score: as what it is, or as a "function" of the user's.
    call : Clearhead's function; "drop-in" is the one that stands in for torch's, on tensors.
    given : "random" inputs, or the tutorial's, which are 2-D.
    way : "forward", or "both": the output, and the gradients of query, key and value (and of an additive score's
    numbers) from an output gradient of standard normal numbers.
    asks : for measures, see ``asked``: those of rows "riding" along in the call; "all" of them, of weights whose
    logsumexp is known; or all of them "alone", of queries and keys with nothing known. "" : for none.
    bound : what limits it at best, "flops" or the "bytes" of keys and values.
    measures : "time", or "memory" beyond inputs and outputs in a process of its own.
    threads : so many, whatever the run uses, where not 0.
    peers : who takes part beside Clearhead; everyone where None.
    beside : other work of ours that is measured in turn with it.
    targets : what it should reach. headline : the README shows it.
    """

    name: str
    groups: tuple[str, ...]
    heads: int
    tokens: int
    dim: int
    batch: int = 1
    key_heads: int = 0
    queries: int = 0
    dtype: str = "float32"
    mask: Literal["full", "causal", "window", "documents", "random", "lengths"] = "full"
    left: int = 0
    documents: int = 0
    score: Literal["dot", "alibi", "additive"] = "dot"
    told: Literal["", "function"] = ""
    call: Literal["attention", "scaled_dot_product_attention", "drop-in"] = "attention"
    given: Literal["random", "tutorial"] = "random"
    way: Literal["forward", "both"] = "forward"
    asks: Literal["", "riding", "all", "alone"] = ""
    bound: Literal["flops", "bytes"] = "flops"
    measures: Literal["time", "memory"] = "time"
    threads: int = 0
    peers: tuple[str, ...] | None = None
    beside: Workload | None = None
    targets: tuple[Target, ...] = ()
    headline: bool = False

    @property
    def title(self) -> str:
        """The workload in words: ``8 × 4,096 × 64, causal``."""
        batch = f"{self.batch} × " if self.batch > 1 else ""
        heads = f"{self.heads} on {self.key_heads}" if self.key_heads else f"{self.heads}"
        mask = {
            "full": "", "window": f"window {self.left + 1:,}", "documents": f"{self.documents} documents",
            "random": "random mask", "lengths": "ragged",
        }.get(self.mask, self.mask)  # fmt: skip
        score = {"dot": "", "alibi": "ALiBi", "additive": "additive score"}[self.score]
        details = [
            mask,
            score,
            "user's function" if self.told else "",
            f"{self.queries} quer{'y' if self.queries == 1 else 'ies'}" if self.queries else "",
            "" if self.dtype == "float32" else self.dtype,
            {"attention": "", "scaled_dot_product_attention": "with weights", "drop-in": "drop-in"}[self.call],
            "" if self.way == "forward" else "forward + backward",
            {"": "", "riding": "with row measures", "all": "all measures", "alone": "logsumexp and all measures"}[
                self.asks
            ],
        ]
        if self.given == "tutorial":
            return ", ".join(["worked example, 3 × 4", *filter(None, details)])
        return ", ".join([f"{batch}{heads} × {self.tokens:,} × {self.dim}", *filter(None, details)])

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads // (self.key_heads or self.heads)

    @property
    def rows(self) -> int:
        """Queries of a head."""
        return self.queries or self.tokens

    @property
    def cells(self) -> int:
        """How many cells are visible, of one head in every batch entry. A random mask counts as none: all its tiles
        have both kinds of cells."""
        match self.mask:
            case "full" | "random":
                return self.batch * self.rows * self.tokens
            case "documents":
                return self.batch * int((np.bincount(self.ids) ** 2).sum())
            case "lengths":
                return int((self.lengths**2).sum())
        behind = self.tokens - 1 if self.mask == "causal" else min(self.left, self.tokens - 1)
        return self.batch * (self.tokens * (behind + 1) - behind * (behind + 1) // 2)

    @property
    def flops(self) -> int:
        """A multiply-add counts two; each visible cell takes ``dim`` of them in each product."""
        products = 2 if self.way == "forward" else 7
        return 2 * products * self.dim * self.cells * self.heads

    @property
    def work(self) -> int:
        """FLOP, or the bytes of keys and values: what the limit is compared in."""
        if self.bound == "flops":
            return self.flops
        return 2 * self.batch * (self.key_heads or self.heads) * self.tokens * self.dim * self._itemsize

    @property
    def dense_nbytes(self) -> int:
        """What one array of 32-bit numbers (64-bit for float64) for every cell takes; an additive score has ``dim``
        numbers a cell."""
        each = max(4, self._itemsize) * (self.dim if self.score == "additive" else 1)
        return self.batch * self.heads * self.rows * self.tokens * each

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of queries and outputs."""
        return self.batch, self.heads, self.rows, self.dim

    @property
    def output_nbytes(self) -> int:
        """Of the output, and of the gradients of query, key and value where they are computed."""
        queries, keys = self.heads * self.rows, (self.key_heads or self.heads) * self.tokens
        rows = queries if self.way == "forward" else 2 * queries + 2 * keys
        return self.batch * rows * self.dim * self._itemsize

    @property
    def _itemsize(self) -> int:
        return {"float64": 8, "float32": 4}.get(self.dtype, 2)

    # the arrays

    def arrays(self) -> list[Arrays]:
        """(query, key, value), the same for every peer, not to be written to; calls take turns where there are several.

        Where reading is the limit, there are so many copies that no cache holds them until their turn comes again, as
        when a model's layers follow one another.
        """
        return _tutorial() if self.given == "tutorial" else _arrays(self)

    def grad_output(self) -> NDArray[Any]:
        """The gradient that is given of the output: standard normal, like the inputs."""
        made = np.random.default_rng(1986).standard_normal(self.shape, dtype=np.float32)
        return made.astype(_dtype(self.dtype))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """How many tokens each batch entry has, in random order."""
        even = np.linspace(16, self.tokens, self.batch).astype(np.int64)
        return np.random.default_rng(self.batch).permutation(even)

    @property
    def ids(self) -> NDArray[np.int64]:
        """Which document each token belongs to."""
        ends = np.random.default_rng(self.documents).choice(self.tokens - 1, self.documents - 1, replace=False) + 1
        return np.searchsorted(np.sort(ends), np.arange(self.tokens), side="right")

    @property
    def slopes(self) -> NDArray[np.float64]:
        """ALiBi's, for a power of two of heads: 2^(-8/heads), 2^(-16/heads) ..."""
        return 2.0 ** (-8.0 / self.heads * np.arange(1, self.heads + 1))

    def learned(self) -> Arrays:
        """W_q, W_k (dim, hidden) and v (hidden,) of an additive score, of a size that makes scores vary by about 1."""
        random = np.random.default_rng(2015)
        shapes = (self.dim, self.dim), (self.dim, self.dim), (self.dim,)
        query, key, vector = (
            (random.standard_normal(shape) / np.sqrt(self.dim)).astype(_dtype(self.dtype)) for shape in shapes
        )
        return query, key, vector

    def sees(self, batch: int, queries: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether these queries of a batch entry see each key: (len(queries), tokens)."""
        query, key = queries[:, None], np.arange(self.tokens)
        match self.mask:
            case "causal":
                return key <= query
            case "window":
                return (key <= query) & (key >= query - self.left)
            case "documents":
                return np.asarray(self.ids[query] == self.ids)
            case "random":
                return every_second(self.rows, self.tokens)[queries]
            case "lengths":
                length = self.lengths[batch]
                return (query < length) & (key < length)
        return np.ones((len(queries), self.tokens), dtype=np.bool_)

    def visible(self) -> NDArray[np.bool_] | None:
        """The mask as an array (queries, keys), for peers that take no other; None where everything is visible.

        (batch, 1, queries, keys) where batch entries differ.
        """
        if self.mask == "full":
            return None
        queries = np.arange(self.rows)
        if self.mask == "lengths":
            return np.stack([self.sees(batch, queries) for batch in range(self.batch)])[:, None]
        return self.sees(0, queries)


@lru_cache(maxsize=1)
def every_second(rows: int, columns: int) -> NDArray[np.bool_]:
    """A random mask: each cell is visible or not, as a coin falls."""
    return np.random.default_rng(rows).integers(2, size=(rows, columns), dtype=np.int8).astype(np.bool_)


@lru_cache(maxsize=1)
def _arrays(workload: Workload) -> list[Arrays]:
    random = np.random.default_rng(2017)
    w, at = workload, np.float64 if workload.dtype == "float64" else np.float32
    few = (w.batch, w.key_heads or w.heads, w.tokens, w.dim)
    query, key, value = (random.standard_normal(n, dtype=at).astype(_dtype(w.dtype)) for n in (w.shape, few, few))
    copies = -(-LARGE // w.work) if w.bound == "bytes" else 1
    return [(query, key, value), *((query.copy(), key.copy(), value.copy()) for _ in range(copies - 1))]


def _tutorial() -> list[Arrays]:
    from clearhead.lessons.worked_example import worked_example

    example = worked_example()
    return [(example.query, example.key, example.value)]


def _dtype(name: str) -> np.dtype[Any]:
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes  # NumPy has no bfloat16 of its own

    bfloat16: type[np.generic] = ml_dtypes.bfloat16
    return np.dtype(bfloat16)
