"""Listen to a transformers model's attention while it runs, without changing a bit of what it computes.

Every attention that can be swapped asks ``AttentionInterface.get_interface`` which function to run. While a block
lasts, the answer is the same function, wrapped: it runs as it would have, on the same inputs, and what went in and
came out is shown to a listener. Nothing is renamed and no configuration is touched, so that code which asks for the
implementation's name, and the masks that are made for it, stay as they are."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from clearhead.algebra import HIDDEN
from clearhead.trace.errors import TraceError
from clearhead.trace.sites import Attention, Attentions, check_kinds, find_attentions
from clearhead.trace.visible import Visible, describe

MASKS_KEPT = 4  # full and sliding layers alternate in the models that have more than one


@dataclass(frozen=True, eq=False)
class Call:
    """One call of one attention: what went in and came out, as the model's own tensors.

    query : (texts, heads, queries, dim), after rotary embedding; key : (texts, key heads, keys, dim); value : (texts,
    key heads, keys, value dim); output : (texts, heads, queries, value dim); visible : who may look at whom; bias :
    (texts or 1, heads or 1, queries, keys), added to scores, or None; sinks : (heads,) or None; window : how far back
    the model says it looks; causal : whether it says that nothing sees the future."""

    site: Attention
    query: Any
    key: Any
    value: Any
    output: Any
    visible: Visible
    bias: Any
    scale: float
    softcap: float | None
    sinks: Any
    window: int | None
    causal: bool


Listener = Callable[[Call], None]


@dataclass(eq=False)
class Session:
    """One use of `capture`: who listens, to which attentions, and which have been heard so far."""

    listener: Listener
    attentions: Attentions
    wanted: frozenset[Attention]
    heard: set[Attention] = field(default_factory=set)
    calls: dict[int, int] = field(default_factory=dict)  # of each module, by its identity
    implementation: str = ""
    # Layers share few masks. Each is described once; it is kept, so that its identity stays its own while it is here.
    masks: dict[Any, tuple[Any, Visible, Any]] = field(default_factory=dict)

    def silent(self) -> list[Attention]:
        """What was wanted and has not run."""
        return [one for one in self.attentions.heard if one in self.wanted and one not in self.heard]

    def called(self, module: Any) -> Attention | None:
        """Which attention a call of a module is, if it is wanted: those that share a module have their turns."""
        sharing = [one for one in self.attentions.heard if one.module is module]
        if not sharing:
            return None
        count = self.calls.get(id(module), 0)
        self.calls[id(module)] = count + 1
        one = sharing[count % len(sharing)]
        return one if one in self.wanted else None


# Of this thread and context alone: models that run elsewhere at the same time are not listened to.
_SESSION: ContextVar[Session | None] = ContextVar("clearhead-capture", default=None)


@contextmanager
def capture(
    network: Any,
    listener: Listener,
    layers: Collection[int] | None = None,
    kinds: Collection[str] | None = None,
    skip: Collection[tuple[str, int]] = (),
) -> Iterator[Session]:
    """Call ``listener`` with each call of the chosen attentions (all, when None) while the block lasts.

    ``skip`` : kinds and layers that need not be heard again.

    The model's outputs are bit for bit those it has without this.

    Raises TraceError if the model's attention cannot be listened to, or does what cannot be told from its inputs.

    >>> with capture(model, print, layers=[0]):                             # doctest: +SKIP
    ...     model(**tokenizer("Hello", return_tensors="pt"))
    """
    attentions = find_attentions(network)
    check_kinds(attentions, kinds, network)
    wanted = frozenset(one for one in attentions.chosen(layers, kinds) if (one.kind, one.layer) not in skip)
    for one in wanted:
        _check_implementation(getattr(getattr(one.module, "config", None), "_attn_implementation", None) or "eager")
    session = Session(listener, attentions, wanted)
    token = _SESSION.set(session)
    try:
        with _wrapped():
            yield session
    finally:
        _SESSION.reset(token)


_lock = threading.Lock()
_inside = 0  # how many blocks are open, in all threads
_original: Any = None


@contextmanager
def _wrapped() -> Iterator[None]:
    """Make ``get_interface`` give what it gives, wrapped, to those who are listened to."""
    import transformers

    global _inside, _original
    interface: Any = transformers.AttentionInterface
    with _lock:
        if _inside == 0:
            _original = interface.get_interface
            interface.get_interface = functools.wraps(_original)(_get_interface)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                interface.get_interface = _original


def _get_interface(interface: Any, *names: Any, **options: Any) -> Any:
    own = _original(interface, *names, **options)
    return own if _SESSION.get() is None else functools.partial(_listen, own)


def _listen(own: Any, module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any) -> Any:
    """Runs the model's attention as it is, and tells the listener."""
    result = own(module, query, key, value, attention_mask, **options)
    session = _SESSION.get()
    site = None if session is None else session.called(module)
    if session is not None and site is not None:
        session.listener(_call(session, site, own, (query, key, value, attention_mask), result[0], options))
        session.heard.add(site)
    return result


