"""Objects from a resolved config. `_target_` may name paths on a list only (`lit_rl.cli.targets`)."""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import Any

import lightning as L
from hydra.utils import get_object, instantiate
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from omegaconf import DictConfig, OmegaConf

from lit_rl.algorithms.checks.data_and_trainer import check_process_count
from lit_rl.algorithms.loop.generating import GeneratingModule
from lit_rl.algorithms.optim.strategies import FSDPTPStrategy, check_mesh
from lit_rl.cli.listing import neighbouring_keys
from lit_rl.cli.schemas import TARGETS, parameters
from lit_rl.cli.targets import ALLOWED, check_target, targets
from lit_rl.core import upstream
from lit_rl.core.errors import BackendError, ConfigError, LitRLError, UnknownKeyword, in_range
from lit_rl.core.other_names import hint

OPTIONAL = {
    "lit_rl.models.adapters.Lora",
    "lit_rl.data.curriculum.Curriculum",
    "lit_rl.data.supervised_text.SupervisedText",
    "lit_rl.core.rollout.Structured",
}
"""Objects that exist only if one of their settings does."""


def plain(config: DictConfig) -> dict[str, Any]:
    """Return the config as dicts, lists and primitives, resolved, without parts that are switched off.

    Raises:
        ConfigError: a mandatory value is missing, an interpolation leads nowhere, or a target is not allowed.
    """
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        hint = _HINTS.get(missing[0], "")
        raise ConfigError(f"{missing[0]} has no value and needs one: {missing[0]}=...{hint}")
    container = OmegaConf.to_container(config, resolve=True)
    assert isinstance(container, dict)
    tree = prune(container)
    allowed = (*ALLOWED, *(f"{name}." for name in tree.get("allow_targets") or ()))
    for key, target in targets(tree):
        check_target(key, target, allowed)
    return tree


_HINTS = {
    "env.path": " (package.module:Name or ./file.py:Name)",
    "env.functions": " (such as [./my_tools.py:multiply])",
    "reward.fn": " (package.module:name or ./file.py:name)",
    "reward.joint": " (package.module:name or ./file.py:name)",
    "optimizer.path": " (such as torch.optim.SGD)",
    "scheduler.path": " (such as torch.optim.lr_scheduler.StepLR)",
    "reward.functions.reward_model.name": " (a folder or a hub id)",
    "reward.functions.process_reward_model.name": " (a folder or a hub id)",
    "judge.fn": " (package.module:name or ./file.py:name)",
    "judge.base_url": " (such as https://host/v1)",
    "judge.model": " (the name that the server knows)",
    "reward.functions.remote.urls": " (such as [https://host/score])",
}


ABSENT = "lit_rl.cli.build.absent"
"""The target of a choice that stands for nothing: a file of a Hydra group cannot itself be null."""


def prune(node: Any) -> Any:
    """Drop null settings of optional objects; an optional object without any setting is None, as is `ABSENT`."""
    if isinstance(node, list):
        return [prune(item) for item in node]
    if not isinstance(node, dict):
        return node
    if node.get("_target_") == ABSENT:
        return None
    if str(node.get("_target_")) in OPTIONAL:
        given = {key: value for key, value in node.items() if value is not None}
        return given if len(given) > 1 else None
    return {key: prune(value) for key, value in node.items()}


_INTERPOLATION = re.compile(r"(\\*)\$\{")


def escape_interpolations(node: Any) -> Any:
    """Escape each `${` of plain values, with the backslashes before it, so that OmegaConf gives them back unchanged."""
    if isinstance(node, str):
        return _INTERPOLATION.sub(lambda found: found[1] * 2 + "\\${", node)
    if isinstance(node, list):
        return [escape_interpolations(item) for item in node]
    return {key: escape_interpolations(item) for key, item in node.items()} if isinstance(node, dict) else node


def escape_for_hydra(node: Any) -> Any:
    """Escape plain values for `hydra.utils.instantiate`, which resolves them twice: before it builds, and as it reads
    each."""
    return escape_interpolations(escape_interpolations(node))


