"""Does training on the card hold together? The demo learns, resumes and repeats itself, and log-probs agree.

Three runs of 60 steps, the first two beside each other: each is 256 completions of some four tokens a step of a policy
of 0.6 million parameters, so the card waits for launches, and two processes share it without loss. Some 20 s for the
two, 15 s for the one that resumes, 15 s for log-probs of four generators in two types.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from gpu.result import SMALL, Result, stage
from gpu.training import ACCELERATOR, GPU

ROOT = Path(__file__).resolve().parents[2]
STEPS, MIDDLE = (4, 2) if SMALL else (60, 30)
LEARNED = -1.0 if SMALL else 0.04
"""Mean reward of the last ten steps less that of the first ten, at least: 0.11 on a CPU, a third of which is noise."""
SETTINGS = (
    f"trainer.max_steps={STEPS}",
    "trainer.limit_val_batches=0",
    "trainer.deterministic=true",
    f"callbacks.checkpoint.every_n_train_steps={MIDDLE}",
    "callbacks.checkpoint.save_top_k=-1",
    ACCELERATOR,
    "trainer.devices=1",
)
NATS = {"float32": (1e-4, 1e-3), "bfloat16": (0.05, 0.5)}
"""Of a token, the mean and the largest. Of equal weights 1e-5 is usual in float32, and 0.02 and 0.16 in bfloat16
(docs/generators.md): the policy is sure of most tokens, and has logits of up to 20, of which 2^-9 is rounded away."""


def run(result: Result, work: Path) -> None:
    whole, again, resumed = (work / "sound" / name for name in ("whole", "again", "resumed"))
    with result.part("two equal commands"):
        both = [start(whole), start(again)]
        for process in both:
            finish(process)
        result.check("weights of two equal commands, deterministic=true", distance(whole, again), most=0.0)
        rewards = [row["train/reward"] for row in metrics(whole) if "train/reward" in row]
        learned = statistics.mean(rewards[-10:]) - statistics.mean(rewards[:10])
        result.check(f"the demo learns in {STEPS} steps: reward, last ten less first ten", learned, least=LEARNED)
    with result.part("resumed in the middle"):
        interrupt(whole, resumed)
        finish(start(resumed, "ckpt_path=last"))
        result.check(f"weights of a run resumed at step {MIDDLE}", distance(whole, resumed), most=0.0)
    with result.part("export reloaded"):
        result.check("logits of the export, loaded on the CPU, from the policy's", of_export(whole), most=1e-3)
    for dtype in NATS:
        with result.part(f"log-probs in {dtype}"):
            log_probs(result, whole / "hf", dtype)


def start(folder: Path, *more: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, str(ROOT / "train.py"), *SETTINGS, *more, f"run_dir={folder}"])


def finish(process: subprocess.Popen[bytes]) -> None:
    if code := process.wait():
        raise RuntimeError(f"train.py ended with {code}")


def interrupt(whole: Path, folder: Path) -> None:
    """Copy a run as it was when its middle checkpoint was whole, and the rest had not happened."""
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("hf"))
    for file in (folder / "checkpoints").glob("*.ckpt"):
        if int(file.stem[5:]) > MIDDLE:
            file.unlink()
    summary = json.loads((folder / "summary.json").read_text())
    kept = {name: summary[name] for name in ("before", "losses", "prompts") if name in summary}
    (folder / "summary.json").write_text(json.dumps({"status": "running", **kept, "seconds": 1.0}))


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def distance(one: Path, other: Path) -> float:
    """The largest difference of any weight of two exports."""
    a, b = (load_file(folder / "hf" / "model.safetensors") for folder in (one, other))
    return max(float((a[name].float() - b[name].float()).abs().max()) for name in a)


def of_export(folder: Path) -> float:
    """The largest difference of logits: the export on the CPU, and the checkpoint's weights on the card."""
    from transformers import AutoModelForCausalLM

    exported = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    state = torch.load(folder / "checkpoints" / f"step_{STEPS:08d}.ckpt", map_location="cpu", weights_only=False)
    policy = AutoModelForCausalLM.from_config(exported.config, dtype=torch.float32)
    weights = {name.removeprefix("policy."): value for name, value in state["state_dict"].items()}
    policy.load_state_dict(weights, strict=False)
    policy.tie_weights()
    ids = torch.randint(0, exported.config.vocab_size, (4, 16), generator=torch.manual_seed(0))
    device = "cuda" if GPU else "cpu"
    with torch.no_grad():
        return float((policy.to(device).eval()(ids.to(device)).logits.cpu() - exported.eval()(ids).logits).abs().max())


def log_probs(result: Result, folder: Path, dtype: str) -> None:
    """Tokens that the native and the hf generator draw on the card, scored by the training pass and by the CPU."""
    from lit_rl.core.rollout import Prompts, Sampling
    from lit_rl.generation.hf import HFGenerator
    from lit_rl.generation.native import NativeGenerator
    from lit_rl.generation.noise import prompt_key
    from lit_rl.models import LanguageModel
    from lit_rl.models.forward import response_logprobs

    device, sampling = "cuda" if GPU else "cpu", Sampling(max_new_tokens=8)
    model = LanguageModel(str(folder), dtype=dtype)
    on_card = model.load().to(device).eval()
    on_cpu = LanguageModel(str(folder), dtype="float32").load().eval()
    ids = torch.randint(5, 20, (8, 12), generator=torch.manual_seed(0)).tolist()
    prompts = Prompts(ids, [int(prompt_key(0, 0, row, 0)) for row in range(8)], 4, eos_ids=(), pad_id=model.pad_id)
    generators = {
        "native": NativeGenerator(),
        "native without lean steps": NativeGenerator(lean_steps=False),
        "native with the model's own cache": NativeGenerator(grouped_cache=False),
        "hf": HFGenerator(),
    }
    for name, generator in generators.items():
        generator.sync(on_card, 0)
        with torch.no_grad():
            drawn = generator.generate(prompts, sampling)
            trained = response_logprobs(on_card, drawn, sampling)
            tensors = {name: value.cpu() for name, value in vars(drawn).items() if isinstance(value, torch.Tensor)}
            reference = response_logprobs(on_cpu, replace(drawn, **tensors), sampling)
        if isinstance(generator, NativeGenerator):
            result.figure(f"{name}, {dtype}: decode steps", generator.steps or "unknown")
        mask = drawn.response_mask
        pairs = {
            f"{name} against the training pass, {dtype}": drawn.sampler_logprobs - trained,
            f"the training pass on {name}'s tokens against the CPU's float32, {dtype}": trained.cpu() - reference,
        }
        for what, difference in pairs.items():
            far = difference.cpu()[mask.cpu()].abs()
            result.check(f"{what}: mean", float(far.mean()), most=NATS[dtype][0], unit="nats")
            result.check(f"{what}: largest", float(far.max()), most=NATS[dtype][1], unit="nats")


if __name__ == "__main__":
    stage(run)
