"""Machines other than this one: narrower vectors in a child process, and the table of tile shapes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
import pytest

from clearhead.kernels.target import TARGETS, host

CODE = """
import numpy as np, clearhead as ch
from clearhead.kernels.target import host

random = np.random.default_rng(0)
q = random.standard_normal((4, 130, 40), dtype=np.float32)
k, v = random.standard_normal((2, 2, 130, 40), dtype=np.float32)
mask = ch.masks.causal() & (ch.masks.window(left=40) | ch.masks.intervals(0, 3))
for score in (ch.scores.dot(), ch.scores.dot(softcap=3.0, alibi=ch.scores.alibi_slopes(4), sinks=np.zeros(4))):
    output, weights = ch.scaled_dot_product_attention(q, k, v, mask=mask, score=score)
    truth, matrix, _ = ch.core.attend(q, k, v, mask=mask, score=score, dtype=np.float64)
    assert np.linalg.norm(output - truth) < 2e-6 * np.linalg.norm(truth)
    assert abs(np.asarray(weights) - matrix).max() < 1e-6
few = ch.attention(q[:, :1], k, v)
truth, _, _ = ch.core.attend(q[:, :1], k, v, dtype=np.float64)
assert np.linalg.norm(few - truth) < 2e-6 * np.linalg.norm(truth)
print(host().name)
"""


@pytest.mark.skipif(llvm.get_default_triple().split("-")[0] != "x86_64", reason="these are rows of x86 processors")
@pytest.mark.parametrize("name", ["AVX2", "scalar"])
def test_narrower_vectors(name: str, tmp_path: Path) -> None:
    has = dict(llvm.get_host_cpu_features().items())
    if name == "AVX2" and not has.get("avx2"):
        pytest.skip("this processor has no AVX2")
    keep = {"AVX2": lambda f: not f.startswith(("avx512", "amx", "avx10", "evex512")), "scalar": lambda f: f in SSE2}
    features = ",".join(("+" if on and keep[name](f) else "-") + f for f, on in has.items())
    environment = os.environ | {
        "NUMBA_CPU_NAME": "haswell" if name == "AVX2" else "x86-64",
        "NUMBA_CPU_FEATURES": features,
        "CLEARHEAD_CACHE_DIR": str(tmp_path),
    }
    found = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == name


SSE2 = {"sse", "sse2", "fxsr", "cmov", "cx8", "mmx", "64bit"}


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_tiles_fit_the_registers(target: object) -> None:
    """Accumulators, the queries' vectors and one broadcast key: else the inner loop spills."""
    assert target.keys * target.vectors + target.vectors + 1 <= target.registers  # type: ignore[attr-defined]
    assert target.keys % 2 == 0  # type: ignore[attr-defined]
    assert target.rows(np.float32) == 2 * target.rows(np.float64)  # type: ignore[attr-defined]


def test_this_machine_has_a_row() -> None:
    assert host() in TARGETS
