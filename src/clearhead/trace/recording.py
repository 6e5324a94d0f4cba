"""Record the attention of a model over a text: run it once, and write each layer down as it happens."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Collection
from os import PathLike
from pathlib import Path
from typing import Any

from clearhead.trace.errors import TraceError
from clearhead.trace.estimates import Needs, check_needs, estimate, reads_text
from clearhead.trace.format import Tokens
from clearhead.trace.keep import Keeping, Store, check_store
from clearhead.trace.models import Model, quiet
from clearhead.trace.reader import Trace
from clearhead.trace.recorder import recording
from clearhead.trace.sites import check_kinds, find_attentions
from clearhead.trace.writer import writing

OTHER_INPUTS = {"pixel_values", "input_features", "input_values"}  # images, sound


def record(
    model: Model,
    tokens: Tokens,
    path: str | PathLike[str],
    *,
    layers: Collection[int] | None = None,
    heads: Collection[int] | None = None,
    kinds: Collection[str] | None = None,
    store: Store | None = None,
    only_measures: bool = False,
    progress: Callable[[int], None] | None = None,
    go_on: bool = False,
    write: int = 0,
) -> Trace:
    """Run ``model`` over ``tokens`` and write a trace of the chosen layers, heads and kinds (None: all) to ``path``.

    ``progress`` is called with each layer's number once it is on disk. Memory does not grow with the layers.
    What is written is checked as it is written: the weights that the trace will give must reproduce the
    model's own output. ``store`` is the dtype of queries and keys, "float16" or "bfloat16", None for the model's own;
    with ``only_measures`` they are not kept at all. A run that was killed leaves ``path.unfinished``; with ``go_on``
    the same run goes on with it, and layers that are whole are not recorded again. With ``write`` the model (loaded
    with ``writing=True``) reads the text and writes at most so many tokens, greedily: one record of all that it read.

    Raises TraceError if the text is longer than the model's context, disk or memory too small, ``path`` taken by
    something that is not a trace, or the model one whose attention cannot be told from queries and keys."""
    import torch

    path = Path(path)
    check_length(model, tokens, write)
    check_layers(model, layers)
    check_store(store)
    keeping = Keeping(heads, store, only_measures)
    check_writes(model, write)
    check_room(path, needs(model, len(tokens), layers, kinds, keeping, write))
    run = run_facts(model, tokens, keeping, layers, kinds, write)
    with (
        writing(path, run, go_on) as writer,
        recording(
            model.network,
            writer,
            name=model.name,
            layers=layers,
            kinds=kinds,
            keeping=keeping,
            once=not write,
            tokenizer=model.tokenizer,
            tokens=tokens,
            done=tuple(writer.done),
            progress=None if progress is None else lambda site: progress(site.layer),
        ),
        torch.inference_mode(),
        quiet(),
    ):
        _run(model, torch.tensor([tokens.ids], device=model.network.device), write)
    return Trace.open(path)


def _run(model: Model, ids: Any, write: int) -> None:
    """Let the model read the tokens (1, n), and write. Raises TraceError for one that reads more than text."""
    import torch

    network = model.network
    try:
        if write:
            mask = torch.ones_like(ids)
            network.generate(ids, attention_mask=mask, max_new_tokens=write, do_sample=False, num_beams=1)
        else:
            network(input_ids=ids, use_cache=False)
    except TraceError:
        raise
    except (AttributeError, TypeError, ValueError) as error:
        if not OTHER_INPUTS & set(inspect.signature(network.forward).parameters):
            raise
        raise TraceError(
            f"{model.name} is a {network.config.model_type} model, which does not read text alone: trace it in Python, "
            f"with whatever it reads: clearhead.trace(model, inputs)"
        ) from error


def check_writes(model: Model, write: int) -> None:
    """Raise TraceError for an encoder-decoder model that is to write nothing: its decoder would read nothing."""
    if model.network.config.is_encoder_decoder and not write:
        raise TraceError(
            f"{model.name} is an encoder-decoder model: say with --generate N how many tokens it is to write"
        )


def run_facts(
    model: Model,
    tokens: Tokens,
    keeping: Keeping,
    layers: Collection[int] | None = None,
    kinds: Collection[str] | None = None,
    write: int = 0,
) -> dict[str, str]:
    """What must be the same for a run to go on with what another left: each in words, or by a hash."""
    import torch
    import transformers

    weights = hashlib.sha256()
    for name, parameter in model.network.named_parameters():
        weights.update(name.encode() + parameter.detach().flatten()[:16].double().cpu().numpy().tobytes())
    return {
        "model": model.name,
        "weights": weights.hexdigest(),
        "dtype": str(model.network.dtype),
        "tokens": hashlib.sha256(repr(tokens.ids).encode()).hexdigest(),
        "layers": "all" if layers is None else repr(sorted(set(layers))),
        "heads": "all" if keeping.heads is None else repr(sorted(set(keeping.heads))),
        "kinds": "all" if kinds is None else repr(sorted(set(kinds))),
        "store": f"{keeping.store}, {'measures' if keeping.only_measures else 'all'}",
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "write": str(write),
        "of": str(len(find_attentions(model.network).chosen(layers, kinds))),
    }


def longest(model: Model, write: int = 0) -> int | None:
    """How many tokens of a text the model can read if it is to write so many more; None where it does not say.

    A decoder reads what it writes, too; that of an encoder-decoder reads nothing else."""
    if not model.context:
        return None
    room = model.context if model.network.config.is_encoder_decoder else model.context - write
    if room < 1 or write > model.context:
        raise TraceError(f"{model.name} reads at most {model.context:,} tokens: it cannot write {write:,} more")
    return room


def check_length(model: Model, tokens: Tokens, write: int = 0) -> None:
    """Raise TraceError if there are more tokens than the model's context, with those that it is to write."""
    room = longest(model, write)
    if room is not None and len(tokens) > room:
        raise TraceError(
            f"the text has {len(tokens):,} tokens and {model.name} reads at most {room:,}"
            + (f" before it writes {write:,}" if write else "")
            + f": give --max-tokens {room} to trace its beginning"
        )


def check_layers(model: Model, layers: Collection[int] | None) -> None:
    """Raise TraceError if a layer is asked for that the model does not have, or none of it can be traced."""
    attentions = find_attentions(model.network)
    check_kinds(attentions, attentions.kinds or None, model.network)
    known = attentions.layers()
    if layers is not None and (beyond := sorted(set(layers) - set(known))):
        missing = ", ".join(map(str, beyond))
        if known == tuple(range(len(known))):
            raise TraceError(f"{model.name} has layers 0 to {len(known) - 1}: there is no layer {missing}")
        raise TraceError(
            f"layer {missing} has no attention that can be traced; those that have: {', '.join(map(str, known))}"
        )


def needs(
    model: Model,
    tokens: int,
    layers: Collection[int] | None = None,
    kinds: Collection[str] | None = None,
    keeping: Keeping | None = None,
    write: int = 0,
) -> Needs:
    """What recording a text of so many tokens will take, if the model writes so many more."""
    return estimate(model.network, reads_text(model, tokens, write), layers, kinds, keeping, once=not write)


def check_room(path: Path, needed: Needs) -> None:
    """Raise TraceError unless disk and memory have room for what ``record`` needs."""
    less = "give a smaller --max-tokens"
    check_needs(needed, path, f"{less}, fewer --layers", less)
