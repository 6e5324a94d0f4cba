"""The segments that are kept with a trace: one small JSON file in its folder, written whole or not at all.

DIR/segments.json      {"format": "clearhead-segments", "version": 1,
                        "sides": {"self": [{"question": [[0, 12]]}, ... one a text]}}
"""

from __future__ import annotations

import json
from pathlib import Path

from clearhead.trace.errors import TraceError
from clearhead.trace.segments import Segments, checked
from clearhead.trace.whole import whole_file

FILE = "segments.json"
FORMAT = "clearhead-segments"
VERSION = 1

Marks = dict[str, dict[int, Segments]]  # by side, by text


def read_marks(folder: Path, lengths: dict[str, list[int]]) -> Marks:
    """The segments kept in a folder; none if there is no such file. ``lengths`` : tokens of each text, by side.

    Raises TraceError for a file that is damaged, newer, or of another trace."""
    path = folder / FILE
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError):
        raise TraceError(f"{path} is cut short or not JSON: remove it, and mark the segments again") from None
    try:
        if data["format"] != FORMAT:
            raise ValueError(f"its format is {data['format']!r}")
        if type(data["version"]) is int and data["version"] > VERSION:
            raise TraceError(
                f"{path} is of version {data['version']}, and this Clearhead reads up to {VERSION}: upgrade it"
            )
        found: Marks = {}
        for side, texts in data["sides"].items():
            if len(texts) != len(lengths[side]):
                raise ValueError(f"it has {len(texts)} texts")
            found[side] = {text: checked(one, lengths[side][text]) for text, one in enumerate(texts) if one}
        return found
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, TraceError) and "upgrade" in str(error):
            raise
        raise TraceError(f"{path} does not fit this trace ({error}): remove it, and mark the segments again") from None


def write_marks(folder: Path, marks: Marks, texts: dict[str, int]) -> None:
    """Keep segments in a folder; what was there stays as it was unless the new file is whole. ``texts`` : how many, by
    side."""
    sides = {side: [by_text.get(text, {}) for text in range(texts[side])] for side, by_text in marks.items()}
    data = json.dumps({"format": FORMAT, "version": VERSION, "sides": sides}, ensure_ascii=False)
    with whole_file(folder / FILE) as file:
        file.write(data.encode())
