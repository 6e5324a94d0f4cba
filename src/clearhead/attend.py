"""The entry points: check what was asked, plan it, run it.

``attention`` gives the output, ``scaled_dot_product_attention`` also the weights, ``attention_weights`` the weights
alone, ``attention_state`` what is needed to merge with other keys. All take the same masks and scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from clearhead import launch, measuring
from clearhead.again import recall
from clearhead.keyvalue import KeyValueCache
from clearhead.masks import Mask
from clearhead.measures import Asked, Measures, asked_for, find, gather
from clearhead.paged import PagedKeyValues
from clearhead.plan import Plan, in_nats, plan, strided, without_value
from clearhead.problem import Problem, check
from clearhead.scores import Score
from clearhead.state import State
from clearhead.weights import AttentionWeights

Floats = NDArray[np.floating[Any]]


@overload
def attention(
    query: ArrayLike,
    key: ArrayLike | KeyValueCache | PagedKeyValues,
    value: ArrayLike | None = None,
    *,
    mask: Mask | ArrayLike | None = None,
    score: Score | None = None,
    measure: None = None,
) -> Floats: ...


@overload
def attention(
    query: ArrayLike,
    key: ArrayLike | KeyValueCache | PagedKeyValues,
    value: ArrayLike | None = None,
    *,
    mask: Mask | ArrayLike | None = None,
    score: Score | None = None,
    measure: str | Sequence[str] | Asked,
) -> tuple[Floats, Measures]: ...


def attention(
    query: ArrayLike,
    key: ArrayLike | KeyValueCache | PagedKeyValues,
    value: ArrayLike | None = None,
    *,
    mask: Mask | ArrayLike | None = None,
    score: Score | None = None,
    measure: str | Sequence[str] | Asked | None = None,
) -> Floats | tuple[Floats, Measures]:
    """softmax(scale * q.k) v for every query, exactly, in memory linear in length.

    Parameters
    ----------
    query : array (..., heads, queries, dim) or (queries, dim)
        float16, bfloat16 (ml_dtypes), float32 or float64.
    key : array (..., key heads, keys, dim) or (keys, dim)
        heads must be a multiple of key heads: query head h reads key head ``h // (heads // key heads)``.
        Or a KeyValueCache or PagedKeyValues, which hold the values too.
    value : array (..., key heads, keys, value dim) or (keys, value dim)
    mask : Mask or array, optional
        Who may look at whom: see ``clearhead.masks``. A boolean array, True where attending is allowed; an array of
        numbers is added to the scores. Broadcast over (..., heads, queries, keys).
    score : Score, optional
        How a query matches a key: see ``clearhead.scores``. Default: the dot product over sqrt(dim).
    measure : name, names or measures.ask(...), optional
        What is to be said of the weights, see ``clearhead.measures``. Measures of rows ride along in the pass (all but
        diagonality), and cost less than a tenth of it; with others in the same call, all are found in a pass of their
        own, as by ``AttentionWeights.measure``. The same holds for what other kernels compute: few queries, and
        bfloat16 on a matrix unit.

    Returns
    -------
    array (..., heads, queries, value dim) in the inputs' dtype. A row that may attend to nothing is 0.
    With ``measure`` two: that array, to the same bit, and the Measures.

    Raises
    ------
    TypeError
        If an input is not floating point, or a user's function cannot be compiled.
    ValueError
        If shapes, head counts, mask or score do not fit each other.

    Notes
    -----
    4 * heads * queries * keys * dim floating-point operations, less what masks let it skip; beyond inputs and output
    16 bytes a row and some 0.3 MB a thread. 16-bit inputs are computed in float32, float64 throughout in float64. The
    result does not depend on the number of threads. Leading axes broadcast. Inputs of any strides are read where
    they lie (of bfloat16 on a matrix unit, rows whose numbers do not lie side by side are copied first).

    Values are summed before they are divided by the weights' total, and log2(e) may be in the query: numbers within a
    factor ``keys`` (values) or 1.45 (scores) of the largest of the type computed in overflow to infinity.

    References
    ----------
    Vaswani et al. 2017, *Attention Is All You Need*, equation 1: Q, K, V, d_k are query, key, value, dim.

    Examples
    --------
    >>> import numpy as np, clearhead as ch
    >>> x = np.random.default_rng(0).standard_normal((2, 5, 8), dtype=np.float32)
    >>> ch.attention(x, x, x, mask=ch.masks.causal()).shape
    (2, 5, 8)
    >>> output, found = ch.attention(x, x, x, mask=ch.masks.causal(), measure=("entropy", "sink"))
    >>> found.entropy.shape, found.sink[:, 0].tolist()
    ((2, 5), [1.0, 1.0])
    """
    asked = asked_for(measure)
    if isinstance(key, KeyValueCache | PagedKeyValues):
        if value is not None:
            raise ValueError(f"value was given beside a {type(key).__name__}, which holds the values: leave it out")
        if asked is None:
            return _run_cached(query, key, mask, score)
        return _run_measured(plan(_within(check(query, key.key, key.value, mask, score), key)), asked)
    if value is None:
        raise ValueError("value is missing: attention(query, key, value), or attention(query, cache)")
    if asked is not None:
        return _run_measured(plan(check(query, key, value, mask, score)), asked)
    known = recall(query, key, value, mask, score)
    if known is not None:
        ready, arrays = known
        return _as_given(ready.plan.problem, ready.run(*arrays)[0])
    return _run(plan(check(query, key, value, mask, score)))[0]


def scaled_dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    mask: Mask | ArrayLike | None = None,
    score: Score | None = None,
) -> tuple[Floats, AttentionWeights]:
    """(output, weights): as the tutorial's function of this name, without its memory.

    Arguments, output and errors are those of :func:`attention`. ``weights`` is shaped like the matrix
    (..., heads, queries, keys) and acts like it, but is computed where it is looked at.

    >>> import numpy as np, clearhead as ch
    >>> Q = np.array([[1.0, 0.0]]); K = np.array([[1.0, 0.0], [0.0, 1.0]]); V = np.array([[1.0], [3.0]])
    >>> output, weights = ch.scaled_dot_product_attention(Q, K, V)
    >>> np.round(output, 3).tolist(), np.round(weights, 3).tolist()
    ([[1.66]], [[0.67, 0.33]])
    """
    known = recall(query, key, value, mask, score)
    if known is not None:
        ready, arrays = known
        output, logsumexp = ready.run(*arrays)
        return _as_given(ready.plan.problem, output), _weights(ready.plan, logsumexp, arrays)
    planned = plan(check(query, key, value, mask, score))
    output, logsumexp = _run(planned)
    return output, _weights(planned, logsumexp)


def _weights(planned: Plan, logsumexp: Floats, arrays: tuple[Floats, ...] = ()) -> AttentionWeights:
    """Weights recompute scores as the tile kernels do; the streaming kernel's sums are rounded otherwise."""
    return AttentionWeights(planned, None if launch.can_stream(planned) else logsumexp, arrays)


