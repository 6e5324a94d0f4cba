"""The report's numbers against plain NumPy over dense weights."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tiny_models

import clearhead as ch
from clearhead import from_attentions
from clearhead.trace import Trace, TraceError, summarize
from clearhead.trace.report import UNITS

SIZES = (("encoder", 4, 4), ("decoder", 5, 5), ("cross", 5, 4))


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
    assert list(by) == ["broad", "sink", "far", "previous", "self"]
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
    assert set(data["heads"][0]) == {"kind", "layer", "head", "rows", *UNITS, "far"}
    assert set(data["strongest"][0]) == {"kind", "meaning", "attention", "layer", "head", "value", "examples"}


def test_rows_that_see_nothing_take_no_part() -> None:
    weights = np.tril(np.random.default_rng(0).random((1, 2, 9, 9)))
    weights[0, 0, [0, 5, 6]] = 0
    weights /= np.maximum(weights.sum(axis=-1, keepdims=True), 1e-9)
    found = summarize(from_attentions([weights], list("abcdefghi")))
    seeing = [0, 5, 6]
    assert [head.rows for head in found.heads] == [6, 9]
    assert found.heads[0].sink == pytest.approx(np.delete(weights[0, 0, :, 0], seeing).mean())
    for strongest in found.strongest:
        if strongest.head.head == 0:
            assert not {0, 5, 6} & {example.query for example in strongest.examples}


def test_a_trace_that_sees_nothing() -> None:
    with pytest.raises(TraceError, match=r"no token in the trace sees anything"):
        summarize(from_attentions([np.zeros((1, 2, 3, 3))]))


def test_kinds_apart_and_cross_attention_in_fewer_numbers() -> None:
    random = np.random.default_rng(1)
    layers = {kind: [random.dirichlet(np.ones(n), (2, 3, m))] for kind, m, n in SIZES}
    trace = from_attentions(layers, {"encoder": [list("wxyz")] * 2, "decoder": [list("abcde")] * 2})
    found = summarize(trace, text=1)
    assert [head.kind for head in found.heads] == ["encoder"] * 3 + ["decoder"] * 3 + ["cross"] * 3
    cross = [head for head in found.heads if head.kind == "cross"]
    assert set(cross[0].to_dict()) == {"kind", "layer", "head", "rows", "entropy", "sink"}
    assert cross[2].sink == pytest.approx(layers["cross"][0][1, 2, :, 0].mean())
    sorts = {(strongest.head.kind, strongest.kind) for strongest in found.strongest}
    assert sorts == {("cross", sort) for sort in ("broad", "narrow", "sink")} | {
        (kind, sort) for kind in ("encoder", "decoder") for sort in ("broad", "sink", "far", "previous", "self")
    }
    narrow = next(one for one in found.strongest if one.kind == "narrow")
    assert narrow.value == min(head.entropy for head in cross)
    example = narrow.examples[0]
    assert example.token == "abcde"[example.query]
    assert all(token == "wxyz"[key] for key, token, _ in example.keys)
    assert {head.kind for head in summarize(trace, kind="cross").heads} == {"cross"}


def test_hf_2975_examples_can_leave_the_first_tokens_out(recorded: Trace) -> None:
    """transformers#2975: the first token is always looked at most. A view without it, and rows still sum to 1."""
    plain, without = summarize(recorded), summarize(recorded, without=2)
    assert plain.heads == without.heads
    for strongest in without.strongest:
        for example in strongest.examples:
            assert all(key >= 2 for key, _, _ in example.keys)
            row = recorded.weights(strongest.head.layer, strongest.head.head)[0, example.query].astype(np.float64)
            for key, _, weight in example.keys:
                assert weight == pytest.approx(row[key] / row[2:].sum(), abs=1e-6)


def test_a_trace_of_measures_has_no_examples_to_leave_tokens_out_of() -> None:
    trace = ch.trace(tiny_models.build("llama"), tiny_models.inputs("llama"), only_measures=True)
    assert all(strongest.examples == () for strongest in summarize(trace).strongest)
    with pytest.raises(TraceError, match="recorded with measures only: it has no examples to leave first keys out of"):
        summarize(trace, without=1)
