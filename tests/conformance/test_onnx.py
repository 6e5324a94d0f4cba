"""ONNX's own cases for Attention (opset 25) and FlexAttention, unchanged, through the kernels.

The cases come with their inputs and expected outputs; ``attend`` translates an ONNX node's attributes and inputs into
a call of this library, in the terms of the operator's specification.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="ONNX's cases come with the package onnx (extra: test)")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import onnx.backend.test.case.node as node_cases
    import onnx.backend.test.case.node.attention
    import onnx.backend.test.case.node.flexattention

import clearhead as ch  # noqa: E402

CASES = {case.name: case for case in node_cases._NodeTestCases}
ATTENTION = [name for name, case in CASES.items() if case.model.graph.node[0].op_type == "Attention"]
FLEX = [name for name, case in CASES.items() if case.model.graph.node[0].op_type == "FlexAttention"]

# FlexAttention's functions are ONNX graphs over whole matrices; these say the same, cell by cell.
SCORE_FUNCTIONS = {
    "test_flexattention_score_mod": {"function": lambda s, b, h, q, k: s + 0.5},
    "test_flexattention_soft_cap": {"softcap": 20.0},
    "test_flexattention_relative_positional": {"function": lambda s, b, h, q, k: s + (q - k)},
}
# What changes probabilities after the softmax makes weights that do not sum to 1: no such thing here.
NOT_EXPRESSIBLE = {"test_flexattention_prob_mod"}


def test_every_case_is_here() -> None:
    assert len(ATTENTION) == 93
    assert len(FLEX) == 11
    assert NOT_EXPRESSIBLE.issubset(FLEX)


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name: str) -> None:
    case = CASES[name]
    node = case.model.graph.node[0]
    for given, expected in case.data_sets:
        inputs = dict(zip([i for i in node.input if i], given, strict=True))
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        found = attend(attributes, **inputs, want=[o for o in node.output if o])
        for output, wanted in zip([o for o in node.output if o], expected, strict=True):
            assert found[output].dtype == wanted.dtype
            # ONNX's own runner allows two units in the last place of a bfloat16.
            rtol = max(case.rtol, 2**-6) if wanted.dtype.name == "bfloat16" else case.rtol
            np.testing.assert_allclose(
                found[output].astype(np.float64), np.asarray(wanted, np.float64), rtol=rtol, atol=case.atol
            )


@pytest.mark.parametrize("name", sorted(set(FLEX) - NOT_EXPRESSIBLE))
def test_flex_attention(name: str) -> None:
    case = CASES[name]
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in case.model.graph.node[0].attribute}
    score = ch.scores.dot(attributes.get("scale"), **SCORE_FUNCTIONS.get(name, {}))
    mask = ch.masks.causal(align="start") if name == "test_flexattention_causal_mask" else None
    known = name in SCORE_FUNCTIONS or mask is not None
    assert known == ("score_mod" in attributes)
    for (query, key, value), (wanted,) in case.data_sets:
        found = ch.attention(query, key, value, mask=mask, score=score)
        assert found.dtype == wanted.dtype
        np.testing.assert_allclose(found, wanted, rtol=case.rtol, atol=case.atol)


def attend(attributes: dict[str, Any], *, Q: Any, K: Any, V: Any, want: list[str], attn_mask: Any = None,
           past_key: Any = None, past_value: Any = None, nonpad_kv_seqlen: Any = None) -> dict[str, Any]:  # fmt: skip
    """An ONNX Attention node: its named outputs."""
    flat = Q.ndim == 3
    heads, key_heads = attributes.get("q_num_heads"), attributes.get("kv_num_heads")
    query = split_heads(Q, heads) if flat else Q
    key, value = (split_heads(x, key_heads) if flat else x for x in (K, V))
    past = 0
    if past_key is not None:
        past = past_key.shape[2]
        key, value = np.concatenate([past_key, key], axis=2), np.concatenate([past_value, value], axis=2)
    queries, keys = query.shape[2], key.shape[2]
    mask, bias = positions(attributes, queries, keys, past, nonpad_kv_seqlen), None
    if attn_mask is not None:
        hidden = False if attn_mask.dtype == np.bool_ else -np.inf
        missing = keys - attn_mask.shape[-1]
        attn_mask = np.pad(attn_mask, [(0, 0)] * (attn_mask.ndim - 1) + [(0, missing)], constant_values=hidden)
        if attn_mask.dtype == np.bool_:
            mask = ch.masks.array(attn_mask) if mask is None else mask & ch.masks.array(attn_mask)
        else:
            bias = attn_mask
    softcap = attributes.get("softcap") or None
    score = ch.scores.dot(attributes.get("scale"), softcap=softcap, bias=bias)
    output, weights = ch.scaled_dot_product_attention(query, key, value, mask=mask, score=score)
    found = {"Y": join_heads(output) if flat else output, "present_key": key, "present_value": value}
    if "qk_matmul_output" in want:
        mode = attributes.get("qk_matmul_output_mode", 0)
        if mode == 3:
            matrix = np.asarray(weights)
        else:
            # Scores follow from weights: s = ln w + logsumexp.
            raw = ch.scores.dot(
                attributes.get("scale"), softcap=softcap if mode else None, bias=bias if mode == 2 else None
            )
            wide = ch.attention_weights(
                query.astype(np.float64), key.astype(np.float64), score=raw, mask=mask if mode == 2 else None
            )
            with np.errstate(divide="ignore"):
                matrix = np.log(np.asarray(wide)) + wide.logsumexp[..., None]
        found["qk_matmul_output"] = matrix.astype(Q.dtype)
    return found


def positions(attributes: dict[str, Any], queries: int, keys: int, past: int, lengths: Any) -> ch.masks.Mask | None:
    """is_causal, the window and the padding as one run of keys for each row: (batch or 1, 1, queries)."""
    batch = np.zeros(1, int) if lengths is None else lengths
    offset = np.full_like(batch, past) if lengths is None else lengths - queries
    place = offset[:, None, None] + np.arange(queries)
    stop = np.broadcast_to((np.full_like(batch, keys) if lengths is None else lengths)[:, None, None], place.shape)
    start = np.zeros_like(place)
    if attributes.get("is_causal"):
        stop = np.minimum(stop, place + 1)
    if (left := attributes.get("left_window_size", -1)) >= 0:
        start = place - left
    if (right := attributes.get("right_window_size", -1)) >= 0:
        stop = np.minimum(stop, place + right + 1)
    return ch.masks.intervals(start, stop)


def split_heads(x: Any, heads: int) -> Any:
    batch, tokens, _ = x.shape
    return x.reshape(batch, tokens, heads, -1).swapaxes(1, 2)


def join_heads(x: Any) -> Any:
    batch, heads, tokens, dim = x.shape
    return x.swapaxes(1, 2).reshape(batch, tokens, heads * dim)
