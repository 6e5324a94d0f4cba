"""Record the attention of a model over a text: run it once, and write each layer down as it happens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from os import PathLike
from pathlib import Path

from clearhead.trace.errors import TraceError
from clearhead.trace.format import Tokens
from clearhead.trace.keep import Keeping, Store, check_store
from clearhead.trace.measured import MAP
from clearhead.trace.models import Model
from clearhead.trace.reader import Trace
from clearhead.trace.recorder import recording
from clearhead.trace.sites import check_kinds, find_attentions
from clearhead.trace.writer import check_space, writing


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
) -> Trace:
    """Run ``model`` over ``tokens`` and write a trace of the chosen layers, heads and kinds (None: all) to ``path``.

    ``progress`` is called with each layer's number once it is on disk. Memory does not grow with the layers.
    What is written is checked as it is written: the weights that the trace will give must reproduce the
    model's own output. ``store`` is the dtype of queries and keys, "float16" or "bfloat16", None for the model's own;
    with ``only_measures`` they are not kept at all. A run that was killed leaves ``path.unfinished``; with ``go_on`` the
    same run goes on with it, and layers that are whole are not recorded again.

    Raises TraceError if the text is longer than the model's context, the disk too small, ``path`` taken by
    something that is not a trace, or the model one whose attention cannot be told from queries and keys."""
    import torch

    path = Path(path)
    check_length(model, tokens)
    check_layers(model, layers)
    check_store(store)
    keeping = Keeping(heads, store, only_measures)
    check_space(path, estimate(model, len(tokens), layers, keeping))
    with (
        writing(path, run_facts(model, tokens, keeping, layers, kinds), go_on) as writer,
        recording(
            model.network,
            writer,
            name=model.name,
            layers=layers,
            kinds=kinds,
            keeping=keeping,
            once=True,
            tokens=tokens,
            done=tuple(writer.done),
            progress=None if progress is None else lambda site: progress(site.layer),
        ),
        torch.inference_mode(),
    ):
        model.network(input_ids=torch.tensor([tokens.ids], device=model.network.device), use_cache=False)
    return Trace.open(path)


def run_facts(
    model: Model, tokens: Tokens, keeping: Keeping, layers: Collection[int] | None, kinds: Collection[str] | None
) -> dict[str, str]:
    """What must be the same for a run to go on with what another left: each in words, or by a hash."""
    import torch
    import transformers

    weights = hashlib.sha256()
    for name, parameter in model.network.named_parameters():
        weights.update(name.encode() + parameter.detach().flatten()[:16].double().cpu().numpy().tobytes())
    count = len(find_attentions(model.network).layers() if layers is None else set(layers))
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
        "of": str(count),
    }


def check_length(model: Model, tokens: Tokens) -> None:
    """Raise TraceError if there are more tokens than the model's context."""
    if 0 < model.context < len(tokens):
        raise TraceError(
            f"the text has {len(tokens):,} tokens and {model.name} reads at most {model.context:,}: "
            f"give --max-tokens {model.context} to trace its beginning"
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


def estimate(model: Model, tokens: int, layers: Collection[int] | None = None, keeping: Keeping | None = None) -> int:
    """What a trace will take on disk, in bytes: queries, keys, logsumexp and measures of each layer."""
    config, keeping = model.config, keeping or Keeping()
    every = config.num_attention_heads
    heads = every if keeping.heads is None else len(set(keeping.heads))
    key_heads = (getattr(config, "num_key_value_heads", None) or every) if keeping.heads is None else heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // every
    itemsize = model.network.dtype.itemsize if keeping.store is None else 2
    count = len(find_attentions(model.network).layers() if layers is None else set(layers))
    measured = heads * (min(tokens, MAP) ** 2 * 4 + tokens * 4 + 10 * 8)
    kept = tokens * ((heads + key_heads) * dim * itemsize + heads * 8)
    return int(count * (measured + (0 if keeping.only_measures else kept)))
