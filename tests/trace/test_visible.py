"""Masks found in a model become the shortest description that says the same."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_models
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import clearhead as ch
from clearhead.trace.visible import Visible, describe, hidden_blocks


def dense(seen: Visible, heads: int, queries: int, keys: int) -> np.ndarray:
    mask = seen.of(0).mask()
    if mask is None:
        return np.ones((heads, queries, keys), bool)
    return mask.dense(queries, keys, heads).reshape(heads, queries, keys)


@given(arrays(bool, st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 6))))
def test_nothing_is_lost(allowed: np.ndarray) -> None:
    assert np.array_equal(dense(describe(allowed[None]), *allowed.shape), allowed)


@given(st.integers(1, 8), st.integers(1, 8), st.data())
def test_unbroken_rows_become_intervals(queries: int, keys: int, data: st.DataObject) -> None:
    start = data.draw(arrays(int, queries, elements=st.integers(0, keys)))
    stop = data.draw(arrays(int, queries, elements=st.integers(0, keys)))
    key = np.arange(keys)
    allowed = ((start[:, None] <= key) & (key < stop[:, None]))[None]
    found = describe(allowed[None])
    assert found.kind != "array"
    assert np.array_equal(dense(found, 1, queries, keys), allowed)


SIZES = st.integers(1, 9)


@given(arrays(bool, st.tuples(st.integers(1, 3), SIZES, SIZES)), SIZES, SIZES)
def test_blocks_that_are_hidden(allowed: np.ndarray, rows: int, columns: int) -> None:
    """The grid is that of pooled maps; runs, and masks of several heads, give what their cells give."""
    _, queries, keys = allowed.shape
    rows, columns = min(rows, queries), min(columns, keys)
    query, key = ([slice(n * count // parts, (n + 1) * count // parts) for n in range(parts)]
                  for parts, count in ((rows, queries), (columns, keys)))  # fmt: skip
    for heads in (allowed, allowed[:1], np.tri(queries, keys, dtype=bool)[None], np.ones_like(allowed[:1])):
        expected = [[not heads[:, down, across].any() for across in key] for down in query]
        found = hidden_blocks(describe(heads[None]).of(0), queries, keys, rows, columns)
        assert found.tolist() == expected


def test_weights_that_underflow_are_not_hidden() -> None:
    """As many of MiniLM's first layer do: they are 0 in float32, and may be looked at."""
    model, inputs = tiny_models.build("bert"), tiny_models.inputs("bert")
    with torch.no_grad():
        model.encoder.layer[0].attention.self.query.weight *= 300
    trace = ch.trace(model, inputs)
    assert (trace.map(0, 0, 17) == 0).any()
    assert not trace.hidden(0, 0, 17, 17).any()
    padded = np.zeros((17, 17), bool)
    padded[8:], padded[:, 8:] = True, True
    assert np.array_equal(trace.hidden(0, 0, 17, 17, text=2), padded)
    small = ch.trace(model, inputs, only_measures=True)
    assert small.hidden(0, 0, 17, 17) is None


@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        ([[1, 1], [1, 1]], "full"),
        ([[1, 0], [1, 1]], "causal"),
        ([[1, 0], [0, 1]], "intervals"),
        ([[0, 0], [0, 1]], "intervals"),
        ([[1, 0, 1]], "array"),
        ([[1]], "full"),
    ],
)
def test_kinds(rows: list[list[int]], kind: str) -> None:
    assert describe(np.array([[rows]], bool)).kind == kind
