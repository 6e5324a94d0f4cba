"""What this machine can do at best: multiply-adds a second and bytes read a second, measured; and what it is.

Shares of the peak say how good a kernel is; seconds alone say how good the machine was that day. So the peak is
measured in the same run, in turn with everything else: see ``paired``.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
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
from clearhead.kernels.addresses import pointer
from clearhead.kernels.target import host
from clearhead.kernels.vectors import Vectors, at, i64, loop
from workload import LARGE

SAMPLE = 0.03  # seconds that one measurement of the peak takes
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


class Limit:
    """The most that ``threads`` threads can do at once. ``run()`` does ``work`` (FLOP, or bytes), as fast as may be.

    A subject for ``paired`` like any other.
    """

    work: int

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def run(self) -> None:
        raise NotImplementedError

    def best(self, tries: int) -> float:
        """Work a second, at the best of some tries."""
        return max(self.work / _timed(self.run) for _ in range(tries))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def _on_each(self, call: Callable[..., Any], *arguments: list[Any]) -> None:
        """``call`` on every thread, each with its own of the arguments."""
        if self._pool is None:
            call(*(own[0] for own in arguments))
        else:
            list(self._pool.map(call, *arguments))


class Peak(Limit):
    """Multiply-adds in ``dtype``; work is FLOP."""

    def __init__(self, dtype: str, threads: int) -> None:
        super().__init__(threads)
        self.dtype = np.dtype(dtype)
        self._numbers = [np.full(64, 0.5, self.dtype) for _ in range(threads)]
        self._rounds = 1000
        self.run()
        while (seconds := _timed(self.run)) < SAMPLE:
            self._rounds = int(self._rounds * min(10.0, 1.2 * SAMPLE / seconds))
        self.work = 2 * host().lanes(self.dtype) * CHAINS * self._rounds * threads

    def run(self) -> None:
        self._on_each(_run_multiply_add, [self._rounds] * self.threads, self._numbers)


class Reading(Limit):
    """Reading memory that no cache holds; work is bytes."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        step = 16 * host().lanes(np.float32)
        self._rounds = min(LARGE, (memory.available() or LARGE) // 4) // 4 // threads // step
        self._parts = [np.ones(self._rounds * step, np.float32) for _ in range(threads)]
        self._totals = [np.zeros(64, np.float32) for _ in range(threads)]
        self.work = sum(part.nbytes for part in self._parts)
        self.run()

    def run(self) -> None:
        self._on_each(_run_read, [self._rounds] * self.threads, self._parts, self._totals)


def limits(threads: int) -> dict[str, float]:
    """FLOP a second in float32 and float64, and bytes read a second, at best."""
    found = {}
    for name, limit, tries in (
        ("float32", Peak("float32", threads), 20),
        ("float64", Peak("float64", threads), 20),
        ("bandwidth", Reading(threads), 5),
    ):
        found[name] = limit.best(tries)
        limit.close()
    return found


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
        "commit": commit(),
    }


def commit() -> str:
    """The state of the sources, ``7d06103`` or ``7d06103 with changes``; empty where they are not in git."""
    command = ["git", "describe", "--always", "--abbrev=7", "--exclude=*", "--dirty= with changes"]
    try:
        return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


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
        best = {name: speed / 1e9 for name, speed in limits(count).items()}
        print(
            f"{count} thread{'s' * (count > 1)}: {best['float32']:.0f} GFLOP/s in float32, {best['float64']:.0f} in "
            f"float64, {best['bandwidth']:.1f} GB/s read"
        )
