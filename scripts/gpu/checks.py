"""Is training on the card sound? The stages `sound` and `kernels`.

**sound**: does training on it hold together? The demo learns, resumes and repeats itself, and log-probs agree. Three
runs of 60 steps, the first two beside each other: each is 256 completions of some four tokens a step of a policy of 0.6
million parameters, so the card waits for launches, and two processes share it without loss. Some 20 s for the two, 15 s
for the one that resumes, 15 s for log-probs of four generators in two types.

**kernels**: is each way to compute equal to the CPU's float32? First the kernels themselves: values and gradients,
relative to the largest number of the reference. Then whole steps: one GRPO step by `train.py`'s door on completions
that are given, a setting a row. Its log-probs and gradient are held against the same step on the CPU in float32, within
the bounds of the benchmark's gate. A step of this shape (7 million parameters, 32 rows of 128 tokens) takes a card
milliseconds: 2 s a row are its start. Ten rows are 20 s, the kernels, the reference and the start 20 s, and Triton, for
two rows that come last, 30 s.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench.bounds import LIMITS
from bench.suites import C1
from bench.workload import Spec
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import is_nccl_available
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu import training
from gpu.prove import SMALL, Result, stage
from gpu.training import ACCELERATOR, GPU, PRETENDED, REAL

# --------------------------------------------------------------------------------------------------------------- sound


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


def sound(result: Result, work: Path) -> None:
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
    """Return the largest difference of any weight of two exports."""
    a, b = (load_file(folder / "hf" / "model.safetensors") for folder in (one, other))
    return max(float((a[name].float() - b[name].float()).abs().max()) for name in a)


def of_export(folder: Path) -> float:
    """Return the largest difference of logits: the export on the CPU, and the checkpoint's weights on the card."""
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
    """Score tokens that the native and the hf generator draw on the card by the training pass and by the CPU."""
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
        "native without lean steps": NativeGenerator(speedups={"lean_steps": False}),
        "native with the model's own cache": NativeGenerator(speedups={"grouped_cache": False}),
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


# ------------------------------------------------------------------------------------------------------------- kernels


WORK = replace(C1, shape="tiny", prompts=2, prompt_tokens=8, completion_tokens=8) if SMALL else C1
FLOAT32, TRUE, MIXED = (f"trainer.precision={name}" for name in ("32-true", "bf16-true", "bf16-mixed"))
WHOLE_STEPS: dict[str, tuple[str, ...]] = {
    "float32, as it comes": (FLOAT32,),
    "float32, hidden states through the model's own head": (FLOAT32, "model.speedups.fused_head=false"),
    "float32, each row with its own prompt": (FLOAT32, "model.speedups.shared_prompts=false"),
    "float32, activations offloaded": (FLOAT32, "model.gradient_checkpointing=offload"),
    "float32, Liger's kernels": (FLOAT32, "model.use_liger_kernel=true"),
    "autocast": (MIXED,),
    "bf16 weights, as it comes": (TRUE,),
    "bf16 weights, Liger's kernels": (TRUE, "model.use_liger_kernel=true"),
    "float32, DDP of one rank": (FLOAT32, "strategy=ddp", "trainer.devices=1"),
    "float32, compiled": (FLOAT32, "model.compile=true"),
    "bf16 weights, compiled": (TRUE, "model.compile=true"),
}
BY_TRITON = "model.use_liger_kernel=true", "model.compile=true"
COMPILES = 20
"""Seconds that a row with `model.compile` may take, most of which is Triton's: it is left out where fewer are left."""
RELATIVE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Of the largest number of the reference: 2^-24 and 2^-8, times some hundred terms of random sign."""


def kernels(result: Result, work: Path) -> None:
    each_function(result)
    reference = first_step(work, "reference", FLOAT32, "trainer.accelerator=cpu", "trainer.devices=1").work
    for number, (name, settings) in enumerate(WHOLE_STEPS.items()):
        if not REAL and set(settings) & set(BY_TRITON):
            result.not_run(name, "Triton needs a real card")
            continue
        if "model.use_liger_kernel=true" in settings and importlib.util.find_spec("liger_kernel") is None:
            result.not_run(name, "liger-kernel is not installed")
            continue
        if "model.compile=true" in settings and result.left < COMPILES:
            result.not_run(name, f"{result.left:.0f} s are left")
            continue
        if any(setting.startswith("strategy=") for setting in settings) and GPU and not is_nccl_available():
            result.not_run(name, "there is no NCCL")
            continue
        with result.part(name):
            spec = first_step(work, f"step_{number}", *settings)
            found = training.agreement(spec, reference)
            bounds = LIMITS["float32" if FLOAT32 in settings else "bfloat16"]
            note = f"of {found.tokens:,} tokens"
            result.check(f"{name}: log-probs", found.logprobs, most=bounds.logprobs, unit="nats", note=note)
            result.check(f"{name}: cosine of gradients", found.cosine, least=bounds.cosine)
            result.check(f"{name}: norm of the gradient", found.norm, most=bounds.norm, note="relative")
            shutil.rmtree(spec.work)


def first_step(work: Path, name: str, *settings: str) -> Spec:
    """Return one step of ours; `bench.protocol` keeps it in the spec's folder."""
    spec = training.prepared(WORK, work / f"kernels_{WORK.shape}", name, dtype=torch.float32)
    training.ours(spec, *settings)
    return spec


