"""Tracing a model that is at hand: what can be chosen, where it goes, and what is left when something fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch

import clearhead as ch
from clearhead.trace import Trace, TraceError, measured
from clearhead.trace.tensors import read_tensors, write_tensors


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_models.build("llama")


@pytest.fixture(scope="module")
def inputs() -> dict[str, Any]:
    return tiny_models.inputs("llama")


@pytest.fixture(scope="module")
def whole(model: Any, inputs: dict[str, Any]) -> Trace:
    return ch.trace(model, inputs)


def test_the_package_is_the_function(whole: Trace) -> None:
    """`ch.trace` is the package `clearhead.trace` too, whichever is asked for first."""
    assert isinstance(whole, Trace)
    code = (
        "import clearhead as ch, sys; assert 'torch' not in sys.modules; ch.trace.Trace; assert callable(ch.trace); "
        "from clearhead.trace import tracing; assert ch.tracing is tracing; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_in_memory_and_on_disk_are_the_same(model: Any, inputs: dict[str, Any], whole: Trace, tmp_path: Path) -> None:
    stored = ch.trace(model, inputs, tmp_path / "t")
    assert whole.path is None
    assert stored.path == tmp_path / "t"
    assert stored.text == whole.text
    assert stored.sites == whole.sites
    assert stored.checks == whole.checks
    for layer in whole.layers:
        for name, array in whole.arrays(layer).items():
            assert np.array_equal(array, stored.arrays(layer)[name], equal_nan=True)
            assert not array.flags.writeable
    assert whole.nbytes > 0


def test_a_trace_in_memory_can_be_saved(whole: Trace, tmp_path: Path) -> None:
    saved = whole.save(tmp_path / "t")
    assert np.array_equal(np.asarray(saved.weights(1, text=2)), np.asarray(whole.weights(1, text=2)))
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_a_trace_outlives_the_model_s_memory(model: Any, inputs: dict[str, Any], whole: Trace) -> None:
    """Static caches are written over: what was heard was copied."""
    with torch.inference_mode(), ch.tracing(model) as trace:
        cache = model(**inputs, use_cache=True).cache
    cache.reset()
    assert np.array_equal(np.asarray(trace.weights(1)), np.asarray(whole.weights(1)))


def test_tokens_have_names(model: Any, inputs: dict[str, Any], whole: Trace) -> None:
    assert whole.tokens == tuple(map(str, inputs["input_ids"][0].tolist()))
    ids = tiny_models.tokenizer()("the cat sat", return_tensors="pt")
    trace = ch.trace(model, ids, tokenizer=tiny_models.tokenizer())
    assert "".join(trace.tokens) == "the cat sat"


def test_chosen_layers_heads_and_kinds(model: Any, inputs: dict[str, Any], whole: Trace) -> None:
    trace = ch.trace(model, inputs, layers=[2], heads=[4, 1])
    assert trace.layers == (2,)
    site = trace.facts(2)
    assert (site.heads, site.key_heads, site.numbers) == (2, 2, (1, 4))
    assert np.array_equal(np.asarray(trace.weights(2, 4, text=1)), np.asarray(whole.weights(2, 4, text=1)))
    assert np.array_equal(np.asarray(trace.weights(2))[0], np.asarray(whole.weights(2, 1))[0])
    assert trace.checks.missing == ("self layer 0", "self layer 1")
    with pytest.raises(TraceError, match="layer 2 has heads 1, 4, there is no head 0"):
        trace.weights(2, 0)
    with pytest.raises(TraceError, match="self layer 0 has heads 0 to 5: there is no head 6"):
        ch.trace(model, inputs, heads=[6])
    with pytest.raises(TraceError, match="LlamaForCausalLM has no 'cross' attention; it has self"):
        ch.trace(model, inputs, kinds=["cross"])
    bart = ch.trace(tiny_models.build("bart"), tiny_models.inputs("bart"), kinds=["cross"], layers=[1])
    assert [str(site) for site in bart.sites] == ["cross layer 1"]
    assert len(bart.side(of="key")) == 17


@pytest.mark.parametrize("family", ["gpt_oss", "t5", "gemma2"])
def test_chosen_heads_keep_what_is_theirs(family: str) -> None:
    """Sinks and biases are each head's own."""
    model, inputs = tiny_models.build(family), tiny_models.inputs(family)
    some, every = (ch.trace(model, inputs, heads=heads) for heads in ([5, 2], None))
    for site in some.sites:
        for head in (2, 5):
            found = (np.asarray(trace.weights(site.layer, head, kind=site.kind, text=1)) for trace in (some, every))
            assert np.array_equal(*found)


