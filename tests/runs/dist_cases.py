"""The table of `test_dist_cases.py`: short runs that two processes have to do as one does (`dist_jobs.py`).

Plain SGD everywhere: the change of the weights is the gradient.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "algorithms")]  # of a new process

import torchvision_beside  # noqa: I001  # before transformers, which looks for torchvision once
import dist_equal
import lightning as L
import torch
import vision_toys
from copied_engines import CopiedPolicyGenerator
from forking_agents import forking
from dist_equal import CLIP
from objective_terms import TWO_STEPS, EngineWithOtherLogprobs, fresh

from lit_rl.algorithms import BCO, DPO, GRPO, KTO, PPO, Constant, Reinforce, RewardModeling
from lit_rl.algorithms.evaluation.validation import Evaluation
from lit_rl.algorithms.optim.optimizers import ByPath
from lit_rl.algorithms.optim.strategies import FSDP2Strategy
from lit_rl.algorithms.terms.credit import RoleBaseline, RunningNorm
from lit_rl.algorithms.terms.groups import BestOfGroup, DynamicSampling, TopOfGroup, shortest
from lit_rl.algorithms.terms.optimal_value import OptimalValue
from lit_rl.algorithms.terms.regularizers import AdaptiveEntropy, AdaptiveKL
from lit_rl.algorithms.terms.teachers import ModelTeacher, SampledKL
from lit_rl.algorithms.terms.verdict_terms import DensityRatio
from lit_rl.core.rollout import Sampling
from lit_rl.data.curriculum import Curriculum
from lit_rl.data.example_module import PreferenceDataModule
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.supervised_text import SupervisedText
from lit_rl.data.tasks import Addition, AdditionPairs, Digits
from lit_rl.environments import CustomEnvironment
from lit_rl.generation import RolloutFunction
from lit_rl.models import LanguageModel, Lora
from lit_rl.models.critics import SeparateCritic
from lit_rl.models.sharding import full_state_dict
from lit_rl.ops import advantages, engine_mismatch, policy_losses, preference_losses, selection
from lit_rl.rewards import environment

Shown = Callable[[Any], bool]
"""Of what two processes left."""


class Watch(L.Callback):
    """Keeps what a run did, of every rank."""

    def seen(self, module: Any) -> dict[str, Any]:
        raise NotImplementedError


@dataclass(frozen=True)
class Case:
    """One short run, and how far two processes may be from one.

    Attributes:
        made: The words of a command line, or what makes the module and the data module, in a folder.
        steps: Optimizer steps.
        share: How far weights may differ, as a share of how far they moved.
        beyond: The same as a number, for what did not move.
        moved: How far a weight must have moved.
        ddp: The micro-batches of each process in a step under DDP; none: it is not run.
        fsdp: The same under FSDP2.
        alone: The micro-batches of the one process.
        cut: Metrics that belong to a batch or to some rows, of which two processes have other ones.
        caches: How many files of a precomputed reference both leave.
        watch: Makes what keeps more of the run.
        shown: What a run must have done, else it would show nothing.
        start: What it starts from, in a folder.
        settings: More of the Trainer.
    """

    made: Sequence[str] | Callable[[Path], tuple[Any, Any]]
    steps: int
    share: float
    beyond: float
    moved: float = 1e-3
    ddp: int | None = 1
    fsdp: int | None = None
    alone: int = 1
    cut: Sequence[str] = ()
    caches: int = 0
    watch: Callable[[], Watch] | None = None
    shown: Shown | None = None
    start: Callable[[Path], LanguageModel] = lambda _: LanguageModel("tiny")
    settings: Mapping[str, Any] = field(default_factory=dict)


def run(name: str, folder: Path, devices: int, accumulate: int = 1, **more: Any) -> None:
    """Train, validate on everything, and leave `name.pt` there."""
    case = CASES[name]
    module, data = case.made(folder) if callable(case.made) else dist_equal.parts(*case.made)
    watch = case.watch() if case.watch else None
    trainer = dist_equal.trainer(
        folder / name, devices, max_steps=case.steps, accumulate_grad_batches=accumulate,
        callbacks=[watch] if watch else [], **{**case.settings, **more},
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    metrics = dist_equal.logged(trainer)
    beside = watch.seen(module) if watch else {}
    trainer.limit_val_batches = 1.0
    trainer.validate(module, datamodule=data, verbose=False)
    parts = {part: full_state_dict(getattr(module, part)) for part in ("policy", *module.trained_beside)}
    weights = {f"{part}.{key}": value for part, state in parts.items() for key, value in state.items()}
    metrics |= dist_equal.logged(trainer)
    if trainer.is_global_zero:
        left = {"weights": weights, "metrics": metrics, "cut": list(case.cut), **beside}
        torch.save(left, folder / f"{name}.pt")
    trainer.strategy.barrier()


def two(row: str, folder: Path) -> None:
    """Run a row of the table in both processes: `ddp/NAME` or `fsdp/NAME`."""
    way, name = row.split("/")
    (folder / way).mkdir(parents=True, exist_ok=True)
    strategy = FSDP2Strategy() if way == "fsdp" else "ddp"
    run(name, folder / way, 2, getattr(CASES[name], way), strategy=strategy)


# What learns from a data set.

COMMON = [
    *("data.task.max_operand=9", "data.task.val_rows=6", "optimizer=by_path", "optimizer.path=torch.optim.SGD"),
    *("scheduler=constant", "scheduler.warmup_steps=0"),
]
MPO = ["algo=dpo", "algo/preference=[sigmoid,bco_pair,sft]", "algo.preference_weights={sigmoid:0.8,bco_pair:0.2}"]
UNEVEN = ["data.task.val_rows=5", "data.val_batch_size=2"]
"""Validation batches that the ranks do not share evenly: one has a row less, and yet has to gather every layer."""
CUT = {
    **{"kto": ["val/kl", "val/loss"], "aot": ["val/loss"], "aot-unpaired": ["val/loss"]},
    "taught-top": ["train/teacher/overlap"],  # of the first rows of each rank
}
"""KTO's baseline is that of the batch at hand, AOT sorts over it."""


