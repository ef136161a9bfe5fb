"""`lit-rl chat`, `serve` and `doctor`: the model that is talked to, served or examined, of a run or named."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.strategies import SingleDeviceStrategy
from omegaconf import DictConfig

from lit_rl.algorithms.optim.master_weights import BF16
from lit_rl.callbacks.checkpoint_io import step_of
from lit_rl.cli import key_checks, run_trust
from lit_rl.cli.build import build, plain
from lit_rl.cli.replays import checkpoint_of, placed
from lit_rl.cli.trainer_settings import AUTO, automatic_precision_on
from lit_rl.core.errors import ConfigError, did_you_mean
from lit_rl.core.rollout import PromptForm
from lit_rl.data.order import DEFAULT_STEP_ROWS
from lit_rl.generation.vllm.engine_settings import EngineSettings
from lit_rl.models import LanguageModel
from lit_rl.runs.chat import Chat, chat
from lit_rl.runs.doctor import Doctor, PlannedRollout, doctor
from lit_rl.runs.run_dir import RunDir
from lit_rl.runs.serve import Serve, serve

CHAT_KEYS = ("run_dir", "ckpt_path", "sampling", "chat", "seed", "trainer.accelerator", "trainer.precision")
"""Keys that may be typed, with `model` where there is no run; all others have no meaning here."""


def run_chat(config: DictConfig) -> int:
    """Find the model, and talk."""
    typed = [override.lstrip("+~").partition("=")[0] for override in HydraConfig.get().overrides.task]
    _check_chat_keys(typed, bool(config.run_dir))
    tree = plain(config)
    if not config.run_dir:
        if config.ckpt_path is not None:
            raise ConfigError("ckpt_path belongs to a run: set run_dir too. For a folder of weights: model.name=DIR.")
        model, checkpoint, sampling, of_run = build(tree["model"]), None, tree["sampling"], tree
    else:
        run_dir = RunDir(Path(str(config.run_dir)).expanduser())
        of_run = _tree(run_dir, tree, config)
        model, checkpoint = _model(config, run_dir, of_run)
        named = {key.split(".")[1] for key in typed if key.startswith("sampling.")}
        sampling = of_run["sampling"] | {key: tree["sampling"][key] for key in named}
    model, fabric, _ = placed(model, config, of_run["trainer"])
    # What the policy was trained to read: the command's own setting counts more.
    data, own = (of_run.get("data") or {}) if config.run_dir else {}, dict(tree["chat"])
    own["trained_on"] = (_recorded(config) if config.run_dir else None) or model.reads
    if own["plain"] is None:
        own["plain"] = own["trained_on"] == "text"
    plain_lines = own["plain"] or not (model.processor or model).tokenizer.chat_template
    if own["system_prompt"] is None and not plain_lines:
        own["system_prompt"] = data.get("system_prompt")
    kwargs = data.get("chat_template_kwargs") or {}
    return chat(Chat(model, build(sampling), fabric, checkpoint, tree["seed"], template_kwargs=kwargs, **own))


def _recorded(config: DictConfig) -> PromptForm | None:
    """Return the kind of prompt that the run learned to answer, as its summary has it."""
    return RunDir(Path(str(config.run_dir)).expanduser()).read_summary().get("prompts")


def _check_chat_keys(typed: list[str], with_run: bool) -> None:
    keys = CHAT_KEYS if with_run else (*CHAT_KEYS, "model")
    for key in typed:
        if key.startswith(tuple(f"{name}." for name in keys)) or key in (*keys, "task", "allow_targets", "trust_run"):
            continue
        why = " The model is that of run_dir." if with_run and key.partition(".")[0] == "model" else ""
        raise ConfigError(
            f"{key} cannot be set for lit-rl chat.{why}{did_you_mean(key, keys)} To be set are {', '.join(keys)}."
        )


def _tree(run_dir: RunDir, own: dict[str, Any], config: DictConfig) -> dict[str, Any]:
    """Return the run's settings; this command's where an export stands alone."""
    if not (run_dir.path / "config.yaml").exists() and run_dir.hf.is_dir():
        return own
    tree = run_dir.read().settings()
    if "sampling" not in tree["algo"]:
        raise ConfigError(
            f"run_dir={run_dir.path} holds a {str(tree['algo'].get('_target_')).rpartition('.')[2]} run: what it "
            "trained gives scores and writes no text. Give the folder of a policy's run."
        )
    run_trust.check({name: tree["algo"][name] for name in ("model", "sampling")}, config)
    return tree


def _model(config: DictConfig, run_dir: RunDir, tree: dict[str, Any]) -> tuple[LanguageModel, Path | None]:
    """Return the run's export, or its model with the weights of a checkpoint where one was named, or is newer."""
    settings = tree["algo"]["model"]
    if config.ckpt_path is not None or not run_dir.hf.is_dir() or _went_on(run_dir):
        return build(settings), checkpoint_of(config, run_dir)
    kept = {key: settings[key] for key in ("dtype", "attn_implementation", "trust_remote_code") if key in settings}
    return LanguageModel(str(run_dir.hf), **kept), None


