"""Who may look at whom: each mask against its definition, cell by cell, and the algebra of masks."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import clearhead as ch
from clearhead.algebra import Extent, Mask, split
from clearhead.testing.cases import MASKS, SHAPES

SIZES = [(1, 1), (4, 4), (3, 5), (5, 3), (1, 6), (6, 1)]


def cells(mask: Mask, queries: int, keys: int) -> list[list[bool]]:
    return [[bool(cell) for cell in row] for row in mask.dense(queries, keys)]


def rule(visible: Callable[[int, int], bool], queries: int, keys: int) -> list[list[bool]]:
    return [[visible(i, j) for j in range(keys)] for i in range(queries)]


@pytest.mark.parametrize(("queries", "keys"), SIZES)
def test_causal_is_j_up_to_i_in_aligned_positions(queries: int, keys: int) -> None:
    start = rule(lambda i, j: j <= i, queries, keys)
    end = rule(lambda i, j: j <= i + keys - queries, queries, keys)
    assert cells(ch.masks.causal(align="start"), queries, keys) == start
    assert cells(ch.masks.causal(align="end"), queries, keys) == end
    if queries == keys:
        assert cells(ch.masks.causal(), queries, keys) == start == end


@pytest.mark.parametrize(("queries", "keys"), SIZES)
@pytest.mark.parametrize("left", [None, 0, 2])
@pytest.mark.parametrize("right", [None, 0, 1])
@pytest.mark.parametrize("align", ["start", "end"])
def test_both_ends_of_a_window_are_inclusive(
    queries: int, keys: int, left: int | None, right: int | None, align: Any
) -> None:
    offset = keys - queries if align == "end" else 0

    def visible(i: int, j: int) -> bool:
        position = i + offset
        return (left is None or position - left <= j) and (right is None or j <= position + right)

    assert cells(ch.masks.window(left, right, align), queries, keys) == rule(visible, queries, keys)


@pytest.mark.parametrize("size", [10, sys.maxsize, 2**70])
def test_a_window_wider_than_the_matrix_hides_nothing(size: int) -> None:
    assert ch.masks.window(left=size, right=size).dense(4, 4).all()
    assert cells(ch.masks.window(left=size, right=0), 4, 4) == cells(ch.masks.causal(), 4, 4)


def test_lengths_keep_the_first_keys_and_queries_of_each_entry() -> None:
    dense = ch.masks.lengths([3, 0], queries=[1, 2]).dense(2, 4, heads=2, lead=(2,))
    assert dense.shape == (2, 2, 2, 4)
    expected = [[[1, 1, 1, 0], [0, 0, 0, 0]], [[0, 0, 0, 0], [0, 0, 0, 0]]]
    for head in range(2):
        assert dense[:, head].astype(int).tolist() == expected
    assert ch.masks.lengths(2).dense(1, 3).astype(int).tolist() == [[1, 1, 0]]
    by_row = ch.masks.lengths(np.array([[1], [2]])).dense(1, 2, lead=(2, 3))
    assert by_row[0].sum() == 3
    assert by_row[1].sum() == 6


def test_documents_see_themselves_alone() -> None:
    ids = [4, 4, 2, 7, 7, 7]
    assert cells(ch.masks.documents(ids), 6, 6) == rule(lambda i, j: ids[i] == ids[j], 6, 6)
    pieces = [1, 2, 1, 1, 2, 3]
    assert cells(ch.masks.documents(pieces), 6, 6) == rule(lambda i, j: pieces[i] == pieces[j], 6, 6)
    query, key = [5, 1, 9], [1, 1, 5, 8]
    assert cells(ch.masks.documents(query, key), 3, 4) == rule(lambda i, j: query[i] == key[j], 3, 4)
    assert ch.masks.documents([[0, 1], [1, 1]]).dense(2, 2, lead=(2,))[:, 0].astype(int).tolist() == [
        [[1, 0], [0, 1]],
        [[1, 1], [1, 1]],
    ]


def test_intervals_may_reach_over_the_ends_or_be_empty() -> None:
    start, stop = [-5, 2, 3, 2], [2, 99, 3, 1]
    mask = ch.masks.intervals(start, stop)
    assert cells(mask, 4, 4) == rule(lambda i, j: start[i] <= j < stop[i], 4, 4)
    by_head = ch.masks.intervals(np.array([[0], [1]]), 2).dense(2, 3, heads=2)
    assert by_head.astype(int).tolist() == [[[1, 1, 0]] * 2, [[0, 1, 0]] * 2]


@pytest.mark.parametrize("shape", [(), (3,), (2, 1), (2, 3), (4, 1, 1), (4, 2, 3), (5, 1, 1, 3), (5, 4, 2, 3), (1, 3)])
def test_arrays_broadcast_as_in_numpy(shape: tuple[int, ...]) -> None:
    allowed = np.random.default_rng(0).random(shape) < 0.5
    dense = ch.masks.array(allowed).dense(2, 3, heads=4, lead=(5,))
    np.testing.assert_array_equal(dense, np.broadcast_to(allowed, (5, 4, 2, 3)))


def test_a_function_is_asked_for_every_cell() -> None:
    mask = ch.masks.function(lambda batch, head, query, key: batch + head + query > key)
    dense = mask.dense(2, 3, heads=2, lead=(2,))
    for cell in np.ndindex(dense.shape):
        batch, head, query, key = cell
        assert dense[cell] == (batch + head + query > key)


def test_masks_combine_by_and_or_and_not() -> None:
    a, b = ch.masks.causal(), ch.masks.array(np.random.default_rng(0).random((4, 4)) < 0.5)
    one, other = a.dense(4, 4), b.dense(4, 4)
    np.testing.assert_array_equal((a & b).dense(4, 4), one & other)
    np.testing.assert_array_equal((a | b).dense(4, 4), one | other)
    np.testing.assert_array_equal((~a).dense(4, 4), ~one)
    np.testing.assert_array_equal((~(a | b) & a | ~b).dense(4, 4), ~(one | other) & one | ~other)


def test_a_boolean_array_may_stand_on_either_side() -> None:
    causal, array = ch.masks.causal(), np.random.default_rng(0).random((4, 4)) < 0.5
    expected = causal.dense(4, 4) & array
    for combined in (causal & array, array & causal, causal & array.tolist()):
        assert isinstance(combined, Mask)
        np.testing.assert_array_equal(combined.dense(4, 4), expected)
    for combined in (causal | array, array | causal):
        np.testing.assert_array_equal(combined.dense(4, 4), causal.dense(4, 4) | array)


@pytest.mark.parametrize("name", [name for name in MASKS if name != "none"])
@pytest.mark.parametrize("shape", ["grouped", "five_axes", "more_queries", "no_keys", "no_queries", "no_batch"])
def test_intervals_say_the_same_as_cells(name: str, shape: str) -> None:
    """What the kernels skip by, and what the oracle asks: one mask told in two ways."""
    extent = SHAPES[shape].extent
    mask = MASKS[name](extent, np.random.default_rng(0))
    mask = mask if isinstance(mask, Mask) else ch.masks.array(mask)
    mask.check(extent)
    dense = mask.dense(extent.queries, extent.keys, extent.heads, extent.lead).reshape(extent.shape)
    found, rest = split(mask, extent)
    seen = np.ones(extent.shape, bool)
    if found is not None:
        start, stop = (np.broadcast_to(bound, extent.shape[:-1])[..., None] for bound in found)
        seen &= (start <= np.arange(extent.keys)) & (np.arange(extent.keys) < stop)
    if rest is not None:
        seen &= rest.dense(extent.queries, extent.keys, extent.heads, extent.lead).reshape(extent.shape)
    np.testing.assert_array_equal(seen, dense)


def test_what_is_one_run_of_keys_costs_two_integers_a_row() -> None:
    """causal, windows, padding, packed documents and any & of those leave nothing to be asked cell by cell."""
    runs = [
        ch.masks.causal(),
        ch.masks.window(2, 2),
        ch.masks.lengths(3),
        ch.masks.documents([1, 1, 2, 2]),
        ch.masks.intervals([0, 1, 2, 3], 4),
    ]
    extent = Extent((), 1, 4, 4)
    for one, other in itertools.product(runs, runs):
        found, rest = split(one & other, extent)
        assert found is not None
        assert rest is None
    assert split(~ch.masks.causal(), extent)[0] is None
    found, rest = split(ch.masks.causal() & ch.masks.array(np.ones((4, 4), bool)), extent)
    assert found is not None
    assert rest is not None


def test_a_long_chain_of_masks_works() -> None:
    x = np.random.default_rng(0).standard_normal((9, 4))
    mask: Mask = ch.masks.intervals(0, 1)
    for key in range(1, 9, 2):
        mask = mask | ch.masks.intervals(key, key + 1)
    for _ in range(20):
        mask = ~mask
    seen = np.zeros((9, 9), bool)
    seen[:, [0, 1, 3, 5, 7]] = True
    np.testing.assert_array_equal(ch.attention(x, x, x, mask=mask), ch.attention(x, x, x, mask=seen))
