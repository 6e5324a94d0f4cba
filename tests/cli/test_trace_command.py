"""`clearhead trace`: what it writes, what it says, and one clear line for everything that can go wrong."""

from __future__ import annotations

import errno
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from clearhead import memory
from clearhead.cli.trace import parse_layers
from clearhead.trace import Trace, load, unfinished, writer
from clearhead.trace.keep import Keeping
from clearhead.trace.recording import needs, run_facts

sys.path.insert(0, str(Path(__file__).parents[1] / "trace"))
import tiny_models

Run = Callable[..., Any]


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "text.txt")


def test_a_trace(model: Path, text: Path, tmp_path: Path, run: Run) -> None:
    result = run("trace", model, "--text", text, "--max-tokens", "20", "--layers", "0,2", "-o", tmp_path / "a" / "t")
    assert result.exit_code == 0, result.stderr
    trace = Trace.open(tmp_path / "a" / "t")
    assert len(trace.tokens) == 20
    assert trace.layers == (0, 2)
    said = re.search(r"tiny: 2 of 3 layers, 20 tokens: the trace will take about ([\d.]+) kB", result.stderr)
    assert said
    assert 1000 * float(said[1]) == pytest.approx(trace.nbytes, rel=0.05)
    assert result.stdout.startswith(f"Wrote {tmp_path / 'a' / 't'}: ")
    assert "peak memory" in result.stdout
    assert "As matrices, its weights would take 19.2 kB." in result.stdout
    assert result.stdout.endswith(f"Next: clearhead report {tmp_path / 'a' / 't'}\n")


