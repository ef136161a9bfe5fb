"""The table of `test_resume_cases.py`: short runs that are stopped, go on, and end with the bits of the whole run.

A row's words are those of a command line; `{work}` is a folder with `FILES`. Where a row
has no other steps, it has three rollouts of two steps, or six steps, and stops after the third: inside a rollout.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[1] / name) for name in ("algorithms", "data", "doors", "vision", "../scripts")]

import torchvision_beside  # noqa: F401, I001  # before transformers, which looks for torchvision once
import dist_equal
import lightning as L
import peft
import same_bits
import test_curriculum
import test_lag
import torch
import test_vision_episodes
import test_vision_returned
import test_vision_training
import vision_toys
from composed_configs import tree_of
from copied_engines import CopiedPolicyGenerator
from forking_agents import forking, letters
from lightning.pytorch.loggers.logger import Logger
from test_data_datamodule import Recorder, make_rows
from test_dist_resumed import PASSES, STATEFUL
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from transformers import AutoModelForCausalLM, AutoTokenizer
from vision_kinds import kinds

from lit_rl.algorithms import GRPO, PPO, SFT, AdamW, Constant
from lit_rl.algorithms.rollouts.checkpoints import to_plain
from lit_rl.algorithms.rollouts.phase_costs import is_speed
from lit_rl.algorithms.terms.groups import DynamicSampling, GroupReplay
from lit_rl.callbacks import BEMAWeights, EMAWeights, MergedWeights
from lit_rl.cli.build import build
from lit_rl.core.model_paths import TINY
from lit_rl.core.rollout import Sampling
from lit_rl.data.curriculum import Curriculum
from lit_rl.data.example_module import SupervisedDataModule
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.generation import RolloutFunction
from lit_rl.models import LanguageModel

SUMS = [(i, j) for i in range(10) for j in range(5)]
FILES = same_bits.FILES | {
    "sums.jsonl": "".join(f'{{"prompt": "{i}+{j}=", "completion": "{i + j}"}}\n' for i, j in SUMS),
    "pairs.jsonl": "".join(f'{{"prompt": "{i}+{j}=", "chosen": "{i + j}", "rejected": "{i}"}}\n' for i, j in SUMS if j),
}


@dataclass(frozen=True)
class Case:
    """One short run, and where it is stopped.

    Attributes:
        made: The words of a command line, or what makes the module and the data module, in a folder.
        steps: Optimizer steps; none: the settings say how long it is.
        stops: The steps from which it goes on.
        threads: Of torch.
        settings: More of the Trainer; callbacks are made for each run.
        shown: What the whole run must have done, else it would show nothing.
    """

    made: Sequence[str] | Callable[[Path], tuple[Any, Any]]
    steps: int | None = 6
    stops: Sequence[int] = (3,)
    threads: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)
    shown: Callable[[Left], bool] | None = None


class Record(L.Callback):
    """What a run did in each micro-batch, and a checkpoint, `STEP.ckpt`, behind some of its steps."""

    def __init__(self, folder: Path, stops: Sequence[int]) -> None:
        self.folder, self.stops = folder, stops
        self.seen: list[dict[str, Any]] = []
        self.rollouts: list[Any] = []
        self.saved: dict[int, int] = {}

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        rollout = getattr(pl_module, "rollout", None)
        begins = rollout is not None and batch.slot == 0  # a run that goes on inside a rollout has no table of it
        plain = to_plain(rollout and replace(rollout, completions=replace(rollout.completions, episodes=None)))
        named = {name: getattr(batch, name, None) for name in ("rollout", "step", "slot", "rows", "occurrences")}
        named["upcoming"] = [list(each.rows) for each in getattr(batch, "upcoming", ())]
        rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        self.seen.append({
            "step": trainer.global_step, "batch": to_plain(named), "rates": rates, "loss": outputs["loss"],
            "rollout": plain, "samples": to_plain(pl_module.samples) if begins else None,
        })  # fmt: skip
        self.rollouts.append(rollout)
        if trainer.global_step in self.stops and not trainer.fit_loop._should_accumulate():
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")
            self.saved[trainer.global_step] = len(self.seen)


class Lines(Logger):
    """What was logged, and at which step, less times."""

    name, version = "lines", ""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, dict[str, Any]]] = []

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self.seen.append((step, {name: value for name, value in metrics.items() if not is_speed(name)}))

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


@dataclass(repr=False)
class Left:
    """What a run left: of each micro-batch, each line of the log, its last checkpoint, and its objects."""

    record: Record
    lines: list[tuple[Any, dict[str, Any]]]
    saved: dict[str, Any]
    module: Any
    data: Any

    @property
    def seen(self) -> list[dict[str, Any]]:
        return self.record.seen

    @property
    def rollouts(self) -> list[Any]:
        return self.record.rollouts

    def metric(self, name: str) -> list[float]:
        return [line[f"train/{name}"] for _, line in self.lines if f"train/{name}" in line]


def run(case: Case, folder: Path, start: int | None = None, stops: Sequence[int] = ()) -> Left:
    """Train to the end, from the beginning or from the checkpoint of a step, in a process that drew other numbers."""
    settings: dict[str, Any] = {}
    if callable(case.made):
        module, data = case.made(folder)
    else:
        tree = tree_of("run_dir=run", *(word.replace("{work}", str(folder)) for word in case.made))
        typed = [word[8:].partition("=")[0] for word in case.made if word.startswith("trainer.")]
        settings |= {name: tree["trainer"][name] for name in typed}
        module, data = build(tree["algo"]), build(tree["data"])
    settings |= {"max_steps": case.steps} if case.steps else {}
    settings |= case.settings
    record, lines = Record(folder, stops), Lines()
    callbacks = [record, *(make() for make in settings.pop("callbacks", ()))]
    trainer = dist_equal.trainer(folder, 1, logger=lines, callbacks=callbacks, gradient_clip_val=1.0, **settings)
    random.seed(start)
    torch.manual_seed(start or 0)
    trainer.fit(module, datamodule=data, ckpt_path=start and folder / f"{start}.ckpt", weights_only=True)
    trainer.save_checkpoint(folder / "end.ckpt")
    saved = torch.load(folder / "end.ckpt", weights_only=True)
    loops = saved.pop("loops")["fit_loop"]
    return Left(record, lines.seen, without_times(saved | {"loader": loops["state_dict"]}), module, data)


def without_times(item: Any) -> Any:
    """The same state without seconds: a run that ends inside a rollout has not logged them yet."""
    if isinstance(item, dict):
        times = [name for name in item if name in ("seconds", "parts") or is_speed(str(name))]
        return {name: without_times(value) for name, value in item.items() if name not in times}
    return [without_times(each) for each in item] if isinstance(item, list) else item


def varied(name: str) -> Callable[[Left], bool]:
    return lambda left: len(set(left.metric(name))) > 1


def every(*names: str) -> Callable[[Left], bool]:
    return lambda left: all(left.metric(name)[-1] > 0 for name in names)


# ---------------------------------------------------------------------- what learns from what it writes

SHORT = ["data.task.max_operand=5", "data.task.val_rows=4", "optimizer.lr=1e-3", "scheduler.warmup_steps=2"]
PROMPTS = [*SHORT, "data.prompts_per_rollout=4", "algo.group_size=4", "algo.minibatches=2"]
GRADED = ["reward=function", "reward.fn={work}/graded.py:score"]
PAIRED = [*SHORT, *GRADED, "data.prompts_per_rollout=8", "algo.minibatches=2", "trainer.accumulate_grad_batches=2"]
CRITIC = [*SHORT, "algo=ppo", *PASSES, "algo.group_size=2", "algo.critic_lr=1e-3", "data.prompts_per_rollout=8"]
TAUGHT = ["algo.teacher.context.template='$context'", "algo.teacher.context.solution_template='$solution+0='"]
GUESS = [
    word for word in same_bits.GAME.split() if word.partition("=")[0] not in ("trainer.max_steps", "algo.iterations")
]
ONE_LAYER = "model.init_kwargs={num_hidden_layers: 1, layer_types: [full_attention]}"


def prompts(*words: str, **more: Any) -> Case:
    return Case([*PROMPTS, *words], **more)


def of_roles(left: Left) -> bool:
    return any("/role/" in name for name in left.lines[-1][1])


def held(left: Left) -> bool:
    """All of it was at work, so all of it was compared."""
    terms = left.saved["lit_rl"][0]["module"]["terms"]
    kept = terms["groups"]["position"] > 0 and terms["reward_norm"]["count"] > 0 and terms["replay"]["groups"]
    moved = all(len(set(left.metric(name))) == 2 for name in ("kl_coef", "entropy_coef"))
    return bool(set(terms) == {"kl_control", "reward_norm", "entropy", "groups", "replay"} and kept and moved
                and left.saved["reference"] and every("replay/groups", "groups/drawn")(left))  # fmt: skip


ONLINE = {
    "grpo": prompts(
        "algo.iterations=2", "trainer.accumulate_grad_batches=2", "algo.beta=0.1", steps=8, stops=(3,),
        shown=varied("clip_ratio/region_mean"),
    ),
    "stateful": Case(
        [*SHORT, *STATEFUL, "data.prompts_per_rollout=4", "algo.group_size=4", "trainer.accumulate_grad_batches=2"],
        steps=8, stops=(7,), shown=held,
    ),
    # dropout draws from the global generator
    "dropout": prompts("algo=rloo", "scheduler=cosine", "+model.init_kwargs.attention_dropout=0.1"),
    # weights and moments, each in its own type
    "halves": prompts("trainer.precision=bf16-true", "optimizer=adamw_split"),
    "masters": prompts("trainer.precision=bf16-true"),
    "baselines-of-roles": prompts("algo=rae", "algo.role=answer", shown=of_roles),
    "optimal-values": prompts("algo=a2po", *GRADED),  # of the initial policy, which is gone by then
    # what the teacher said is in the rollout, and its weights are an average of the policy's
    "self-taught": prompts("algo=sdpo", "reference.decay=0.5", "algo.distillation.top_k=20", *TAUGHT),
    "sdft": prompts("algo=sdft", TAUGHT[0]),
    "opd": prompts("algo=opd", "algo.teacher.model.name=tiny", ONE_LAYER),
    "raft": prompts("algo=raft", *GRADED),
    "reinforce": prompts("algo=reinforce_pp", *GRADED, "algo.reward_beta=0.05"),
    "pass-at-k": prompts("algo=pass_at_k"),
    "shared-trunk": Case(
        [
            *(*CRITIC, "algo/critic=shared_trunk", "algo/kl_control=adaptive", "algo.critic_warmup=2"),
            *("algo.ptx.path={work}/texts.jsonl", "algo.ptx.batch_size=3", "algo.ptx_coef=0.2"),
        ],
        steps=8,
    ),
    "critic-adapter": Case(
        [*CRITIC, "model.lora.r=4", "algo/critic=adapter", "reference=adapter_base", "algo/critic_scheduler=cosine"],
        steps=8,
    ),
    "online-dpo": Case([*PAIRED, "algo=online_dpo", "judge=reward"], steps=4),
    "iterative-dpo": Case([*PAIRED, "algo=iterative_dpo", "reference.every=2"], stops=(2, 3)),
    "xpo": Case([*PAIRED, "algo=xpo"], steps=4),
    "nash-md": Case([*PAIRED, "algo=nash_md"], steps=4),
    "gkd": Case(
        [*SHORT, "algo=gkd", ONE_LAYER, "algo.teacher.name=tiny", "algo.teacher_completions=true",
         "data.batch_size=8", "sampling.max_new_tokens=4", "trainer.accumulate_grad_batches=2"],
        steps=5, stops=(2,), shown=lambda left: set(left.metric("on_policy")) == {0.0, 1.0},
    ),
}  # fmt: skip

# ---------------------------------------------------------------------- what is drawn ahead, and rows that are chosen


def ahead(algorithm: Any, **settings: Any) -> Callable[[Path], tuple[Any, Any]]:
    return lambda _: (test_lag.module_of(algorithm, minibatches=2, **settings), test_lag.data_of())


def chosen(**terms: Callable[[], Any]) -> Case:
    """Rollouts of two steps, whose rows a curriculum draws."""

    def made(_: Path) -> tuple[Any, Any]:
        module = test_curriculum.module_of(**{name: make() for name, make in terms.items()})
        curriculum = Curriculum(weights=[0.3, 1.0, 0.3])
        rows = {"rows": test_curriculum.ROWS, "prompts_per_rollout": 4, "val_fraction": 0}
        return module, RolloutDataModule(curriculum=curriculum, **rows)

    return Case(made, steps=12, stops=(3, 6), shown=lambda left: len({str(s["batch"]["rows"]) for s in left.seen}) == 6)


AHEAD = {
    "ahead": Case(ahead(PPO, iterations=1, group_size=1), steps=10, stops=(1, 4)),
    # from the first and the last step of a rollout, and with a queue that is of two epochs
    "two-ahead": Case(lambda _: (test_lag.late(), test_lag.data_of()), steps=12, stops=(1, 4, 7)),
    "curriculum": chosen(),
    "curriculum-redrawn": chosen(groups=lambda: DynamicSampling(8, tolerance=0.1)),
    "curriculum-ahead": chosen(generator=lambda: CopiedPolicyGenerator(lag=1)),
    "curriculum-two-ahead": chosen(generator=lambda: CopiedPolicyGenerator(lag=2)),
}


def lottery(completions: list[str], log_extra: Callable[..., None]) -> list[float]:
    """A reward that is drawn with the global generators."""
    tickets = [random.random() + torch.rand(()).item() for _ in completions]
    log_extra("ticket", tickets)
    return tickets


def drawn_reward(_: Path) -> tuple[Any, Any]:
    return test_lag.module_of(GRPO, lottery, minibatches=2, generator=None), test_lag.data_of()


# ---------------------------------------------------------------------- episodes


def branching(method: Any) -> Case:
    def made(_: Path) -> tuple[Any, Any]:
        env = RolloutFunction(forking, max_tokens=24, max_branches=3)
        module = method("tiny", letters, env=env, sampling=Sampling(max_new_tokens=4), group_size=4, minibatches=2,
                        iterations=2, optimizer=AdamW(lr=1e-3), scheduler=Constant())  # fmt: skip
        rows = [{"prompt": f"{number}="} for number in range(8)]
        return module, RolloutDataModule(rows=rows, prompts_per_rollout=4, val_fraction=0.0)

    return Case(made, stops=(1, 3), shown=lambda left: left.rollouts[0].completions.follows is not None)


EPISODES = {
    "drawn-rewards": Case(drawn_reward, shown=lambda left: "ticket" in left.seen[0]["samples"]),
    "branches": branching(GRPO),
    "branches-critic": branching(PPO),
    "agents": Case([*GUESS, *GRADED, "algo.beta=0.1"]),
}

# ---------------------------------------------------------------------- data sets that are learned from as they are

ROWS = [*SHORT, "data.batch_size=8", "trainer.accumulate_grad_batches=2"]
"""Steps of two micro-batches; 32 training rows, so step 4 is an epoch's last (8 where a pair is two verdicts)."""


