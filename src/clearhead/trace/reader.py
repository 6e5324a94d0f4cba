"""Open a trace and look at it: rows, blocks and measures of any head, computed as they are asked for."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from clearhead import scores
from clearhead.trace import format as layout
from clearhead.trace.errors import TraceError
from clearhead.trace.format import Index, LayerFacts, ModelFacts, Tokens
from clearhead.trace.tensors import NAMES, Entry, read_header, read_tensors
from clearhead.trace.visible import Visible

if TYPE_CHECKING:
    from clearhead.weights import AttentionWeights


class Trace:
    """The attention of a model over one text, as recorded by ``clearhead trace``. Made by :meth:`open`.

    path : where it lies; model : facts about the model; tokens : the pieces of text, one per token; layers :
    the numbers of the recorded layers. ``len(trace)`` is the number of recorded layers."""

    def __init__(self, path: Path, index: Index) -> None:
        self.path = path
        self._index = index
        self._layers = {facts.layer: facts for facts in index.layers}

    @classmethod
    def open(cls, path: str | PathLike[str]) -> Trace:
        """Read the index of a trace and check every layer's file against it. No numbers are read yet.

        Raises TraceError, saying what is wrong, where the folder is no trace, was cut short, or is of a newer
        format."""
        path = Path(path)
        trace = cls(path, _read_index(path))
        for facts in trace._index.layers:
            file = path / layout.layer_file(facts.layer)
            _check_file(file, read_header(file), facts, tokens=len(trace.tokens))
        return trace

    @property
    def model(self) -> ModelFacts:
        return self._index.model

    @property
    def tokens(self) -> tuple[str, ...]:
        """The piece of text that each token came from."""
        return self._index.tokens.text

    @property
    def text(self) -> Tokens:
        """The tokens with their numbers and their places in the text."""
        return self._index.tokens

    @property
    def layers(self) -> tuple[int, ...]:
        """The numbers of the recorded layers, ascending."""
        return tuple(sorted(self._layers))

    @property
    def nbytes(self) -> int:
        """What the trace takes on disk, in bytes."""
        return sum(file.stat().st_size for file in self.path.iterdir())

    @property
    def dense_nbytes(self) -> int:
        """What the weights of the recorded layers would take as float32 matrices, in bytes."""
        return sum(facts.heads * len(self.tokens) ** 2 * 4 for facts in self._layers.values())

    def facts(self, layer: int) -> LayerFacts:
        """How a layer makes its scores: heads, dim, scale, softcap, mask."""
        if layer not in self._layers:
            kept = ", ".join(map(str, self.layers))
            raise TraceError(f"layer {layer} is not in the trace {self.path}: it holds {kept}")
        return self._layers[layer]

    def arrays(self, layer: int) -> dict[str, NDArray[Any]]:
        """What is kept of a layer, mapped into memory and read-only: query, key, logsumexp, and any mask."""
        self.facts(layer)
        return read_tensors(self.path / layout.layer_file(layer))

    def weights(self, layer: int, head: int | None = None) -> AttentionWeights:
        """The weights of a layer, (heads, queries, keys), or of one of its heads, (1, queries, keys).

        Nothing is computed until it is looked at: ``trace.weights(3)[0, 100]`` computes one row.
        """
        from clearhead import attention_weights  # loads the kernels: opening a trace does not need them

        facts, arrays = self.facts(layer), self.arrays(layer)
        heads = slice(None)
        key_heads = slice(None)
        if head is not None:
            if not 0 <= head < facts.heads:
                raise TraceError(f"layer {layer} has heads 0 to {facts.heads - 1}, there is no head {head}")
            heads = slice(head, head + 1)
            key_head = head // (facts.heads // facts.key_heads)
            key_heads = slice(key_head, key_head + 1)
        array = arrays.get("mask")
        if array is not None and len(array) > 1:
            array = array[heads]
        visible = Visible(facts.mask, arrays.get("start"), arrays.get("stop"), array)
        sinks = arrays["sinks"][heads] if "sinks" in arrays else None
        return attention_weights(
            arrays["query"][heads],
            arrays["key"][key_heads],
            mask=visible.mask(),
            score=scores.dot(scale=facts.scale, softcap=facts.softcap, sinks=sinks),
            logsumexp=arrays["logsumexp"][heads],
        )

    def __len__(self) -> int:
        return len(self._layers)

    def __repr__(self) -> str:
        return f"Trace({str(self.path)!r}: {self.model.name}, {len(self.tokens):,} tokens, {len(self)} layers)"


def is_trace(path: Path) -> bool:
    """Whether a folder is a trace of Clearhead's, of any version, damaged or not: it may be replaced."""
    try:
        return bool(json.loads((path / layout.INDEX).read_bytes())["format"] == layout.FORMAT)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _read_index(path: Path) -> Index:
    where = path / layout.INDEX
    try:
        data = json.loads(where.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        what = "is not a trace: it has no trace.json" if path.is_dir() else "is not a folder with a trace"
        what = what if path.exists() else "does not exist"
        raise TraceError(f"{path} {what}. `clearhead trace MODEL --text FILE -o DIR` records one") from None
    except (ValueError, RecursionError):
        raise TraceError(f"{where} is cut short or not JSON: record the trace again") from None
    return layout.from_json(data, str(where))


def _check_file(file: Path, entries: dict[str, Entry], facts: LayerFacts, tokens: int) -> None:
    """Raise TraceError unless a layer's file holds what the index says of it."""
    needed: dict[str, tuple[str, tuple[int, ...]]] = {
        "query": (facts.dtype, (facts.heads, tokens, facts.dim)),
        "key": (facts.dtype, (facts.key_heads, tokens, facts.dim)),
        "logsumexp": ("F64", (facts.heads, tokens)),
    }
    if facts.mask == "intervals":
        needed |= {"start": ("I64", (tokens,)), "stop": ("I64", (tokens,))}
    if facts.mask == "array":
        heads = facts.heads if "mask" in entries and entries["mask"].shape[:1] == (facts.heads,) else 1
        needed["mask"] = ("BOOL", (heads, tokens, tokens))
    if "sinks" in entries:
        needed["sinks"] = (entries["sinks"].dtype, (facts.heads,))
    found = {name: (entry.dtype, entry.shape) for name, entry in entries.items()}
    if found != needed or any(dtype not in NAMES for dtype, _ in found.values()):
        raise TraceError(f"{file} holds {_listed(found)}, the trace needs {_listed(needed)}: record it again")


def _listed(arrays: dict[str, tuple[str, tuple[int, ...]]]) -> str:
    return ", ".join(f"{name} {dtype} {shape}" for name, (dtype, shape) in arrays.items())
