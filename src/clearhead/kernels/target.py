"""How wide this machine's vectors are, and which tile shape its registers hold.

A micro-tile of scores is ``keys`` x ``vectors`` accumulators, each ``lanes`` queries wide; with the queries'
vectors and one broadcast key they must fit the registers, or the inner loop spills (spilling shapes measured at
about two thirds of the speed). So accumulators + vectors + 1 <= registers in every row of the table.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import cache

import llvmlite.binding as llvm
import numpy as np
from numba.core import config
from numpy.typing import DTypeLike


@dataclass(frozen=True)
class Target:
    """One row: what a feature of the host means for tiles."""

    name: str
    feature: str
    bits: int  # of a vector register
    registers: int
    keys: int  # of a micro-tile
    vectors: int  # of queries in a tile

    def lanes(self, dtype: DTypeLike) -> int:
        """Numbers in one vector."""
        return self.bits // (8 * np.dtype(dtype).itemsize)

    def rows(self, dtype: DTypeLike) -> int:
        """Queries in a tile."""
        return self.vectors * self.lanes(dtype)


TARGETS = (
    Target("AVX-512", "avx512f", bits=512, registers=32, keys=4, vectors=4),
    Target("AVX2", "avx2", bits=256, registers=16, keys=4, vectors=3),
    Target("NEON", "neon", bits=128, registers=32, keys=4, vectors=6),
    Target("scalar", "", bits=128, registers=16, keys=4, vectors=3),
)


@cache
def features() -> frozenset[str]:
    """LLVM's names of what the processor can do (NUMBA_CPU_FEATURES is heeded, as by Numba)."""
    given = config.CPU_FEATURES
    if given is None:
        return frozenset(name for name, has in llvm.get_host_cpu_features().items() if has)
    return frozenset(name[1:] for name in given.split(",") if name.startswith("+"))


@cache
def converts_float16() -> bool:
    """Whether float16 is converted by an instruction: by all that have AVX2, and by ARM's 64-bit ones."""
    return "f16c" in features() or platform.machine() in ("arm64", "aarch64")


@cache
def host() -> Target:
    """The first row whose feature this machine has."""
    return next(row for row in TARGETS if not row.feature or row.feature in features())