def each_function(result: Result) -> None:
    """Hold each function on the device against the same on the CPU in float32."""
    for dtype in RELATIVE:
        kind = str(dtype).removeprefix("torch.")
        with result.part(f"fused head, {kind}"):
            compared(result, f"fused head, {kind}", fused_head, dtype, (64, 128), (2048, 128))
        with result.part(f"folded attention, {kind}"):
            shapes = (8, 4, 32, 32), (2, 2, 64, 32), (2, 2, 64, 32), (8, 2, 32, 32), (8, 2, 32, 32)
            compared(result, f"folded attention, {kind}", folded, dtype, *shapes)
        for backend in (
            SDPBackend.MATH,
            SDPBackend.EFFICIENT_ATTENTION,
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.CUDNN_ATTENTION,
        ):
            what = f"attention, {backend.name.lower()}, {kind}"
            fused = backend is not SDPBackend.MATH
            if fused and (PRETENDED or not GPU):
                result.not_run(what, "a CUDA kernel")
            elif dtype is torch.float32 and backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
                result.not_run(what, "it takes half precision alone")
            else:
                with result.part(what):
                    compared(result, what, attention(backend), dtype, *[(4, 14, 256, 64)] * 3)
    with result.part("split masters"):
        split_masters(result)
    if GPU:
        with result.part("decode steps as CUDA graphs"):
            graphed(result)
    else:
        result.not_run("decode steps as CUDA graphs", "they are of CUDA")
    if GPU and not is_nccl_available():
        result.not_run("FSDP2 of one rank", "there is no NCCL")
    else:
        with result.part("FSDP2 of one rank"):
            sharded(result)


def compared(
    result: Result, name: str, function: Callable[..., Tensor], dtype: torch.dtype, *shapes: tuple[int, ...]
) -> None:
    """Check a function's value and the gradients of all its tensors."""
    torch.manual_seed(0)
    drawn = [torch.randn(shape).to(dtype) for shape in shapes]  # both sides take the rounded numbers
    sides = []
    for device, kind in (("cpu", torch.float32), ("cuda" if GPU else "cpu", dtype)):
        inputs = [each.to(device, kind).requires_grad_() for each in drawn]
        value = function(*inputs)
        weights = torch.randn(value.shape, generator=torch.manual_seed(1)).to(device, value.dtype)
        gradients = torch.autograd.grad(value, inputs, weights)
        sides.append([each.detach().float().cpu() for each in (value, *gradients)])
    for what, wanted, found in zip(("value", *(f"gradient {i + 1}" for i in range(len(shapes)))), *sides):
        far = float((found - wanted).abs().max() / wanted.abs().max())
        result.check(f"{name}: {what}", far, most=RELATIVE[dtype], note="relative")


def fused_head(hidden: Tensor, weight: Tensor) -> Tensor:
    from lit_rl.ops.fused_head import linear_logprobs

    ids = torch.randint(0, len(weight), hidden.shape[:1], generator=torch.manual_seed(2)).to(hidden.device)
    return linear_logprobs(hidden / hidden.shape[1] ** 0.5, weight, ids).logprobs


def folded(*tensors: Tensor) -> Tensor:
    from lit_rl.ops.folded_attention import Sharers, folded_attention

    groups = [Sharers(0, 0, 4, padding=5), Sharers(1, 4, 8)]
    return folded_attention(*tensors, groups, scaling=tensors[0].shape[-1] ** -0.5)


