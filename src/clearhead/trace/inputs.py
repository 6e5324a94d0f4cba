"""What a model's queries and keys stand for: its inputs, seen on their way into the stacks that read them.

A stack is any part of the model that transformers knows as a model: it takes token numbers (``input_ids``), images
(``pixel_values``), or what another stack made. While a model generates, its decoder takes one more token at a time."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clearhead.trace.format import Kind, Side, Tokens
from clearhead.trace.sites import Attentions, query_side
from clearhead.trace.text import read_back

Ids = NDArray[np.int64]


class Inputs:
    """The inputs that were seen, by the side of the attentions that read them. Made by :func:`watching`."""

    def __init__(self) -> None:
        self.ids: dict[str, Ids] = {}  # (texts, tokens)
        self.grids: dict[str, tuple[int, int, int]] = {}  # rows, columns, registers
        self._open: dict[str, int] = {}  # how many stacks of a side are running, one in another
        self._now: dict[str, Any] = {}  # the token numbers that the innermost was given

    def enter(self, sides: set[str], given: dict[str, Any], config: Any) -> None:
        for side in sides:
            if not self._open.setdefault(side, 0):
                self._now[side] = None
            self._open[side] += 1
        first = next((side for side in ("encoder", "text", "self", "decoder") if side in sides), None)
        ids, later, pixels = (given.get(name) for name in ("input_ids", "decoder_input_ids", "pixel_values"))
        if ids is not None and first is not None:
            self._now[first] = ids
        if later is not None and "decoder" in sides:
            self._now["decoder"] = later
        place = "vision" if "vision" in sides else next(iter(sides)) if len(sides) == 1 else None
        if pixels is not None and place is not None:
            self._see(place, pixels, getattr(config, "vision_config", config))

    def leave(self, sides: set[str]) -> None:
        for side in sides:
            self._open[side] -= 1
            if not self._open[side] and self._now[side] is not None:
                self._take(side, np.asarray(self._now.pop(side).detach().cpu().numpy(), np.int64))

    def _take(self, side: str, ids: Ids) -> None:
        """Token numbers that follow those before, or repeat them and go on (without a cache)."""
        before = self.ids.get(side)
        count = 0 if before is None else before.shape[1]
        repeats = before is None or (ids.shape[1] > count and np.array_equal(ids[:, :count], before))
        follows = before is not None and not repeats and len(before) == len(ids)
        self.ids[side] = np.concatenate([before, ids], axis=1) if follows else ids

    def _see(self, side: str, pixels: Any, config: Any) -> None:
        size = getattr(config, "patch_size", None)
        if size is None or pixels.dim() != 4:
            return
        height, width = (size, size) if isinstance(size, int) else size
        registers = int(getattr(config, "num_register_tokens", 0) or 0)
        self.grids[side] = pixels.shape[2] // height, pixels.shape[3] // width, registers

    def side(self, name: Kind, texts: int, count: int, padding: NDArray[np.bool_] | None, tokenizer: Any) -> Side:
        """The tokens of a side of so many texts and tokens; padding : (texts, tokens) or None."""
        ids = self.ids.get(name)
        if ids is not None and ids.shape == (texts, count):
            named = [_named(row, tokenizer) for row in ids.tolist()]
            return Side(name, tuple(_marked(tokens, padding, text) for text, tokens in enumerate(named)))
        rows, columns, registers = self.grids.get(name, (0, 0, 0))
        if 0 < rows * columns <= count:
            places = _extra(count - rows * columns, registers)
            places += [f"{row},{column}" for row in range(rows) for column in range(columns)]
            special = tuple(range(count - rows * columns))
            return Side(name, (_nowhere(places, special),) * texts, (rows, columns))
        unknown = _nowhere([str(place) for place in range(count)], ())
        return Side(name, tuple(_marked(unknown, padding, text) for text in range(texts)))


@contextmanager
def watching(network: Any, attentions: Attentions) -> Iterator[Inputs]:
    """See what goes into a model's stacks while the block lasts."""
    from transformers import PreTrainedModel

    inputs, hooks = Inputs(), []
    for path, stack in network.named_modules():
        within = [one for one in attentions.heard if not path or one.path.startswith(path + ".")]
        if not isinstance(stack, PreTrainedModel) or not within:
            continue
        sides: set[str] = {query_side(one.kind) for one in within}
        hooks += [
            stack.register_forward_pre_hook(_entering(inputs, sides), with_kwargs=True),
            stack.register_forward_hook(_leaving(inputs, sides), always_call=True),
        ]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()


def _entering(inputs: Inputs, sides: set[str]) -> Any:
    def hook(stack: Any, arguments: Any, options: dict[str, Any]) -> None:
        inputs.enter(sides, _bound(stack, arguments, options), stack.config)

    return hook


def _leaving(inputs: Inputs, sides: set[str]) -> Any:
    def hook(stack: Any, arguments: Any, output: Any) -> None:
        inputs.leave(sides)

    return hook


def _bound(stack: Any, arguments: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name."""
    try:
        names = [*inspect.signature(stack.forward).parameters]
    except ValueError:
        names = []
    return {**dict(zip(names, arguments, strict=False)), **options}


def _named(ids: list[int], tokenizer: Any) -> Tokens:
    """Tokens whose text is what they decode to; their numbers, where there is no tokenizer."""
    if tokenizer is None:
        nowhere = (-1,) * len(ids)
        return Tokens(tuple(ids), tuple(map(str, ids)), nowhere, nowhere)
    return read_back(tokenizer, ids)


def _marked(tokens: Tokens, padding: NDArray[np.bool_] | None, text: int) -> Tokens:
    if padding is None or not padding[text].any():
        return tokens
    return Tokens(**{**vars(tokens), "padding": tuple(np.flatnonzero(padding[text]).tolist())})


def _nowhere(places: list[str], special: tuple[int, ...]) -> Tokens:
    none = (-1,) * len(places)
    return Tokens(none, tuple(places), none, none, special)


def _extra(count: int, registers: int) -> list[str]:
    """The names of an image's tokens that are no places: the class token, others, and registers."""
    others = max(0, count - registers)
    names = ["class", *(f"class {place}" for place in range(2, others + 1))][:others]
    return names + [f"register {place}" for place in range(1, count - others + 1)]
