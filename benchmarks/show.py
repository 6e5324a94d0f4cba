"""Results on the terminal: what the machine is, a table of times, and one of memory."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rich.console import Console
from rich.table import Table

from peers import OURS
from workloads import WORKLOADS

# Wide enough for the tables where output goes to a file.
OUT = Console(width=None if sys.stdout.isatty() else 132, highlight=False, markup=False)
LOG = Console(stderr=True, highlight=False, markup=False)

Results = dict[str, Any]


def results(found: Results) -> None:
    """Everything that a run has measured so far."""
    machine(found)
    for measured, table in (("time", times), ("memory", memory)):
        rows = [row for row in found["rows"] if row["measures"] == measured]
        if rows:
            OUT.print()
            OUT.print(table(rows, found["peers"]))


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


def times(rows: list[Results], about: Results) -> Table:
    """Milliseconds; ours also as work a second, and as a share of the machine's limit; peers as multiples of ours."""
    main = OURS if OURS in about else next(iter(about))
    others = [name for name in about if name != main]
    table = Table(box=None, padding=(0, 1), header_style="bold", caption_justify="left")
    table.add_column("heads × tokens × dim", no_wrap=True)
    for heading in ("threads", f"{about[main]['name']}, ms", "work", "of limit"):
        table.add_column(heading, justify="right")
    for name in others:
        table.add_column(f"{about[name]['name']}, ms", justify="right")
        if main == OURS:
            table.add_column("times", justify="right")
    for row in rows:
        cells = [row["title"], str(row["threads"])]
        if "disagree" in row:
            cells.append("results differ: " + ", ".join(f"{n} by {row['difference'][n]:.1e}" for n in row["disagree"]))
            table.add_row(*cells)
            continue
        cells.append(_number(row["median"].get(main), 1e3))
        cells.append(rate(row, main))
        cells.append(_number(row["share"].get(main)))
        for name in others:
            cells.append(_number(row["median"].get(name), 1e3))
            if main == OURS:
                cells.append(_number(row["times_ours"].get(name)))
        table.add_row(*cells)
    table.caption = "\n".join(
        f"{about[name]['name']} is left out at {row['title']}: {why}"
        for row in rows
        for name, why in row["lacks"].items()
    )
    return table


def rate(row: Results, name: str) -> str:
    """What a peer got done: ``182 GFLOP/s``, or ``14.2 GB/s`` of keys and values."""
    if name not in row["rate"]:
        return "–"
    return (
        f"{row['rate'][name] / 1e9:.0f} GFLOP/s" if row["bound"] == "flops" else f"{row['rate'][name] / 1e9:.1f} GB/s"
    )


def memory(rows: list[Results], about: Results) -> Table:
    """Peak memory of one call beyond its inputs and outputs."""
    table = Table(box=None, padding=(0, 1), header_style="bold")
    table.add_column("peak memory beyond inputs and outputs, MB")
    for heading in ("threads", *(peer["name"] for peer in about.values())):
        table.add_column(heading, justify="right")
    for row in rows:
        cells = [row["title"], str(row["threads"])]
        for name in about:
            found = row["footprint"].get(name, {"error": row["lacks"].get(name, "")})
            cells.append(found["error"] if "error" in found else _number(found["bytes"], 1e-6, 1))
        table.add_row(*cells)
    return table


def workloads() -> None:
    """What can be measured."""
    table = Table(box=None, padding=(0, 1), header_style="bold")
    for heading in ("name", "groups", "heads × tokens × dim", "measures", "work"):
        table.add_column(heading, justify="right" if heading == "work" else "left")
    for w in WORKLOADS:
        table.add_row(
            w.name,
            ", ".join(w.groups),
            w.title,
            w.measures,
            f"{w.work / 1e9:,.2f} {'GFLOP' if w.bound == 'flops' else 'GB'}",
        )
    OUT.print(table)


def threads(count: int | str) -> str:
    """``1 thread``, ``2 threads``."""
    return f"{count} thread{'s' * (str(count) != '1')}"


def waiting(what: str) -> AbstractContextManager[Any]:
    """Say on the standard error what is going on: a spinner, or one line where there is no terminal."""
    if LOG.is_terminal:
        return LOG.status(what)
    LOG.print(f"{what} ...", soft_wrap=True)
    return nullcontext()


def _number(value: float | None, unit: float = 1.0, decimals: int = 2) -> str:
    return "–" if value is None else f"{value * unit:,.{decimals}f}"
