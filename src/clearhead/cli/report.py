"""``clearhead report``: what every head of a trace does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli.console import counting, print_json, stdout
from clearhead.cli.words import bracketed, flat

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from clearhead.trace import Report, Tokens, Trace
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
STANDS_FOR = {
    "broad": "entropy",
    "narrow": "entropy",
    "sink": "sink",
    "far": "distance",
    "previous": "previous",
    "self": "self_",
}


def report(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A folder that `clearhead trace` wrote.")],
    kind: Annotated[
        str | None, typer.Option("--kind", metavar="KIND", help="encoder, decoder, cross ...: this attention only.")
    ] = None,
    text: Annotated[int, typer.Option("--text", metavar="N", min=0, help="Which text of a batch, from 0.")] = 0,
    without: Annotated[
        int, typer.Option("--without-first", metavar="N", min=0, help="Leave the first N tokens out of the examples.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """What every head of a trace does, in a few numbers, and the strongest head of each sort as text."""
    from clearhead.trace import Trace

    found = measure(Trace.open(trace), kind, text, without)
    if as_json:
        print_json(found.to_dict())
        return
    console = stdout()
    count = found.trace.texts
    console.print(
        f"{found.trace.model.name}, {len(tokens_of(found, found.heads[0]).text):,} tokens, {len(found.heads)} heads"
        + (f", text {text} of 0 to {count - 1} (--text)" if count > 1 else "")
    )
    means = "Means over all tokens"
    if any(head.previous is not None for head in found.heads):
        means += ", but the first for the previous token: it has none"
    console.print(f"{means}.\n")
    show_heads(console, found)
    console.print()
    show_strongest(console, found)
    best = found.strongest[-2].head
    which = f"--layer {best.layer} --head {best.head}"
    which += f" --kind {best.kind}" if len(found.trace.kinds) > 1 else ""
    which += f" --text {text}" if text else ""
    console.print(f"\nNext: clearhead plot {trace} {which} -o head.png", soft_wrap=True)


def measure(trace: Trace, kind: str | None = None, text: int = 0, without: int = 0) -> Report:
    """The report of a trace, with progress shown."""
    from clearhead.trace import summarize

    with counting("Measuring", len(trace if kind is None else trace.sites_of(kind))) as progress:
        return summarize(trace, progress, kind=kind, text=text, without=without)


def tokens_of(found: Report, head: Head) -> Tokens:
    """The tokens of a head's queries."""
    return found.trace.side(head.kind, "query", found.text)


def show_heads(console: Console, found: Report) -> None:
    """A table for each kind of attention with a line for each head; the strongest of each sort stand out."""
    from rich.text import Text

    peaks = {(strongest.head, STANDS_FOR.get(strongest.kind, strongest.kind)) for strongest in found.strongest}
    kinds = list(dict.fromkeys(head.kind for head in found.heads))
    for place, kind in enumerate(kinds):
        heads = [head for head in found.heads if head.kind == kind]
        names = measured(heads)
        if len(found.trace.kinds) > 1:
            console.print(("\n" if place else "") + f"{kind} attention", style="bold")
        table = _table(names, "layer", "head")
        for head in heads:
            cells = [Text(_number(head, name), style="bold reverse" if (head, name) in peaks else "") for name in names]
            table.add_row(str(head.layer), str(head.head), *cells)
        console.print(table)


def show_layers(console: Console, found: Report) -> None:
    """A table with a line for each layer: the mean of its heads."""
    names = measured(found.heads)
    table = _table(names, "layer", "heads")
    for layer in found.trace.layers:
        heads = [head for head in found.heads if head.layer == layer]
        means = {name: sum(getattr(head, name) for head in heads) / len(heads) for name in names}
        cells = [f"{means[name]:,.{COLUMNS[name][1]}f}" for name in names]
        table.add_row(str(layer), str(len(heads)), *cells)
    console.print(table)


def measured(heads: Sequence[Head]) -> list[str]:
    """The measures that these heads have."""
    return [name for name in COLUMNS if all(getattr(head, name) is not None for head in heads)]


def show_strongest(console: Console, found: Report) -> None:
    """The strongest head of each sort, with some of its rows as text."""
    from clearhead.trace.report import KINDS

    for strongest in found.strongest:
        head = strongest.head
        where = f"layer {head.layer}, head {head.head}"
        where = where if len(found.trace.kinds) == 1 else f"{head.kind} {where}"
        console.print(f"{strongest.kind:9} {where}: {KINDS[strongest.kind]}, {_value(strongest)}", style="bold")
        for example in strongest.examples:
            console.print(_line(tokens_of(found, head), example, console.width), soft_wrap=True)


def _value(strongest: Strongest) -> str:
    unit = {"broad": " nats", "narrow": " nats", "far": " tokens"}.get(strongest.kind, " of its weight")
    return f"{strongest.value:,.2f}{unit}"


def _line(tokens: Tokens, example: Any, width: int) -> Text:
    """``  1,024  ... the words before [it]  ->  [token] 0.93  [other] 0.03``, one key or as many as fit."""
    from rich.text import Text

    line = Text(f"  {example.query:>6,}  ")
    before = flat(_before(tokens, example.query))
    if before:
        line.append("…" + before[-max(12, width // 4) :], style="dim")
    line.append(bracketed(example.token), style="bold")
    line.append("  →  ")
    for place, (key, token, weight) in enumerate(example.keys):
        if place > 0 and weight < LEAST:
            break
        looked = Text(bracketed(token) + (f" {weight:.2f}" if weight >= LEAST else f" {weight:.1g}"))
        looked.append(f" at {key:,}", style="dim")
        if place > 0 and line.cell_len + 3 + looked.cell_len > width:
            break
        line.append("   " if place else "").append(looked)
    return line


def _before(tokens: Tokens, query: int) -> str:
    """The text of the tokens before one, each character once; nothing for tokens that are no text."""
    if tokens.ids[query] < 0:
        return ""
    first = max(0, query - CONTEXT)
    pieces, end = [], -1
    for place in range(first, query):
        start, stop = tokens.start[place], tokens.stop[place]
        pieces.append(tokens.text[place] if start < 0 else tokens.text[place][max(0, end - start) :])
        end = max(end, stop)
    return "".join(pieces)


def _number(head: Head, name: str) -> str:
    return f"{getattr(head, name):,.{COLUMNS[name][1]}f}"


def _table(names: Sequence[str], *first: str) -> Any:
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), header_style="bold")
    for heading in (*first, *(COLUMNS[name][0] for name in names)):
        table.add_column(heading, justify="right", no_wrap=False)
    return table
