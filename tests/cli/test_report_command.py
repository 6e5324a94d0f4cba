"""`clearhead report`: a table for people, JSON for programs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]


def test_the_table_names_every_head(recorded: Path, run: Run) -> None:
    result = run("report", recorded)
    assert result.exit_code == 0
    rows = [line.split() for line in result.stdout.splitlines()]
    for layer in range(3):
        for head in range(6):
            assert any(row[:2] == [str(layer), str(head)] and len(row) == 7 for row in rows)
    for column in ("entropy (nats)", "first token", "distance (tokens)", "previous token", "itself"):
        assert column in result.stdout
    for kind in ("broad", "sink", "far", "previous", "self"):
        assert f"\n{kind:9} layer " in result.stdout
    assert " →  ⟨" in result.stdout
    assert f"Next: clearhead plot {recorded} --layer " in result.stdout


def test_json_is_pure(recorded: Path, run: Run) -> None:
    data = json.loads(run("report", recorded, "--json").stdout)
    assert data["model"] == "tiny"
    assert len(data["heads"]) == 18
    assert all(0 <= head["sink"] <= 1 and head["entropy"] >= 0 for head in data["heads"])
    assert [strongest["kind"] for strongest in data["strongest"]] == ["broad", "sink", "far", "previous", "self"]
    assert data["strongest"][0]["examples"][0]["keys"][0]["weight"] > 0


def test_no_colour_where_there_is_no_terminal(recorded: Path, run: Run) -> None:
    assert "\x1b" not in run("report", recorded).stdout


def test_colour_on_a_terminal_but_not_with_no_color(recorded: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[" in run("report", recorded).stdout
    monkeypatch.setenv("NO_COLOR", "1")
    assert not any(f"\x1b[3{colour}m" in run("report", recorded).stdout for colour in range(8))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("cut", "self-001.safetensors is cut short or not a file of Clearhead's"),
        ("foreign", "trace.json does not describe a trace of Clearhead's"),
        ("gone", "is not a trace: it has no trace.json"),
        ("newer", "upgrade Clearhead"),
    ],
)
def test_damaged_and_foreign_traces_are_one_line(
    damage: str, words: str, recorded: Path, tmp_path: Path, run: Run
) -> None:
    path = Path(shutil.copytree(recorded, tmp_path / "t"))
    index, layer = path / "trace.json", path / "self-001.safetensors"
    match damage:
        case "cut":
            layer.write_bytes(layer.read_bytes()[:5000])
        case "foreign":
            index.write_text("{}")
        case "gone":
            index.unlink()
        case "newer":
            index.write_text(index.read_text().replace('"version": 2', '"version": 7'))
    for command in (["report", path], ["plot", path, "--layer", 0, "--head", 0, "-o", tmp_path / "x.png"]):
        result = run(*command)
        assert result.exit_code == 1
        *_, last = result.stderr.splitlines()
        assert last.startswith("clearhead: ")
        assert words in last
        assert result.stdout == ""
    assert not (tmp_path / "x.png").exists()