@pytest.mark.parametrize("store", ["float16", "bfloat16"])
def test_sixteen_bits_on_request(store: Any, model: Any, inputs: dict[str, Any], whole: Trace) -> None:
    trace = ch.trace(model, inputs, store=store)
    assert trace.arrays(0)["query"].dtype.name == store
    assert trace.checks.passed  # logsumexp is that of what was stored
    assert {check.dtype for check in trace.checks.sites} == {"F32"}  # what the model computed in
    assert np.abs(np.asarray(trace.weights(0)) - np.asarray(whole.weights(0))).max() < 0.1
    with pytest.raises(TraceError, match="store takes 'float16' or 'bfloat16', or None for the model's own dtype"):
        ch.trace(model, inputs, store="int8")  # type: ignore[arg-type]


def test_measures_only(model: Any, inputs: dict[str, Any], whole: Trace, tmp_path: Path) -> None:
    trace = ch.trace(model, inputs, tmp_path / "t", only_measures=True)
    assert Trace.open(trace.path).sites == trace.sites
    assert {site.kept for site in trace.sites} == {"measures"}
    found, expected = trace.measures(1, text=2), whole.measures(1, text=2)
    assert list(found) == list(expected)
    for name in found:
        assert np.array_equal(found.mean(name), expected.mean(name))
    for name in ("pooled", "received"):  # of a text so short in 32 bits, as they are
        assert np.array_equal(getattr(found, name), getattr(expected, name))
    assert np.array_equal(found.rows, expected.rows)
    words = r"was recorded with measures only: self layer 1 has no queries and keys.*trace\.measures\(1\) has what was"
    with pytest.raises(TraceError, match=words):
        trace.weights(1)
    assert "query" not in trace.arrays(1)


def test_a_trace_of_measures_takes_two_bytes_a_token_and_head(model: Any, tmp_path: Path) -> None:
    """Beside them a map of 64 x 64 and some means: 8.3 kB a head, and the names of arrays, and the tokens."""
    ids = torch.randint(2, 320, (1, 240), generator=torch.Generator().manual_seed(1))
    sizes = []
    for tokens in (100, 240):
        trace = ch.trace(model, {"input_ids": ids[:, :tokens]}, tmp_path / str(tokens), only_measures=True)
        sizes.append([file.stat().st_size for file in sorted(trace.path.glob("*.safetensors"))])
    heads = 6
    for small, large in zip(*sizes, strict=True):
        assert (large - small) / (140 * heads) == pytest.approx(2, abs=0.05)  # headers have a digit more
        assert small - heads * 2 * 100 == pytest.approx(heads * (64 * 64 * 2 + 88), abs=1200)


