"""The index of a trace: found in its folder and read, or what lies there instead said in words."""

from __future__ import annotations

import json
from pathlib import Path

from clearhead.trace import format as layout
from clearhead.trace.checked import from_json
from clearhead.trace.errors import TraceError
from clearhead.trace.format import Index
from clearhead.trace.unfinished import advice, folder_for, said


def is_trace(path: Path) -> bool:
    """Whether a folder is a trace of Clearhead's, of any version, damaged or not: it may be replaced."""
    try:
        return bool(json.loads((path / layout.INDEX).read_bytes())["format"] == layout.FORMAT)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def read_index(path: Path) -> Index:
    """What trace.json says. Raises TraceError where there is none, or it is cut short, newer or of something else."""
    where = path / layout.INDEX
    try:
        data = json.loads(where.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        what = "is not a trace: it has no trace.json" if path.is_dir() else "is not a folder with a trace"
        what = what if path.exists() else "does not exist"
        for folder in (path, folder_for(path)):
            if (left := said(folder)) is not None:
                if left.endswith("being written"):
                    raise TraceError(f"{left}: it is no trace yet. Wait for it") from None
                raise TraceError(f"{left}: it is not a trace; {advice(folder)}") from None
        raise TraceError(f"{path} {what}. `clearhead trace MODEL --text FILE -o DIR` records one") from None
    except (ValueError, RecursionError):
        raise TraceError(f"{where} is cut short or not JSON: record the trace again") from None
    return from_json(data, str(where))
