"""Clearhead: ``clearhead.attention``, and with gradients ``clearhead.torch.attention``."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

import asked
import clearhead as ch
from clearhead.measures import ask
from workload import Workload, every_second

name = "Clearhead"
version = ch.__version__


def set_threads(count: int) -> bool:
    ch.set_num_threads(count)
    return True


def lacks(workload: Workload) -> str | None:
    return None


def prepare(workload: Workload) -> Callable[[], Any]:
    if workload.way == "both":
        return _both_ways(workload)
    if workload.call == "drop-in":
        return _drop_in(workload)
    turns = itertools.cycle(workload.arrays())
    call, given = getattr(ch, workload.call), {}
    if workload.mask != "full":
        given["mask"] = _mask(workload)
    if workload.score != "dot":
        given["score"] = _score(workload)
    if workload.asks:
        return _asking(workload, turns, given)
    return lambda: call(*next(turns), **given)


def _drop_in(workload: Workload) -> Callable[[], Any]:
    import torch

    import tensors
    from clearhead.torch import scaled_dot_product_attention

    turns = itertools.cycle([[tensors.of(array) for array in arrays] for arrays in workload.arrays()])
    causal = workload.mask == "causal"
    return torch.inference_mode()(lambda: scaled_dot_product_attention(*next(turns), is_causal=causal))


def _both_ways(workload: Workload) -> Callable[[], Any]:
    import tensors
    from clearhead.torch import attention

    mask = None if workload.mask == "full" else _mask(workload)

    def with_mask(query: Any, key: Any, value: Any, *learned: Any) -> Any:
        return attention(query, key, value, mask=mask, additive=learned or None)

    return tensors.both_ways(workload, with_mask)


def _asking(workload: Workload, turns: Iterator[Any], given: dict[str, Any]) -> Callable[[], Any]:
    """The same for what is asked of weights; what is found comes with the workload, which says how to compare it."""
    if workload.asks == "riding":
        rows = ask(*asked.ROWS, sink=asked.SINK)
        return lambda: (workload, *ch.attention(*next(turns), **given, measure=rows))
    made = itertools.cycle([ch.scaled_dot_product_attention(*a, **given)[1] for a in workload.arrays()])

    def measured() -> Any:
        weights = next(made) if workload.asks == "all" else ch.attention_weights(*next(turns)[:2], **given)
        return (
            workload,
            None,
            weights.measure(*asked.ROWS, "received", sink=asked.SINK, top=asked.TOP, pooled=(asked.GRID, asked.GRID)),
        )

    return measured


def numbers(result: Any) -> NDArray[np.float64]:
    if isinstance(result, tuple) and isinstance(result[0], Workload):
        workload, output, found = result
        top = None if output is not None else found.top.weights
        return asked.side_by_side(workload, {name: found[name] for name in asked.ROWS}, top, output)
    if isinstance(result, tuple) and len(result) > 2:  # with gradients
        import tensors

        return tensors.numbers(result)
    output = result[0] if isinstance(result, tuple) else result  # with weights, or without
    return np.asarray(output).astype(np.float64)


def _mask(workload: Workload) -> Any:
    match workload.mask, workload.told:
        case "causal", "function":
            return ch.masks.function(lambda batch, head, query, key: key <= query)
        case "causal", _:
            return ch.masks.causal()
        case "window", _:
            return ch.masks.causal() & ch.masks.window(left=workload.left)
        case "documents", _:
            return ch.masks.documents(workload.ids)
        case "random", _:
            return every_second(workload.rows, workload.tokens)
        case "lengths", _:
            return ch.masks.lengths(workload.lengths, workload.lengths)
    raise ValueError(f"no mask for {workload}")


def _score(workload: Workload) -> Any:
    match workload.score, workload.told:
        case "alibi", "function":
            step = -8.0 / workload.heads
            return ch.scores.dot(
                function=lambda score, batch, head, query, key: score - 2.0 ** (step * (head + 1)) * abs(query - key)
            )
        case "alibi", _:
            return ch.scores.dot(alibi=workload.slopes)
        case "additive", _:
            return ch.scores.additive(*workload.learned())
    raise ValueError(f"no score for {workload}")
