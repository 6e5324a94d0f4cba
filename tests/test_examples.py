"""Examples run: a small GPT learns, alike with either attention, and keeps its curve when it is stopped."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import train_tiny_gpt

TINY = ["--layers", "2", "--width", "32", "--heads", "4", "--tokens", "48", "--batch", "4", "--rate", "0.003"]


def run(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    file = tmp_path / "new" / "curve.json"
    code = train_tiny_gpt.main([*TINY, *arguments, "--json", str(file)])
    return code, json.loads(file.read_text(encoding="utf-8"))


def test_both_attentions_lead_to_the_same_losses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run(tmp_path, "--steps", "60", "--attention", "both")
    assert code == 0
    assert set(found["losses"]) == {"clearhead", "torch"}
    for losses in found["losses"].values():
        assert len(losses) == 60
        assert losses[-1] < 0.75 * losses[0]
    pairs = list(zip(*found["losses"].values(), strict=True))
    assert 0 < found["apart"] == max(abs(a - b) for a, b in pairs) < 1e-3
    said = capsys.readouterr().out
    assert said.count("step ") >= 7
    assert "tokens/s" in said
    assert "losses differ by" in said


@pytest.mark.parametrize("which", ["clearhead", "torch"])
def test_one_attention_alone(which: str, tmp_path: Path) -> None:
    code, found = run(tmp_path, "--steps", "2", "--attention", which)
    assert code == 0
    assert list(found["losses"]) == [which]
    assert len(found["seconds"][which]) == 2


def test_the_same_seed_gives_the_same_curve(tmp_path: Path) -> None:
    curves = [run(tmp_path, "--steps", "3", "--seed", seed)[1]["losses"]["clearhead"] for seed in ("7", "7", "8")]
    assert curves[0] == curves[1] != curves[2]


def test_an_interrupt_keeps_the_steps_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own, taken = train_tiny_gpt.Training.step, []

    def step(self: Any) -> float:
        taken.append(self)
        if len(taken) == 6:  # in the midst of the third pair
            raise KeyboardInterrupt
        return own(self)

    monkeypatch.setattr(train_tiny_gpt.Training, "step", step)
    code, found = run(tmp_path, "--steps", "9", "--attention", "both")
    assert code == 130
    assert found["stopped"]
    assert [len(losses) for losses in found["losses"].values()] == [2, 2]
    assert "stopped before the end" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--steps", "0"], "--steps takes 1 or more"), (["--width", "30"], "not a multiple of --heads 4")],
)
def test_what_does_not_fit_is_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        train_tiny_gpt.main([*TINY, *arguments])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err
