"""What a trace will take, before anything runs: bytes on disk and bytes of memory, from what the model will read.

On disk the count is of what is written, array by array. In memory it is of what is largest at once: what flows through
the model, one attention at work, and what is held until it is written."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clearhead import memory
from clearhead.trace.errors import TraceError
from clearhead.trace.keep import Keeping
from clearhead.trace.measured import IN_ORDER, MAP
from clearhead.trace.models import Model
from clearhead.trace.sites import Attention, find_attentions, query_side
from clearhead.trace.writer import check_space

# What is written beside numbers, in bytes: of trace.json in all, for each site, for each token; a name in a header.
INDEX, SITE, TOKEN, ARRAY = 700, 470, 48, 85


@dataclass(frozen=True)
class Reads:
    """What a model is going to read. texts : at once; tokens : of each side, by its name; padded : whether some tokens
    are padding; written : whether they come one after another, as the model writes them."""

    texts: int
    tokens: Mapping[str, int]
    padded: bool = False
    written: bool = False


@dataclass(frozen=True)
class Needs:
    """What a trace will take, in bytes: ``disk`` of it as a folder, ``memory`` beside the model while it is made."""

    disk: int
    memory: int


@dataclass(frozen=True)
class _Shape:
    """One attention: its heads, its key heads, their dim, and how many queries and keys it will have."""

    heads: int
    key_heads: int
    dim: int
    queries: int
    keys: int


def reads_text(model: Model, tokens: int, write: int = 0) -> Reads:
    """A text of so many tokens, and so many more that are written after it; the last of them is not read."""
    if model.network.config.is_encoder_decoder:
        return Reads(1, {"encoder": tokens, "decoder": write}, written=write > 0)
    count = tokens + max(0, write - 1)
    return Reads(1, dict.fromkeys(find_attentions(model.network).kinds, count), written=write > 0)


def reads_inputs(network: Any, inputs: Mapping[str, Any]) -> Reads | None:
    """What ``network(**inputs)`` reads, or None where that does not follow from their shapes: images, sound, caches."""
    kinds = find_attentions(network).kinds
    sides = {"encoder": ("input_ids", "inputs_embeds"), "decoder": ("decoder_input_ids", "decoder_inputs_embeds")}
    if kinds == ("self",):
        sides = {"self": sides["encoder"]}
    elif not set(kinds) <= {*sides, "cross"}:
        return None
    shapes = {side: [inputs[name].shape for name in names if _is_tensor(inputs, name)] for side, names in sides.items()}
    if not all(len(found) == 1 for found in shapes.values()) or inputs.get("past_key_values") is not None:
        return None
    padded = any(_is_tensor(inputs, name) and not bool(inputs[name].all()) for name in inputs if "mask" in name)
    return Reads(next(iter(shapes.values()))[0][0], {side: found[0][1] for side, found in shapes.items()}, padded)


def _is_tensor(inputs: Mapping[str, Any], name: str) -> bool:
    return hasattr(inputs.get(name), "shape")


def estimate(
    network: Any,
    reads: Reads,
    layers: Collection[int] | None = None,
    kinds: Collection[str] | None = None,
    keeping: Keeping | None = None,
    *,
    once: bool = True,
    in_memory: bool = False,
) -> Needs:
    """What a trace of some layers and kinds (None: all) of a model will take.

    ``once`` : each attention is written as soon as it has run; else all queries and keys are held until the end, as
    when the model writes. ``in_memory`` : the trace is not written at all, but kept."""
    keeping = keeping or Keeping()
    attentions = find_attentions(network)
    chosen = attentions.chosen(layers, kinds)
    sides = {side for one in chosen for side in (query_side(one.kind), "encoder" if one.kind == "cross" else one.kind)}
    disk = INDEX + TOKEN * reads.texts * sum(reads.tokens[side] for side in sides)
    disk += sum(_written(network, one, reads, keeping) for one in chosen)
    needed = _at_work(network, reads, [_shape(one, reads) for one in attentions.heard])
    size = network.dtype.itemsize
    if not once:  # heads are chosen, and 16 bits made, when an attention is written
        shapes = [_shape(one, reads) for one in chosen]
        needed += sum(reads.texts * (s.queries * s.heads + s.keys * s.key_heads) * s.dim * size for s in shapes)
    if reads.written:  # the model's own cache
        shapes = [_shape(one, reads) for one in attentions.heard if one.kind != "encoder"]
        needed += sum(reads.texts * 2 * s.keys * s.key_heads * s.dim * size for s in shapes)
    return Needs(disk, needed + (disk if in_memory else 0))


def _written(network: Any, one: Attention, reads: Reads, keeping: Keeping) -> int:
    """The bytes of one attention's file, and of its lines in trace.json."""
    shape = _shape(one, reads)
    heads = shape.heads if keeping.heads is None else len(set(keeping.heads))
    key_heads = shape.key_heads if keeping.heads is None else heads
    in_order = one.kind in IN_ORDER and shape.queries == shape.keys
    means = 11 if in_order else 6
    number = 2 if keeping.only_measures and max(shape.queries, shape.keys) >= MAP else 4
    numbers = heads * ((min(shape.queries, MAP) * min(shape.keys, MAP) + shape.keys) * number + 8 * means)
    arrays = means + 2
    if not keeping.only_measures:
        size = network.dtype.itemsize if keeping.store is None else 2
        numbers += (shape.queries * heads + shape.keys * key_heads) * shape.dim * size + shape.queries * heads * 8
        arrays += 3
        if reads.padded or 0 < (_window(one) or 0) < shape.keys:
            numbers += 2 * 8 * shape.queries
            arrays += 2
    size = reads.texts * numbers + SITE + ARRAY * arrays
    if _by_offset(one) and not keeping.only_measures:  # all texts' together
        size += ARRAY + heads * (shape.queries + shape.keys - 1) * 4
    return size


