"""Arrays in a file, in the safetensors format: 8 bytes of length, a JSON header, then the raw numbers.

Reading maps the file into memory and copies nothing; what the header says is checked against the file's size
before any number is looked at. Nothing is ever unpickled. The format is small enough to be written here,
which keeps reading a trace free of torch, transformers and safetensors.

>>> import numpy as np, tempfile, pathlib
>>> path = pathlib.Path(tempfile.mkdtemp(), "numbers.safetensors")
>>> write_tensors(path, {"x": np.arange(6, dtype=np.float32).reshape(2, 3)})
>>> read_tensors(path)["x"].tolist()
[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clearhead.trace.errors import TraceError

# The names that safetensors gives to NumPy's types. bfloat16 is not among NumPy's own: see `_numpy_dtype`.
NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "BOOL": "bool",
}
LARGEST_HEADER = 1 << 20  # bytes; those of a trace take less than a thousand


@dataclass(frozen=True)
class Entry:
    """Where one array lies in its file: ``offset`` counts bytes from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


def write_tensors(path: Path, tensors: dict[str, NDArray[Any]]) -> None:
    """Write the arrays to ``path`` under a temporary name, then rename: the file is whole or not there.

    Raises OSError as the file system does (a full disk, no permission); the temporary file is then removed.
    """
    header: dict[str, Any] = {}
    offset = 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": format_name(array.dtype),
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the numbers start at a multiple of 8, as mapped arrays like it
    temporary = path.with_name(path.name + ".partial")
    try:
        with open(temporary, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for array in tensors.values():
                file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_header(path: Path) -> dict[str, Entry]:
    """The arrays that a file says it holds, once all it says has been checked against its size.

    Raises TraceError for a file that is missing, cut short, or not in this format.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, LARGEST_HEADER):
                raise _broken(path, "its header does not fit the file")
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise TraceError(f"{path} is missing: the trace is not whole, record it again") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, TraceError):
            raise
        raise _broken(path, "its header is not JSON") from None
    if not isinstance(header, dict):
        raise _broken(path, "its header is not a table of arrays")
    header.pop("__metadata__", None)
    spans = {name: _entry(path, name, facts) for name, facts in header.items()}
    return _laid_out(path, spans, start=8 + length, size=size)


def read_tensors(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a file, mapped into memory and read-only: what is not looked at is not read."""
    arrays = {}
    for name, entry in read_header(path).items():
        dtype = _numpy_dtype(entry.dtype)
        if 0 in entry.shape:  # nothing to map
            arrays[name] = np.zeros(entry.shape, dtype)
        else:
            mapped = np.memmap(path, np.uint8, "r", entry.offset, (math.prod(entry.shape) * dtype.itemsize,))
            arrays[name] = np.asarray(mapped).view(dtype).reshape(entry.shape)
        arrays[name].flags.writeable = False
    return arrays


def _entry(path: Path, name: str, facts: Any) -> tuple[str, tuple[int, ...], int, int]:
    """(dtype, shape, first byte, one past the last byte) of one array, offsets from the end of the header."""
    try:
        dtype, shape, (first, last) = facts["dtype"], tuple(facts["shape"]), facts["data_offsets"]
        if not all(type(number) is int and number >= 0 for number in (*shape, first, last)):
            raise TypeError
        size = math.prod(shape) * _itemsize(dtype)
    except (KeyError, TypeError, ValueError):
        raise _broken(path, f"its header says nothing usable about {name!r}") from None
    if last - first != size:
        raise _broken(path, f"{name!r} has {last - first} bytes, its shape {shape} of {dtype} needs {size}")
    return dtype, shape, first, last


def _laid_out(
    path: Path, spans: dict[str, tuple[str, tuple[int, ...], int, int]], start: int, size: int
) -> dict[str, Entry]:
    """The entries, once they are known to follow each other without gaps and to end where the file ends."""
    end = 0
    for _, _, first, last in sorted(spans.values(), key=lambda span: span[2:]):
        if first != end:
            raise _broken(path, "its arrays overlap or leave gaps")
        end = last
    if start + end != size:
        raise _broken(path, f"it has {size:,} bytes and should have {start + end:,}")
    return {name: Entry(dtype, shape, start + first) for name, (dtype, shape, first, _) in spans.items()}


def _broken(path: Path, what: str) -> TraceError:
    return TraceError(f"{path} is cut short or not a file of Clearhead's: {what}. Record the trace again")


def format_name(dtype: np.dtype[Any]) -> str:
    """What safetensors calls a dtype of NumPy. Raises TypeError for one that a trace does not hold."""
    for name, numpy_name in NAMES.items():
        if dtype.name == numpy_name:
            return name
    raise TypeError(f"arrays of dtype {dtype} have no place in a trace; it takes {', '.join(NAMES.values())}")


def _itemsize(name: str) -> int:
    return {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "BOOL": 1}[name]


def _numpy_dtype(name: str) -> np.dtype[Any]:
    if name != "BF16":
        return np.dtype(NAMES[name])
    import ml_dtypes  # only a trace of a bfloat16 model needs it

    bfloat16: type[np.generic] = ml_dtypes.bfloat16
    return np.dtype(bfloat16)
