"""Machine code on disk: found again, never stale, whole, and not missed where nothing can be written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import clearhead

# A kernel of its own keeps compiling cheap; it is made by the decorator that all kernels are made by.
CODE = """
import numpy as np
from clearhead.kernels.cache import folder, kernel, stamp

@kernel
def twice(x):
    return x * 2

assert twice(np.float32(3)) == 6
assert twice(np.float64(3)) == 6
print(sum(twice.stats.cache_hits.values()), sum(twice.stats.cache_misses.values()), stamp(), folder() is not None)
"""


def run(cache: Path, source: Path | None = None, wait: bool = True) -> subprocess.Popen[str]:
    environment = os.environ | {"CLEARHEAD_CACHE_DIR": str(cache)}
    if source is not None:
        environment["PYTHONPATH"] = str(source)
    script = cache.parent / "child.py"  # Numba asks for a file that a function comes from
    script.write_text(CODE)
    child = subprocess.Popen(
        [sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    if wait:
        child.wait(timeout=120)
    return child


def report(child: subprocess.Popen[str]) -> list[str]:
    output, errors = child.communicate(timeout=120)
    assert child.returncode == 0, errors
    return output.split()


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    first, second = (report(run(tmp_path / "cache")) for _ in range(2))
    assert first[:2] == ["0", "2"]
    assert second[:2] == ["2", "0"]
    assert len(list((tmp_path / "cache").rglob("*.nbc"))) == 2


def test_a_changed_source_is_noticed(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(Path(clearhead.__file__).parent, source / "clearhead")
    before = report(run(tmp_path / "cache", source))
    same = report(run(tmp_path / "cache", source))
    with (source / "clearhead/kernels/vectors.py").open("a") as file:
        file.write("\n# another source\n")
    after = report(run(tmp_path / "cache", source))
    assert same[:2] == ["2", "0"]
    assert after[:2] == ["0", "2"]
    assert before[2] == same[2] != after[2]


def test_two_processes_at_once(tmp_path: Path) -> None:
    children = [run(tmp_path / "cache", wait=False) for _ in range(3)]
    for child in children:
        report(child)
    assert report(run(tmp_path / "cache"))[:2] == ["2", "0"]
    assert not list((tmp_path / "cache").rglob("*.tmp*"))


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    """A file stands where the folder should be: one warning, and the same results."""
    (tmp_path / "cache").write_text("not a folder")
    child = run(tmp_path / "cache")
    output, errors = child.communicate(timeout=120)
    assert child.returncode == 0
    assert output.split()[3] == "False"
    assert errors.count("RuntimeWarning") == 1
    assert "kernels will be compiled anew in every process" in errors
    assert "Set CLEARHEAD_CACHE_DIR to a folder that can" in errors
