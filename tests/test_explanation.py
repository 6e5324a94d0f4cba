"""``explain`` says what a call does: checked against what it does."""

from __future__ import annotations

import numpy as np
import pytest

import clearhead as ch
from clearhead.kernels.target import host

X = np.zeros((8, 1000, 64), np.float32)


def computed(mask: np.ndarray, rows: int) -> int:
    """Cells between the first key that any query of a tile sees and the last."""
    total = 0
    for first in range(0, len(mask), rows):
        keys = np.flatnonzero(mask[first : first + rows].any(axis=0))
        total += (keys[-1] + 1 - keys[0]) * len(mask[first : first + rows]) if len(keys) else 0
    return total


@pytest.mark.parametrize(
    "mask",
    [
        ch.masks.causal(),
        ch.masks.window(left=99, right=3),
        ch.masks.documents(np.arange(1000) // 130),
        ch.masks.intervals(np.zeros(1000, int), np.where(np.arange(1000) < 500, 0, 7)),
    ],
    ids=["causal", "window", "documents", "half empty"],
)
def test_what_is_skipped(mask: ch.masks.Mask) -> None:
    found = ch.explain(X, X, X, mask=mask)
    rows = host().rows(np.float32)
    cells = computed(mask.dense(1000, 1000), rows)
    assert found.kernel == "tiles"
    assert found.tile == (rows, 128)
    assert found.skipped == pytest.approx(1 - cells / 1e6)
    assert found.flop == pytest.approx(8 * cells * 4 * 64)
    assert found.program == ()


def test_what_is_asked_tile_by_tile() -> None:
    mask = ch.masks.causal() & (ch.masks.window(left=9) | ~ch.masks.array(np.ones((1, 1000), bool)))
    found = ch.explain(X, X, X, mask=mask)
    assert found.program == ("intervals", "array", "not", "or")
    assert "and what these hide: intervals, array, not, or" in str(found)


def test_few_queries_stream() -> None:
    found = ch.explain(X[:, :1], X[:2], X[:2])
    assert found.kernel == "streaming"
    assert found.tile == (4, 1024)
    assert found.skipped == 0
    assert found.input_bytes == X[:, :1].nbytes + 2 * X[:2].nbytes
    assert found.output_bytes == X[:, :1].nbytes


def test_memory_beside_is_linear() -> None:
    small, large = (ch.explain(x, x, x) for x in (X[:1], np.zeros((1, 100_000, 64), np.float32)))
    assert large.scratch_bytes - small.scratch_bytes == 16 * 99_000  # logsumexp: two numbers a row


def test_nothing_to_do() -> None:
    assert ch.explain(X[:, :0], X, X).skipped == 0
    assert ch.explain(X, X[:, :0], X[:, :0]).flop == 0


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="key has 1000 tokens and value has 3"):
        ch.explain(X, X, X[:, :3])
