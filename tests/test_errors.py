"""Whatever can be wrong with the arguments, with the whole message that says so: one table."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import clearhead as ch


def x(*shape: int, dtype: Any = np.float64) -> np.ndarray:
    return np.zeros(shape, dtype)


def attend(*shapes: tuple[int, ...], **options: Any) -> Callable[[], Any]:
    return lambda: ch.attention(*(x(*shape) for shape in shapes), **options)


def scored(**modifiers: Any) -> Callable[[], Any]:
    """Attention of 3 queries over 5 keys, 2 heads, with these modifiers of the dot product."""
    return lambda: ch.attention(x(2, 3, 4), x(2, 5, 4), x(2, 5, 4), score=ch.scores.dot(**modifiers))


def masked(mask: Any) -> Callable[[], Any]:
    return lambda: ch.attention(x(6, 2, 3, 4), x(6, 2, 5, 4), x(6, 2, 5, 4), mask=mask())


FLOATS = "float16, bfloat16, float32, float64"
TWO_THINGS = (
    "with 3 queries and 5 keys can mean two things: say align='start' (query i stands at key i) or align='end' "
    "(the last query stands at the last key)"
)
MEASURES = (
    "entropy, mass, distance, sink, largest, self, previous, perplexity, learned_sink, diagonality, received, "
    "coverage, offset(d), and top=k, pooled=(rows, columns), folds={...}"
)
GROUPED = "Grouped-query attention needs the same number of query heads for each key head"
PLAIN = "got partial: wrap it, for example lambda *cell: yours(*cell)"

TYPES: dict[str, Callable[[], Any]] = {
    f"query has dtype int64, attention needs one of {FLOATS}: convert it, for example query.astype(np.float32)":
        lambda: ch.attention(x(3, 4, dtype=int), x(3, 4), x(3, 4)),
    f"key has dtype bool, attention needs one of {FLOATS}: convert it, for example key.astype(np.float32)":
        lambda: ch.attention(x(3, 4), x(3, 4, dtype=bool), x(3, 4)),
    f"value has dtype complex128, attention needs one of {FLOATS}: convert it, for example value.astype(np.float32)":
        lambda: ch.attention(x(3, 4), x(3, 4), x(3, 4, dtype=complex)),
    f"query has dtype object, attention needs one of {FLOATS}: convert it, for example query.astype(np.float32)":
        lambda: ch.attention_weights(np.array([[None]]), x(3, 4)),
    f"query has dtype {np.dtype(np.longdouble)}, attention needs one of {FLOATS}: convert it, "
    "for example query.astype(np.float32)":
        lambda: ch.attention(x(3, 4, dtype=np.longdouble), x(3, 4), x(3, 4)),
    "score must be made by scores.dot, scores.general or scores.additive, got 'dot'":
        attend((3, 4), (3, 4), (3, 4), score="dot"),
    f"bias has dtype bool, it must be one of {FLOATS}: a boolean array is a mask: give it as mask=...":
        scored(bias=x(3, 5, dtype=bool)),
    f"bias has dtype int64, it must be one of {FLOATS}: convert with .astype(float)": scored(bias=x(3, 5, dtype=int)),
    f"bias has dtype {np.dtype(np.longdouble)}, it must be one of {FLOATS}: convert with .astype(float)":
        scored(bias=x(3, 5, dtype=np.longdouble)),
    f"alibi has dtype int64, it must be one of {FLOATS}: convert with .astype(float)": scored(alibi=[1, 2]),
    f"sinks has dtype int64, it must be one of {FLOATS}: convert with .astype(float)": scored(sinks=[1, 2]),
    f"general: weight has dtype int64, it must be one of {FLOATS}: convert with .astype(float)":
        lambda: ch.scores.general([[1]]),
    f"additive: key_weight has dtype int64, it must be one of {FLOATS}: convert with .astype(float)":
        lambda: ch.scores.additive([[1.0]], [[1]], [1.0]),
    "scores: function takes a function of (score, batch, head, query, key), got int": scored(function=3),
    f"scores: function takes a plain function (def or lambda) of (score, batch, head, query, key), {PLAIN}":
        scored(function=functools.partial(max, 1)),
    "masks.function takes a function of (batch, head, query, key), got str": lambda: ch.masks.function("causal"),
    f"masks.function takes a plain function (def or lambda) of (batch, head, query, key), {PLAIN}":
        lambda: ch.masks.function(functools.partial(max, 1)),
    "mask has dtype int64: a mask is boolean, True where attending is allowed. Convert it with mask.astype(bool), "
    "or, if it holds numbers to add to the scores, give it as scores.dot(bias=...)":
        attend((3, 4), (3, 4), (3, 4), mask=np.ones((3, 3), int)),
    "lengths(keys=...) must hold whole numbers, got dtype float64: convert with .astype(int)":
        lambda: ch.masks.lengths([1.0]),
    "lengths(queries=...) must hold whole numbers, got dtype float64: convert with .astype(int)":
        lambda: ch.masks.lengths([1], queries=[1.5]),
    "documents(query_ids=...) must hold whole numbers, got dtype float64: convert with .astype(int)":
        lambda: ch.masks.documents([1.0]),
    "documents(key_ids=...) must hold whole numbers, got dtype <U1: convert with .astype(int)":
        lambda: ch.masks.documents([1], ["a"]),
    "intervals: start must hold whole numbers, got dtype float64: convert with .astype(int)":
        lambda: ch.masks.intervals(0.5, 1),
    "intervals: stop must hold whole numbers, got dtype bool: convert with .astype(int)":
        lambda: ch.masks.intervals(0, True),
    "out= is not supported by weights: use the result, or np.asarray(weights) first":
        lambda: np.sum(ch.attention_weights(x(3, 4), x(3, 4)), axis=-1, out=x(3)),
    "weights are read-only: they follow from queries and keys":
        lambda: np.add(1, 1, out=ch.attention_weights(x(3, 4), x(3, 4))),
}  # fmt: skip

VALUES: dict[str, Callable[[], Any]] = {
    "query, key and value must be (tokens, dim) or (..., heads, tokens, dim), got query (4,), key (3, 4), value (3, 4)":
        attend((4,), (3, 4), (3, 4)),
    "query, key and value must all be (tokens, dim) or all have a heads axis, (..., heads, tokens, dim), "
    "got query (3, 4), key (1, 3, 4), value (1, 3, 4)":
        attend((3, 4), (1, 3, 4), (1, 3, 4)),
    "the leading axes do not broadcast: query (2, 1, 3, 4), key (3, 1, 3, 4), value (3, 1, 3, 4)":
        attend((2, 1, 3, 4), (3, 1, 3, 4), (3, 1, 3, 4)),
    "key has 5 tokens and value has 6: each key needs exactly one value": attend((3, 4), (5, 4), (6, 4)),
    "key has 2 heads and value has 4: they must be equal": attend((4, 3, 4), (2, 5, 4), (4, 5, 4)),
    f"key has 8 heads and query has 12: 12 is not a multiple of 8. {GROUPED}":
        attend((12, 3, 4), (8, 5, 4), (8, 5, 4)),
    f"key has 0 heads and query has 2: 2 is not a multiple of 0. {GROUPED}": attend((2, 3, 4), (0, 5, 4), (0, 5, 4)),
    "query has dim 4 and key has dim 6: a dot product needs equal dims; scores.general(W) matches unequal ones":
        attend((3, 4), (5, 6), (5, 6)),
    "general: weight has shape (4, 4), query dim 4, key dim 6 and 1 heads need (4, 6) or (1, 4, 6)":
        attend((3, 4), (5, 6), (5, 6), score=ch.scores.general(x(4, 4))),
    "general: weight has shape (3, 4, 4), query dim 4, key dim 4 and 2 heads need (4, 4) or (2, 4, 4)":
        attend((2, 3, 4), (2, 5, 4), (2, 5, 4), score=ch.scores.general(x(3, 4, 4))),
    "general: weight must be (query dim, key dim) or (heads, query dim, key dim), got (4,)":
        lambda: ch.scores.general(x(4)),
    "additive: query_weight (query dim, hidden), key_weight (key dim, hidden) and vector (hidden,) do not fit: "
    "got (4, 7), (4, 8) and (7,)":
        lambda: ch.scores.additive(x(4, 7), x(4, 8), x(7)),
    "additive: key_weight has shape (5, 7), key has dim 4: it must be (4, hidden)":
        attend((3, 4), (3, 4), (3, 4), score=ch.scores.additive(x(4, 7), x(5, 7), x(7))),
    "bias has shape (3, 4), which does not broadcast to (..., heads, queries, keys) = (2, 3, 5)": scored(bias=x(3, 4)),
    "alibi needs one number per head, (2,), got shape (3,)": scored(alibi=x(3), align="end"),
    "sinks needs one number per head, (2,), got shape (2, 1)": scored(sinks=x(2, 1)),
    f"alibi {TWO_THINGS}": scored(alibi=x(2)),
    f"causal {TWO_THINGS}": masked(ch.masks.causal),
    f"window {TWO_THINGS}": masked(lambda: ch.masks.causal("end") | ~ch.masks.window(1)),
    "align must be 'start', 'end' or None, got 'left'": lambda: ch.masks.causal("left"),
    "align must be 'start', 'end' or None, got 'right'": lambda: ch.scores.dot(align="right"),
    "align must be 'start', 'end' or None, got 'middle'":
        lambda: ch.attention_weights(x(3, 4), x(3, 4)).measure("self", align="middle"),
    "scale must be a finite number, got nan": scored(scale=np.nan),
    "softcap must be a positive number, got 0; None is no cap": scored(softcap=0),
    "softcap must be a positive number, got inf; None is no cap": scored(softcap=np.inf),
    "window(left=...) must be a whole number of keys, 0 or more, or None; got -1": lambda: ch.masks.window(left=-1),
    "window(right=...) must be a whole number of keys, 0 or more, or None; got 1.5": lambda: ch.masks.window(right=1.5),
    "lengths(keys=...) must lie between 0 and the 5 keys there are, got 2 to 6":
        masked(lambda: ch.masks.lengths([2, 3, 6, 2, 2, 2])),
    "lengths(keys=...) must lie between 0 and the 5 keys there are, got -1 to -1": masked(lambda: ch.masks.lengths(-1)),
    "lengths(queries=...) must lie between 0 and the 3 queries there are, got 4 to 4":
        masked(lambda: ch.masks.lengths(1, queries=4)),
    "lengths(keys=...) has shape (2,), which does not broadcast to the leading axes = (6,)":
        masked(lambda: ch.masks.lengths([1, 2])),
    "documents: ids must have one entry per token, got a single number": lambda: ch.masks.documents(1),
    "documents: key_ids names 4 tokens, there are 5": masked(lambda: ch.masks.documents([1] * 3, [1] * 4)),
    "documents: query_ids has shape (2,), which does not broadcast to the leading axes = (6,)":
        masked(lambda: ch.masks.documents(np.ones((2, 3), int), [1] * 5)),
    "intervals: start has shape (4,), which does not broadcast to (..., heads, queries) = (6, 2, 3)":
        masked(lambda: ch.masks.intervals([0] * 4, 1)),
    "mask has shape (3, 4), which does not broadcast to (..., heads, queries, keys) = (6, 2, 3, 5)":
        masked(lambda: np.ones((3, 4), bool)),
    "mask has shape (7, 6, 2, 3, 5), which does not broadcast to (..., heads, queries, keys) = (6, 2, 3, 5)":
        masked(lambda: np.ones((7, 6, 2, 3, 5), bool)),
    "mask is an array of numbers to add, and score has a bias already: add the two yourself":
        attend((3, 4), (3, 4), (3, 4), mask=x(3, 3), score=ch.scores.dot(bias=x(3, 3))),
    "value is missing: attention(query, key, value), or attention(query, cache)": attend((3, 4), (3, 4)),
    "logsumexp has shape (4,), these weights have one per row: (3,)":
        lambda: ch.attention_weights(x(3, 4), x(5, 4), logsumexp=x(4)),
    f"measure: 'spread' asked for, known are {MEASURES}":
        lambda: ch.attention_weights(x(3, 4), x(3, 4)).measure("entropy", "spread"),
    f"measure: nothing asked for, known are {MEASURES}":
        lambda: ch.attention_weights(x(3, 4), x(3, 4)).measure(),
    "top must be how many of the largest weights are wanted, 1 or more, got 0":
        lambda: ch.attention_weights(x(3, 4), x(3, 4)).top(0),
    "pooled=(rows, columns, 'sum'): blocks give their 'mean' or their 'max'":
        lambda: ch.attention_weights(x(3, 4), x(3, 4)).measure(pooled=(2, 2, "sum")),
    "folds: 'entropy' is the name of a measure that is built in":
        lambda: ch.attention_weights(x(3, 4), x(3, 4)).measure(folds={"entropy": ch.Fold(len)}),
    "fold: keeps must be how many numbers a row keeps, 1 or more, got 0": lambda: ch.Fold(len, keeps=0),
    "measure('self') with first_key=3: these keys are a part of all, say also first_query, the number of the first "
    "query among all": lambda: ch.attention_weights(x(3, 4), x(3, 4)).measure("self", first_key=3),
    "to_pandas('keys'): nothing of keys was measured, only entropy":
        lambda: ch.attention_weights(x(3, 4), x(3, 4)).measure("entropy").to_pandas("keys"),
    f"measure('previous') {TWO_THINGS}":
        lambda: ch.attention_weights(x(3, 4), x(5, 4)).measure("previous", "entropy"),
    "sink must be a number of keys, 0 or more, got -1":
        lambda: ch.attention_weights(x(3, 4), x(3, 4)).measure("sink", sink=-1),
    "pooled(rows, columns) needs at least one block each way, got 0 x 3":
        lambda: ch.attention_weights(x(3, 4), x(3, 4)).pooled(0, 3),
    "weights (3, 5) @ values (4, 2): 5 keys, not 4": lambda: ch.attention_weights(x(3, 4), x(5, 4)) @ x(4, 2),
    "weights (3, 0) have no max over axis -1: it is empty":
        lambda: ch.attention_weights(x(3, 4), x(0, 4)).max(axis=-1),
    "weights are computed when asked for: np.asarray(weights) always makes a new array":
        lambda: np.array(ch.attention_weights(x(3, 4), x(3, 4)), copy=False),
    "count must be a whole number of threads, 1 or more, got 0": lambda: ch.set_num_threads(0),
    "count must be a whole number of threads, 1 or more, got 2.5": lambda: ch.set_num_threads(2.5),  # type: ignore[arg-type]
}  # fmt: skip


@pytest.mark.parametrize("message", TYPES)
def test_wrong_types_are_named(message: str) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        TYPES[message]()


@pytest.mark.parametrize("message", VALUES)
def test_wrong_values_are_named(message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        VALUES[message]()


@pytest.mark.parametrize("count", ["0", "-1", "many", "1.5"])
def test_a_wrong_number_of_threads_in_the_environment_is_named(monkeypatch: pytest.MonkeyPatch, count: str) -> None:
    monkeypatch.setenv("CLEARHEAD_NUM_THREADS", count)
    message = f"CLEARHEAD_NUM_THREADS must be a whole number of threads, 1 or more, got {count!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        ch.attention(x(999, 64), x(999, 64), x(999, 64))  # more than one thread's work


@pytest.mark.parametrize("kind", ["score", "mask"])
def test_a_function_that_cannot_be_compiled_is_named(kind: str) -> None:
    table = {0: 1.0}

    def lookup(*cell: Any) -> Any:
        return table[cell[-1]]

    options: dict[str, Any] = (
        {"score": ch.scores.dot(function=lookup)} if kind == "score" else {"mask": ch.masks.function(lookup)}
    )
    message = (
        f"the {kind} function 'lookup' cannot be compiled by Numba: write it in plain arithmetic on numbers "
        f"(+ - * / comparisons, if, math.*), without arrays or tensors. Numba says: "
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}.+"):
        ch.attention(x(3, 4), x(3, 4), x(3, 4), **options)


def test_errors_come_before_any_work() -> None:
    """A mask that does not fit is named even where there is nothing to compute."""
    with pytest.raises(ValueError, match="does not broadcast"):
        ch.attention(x(0, 4), x(5, 4), x(5, 4), mask=np.ones((3, 4), bool))
