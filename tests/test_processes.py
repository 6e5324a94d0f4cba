"""Processes: forked and spawned ones compute the same bits, and Ctrl-C is heard."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has neither fork nor POSIX signals")


def start(folder: Path, source: str, **environment: Any) -> subprocess.Popen[str]:
    """A child that runs this source, from a file: what is spawned imports it again."""
    script = folder / "child.py"
    script.write_text(source)
    return subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, **{name: str(value) for name, value in environment.items()}},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def printed(child: subprocess.Popen[str], timeout: float = 200) -> str:
    """What the child printed; it must end by itself, in peace and without a word of error."""
    try:
        output, errors = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        raise
    assert child.returncode == 0, errors
    assert not errors
    return output


PROBLEMS = """
import numpy as np, clearhead as ch

def problem(n):
    q, k, v = np.random.default_rng(n).standard_normal((3, 4, 500, 32)).astype(("f4", "f8")[n % 2])
    return q[:, : (500, 1)[n // 2 % 2]], k, v

def attend(n):
    return ch.attention(*problem(n), mask=ch.masks.causal("end"))
"""

FORK = """
import os, threading
ch.set_num_threads(3)
expected = [attend(n) for n in range(4)]  # the pool of threads is in use, and its threads are not forked

def is_right():
    return all(np.array_equal(attend(n), expected[n]) for n in range(4))

def ends(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def child(depth):
    if depth == 0:
        return 0 if is_right() else 3
    made = os.fork()
    if made:
        return ends(made) or (0 if is_right() else 4)
    os._exit(child(depth - 1))
"""


def test_a_forked_child_and_its_child_compute_the_same_bits(tmp_path: Path) -> None:
    """The parent's threads are not there after os.fork: a child makes its own."""
    assert printed(start(tmp_path, PROBLEMS + FORK + "print(child(2), is_right())")) == "0 True\n"


def test_a_child_forked_while_other_threads_compute_works(tmp_path: Path) -> None:
    """Whatever a thread of the parent holds at that moment, the child does not wait for it."""
    source = """
stop = threading.Event()

def keep_busy():
    while not stop.is_set():
        attend(0)

busy = [threading.Thread(target=keep_busy) for _ in range(2)]
for thread in busy:
    thread.start()
print(sum(child(1) for _ in range(10)))
stop.set()
for thread in busy:
    thread.join()
"""
    assert printed(start(tmp_path, PROBLEMS + FORK + source)) == "0\n"


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_pool_of_processes_computes_the_same_bits(method: str, tmp_path: Path) -> None:
    """Workers of multiprocessing, each with threads of its own, of a parent that has used its threads."""
    source = f"""
import multiprocessing

if __name__ == "__main__":
    ch.set_num_threads(3)
    expected = [attend(n) for n in range(8)]
    with multiprocessing.get_context({method!r}).Pool(2) as pool:
        found = pool.map(attend, range(8), chunksize=1)
    print(all(map(np.array_equal, found, expected)), np.array_equal(attend(0), expected[0]))
"""
    child = start(tmp_path, PROBLEMS + source, CLEARHEAD_NUM_THREADS=3)
    assert printed(child) == "True True\n"


# Rows of stride 0 take no memory: two million queries and keys are more than an hour's work, and one query over two
# thousand million long keys is minutes of it.
INTERRUPTED = """
import signal, sys
import numpy as np, clearhead as ch

signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever began the tests may have told us to ignore it
ch.set_num_threads({threads})
small = np.random.default_rng(0).standard_normal((3, 2, 300, 16), dtype=np.float32)
few = small[0, :, :1]
expected, decoded = ch.attention(*small), ch.attention(few, *small[1:])
ch.attention_weights(*small[:2]).measure("entropy")  # compiled, so that it is the call that is interrupted
far = np.broadcast_to(small[0, :1, :1], (1, 2_000_000, 16))
logs = np.zeros((1, 2_000_000))
lone = np.ones((1, 1, 4096), np.float32)
keys = np.broadcast_to(lone, (1, 2_000_000_000, 4096))
values = np.broadcast_to(small[0, :1, :1], (1, 2_000_000_000, 16))
assert ch.explain(lone, keys, values).kernel == "streaming"
print("begins", flush=True)
try:
    {call}
    print("was not interrupted")
except KeyboardInterrupt:
    right = np.array_equal(ch.attention(*small), expected)
    print("interrupted", right and np.array_equal(ch.attention(few, *small[1:]), decoded))
"""
CALLS = {
    "prefill": "ch.attention(far, far, far)",
    "decode": "ch.attention(lone, keys, values)",
    "measures": "ch.attention_weights(far, far, logsumexp=logs).measure('entropy')",
    "row sums": "ch.attention_weights(far, far, logsumexp=logs).sum(axis=-1)",
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("call", CALLS)
def test_ctrl_c_ends_a_long_call_and_nothing_else(call: str, threads: int, tmp_path: Path) -> None:
    """KeyboardInterrupt comes out long before the call would end, the next call is right, and the process exits."""
    child = start(tmp_path, INTERRUPTED.format(call=CALLS[call], threads=threads))
    assert child.stdout is not None
    assert child.stdout.readline() == "begins\n"
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(timeout=0.3)  # by now it computes
    child.send_signal(signal.SIGINT)
    assert printed(child, timeout=30) == "interrupted True\n"


def test_a_cache_that_cannot_be_written_is_said_once_by_all_kernels(tmp_path: Path) -> None:
    """A file stands where the folder should be: root is refused too."""
    (tmp_path / "cache").write_text("not a folder")
    child = start(tmp_path, "import clearhead.launch", CLEARHEAD_CACHE_DIR=tmp_path / "cache")
    _, errors = child.communicate(timeout=200)
    assert child.returncode == 0
    assert errors.count("RuntimeWarning") == 1
