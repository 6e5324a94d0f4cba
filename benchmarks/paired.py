"""Time several things against each other on a machine that is never quiet.

Each repetition runs every subject once, in an order that turns by one from repetition to repetition, so that whatever
disturbs the machine meets all of them alike. What is reported is the median of the ratios within repetitions.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

SHORTEST = 0.05  # seconds of a sample: shorter calls are repeated until it is full
PAUSE = 0.003  # seconds between subjects: idle threads of the one before have stopped spinning by then


class Samples:
    """Seconds per call of each subject, one number for each repetition."""

    def __init__(self, subjects: dict[str, Callable[[], Any]], calls: dict[str, int]) -> None:
        self.subjects, self.calls = subjects, calls
        self.seconds: dict[str, list[float]] = {name: [] for name in subjects}

    def repeat(self) -> None:
        """One more repetition. If it is interrupted, nothing of it is kept."""
        names = list(self.subjects)
        turn = len(self.seconds[names[0]]) % len(names)
        once = {}
        for name in names[turn:] + names[:turn]:
            time.sleep(PAUSE)
            once[name] = _per_call(self.subjects[name], self.calls[name])
        for name, seconds in once.items():
            self.seconds[name].append(seconds)

    @property
    def repetitions(self) -> int:
        return min(map(len, self.seconds.values()))

    def median(self, name: str) -> float:
        """Seconds per call."""
        return statistics.median(self.seconds[name])

    def ratio(self, name: str, to: str) -> float:
        """How many times as long as ``to`` it takes: the median over repetitions."""
        return statistics.median(a / b for a, b in zip(self.seconds[name], self.seconds[to], strict=True))


def prepare(subjects: dict[str, Callable[[], Any]]) -> Samples:
    """Samples without a repetition yet: each subject has run, and it is known how often it fits into a sample."""
    calls = {}
    for name, call in subjects.items():
        once = min(_per_call(call, 1) for _ in range(2))
        if once < SHORTEST:
            once = _per_call(call, max(1, int(SHORTEST / 4 / once)))
        calls[name] = max(1, round(SHORTEST / once))
    return Samples(subjects, calls)


def _per_call(call: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls
