"""`clearhead check`: exit code 1 for a trace that is not what it says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from clearhead import from_attentions
from clearhead.trace.tensors import read_tensors, write_tensors

Run = Callable[..., Any]


def test_a_trace_that_passes(recorded: Path, run: Run) -> None:
    result = run("check", recorded)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "passed"
    assert [line.split()[1] for line in result.stdout.splitlines() if line.startswith(" self")] == ["0", "1", "2"]
    data = json.loads(run("check", recorded, "--json").stdout)
    assert data["passed"]
    assert len(data["sites"]) == 3
    assert all(site["row_sum"] < 1e-5 and site["hidden"] == 0 for site in data["sites"])


def test_a_trace_that_was_tampered_with(recorded: Path, tmp_path: Path, run: Run) -> None:
    path = Path(shutil.copytree(recorded, tmp_path / "t"))
    file = next(path.glob("self-001*"))
    arrays = {name: array.copy() for name, array in read_tensors(file).items()}
    arrays["logsumexp"] += 0.01
    write_tensors(file, arrays)
    result = run("check", path)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "FAILED"
    assert not json.loads(run("check", path, "--json").stdout)["passed"]


def test_numbers_that_are_none_fail(recorded: Path, tmp_path: Path, run: Run) -> None:
    """A comparison with NaN is never true: what is not shown to be right is wrong."""
    path = Path(shutil.copytree(recorded, tmp_path / "t"))
    file = next(path.glob("self-001*"))
    arrays = {name: array.copy() for name, array in read_tensors(file).items()}
    arrays["query"][0, 2, 0] = np.nan
    write_tensors(file, arrays)
    result = run("check", path)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == "FAILED"
    data = json.loads(run("check", path, "--json").stdout)
    assert [site["row_sum"] < 1e-5 for site in data["sites"]] == [True, False, True]


def test_of_measures_alone_the_record_is_told_and_the_numbers_are_held_against_it(
    model: Path, text: Path, tmp_path: Path, run: Run
) -> None:
    path = tmp_path / "t"
    assert run("trace", model, "--text", text, "--measures-only", "-o", path).exit_code == 0
    result = run("check", path)
    assert result.exit_code == 0
    said = " ".join(result.stdout.split())
    assert "Of 3 attentions measures alone are kept: rows were looked at when the trace was recorded" in said
    file = next(path.glob("self-001*"))
    whole = {name: array.copy() for name, array in read_tensors(file).items()}
    for wrong in (0.1, np.nan):
        arrays = {name: array.copy() for name, array in whole.items()}
        arrays["measure.received"][0, 2, 3] += wrong
        write_tensors(file, arrays)
        assert run("check", path).exit_code == 1
    write_tensors(file, whole)
    assert run("check", path).exit_code == 0


def test_weights_after_dropout_fail(tmp_path: Path, run: Run) -> None:
    """transformers#31468: their rows do not sum to 1."""
    kept = np.random.default_rng(0).random((1, 2, 9, 9)) < 0.9
    from_attentions([np.full((1, 2, 9, 9), 1 / 9) * kept / 0.9]).save(tmp_path / "t")
    assert run("check", tmp_path / "t").exit_code == 1