def offline(*words: str, ddp: bool = True, fsdp: bool = True, cut: Sequence[str] = ()) -> Case:
    short = [] if "reward_model" in words[0] else ["sampling.max_new_tokens=2"]
    made = [*COMMON, "data.batch_size=8", "optimizer.lr=0.05", *short, *words]
    ways = {"ddp": 1 if ddp else None, "fsdp": 2 if fsdp else None}
    return Case(made, steps=3, share=2e-4, beyond=2e-6, moved=1e-4, cut=cut, **ways)


OFFLINE = {
    # SFT and DPO under FSDP2 are below. Packed rows are run under FSDP2, and SimPO is CPO with another formula.
    "sft": offline("algo=sft", fsdp=False),
    "sft-packed": offline("algo=sft", "data.packing=best_fit", "data.max_length=24", ddp=False),
    "dpo": offline("algo=dpo", fsdp=False),
    "mpo": offline(*MPO),
    "aot": offline("algo=dpo", "algo/preference=[aot]", cut=CUT["aot"]),
    "aot-unpaired": offline("algo=dpo", "algo/preference=[aot_unpaired]", fsdp=False, cut=CUT["aot-unpaired"]),
    "kto": offline("algo=kto", cut=CUT["kto"]),
    "bco": offline("algo=bco"),
    "cpo": offline("algo=cpo"),
    "tpo": offline("algo=tpo", "algo.beta=0.1"),
    "simpo": offline("algo=simpo", ddp=False),
    "orpo": offline("algo=orpo"),
    "reward-model": offline("algo=reward_model"),
    "process-reward-model": offline("algo=process_reward_model", "data.task.max_operand=30"),  # of one step or two
}
OF_SHARDS = {
    "dpo-recomputed": offline("algo=dpo", "model.gradient_checkpointing=true", *UNEVEN, ddp=False),
    "sft-lora": offline("algo=sft", "model.lora.r=4", *UNEVEN, ddp=False),
    "mpo-lora": offline(*MPO, "model.lora.r=4", "reference=adapter_base", *UNEVEN, ddp=False),
}
"""What is new where weights are spread: layers gathered again in the backward pass, frozen ones, and a reference that
is the policy without its adapters. Their validation is uneven."""