def _call(
    session: Session, site: Attention, own: Any, inputs: tuple[Any, ...], output: Any, options: dict[str, Any]
) -> Call:
    query, key, value = (tensor.detach() for tensor in inputs[:3])
    mask = inputs[3]  # as it is: layers that share one are known by it
    implementation = _implementation(own)
    session.implementation = implementation
    _check_traceable(site, query, key, options)
    causal = options.get("is_causal")
    causal = bool(getattr(site.module, "is_causal", True) if causal is None else causal)
    scale, softcap, window = (options.get(name) for name in ("scaling", "softcap", "sliding_window"))
    if mask is None:
        # Under sdpa and ours, no mask means causal where the module says that it is, aligned at the first key.
        visible, bias = Visible("full"), None
        if implementation != "eager" and causal and query.shape[2] > 1:
            visible, key, value = Visible("causal"), key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    else:
        visible, bias = _understood(session, mask, (query.shape[0], query.shape[2], key.shape[2]))
    added = options.get("position_bias")
    if added is not None:
        added = added.detach()[..., : key.shape[2]]
        bias = added if bias is None else bias + added
    return Call(
        site=site,
        query=query,
        key=key,
        value=value,
        output=output.detach().transpose(1, 2),
        visible=visible,
        bias=bias,
        scale=float(query.shape[-1] ** -0.5 if scale is None else scale),
        softcap=None if softcap is None else float(softcap),
        sinks=None if options.get("s_aux") is None else options["s_aux"].detach(),
        window=None if window is None else int(window),
        causal=causal and site.kind != "cross",
    )


def _check_implementation(name: str) -> None:
    if name not in ("sdpa", "eager", "clearhead"):
        raise TraceError(
            f"the model runs attention {name!r}: load it with attn_implementation='sdpa' (or 'eager') to trace it"
        )


def _implementation(own: Any) -> str:
    """What a function is, by its name: each model has an eager attention of its own."""
    name = getattr(own, "__name__", str(own))
    known = {"sdpa_attention_forward": "sdpa", "clearhead_attention_forward": "clearhead"}
    found = known.get(name, "eager" if "eager" in name else name)
    _check_implementation(found)
    return found


def _check_traceable(site: Attention, query: Any, key: Any, options: dict[str, Any]) -> None:
    if options.get("dropout"):
        raise TraceError("the model is in training mode, where weights are dropped at random: call model.eval() first")
    if query.dim() != 4 or key.dim() != 4 or query.shape[0] != key.shape[0] or query.shape[1] % key.shape[1]:
        raise TraceError(
            f"{site.path} has queries {tuple(query.shape)} and keys {tuple(key.shape)}: they are not (texts, heads, "
            f"tokens, dim), and cannot be traced"
        )


def _understood(session: Session, mask: Any, shape: tuple[int, int, int]) -> tuple[Visible, Any]:
    """Who may look at whom, and what is added to scores, from a model's mask: booleans, or numbers to be added.

    ``shape`` : (texts, queries, keys)."""
    which = id(mask), shape
    if which not in session.masks:
        if len(session.masks) == MASKS_KEPT:
            session.masks.pop(next(iter(session.masks)))
        session.masks[which] = (mask, *_read(mask, *shape))
    return session.masks[which][1:]


def _read(mask: Any, texts: int, queries: int, keys: int) -> tuple[Visible, Any]:
    import torch

    mask, bias = mask.detach()[..., :keys], None
    mask = mask.expand(texts, -1, queries, -1)
    if mask.dtype != torch.bool:
        allowed = mask > HIDDEN
        if (mask[allowed] != 0).any():
            bias = torch.where(allowed, mask, 0)
        mask = allowed
    if mask.shape[1] > 1 and (mask[:, :1] == mask).all():
        mask = mask[:, :1]
    return describe(np.asarray(mask.cpu().numpy())), bias
