"""Three front doors, one object: Hydra, LightningCLI and plain constructors agree on every setting."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from lit_rl.algorithms import GRPO, PPO, RLOO
from lit_rl.cli import run_info, schemas
from lit_rl.cli.build import build, plain
from lit_rl.cli.lightning_app import command_line
from lit_rl.cli.trainer_settings import cut_by
from lit_rl.core.errors import ConfigError
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Addition
from lit_rl.generation import RolloutFunction
from lit_rl.rewards import exact_match

ALGORITHMS = {"grpo": GRPO, "rloo": RLOO, "ppo": PPO}
TRAINER = {
    "max_epochs": 3,
    "gradient_clip_val": 1.0,
    "log_every_n_steps": 1,
    "num_sanity_val_steps": 0,
    "use_distributed_sampler": False,
    "inference_mode": False,
    "enable_model_summary": False,
}
"""Where our Trainer settings depart from Lightning's own. Written out, so that an edit of the YAML is seen here."""

Built = tuple[Any, Any, L.Trainer]


def without_tiny(config: DictConfig) -> DictConfig:
    """The shipped policy without what its YAML recommends for it: the constructors' defaults again."""
    config.optimizer.lr = 1e-6
    config.scheduler.warmup_steps = 0
    config.sampling.max_new_tokens = 512
    config.trainer.max_steps = -1
    return config


def by_hydra(algorithm: str, *overrides: str) -> Built:
    GlobalHydra.instance().clear()
    schemas.register_schemas()
    with initialize_config_module(version_base="1.3", config_module="lit_rl.conf"):
        composed = compose("config", overrides=[f"algo={algorithm}", "run_dir=unused", *overrides])
    return built_of(plain(without_tiny(composed)))


def built_of(resolved: dict[str, Any]) -> Built:
    module = build(resolved["algo"])
    trainer = {name: value for name, value in resolved["trainer"].items() if name != "_target_"}
    trainer["max_epochs"] = run_info.max_epochs(trainer)
    trainer["accumulate_grad_batches"] = cut_by(module, trainer["accumulate_grad_batches"])
    return module, build(resolved["data"]), L.Trainer(**trainer)


def by_lightning_cli(algorithm: str, *arguments: str) -> Built:
    cli = command_line(
        [
            f"--model={algorithm.upper()}",
            "--model.model=tiny",
            "--model.reward=lit_rl.rewards.exact_match",
            "--data.task=lit_rl.data.tasks.Addition",
            "--trainer.precision=32-true",  # as the YAML of the shipped policy has it
            *arguments,
        ],
        run=False,
    )
    return cli.model, cli.datamodule, cli.trainer


def by_hand(algorithm: str) -> Built:
    module = ALGORITHMS[algorithm]("tiny", exact_match, micro_batch_size="auto")  # the doors ask the memory plan
    return module, RolloutDataModule(task=Addition()), L.Trainer(**TRAINER)


# ---------------------------------------------------------------------- an object as a tree of its settings


