"""What holds for every command: quick help, exit codes, one line for each error."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

import clearhead
from clearhead.cli.errors import Commands, explain

Run = Callable[..., Any]


def test_version(run: Run) -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"clearhead {clearhead.__version__}\n")


def test_help_names_every_command(run: Run) -> None:
    result = run("--help")
    assert result.exit_code == 0
    for command in ("example", "trace", "report", "plot", "demo"):
        assert command in result.stdout
        assert run(command, "--help").exit_code == 0


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from clearhead.cli import app\n"
        "try: app(['--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'transformers', 'numba', 'matplotlib', 'safetensors', 'gguf'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_python_m_clearhead_is_clearhead() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "clearhead", "report", "nowhere"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr == (
        "clearhead: nowhere does not exist. `clearhead trace MODEL --text FILE -o DIR` records one\n"
    )


@pytest.mark.parametrize(
    "words",
    [
        ["unknown"],
        ["trace"],
        ["trace", "smollm2"],
        ["plot", "t", "--layer", "x"],
        ["report", "t", "--what"],
        ["trace", "m", "--text", "t", "--max-tokens", "0"],
        ["plot", "t", "--layer", "0", "--head", "0", "-o", "x.png", "--size", "10"],
    ],
)
def test_wrong_usage_is_2(words: list[str], run: Run) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert result.stderr
    assert not result.stdout


def failing(error: BaseException) -> typer.Typer:
    app = typer.Typer(cls=Commands, pretty_exceptions_enable=False)

    @app.command()
    def fail() -> None:
        raise error

    @app.callback()
    def nothing() -> None: ...

    return app


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (KeyboardInterrupt(), "stopped. Nothing half-written was left behind"),
        (ValueError("two\n  lines"), "two lines"),
        (OSError(errno.ENOSPC, "No space left on device", "out/x"), "out/x: No space left on device"),
        (ModuleNotFoundError("No module", name="matplotlib"), "this needs the package matplotlib: pip install"),
        (MemoryError("4 GB wanted"), "out of memory: 4 GB wanted"),
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero (CLEARHEAD_TRACEBACK=1 shows"),
    ],
)
def test_errors_are_one_line(error: BaseException, line: str) -> None:
    from typer.testing import CliRunner

    result = CliRunner().invoke(failing(error), ["fail"])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith(f"clearhead: {line}")
    assert result.stderr.count("\n") == 1


def test_the_traceback_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    monkeypatch.setenv("CLEARHEAD_TRACEBACK", "1")
    result = CliRunner().invoke(failing(ZeroDivisionError()), ["fail"])
    assert isinstance(result.exception, ZeroDivisionError)


def test_an_error_without_words_is_named() -> None:
    assert explain(ValueError()) == "ValueError"


@pytest.mark.skipif(os.name == "nt", reason="a pipe that breaks is a matter of POSIX")
def test_a_reader_that_has_gone_is_no_error_of_ours(recorded: Path) -> None:
    command = f"'{sys.executable}' -m clearhead report '{recorded}' | head -n 1"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert "tiny" in result.stdout
    assert "clearhead:" not in result.stderr.replace("Measuring ...\n", "")
