"""Make the shipped `digits` policy from nothing: `python scripts/make_digits_policy.py [OUT_DIR]`.

An Idefics3 of 0.2 million parameters with a byte-level tokenizer, which sees an image of 32 x 32 pixels as four tokens.
It is warmed up by `algo=sft` on the first 32 training images of the digits (never on held-out ones) until it reads a
third of the others when it samples. So few make it sure of itself before it is right, which leaves reinforcement
learning something to find beside sharpness: all of them would end at three quarters right when it is greedy. One thread
and one seed, so the same machine makes the same files; about half a minute.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import torch
from make_tiny_policy import save
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    GenerationConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    PreTrainedTokenizerFast,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from lit_rl.algorithms import SFT, AdamW, Constant
from lit_rl.core.rollout import Sampling
from lit_rl.data.example_module import SupervisedDataModule
from lit_rl.data.rendering import render_prompt
from lit_rl.data.row_visuals import image_of
from lit_rl.data.tasks import DigitTexts
from lit_rl.models import LanguageModel

PAD, START, END, IMAGE = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>"
SEEN = ["<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
"""What an Idefics3 writes around an image, beside the places of its parts."""

# The template marks the assistant's tokens ({% generation %}), so that supervised methods can find them.
CHAT_TEMPLATE = """\
{%- macro shown(content) -%}
{%- if content is string -%}{{- content -}}
{%- else -%}
{%- for part in content -%}
{%- if part['type'] == 'image' -%}{{- '<image>' -}}{%- else -%}{{- part['text'] -}}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{% generation %}{{- shown(message['content']) + '<|im_end|>' -}}{% endgeneration %}
{%- else -%}
{{- shown(message['content']) + '<|im_end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
SIDE, PATCH, JOINED = 32, 8, 2  # pixels of an image and of a patch; patches of a token, along each side
SEED, STEPS, BATCH, LEARNING_RATE = 0, 400, 32, 1e-3
SHOWN = 32  # images of the warm-up
TARGET = 0.36  # chance of the right reply, on other training images, at which it stops


def make_processor() -> Idefics3Processor:
    """Byte-level BPE without merges, a token a byte, and an image processor that cuts nothing."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = [PAD, START, END, IMAGE, *SEEN]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, padding_side="left")
    fast.chat_template = CHAT_TEMPLATE
    fast.model_max_length = 512
    side = {"longest_edge": SIDE}
    images = Idefics3ImageProcessorPil(size=side, max_image_size=side, do_image_splitting=False)
    tokens = (SIDE // PATCH // JOINED) ** 2
    return Idefics3Processor(images, fast, image_seq_len=tokens, chat_template=CHAT_TEMPLATE)


def make_model(tokenizer: PreTrainedTokenizerFast) -> Idefics3ForConditionalGeneration:
    torch.manual_seed(SEED)
    # head_dim 32: the least that vLLM's CPU attention takes
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    text = {
        **small,
        "model_type": "llama",
        "num_key_value_heads": 1,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
        "tie_word_embeddings": True,  # vLLM reads it here
        **ids,
    }
    config = Idefics3Config(
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        tie_word_embeddings=True,
        scale_factor=JOINED,
        text_config=text,
        vision_config={**small, "image_size": SIDE, "patch_size": PATCH},
        **ids,
    )
    model = Idefics3ForConditionalGeneration(config)
    model.generation_config = GenerationConfig(**ids)
    return model


class FewDigits(DigitTexts):
    """The first `SHOWN` training rows."""

    def train(self) -> list[dict[str, Any]]:
        return super().train()[:SHOWN]


class Probe:
    """Some rows, ready to be read: all of their prompts have the same tokens."""

    def __init__(self, model: LanguageModel, rows: list[dict[str, Any]]) -> None:
        assert model.processor is not None
        part = {"type": "image"}
        made, found = [], []
        for row in rows:
            (message,) = row["prompt"]
            shown = [{**message, "content": [part, {"type": "text", "text": message["content"]}]}]
            image = image_of(row["image"], "a digit", max_pixels=SIDE * SIDE)
            text = render_prompt(model.tokenizer, shown, "a digit", {})
            ids, vision = model.processor.process(text, [image], "a digit")
            assert vision is not None and isinstance(model.tokenizer.eos_token_id, int)
            made.append([*ids, *model.tokenizer.encode(row["answer"]), model.tokenizer.eos_token_id])
            found.append(vision.inputs)
        self.ids = torch.tensor(made)
        self.seen: dict[str, Tensor] = {name: torch.cat([each[name] for each in found]) for name in found[0]}

    @torch.no_grad()
    def accuracy(self, policy: Any) -> tuple[float, float]:
        """Of right replies: the share when the policy is greedy, and the mean chance of one when it samples."""
        policy.eval()
        logits = policy(input_ids=self.ids, **self.seen).logits[:, -3:-1]
        policy.train()
        wanted = self.ids[:, -2:]
        chances = logits.log_softmax(-1).gather(-1, wanted[..., None])[..., 0].sum(1).exp()
        return float((logits.argmax(-1) == wanted).all(1).float().mean()), float(chances.mean())


class StopAtTarget(L.Callback):
    """Ends the warm-up once the chance of the right reply, to images that it has not seen, is `TARGET`; looks every
    fourth step, since one kind of processor needs more of them than the next.
    """

    def __init__(self, probe: Probe) -> None:
        self.probe = probe

    def on_train_batch_end(self, trainer: L.Trainer, module: SFT, *_: object) -> None:
        step = trainer.global_step
        if step % 4 == 0:
            greedy, sampled = self.probe.accuracy(module.policy)
            print(f"step {step:4d}  greedy {greedy:.3f}  sampled {sampled:.3f}")
            trainer.should_stop = sampled >= TARGET


def warm_up(folder: Path) -> Any:
    """The policy of the folder after supervised steps on images and replies."""
    digits = DigitTexts()
    model = LanguageModel(str(folder), freeze=())
    module = SFT(
        model,
        optimizer=AdamW(lr=LEARNING_RATE),
        scheduler=Constant(),
        sampling=Sampling(max_new_tokens=2),
        seed=SEED,
    )
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        gradient_clip_val=1.0,
        limit_val_batches=0,
        callbacks=[StopAtTarget(Probe(model, digits.train()[SHOWN : SHOWN + 300]))],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=SupervisedDataModule(task=FewDigits(), batch_size=BATCH, seed=SEED))
    greedy, sampled = Probe(model, digits.val()).accuracy(module.policy)
    print(f"held-out accuracy: greedy {greedy:.3f}, sampled {sampled:.3f}")
    return module.policy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(__file__).parents[1] / "lit_rl" / "models" / "digits"
    parser.add_argument("out", nargs="?", type=Path, default=default)
    out = parser.parse_args().out

    torch.set_num_threads(1)
    processor = make_processor()
    model = make_model(processor.tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    with tempfile.TemporaryDirectory() as folder:
        save(model, processor, Path(folder) / "random")
        policy = warm_up(Path(folder) / "random")
    save(policy, processor, out)
    print(f"written to {out}: {sum(file.stat().st_size for file in out.iterdir()):,} bytes")


if __name__ == "__main__":
    main()
