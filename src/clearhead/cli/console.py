"""What the commands share: where they print, how they show progress, what the run has cost so far."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console


def stdout() -> Console:
    """Results go here, in colour unless NO_COLOR is set or it is no terminal. Text is never markup."""
    from rich.console import Console

    return Console(markup=False, highlight=False, emoji=False)


def stderr() -> Console:
    """Progress goes here."""
    from rich.console import Console

    return Console(stderr=True, markup=False, highlight=False, emoji=False)


def print_json(data: Any) -> None:
    """Pure JSON on the standard output."""
    typer.echo(json.dumps(data, ensure_ascii=False, indent=1, allow_nan=False))


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Say what is going on while a block runs: a spinner, or one line where there is no terminal."""
    console = stderr()
    if not console.is_terminal:
        console.print(f"{what} ...")
        yield
        return
    with console.status(what):
        yield


@contextmanager
def counting(what: str, steps: int) -> Iterator[Callable[[int], None]]:
    """A progress bar: call what it gives once for each step. One line where there is no terminal."""
    console = stderr()
    if not console.is_terminal:
        console.print(f"{what} ...")
        yield lambda step: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=steps)
        yield lambda step: progress.advance(task)


def peak_memory() -> int | None:
    """The most memory that this process has held so far, in bytes; None where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
