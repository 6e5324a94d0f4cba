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
    size: Annotated[int, typer.Option("--size", min=300, max=20_000, help="Width in pixels.")] = 900,
) -> None:
    """Draw the attention map of one head: queries downwards, keys to the right."""
    from clearhead.picture import check_suffix
    from clearhead.trace import Trace

    check_suffix(output)
    with waiting("Drawing"):
        draw_head(Trace.open(trace), layer, head, output, size)
    stdout().print(f"Wrote {output}", soft_wrap=True)


def draw_head(trace: Trace, layer: int, head: int, path: Path, size: int = 900, remark: str = "") -> Path:
    """Draw one head of a trace, its map pooled to what the picture can show."""
    from clearhead.picture import draw, resolution

    cells = resolution(size, len(trace.tokens))
    map = trace.weights(layer, head).pooled(cells, cells)[0]
    title = f"{trace.model.name} · layer {layer}, head {head}" + (f" · {remark}" if remark else "")
    path.parent.mkdir(parents=True, exist_ok=True)
    return draw(map, path, tokens=trace.tokens, title=title, size=size)
