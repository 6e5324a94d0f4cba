"""Attention you can see through: exact, fast, and with its weights at hand.

>>> import numpy as np, clearhead as ch
>>> x = np.eye(3)
>>> output, weights = ch.scaled_dot_product_attention(x, x, x)
>>> weights.shape, np.round(weights[0], 3).tolist()
((3, 3), [0.471, 0.264, 0.264])
"""

import importlib
from typing import TYPE_CHECKING, Any

from clearhead import core, masks, scores
from clearhead.core import create_qkv, softmax
from clearhead.state import State, merge

if TYPE_CHECKING:
    from clearhead.attend import attention, attention_state, attention_weights, scaled_dot_product_attention
    from clearhead.explanation import Explanation, explain
    from clearhead.flow import rollout
    from clearhead.fold import Fold
    from clearhead.gradients import Gradients, attention_vjp
    from clearhead.kernels.threads import get_num_threads, set_num_threads
    from clearhead.keyvalue import KeyValueCache
    from clearhead.paged import PagedKeyValues
    from clearhead.trace.attentions import from_attentions
    from clearhead.trace.live import trace, tracing
    from clearhead.weights import AttentionWeights

__version__ = "0.1.0"

# What needs Numba is loaded when first asked for (PEP 562): importing Clearhead costs NumPy alone.
_ON_FIRST_USE = {
    "attention": "clearhead.attend",
    "attention_state": "clearhead.attend",
    "attention_vjp": "clearhead.gradients",
    "attention_weights": "clearhead.attend",
    "scaled_dot_product_attention": "clearhead.attend",
    "AttentionWeights": "clearhead.weights",
    "Explanation": "clearhead.explanation",
    "Fold": "clearhead.fold",
    "Gradients": "clearhead.gradients",
    "KeyValueCache": "clearhead.keyvalue",
    "PagedKeyValues": "clearhead.paged",
    "explain": "clearhead.explanation",
    "rollout": "clearhead.flow",
    "get_num_threads": "clearhead.kernels.threads",
    "set_num_threads": "clearhead.kernels.threads",
    "from_attentions": "clearhead.trace.attentions",
    "tracing": "clearhead.trace.live",
}

__all__ = [
    "AttentionWeights",
    "Explanation",
    "Fold",
    "Gradients",
    "KeyValueCache",
    "PagedKeyValues",
    "State",
    "__version__",
    "attention",
    "attention_state",
    "attention_vjp",
    "attention_weights",
    "core",
    "create_qkv",
    "explain",
    "from_attentions",
    "get_num_threads",
    "masks",
    "merge",
    "rollout",
    "scaled_dot_product_attention",
    "scores",
    "set_num_threads",
    "softmax",
    "trace",
    "tracing",
]


def __getattr__(name: str) -> Any:
    if name == "trace":  # a package that can be called: see there
        return importlib.import_module("clearhead.trace")
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module 'clearhead' has no attribute {name!r}")
    value = getattr(importlib.import_module(_ON_FIRST_USE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
