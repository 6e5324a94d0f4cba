"""Results on the terminal: what the machine is, tables of times, memory and starts, and which targets are met."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rich.console import Console
from rich.table import Table

from peers import OURS
from targets import written
from workload import Workload
from workloads import choose

# Wide enough for the tables where output goes to a file.
OUT = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)
LOG = Console(stderr=True, highlight=False, markup=False)

Results = dict[str, Any]


def results(found: Results) -> None:
    """Everything that a run has measured so far."""
    machine(found)
    for measured, table in (("time", times), ("memory", memory), ("model", models), ("start", starts)):
        rows = [row for row in found["rows"] if row["measures"] == measured]
        if rows:
            OUT.print()
            OUT.print(table(rows, found["peers"]))
    for note in notes(found["rows"], found["peers"]):
        OUT.print(note, soft_wrap=True)
    if not found["rows"]:
        return
    OUT.print()
    OUT.print(targets(found["rows"], found["peers"]))
    OUT.print()
    OUT.print(verdict(found["rows"], found["peers"]), soft_wrap=True)


def machine(found: Results) -> None:
    """The processor, every version, the BLAS of naive NumPy, and the limits that were measured."""
    facts = found["machine"]
    OUT.print(f"{facts['processor']} ({facts['core']}, {facts['vectors']}), {facts['cores']} cores, {facts['system']}")
    OUT.print(f"Python {facts['python']}, {versions(found)}")
    OUT.print(blas(found), soft_wrap=True)
    for count, limit in found["threads"].items():
        OUT.print(
            f"{threads(count)}: {limit['float32'] / 1e9:.0f} GFLOP/s float32, "
            f"{limit['float64'] / 1e9:.0f} float64, reads {limit['bandwidth'] / 1e9:.1f} GB/s at best"
            + "".join(f"; {found['peers'][name]['name']} keeps its own number of threads" for name in limit["untold"])
        )


def versions(found: Results) -> str:
    """``clearhead 0.1.0, numpy 2.4.6, ...``: what computes, and the peers."""
    known = dict(found["machine"]["versions"])
    for name, peer in found["peers"].items():
        if peer["version"] not in known.values():
            known[name] = peer["version"]
    return ", ".join(f"{name} {version}" for name, version in known.items())


def blas(found: Results) -> str:
    """Which BLAS, on which of its cores, naive NumPy ran with, and the variables that were set to steer it."""
    facts = found["machine"]["blas"]
    said = [facts["name"], facts["version"], *([f"with its {facts['core']} kernels"] if "core" in facts else [])]
    return f"NumPy's BLAS: {' '.join(said)}" + "".join(f", {k}={v}" for k, v in facts.items() if k.isupper())


# tables


def times(rows: list[Results], about: Results) -> Table:
    """Milliseconds of the first peer, also as work a second and as a share of the machine's limit; the others as
    multiples of ours."""
    main = OURS if OURS in about else next(iter(about))
    others = [name for name in about if name != main]
    table = _table("heads × tokens × dim", "threads", f"{main}, ms", "work", "of limit", *others)
    for row in rows:
        cells = [row["title"], str(row["threads"])]
        if "median" in row:
            cells += [_number(row["median"].get(main), 1e3, 3), rate(row, main), _number(row["share"].get(main))]
            cells += [beside_ours(row, name) for name in others]
        table.add_row(*cells)
    return table


def beside_ours(row: Results, name: str) -> str:
    """How many times our time a peer takes, or where we were not measured, its milliseconds."""
    if "times_ours" in row:
        return f"{row['times_ours'][name]:.2f}×" if name in row["times_ours"] else "–"
    return f"{1e3 * row['median'][name]:.2f} ms" if name in row.get("median", {}) else "–"


def notes(rows: list[Results], about: Results) -> list[str]:
    """What is to be said of rows and peers: wrong results, fewer repetitions, and why one is left out."""
    found = []
    for row in rows:
        far = ", ".join(f"{about[n]['name']} errs by {row['difference'][n]:.1e}" for n in row.get("disagree", ()))
        found += [f"{row['title']}: {far}; what is wrong is not timed"] if far else []
        repetitions = {name: len(took) for name, took in row.get("seconds", {}).items() if name in about}
        most = max(repetitions.values(), default=0)
        slow = [f"{about[n]['name']} in {count}" for n, count in repetitions.items() if count < most]
        found += [f"{row['title']}: of {most} repetitions, {', '.join(slow)}"] if slow else []
    reasons: dict[str, list[str]] = {}
    for row in rows:
        for name, why in row.get("lacks", {}).items():
            reasons.setdefault(f"{about[name]['name']}: {why}", []).append(row["title"])
    return found + [f"{why} ({'; '.join(titles)})" for why, titles in reasons.items()]


def rate(row: Results, name: str) -> str:
    """What a peer got done: ``182 GFLOP/s``, or ``14.2 GB/s`` of keys and values."""
    if name not in row["rate"]:
        return "–"
    speed, unit = row["rate"][name], "FLOP/s" if row["bound"] == "flops" else "B/s"
    if speed < 1e9:
        return f"{speed / 1e6:.1f} M{unit}"
    return f"{speed / 1e9:.0f} G{unit}" if row["bound"] == "flops" else f"{speed / 1e9:.1f} G{unit}"


def memory(rows: list[Results], about: Results) -> Table:
    """Peak memory of one call beyond its inputs and outputs."""
    table = _table("memory beyond inputs and outputs, MB", "threads", *about)
    for row in rows:
        cells = [row["title"], str(row["threads"])]
        for name in about:
            found = row["footprint"].get(name, {"error": row["lacks"].get(name, "–")})
            cells.append(found["error"] if "error" in found else _number(found["bytes"], 1e-6, 1))
        table.add_row(*cells)
    return table


def starts(rows: list[Results], about: Results) -> Table:
    """Seconds in a new process."""
    table = _table("in a new process", "s", "of that, over")
    for row in rows:
        seconds = row["median"]
        table.add_row(row["title"], _number(seconds[OURS], decimals=3), _number(seconds.get("beside"), decimals=3))
    return table


def models(rows: list[Results], about: Results) -> Table:
    """Seconds of whole models, and of their attention alone."""
    table = _table("whole models", "threads", "s", "with torch's", "attention alone, s", "torch's")
    for row in rows:
        table.add_row(row["title"], str(row["threads"]), *model(row))
    return table


def model(row: Results) -> list[str]:
    """Ours, how many times as long with torch's attention; and both of attention alone, where that is known."""
    if not row["median"]:
        return ["–"] * 4
    own = row["median_attention"][OURS]
    alone = [_number(own, decimals=3), f"{row['figures']['attention']:.2f}×"] if own else ["–", "–"]
    return [_number(row["median"][OURS], decimals=3), f"{row['times_ours']['torch']:.2f}×", *alone]


