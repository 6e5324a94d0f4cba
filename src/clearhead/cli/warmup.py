"""``clearhead warmup``: compile the kernels now, so that no later call has to wait for them."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from clearhead.cli.console import stdout, waiting

DTYPES = ("float32", "float64", "float16", "bfloat16")


def warmup(
    dtypes: Annotated[list[str] | None, typer.Argument(metavar="[DTYPE]...", help=", ".join(DTYPES))] = None,
) -> None:
    """Compile the common kernels ahead: for all dtypes, or for those named."""
    import numpy as np

    import clearhead as ch
    from clearhead.kernels import cache

    names = dtypes or list(DTYPES)
    if unknown := [name for name in names if name not in DTYPES]:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(DTYPES)}")
    for name in names:
        if name == "bfloat16":
            try:
                from ml_dtypes import bfloat16
            except ImportError:
                stdout().print("bfloat16   left out: it needs the package ml_dtypes (pip install ml_dtypes)")
                continue
        start = time.perf_counter()
        with waiting(f"Compiling for {name}"):
            x = np.zeros((1, 40, 64), bfloat16 if name == "bfloat16" else name)
            _, weights = ch.scaled_dot_product_attention(x, x, x)
            weights[0, :2, :2]
            weights.measure("entropy")
            ch.attention(x[:, :1], x, x)
            ch.attention(x, x, x, measure="entropy")
        stdout().print(f"{name:<10} {time.perf_counter() - start:5.1f} s")
    place = cache.folder()
    stdout().print(f"Kept in {place}" if place else "Not kept: no folder can be written", soft_wrap=True)
