"""Time several things against each other on a machine that is never quiet.

Each repetition runs every subject once, in an order that turns by one from repetition to repetition, so that whatever
disturbs the machine meets all of them alike. What is reported is the median of the ratios within repetitions. A
subject that takes very long takes part in the first few repetitions alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

SHORTEST = 0.05  # seconds of a sample: shorter calls are repeated until it is full
BUDGET = 8.0  # seconds that a subject may take in all, once it has
FEWEST = 3  # repetitions
BEST_OF = 4  # calls of a subject of which the fastest counts


class Samples:
    """Seconds per call of each subject, one number for each repetition that it takes part in: the first ``most``.

    Of a repetition's calls that is the mean, or for subjects in ``best`` the least.
    """

    def __init__(
        self,
        subjects: dict[str, Callable[[], Any]],
        calls: dict[str, int],
        most: dict[str, int],
        best: frozenset[str] = frozenset(),
    ) -> None:
        self.subjects, self.calls, self.most, self.best = subjects, calls, most, best
        self.seconds: dict[str, list[float]] = {name: [] for name in subjects}

    def repeat(self) -> None:
        """One more repetition. If it is interrupted, nothing of it is kept."""
        done = self.repetitions
        names = [name for name in self.subjects if done < self.most[name]]
        turn = done % max(1, len(names))
        once = {}
        for name in names[turn:] + names[:turn]:
            settle()
            if name in self.best:
                once[name] = min(_per_call(self.subjects[name], 1) for _ in range(self.calls[name]))
            else:
                once[name] = _per_call(self.subjects[name], self.calls[name])
        for name, seconds in once.items():
            self.seconds[name].append(seconds)

    @property
    def repetitions(self) -> int:
        return max(map(len, self.seconds.values()))

    def median(self, name: str) -> float:
        """Seconds per call."""
        return statistics.median(self.seconds[name])

    def ratio(self, name: str, to: str) -> float:
        """How many times as long as ``to`` it takes: the median over the repetitions that have both."""
        return statistics.median(a / b for a, b in zip(self.seconds[name], self.seconds[to], strict=False))


def prepare(subjects: dict[str, Callable[[], Any]], repeats: int, best: frozenset[str] = frozenset()) -> Samples:
    """Samples without a repetition yet: each subject has run, and it is known how often it fits into a sample."""
    calls, most = {}, {}
    for name, call in subjects.items():
        settle()
        once = _per_call(call, 1)
        if once < BUDGET / repeats:  # it will be repeated, and what happens only once should not count
            once = min(once, _per_call(call, 1))
        if once < SHORTEST:
            once = _per_call(call, max(1, int(SHORTEST / 4 / once)))
        calls[name] = BEST_OF if name in best else max(1, round(SHORTEST / once))
        most[name] = min(repeats, max(FEWEST, int(BUDGET / max(once, SHORTEST))))
    return Samples(subjects, calls, most, best)


def settle() -> None:
    """Wait until idle threads of the subject before have stopped spinning, as far as they ever do.

    After a call torch's spin for 7 ms and jax's for 10 to 20 (processor time of this process, measured).
    """
    for _ in range(25):
        before = time.process_time()
        time.sleep(0.002)
        if time.process_time() - before < 0.0005:
            return


def _per_call(call: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls
