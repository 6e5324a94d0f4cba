"""What changed between two traces, against the same over dense matrices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models

from clearhead import from_attentions
from clearhead.trace import Trace, TraceError, diff, load, record, tokenize
from clearhead.trace.diff import compare


def weights(seed: int, heads: int = 3, n: int = 7, texts: int = 1) -> Any:
    rows = np.tril(np.random.default_rng(seed).random((texts, heads, n, n)))
    return rows / rows.sum(axis=-1, keepdims=True)


def test_nothing_changed(recorded: Trace, copied: Path) -> None:
    found = compare(recorded, Trace.open(copied))
    assert found.largest == 0
    assert found.missing == ()
    assert len(found.changes) == 18


@pytest.mark.parametrize("cells", [1, 20, 1 << 21])
def test_total_variation_of_every_head(cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diff, "BLOCK_CELLS", cells)
    one, other = ([weights(seed, texts=2), weights(7, texts=2)] for seed in (0, 1))
    seen: list[int] = []
    found = compare(from_attentions(one), from_attentions(other), progress=seen.append)
    assert seen == [0, 1]
    changes = [change.change for change in found.changes]
    assert changes == sorted(changes, reverse=True)
    for change in found.changes:
        rows = np.abs(one[change.layer][:, change.head] - other[change.layer][:, change.head]).sum(axis=-1) / 2
        assert change.change == pytest.approx(rows.mean(), abs=1e-7)
        assert change.largest == pytest.approx(rows.max(), abs=1e-7)
        if change.layer == 0:
            assert (change.text, change.row) == np.unravel_index(rows.argmax(), rows.shape)
    assert found.largest == changes[0]


@pytest.mark.parametrize("measure", ["entropy", "sink", "distance", "previous", "self"])
def test_by_a_measure_texts_may_differ(measure: str) -> None:
    one, other = from_attentions([weights(0)]), from_attentions([weights(1, n=9)])
    found = compare(one, other, by=measure)
    expected = np.abs(one.measures(0).mean(measure) - other.measures(0).mean(measure))
    assert {change.head: change.change for change in found.changes} == pytest.approx(dict(enumerate(expected)))
    assert found.changes[0].row is None


def test_rows_that_see_nothing_in_either_take_no_part() -> None:
    one, other = weights(0), weights(1)
    one[:, :, :2] = other[:, :, :2] = 0  # as padding is
    one[:, :, 2] = 0  # seen by the other alone
    found = compare(from_attentions([one]), from_attentions([other]))
    rows = np.abs(one[0] - other[0]).sum(axis=-1, dtype=np.float64)[:, 2:] / 2
    assert rows[:, 0] == pytest.approx(0.5)
    assert {change.head: change.change for change in found.changes} == pytest.approx(
        dict(enumerate(rows.mean(axis=-1)))
    )


def test_what_only_one_has() -> None:
    one, other = from_attentions([weights(0)] * 2), from_attentions([weights(0, heads=2)])
    found = compare(one, other)
    assert found.missing == (
        "self layer 0, heads 2: in a trace of attentions only",
        "self layer 1, all heads: in a trace of attentions only",
    )
    assert len(found.changes) == 2


def test_other_texts_are_refused(recorded: Trace) -> None:
    one = from_attentions([weights(0)], list("abcdefg"))
    with pytest.raises(TraceError, match=r"read different texts: token 3 is 'd' in one and 'x' in the other\. Compare"):
        compare(one, from_attentions([weights(0)], list("abcxefg")))
    with pytest.raises(TraceError, match="read different texts: 7 tokens and 5"):
        compare(one, from_attentions([weights(0, n=5)], list("abcde")))
    with pytest.raises(TraceError, match=r"holds 1 texts and .* 2$"):
        compare(one, from_attentions([weights(0, texts=2)], [list("abcdefg")] * 2))
    with pytest.raises(TraceError, match=r"compared by weights or by entropy, sink, .*, not by 'looks'"):
        compare(one, one, by="looks")
    cross = from_attentions({"cross": [np.full((1, 2, 3, 4), 0.25)]})
    with pytest.raises(TraceError, match="have no head in common that can be compared by entropy"):
        compare(one, cross, by="entropy")


def test_a_trace_of_measures_is_compared_by_measures(recorded: Trace, tmp_path: Path) -> None:
    model = load(str(tiny_models.save(tmp_path / "tiny")))
    tokens = tokenize(model.tokenizer, tiny_models.TEXT)
    small = record(model, tokens, tmp_path / "small", only_measures=True)
    assert compare(recorded, small, by="entropy").largest < 1e-4
    with pytest.raises(TraceError, match="recorded with measures only"):
        compare(recorded, small)
