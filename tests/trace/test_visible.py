"""Masks found in a model become the shortest description that says the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from clearhead.trace.visible import Visible, describe


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
