"""What a trace is on disk: its facts, and their way into JSON. The way back is checked.py's.

    DIR/trace.json                 the model, its texts' tokens, one entry for each site, and what was checked
    DIR/self-000.safetensors       what is kept of a site, each with a first axis for the texts:
                                   query (texts, heads, queries, dim), key (texts, key heads, keys, dim) and logsumexp
                                   (texts, heads, queries); start and stop, or mask, where more than a causal mask is
                                   needed; offsets or bias where scores have one; sinks; and what was measured
    DIR/cross-000.safetensors      ...

A *site* is one attention of the model: a kind and a layer. Weights are not kept: they are ``exp(score -
logsumexp)``, recomputed wherever they are looked at. The files' names follow from kinds and layers; no path is
ever taken from the JSON.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from clearhead.trace.visible import Kind as MaskKind

FORMAT = "clearhead-trace"
VERSION = 2
INDEX = "trace.json"
DTYPES = ("F64", "F32", "F16", "BF16")

Kind = Literal["self", "encoder", "decoder", "cross", "text", "vision", "audio"]
KINDS: tuple[Kind, ...] = ("self", "encoder", "decoder", "cross", "text", "vision", "audio")
Bias = Literal["none", "offsets", "dense"]
BIASES: tuple[Bias, ...] = ("none", "offsets", "dense")


def site_file(kind: str, layer: int) -> str:
    """The name of a site's file: cross-007.safetensors."""
    return f"{kind}-{layer:03d}.safetensors"


@dataclass(frozen=True)
class ModelFacts:
    """The model that was traced. ``context`` is the longest text it was made for, in tokens; 0 is unknown."""

    name: str
    type: str
    layers: int
    context: int
    dtype: str
    attention: str  # the implementation that ran: "sdpa", "eager" or "clearhead"
    transformers: str  # versions
    torch: str


@dataclass(frozen=True)
class Tokens:
    """A text as the model reads it.

    ids : the model's numbers, -1 where there are none (images, sound); text : the piece of text each token came from,
    whole characters always (tokens that share a character all show it), or the place of an image's token, as
    "row,column"; start, stop : where that piece lies in the text, in characters, both -1 for tokens that lie nowhere;
    special : the places of tokens that stand for no text (such as ``<s>``); padding : the places of tokens that fill
    up a batch: they are hidden from all others, and see nothing."""

    ids: tuple[int, ...]
    text: tuple[str, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]
    special: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Side:
    """What queries or keys stand for: all texts of one input of the model.

    name : the kind of the sites that look at themselves there ("self", "encoder" ...); texts : as many as the batch
    holds, all of one length; grid : (rows, columns) of an image's places, which are the last of its tokens; None for
    what is no image."""

    name: Kind
    texts: tuple[Tokens, ...]
    grid: tuple[int, int] | None = None


@dataclass(frozen=True)
class Site:
    """One attention of the model: its shape and its scores.

    Query head h reads key head ``h // (heads // key_heads)``, counted among the heads that are kept; ``numbers`` are
    their numbers in the model. ``kept`` is "all", or "measures" where queries and keys were not stored."""

    kind: Kind
    layer: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    dim: int
    dtype: str  # of query and key, in safetensors' names
    mask: MaskKind
    scale: float
    softcap: float | None = None
    window: int | None = None  # how many keys back the model says it looks; the mask itself is in `mask`
    bias: Bias = "none"  # added to scores: one number per head and offset, or per head and cell
    causal: bool = False  # whether the model says that nothing sees the future
    numbers: tuple[int, ...] = ()
    kept: Literal["all", "measures"] = "all"

    @property
    def query_side(self) -> Kind:
        """The side whose tokens are the queries: that of the kind, the decoder's for cross attention."""
        return "decoder" if self.kind == "cross" else self.kind

    @property
    def key_side(self) -> Kind:
        """The side whose tokens are the keys: that of the kind, the encoder's for cross attention."""
        return "encoder" if self.kind == "cross" else self.kind

    def __str__(self) -> str:
        return f"{self.kind} layer {self.layer}"


@dataclass(frozen=True)
class SiteCheck:
    """What was found when some rows of a site were looked at.

    rows : how many; row_sum : the largest distance of a row's sum from 1, sinks' share included; hidden : the largest
    weight on a key that the mask hides, or on a later one where the model is causal; output : the largest difference
    between weights times values and the model's own output, in units of the largest value; None where it was not
    looked at, since values are not kept."""

    kind: Kind
    layer: int
    dtype: str
    rows: int
    row_sum: float
    hidden: float
    output: float | None


@dataclass(frozen=True)
class Checks:
    """All sites' checks, and ``missing``: attentions that the model has and the trace has not, in words."""

    sites: tuple[SiteCheck, ...]
    missing: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether rows sum to 1 within 1e-5 and nothing hidden has weight. The outputs were judged when recorded."""
        return all(site.row_sum <= 1e-5 and site.hidden == 0 for site in self.sites)


@dataclass(frozen=True)
class Index:
    """All of trace.json."""

    clearhead: str  # the version that wrote it
    model: ModelFacts
    sides: tuple[Side, ...]
    sites: tuple[Site, ...]
    checks: Checks
    version: int = VERSION

    def side(self, name: str) -> Side:
        return next(side for side in self.sides if side.name == name)

    def to_json(self) -> dict[str, Any]:
        facts = asdict(self)
        facts.pop("version")
        return {"format": FORMAT, "version": VERSION, **facts}
