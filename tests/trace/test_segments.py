"""Parts of a text by name, how they become tokens, are kept, and what rows of one give to keys of another."""

from __future__ import annotations

import itertools
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import tiny_tokenizers
from hypothesis import given
from hypothesis import strategies as st

import clearhead as ch
from clearhead import from_attentions
from clearhead.trace import Trace, TraceError, between, segments, tokenize
from clearhead.trace.whole import whole_file

CHATS = {
    "ChatML": "<|im_start|>{who}\n{what}<|im_end|>\n",
    "Llama 3": "<|start_header_id|>{who}<|end_header_id|>\n\n{what}<|eot_id|>",
    "Gemma": "<start_of_turn>{who}\n{what}<end_of_turn>\n",
    "Zephyr": "<|{who}|>\n{what}</s>\n",
    "Phi-3": "<|{who}|>\n{what}<|end|>\n",
    "plain": "{who}: {what}\n",
}
SAID = [("user", "How many cats?"), ("assistant", "Two.\nOr three?"), ("user", "Thanks!")]


@pytest.mark.parametrize("template", CHATS)
def test_turns(template: str) -> None:
    said = [(who.title(), what) for who, what in SAID] if template == "plain" else SAID
    text = "".join(CHATS[template].format(who=who, what=what) for who, what in said)
    found = segments.turns(text)
    assert list(found) == ["user 1", "assistant 1", "user 2"]
    assert [text[start:stop].strip() for ((start, stop),) in found.values()] == [what for _, what in SAID]


def test_a_turn_that_is_still_written_ends_with_the_text() -> None:
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHel"
    ((start, stop),) = segments.turns(text)["assistant 1"]
    assert text[start:stop] == "Hel"
    with pytest.raises(TraceError, match="the text is no chat in any of the templates known: ChatML, Llama 3"):
        segments.turns("Once upon a time.")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It rains. Does it? Yes!", ["It rains.", "Does it?", "Yes!"]),
        ('He said "no." She left…  \n\nEnd', ['He said "no."', "She left…", "End"]),
        ("雨だ。本当？「はい。」終", ["雨だ。", "本当？", "「はい。」", "終"]),
        ("3.14 is pi.\nNot 3.", ["3.14 is pi.", "Not 3."]),
        ("  \n ", []),
    ],
)
def test_sentences(text: str, expected: list[str]) -> None:
    found = segments.sentences(text)
    assert [text[start:stop].strip() for ((start, stop),) in found.values()] == expected
    assert list(found) == [f"sentence {number}" for number in range(1, len(expected) + 1)]


@given(st.text("ab.!? \n。"))
def test_sentences_are_apart_and_leave_out_white_space_alone(text: str) -> None:
    spans = [span for (span,) in segments.sentences(text).values()]
    assert all(start < stop for start, stop in spans)
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
    covered = {place for start, stop in spans for place in range(start, stop)}
    assert not "".join(c for place, c in enumerate(text) if place not in covered).strip()


def test_documents() -> None:
    text = "one<|endoftext|>two<|endoftext|>"
    assert [text[a:b] for ((a, b),) in segments.documents(text).values()] == ["one", "two"]
    assert list(segments.documents("a\f\fb", "\f")) == ["document 1", "document 2"]
    with pytest.raises(TraceError, match="separator is empty"):
        segments.documents(text, "")


@pytest.mark.parametrize("name", tiny_tokenizers.ALL)
def test_characters_become_tokens_of_any_vocabulary(name: str) -> None:
    text = "The cat sat.  Then THE naïve dog 🙂 saw it!"
    tokens = tokenize(tiny_tokenizers.ALL[name](), text)
    found = segments.in_tokens(tokens, segments.sentences(text))
    inside = [place for ranges in found.values() for start, stop in ranges for place in range(start, stop)]
    assert len(set(inside)) == len(inside)
    places = [place for start, stop in found["sentence 1"] for place in range(start, stop)]
    first = text[tokens.start[places[0]] : tokens.stop[places[-1]]]
    assert first == "The cat sat."
    assert not set(inside) & set(tokens.special)
    assert segments.source(tokens).split() == text.split()


