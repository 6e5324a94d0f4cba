"""A run that is killed leaves a folder that says what it holds, never opens as a trace, and can be gone on with."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models

import clearhead as ch
from clearhead.trace import Model, Trace, TraceError, load, record, tokenize, unfinished
from clearhead.trace.format import Tokens
from clearhead.trace.keep import Keeping
from clearhead.trace.recording import run_facts
from clearhead.trace.writer import TraceWriter

KILLED = """
    import os, signal, sys
    sys.path.insert(0, {tests!r})
    import tiny_models
    from clearhead.trace import load, record, tokenize
    model = load({model!r})
    def progress(layer):
        if layer == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    record(model, tokenize(model.tokenizer, tiny_models.TEXT), {path!r}, progress=progress)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def killed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `kill -9` in the second of three layers leaves beside the path, which is given."""
    path = tmp_path_factory.mktemp("killed") / "t"
    code = textwrap.dedent(KILLED).format(tests=str(Path(__file__).parent), model=str(folder), path=str(path))
    found = subprocess.run([sys.executable, "-c", code], env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert found.returncode == -signal.SIGKILL
    return path


@pytest.fixture
def left(killed: Path, tmp_path: Path) -> Path:
    """A copy that a test may change: the path of the trace that was not finished."""
    shutil.copytree(unfinished.folder_for(killed), tmp_path / "t.unfinished")
    return tmp_path / "t"


def test_what_is_left(killed: Path) -> None:
    assert [path.name for path in killed.parent.iterdir()] == ["t.unfinished"]
    names = sorted(path.name for path in unfinished.folder_for(killed).iterdir())
    assert names == ["lock", "self-000.safetensors", "self-001.safetensors", "unfinished.json"]


def test_it_never_opens_as_a_trace(killed: Path) -> None:
    words = (
        r"t\.unfinished holds 2 of 3 attentions of a run of tiny that was stopped: it is not a trace; `.*--continue`"
    )
    for path in (killed, unfinished.folder_for(killed)):
        with pytest.raises(TraceError, match=words):
            Trace.open(path)


def test_it_is_not_written_over_unasked(left: Path, tiny: Model, tokens: Tokens) -> None:
    words = r"t\.unfinished holds 2 of 3 attentions of a run of tiny that was stopped: `clearhead trace .* --continue`"
    with pytest.raises(TraceError, match=words):
        record(tiny, tokens, left)
    assert (left.parent / "t.unfinished" / "unfinished.json").is_file()


def test_going_on(left: Path, folder: Path, tokens: Tokens, tmp_path: Path) -> None:
    model, seen = load(str(folder)), []
    trace = record(model, tokens, left, go_on=True, progress=seen.append)
    assert seen == [2]  # the others were whole
    whole = record(model, tokens, tmp_path / "whole")
    assert trace.sites == whole.sites
    assert trace.checks == whole.checks
    assert trace.text == whole.text
    for layer in whole.layers:
        assert np.array_equal(np.asarray(trace.weights(layer)), np.asarray(whole.weights(layer)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t", "whole"]
    assert sorted(path.name for path in left.iterdir()) == [
        *(f"self-00{i}.safetensors" for i in range(3)),
        "trace.json",
    ]


def test_going_on_when_all_is_there_but_the_index(left: Path, folder: Path, tokens: Tokens, tmp_path: Path) -> None:
    """Killed between the last layer and the end."""
    model = load(str(folder))
    whole = record(model, tokens, tmp_path / "whole")
    state = left.parent / "t.unfinished"
    (state / "self-002.safetensors").write_bytes((tmp_path / "whole" / "self-002.safetensors").read_bytes())
    run, done = unfinished.read_state(state) or ({}, [])
    unfinished.write_state(state, run, [*done, (whole.sites[2], whole.checks.sites[2])])
    trace = record(model, tokens, left, go_on=True)
    assert trace.sites == whole.sites
    assert trace.model == whole.model


def test_there_is_nothing_to_go_on_with(tiny: Model, tokens: Tokens, tmp_path: Path) -> None:
    assert len(record(tiny, tokens, tmp_path / "t", go_on=True)) == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("text", r"is of another run \(tokens differ\)"),
        ("layers", r"is of another run \(layers, of differ\)"),
        ("store", r"is of another run \(store differ\)"),
        ("weights", r"is of another run \(weights differ\)"),
    ],
)
def test_another_run_does_not_go_on(change: str, words: str, left: Path, folder: Path, tokens: Tokens) -> None:
    model = load(str(folder))
    options: dict[str, Any] = {"layers": {"layers": [0, 2]}, "store": {"store": "float16"}}.get(change, {})
    if change == "text":
        tokens = tokenize(model.tokenizer, "The dog sat.")
    if change == "weights":
        model.network.norm.weight.data += 1
    with pytest.raises(TraceError, match=words + ": give the same model, text and choices to go on with it"):
        record(model, tokens, left, go_on=True, **options)
    assert (left.parent / "t.unfinished").is_dir()


@pytest.mark.parametrize("damage", ["json", "file", "fact"])
def test_a_damaged_folder_is_not_gone_on_with(damage: str, left: Path, folder: Path, tokens: Tokens) -> None:
    state = left.parent / "t.unfinished"
    if damage == "json":
        (state / "unfinished.json").write_text("{")
    if damage == "file":
        file = state / "self-001.safetensors"
        file.write_bytes(file.read_bytes()[:-10])
    if damage == "fact":
        data = json.loads((state / "unfinished.json").read_text())
        data["sites"][0]["site"]["heads"] = "many"
        (state / "unfinished.json").write_text(json.dumps(data))
    with pytest.raises(TraceError, match=r"t\.unfinished does not say what it holds: remove it, and record"):
        record(load(str(folder)), tokens, left, go_on=True)


def test_a_run_that_goes_on_is_not_said_to_be_stopped(tiny: Model, tokens: Tokens, tmp_path: Path) -> None:
    said = []

    def look(layer: int) -> None:
        with pytest.raises(TraceError) as caught:
            Trace.open(tmp_path / "t")
        said.append(str(caught.value))

    record(tiny, tokens, tmp_path / "t", progress=look)
    assert [f"holds {n} of 3 attentions of a run of tiny that is being written: it is no trace yet" in words
            for n, words in enumerate(said, 1)] == [True] * 3  # fmt: skip


def test_all_attentions_of_several_stacks_are_counted(tmp_path: Path) -> None:
    """Layers 0 to 2 of a decoder are six attentions beside the encoder's two."""
    model = load(str(tiny_models.save(tmp_path / "bart", "bart")), writing=True)
    tokens = tokenize(model.tokenizer, "The cat sat.")
    assert run_facts(model, tokens, Keeping(), write=3)["of"] == "8"
    assert run_facts(model, tokens, Keeping(), layers=[0, 2], kinds=["decoder", "encoder"], write=3)["of"] == "3"


