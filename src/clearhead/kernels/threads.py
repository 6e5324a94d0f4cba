"""Work over plain threads: kernels hold no GIL, so threads of Python are enough, and calls from several are safe.

What is computed never depends on how it is shared out: an item's result is the same in any thread and any order.
"""

from __future__ import annotations

import itertools
import operator
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

_chosen: int | None = None
_pool: ThreadPoolExecutor | None = None
_lock = threading.Lock()


def get_num_threads() -> int:
    """How many threads a call uses: as set, else CLEARHEAD_NUM_THREADS, else the processors this process may use."""
    if _chosen is not None:
        return _chosen
    given = os.environ.get("CLEARHEAD_NUM_THREADS", "")
    if given:
        return _positive(given, "CLEARHEAD_NUM_THREADS")
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def set_num_threads(count: int | None) -> None:
    """Use ``count`` threads from now on; None: the default again."""
    global _chosen
    _chosen = None if count is None else _positive(count, "count")


def share(work: Callable[[int, int], Iterable[None] | None], items: int, grain: int = 1) -> None:
    """Call ``work(first, last)`` until all of 0 ... items-1 are done, ``grain`` or fewer at a time, on several threads.

    The caller's thread works too. If work raises, or the user interrupts, no new share is begun, those under way
    are waited for, and the error comes out here. Work that takes long may be a generator: between any two of its steps
    it may be the last one.
    """
    shares = -(-items // grain)
    helpers = min(get_num_threads(), shares) - 1 if shares > 1 else 0
    if helpers <= 0:
        for first in range(0, items, grain):
            for _ in work(first, min(first + grain, items)) or ():
                pass
        return
    turn, stop = itertools.count(), threading.Event()
    # As many shares for each thread, all of a size: where work is even, none ends later than the others.
    shares = min(items, -(-shares // (helpers + 1)) * (helpers + 1))

    def take() -> None:
        try:
            # next() on a count is one step under the GIL: no two threads get the same turn.
            while (n := next(turn)) < shares and not stop.is_set():
                for _ in work(items * n // shares, items * (n + 1) // shares) or ():
                    if stop.is_set():
                        return
        except BaseException:
            stop.set()
            raise

    running: list[Future[None]] = [_workers(helpers).submit(take) for _ in range(helpers)]
    try:
        take()
    finally:
        stop.set() if any(f.done() and f.exception() for f in running) else None
        error = _wait(running, stop)
    if error is not None:
        raise error


def _wait(running: list[Future[None]], stop: threading.Event) -> BaseException | None:
    """The error of one of them, if any; those that have not begun are not waited for: no work is left."""
    error: BaseException | None = None
    for future in running:
        while not future.cancel():
            try:
                error = future.exception() or error
                break
            except KeyboardInterrupt as interrupt:
                stop.set()
                error = interrupt
    return error


def _workers(helpers: int) -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None or _pool._max_workers < helpers:
            _pool = ThreadPoolExecutor(max(helpers, get_num_threads() - 1), thread_name_prefix="clearhead")
        return _pool


def _forget() -> None:
    """A forked child has none of its parent's threads."""
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


def _positive(count: int | str, name: str) -> int:
    try:
        number = int(count) if isinstance(count, str) else operator.index(count)
    except (TypeError, ValueError):
        number = 0
    if number < 1:
        raise ValueError(f"{name} must be a whole number of threads, 1 or more, got {count!r}")
    return number


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
