"""`clearhead info`: what a trace holds, and one clear line for what is no whole trace."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import stacks

from clearhead.trace import Trace

Run = Callable[..., Any]


def test_what_it_holds(recorded: Path, run: Run) -> None:
    result = run("info", recorded)
    trace = Trace.open(recorded)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "tiny"
    assert "llama, float32, its own sdpa attention · transformers" in lines[1]
    assert lines[2] == f"1 text of {len(trace.tokens)} tokens (0 special, 0 padding)"
    assert lines[5].split() == ["self", "0-2", "6", "on", "2", "37", "×", "37", "8", "F32", "causal", "all"]
    assert "on disk; as matrices, its weights would take 98.6 kB." in result.stdout
    assert "nothing hidden has weight" in result.stdout
    assert result.stderr == ""


def test_stacks_batches_and_segments(tmp_path: Path, run: Run) -> None:
    stacks.save(tmp_path / "t").mark({"name": (1, 2)}, side="decoder", text=1)
    said = run("info", tmp_path / "t").stdout
    assert "encoder: 2 texts of 4 tokens" in said
    assert "decoder: 2 texts of 5 tokens" in said
    assert "Segments of decoder text 1: name" in said
    assert [line.split()[0] for line in said.splitlines() if " × " in line][1:] == ["encoder", "decoder", "cross"]


def test_what_is_missing_is_one_line_a_kind(model: Path, text: Path, tmp_path: Path, run: Run) -> None:
    assert run("trace", model, "--text", text, "--layers", "0", "-o", tmp_path / "t").exit_code == 0
    for command in ("info", "check"):
        said = run(command, tmp_path / "t").stdout.splitlines()
        assert [line for line in said if line.startswith("Not recorded")] == ["Not recorded: self layers 1-2"]


def test_json(recorded: Path, run: Run) -> None:
    data = json.loads(run("info", recorded, "--json").stdout)
    assert data["model"]["name"] == "tiny"
    assert data["texts"] == [
        {"side": "self", "text": 0, "tokens": 37, "special": 0, "padding": 0, "segments": {}},
    ]
    assert [site["layer"] for site in data["attentions"]] == [0, 1, 2]
    assert data["checks"]["passed"]
    assert data["bytes"] == Trace.open(recorded).nbytes


@pytest.mark.parametrize("command", [["info"], ["check"], ["report"], ["export", "-o", "x.csv"], ["diff", "again"]])
def test_what_is_no_whole_trace_is_one_line(
    command: list[str], recorded: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Newer, cut short, killed in the middle, not there: each says what to do, and writes nothing."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(recorded, "again")
    newer = json.loads((recorded / "trace.json").read_text()) | {"version": 99}
    for name in ("newer", "cut", "partial"):
        shutil.copytree(recorded, name)
    Path("newer/trace.json").write_text(json.dumps(newer))
    site = next(Path("cut").glob("self-001*"))
    site.write_bytes(site.read_bytes()[:-9])
    Path("partial/trace.json").unlink()
    cases = {
        "newer": "this one reads up to version",
        "cut": "is cut short",
        "partial": "is not a trace: it has no trace.json",
        "nowhere": "nowhere does not exist",
    }
    for name, words in cases.items():
        result = run(command[0], name, *command[1:])
        assert result.exit_code == 1
        assert words in result.stderr
        assert result.stderr.count("\n") == 1
        assert result.stdout == ""
    assert not Path("x.csv").exists()
