"""What a user sees when something fails: one line that begins with ``clearhead:``, and exit code 1."""

from __future__ import annotations

import os
from typing import Any

import typer
from typer.core import TyperGroup


class Commands(TyperGroup):
    """The commands, each run so that its errors become one line. Those of usage stay typer's: exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise _failed("stopped. Nothing half-written was left behind") from None
        except Exception as error:
            if hasattr(error, "exit_code") or isinstance(error, typer.Abort | BrokenPipeError):
                raise  # typer deals with these: wrong usage, an end, a reader that has gone
            if os.environ.get("CLEARHEAD_TRACEBACK"):
                raise
            raise _failed(explain(error)) from None


def explain(error: Exception) -> str:
    """An error in one line. Ours say what is wrong in their own words; others are named."""
    words = " ".join(str(error).split()) or type(error).__name__
    match error:
        case OSError(filename=str() as name, strerror=str() as reason):
            return f"{name}: {reason}"
        case ModuleNotFoundError(name=str() as name):
            return f"this needs the package {name}: pip install 'clearhead[demo]'"
        case MemoryError():
            return f"out of memory: {words}"
        case ValueError() | OSError():
            return words
    return f"{type(error).__name__}: {words} (CLEARHEAD_TRACEBACK=1 shows where)"


def _failed(words: str) -> typer.Exit:
    typer.echo(f"clearhead: {words}", err=True)
    return typer.Exit(1)
