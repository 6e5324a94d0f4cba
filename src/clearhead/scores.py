"""How a query matches a key. A score is a base (dot, general, additive) plus modifiers, always in one order:

    s = scale * match(q, k)  ->  softcap * tanh(s / softcap)  ->  + bias, + ALiBi  ->  your function

and then, in the softmax, the sinks. See :func:`dot` for the modifiers, which every base takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypedDict, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from clearhead.algebra import Align
from clearhead.masks import check_function

Floats = NDArray[np.floating[Any]]
FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True, eq=False)
class Dot:
    """``q . k``"""


@dataclass(frozen=True, eq=False)
class General:
    """``q . W . k``, W: (query dim, key dim) or (heads, query dim, key dim)."""

    weight: Floats


@dataclass(frozen=True, eq=False)
class Additive:
    """``v . tanh(q W_q + k W_k)``, W_q: (query dim, hidden), W_k: (key dim, hidden), v: (hidden,)."""

    query_weight: Floats
    key_weight: Floats
    vector: Floats


@dataclass(frozen=True, eq=False)
class Score:
    """A base and its modifiers. Made by :func:`dot`, :func:`general`, :func:`additive`."""

    base: Dot | General | Additive
    scale: float | None = None
    softcap: float | None = None
    bias: Floats | None = None
    slopes: Floats | None = None
    align: Align = None
    function: Callable[..., Any] | None = None
    sinks: Floats | None = None
    derivative: Callable[..., Any] | None = None

    def scale_for(self, dim: int) -> float:
        """The factor on the match: as given, else 1/sqrt(dim) for dot products and 1 for learned scores."""
        if self.scale is not None:
            return self.scale
        return 1.0 / float(np.sqrt(dim)) if isinstance(self.base, Dot) and dim else 1.0


class Modifiers(TypedDict, total=False):
    """What may be done to any score: see :func:`dot`."""

    softcap: float | None
    bias: ArrayLike | None
    alibi: ArrayLike | None
    align: Align
    function: Callable[..., Any] | None
    sinks: ArrayLike | None
    derivative: Callable[..., Any] | None


def dot(
    scale: float | None = None,
    *,
    softcap: float | None = None,
    bias: ArrayLike | None = None,
    alibi: ArrayLike | None = None,
    align: Align = None,
    function: Callable[..., Any] | None = None,
    sinks: ArrayLike | None = None,
    derivative: Callable[..., Any] | None = None,
) -> Score:
    """The scaled dot product, ``scale * q.k``, and what may be done to it.

    Parameters
    ----------
    scale : float, optional
        1/sqrt(dim) when None; 0 and negative values are taken as given.
    softcap : float, optional
        Scores are bent into (-softcap, softcap) by ``softcap * tanh(s / softcap)``.
    bias : array, optional
        Added to the scores; broadcasts over (..., heads, queries, keys). -inf hides a cell; large negative numbers
        are ordinary numbers.
    alibi : array (heads,), optional
        Adds ``-slope * |i - j|`` in aligned positions; :func:`alibi_slopes` gives the paper's slopes.
    align : "start" or "end", optional
        Where query 0 stands among the keys, for ``alibi``; needed when their numbers differ (see ``masks.causal``).
    function : callable, optional
        ``f(score, batch, head, query, key) -> score`` in plain arithmetic, compiled by Numba, and with
        it the functions that it calls by name.
    sinks : array (heads,), optional
        One logit per head which takes part in the softmax and has no value: weights then sum to less than 1.
    derivative : callable, optional
        That of ``function`` by score, of the same arguments, for gradients. None: ``function`` itself, compiled once
        more for dual numbers (a score and its slope) when a gradient first needs it. That is exact, through arithmetic,
        comparisons, ``if`` and loops, ``min``, ``max``, ``abs``, ``math.*``, NumPy's functions of the same and
        ``np.where``. Through anything else slopes are central differences in float64, right to some 1e-9, and a
        RuntimeWarning says so.

    References
    ----------
    Vaswani et al. 2017, *Attention Is All You Need*, section 3.2.1 (scale); Gemma Team 2024, *Gemma 2*, section 2
    (softcap); Press et al. 2022, *Train Short, Test Long*, section 3 (ALiBi: m is ``slope``); OpenAI 2025, *gpt-oss*
    model card, section 2 (sinks).

    >>> import numpy as np, clearhead as ch
    >>> x = np.eye(2)
    >>> np.round(ch.attention(x, x, x, score=ch.scores.dot(scale=0.0)), 3).tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """
    if scale is not None and not np.isfinite(scale):
        raise ValueError(f"scale must be a finite number, got {scale}")
    if softcap is not None and not (np.isfinite(softcap) and softcap > 0):
        raise ValueError(f"softcap must be a positive number, got {softcap}; None is no cap")
    if align not in (None, "start", "end"):
        raise ValueError(f"align must be 'start', 'end' or None, got {align!r}")
    if function is not None:
        check_function("scores: function", function, "(score, batch, head, query, key)")
    if derivative is not None:
        if function is None:
            raise ValueError("derivative was given without a function: it is that of function by score")
        check_function("scores: derivative", derivative, "(score, batch, head, query, key)")
    return Score(
        Dot(),
        None if scale is None else float(scale),
        None if softcap is None else float(softcap),
        None if bias is None else _floats("bias", bias),
        None if alibi is None else _floats("alibi", alibi),
        align,
        function,
        None if sinks is None else _floats("sinks", sinks),
        derivative,
    )


def general(
    weight: ArrayLike,
    scale: float | None = None,
    **modifiers: Unpack[Modifiers],
) -> Score:
    """``scale * q.W.k`` with W: (query dim, key dim) or (heads, query dim, key dim); scale 1 when None.

    Modifiers as in :func:`dot`. Luong et al. 2015, *Effective Approaches*, equation 8 ("general"): W_a is ``weight``.
    """
    weight = _floats("general: weight", weight)
    if weight.ndim not in (2, 3):
        raise ValueError(
            f"general: weight must be (query dim, key dim) or (heads, query dim, key dim), got {weight.shape}"
        )
    return replace(dot(scale, **modifiers), base=General(weight))


def additive(
    query_weight: ArrayLike,
    key_weight: ArrayLike,
    vector: ArrayLike,
    scale: float | None = None,
    **modifiers: Unpack[Modifiers],
) -> Score:
    """``scale * v.tanh(q W_q + k W_k)``; scale 1 when None.

    query_weight W_q: (query dim, hidden), key_weight W_k: (key dim, hidden), vector v: (hidden,).

    Modifiers as in :func:`dot`. Bahdanau et al. 2015, *Neural Machine Translation by Jointly Learning to Align and
    Translate*, appendix A.1.2: W_a, U_a and v_a are ``query_weight``, ``key_weight`` (both transposed) and ``vector``.
    """
    query_weight = _floats("additive: query_weight", query_weight)
    key_weight = _floats("additive: key_weight", key_weight)
    vector = _floats("additive: vector", vector)
    hidden = {query_weight.shape[-1:], key_weight.shape[-1:], vector.shape[-1:]}
    if (query_weight.ndim, key_weight.ndim, vector.ndim) != (2, 2, 1) or len(hidden) != 1:
        raise ValueError(
            f"additive: query_weight (query dim, hidden), key_weight (key dim, hidden) and vector (hidden,) "
            f"do not fit: got {query_weight.shape}, {key_weight.shape} and {vector.shape}"
        )
    return replace(dot(scale, **modifiers), base=Additive(query_weight, key_weight, vector))


def alibi_slopes(heads: int) -> Floats:
    """The ALiBi paper's slopes: a geometric series 2^(-8/n), 2^(-16/n), ... for n heads, n a power of two.

    For other n: those of the power of two below, then every other one of the power above (Press et al. 2022, their
    published code).

    >>> alibi_slopes(4).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    below = 1 << (int(heads).bit_length() - 1) if heads > 0 else 1
    series = 2.0 ** (-8.0 / below * np.arange(1, below + 1))
    between = 2.0 ** (-8.0 / (2 * below) * np.arange(1, 2 * below + 1, 2))
    return np.concatenate([series, between])[:heads]


def _floats(name: str, values: ArrayLike) -> Floats:
    values = np.asarray(values)
    if values.dtype.name not in FLOATS:
        hint = (
            "a boolean array is a mask: give it as mask=..."
            if values.dtype == np.bool_
            else "convert with .astype(float)"
        )
        raise TypeError(f"{name} has dtype {values.dtype}, it must be one of {', '.join(FLOATS)}: {hint}")
    return values
