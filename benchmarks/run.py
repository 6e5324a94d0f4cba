"""Measure attention beside its peers, paired in one run, and against what this machine can do at best.

    python benchmarks/run.py                          # everything
    python benchmarks/run.py forward                  # a group, or rows by name
    python benchmarks/run.py causal-64 --threads 1 2 --peers clearhead torch
    python benchmarks/run.py --list

Results are first checked. Then each repetition runs every peer, and the machine's limit, once, in an order that turns.
Printed are medians, of ratios within repetitions, and which rows fall short of their targets; the JSON file holds
every repetition. Ctrl-C prints what is there. Exit codes: 0; 1 if a result is wrong, 2 for wrong usage, 130 after
Ctrl-C. A row that falls short is no failure: it is a finding.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

# Before NumPy loads it. Its threads wait for more work for so many cycles, as a power of two: 2 ms. By default they
# take turns with the next peer's threads for more than 100 ms; products take as long either way (measured).
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "22")

import machine
import peers
import show
from clearhead import get_num_threads
from measure import measure
from peers import Peer
from workloads import Row, choose

DEFAULT_FILE = Path("out") / "bench.json"


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if options.list:
        show.workloads()
        return 0
    start = time.monotonic()
    results: dict[str, Any] = {"machine": machine.describe(), "peers": {}, "threads": {}, "rows": []}
    stopped = False
    try:
        libraries = load(options.peers)
        results["peers"] = {name: {"name": peer.name, "version": peer.version} for name, peer in libraries.items()}
        tasks = schedule(options.workloads, options.threads)
        for threads, rows in tasks.items():
            told = {name: peer.set_threads(threads) for name, peer in libraries.items()}
            with show.waiting(f"The machine's limits, {show.threads(threads)}"):
                best = machine.limits(threads)
            results["threads"][str(threads)] = best | {"untold": [n for n, heard in told.items() if not heard]}
            for row in rows:
                done, all_rows = len(results["rows"]), sum(map(len, tasks.values()))
                with show.waiting(f"{done + 1} of {all_rows}: {row.title}, {show.threads(threads)}"):
                    found = measure(row, libraries, threads, options.repeats)
                results["rows"].append(found)
                results["seconds"] = round(time.monotonic() - start, 1)
                write(results, options.json)
                show.done(found, results["peers"])
                if found.get("stopped"):
                    raise KeyboardInterrupt
    except KeyboardInterrupt:
        stopped = True
    show.results(results)
    if results["rows"]:
        show.OUT.print(f"\nEvery repetition: {options.json}", soft_wrap=True)
    if stopped:
        show.LOG.print("Stopped before the end.")
        return 130
    return int(any(found.get("disagree") for found in results["rows"]))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks/run.py", description="Attention beside its peers, paired in one run."
    )
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help="names or groups, see --list (default: all)")
    parser.add_argument("--peers", nargs="+", metavar="PEER", choices=peers.MODULES, default=list(peers.MODULES),
                        help=f"of {', '.join(peers.MODULES)} (default: all)")  # fmt: skip
    parser.add_argument("--threads", nargs="+", type=positive, metavar="N",
                        help="thread counts (default: all cores); rows that say their own keep it")  # fmt: skip
    parser.add_argument("--repeats", type=positive, metavar="N", default=7, help="repetitions (default: 7)")
    parser.add_argument("--json", type=Path, metavar="FILE", default=DEFAULT_FILE,
                        help=f"where every repetition goes (default: {DEFAULT_FILE})")  # fmt: skip
    parser.add_argument("--list", action="store_true", help="list the rows, and measure nothing")
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


def schedule(rows: list[Row], threads: list[int]) -> dict[int, list[Row]]:
    """Which rows are measured on how many threads: their own number, or each of those asked for."""
    counts = sorted({count for row in rows for count in ([row.threads] if row.threads else threads)})
    return {count: [row for row in rows if row.threads == count or (not row.threads and count in threads)]
            for count in counts}  # fmt: skip


def write(results: dict[str, Any], file: Path) -> None:
    """Whole or not there: after every row, so that what has been measured is never lost."""
    temporary = file.with_name(f".{file.name}.partial-{os.getpid()}")
    temporary.write_text(json.dumps(results, ensure_ascii=False, indent=1), encoding="utf-8")
    os.replace(temporary, file)


if __name__ == "__main__":
    sys.exit(main())
