"""What an import loads, seen from a fresh process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import clearhead as ch

HEAVY = ("numba", "llvmlite", "torch", "transformers", "safetensors", "matplotlib", "rich", "typer", "ml_dtypes")


def loaded_after(code: str) -> set[str]:
    """Top-level modules that are loaded once ``code`` has run in a new interpreter."""
    report = "; import json, sys; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    found = subprocess.run([sys.executable, "-c", code + report], capture_output=True, text=True, check=True)
    return set(json.loads(found.stdout.splitlines()[-1]))


def test_importing_clearhead_loads_numpy_alone() -> None:
    loaded = loaded_after("import clearhead")
    assert "numpy" in loaded
    assert not loaded & set(HEAVY)


def test_the_oracle_needs_no_compiler() -> None:
    code = "import clearhead as ch, numpy as np; x = np.eye(3); ch.core.attend(x, x, x, mask=ch.masks.causal())"
    assert not loaded_after(code) & set(HEAVY)


def test_attention_loads_numba_and_nothing_else_heavy() -> None:
    code = "import clearhead as ch, numpy as np; x = np.eye(3); ch.attention(x, x, x)"
    assert loaded_after(code) & set(HEAVY) == {"numba", "llvmlite"}


def test_reading_a_trace_needs_no_torch() -> None:
    assert not loaded_after("import clearhead.trace.reader") & {"torch", "transformers", "safetensors"}


def test_everything_promised_is_there() -> None:
    assert len(set(ch.__all__)) == len(ch.__all__)
    assert set(ch.__all__) <= set(dir(ch))
    for name in ch.__all__:
        assert getattr(ch, name) is not None


def test_what_is_not_there_is_said() -> None:
    with pytest.raises(AttributeError, match=r"^module 'clearhead' has no attribute 'atention'$"):
        ch.atention  # noqa: B018
