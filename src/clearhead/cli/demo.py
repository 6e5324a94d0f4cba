"""``clearhead demo``: the whole road, from three tokens to every head of a language model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clearhead.cli.console import peak_memory, stdout, waiting
from clearhead.cli.example import show_example
from clearhead.cli.plot import draw_head
from clearhead.cli.report import measure, show_layers, show_strongest
from clearhead.cli.trace import load_model, record_trace
from clearhead.memory import written

if TYPE_CHECKING:
    from rich.console import Console

    from clearhead.trace import Report

MODEL = "smollm2"
TOKENS = 4096
DRAWN = {"previous": "looks at the token before", "far": "looks far back", "broad": "looks everywhere"}


def demo(
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Where its files go.")] = Path(
        "out/demo"
    ),
) -> None:
    """Three tokens by hand, then every head of SmolLM2 over 4,096 tokens of Python's language reference."""
    from clearhead.lessons.worked_example import worked_example
    from clearhead.trace import tokenize

    start = time.perf_counter()
    console = stdout()
    console.rule("1 · attention by hand", style="dim")
    show_example(console, worked_example())

    console.rule("2 · a language model reads", style="dim")
    console.print(
        f"SmolLM2-135M-Instruct, 30 layers of 9 heads, reads the first {TOKENS:,} tokens of Python's "
        f"language reference (pydoc_data.topics). Its own attention runs, unchanged; each layer is written "
        f"down as it happens."
    )
    text = language_reference()
    model = load_model(MODEL)
    tokens = tokenize(model.tokenizer, text, TOKENS)
    trace, seconds = record_trace(model, tokens, output / "trace")

    console.rule("3 · what its heads do", style="dim")
    found = measure(trace)
    console.print("Means over all tokens and the heads of each layer:\n")
    show_layers(console, found)
    console.print("\nThe strongest head of each kind, and where some of its tokens look:\n")
    show_strongest(console, found)

    console.rule("4 · three of them drawn", style="dim")
    draw_strongest(console, found, output)

    console.rule("5 · what it cost", style="dim")
    show_costs(console, found, seconds, time.perf_counter() - start)
    best = next(strongest.head for strongest in found.strongest if strongest.kind == "self")
    console.print(
        f"\nNext, look at all {len(found.heads)} heads, draw another, or read a text of your own:\n"
        f"  clearhead report {trace.path}\n"
        f"  clearhead plot {trace.path} --layer {best.layer} --head {best.head} -o {output / 'self.png'}\n"
        f"  clearhead trace {MODEL} --text README.md -o out/readme",
        soft_wrap=True,
    )


def language_reference() -> str:
    """Python's own language reference, as the standard library carries it for ``help()``."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ValueError(
            "this Python has no pydoc_data, whose text the demo reads: install all of the standard library"
        ) from None
    return "\n\n".join(topics.values())


def draw_strongest(console: Console, found: Report, folder: Path) -> None:
    """Draw three of the strongest heads to PNG files in ``folder``."""
    heads = {strongest.kind: strongest.head for strongest in found.strongest}
    for kind, remark in DRAWN.items():
        head = heads[kind]
        with waiting(f"Drawing layer {head.layer}, head {head.head}"):
            path = draw_head(found.trace, head.layer, head.head, folder / f"{kind}.png", remark=remark)
        console.print(f"{path}: layer {head.layer}, head {head.head}, which {remark}", soft_wrap=True)


def show_costs(console: Console, found: Report, reading: float, total: float) -> None:
    """What dense weights would have cost, beside what this run did cost."""
    from rich.table import Table

    trace = found.trace
    memory = peak_memory()
    table = Table(box=None, padding=(0, 2), header_style="bold")
    for heading in ("", "dense weights would take", "this took"):
        table.add_column(heading, justify="left" if not heading else "right")
    dense = written(trace.dense_nbytes)
    table.add_row("memory", dense, written(memory) + ", model included" if memory else "not known here")
    table.add_row("disk", dense, written(trace.nbytes))
    table.add_row("time", "", f"{reading:.1f} s reading, {total:.1f} s in all")
    console.print(table)
    console.print(
        f"\nDense: {len(found.heads)} heads x {len(trace.tokens):,} x {len(trace.tokens):,} x 4 bytes. "
        f"Here: queries, keys and one number a row, from which any weight is computed when it is looked at."
    )
