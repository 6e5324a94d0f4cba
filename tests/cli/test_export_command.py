"""`clearhead export`: files that other programs read, whole or not there."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stacks

from clearhead import memory
from clearhead.trace import Trace

Run = Callable[..., Any]


def exported(run: Run, trace: Path, path: Path, *words: Any) -> str:
    result = run("export", trace, "-o", path, *words)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith(f"Wrote {path}: ")
    return str(result.stdout)


def test_rows_of_weights(recorded: Path, tmp_path: Path, run: Run) -> None:
    trace = Trace.open(recorded)
    path = tmp_path / "new" / "w.npz"
    said = exported(run, recorded, path, "--layers", "0,2", "--heads", "1,4-5", "--rows", "3,7-9")
    assert "weights of 2 layers" in said
    with np.load(path) as found:  # without pickle
        assert set(found.files) == {"self-000", "self-002", "self-000-heads", "self-002-heads", "rows",
                                    "self-query-tokens", "self-key-tokens"}  # fmt: skip
        assert found["rows"].tolist() == [3, 7, 8, 9]
        assert found["self-002-heads"].tolist() == [1, 4, 5]
        assert found["self-002"].dtype == np.float32
        assert np.array_equal(found["self-002"], np.asarray(trace.weights(2))[[1, 4, 5]][:, [3, 7, 8, 9]])
        assert tuple(found["self-key-tokens"].tolist()) == trace.tokens
    exported(run, recorded, path)
    with np.load(path) as found:
        assert np.array_equal(found["self-001"], np.asarray(trace.weights(1)))


def lines(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_measures_a_head_and_a_row(recorded: Path, tmp_path: Path, run: Run) -> None:
    trace = Trace.open(recorded)
    assert "measures, 18 lines" in exported(run, recorded, tmp_path / "m.csv")
    heads = lines(tmp_path / "m.csv")
    assert [(line["layer"], line["head"]) for line in heads] == [(str(i), str(j)) for i in range(3) for j in range(6)]
    assert float(heads[8]["entropy"]) == pytest.approx(trace.measures(1).mean("entropy")[2])
    exported(run, recorded, tmp_path / "r.csv", "--layers", "1", "--heads", "2", "--rows", "0-36")
    rows = lines(tmp_path / "r.csv")
    assert [line["token"] for line in rows] == list(trace.tokens)
    measured = trace.weights(1, 2).measure("entropy", "previous")
    assert np.abs(np.array([float(line["entropy"]) for line in rows]) - measured.entropy[0]).max() < 1e-12
    assert np.abs(np.array([float(line["previous"]) for line in rows]) - measured.previous[0]).max() < 1e-12


def test_a_trace_of_measures_alone_opens_everywhere(model: Path, text: Path, tmp_path: Path, run: Run) -> None:
    """What is measured is told as of the whole trace; what needs weights is refused in words."""
    long, recorded, small = tmp_path / "long.txt", tmp_path / "whole", tmp_path / "small"
    long.write_text(text.read_text(encoding="utf-8") * 4, encoding="utf-8")
    assert run("trace", model, "--text", long, "-o", recorded).exit_code == 0
    assert run("trace", model, "--text", long, "--measures-only", "-o", small).exit_code == 0
    assert Trace.open(small).nbytes < Trace.open(recorded).nbytes / 2
    info = json.loads(run("info", small, "--json").stdout)
    assert {site["kept"] for site in info["attentions"]} == {"measures"}
    whole, some = (json.loads(run("report", path, "--json").stdout)["heads"] for path in (recorded, small))
    assert [head["entropy"] for head in some] == pytest.approx([head["entropy"] for head in whole])
    exported(run, recorded, tmp_path / "whole.csv")
    exported(run, small, tmp_path / "small.csv")
    assert lines(tmp_path / "small.csv") == lines(tmp_path / "whole.csv")
    for name, words in (("w.npz", []), ("r.csv", ["--rows", "0-3"])):
        result = run("export", small, "-o", tmp_path / name, *words)
        assert result.exit_code == 1
        assert "was recorded with measures only: self layer 0 has no queries and keys" in result.stderr
        assert not (tmp_path / name).exists()


def test_measures_of_every_kind_and_text(tmp_path: Path, run: Run) -> None:
    stacks.save(tmp_path / "t")
    exported(run, tmp_path / "t", tmp_path / "m.csv")
    found = lines(tmp_path / "m.csv")
    assert len(found) == 3 * 2 * 2 * 3
    assert {line["text"] for line in found} == {"0", "1"}
    assert {bool(line["distance"]) for line in found if line["kind"] == "cross"} == {False}
    exported(run, tmp_path / "t", tmp_path / "m.csv", "--kind", "cross", "--text", "1")
    assert len(lines(tmp_path / "m.csv")) == 6


def test_tokens_of_an_image_are_in_no_order(tmp_path: Path, run: Run) -> None:
    """As in a report: its places lie in rows and columns, and none is before another."""
    import tiny_models

    import clearhead as ch

    ch.trace(tiny_models.build("vit"), tiny_models.inputs("vit"), tmp_path / "t")
    for words in ([], ["--rows", "0-9"]):
        exported(run, tmp_path / "t", tmp_path / "m.csv", *words)
        names = set(lines(tmp_path / "m.csv")[0])
        assert {"entropy", "sink"} < names
        assert not {"distance", "previous", "self", "far", "diagonality"} & names


def test_of_a_batch_one_text_is_chosen(tmp_path: Path, run: Run) -> None:
    trace = stacks.save(tmp_path / "t")
    result = run("export", tmp_path / "t", "-o", tmp_path / "w.npz")
    assert result.exit_code == 1
    assert "the trace holds texts 0 to 1, and a file of weights is of one" in result.stderr
    exported(run, tmp_path / "t", tmp_path / "w.npz", "--text", "1")
    with np.load(tmp_path / "w.npz") as found:
        assert np.array_equal(found["cross-001"], np.asarray(trace.weights(1, kind="cross", text=1)))


def test_a_file_that_cannot_be_written_is_called_by_its_name(recorded: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "taken").write_text("a file")
    for name in ("w.npz", "m.csv"):
        (tmp_path / name).mkdir()
        result = run("export", recorded, "-o", tmp_path / name)
        assert result.exit_code == 1
        assert f"{tmp_path / name}: Is a directory" in result.stderr
        assert list((tmp_path / name).iterdir()) == []
        result = run("export", recorded, "-o", tmp_path / "taken" / name)
        assert result.exit_code == 1
        assert "taken" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.csv", "taken", "w.npz"]


def test_parquet_without_its_package(recorded: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    result = run("export", recorded, "-o", tmp_path / "m.parquet")
    assert result.exit_code == 1
    assert "Parquet needs the package pyarrow: pip install pyarrow, or give a name that ends in .csv" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_parquet_holds_what_csv_holds(recorded: Path, tmp_path: Path, run: Run) -> None:
    import pyarrow.parquet as parquet

    exported(run, recorded, tmp_path / "m.parquet")
    exported(run, recorded, tmp_path / "m.csv")
    table = parquet.read_table(tmp_path / "m.parquet").to_pydict()
    written = lines(tmp_path / "m.csv")
    assert list(table) == list(written[0])
    assert table["kind"] == [line["kind"] for line in written]
    for name in ("layer", "head", "rows", "entropy", "far", "coverage"):
        assert table[name] == [float(line[name]) for line in written]


def test_alignments(tmp_path: Path, run: Run) -> None:
    trace = stacks.save(tmp_path / "t")
    assert "the alignments of 2 texts" in exported(run, tmp_path / "t", tmp_path / "a.align")
    written = (tmp_path / "a.align").read_text().splitlines()
    assert written == [" ".join(f"{i}-{j}" for i, j in trace.alignment(text=text)) for text in (0, 1)]
    for line, text in zip(written, (0, 1), strict=True):
        weights = np.asarray(trace.weights(0, kind="cross", text=text)).mean(axis=0)
        assert line == " ".join(f"{weights[target - 1].argmax()}-{target}" for target in range(1, 5))
    words = ("--layers", "1", "--heads", "2", "--step", "input", "--words", "--text", "1")
    exported(run, tmp_path / "t", tmp_path / "a.pharaoh", *words)
    links = trace.alignment(1, 2, text=1, step="input", words=True)
    assert (tmp_path / "a.pharaoh").read_text() == " ".join(f"{i}-{j}" for i, j in links) + "\n"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["-o", "x.txt"], 1, "x.txt must end in .npz, .csv, .parquet, .align, .pharaoh: that says what to export"),
        (["-o", "x.align"], 1, "alignments are made of cross attention, and this trace holds self only"),
        (["-o", "x.npz", "--layers", "9"], 1, "layer 9 is not in the trace: it holds 0 to 2"),
        (["-o", "x.npz", "--heads", "9"], 1, "self layer 0 has heads 0 to 5, there is no head 9"),
        (["-o", "x.csv", "--rows", "99"], 1, "self layer 0 has rows 0 to 36, there is no row 99"),
        (["-o", "x.csv", "--kind", "cross"], 1, "this trace holds no 'cross' attention, only self"),
        (["-o", "x.npz", "--text", "4"], 1, "the trace holds texts 0 to 0, there is no text 4"),
        (["-o", "x.csv", "--rows", "7-3"], 2, "runs backwards"),
        (["-o", "x.align", "--step", "next"], 2, "output or input"),
        (["-o", "x.align", "--rows", "1"], 2, "alignments are of whole texts, by cross attention"),
        (["-o", "x.align", "--kind", "self"], 2, "alignments are of whole texts, by cross attention"),
        (["-o", "x.npz", "--words"], 2, "x.npz holds weights: this is about alignments"),
        (["-o", "x.csv", "--step", "input"], 2, "x.csv holds measures: this is about alignments"),
        ([], 2, "Missing option"),
    ],
)
def test_what_cannot_be_exported(
    words: list[str], code: int, said: str, recorded: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("export", recorded, *words)
    assert result.exit_code == code
    assert said in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_fit_is_refused(
    recorded: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available", lambda: 1000)
    result = run("export", recorded, "-o", tmp_path / "w.npz")
    assert result.exit_code == 1
    assert "the weights of a layer take 32.9 kB, 1.0 kB are free: choose rows with --rows" in result.stderr


def test_a_full_disk_leaves_nothing(recorded: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*words: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    for name in ("w.npz", "m.csv"):
        assert run("export", recorded, "-o", tmp_path / name).exit_code == 1
    assert list(tmp_path.iterdir()) == []
