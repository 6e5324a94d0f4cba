"""Measure attention beside its peers, paired in one run, and against what this machine can do at best.

    python benchmarks/run.py                          # everything
    python benchmarks/run.py forward                  # a group, or workloads by name
    python benchmarks/run.py causal-64 --threads 1 2 --peers clearhead torch
    python benchmarks/run.py --list

Results are first checked to agree. Then each repetition runs every peer, and the machine's limit, once, in an order
that turns. Printed are medians, of ratios within repetitions; the JSON file holds every repetition. Ctrl-C prints what
is there. Exit codes: 0; 1 if results differ, 2 for wrong usage, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

import footprint
import machine
import paired
import peers
import show
from clearhead import get_num_threads
from peers import OURS, Peer
from workloads import TOLERANCE, Workload, choose

LIMIT = "limit"  # the name under which the machine's best is measured beside the peers
DEFAULT_FILE = Path("out") / "bench.json"


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if options.list:
        show.workloads()
        return 0
    results: dict[str, Any] = {"machine": machine.describe(), "peers": {}, "threads": {}, "rows": []}
    stopped = False
    try:
        libraries = load(options.peers)
        results["peers"] = {name: {"name": peer.name, "version": peer.version} for name, peer in libraries.items()}
        for threads in options.threads:
            told = {name: peer.set_threads(threads) for name, peer in libraries.items()}
            with show.waiting(f"The machine's limits, {show.threads(threads)}"):
                best = machine.limits(threads)
            results["threads"][str(threads)] = best | {"untold": [n for n, heard in told.items() if not heard]}
            for workload in options.workloads:
                with show.waiting(f"{workload.title}, {show.threads(threads)}"):
                    row = measure(workload, libraries, threads, options.repeats)
                results["rows"].append(row)
                write(results, options.json)
                if row.get("stopped"):
                    raise KeyboardInterrupt
    except KeyboardInterrupt:
        stopped = True
    show.results(results)
    if results["rows"]:
        show.OUT.print(f"\nEvery repetition: {options.json}", soft_wrap=True)
    if stopped:
        show.LOG.print("Stopped before the end.")
        return 130
    return int(any("disagree" in row for row in results["rows"]))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks/run.py", description="Attention beside its peers, paired in one run."
    )
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help="names or groups, see --list (default: all)")
    parser.add_argument("--peers", nargs="+", metavar="PEER", choices=peers.MODULES, default=list(peers.MODULES),
                        help=f"of {', '.join(peers.MODULES)} (default: all)")  # fmt: skip
    parser.add_argument("--threads", nargs="+", type=positive, metavar="N", help="thread counts (default: all cores)")
    parser.add_argument("--repeats", type=positive, metavar="N", default=7, help="repetitions (default: 7)")
    parser.add_argument("--json", type=Path, metavar="FILE", default=DEFAULT_FILE,
                        help=f"where every repetition goes (default: {DEFAULT_FILE})")  # fmt: skip
    parser.add_argument("--list", action="store_true", help="list the workloads, and measure nothing")
    options = parser.parse_args(argv)
    options.threads = options.threads or [get_num_threads()]
    try:
        options.workloads = choose(options.workloads)
        options.json.parent.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return options


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def load(names: list[str]) -> dict[str, Peer]:
    """The peers whose libraries are installed; what is missing is said."""
    found = {}
    for name in sorted(set(names), key=list(peers.MODULES).index):
        try:
            found[name] = peers.load(name)
        except ImportError as error:
            show.LOG.print(f"{name} is left out: {error}")
    if not found:
        raise SystemExit("none of the peers is installed")
    return found


# measuring one workload


def measure(workload: Workload, libraries: dict[str, Peer], threads: int, repeats: int) -> dict[str, Any]:
    """One row of results. Interrupted, it has the repetitions so far, and says ``stopped``."""
    row: dict[str, Any] = {
        "workload": workload.name, "title": workload.title, "measures": workload.measures, "threads": threads,
        "dtype": workload.dtype, "bound": workload.bound, "work": workload.work, "dense_nbytes": workload.dense_nbytes,
        "lacks": {name: why for name, peer in libraries.items() if (why := peer.lacks(workload))},
    }  # fmt: skip
    able = {name: peer for name, peer in libraries.items() if name not in row["lacks"]}
    if workload.measures == "memory":
        return row | {"footprint": {name: footprint.measure(name, workload, threads) for name in able}}
    calls = {name: peer.prepare(workload) for name, peer in able.items()}
    row["difference"] = differences(workload, able, {name: call() for name, call in calls.items()})
    row["disagree"] = [name for name, far in row["difference"].items() if not far <= TOLERANCE[workload.dtype]]
    if row["disagree"]:
        return row  # what is wrong is not timed
    del row["disagree"]
    limit = limit_of(workload, threads)
    try:
        samples = paired.prepare(calls | {LIMIT: limit.run})
        try:
            for _ in range(repeats):
                samples.repeat()
        except KeyboardInterrupt:
            row["stopped"] = True
            if not samples.repetitions:
                raise
    finally:
        limit.close()
    return row | summary(samples, workload.work, limit.work)


def limit_of(workload: Workload, threads: int) -> machine.Limit:
    """What the workload cannot be faster than."""
    if workload.bound == "bytes":
        return machine.Reading(threads)
    return machine.Peak("float64" if workload.dtype == "float64" else "float32", threads)


def differences(workload: Workload, able: dict[str, Peer], results: dict[str, Any]) -> dict[str, float]:
    """norm(difference) / norm(reference) of each result; the reference is naive NumPy where it can, else the last."""
    numbers = {name: able[name].numbers(result) for name, result in results.items()}
    reference = numbers.get("naive", next(reversed(numbers.values())))
    size = float(np.linalg.norm(reference))
    return {name: float(np.linalg.norm(array - reference)) / size for name, array in numbers.items()}


def summary(samples: paired.Samples, work: int, limit_work: int) -> dict[str, Any]:
    """Every repetition, and medians: seconds, work a second, share of the limit, and how many times our time."""
    names = [name for name in samples.subjects if name != LIMIT]
    found: dict[str, Any] = {
        "calls": samples.calls,
        "seconds": samples.seconds,  # per call; those of the limit are for so much work:
        "limit_work": limit_work,
        "median": {name: samples.median(name) for name in names},
        "rate": {name: work / samples.median(name) for name in names},
        "share": {name: work / limit_work * samples.ratio(LIMIT, to=name) for name in names},
    }
    if OURS in names:
        found["times_ours"] = {name: samples.ratio(name, to=OURS) for name in names if name != OURS}
    return found


def write(results: dict[str, Any], file: Path) -> None:
    """Whole or not there: after every row, so that what has been measured is never lost."""
    temporary = file.with_name(f".{file.name}.partial-{os.getpid()}")
    temporary.write_text(json.dumps(results, ensure_ascii=False, indent=1), encoding="utf-8")
    os.replace(temporary, file)


if __name__ == "__main__":
    sys.exit(main())
