"""``clearhead info``: what a trace holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli.console import print_json, stdout
from clearhead.cli.words import ranges, together
from clearhead.memory import written

if TYPE_CHECKING:
    from rich.console import Console

    from clearhead.trace import Trace


def info(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A folder that `clearhead trace` wrote.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """What a trace holds: its model, texts, attentions, sizes and checks. Computes nothing."""
    from clearhead.trace import Trace

    found = Trace.open(trace)
    if as_json:
        print_json(facts(found))
    else:
        show(stdout(), found)


def facts(trace: Trace) -> dict[str, Any]:
    """The same as plain data."""
    from dataclasses import asdict

    return {
        "trace": str(trace.path),
        "model": asdict(trace.model),
        "texts": [
            {
                "side": side,
                "text": number,
                "tokens": len(tokens),
                "special": len(tokens.special),
                "padding": len(tokens.padding),
                "segments": trace.segments(side, number),
            }
            for side in trace.side_names
            for number, tokens in enumerate(trace.texts_of(side))
        ],
        "attentions": [asdict(site) for site in trace.sites],
        "bytes": trace.nbytes,
        "dense_bytes": trace.dense_nbytes,
        "checks": {"passed": trace.checks.passed, **asdict(trace.checks)},
    }


def show(console: Console, trace: Trace) -> None:
    """Print what a trace holds."""
    from rich.table import Table

    model = trace.model
    console.print(model.name, style="bold")
    console.print(f"{model.type}, {model.dtype}, its own {model.attention} attention", end="")
    console.print(f" · transformers {model.transformers}, torch {model.torch}" if model.torch else "")
    for side in trace.side_names:
        texts = trace.texts_of(side)
        padding = sum(len(tokens.padding) for tokens in texts)
        special = sum(len(set(tokens.special) - set(tokens.padding)) for tokens in texts)
        name = "" if trace.side_names == ("self",) else f"{side}: "
        count = "1 text" if len(texts) == 1 else f"{len(texts)} texts"
        console.print(f"{name}{count} of {len(texts[0]):,} tokens ({special:,} special, {padding:,} padding)")
    console.print()
    table = Table(box=None, padding=(0, 1), header_style="bold")
    for heading in ("attention", "layers", "heads", "queries × keys", "dim", "dtype", "mask", "kept"):
        table.add_column(heading, justify="left" if heading in ("attention", "mask", "kept") else "right")
    for kind in trace.kinds:
        for alike, layers in _alike(trace, kind):
            table.add_row(kind, ranges(layers), *alike)
    console.print(table)
    console.print(
        f"\n{written(trace.nbytes)} on disk; as matrices, its weights would take {written(trace.dense_nbytes)}."
    )
    checks = trace.checks
    if checks.sites:
        worst = max(checks.sites, key=lambda site: site.row_sum)
        console.print(
            f"When recorded: rows sum to 1 within {worst.row_sum:.1g}, "
            + ("nothing hidden has weight." if checks.passed else "and not all is well: see clearhead check.")
        )
    for what in together(checks.missing):
        console.print(f"Not recorded: {what}", soft_wrap=True)
    for side in trace.side_names:
        for number in range(len(trace.texts_of(side))):
            if names := trace.segments(side, number):
                console.print(f"Segments of {side} text {number}: {', '.join(names)}", soft_wrap=True)


def _alike(trace: Trace, kind: str) -> list[tuple[tuple[str, ...], list[int]]]:
    """The layers of a kind, those that are built alike together."""
    found: dict[tuple[str, ...], list[int]] = {}
    for site in trace.sites_of(kind):
        heads = str(site.heads) if site.key_heads == site.heads else f"{site.heads} on {site.key_heads}"
        mask = f"window {site.window:,}" if site.window else site.mask
        alike = (heads, f"{site.queries:,} × {site.keys:,}", str(site.dim), site.dtype, mask, site.kept)
        found.setdefault(alike, []).append(site.layer)
    return list(found.items())
