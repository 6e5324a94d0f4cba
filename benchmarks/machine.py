"""What this machine can do at best: multiply-adds a second and bytes read a second, measured; and what it is.

Shares of the peak say how good a kernel is; seconds alone say how good the machine was that day. So the peak is
measured in the same run, in turn with everything else: see ``paired``.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

import blas
import clearhead
from clearhead import memory
from clearhead.kernels.target import host
from clearhead.kernels.vectors import Vectors, at, i64, loop, pointer

SAMPLE = 0.03  # seconds that one measurement of the peak takes
LARGE = 1 << 30  # bytes to read: far more than any cache holds
# Chains of dependent multiply-adds that run side by side. Two units of 4 or 5 cycles need 10; more than the registers
# hold would spill. 24 of 32 with AVX-512 and NEON, 12 of 16 with AVX2.
CHAINS = min(24, host().registers - 4)


@intrinsic
def _multiply_add(typingctx: Any, rounds: Any, numbers: Any) -> Any:
    """``rounds`` times CHAINS independent vector FMAs, x*a + x; the sum of all goes back to ``numbers``."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        v = Vectors(b, signature.args[1].dtype)
        x = v.load(arguments[1])
        chains = loop(b, arguments[0], [v.const(float(n)) for n in range(CHAINS)], lambda i, chain: [
            v.fma(x, a, x) for a in chain
        ])  # fmt: skip
        total = chains[0]
        for chain in chains[1:]:
            total = b.fadd(total, chain)
        v.store(total, arguments[1])
        return context.get_dummy_value()

    return types.void(types.int64, numbers), generate


@intrinsic
def _read(typingctx: Any, rounds: Any, numbers: Any, total: Any) -> Any:
    """Add ``rounds`` times 16 vectors that follow each other in memory, and nothing else."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        v, count = Vectors(b, signature.args[1].dtype), 16

        def body(i: Any, sums: Any) -> Any:
            here = at(b, arguments[1], b.mul(i, ir.Constant(i64, count * v.lanes)))
            return [b.fadd(s, v.load(at(b, here, n * v.lanes))) for n, s in enumerate(sums)]

        sums = loop(b, arguments[0], [v.const(0.0)] * count, body)
        whole = sums[0]
        for s in sums[1:]:
            whole = b.fadd(whole, s)
        v.store(whole, arguments[2])
        return context.get_dummy_value()

    return types.void(types.int64, numbers, numbers), generate


# Plain Numba: the package's disk cache watches the package's own sources alone.
@numba.njit(nogil=True)
def _run_multiply_add(rounds, numbers):  # type: ignore[no-untyped-def]
    _multiply_add(rounds, pointer(numbers, 0))


@numba.njit(nogil=True)
def _run_read(rounds, numbers, total):  # type: ignore[no-untyped-def]
    _read(rounds, pointer(numbers, 0), pointer(total, 0))


class Peak:
    """Multiply-adds as fast as the vector units can, on every one of ``threads`` threads at once.

    ``run()`` does ``flops`` floating-point operations: a subject for ``paired.measure`` like any other.
    """

    def __init__(self, dtype: str, threads: int) -> None:
        self.dtype, self.threads = np.dtype(dtype), threads
        self._numbers = [np.full(64, 0.5, self.dtype) for _ in range(threads)]
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None
        self._rounds = 1000
        self.run()
        while (seconds := _timed(self.run)) < SAMPLE:
            self._rounds = int(self._rounds * min(10.0, 1.2 * SAMPLE / seconds))

    @property
    def flops(self) -> int:
        return 2 * host().lanes(self.dtype) * CHAINS * self._rounds * self.threads

    def run(self) -> None:
        if self._pool is None:
            _run_multiply_add(self._rounds, self._numbers[0])
        else:
            list(self._pool.map(_run_multiply_add, [self._rounds] * self.threads, self._numbers))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


def flop_peak(dtype: str, threads: int, tries: int = 20) -> float:
    """FLOP a second: the best of some tries."""
    peak = Peak(dtype, threads)
    best = max(peak.flops / _timed(peak.run) for _ in range(tries))
    peak.close()
    return best


def read_bandwidth(threads: int, tries: int = 5) -> float:
    """Bytes a second that ``threads`` threads together read from memory: the best of some tries."""
    size = min(LARGE, (memory.available() or LARGE) // 4)
    step = 16 * host().lanes(np.float32)
    rounds = size // 4 // threads // step
    parts = [np.ones(rounds * step, np.float32) for _ in range(threads)]
    totals = [np.zeros(64, np.float32) for _ in range(threads)]
    _run_read(1, parts[0], totals[0])
    with ThreadPoolExecutor(threads) as pool:

        def read() -> None:
            list(pool.map(_run_read, [rounds] * threads, parts, totals))

        return max(sum(part.nbytes for part in parts) / _timed(read) for _ in range(tries))


def describe() -> dict[str, Any]:
    """The processor, the system and every version that figures depend on."""
    return {
        "processor": processor(),
        "core": llvm.get_host_cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "vectors": host().name,
        "system": f"{platform.system()} {platform.machine()}",
        "memory": memory.available(),
        "python": platform.python_version(),
        "versions": {
            "clearhead": clearhead.__version__,
            "numpy": np.__version__,
            "numba": numba.__version__,
            "llvmlite": llvmlite.__version__,
        },
        "blas": blas.describe(),
        "date": time.strftime("%Y-%m-%d"),
    }


def processor() -> str:
    """The processor's name as the system gives it."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    for count in range(1, (describe()["cores"] or 1) + 1):
        single, double = (flop_peak(kind, count) / 1e9 for kind in ("float32", "float64"))
        read = read_bandwidth(count) / 1e9
        print(f"{count} threads: {single:.0f} GFLOP/s in float32, {double:.0f} in float64, {read:.1f} GB/s read")