def offline(*words: str, **more: Any) -> Case:
    return Case([*ROWS, *words], **more)


def streamed(*words: str) -> Case:
    """Rows that are read as they are needed, in windows of two steps (four where a pair is two verdicts); the run's
    seven steps begin them again."""
    rows = ["optimizer.lr=1e-3", "data.stream_buffer=20", "data.max_length=32", "data.val_fraction=0"]
    return Case([*rows, "trainer.accumulate_grad_batches=2", *words], steps=7, stops=(3, 4))


OFFLINE = {
    "sft": offline("algo=sft", "algo.neftune_alpha=5"),
    "sft-packed": offline("algo=sft", "data.packing=best_fit", "data.max_length=16", "data.batch_size=4"),
    "dpo-lora": offline("algo=dpo", "model.lora.r=4", "trainer.log_every_n_steps=2", stops=(3, 4)),
    "dpo-coupled-moving": offline(
        "algo=dpo", "algo/preference=[aot]", "reference=ema", "+model.init_kwargs.attention_dropout=0.1"
    ),
    "dpo-precomputed": offline("algo=dpo", "algo.precompute_reference=true"),
    "tr-dpo": offline("algo=tr_dpo"),
    "bco": offline("algo=bco", "scheduler=cosine"),
    "bco-precomputed": offline("algo=bco", "algo/prompt_weights=density_ratio", "algo.precompute_reference=true"),
    "kto": offline("algo=kto"),
    "cpo": offline("algo=cpo"),
    "orpo": offline("algo=orpo"),
    "tpo": offline("algo=tpo"),
    "reward-model": offline("algo=reward_model"),
    "process-reward-model": offline("algo=process_reward_model"),
    "streamed-packed": streamed(
        "algo=sft", "data=texts", "data.packing=best_fit", "data.batch_size=2",
        "data.sources=[{path: '{work}/sums.jsonl', weight: 2}, {path: '{work}/sums.jsonl'}]",
    ),
    "streamed-verdicts": streamed("algo=kto", "data=preferences", "data.path={work}/pairs.jsonl", "data.batch_size=8"),
}  # fmt: skip

