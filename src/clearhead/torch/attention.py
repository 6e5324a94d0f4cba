"""Attention on tensors: by the kernels on the tensors' own memory, differentiable in every argument.

``attention`` puts the arguments in order and picks the road: straight to the kernels, as a node of autograd's graph, as
an operator of torch's library where something looks at operators, or by torch's operations where derivatives of
another sort are at work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.autograd import forward_ad

from clearhead.algebra import Align, Mask
from clearhead.attend import attention_weights
from clearhead.scores import Additive, General, Score
from clearhead.torch import autograd, fused, library, operations
from clearhead.torch.arrays import FLOATS, array_of
from clearhead.torch.call import Fixed, Tensors, mask_of, named, score_of
from clearhead.weights import AttentionWeights

Numbers = Tensor | ArrayLike
_LOWERED = (torch.float32, torch.float16, torch.bfloat16)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    score: Score | None = None,
    scale: float | Tensor | None = None,
    softcap: float | Tensor | None = None,
    bias: Numbers | None = None,
    alibi: Numbers | None = None,
    align: Align = None,
    sinks: Numbers | None = None,
    function: Callable[..., Any] | None = None,
    derivative: Callable[..., Any] | None = None,
    general: Tensor | None = None,
    additive: tuple[Tensor, Tensor, Tensor] | None = None,
    dropout: float = 0.0,
    return_logsumexp: bool = False,
    return_weights: bool = False,
) -> Any:
    """softmax(scale * q.k) v for every query, exactly, in memory linear in length both ways.

    Parameters
    ----------
    query : tensor (..., heads, queries, dim) or (queries, dim)
        float16, bfloat16, float32 or float64; key and value of the same dtype. Leading axes broadcast.
    key : tensor (..., key heads, keys, dim) or (keys, dim)
        heads must be a multiple of key heads: query head h reads key head ``h // (heads // key heads)``.
    value : tensor (..., key heads, keys, value dim) or (keys, value dim)
    mask : Mask or tensor, optional
        Who may look at whom: see ``clearhead.masks``. A boolean tensor, True where attending is allowed; a tensor of
        numbers is a bias. Broadcast over (..., heads, queries, keys).
    score : Score, optional
        A score made by ``clearhead.scores``: its numbers are constants. Or, to have gradients of them, its parts:
    scale, softcap : number or tensor of one number, optional
    bias : tensor, broadcasts over (..., heads, queries, keys); -inf hides a cell
    alibi, sinks : tensor (heads,), one number of each head; ``align`` as in ``clearhead.scores.dot``
    function, derivative : as in ``clearhead.scores.dot``
    general : tensor (query dim, key dim) or (heads, query dim, key dim)
        The score is q.W.k instead of q.k (Luong).
    additive : tensors W_q (query dim, hidden), W_k (key dim, hidden), v (hidden,)
        The score is v.tanh(q W_q + k W_k) instead of q.k (Bahdanau).
    dropout : float
        The probability for each weight to be dropped; what is kept is divided by 1 - dropout. Which ones follows from
        a number that is drawn from torch's generator, and from where a weight stands: see ``clearhead.torch.dropping``.
    return_logsumexp : bool
        Also give logsumexp (..., heads, queries), natural log, differentiable; float64 for float64, else float32.
    return_weights : bool
        Also give the weights (before dropout), an ``AttentionWeights``: computed where looked at, not differentiable.

    Returns
    -------
    tensor (..., heads, queries, value dim) in the inputs' dtype; a row that may attend to nothing is 0. Or a tuple:
    the output, then logsumexp, then the weights, those of them that were asked for.

    Raises
    ------
    TypeError
        If query, key or value is no tensor, has another dtype than those above or than the others.
    ValueError
        If shapes, head counts, mask or score do not fit each other, or dropout is no probability.

    Notes
    -----
    Gradients flow to query, key, value and every tensor of the score, and from the output and logsumexp. First
    derivatives by ``backward`` and ``torch.autograd.grad`` are computed by the kernels on CPUs. By torch's operations,
    slower, and with matrices of queries x keys in memory: double backward (``create_graph=True``), forward mode, and
    the transforms of ``torch.func``. By torch's operations too, but in blocks of rows and memory linear in tokens:
    dropout, and tensors on other devices. There a score function is called with tensors. Under autocast, query, key
    and value are rounded to its dtype, as for torch's function. A tensor that is changed in place between forward and
    backward is an error, by autograd.

    References
    ----------
    Vaswani et al. 2017, *Attention Is All You Need*, equation 1: Q, K, V, d_k are query, key, value, dim. Dao et al.
    2022, *FlashAttention*, section 3.1: scores recomputed from logsumexp.

    Examples
    --------
    >>> import torch, clearhead as ch
    >>> from clearhead.torch import attention
    >>> x = torch.randn(2, 5, 8, requires_grad=True)
    >>> slopes = torch.tensor([0.5, 0.25], requires_grad=True)
    >>> output, weights = attention(x, x, x, mask=ch.masks.causal(), alibi=slopes, return_weights=True)
    >>> output.sum().backward()
    >>> x.grad.shape, slopes.grad.shape, weights[0, 0].tolist()
    (torch.Size([2, 5, 8]), torch.Size([2]), [1.0, 0.0, 0.0, 0.0, 0.0])
    """
    _check_tensors(query, key, value)
    query, key, value = lowered(query, key, value)
    if score is not None:
        given = (scale, softcap, bias, alibi, align, sinks, function, derivative, general, additive)
        if any(part is not None for part in given):
            raise ValueError("score was given and parts of a score beside it: give one or the other")
        scale, softcap, bias, alibi, align, sinks = (
            score.scale, score.softcap, score.bias, score.slopes, score.align, score.sinks)  # fmt: skip
        function, derivative = score.function, score.derivative
        if isinstance(score.base, General):
            general = _tensor("general", score.base.weight, query)
        elif isinstance(score.base, Additive):
            base = score.base
            additive = tuple(_tensor("additive", w, query) for w in (base.query_weight, base.key_weight, base.vector))  # type: ignore[assignment]
    if not 0 <= dropout <= 1:
        raise ValueError(f"dropout is a probability, between 0 and 1, got {dropout}")
    if general is not None and additive is not None:
        raise ValueError("general and additive were both given: a score has one base")
    allowed = None
    if isinstance(mask, Tensor):
        if mask.dtype is torch.bool:
            mask, allowed = None, mask
        elif bias is not None:
            raise ValueError("mask is a tensor of numbers to add, and bias was given too: add the two yourself")
        else:
            mask, bias = None, mask
    elif mask is not None and not isinstance(mask, Mask):
        raise TypeError(
            f"mask must be a tensor or made by clearhead.masks, got {type(mask).__name__}: torch.as_tensor(mask)"
        )
    scale, scale_tensor = (None, scale) if isinstance(scale, Tensor) else (scale, None)
    softcap, softcap_tensor = (None, softcap) if isinstance(softcap, Tensor) else (softcap, None)
    tensors = (
        query, key, value, _tensor("bias", bias, query), scale_tensor, softcap_tensor, _tensor("alibi", alibi, query),
        _tensor("sinks", sinks, query), general, *(additive or (None, None, None)), allowed, draw(dropout, query),
    )  # fmt: skip
    fixed = Fixed(mask, scale, softcap, align, function, derivative, dropout)
    return run(fixed, tensors, return_logsumexp, return_weights)


def run(fixed: Fixed, tensors: Tensors, with_logsumexp: bool = False, with_weights: bool = False) -> Any:
    """What ``attention`` returns, of a call whose arguments stand in order."""
    rows, logsumexp = None, None
    if _transformed(tensors):
        output, logsumexp = operations.attend(fixed, tensors)
    elif _watched(tensors):
        number = library.handle(fixed.mask, fixed.align, fixed.function, fixed.derivative)
        output, logsumexp, _ = library.attend(number, fixed.scale, fixed.softcap, fixed.dropout, *tensors)
    elif torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        found = autograd.Attend.apply(fixed, with_logsumexp, *tensors)
        output, logsumexp = found if with_logsumexp else (found, None)
    else:
        with torch.no_grad():
            output, logsumexp, rows = autograd.forward(fixed, tensors, with_logsumexp)
    if not (with_logsumexp or with_weights):
        return output
    return (
        output,
        *((logsumexp,) if with_logsumexp else ()),
        *((_weights(fixed, tensors, rows),) if with_weights else ()),
    )


def lowered(*tensors: Tensor) -> tuple[Tensor, ...]:
    """In autocast's dtype where that is on, as torch's own function does."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(tensor.to(dtype) if tensor.dtype in _LOWERED else tensor for tensor in tensors)