def precomputed(method: Any, **terms: Any) -> Callable[[Path], tuple[Any, Any]]:
    """The reference is asked before the first step; two epochs of verdicts, which KTO pairs anew in each."""

    def made(_: Path) -> tuple[Any, Any]:
        module = method("tiny", optimizer=ByPath("torch.optim.SGD", lr=0.1), scheduler=Constant(),
                        sampling=Sampling(max_new_tokens=6), precompute_reference=True, **terms)  # fmt: skip
        return module, PreferenceDataModule(task=AdditionPairs(max_operand=4, val_rows=6), batch_size=8,
                                            val_batch_size=4)  # fmt: skip

    return made


PRECOMPUTED = {
    f"precomputed-{name}": Case(
        made, steps=5, share=1e-4, beyond=1e-6, ddp=2, alone=2, cut=CUT.get(name, ()),
        caches=5 if name == "kto" else 2, settings={"limit_val_batches": 1.0},
    )  # a file for each set: rows of training and validation; for KTO pairs of two epochs and of validation
    for name, made in {
        "dpo": precomputed(DPO, preference={"sigmoid": preference_losses.sigmoid, "sft": preference_losses.sft}),
        "aot": precomputed(DPO, preference=preference_losses.aot),  # over the step
        "kto": precomputed(KTO),
        "bco": precomputed(BCO, prompt_weights=DensityRatio(sample_rows=30)),
    }.items()
}  # fmt: skip

# What writes what it learns from. A completion's random numbers are named by its row of the data.

REWARDS = Path(__file__).with_name("dist_rewards.py")
ONLINE = ["reward=function", f"reward.fn={REWARDS}:varied", "data.prompts_per_rollout=8", "optimizer.lr=0.01"]
VERDICTS = ["judge=function", f"judge.fn={REWARDS}:with_ties_and_failures"]
GKD = [
    *("algo=gkd", "model.init_kwargs={num_hidden_layers: 1, layer_types: [full_attention]}"),
    *("algo.teacher.name=tiny", "data.batch_size=8", "optimizer.lr=0.1"),
]


def written(*words: str, fsdp: bool = False, shown: Shown | None = None) -> Case:
    made = [*COMMON, "sampling.max_new_tokens=4", *words]
    return Case(made, steps=4, share=1e-4, beyond=1e-6, ddp=2, fsdp=1 if fsdp else None, shown=shown)


def metric(name: str, wanted: Callable[[float], bool]) -> Shown:
    return lambda left: wanted(left["metrics"][f"train/{name}"])


def ties_and_failures(left: Any) -> bool:
    """They are no part of a mean."""
    return all(0 < left["metrics"][f"train/judge/{kind}"] < 1 for kind in ("ties", "failures"))


some_ties = metric("judge/ties", lambda share: share < 1)
WRITTEN = {
    "online-dpo": written("algo=online_dpo", *ONLINE, "algo.missing_eos_penalty=1.5", shown=some_ties),
    "online-dpo-of-four": written(
        "algo=online_dpo", *ONLINE, *VERDICTS, "algo.group_size=4", "algo/preference=[sigmoid,sft]",
        "algo.iterations=2", "seed=3", fsdp=True, shown=ties_and_failures,
    ),
    "online-ipo": written("algo=online_ipo", *ONLINE, "optimizer.lr=0.0003", shown=some_ties),
    "iterative-dpo": written("algo=iterative_dpo", *ONLINE, "reference.every=2"),
    "xpo": written("algo=xpo", *ONLINE, *VERDICTS, "algo.alpha=0.1", shown=ties_and_failures),
    "nash-md": written("algo=nash_md", *ONLINE, *VERDICTS, fsdp=True, shown=ties_and_failures),
    "raft": written("algo=raft", *ONLINE, "algo.group_size=4", shown=metric("groups/tied", lambda x: 0 < x < 1)),
    "gkd-data": written(*GKD, "algo.on_policy_fraction=0", shown=metric("on_policy", lambda x: x == 0)),
    "gkd-student": written(
        *GKD, "algo.on_policy_fraction=1", "algo.beta=0.9", shown=metric("on_policy", lambda x: x == 1)
    ),
    "gkd-mixed": written(*GKD, "algo.on_policy_fraction=0.5", "algo.teacher_completions=true", fsdp=True),
}  # fmt: skip

