"""A call by torch's own operations: slower, on any device, differentiable any number of times and in any mode.

This is the road of double backward, of forward mode and torch.func, of dropout, and of tensors that are not on the
CPU. ``attend`` keeps matrices where gradients are wanted; ``forward`` and ``gradients`` go through blocks of rows
and compute each again on the way back, in memory linear in tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.algebra import Cells
from clearhead.problem import Problem
from clearhead.torch.arrays import stand_in
from clearhead.torch.call import NAMES, Fixed, Tensors, named, problem_of
from clearhead.torch.dropping import kept
from clearhead.torch.products import match, mix

CELLS = 1 << 20  # scores held at once by blocks of rows: some 50 MB of matrices that make them


def forward(fixed: Fixed, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """(output, logsumexp), block by block."""
    problem = checked(fixed, tensors)
    parts = [_rows(fixed, problem, named(tensors), block) for block in _blocks(problem)]
    output, logsumexp = (
        torch.cat(part, dim=axis) for part, axis in zip(zip(*parts, strict=True), (-2, -1), strict=True)
    )
    return output, logsumexp


def gradients(fixed: Fixed, tensors: Tensors, grad_output: Tensor | None, grad_logsumexp: Tensor | None,
              wanted: Sequence[str]) -> list[Tensor]:  # fmt: skip
    """Of what is wanted, block by block; nothing flows through them."""
    problem = checked(fixed, tensors)
    given = named(tensors)
    found = {name: torch.zeros_like(given[name], memory_format=torch.contiguous_format) for name in wanted}
    wide = {name: total.to(_at(problem)) if total.itemsize == 2 else total for name, total in found.items()}
    for block in _blocks(problem):
        own = given | {"query": given["query"][..., block.start : block.stop, :]}
        own = {name: tensor.detach().requires_grad_(name in found) for name, tensor in own.items()}
        with torch.enable_grad():
            made = _rows(fixed, problem, own, block, sliced=True)
        grads = _sliced(grad_output, block, -2), _sliced(grad_logsumexp, block, -1)
        pairs = [(m, g) for m, g in zip(made, grads, strict=True) if g is not None and m.requires_grad]
        if not pairs:
            continue
        outputs, into = zip(*pairs, strict=True)
        parts = torch.autograd.grad(outputs, [own[name] for name in wanted], into, materialize_grads=True)
        for name, part in zip(wanted, parts, strict=True):
            (wide[name][..., block.start : block.stop, :] if name == "query" else wide[name]).add_(part)
    return [wide[name].to(given[name].dtype) for name in wanted]


def differentiable_gradients(fixed: Fixed, tensors: Tensors, grad_output: Tensor | None,
                             grad_logsumexp: Tensor | None, wanted: Sequence[str]) -> list[Tensor]:  # fmt: skip
    """The same with whole matrices, through which further gradients flow."""
    # One tensor may have been made from another: gradients are to stop at each.
    own = {name: tensor.view_as(tensor) for name, tensor in named(tensors).items()}
    made = attend(fixed, [own.get(name) for name in NAMES])
    pairs = [(m, g) for m, g in zip(made, (grad_output, grad_logsumexp), strict=True) if g is not None]
    outputs, into = zip(*pairs, strict=True)
    inputs = [own[name] for name in wanted]
    return list(torch.autograd.grad(outputs, inputs, into, create_graph=True, materialize_grads=True))


def attend(fixed: Fixed, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """(output, logsumexp), all rows at once."""
    problem = checked(fixed, tensors)
    return _rows(fixed, problem, named(tensors), range(problem.extent.queries))


def checked(fixed: Fixed, tensors: Tensors) -> Problem:
    """The Problem of these tensors' sizes: none of their numbers is looked at."""
    return problem_of(fixed, {name: stand_in(tensor) for name, tensor in named(tensors).items()}, read=False)


