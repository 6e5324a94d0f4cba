"""Tokens are shown as the text they came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models

from clearhead.trace import TraceError, read_text, tokenize


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_models.tokenizer()


class Slow:
    """A tokenizer that keeps no offsets, around one that does."""

    is_fast = False
    all_special_ids = (0, 1)

    def __init__(self, fast: Any, before: tuple[int, ...] = ()) -> None:
        self.fast, self.before = fast, before

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [*self.before, *self.fast(text, **options)["input_ids"]]}

    def decode(self, ids: list[int]) -> str:
        return str(self.fast.decode(ids))


@pytest.mark.parametrize("slow", [False, True])
def test_pieces_are_the_text(tokenizer: Any, slow: bool) -> None:
    text = tiny_models.TEXT
    tokens = tokenize(Slow(tokenizer) if slow else tokenizer, text)
    assert not any("Ġ" in piece or "\ufffd" in piece for piece in tokens.text)
    for piece, start, stop in zip(tokens.text, tokens.start, tokens.stop, strict=True):
        assert text[start:stop] == piece
    covered = {place for start, stop in zip(tokens.start, tokens.stop, strict=True) for place in range(start, stop)}
    assert covered == set(range(len(text)))


@pytest.mark.parametrize("slow", [False, True])
def test_tokens_that_share_a_character_all_show_it(tokenizer: Any, slow: bool) -> None:
    tokens = tokenize(Slow(tokenizer) if slow else tokenizer, "🙂")
    assert tokens.text == ("🙂",) * len(tokens.ids)
    assert len(tokens) == 4
    assert tokens.start == (0,) * 4
    assert tokens.stop == (1,) * 4


def test_white_space_left_out_of_offsets_is_put_back() -> None:
    class Trims:
        is_fast = True
        all_special_ids = ()

        def __call__(self, text: str, **options: Any) -> dict[str, Any]:
            return {"input_ids": [5, 6], "offset_mapping": [(0, 3), (4, 7)]}

    assert tokenize(Trims(), "the cat").text == ("the", " cat")


def test_tokens_that_the_tokenizer_adds_have_no_place_in_the_text(tokenizer: Any) -> None:
    tokens = tokenize(Slow(tokenizer, before=(0,)), "the cat")
    assert tokens.text[0] == "<s>"
    assert (tokens.start[0], tokens.stop[0]) == (-1, -1)
    assert "".join(tokens.text[1:]) == "the cat"


def test_what_decodes_to_something_else_is_shown_as_it_was_written() -> None:
    class Lowers:
        is_fast = False
        all_special_ids = ()

        def __call__(self, text: str, **options: Any) -> dict[str, Any]:
            return {"input_ids": [1, 2]}

        def decode(self, ids: list[int]) -> str:
            return "".join({1: "the", 2: " cat"}[token] for token in ids)

    tokens = tokenize(Lowers(), "THE Cat")
    assert tokens.text == ("THE", " Cat")
    assert tokens.start == (0, 3)


def test_at_most_so_many(tokenizer: Any) -> None:
    assert len(tokenize(tokenizer, tiny_models.TEXT, 5)) == 5
    assert len(tokenize(tokenizer, "cat", 500)) == len(tokenize(tokenizer, "cat"))


def test_no_tokens_are_refused(tokenizer: Any) -> None:
    with pytest.raises(TraceError, match="the text has no tokens"):
        tokenize(tokenizer, "")


def test_read_text(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes("\ufeffnaïve".encode())
    assert read_text(file) == "naïve"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, r"a\.txt does not exist: --text takes the name of a text file"),
        (b"", r"a\.txt is empty: there is nothing to read"),
        (b" \n\t ", r"a\.txt is empty: there is nothing to read"),
        ("naïve".encode("latin1"), r"a\.txt is not UTF-8 text: byte 2 is 0xef\. Convert it first"),
    ],
)
def test_texts_that_cannot_be_read(content: bytes | None, words: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(TraceError, match=words):
        read_text(tmp_path / "a.txt")


def test_a_folder_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="is a folder"):
        read_text(tmp_path)
