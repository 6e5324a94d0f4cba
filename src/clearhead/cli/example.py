"""``clearhead example``: three tokens, all of attention, by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli.console import print_json, stdout

if TYPE_CHECKING:
    from rich.console import Console

    from clearhead.lessons.worked_example import WorkedExample


def example(
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Attention on three tokens, step by step: score, normalize, aggregate."""
    from clearhead.lessons.worked_example import worked_example

    found = worked_example()
    if as_json:
        print_json({name: array.tolist() for name, array in vars(found).items()})
    else:
        show_example(stdout(), found)


def show_example(console: Console, found: WorkedExample) -> None:
    """Print the worked example in three steps, and how to read a row of it."""
    console.print("Attention on three tokens of four numbers each, small enough to check by hand.")
    console.print("x is (3, 4); each token asks Q = x W_q, offers K = x W_k, and says V = x W_v.")
    keys = [f"key {key}" for key in range(len(found.key))]
    console.print("\n1  score       how well does each query match each key?      S = Q Kᵀ / √4", style="bold")
    console.print(_table(found.scores, keys))
    console.print("\n2  normalize   make each row positive, with sum 1            W = softmax(S)", style="bold")
    console.print(_table(found.weights, keys))
    console.print("\n3  aggregate   mix the values by those weights               output = W V", style="bold")
    console.print(_table(found.output, [f"dim {dim}" for dim in range(found.output.shape[1])]))
    shares = [f"{100 * weight:.1f} %" for weight in found.weights[0]]
    console.print(
        f"\nHow to read a row: the first row of weights belongs to query 0, the first token. Its output is "
        f"made of {shares[0]} of the value of token 0 (itself), {shares[1]} of token 1 and {shares[2]} "
        f"of token 2. "
        f"Each row adds up to 100 %; columns need not: token 1 is looked at more than token 2 is."
    )


def _table(rows: Any, columns: list[str]) -> Any:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2), header_style="dim")
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    for query, row in enumerate(rows):
        table.add_row(f"   query {query}", *(f"{number:.3f}" for number in row))
    return table
