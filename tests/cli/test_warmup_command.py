"""``clearhead warmup`` compiles, says where to, and refuses what it does not know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from clearhead.kernels import cache


def test_one_dtype(run: Callable[..., Any]) -> None:
    result = run("warmup", "float32")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith("float32")
    assert lines[-1] == f"Kept in {cache.folder()}"
    assert list((cache.folder() or "").glob("forward.attend-*.nbc"))


def test_an_unknown_dtype_is_wrong_usage(run: Callable[..., Any]) -> None:
    result = run("warmup", "int8")
    assert result.exit_code == 2
    assert "'int8' is none of float32, float64, float16, bfloat16" in result.stderr
