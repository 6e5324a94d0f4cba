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
    """The configuration of a tiny model of a family, by its own class."""
    import transformers

    kind, facts = FAMILIES[family]
    return getattr(transformers, f"{kind}Config")(**(facts | changes))


WINDOW = {"sliding_window": 8}
KINDS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
STACK = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
}
RANDOM = {"initializer_range": 0.3, "max_position_embeddings": 256}
SPECIAL = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
SEQ2SEQ = {
    "vocab_size": 320,
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "init_std": 0.3,
    "max_position_embeddings": 256,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
    **SPECIAL,
}
PATCHES = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "image_size": 24,
    "patch_size": 8,
    "initializer_range": 0.3,
}

# Name: configuration class, and what is set in it.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", COMMON),
    "qwen2": ("Qwen2", COMMON),
    "qwen3": ("Qwen3", COMMON),
    "mistral": ("Mistral", COMMON | WINDOW),
    "gemma2": ("Gemma2", COMMON | WINDOW | {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3Text", COMMON | WINDOW | KINDS),
    "gpt_oss": ("GptOss", COMMON | WINDOW | {"num_local_experts": 2, "num_experts_per_tok": 1}),
    "gpt2": (
        "GPT2",
        {"vocab_size": 320, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 256, "initializer_range": 0.3}
        | SPECIAL,
    ),
    "gpt_neox": ("GPTNeoX", STACK | RANDOM | SPECIAL),
    "phi3": ("Phi3", {name: value for name, value in COMMON.items() if name != "head_dim"}),
    "olmo": ("Olmo", {name: value for name, value in COMMON.items() if name != "head_dim"}),
    "bert": ("Bert", STACK | RANDOM | {"pad_token_id": 1}),
    "roberta": ("Roberta", STACK | RANDOM | {"pad_token_id": 1}),
    "distilbert": (
        "DistilBert",
        {"vocab_size": 320, "dim": 48, "hidden_dim": 64, "n_layers": 3, "n_heads": 6, "pad_token_id": 1} | RANDOM,
    ),
    "albert": (
        "Albert",
        STACK | RANDOM | {"num_hidden_layers": 5, "num_hidden_groups": 2, "embedding_size": 16} | {"pad_token_id": 1},
    ),
    "t5": (
        "T5",
        {
            "vocab_size": 320,
            "d_model": 48,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 6,
            "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 20,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
            "eos_token_id": 1,
        },
    ),
    "bart": ("Bart", SEQ2SEQ),
    "marian": ("Marian", SEQ2SEQ),
    "whisper": (
        "Whisper",
        {
            name: value
            for name, value in SEQ2SEQ.items()
            if name not in ("max_position_embeddings", "forced_eos_token_id")
        }
        | {"num_mel_bins": 8, "max_source_positions": 30, "max_target_positions": 64},
    ),
    "vit": ("ViT", PATCHES),
    "dinov2": ("Dinov2", {name: value for name, value in PATCHES.items() if name != "intermediate_size"}),
    "dinov2_with_registers": (
        "Dinov2WithRegisters",
        {name: value for name, value in PATCHES.items() if name != "intermediate_size"} | {"num_register_tokens": 3},
    ),
    "clip": (
        "CLIP",
        {
            "text_config": STACK | RANDOM | SPECIAL,
            "vision_config": PATCHES | {"num_hidden_layers": 2},
            "projection_dim": 16,
        },
    ),
    "bloom": ("Bloom", {"vocab_size": 320, "hidden_size": 48, "n_layer": 2, "n_head": 6}),
    "xlnet": ("XLNet", {"vocab_size": 320, "d_model": 48, "n_layer": 2, "n_head": 6, "d_inner": 64}),
}
CAUSAL = (
    "llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss", "gpt2", "gpt_neox", "phi3", "olmo"
)  # fmt: skip
BOTH_WAYS = ("bert", "roberta", "distilbert", "albert")
TRANSLATE = ("t5", "bart", "marian")
IMAGES = ("vit", "dinov2", "dinov2_with_registers")


def build(family: str, head: bool = True, **changes: Any) -> Any:
    """A random model, with the same numbers each time; with its language model head, or without."""
    import torch
    import transformers

    torch.manual_seed(0)
    kind: Any = transformers.AutoModel
    if head and family in (*CAUSAL, "bloom"):
        kind = transformers.AutoModelForCausalLM
    if family in (*TRANSLATE, "whisper"):
        kind = transformers.AutoModelForSpeechSeq2Seq if family == "whisper" else transformers.AutoModelForSeq2SeqLM
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind.from_config(config(family, **changes)).eval()
        if family in ("t5",):  # it has no initializer range, and zeros for the bias would hide what it does
            for name, weights in model.named_parameters():
                if weights.dim() == 2 and "layer_norm" not in name:
                    torch.nn.init.normal_(weights, std=1.0 if "relative" in name else 0.15)
    return model


def inputs(family: str) -> dict[str, Any]:
    """A batch of three texts, the second padded on the left and the third on the right; or two images; or sound."""
    import torch

    chance = torch.Generator().manual_seed(1)
    images = {"pixel_values": torch.randn(2, 3, 24, 24, generator=chance)}
    if family in IMAGES:
        return images
    ids, decoder = (torch.randint(2, 320, (3, count), generator=chance) for count in (17, 11))
    if family == "whisper":
        return {"input_features": torch.randn(3, 8, 60, generator=chance), "decoder_input_ids": decoder}
    mask, decoder_mask = torch.ones_like(ids), torch.ones_like(decoder)
    mask[1, :4], mask[2, 8:] = 0, 0
    found = {"input_ids": torch.where(mask == 1, ids, 1), "attention_mask": mask}
    if family in TRANSLATE:
        decoder_mask[2, 7:] = 0
        found |= {
            "decoder_input_ids": torch.where(decoder_mask == 1, decoder, 1),
            "decoder_attention_mask": decoder_mask,
        }
    return found | (images if family == "clip" else {})


def eager_attentions(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """What the model gives out under eager attention: kind to one (texts, heads, queries, keys) for each layer."""
    import torch

    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            return attentions_of(model(**inputs, output_attentions=True))
    finally:
        model.set_attn_implementation(before)


def attentions_of(output: Any) -> dict[str, Any]:
    if "vision_model_output" in output:
        return {"text": output.text_model_output.attentions, "vision": output.vision_model_output.attentions}
    if "encoder_attentions" in output:
        names = {"encoder": "encoder_attentions", "decoder": "decoder_attentions", "cross": "cross_attentions"}
        return {kind: output[name] for kind, name in names.items()}
    return {"self": output.attentions}


def save(folder: Path, family: str = "llama", **changes: Any) -> Path:
    """A folder in Hugging Face's layout."""
    from clearhead.trace.models import quiet

    with quiet():
        build(family, **changes).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    return folder
