"""What a trace is on disk, and the one place that knows: facts to JSON, and JSON checked into facts.

    DIR/trace.json                 the model, the text's tokens, and one entry for each layer
    DIR/layer-000.safetensors      query (heads, tokens, dim), key (key heads, tokens, dim), logsumexp (heads, tokens);
                                   with start, stop or mask where more than a causal mask is needed, and sinks
    DIR/layer-001.safetensors      ...

Weights are not there: they are ``exp(score - logsumexp)``, recomputed wherever they are looked at. The files'
names follow from the layers' numbers; no path is ever taken from the JSON.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from clearhead.trace.errors import TraceError
from clearhead.trace.visible import KINDS, Kind

FORMAT = "clearhead-trace"
VERSION = 1
INDEX = "trace.json"
DTYPES = ("F64", "F32", "F16", "BF16")


def layer_file(layer: int) -> str:
    """The name of a layer's file: layer-007.safetensors."""
    return f"layer-{layer:03d}.safetensors"


@dataclass(frozen=True)
class ModelFacts:
    """The model that was traced. ``context`` is the longest text it was made for, in tokens; 0 is unknown."""

    name: str
    type: str
    layers: int
    context: int
    dtype: str
    attention: str  # the implementation that ran: "sdpa" or "eager"
    transformers: str  # versions
    torch: str


@dataclass(frozen=True)
class Tokens:
    """A text as the model reads it.

    ids : the model's numbers; text : the piece of text each token came from, whole characters always (tokens
    that share a character all show it); start, stop : where that piece lies in the text, in characters, both
    -1 for tokens that the tokenizer adds by itself."""

    ids: tuple[int, ...]
    text: tuple[str, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class LayerFacts:
    """One layer: its shape and its scores. Query head h reads key head ``h // (heads // key_heads)``."""

    layer: int
    heads: int
    key_heads: int
    dim: int
    dtype: str  # of query and key, in safetensors' names
    mask: Kind
    scale: float
    softcap: float | None
    window: int | None  # how many keys back the model says it looks; the mask itself is in `mask`


@dataclass(frozen=True)
class Index:
    """All of trace.json."""

    clearhead: str  # the version that wrote it
    model: ModelFacts
    tokens: Tokens
    layers: tuple[LayerFacts, ...]

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, **asdict(self)}


def from_json(data: Any, where: str) -> Index:
    """The Index that parsed JSON states. Raises TraceError for anything that this version cannot read."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise TraceError(f"{where} does not describe a trace of Clearhead's (format {FORMAT!r})")
    version = data.get("version")
    if type(version) is int and version > VERSION:
        raise TraceError(
            f"{where} was written in format version {version} by Clearhead {data.get('clearhead')}, and this one "
            f"reads up to version {VERSION}: upgrade Clearhead"
        )
    try:
        if version != VERSION:
            raise ValueError(f"version is {version!r}")
        model = ModelFacts(**_typed(ModelFacts, data["model"]))
        tokens = _tokens(data["tokens"])
        layers = tuple(LayerFacts(**_typed(LayerFacts, facts)) for facts in data["layers"])
        for facts in layers:
            _check_layer(facts, model)
        if len({facts.layer for facts in layers}) != len(layers) or not layers:
            raise ValueError("layers are missing or named twice")
        return Index(_string(data["clearhead"]), model, tokens, layers)
    except (KeyError, TypeError, ValueError) as error:
        what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise TraceError(
            f"{where} is damaged or was not written by Clearhead: {what}. Record the trace again"
        ) from None


_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (float, int),
    "float | None": (float, int, type(None)),
    "int | None": (int, type(None)),
    "Kind": (str,),
}


def _typed(kind: type, facts: Any) -> dict[str, Any]:
    """The fields of a dataclass from a JSON object, each of the type that its annotation says."""
    found = {}
    for name, annotation in kind.__annotations__.items():
        value = facts[name]
        if type(value) not in _TYPES[annotation]:
            raise TypeError(f"{name!r} is {value!r}")
        if isinstance(value, int | float) and not math.isfinite(value):
            raise ValueError(f"{name!r} is {value}")
        found[name] = value
    return found


def _check_layer(facts: LayerFacts, model: ModelFacts) -> None:
    if not 0 <= facts.layer < model.layers:
        raise ValueError(f"there is no layer {facts.layer} in a model of {model.layers}")
    if facts.heads < 1 or facts.key_heads < 1 or facts.dim < 1 or facts.heads % facts.key_heads:
        raise ValueError(f"layer {facts.layer} has {facts.heads} heads on {facts.key_heads} of dim {facts.dim}")
    if facts.mask not in KINDS or facts.dtype not in DTYPES:
        raise ValueError(
            f"layer {facts.layer} has mask {facts.mask!r} and dtype {facts.dtype!r}; known are {KINDS}, {DTYPES}"
        )
    if facts.softcap is not None and facts.softcap <= 0:
        raise ValueError(f"layer {facts.layer} has softcap {facts.softcap}")


def _tokens(data: Any) -> Tokens:
    columns = {name: tuple(data[name]) for name in Tokens.__annotations__}
    if len({len(column) for column in columns.values()}) != 1 or not columns["ids"]:
        raise ValueError("its tokens are not complete")
    for name, column in columns.items():
        wanted = str if name == "text" else int
        if not all(type(value) is wanted for value in column):
            raise TypeError(f"its tokens' {name} are not all of one type")
    return Tokens(**columns)


def _string(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{value!r} is not a text")
    return value
