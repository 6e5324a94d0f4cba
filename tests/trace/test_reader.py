"""Opening a trace checks all it says before anything is computed; what is wrong is said in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clearhead.trace import Trace, TraceError
from clearhead.trace.tensors import read_tensors, write_tensors


def change(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    file = path / "trace.json"
    index = json.loads(file.read_text())
    edit(index)
    file.write_text(json.dumps(index))


def test_what_it_says_of_itself(recorded: Trace) -> None:
    trace = Trace.open(str(recorded.path))
    assert len(trace) == 3
    assert trace.layers == (0, 1, 2)
    assert trace.model.name == "tiny"
    assert trace.model.attention == "sdpa"
    assert trace.tokens == trace.text.text
    assert repr(trace) == f"Trace({str(trace.path)!r}: tiny, {len(trace.tokens)} tokens, 3 layers)"
    assert trace.dense_nbytes == 3 * 6 * len(trace.tokens) ** 2 * 4
    assert trace.facts(2).key_heads == 2


def test_numbers_are_mapped_not_read(recorded: Trace) -> None:
    base: Any = recorded.arrays(0)["query"]
    while not isinstance(base, np.memmap):
        base = base.base
    assert Path(base.filename) == recorded.path / "self-000.safetensors"


def test_a_trace_is_read_without_torch(recorded: Trace) -> None:
    import subprocess
    import sys

    code = (
        "import sys; from clearhead.trace import Trace; "
        f"Trace.open({str(recorded.path)!r}).weights(1)[0, 5]; "
        "assert not {'torch', 'transformers', 'safetensors'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_trace_can_be_moved(recorded: Trace, copied: Path) -> None:
    assert np.array_equal(Trace.open(copied).weights(1)[2, 7], recorded.weights(1)[2, 7])


def test_heads_that_are_not_there(recorded: Trace) -> None:
    with pytest.raises(TraceError, match="layer 1 has heads 0 to 5, there is no head 6"):
        recorded.weights(1, 6)
    with pytest.raises(TraceError, match="there is no head -1"):
        recorded.weights(1, -1)


def test_folders_that_are_no_traces(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"nowhere does not exist\. `clearhead trace MODEL --text FILE"):
        Trace.open(tmp_path / "nowhere")
    with pytest.raises(TraceError, match=r"is not a trace: it has no trace\.json"):
        Trace.open(tmp_path)
    (tmp_path / "trace.json").write_text('{"format": "another"}')
    with pytest.raises(TraceError, match=r"trace\.json does not describe a trace of Clearhead's"):
        Trace.open(tmp_path)
    with pytest.raises(TraceError, match="is not a folder with a trace"):
        Trace.open(tmp_path / "trace.json")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000])
def test_an_index_that_is_not_json(content: bytes, copied: Path) -> None:
    (copied / "trace.json").write_bytes(content)
    with pytest.raises(TraceError, match=r"trace\.json is cut short or not JSON"):
        Trace.open(copied)


def test_a_newer_trace_asks_for_an_upgrade(copied: Path) -> None:
    change(copied, lambda index: index.update(version=3, clearhead="9.9"))
    with pytest.raises(TraceError, match=r"format version 3 by Clearhead 9\.9.*reads up to version 2: upgrade"):
        Trace.open(copied)


@pytest.mark.parametrize(
    "edit",
    [
        lambda index: index.update(version=0),
        lambda index: index.update(version="1"),
        lambda index: index.update(sides=3),
        lambda index: index.update(sites=[]),
        lambda index: index.update(clearhead=1),
        lambda index: index.pop("model"),
        lambda index: index["model"].pop("name"),
        lambda index: index["model"].update(layers=2.5),
        lambda index: index["model"].update(layers=True),
        lambda index: index["model"].update(layers=2),
        lambda index: index["sides"][0]["texts"][0]["text"].pop(),
        lambda index: index["sides"][0]["texts"][0].update(ids=["x"] * len(index["sides"][0]["texts"][0]["ids"])),
        lambda index: index["sites"].append(index["sites"][0]),
        lambda index: index["sites"][0].update(layer=-1),
        lambda index: index["sites"][0].update(heads=0),
        lambda index: index["sites"][0].update(key_heads=4),
        lambda index: index["sites"][0].update(mask="../../secret"),
        lambda index: index["sites"][0].update(scale=float("nan")),
        lambda index: index["sites"][0].update(scale="big"),
        lambda index: index["sites"][0].update(softcap=-1.0),
        lambda index: index["sites"][0].update(dtype="PICKLE"),
        lambda index: index["sites"][0].update(kind="../../secret"),
        lambda index: index["sites"][0].update(bias="big"),
        lambda index: index["sites"][0].update(kept="nothing"),
        lambda index: index["sites"][0].update(numbers=[0, 0, 1, 2, 3, 4]),
        lambda index: index["sites"][0].update(queries=3),
        lambda index: index["sites"][0].update(kind="cross"),
        lambda index: index["sides"].append(index["sides"][0]),
        lambda index: index["sides"][0].update(name="head"),
        lambda index: index["sides"][0].update(grid=[100, 100]),
        lambda index: index["sides"][0].update(texts=[]),
        lambda index: index["sides"][0]["texts"][0].update(padding=[-1]),
        lambda index: [index["sides"][0]["texts"][0][name].pop() for name in ("ids", "text", "start", "stop")],
        lambda index: index["checks"].update(missing=3),
        lambda index: index["checks"]["sites"][0].pop("hidden"),
    ],
)
def test_an_index_that_makes_no_sense(edit: Callable[[dict[str, Any]], Any], copied: Path) -> None:
    change(copied, edit)
    with pytest.raises(TraceError, match=r"trace\.json is damaged or was not written by Clearhead: .*again"):
        Trace.open(copied)


@pytest.mark.parametrize(
    "edit",
    [
        lambda index: index["sites"][0].update(heads=12),
        lambda index: index["sites"][0].update(dim=4),
        lambda index: index["sites"][0].update(dtype="F64"),
        lambda index: index["sites"][0].update(mask="intervals"),
        lambda index: index["sites"][0].update(mask="array"),
    ],
)
def test_files_that_hold_something_else(edit: Callable[[dict[str, Any]], Any], copied: Path) -> None:
    change(copied, edit)
    with pytest.raises(TraceError, match=r"self-000\.safetensors holds .*, the trace needs .*: record it again"):
        Trace.open(copied)


def test_more_or_fewer_arrays_than_the_trace_needs(copied: Path) -> None:
    file = copied / "self-002.safetensors"
    arrays = {name: array.copy() for name, array in read_tensors(file).items()}
    for tensors in (arrays | {"extra": np.zeros(2)}, {name: arrays[name] for name in ("query", "key")}):
        write_tensors(file, tensors)
        with pytest.raises(TraceError, match=r"self-002\.safetensors holds"):
            Trace.open(copied)


def test_a_layer_cut_short_or_gone(copied: Path) -> None:
    file = copied / "self-001.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(TraceError, match=r"self-001\.safetensors is cut short"):
        Trace.open(copied)
    file.unlink()
    with pytest.raises(TraceError, match=r"self-001\.safetensors is missing"):
        Trace.open(copied)


def test_masks_are_kept(tmp_path: Path, recorded: Trace) -> None:
    """Intervals and arrays, checked against the oracle."""
    from clearhead import core, masks, scores

    path = Path(shutil.copytree(recorded.path, tmp_path / "t"))
    tokens = len(recorded.tokens)
    arrays = {name: array.copy() for name, array in read_tensors(path / "self-000.safetensors").items()}
    row = np.arange(tokens)
    start, stop = np.maximum(0, row - 3), row + 1
    start[4] = stop[4] = 0  # a row that sees nothing
    allowed = np.tril(np.random.default_rng(0).random((6, tokens, tokens)) < 0.7)
    cases = {
        "intervals": (masks.intervals(start, stop), {"start": start, "stop": stop}),
        "array": (masks.array(allowed), {"mask": allowed}),
    }
    for kind, (mask, tensors) in cases.items():
        score = scores.dot(recorded.facts(0).scale)
        expected, logsumexp = core.attend(
            arrays["query"][0], arrays["key"][0], arrays["key"][0], mask=mask, score=score, dtype=np.float64
        )[1:]
        more = {"logsumexp": logsumexp, **tensors}
        write_tensors(path / "self-000.safetensors", arrays | {name: array[None] for name, array in more.items()})
        change(path, lambda index, kind=kind: index["sites"][0].update(mask=kind))
        trace = Trace.open(path)
        assert np.abs(np.asarray(trace.weights(0)) - expected).max() < 1e-5
        assert np.abs(np.asarray(trace.weights(0, 4))[0] - expected[4]).max() < 1e-5


def test_a_trace_of_version_1_still_opens(recorded: Trace, tmp_path: Path) -> None:
    """As Clearhead 0.1 wrote them: one text, a file for each layer, no axis for texts, nothing measured."""
    old = tmp_path / "old"
    old.mkdir()
    layers = []
    for site in recorded.sites:
        arrays = recorded.arrays(site.layer)
        kept = {name: np.array(arrays[name][0]) for name in ("query", "key", "logsumexp")}
        write_tensors(old / f"layer-{site.layer:03d}.safetensors", kept)
        facts = ("layer", "heads", "key_heads", "dim", "dtype", "mask", "scale", "softcap", "window")
        layers.append({name: getattr(site, name) for name in facts})
    tokens = {name: list(getattr(recorded.text, name)) for name in ("ids", "text", "start", "stop")}
    model = dict(vars(recorded.model))
    index = {"format": "clearhead-trace", "version": 1, "clearhead": "0.1.0"}
    (old / "trace.json").write_text(json.dumps(index | {"model": model, "tokens": tokens, "layers": layers}))
    trace = Trace.open(old)
    assert trace.kinds == ("self",)
    assert trace.tokens == recorded.tokens
    assert trace.layers == (0, 1, 2)
    assert np.array_equal(np.asarray(trace.weights(2)), np.asarray(recorded.weights(2)))
    assert np.array_equal(trace.weights(1, 4)[0, 7], recorded.weights(1, 4)[0, 7])
    assert trace.measures(0).mean("entropy") == pytest.approx(recorded.measures(0).mean("entropy"))
    assert trace.checks.sites == ()
    (old / "layer-001.safetensors").unlink()
    with pytest.raises(TraceError, match=r"layer-001\.safetensors is missing"):
        Trace.open(old)


def test_kinds_and_sides(recorded: Trace) -> None:
    assert recorded.kinds == ("self",)
    assert [str(site) for site in recorded.sites] == ["self layer 0", "self layer 1", "self layer 2"]
    assert recorded.texts == 1
    assert recorded.side("self", "key").text == recorded.tokens
    assert recorded.grid() is None
    assert recorded.checks.passed
    assert [check.layer for check in recorded.checks.sites] == [0, 1, 2]
    assert recorded.checks.missing == ()
    with pytest.raises(TraceError, match="this trace holds no 'cross' attention, only self"):
        recorded.weights(0, kind="cross")
    with pytest.raises(TraceError, match="a site has a query side and a key side, not 'value'"):
        recorded.side("self", "value")
    with pytest.raises(TraceError, match="the trace holds texts 0 to 0, there is no text 1"):
        recorded.weights(0, text=1)
