"""Models that would take a mask of ours for one of eager attention: told apart, and refused in words.

Some models of transformers have attention of their own, whatever implementation is chosen, and add the mask to scores:
booleans, or none where causal is meant, would give wrong numbers without an error. What tells them apart is what
transformers itself looks at: their module has a class of attention, and does not ask AttentionInterface.
"""

from __future__ import annotations

import inspect
import re
import sys
from functools import cache
from typing import Any

_MAKERS = ("clearhead.torch.", "transformers.masking_utils", "transformers.utils.")
_OWN = re.compile(r"^class \w*Attention\w*\(nn\.Module\):", re.MULTILINE)


def check_interface(config: Any) -> None:
    """Raise ValueError if the model that asks for a mask, or whose configuration this is, has attention of its own."""
    asking: Any = sys._getframe(1)
    while asking is not None and asking.f_globals.get("__name__", "").startswith(_MAKERS):
        asking = asking.f_back
    names = [] if asking is None else [asking.f_globals.get("__name__", "")]
    names.append(type(config).__module__.replace(".configuration_", ".modeling_"))
    for name in names:
        if has_its_own(name):
            model = name.rpartition(".modeling_")[2]
            raise ValueError(
                f"the attention of {model} does not go through transformers' AttentionInterface, so it cannot be "
                f"Clearhead's: load the model with attn_implementation='eager'"
            )


@cache
def has_its_own(name: str) -> bool:
    """Whether a module has a class of attention and none of them asks AttentionInterface.

    >>> from transformers.models.bloom import modeling_bloom
    >>> from transformers.models.llama import modeling_llama
    >>> has_its_own(modeling_bloom.__name__), has_its_own(modeling_llama.__name__)
    (True, False)
    """
    module = sys.modules.get(name)
    if module is None or ".modeling_" not in name:
        return False
    try:
        code = inspect.getsource(module)
    except (OSError, TypeError):
        return False
    return bool(_OWN.search(code)) and "ALL_ATTENTION_FUNCTIONS" not in code
