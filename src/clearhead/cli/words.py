"""Tokens and ranges of numbers as a terminal can show them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def ranges(values: Iterable[int]) -> str:
    """Numbers as people write them.

    >>> ranges([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7-8'
    """
    runs: list[list[int]] = []
    for value in sorted(values):
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def together(missing: Sequence[str]) -> list[str]:
    """Layers that are named one by one, by kind; what else is named, as it is.

    >>> together(["self layer 2", "self layer 3", "cross layer 0", "TorchAttention at head"])
    ['self layers 2-3', 'cross layer 0', 'TorchAttention at head']
    """
    found: dict[str, list[int]] = {}
    for what in missing:
        match = re.fullmatch(r"(\w+) layer (\d+)", what)
        found.setdefault(match[1] if match else what, []).extend([int(match[2])] if match else [])
    return [
        f"{what} layer{'s' * (len(layers) > 1)} {ranges(layers)}" if layers else what for what, layers in found.items()
    ]


def bracketed(token: str) -> str:
    """A token in brackets, so that its white space is seen.

    >>> bracketed(" cat\\n")
    '⟨ cat⏎⟩'
    """
    return f"⟨{flat(token)}⟩"


def flat(text: str) -> str:
    """A piece of text on one line, with nothing in it that could move a terminal's cursor. What joins emoji stays."""
    text = text.replace("\r\n", "⏎").replace("\n", "⏎").replace("\t", "⇥")
    return "".join(c if c.isprintable() or c == "\u200d" else "·" for c in text)
