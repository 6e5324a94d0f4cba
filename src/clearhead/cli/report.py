"""``clearhead report``: what every head of a trace does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli.console import counting, print_json, stdout

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from clearhead.trace import Report, Trace
    from clearhead.trace.report import Head, Strongest

CONTEXT = 5  # tokens shown before a query
LEAST = 0.005  # beside the heaviest, weights that would be printed as 0.00 are left out

COLUMNS = {  # heading and decimals of each measure
    "entropy": ("entropy (nats)", 3),
    "sink": ("first token", 3),
    "distance": ("distance (tokens)", 1),
    "previous": ("previous token", 3),
    "self_": ("itself", 3),
}
STANDS_FOR = {"broad": "entropy", "sink": "sink", "far": "distance", "previous": "previous", "self": "self_"}


def report(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A folder that `clearhead trace` wrote.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """What every head of a trace does, in five numbers, and the strongest head of each kind as text."""
    from clearhead.trace import Trace

    found = measure(Trace.open(trace))
    if as_json:
        print_json(found.to_dict())
        return
    console = stdout()
    console.print(f"{found.trace.model.name}, {len(found.trace.tokens):,} tokens, {len(found.heads)} heads")
    console.print("Means over all tokens, but the first for the previous token: it has none.\n")
    show_heads(console, found)
    console.print()
    show_strongest(console, found)
    best = found.strongest[-2].head
    console.print(f"\nNext: clearhead plot {trace} --layer {best.layer} --head {best.head} -o head.png", soft_wrap=True)


def measure(trace: Trace) -> Report:
    """The report of a trace, with progress shown."""
    from clearhead.trace import summarize

    with counting("Measuring", len(trace)) as progress:
        return summarize(trace, progress)


def show_heads(console: Console, found: Report) -> None:
    """A table with a line for each head; the strongest of each kind in bold."""
    from rich.text import Text

    table = _table("layer", "head")
    peaks = {(strongest.head, STANDS_FOR[strongest.kind]) for strongest in found.strongest}
    for head in found.heads:
        cells = [Text(_number(head, name), style="bold reverse" if (head, name) in peaks else "") for name in COLUMNS]
        table.add_row(str(head.layer), str(head.head), *cells)
    console.print(table)


def show_layers(console: Console, found: Report) -> None:
    """A table with a line for each layer: the mean of its heads."""
    table = _table("layer", "heads")
    for layer in found.trace.layers:
        heads = [head for head in found.heads if head.layer == layer]
        means = {name: sum(getattr(head, name) for head in heads) / len(heads) for name in COLUMNS}
        cells = [f"{means[name]:,.{decimals}f}" for name, (_, decimals) in COLUMNS.items()]
        table.add_row(str(layer), str(len(heads)), *cells)
    console.print(table)


def show_strongest(console: Console, found: Report) -> None:
    """The strongest head of each kind, with some of its rows as text."""
    from clearhead.trace.report import KINDS

    for strongest in found.strongest:
        head = strongest.head
        console.print(
            f"{strongest.kind:9} layer {head.layer}, head {head.head}: {KINDS[strongest.kind]}, {_value(strongest)}",
            style="bold",
            soft_wrap=True,
        )
        for example in strongest.examples:
            console.print(_line(found.trace, example), soft_wrap=True)


def _value(strongest: Strongest) -> str:
    unit = {"broad": " nats", "far": " tokens"}.get(strongest.kind, " of its weight")
    return f"{strongest.value:,.2f}{unit}"


def _line(trace: Trace, example: Any) -> Text:
    """``  1,024  ... the words before [it]  ->  [token] 0.93  [other] 0.03``"""
    from rich.text import Text

    before = "".join(trace.tokens[max(0, example.query - CONTEXT) : example.query])
    line = Text(f"  {example.query:>6,}  ")
    line.append("…" + _flat(before), style="dim")
    line.append(_bracketed(example.token), style="bold")
    line.append("  →  ")
    for place, (key, token, weight) in enumerate(example.keys):
        if place > 0 and weight < LEAST:
            break
        line.append(_bracketed(token))
        line.append(f" {weight:.2f}" if weight >= LEAST else f" {weight:.1g}")
        line.append(f" at {key:,}   ", style="dim")
    return line


def _bracketed(token: str) -> str:
    return f"⟨{_flat(token)}⟩"


def _flat(text: str) -> str:
    """A piece of text on one line, with nothing in it that could move a terminal's cursor."""
    text = text.replace("\n", "⏎").replace("\t", "⇥")
    return "".join(character if character.isprintable() else "·" for character in text)


def _number(head: Head, name: str) -> str:
    return f"{getattr(head, name):,.{COLUMNS[name][1]}f}"


def _table(*first: str) -> Any:
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), header_style="bold")
    for heading in (*first, *(heading for heading, _ in COLUMNS.values())):
        table.add_column(heading, justify="right", no_wrap=False)
    return table