def trace(texts: int = 1) -> Trace:
    weights = np.tril(np.random.default_rng(0).random((texts, 3, 8, 8)))
    weights[0, 1, [2, 5]] = 0
    weights /= np.maximum(weights.sum(axis=-1, keepdims=True), 1e-12)
    return from_attentions([weights, weights[:, ::-1]], [list("abcdefgh")] * texts)


def dense(found: Trace, layer: int, rows: list[int], keys: list[int], text: int = 0) -> Any:
    weights = np.asarray(found.weights(layer, text=text), np.float64)
    mass, seeing = weights[:, rows][:, :, keys].sum(axis=-1), weights[:, rows].any(axis=-1)
    return (mass * seeing).sum(axis=-1) / seeing.sum(axis=-1)


def test_between_is_the_mean_of_the_dense_rows() -> None:
    found = trace(texts=2)
    parts = {"question": (0, 3), "answer": [(3, 5), (6, 8)]}
    for text in (0, 1):
        values = found.between("answer", "question", text=text, segments=parts)
        assert values.shape == (2, 3)
        for layer in (0, 1):
            expected = dense(found, layer, [3, 4, 6, 7], [0, 1, 2], text)
            assert np.abs(values[layer] - expected).max() < 1e-6
    assert found.between("question", "answer", segments=parts).max() == 0  # the future


def test_between_takes_numbered_segments_together() -> None:
    found = trace()
    found.mark({"user 1": (0, 2), "assistant 1": (2, 4), "user 2": (4, 6), "userland": (6, 7)})
    values = found.between("user", "assistant")
    assert np.abs(values[0] - dense(found, 0, [0, 1, 4, 5], [2, 3])).max() < 1e-6
    assert list(found.segments()) == ["user 1", "assistant 1", "user 2", "userland"]


def test_tokens_of_overlapping_ranges_count_once() -> None:
    weights = np.full((1, 1, 6, 6), 1 / 6)
    trace = from_attentions([weights])
    given = {"a": [(0, 3), (1, 4), (4, 4)], "b 1": (2, 5), "b 2": (3, 6), "all": (0, 6)}
    assert trace.between("all", "a", segments=given)[0, 0] == pytest.approx(4 / 6)
    assert trace.between("all", "b", segments=given)[0, 0] == pytest.approx(4 / 6)
    places = np.arange(7)
    given = {"a": (places[0], places[4]), "all": [places[[0, 6]]]}  # whole numbers of NumPy's
    assert trace.between("all", "a", segments=given)[0, 0] == pytest.approx(4 / 6)
    assert segments.named({"a": ((3, 5), (0, 2), (1, 4))}, "a") == ((0, 5),)


def test_between_in_blocks(monkeypatch: pytest.MonkeyPatch, recorded: Trace) -> None:
    """The same however few rows are computed at once."""
    parts = {"all": (0, len(recorded.tokens)), "some": (3, 9)}
    expected = recorded.between("all", "some", segments=parts)
    monkeypatch.setattr(between, "BLOCK_CELLS", 50)
    assert np.abs(recorded.between("all", "some", segments=parts) - expected).max() < 1e-9


def test_rows_that_see_nothing_have_no_mean() -> None:
    found = from_attentions([np.zeros((1, 2, 3, 3))])
    assert np.isnan(found.between("a", "b", segments={"a": (0, 2), "b": (2, 3)})).all()
    assert np.isnan(trace().between("none", "a", segments={"none": (3, 3), "a": (0, 1)})).all()