def _went_on(run_dir: RunDir) -> bool:
    """Tell whether a checkpoint is of a later step than the export: a run that Ctrl-C stopped has one, and may be
    resumed."""
    exported = run_dir.read_summary().get("hf_step")
    files = (path for path in run_dir.checkpoints.glob("*.ckpt") if path.is_file())  # pieces cannot be read here
    return isinstance(exported, int) and any(step_of(path) > exported for path in files)


SERVE_KEYS = ("model", "generator", "serve")
"""Keys that may be typed; all others have no meaning here."""

GENERATOR = "vllm_server"
"""The choice whose settings are read where none was typed."""


def generator_override(words: Sequence[str]) -> list[str]:
    """Return the choice of generator to add to the words of a command line: Hydra takes the keys of the chosen one
    only."""
    typed = any(word.lstrip("+").startswith("generator=") for word in words)
    return [] if typed else [f"generator={GENERATOR}"]


def run_serve(config: DictConfig) -> int:
    """Serve until a signal ends it."""
    overrides = list(HydraConfig.get().overrides.task)
    typed = key_checks.overridden_keys()
    engine = [field.name for field in dataclasses.fields(EngineSettings)]
    _check_serve_keys(typed, engine)
    tree = plain(config)
    settings = {name: tree["generator"][name] for name in engine if name in tree["generator"]}
    # The run describes the same model and the same engine; the generator and its address are the command's own to say.
    said = [word for word, key in zip(overrides, typed) if key.startswith(("model", "generator."))]
    model = build(tree["model"])
    precision = tree["trainer"]["precision"]
    if precision == AUTO:  # as the run will hold the policy on such a device
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        precision = automatic_precision_on(device, SingleDeviceStrategy, model).precision
    if precision == BF16:
        model = model.held_in("bfloat16")
    return serve(Serve(model, EngineSettings(**settings), typed=said, **tree["serve"]))


def _check_serve_keys(typed: Sequence[str], engine: Sequence[str]) -> None:
    key_checks.check_command_keys("lit-rl serve", typed, SERVE_KEYS)
    for key in typed:
        group, _, name = key.partition(".")
        if group == "generator" and name and name not in engine:
            raise ConfigError(
                f"{key} is a setting of the run, not of its server.{did_you_mean(name, engine)} Of the generator, "
                f"lit-rl serve takes {', '.join(engine)}."
            )


DOCTOR_KEYS = (
    "model",
    "generator",
    "sampling",
    "doctor",
    "seed",
    "trainer.accelerator",
    "trainer.precision",
    "data.prompts_per_rollout",
    "data.max_prompt_tokens",
    "algo.group_size",
)
"""Keys that may be typed; all others have no meaning here. The last three are for the memory."""


def run_doctor(config: DictConfig) -> int:
    """Build the policy and the generator, and examine them."""
    key_checks.check_command_keys("lit-rl doctor", key_checks.overridden_keys(), DOCTOR_KEYS)
    tree = plain(config)
    # The generator first: without vLLM nothing else has to be loaded.
    generator, sampling = build(tree["generator"]), build(tree["sampling"])
    data = tree["data"]
    prompts, longest = data["prompts_per_rollout"] or DEFAULT_STEP_ROWS, data["max_prompt_tokens"]
    planned = PlannedRollout(prompts, tree["algo"]["group_size"], longest, sampling.max_new_tokens)
    model, fabric, _ = placed(build(tree["model"]), config, tree["trainer"])
    job = Doctor(model, generator, sampling, fabric, planned, seed=tree["seed"], **tree["doctor"])
    return doctor(job)
