"""Where tokens lie in a text, for tokenizers that keep no offsets: each is decoded and looked for.

What it decodes to need not stand in the text letter by letter: case, accents and compatibility forms may have been
folded. So both are compared folded the same way, and without their white space."""

from __future__ import annotations

import unicodedata
from bisect import bisect_left
from collections.abc import Container
from typing import Any

AHEAD = 64  # characters that may be passed over, where a token before stood for something that cannot be found
BYTES = 4  # tokens that wait for the one that completes them, at most: a space and all bytes of a character but one


def spans_by_decoding(tokenizer: Any, ids: list[int], text: str, special: Container[int]) -> list[tuple[int, int]]:
    """(start, stop) of each token in the text, (0, 0) for tokens with no place in it.

    Tokens that are parts of one character get its place together. One that stands for text but is not found in it
    (the unknown token) gets what lies between its neighbours."""
    source = _Folded(text)
    spans: list[tuple[int, int] | None] = []  # None: stands for something, not known where
    end, waiting = 0, 0
    for place, token in enumerate(ids):
        if token in special:
            spans += [None] * waiting
            waiting = 0
            written = source.find(tokenizer.decode([token]), end, 0) or (0, 0)
            spans.append(written)
            end = max(end, written[1])
            continue
        piece = tokenizer.decode(ids[place - waiting : place + 1]) or _space(tokenizer, ids, place)
        partial = not piece or "\ufffd" in piece
        found = source.find(piece, end, 0 if partial else AHEAD)
        if found:
            spans += [found] * (waiting + 1)
            end, waiting = found[1], 0
        elif partial and waiting < BYTES:
            waiting += 1
        else:
            spans += [None] * (waiting + 1)
            waiting = 0
    return _filled(spans + [None] * waiting, text)


def _space(tokenizer: Any, ids: list[int], place: int) -> str:
    """What a token decodes to after the one before it: SentencePiece drops a space at the beginning."""
    if not place:
        return ""
    before, both = tokenizer.decode(ids[place - 1 : place]), tokenizer.decode(ids[place - 1 : place + 1])
    return str(both[len(before) :]) if both.startswith(before) and both[len(before) :].isspace() else ""


class _Folded:
    """A text, and the same folded, with the place that each folded character came from."""

    def __init__(self, text: str) -> None:
        self.text = text
        folded, self.places = [], []
        for place, character in enumerate(text):
            for part in _fold(character):
                folded.append(part)
                self.places.append(place)
        self.folded = "".join(folded)

    def find(self, piece: str, start: int, ahead: int) -> tuple[int, int] | None:
        """Where a piece stands from ``start`` on, after white space and at most ``ahead`` other characters."""
        if piece and self.text.startswith(piece, start):
            return start, start + len(piece)
        folded = _fold(piece)
        if not folded:
            return None
        first = bisect_left(self.places, start)
        found = self.folded.find(folded, first, first + ahead + len(folded))
        return None if found < 0 else (self.places[found], self.places[found + len(folded) - 1] + 1)


def _fold(text: str) -> str:
    """Without case, accents, compatibility forms, white space and what cannot be seen."""
    plain = unicodedata.normalize("NFKD", text.casefold())
    return "".join(c for c in plain if not (c.isspace() or unicodedata.category(c) in ("Mn", "Cc", "Cf")))


def _filled(spans: list[tuple[int, int] | None], text: str) -> list[tuple[int, int]]:
    """The unknown given what lies between the known, less white space; after the last of those, one word."""
    found: list[tuple[int, int]] = []
    end, gap = 0, (0, 0)
    for place, span in enumerate(spans):
        if span is None and (not place or spans[place - 1] is not None):  # several in a row share what is there
            after = next((s[0] for s in spans[place:] if s is not None and s[0] < s[1]), None)
            between = text[end:after]
            words = [between.strip()] if after is not None else between.split(maxsplit=1)[:1]
            start = text.index(words[0], end) if words and words[0] else 0
            gap = (start, start + len(words[0])) if words else (0, 0)
        found.append(gap if span is None else span)
        end = max(end, found[-1][1])
    return found
