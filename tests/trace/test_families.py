"""Every family that a trace promises: the very weights of its eager attention, and not a bit of its outputs changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from tiny_models import FAMILIES, IMAGES, TRANSLATE

import clearhead as ch
from clearhead.trace import Trace, TraceError
from clearhead.trace.format import Site
from clearhead.trace.recompute import site_bias

TRACED = [family for family in FAMILIES if family not in ("bloom", "xlnet")]


def dense(trace: Trace, kind: str, layer: int, text: int) -> np.ndarray:
    return np.asarray(trace.weights(layer, kind=kind, text=text))


def real_rows(trace: Trace, kind: str, text: int, count: int) -> list[int]:
    return sorted(set(range(count)) - set(trace.side(kind, "query", text).padding))


def check_equal(trace: Trace, attentions: dict[str, Any], within: float = 1e-5) -> None:
    """The weights of every site are those that the model gave out, on all rows that are no padding."""
    assert set(trace.kinds) == set(attentions)
    for kind, layers in attentions.items():
        assert [site.layer for site in trace.sites if site.kind == kind] == list(range(len(layers)))
        for layer, batch in enumerate(layers):
            for text, expected in enumerate(batch.float().numpy()):
                rows = real_rows(trace, kind, text, expected.shape[1])
                found = dense(trace, kind, layer, text)
                assert np.abs(found - expected)[:, rows].max() < within


@pytest.mark.parametrize("family", TRACED)
def test_weights_and_outputs(family: str) -> None:
    """A batch of three: one text whole, one padded on the left, one on the right."""
    model, inputs = tiny_models.build(family), tiny_models.inputs(family)
    assert model.config._attn_implementation == ("eager" if family in ("gemma2", "gpt_oss") else "sdpa")
    with torch.inference_mode():
        before = model(**inputs)
        with ch.tracing(model) as trace:
            during = model(**inputs)
    for name, value in before.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, during[name]), name
    assert trace.checks.passed
    assert trace.checks.missing == ()
    check_equal(trace.trace, tiny_models.eager_attentions(model, inputs))


@pytest.mark.parametrize("family", TRACED)
def test_padding_is_marked_and_sees_nothing(family: str) -> None:
    trace = ch.trace(tiny_models.build(family), tiny_models.inputs(family))
    if family in IMAGES or family == "whisper":
        assert all(tokens.padding == () for side in trace._index.sides for tokens in side.texts)
        return
    first = "encoder" if family in TRANSLATE else trace.kinds[0]
    assert trace.side(first, text=0).padding == ()
    assert trace.side(first, text=1).padding == tuple(range(4))
    assert trace.side(first, text=2).padding == tuple(range(8, 17))
    for text in (1, 2):
        padding = list(trace.side(first, text=text).padding)
        weights = trace.weights(0, kind=first, text=text)
        assert np.isneginf(weights.logsumexp[:, padding]).all() or family == "gpt_oss"  # there the sink is left
        assert not np.asarray(weights)[:, padding].any()
        assert not np.asarray(weights)[:, :, padding].any()
        assert (trace.measures(0, kind=first, text=text).rows == 17 - len(padding)).all()


def defined(trace: Trace, kind: str, layer: int, text: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights by their definition, dense and in float32, from the very queries and keys that were captured; and how far
    eager attention may take each score if its steps are rounded: in units of a rounding. A learned sink is the last
    key."""
    site, arrays = trace.facts(layer, kind), trace.arrays(layer, kind)
    query, key = (torch.from_numpy(arrays[name][text].astype(np.float32)) for name in ("query", "key"))
    score = query @ key.repeat_interleave(site.heads // site.key_heads, dim=0).transpose(1, 2) * site.scale
    final, steps = score, 2 * score.abs()  # the product; times the scale
    if site.softcap is not None:
        final = site.softcap * torch.tanh(score / site.softcap)
        steps = steps + score.abs() + 2 * final.abs()  # the quotient; its tanh; times the cap
    if (bias := site_bias(site, arrays, text)) is not None:
        final = final + torch.from_numpy(bias.copy())
        steps = steps + final.abs()
    final = final.masked_fill(~torch.from_numpy(seen_cells(site, arrays, text)), -torch.inf)
    if "sinks" in arrays:
        sinks = torch.from_numpy(arrays["sinks"].astype(np.float32))[:, None, None].expand(-1, site.queries, 1)
        final, steps = torch.cat([final, sinks], dim=-1), torch.cat([steps, torch.zeros_like(sinks)], dim=-1)
        steps = steps + (final - final.amax(dim=-1, keepdim=True)).abs().nan_to_num(posinf=0)  # less the largest
    return torch.softmax(final, dim=-1).nan_to_num(), steps  # an empty row has none


def reach(weights: torch.Tensor, stray: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest and the largest that each weight can become if each score may stray so far."""
    found = []
    for way in (-1, 1):  # its own score goes one way and all others the other way
        own, others = weights * (way * stray).exp(), weights * (-way * stray).exp()
        found.append(own / (own + (others.sum(dim=-1, keepdim=True) - others).clamp(min=0)).clamp(min=1e-30))
    return found[0], found[1]


def seen_cells(site: Site, arrays: dict[str, np.ndarray], text: int) -> np.ndarray:
    """(1 or heads, queries, keys): which keys each row sees."""
    row, key = np.arange(site.queries)[:, None], np.arange(site.keys)
    match site.mask:
        case "full":
            return np.ones((1, site.queries, site.keys), bool)
        case "causal":
            return (key <= row)[None]
        case "intervals":
            return ((arrays["start"][text][:, None] <= key) & (key < arrays["stop"][text][:, None]))[None]
    return arrays["mask"][text].copy()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", TRACED)
def test_sixteen_bits(family: str, dtype: torch.dtype) -> None:
    """Outputs to the bit; weights those that are defined by the model's queries and keys; and eager's own no farther
    from those than eager's rounding of each score and weight can take them."""
    model, inputs = tiny_models.build(family).to(dtype), tiny_models.inputs(family)
    inputs = {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}
    with torch.inference_mode():
        before = model(**inputs)[0]
        with ch.tracing(model) as traced:
            assert torch.equal(model(**inputs)[0], before)
    check_defined(traced.trace)
    assert {site.dtype for site in traced.sites} == {"F16" if dtype == torch.float16 else "BF16"}
    model.set_attn_implementation("eager")
    with torch.inference_mode(), ch.tracing(model) as traced:
        output = model(**inputs, output_attentions=True)
    trace, half = traced.trace, torch.finfo(dtype).eps / 2
    check_defined(trace)
    tiny = torch.finfo(dtype).smallest_normal * half + 1e-6  # of numbers below the normal ones, and of float32
    for kind, layers in tiny_models.attentions_of(output).items():
        for layer, batch in enumerate(layers):
            for text, own in enumerate(batch.float()):
                rows = real_rows(trace, kind, text, own.shape[1])
                weights, steps = defined(trace, kind, layer, text)
                least, most = (limit[:, rows, : own.shape[2]] for limit in reach(weights, half * steps))
                assert (own[:, rows] >= least * (1 - half) - tiny).all(), (kind, layer)
                assert (own[:, rows] <= most * (1 + half) + tiny).all(), (kind, layer)


def check_defined(trace: Trace) -> None:
    """Every weight of every text is as it is defined, within 1e-5."""
    assert trace.checks.passed
    for site in trace.sites:
        for text in range(len(trace.texts_of(site.query_side))):
            expected = defined(trace, site.kind, site.layer, text)[0][..., : site.keys].numpy()
            assert np.abs(dense(trace, site.kind, site.layer, text) - expected).max() < 1e-5


def test_kinds_of_sites() -> None:
    kinds = {family: ch.trace(tiny_models.build(family), tiny_models.inputs(family)).kinds for family in TRACED}
    assert kinds.pop("clip") == ("text", "vision")
    for family in (*TRANSLATE, "whisper"):
        assert kinds.pop(family) == ("encoder", "decoder", "cross")
    assert set(kinds.values()) == {("self",)}


def test_encoder_decoder_sides() -> None:
    inputs = tiny_models.inputs("bart")
    trace = ch.trace(tiny_models.build("bart"), inputs)
    site = trace.facts(1, kind="cross")
    assert (site.queries, site.keys) == (11, 17)
    assert trace.weights(1, 2, kind="cross", text=1).shape == (1, 11, 17)
    assert trace.side("cross", "query", 1).ids == tuple(inputs["decoder_input_ids"][1].tolist())
    assert trace.side("cross", "key", 1).ids == tuple(inputs["input_ids"][1].tolist())
    assert trace.side("cross", "query", 1) == trace.side("decoder", text=1)
    with pytest.raises(TraceError, match="this trace holds encoder, decoder, cross: say which with kind="):
        trace.weights(0)
    with pytest.raises(TraceError, match="cross layer 5 is not in the trace: it holds 0, 1, 2"):
        trace.weights(5, kind="cross")
    assert repr(trace) == (
        "Trace(in memory: BartForConditionalGeneration, 3 texts of 17 tokens, 8 layers of encoder, decoder, cross "
        "attention)"
    )


def test_position_bias_is_one_number_per_head_and_offset() -> None:
    """T5 adds a learned bias and does not scale: kept as a row, looked at as a matrix."""
    trace = ch.trace(tiny_models.build("t5"), tiny_models.inputs("t5"))
    assert {site.kind: site.bias for site in trace.sites} == {
        "encoder": "offsets",
        "decoder": "offsets",
        "cross": "none",
    }
    assert {site.scale for site in trace.sites} == {1.0}
    offsets = trace.arrays(0, "encoder")["offsets"]
    assert offsets.shape == (1, 6, 33)
    assert offsets.std() > 0.1


def test_places_of_an_image() -> None:
    trace = ch.trace(tiny_models.build("vit"), tiny_models.inputs("vit"))
    assert trace.grid() == (3, 3)
    assert trace.tokens == ("class", *(f"{row},{column}" for row in range(3) for column in range(3)))
    assert trace.text.special == (0,)
    trace = ch.trace(tiny_models.build("dinov2_with_registers"), tiny_models.inputs("vit"))
    assert trace.tokens[:5] == ("class", "register 1", "register 2", "register 3", "0,0")
    trace = ch.trace(tiny_models.build("clip"), tiny_models.inputs("clip"))
    assert (trace.grid("text"), trace.grid("vision")) == (None, (3, 3))
    assert len(trace.side("vision", text=1)) == 10
    with pytest.raises(TraceError, match="there is no text 2"):  # three texts, two images
        trace.weights(0, kind="vision", text=2)


def test_what_models_say_of_themselves() -> None:
    """Windows, caps and sinks arrive where they belong."""
    gemma = ch.trace(tiny_models.build("gemma2"), tiny_models.inputs("gemma2"))
    assert [site.softcap for site in gemma.sites] == [2.0] * 3
    assert [site.window for site in gemma.sites] == [8, None, 8]
    oss = ch.trace(tiny_models.build("gpt_oss"), tiny_models.inputs("gpt_oss"))
    assert oss.arrays(0)["sinks"].shape == (6,)
    assert np.asarray(oss.weights(0)).sum(axis=-1).min() < 0.9
    assert oss.checks.passed


@pytest.mark.parametrize(("layers", "groups", "inner"), [(4, 1, 1), (5, 2, 1), (3, 3, 1), (4, 2, 2)])
def test_layers_that_share_a_module_are_layers_of_their_own(layers: int, groups: int, inner: int) -> None:
    """ALBERT runs one module again and again: each run is a layer, numbered as the model's own outputs are."""
    facts = {"num_hidden_layers": layers, "num_hidden_groups": groups, "inner_group_num": inner}
    model, inputs = tiny_models.build("albert", **facts), tiny_models.inputs("albert")
    trace = ch.trace(model, inputs)
    assert trace.layers == tuple(range(layers * inner))
    check_equal(trace, tiny_models.eager_attentions(model, inputs))
    some = ch.trace(model, inputs, layers=[1, 3] if layers > 3 else [2])
    for layer in some.layers:
        assert np.array_equal(dense(some, "self", layer, 0), dense(trace, "self", layer, 0))
    with ch.tracing(model) as heard, torch.inference_mode():
        model(**inputs)
    assert heard.layers == trace.layers


@pytest.mark.parametrize("family", ["bloom", "xlnet"])
def test_attention_that_cannot_be_heard_is_refused_by_name(family: str) -> None:
    model = tiny_models.build(family)
    words = rf"{type(model).__name__} does not run its attention through transformers' AttentionInterface: \w+Attention"
    with pytest.raises(TraceError, match=words):
        ch.trace(model, {"input_ids": torch.tensor([[1, 2, 3]])})


def test_nothing_is_half_traced_unasked() -> None:
    """A vision tower that pools with an attention of torch's own: heard only in part, if one says so."""
    import transformers

    sizes = tiny_models.PATCHES | {"num_hidden_layers": 2}
    model = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**sizes)).eval()
    images = tiny_models.inputs("vit")
    words = r"SiglipVisionModel runs some attentions outside .* \(SiglipMultihead\w+ at head\).*kinds=\('self',\)"
    with pytest.raises(TraceError, match=words):
        ch.trace(model, images)
    trace = ch.trace(model, images, kinds=["self"])
    assert trace.layers == (0, 1)
    assert len(trace.checks.missing) == 1
    assert trace.checks.missing[0].startswith("SiglipMultihead")
