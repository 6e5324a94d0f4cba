"""Small random models of several families, saved as folders that `clearhead trace` reads, built in a second."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

TEXT = "The cat sat on the mat, because the naïve cat 🙂 was tired. Then the dog sat on the cat."
COMMON = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "initializer_range": 0.3,  # so that the attention is far from even
}


def tokenizer() -> Any:
    """Byte-level BPE: spaces are spelled Ġ, characters outside ASCII are cut into bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"], show_progress=False
    )
    found.train_from_iterator(["the cat sat on the mat because the cat was tired then the dog"] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=found, bos_token="<s>", eos_token="</s>", pad_token="</s>")


def config(family: str, **changes: Any) -> Any:
    """The configuration of a tiny model: llama, mistral (a window), gemma2 (softcap, eager), gpt_oss (sinks) ..."""
    import transformers

    facts = COMMON | changes
    match family:
        case "llama":
            return transformers.LlamaConfig(**facts)
        case "mistral":
            return transformers.MistralConfig(**({"sliding_window": 8} | facts))
        case "gemma3":
            kinds = ["sliding_attention", "full_attention", "sliding_attention"]
            return transformers.Gemma3TextConfig(**({"sliding_window": 8, "layer_types": kinds} | facts))
        case "gemma2":
            small = {"attn_logit_softcapping": 2.0, "sliding_window": 8, "query_pre_attn_scalar": 16}
            return transformers.Gemma2Config(**(small | facts))
        case "gpt_oss":
            small = {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 8}
            return transformers.GptOssConfig(**(small | facts))
        case "gpt2":
            return transformers.GPT2Config(
                vocab_size=320, n_embd=48, n_layer=3, n_head=6, n_positions=256, initializer_range=0.3
            )
        case "bert":
            names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "initializer_range")
            return transformers.BertConfig(**{name: facts[name] for name in names}, max_position_embeddings=256)
        case "bloom":
            return transformers.BloomConfig(vocab_size=320, hidden_size=48, n_layer=2, n_head=6)
    raise AssertionError(family)


def build(family: str, head: bool = True, **changes: Any) -> Any:
    """A random model, with the same numbers each time; with its language model head, or without."""
    import torch
    import transformers

    torch.manual_seed(0)
    kind = transformers.AutoModelForCausalLM if head and family != "bert" else transformers.AutoModel
    return kind.from_config(config(family, **changes)).eval()


def save(folder: Path, family: str = "llama", **changes: Any) -> Path:
    """A folder in Hugging Face's layout."""
    from clearhead.trace.models import quiet

    with quiet():
        build(family, **changes).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    return folder