# ---------------------------------------------------------------------- objects of Python


def texts(model: Any = "tiny", scheduler: Any = None, **more: Any) -> tuple[Any, Any]:
    rows = [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(8)]
    module = SFT(model, optimizer=AdamW(lr=0.01), scheduler=scheduler or Constant(), **more)
    return module, SupervisedDataModule(rows, batch_size=2, val_fraction=0)


def adapted(config: Any) -> Case:
    return Case(lambda _: texts(LanguageModel("tiny", lora=config)), steps=2, stops=(1,))


def scheduled(scheduler: Any) -> Case:
    return Case(
        lambda _: texts(scheduler=scheduler),
        steps=4,
        stops=(2,),
        shown=lambda left: len({s["rates"][0] for s in left.seen}) == 4,
    )


def batches_alone(count: int, **settings: Any) -> Case:
    """Of a module that learns nothing: three rollouts an epoch, each for two steps."""

    def made(_: Path) -> tuple[Any, Any]:
        return Recorder(slots=2), RolloutDataModule(rows=make_rows(17), prompts_per_rollout=5, val_fraction=0)

    def shown(left: Left) -> bool:
        return [(seen["batch"]["rollout"] % 3, seen["batch"]["slot"]) for seen in left.seen] == wanted

    epoch = int(settings.get("limit_train_batches", 6))
    wanted = [(i % epoch // 2, i % 2) for i in range(count)]
    return Case(made, steps=None, settings=settings, stops=range(1, count), shown=shown)


OBJECTS = {
    "oft": adapted(peft.OFTConfig(r=0, oft_block_size=4, target_modules="all-linear")),
    "ia3": adapted(peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])),
    "vera": adapted(peft.VeraConfig(r=4, target_modules=["q_proj"])),
    "step-lr": scheduled(partial(StepLR, step_size=1, gamma=0.5)),
    "one-cycle": scheduled(partial(OneCycleLR, max_lr=0.01, total_steps=9)),
    "averages": Case(
        [*ROWS, "algo=sft", "model.lora.r=2"],
        settings={"callbacks": [partial(EMAWeights, decay=0.6), partial(BEMAWeights, every=2, lag=1)]},
        shown=lambda left: {"EMAWeights", "BEMAWeights"} <= left.saved["callbacks"].keys(),
    ),
    "merged": Case(
        [*ROWS, "algo=sft"],
        settings={"callbacks": [MergedWeights]},
        shown=lambda left: "initial" in left.saved["callbacks"]["MergedWeights"],
    ),
    "object": Case(
        lambda _: texts(AutoModelForCausalLM.from_pretrained(TINY), tokenizer=AutoTokenizer.from_pretrained(TINY)),
        steps=2,
        stops=(1,),
    ),
    "batches": batches_alone(12, max_epochs=2),
    "batches-of-short-epochs": batches_alone(12, max_epochs=3, limit_train_batches=4),
}

