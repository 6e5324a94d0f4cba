"""Small tokenizers of every sort, built in a moment: byte-level BPE, SentencePiece's two, WordPiece, bytes."""

from __future__ import annotations

from typing import Any

WORDS = ["the cat sat on the mat because the naïve cat was tired", "Then THE dog saw it, and ﬁve cafés!"]


def byte_level() -> Any:
    """As GPT-2, Llama 3, SmolLM2."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _trained(
        found,
        trainers.BpeTrainer(vocab_size=300, show_progress=False, initial_alphabet=alphabet, special_tokens=SPECIAL),
    )


def sentencepiece_bpe() -> Any:
    """As Llama 2, Gemma, Mistral: spaces are ``▁``, what is unknown falls apart into bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    words = ["▁", *"thecasonmd", "th", "the", "▁the", "ca", "cat", "▁cat"]
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *dict.fromkeys(words)]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("c", "a"), ("ca", "t"), ("▁", "cat")]
    vocabulary = {name: number for number, name in enumerate(names)}
    found = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    found.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    found.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    found.add_special_tokens(SPECIAL)
    return _fast(found)


def unigram() -> Any:
    """As T5 and XLM-R: SentencePiece's unigram, after NFKC."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    found = Tokenizer(models.Unigram())
    found.normalizer = normalizers.NFKC()
    found.pre_tokenizer = pre_tokenizers.Metaspace()
    found.decoder = decoders.Metaspace()
    return _trained(
        found, trainers.UnigramTrainer(vocab_size=60, show_progress=False, unk_token="<unk>", special_tokens=SPECIAL)
    )


def wordpiece() -> Any:
    """As BERT: lower case, accents dropped, words split at punctuation, with [CLS] and [SEP] around them."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    found = Tokenizer(models.WordPiece(unk_token="<unk>"))
    found.normalizer = normalizers.BertNormalizer(lowercase=True)
    found.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    found.decoder = decoders.WordPiece(prefix="##")
    trainer = trainers.WordPieceTrainer(
        vocab_size=80, show_progress=False, special_tokens=SPECIAL, continuing_subword_prefix="##"
    )
    found.train_from_iterator(WORDS * 4, trainer)
    ends = ("</s>", found.token_to_id("</s>"))
    found.post_processor = processors.BertProcessing(ends, ("<s>", found.token_to_id("<s>")))
    return _fast(found)


def bytes_alone() -> Any:
    """As ByT5: one token a byte, and no offsets."""
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer(extra_ids=0)


SPECIAL = ["<s>", "</s>", "<unk>"]
ALL = {
    "byte-level": byte_level,
    "sentencepiece-bpe": sentencepiece_bpe,
    "unigram": unigram,
    "wordpiece": wordpiece,
    "bytes": bytes_alone,
}


class Slow:
    """A tokenizer that keeps no offsets, around one that does."""

    is_fast = False

    def __init__(self, fast: Any, before: tuple[int, ...] = ()) -> None:
        self.fast, self.before = fast, before
        self.all_special_ids, self.unk_token_id = fast.all_special_ids, fast.unk_token_id

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [*self.before, *self.fast(text, **options)["input_ids"]]}

    def decode(self, ids: list[int]) -> str:
        return str(self.fast.decode(ids))


def _trained(found: Any, trainer: Any) -> Any:
    found.train_from_iterator(WORDS * 4, trainer)
    return _fast(found)


def _fast(found: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=found, bos_token="<s>", eos_token="</s>", pad_token="</s>", unk_token="<unk>"
    )