def settings(value: Any) -> Any:
    """What an object was told, all the way down; what it made of it while running is left out."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (str, int, float, bool, type(None), torch.device, torch.dtype, Path)):
        return value
    if isinstance(value, (list, tuple)):
        return [settings(item) for item in value]
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, dict):
        return {name: settings(item) for name, item in value.items()}
    if isinstance(value, type):
        return value.__qualname__
    if isinstance(value, functools.partial) or hasattr(value, "keywords"):
        return function(value.func, value.keywords)
    if inspect.isroutine(value):
        return function(value, {})
    # What a property has kept says which test ran before: default settings are shared.
    kept = {name for name in vars(value) if isinstance(getattr(type(value), name, None), functools.cached_property)}
    own = {name: item for name, item in vars(value).items() if not name.startswith("_") and name not in kept}
    return {"class": type(value).__qualname__, **settings(own)}


def function(target: Callable, keywords: dict[str, Any]) -> dict[str, Any]:
    """A function and its keyword-only settings: one left at its default equals the default spelled out."""
    only = [p for p in inspect.signature(target).parameters.values() if p.kind is p.KEYWORD_ONLY]
    defaults = {p.name: p.default for p in only if p.default is not p.empty}
    own = {name: settings(value) for name, value in {**defaults, **keywords}.items()}
    return {"function": f"{target.__module__}.{target.__qualname__}", **own}


def of_trainer(trainer: L.Trainer) -> dict[str, Any]:
    """The settings of a Trainer that decide what is trained, logged and validated."""
    names = ["max_epochs", "max_steps", "min_epochs", "min_steps", "gradient_clip_val", "gradient_clip_algorithm"]
    names += ["accumulate_grad_batches", "log_every_n_steps", "num_sanity_val_steps", "overfit_batches", "precision"]
    names += [f"limit_{stage}_batches" for stage in ("train", "val", "test", "predict")]
    names += ["val_check_interval", "check_val_every_n_epoch", "fast_dev_run", "world_size", "num_nodes", "num_devices"]
    return {name: getattr(trainer, name) for name in names} | {
        "inference_mode": trainer.validate_loop.inference_mode,
        "use_distributed_sampler": trainer._accelerator_connector.use_distributed_sampler,
        "model_summary": any("Summary" in type(callback).__name__ for callback in trainer.callbacks),  # pyright: ignore
        "accelerator": type(trainer.accelerator).__name__,
        "strategy": type(trainer.strategy).__name__,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "detect_anomaly": trainer._detect_anomaly,
    }


def tree(built: Built) -> dict[str, Any]:
    module, data, trainer = built
    return {"module": settings(module), "data": settings(data), "trainer": of_trainer(trainer)}


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Paths at which two trees differ, with both values."""
    if isinstance(one, dict) and isinstance(other, dict):
        absent = object()
        keys = [*one, *(key for key in other if key not in one)]
        pairs = [(f"{path}.{key}", one.get(key, absent), other.get(key, absent)) for key in keys]
        return [found for key, a, b in pairs for found in differences(a, b, key)]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [found for i, (a, b) in enumerate(zip(one, other)) for found in differences(a, b, f"{path}[{i}]")]
    return [] if one == other else [f"{path}: {one!r} != {other!r}"]


# ---------------------------------------------------------------------- the laws


