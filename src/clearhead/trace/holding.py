"""What a site's file must hold, by what the index says of the site."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from clearhead.trace.errors import TraceError
from clearhead.trace.format import Site
from clearhead.trace.measured import PREFIX
from clearhead.trace.tensors import NAMES

Shapes = dict[str, tuple[str, tuple[int, ...]]]  # dtype and shape of each array


def check_holding(file: Path, found: Mapping[str, tuple[str, tuple[int, ...]]], site: Site, texts: int) -> None:
    """Raise TraceError unless a file holds what the index says of it. ``found`` : name to (dtype, shape)."""
    needed = _needed(site, texts, found) if site.kept == "all" else {}
    arrays = {name: entry for name, entry in found.items() if not name.startswith(PREFIX)}
    unknown = any(dtype not in NAMES for dtype, _ in found.values())
    if arrays != needed or unknown or (site.kept == "measures" and len(found) == 0):
        raise TraceError(f"{file} holds {_listed(arrays)}, the trace needs {_listed(needed)}: record it again")
    for name, (dtype, shape) in found.items():
        if name.startswith(PREFIX) and (shape[:2] != (texts, site.heads) or dtype not in ("F16", "F32", "F64", "I64")):
            raise TraceError(f"{file} holds {name} {dtype} {shape}, which measures nothing: record it again")


def _needed(site: Site, texts: int, found: Mapping[str, tuple[str, tuple[int, ...]]]) -> Shapes:
    needed: Shapes = {
        "query": (site.dtype, (texts, site.heads, site.queries, site.dim)),
        "key": (site.dtype, (texts, site.key_heads, site.keys, site.dim)),
        "logsumexp": ("F64", (texts, site.heads, site.queries)),
    }
    if site.mask == "intervals":
        needed |= dict.fromkeys(("start", "stop"), ("I64", (texts, site.queries)))
    if site.mask == "array":
        heads = _either(found, "mask", 1, site.heads)
        needed["mask"] = ("BOOL", (texts, heads, site.queries, site.keys))
    if site.bias == "offsets":
        shape = (_either(found, "offsets", 0, texts), _either(found, "offsets", 1, site.heads))
        needed["offsets"] = ("F32", (*shape, site.queries + site.keys - 1))
    if site.bias == "dense":
        shape = (_either(found, "bias", 0, texts), _either(found, "bias", 1, site.heads))
        needed["bias"] = ("F32", (*shape, site.queries, site.keys))
    if "sinks" in found:
        needed["sinks"] = (found["sinks"][0], (site.heads,))
    return needed


def _either(found: Mapping[str, tuple[str, tuple[int, ...]]], name: str, axis: int, full: int) -> int:
    """The size of an axis that may be shared (1) or full."""
    shape = found[name][1] if name in found else ()
    return full if len(shape) > axis and shape[axis] == full else 1


def _listed(arrays: Shapes) -> str:
    return ", ".join(f"{name} {dtype} {shape}" for name, (dtype, shape) in arrays.items()) or "nothing"