# Terms of an objective that count over a whole optimizer step.

FORMULAS = (
    *("clipped-delta", "gspo-token", "cispo", "cispo-two-sided", "sapo", "dppo-tv", "dppo-kl", "prime-rl", "up-grpo"),
    *("dro", "fipo", "otb"),
    *("cpgd", "opo", "process", "maxrl", "pass-at-k", "lite-ppo", "vespo", "kl-cov", "ppo", "top-entropy-and-bonus"),
    *("kl-corrected-k1", "kl-corrected-k2", "kl-in-reward", "entropy-bonus", "entropy-adaptive", "top-entropy"),
)
"""Of `TWO_STEPS`, what differs from one of the others in the formula of a token or of a group, which lies on one rank
whole: that many processes do what one does is shown by the other; micro-batches: `algorithms/test_gradients.py`."""
assert set(FORMULAS) < set(TWO_STEPS)


def varied(completions: list[str], log_metric: Callable[[str, float], None]) -> list[float]:
    """Differs within most groups, and not in all. What it logs, it logs under names that not every rank sees."""
    for text in completions:
        log_metric(f"first/{ord(text[:1] or '-')}", len(text))
    return [float(len(text) % 2) for text in completions]


def uneven(completions: list[str], answer: list[str]) -> list[float]:
    """One and the same within the groups of many prompts, of which ranks have different numbers."""
    return [float(len(text) % 2) if int(right) > 7 else 0.0 for text, right in zip(completions, answer)]


class Teaching(Watch):
    """The widest response of a rank in each rollout, and its rows that a gradient comes from."""

    def __init__(self) -> None:
        self.widths: list[int] = []
        self.teaching: list[int] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        self.widths.append(int(pl_module.rollout.completions.lengths.max()))
        teaching = pl_module.rows_that_teach(pl_module.rollout)
        self.teaching.append(len(pl_module.rollout) if teaching is None else int(teaching.sum()))

    def seen(self, module: Any) -> dict[str, Any]:
        mine = {"widths": self.widths, "teaching": self.teaching}
        return {each: module.ranks.gather(torch.tensor([found])).tolist() for each, found in mine.items()}


def term(
    method: Any, fresh_settings: Callable[[], dict[str, Any]], fsdp: bool = False, shown: Shown | None = None
) -> Case:
    """Settings are made anew for each run: controllers hold a state."""

    def made(_: Path) -> tuple[Any, Any]:
        settings = {"group_size": 4, "lr": 0.1, "sampling": Sampling(max_new_tokens=6), **fresh_settings()}
        data = settings.pop("data", {})
        module = method(
            "tiny", settings.pop("reward", varied), scheduler=Constant(),
            optimizer=ByPath("torch.optim.SGD", lr=settings.pop("lr")), **settings,
        )  # fmt: skip
        data = {"prompts_per_rollout": 8, **data}
        return module, RolloutDataModule(task=Addition(max_operand=5, val_rows=4), **data)

    clipped = {"gradient_clip_val": 1.0}
    return Case(
        made, steps=4, share=1e-4, beyond=2e-7, fsdp=1 if fsdp else None, watch=Teaching, shown=shown, settings=clipped
    )


def _other_widths(left: Any) -> bool:
    """Else nothing was padded before it was gathered."""
    first, second = left["widths"]
    return len(first) == 4 and first != second


def _learns_nothing_on_one_rank(left: Any) -> bool:
    """In one step a rank learns from no row, and still takes as many passes as the other."""
    return any(not mine and theirs for mine, theirs in zip(*left["teaching"]))


def _one_text_a_step() -> dict[str, Any]:
    """One of the ranks has none of its own, and takes as many passes as the other."""
    path = Path(tempfile.mkdtemp()) / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": f"{n}+1={n + 1}"}) + "\n" for n in range(3)))
    return {"ptx": SupervisedText(str(path), batch_size=1), "ptx_coef": 0.5}


