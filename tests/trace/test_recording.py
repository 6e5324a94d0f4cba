"""A trace is the model's own attention, whole or not there, whatever happens while it is written."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch

from clearhead.trace import Call, Model, Trace, TraceError, load, record, recorder, tokenize, writer
from clearhead.trace.format import Tokens


def test_weights_are_those_of_eager_attention(tiny: Model, tokens: Tokens, recorded: Trace) -> None:
    tiny.network.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            inputs = torch.tensor([tokens.ids])
            attentions = tiny.network(input_ids=inputs, output_attentions=True, use_cache=False).attentions
    finally:
        tiny.network.set_attn_implementation("sdpa")
    for layer, expected in enumerate(attentions):
        found = np.asarray(recorded.weights(layer))
        assert np.abs(found - expected[0].numpy()).max() < 1e-5
        assert not np.triu(found, 1).any()
        for head in range(6):
            assert np.array_equal(np.asarray(recorded.weights(layer, head))[0], found[head])


@pytest.mark.parametrize("family", ["mistral", "gemma3", "gemma2", "gpt_oss", "gpt2", "bert"])
def test_other_families(family: str, tmp_path: Path) -> None:
    model = load(str(tiny_models.save(tmp_path / family, family)))
    tokens = tokenize(model.tokenizer, tiny_models.TEXT)
    trace = record(model, tokens, tmp_path / "trace")
    model.network.set_attn_implementation("eager")
    with torch.inference_mode():
        inputs = torch.tensor([tokens.ids])
        attentions = model.network(input_ids=inputs, output_attentions=True, use_cache=False).attentions
    for layer, expected in enumerate(attentions):
        assert np.abs(np.asarray(trace.weights(layer)) - expected[0].numpy()).max() < 1e-5


def test_bfloat16(tmp_path: Path) -> None:
    folder = tiny_models.save(tmp_path / "model", dtype=torch.bfloat16)
    tiny_models.build("llama").to(torch.bfloat16).save_pretrained(folder)
    model = load(str(folder))
    trace = record(model, tokenize(model.tokenizer, tiny_models.TEXT), tmp_path / "trace")
    assert trace.facts(0).dtype == "BF16"
    assert np.allclose(np.asarray(trace.weights(0)).sum(axis=-1), 1, atol=1e-5)


def test_what_is_on_disk(recorded: Trace) -> None:
    names = sorted(file.name for file in recorded.path.iterdir())
    assert names == ["self-000.safetensors", "self-001.safetensors", "self-002.safetensors", "trace.json"]
    index = json.loads((recorded.path / "trace.json").read_text())
    assert index["format"] == "clearhead-trace"
    assert index["version"] == 2
    assert index["model"]["type"] == "llama"
    assert index["sites"][1] == {
        "kind": "self",
        "layer": 1,
        "heads": 6,
        "key_heads": 2,
        "queries": len(recorded.tokens),
        "keys": len(recorded.tokens),
        "dim": 8,
        "dtype": "F32",
        "mask": "causal",
        "scale": 8**-0.5,
        "softcap": None,
        "window": None,
        "bias": "none",
        "causal": True,
        "numbers": [],
        "kept": "all",
    }
    assert os.stat(recorded.path).st_mode & 0o777 == 0o777 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_each_layer_is_written_as_it_happens(tiny: Model, tokens: Tokens, tmp_path: Path) -> None:
    seen = []

    def progress(layer: int) -> None:
        seen.append(sorted(file.name for file in (tmp_path / "t.unfinished").glob("*.safetensors")))

    record(tiny, tokens, tmp_path / "t", progress=progress)
    assert [len(files) for files in seen] == [1, 2, 3]
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_memory_does_not_grow_with_the_layers(
    tiny: Model, tokens: Tokens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hear, before = recorder.Recorder.hear, []

    def watched(self: recorder.Recorder, call: Call) -> None:
        gc.collect()
        assert not any(earlier() for earlier in before)
        before.append(weakref.ref(call.query))
        hear(self, call)
        before.extend(weakref.ref(tensor) for one in self.gatherings.values() for tensor in one.query)

    monkeypatch.setattr(recorder.Recorder, "hear", watched)
    record(tiny, tokens, tmp_path / "t")
    assert len(before) == 3


def test_chosen_layers(tiny: Model, tokens: Tokens, tmp_path: Path) -> None:
    trace = record(tiny, tokens, tmp_path / "t", layers=[2, 0])
    assert trace.layers == (0, 2)
    assert len(trace) == 2
    with pytest.raises(TraceError, match=r"layer 1 is not in the trace .*: it holds 0, 2"):
        trace.weights(1)
    with pytest.raises(TraceError, match="tiny has layers 0 to 2: there is no layer 3, 9"):
        record(tiny, tokens, tmp_path / "u", layers=[9, 1, 3])


def test_a_text_longer_than_the_context(tiny: Model, tmp_path: Path) -> None:
    tokens = tokenize(tiny.tokenizer, tiny_models.TEXT * 10)
    words = rf"the text has {len(tokens):,} tokens and tiny reads at most 256: give --max-tokens 256 to trace"
    with pytest.raises(TraceError, match=words):
        record(tiny, tokens, tmp_path / "t")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small(tiny: Model, tokens: Tokens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=20_000))
    with pytest.raises(TraceError, match=r"the trace takes about [0-9.]+ kB and 20\.0 kB are free in .*--layers"):
        record(tiny, tokens, tmp_path / "t")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
@pytest.mark.parametrize("before", [False, True])
def test_nothing_is_left_half_written(
    error: BaseException, before: bool, tiny: Model, tokens: Tokens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t"
    if before:
        record(tiny, tokens, path, layers=[1])
    write = writer.write_tensors

    def fails(file: Path, tensors: Any) -> None:
        write(file, tensors)
        if file.name == "self-001.safetensors":
            raise error

    monkeypatch.setattr(writer, "write_tensors", fails)
    words = r"the trace cannot be written to .*t: No space left on device\. Nothing was left behind"
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else TraceError) as caught:
        record(tiny, tokens, path)
    assert isinstance(error, KeyboardInterrupt) or caught.match(words)
    assert [left.name for left in tmp_path.iterdir()] == (["t"] if before else [])
    if before:
        assert Trace.open(path).layers == (1,)
    assert tiny.network.config._attn_implementation == "sdpa"


def test_a_trace_is_replaced(tiny: Model, tokens: Tokens, tmp_path: Path) -> None:
    record(tiny, tokens, tmp_path / "t")
    record(tiny, tokens, tmp_path / "t", layers=[1])
    assert Trace.open(tmp_path / "t").layers == (1,)
    assert [left.name for left in tmp_path.iterdir()] == ["t"]


def test_the_old_trace_comes_back_if_the_new_one_cannot_take_its_place(
    tiny: Model, tokens: Tokens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tiny, tokens, tmp_path / "t", layers=[1])
    rename = os.rename

    def fails(source: Any, target: Any) -> None:
        if str(source).endswith(".unfinished"):
            raise OSError(errno.EROFS, "Read-only file system")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(TraceError, match="Read-only file system"):
        record(tiny, tokens, tmp_path / "t")
    assert Trace.open(tmp_path / "t").layers == (1,)
    assert [left.name for left in tmp_path.iterdir()] == ["t"]


def test_an_empty_folder_is_used(tiny: Model, tokens: Tokens, tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    assert len(record(tiny, tokens, tmp_path / "t")) == 3


def test_what_is_not_a_trace_is_left_alone(tiny: Model, tokens: Tokens, tmp_path: Path) -> None:
    folder, file = tmp_path / "folder", tmp_path / "file"
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    (folder / "trace.json").write_text('{"format": "something else"}')
    file.write_text("a file")
    link = tmp_path / "link"
    link.symlink_to(folder)
    with pytest.raises(TraceError, match="folder exists and is not a trace: choose another folder with -o"):
        record(tiny, tokens, folder)
    with pytest.raises(TraceError, match="file is not a folder: choose another name with -o"):
        record(tiny, tokens, file)
    with pytest.raises(TraceError, match="link is not a folder"):
        record(tiny, tokens, link)
    with pytest.raises(TraceError, match="file is not a folder"):
        record(tiny, tokens, file / "inside" / "t")
    assert (folder / "thesis.tex").read_text() == "years of work"


def test_a_model_that_changes_its_scores_in_secret_is_refused(
    tiny: Model, tokens: Tokens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hear = recorder.Recorder.hear

    def biased(self: recorder.Recorder, call: Call) -> None:
        own = call.output + (0.1 if call.site.layer == 1 else 0)
        hear(self, Call(**{**vars(call), "output": own}))

    monkeypatch.setattr(recorder.Recorder, "hear", biased)
    with pytest.raises(TraceError, match=r"self layer 1, head \d: the weights of query \d+,.*off by 0\.\d+"):
        record(tiny, tokens, tmp_path / "t")
    assert list(tmp_path.iterdir()) == []
