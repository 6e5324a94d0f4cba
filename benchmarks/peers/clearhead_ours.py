"""Clearhead: ``clearhead.attention``."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import clearhead as ch
from workload import Workload, every_second

name = "Clearhead"
version = ch.__version__


def set_threads(count: int) -> bool:
    ch.set_num_threads(count)
    return True


def lacks(workload: Workload) -> str | None:
    return None


def prepare(workload: Workload) -> Callable[[], Any]:
    turns = itertools.cycle(workload.arrays())
    call, given = getattr(ch, workload.call), {}
    if workload.mask != "full":
        given["mask"] = _mask(workload)
    if workload.score != "dot":
        given["score"] = _score(workload)
    return lambda: call(*next(turns), **given)


def numbers(result: Any) -> NDArray[np.float64]:
    output = result[0] if isinstance(result, tuple) else result  # with weights, or without
    return np.asarray(output).astype(np.float64)


def _mask(workload: Workload) -> Any:
    match workload.mask, workload.told:
        case "causal", "function":
            return ch.masks.function(lambda batch, head, query, key: key <= query)
        case "causal", _:
            return ch.masks.causal()
        case "window", _:
            return ch.masks.causal() & ch.masks.window(left=workload.left)
        case "documents", _:
            return ch.masks.documents(workload.ids)
        case "random", _:
            return every_second(workload.rows, workload.tokens)
        case "lengths", _:
            return ch.masks.lengths(workload.lengths, workload.lengths)
    raise ValueError(f"no mask for {workload}")


def _score(workload: Workload) -> Any:
    match workload.score, workload.told:
        case "alibi", "function":
            step = -8.0 / workload.heads
            return ch.scores.dot(
                function=lambda score, batch, head, query, key: score - 2.0 ** (step * (head + 1)) * abs(query - key)
            )
        case "alibi", _:
            return ch.scores.dot(alibi=workload.slopes)
        case "additive", _:
            return ch.scores.additive(*workload.learned())
    raise ValueError(f"no score for {workload}")
