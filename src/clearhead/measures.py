"""What weights say, in numbers: of rows, of keys, of blocks of the matrix. Many in one pass over the scores.

For row i with weights w over the keys it may see, at position i (positions aligned, see ``masks.causal``), natural
logarithms. A row that sees nothing has 0 everywhere (a learned sink takes all of it), takes no part in averages and
is counted (``empty_rows``).

    of rows, (..., heads, queries)
    entropy       -sum w ln w: how widely it looks; 0 for one key, ln n for n alike;       nats
                  Clark et al. 2019, section 3
    perplexity    exp(entropy): how many keys share the attention; Hill 1973 (there: the   keys
                  diversity of order 1, of species)
    mass          sum w: 1, less what a learned sink takes                                 weight
    learned_sink  the share of the learned sink (``scores.dot(sinks=...)``), which has     weight
                  no key: 1 - mass
    sink          w on the first ``sink`` keys of all; Xiao et al. 2023, section 3         weight
    distance      sum w (i - j): how far back it looks; Vig and Belinkov 2019 (there:      tokens
                  attention distance, of which this is a row's term)
    previous      w on the key one back: offset(1); Clark et al. 2019, section 3           weight
    self          w on the key at i itself: offset(0); likewise                            weight
    offset(d)     w on the key d back; ahead where d is negative                           weight
    largest       the largest w; Voita et al. 2019, section 4 (there: confidence, its      weight
                  mean over rows)
    diagonality   1 - (sum w |i - j|) / (the farthest that a key of the matrix lies        1: all on itself
                  from i); Zhang et al. 2021, section 4 (there: centrality, of which
                  diagonality is the mean over rows)

    of keys, (..., heads, keys)
    received      sum over rows of w on this key; ``normalized``: over how many rows may   weight
                  see it, NaN where none may; Zhang et al. 2023, section 3 (there: the
                  accumulated attention score)

    of heads, (..., heads)
    coverage      the mean over keys that some row may see of min(received, 1): how much   0 to 1
                  of the text is looked at in all; the sum inside the logarithm of the
                  coverage penalty in Wu et al. 2016, equation 14

``top=k`` adds the k largest weights of each row with their keys (Gupta et al. 2021, section 2, keep those of the scores
alone), ``pooled=(rows, columns)`` the mean weight in each block of a grid (a picture of the matrix made smaller, by no
paper's definition), ``folds={...}`` measures of your own (``clearhead.Fold``).

References
----------
Zhang, Loweimi, Bell, Renals 2021, *On the Usefulness of Self-Attention for Automatic Speech Recognition with
Transformers*. Wu et al. 2016, *Google's Neural Machine Translation System*. Xiao et al. 2023, *Efficient Streaming
Language Models with Attention Sinks*: the first keys as sinks. Clark et al. 2019, *What Does BERT Look At?*, section 3:
entropy of heads, and the mass on previous and own tokens. Hill 1973, *Diversity and Evenness: A Unifying Notation and
Its Consequences*. Vig and Belinkov 2019, *Analyzing the Structure of Attention in a Transformer Language Model*. Voita
et al. 2019, *Analyzing Multi-Head Self-Attention*. Zhang, Sheng et al. 2023, *H2O: Heavy-Hitter Oracle for Efficient
Generative Inference of Large Language Models*. Gupta et al. 2021, *Memory-efficient Transformers via Top-k Attention*.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from clearhead import measuring
from clearhead.answers import Floats, Measures, Top
from clearhead.asked import HEAD_MEASURES, KEY_MEASURES, ROW_MEASURES, SUMS, Asked, ask, asked_for
from clearhead.kernels import measure_asked as kernels
from clearhead.measuring import Kept
from clearhead.plan import Plan, in_nats

__all__ = [
    "HEAD_MEASURES",
    "KEY_MEASURES",
    "ROW_MEASURES",
    "Asked",
    "Measures",
    "Top",
    "ask",
    "asked_for",
    "find",
    "gather",
]


def find(plan: Plan, logsumexp: NDArray[Any], asked: Asked) -> Measures:
    """What is asked for, in one pass over the scores; logsumexp (batch, heads, queries, 2)."""
    return gather(plan, logsumexp, asked, measuring.run(plan, logsumexp, asked.wanted(plan)))


def gather(plan: Plan, logsumexp: NDArray[Any], asked: Asked, kept: Kept) -> Measures:
    """What a pass has kept, as measures with the axes of the user's arrays."""
    problem, extent = plan.problem, plan.problem.extent
    lead = (*extent.lead, extent.heads)

    def given(array: NDArray[Any]) -> NDArray[Any]:
        """(batch * heads, ...) with the user's axes."""
        return problem.as_given(array.reshape(*lead, *array.shape[1:]), len(lead) - 1)

    rows = {name: kept.rows[..., place] for name, place in SUMS.items()}
    sees = kept.rows[..., kernels.SEES] > 0
    for n, name in enumerate(asked.offsets):
        rows[name] = kept.rows[..., kernels.OFFSETS + n]
    nats = in_nats(plan, logsumexp).reshape(extent.batch * extent.heads, extent.queries)
    rows["learned_sink"] = _learned_sink(plan, nats)
    needed = {*asked.names, "entropy", "mass"} & set(rows)
    others: dict[str, Any] = {}
    if "diagonality" in asked.names:
        others["diagonality"] = given(_diagonality(plan, kept.rows[..., kernels.SPREAD], sees, asked.aligned(plan)))
    if kept.received is not None and kept.seen is not None:
        received, seen = kept.received[:, 0], kept.seen
        others["seen"] = given(seen)
        with np.errstate(invalid="ignore", divide="ignore"):
            others["received"] = given(received / seen if asked.normalized else received)
            covered = np.where(seen > 0, np.minimum(received, 1), 0).sum(axis=-1)
            others["coverage"] = given(covered / (seen > 0).sum(axis=-1))
    if kept.top is not None:
        weights, keys = kept.top
        others["top"] = Top(given(keys), given(weights))
    if asked.pooled is not None:
        others["pooled"] = given(_means(plan, asked, kept.grid))
    folds = {name: given(numbers) for name, numbers in zip(asked.folds, kept.folds, strict=True)}
    sums = {name: given(np.ascontiguousarray(rows[name])) for name in needed}
    return Measures(asked, given(nats), sums, given(sees), folds, others)