def attention(backend: SDPBackend) -> Callable[..., Tensor]:
    """Return causal attention by one of PyTorch's kernels; on the CPU by the formula."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(backend if query.device.type == "cuda" else SDPBackend.MATH):
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    return attend


def split_masters(result: Result) -> None:
    """20 steps of bfloat16 weights with split masters, beside AdamW of float32 weights on the CPU."""
    from lit_rl.algorithms.optim.split_adamw import SplitAdamW

    torch.manual_seed(0)
    start = torch.randn(64, 256).bfloat16().float()
    gradients = [torch.randn(64, 256).bfloat16().float() for _ in range(20)]
    settings: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    whole = torch.nn.Parameter(start.clone())
    half = torch.nn.Parameter(start.to("cuda" if GPU else "cpu", torch.bfloat16))
    plain, split = torch.optim.AdamW([whole], **settings), SplitAdamW([half], **settings)
    for gradient in gradients:
        whole.grad, half.grad = gradient.clone(), gradient.to(half)
        plain.step()
        split.step()
    moved, wanted = half.detach().float().cpu() - start, whole.detach() - start
    cosine = float(F.cosine_similarity(moved.flatten(), wanted.flatten(), dim=0))
    ratio = float(moved.norm() / wanted.norm())
    result.check("split masters, 20 steps: cosine of what moved", cosine, least=0.99, note="moments have 8 bits")
    result.check("split masters, 20 steps: length of what moved", ratio, least=0.97, most=1.03, note="relative")


def graphed(result: Result) -> None:
    """Hold samples of replayed decode steps against those of steps that are launched one by one."""
    from lit_rl.core.rollout import Prompts, Sampling
    from lit_rl.generation.native import NativeGenerator
    from lit_rl.generation.noise import prompt_key
    from lit_rl.models import LanguageModel

    described = LanguageModel("tiny", dtype="float32")
    policy, words = described.load().to("cuda").eval(), described.tokenizer
    texts, keys = [words.encode(text) for text in ("1+2=", "3+4=")], [prompt_key(0, 0, row, 0) for row in range(2)]
    prompts = Prompts(texts, keys, 8, (), words.pad_token_id, words.decode, words.encode)
    drawn, steps = [], []
    for cuda_graphs in (False, True):
        generator = NativeGenerator(speedups={"cuda_graphs": cuda_graphs})
        generator.sync(policy, 0)
        drawn.append(generator.generate(prompts, Sampling(max_new_tokens=64)))
        steps.append(generator.steps)
    launched, replayed = drawn
    result.figure("decode steps as CUDA graphs: taken", str(steps[1]))
    apart = int((launched.response_ids != replayed.response_ids).sum())
    result.check("decode steps as CUDA graphs: tokens that differ", apart, most=0, note="of 16 x 64")
    far = float((launched.sampler_logprobs - replayed.sampler_logprobs).abs().max())
    result.check("decode steps as CUDA graphs: log-probs", far, most=1e-3, unit="nats")


def sharded(result: Result) -> None:
    """Check the shipped policy's gradient, layers sharded over one rank: `strategy=fsdp` refuses a single device."""
    from lit_rl.models import LanguageModel

    device = "cuda" if GPU else "cpu"
    gradients = []
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl" if GPU else "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            for shards in (False, True):
                model: Any = LanguageModel("tiny", dtype="float32").load().to(device if shards else "cpu")
                if shards:
                    mesh = init_device_mesh(device, (1,))
                    for module in (*model.model.layers, model):
                        fully_shard(module, mesh=mesh)
                weight = next(model.parameters())
                ids = torch.randint(0, model.config.vocab_size, (4, 16), generator=torch.manual_seed(0))
                model(input_ids=ids.to(weight.device), labels=ids.to(weight.device)).loss.backward()
                found = [p.grad.full_tensor() if shards else p.grad for p in model.parameters()]
                gradients.append(torch.cat([grad.flatten().float().cpu() for grad in found]))
        finally:
            dist.destroy_process_group()
    wanted, found = gradients
    far = float((found - wanted).abs().max() / wanted.abs().max())
    result.check("FSDP2 of one rank: gradient", far, most=RELATIVE[torch.float32], note="relative")


if __name__ == "__main__":
    stage({"sound": sound, "kernels": kernels})
