"""Is a record the model's own attention? Some of its rows are looked at, in two ways.

While the model runs, weights times values must give the model's own output: whatever else an attention may do to
its scores would show there, and lets a trace be believed for models whose code was never looked at. Afterwards, and
whenever it is asked for again, rows must sum to 1 and what is hidden must have no weight at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from clearhead.trace.capture import Call
from clearhead.trace.errors import TraceError
from clearhead.trace.format import Site

if TYPE_CHECKING:
    from clearhead.trace.measured import SiteMeasures
    from clearhead.weights import AttentionWeights

# How far weights times values may stray from the model's own output, in units of the largest value: rounding, and room.
TOLERANCE = {"float64": 1e-9, "float32": 1e-3, "float16": 2e-2, "bfloat16": 5e-2}


def sampled(rows: int) -> list[int]:
    """The rows that are looked at."""
    return sorted({0, rows // 3, rows // 2, rows - 1})


def check_output(call: Call, first: int = 0) -> float:
    """How far weights times values stray from the model's own output, on some rows, in units of the largest value.

    ``first`` is the absolute position of the call's first query. Raises TraceError if that is more than rounding."""
    import torch

    texts, heads, queries, dim = call.query.shape
    key_heads, keys = call.key.shape[1:3]
    rows = sampled(queries)
    # Apple's GPUs have no float64.
    wide = {"dtype": torch.float32 if call.query.device.type == "mps" else torch.float64, "device": call.query.device}
    query = call.query[:, :, rows].to(**wide).reshape(texts, key_heads, -1, dim)
    score = (query @ call.key.to(**wide).transpose(2, 3) * call.scale).reshape(texts, heads, len(rows), keys)
    if call.softcap is not None:
        score = call.softcap * torch.tanh(score / call.softcap)
    if call.bias is not None:
        score = score + call.bias[:, :, rows].to(**wide)
    seen = torch.from_numpy(_rows_seen(call, rows)).to(call.query.device)
    score = score.masked_fill(~seen, -torch.inf)
    largest = score.amax(dim=-1, keepdim=True).clamp(min=-1e30)
    total = (score - largest).exp().sum(dim=-1, keepdim=True)
    if call.sinks is not None:
        total = total + (call.sinks.to(**wide).reshape(-1, 1, 1) - largest).exp()
    weights = (score - largest).exp() / total.clamp(min=1e-30)
    value = call.value.to(**wide).nan_to_num()
    mixed = (weights.reshape(texts, key_heads, -1, keys) @ value).reshape(texts, heads, len(rows), -1)
    error = (mixed - call.output[:, :, rows].to(**wide)).abs().amax(dim=-1)
    error = torch.where(seen.any(dim=-1), error, 0)  # of an empty row the model makes whatever it makes
    unit = value.abs().amax(dim=(2, 3)).clamp(min=1e-30).repeat_interleave(heads // key_heads, dim=1)
    error = error / unit[..., None]
    worst = float(error.nan_to_num(nan=torch.inf).max()) if error.numel() else 0.0
    if not worst <= TOLERANCE[str(call.query.dtype).removeprefix("torch.")]:
        text, head, row = np.unravel_index(int(error.nan_to_num(nan=torch.inf).argmax()), error.shape)
        raise TraceError(
            f"{call.site.kind} layer {call.site.layer}, head {head}: the weights of query {first + rows[row]}"
            f"{f' of text {text}' if texts > 1 else ''}, computed from queries and keys, do not give the model's own "
            f"output (off by {worst:.2g} of the largest value). This model changes its scores in a way that cannot be "
            f"traced"
        )
    return worst


def _rows_seen(call: Call, rows: list[int]) -> NDArray[np.bool_]:
    """(texts, 1 or heads, rows, keys)."""
    texts, queries, keys = call.query.shape[0], call.query.shape[2], call.key.shape[2]
    runs = call.visible.runs(texts, queries, keys)
    if runs is None:
        return call.visible.cells(texts, queries, keys)[:, :, rows]
    start, stop = (bound[:, rows, None] for bound in runs)
    key = np.arange(keys)
    return np.asarray((start <= key) & (key < stop))[:, None]


def look_at_rows(
    site: Site, arrays: dict[str, NDArray[Any]], text: int, weights: AttentionWeights
) -> tuple[int, float, float]:
    """(rows looked at, largest distance of a row's sum from 1, largest weight on what is hidden or in the future)."""
    rows = sampled(site.queries)
    logsumexp = weights.logsumexp64
    share = np.zeros_like(logsumexp)
    if "sinks" in arrays:
        share = np.exp(np.asarray(arrays["sinks"], np.float64)[:, None] - logsumexp)
    count, worst, hidden = 0, 0.0, 0.0
    for row in rows:
        found = np.asarray(weights[:, row], np.float64)
        seen = _seen(site, arrays, text, row)
        unseen = np.broadcast_to(~seen, found.shape)
        if unseen.any():
            hidden = max(hidden, float(found[unseen].max()))
        empty = ~seen.any(axis=-1)
        sums = np.where(empty, 1 + found.sum(axis=-1), found.sum(axis=-1) + share[:, row])
        off = np.abs(sums - 1)
        worst = max(worst, float(np.where(np.isnan(off), 1.0, off).max()))  # a sum that is no number is off by 1
        count += int((~np.broadcast_to(empty, len(found))).sum())
    return count, worst, hidden


def look_at_measures(measures: SiteMeasures) -> float:
    """By how much what the keys of a head received is not what its rows gave, a row, beyond the rounding of how it is
    stored; all that measures alone can be asked. What rows gave is not more than 1 each, and less where a learned sink
    took some; traces that do not say it are only asked whether keys received more than 1 a row."""
    stored, rows = measures.to_dict()["received"], np.maximum(measures.rows, 1)
    total = np.asarray(stored, np.float64).sum(axis=-1) / rows
    if "mass" not in tuple(measures):
        off = total - 1
    else:
        mass = measures.mean("mass")
        rounding = np.finfo(stored.dtype)  # half a step of each number, or of the smallest that there is
        half = float(rounding.eps) / 2 * mass + float(rounding.smallest_subnormal) / 2 * stored.shape[-1] / rows
        off = np.maximum(mass - 1, np.abs(total - mass) - half)
    off = np.where(np.isnan(off), np.inf, off)
    return float(max(0.0, off.max())) if off.size else 0.0


def _seen(site: Site, arrays: dict[str, NDArray[Any]], text: int, row: int) -> NDArray[np.bool_]:
    """(1 or heads, keys): which keys a row may see, the future never where the model is causal."""
    key = np.arange(site.keys)
    match site.mask:
        case "full":
            seen = np.ones((1, site.keys), bool)
        case "causal":
            seen = (key <= row)[None]
        case "intervals":
            seen = ((arrays["start"][text, row] <= key) & (key < arrays["stop"][text, row]))[None]
        case "array":
            seen = np.asarray(arrays["mask"][text, :, row])
    return seen & (key <= row) if site.causal else seen
