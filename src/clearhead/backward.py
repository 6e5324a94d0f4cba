"""From a plan and the gradient of its output to gradients of its arguments: what the kernel does not do itself.

Before it, each row's share of its own output; after it, sums over the parts of the keys, and the way back through
projections (general and additive scores), which is linear in tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clearhead import launch
from clearhead.core_backward import parameters, summed_to
from clearhead.kernels import backward as kernels
from clearhead.kernels import backward_ends as ends
from clearhead.kernels import functions
from clearhead.kernels.arguments import likes, pack
from clearhead.kernels.threads import share
from clearhead.plan import Plan, address, in_nats, readable, strided
from clearhead.scores import Additive, General

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]
# Where there would be fewer items than ITEMS, a head's keys are shared out in up to PARTS parts: so many threads can
# work on one head. Each part takes memory like the queries.
PARTS, ITEMS = 4, 16
ROWS = 1 << 18  # numbers in a share of what goes before and after the kernel


def run(
    plan: Plan, output: Floats, logsumexp: Floats, grad_output: Floats, grad_logsumexp: Floats | None,
    wanted: Iterable[str], summed: bool,
) -> dict[str, Floats]:  # fmt: skip
    """What is wanted, by name, in the shapes that the Problem's arrays and the score's have: in the dtype computed in,
    or rounded to the arrays' own already where nothing is to be summed any more.

    summed : whether the caller still sums gradients over axes along which query, key or value were broadcast.
    output (*lead, heads, queries, value dim) and logsumexp (batch, heads, queries, 2) are the forward pass's.
    Memory: beside the results, at most PARTS times the queries, and the output's gradient where its rows are copied.
    """
    names = frozenset(wanted)
    with np.errstate(all="ignore"):  # numbers that are not finite go through as IEEE has them
        return _Backward(plan, output, logsumexp, grad_output, grad_logsumexp, names, summed).run()


class _Backward:
    def __init__(
        self, plan: Plan, output: Floats, logsumexp: Floats, grad_output: Floats, grad_logsumexp: Floats | None,
        wanted: frozenset[str], summed: bool,
    ) -> None:  # fmt: skip
        problem, x = plan.problem, plan.arguments
        extent, at = problem.extent, problem.compute_dtype
        self.plan, self.wanted, self.logsumexp, self.at = plan, wanted, logsumexp, at
        self.batch, self.heads, self.queries, self.keys = extent.batch, extent.heads, extent.queries, extent.keys
        self.key_heads, self.tiles = extent.heads // problem.group, -(-extent.queries // x.rows)
        turns = -(-extent.keys // kernels.TURN)
        sequences = self.batch * self.key_heads
        self.parts = max(1, min(PARTS, turns, -(-ITEMS // max(1, sequences))))
        self.items = sequences * self.parts
        self.widths = _widths(x.dim, x.value_dim, x.micro, x.lanes)
        self.grad_output, own = _opened(grad_output, output, self.widths[3], problem.dtype, at)
        if grad_logsumexp is not None:
            own -= np.asarray(grad_logsumexp, at).reshape(-1)
        self.own = own
        # Whether gradients of queries, keys and values are done when the kernel is: nothing is left to multiply or sum.
        self.direct = not isinstance(problem.score.base, Additive | General) and "scale" not in wanted
        self.stored = at if summed or not self.direct else launch.stored_dtype(plan)

    def run(self) -> dict[str, Floats]:
        plan, x, wanted, at = self.plan, self.plan.arguments, self.wanted, self.at
        score, projected = plan.problem.score, isinstance(self.plan.problem.score.base, Additive)
        rows = self.batch * self.key_heads
        by_query = {"query", "scale", "weight", "query_weight"} & wanted or projected
        by_key = {"key", "key_weight"} & wanted or projected
        key_width = self.widths[0]
        of_query = np.zeros((self.parts if by_query else 0, self.batch, self.heads, self.tiles, key_width, x.rows), at)
        of_key = np.empty((rows if by_key else 0, self.keys, x.dim), self.stored)
        of_value = np.empty((rows if "value" in wanted else 0, self.keys, x.value_dim), self.stored)
        of_vector = np.zeros((self.items, x.dim) if projected else (0, 0))
        sums = np.zeros((self.items, 1 + plan.problem.group))
        bias = _Bias(plan, self.parts) if "bias" in wanted else None
        slope = None
        if score.function is not None and wanted - {"value", "sinks"}:
            slope = functions.slope(score.function, score.derivative, at)
        wanted_at = [address(array) if array.size else 0 for array in (of_query, of_key, of_value)]
        bias_at = bias.place if bias else (0,) * 6
        numbers = [
            self.batch, self.parts, self.tiles, *self.widths, address(self.grad_output), address(self.own), *wanted_at,
            *bias_at, slope.address if slope else 0, address(sums), address(of_vector) if of_vector.size else 0,
        ]  # fmt: skip
        for items in _rounds(plan, self.parts, bias is not None):
            self._go_through(np.array(numbers, np.int64), bias.like if bias else at.type(0), items)
        del slope
        found: dict[str, Floats] = {}
        if by_query:
            scale, dtype = (plan.problem.scale, self.stored) if self.direct else (1.0, at)
            turned = of_query.reshape(self.parts, self.batch * self.heads, self.tiles, key_width, x.rows)
            found["query"] = _closed(turned, self.batch * self.heads, self.queries, x.dim, scale, dtype)
            found["query"] = found["query"].reshape(self.batch, self.heads, self.queries, x.dim)
        if by_key:
            found["key"] = of_key.reshape(self.batch, self.key_heads, self.keys, x.dim)
        if "value" in wanted:
            found["value"] = of_value
        if bias is not None:
            found["bias"] = bias.total()
        found |= self._of_rows(sums)
        self._through_match(found, of_vector)
        return {name: self._shaped(name, array) for name, array in found.items() if name in wanted}

    def _go_through(self, numbers: Ints, bias_like: Any, items: Ints) -> None:
        plan, x = self.plan, self.plan.arguments
        (logs, _kept) = strided(self.logsumexp)
        x = x._replace(logsumexp=logs)
        packed, kinds = pack(x), likes(x, self.at)
        needed = (self.at, x.dim, x.value_dim, plan.depth)
        numbers_each = kernels.desk_sizes(kernels.Back(*numbers.tolist()), x.dim, x.rows)
        sizes = tuple(count * self.at.itemsize for count in numbers_each)
        like = readable(np.zeros(1, self.stored))[0]

        def some(first: int, last: int) -> Iterator[None]:
            room, places = launch.room_for(needed), launch.desk_for(sizes, (x.dim, x.value_dim))
            turn, more = 0, True
            while more:
                more = kernels.backward(
                    packed, kinds, room.places, numbers, bias_like, like, places, items, first, last, turn
                )
                turn += 1
                launch.check_functions(room)
                yield

        one = self.queries * plan.problem.group * max(1, self.keys // self.parts) * (x.dim + x.value_dim + 8)
        share(some, len(items), max(1, len(items)) if one * len(items) <= launch.GRAIN else 1)

    def _of_rows(self, sums: NDArray[np.float64]) -> dict[str, Floats]:
        """Gradients of numbers that are one for a head, or for all: of what is wanted."""
        plan, found = self.plan, dict[str, Floats]()
        score = plan.problem.score
        if "softcap" in self.wanted:
            found["softcap"] = np.asarray(sums[:, kernels.SOFTCAP].sum())
        if "alibi" in self.wanted:
            of_heads = sums[:, kernels.ALIBI :].reshape(self.batch, self.key_heads, self.parts, plan.problem.group)
            found["alibi"] = of_heads.sum(axis=(0, 2)).reshape(-1)
        if "sinks" in self.wanted:
            assert score.sinks is not None
            logs = in_nats(plan, self.logsumexp).reshape(self.batch, self.heads, self.queries)
            sink = np.broadcast_to(np.asarray(score.sinks, np.float64), self.heads)[None, :, None]
            shares = np.where(np.isneginf(logs), 0, np.exp(sink - logs)) * -self.own.reshape(logs.shape)
            found["sinks"] = shares.sum(axis=(0, 2))
        return found

    def _through_match(self, found: dict[str, Floats], of_vector: NDArray[np.float64]) -> None:
        """From gradients of what was matched (without their scale) to those of the arguments."""
        problem, at = self.plan.problem, self.at
        base, query = problem.score.base, problem.query
        whole = (self.batch, self.heads, self.queries, query.shape[-1])
        if isinstance(base, Additive):
            asked, offered = found["query"], found["key"]
            first, second, vector = (array.astype(at) for array in (base.query_weight, base.key_weight, base.vector))
            direct = of_vector.sum(axis=0)
            found["vector"] = direct * problem.scale
            found["scale"] = np.asarray(np.dot(direct, vector.astype(np.float64)))
            if "query_weight" in self.wanted:
                found["query_weight"] = np.einsum(
                    "bhid,bhie->de", query.astype(at).reshape(whole), asked, optimize=True
                )
            if "key_weight" in self.wanted:
                keys = problem.key.astype(at).reshape(self.batch, self.key_heads, self.keys, problem.key.shape[-1])
                found["key_weight"] = np.einsum("bhid,bhie->de", keys, offered, optimize=True)
            found["query"], found["key"] = asked @ first.T, offered @ second.T
            return
        if "query" not in found or self.direct:
            return
        raw = found["query"]
        if isinstance(base, General):
            weight = base.weight.astype(at)
            if "weight" in self.wanted:
                sums = "bhid,bhie->de" if weight.ndim == 2 else "bhid,bhie->hde"
                seen = np.where((raw == 0).all(axis=-1, keepdims=True), 0, query.astype(at).reshape(whole))
                found["weight"] = np.einsum(sums, seen, raw, optimize=True) * at.type(problem.scale)
            raw = raw @ weight.swapaxes(-1, -2)
        if "scale" in self.wanted:
            pairs = zip(np.ndindex(raw.shape[:2]), query.reshape(self.batch * self.heads, *whole[2:]), strict=True)
            total = sum(np.sum(np.where(raw[n] == 0, 0, raw[n] * own.astype(at)), dtype=np.float64) for n, own in pairs)
            found["scale"] = np.asarray(total)
        if "query" in self.wanted:
            found["query"] = np.multiply(raw, at.type(problem.scale))

    def _shaped(self, name: str, array: Floats) -> Floats:
        problem = self.plan.problem
        given = {"query": problem.query, "key": problem.key, "value": problem.value}.get(name)
        if given is not None:  # where there are no query heads, nothing comes back to the key heads that there are
            return array.reshape(given.shape) if array.size == given.size else np.zeros(given.shape, self.at)
        if name in ("alibi", "sinks"):
            return summed_to(array, np.shape(parameters(problem.score)[name]))
        return array


class _Bias:
    """Where the gradient of a bias is summed: an array like the bias itself, of each part of the keys where it is
    broadcast along them."""

    def __init__(self, plan: Plan, parts: int) -> None:
        extent, bias = plan.problem.extent, plan.problem.score.bias
        assert bias is not None
        shape = (1,) * (len(extent.shape) - bias.ndim) + bias.shape
        small = 1 in (shape[-1], shape[-2])  # then it is linear in tokens, and many numbers are summed
        self._shape, apart = bias.shape, parts if shape[-1] == 1 else 1
        self._array = np.zeros((apart, *shape), np.float64 if small else plan.problem.compute_dtype)
        self.like = self._array.dtype.type(0)
        place, offsets = strided(np.broadcast_to(self._array[0], extent.shape))
        self._kept = offsets
        step = self._array[0].size if apart > 1 else 0
        self.place = (place.address, place.offsets, step, *place.steps)

    def total(self) -> Floats:
        array = self._array.sum(axis=0) if len(self._array) > 1 else self._array[0]
        return np.asarray(array.reshape(self._shape))


def _rounds(plan: Plan, parts: int, with_bias: bool) -> Iterator[Ints]:
    """Items in rounds, one after the other: in a round no two write to the same place of a bias's gradient.

    The first part of the keys goes first: under a causal mask it is the most work.
    """
    problem = plan.problem
    lead, key_heads = problem.extent.lead, problem.extent.heads // problem.group
    places = np.arange(problem.extent.batch * key_heads).reshape(*lead, key_heads)
    shared: list[int] = []
    bias = problem.score.bias
    if with_bias and bias is not None:
        shape = ((1,) * (len(problem.extent.shape) - bias.ndim) + bias.shape)[:-2]
        shared = [axis for axis, size in enumerate(shape) if size == 1]
    apart = np.moveaxis(places, shared, range(len(shared)))
    for place in np.ndindex(*apart.shape[: len(shared)]):
        yield (apart[place].reshape(1, -1) * parts + np.arange(parts)[:, None]).reshape(-1)


def _widths(dim: int, value_dim: int, micro: int, lanes: int) -> tuple[int, int, int, int]:
    """Of rows of keys and values, whole micro-tiles, and of queries and output gradients, whole vectors."""

    def whole(size: int, unit: int) -> int:
        return -(-max(size, 1) // unit) * unit

    return whole(dim, micro), whole(value_dim, micro), whole(dim, lanes), whole(value_dim, lanes)


def _opened(grad_output: Floats, output: Floats, width: int, given: np.dtype[Any],
            at: np.dtype[Any]) -> tuple[Floats, Floats]:  # fmt: skip
    """(the output's gradient, (rows, width) in the dtype computed in, made up with 0; of each row its product with the
    output)."""
    if grad_output.dtype not in (given, at):
        grad_output = grad_output.astype(at)
    rows, dim = math.prod(output.shape[:-1]), output.shape[-1]
    flat, outputs = (np.ascontiguousarray(array).reshape(-1) for array in (grad_output, output))
    as_it_is = width == dim and flat.dtype == at
    made = np.empty(0 if as_it_is else rows * width, at)
    own = np.empty(rows, at)
    given_bits, output_bits = readable(flat), readable(outputs)

    def some(first: int, last: int) -> None:
        ends.open_rows(given_bits, output_bits, dim, width, made, own, first, last)

    share(some, rows, max(1, ROWS // max(1, dim)))
    return (flat if as_it_is else made).reshape(rows, width), own


def _closed(turned: Floats, heads: int, queries: int, dim: int, scale: float, dtype: np.dtype[Any]) -> Floats:
    """(heads, queries, dim): parts of gradients of queries (parts, heads, tiles, width, rows), added up and scaled."""
    parts, _, tiles, width, rows = turned.shape
    out = np.empty(heads * queries * dim, dtype)
    flat, bits = turned.reshape(-1), readable(out)

    def some(first: int, last: int) -> None:
        ends.close_tiles(flat, parts, tiles, width, rows, queries, dim, scale, bits, first, last)

    share(some, heads * tiles, max(1, ROWS // max(1, dim * rows)))
    return out.reshape(heads, queries, dim)