# ---------------------------------------------------------------------- policies that see


def toy(kind: str, folder: Path) -> str:
    if not (folder / kind).exists():
        vision_toys.save(kind, folder / kind)
    return str(folder / kind)


def seeing(kind: str) -> Case:
    return Case(lambda folder: (test_vision_training.grpo(toy(kind, folder)), test_vision_training.rollouts()))


def buffer(kind: str) -> Case:
    """After the first rollout come groups that teach nothing: stored ones step in, and see."""

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        return [float(i % 4) if int(number) < 4 else 1.0 for i, number in enumerate(answer)]

    def made(folder: Path) -> tuple[Any, Any]:
        settings = {"group_size": 4, "sampling": Sampling(max_new_tokens=5), "replay": GroupReplay(8)}
        return GRPO(toy(kind, folder), reward, **settings), test_vision_training.rollouts(shuffle=False)

    return Case(made, steps=4, stops=(1,), shown=replayed)


def replayed(left: Left) -> bool:
    groups = [group.completions.vision for _, group in left.module.replay._groups]
    seen = [each for vision in groups if vision for each in vision.prompts]
    alone = all(vision is None or len(vision.prompts) == 1 for vision in groups)
    return alone and max(left.metric("replay/groups")) > 0 and any(each and each.inputs for each in seen)


