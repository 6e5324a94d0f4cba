"""One table of work: what every peer is given, and how much arithmetic it is.

A workload is data alone. To add one, add a line to WORKLOADS; to measure another kind of thing, give it a group of its
own. The FLOP count is that of the two products over the cells that the mask leaves visible, the softmax not counted.
Decoding is counted in bytes instead: those of the keys and values, each of which must be read once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

# How far results may lie from each other, as norm(difference) / norm(reference), before anything is timed.
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}

LARGE = 1 << 30  # bytes: far more than any cache holds


@dataclass(frozen=True)
class Workload:
    """Attention on standard normal inputs of shape (batch, heads, tokens, dim).

    key_heads : as many as heads, where 0. queries : as many as tokens (which are the keys), where 0.
    mask : "full" (everyone sees everyone), "causal", or "window": causal, and ``left`` keys back.
    bound : what limits it at best, "flops" or the "bytes" of keys and values.
    measures : "time", or "memory" beyond inputs and outputs in a process of its own.
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
    mask: Literal["full", "causal", "window"] = "full"
    left: int = 0
    bound: Literal["flops", "bytes"] = "flops"
    measures: Literal["time", "memory"] = "time"

    @property
    def title(self) -> str:
        """The workload in words: ``8 × 4,096 × 64, causal``."""
        batch = f"{self.batch} × " if self.batch > 1 else ""
        heads = f"{self.heads} on {self.key_heads}" if self.key_heads else f"{self.heads}"
        details = [] if self.mask == "full" else [self.mask if self.mask == "causal" else f"window {self.left + 1:,}"]
        details += [f"{self.queries} quer{'y' if self.queries == 1 else 'ies'}"] if self.queries else []
        details += [] if self.dtype == "float32" else [self.dtype]
        return ", ".join([f"{batch}{heads} × {self.tokens:,} × {self.dim}", *details])

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads // (self.key_heads or self.heads)

    @property
    def cells(self) -> int:
        """How many cells of one head's matrix are visible."""
        if self.mask == "full":
            return (self.queries or self.tokens) * self.tokens
        behind = self.tokens - 1 if self.mask == "causal" else min(self.left, self.tokens - 1)
        return self.tokens * (behind + 1) - behind * (behind + 1) // 2

    @property
    def flops(self) -> int:
        """A multiply-add counts two; each visible cell takes ``dim`` of them in either product."""
        return 4 * self.dim * self.cells * self.heads * self.batch

    @property
    def work(self) -> int:
        """FLOP, or the bytes of keys and values: what the limit is compared in."""
        if self.bound == "flops":
            return self.flops
        return 2 * self.batch * (self.key_heads or self.heads) * self.tokens * self.dim * self._itemsize

    @property
    def dense_nbytes(self) -> int:
        """What one matrix (batch, heads, queries, keys) of 32-bit numbers (64-bit for float64) takes."""
        return self.batch * self.heads * (self.queries or self.tokens) * self.tokens * max(4, self._itemsize)

    @property
    def output_nbytes(self) -> int:
        return self.batch * self.heads * (self.queries or self.tokens) * self.dim * self._itemsize

    @property
    def _itemsize(self) -> int:
        return {"float64": 8, "float32": 4}.get(self.dtype, 2)

    def arrays(self) -> list[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]:
        """(query, key, value), the same for every peer, not to be written to; calls take turns where there are several.

        Where reading is the limit, there are so many copies that no cache holds them until their turn comes again, as
        when a model's layers follow one another.
        """
        return _arrays(self)

    def visible(self) -> NDArray[np.bool_] | None:
        """The mask as an array (queries, keys), for peers that take no other; None where everything is visible."""
        if self.mask == "full":
            return None
        back = np.arange(self.tokens)[:, None] - np.arange(self.tokens)
        return (back >= 0) & (back <= (self.tokens if self.mask == "causal" else self.left))


@lru_cache(maxsize=1)
def _arrays(workload: Workload) -> list[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]:
    random = np.random.default_rng(2017)
    w, at = workload, np.float64 if workload.dtype == "float64" else np.float32
    many, few = (w.batch, w.heads, w.queries or w.tokens, w.dim), (w.batch, w.key_heads or w.heads, w.tokens, w.dim)
    query, key, value = (random.standard_normal(n, dtype=at).astype(_dtype(w.dtype)) for n in (many, few, few))
    copies = -(-LARGE // w.work) if w.bound == "bytes" else 1
    return [(query, key, value), *((query.copy(), key.copy(), value.copy()) for _ in range(copies - 1))]


def _dtype(name: str) -> np.dtype[Any]:
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes  # NumPy has no bfloat16 of its own

    bfloat16: type[np.generic] = ml_dtypes.bfloat16
    return np.dtype(bfloat16)


FORWARD, DECODE = ("forward",), ("decode",)

WORKLOADS = (
    Workload("full-64", FORWARD, heads=8, tokens=4096, dim=64),
    Workload("full-128", FORWARD, heads=8, tokens=4096, dim=128),
    Workload("causal-64", FORWARD, heads=8, tokens=4096, dim=64, mask="causal"),
    Workload("causal-128", FORWARD, heads=8, tokens=4096, dim=128, mask="causal"),
    Workload("short-512", FORWARD, heads=8, tokens=512, dim=64),
    Workload("short-1024", FORWARD, heads=8, tokens=1024, dim=64),
    Workload("batch", FORWARD, batch=4, heads=12, tokens=128, dim=64),
    Workload("float64", FORWARD, heads=8, tokens=2048, dim=128, dtype="float64", mask="causal"),
    Workload("float16", FORWARD, heads=8, tokens=2048, dim=128, dtype="float16", mask="causal"),
    Workload("bfloat16", FORWARD, heads=8, tokens=2048, dim=128, dtype="bfloat16", mask="causal"),
    Workload("window", FORWARD, heads=4, tokens=16_384, dim=64, mask="window", left=1023),
    *(
        Workload(f"decode-{name}-{dtype}", DECODE, heads, tokens, dim=128, key_heads=key_heads, queries=1, dtype=dtype,
                 bound="bytes")
        for name, heads, key_heads, tokens in (("grouped", 32, 8, 8192), ("heads", 8, 8, 16_384))
        for dtype in ("float32", "bfloat16")
    ),
    Workload("decode-one", DECODE, heads=1, key_heads=1, tokens=65_536, dim=128, queries=1, bound="bytes"),
    Workload("memory", ("forward", "memory"), heads=1, tokens=65_536, dim=64, measures="memory"),
)  # fmt: skip


def choose(names: list[str]) -> list[Workload]:
    """The workloads of these names and groups, in the table's order; all where none is named.

    Raises ValueError for a name that is neither.
    """
    known = {workload.name for workload in WORKLOADS} | {group for workload in WORKLOADS for group in workload.groups}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no workload or group {', '.join(unknown)}: known are {', '.join(sorted(known))}")
    return [w for w in WORKLOADS if not names or w.name in names or set(w.groups) & set(names)]
