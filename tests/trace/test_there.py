"""Measures made by torch where queries and keys are: the same as the kernels', block by block."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from test_families import TRACED

import clearhead as ch
from clearhead.trace import Trace, there
from clearhead.trace.keep import Keeping
from clearhead.trace.live import Tracing, _recorded


def measured_there(model: Any, inputs: dict[str, Any], heads: Any = None) -> Trace:
    """As for a model on another device, on this one."""
    found = Tracing()
    keeping = Keeping(heads, only_measures=True, there=True)
    with _recorded(model, None, found, once=True, keeping=keeping), torch.inference_mode():
        model(**inputs)
    return found.trace


@pytest.mark.parametrize("family", TRACED)
def test_the_same_as_the_kernels(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(there, "CELLS", 6 * 17 * 4)  # four rows at once
    model, inputs = tiny_models.build(family), tiny_models.inputs(family)
    heads = [1, 2, 5] if family in ("llama", "gpt_oss", "t5") else None
    trace, expected = measured_there(model, inputs, heads), ch.trace(model, inputs, heads=heads)
    assert trace.checks.passed
    for site in expected.sites:
        for text in range(len(expected._index.side(site.query_side).texts)):
            ours = expected.measures(site.layer, kind=site.kind, text=text).to_dict()
            theirs = trace.measures(site.layer, kind=site.kind, text=text).to_dict()
            assert set(ours) == set(theirs)
            for name, values in ours.items():
                assert theirs[name] == pytest.approx(values, abs=2e-5), (site, name)


def test_nothing_else_leaves_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries and keys are never made NumPy's, and weights never asked of the kernels."""
    from clearhead.trace import keep

    monkeypatch.setattr(keep, "site_weights", None)
    trace = measured_there(tiny_models.build("llama"), tiny_models.inputs("llama"))
    assert {site.kept for site in trace.sites} == {"measures"}
    assert not {"query", "key", "logsumexp"} & set(trace.arrays(0))


def test_only_other_devices_measure_there() -> None:
    assert Keeping(only_measures=True).measures_there("cuda")
    assert not Keeping(only_measures=True).measures_there("cpu")
    assert not Keeping().measures_there("cuda")


def test_memory_is_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensor of scores holds so many rows as CELLS allows."""
    seen = []
    score = there._scores

    def watched(*arguments: Any) -> Any:
        found = score(*arguments)
        seen.append(found.numel())
        return found

    monkeypatch.setattr(there, "_scores", watched)
    monkeypatch.setattr(there, "CELLS", 6 * 200 * 10)
    ids = torch.randint(2, 320, (1, 200), generator=torch.Generator().manual_seed(1))
    measured_there(tiny_models.build("llama"), {"input_ids": ids})
    assert max(seen) == 6 * 200 * 10
    assert len(seen) == 3 * 20


def test_a_future_that_is_seen_is_noticed() -> None:
    model = tiny_models.build("llama")
    ids = torch.randint(2, 320, (1, 20), generator=torch.Generator().manual_seed(1))
    trace = measured_there(model, {"input_ids": ids, "attention_mask": torch.ones(1, 1, 20, 20, dtype=torch.bool)})
    assert not trace.checks.passed
    assert np.isfinite(trace.measures(0).mean("entropy")).all()
