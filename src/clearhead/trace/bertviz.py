"""A trace as BertViz draws it: whole matrices, as torch tensors, for ``head_view`` and ``model_view``.

Jesse Vig, "A Multiscale Visualization of Attention in the Transformer Model", ACL 2019. BertViz takes every weight of
every layer at once and writes it into a page as text, so what fits is small."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np

from clearhead import memory
from clearhead.trace.errors import TraceError

if TYPE_CHECKING:
    from clearhead.trace.format import Site
    from clearhead.trace.reader import Trace

CELL = 80  # bytes that a weight takes on its way into the page: float32, again in a stack, a Python float, JSON, HTML
NAMES = {"encoder": "encoder_attention", "decoder": "decoder_attention", "cross": "cross_attention"}


def to_bertviz(
    trace: Trace, kind: str | None = None, layers: Collection[int] | None = None, text: int = 0
) -> dict[str, Any]:
    """What ``bertviz.head_view`` and ``bertviz.model_view`` are called with: ``head_view(**trace.to_bertviz())``.

    A kind of attention gives ``attention``, a list with a float32 tensor (1, heads, queries, keys) for each layer, and
    ``tokens``. A model of encoder and decoder gives, if no kind is chosen, all three attentions and the tokens of both.
    BertViz numbers the chosen ``layers`` from 0.

    Raises TraceError where the page would not fit into memory, before anything is computed; where layers differ in
    heads or stacks in layers, which BertViz cannot draw; and where a trace holds measures only.
    """
    several = kind is None and set(trace.kinds) > {"cross"} and set(trace.kinds) <= set(NAMES)
    kinds = [name for name in NAMES if name in trace.kinds] if several else [trace.sites_of(kind)[0].kind]
    chosen = {
        name: [site for site in trace.sites if site.kind == name and (layers is None or site.layer in layers)]
        for name in kinds
    }
    _check(trace, chosen)
    found: dict[str, Any] = {}
    for name, sites in chosen.items():
        tensors = [_tensor(trace, site, text) for site in sites]
        queries, keys = (list(trace.side(name, of, text).text) for of in ("query", "key"))
        if name == "cross":
            found |= {"cross_attention": tensors, "decoder_tokens": queries, "encoder_tokens": keys}
        elif several:
            found |= {NAMES[name]: tensors, f"{name}_tokens": queries}
        else:
            found |= {"attention": tensors, "tokens": queries}
    return found


def _check(trace: Trace, chosen: dict[str, list[Site]]) -> None:
    """Raise TraceError for what BertViz could not draw."""
    for kind, sites in chosen.items():
        if not sites:
            raise TraceError(
                f"none of these layers has {kind} attention: there are {', '.join(map(str, trace.layers))}"
            )
        if len({site.heads for site in sites}) != 1:
            raise TraceError(
                f"the {kind} layers differ in their heads, and BertViz draws as many for each: choose layers"
            )
    if len({len(sites) for sites in chosen.values()}) != 1:
        counts = ", ".join(f"{len(sites)} {kind} layers" for kind, sites in chosen.items())
        raise TraceError(f"there are {counts}, and BertViz draws as many of each: choose one with kind=")
    cells = sum(site.heads * site.queries * site.keys for sites in chosen.values() for site in sites)
    free = memory.available()
    if free is not None and cells * CELL > free:
        raise TraceError(
            f"BertViz writes each of these {cells:,} weights into a page: that takes {memory.written(cells * CELL)}, "
            f"{memory.written(free)} are free. Choose fewer layers, or a shorter text"
        )


def _tensor(trace: Trace, site: Site, text: int) -> Any:
    import torch

    weights = trace.weights(site.layer, kind=site.kind, text=text)
    return torch.from_numpy(np.asarray(weights, np.float32)[None])
