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


def test_kinds_and_texts(tmp_path: Path, run: Callable[..., Any]) -> None:
    import stacks

    trace = stacks.save(tmp_path / "t")
    said = run("report", tmp_path / "t", "--text", 1).stdout
    assert said.splitlines()[0] == "attentions, 4 tokens, 18 heads, text 1 of 0 to 1 (--text)"
    places = [said.index(f"{kind} attention\n") for kind in ("encoder", "decoder", "cross")]
    assert places == sorted(places)
    assert "narrow    cross layer" in said
    cross = json.loads(run("report", tmp_path / "t", "--kind", "cross", "--text", 1, "--json").stdout)
    assert [head["kind"] for head in cross["heads"]] == ["cross"] * 6
    sinks = [head["sink"] for head in cross["heads"][:3]]
    assert sinks == pytest.approx(trace.measures(0, kind="cross", text=1).mean("sink").tolist())
    failed = run("report", tmp_path / "t", "--text", 7)
    assert failed.exit_code == 1
    assert "there is no text 7" in failed.stderr


def test_it_fits_a_terminal_of_80_columns(recorded: Path, run: Callable[..., Any], monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    said = run("report", recorded, "--without-first", 1).stdout
    assert max(map(len, said.splitlines()[:-1])) <= 80  # the last is a command to copy
    for line in said.splitlines():
        assert " at 0 " not in line + " "
    for command in ("info", "check"):
        assert max(map(len, run(command, recorded).stdout.splitlines())) <= 80
    assert max(map(len, run("diff", recorded, recorded).stdout.splitlines())) <= 80
