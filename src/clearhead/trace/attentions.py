"""Weights that somebody else computed, as a trace: what transformers returns and BertViz draws.

Such weights are whole matrices. Here their logarithms become the scores of an attention whose queries and keys are 0
and whose logsumexp is 0: its weights are exp(ln w) = w, and all that can be asked of a trace can be asked of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clearhead import __version__
from clearhead.trace.errors import TraceError
from clearhead.trace.format import KINDS, Checks, Index, ModelFacts, Side, Site, SiteCheck, Tokens, site_file
from clearhead.trace.generation import merge_steps
from clearhead.trace.reader import Trace
from clearhead.trace.tensors import format_name

Floats = NDArray[np.floating[Any]]
Texts = Sequence[str] | Sequence[Sequence[str]]


def from_attentions(
    attentions: Sequence[Any] | Mapping[str, Sequence[Any]],
    tokens: Texts | Mapping[str, Texts] | None = None,
) -> Trace:
    """A trace, in memory, of weights that are at hand as matrices.

    attentions : for each layer an array or torch tensor (texts, heads, queries, keys), as transformers gives with
        ``output_attentions=True`` and BertViz takes; or for each step of a generation such a tuple, n queries by n keys
        first and 1 by n + 1, n + 2 ... then, which becomes one record in absolute positions. For a model of several
        stacks a mapping from "encoder", "decoder" and "cross" to such tuples.
    tokens : the tokens' texts, one list or one a text of the batch; for several stacks a mapping from "encoder" and
        "decoder" to them. Their numbers, if left out.

    Rows of weights come back within 1e-7 as they were given. Arrays of float32 are referred to, not copied.
    ``trace.checks`` says how far their rows are from summing to 1, which after dropout they do not.

    Raises TraceError for what cannot be weights: None, another shape, negative or infinite numbers.

    >>> import numpy as np, clearhead as ch
    >>> weights = np.tril(np.ones((1, 2, 3, 3))) / np.array([[1.0], [2.0], [3.0]])
    >>> trace = ch.from_attentions((weights, weights), ["the", " cat", " sat"])
    >>> trace.layers, trace.weights(1)[0, 1].tolist()
    ((0, 1), [0.5, 0.5, 0.0])
    >>> trace.weights(0).measure("entropy").mean("entropy").round(3).tolist()
    [0.597, 0.597]
    """
    given = dict(attentions) if isinstance(attentions, Mapping) else {"self": attentions}
    if unknown := [kind for kind in given if kind not in KINDS]:
        raise TraceError(f"attentions are given for {unknown[0]!r}: the kinds are {', '.join(KINDS)}")
    layers = {kind: _layers(kind, some) for kind, some in given.items()}
    if not layers:
        raise TraceError("attentions are given for no kind: give a tuple with an array for each layer")
    texts = {len(array) for arrays in layers.values() for array in arrays}
    if len(texts) != 1:
        raise TraceError(
            f"attentions hold batches of {', '.join(map(str, sorted(texts)))} texts: give those of one run"
        )
    sites, checks = [], []
    for kind, arrays in layers.items():
        for layer, array in enumerate(arrays):
            sites.append(_site(kind, layer, array))
            checks.append(_check(sites[-1], array))
    sides = _sides(sites, tokens, texts.pop())
    count = max(len(arrays) for arrays in layers.values())
    dtype = str(layers[sites[0].kind][0].dtype)
    model = ModelFacts("attentions", "given", count, 0, dtype, "given", "", "")
    return Trace(Index(__version__, model, sides, tuple(sites), Checks(tuple(checks))), held=_Given(layers))


def _layers(kind: str, attentions: Sequence[Any]) -> list[Floats]:
    """One array (texts, heads, queries, keys) a layer."""
    if attentions is None or len(attentions) == 0:
        raise TraceError(f"there are no {kind} attentions: run the model with output_attentions=True")
    if isinstance(attentions[0], list | tuple):
        return merge_steps([[_array(kind, array) for array in step] for step in attentions], cross=kind == "cross")
    return [_array(kind, array) for array in attentions]


def _array(kind: str, given: Any) -> Floats:
    """One layer's weights as float32. Raises TraceError for what cannot be weights."""
    if given is None:
        raise TraceError(
            f"{kind} attentions hold None in a layer's place: transformers gives weights only where the model runs "
            f"attn_implementation='eager'. `clearhead trace` needs no other than the model's own"
        )
    if hasattr(given, "detach"):  # a tensor of torch's, which need not be here
        given = given.detach().cpu().float().numpy()
    array = np.asarray(given)
    if array.ndim != 4:
        more = ": flex_attention puts logsumexp where weights are expected" if array.ndim == 3 else ""
        raise TraceError(f"{kind} attentions hold an array {array.shape}, not (texts, heads, queries, keys){more}")
    if array.dtype.kind != "f":
        raise TraceError(f"{kind} attentions are {array.dtype}: weights are floating-point numbers")
    if array.size and not (array.min() >= 0 and array.max() < np.inf):
        raise TraceError(
            f"{kind} attentions hold negative or infinite numbers: these are no weights, but perhaps scores"
        )
    return array.astype(np.float32, copy=False)


