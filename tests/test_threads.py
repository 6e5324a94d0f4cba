"""Threads change nothing but the time: the same bits for any number of them, from anywhere."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import clearhead as ch
from clearhead.kernels import threads
from clearhead.kernels.threads import share
from clearhead.testing.cases import CHOSEN, DTYPES, SHAPES, Case, as_dtype

# Few queries and many, each dtype under every kind of mask and score: enough work in each to be shared out.
MASKS = ("none", "causal_end", "padded_causal", "documents", "array", "nested", "function")
SCORES = ("dot", "bias", "sinks", "all_modifiers")
MIXED = [
    Case(SHAPES[shape], mask, SCORES[n % len(SCORES)], DTYPES[(n + m) % len(DTYPES)])
    for m, shape in enumerate(("one_query", *CHOSEN))
    for n, mask in enumerate(MASKS)
]


def inputs(*shape: int, dtype: str = "float32") -> Any:
    return np.random.default_rng(0).standard_normal((3, *shape)).astype(as_dtype(dtype))


def everything(problem: dict[str, Any]) -> list[np.ndarray]:
    """Output, logsumexp, weights and measures: what each kernel gives."""
    output, weights = ch.scaled_dot_product_attention(**problem)
    measures = weights.measure("entropy", "sink", "self", "received", align="end", top=3, pooled=(5, 7)).to_dict()
    return [output, weights.logsumexp64, np.asarray(weights), *measures.values()]


def are_the_same_bits(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", [1, 300], ids=["few", "many"])
def test_the_same_bits_for_any_number_of_threads(queries: int, dtype: str) -> None:
    q, k, v = inputs(2, 3, 2500, 64, dtype=dtype)
    results = []
    for count in (1, 2, 3, 5):
        ch.set_num_threads(count)
        output, weights = ch.scaled_dot_product_attention(q[:, :, :queries], k, v, mask=ch.masks.causal(align="end"))
        measures = weights.measure("entropy", align="end")
        results.append([output, weights.logsumexp, weights[1, 2, 0], measures.entropy])
    for other in results[1:]:
        are_the_same_bits(other, results[0])


@pytest.mark.parametrize("case", MIXED, ids=lambda case: f"{case.shape.queries}x{case.shape.keys}-{case.mask}")
def test_the_same_bits_for_any_number_of_threads_under_any_mask(case: Case) -> None:
    problem = case.problem()
    ch.set_num_threads(1)
    expected = everything(problem)
    for count in (2, 3, 5):
        ch.set_num_threads(count)
        are_the_same_bits(everything(problem), expected)


BATCH, KEYS = 4, 1100
LENGTHS = np.array([KEYS, 3, 0, 700])
RANDOM = np.random.default_rng(1)
IDS = np.sort(RANDOM.integers(0, 5, (BATCH, KEYS)))
ALLOWED = RANDOM.random((BATCH, 1, 1, KEYS)) < 0.5
BIAS = RANDOM.standard_normal((BATCH, 2, 1, KEYS)).astype(np.float32)


def options(name: str, queries: int, entry: Any = slice(None)) -> dict[str, Any]:
    """Mask and score of the whole batch, or of one entry of it."""
    lengths = ch.masks.lengths(LENGTHS[entry])
    documents = ch.masks.documents(IDS[entry, -queries:], IDS[entry])
    array = ch.masks.array(ALLOWED[entry])
    table: dict[str, dict[str, Any]] = {
        "none": {},
        "causal": {"mask": ch.masks.causal("end")},
        "window": {"mask": ch.masks.window(left=50, right=3, align="start")},
        "lengths": {"mask": lengths},
        "documents": {"mask": documents},
        "array": {"mask": array},
        "algebra": {"mask": (lengths | documents) & ~(array & ch.masks.causal("start"))},
        "bias": {"score": ch.scores.dot(bias=BIAS[entry])},
        "modifiers": {
            "mask": lengths,
            "score": ch.scores.dot(softcap=3.0, alibi=np.array([0.1, 0.2]), sinks=np.array([0.5, -0.5]), align="end"),
        },
    }
    return table[name]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", [1, 3, 130])
@pytest.mark.parametrize("name", ["none", "causal", "window", "lengths", "documents", "array", "algebra", "bias",
                                  "modifiers"])  # fmt: skip
def test_an_entry_does_not_feel_its_batch(name: str, queries: int, dtype: str) -> None:
    q, k, v = inputs(BATCH, 2, KEYS, 32, dtype=dtype)
    q = q[:, :, :queries]
    together = ch.attention_state(q, k, v, **options(name, queries))
    for n in range(BATCH):
        alone = ch.attention_state(q[n], k[n], v[n], **options(name, queries, n))
        np.testing.assert_array_equal(together.output[n], alone.output)
        np.testing.assert_array_equal(together.logsumexp[n], alone.logsumexp)


@pytest.mark.parametrize("queries", [1, 130], ids=["few", "many"])
def test_a_sequence_does_not_feel_its_padding(queries: int) -> None:
    q, k, v = inputs(5, 2, 1100, 64)
    lengths = np.array([1100, 3, 700, 0, 1099])
    together = ch.attention(q[:, :, :queries], k, v, mask=ch.masks.lengths(lengths))
    for n, length in enumerate(lengths):
        alone = ch.attention(q[n, :, :queries], k[n, :, :length], v[n, :, :length])
        np.testing.assert_array_equal(together[n], alone)


def test_calls_from_eight_threads_at_once_give_what_lone_calls_give() -> None:
    """Each thread goes through all of the problems, beginning at another one; each call has helpers of its own."""
    problems = [case.problem() for case in MIXED]
    ch.set_num_threads(3)
    expected = [everything(problem) for problem in problems]
    start = threading.Barrier(8)

    def call(first: int) -> None:
        start.wait()
        for step in range(len(problems)):
            n = (first * 5 + step) % len(problems)
            are_the_same_bits(everything(problems[n]), expected[n])

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(call, first) for first in range(8)]:
            done.result()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("where", [0, 20])
def test_an_error_comes_out_and_ends_the_work(error: type[BaseException], where: int) -> None:
    ch.set_num_threads(2)
    begun = []

    def work(first: int, last: int) -> None:
        begun.append(first)
        if first == where:
            raise error("stop")

    with pytest.raises(error, match="stop"):
        share(work, 100_000)
    assert len(begun) < 100_000
    q, k, v = inputs(2, 200, 16)
    assert np.isfinite(ch.attention(q, k, v)).all()


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize(("items", "grain"), [(0, 1), (1, 1), (7, 3), (100, 1), (10, 100)])
def test_every_item_is_done_once(count: int, items: int, grain: int) -> None:
    ch.set_num_threads(count)
    done: list[int] = []
    share(lambda first, last: done.extend(range(first, last)), items, grain)
    assert sorted(done) == list(range(items))


def test_threads_that_are_busy_elsewhere_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they might have done is done by then."""
    monkeypatch.setattr(threads, "_pool", None)  # a new one, with a single thread
    ch.set_num_threads(2)
    begun, free = threading.Event(), threading.Event()

    def occupy(first: int, last: int) -> None:
        if threading.current_thread() is not caller:  # the pool's only thread
            begun.set()
            free.wait(60)
        else:
            begun.wait(60)

    def hold() -> None:
        nonlocal caller
        caller = threading.current_thread()
        share(occupy, 2)

    caller = None
    holding = threading.Thread(target=hold)
    holding.start()
    assert begun.wait(60)
    done: list[int] = []
    other = threading.Thread(target=lambda: share(lambda first, last: done.extend(range(first, last)), 10))
    other.start()
    other.join(60)
    assert not other.is_alive()
    assert sorted(done) == list(range(10))
    free.set()
    holding.join(60)


def test_the_environment_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLEARHEAD_NUM_THREADS", "3")
    assert ch.get_num_threads() == 3
    ch.set_num_threads(2)
    assert ch.get_num_threads() == 2
    ch.set_num_threads(None)
    monkeypatch.delenv("CLEARHEAD_NUM_THREADS")
    assert ch.get_num_threads() >= 1
