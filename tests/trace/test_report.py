"""The report's numbers against plain NumPy over dense weights."""

from __future__ import annotations

import json

import numpy as np
import pytest

from clearhead.trace import Trace, TraceError, summarize
from clearhead.trace.report import KINDS, UNITS


def test_means_of_every_head(recorded: Trace) -> None:
    found = summarize(recorded)
    assert [(head.layer, head.head) for head in found.heads] == [(i, j) for i in range(3) for j in range(6)]
    row = np.arange(len(recorded.tokens))
    for head in found.heads:
        w = np.asarray(recorded.weights(head.layer, head.head), np.float64)[0]
        back = row[:, None] - row
        with np.errstate(divide="ignore", invalid="ignore"):
            entropy = -np.where(w > 0, w * np.log(w), 0).sum(axis=-1).mean()
        assert head.rows == len(row)
        assert head.entropy == pytest.approx(entropy, abs=1e-6)
        assert head.sink == pytest.approx(w[:, 0].mean(), abs=1e-6)
        assert head.distance == pytest.approx((w * back).sum(axis=-1).mean(), abs=1e-5)
        assert head.far == pytest.approx((w * back)[:, 1:].sum(axis=-1).mean(), abs=1e-5)
        assert head.previous == pytest.approx(np.diagonal(w, -1).mean(), abs=1e-6)  # row 0 has no previous
        assert head.self_ == pytest.approx(np.diagonal(w).mean(), abs=1e-6)


def test_the_strongest_of_each_kind(recorded: Trace) -> None:
    found = summarize(recorded)
    by = {strongest.kind: strongest for strongest in found.strongest}
    assert list(by) == list(KINDS)
    assert by["broad"].value == max(head.entropy for head in found.heads)
    assert by["self"].head.self_ == max(head.self_ for head in found.heads)
    for strongest in found.strongest:
        assert strongest.examples
        for example in strongest.examples:
            row = recorded.weights(strongest.head.layer, strongest.head.head)[0, example.query]
            weights = [weight for _, _, weight in example.keys]
            assert weights == sorted(weights, reverse=True)
            assert weights[0] == row.max()
            assert example.token == recorded.tokens[example.query]
            assert all(recorded.tokens[key] == token for key, token, _ in example.keys)


def test_progress_and_json(recorded: Trace) -> None:
    seen: list[int] = []
    data = json.loads(json.dumps(summarize(recorded, seen.append).to_dict(), allow_nan=False))
    assert seen == [0, 1, 2]
    assert data["model"] == "tiny"
    assert data["tokens"] == len(recorded.tokens)
    assert data["units"] == UNITS | {"far": "tokens"}
    assert set(data["heads"][0]) == {"layer", "head", "rows", *UNITS, "far"}
    assert set(data["strongest"][0]) == {"kind", "meaning", "layer", "head", "value", "examples"}


def test_rows_that_see_nothing_take_no_part(recorded: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    import clearhead

    weights = recorded.weights(0)
    arrays = {name: array[0] for name, array in recorded.arrays(0).items()}
    blind = {0, 5, 6}
    row = np.arange(len(recorded.tokens))
    stop = np.where(np.isin(row, list(blind)), 0, row + 1)
    mask = clearhead.masks.intervals(np.zeros_like(stop), stop)
    score = clearhead.scores.dot(recorded.facts(0).scale)
    hidden = clearhead.attention_weights(arrays["query"], arrays["key"], mask=mask, score=score)
    seeing = [i for i in row if i not in blind]

    def weights_of(self: Trace, layer: int, head: int | None = None) -> object:
        if head is None:
            return hidden
        return clearhead.attention_weights(
            arrays["query"][head : head + 1], arrays["key"][head // 3 : head // 3 + 1], mask=mask, score=score
        )

    monkeypatch.setattr(Trace, "weights", weights_of)
    found = summarize(recorded)
    assert found.heads[0].rows == len(seeing)
    dense = np.asarray(weights)[0]
    assert found.heads[0].sink == pytest.approx(dense[seeing, 0].mean(), abs=1e-6)
    assert not blind & {example.query for example in found.strongest[0].examples}


def test_a_trace_that_sees_nothing(recorded: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    import clearhead

    arrays = {name: array[0] for name, array in recorded.arrays(0).items()}
    nothing = clearhead.masks.intervals(0, 0)
    hidden = clearhead.attention_weights(arrays["query"], arrays["key"], mask=nothing)
    monkeypatch.setattr(Trace, "weights", lambda self, layer: hidden)
    with pytest.raises(TraceError, match=r"no token in .* sees anything"):
        summarize(recorded)
