"""A text as a model reads it: its tokens, each with the piece of text that it came from.

Vocabularies spell a space as ``Ġ`` or ``▁``, mark the rest of a word with ``##``, cut characters into bytes, and
lower or fold what they read. People read none of this, so a token is shown as the characters of the source that it
covers (see :mod:`clearhead.trace.spans`)."""

from __future__ import annotations

from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

from clearhead.trace.decoding import spans_by_decoding
from clearhead.trace.errors import TraceError
from clearhead.trace.format import Tokens
from clearhead.trace.models import quiet
from clearhead.trace.spans import settle


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

    Works for byte-level BPE, SentencePiece and WordPiece vocabularies, whether the tokenizer keeps offsets ("fast")
    or not. Where tokens share a character, as a reader sees characters, each shows all of it: the bytes of one
    letter, the parts of one emoji, a letter and its accents. White space goes with the token after it.

    Raises TraceError if the text has no tokens.
    """
    options: dict[str, Any] = {} if max_tokens is None else {"truncation": True, "max_length": max_tokens}
    special = special_ids(tokenizer)
    with quiet():  # whether the text is too long for the model is said elsewhere, in words
        if tokenizer.is_fast:
            found = tokenizer(text, return_offsets_mapping=True, **options)
            ids, spans = list(found["input_ids"]), [(int(a), int(b)) for a, b in found["offset_mapping"]]
        else:
            ids = list(tokenizer(text, **options)["input_ids"])
            spans = spans_by_decoding(tokenizer, ids, text, special)
        if not ids:
            raise TraceError("the text has no tokens: the model's tokenizer makes nothing of it")
        return _tokens(tokenizer, ids, settle(spans, text, whole=len(ids) != max_tokens), text, special)


def read_back(tokenizer: Any, ids: Sequence[int]) -> Tokens:
    """The tokens of a text of which the model's numbers are all that is known: it is what these decode to, special
    tokens spelled out. Shown as whole characters, as :func:`tokenize` does."""
    special, ids = special_ids(tokenizer), list(ids)
    with quiet():
        text = str(tokenizer.decode(ids))
        spans = spans_by_decoding(tokenizer, ids, text, special)
        return _tokens(tokenizer, ids, settle(spans, text), text, special)


def _tokens(
    tokenizer: Any, ids: list[int], places: list[tuple[int, int]], text: str, special: Container[int]
) -> Tokens:
    return Tokens(
        ids=tuple(ids),
        text=tuple(
            str(tokenizer.decode([token])) if start < 0 else text[start:stop]
            for token, (start, stop) in zip(ids, places, strict=True)
        ),
        start=tuple(start for start, _ in places),
        stop=tuple(stop for _, stop in places),
        special=tuple(place for place, token in enumerate(ids) if token in special),
    )


def special_ids(tokenizer: Any) -> frozenset[int]:
    """The numbers of the tokens that stand for no text: beginnings, ends, separators, padding, turns of a chat.

    The unknown token stands for text, and is not among them unless it has another of these parts too."""
    special = set(tokenizer.all_special_ids)
    unknown = getattr(tokenizer, "unk_token_id", None)
    others = ("bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id", "mask_token_id")
    if unknown is not None and unknown not in {getattr(tokenizer, name, None) for name in others}:
        special.discard(unknown)
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(special) | {token for token, entry in added.items() if entry.special and token != unknown}