NAMES = ("entropy", "largest", "sink", "distance", "previous", "diagonality", "perplexity", "received")


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_measures_over_a_segment_are_means_of_its_dense_rows(family: str) -> None:
    """Of a text that is padded on the left: rows that see nothing take no part."""
    found = ch.trace(tiny_models.build(family), tiny_models.inputs(family))
    values = found.over("part", *NAMES, text=1, segments={"part": [(2, 9), (12, 14)]})
    rows, keys = [*range(4, 9), 12, 13], [*range(2, 9), 12, 13]
    assert list(values) == list(NAMES)
    for layer in found.layers:
        weights = np.asarray(found.weights(layer, text=1), np.float64)
        logarithm = np.log(np.where(weights > 0, weights, 1))
        back = np.arange(17)[:, None] - np.arange(17)
        farthest = np.maximum(np.arange(17), 16 - np.arange(17))
        entropy = -(weights * logarithm).sum(-1)
        dense = {
            "entropy": entropy,
            "largest": weights.max(-1),
            "sink": weights[:, :, 0],
            "distance": (weights * back).sum(-1),
            "previous": np.pad(np.diagonal(weights, -1, 1, 2), ((0, 0), (1, 0))),
            "diagonality": 1 - (weights * abs(back)).sum(-1) / farthest,
            "perplexity": np.exp(entropy),
        }
        for name, expected in dense.items():
            assert values[name][layer] == pytest.approx(expected[:, rows].mean(-1), abs=2e-5), name
        assert values["received"][layer] == pytest.approx(weights.sum(1)[:, keys].mean(-1), abs=2e-5)


def test_a_segment_of_the_whole_text_has_the_heads_own_means(recorded: Trace) -> None:
    found = recorded.over("all", "entropy", "distance", segments={"all": (0, len(recorded.tokens))})
    for layer in recorded.layers:
        for name, values in found.items():
            assert values[layer] == pytest.approx(recorded.measures(layer).mean(name), abs=1e-6)


def test_measures_over_segments_of_cross_attention() -> None:
    """Rows are the decoder's, keys the encoder's, each with its own segments."""
    found = ch.trace(tiny_models.build("bart"), tiny_models.inputs("bart"))
    found.mark({"name": (0, 5)}, side="decoder")
    found.mark({"name": (10, 17)}, side="encoder")
    values = found.over("name", "entropy", "received", kind="cross")
    weights = np.asarray(found.weights(1, kind="cross"), np.float64)
    assert values["received"][1] == pytest.approx(weights[:, :, 10:].sum(1).mean(-1), abs=1e-5)
    entropy = -(weights * np.log(np.where(weights > 0, weights, 1))).sum(-1)
    assert values["entropy"][1] == pytest.approx(entropy[:, :5].mean(-1), abs=1e-5)
    with pytest.raises(
        TraceError, match="'distance' is of positions, and keys of cross attention are not the queries'"
    ):
        found.over("name", "distance", kind="cross")


def test_cross_attention_between_two_texts() -> None:
    weights = np.random.default_rng(0).dirichlet(np.ones(4), (1, 2, 5))
    found = from_attentions({"cross": [weights]})
    found.mark({"name": (1, 3)}, side="encoder")
    found.mark({"Name": (2, 4)}, side="decoder")
    values = found.between("Name", "name", kind="cross")
    assert np.abs(values[0] - weights[0, :, 2:4, 1:3].sum(axis=-1).mean(axis=-1)).max() < 1e-6
    with pytest.raises(TraceError, match="there is no segment 'name'; there are Name"):
        found.between("name", "Name", kind="cross")


def test_memory_is_linear() -> None:
    """As a matrix, these weights would be 256 MB."""
    x = np.random.default_rng(0).standard_normal((1, 8192, 4), dtype=np.float32)
    weights = ch.attention_weights(x, x, mask=ch.masks.causal())
    between.masses(weights, [((0, 9),)], [((0, 9),)])  # compiles, and finds the logsumexp
    tracemalloc.start()
    try:
        between.masses(weights, [((0, 8192),)], [((0, 4096),), ((4096, 8192),)])
        assert tracemalloc.get_traced_memory()[1] < 64e6
    finally:
        tracemalloc.stop()