KILLED_AT_HAND = """
    import os, signal, sys
    sys.path.insert(0, {tests!r})
    import tiny_models
    import clearhead as ch
    from clearhead.trace import recorder
    keep, kept = recorder.Recorder.keep, []
    def killed(self, one):
        keep(self, one)
        kept.append(one)
        if len(kept) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
    recorder.Recorder.keep = killed
    model, inputs = tiny_models.build("llama"), tiny_models.inputs("llama")
    if {how!r} == "trace":
        ch.trace(model, inputs, {path!r})
    with ch.tracing(model, {path!r}, layers=[0, 1]):
        model(**inputs)
"""


@pytest.mark.parametrize(("how", "of"), [("trace", 3), ("tracing", 2)])
def test_a_killed_run_of_inputs_at_hand_says_that_it_can_only_be_removed(how: str, of: int, tmp_path: Path) -> None:
    """``ch.trace(model, inputs, path)`` and ``ch.tracing``: there is no text that could be read again."""
    path = tmp_path / "t"
    code = textwrap.dedent(KILLED_AT_HAND).format(tests=str(Path(__file__).parent), path=str(path), how=how)
    found = subprocess.run([sys.executable, "-c", code], env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert found.returncode == -signal.SIGKILL
    assert [file.name for file in tmp_path.iterdir()] == ["t.unfinished"]
    holds = rf"t\.unfinished holds 2 of {of} attentions of a run of LlamaForCausalLM that was stopped"
    only = "it does not say what was read, so that nothing can go on with it. Remove it, and trace"
    for folder in (path, unfinished.folder_for(path)):
        with pytest.raises(TraceError, match=rf"{holds}: it is not a trace; {only}"):
            Trace.open(folder)
    model, inputs = tiny_models.build("llama"), tiny_models.inputs("llama")
    with pytest.raises(TraceError, match=rf"{holds}: {only}"):
        ch.trace(model, inputs, path)
    loaded = load(str(tiny_models.save(tmp_path / "tiny")))
    with pytest.raises(TraceError, match=rf"{holds}: {only}"):
        record(loaded, tokenize(loaded.tokenizer, tiny_models.TEXT), path, go_on=True)
    shutil.rmtree(unfinished.folder_for(path))
    assert len(ch.trace(model, inputs, path)) == 3


def test_what_saving_left_says_what_it_holds(recorded: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked at while it is saved, as if the process had been killed there."""
    finish, said = TraceWriter.finish, []

    def watched(self: TraceWriter, index: Any) -> None:
        said.append((unfinished.said(self.folder, locked=True), unfinished.advice(self.folder)))
        finish(self, index)

    monkeypatch.setattr(TraceWriter, "finish", watched)
    recorded.save(tmp_path / "saved")
    ((holds, advice),) = said
    assert holds == f"{tmp_path / 'saved'}.unfinished holds 3 of 3 attentions of a run of tiny that was stopped"
    assert "nothing can go on with it. Remove it, and trace or save again" in advice


def test_two_processes_do_not_write_into_one_folder(tiny: Model, tokens: Tokens, tmp_path: Path) -> None:
    def second(layer: int) -> None:
        with pytest.raises(TraceError, match=r"t\.unfinished is being written by another process: wait for it"):
            record(tiny, tokens, tmp_path / "t", go_on=bool(layer % 2))

    assert len(record(tiny, tokens, tmp_path / "t", progress=second)) == 3


def test_what_is_in_the_way(tiny: Model, tokens: Tokens, tmp_path: Path) -> None:
    (tmp_path / "t.unfinished").mkdir()
    (tmp_path / "t.unfinished" / "thesis").write_text("years of work")
    with pytest.raises(TraceError, match=r"t\.unfinished is in the way: remove it$"):
        record(tiny, tokens, tmp_path / "t")
    (tmp_path / "u.unfinished").write_text("a file")
    with pytest.raises(TraceError, match=r"u\.unfinished is in the way: remove it, or choose another name"):
        record(tiny, tokens, tmp_path / "u")
    assert (tmp_path / "t.unfinished" / "thesis").read_text() == "years of work"
