"""The command ``clearhead``: one file per subcommand, heavy imports inside them.

Exit codes: 0; 1 if it failed, with one line on the standard error that says why; 2 for wrong usage.
"""

from __future__ import annotations

import signal
from typing import Annotated

import typer

from clearhead.cli import check, demo, diff, example, export, info, plot, report, trace, warmup
from clearhead.cli.errors import Commands

app = typer.Typer(
    name="clearhead",
    cls=Commands,
    help="Attention you can see through: exact, fast, and with its weights at hand.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
COMMANDS = (
    example.example,
    trace.trace,
    info.info,
    check.check,
    report.report,
    plot.plot,
    diff.diff,
    export.export,
    demo.demo,
    warmup.warmup,
)
for command in COMMANDS:
    app.command()(command)


def _version(wanted: bool) -> None:
    if wanted:
        from clearhead import __version__

        typer.echo(f"clearhead {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Attention you can see through: exact, fast, and with its weights at hand."""


def main() -> None:
    """Run the command line. Being told to end (SIGTERM) is like Ctrl-C: what is half-written is removed."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    app()
