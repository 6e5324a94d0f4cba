"""Alignments in Pharaoh's format: exact tokens, whatever stands before, after and around them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from clearhead.trace import Tokens, Trace, TraceError
from clearhead.trace.alignment import align, counted, pharaoh
from clearhead.trace.attentions import _Given
from clearhead.trace.format import Checks, Index, ModelFacts, Side, Site


def tokens(pieces: list[str], special: tuple[int, ...] = (), padding: tuple[int, ...] = ()) -> Tokens:
    starts, end = [], 0
    for piece in pieces:
        starts.append(end)
        end += len(piece)
    stops = tuple(start + len(piece) for start, piece in zip(starts, pieces, strict=True))
    return Tokens(tuple(range(len(pieces))), tuple(pieces), tuple(starts), stops, special, padding)


def trace(weights: list[Any], source: list[Tokens], target: list[Tokens]) -> Trace:
    """A trace of cross attention, weights (texts, heads, queries, keys) a layer."""
    sites = tuple(
        Site("cross", n, array.shape[1], array.shape[1], *array.shape[2:], 1, "F64", "array", 1.0, bias="dense")
        for n, array in enumerate(weights)
    )
    sides = Side("decoder", tuple(target)), Side("encoder", tuple(source))
    model = ModelFacts("m", "given", len(weights), 0, "float64", "given", "", "")
    return Trace(Index("", model, sides, sites, Checks(())), held=_Given({"cross": weights}))


# Source: <pad> das | haus | ist klein </s>; target, as the decoder reads it: <s> the house is small </s>
SOURCE = tokens(["<pad>", "das", " ha", "us", " ist", " klein", "</s>"], special=(6,), padding=(0,))
TARGET = tokens(["<s>", "the", " house", " is", " small", "</s>"], special=(0, 5))
WRITES = [1, 3, 4, 5, 6, 6]  # the source place that each row looks at most, for the token that it writes


def looking(at: list[int], keys: int, heads: int = 1) -> Any:
    rows = np.full((len(at), keys), 0.01)
    rows[np.arange(len(at)), at] = 1
    return np.repeat((rows / rows.sum(axis=-1, keepdims=True))[None, None], heads, axis=1)


def test_exact_tokens_without_padding_and_ends() -> None:
    """fairseq#3625, #3494: alignments shifted by padding, and one row too many for the end."""
    found = trace([looking(WRITES, 7)], [SOURCE], [TARGET])
    assert align(found) == ((0, 0), (2, 1), (3, 2), (4, 3))
    assert pharaoh(align(found)) == "0-0 2-1 3-2 4-3"


def test_the_row_that_reads_a_token() -> None:
    found = trace([looking([6, *WRITES[:5]], 7)], [SOURCE], [TARGET])
    assert align(found, step="input") == ((0, 0), (2, 1), (3, 2), (4, 3))
    with pytest.raises(TraceError, match="step is 'next': 'output' takes a row for the token it writes"):
        align(found, step="next")  # type: ignore[arg-type]


def test_words() -> None:
    found = trace([looking([1, 2, 4, 5, 6, 6], 7)], [SOURCE], [TARGET])
    assert align(found, words=True) == ((0, 0), (1, 1), (2, 2), (3, 3))
    both = tokens(["<s>", "a", " bi", "g", " one"], special=(0,))
    found = trace([looking([1, 2, 3, 4, 0], 5)], [both], [both])
    assert align(found) == ((0, 0), (1, 1), (2, 2), (3, 3))
    assert align(found, words=True) == ((0, 0), (1, 1), (2, 2))


def test_what_is_special_is_never_looked_at() -> None:
    """Rows that look at the end alone are linked to the best of the text, and rows that see no text to nothing."""
    weights = looking([6] * 6, 7)
    weights[0, 0, 1, 4] = 0.5
    weights[0, 0, 2] = np.eye(7)[6]
    assert align(trace([weights], [SOURCE], [TARGET])) == ((0, 0), (3, 1), (0, 3))  # equal weights: the earlier


def test_layers_and_heads() -> None:
    first, second, last = (looking([place] * 6, 7, heads=2) for place in (1, 2, 3))
    second[:, 1] = looking([4] * 6, 7)[0, 0] * 3
    found = trace([first, second, last], [SOURCE], [TARGET])
    assert {source for source, _ in align(found)} == {3}  # the layer before the last, mean of its heads
    assert {source for source, _ in align(found, layer=2)} == {2}
    assert {source for source, _ in align(found, layer=1, head=0)} == {1}
    assert found.alignment(1, 0) == align(found, 1, 0)


def test_batches_change_nothing() -> None:
    longer = tokens(["das", " ha", "us", " ist", " sehr", " klein", "</s>"], special=(6,))
    weights = np.concatenate([looking(WRITES, 7), looking([0, 2, 3, 5, 6, 6], 7)])
    found = trace([weights], [SOURCE, longer], [TARGET, TARGET])
    assert align(found, text=0) == ((0, 0), (2, 1), (3, 2), (4, 3))
    assert align(found, text=1) == ((0, 0), (2, 1), (3, 2), (5, 3))


def test_nothing_to_align(recorded: Trace) -> None:
    with pytest.raises(TraceError, match="alignments are made of cross attention, and this trace holds self only"):
        align(recorded)
    ends = tokens(["<s>", "</s>"], special=(0, 1))
    assert align(trace([looking([0, 0], 2)], [ends], [ends])) == ()
    assert pharaoh(()) == ""


def test_words_of_tokens_without_a_text_are_refused() -> None:
    """Numbers have no places in a text: all would be one word."""
    numbers = Tokens((5, 6, 7), ("5", "6", "7"), (-1,) * 3, (-1,) * 3)
    found = trace([looking([0, 1, 2], 3)], [numbers], [numbers])
    assert len(align(found)) == 2
    with pytest.raises(TraceError, match=r"words are not known: .*Record it with tokenizer=, or align tokens"):
        align(found, words=True)


def test_words_are_what_white_space_parts() -> None:
    places, numbers = counted(tokens(["<s>", " ", "a", "b", "\n", "c", " d"], special=(0,)), words=True)
    assert places.tolist() == [1, 2, 3, 4, 5, 6]
    assert numbers.tolist() == [0, 0, 0, 1, 1, 2]  # white space goes with the word after it
