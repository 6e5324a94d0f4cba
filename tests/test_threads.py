"""Threads change nothing but the time: the same bits for any number of them, from anywhere, and memory stays linear."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import clearhead as ch
from clearhead.kernels.threads import share

CHILD_MEMORY = """
import ctypes, re
import numpy as np, clearhead as ch

def status(name):
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read()).group(1)) * 1024

def run(tokens):
    q, k, v = (x[:, :tokens] for x in (Q, K, V))
    return ch.scaled_dot_product_attention(q, k, v, mask=ch.masks.causal())[0]

Q, K, V = np.random.default_rng(0).standard_normal((3, 1, 65536, 64), dtype=np.float32)
run(500)  # compiles, and makes the threads
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
output = run(65536)
print(status("VmHWM") - before - output.nbytes)
"""


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    yield
    ch.set_num_threads(None)


def inputs(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal((3, *shape), dtype=np.float32)


@pytest.mark.parametrize("queries", [1, 300], ids=["few", "many"])
def test_the_same_bits_for_any_number_of_threads(queries: int) -> None:
    q, k, v = inputs(2, 3, 2500, 64)
    results = []
    for count in (1, 2, 3, 7):
        ch.set_num_threads(count)
        output, weights = ch.scaled_dot_product_attention(q[:, :, :queries], k, v, mask=ch.masks.causal(align="end"))
        results.append((output, weights.logsumexp, weights[1, 2, 0], weights.measure("entropy", align="end").entropy))
    for other in results[1:]:
        for one, another in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(one, another)


@pytest.mark.parametrize("queries", [1, 130], ids=["few", "many"])
def test_a_sequence_does_not_feel_its_batch(queries: int) -> None:
    q, k, v = inputs(5, 2, 1100, 64)
    lengths = np.array([1100, 3, 700, 0, 1099])
    together = ch.attention(q[:, :, :queries], k, v, mask=ch.masks.lengths(lengths))
    for n, length in enumerate(lengths):
        alone = ch.attention(q[n, :, :queries], k[n, :, :length], v[n, :, :length])
        np.testing.assert_array_equal(together[n], alone)


def test_calls_from_eight_threads_at_once() -> None:
    q, k, v = inputs(8, 2, 400, 32)
    expected = [ch.attention(q[n], k[n], v[n]) for n in range(8)]
    start = threading.Barrier(8)

    def call(n: int) -> Any:
        start.wait()
        return [ch.attention(q[n], k[n], v[n]) for _ in range(5)]

    with ThreadPoolExecutor(8) as pool:
        for n, found in enumerate(pool.map(call, range(8))):
            for output in found:
                np.testing.assert_array_equal(output, expected[n])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_works() -> None:
    code = (
        "import os, numpy as np, clearhead as ch\n"
        "ch.set_num_threads(3)\n"
        "q, k, v = np.random.default_rng(0).standard_normal((3, 4, 500, 32))\n"
        "expected = ch.attention(q, k, v)\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    os._exit(0 if np.array_equal(ch.attention(q, k, v), expected) else 3)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout.strip() == "0"


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


def test_the_environment_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLEARHEAD_NUM_THREADS", "3")
    assert ch.get_num_threads() == 3
    ch.set_num_threads(2)
    assert ch.get_num_threads() == 2
    ch.set_num_threads(None)
    monkeypatch.delenv("CLEARHEAD_NUM_THREADS")
    assert ch.get_num_threads() >= 1


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="peak memory is read from Linux's /proc")
def test_65_536_tokens_take_less_than_32_mb_beside() -> None:
    found = subprocess.run([sys.executable, "-c", CHILD_MEMORY], capture_output=True, text=True, check=True)
    assert int(found.stdout) < 32e6