def test_the_trace_is_named_after_its_text(
    model: Path, text: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("trace", model, "--text", text).exit_code == 0
    assert left(tmp_path) == ["text.trace"]


@pytest.mark.parametrize(
    ("given", "layers"),
    [("0", {0}), ("0,5-8", {0, 5, 6, 7, 8}), (" 3 - 4 , 1", {1, 3, 4}), ("2-2,2", {2}), (None, None)],
)
def test_layers(given: str | None, layers: set[int] | None) -> None:
    assert parse_layers(given) == layers


@pytest.mark.parametrize("given", ["", "a", "1,", "1-", "-1", "1--2", "8-5", "1.5", "99999999"])
def test_layers_that_are_none_are_wrong_usage(given: str, model: Path, text: Path, run: Run) -> None:
    with pytest.raises(typer.BadParameter):
        parse_layers(given)
    assert run("trace", model, "--text", text, "--layers", given).exit_code == 2


def failed(result: Any, words: str) -> None:
    """It ended with 1, and its last line says why."""
    assert result.exit_code == 1, result.output
    *_, last = result.stderr.splitlines()
    assert last.startswith("clearhead: ")
    assert words in last
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_what_can_be_wrong_with_the_arguments(model: Path, text: Path, tmp_path: Path, run: Run) -> None:
    out = ("-o", tmp_path / "t")
    failed(run("trace", "nowhere", "--text", text, *out), "there is no model 'nowhere': give the path of a local")
    failed(run("trace", model, "--text", tmp_path / "gone", *out), "gone does not exist: --text takes the name")
    failed(run("trace", model, "--text", tmp_path, *out), "is a folder: --text takes the name of a text file")
    text.write_text(" \n")
    failed(run("trace", model, "--text", text, *out), "text.txt is empty: there is nothing to read")
    text.write_bytes("naïve".encode("latin1"))
    failed(run("trace", model, "--text", text, *out), "text.txt is not UTF-8 text: byte 2 is 0xef")
    text.write_text("the cat " * 300)
    long = run("trace", model, "--text", text, "--max-tokens", 300, *out)
    failed(long, "tokens and tiny reads at most 256: give --max-tokens 256 to trace its beginning")
    text.write_text("the cat")
    failed(run("trace", model, "--text", text, "--layers", "1,7", *out), "tiny has layers 0 to 2: there is no layer 7")
    assert left(tmp_path) == []


def test_of_a_text_that_is_too_long_the_beginning_is_read(model: Path, text: Path, tmp_path: Path, run: Run) -> None:
    text.write_text("the cat sat " * 300)
    result = run("trace", model, "--text", text, "-o", tmp_path / "t")
    assert result.exit_code == 0, result.stderr
    trace = Trace.open(tmp_path / "t")
    assert len(trace.tokens) == 256
    said = r"The text has [\d,]+ tokens and tiny reads at most 256: its first 256 are traced, up to character "
    assert re.search(said + rf"{trace.text.stop[-1]:,} of 3,600\.", result.stderr), result.stderr
    result = run("trace", model, "--text", text, "-o", tmp_path / "t", "--generate", 6)
    assert result.exit_code == 0, result.stderr
    assert "reads at most 250 before it writes 6: its first 250 are traced" in result.stderr
    assert 250 <= len(Trace.open(tmp_path / "t").tokens) <= 255
    failed(run("trace", model, "--text", text, "--generate", 256), "reads at most 256 tokens: it cannot write 256 more")
    failed(
        run("trace", model, "--text", text, "--generate", 6, "--max-tokens", 254, "-o", tmp_path / "u"),
        "reads at most 250 before it writes 6: give --max-tokens 250 to trace its beginning",
    )


@pytest.mark.parametrize(
    ("family", "options", "words"),
    [
        ("clip", [], "is a clip model, which does not read text alone: trace it in Python, with whatever it reads"),
        ("vit", [], "is a vit model, which does not read text alone"),
        ("whisper", ["--generate", "3"], "is a whisper model, which does not write text after text"),
        ("bert", ["--generate", "3"], "is a bert model, which does not write text after text"),
        ("xlnet", [], "does not run its attention through transformers' AttentionInterface"),
    ],
)
def test_models_that_do_not_read_text_alone(
    family: str, options: list[str], words: str, text: Path, tmp_path: Path, run: Run
) -> None:
    text.write_text("the cat sat")
    folder = tiny_models.save(tmp_path / "models" / family, family)
    failed(run("trace", folder, "--text", text, "-o", tmp_path / "t", *options), words)
    assert left(tmp_path) == ["models"]


def test_what_is_not_a_trace_is_not_overwritten(model: Path, text: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("years of work")
    failed(run("trace", model, "--text", text, "-o", tmp_path / "thesis"), "thesis exists and is not a trace")
    failed(run("trace", model, "--text", text, "-o", text), "text.txt is not a folder")
    assert left(tmp_path / "thesis") == ["chapter"]


def test_a_disk_without_room(
    model: Path, text: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=50_000))
    failed(run("trace", model, "--text", text, "-o", tmp_path / "t"), "and 50.0 kB are free in")
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device. Nothing was left behind"),
        (OSError(errno.EROFS, "Read-only file system"), "Read-only file system. Nothing was left behind"),
        (KeyboardInterrupt(), "stopped. Nothing half-written was left behind"),
    ],
)
def test_what_can_happen_while_it_writes(
    error: BaseException, words: str, model: Path, text: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = writer.write_tensors

    def fails(file: Path, arrays: Any) -> None:
        if file.name == "self-001.safetensors":
            raise error
        write(file, arrays)

    monkeypatch.setattr(writer, "write_tensors", fails)
    failed(run("trace", model, "--text", text, "-o", tmp_path / "t"), words)
    assert left(tmp_path) == []


def test_a_folder_that_cannot_be_made(
    model: Path, text: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*words: Any) -> bool:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(writer, "_claim", fails)
    result = run("trace", model, "--text", text, "-o", tmp_path / "t")
    failed(result, "t: Permission denied. Nothing was left behind")


def test_what_can_be_chosen(model: Path, text: Path, tmp_path: Path, run: Run) -> None:
    choices = ("--layers", "1", "--heads", "0,4-5", "--kinds", "self", "--store", "bfloat16")
    result = run("trace", model, "--text", text, "-o", tmp_path / "t", *choices)
    assert result.exit_code == 0, result.stderr
    (site,) = Trace.open(tmp_path / "t").sites
    assert (site.layer, site.numbers, site.dtype) == (1, (0, 4, 5), "BF16")
    failed(
        run("trace", model, "--text", text, "-o", tmp_path / "u", "--kinds", "cross"),
        "has no 'cross' attention; it has",
    )
    failed(
        run("trace", model, "--text", text, "-o", tmp_path / "u", "--heads", "9"), "heads 0 to 5: there is no head 9"
    )
    wrong = run("trace", model, "--text", text, "-o", tmp_path / "u", "--store", "int8")
    assert wrong.exit_code == 2
    assert "'int8': float16 or bfloat16" in wrong.stderr
    assert left(tmp_path) == ["t"]


def test_measures_only(model: Path, text: Path, tmp_path: Path, run: Run) -> None:
    result = run("trace", model, "--text", text, "-o", tmp_path / "t", "--measures-only")
    assert result.exit_code == 0, result.stderr
    assert {site.kept for site in Trace.open(tmp_path / "t").sites} == {"measures"}


def test_memory_and_size_are_said_first(
    model: Path, text: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run("trace", model, "--text", text, "-o", tmp_path / "t")
    said = r"3 of 3 layers, \d+ tokens: the trace will take about ([\d.]+) kB, reading it ([\d.]+) kB of memory"
    found = re.search(said, result.stderr)
    assert found, result.stderr
    trace = Trace.open(tmp_path / "t")
    assert 1000 * float(found[1]) == pytest.approx(trace.nbytes, rel=0.05)
    assert 1000 * float(found[2]) == pytest.approx(needs(load(str(model)), len(trace.tokens)).memory, abs=50)
    monkeypatch.setattr(memory, "available", lambda: 10_000)
    result = run("trace", model, "--text", text, "-o", tmp_path / "u")
    failed(result, "of memory beside the model and 10.0 kB are free: give a smaller --max-tokens")
    assert left(tmp_path) == ["t"]


def test_a_run_that_was_killed_goes_on(model: Path, text: Path, tmp_path: Path, run: Run) -> None:
    arguments = ("trace", model, "--text", text, "-o", tmp_path / "t")
    assert run(*arguments).exit_code == 0
    trace = Trace.open(tmp_path / "t")
    loaded = load(str(model))
    state = tmp_path / "t.unfinished"
    (tmp_path / "t").rename(state)
    (state / "trace.json").unlink()
    (state / "self-002.safetensors").unlink()
    done = list(zip(trace.sites, trace.checks.sites, strict=True))[:2]
    unfinished.write_state(state, run_facts(loaded, trace.text, Keeping()), done)
    failed(
        run(*arguments),
        "t.unfinished holds 2 of 3 attentions of a run of tiny that was stopped: `clearhead trace ... "
        "--continue` with the same model and text goes on with it",
    )
    assert run(*arguments, "--continue").exit_code == 0
    assert Trace.open(tmp_path / "t").sites == trace.sites
    assert left(tmp_path) == ["t"]


def test_a_model_that_writes(model: Path, text: Path, tmp_path: Path, run: Run) -> None:
    arguments = ("--text", text, "--max-tokens", 20, "-o", tmp_path / "t", "--generate", 6)
    result = run("trace", model, *arguments)
    assert result.exit_code == 0, result.stderr
    trace = Trace.open(tmp_path / "t")
    read = len(trace.tokens)
    assert 20 < read <= 25  # the last token was written and not read; an end of text may come before
    assert trace.text.start[19] >= 0
    assert trace.text.start[20] == trace.text.stop[19]  # what was written follows what was read
    assert list(trace.text.start) == sorted(trace.text.start)
    assert trace.facts(0).queries == trace.facts(0).keys == read
    translator = tiny_models.save(tmp_path / "bart", "bart")
    failed(run("trace", translator, *arguments[:-2]), "is an encoder-decoder model: say with --generate N how many")
    assert run("trace", translator, *arguments).exit_code == 0
    trace = Trace.open(tmp_path / "t")
    assert trace.kinds == ("encoder", "decoder", "cross")
    assert trace.facts(0, "cross").keys == 20
