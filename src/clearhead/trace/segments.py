r"""Parts of a text by name: turns of a chat, documents, sentences, or whatever is marked by hand.

A segment is one or more ranges of tokens, ``((start, stop), ...)``, each half-open. Ranges of characters become
ranges of tokens in :func:`in_tokens`: a token belongs to the range in which its first character lies that is not
white space, and one with no place in the text (``<s>``) to none.

>>> turns("<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>")
{'user 1': ((17, 20),), 'assistant 1': ((53, 59),)}
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from clearhead.trace.errors import TraceError
from clearhead.trace.format import Tokens

Ranges = tuple[tuple[int, int], ...]
Segments = dict[str, Ranges]

# How chat templates write who speaks, and where the turn ends. "who" is the speaker, "what" the turn.
TEMPLATES = {
    "ChatML": r"<\|im_start\|>(?P<who>\w+)\n(?P<what>.*?)(?:<\|im_end\|>|\Z)",
    "Llama 3": r"<\|start_header_id\|>(?P<who>\w+)<\|end_header_id\|>\n\n(?P<what>.*?)(?:<\|eot_id\|>|\Z)",
    "Gemma": r"<start_of_turn>(?P<who>\w+)\n(?P<what>.*?)(?:<end_of_turn>|\Z)",
    "Zephyr, Phi-3": r"<\|(?P<who>system|user|assistant)\|>\n(?P<what>.*?)(?:</s>|<\|end\|>|(?=<\|user\|>)|\Z)",
    "plain": r"^(?P<who>System|User|Human|Assistant|AI): ?(?P<what>.*?)(?=^(?:System|User|Human|Assistant|AI):|\Z)",
}
SENTENCE = re.compile(r"\S.*?(?:[.!?…]+[\"')\]”’»]*(?=\s)|[。！？]+[」』”’）]*|(?=\n\s*\n)|\Z)", re.DOTALL)


def turns(text: str) -> Segments:
    """The turns of a chat, "user 1", "assistant 1", "user 2" ..., in characters, without the words of the template.

    Knows the templates of ChatML, Llama 3, Gemma, Zephyr and Phi-3, and plain ``User: ...`` at the start of a line.
    Raises TraceError if the text is written in none of them.
    """
    for pattern in TEMPLATES.values():
        if found := list(re.finditer(pattern, text, re.DOTALL | re.MULTILINE)):
            return _numbered((match["who"].lower(), match.span("what")) for match in found)
    raise TraceError(f"the text is no chat in any of the templates known: {', '.join(TEMPLATES)}")


def sentences(text: str) -> Segments:
    r"""The sentences, "sentence 1", "sentence 2" ..., in characters.

    One ends at . ! ? … and closing quotes before white space, at 。！？, or at an empty line; so does an abbreviation.

    >>> sentences("It rains. Does it?\n\nYes")
    {'sentence 1': ((0, 9),), 'sentence 2': ((10, 18),), 'sentence 3': ((20, 23),)}
    """
    return _numbered(("sentence", match.span()) for match in SENTENCE.finditer(text))


def documents(text: str, separator: str = "<|endoftext|>") -> Segments:
    """The documents that were packed into one text, "document 1" ..., in characters, without the separator.

    >>> documents("one<|endoftext|>two")
    {'document 1': ((0, 3),), 'document 2': ((16, 19),)}
    """
    if not separator:
        raise TraceError("separator is empty: give the text that stands between two documents")
    ends = [match.span() for match in re.finditer(re.escape(separator), text)]
    starts = [0, *(stop for _, stop in ends)]
    stops = [*(start for start, _ in ends), len(text)]
    return _numbered(("document", span) for span in zip(starts, stops, strict=True) if span[0] < span[1])


def in_tokens(tokens: Tokens, segments: Mapping[str, Any]) -> Segments:
    """Segments of characters as segments of tokens. Names without any token have no ranges.

    >>> tokens = Tokens((0, 1, 2), ("<s>", "Hi", " there"), (-1, 0, 2), (-1, 2, 8))
    >>> in_tokens(tokens, {"greeting": (0, 2), "rest": (3, 8)})
    {'greeting': ((1, 2),), 'rest': ((2, 3),)}
    """
    first = np.array(
        [
            -1 if start < 0 else start + len(piece) - len(piece.lstrip() or piece)
            for start, piece in zip(tokens.start, tokens.text, strict=True)
        ]
    )
    found: Segments = {}
    for name, ranges in checked(segments).items():
        inside = np.zeros(len(first), bool)
        for start, stop in ranges:
            inside |= (start <= first) & (first < stop)
        found[name] = _runs(np.flatnonzero(inside).tolist())
    return found


def source(tokens: Tokens, without: Container[int] = ()) -> str:
    """The text that tokens came from, up to the last of them; spaces for what none of them, or one of those left out
    (``without``, places), says."""
    text = [" "] * max([0, *tokens.stop])
    for place, (piece, start, stop) in enumerate(zip(tokens.text, tokens.start, tokens.stop, strict=True)):
        if start >= 0 and place not in without:
            text[start:stop] = piece
    return "".join(text)


def checked(segments: Mapping[str, Any], length: int | None = None) -> Segments:
    """Segments with every value as a tuple of ranges, whether one range was given or several.

    Raises TraceError, naming the segment, for what is no range or lies beyond ``length``."""
    found: Segments = {}
    for name, given in segments.items():
        ranges = [given] if _is_range(given) or not isinstance(given, Iterable) or isinstance(given, str) else given
        for one in ranges:
            if not _is_range(one) or not 0 <= one[0] <= one[1] or (length is not None and one[1] > length):
                limit = "" if length is None else f" within the {length:,} tokens"
                shown = tuple(one) if isinstance(one, list | tuple) else one
                raise TraceError(f"segment {name!r} has the range {shown}: give (start, stop), half-open,{limit}")
        found[str(name)] = tuple((int(start), int(stop)) for start, stop in ranges)
    return found


def _is_range(given: Any) -> bool:
    """Whether it is two whole numbers, Python's or NumPy's."""
    return (
        isinstance(given, Sequence | np.ndarray)
        and len(given) == 2
        and all(isinstance(number, int | np.integer) for number in given)
    )


def named(segments: Segments, name: str) -> Ranges:
    """The ranges of a segment, or of all that are numbered under a name: "user" is "user 1", "user 2" ...

    In order, and joined where they overlap, so that no token counts twice.

    Raises TraceError if there is none, saying which there are."""
    if name in segments:
        return _joined(segments[name])
    numbered = re.compile(re.escape(name) + r" \d+")
    found = [one for other, ranges in segments.items() if numbered.fullmatch(other) for one in ranges]
    if not found:
        known = ", ".join(segments) or "none: mark them with trace.mark(...), or give segments="
        raise TraceError(f"there is no segment {name!r}; there are {known}")
    return _joined(found)


def _joined(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """Ranges in order, those that touch or overlap as one; empty ones left out."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(one for one in ranges if one[0] < one[1]):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return tuple(found)


def _numbered(spans: Any) -> Segments:
    counts: dict[str, int] = {}
    found: Segments = {}
    for name, (start, stop) in spans:
        counts[name] = counts.get(name, 0) + 1
        found[f"{name} {counts[name]}"] = ((start, stop),)
    return found


def _runs(places: Sequence[int]) -> Ranges:
    """Ascending places as ranges: 3, 4, 5, 9 is (3, 6), (9, 10)."""
    runs: list[tuple[int, int]] = []
    for place in places:
        if runs and runs[-1][1] == place:
            runs[-1] = (runs[-1][0], place + 1)
        else:
            runs.append((place, place + 1))
    return tuple(runs)