def test_what_does_not_fit_into_sixteen_bits_is_kept_in_more(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sink of a text of 65,504 tokens and more may receive more than float16 can say."""
    inputs = {"input_ids": torch.randint(2, 320, (1, 100), generator=torch.Generator().manual_seed(1))}
    exact, half = (ch.trace(model, inputs, layers=[1], only_measures=alone) for alone in (False, True))
    for name in ("pooled", "received"):
        assert half.arrays(1)[f"measure.{name}"].dtype == np.float16
        values = getattr(exact.measures(1), name)
        assert np.array_equal(getattr(half.measures(1), name), values.astype(np.float16))
    assert half.check().passed
    monkeypatch.setattr(measured, "LARGEST_HALF", float(exact.measures(1).received.max()) / 2)
    more = ch.trace(model, inputs, layers=[1], only_measures=True)
    assert more.arrays(1)["measure.received"].dtype == np.float32
    assert more.arrays(1)["measure.pooled"].dtype == np.float16
    assert np.array_equal(more.measures(1).received, exact.measures(1).received)
    assert more.check().passed


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "bart"])
@pytest.mark.parametrize(("factor", "passes"), [(1.0, True), (0.9999, False), (1.0001, False)])
def test_what_keys_received_is_held_against_what_rows_gave(
    family: str, factor: float, passes: bool, tmp_path: Path
) -> None:
    """One head of one site, changed a little: learned sinks take their share, and padding gives nothing."""
    model, inputs = tiny_models.build(family), tiny_models.inputs(family)
    trace = ch.trace(model, inputs, tmp_path / "t", only_measures=True)
    assert trace.check().passed
    file = tmp_path / "t" / f"{trace.sites[1].kind}-001.safetensors"
    arrays = {name: array.copy() for name, array in read_tensors(file).items()}
    arrays["measure.received"][1, 3] *= np.float32(factor)
    write_tensors(file, arrays)
    assert Trace.open(tmp_path / "t").check().passed == passes


def test_measures_are_those_of_dense_weights(whole: Trace) -> None:
    found = whole.measures(1, text=1)  # padded on the left
    weights = np.asarray(whole.weights(1, text=1), np.float64)[:, 4:]
    row, key = np.arange(4, 17)[:, None], np.arange(17)
    logarithm = np.log(np.where(weights > 0, weights, 1))
    assert found.mean("entropy") == pytest.approx(-(weights * logarithm).sum(-1).mean(-1), abs=1e-6)
    assert found.mean("distance") == pytest.approx((weights * (row - key)).sum(-1).mean(-1), abs=1e-5)
    assert found.mean("self") == pytest.approx(np.diagonal(weights, 4, 1, 2).mean(-1), abs=1e-6)
    assert found.mean("previous") == pytest.approx(np.diagonal(weights, 3, 1, 2).mean(-1), abs=1e-6)
    assert found.mean("sink") == pytest.approx(weights[:, :, 0].mean(-1), abs=1e-6)
    assert found.mean("largest") == pytest.approx(weights.max(-1).mean(-1), abs=1e-6)
    assert found.received == pytest.approx(weights.sum(1), abs=1e-5)
    assert (found.rows == 13).all()
    assert found.pooled[:, 4:] == pytest.approx(weights, abs=1e-6)  # 17 rows fit into the map
    with pytest.raises(AttributeError, match="'speed' was not measured, only entropy, "):
        found.mean("speed")


def test_a_check_can_be_made_again(model: Any, inputs: dict[str, Any], tmp_path: Path) -> None:
    trace = ch.trace(model, inputs, tmp_path / "t")
    found = trace.check()
    assert found.passed
    assert found.missing == trace.checks.missing
    for now, then in zip(found.sites, trace.checks.sites, strict=True):
        assert (now.kind, now.layer, now.rows, now.hidden) == (then.kind, then.layer, then.rows, then.hidden)
        assert now.row_sum == pytest.approx(then.row_sum, abs=1e-7)
        assert now.output == then.output  # values are not kept: what was found when it was recorded
    path = tmp_path / "t" / "self-001.safetensors"
    content = bytearray(path.read_bytes())
    start = content.index(b"}}") + 8
    content[start + 3000 : start + 3064] = np.full(16, 9.0, np.float32).tobytes()  # some queries are others now
    path.write_bytes(content)
    assert not Trace.open(tmp_path / "t").check().passed


def test_looking_too_early(model: Any, inputs: dict[str, Any]) -> None:
    with ch.tracing(model) as trace:
        with pytest.raises(TraceError, match="the trace is made when its block ends well: look at it after the block"):
            trace.weights(0)
        assert repr(trace) == "<a trace, once its block has ended>"
        model(**inputs)
    assert len(trace) == 3
    assert repr(trace).startswith("Trace(in memory")


def test_nothing_is_left_when_the_block_fails(model: Any, inputs: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="unknown"), ch.tracing(model, tmp_path / "t") as trace:
        model(**inputs)["unknown"]
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TraceError, match="the trace is made when its block ends well"):
        trace.weights(0)
    assert not model._forward_pre_hooks
    assert not model.model._forward_hooks


def test_a_block_in_which_nothing_runs(model: Any) -> None:
    with pytest.raises(TraceError, match=r"the model did not run, or ran compiled or in another thread"):  # noqa: SIM117
        with ch.tracing(model):
            pass


def test_two_models_in_turn_do_not_mix(inputs: dict[str, Any], whole: Trace) -> None:
    """Blocks inside blocks: the inner one listens."""
    model, other = tiny_models.build("llama"), tiny_models.build("gpt2")
    with torch.inference_mode(), ch.tracing(model) as outer:
        model(**inputs)
        with ch.tracing(other) as inner:
            other(**inputs)
    assert inner.model.type == "gpt2"
    assert np.array_equal(np.asarray(outer.weights(2)), np.asarray(whole.weights(2)))