def test_segments_are_kept_with_the_trace(copied: Path) -> None:
    found = Trace.open(copied)
    assert found.segments() == {}
    text = segments.source(found.text)
    found.mark(segments.sentences(text), characters=True)
    found.mark({"cat": (1, 2)})
    again = Trace.open(copied)
    assert again.segments() == found.segments()
    assert set(again.segments()) == {"sentence 1", "sentence 2", "cat"}
    sentence = "".join(again.tokens[start:stop][0] for start, stop in again.segments()["cat"])
    assert sentence
    assert [file.name for file in copied.iterdir() if file.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "segments.json is cut short or not JSON"),
        (
            '{"format": "clearhead-segments", "version": 9, "sides": {}}',
            "of version 9, and this Clearhead reads",
        ),
        ('{"format": "other"}', "segments.json does not fit this trace"),
        ('{"format": "clearhead-segments", "version": 1, "sides": {"self": []}}', "does not fit this trace"),
        ('{"format": "clearhead-segments", "version": 1, "sides": {"self": [{"a": [[0, 999]]}]}}', "does not fit"),
        ('{"format": "clearhead-segments", "version": 1, "sides": {"else": [{}]}}', "does not fit this trace"),
        ("[]", "does not fit this trace"),
    ],
)
def test_segments_that_are_damaged(content: str, words: str, copied: Path) -> None:
    (copied / "segments.json").write_text(content)
    with pytest.raises(TraceError, match=words):
        Trace.open(copied).segments()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda t: t.between("x", "y"), "there is no segment 'x'; there are none: mark them with trace.mark"),
        (lambda t: t.between("x", "x", segments={"y": (0, 1)}), "there is no segment 'x'; there are y"),
        (
            lambda t: t.between("x", "x", segments={"x": (0, 99)}),
            r"'x' has the range \(0, 99\): .* the 8 tokens",
        ),
        (lambda t: t.over("x", "entropy"), "there is no segment 'x'; there are none: mark them with trace.mark"),
        (lambda t: t.over("x", segments={"x": (0, 1)}), "say which measures are wanted: entropy, mass"),
        (lambda t: t.over("x", "coverage", segments={"x": (0, 1)}), "'coverage' has no mean over a segment; there are"),
        (lambda t: t.over("x", "entropy", segments={"x": (0, 99)}), r"'x' has the range \(0, 99\): .* the 8 tokens"),
        (lambda t: t.mark({"x": (3, 2)}), r"segment 'x' has the range \(3, 2\): give \(start, stop\), half-open"),
        (lambda t: t.mark({"x": [(0, 1, 2)]}), "segment 'x' has the range"),
        (lambda t: t.mark({"x": 5}), r"segment 'x' has the range 5: give \(start, stop\)"),
        (lambda t: t.mark({"x": "all"}), "segment 'x' has the range all: give"),
        (lambda t: t.mark({"x": (0.0, 1.0)}), "segment 'x' has the range 0.0: give"),
        (lambda t: t.mark({"x": (0, 1)}, side="other"), "this trace has no side 'other', only self"),
        (lambda t: t.mark({"x": (0, 1)}, text=3), "the trace holds texts 0 to 0, there is no text 3"),
    ],
)
def test_segments_that_cannot_be(call: Any, words: str) -> None:
    with pytest.raises(TraceError, match=words):
        call(trace())


def test_files_are_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with whole_file(tmp_path / "new" / "a.txt") as file:
        file.write(b"before")
    path = tmp_path / "new" / "a.txt"

    def stopped(file: Any) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), whole_file(path) as file:
        stopped(file)

    def full(*words: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"), whole_file(path) as file:
        file.write(b"after")
    assert [file.name for file in path.parent.iterdir()] == ["a.txt"]
    assert path.read_text() == "before"


def test_json_of_segments_is_for_people_too(copied: Path) -> None:
    found = Trace.open(copied)
    found.mark({"naïve": (0, 1)})
    data = json.loads((copied / "segments.json").read_text(encoding="utf-8"))
    assert data["sides"] == {"self": [{"naïve": [[0, 1]]}]}


def test_masses_of_all_parts_at_once() -> None:
    x = np.random.default_rng(0).standard_normal((2, 50, 8), dtype=np.float32)
    weights = ch.attention_weights(x, x, mask=ch.masks.causal())
    parts = [((0, 10),), ((10, 30),), ((30, 50),)]
    found = between.masses(weights, parts, parts)
    assert np.abs(found.sum(axis=-1) - 1).max() < 1e-6
    whole = np.asarray(weights)
    assert np.abs(found[:, 2, 0] - whole[:, 30:, :10].sum(axis=-1).mean(axis=-1)).max() < 1e-6
