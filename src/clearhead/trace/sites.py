"""Which attentions a model has: those that can be heard, each with its kind and layer, and those that cannot.

An attention of transformers that can be swapped asks ``AttentionInterface.get_interface`` for the function to run.
Whether a module does so is read off its code's names, before anything runs; so is what it stands for, off its
place in the model."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from clearhead.trace.errors import TraceError
from clearhead.trace.format import KINDS, Kind

_PARTS: tuple[Kind, ...] = ("text", "vision", "audio", "encoder", "decoder")  # how their configurations' names begin
_CROSS = re.compile(r"cross|encoder_attn|encdec|enc_dec", re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class Attention:
    """One attention of a model: what it stands for, and the module that does it, of which several may share one."""

    kind: Kind
    layer: int
    path: str
    module: Any


@dataclass(frozen=True, eq=False)
class Attentions:
    """All attentions of a model. ``deaf`` : those that do not go through the interface, in words."""

    heard: tuple[Attention, ...]
    deaf: tuple[str, ...]

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return tuple(kind for kind in KINDS if any(one.kind == kind for one in self.heard))

    def chosen(self, layers: Collection[int] | None, kinds: Collection[str] | None) -> tuple[Attention, ...]:
        """Those of some layers and kinds, None for all."""
        return tuple(
            one
            for one in self.heard
            if (layers is None or one.layer in layers) and (kinds is None or one.kind in kinds)
        )

    def layers(self, kind: str | None = None) -> tuple[int, ...]:
        return tuple(sorted({one.layer for one in self.heard if kind in (None, one.kind)}))


def find_attentions(network: Any) -> Attentions:
    """The attentions of a transformers model, found without running it."""
    heard = [(path, module) for path, module in network.named_modules() if _asks(module.__class__)]
    crossed = any(_is_cross(path, module) for path, module in heard)
    found: dict[Kind, list[tuple[str, Any]]] = {}
    for path, module in heard:
        found.setdefault(_kind(network, path, module, crossed), []).append((path, module))
    if len(found) == 1 and "cross" not in found:
        found = {"self": next(iter(found.values()))}
    attentions = [one for kind, modules in found.items() for one in _numbered(kind, modules)]
    return Attentions(tuple(attentions), tuple(_deaf(network, [path for path, _ in heard])))


def check_kinds(attentions: Attentions, kinds: Collection[str] | None, network: Any) -> None:
    """Raise TraceError if the model has no attention that can be heard, or not of these kinds, or only a part.

    Attentions that cannot be heard are an error unless the kinds are named: nothing is half traced unasked."""
    name = type(network).__name__
    if not attentions.heard:
        raise TraceError(
            f"{name} does not run its attention through transformers' AttentionInterface"
            f"{': ' + attentions.deaf[0] if attentions.deaf else ''}. It cannot be traced without changing it: use a "
            f"model of transformers 5 whose attention does, such as those with _supports_attention_backend"
        )
    if kinds is None and attentions.deaf:
        listed = ", ".join(attentions.deaf[:3]) + (", ..." if len(attentions.deaf) > 3 else "")
        raise TraceError(
            f"{name} runs some attentions outside transformers' AttentionInterface ({listed}): the trace would miss "
            f"them. To record the others alone, say so: kinds={attentions.kinds!r}"
        )
    if unknown := [kind for kind in kinds or () if kind not in attentions.kinds]:
        raise TraceError(f"{name} has no {unknown[0]!r} attention; it has {', '.join(attentions.kinds)}")


def query_side(kind: Kind) -> Kind:
    """The side whose tokens are the queries of attentions of a kind: the kind's own, the decoder's for cross."""
    return "decoder" if kind == "cross" else kind


@cache
def _asks(kind: Any) -> bool:
    """Whether a class of modules asks the interface for its attention."""
    for owner in kind.__mro__:
        if owner.__module__.split(".")[0] == "torch":
            return False
        for function in vars(owner).values():
            code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
            if code is not None and "get_interface" in code.co_names:
                return True
    return False


def _kind(network: Any, path: str, module: Any, crossed: bool) -> Kind:
    if _is_cross(path, module):
        return "cross"
    parts = path.split(".")
    if "encoder" in parts and "decoder" not in parts and network.config.is_encoder_decoder:
        return "encoder"
    if "decoder" in parts or crossed:
        return "decoder"
    part = _part(network.config, getattr(module, "config", None))
    for kind in _PARTS:
        if part is not None and part.startswith(kind):
            return kind
    return "self"


def _part(config: Any, inner: Any) -> str | None:
    """The name under which one configuration lies in another, such as text_config."""
    return next((name for name in config.sub_configs if getattr(config, name, None) is inner), None)


def _is_cross(path: str, module: Any) -> bool:
    names = (path.rsplit(".", 1)[-1], type(module).__name__)
    return any(_CROSS.search(name) for name in names) or "crossattention" in path.split(".")


def _numbered(kind: Kind, modules: list[tuple[str, Any]]) -> Iterator[Attention]:
    """Layers by the numbers that modules have themselves, if each has its own, else in the order in which they run."""
    own = [module.layer_idx for _, module in modules if type(getattr(module, "layer_idx", None)) is int]
    order = _order(getattr(modules[0][1], "config", None), len(modules))
    numbers = own if len(set(own)) == len(modules) == len(order) else range(len(order))
    for number, place in zip(numbers, order, strict=True):
        yield Attention(kind, number, *modules[place])


def _order(config: Any, modules: int) -> list[int]:
    """Which of the modules runs as which layer: each once, but in models whose layers share them (ALBERT).

    Those have groups of modules, and each group is run for as many layers in a row as share it."""
    layers, groups = (getattr(config, name, None) for name in ("num_hidden_layers", "num_hidden_groups"))
    if not layers or not groups or modules % groups:
        return list(range(modules))
    inner = modules // groups
    return [int(layer / (layers / groups)) * inner + one for layer in range(layers) for one in range(inner)]


def _deaf(network: Any, heard: list[str]) -> Iterator[str]:
    """Modules that are attentions by their name, with none in, around or under them that can be heard."""
    seen: list[str] = []
    for path, module in network.named_modules():
        if "Attention" not in type(module).__name__ or not any(True for _ in module.parameters()):
            continue
        if any(_within(one, path) or _within(path, one) for one in heard) or any(_within(path, one) for one in seen):
            continue
        seen.append(path)
        yield f"{type(module).__name__} at {path}"


def _within(path: str, outer: str) -> bool:
    return path == outer or path.startswith(outer + ".")
