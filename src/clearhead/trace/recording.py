"""Record the attention of a model over a text: run it once, and write each layer down as it happens."""

from __future__ import annotations

from collections.abc import Callable, Collection
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from clearhead import scores
from clearhead.trace.capture import Layer, capture, check_heard
from clearhead.trace.errors import TraceError
from clearhead.trace.format import LayerFacts, ModelFacts, Tokens
from clearhead.trace.models import Model
from clearhead.trace.reader import Trace
from clearhead.trace.tensors import format_name
from clearhead.trace.writer import TraceWriter, check_space, writing

if TYPE_CHECKING:
    from clearhead.weights import AttentionWeights

# How far the weights' own output may stray from the model's, in units of the largest value: rounding, and
# room.
TOLERANCE = {"float64": 1e-9, "float32": 1e-3, "float16": 2e-2, "bfloat16": 5e-2}


def record(
    model: Model,
    tokens: Tokens,
    path: str | PathLike[str],
    *,
    layers: Collection[int] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Trace:
    """Run ``model`` over ``tokens`` and write a trace of the chosen layers (all, when None) to ``path``.

    ``progress`` is called with each layer's number once it is on disk. Memory does not grow with the layers.
    What is written is checked as it is written: the weights that the trace will give must reproduce the
    model's own output.

    Raises TraceError if the text is longer than the model's context, the disk too small, ``path`` taken by
    something that is not a trace, or the model one whose attention cannot be told from queries and keys."""
    import torch

    from clearhead import __version__

    path = Path(path)
    check_length(model, tokens)
    check_layers(model, layers)
    check_space(path, estimate(model, len(tokens), layers))
    with writing(path) as writer:

        def listener(layer: Layer) -> None:
            write_layer(writer, layer)
            if progress is not None:
                progress(layer.layer)

        with torch.inference_mode(), capture(model.network, listener, layers) as heard:
            model.network(input_ids=torch.tensor([tokens.ids]), use_cache=False)
        check_heard(model.network, heard, layers)
        writer.finish(__version__, model_facts(model), tokens)
    return Trace.open(path)


def check_length(model: Model, tokens: Tokens) -> None:
    """Raise TraceError if there are more tokens than the model's context."""
    if 0 < model.context < len(tokens):
        raise TraceError(
            f"the text has {len(tokens):,} tokens and {model.name} reads at most {model.context:,}: "
            f"give --max-tokens {model.context} to trace its beginning"
        )


def check_layers(model: Model, layers: Collection[int] | None) -> None:
    """Raise TraceError if a layer is asked for that the model does not have."""
    count = model.config.num_hidden_layers
    if layers is not None and (beyond := [layer for layer in layers if not 0 <= layer < count]):
        raise TraceError(
            f"{model.name} has layers 0 to {count - 1}: there is no layer {', '.join(map(str, sorted(beyond)))}"
        )


def estimate(model: Model, tokens: int, layers: Collection[int] | None = None) -> int:
    """What a trace will take on disk, in bytes: queries, keys and logsumexp of each layer."""
    config = model.config
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    itemsize = model.network.dtype.itemsize
    count = config.num_hidden_layers if layers is None else len(set(layers))
    return int(count * tokens * ((heads + key_heads) * dim * itemsize + heads * 8))


def model_facts(model: Model) -> ModelFacts:
    """What trace.json says of the model."""
    import torch
    import transformers

    return ModelFacts(
        name=model.name,
        type=model.config.model_type,
        layers=model.config.num_hidden_layers,
        context=model.context,
        dtype=str(model.network.dtype).removeprefix("torch."),
        attention=model.config._attn_implementation,
        transformers=transformers.__version__,
        torch=torch.__version__,
    )


def write_layer(writer: TraceWriter, layer: Layer) -> None:
    """Compute a layer's logsumexp, check that its weights are the model's, and write it down."""
    from clearhead import attention_weights

    query, key = np.ascontiguousarray(layer.query), np.ascontiguousarray(layer.key)
    score = scores.dot(scale=layer.scale, softcap=layer.softcap, sinks=layer.sinks)
    weights = attention_weights(query, key, mask=layer.visible.mask(), score=score)
    check_faithful(layer, weights)
    tensors: dict[str, NDArray[Any]] = {"query": query, "key": key, "logsumexp": weights.logsumexp64}
    if layer.sinks is not None:
        tensors["sinks"] = layer.sinks
    facts = LayerFacts(
        layer=layer.layer,
        heads=len(query),
        key_heads=len(key),
        dim=query.shape[-1],
        dtype=format_name(query.dtype),
        mask=layer.visible.kind,
        scale=layer.scale,
        softcap=layer.softcap,
        window=layer.window,
    )
    writer.add(facts, tensors | layer.visible.tensors())


def check_faithful(layer: Layer, weights: AttentionWeights) -> None:
    """Raise TraceError unless a few rows of weights, times the values, are the model's own output.

    This is what lets a trace be believed for models whose code was never looked at: whatever else an
    attention may do to its scores would show here."""
    group = len(layer.query) // len(layer.key)
    queries, logsumexp = layer.query.shape[1], weights.logsumexp
    for row in sorted({0, queries // 2, queries - 1}):
        for head in range(len(layer.query)):
            if np.isneginf(logsumexp[head, row]):
                continue  # it sees nothing: 0 here, and whatever the model made of it there
            value = layer.value[head // group].astype(np.float64)
            own = layer.output[head, row].astype(np.float64)
            error = np.abs(np.asarray(weights[head, row], np.float64) @ value - own).max()
            if not error <= TOLERANCE[layer.query.dtype.name] * max(np.abs(value).max(), 1e-30):
                raise TraceError(
                    f"layer {layer.layer}, head {head}: the weights of query {row}, computed from queries and keys, "
                    f"do not give the model's own output (off by {error:.2g}). This model changes its scores in "
                    f"a way that cannot be traced"
                )
