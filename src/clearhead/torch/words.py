"""A mask in words that torch.compile keeps: numbers and strings, what combines masks after what is combined.

Of an object that is made inside of a compiled function torch.compile notes down what its attributes are to become, and
hands it on without them. Masks of numbers are therefore taken apart where it looks on, and put together where it does
not. It follows that they need not be the same objects at each call, only equal. Masks that hold arrays or functions go
as they are, and must be made outside.
"""

from __future__ import annotations

import dataclasses
from operator import index
from typing import Any

from clearhead.algebra import Both, Either, Mask, Not
from clearhead.masks import Causal, Window

Words = tuple[Any, ...]


def words_of(mask: Mask | None) -> Words:
    """
    >>> import clearhead as ch
    >>> words_of(ch.masks.causal(align="end") & ~ch.masks.window(left=2))
    ('causal', 'end', 'window', 2, None, None, 'not', 'both')
    """
    if isinstance(mask, Causal):
        return ("causal", mask.align)
    if isinstance(mask, Window):
        # index() tells torch.compile to take a number as it is: it may have made it a variable.
        left, right = (None if size is None else index(size) for size in (mask.left, mask.right))
        return ("window", left, right, mask.align)
    if isinstance(mask, Both):
        return (*words_of(mask.first), *words_of(mask.second), "both")
    if isinstance(mask, Either):
        return (*words_of(mask.first), *words_of(mask.second), "either")
    if isinstance(mask, Not):
        return (*words_of(mask.inner), "not")
    return (mask,)


def mask_of(words: Words) -> Mask | None:
    """The mask that these words name.

    ValueError if it holds arrays or a function and was made inside of a compiled function.

    >>> import clearhead as ch
    >>> mask_of(words_of(ch.masks.causal() | ch.masks.window(left=2)))
    Either(first=Causal(align=None), second=Window(left=2, right=None, align=None))
    """
    rest, made = list(words), list[Any]()
    while rest:
        word = rest.pop(0)
        match word:
            case "causal":
                made.append(Causal(rest.pop(0)))
            case "window":
                made.append(Window(rest.pop(0), rest.pop(0), rest.pop(0)))
            case "both" | "either":
                second, first = made.pop(), made.pop()
                made.append(Both(first, second) if word == "both" else Either(first, second))
            case "not":
                made.append(Not(made.pop()))
            case _:
                made.append(_whole(word))
    return made[0]  # type: ignore[no-any-return]


def _whole(mask: Any) -> Mask | None:
    if dataclasses.is_dataclass(mask) and not all(hasattr(mask, field.name) for field in dataclasses.fields(mask)):
        raise ValueError(
            f"a mask ({type(mask).__name__}) was made inside of a compiled function from arrays or a function: "
            f"make it outside, and give it to the function as an argument"
        )
    return mask  # type: ignore[no-any-return]
