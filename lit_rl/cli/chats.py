"""`lit-rl chat`: which model is talked to, that of a run or one that is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from lit_rl.callbacks.checkpoint_files import step_of
from lit_rl.cli import run_trust
from lit_rl.cli.build import build, plain
from lit_rl.cli.replays import checkpoint_of, config_of, placed
from lit_rl.commands.chat import Chat, chat
from lit_rl.commands.run_dir import RunDir
from lit_rl.errors import ConfigError, did_you_mean
from lit_rl.models import LanguageModel
from lit_rl.rollout import PromptForm

KEYS = ("run_dir", "ckpt_path", "sampling", "chat", "seed", "trainer.accelerator", "trainer.precision")
"""Keys that may be typed, with `model` where there is no run; all others have no meaning here."""


def run(config: DictConfig) -> int:
    """Find the model, and talk."""
    typed = [override.lstrip("+~").partition("=")[0] for override in HydraConfig.get().overrides.task]
    _check_keys(typed, bool(config.run_dir))
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


def _check_keys(typed: list[str], with_run: bool) -> None:
    keys = KEYS if with_run else (*KEYS, "model")
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
    tree = config_of(run_dir)
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
    resumed. For a run of an earlier version that is unknown."""
    exported = run_dir.read_summary().get("hf_step")
    files = (path for path in run_dir.checkpoints.glob("*.ckpt") if path.is_file())  # pieces cannot be read here
    return isinstance(exported, int) and any(step_of(path) > exported for path in files)