def _learned_sink(plan: Plan, logsumexp: Floats) -> Floats:
    """The share of each row that the learned sink takes."""
    sinks, extent = plan.problem.score.sinks, plan.problem.extent
    if sinks is None:
        return np.zeros_like(logsumexp)
    per_head = np.broadcast_to(np.asarray(sinks, np.float64), extent.heads)
    return np.asarray(np.exp(np.tile(per_head, extent.batch)[:, None] - logsumexp))


def _diagonality(plan: Plan, spread: Floats, sees: NDArray[np.bool_], aligned: int) -> Floats:
    """1 - spread over the farthest that a key lies from each row."""
    extent = plan.problem.extent
    position = np.arange(extent.queries) + aligned
    farthest = np.maximum(abs(position), abs(position - (extent.keys - 1)))
    return np.where(sees, 1 - spread / np.maximum(farthest, 1), 0.0)


def _means(plan: Plan, asked: Asked, grid: Floats | None) -> Floats:
    """The grid, means of its blocks; a grid finer than the matrix is cut down to it."""
    assert asked.pooled is not None
    extent = plan.problem.extent
    rows, columns, *how = asked.pooled
    rows, columns = min(rows, extent.queries), min(columns, extent.keys)
    if grid is None:
        return np.zeros((extent.batch * extent.heads, rows, columns))
    if how == ["max"]:
        return grid
    height, width = (
        np.diff(np.r_[np.arange(n) * size // n, size]) for n, size in ((rows, extent.queries), (columns, extent.keys))
    )
    np.divide(grid, height[:, None] * width, out=grid)
    return grid
