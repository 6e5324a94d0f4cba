"""``clearhead check``: is a trace what it says?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clearhead.cli.console import print_json, stdout, waiting
from clearhead.cli.words import together

if TYPE_CHECKING:
    from rich.console import Console

    from clearhead.trace import Checks


def check(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A folder that `clearhead trace` wrote.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Look at rows of every attention: do they sum to 1, is nothing hidden seen? Exit code 1 if a check fails."""
    from clearhead.trace import Trace

    found = Trace.open(trace)
    with waiting("Checking"):
        checks = found.check()
    if as_json:
        print_json({"passed": checks.passed, **asdict(checks)})
    else:
        show(stdout(), checks, sum(site.kept == "measures" for site in found.sites))
    if not checks.passed:
        raise typer.Exit(1)


def show(console: Console, checks: Checks, measured: int = 0) -> None:
    """A line for each attention, and the outcome. ``measured`` : of how many measures alone are kept."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 1), header_style="bold")
    for heading in ("attention", "layer", "dtype", "rows", "sums off by", "hidden weight", "output off by"):
        table.add_column(heading, justify="left" if heading == "attention" else "right")
    for site in checks.sites:
        sums = Text(f"{site.row_sum:.1e}", style="" if site.row_sum <= 1e-5 else "bold red")
        hidden = Text(f"{site.hidden:.1e}" if site.hidden else "0", style="" if site.hidden == 0 else "bold red")
        output = "" if site.output is None else f"{site.output:.1e}"
        table.add_row(site.kind, str(site.layer), site.dtype, f"{site.rows:,}", sums, hidden, output)
    console.print(table)
    rows = sum(site.rows for site in checks.sites)
    console.print(
        f"\n{rows:,} rows of {len(checks.sites)} attentions looked at. Sums may be off by 1e-5; hidden keys have no "
        f"weight; outputs were compared with the model's own when the trace was recorded."
    )
    if measured:
        console.print(
            f"Of {measured} attention{'s' * (measured != 1)} measures alone are kept: rows were looked at when the "
            f"trace was recorded, now only what keys received."
        )
    for what in together(checks.missing):
        console.print(f"Not recorded: {what}", soft_wrap=True)
    console.print("passed" if checks.passed else "FAILED", style="bold green" if checks.passed else "bold red")