def targets(rows: list[Results], about: Results) -> Table:
    """Each row with its target, what it reached, and what would be reached at the machine's limit."""
    table = _table("work", "threads", "target", "reached", "at the limit", "")
    for column in (2, 5):
        table.columns[column].justify = "left"
    for row in rows:
        for target in row["targets"]:
            title, reached, short = judged(target, about)
            table.add_row(row["title"], str(row["threads"]), title, reached, at_limit(target), short)
    return table


def at_limit(target: Results) -> str:
    """The figure of a program that is as fast as the machine; empty where that is no question."""
    return "" if target["limit"] is None else written(target["figure"], target["limit"])


def judged(target: Results, about: Results) -> tuple[str, str, str]:
    """A target, the figure that was reached, and whether that falls short."""
    if target["reached"] is None:
        return target["target"], "–", "not measured"
    whose = f" ({about[target['whose']]['name']})" if target["whose"] else ""
    return target["target"], written(target["figure"], target["reached"]) + whose, "short" if target["short"] else ""


def verdict(rows: list[Results], about: Results) -> str:
    """How many targets are met, and the names of the rows that fall short."""
    judgements = [(row, target) for row in rows for target in row["targets"]]
    lines = [verdict_in_short(rows)]
    for words, chosen in (
        ("Short", [(row, target) for row, target in judgements if target["short"]]),
        ("Not measured", [(row, target) for row, target in judgements if target["reached"] is None]),
    ):
        for row, target in chosen:
            title, reached, _ = judged(target, about)
            best = f"; {at_limit(target)} at this machine's limit" if at_limit(target) else ""
            lines.append(f"{words}: {row['workload']}, {threads(row['threads'])}: {reached}, should be {title}{best}")
    return "\n".join(lines)


def verdict_in_short(rows: list[Results]) -> str:
    """``29 of 36 targets are met.``"""
    judgements = [target for row in rows for target in row["targets"]]
    met = sum(target["reached"] is not None and not target["short"] for target in judgements)
    return f"{met} of {len(judgements)} targets are met."


def workloads() -> None:
    """What can be measured."""
    table = _table("name", "groups", "what", "targets")
    for column in table.columns:
        column.justify = "left"
    for row in choose([]):
        alone = f", {threads(row.threads)}" if isinstance(row, Workload) and row.threads else ""
        wanted = "; ".join(target.title for target in row.targets)
        table.add_row(row.name, ", ".join(row.groups), row.title + alone, wanted)
    OUT.print(table)


# progress


def done(row: Results, about: Results) -> None:
    """One line on what a row has reached, as soon as it has."""
    ours = row.get("median", {}).get(OURS)
    took = "" if ours is None else f" {1e3 * ours:,.3f} ms;"
    reached = "; ".join(" ".join(filter(None, (f"{now}, {title}:", short or "met"))) for title, now, short in (
        judged(target, about) for target in row["targets"]
    ))  # fmt: skip
    LOG.print(f"{row['title']}, {threads(row['threads'])}:{took} {reached}", soft_wrap=True)


def waiting(what: str) -> AbstractContextManager[Any]:
    """Say on the standard error what is going on: a spinner, or one line where there is no terminal."""
    if LOG.is_terminal:
        return LOG.status(what)
    LOG.print(f"{what} ...", soft_wrap=True)
    return nullcontext()


def threads(count: int | str) -> str:
    """``1 thread``, ``2 threads``."""
    return f"{count} thread{'s' * (str(count) != '1')}"


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="bold")
    table.add_column(first, no_wrap=True)
    for heading in others:
        table.add_column(heading, justify="right")
    return table


def _number(value: float | None, unit: float = 1.0, decimals: int = 2) -> str:
    return "–" if value is None else f"{value * unit:,.{decimals}f}"
