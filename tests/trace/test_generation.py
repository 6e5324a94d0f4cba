"""A generation is one record in absolute positions: that of the whole text read at once, whatever cache it used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from test_families import check_equal

import clearhead as ch
from clearhead.trace import TraceError

STEPS = {"max_new_tokens": 6, "min_new_tokens": 6, "return_dict_in_generate": True, "output_logits": True}
STATIC = {"cache_implementation": "static"}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"use_cache": False}),
    ("llama", STATIC),
    ("llama", {"do_sample": True}),
    ("llama", {"prefill_chunk_size": 5}),
    ("gpt2", {}),
    ("mistral", {}),  # the prompt is longer than the window
    ("mistral", {"use_cache": False}),
    ("mistral", STATIC),
    ("gemma3", STATIC),
    ("gemma2", {}),
    ("gpt_oss", STATIC),
    ("t5", {}),
    ("t5", {"use_cache": False}),
    ("t5", STATIC),
    ("bart", {"do_sample": True}),
    ("marian", STATIC),
    ("whisper", {}),
]


def prompt(family: str) -> dict[str, Any]:
    """Padded on the left alone, as models that go on writing need it."""
    inputs = tiny_models.inputs(family)
    if family in tiny_models.CAUSAL:
        inputs["attention_mask"][2] = 1
        inputs["attention_mask"][2, :9] = 0
    return {name: value for name, value in inputs.items() if not name.startswith("decoder")}


def generate(model: Any, inputs: dict[str, Any], **options: Any) -> Any:
    torch.manual_seed(3)
    return model.generate(**inputs, **STEPS, **options)


@pytest.mark.parametrize(("family", "options"), CASES)
def test_one_record(family: str, options: dict[str, Any]) -> None:
    model, inputs = tiny_models.build(family), prompt(family)
    before = generate(model, inputs, **options)
    with ch.tracing(model) as trace:
        during = generate(model, inputs, **options)
    assert torch.equal(before.sequences, during.sequences)
    assert all(torch.equal(*pair) for pair in zip(before.logits, during.logits, strict=True))

    read = during.sequences[:, :-1]  # the last token was written, and not read
    if family in tiny_models.CAUSAL:
        mask = torch.cat([inputs["attention_mask"], torch.ones(3, 5, dtype=torch.long)], dim=1)
        whole = {"input_ids": read, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
        assert trace.facts(0).queries == trace.facts(0).keys == 22
        assert trace.side(text=1).padding == (0, 1, 2, 3)
    else:
        whole = inputs | {"decoder_input_ids": read}
        assert trace.facts(0, "cross").queries == 6
        assert trace.facts(0, "cross").keys == (30 if family == "whisper" else 17)
    assert trace.side(trace.kinds[-1]).ids == tuple(read[0].tolist())
    assert trace.checks.passed
    check_equal(trace.trace, tiny_models.eager_attentions(model, whole))


def test_several_texts_from_one_prompt() -> None:
    model = tiny_models.build("llama")
    inputs = {name: value[:1] for name, value in prompt("llama").items()}
    with ch.tracing(model) as trace:
        found = generate(model, inputs, do_sample=True, num_return_sequences=3)
    assert trace.texts == 3
    for text in range(3):
        assert trace.side(text=text).ids == tuple(found.sequences[text, :-1].tolist())


@pytest.mark.parametrize("family", ["llama", "bart"])
def test_beams_are_refused(family: str) -> None:
    model = tiny_models.build(family)
    with pytest.raises(TraceError, match=r"layer 0 ran again and no longer has the keys.*set num_beams=1"):  # noqa: SIM117
        with ch.tracing(model):
            generate(model, prompt(family), num_beams=3)


def test_decoding_with_guesses_is_refused() -> None:
    """Prompt lookup reads guesses, and takes back those that were wrong."""
    model = tiny_models.build("llama")
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8, 5, 6, 7, 9, 5, 6]])}
    with pytest.raises(TraceError, match=r"layer 0 ran again and .*assisted decoding reorder or cut"):  # noqa: SIM117
        with ch.tracing(model):
            generate(model, inputs, prompt_lookup_num_tokens=3)


def test_two_calls_are_not_one_record() -> None:
    model, inputs = tiny_models.build("llama"), prompt("llama")
    words = "self layer 0 ran again and was given other tokens: a trace holds one pass"
    with pytest.raises(TraceError, match=words), ch.tracing(model):
        [model(**inputs) for _ in range(2)]


def test_a_cache_from_before_is_refused() -> None:
    model = tiny_models.build("llama")
    ids = prompt("llama")["input_ids"]
    cache = model(ids, use_cache=True).cache
    words = r"self layer 0 has 1 queries and 18 keys: it was given a cache of what it read before"
    with pytest.raises(TraceError, match=words), ch.tracing(model):
        model(ids[:, :1], cache=cache)


def test_a_conversation_in_turns() -> None:
    """The user's own loop over a cache: two tokens, then three, then one."""
    model = tiny_models.build("mistral")
    ids = torch.randint(2, 320, (1, 26), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode(), ch.tracing(model) as trace:
        cache = model(ids[:, :20], use_cache=True).cache
        for part in (slice(20, 22), slice(22, 25), slice(25, 26)):
            cache = model(ids[:, part], cache=cache, use_cache=True).cache
    assert trace.text.ids == tuple(ids[0].tolist())
    check_equal(trace.trace, tiny_models.eager_attentions(model, {"input_ids": ids}))
    assert not np.triu(np.asarray(trace.weights(0)), 1).any()
