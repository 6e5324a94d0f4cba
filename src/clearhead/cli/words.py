"""Tokens as a terminal can show them."""

from __future__ import annotations


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
