"""Byte-level tokenizers without merges: any text comes back, and no file is needed."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if thinking is defined and not thinking %}<think></think>{% endif %}"
)


def make_tokenizer(*, template: str | None = CHATML, wraps: bool = False) -> PreTrainedTokenizerBase:
    """`wraps`: puts BOS before and EOS after every text, as some real tokenizers do."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|bos|>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>"],
    )
    if wraps:
        ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<|bos|>", "<|im_end|>")]
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A <|im_end|>", special_tokens=ids
        )
    tokenizer.chat_template = template
    return tokenizer
