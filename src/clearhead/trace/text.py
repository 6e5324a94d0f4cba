"""A text as a model reads it: its tokens, each with the piece of text that it came from.

Byte-level vocabularies spell a space as ``Ġ`` and cut characters apart. People read neither, so a token is
shown as the characters it covers: white space before it included, and where several tokens share one
character, each of them shows that character whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clearhead.trace.errors import TraceError
from clearhead.trace.format import Tokens
from clearhead.trace.models import quiet


def read_text(path: Path) -> str:
    """The text of a UTF-8 file. Raises TraceError where there is none to read."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise TraceError(f"{path} does not exist: --text takes the name of a text file") from None
    except IsADirectoryError:
        raise TraceError(f"{path} is a folder: --text takes the name of a text file") from None
    except UnicodeDecodeError as error:
        raise TraceError(
            f"{path} is not UTF-8 text: byte {error.start:,} is {error.object[error.start]:#04x}. "
            f"Convert it first, for example with: iconv -f latin1 -t utf-8"
        ) from None
    if not text.strip():
        raise TraceError(f"{path} is empty: there is nothing to read")
    return text


def tokenize(tokenizer: Any, text: str, max_tokens: int | None = None) -> Tokens:
    """The tokens of a text, at most ``max_tokens``, with those that the tokenizer adds (such as ``<s>``).

    Raises TraceError if the text has no tokens.
    """
    options: dict[str, Any] = {} if max_tokens is None else {"truncation": True, "max_length": max_tokens}
    with quiet():  # whether the text is too long for the model is said elsewhere, in words
        if tokenizer.is_fast:
            found = tokenizer(text, return_offsets_mapping=True, **options)
            ids, spans = list(found["input_ids"]), [(int(a), int(b)) for a, b in found["offset_mapping"]]
        else:
            ids = list(tokenizer(text, **options)["input_ids"])
            spans = _spans_by_decoding(tokenizer, ids, text)
    if not ids:
        raise TraceError("the text has no tokens: the model's tokenizer makes nothing of it")
    return _tokens(tokenizer, ids, spans, text)


def _tokens(tokenizer: Any, ids: list[int], spans: list[tuple[int, int]], text: str) -> Tokens:
    """Tokens from the characters that each covers. One that covers none was added by the tokenizer."""
    pieces, starts, stops = [], [], []
    end = 0
    for token, (first, last) in zip(ids, spans, strict=True):
        if first == last:
            pieces.append(tokenizer.decode([token]))
            starts.append(-1)
            stops.append(-1)
            continue
        if end < first and text[end:first].isspace():
            first = end  # some tokenizers leave white space out of their offsets
        pieces.append(text[first:last])
        starts.append(first)
        stops.append(last)
        end = max(end, last)
    return Tokens(tuple(ids), tuple(pieces), tuple(starts), tuple(stops))


def _spans_by_decoding(tokenizer: Any, ids: list[int], text: str) -> list[tuple[int, int]]:
    """Spans where the tokenizer keeps none: tokens are decoded, several at once where they share a character,
    and looked for in the text. What is not found is shown as it decodes, with no place in the text."""
    special = set(tokenizer.all_special_ids)
    spans: list[tuple[int, int]] = []
    end, waiting = 0, 0  # how many tokens wait for their character to be whole
    for place, token in enumerate(ids):
        piece = "" if token in special else tokenizer.decode(ids[place - waiting : place + 1])
        first = text.find(piece, end) if piece else -1
        if first < 0 and piece.strip():
            piece = piece.strip()
            first = text.find(piece, end)
        if first >= 0:
            end = first + len(piece)
            spans += [(first, end)] * (waiting + 1)
            waiting = 0
        elif "\ufffd" in piece and waiting < 4:  # a character has at most 4 bytes
            waiting += 1
        else:
            spans += [(0, 0)] * (waiting + 1)
            waiting = 0
    return spans + [(0, 0)] * waiting
