"""Machines other than this one: rows of narrower vectors, in child processes, the code written for them, and the table.

The children compile from nothing, and so also show that processes may fill an empty cache at once.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
import pytest

from assembly import MACHINES, fmas, is_whole, products, touches_the_stack
from clearhead.kernels.target import TARGETS, Target, host
from clearhead.kernels.tiles import BLOCK

KEEP_MODULES = """
from numba.core.codegen import CPUCodeLibrary

# What Numba makes of each kernel, before LLVM is told for which processor.
modules, optimize = {}, CPUCodeLibrary._optimize_final_module
def keep(library):
    modules[library.name] = str(library._final_module)
    optimize(library)
CPUCodeLibrary._optimize_final_module = keep
"""
CHECKS = """
import numpy as np, clearhead as ch

random = np.random.default_rng(0)
q = random.standard_normal((4, 130, 40), dtype=np.float32)
k, v = random.standard_normal((2, 2, 130, 40), dtype=np.float32)
mask = ch.masks.causal() & (ch.masks.window(left=40) | ch.masks.intervals(0, 3))
for score in (ch.scores.dot(), ch.scores.dot(softcap=3.0, alibi=ch.scores.alibi_slopes(4), sinks=np.zeros(4))):
    truth, matrix, _ = ch.core.attend(q, k, v, mask=mask, score=score, dtype=np.float64)
    output = ch.attention(q, k, v, mask=mask, score=score)
    assert np.linalg.norm(output - truth) < 2e-6 * np.linalg.norm(truth)
"""
MORE_CHECKS = """
assert abs(np.asarray(ch.attention_weights(q, k, mask=mask, score=score)) - matrix).max() < 1e-6
found = ch.attention_weights(q, k, mask=mask, score=score).measure("received", "self", top=2, pooled=(10, 13))
assert abs(found.received - matrix.sum(axis=-2)).max() < 1e-5
assert abs(found.self_ - np.diagonal(matrix, 0, -2, -1)).max() < 1e-6
assert abs(found.top.weights - -np.sort(-matrix)[..., :2]).max() < 1e-6
assert abs(found.pooled - matrix.reshape(4, 10, 13, 13, 10).mean(axis=(2, 4))).max() < 1e-6
few = ch.attention(q[:, :1], k, v)
truth, _, _ = ch.core.attend(q[:, :1], k, v, dtype=np.float64)
assert np.linalg.norm(few - truth) < 2e-6 * np.linalg.norm(truth)
"""
SIXTEEN_BITS = """
import ml_dtypes, numpy as np, clearhead as ch
from clearhead.kernels.target import converts_float16, host

def are_the_same(found, expected):
    wide = np.asarray(expected, np.float32)
    np.testing.assert_array_equal(found.astype(np.float32), np.broadcast_to(wide, found.shape))

for dtype, limit in ((np.dtype("float16"), 1e-3), (np.dtype(ml_dtypes.bfloat16), 8e-3)):
    random = np.random.default_rng(0)
    q = random.standard_normal((2, 70, 24)).astype(dtype)
    k, v = random.standard_normal((2, 1, 150, 24)).astype(dtype)
    mask = ch.masks.window(left=60, right=3, align="end")
    for rows in (70, 2):  # by tiles, and streaming
        assert ch.explain(q[:, -rows:], k, v).kernel == ("tiles" if rows == 70 else "streaming")
        truth, _, _ = ch.core.attend(q[:, -rows:], k, v, mask=mask, dtype=np.float64)
        output = ch.attention(q[:, -rows:], k, v, mask=mask)
        assert output.dtype == dtype
        assert np.linalg.norm(output.astype(float) - truth) < limit * np.linalg.norm(truth)
        # Every 16 bits there are as the value of a lone key: subnormals, infinity and NaN come out as they are.
        every = np.arange(2**16, dtype=np.uint16).view(dtype)
        for first in range(0, 2**16, 2**13):
            lone = every[first : first + 2**13][None, None]
            are_the_same(ch.attention(q[:1, :rows], k[:, :1], lone), lone)
        # The mean of neighbours lies half way between them, or is one of them: rounded to even, as NumPy does.
        finite = every[np.isfinite(every)]
        pairs = np.stack([finite[:8192], finite[1:8193]])[None]
        found = ch.attention(q[:1, :rows], k[:, :2], pairs, score=ch.scores.dot(scale=0))
        expected = pairs.astype(np.float32).mean(axis=1, keepdims=True).astype(dtype)
        are_the_same(found, expected)
print(host().name, converts_float16())
"""
REPORT = """
import sys
from pathlib import Path
from clearhead.kernels.forward import attend
from clearhead.kernels.target import host

if "attend" in modules:
    (assembly,) = attend.inspect_asm().values()
    Path(sys.argv[1] + ".s").write_text(assembly)
    Path(sys.argv[1] + ".ll").write_text(modules["attend"])
