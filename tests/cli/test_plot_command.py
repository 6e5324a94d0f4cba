"""`clearhead plot`, and the pictures it makes."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import stacks
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image

from clearhead.picture import MARGIN, SMALLEST, draw, readable, resolution, spread
from clearhead.trace import Trace

Run = Callable[..., Any]


@pytest.mark.parametrize("size", [300, 640, 900])
def test_a_png_of_the_size_asked_for(size: int, recorded: Path, tmp_path: Path, run: Run) -> None:
    path = tmp_path / "new" / "head.png"
    result = run("plot", recorded, "--layer", 1, "--head", 2, "-o", path, "--size", size)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"Wrote {path}\n"
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        assert picture.width == size
        assert 0.8 * size < picture.height <= 1.1 * size
        assert len(picture.convert("RGB").getcolors(1 << 20)) > 50
    assert [left.name for left in path.parent.iterdir()] == ["head.png"]


def test_an_svg_names_its_axes(recorded: Path, tmp_path: Path, run: Run) -> None:
    path = tmp_path / "head.SVG"
    assert run("plot", recorded, "--layer", 0, "--head", 0, "-o", path).exit_code == 0
    assert ElementTree.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    words = path.read_text()
    assert all(f"<!-- {word} -->" in words for word in ("query", "key", "mean weight", "cat"))


def test_cross_attention_names_the_tokens_of_both(tmp_path: Path, run: Run) -> None:
    stacks.save(tmp_path / "t")
    path = tmp_path / "head.svg"
    words = ("plot", tmp_path / "t", "--layer", 1, "--head", 2, "-o", path)
    assert run(*words, "--kind", "cross", "--text", 1).exit_code == 0
    drawn = path.read_text()
    assert all(f"<!-- {word} -->" in drawn for word in ("das", "klein", "house", "!"))
    assert "cross layer 1, head 2" in drawn
    result = run(*words)
    assert result.exit_code == 2
    assert "this trace holds encoder, decoder, cross: say which" in result.stderr
    assert "there is no text 2" in run(*words, "--kind", "cross", "--text", 2).stderr


def test_a_trace_of_measures_has_the_map_that_was_recorded(
    model: Path, text: Path, recorded: Path, tmp_path: Path, run: Run
) -> None:
    small = tmp_path / "small"
    assert run("trace", model, "--text", text, "--measures-only", "--heads", "1,3", "-o", small).exit_code == 0
    found = Trace.open(small).map(2, 3, 500)
    assert found == pytest.approx(np.asarray(Trace.open(recorded).weights(2, 3)[0]), abs=1e-6)  # 37 tokens fit
    assert run("plot", small, "--layer", 2, "--head", 3, "-o", tmp_path / "x.png").exit_code == 0
    assert "has heads 1, 3, there is no head 2" in run("plot", small, "--layer", 2, "--head", 2, "-o", "x.png").stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--layer", "9", "--head", "0", "-o", "x.png"], "layer 9 is not in the trace"),
        (["--layer", "0", "--head", "9", "-o", "x.png"], "layer 0 has heads 0 to 5, there is no head 9"),
        (["--layer", "0", "--head", "0", "-o", "x.gif"], "x.gif must end in .png or .svg"),
    ],
)
def test_what_cannot_be_drawn(
    words: list[str], said: str, recorded: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("plot", recorded, *words)
    assert result.exit_code == 1
    assert said in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_missing_matplotlib(recorded: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("plot", recorded, "--layer", 0, "--head", 0, "-o", tmp_path / "x.png")
    assert result.exit_code == 1
    assert "pip install 'clearhead[demo]'" in result.stderr


def test_long_texts_show_positions(tmp_path: Path) -> None:
    draw(np.tril(np.full((50, 50), 0.02)), tmp_path / "x.svg", tokens=5000, title="long", size=400)
    words = (tmp_path / "x.svg").read_text()
    assert "<!-- 4,000 -->" in words
    assert "<!-- long -->" in words


@pytest.mark.parametrize("map", [np.zeros((3, 3)), np.ones((1, 1)), np.full((2, 700), 1e-12)])
def test_odd_maps(map: np.ndarray, tmp_path: Path) -> None:
    assert draw(map, tmp_path / "x.png", tokens=max(map.shape)).exists()


def test_what_is_hidden_is_light_and_a_weight_of_0_is_dark(tmp_path: Path) -> None:
    """Weights of e-45 and less are 0 in float32, and no mask hides them."""
    map, hidden = np.tril(np.full((4, 4), 0.5)), ~np.tri(4, dtype=bool)
    map[3, 0] = 0
    for name, told in (("told", hidden), ("guessed", None)):
        draw(map, tmp_path / f"{name}.png", tokens=500, hidden=told)
        with Image.open(tmp_path / f"{name}.png") as picture:
            pixels = np.asarray(picture.convert("L"))
        left, top, side = *MARGIN[:2], resolution(900, 500_000)
        places = [((2 * row + 1) * side // 8, (2 * key + 1) * side // 8) for row, key in ((0, 3), (3, 0), (3, 1))]
        shades = [int(pixels[top + down, left + right]) for down, right in places]
        assert shades[0] == 240
        assert shades[1] < 20 if told is not None else shades[1] == 240
        assert 200 < shades[2] < 250


def test_characters_without_a_glyph_are_drawn_without_a_warning(tmp_path: Path) -> None:
    draw(np.eye(3), tmp_path / "x.png", tokens=["漢字", "🙂", "\x07"])


@pytest.mark.parametrize(
    ("map", "options", "words"),
    [
        (np.zeros(3), {}, r"map must be \(rows, columns\) of finite numbers, got shape \(3,\)"),
        (np.zeros((0, 3)), {}, "map must be"),
        (np.full((2, 2), np.nan), {}, "map must be"),
        (np.eye(2), {"hidden": np.zeros((2, 3), bool)}, r"hidden has shape \(2, 3\), and the map \(2, 2\)"),
        (np.eye(2), {"size": SMALLEST - 1}, "size is 299: a picture needs 300 pixels"),
    ],
)
def test_maps_that_cannot_be_drawn(map: np.ndarray, options: dict[str, int], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        draw(map, tmp_path / "x.png", tokens=2, **options)


def test_a_full_disk_leaves_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*words: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        draw(np.eye(3), tmp_path / "x.png", tokens=3)
    assert list(tmp_path.iterdir()) == []


@given(arrays(float, st.tuples(st.integers(1, 9), st.integers(1, 9)), elements=st.floats(0, 1)), st.integers(1, 30))
def test_pixels_are_means(rows: np.ndarray, side: int) -> None:
    pixels = spread(rows, side)
    assert pixels.shape == (side, side)
    assert pixels.mean() == pytest.approx(rows.mean(), abs=1e-12)
    assert pixels.max() <= rows.max() + 1e-12


def test_resolution() -> None:
    assert resolution(900, 40) == 40
    assert resolution(900, 100_000) == 722


def test_readable() -> None:
    assert [readable(token) for token in ("\t", "a\u200bb", " ", "")] == ["⇥", "a·b", "␣", ""]