def attention_weights(
    query: ArrayLike,
    key: ArrayLike,
    *,
    mask: Mask | ArrayLike | None = None,
    score: Score | None = None,
    logsumexp: ArrayLike | None = None,
) -> AttentionWeights:
    """The weights alone, of shape (..., heads, queries, keys), computed where looked at.

    Costs one pass over the scores for ``logsumexp`` (..., heads, queries), natural log; none if it is given, as
    ``weights.logsumexp64`` was.

    >>> import numpy as np, clearhead as ch
    >>> x = np.zeros((4, 2))
    >>> ch.attention_weights(x, x, mask=ch.masks.causal())[3].tolist()
    [0.25, 0.25, 0.25, 0.25]
    """
    problem = check(query, key, None, mask, score)
    planned = plan(problem)
    if logsumexp is None:
        return AttentionWeights(planned)
    given = np.asarray(logsumexp, dtype=np.float64)
    expected = problem.as_given(np.empty(problem.extent.shape[:-1]), -2).shape
    if given.shape != expected:
        raise ValueError(f"logsumexp has shape {given.shape}, these weights have one per row: {expected}")
    extent = problem.extent
    whole = given.reshape(extent.batch, extent.heads, extent.queries)
    return AttentionWeights(planned, np.stack([whole / planned.arguments.unit, np.zeros_like(whole)], axis=-1))


