"""Arrays in files: what is written comes back, what is damaged is refused before a number is read."""

from __future__ import annotations

import contextlib
import errno
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from clearhead.trace import TraceError
from clearhead.trace.tensors import read_tensors, write_tensors

ARRAYS = {
    "single": np.arange(12, dtype=np.float32).reshape(3, 4),
    "double": np.linspace(0, 1, 5),
    "half": np.ones((2, 1, 3), np.float16),
    "brain": np.ones((2, 3), ml_dtypes.bfloat16),
    "whole": np.arange(-2, 3, dtype=np.int64),
    "truth": np.array([[True, False]]),
    "nothing": np.zeros((0, 4), np.float32),
    "turned": np.arange(6, dtype=np.float32).reshape(2, 3).T,
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "x.safetensors"
    write_tensors(path, ARRAYS)
    return path


def test_what_is_written_comes_back(file: Path) -> None:
    found = read_tensors(file)
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert found[name].dtype == array.dtype
        assert np.array_equal(found[name], array)


def test_reading_maps_the_file_and_cannot_change_it(file: Path) -> None:
    found = read_tensors(file)["single"]
    base: Any = found
    while not isinstance(base, np.memmap):
        base = base.base
    assert base.mode == "r"
    with pytest.raises(ValueError, match="read-only"):
        found[0, 0] = 1


def test_the_format_is_that_of_safetensors(file: Path, tmp_path: Path) -> None:
    ours = load_file(file)
    theirs = {name: array.copy() for name, array in ARRAYS.items() if name != "turned"}
    save_file(theirs, tmp_path / "theirs.safetensors", metadata={"who": "safetensors"})
    read = read_tensors(tmp_path / "theirs.safetensors")
    for name, array in theirs.items():
        assert np.array_equal(ours[name], array)
        assert np.array_equal(read[name], array)


def test_a_file_cut_anywhere_is_refused(file: Path, tmp_path: Path) -> None:
    whole = file.read_bytes()
    cut = tmp_path / "cut.safetensors"
    for length in [*range(0, len(whole), 7), len(whole) - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(TraceError, match=r"cut short or not a file of Clearhead's.*Record the trace again"):
            read_tensors(cut)
    cut.write_bytes(whole + b"more")
    with pytest.raises(TraceError, match="bytes and should have"):
        read_tensors(cut)


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_noise_is_refused(tmp_path_factory: pytest.TempPathFactory, noise: bytes) -> None:
    path = tmp_path_factory.mktemp("noise") / "x.safetensors"
    path.write_bytes(noise)
    with contextlib.suppress(TraceError):
        assert read_tensors(path) == {}  # an empty table is one


GOOD: dict[str, Any] = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ([1], "not a table of arrays"),
        ({"x": 3}, "nothing usable about 'x'"),
        ({"x": {**GOOD, "dtype": "F99"}}, "nothing usable"),
        ({"x": {**GOOD, "dtype": ["F32"]}}, "nothing usable"),
        ({"x": {**GOOD, "shape": [2.0]}}, "nothing usable"),
        ({"x": {**GOOD, "shape": [True, 2]}}, "nothing usable"),
        ({"x": {**GOOD, "shape": [-2]}}, "nothing usable"),
        ({"x": {**GOOD, "shape": [1 << 70]}}, "'x' has 8 bytes"),
        ({"x": {**GOOD, "shape": [3]}}, "'x' has 8 bytes"),
        ({"x": {**GOOD, "data_offsets": [8, 0]}}, "'x' has -8 bytes"),
        ({"x": {**GOOD, "data_offsets": [0, 8, 16]}}, "nothing usable"),
        ({"x": {**GOOD, "data_offsets": [4, 12]}}, "overlap or leave gaps"),
        ({"x": GOOD, "y": GOOD}, "overlap or leave gaps"),
        ({"x": GOOD, "y": {**GOOD, "data_offsets": [8, 16]}}, "bytes and should have"),
    ],
)
def test_headers_that_lie_are_refused(header: Any, words: str, tmp_path: Path) -> None:
    path, text = tmp_path / "x.safetensors", json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(TraceError, match=words):
        read_tensors(path)


def test_headers_that_are_too_deep_or_too_long_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for text in (b"[" * 100_000, b" " * ((1 << 20) + 1)):
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        with pytest.raises(TraceError, match="its header"):
            read_tensors(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"gone\.safetensors is missing: the trace is not whole"):
        read_tensors(tmp_path / "gone.safetensors")


def test_other_dtypes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="complex64 have no place in a trace"):
        write_tensors(tmp_path / "x.safetensors", {"x": np.zeros(2, np.complex64)})
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(array: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "ascontiguousarray", full)
    with pytest.raises(OSError, match="No space left"):
        write_tensors(tmp_path / "x.safetensors", ARRAYS)
    assert list(tmp_path.iterdir()) == []
