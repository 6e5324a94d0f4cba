"""What several tests need: a number of threads that is set back, and Python run afresh."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import clearhead as ch


@pytest.fixture(autouse=True)
def _default_threads() -> Iterator[None]:
    """Each test begins and ends with the default number of threads."""
    yield
    ch.set_num_threads(None)


@pytest.fixture
def python() -> Callable[..., str]:
    """python(source, NAME=value ...) -> what a fresh interpreter prints; its errors are ours."""

    def run(source: str, /, expect: int = 0, **environment: Any) -> str:
        done = subprocess.run(
            [sys.executable, "-c", source],
            env={**os.environ, **{name: str(value) for name, value in environment.items()}},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == expect, done.stdout + done.stderr
        return done.stdout

    return run
