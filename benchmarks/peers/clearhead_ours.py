"""Clearhead: ``clearhead.attention``."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import clearhead as ch
from workloads import Workload

name = "Clearhead"
version = ch.__version__


def set_threads(count: int) -> bool:
    ch.set_num_threads(count)
    return True


def lacks(workload: Workload) -> str | None:
    return None


def prepare(workload: Workload) -> Callable[[], Any]:
    turns = itertools.cycle(workload.arrays())
    mask = {
        "full": None,
        "causal": ch.masks.causal(),
        "window": ch.masks.causal() & ch.masks.window(left=workload.left),
    }[workload.mask]
    return lambda: ch.attention(*next(turns), mask=mask)


def numbers(result: Any) -> NDArray[np.float64]:
    return np.asarray(result).astype(np.float64)
