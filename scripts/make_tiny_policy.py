"""Make the shipped `tiny` policy from nothing: `python scripts/make_tiny_policy.py [OUT_DIR]`.

A two-layer Qwen2 of 0.56 million parameters with a byte-level tokenizer, warmed up by `algo=sft` on the training pairs
of the addition task (never on held-out ones) until it answers a third to a half of them when it samples: a place from
which reinforcement learning has something to find. One thread and one seed, so the same machine makes the same file;
about half a minute. The shipped file was made when the warm-up was still a loop of its own: another one, as good.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

import lightning as L
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from lit_rl.algorithms import SFT, AdamW, Linear
from lit_rl.core.rollout import Sampling
from lit_rl.data.example_module import SupervisedDataModule
from lit_rl.data.tasks import AdditionText

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
SEED, STEPS, WARM_UP, BATCH, LEARNING_RATE = 0, 600, 20, 256, 4e-3
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
    config.lit_rl_prompts = "text"  # the additions: `lit-rl chat` asks without its template
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=None, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    return model


class StopAtTarget(L.Callback):
    """Ends the warm-up once the policy samples `TARGET` of some training pairs right; looks every eighth step.

    The carry is learned all at once, at a step that differs from one kind of processor to the next; a fixed number of
    steps would make now a policy that knows nothing, now one that knows all.
    """

    def __init__(self, rows: list[dict]) -> None:
        self.rows = rows

    def on_train_batch_end(self, trainer: L.Trainer, module: SFT, *_: object) -> None:
        step = trainer.global_step - 1
        if step % 8 == 0:
            share = accuracy(module.policy, self.rows, module.tokenizer, temperature=1.0)
            module.policy.train()
            print(f"step {step:4d}  sampled accuracy {share:.3f}")
            trainer.should_stop = share >= TARGET


def warm_up(folder: Path, task: AdditionText) -> Qwen2ForCausalLM:
    """The policy of the folder after supervised steps on the sums and their answers.

    Learning rate: up for `WARM_UP` steps, then on a line that would reach zero at `STEPS`.
    """
    module = SFT(
        str(folder),
        optimizer=AdamW(lr=LEARNING_RATE, betas=(0.9, 0.98)),
        scheduler=Linear(warmup_steps=WARM_UP),
        sampling=Sampling(max_new_tokens=6),
        seed=SEED,
    )
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        gradient_clip_val=1.0,
        limit_val_batches=0,
        callbacks=[StopAtTarget(task.train()[:500])],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=SupervisedDataModule(task=task, batch_size=BATCH, seed=SEED))
    return module.policy


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


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | ProcessorMixin, out: Path) -> None:
    """Write both to a folder, which is replaced once they are whole."""
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
    task = AdditionText()
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    with tempfile.TemporaryDirectory() as folder:
        save(model, tokenizer, Path(folder) / "random")
        model = warm_up(Path(folder) / "random", task)
    held_out = task.val()
    greedy, sampled = (accuracy(model, held_out, tokenizer, t) for t in (0.0, 1.0))
    print(f"held-out accuracy: greedy {greedy:.3f}, sampled {sampled:.3f}")
    save(model, tokenizer, out)
    print(f"written to {out}")


if __name__ == "__main__":
    main()