def _check_tensors(query: Any, key: Any, value: Any) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{name} is {type(tensor).__name__}, clearhead.torch takes tensors: clearhead.attention takes arrays"
            )
    if query.dtype not in FLOATS:
        raise TypeError(
            f"query has dtype {query.dtype}, attention needs one of {', '.join(map(str, FLOATS))}: query.float()"
        )
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype != query.dtype and not torch.is_autocast_enabled(query.device.type):
            raise TypeError(
                f"query has dtype {query.dtype} and {name} has {tensor.dtype}: torch's tensors must agree, "
                f"{name}.to(query.dtype)"
            )
        if tensor.device != query.device:
            raise ValueError(f"query is on {query.device} and {name} on {tensor.device}: they must be on one device")


def _tensor(name: str, values: Any, like: Tensor) -> Tensor | None:
    """Numbers as a tensor beside the query; None is none."""
    if values is None or isinstance(values, Tensor):
        return values
    found = torch.as_tensor(values)
    return found.to(like.device) if like.device.type != "cpu" else found


def draw(dropout: float, query: Tensor) -> Tensor | None:
    """A number from torch's generator, where weights are to be dropped."""
    return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=query.device) if dropout else None


def _transformed(tensors: Tensors) -> bool:
    """Whether derivatives of another sort than backward's are at work: torch.func's, or forward mode."""
    if torch.compiler.is_compiling():
        return False
    if torch._C._are_functorch_transforms_active():
        return True
    return forward_ad._current_level >= 0 and any(
        t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors
    )


def _watched(tensors: Tensors) -> bool:
    """Whether something looks at operators instead of running them on plain tensors."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state():
        return True
    return any((t is not None and type(t) not in _PLAIN) or (t is not None and t.is_meta) for t in tensors)


_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _weights(fixed: Fixed, tensors: Tensors, rows: Tensor | None) -> AttentionWeights:
    if rows is not None:
        return fused.weights(fixed, tensors, rows)
    arrays = {name: array_of(tensor.cpu()) for name, tensor in named(tensors).items()}
    return attention_weights(arrays["query"], arrays["key"], mask=mask_of(fixed, arrays), score=score_of(fixed, arrays))
