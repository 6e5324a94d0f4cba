"""Measures of queries and keys that stay on their device: torch's operations, on blocks of rows.

What :mod:`clearhead.trace.measured` gives, by the same definitions, for traces that keep measures only: nothing but
the measures leaves the device. A block holds so many rows that memory stays linear in the number of tokens; it runs
on any device, and the tests hold it against the kernels on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from clearhead.trace.format import Site
from clearhead.trace.measured import IN_ORDER, MAP
from clearhead.trace.visible import Visible

Arrays = dict[str, NDArray[Any]]
CELLS = 1 << 24  # scores held at once: 64 MB of float32


def measure_there(
    site: Site, query: Any, key: Any, visible: Visible, bias: NDArray[Any] | None, sinks: Any
) -> tuple[Arrays, tuple[int, float, float]]:
    """The measures of one text, and (rows looked at, largest distance of a row's sum from 1, largest weight ahead).

    query : (heads, queries, dim) and key : (key heads, keys, dim), tensors; bias : (1 or heads, queries, keys) or None;
    sinks : (heads,) tensor or None."""
    import torch

    device, heads, keys = query.device, site.heads, site.keys
    key = key.float()
    in_order = site.kind in IN_ORDER and site.queries == keys
    place = torch.arange(keys, device=device)
    onto = torch.zeros(keys, min(MAP, keys), device=device)  # which column of the map each key falls into
    onto[place, _moved(_blocks(keys), device)] = 1
    map_rows = _moved(_blocks(site.queries), device)
    pooled = torch.zeros(heads, min(MAP, site.queries), onto.shape[1], device=device)
    received, seen_by = torch.zeros(heads, keys, device=device), torch.zeros(heads, keys, device=device)
    columns: dict[str, list[Any]] = {}
    row_sum = ahead = 0.0
    step = max(1, CELLS // max(1, heads * keys))
    for first in range(0, site.queries, step):
        rows = torch.arange(first, min(first + step, site.queries), device=device)
        added = None if bias is None else _moved(bias[:, first : first + step], device)
        sees = _sees(visible, site, first, len(rows), device)
        score = _scores(site, query[:, first : first + step].float(), key, added).masked_fill(~sees, -torch.inf)
        total = score if sinks is None else torch.cat([score, _sink_scores(sinks, len(rows))], dim=-1)
        logsumexp = torch.logsumexp(total, dim=-1, keepdim=True)
        weights = (score - logsumexp.clamp(min=torch.finfo(score.dtype).min)).exp()
        mass = weights.sum(dim=-1)
        share = 0 if sinks is None else (sinks.float()[:, None] - logsumexp[..., 0]).exp()
        alive = sees.any(dim=-1).expand(heads, -1)
        off = (mass + share - 1).abs().nan_to_num(nan=1.0)  # a sum that is no number is off by 1
        row_sum = max(row_sum, float(torch.where(alive, off, 0).max()))
        if site.causal:
            ahead = max(ahead, float(weights.masked_fill(place <= rows[:, None], 0).max()))
        logarithm = torch.where(weights > 0, score - logsumexp, 0)
        found = {
            "alive": alive,
            "entropy": -(weights * logarithm).sum(dim=-1),
            "largest": weights.amax(dim=-1),
            "sink": weights[..., 0],
            "mass": mass,
        }
        if in_order:
            back = (rows[:, None] - place).float()
            farthest = torch.maximum(rows, keys - 1 - rows).clamp(min=1)
            found["distance"] = (weights * back).sum(dim=-1)
            found["diagonality"] = 1 - (weights * back.abs()).sum(dim=-1) / farthest
            found["self"] = weights.gather(-1, rows[None, :, None].expand(heads, -1, 1))[..., 0]
            found["previous"] = weights.gather(-1, (rows - 1).clamp(min=0)[None, :, None].expand(heads, -1, 1))[..., 0]
        for name, values in found.items():
            columns.setdefault(name, []).append(values.cpu())
        received += weights.sum(dim=1)
        seen_by += sees.expand(heads, -1, -1).sum(dim=1)
        pooled.index_add_(1, map_rows[first : first + step], weights @ onto)
    whole = {name: torch.cat(parts, dim=1).numpy() for name, parts in columns.items()}
    values = _means(whole, in_order)
    seen = (seen_by > 0).cpu().numpy()
    got = received.cpu().numpy()
    values["coverage"] = (np.minimum(got, 1) * seen).sum(axis=-1, dtype=np.float64) / np.maximum(seen.sum(axis=-1), 1)
    values["received"] = got
    values["rows"] = whole["alive"].sum(axis=-1).astype(np.int64)
    area = np.outer(np.bincount(_blocks(site.queries)), np.bincount(_blocks(keys)))
    values["pooled"] = (pooled.cpu().numpy() / area).astype(np.float32)
    return values, (int(values["rows"].sum()), row_sum, ahead)


def _scores(site: Site, query: Any, key: Any, added: Any) -> Any:
    """(heads, rows, keys)."""
    import torch

    grouped = query.reshape(site.key_heads, -1, site.dim)
    score = (grouped @ key.transpose(1, 2)).reshape(site.heads, -1, site.keys) * site.scale
    if site.softcap is not None:
        score = site.softcap * torch.tanh(score / site.softcap)
    return score if added is None else score + added


def _sink_scores(sinks: Any, rows: int) -> Any:
    return sinks.float()[:, None, None].expand(-1, rows, 1)


def _sees(visible: Visible, site: Site, first: int, count: int, device: Any) -> Any:
    """(1 or heads, rows, keys) booleans, on the device."""
    import torch

    key = torch.arange(site.keys, device=device)
    rows = torch.arange(first, first + count, device=device)[:, None]
    if visible.array is not None:
        return _moved(visible.array[:, first : first + count], device)
    if visible.start is not None and visible.stop is not None:
        start, stop = (_moved(bound[first : first + count, None], device) for bound in (visible.start, visible.stop))
        return ((start <= key) & (key < stop))[None]
    return (key <= rows)[None] if visible.kind == "causal" else (key < site.keys).expand(1, count, -1)


def _moved(values: NDArray[Any], device: Any) -> Any:
    import torch

    return torch.from_numpy(np.ascontiguousarray(values)).to(device)


def _blocks(count: int) -> NDArray[np.int64]:
    """Which block of the map each row or column falls into: block b begins at ``b * count // blocks``."""
    size = min(MAP, count)
    begins = np.arange(size) * count // size
    return np.searchsorted(begins, np.arange(count), side="right") - 1


def _means(whole: Arrays, in_order: bool) -> Arrays:
    alive = whole["alive"]
    position = np.arange(alive.shape[1])

    def mean(values: NDArray[Any], rows: NDArray[np.bool_]) -> NDArray[np.float64]:
        count = rows.sum(axis=-1)
        return np.asarray(np.where(rows, values, 0).sum(axis=-1, dtype=np.float64) / np.maximum(count, 1))

    names = [name for name in whole if name not in ("alive", "previous")]
    found: Arrays = {name: mean(whole[name], alive) for name in names}
    if in_order:
        found["previous"] = mean(whole["previous"], alive & (position > 0))
        found["far"] = mean(whole["distance"] - whole["sink"] * position, alive)
    return found
