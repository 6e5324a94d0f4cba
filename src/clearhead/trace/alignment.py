"""Which source token each target token was written from, by cross attention: alignments in Pharaoh's format.

A line ``0-0 1-2 2-1`` says i-j for source token i and target token j, counted from 0, as fast_align writes them (Dyer,
Chahuneau & Smith, "A Simple, Fast, and Effective Reparameterization of IBM Model 2", NAACL 2013). Only tokens of text
are counted: beginnings, ends, padding and language marks are left out before anything is numbered, so that nothing is
shifted by them and no line has one link too many.

A row of a decoder reads one token and writes the next. ``step`` says which of the two a row's weights are taken for:
"output", the token that it writes, or "input", the token that it reads, which is often the better alignment (Chen, Sun
& Liu, "Accurate Word Alignment Induction from Neural Machine Translation", EMNLP 2020, Shift-Att).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from clearhead.trace.errors import TraceError
from clearhead.trace.segments import source

if TYPE_CHECKING:
    from clearhead.trace.format import Tokens
    from clearhead.trace.reader import Trace

Links = tuple[tuple[int, int], ...]


def align(
    trace: Trace,
    layer: int | None = None,
    head: int | None = None,
    *,
    text: int = 0,
    step: Literal["output", "input"] = "output",
    words: bool = False,
) -> Links:
    """(source, target) links of one text, by target: for each target token the source token of the largest weight.

    Weights are means over the heads of a layer, or one head's. The layer before the last is taken if none is chosen
    (Garg, Peitz, Nallasamy & Paulik, "Jointly Learning to Align and Translate with Transformer Models", EMNLP 2019), or
    the only one. Equal weights go to the earlier source token; a row that sees no token of text has no link.
    ``words`` numbers words (what white space separates) in place of tokens, each pair once.

    Raises TraceError if the trace has no cross attention.
    """
    if "cross" not in trace.kinds:
        raise TraceError(f"alignments are made of cross attention, and this trace holds {', '.join(trace.kinds)} only")
    if step not in ("output", "input"):
        raise TraceError(
            f"step is {step!r}: 'output' takes a row for the token it writes, 'input' for the one it reads"
        )
    layer = default_layer(trace) if layer is None else layer
    weights = trace.weights(layer, head, kind="cross", text=text)
    sides = trace.side("cross", "key", text), trace.side("cross", "query", text)
    (sources, source_numbers), (targets, target_numbers) = (counted(tokens, words) for tokens in sides)
    seeing = np.asarray(~np.isneginf(weights.logsumexp64).all(axis=0))
    links = []
    if sources.size:
        low, high = int(sources[0]), int(sources[-1]) + 1
        rows = targets - (step == "output")
        for row, number in zip(rows.tolist(), target_numbers.tolist(), strict=True):
            if row < 0 or not seeing[row]:
                continue  # what a decoder is given first was written by none of its rows
            mean = weights[:, row, low:high].mean(axis=0, dtype=np.float64)[sources - low]
            if mean.max() > 0:
                links.append((int(source_numbers[mean.argmax()]), number))
    return tuple(dict.fromkeys(sorted(links, key=lambda link: (link[1], link[0])))) if words else tuple(links)


def default_layer(trace: Trace) -> int:
    """The layer before the last of those with cross attention, or the only one."""
    layers = [site.layer for site in trace.sites if site.kind == "cross"]
    return layers[-2] if len(layers) > 1 else layers[0]


def pharaoh(links: Links) -> str:
    """One line of links.

    >>> pharaoh(((0, 0), (2, 1)))
    '0-0 2-1'
    """
    return " ".join(f"{source}-{target}" for source, target in links)


def counted(tokens: Tokens, words: bool = False) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The places of the tokens that stand for text, and the number of each among them (or of the word it is in).

    Raises TraceError for words where it is not known where tokens lie in the text."""
    left_out = {*tokens.special, *tokens.padding}
    places = [place for place in range(len(tokens)) if place not in left_out]
    if not words:
        return np.array(places, np.int64), np.arange(len(places))
    if any(tokens.start[place] < 0 for place in places):
        raise TraceError(
            "words are not known: the trace has its tokens' numbers, and not their text. Record it with tokenizer=, or "
            "align tokens"
        )
    text = source(tokens, left_out)
    begins = [match.start() for match in re.finditer(r"\S+", text)]
    first = [tokens.start[place] + len(tokens.text[place]) - len(tokens.text[place].lstrip()) for place in places]
    return np.array(places, np.int64), np.maximum(np.searchsorted(begins, first, side="right") - 1, 0)
