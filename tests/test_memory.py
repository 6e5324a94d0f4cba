"""Memory stays linear in tokens: whatever the mask is made of, no part of a call holds the matrix.

Each case is a process of its own, whose peak is read from Linux's /proc: what NumPy's arrays and kernels take alike.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    not os.path.exists("/proc/self/clear_refs"), reason="peak memory is read from Linux's /proc"
)
MB = 1_000_000

PEAK = """
import re
import numpy as np, clearhead as ch

def status(name):
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read()).group(1)) * 1024

def rows_alike(batch, head, query, key):
    return (query * 7 + key) % 5 < 2 or query == key

def mask_of(tokens):
    ids = np.arange(tokens) * 7919 % 31  # each document's tokens lie all over the sequence
    scattered, own = ch.masks.documents(ids), ch.masks.function(rows_alike)
    return {mask}

def run(tokens):
    arrays = (x[:, :tokens] for x in (Q, K, V))
    return {call}

Q, K, V = np.random.default_rng(0).standard_normal((3, 1, {tokens}, {dim}), dtype=np.float32)
run(500)  # compiles, and makes the threads
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
result = run({tokens})
print(status("VmHWM") - before - result.nbytes)
"""
MASKS = {
    "function": "own",
    "scattered documents": "scattered",
    "not": "~ch.masks.window(left=5, right=5)",
    "or": "scattered | ch.masks.window(left=9) | own",
    "nested": "~(scattered | own & ch.masks.causal()) & ~ch.masks.array(ids == 3) | ch.masks.intervals(0, 1)",
}
CALLS = {
    "output": "ch.attention(*arrays, mask=mask_of(tokens))",
    "measures": "ch.attention_weights(*list(arrays)[:2], mask=mask_of(tokens)).received()",
}


def peak(**given: object) -> int:
    """Bytes held at once beside inputs and the result."""
    source = PEAK
    for name, value in given.items():
        source = source.replace("{" + name + "}", str(value))
    return int(subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stdout)


def test_65_536_tokens_take_less_than_32_mb_beside() -> None:
    assert peak(mask="ch.masks.causal()", call=CALLS["output"], tokens=65_536, dim=64) < 32 * MB


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("mask", MASKS)
def test_no_mask_is_made_dense(mask: str, call: str) -> None:
    """16,384 tokens: as bytes, the mask alone would take 268 MB, and float32 scores 1,074 MB."""
    assert peak(mask=MASKS[mask], call=CALLS[call], tokens=16_384, dim=16) < 32 * MB
