"""Tokenizers whose tokens are longer than a byte, so that one may straddle the end of a prompt."""

from __future__ import annotations

from byte_tokenizers import CHATML
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers import decoders as text_decoders
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

LINES = ["the cat sat on the mat", "hello hello world", "abcabcabc", "1234 1234", "\n\n\n\n", "it's the cat's mat"] * 20
MARKED = CHATML.replace(
    "{{ m['content'] }}<|im_end|>\n",
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>{% endif %}{{ '\n' }}",
)
SPECIAL = ["<|im_end|>", "<|pad|>", "<|im_start|>"]


def make_merging_tokenizer(*, template: str | None = MARKED, metaspace: bool = False) -> PreTrainedTokenizerBase:
    """Byte-level BPE; with `metaspace` one that marks the start of a text like a space, as Llama's does."""
    if metaspace:
        backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        backend.decoder = text_decoders.Metaspace(prepend_scheme="first", split=False)
        trainer = trainers.BpeTrainer(vocab_size=150, special_tokens=["<unk>", *SPECIAL], show_progress=False)
    else:
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = text_decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        )
    backend.train_from_iterator(LINES, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = template
    return tokenizer


def make_llama_like_tokenizer(*, template: str | None = MARKED) -> PreTrainedTokenizerBase:
    """Marks the start of a text like a space, knows ASCII and some pairs of it, and every other byte by itself."""
    ascii_letters = [chr(code) for code in range(33, 127)]
    pairs = [("▁", letter) for letter in "6abht"] + [("t", "h"), ("h", "e"), ("a", "b"), (":", ":"), ("▁th", "e")]
    pairs.insert(-1, ("▁t", "h"))
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *ascii_letters, *("".join(p) for p in pairs)]
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(words))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = text_decoders.Sequence(
        [
            text_decoders.Replace("▁", " "),
            text_decoders.ByteFallback(),
            text_decoders.Fuse(),
            text_decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = template
    return tokenizer