def build(tree: Any) -> Any:
    """Build the objects of a part of the tree, whose values are plain: a text that looks like a reference stays as it
    is.

    Raises:
        LitRLError: as the constructor raised it; anything else is a ConfigError with the constructor's words.
    """
    from hydra.errors import InstantiationException

    try:
        return instantiate(escape_for_hydra(tree), _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__ or error.__context__
        if isinstance(cause, LitRLError) and not isinstance(cause, UnknownKeyword):
            raise _with_whole_key(tree, error, cause) from error
        if isinstance(cause, ImportError):
            raise BackendError(f"What the config builds cannot be imported: {cause}") from error
        text = str(cause or error)
        if "deepspeed" in text.lower() and find_spec("deepspeed") is None:
            raise BackendError(
                "strategy=deepspeed_* needs DeepSpeed, which is not installed. Install it with: pip install "
                "'lit-rl[deepspeed]', or take strategy=fsdp."
            ) from error
        raise ConfigError(_refusal(tree, error, cause or error)) from error


def _with_whole_key(tree: dict[str, Any], error: Exception, cause: LitRLError) -> LitRLError:
    """Return the error of a constructor with the whole key, where its class does not know where in the config it is.

    A reward function, which a config may have under any name, begins with the setting alone: ``rubric=...``,
    ``rubric, criterion 0: ...``. A model takes itself for the policy: ``model.name=...`` of a teacher is
    ``algo.teacher.model.name=...``.
    """
    _, _, key = str(error).partition("full_key: ")
    node: Any = tree
    for part in key.split(".") if key else ():
        node = node.get(part) if isinstance(node, dict) else None
    is_model = isinstance(node, dict) and node.get("_target_") == TARGETS["LanguageModel"]
    if is_model and key not in ("", "model"):  # of an algorithm, beside its policy
        return type(cause)(re.sub(r"\bmodel\.(?=[a-z])", f"algo.{key}.", str(cause)))
    setting = re.match(r"(\w+)(?=[=:,]| (?:lacks|has|is) )", str(cause))
    is_reward = re.fullmatch(r"(reward\.)?functions\.[^.]+", key) is not None
    if setting is None or not isinstance(node, dict) or setting[1] not in node or not is_reward:
        return cause
    return type(cause)(f"reward.{key.removeprefix('reward.')}.{cause}")


def _refusal(tree: dict[str, Any], error: Exception, cause: BaseException) -> str:
    """Return the error about the part of the config that was refused: its value, and the constructor's words."""
    _, _, key = str(error).partition("full_key: ")
    node: Any = tree
    for part in key.split(".") if key else ():
        node = node.get(part) if isinstance(node, dict) else None
    if not isinstance(node, dict) or "_target_" not in node:
        return str(error).split("\nfull_key")[0]
    target = str(node["_target_"])
    if word := _unknown_keyword(cause):
        names = [parameter.name for parameter, _ in parameters(get_object(target))]
        where = f"{key}.{word}" if key else word
        shipped = target in TARGETS.values()
        command = "lit-rl train --cfg job" if shipped else f"python -m pydoc {target}"
        listed = neighbouring_keys(target.rpartition(".")[2], word, names, command)
        return f"{where} is not a key of {target}.{hint(where, 'train', names, listed)}"
    came = ", ".join(f"{name}={value!r}" for name, value in node.items() if not isinstance(value, dict | None))
    came = came.replace(f"_target_={target!r}, ", "")
    return f"{key or 'The config'}: {target} refuses {came}: {type(cause).__name__}: {cause}"


def _unknown_keyword(cause: BaseException) -> str | None:
    """Return the keyword that a constructor, of ours or any other, does not take."""
    if isinstance(cause, UnknownKeyword):
        return cause.keyword
    found = re.search(r"unexpected keyword argument '(\w+)'", str(cause))
    return found[1] if found else None


def check_judged(module: Any, tree: dict[str, Any]) -> None:
    """Refuse a judge, or a model to compare with, where the module writes nothing that could be judged."""
    if isinstance(module, GeneratingModule):
        return
    against, judge = tree["eval"]["win_rate_against"], _class_of(tree["judge"])
    asked = f"eval.win_rate_against={against!r}" if against is not None else f"judge={judge}"
    if against is not None or judge not in ("", "RewardJudge"):
        raise ConfigError(f"{asked} judges completions, and {type(module).__name__} writes none: leave it out.")


def check_answered(module: Any, tree: dict[str, Any]) -> None:
    """Refuse environments where the method draws completions of one turn only, or none."""
    env = tree.get("env")
    if env is not None and getattr(module, "env", None) is None:
        raise ConfigError(
            f"env={_class_of(env)} answers the turns of a policy, and {type(module).__name__} has none to answer: take "
            "a method that learns from rollouts (grpo, rloo, reinforce_pp, ppo and their presets), or leave it out."
        )


def _class_of(node: dict[str, Any] | None) -> str:
    """Return the class name of a node's target; empty where it was set to null."""
    return str((node or {}).get("_target_", "")).rpartition(".")[2]


def check_trainer(trainer: L.Trainer, asked: Any) -> None:
    """Refuse settings that Lightning lets pass and no run can use, before anything is downloaded.

    Args:
        trainer: The Trainer, built.
        asked: Its `precision` as it was given: on a CPU Lightning makes bf16-mixed of 16-mixed.

    Raises:
        ConfigError: nothing would end the training, or its processes could not give back what they learned.
        BackendError: the device cannot compute in this precision, or there is nothing to spread over.
    """
    if trainer.gradient_clip_val is not None:
        in_range("trainer.gradient_clip_val", trainer.gradient_clip_val, low=0)
    timed = any(isinstance(callback, Timer) for callback in trainer.callbacks)  # pyright: ignore
    if trainer.max_steps == -1 and trainer.max_epochs == -1 and not timed:
        raise ConfigError("Nothing ends the run: set trainer.max_steps, trainer.max_epochs or trainer.max_time.")
    method = upstream.start_method(trainer.strategy)
    if isinstance(trainer.strategy, DDPStrategy) and method != "popen":
        typed = "ddp_spawn" if method == "spawn" else "ddp_fork (ddp_notebook is the same)"
        raise ConfigError(
            f"trainer.strategy={typed} makes its processes of this one, and their weights would come back through a "
            "file that is no checkpoint of a run. Take strategy=ddp, which starts the command for each device."
        )
    check_process_count(trainer.num_devices, trainer.num_nodes)
    check_mesh(trainer.strategy)
    if isinstance(trainer.strategy, FSDPTPStrategy):
        trainer.strategy.check_sizes()
    if not isinstance(trainer.accelerator, CPUAccelerator):
        return
    if str(asked) in ("16", "16-true", "16-mixed"):
        raise BackendError(f"trainer.precision={asked} needs a GPU: on a CPU take bf16-mixed or 32-true.")
    if isinstance(trainer.strategy, ModelParallelStrategy) and trainer.world_size == 1:
        raise BackendError(
            "strategy=fsdp spreads over several devices and there is one: take strategy=auto, or devices=2."
        )
