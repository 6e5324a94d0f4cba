"""Gradients: how a loss changes with each argument of attention, from how it changes with the output.

``attention_vjp`` is the forward pass and a function that goes back. Nothing quadratic is kept between the two: scores
are recomputed from query, key and logsumexp, so memory is linear in tokens both ways.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from clearhead import launch
from clearhead.backward import run as backward
from clearhead.core_backward import parameters, summed_to
from clearhead.masks import Mask
from clearhead.plan import Plan, in_nats, plan
from clearhead.problem import check
from clearhead.scores import Score

Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True, eq=False)
class Gradients:
    """One for each argument, shaped like it and in its dtype; None where there is no such argument, or none was wanted.

    query, key, value; of the score: bias, scale, softcap, alibi, sinks; weight (of ``scores.general``); query_weight,
    key_weight, vector (of ``scores.additive``). Arguments that were broadcast get the sum over the axes concerned.
    """

    query: Floats | None = None
    key: Floats | None = None
    value: Floats | None = None
    bias: Floats | None = None
    scale: Floats | None = None
    softcap: Floats | None = None
    alibi: Floats | None = None
    sinks: Floats | None = None
    weight: Floats | None = None
    query_weight: Floats | None = None
    key_weight: Floats | None = None
    vector: Floats | None = None


NAMES = tuple(field.name for field in fields(Gradients))


class Vjp:
    """The way back from one forward pass: call it with the gradient of the output. It may be called more than once."""

    def __init__(self, planned: Plan, given: dict[str, Floats], output: Floats, logsumexp: Floats) -> None:
        self._plan, self._given, self._output, self._logsumexp = planned, given, output, logsumexp

    @property
    def logsumexp(self) -> Floats:
        """(..., heads, queries), natural log, of each row's scores."""
        problem = self._plan.problem
        rows = in_nats(self._plan, self._logsumexp).reshape(problem.extent.shape[:-1])
        return problem.as_given(rows.astype(np.float64 if problem.dtype == np.float64 else np.float32), -2)

    def __call__(
        self,
        grad_output: ArrayLike,
        grad_logsumexp: ArrayLike | None = None,
        wanted: Iterable[str] | None = None,
    ) -> Gradients:
        """Gradients of what ``wanted`` names (default: of all there is).

        grad_output : shaped like the output. grad_logsumexp : like ``logsumexp``, for losses that depend on it.
        """
        problem, given = self._plan.problem, self._given | parameters(self._plan.problem.score) | {"scale": 0.0}
        names = frozenset(given if wanted is None else wanted)
        if not names <= set(NAMES):
            raise ValueError(f"wanted names {sorted(names - set(NAMES))}: gradients are of {', '.join(NAMES)}")
        out = _shaped("grad_output", grad_output, problem.as_given(self._output, -3).shape)
        rows = problem.as_given(self._output, -3).shape[:-1]
        log = None if grad_logsumexp is None else _shaped("grad_logsumexp", grad_logsumexp, rows)
        full = {"query": problem.query, "key": problem.key, "value": problem.value}
        summed = any(array is not None and array.size != self._given[name].size for name, array in full.items())
        found = backward(self._plan, self._output, self._logsumexp, out, log, names & set(given), summed)
        shaped = {}
        for name, array in found.items():
            like = np.asarray(given[name])
            shape = (1, *like.shape) if problem.single and name in self._given else like.shape
            shaped[name] = summed_to(array, shape).reshape(like.shape).astype(like.dtype, copy=False)
        return Gradients(**shaped)


def _shaped(name: str, array: ArrayLike, shape: tuple[int, ...]) -> Floats:
    array = np.asarray(array)
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}, it must be shaped like what it is the gradient of: {shape}")
    return array


def attention_vjp(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    mask: Mask | ArrayLike | None = None,
    score: Score | None = None,
) -> tuple[Floats, Vjp]:
    """(output, vjp): attention, and the function from the output's gradient to the arguments'.

    Arguments, output and errors are those of :func:`clearhead.attention`.

    >>> import numpy as np, clearhead as ch
    >>> x = np.random.default_rng(0).standard_normal((2, 5, 8))
    >>> output, vjp = ch.attention_vjp(x, x, x, mask=ch.masks.causal())
    >>> found = vjp(np.ones_like(output))
    >>> found.value.shape, bool(found.value[0, -1, 0] < 1)
    ((2, 5, 8), True)
    """
    problem = check(query, key, value, mask, score)
    planned = plan(problem)
    output, logsumexp = launch.run(planned)
    output = output.reshape(*problem.extent.shape[:-1], output.shape[-1]).astype(problem.dtype, copy=False)
    given = {"query": np.asarray(query), "key": np.asarray(key), "value": np.asarray(value)}
    return problem.as_given(output, -3), Vjp(planned, given, output, logsumexp)