def _at_work(network: Any, reads: Reads, shapes: list[_Shape]) -> int:
    """What the model needs at once where it needs most: what flows through it, and its largest attention.

    Eager attention makes its matrices, and windows need a mask of one byte a cell."""
    config, size = network.config.get_text_config(), network.dtype.itemsize
    wide = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    tokens = max(reads.tokens.values())
    needed = reads.texts * tokens * (6 * config.hidden_size + 3 * wide) * size
    needed += max(
        reads.texts
        * max(s.queries, s.keys)
        * (4 * (s.heads + 2 * s.key_heads) * s.dim * max(size, 4) + 16 * s.heads * 8)
        for s in shapes
    )
    if config._attn_implementation == "eager":
        needed += max(3 * reads.texts * s.heads * s.queries * s.keys * size for s in shapes)
    if getattr(config, "sliding_window", None):
        needed += reads.texts * tokens**2
    return int(needed)


def _shape(one: Attention, reads: Reads) -> _Shape:
    """By what the module says of itself, else its configuration."""
    module = one.module
    config = getattr(module, "config", None)
    heads = _first(module, "num_heads", "num_attention_heads", "n_heads") or _first(config, "num_attention_heads")
    groups = _first(module, "num_key_value_groups")
    key_heads = heads // groups if groups else _first(module, "num_key_value_heads")
    key_heads = key_heads or _first(config, "num_key_value_heads") or heads
    dim = _first(module, "qk_head_dim", "head_dim", "attention_head_size", "key_value_proj_dim", "head_size")
    dim = dim or _first(config, "head_dim", "d_kv") or _first(config, "hidden_size") // max(1, heads)
    queries = reads.tokens[query_side(one.kind)]
    return _Shape(heads, key_heads, dim, queries, reads.tokens["encoder"] if one.kind == "cross" else queries)


def _first(source: Any, *names: str) -> int:
    """The first of these that is there and a number; 0 if none is."""
    return next((found for name in names if type(found := getattr(source, name, None)) is int), 0)


def _window(one: Attention) -> int | None:
    """How far an attention says that it looks: in models whose layers alternate, the module says so itself."""
    if hasattr(one.module, "sliding_window"):
        return _first(one.module, "sliding_window") or None
    kinds = getattr(one.module, "layer_type", None) or getattr(one.module, "attention_type", None)
    return None if kinds == "full_attention" else _first(getattr(one.module, "config", None), "sliding_window") or None


def _by_offset(one: Attention) -> bool:
    """Whether a bias by relative position is added, as in T5."""
    return one.kind != "cross" and hasattr(getattr(one.module, "config", None), "relative_attention_num_buckets")


def check_needs(needs: Needs, path: Path | None, fewer: str, less: str) -> None:
    """Raise TraceError unless disk and memory have room.

    path : None in memory; fewer : what makes the trace smaller, in words; less : what makes it take less memory."""
    if path is not None:
        check_space(path, needs.disk, fewer)
    free = memory.available()
    if free is not None and needs.memory > free:
        raise TraceError(
            f"the trace takes about {memory.written(needs.memory)} of memory beside the model and "
            f"{memory.written(free)} are free: {less}"
        )
