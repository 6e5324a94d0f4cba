"""``clearhead export``: a trace for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from clearhead.cli.console import counting, stdout
from clearhead.cli.trace import parse_layers
from clearhead.memory import written


def export(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A folder that `clearhead trace` wrote.")],
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", metavar="FILE", help=".npz: weights; .csv, .parquet: measures; .align: alignments."
        ),
    ],
    kind: Annotated[
        str | None, typer.Option("--kind", metavar="KIND", help="self, encoder, decoder, cross ...")
    ] = None,
    layers: Annotated[str | None, typer.Option("--layers", metavar="0,5-8", help="These layers only.")] = None,
    heads: Annotated[str | None, typer.Option("--heads", metavar="0,5-8", help="These heads only.")] = None,
    rows: Annotated[
        str | None, typer.Option("--rows", metavar="0,5-8", help="These rows; of measures, one line for each.")
    ] = None,
    text: Annotated[int | None, typer.Option("--text", metavar="N", min=0, help="This text of a batch.")] = None,
    words: Annotated[bool, typer.Option("--words", help="Align words, not tokens.")] = False,
    step: Annotated[
        str,
        typer.Option("--step", metavar="WHICH", help="Align a row to the token it writes (output) or reads (input)."),
    ] = "output",
) -> None:
    """Write rows of weights (NPZ), measures (CSV, Parquet) or alignments by cross attention (Pharaoh's i-j)."""
    from clearhead.trace import Trace
    from clearhead.trace.export import Part, way, write_alignments, write_measures, write_weights

    kept = way(output)
    if step not in ("output", "input"):
        raise typer.BadParameter(f"{step!r}: output or input", param_hint="'--step'")
    if kept == "alignments" and (rows is not None or kind not in (None, "cross")):
        given = "'--rows'" if rows is not None else "'--kind'"
        raise typer.BadParameter("alignments are of whole texts, by cross attention", param_hint=given)
    if kept != "alignments" and (words or step != "output"):
        given = "'--words'" if words else "'--step'"
        raise typer.BadParameter(f"{output} holds {kept}: this is about alignments", param_hint=given)
    part = Part(kind, parse_layers(layers), parse_layers(heads, "--heads"), parse_layers(rows, "--rows"), text)
    found = Trace.open(trace)
    if kept == "alignments":
        which: Literal["output", "input"] = "input" if step == "input" else "output"
        count = write_alignments(found, output, part, which, words)
        what = f"the alignments of {count} text{'s' * (count != 1)}"
    else:
        with counting("Exporting", len(part.sites(found))) as progress:
            if kept == "weights":
                count = write_weights(found, output, part, progress)
                what = f"weights of {count} layer{'s' * (count != 1)}"
            else:
                count = write_measures(found, output, part, progress)
                what = f"measures, {count:,} lines"
    stdout().print(f"Wrote {output}: {what}, {written(output.stat().st_size)}", soft_wrap=True)