TERMS = {
    "ppo": term(
        PPO,
        lambda: {
            "iterations": 2, "reward_beta": 0.2, "critic": SeparateCritic(), "vf_coef": 0.5, "group_size": 2, "lr": 0.05
        },
        fsdp=True,  # an actor and a critic
        shown=lambda left: any(name.startswith("train/first/") for name in left["metrics"]),
    ),
    "entropy": term(
        GRPO,
        lambda: {
            "iterations": 2, "selection": partial(selection.top_entropy, share=0.3),
            "entropy": AdaptiveEntropy(coef=0.1, delta=0.05, target=10.0),
        },
        shown=metric("entropy_coef", lambda coef: coef > 0),
    ),
    "kl-cov": term(
        GRPO,
        lambda: {"iterations": 2, "loss": partial(policy_losses.kl_cov_loss, share=0.2)},
        shown=metric("kl_cov/share", lambda share: 0 < share < 0.5),
    ),
    "weights": term(
        GRPO,
        lambda: {
            "iterations": 2, "generator": EngineWithOtherLogprobs(), "correction": engine_mismatch.token_truncate,
            "weight_norm": engine_mismatch.normalize_sequence_weights,
        },
        shown=metric("sampling/ess", lambda size: size < 1),
    ),
    "ahead": term(
        GRPO,
        lambda: {"generator": CopiedPolicyGenerator(lag=1)},
        shown=metric("sampling/staleness/max", lambda steps: steps == 1),
    ),
    "batch-normalized": term(  # over all ranks in a validation, too
        GRPO,
        lambda: {
            "advantage": advantages.batch_normalized, "beta": 0.1,
            "evaluation": Evaluation(group_size=3, temperature=1.0, log_policy=True),
        },
        shown=lambda left: left["metrics"]["val/loss"] > 0.01,
    ),
    "texts": term(GRPO, _one_text_a_step, fsdp=True, shown=metric("ptx_loss", lambda loss: loss > 0)),
    "skipped": term(GRPO, lambda: {"reward": uneven}, fsdp=True, shown=_learns_nothing_on_one_rank),
    "dynamic": term(
        GRPO,
        lambda: {"groups": DynamicSampling(6), "beta": 0.2, "kl_control": AdaptiveKL(0.01, 64)},
        shown=metric("groups/drawn", lambda drawn: drawn > 0),
    ),
    "curriculum": term(  # what is known of all rows is in the shares of the pools
        GRPO,
        lambda: {"groups": DynamicSampling(6, tolerance=0.3), "data": {"curriculum": Curriculum()}},
        shown=metric("curriculum/rows/unseen", lambda share: share < 0.5),
    ),
    # Prompts that do not divide over two ranks: both complete each of them, and draw what one process draws.
    "shared-one-prompt": term(GRPO, lambda: {"group_size": 8, "data": {"prompts_per_rollout": 1}}, fsdp=True),
    "shared-steps": term(
        GRPO,
        lambda: {
            "minibatches": 3, "iterations": 2, "advantage": advantages.pass_at_k, "data": {"prompts_per_rollout": 3}
        },
    ),
    "shared-dynamic": term(
        GRPO,
        lambda: {
            "groups": DynamicSampling(6, tolerance=0.3), "group_size": 6,
            "data": {"prompts_per_rollout": 5, "curriculum": Curriculum()},
        },
        shown=metric("groups/drawn", lambda drawn: drawn > 0),
    ),
    "shared-top": term(
        GRPO,
        lambda: {
            "groups": TopOfGroup(3, shortest), "group_size": 8, "minibatches": 3, "data": {"prompts_per_rollout": 3}
        },
    ),
    "shared-best": term(
        GRPO,
        lambda: {
            "groups": BestOfGroup(), "advantage": advantages.constant, "group_size": 6,
            "data": {"prompts_per_rollout": 3},
        },
    ),
    "shared-greedy": term(
        GRPO, lambda: {"advantage": advantages.remax, "group_size": 2, "data": {"prompts_per_rollout": 5}}
    ),
    "whitened": term(
        Reinforce,
        lambda: {"iterations": 2, "reward_beta": 0.2, "reward_norm": RunningNorm()},
        shown=_other_widths,
    ),
    "baselines of roles": term(
        Reinforce,
        lambda: {"iterations": 2, "advantage": RoleBaseline(0.5), "role": "answer"},
        shown=metric("role/7/baseline", lambda earned: earned > 0),
    ),
    "optimal-values": term(  # of prompts that the other rank completed
        Reinforce, lambda: {"group_size": 1, "advantage": OptimalValue(samples=3), "reward_beta": 0.1}
    ),
    "taught-by-model": term(  # the first of the policy's two layers, sharded like the policy
        GRPO,
        lambda: {
            "iterations": 2, "distillation": SampledKL(0.5),
            "teacher": ModelTeacher(
                LanguageModel("tiny", init_kwargs={"num_hidden_layers": 1, "layer_types": ["full_attention"]})
            ),
        },
        fsdp=True,
        shown=metric("teacher/kl", lambda kl: kl > 0),
    ),
    "vespo": term(
        GRPO,
        lambda: {
            "iterations": 2, "loss": policy_losses.vespo_loss, "generator": EngineWithOtherLogprobs(),
            "correction": engine_mismatch.token_truncate,
        },
    ),
    **{
        f"step-{name}": replace(
            term(
                kind, lambda terms=terms: {"iterations": 2, **fresh(terms)},
                fsdp=name == "taught-top",  # the sharded policy is called once more, behind other prompts
            ),
            cut=CUT.get(name, ()),
        )
        for name, (kind, terms) in TWO_STEPS.items()
        if name not in FORMULAS
    },
}  # fmt: skip

