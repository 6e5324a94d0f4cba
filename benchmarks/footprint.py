"""Peak memory of one call beyond its inputs and outputs, measured in a process of its own.

    python benchmarks/footprint.py PEER WORKLOAD THREADS

prints one line of JSON. The process first runs 256 tokens of half the dim: libraries, threads and kernels are there
then, room for this size is not. It makes the inputs, sets the system's high-water mark back, runs the workload once.
"""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import peers
import workloads
from workload import Workload


def measure(peer: str, workload: Workload, threads: int) -> dict[str, Any]:
    """{"bytes", "seconds"} of one call, or {"error"} with the reason why there are none."""
    command = [sys.executable, str(Path(__file__)), peer, workload.name, str(threads)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"error": next(reversed(done.stderr.strip().splitlines()), f"exit code {done.returncode}")}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _measure_here(name: str, workload: Workload, threads: int) -> dict[str, Any]:
    peer = peers.load(name)
    peer.set_threads(threads)
    peer.prepare(replace(workload, tokens=256, dim=workload.dim // 2))()
    call = peer.prepare(workload)
    give_back()
    reset_peak()
    before, start = status("VmRSS"), time.perf_counter()
    result = call()
    seconds = time.perf_counter() - start
    beyond = status("VmHWM") - before - workload.output_nbytes
    del result
    return {"bytes": max(0, beyond), "seconds": seconds}


def give_back() -> None:
    """Return freed memory to the system: what the call could reuse unseen would otherwise not count as its own."""
    gc.collect()
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):  # glibc
        library.malloc_trim(0)


def reset_peak() -> None:
    """Set VmHWM back to what is held now (Linux, ``man 5 proc_pid_clear_refs``)."""
    Path("/proc/self/clear_refs").write_text("5")


def status(field: str) -> int:
    """A line of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"this system does not say {field}")


if __name__ == "__main__":
    peer, workload, threads = sys.argv[1:]
    print(json.dumps(_measure_here(peer, workloads.find(workload), int(threads))))
