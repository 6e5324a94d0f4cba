"""Listen to a transformers model's attention while it runs, without changing a bit of what it computes.

transformers lets a model's attention be swapped by name. The function registered here under such a name calls
the one that would have run (``sdpa``, or the model's own ``eager``), hands its inputs to a listener, and
returns its result as it is. The name is registered twice, for the function and for the mask that goes with
it: with the first alone, transformers builds no mask and a causal model sees the future."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clearhead.trace.errors import TraceError
from clearhead.trace.visible import Visible, describe

OWN_NAMES = {"sdpa": "clearhead-sdpa", "eager": "clearhead-eager"}
MASKS_KEPT = 4  # full and sliding layers alternate in the models that have more than one


@dataclass(frozen=True, eq=False)
class Layer:
    """What one layer's attention was given and what it made of it. Arrays share the model's memory.

    query : (heads, queries, dim), after rotary embedding; key : (key_heads, keys, dim); value : (key_heads,
    keys, value dim); output : (heads, queries, value dim); sinks : (heads,) or None; window : how far back
    the model says it looks."""

    layer: int
    query: NDArray[Any]
    key: NDArray[Any]
    value: NDArray[Any]
    output: NDArray[Any]
    visible: Visible
    scale: float
    softcap: float | None
    sinks: NDArray[Any] | None
    window: int | None


Listener = Callable[[Layer], None]


@dataclass(eq=False)
class _Session:
    """One use of `capture`: who listens, to which layers, and what has been heard so far."""

    listener: Listener
    layers: Collection[int] | None
    own: str
    heard: set[int] = field(default_factory=set)
    # Layers share few masks. Each is described once; it is kept, so that its identity stays its own while it
    # is here.
    masks: dict[int, tuple[Any, Visible]] = field(default_factory=dict)


# Of this thread and context alone: models that run elsewhere at the same time are not listened to.
_SESSION: ContextVar[_Session | None] = ContextVar("clearhead-capture", default=None)


@contextmanager
def capture(model: Any, listener: Listener, layers: Collection[int] | None = None) -> Iterator[set[int]]:
    """Call ``listener`` with each of the chosen layers (all, when None) as it runs, while the block lasts.

    Gives the set of layers heard so far. The model's outputs are bit for bit those it has without this.
    Batches hold one text, and the model keeps no cache (``use_cache=False``).

    Raises TraceError if the model's attention cannot be listened to, or does what cannot be told from its
    inputs.

    >>> with capture(model, print, layers=[0]):                             # doctest: +SKIP
    ...     model(**tokenizer("Hello", return_tensors="pt"), use_cache=False)
    """
    own = str(model.config.get_text_config()._attn_implementation)
    if own not in OWN_NAMES:
        raise TraceError(
            f"the model runs attention {own!r}: load it with attn_implementation='sdpa' (or 'eager') to trace it"
        )
    _register()
    session = _Session(listener, layers, own)
    before = [(config, config._attn_implementation) for config in _configs(model.config)]
    token = _SESSION.set(session)
    try:
        model.set_attn_implementation(OWN_NAMES[own])
        if model.config.get_text_config()._attn_implementation != OWN_NAMES[own]:
            raise _deaf(model)
        yield session.heard
    finally:
        _SESSION.reset(token)
        for config, name in before:
            config._attn_implementation = name


def check_heard(model: Any, heard: set[int], wanted: Collection[int] | None) -> None:
    """Raise TraceError if a layer that was asked for, or every layer, stayed silent."""
    if not heard:
        raise _deaf(model)
    if wanted is not None and (silent := sorted(set(wanted) - heard)):
        raise TraceError(
            f"layer {', '.join(map(str, silent))} has no attention that can be traced; those that have: "
            f"{', '.join(map(str, sorted(heard)))}"
        )


def _deaf(model: Any) -> TraceError:
    return TraceError(
        f"{type(model).__name__} does not run its attention through transformers' AttentionInterface: it cannot be "
        f"traced without changing it"
    )


def _configs(config: Any) -> Iterator[Any]:
    """A configuration and those inside it, outermost first: the order in which they can be set one by one."""
    yield config
    for name in config.sub_configs:
        if (inner := getattr(config, name, None)) is not None:
            yield from _configs(inner)


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask, sdpa_mask

    AttentionInterface.register(OWN_NAMES["sdpa"], _listen)
    AttentionInterface.register(OWN_NAMES["eager"], _listen)
    AttentionMaskInterface.register(OWN_NAMES["sdpa"], sdpa_mask)
    AttentionMaskInterface.register(OWN_NAMES["eager"], eager_mask)


def _own_function(session: _Session, module: Any) -> Callable[..., Any]:
    """The attention that the model runs when nobody listens."""
    if session.own == "sdpa":
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward
    own: Callable[..., Any] | None = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if own is None:
        raise TraceError(f"{type(module).__name__} has an eager attention of its own: load the model with 'sdpa'")
    return own


def _listen(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any) -> Any:
    """Stands where the model's attention stood: runs it, and tells the listener."""
    session = _SESSION.get()
    if session is None:
        raise TraceError("this model's attention is listened to in another thread: run it there, or wait")
    result = _own_function(session, module)(module, query, key, value, attention_mask, **options)
    layer = getattr(module, "layer_idx", None)
    layer = len(session.heard) if layer is None else int(layer)
    if session.layers is None or layer in session.layers:
        if layer in session.heard:
            raise TraceError(f"layer {layer} ran twice: one trace holds one pass over one text, without generation")
        session.listener(_layer(session, module, layer, query, key, value, attention_mask, result[0], options))
    session.heard.add(layer)
    return result