# `bf16-mixed` under FSDP2: float32 is gathered and reduced, autocast multiplies in bfloat16, as in one process.

AS_UNDER_FSDP2 = ["generator.speedups={lean_steps: false}", "model.speedups={shared_prompts: false}"]
"""FSDP2 does neither. In float32 they change the last bits, in bfloat16 how each product is rounded."""


def _clipped_float32(left: Any) -> bool:
    float32 = {weight.dtype for weight in left["weights"].values()} == {torch.float32}
    return float32 and left["metrics"]["train/grad_norm"] > CLIP


MIXED = {
    # A micro-batch's gradient is rounded to bfloat16, so one process has as many as both ranks together. Seen: 1.3e-5
    # of the change at most. Float32 is 4e-2 away, and other micro-batches are 1e-2 away.
    f"mixed-{name}": Case(
        words, steps=4, share=1e-4, beyond=1e-7, ddp=None, fsdp=1, alone=2, shown=_clipped_float32,
        settings={"gradient_clip_val": CLIP, "precision": "bf16-mixed"},
    )
    for name, words in {
        "grpo": [*dist_equal.GRPO, *AS_UNDER_FSDP2],
        "dpo": dist_equal.DPO,
    }.items()
}  # fmt: skip

# Episodes: numbers of turns differ, one has an environment that fails, and a rollout function asks the generator
# another number of times on each rank.

KINDS = ["short", "long", "long", "short", "fails", "long", "short", "long"]
"""Of the rows of an epoch: two rollouts of four."""


class ByRow:
    """Talks for as long as its row says, or is lost in its second turn."""

    def reset(self, *, seed: int, kind: str) -> str:
        self.kind, self.turns = kind, 0
        return f"{seed % 10}:"

    def step(self, action: str) -> tuple[Any, ...]:
        self.turns += 1
        if self.kind == "fails" and self.turns == 2:
            raise ConnectionError("no server")
        return "?", float(sum(map(ord, action)) % 3), self.kind == "short", False, {}