def answered(left: Left) -> bool:
    """What was answered is there, and not learned."""
    pairs = [(rollout.loss_mask, rollout.completions) for rollout in left.rollouts]
    heard = [(learned, said.attended & ~said.response_mask) for learned, said in pairs]
    return all(bool(there.any()) and not bool((learned & there).any()) for learned, there in heard)


def answered_with_images(left: Left) -> bool:
    places = torch.tensor(left.module.model.processor.placeholders)
    found = [(each, each.completions) for each in left.rollouts]
    shown = [torch.isin(said.response_ids, places) & said.attended & ~said.response_mask for _, said in found]
    sound = [each.old_logprobs.isfinite().all() and each.ref_logprobs.isfinite().all() for each, _ in found]
    return answered(left) and all(map(bool, sound)) and all(bool(each.any()) for each in shown)


def opened(kind: str) -> Case:
    """Prompts have words of the world, so that they are longer than those of the data."""
    made = test_vision_episodes
    return Case(lambda folder: (made.grpo(toy(kind, folder)), made.data()), stops=(1,), shown=answered)


def painted(kind: str) -> Case:
    made = test_vision_returned
    return Case(lambda folder: (made.paints(toy(kind, folder), replay=GroupReplay(4)), made.worldly()),
                shown=answered_with_images)  # fmt: skip