def _site(kind: Any, layer: int, array: Floats) -> Site:
    texts, heads, queries, keys = array.shape
    if not texts * heads * queries * keys:
        raise TraceError(f"{kind} attentions hold an empty array {array.shape} in layer {layer}")
    in_order = kind != "cross" and queries == keys
    return Site(
        kind=kind,
        layer=layer,
        heads=heads,
        key_heads=heads,
        queries=queries,
        keys=keys,
        dim=1,
        dtype=format_name(array.dtype),
        mask="array",
        scale=1.0,
        bias="dense",
        causal=in_order and not any(np.triu(head, 1).any() for text in array for head in text),
    )


def _check(site: Site, array: Floats) -> SiteCheck:
    sums = array.sum(axis=-1, dtype=np.float64)
    off = np.abs(sums - 1)[sums > 0]
    return SiteCheck(site.kind, site.layer, site.dtype, int(off.size), float(off.max(initial=0.0)), 0.0, None)


def _sides(sites: list[Site], tokens: Any, texts: int) -> tuple[Side, ...]:
    """The tokens of queries and keys, numbered where none are given."""
    lengths: dict[str, set[int]] = {}
    for site in sites:
        lengths.setdefault(site.query_side, set()).add(site.queries)
        lengths.setdefault(site.key_side, set()).add(site.keys)
    given = dict(tokens) if isinstance(tokens, Mapping) else {} if tokens is None else {sites[0].query_side: tokens}
    if unknown := [name for name in given if name not in lengths]:
        raise TraceError(f"tokens are given for {unknown[0]!r}: the attentions look at {', '.join(lengths)}")
    sides = []
    for name, sizes in lengths.items():
        if len(sizes) != 1:
            raise TraceError(
                f"attentions hold {', '.join(map(str, sorted(sizes)))} {name} tokens: give those of one run"
            )
        (count,) = sizes
        pieces = given.get(name, [str(place) for place in range(count)])
        if not pieces or isinstance(pieces[0], str):
            pieces = [pieces] * texts
        if len(pieces) != texts or any(len(some) != count for some in pieces):
            raise TraceError(
                f"tokens are {len(pieces)} lists of {', '.join(str(len(some)) for some in pieces)} {name} tokens, the "
                f"attentions {texts} texts of {count}"
            )
        sides.append(Side(name, tuple(_tokens(some) for some in pieces)))  # type: ignore[arg-type]
    return tuple(sides)


def _tokens(pieces: Sequence[str]) -> Tokens:
    """Tokens of which the text alone is known: laid one after another."""
    ends = np.cumsum([0, *map(len, pieces)]).tolist()
    return Tokens((-1,) * len(pieces), tuple(pieces), tuple(ends[:-1]), tuple(ends[1:]))


class _Given(Mapping[str, dict[str, NDArray[Any]]]):
    """The arrays of each site, made of its weights when asked for: one site's at a time is held."""

    def __init__(self, layers: Mapping[str, list[Floats]]) -> None:
        self._layers = {site_file(kind, n): array for kind, arrays in layers.items() for n, array in enumerate(arrays)}
        self._last: tuple[str, dict[str, NDArray[Any]]] = ("", {})

    def __getitem__(self, name: str) -> dict[str, NDArray[Any]]:
        array = self._layers[name]
        if self._last[0] != name:
            seen = array > 0  # the rest is hidden
            arrays = {
                "query": np.zeros((*array.shape[:3], 1), array.dtype),
                "key": np.zeros((*array.shape[:2], array.shape[3], 1), array.dtype),
                "logsumexp": np.where(seen.any(axis=-1), 0.0, -np.inf),
                "mask": seen,
                "bias": np.log(array, out=np.zeros_like(array), where=seen),
            }
            self._last = name, arrays
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)