def goes_on(prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
    """Some completions are gone on with once, some twice, so that ranks ask another number of times."""
    texts = [trainer.encode(prompt) for prompt in prompts]
    out = trainer.generate(texts)
    said, logprobs = out["completion_ids"], out["logprobs"]
    wanted = {"short": 0, "long": 2, "fails": 1}
    for round_ in range(2):
        rows = [row for row, kind in enumerate(trainer.columns["kind"]) if wanted[kind] > round_]
        more = trainer.generate([texts[row] + said[row] for row in rows], rows=rows)
        for row, ids, values in zip(rows, more["completion_ids"], more["logprobs"]):
            said[row], logprobs[row] = said[row] + ids, logprobs[row] + values
    return {"prompt_ids": texts, "completion_ids": said, "logprobs": logprobs}


def characters(completions: Sequence[str]) -> list[float]:
    return [float(sum(map(ord, text)) % 5) for text in completions]


class Drawn(Watch):
    """Every completion of every rollout, by its row and its number in the group, and the rank that drew it."""

    def __init__(self) -> None:
        self.drawn: list[dict[str, Any]] = []
        self.of_rank: list[dict[str, int]] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        scored, ranks = pl_module.scored, pl_module.ranks
        completions, mine = scored.completions, {}
        mask = completions.response_mask if completions.attended is None else completions.attended
        for place, episode in enumerate(completions.episodes):
            row, number = scored.batch.rows[place // scored.group_size], place % scored.group_size
            number += scored.batch.share * scored.group_size
            mine[f"{row}/{number}"] = {
                "ids": completions.response_ids[place][mask[place]].tolist(),
                "written": completions.response_mask[place][mask[place]].tolist(),
                "end": episode.end,
                "turns": episode.turns,
            }
        every = ranks.objects((ranks.rank, mine))
        self.drawn.append({name: each for _, part in every for name, each in part.items()})
        self.of_rank.append({name: rank for rank, part in every for name in part})

    def seen(self, module: Any) -> dict[str, Any]:
        return {"drawn": self.drawn, "rank": self.of_rank}


def _turns_differ_and_one_rank_fails(left: Any) -> bool:
    failing = set()
    uneven = False
    for drawn, rank in zip(left["drawn"], left["rank"], strict=True):
        turns = [sum(each["turns"] for name, each in drawn.items() if rank[name] == which) for which in (0, 1)]
        failed = {name for name, each in drawn.items() if each["end"] == "failed"}
        if len({rank[name] for name in failed}) > 1:
            return False
        uneven |= turns[0] != turns[1]
        failing |= {int(name.partition("/")[0]) for name in failed}
    return uneven and failing == {KINDS.index("fails")}


def _forks(left: Any) -> bool:
    return left["metrics"]["train/branches/mean"] == 1.5


def episodes(
    make: Callable[[], Any], reward: Any, shown: Shown | None = None, prompts: int = 4, **settings: Any
) -> Case:
    def made(_: Path) -> tuple[Any, Any]:
        module = GRPO("tiny", reward, env=make(), optimizer=ByPath("torch.optim.SGD", lr=0.03), scheduler=Constant(),
                      sampling=Sampling(max_new_tokens=4), group_size=4, **settings)  # fmt: skip
        rows = [{"prompt": f"{place}=", "kind": kind} for place, kind in enumerate(KINDS)]
        return module, RolloutDataModule(rows=rows, prompts_per_rollout=prompts, val_fraction=0.0)

    # Two rollouts, one epoch. Two processes sum in another order, and each step adds to that difference: in the fourth
    # rollout one token was drawn differently on one kind of processor.
    return Case(made, steps=2, share=1e-3, beyond=1e-6, moved=1e-4, watch=Drawn, shown=shown)


def _game() -> CustomEnvironment:
    return CustomEnvironment(ByRow, max_turns=3, max_tokens=24, max_observation_tokens=8, max_failed=0.5)


EPISODES = {
    "episodes-game": episodes(_game, environment, _turns_differ_and_one_rank_fails),
    "episodes-echo": episodes(_game, environment, metric("echo_loss", lambda loss: loss > 0), echo_coef=0.3),
    "episodes-function": episodes(lambda: RolloutFunction(goes_on, max_tokens=16), characters),
    "episodes-shared": episodes(_game, environment, prompts=3),
    # Ranks have another number of branches: 4, 4, 5 and 5 of a group of four rows, and one of them has its own prompt.
    "episodes-forking": replace(
        episodes(lambda: RolloutFunction(forking, max_tokens=24, max_branches=3), characters, _forks), fsdp=1
    ),
}

# Policies over images. All of the policy is trained, what sees too, and in some micro-batches no row of a rank shows
# anything.


def by_letters(completions: list[Any], **_: Any) -> list[float]:
    return [float(sum(map(ord, message[0]["content"])) % 7) for message in completions]


class Shows:
    """Answers each turn with the row's digit again, beside the prompt's or in its place, but where the row has none."""

    def reset(self, *, seed: int, image: Any = None, held: Any = None) -> None:
        self.shown = image if held is None else held

    def step(self, action: str) -> tuple[Any, ...]:
        seen = {"type": "image", "image": self.shown}
        said = "" if self.shown is None else [seen, {"type": "text", "text": "Again?"}]
        return said or "Again?", float(sum(map(ord, action)) % 7), False, False, {}


def _rows() -> list[dict[str, Any]]:
    """In each step's eight, the first four rows show nothing: with two ranks, one of these sees for nobody."""
    digits = Digits(val_rows=0).train()[:24]
    return [row if i // 4 % 2 else {"prompt": row["prompt"], "answer": row["answer"]} for i, row in enumerate(digits)]


def _later_rows() -> list[dict[str, Any]]:
    """Every third row's digit is shown in the episode alone."""
    return [
        {"held" if i % 3 == 0 and key == "image" else key: row[key] for key in row} for i, row in enumerate(_rows())
    ]


def _pairs() -> list[dict[str, Any]]:
    def said(text: str) -> list[dict[str, Any]]:
        return [{"role": "assistant", "content": text}]

    return [{**row, "chosen": said(row["answer"]), "rejected": said("no")} for row in _rows()]


def _digits(_: Path) -> LanguageModel:
    return LanguageModel("digits", freeze=[])


def _adapted(*targets: str) -> Callable[[Path], LanguageModel]:
    return lambda _: LanguageModel("digits", freeze=[], lora=Lora(r=2, targets=list(targets)))


def _toy(kind: str, folder: Path) -> LanguageModel:
    path = folder / "models" / kind
    if os.environ.get("LOCAL_RANK", "0") == "0":  # transformers writes nothing in the others
        vision_toys.save(kind, path)
    if torch.distributed.is_initialized():  # else the first writes before it starts the others
        torch.distributed.barrier()
    return LanguageModel(str(path), freeze=[])


def vision(
    method: Any,
    start: Callable[[Path], LanguageModel] = _digits,
    fsdp: bool = True,
    lr: float = 0.05,
    returned: bool = False,
) -> Case:
    def made(folder: Path) -> tuple[Any, Any]:
        settings: dict[str, Any] = {
            "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=lr),
            "scheduler": Constant(),
        }
        if method is not RewardModeling:
            settings["sampling"] = Sampling(max_new_tokens=3)
        if method in (DPO, RewardModeling):
            data: Any = PreferenceDataModule(rows=_pairs(), batch_size=8, val_fraction=0.0, shuffle=False)
            return method(start(folder), **settings), data
        reward, rows = by_letters, _rows()
        if returned:
            reward, rows = environment, _later_rows()
            settings["env"] = CustomEnvironment(Shows, max_turns=2, max_tokens=120, max_observation_tokens=80)
        if method is GRPO:
            settings |= {"group_size": 2, "beta": 0.1}
        data = RolloutDataModule(rows=rows, prompts_per_rollout=8, val_fraction=0.0, shuffle=False)
        return method(start(folder), reward, **settings), data

    return Case(made, steps=3, share=1e-3, beyond=1e-6, ddp=2, fsdp=2 if fsdp else None, start=start)


# Families with inputs of their own: `token_type_ids`; patches of all images in a row, and positions of three axes.
VISION = {
    "vision-returned": vision(GRPO, fsdp=False, returned=True),
    "vision-ppo": vision(PPO, lr=0.01),
    "vision-dpo": vision(DPO, fsdp=False),  # under FSDP2 these are rollouts as PPO's, or whole texts as the reward's
    # Names of layers mean those of what sees too, so there are adapters that only images train; of "eyes" all are.
    "vision-lora": vision(GRPO, _adapted("q_proj", "v_proj")),
    "vision-eyes": vision(GRPO, _adapted("out_proj", "fc1")),
    "vision-reward": vision(RewardModeling),
    "vision-gemma3": vision(GRPO, partial(_toy, "gemma3")),
}
if torchvision_beside.FOLDER:
    VISION = {"vision-qwen2_vl": vision(GRPO, partial(_toy, "qwen2_vl"))}

CASES: dict[str, Case] = {
    **OFFLINE, **OF_SHARDS, **PRECOMPUTED, **WRITTEN, **TERMS, **MIXED, **EPISODES, **VISION
}  # fmt: skip
ROWS = [f"{way}/{name}" for name, case in CASES.items() for way in ("ddp", "fsdp") if getattr(case, way)]
