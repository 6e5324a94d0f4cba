"""What a trace gives BertViz, by calling BertViz on it and reading its page."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from clearhead import from_attentions, memory
from clearhead.trace import Trace, TraceError

bertviz = pytest.importorskip("bertviz", reason="pip install --no-deps bertviz ipython traitlets")
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # BertViz leaves its script's file open
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def drawn(view: Any, **given: Any) -> list[dict[str, Any]]:
    """The attentions in the page that BertViz makes."""
    page = view(**given, html_action="return").data
    return json.JSONDecoder().raw_decode(page[page.index('{"attention"') :])[0]["attention"]


@pytest.mark.parametrize("view", [bertviz.head_view, bertviz.model_view])
def test_the_page_holds_the_weights(view: Any, recorded: Trace) -> None:
    (page,) = drawn(view, **recorded.to_bertviz())
    assert page["left_text"] == page["right_text"] == list(recorded.tokens)
    whole = np.stack([np.asarray(recorded.weights(layer)) for layer in recorded.layers])
    assert np.abs(np.array(page["attn"]) - whole).max() < 1e-6


def test_layers_are_chosen(recorded: Trace) -> None:
    (page,) = drawn(bertviz.head_view, **recorded.to_bertviz(layers=[2, 0]))
    assert np.abs(np.array(page["attn"])[1] - np.asarray(recorded.weights(2))).max() < 1e-6


def stacks(decoder_layers: int = 1) -> Trace:
    random = np.random.default_rng(0)
    sizes = (("encoder", 4, 4, 1), ("decoder", 5, 5, decoder_layers), ("cross", 5, 4, decoder_layers))
    layers = {kind: [random.dirichlet(np.ones(n), (1, 2, m))] * count for kind, m, n, count in sizes}
    return from_attentions(layers, {"encoder": list("wxyz"), "decoder": list("abcde")})


@pytest.mark.parametrize("view", [bertviz.head_view, bertviz.model_view])
def test_encoder_decoder_and_cross(view: Any) -> None:
    trace = stacks()
    pages = {page["name"]: page for page in drawn(view, **trace.to_bertviz())}
    assert set(pages) == {"Encoder", "Decoder", "Cross"}
    assert (pages["Cross"]["left_text"], pages["Cross"]["right_text"]) == (list("abcde"), list("wxyz"))
    for kind in trace.kinds:
        shown = np.array(pages[kind.title()]["attn"])[0]
        assert np.abs(shown - np.asarray(trace.weights(0, kind=kind))).max() < 1e-6


@pytest.mark.parametrize("kind", ["encoder", "decoder", "cross"])
def test_one_kind_alone(kind: str) -> None:
    trace = stacks(decoder_layers=2)
    (page,) = drawn(bertviz.head_view, **trace.to_bertviz(kind))
    assert len(page["attn"]) == len(trace.sites_of(kind))
    assert len(page["right_text"]) == trace.sites_of(kind)[0].keys


def test_bertviz_116_a_generation_is_drawn() -> None:
    weights = np.tril(np.random.default_rng(0).random((1, 2, 6, 6)))
    weights /= weights.sum(axis=-1, keepdims=True)
    steps = [(weights[:, :, :4, :4],), (weights[:, :, 4:5, :5],), (weights[:, :, 5:, :],)]
    (page,) = drawn(bertviz.head_view, **from_attentions(steps, list("abcdef")).to_bertviz())
    assert np.abs(np.array(page["attn"]) - weights).max() < 1e-6


def test_there_and_back(recorded: Trace) -> None:
    given = recorded.to_bertviz()
    again = from_attentions(given["attention"], given["tokens"])
    assert again.tokens == recorded.tokens
    assert np.abs(np.asarray(again.weights(1)) - np.asarray(recorded.weights(1))).max() < 1e-6


def test_what_bertviz_cannot_draw(recorded: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TraceError, match="there are 1 encoder layers, 2 decoder layers, 2 cross layers, and BertViz"):
        stacks(decoder_layers=2).to_bertviz()
    with pytest.raises(TraceError, match="none of these layers has self attention: there are 0, 1, 2"):
        recorded.to_bertviz(layers=[7])
    uneven = from_attentions([np.full((1, heads, 2, 2), 0.5) for heads in (1, 2)])
    with pytest.raises(TraceError, match="the self layers differ in their heads"):
        uneven.to_bertviz()
    monkeypatch.setattr(memory, "available", lambda: 1000)
    with pytest.raises(TraceError, match=r"BertViz writes each of these 24,642 weights into a page: that takes"):
        recorded.to_bertviz()
