"""From the offsets that a tokenizer gives to the characters that a token is shown as.

Offsets leave things out: white space between words, an accent that a normalizer put into its letter, a control
character that it dropped. And they cut characters apart, for one that a reader sees may be several code points
(a flag, a family, a letter with marks below and above it) and a code point several bytes. Here every character of
the text finds its token, and what a reader sees as one character stays one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

NOWHERE = (-1, -1)
LONGEST = 32  # code points of what may be taken for one character; a letter with more marks is shown cut


def settle(spans: Sequence[tuple[int, int]], text: str, whole: bool = True) -> list[tuple[int, int]]:
    """Where each token lies in the text, (start, stop) in characters; (-1, -1) for those with no place in it.

    spans : the tokenizer's offsets, empty for tokens that it adds; whole : whether the text was read to its end.

    Starts and stops never fall; if any token has a place, all of the text but white space is covered, up to the last
    token where the text was cut; and no span ends inside a character (UAX #29's extended grapheme clusters).

    >>> settle([(0, 0), (0, 3), (4, 7)], "the cat ")        # white space goes with the token after it
    [(-1, -1), (0, 3), (3, 7)]
    >>> settle([(0, 1), (2, 3)], "a\\u0301b")                # an accent that was left out, with its letter
    [(0, 2), (2, 3)]
    >>> settle([(0, 1), (1, 2)], "\\N{REGIONAL INDICATOR SYMBOL LETTER D}\\N{REGIONAL INDICATOR SYMBOL LETTER E}")
    [(0, 2), (0, 2)]
    """
    return _whole_characters(_without_gaps(_in_order(spans, len(text)), text, whole), text)


def _in_order(spans: Sequence[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """Spans that neither run backwards nor leave the text; a normalizer that reorders marks may make them do so."""
    found, start, stop = [], 0, 0
    for first, last in spans:
        if first >= last or first >= length:
            found.append(NOWHERE)
            continue
        start, stop = max(start, first), max(stop, min(last, length))
        found.append((start, stop))
    return found


def _without_gaps(spans: list[tuple[int, int]], text: str, whole: bool) -> list[tuple[int, int]]:
    """What lies between two tokens goes to the first up to white space, and from there on to the second."""
    found = list(spans)
    before, end = -1, 0  # the last token that has a place, and where it ends
    for token, (start, stop) in enumerate(spans):
        if (start, stop) == NOWHERE:
            continue
        if end < start:
            tail = _up_to_space(text, end, start) if before >= 0 else 0
            if tail:
                found[before] = (found[before][0], end + tail)
            found[token] = (end + tail, stop)
        before, end = token, stop
    if before >= 0 and whole and (rest := len(text[end:].rstrip())):
        found[before] = (found[before][0], end + rest)
    return found


def _up_to_space(text: str, start: int, stop: int) -> int:
    """How many characters stand before the first white space of ``text[start:stop]``."""
    return next((place - start for place in range(start, stop) if text[place].isspace()), stop - start)


def _whole_characters(spans: list[tuple[int, int]], text: str) -> list[tuple[int, int]]:
    """Spans grown to the ends of the characters that they cut."""
    if text.isascii() and "\r" not in text:
        return spans
    import regex  # transformers brings it: where there is a tokenizer, it is

    ends = [0]
    for match in regex.finditer(r"\X", text):
        if match.end() - match.start() <= LONGEST:
            ends.append(match.end())
        else:
            ends.extend(range(match.start() + 1, match.end() + 1))
    return [
        span if span == NOWHERE else (ends[bisect_right(ends, span[0]) - 1], ends[bisect_right(ends, span[1] - 1)])
        for span in spans
    ]
