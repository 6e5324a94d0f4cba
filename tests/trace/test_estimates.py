"""What a trace is said to take is what it takes: on disk, whatever is chosen, and of what is held in memory."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
import torch

import clearhead as ch
from clearhead import memory
from clearhead.trace import TraceError, load, record, recorder, tokenize
from clearhead.trace.estimates import Reads, estimate, reads_inputs
from clearhead.trace.keep import Keeping
from clearhead.trace.recording import needs

CLOSE = 0.05  # of the whole folder's bytes, or of what is held


def ids(texts: int, tokens: int, padded: int = 0) -> dict[str, Any]:
    found = torch.randint(2, 320, (texts, tokens), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(found)
    mask[:, :padded] = 0
    return {"input_ids": found, "attention_mask": mask}


def translated(texts: int, tokens: int, written: int) -> dict[str, Any]:
    return ids(texts, tokens) | {"decoder_input_ids": ids(texts, written)["input_ids"]}


@pytest.mark.parametrize(
    ("family", "inputs", "options"),
    [
        ("llama", ids(1, 200), {}),
        ("llama", ids(2, 150, padded=30), {}),
        ("llama", ids(1, 200), {"layers": [1], "heads": [0, 5, 2]}),
        ("llama", ids(1, 200), {"store": "bfloat16"}),
        ("llama", ids(1, 200), {"only_measures": True}),
        ("llama", ids(1, 30), {"only_measures": True, "heads": [4]}),
        ("gpt2", ids(1, 200), {}),
        ("gpt_neox", ids(1, 200), {}),
        ("gemma3", ids(1, 200), {}),
        ("bert", ids(3, 100, padded=5), {"store": "float16"}),
        ("distilbert", ids(1, 100), {}),
        ("albert", ids(1, 100), {}),
        ("t5", translated(1, 200, 90), {}),
        ("bart", translated(2, 200, 40), {}),
        ("bart", translated(1, 200, 40), {"kinds": ["cross"]}),
        ("bart", translated(1, 200, 40), {"kinds": ["decoder", "encoder"], "only_measures": True}),
        ("marian", translated(1, 50, 200), {"kinds": ["cross"], "layers": [0, 2], "store": "float16"}),
    ],
)
def test_what_is_written(family: str, inputs: dict[str, Any], options: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_models.build(family)
    trace = ch.trace(model, inputs, tmp_path / "t", **options)
    reads = reads_inputs(model, inputs)
    assert reads is not None
    keeping = Keeping(options.get("heads"), options.get("store"), options.get("only_measures", False))
    found = estimate(model, reads, options.get("layers"), options.get("kinds"), keeping)
    assert found.disk == pytest.approx(trace.nbytes, rel=CLOSE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_models_of_sixteen_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    model, inputs = tiny_models.build("llama").to(dtype), ids(1, 200)
    trace = ch.trace(model, inputs, tmp_path / "t")
    reads = reads_inputs(model, inputs)
    assert reads is not None
    assert estimate(model, reads).disk == pytest.approx(trace.nbytes, rel=CLOSE)


@pytest.mark.parametrize(("family", "kinds"), [("llama", None), ("bart", None), ("bart", ["cross"])])
@pytest.mark.parametrize("only_measures", [False, True])
def test_what_a_model_writes(
    family: str, kinds: Any, only_measures: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generation is written as one record, and held until its end."""
    facts = {} if family == "llama" else {"eos_token_id": None}
    model = load(str(tiny_models.save(tmp_path / family, family, **facts)), writing=True)
    model.network.generation_config.eos_token_id = None  # so that it writes all that it may
    tokens = tokenize(model.tokenizer, tiny_models.TEXT * 2)
    finish, held = recorder.Recorder.finish, []

    def watched(self: recorder.Recorder, *arguments: Any) -> None:
        tensors = [x for one in self.gatherings.values() for x in (*one.query, *one.key)]
        held.append(sum(x.numel() * x.element_size() for x in tensors))
        finish(self, *arguments)

    monkeypatch.setattr(recorder.Recorder, "finish", watched)
    write = 60
    trace = record(model, tokens, tmp_path / "t", kinds=kinds, only_measures=only_measures, write=write)
    found = needs(model, len(tokens), None, kinds, Keeping(only_measures=only_measures), write)
    assert found.disk == pytest.approx(trace.nbytes, rel=CLOSE)
    reads = Reads(
        1, {"self": len(tokens) + write - 1} if family == "llama" else {"encoder": len(tokens), "decoder": write}
    )
    apart = estimate(model.network, reads, kinds=kinds, once=False).memory - estimate(model.network, reads).memory
    assert apart == pytest.approx(held[0], rel=1e-3)
    cache = 3 * (len(tokens) + write - 1) * 2 * 2 * 8 * 4  # of layers, tokens, keys and values, heads, dim, bytes
    if family == "llama":
        assert found.memory - estimate(model.network, reads, once=False).memory == cache


