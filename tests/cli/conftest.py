"""The command run as a user runs it, on a tiny model and a trace of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from clearhead.cli import app

sys.path.insert(0, str(Path(__file__).parents[1] / "trace"))
import tiny_models


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(tiny_models.TEXT, encoding="utf-8")
    return file


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """run("trace", "tiny", ...) -> the result, with .exit_code, .stdout and .stderr."""
    monkeypatch.setenv("COLUMNS", "200")
    runner = CliRunner()
    return lambda *words: runner.invoke(app, list(map(str, words)), prog_name="clearhead")


@pytest.fixture(scope="session")
def recorded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a trace that tests only read."""
    from clearhead.trace import load, record, tokenize

    loaded = load(str(model))
    path = tmp_path_factory.mktemp("traces") / "t"
    record(loaded, tokenize(loaded.tokenizer, tiny_models.TEXT), path)
    return path
