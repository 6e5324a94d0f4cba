"""The libraries that are compared. Each is one small module with the members of ``Peer``.

To add one, write its module and name it in MODULES. Nothing of a peer is imported before it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from workload import Workload

MODULES = {
    "clearhead": "peers.clearhead_ours",
    "naive": "peers.naive",
    "torch": "peers.torch_sdpa",
    "onnxruntime": "peers.onnxruntime_attention",
    "onnxruntime-mha": "peers.onnxruntime_multihead",
    "openvino": "peers.openvino_sdpa",
    "jax": "peers.jax_attention",
}
OURS = "clearhead"
LARGEST = 1_000_000_000  # bytes: peers that hold one number for every cell hold several such arrays at once


class Peer(Protocol):
    """What a module in this folder offers. ``name`` is for people, ``version`` that of the library."""

    name: str
    version: str

    def set_threads(self, count: int) -> bool:
        """Use so many threads from now on. False where the library cannot be told: it then uses its default."""

    def lacks(self, workload: Workload) -> str | None:
        """Why this peer does not run a workload; None if it does."""

    def prepare(self, workload: Workload) -> Callable[[], Any]:
        """A function of no arguments that computes the workload once, on the next of ``workload.arrays()``.

        Converting inputs is done here, not there.
        """

    def numbers(self, result: Any) -> NDArray[np.float64]:
        """What the prepared function returned, to compare: (batch, heads, queries, dim)."""


def load(name: str) -> Peer:
    """The peer of that name. Raises ImportError where its library is not installed."""
    return cast(Peer, importlib.import_module(MODULES[name]))
