"""`clearhead diff`: the most changed head first, and an exit code for those who check changes by machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models

from clearhead.trace import Trace, load, record, tokenize
from clearhead.trace.diff import compare

Run = Callable[..., Any]


@pytest.fixture(scope="session")
def rounded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same text, queries and keys rounded to 8 bits of mantissa, and one layer less."""
    loaded = load(str(model))
    path = tmp_path_factory.mktemp("traces") / "rounded"
    record(loaded, tokenize(loaded.tokenizer, tiny_models.TEXT), path, store="bfloat16", layers=[0, 1])
    return path


def test_the_same_twice(recorded: Path, run: Run) -> None:
    result = run("diff", recorded, recorded, "--fail-over", "0")
    assert result.exit_code == 0, result.stderr
    assert "18 heads compared by weights" in result.stdout
    assert all(line.split()[2] == "0" for line in result.stdout.splitlines() if line[:1] == " " and "layer" not in line)


def test_the_most_changed_first(recorded: Path, rounded: Path, run: Run) -> None:
    result = run("diff", recorded, rounded, "--top", "5")
    assert result.exit_code == 0
    expected = compare(Trace.open(recorded), Trace.open(rounded)).changes
    rows = [line.split() for line in result.stdout.splitlines() if line[:1] == " "][1:]
    assert [(int(row[0]), int(row[1])) for row in rows] == [(change.layer, change.head) for change in expected[:5]]
    assert "... and 7 more, none above" in result.stdout
    assert f"Not compared: self layer 2, all heads: in {recorded} only" in result.stdout
    every = run("diff", recorded, rounded, "--top", "0").stdout
    assert len([line for line in every.splitlines() if line[:1] == " "]) == 13


def test_for_machines(recorded: Path, rounded: Path, run: Run) -> None:
    found = json.loads(run("diff", recorded, rounded, "--json").stdout)
    assert len(found["heads"]) == 12
    assert found["largest"] == found["heads"][0]["change"] > 0
    assert len(found["missing"]) == 1
    result = run("diff", rounded, rounded, "--fail-over", found["largest"])
    assert result.exit_code == 0
    result = run("diff", recorded, rounded, "--fail-over", found["largest"] / 2, "--json")
    assert result.exit_code == 1
    worst = found["heads"][0]
    assert f"layer {worst['layer']}, head {worst['head']} changed by" in result.stderr
    assert json.loads(result.stdout) == found
    result = run("diff", recorded, rounded, "--fail-over", "1")  # what is missing cannot be within
    assert result.exit_code == 1
    assert "1 attentions are in one trace only" in result.stderr


def test_by_a_measure(recorded: Path, rounded: Path, run: Run) -> None:
    result = run("diff", recorded, rounded, "--by", "entropy")
    assert "12 heads compared by entropy, changes in nats" in result.stdout
    failed = run("diff", recorded, rounded, "--by", "looks")
    assert failed.exit_code == 2
    assert "'looks': weights, or entropy, sink, distance" in failed.stderr
    assert run("diff", recorded).exit_code == 2
    assert run("diff", recorded, rounded, "--fail-over", "-1").exit_code == 2
