"""One row of results: each kind of row has its way of being measured.

To measure another kind of thing, write a function like ``timed`` and name it in KINDS.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import footprint
import machine
import models
import paired
import reference
import startup
from peers import OURS, Peer
from targets import judge
from workload import Workload
from workloads import Row

LIMIT = "limit"  # the name under which the machine's best is measured beside the peers
BESIDE = "beside"  # and other work of ours

Found = dict[str, Any]


def measure(row: Row, libraries: dict[str, Peer], threads: int, repeats: int) -> Found:
    """A row of the table as a row of results. Interrupted, it has the repetitions so far, and says ``stopped``."""
    about = {
        "workload": row.name, "title": row.title, "measures": row.measures, "threads": threads,
        "headline": row.headline,
    }  # fmt: skip
    found = about | KINDS[row.measures](row, libraries, threads, repeats)
    return found | {"targets": judge(row.targets, found)}


def timed(workload: Workload, libraries: dict[str, Peer], threads: int, repeats: int) -> Found:
    """Seconds a call of each peer, of the machine's limit, and of what the row is set beside, in turn."""
    able, found = _able(workload, libraries)
    calls = {name: peer.prepare(workload) for name, peer in able.items()}
    far = {
        name: reference.difference(workload, able[name].numbers(call())) for name, call in calls.items()
    }  # what is wrong is not timed:
    found |= {"difference": far}
    wrong = [name for name, distance in far.items() if not distance <= reference.TOLERANCE[workload.dtype]]
    if wrong:
        found["disagree"] = wrong
        calls = {name: call for name, call in calls.items() if name not in wrong}
        if not calls:
            return found
    limit = limit_of(workload, threads)
    others: dict[str, Callable[[], Any]] = {LIMIT: limit.run}
    if workload.beside is not None and OURS in calls:
        others[BESIDE] = libraries[OURS].prepare(workload.beside)
    try:
        samples = paired.prepare(calls | others, repeats, best=frozenset({LIMIT}))
        try:
            for _ in range(repeats):
                samples.repeat()
        except KeyboardInterrupt:
            found["stopped"] = True
            if not samples.repetitions:
                raise
    finally:
        limit.close()
    return found | summary(workload, list(calls), samples, limit.work)


def weighed(workload: Workload, libraries: dict[str, Peer], threads: int, repeats: int) -> Found:
    """Peak memory of one call, in a process of its own; beside another size, per token."""
    able, found = _able(workload, libraries)
    weights = {name: footprint.measure(name, workload, threads) for name in able}
    found |= {"footprint": weights, "figures": {}}
    ours = weights.get(OURS, {}).get("bytes")
    if ours is not None:
        found["figures"]["bytes"] = ours
        if workload.beside is not None:
            other = found["beside"] = footprint.measure(OURS, workload.beside, threads)
            if "bytes" in other:
                found["figures"]["beside"] = (ours / workload.tokens) / (other["bytes"] / workload.beside.tokens)
    return found


def started(start: startup.Start, libraries: dict[str, Peer], threads: int, repeats: int) -> Found:
    """Seconds in a new process."""
    return startup.measure(start, repeats)


def modelled(run: models.ModelRun, libraries: dict[str, Peer], threads: int, repeats: int) -> Found:
    """Seconds of a whole model, in a process of its own."""
    if OURS not in libraries:
        return {"median": {}}
    return models.measure(run, threads, repeats)


KINDS: dict[str, Callable[..., Found]] = {"time": timed, "memory": weighed, "start": started, "model": modelled}


def limit_of(workload: Workload, threads: int) -> machine.Limit:
    """What the workload cannot be faster than."""
    if workload.bound == "bytes":
        return machine.Reading(threads)
    return machine.Peak("float64" if workload.dtype == "float64" else "float32", threads)


def summary(workload: Workload, names: list[str], samples: paired.Samples, limit_work: int) -> Found:
    """Every repetition, and medians: seconds, work a second, share of the limit, and how many times our time."""
    work = workload.work
    found: Found = {
        "calls": samples.calls,
        "seconds": samples.seconds,  # per call; those of the limit are for so much work:
        "limit_work": limit_work,
        "median": {name: samples.median(name) for name in names},
        "rate": {name: work / samples.median(name) for name in names},
        "share": {name: work / limit_work * samples.ratio(LIMIT, to=name) for name in names},
        "figures": {},
    }
    if OURS in names:
        found["times_ours"] = {name: samples.ratio(name, to=OURS) for name in names if name != OURS}
        found["figures"][LIMIT] = found["share"][OURS]
        if workload.beside is not None:
            arithmetic = workload.work / workload.beside.work
            found["median"][BESIDE] = samples.median(BESIDE)
            found["beside"] = {"title": workload.beside.title, "arithmetic": arithmetic}
            found["figures"][BESIDE] = samples.ratio(OURS, to=BESIDE) / arithmetic
    return found


def _able(workload: Workload, libraries: dict[str, Peer]) -> tuple[dict[str, Peer], Found]:
    """The peers that take part and can, and what is said of the row and of those that cannot."""
    asked = {
        name: peer
        for name, peer in libraries.items()
        if name == OURS or workload.peers is None or name in workload.peers
    }
    lacks = {name: why for name, peer in asked.items() if (why := peer.lacks(workload))}
    about = {
        "dtype": workload.dtype, "bound": workload.bound, "work": workload.work, "dense_nbytes": workload.dense_nbytes,
        "lacks": lacks,
    }  # fmt: skip
    return {name: peer for name, peer in asked.items() if name not in lacks}, about
