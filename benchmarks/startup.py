"""What a new process costs: child processes that time themselves, in turn.

A child prints the seconds that its code took, the start of the interpreter not counted. Where one thing is measured
over another, the two follow each other in every repetition, and the figure is the median of their differences.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from peers import OURS
from targets import Target

BUDGET = 20.0  # seconds that a row may take once it has its three repetitions
FEWEST = 3

# A first call as a script makes it: from before the import to the result.
CALL = (
    "import numpy as np, clearhead as ch; x = np.random.default_rng(0).standard_normal((1, 128, 64), dtype=np.float32);"
    " ch.attention(x, x, x)"
)
TIMED = "import time; start = time.perf_counter(); {code}; print(time.perf_counter() - start)"


@dataclass(frozen=True)
class Start:
    """``code`` in a new process, less ``beside``. The kernels' folder is empty each time where ``cold``."""

    name: str
    groups: tuple[str, ...]
    title: str
    code: str
    beside: str = ""
    cold: bool = False
    threads: int = 0
    targets: tuple[Target, ...] = ()
    headline: bool = False
    measures: str = "start"


def measure(start: Start, repeats: int) -> dict[str, Any]:
    """Every repetition, and the median. Interrupted, those so far; then it says ``stopped``."""
    codes = {OURS: start.code} | ({"beside": start.beside} if start.beside else {})
    seconds: dict[str, list[float]] = {name: [] for name in codes}
    row: dict[str, Any] = {}
    with ExitStack() as stack:
        kernels = stack.enter_context(tempfile.TemporaryDirectory())
        if not start.cold:
            for code in codes.values():
                _child(code, kernels)
        try:
            while len(seconds[OURS]) < repeats and (len(seconds[OURS]) < FEWEST or sum(seconds[OURS]) < BUDGET):
                once = {name: _fresh(code) if start.cold else _child(code, kernels) for name, code in codes.items()}
                for name, took in once.items():
                    seconds[name].append(took)
        except KeyboardInterrupt:
            row["stopped"] = True
            if not seconds[OURS]:
                raise
    beside = seconds.get("beside", [0.0] * len(seconds[OURS]))
    over = statistics.median(ours - other for ours, other in zip(seconds[OURS], beside, strict=True))
    median = {name: statistics.median(took) for name, took in seconds.items()}
    return row | {"seconds": seconds, "median": median, "figures": {"seconds": over}}


def _fresh(code: str) -> float:
    with tempfile.TemporaryDirectory() as kernels:
        return _child(code, kernels)


def _child(code: str, kernels: str) -> float:
    environment = os.environ | {"CLEARHEAD_CACHE_DIR": kernels}
    command = [sys.executable, "-c", TIMED.format(code=code)]
    return float(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