def test_a_trace_in_memory_is_held_there() -> None:
    model, inputs = tiny_models.build("llama"), ids(1, 200)
    reads = reads_inputs(model, inputs)
    assert reads is not None
    apart = estimate(model, reads, in_memory=True).memory - estimate(model, reads).memory
    assert apart == pytest.approx(ch.trace(model, inputs).nbytes, rel=0.1)  # beside, tokens take some


def test_eager_attention_makes_its_matrices() -> None:
    model, inputs = tiny_models.build("llama"), ids(2, 200)
    reads = reads_inputs(model, inputs)
    assert reads is not None
    before = estimate(model, reads).memory
    model.set_attn_implementation("eager")
    assert estimate(model, reads).memory - before == 3 * 2 * 6 * 200 * 200 * 4


@pytest.mark.parametrize("family", ["vit", "whisper", "clip"])
def test_what_is_no_text_is_not_estimated(family: str) -> None:
    assert reads_inputs(tiny_models.build(family), tiny_models.inputs(family)) is None


def test_what_is_read() -> None:
    llama, bart = tiny_models.build("llama"), tiny_models.build("bart")
    assert reads_inputs(llama, ids(2, 7)) == Reads(2, {"self": 7})
    assert reads_inputs(llama, ids(2, 7, padded=1)) == Reads(2, {"self": 7}, padded=True)
    assert reads_inputs(llama, {"inputs_embeds": torch.zeros(2, 7, 48)}) == Reads(2, {"self": 7})
    assert reads_inputs(llama, ids(1, 7) | {"past_key_values": object()}) is None
    assert reads_inputs(bart, translated(2, 7, 4)) == Reads(2, {"encoder": 7, "decoder": 4})
    assert reads_inputs(bart, ids(2, 7)) is None  # what its decoder reads, it makes of that itself


def test_refused_before_the_model_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = tiny_models.build("llama"), ids(1, 200)
    ran: list[Any] = []
    model.register_forward_pre_hook(lambda *_: ran.append(1))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_100_000))
    words = (
        r"the trace takes about \d+\.\d kB and 1\.1 MB are free in .*: give fewer texts, tokens, layers or heads, or "
    )
    with pytest.raises(TraceError, match=words + "only_measures=True, or choose another folder"):
        ch.trace(model, inputs, tmp_path / "t")
    monkeypatch.setattr(memory, "available", lambda: 100_000)
    words = r"takes about \d+\.\d .B of memory beside the model and 100\.0 kB are free: give "
    with pytest.raises(TraceError, match=words + "a path, to keep the trace on disk, or fewer texts"):
        ch.trace(model, inputs)
    monkeypatch.undo()
    monkeypatch.setattr(memory, "available", lambda: 100_000)
    with pytest.raises(TraceError, match=words + "fewer texts or tokens"):
        ch.trace(model, inputs, tmp_path / "t")
    assert ran == []
    assert list(tmp_path.iterdir()) == []
