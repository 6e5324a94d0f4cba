"""The benchmark of tracing a whole model, over few tokens of a small one: what it measures and says, no times."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parent / "trace"))

import tiny_models

import clearhead as ch
import trace_scale

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc"
)


@pytest.fixture(autouse=True)
def threads() -> Any:
    import torch

    before = ch.get_num_threads(), torch.get_num_threads()
    yield
    ch.set_num_threads(before[0])
    torch.set_num_threads(before[1])


def test_every_repetition_and_the_figures(tmp_path: Path, capsys: Any) -> None:
    model = tiny_models.save(tmp_path / "tiny")
    (tmp_path / "text").write_text(tiny_models.TEXT * 2, encoding="utf-8")
    page, file = tmp_path / "page.md", tmp_path / "new" / "scale.json"
    page.write_text(f"before\n{trace_scale.BEGIN}\nold\n{trace_scale.END}\nafter\n", encoding="utf-8")
    words = ["--model", model, "--text", tmp_path / "text", "--tokens", 60, "--repeats", 2, "--threads", 1]
    assert trace_scale.main([*map(str, words), "--json", str(file), "--page", str(page)]) == 0
    found = json.loads(file.read_text(encoding="utf-8"))
    assert (found["tokens"], found["layers"], found["heads"], found["threads"]) == (60, 3, 18, 1)
    assert {name: len(some) for name, some in found["seconds"].items()} == {"model": 2, "trace": 2}
    ratios = sorted(b / a for a, b in zip(*found["seconds"].values(), strict=True))
    assert found["times"] == pytest.approx(sum(ratios) / 2)
    assert found["dense"] == 18 * 60 * 60 * 4
    assert found["disk"] > 3 * 60 * (6 + 2) * 8 * 4  # queries and keys, at least
    assert found["memory"][0] > 1e7
    assert found["passed"]
    assert {"entropy", "received", "pooled", "sink", "distance", "previous", "self"} <= set(found["measures"])
    said = trace_scale.figures(found)
    assert said in capsys.readouterr().out
    assert page.read_text(encoding="utf-8") == f"before\n{trace_scale.BEGIN}\n{said}\n{trace_scale.END}\nafter\n"
    assert [path.name for path in file.parent.iterdir()] == ["scale.json"]


@pytest.mark.parametrize(
    ("times", "memory", "short"),
    [(1.9, 2.9e9, []), (2.0, 2.9e9, ["under 2×: short"]), (1.9, 3e9, ["under 3.0 GB: short"])],
)
def test_what_falls_short_is_said(times: float, memory: float, short: list[str]) -> None:
    facts = {"date": "2026-01-01", "processor": "a processor", "cores": 2, "python": "3.11"}
    found = {
        "machine": facts, "versions": {"torch": "2", "transformers": "5"}, "model": "m", "tokens": 8192, "layers": 30,
        "heads": 270, "dtype": "float32", "measures": ["entropy"], "threads": 2,
        "seconds": {"model": [10.0], "trace": [10.0 * times]}, "times": times, "memory": [memory], "disk": 10**9,
        "dense": 72_477_573_120, "passed": True,
    }  # fmt: skip
    said = trace_scale.figures(found)
    assert [words for words in ("under 2×: short", "under 3.0 GB: short") if words in said] == short
    assert "72.5 GB" in said
    assert ": short" not in trace_scale.figures(found | {"tokens": 4096})


def test_wrong_usage(tmp_path: Path, capsys: Any) -> None:
    few = ["--tokens", "20", "--repeats", "1"]
    for words in (["--tokens", "1"], ["--repeats", "0"], ["--threads", "0"], ["--tokens", "many"]):
        with pytest.raises(SystemExit) as stopped:
            trace_scale.main([*few, *words])
        assert stopped.value.code == 2
    assert trace_scale.main(["--model", str(tmp_path / "none"), "--tokens", "20"]) == 2
    assert "there is no model" in capsys.readouterr().err