VISION = {
    **{f"vision-{kind}": seeing(kind) for kind in kinds("idefics3", "gemma3", "qwen3_vl", "internvl")},
    **{f"vision-opened-{kind}": opened(kind) for kind in kinds("idefics3", "qwen2_5_vl")},
    **{f"vision-answered-{kind}": painted(kind) for kind in kinds("idefics3", "qwen2_5_vl")},
    **{f"vision-buffer-{kind}": buffer(kind) for kind in kinds("idefics3")},
}

# ---------------------------------------------------------------------- on two threads of torch

LISTED = {each.name: each.overrides for each in same_bits.runs(quick=True)}


def threaded(name: str, *words: str) -> Case:
    """Of `scripts/same_bits.py`: rows enough for torch to share single operations out over its threads."""
    return Case([*LISTED[name], *words], steps=4, stops=(1,), threads=2)


ONCE, MANY = "algo.iterations=1", "algo.group_size=16"
THREADED = {
    # 32,768 numbers in each operation
    "threads": Case([*SHORT, "data.prompts_per_rollout=32", MANY], steps=2, stops=(1,), threads=2),
    **{f"threads-{name}": threaded(name, ONCE, MANY) for name in ("ppo_adapter", "grpo_tools")},
    **{f"threads-{name}": threaded(name, ONCE) for name in ("grpo_images", "online_dpo")},
    **{f"threads-{name}": threaded(name) for name in ("sft", "reward_model")},
}

CASES: dict[str, Case] = {**ONLINE, **AHEAD, **EPISODES, **OFFLINE, **OBJECTS, **VISION, **THREADED}
