"""``clearhead plot``: one head as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clearhead.cli.console import stdout, waiting

if TYPE_CHECKING:
    from clearhead.trace import Trace


def plot(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A folder that `clearhead trace` wrote.")],
    layer: Annotated[int, typer.Option("--layer", metavar="L", help="Which layer, from 0.")],
    head: Annotated[int, typer.Option("--head", metavar="H", help="Which head of the layer, from 0.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="A name that ends in .png or .svg")],
    kind: Annotated[
        str | None, typer.Option("--kind", metavar="KIND", help="encoder, decoder, cross ..., if there are several.")
    ] = None,
    text: Annotated[int, typer.Option("--text", metavar="N", min=0, help="Which text of a batch, from 0.")] = 0,
    size: Annotated[int, typer.Option("--size", min=300, max=20_000, help="Width in pixels.")] = 900,
) -> None:
    """Draw the attention map of one head: queries downwards, keys to the right."""
    from clearhead.picture import check_suffix
    from clearhead.trace import Trace

    check_suffix(output)
    with waiting("Drawing"):
        found = Trace.open(trace)
        if kind is None and len(found.kinds) > 1:
            raise typer.BadParameter(f"this trace holds {', '.join(found.kinds)}: say which", param_hint="'--kind'")
        draw_head(found, layer, head, output, size, kind=kind, text=text)
    stdout().print(f"Wrote {output}", soft_wrap=True)


def draw_head(
    trace: Trace,
    layer: int,
    head: int,
    path: Path,
    size: int = 900,
    remark: str = "",
    kind: str | None = None,
    text: int = 0,
) -> Path:
    """Draw one head of a trace, its map pooled to what the picture can show."""
    from clearhead.picture import draw, resolution

    queries, keys = (trace.side(kind, of, text).text for of in ("query", "key"))
    map = trace.map(layer, head, resolution(size, max(len(queries), len(keys))), kind, text)
    what = f"{kind} layer {layer}" if kind is not None and len(trace.kinds) > 1 else f"layer {layer}"
    title = f"{trace.model.name} · {what}, head {head}" + (f" · {remark}" if remark else "")
    path.parent.mkdir(parents=True, exist_ok=True)
    rows, columns = map.shape
    hidden = trace.hidden(layer, head, rows, columns, kind, text)
    return draw(map, path, tokens=queries, keys=keys, title=title, size=size, hidden=hidden)
