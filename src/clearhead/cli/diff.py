"""``clearhead diff``: what changed between two traces."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clearhead.cli.console import counting, print_json, stdout
from clearhead.cli.words import bracketed

if TYPE_CHECKING:
    from rich.console import Console

    from clearhead.trace import Trace
    from clearhead.trace.diff import Difference

UNITS = {"weights": "shares of a row's weight", "entropy": "nats", "distance": "tokens"}


def diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="A folder that `clearhead trace` wrote.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another, of a model of the same shape.")],
    by: Annotated[
        str, typer.Option("--by", metavar="WHAT", help="weights, or: entropy, sink, distance, previous, self.")
    ] = "weights",
    fail_over: Annotated[
        float | None, typer.Option("--fail-over", metavar="X", min=0.0, help="Exit code 1 if a head changed by more.")
    ] = None,
    top: Annotated[int, typer.Option("--top", metavar="N", min=0, help="Heads shown; 0 shows all.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON, all heads.")] = False,
) -> None:
    """What changed between two traces, head by head, the most changed first.

    By weights, a head's change is the mean over its rows of 1/2 sum |w - w'|: 0 if nothing changed, 1 if everything.
    """
    from clearhead.trace import Trace
    from clearhead.trace.diff import MEASURES, compare

    if by not in ("weights", *MEASURES):
        raise typer.BadParameter(f"{by!r}: weights, or {', '.join(MEASURES)}", param_hint="'--by'")
    one, other = Trace.open(first), Trace.open(second)
    with counting("Comparing", len(one)) as progress:
        found = compare(one, other, by, progress)
    if as_json:
        print_json(found.to_dict())
    else:
        show(stdout(), one, found, top)
    if fail_over is not None and (found.largest > fail_over or found.missing):
        worst = found.changes[0]
        where = f"{worst.kind} layer {worst.layer}, head {worst.head}"
        why = (
            f"{where} changed by {number(worst.change)}, more than {fail_over:g}"
            if found.largest > fail_over
            else f"{len(found.missing)} attentions are in one trace only"
        )
        typer.echo(f"clearhead: {why}", err=True)
        raise typer.Exit(1)


def show(console: Console, one: Trace, found: Difference, top: int) -> None:
    """The most changed heads, and what is in one trace only."""
    from rich.table import Table

    shown = found.changes[: top or None]
    several = len(one.kinds) > 1
    table = Table(box=None, padding=(0, 1), header_style="bold")
    headings = [*(["attention"] if several else []), "layer", "head", "change"]
    headings += ["most", "in row", "of"] if found.by == "weights" else []
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("attention", "of") else "right")
    for change in shown:
        cells = [*([change.kind] if several else []), str(change.layer), str(change.head), number(change.change)]
        if change.row is not None and change.largest is not None:
            token = one.side(change.kind, "query", change.text or 0).text[change.row]
            cells += [number(change.largest), f"{change.row:,}", bracketed(token)]
        table.add_row(*cells)
    unit = UNITS.get(found.by, "weight")
    console.print(f"{len(found.changes)} heads compared by {found.by}, changes in {unit}\n")
    console.print(table)
    if rest := found.changes[len(shown) :]:
        console.print(f"\n... and {len(rest)} more, none above {number(rest[0].change)} (--top 0 shows all)")
    for what in found.missing:
        console.print(f"Not compared: {what}", soft_wrap=True)


def number(value: float) -> str:
    """Four digits, or how small it is.

    >>> number(0.12345), number(0.0), number(3e-7)
    ('0.1235', '0', '3e-07')
    """
    return "0" if value == 0 else f"{value:.4f}" if value >= 1e-4 else f"{value:.0e}"