def _blocks(problem: Problem) -> list[range]:
    extent = problem.extent
    hidden = problem.score.base.vector.size if hasattr(problem.score.base, "vector") else 1
    step = max(1, CELLS // max(1, extent.batch * extent.heads * extent.keys * max(1, hidden)))
    return [range(n, min(n + step, extent.queries)) for n in range(0, extent.queries, step)] or [range(0)]


def _sliced(gradient: Tensor | None, block: range, axis: int) -> Tensor | None:
    return None if gradient is None else gradient.narrow(axis, block.start, len(block))


def _at(problem: Problem) -> torch.dtype:
    return torch.float64 if problem.compute_dtype == np.float64 else torch.float32


def _rows(fixed: Fixed, problem: Problem, given: dict[str, Tensor], block: range,
          sliced: bool = False) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(output, logsumexp) of some rows; ``sliced``: query holds these alone."""
    extent, at = problem.extent, _at(problem)
    query, key, value = (_laid_out(given[name], problem, at) for name in ("query", "key", "value"))
    if not sliced:
        query = query[..., block.start : block.stop, :]
    bias = _bias(problem, given, block, at)
    seen = _seen(fixed, problem, given, block, query.device)
    if bias is not None:
        seen = seen & ~bias.isneginf()
    score = _modified(fixed, problem, given, _matched(given, query, key, seen), bias, block)
    visible = seen & ~score.isneginf()
    score = torch.where(visible, score, -torch.inf)
    sink = None if "sinks" not in given else _per_head(given["sinks"], problem, at)[..., 0]
    top = score.detach().amax(dim=-1) if extent.keys else score.new_full(score.shape[:-1], -torch.inf)
    if sink is not None:
        top = torch.maximum(top, sink.detach())
    base = torch.where(top.isneginf(), 0, top)
    share = (score - base[..., None]).exp()
    total = share.sum(dim=-1)
    if sink is not None:
        total = total + (sink - base).exp()
    empty = total == 0
    safe = torch.where(empty, 1, total)
    weights = share / safe[..., None]
    if fixed.dropout:
        stay = kept(given["seed"], fixed.dropout, extent.batch, extent.heads, block, extent.keys)
        stay = stay.reshape(weights.shape) if weights.numel() else stay.new_zeros(weights.shape)
        weights = torch.where(stay, weights / (1 - fixed.dropout), 0) if fixed.dropout < 1 else weights * 0
    output = mix(weights, value, visible).to(given["query"].dtype)
    logsumexp = torch.where(empty, -torch.inf, base + safe.log())
    return (output[0], logsumexp[0]) if problem.single else (output, logsumexp)


def _laid_out(tensor: Tensor, problem: Problem, at: torch.dtype) -> Tensor:
    """(*lead, heads, tokens, dim) in the dtype computed in: keys and values repeated for each head of their group."""
    extent = problem.extent
    tensor = (tensor[None] if problem.single else tensor).to(at)
    tensor = tensor.expand(*extent.lead, *tensor.shape[-3:])
    group = extent.heads // max(1, tensor.shape[-3])
    return tensor if group <= 1 else tensor.repeat_interleave(group, dim=-3)


def _seen(fixed: Fixed, problem: Problem, given: dict[str, Tensor], block: range, device: torch.device) -> Tensor:
    """(*lead, heads, rows, keys) booleans: what the mask shows, with axes of 1 where it is the same for all."""
    extent = problem.extent
    seen = torch.ones((*(1 for _ in extent.lead), 1, len(block), extent.keys), dtype=torch.bool, device=device)
    if "allowed" in given:
        seen = seen & given["allowed"].expand(*extent.shape)[..., block.start : block.stop, :]
    if fixed.mask is None:
        return seen
    batch, head = np.arange(extent.batch)[:, None, None, None], np.arange(extent.heads)[:, None, None]
    cells = Cells(batch, head, np.arange(block.start, block.stop)[:, None], np.arange(extent.keys))
    found = np.broadcast_to(fixed.mask.visible(cells, extent), (extent.batch, extent.heads, len(block), extent.keys))
    shape = (*extent.lead, *found.shape[1:])
    return seen & torch.from_numpy(np.array(found).reshape(shape)).to(device)


def _bias(problem: Problem, given: dict[str, Tensor], block: range, at: torch.dtype) -> Tensor | None:
    if "bias" not in given:
        return None
    bias = given["bias"].expand(*problem.extent.shape)[..., block.start : block.stop, :]
    if bias.dtype == torch.float64 != at:  # a finite number stays finite
        most = torch.finfo(at).max
        bias = torch.where(bias.isfinite(), bias.clamp(-most, most), bias)
    return bias.to(at)


def _per_head(values: Tensor, problem: Problem, at: torch.dtype) -> Tensor:
    """(heads, 1, 1)"""
    return values.to(at).expand(problem.extent.heads)[:, None, None]


def _matched(given: dict[str, Tensor], query: Tensor, key: Tensor, seen: Tensor) -> Tensor:
    """The base score: dot, general or additive. 0 where hidden."""
    if "weight" in given:
        query = torch.where(seen.any(dim=-1, keepdim=True), query, 0)
        return match(query @ given["weight"].to(query.dtype), key, seen)
    if "vector" not in given:
        return match(query, key, seen)
    query = torch.where(seen.any(dim=-1, keepdim=True), query, 0)
    key = torch.where(seen.any(dim=-2).unsqueeze(-1), key, 0)
    asked, offered = query @ given["query_weight"].to(query.dtype), key @ given["key_weight"].to(query.dtype)
    summed = asked[..., :, None, :] + offered[..., None, :, :]
    return torch.tanh(torch.where(seen[..., None], summed, 0)) @ given["vector"].to(query.dtype)


def _modified(fixed: Fixed, problem: Problem, given: dict[str, Tensor], matched: Tensor, bias: Tensor | None,
              block: range) -> Tensor:  # fmt: skip
    """scale, softcap, bias, ALiBi, and the user's function: in this order."""
    extent, at = problem.extent, matched.dtype
    scale = given["scale"].to(at).reshape(()) if "scale" in given else problem.scale
    score = matched * scale
    softcap = given["softcap"].to(at).reshape(()) if "softcap" in given else fixed.softcap
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    if bias is not None:
        score = score + bias
    row = torch.arange(block.start, block.stop, device=score.device)[:, None]
    key = torch.arange(extent.keys, device=score.device)
    if "alibi" in given:
        distance = (row + extent.offset(fixed.align, "alibi") - key).abs().to(at)
        score = score - _per_head(given["alibi"], problem, at) * distance
    if fixed.function is not None and score.numel():
        batch = torch.arange(extent.batch, device=score.device).reshape(*extent.lead, 1, 1, 1)
        head = torch.arange(extent.heads, device=score.device)[:, None, None]
        score = _by_function(fixed.function, score, batch, head, row, key)
    return score


def _by_function(function: Any, score: Tensor, *index: Tensor) -> Tensor:
    """The user's function on tensors: plain arithmetic takes them as it takes numbers."""
    # Twice, so that nothing is a single number: one could be turned into Python's, and its gradient be lost.
    cells = torch.broadcast_tensors(score, *index)
    try:
        found = getattr(function, "py_func", function)(*(torch.stack([part, part]) for part in cells))
        return torch.broadcast_to(torch.as_tensor(found).to(score.dtype), (2, *score.shape))[0]
    except Exception as error:
        raise NotImplementedError(
            f"score function: on this road (double backward, forward mode, torch.func, dropout, other devices) it is "
            f"called with tensors instead of numbers, and failed: {error}. Write it in arithmetic that both "
            f"understand, without if, and/or and the math module"
        ) from error