def attention_state(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    mask: Mask | ArrayLike | None = None,
    score: Score | None = None,
) -> State:
    """(output, logsumexp) over these keys, to be merged with attention over others by :func:`clearhead.merge`.

    >>> import numpy as np, clearhead as ch
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 6, 4))
    >>> halves = [ch.attention_state(q, k[part], v[part]) for part in (slice(0, 3), slice(3, 6))]
    >>> np.allclose(ch.merge(*halves).output, ch.attention(q, k, v))
    True
    """
    problem = check(query, key, value, mask, score)
    planned = plan(problem)
    output, logsumexp = _run(planned)
    kept = np.float64 if problem.dtype == np.float64 else np.float32
    rows = in_nats(planned, logsumexp).reshape(problem.extent.shape[:-1]).astype(kept)
    return State(output, problem.as_given(rows, -2))


def _run(planned: Plan) -> tuple[Floats, Floats]:
    """(output as the user will have it, logsumexp (batch, heads, queries, 2))."""
    output, logsumexp = launch.run(planned)
    return _as_given(planned.problem, output), logsumexp


def _run_measured(planned: Plan, asked: Asked) -> tuple[Floats, Measures]:
    """(output as the user will have it, what was asked)."""
    few = launch.can_stream(planned)
    if asked.rides and not few and not launch.by_amx(planned):
        ride = measuring.Riding(planned, asked.wanted(planned))
        output, logsumexp = ride.run()
        return _as_given(planned.problem, output), gather(planned, logsumexp, asked, measuring.Kept(ride.rows))
    output, logsumexp = _run(planned)
    # The streaming kernel's sums are rounded otherwise than those of the tiles, which measures are made of.
    logsumexp = launch.run(without_value(planned))[1] if few else logsumexp
    return output, find(planned, logsumexp, asked)


def _as_given(problem: Problem, output: Floats) -> Floats:
    """An output (batch, heads, queries, value dim) with the axes and the dtype that the user's arrays had."""
    if problem.single:
        output = output[0, 0]
    elif len(problem.extent.lead) != 1:
        output = output.reshape(*problem.extent.shape[:-1], output.shape[-1])
    return output if output.dtype == problem.dtype else output.astype(problem.dtype)


def _run_cached(
    query: ArrayLike, cache: KeyValueCache | PagedKeyValues, mask: Mask | ArrayLike | None, score: Score | None
) -> Floats:
    """Attention over a cache: few queries read its pages where they lie, many a copy of them in one piece."""
    one = np.zeros((), cache.dtype)
    shape = (cache.batch, cache.heads, len(cache))
    key, value = (np.broadcast_to(one, (*shape, dim)) for dim in (cache.dim, cache.value_dim))
    problem = _within(check(query, key, value, mask, score), cache)
    if len(cache) and problem.dtype == cache.dtype and problem.extent.lead == (cache.batch,):
        planned = plan(problem)
        (first_key, _), (first_value, _) = (strided(page) for page in cache.first_pages())
        paged = replace(planned, arguments=planned.arguments._replace(key=first_key, value=first_value))
        if launch.can_stream(paged) and first_key.steps[2] == 1 == first_value.steps[2]:
            return launch.Stream(paged, cache.paging()).run()[0].astype(problem.dtype, copy=False)
    return _run(plan(_within(check(query, cache.key, cache.value, mask, score), cache)))[0]


def _within(problem: Problem, cache: KeyValueCache | PagedKeyValues) -> Problem:
    """The same, looking at no more than the cache holds of each sequence."""
    if cache.mask is None:
        return problem
    mask = cache.mask if problem.mask is None else problem.mask & cache.mask
    mask.check(problem.extent)
    return replace(problem, mask=mask)