print(host().name)
"""
OWN = ("this machine", "this machine again")

HAS = dict(llvm.get_host_cpu_features().items())
SSE2 = {"sse", "sse2", "fxsr", "cmov", "cx8", "mmx", "64bit"}
WIDER_THAN_AVX2 = ("avx512", "amx", "avx10", "evex512")
OTHERS = ("AVX2", "NEON", "scalar")
X86 = llvm.get_default_triple().startswith("x86_64")
x86 = pytest.mark.skipif(not X86, reason="rows are forced on x86 alone, which can run them all")
needs_avx2 = pytest.mark.skipif(not HAS.get("avx2"), reason="this processor has no AVX2")


def forced(name: str) -> dict[str, str]:
    """The environment in which ``host`` picks this row, and Numba writes what this processor can run.

    NEON's tiles are of 128 bits, as SSE's vectors are.
    """
    kept = {
        feature
        for feature, on in HAS.items()
        if on and (not feature.startswith(WIDER_THAN_AVX2) if name == "AVX2" else feature in SSE2)
    }
    features = ["+" + feature for feature in kept] + ["-" + feature for feature in HAS.keys() - kept]
    return {
        "NUMBA_CPU_NAME": "haswell" if name == "AVX2" else "x86-64",
        "NUMBA_CPU_FEATURES": ",".join(sorted(features) + ["+neon"] * (name == "NEON")),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("targets")


Run = Callable[[str], str]


def start(name: str, folder: Path) -> subprocess.Popen[str]:
    """A child that compiles for this row; its code is kept under this name."""
    checks = CHECKS + MORE_CHECKS * (name in ("AVX2", "scalar"))
    return subprocess.Popen(
        [sys.executable, "-c", KEEP_MODULES + checks + REPORT, str(folder / name)],
        env=os.environ | {"CLEARHEAD_CACHE_DIR": str(folder / "cache")} | (forced(name) if name in OTHERS else {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def printed(child: subprocess.Popen[str]) -> str:
    output, errors = child.communicate(timeout=300)
    assert child.returncode == 0, errors
    return output.strip()


@pytest.fixture(scope="module")
def row_used_by(folder: Path) -> Iterator[Run]:
    """What the child of that name printed. All compile at once, into the same empty cache."""
    names = OWN + tuple(name for name in OTHERS if X86 and (name != "AVX2" or HAS.get("avx2")))
    children = {name: start(name, folder) for name in names}
    yield cache(lambda name: printed(children[name]))
    for child in children.values():
        child.kill()
        child.wait()


@x86
@pytest.mark.parametrize("name", [pytest.param("AVX2", marks=needs_avx2), "NEON", "scalar"])
def test_narrower_vectors(name: str, row_used_by: Run) -> None:
    """What is computed with each row's tiles is right, and none took another's code from the cache."""
    assert row_used_by(name) == name


def test_two_processes_that_fill_an_empty_cache_at_once_are_right_and_so_is_a_third(
    row_used_by: Run, folder: Path
) -> None:
    for name in OWN:
        assert row_used_by(name) == host().name
    written = {path: path.stat().st_mtime_ns for path in (folder / "cache").rglob("*.nbc")}
    assert written
    assert printed(start("a third", folder)) == host().name
    assert not (folder / "a third.s").exists()  # it found all it needed
    assert written.items() <= {path: path.stat().st_mtime_ns for path in (folder / "cache").rglob("*.nbc")}.items()


@x86
@pytest.mark.parametrize(
    ("name", "converts"), [pytest.param("AVX2", HAS.get("f16c", False), marks=needs_avx2), ("scalar", False)]
)
def test_sixteen_bits_on_narrower_vectors(name: str, converts: bool, python: Callable[..., str], folder: Path) -> None:
    """Products, reading and rounding; without F16C, float16 is read bit by bit and rounded by NumPy."""
    printed = python(SIXTEEN_BITS, CLEARHEAD_CACHE_DIR=folder / "cache", **forced(name))
    assert printed.split() == [name, str(converts)]


def is_tight(assembly: str, row: Target) -> None:
    """The products' loops of a whole kernel, score_tile's and mix_tile's: whole vectors, and the stack left alone."""
    loops = products(assembly, row)
    assert len(loops) >= 2
    for loop in loops:
        assert all(is_whole(line, row) for line in fmas(loop))
        assert not touches_the_stack(loop)
        # Two more may ask for the next line of memory.
        assert len(loop) <= 2 * len(fmas(loop)) + 2


@x86
@needs_avx2
def test_the_kernels_inner_loops_for_avx2(row_used_by: Run, folder: Path) -> None:
    row_used_by("AVX2")
    is_tight((folder / "AVX2.s").read_text(), MACHINES["AVX2, haswell"].row)


@pytest.mark.skipif(host().name not in ("AVX-512", "AVX2"), reason="Numba's own code is read where it is x86's")
def test_the_kernels_inner_loops_for_this_machine(row_used_by: Run, folder: Path) -> None:
    row_used_by("this machine")
    is_tight((folder / "this machine.s").read_text(), host())


@x86
@pytest.mark.parametrize("cpu", [name for name in MACHINES if name.startswith("NEON")])
def test_the_kernels_inner_loops_for_neon(cpu: str, row_used_by: Run, folder: Path) -> None:
    """The kernel that Numba made for NEON's row here, compiled for processors that have it. Read, not run."""
    row_used_by("NEON")
    machine = MACHINES[cpu]
    is_tight(machine.compile((folder / "NEON.ll").read_text()), machine.row)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_tiles_fit_the_registers(target: Target) -> None:
    """Accumulators, the queries' vectors and one broadcast key: else the inner loop spills."""
    assert target.keys * target.vectors + target.vectors + 1 <= target.registers
    assert target.keys % 2 == 0
    assert BLOCK % target.keys == 0  # a tile of keys, filled up to whole micro-tiles, is no longer than its room
    assert target.rows(np.float32) == 2 * target.rows(np.float64)


def test_this_machine_has_a_row() -> None:
    assert host() in TARGETS
