"""Make the shipped `tiny` policy from nothing: `python scripts/make_tiny_policy.py [OUT_DIR]`.

A two-layer Qwen2 of 0.56 million parameters with a byte-level tokenizer, warmed up on the training pairs of
the addition task (never on held-out ones) until it answers a third to a half of them when it samples: a place from
which reinforcement learning has something to find. One thread and one seed, so the same machine makes the same file;
about half a minute.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from lit_rl.data.tasks import Addition

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# The template marks the assistant's tokens ({% generation %}), so that supervised methods can find them.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{% generation %}{{- message['content'] + '<|im_end|>' -}}{% endgeneration %}
{%- else -%}
{{- message['content'] + '<|im_end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
SEED, STEPS, WARM_UP, BATCH, LEARNING_RATE = 0, 300, 20, 256, 4e-3
TARGET = 0.36  # accuracy when it samples, on training pairs, at which the warm-up stops; greedy is then at about 0.6


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE without merges: a token a byte. The one kind that every `AutoTokenizer` reload keeps as it is."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD, START, END])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, padding_side="left")
    fast.chat_template = CHAT_TEMPLATE
    fast.model_max_length = 512
    return fast


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    torch.manual_seed(SEED)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,  # head_dim 32: the least that vLLM's CPU attention takes
        num_key_value_heads=4,
        max_position_embeddings=512,
        # Positions of one sum are few: a small base and a wide start let two layers find the carry sooner.
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        initializer_range=0.06,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(END),
        pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=None, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    return model


def encode(rows: list[dict], tokenizer: PreTrainedTokenizerFast) -> tuple[Tensor, Tensor]:
    """Right-padded ids and labels ``(n, s)``; the prompt and the padding carry no label (-100)."""
    texts = [
        (tokenizer.encode(row["prompt"]), [*tokenizer.encode(row["answer"]), tokenizer.eos_token_id]) for row in rows
    ]
    width = max(len(prompt) + len(answer) for prompt, answer in texts)
    ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels = torch.full((len(rows), width), -100)
    for i, (prompt, answer) in enumerate(texts):
        ids[i, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        labels[i, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    return ids, labels


def warm_up(model: Qwen2ForCausalLM, rows: list[dict], tokenizer: PreTrainedTokenizerFast) -> None:
    """Supervised steps on the answers until the policy samples `TARGET` of the training pairs right.

    The carry is learned all at once, at a step that differs from one kind of processor to the next; a fixed number of
    steps would ship now a policy that knows nothing, now one that knows all. Learning rate: up for `WARM_UP` steps,
    then on a line that would reach zero at `STEPS`.
    """
    ids, labels = encode(rows, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARM_UP) * (1 - step / STEPS)
    )
    generator = torch.Generator().manual_seed(SEED)
    model.train()
    for step in range(STEPS):
        picked = torch.randint(len(ids), (BATCH,), generator=generator)
        # Padding stands on the right, after everything a causal model could read: no mask is needed.
        loss = model(input_ids=ids[picked], labels=labels[picked]).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 8 == 0:
            share = accuracy(model, rows[:500], tokenizer, temperature=1.0)
            print(f"step {step:4d}  loss {loss.item():.3f}  sampled accuracy {share:.3f}")
            if share >= TARGET:
                break
            model.train()


@torch.no_grad()
def accuracy(
    model: Qwen2ForCausalLM, rows: list[dict], tokenizer: PreTrainedTokenizerFast, temperature: float
) -> float:
    """Share of right answers, decoding six tokens; rows of one prompt length at a time, so nothing is padded."""
    model.eval()
    generator = torch.Generator().manual_seed(SEED)
    right, groups = 0, {}
    for row in rows:
        groups.setdefault(len(row["prompt"]), []).append(row)
    for group in groups.values():
        ids = torch.tensor([tokenizer.encode(row["prompt"]) for row in group])
        start = ids.shape[1]
        for _ in range(6):
            logits = model(input_ids=ids).logits[:, -1]
            if temperature == 0:
                token = logits.argmax(-1, keepdim=True)
            else:
                token = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            ids = torch.cat([ids, token], dim=1)
        for row, line in zip(group, ids[:, start:].tolist()):
            end = line.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in line else len(line)
            right += end < len(line) and tokenizer.decode(line[:end]) == row["answer"]
    return right / len(rows)


def save(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(folder, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(__file__).parents[1] / "lit_rl" / "models" / "tiny"
    parser.add_argument("out", nargs="?", type=Path, default=default)
    out = parser.parse_args().out

    torch.set_num_threads(1)
    task = Addition()
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    warm_up(model, task.train(), tokenizer)
    held_out = task.val()
    greedy, sampled = (accuracy(model, held_out, tokenizer, t) for t in (0.0, 1.0))
    print(f"held-out accuracy: greedy {greedy:.3f}, sampled {sampled:.3f}")
    save(model, tokenizer, out)
    print(f"written to {out}")


if __name__ == "__main__":
    main()