def _layer(
    session: _Session,
    module: Any,
    layer: int,
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    output: Any,
    options: dict[str, Any],
) -> Layer:
    _check_traceable(layer, query, key, options)
    causal = options.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
    scale = options.get("scaling")
    sinks = options.get("s_aux")
    window = options.get("sliding_window")
    return Layer(
        layer=layer,
        query=_array(query[0]),
        key=_array(key[0]),
        value=_array(value[0]),
        output=_array(output[0].transpose(0, 1)),
        visible=_visible(session, layer, mask, causal, query.shape[2], key.shape[2]),
        scale=float(query.shape[-1] ** -0.5 if scale is None else scale),
        softcap=None if options.get("softcap") is None else float(options["softcap"]),
        sinks=None if sinks is None else _array(sinks.float()),
        window=None if window is None else int(window),
    )


def _check_traceable(layer: int, query: Any, key: Any, options: dict[str, Any]) -> None:
    if query.shape[0] != 1:
        raise TraceError(f"the batch holds {query.shape[0]} texts: one at a time can be traced")
    if query.shape[2] != key.shape[2]:
        raise TraceError(
            f"layer {layer} has {query.shape[2]} queries and {key.shape[2]} keys: one pass over a whole text can be "
            f"traced, without a cache (use_cache=False)"
        )
    if options.get("dropout"):
        raise TraceError("the model is in training mode, where weights are dropped at random: call model.eval() first")
    if options.get("position_bias") is not None:
        raise TraceError(f"layer {layer} adds a learned bias to its scores: that cannot be traced yet")


def _visible(session: _Session, layer: int, mask: Any, causal: bool, queries: int, keys: int) -> Visible:
    """Who may look at whom. Under sdpa, no mask means causal where the module says that it is."""
    if mask is None:
        return Visible("causal" if causal and session.own == "sdpa" and queries > 1 else "full")
    if id(mask) not in session.masks:
        if len(session.masks) == MASKS_KEPT:
            session.masks.pop(next(iter(session.masks)))
        session.masks[id(mask)] = (mask, describe(_allowed(layer, mask, keys)))
    return session.masks[id(mask)][1]


def _allowed(layer: int, mask: Any, keys: int) -> NDArray[np.bool_]:
    """(1 or heads, queries, keys) booleans from a model's mask: booleans, or 0 and -inf to be added."""
    import torch

    mask = mask[0, ..., :keys]
    if mask.dtype != torch.bool:
        hidden = mask <= torch.finfo(mask.dtype).min
        if not (hidden | (mask == 0)).all():
            raise TraceError(f"layer {layer} adds a bias to its scores: that cannot be traced yet")
        mask = ~hidden
    if (mask[:1] == mask).all():
        mask = mask[:1]
    return np.asarray(mask.cpu().numpy())


def _array(tensor: Any) -> NDArray[Any]:
    """A tensor's numbers as a NumPy array on the same memory; bfloat16 as ml_dtypes spells it."""
    import torch

    tensor = tensor.detach().cpu()
    if tensor.dtype != torch.bfloat16:
        return np.asarray(tensor.numpy())
    from ml_dtypes import bfloat16

    return np.asarray(tensor.view(torch.int16).numpy()).view(bfloat16)