@pytest.fixture(scope="module", params=sorted(ALGORITHMS))
def algorithm(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def expected(algorithm: str) -> dict[str, Any]:
    return tree(by_hand(algorithm))


HELD_AS = {
    "reward": "reward_functions",
    "loss": "policy_loss",
    "beta": "kl.in_loss.weight",
    "kl": "kl.in_loss.estimator",
    "reward_beta": "kl.in_reward.weight",
    "reward_kl": "kl.in_reward.estimator",
    "kl_control": "kl.control",
    "shaping": "credit.shaping",
    "reward_norm": "credit.norm",
    "reward_clip": "credit.clip",
    "role": "credit.roles",
    "whitening": "whitening.function",
    "advantage_clip": "advantage_clip.limit",
    "correction": "engine_correction.correction",
    "rejection": "engine_correction.rejection",
    "micro_batch_size": "micro_batches.size",
    "split_groups": "micro_batches.split_groups",
    "weight_norm": "engine_correction.normalisation",
    "selection": "selection.choose",
    "off_policy_threshold": "off_policy.threshold",
    "ptx": "supervised.texts",
    "ptx_coef": "supervised.coef",
    "ptx_loss": "supervised.loss",
    "ptx_decay_steps": "supervised.decay_steps",
    "ptx_final_coef": "supervised.final_coef",
    "teacher": "distillation",
}
"""Where a module holds a setting that does not stand under its own name: in the term that it is of."""


@pytest.mark.all
def test_the_tree_reaches_every_setting(algorithm: str, expected: dict[str, Any]) -> None:
    """Every parameter of the constructors stands in the tree, so that none can differ unseen."""
    for parameter, _ in schemas.parameters(ALGORITHMS[algorithm]):
        found = expected["module"]
        for part in HELD_AS.get(parameter.name, parameter.name).split("."):
            assert part in found, parameter.name
            found = found[part]
    data = expected["data"] | expected["data"]["options"]
    covered_by = {"path": "sources", "split": "sources", "name": "sources", "val_path": "val_sources"}
    covered_by |= {"val_split": "val_sources"}
    of_data = [parameter.name for parameter, _ in schemas.parameters(RolloutDataModule)]
    assert {covered_by.get(name, name) for name in of_data} <= data.keys()
    assert expected["module"]["policy_loss"]["clip_low"] == 0.2
    assert expected["module"]["optimizer"]["lr"] == 1e-6


def test_hydra_builds_what_the_constructors_build(algorithm: str, expected: dict[str, Any]) -> None:
    assert differences(tree(by_hydra(algorithm)), expected) == []


@pytest.mark.all
def test_lightning_cli_builds_what_the_constructors_build(algorithm: str, expected: dict[str, Any]) -> None:
    assert differences(tree(by_lightning_cli(algorithm)), expected) == []


@pytest.mark.parametrize(
    ("override", "argument"),
    [
        ("algo.group_size=4", "--model.group_size=4"),
        ("model.dtype=bfloat16", "--model.model.dtype=bfloat16"),
        ("data.val_batch_size=7", "--data.val_batch_size=7"),
        ("data.task.seed=7", "--data.task.seed=7"),
        ("trainer.accumulate_grad_batches=2", "--trainer.accumulate_grad_batches=2"),
        ("trainer.precision=bf16-mixed", "--trainer.precision=bf16-mixed"),
        ("optimizer.weight_decay=0.1", "--optimizer.weight_decay=0.1"),
        ("scheduler=constant", "--scheduler=Constant"),
        ("reference=frozen_copy", "--reference=FrozenCopy"),
        ("generator.batch_size=8", "--model.generator={class_path: lit_rl.generation.native.NativeGenerator, "
         "init_args: {batch_size: 8}}"),
        ("algo.loss.clip_high=0.28", "--model.loss={class_path: lit_rl.cli.lightning_app.WithKeywords, "
         "init_args: {function: LOSS, keywords: {clip_high: 0.28}}}"),
        ("eval.group_size=4", "--model.evaluation.group_size=4"),
        ("algo/teacher=self", "--model.teacher={class_path: lit_rl.algorithms.terms.self_teacher.SelfTeacher, "
         "init_args: {context: {class_path: lit_rl.algorithms.terms.self_teacher.OutcomeContext}}}"),
        ("data.curriculum.weights=[0.2,0.5,0.1]", "--data.curriculum={class_path: lit_rl.data.curriculum.Curriculum, "
         "init_args: {weights: [0.2, 0.5, 0.1]}}"),
        ("algo/advantage=role_baseline", "--model.advantage={class_path: "
         "lit_rl.algorithms.terms.credit.RoleBaseline, init_args: {decay: 0.95}}"),
        ("algo/advantage=optimal_value", "--model.advantage={class_path: "
         "lit_rl.algorithms.terms.optimal_value.OptimalValue, init_args: {samples: 8, beta: 0.5}}"),
    ],
    ids=lambda value: value.split("=")[0] if not value.startswith("--") else "",
)  # fmt: skip
@pytest.mark.all
def test_the_same_change_through_both_doors_is_the_same_change(override: str, argument: str) -> None:
    """And it is seen: each of these differs from the defaults, at one path."""
    arguments = [argument.replace("LOSS", "lit_rl.ops.policy_losses.clipped_policy_loss")]
    if argument.startswith("--model.model."):
        arguments.insert(0, "--model.model=lit_rl.models.LanguageModel")
    hydra, cli, default = (
        tree(by_hydra("grpo", override)),
        tree(by_lightning_cli("grpo", *arguments)),
        tree(by_hand("grpo")),
    )
    assert differences(hydra, cli) == []
    assert differences(hydra, default)


@pytest.mark.all
def test_the_branches_of_an_episode_are_the_same_through_all_doors(root: Path) -> None:
    path = f"{root}/tests/algorithms/forking_agents.py:forking"
    written = f"{{class_path: lit_rl.generation.RolloutFunction, init_args: {{path: {path}, max_branches: 3}}}}"
    by_key = by_lightning_cli("grpo", f"--model.env={written}")
    by_group = by_hydra("grpo", "env=rollout_func", f"env.path={path}", "env.max_branches=3")
    env = RolloutFunction(path, max_branches=3)
    by_object = (GRPO("tiny", exact_match, env=env, micro_batch_size="auto"), *by_hand("grpo")[1:])
    assert differences(tree(by_group), tree(by_key)) == []
    found = differences(tree(by_group), tree(by_object))
    assert all(path.startswith(".module.env.given.") for path in found)  # a config writes defaults out
    assert by_object[0].env.max_branches == 3


def test_the_demo_of_both_doors_trains_the_same(root: Path) -> None:
    """`python train.py` and `lit-rl fit --config conf/lightning/addition.yaml`, what tiny recommends included."""
    GlobalHydra.instance().clear()
    schemas.register_schemas()
    with initialize_config_module(version_base="1.3", config_module="lit_rl.conf"):
        resolved = plain(compose("config", overrides=["run_dir=unused"]))
    demo = command_line(["--config", str(root / "conf" / "lightning" / "addition.yaml")], run=False)
    hydra = tree(built_of(resolved))
    assert differences(hydra, tree((demo.model, demo.datamodule, demo.trainer))) == []


def test_an_edited_yaml_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison has teeth: a Trainer default changed in the file reaches the CLI door, and no longer fits."""
    loaded = yaml.safe_load
    monkeypatch.setattr(
        "lit_rl.cli.lightning_app.yaml.safe_load",
        lambda text: loaded(str(text).replace("gradient_clip_val: 1.0", "gradient_clip_val: 0.5")),
    )
    assert differences(tree(by_lightning_cli("grpo")), tree(by_hand("grpo"))) == [
        ".trainer.gradient_clip_val: 0.5 != 1.0"
    ]


# ---------------------------------------------------------------------- checks of a constructor, through both doors

REFUSED = {
    "dpo": (["algo.precompute_reference=true", "reference=ema"], "DPO", "EMA", ["--model.precompute_reference=true"]),
    "kto": (["algo.precompute_reference=true", "reference=ema"], "KTO", "EMA", ["--model.precompute_reference=true"]),
    "bco": (
        ["algo/prompt_weights=density_ratio", "reference=ema"],
        "BCO",
        "EMA",
        ["--model.prompt_weights=lit_rl.algorithms.terms.verdict_terms.DensityRatio"],
    ),
    "nash_md": (
        ["reference.device=cpu", "sampling.max_new_tokens=4"],
        "NashMD",
        "Auto",
        ["--reference.device=cpu", "--model.reward=lit_rl.rewards.exact_match"],
    ),
}
"""What a constructor refuses of its reference: words for Hydra; and class, reference and words for LightningCLI."""


@pytest.mark.parametrize("algorithm", REFUSED)
@pytest.mark.all
def test_a_constructor_checks_its_reference_through_both_doors(algorithm: str) -> None:
    hydra, name, reference, words = REFUSED[algorithm]
    task = "Addition" if name == "NashMD" else "AdditionPairs"
    with pytest.raises(ConfigError) as by_group:
        by_hydra(algorithm, *hydra)
    least = [f"--model={name}", "--model.model=tiny", f"--data.task=lit_rl.data.tasks.{task}"]
    with pytest.raises(ConfigError) as by_key:
        command_line([*least, f"--reference={reference}", *words], run=False)
    assert "reference" in str(by_key.value) and str(by_key.value) == str(by_group.value)


class Fixed(GRPO):
    """A user's own, whose constructor names no factory."""

    def __init__(self, model: str) -> None:
        super().__init__(model, exact_match)


def test_a_module_of_the_users_that_names_no_factory_gets_them_all_the_same(monkeypatch) -> None:
    least = [f"--model={__name__}.Fixed", "--model.model=tiny", "--data.task=lit_rl.data.tasks.Addition"]
    allowed = f"--allow_targets=[{__name__}]"
    built = command_line([*least, allowed, "--optimizer=AdamW", "--optimizer.lr=0.5", "--reference=EMA"], run=False)
    assert built.model.optimizer.lr == 0.5 and type(built.model.reference).__name__ == "EMA"
