"""`lit-rl eval` and `best-of-n` over the folder of a run: the run's own settings, under what was typed."""

from __future__ import annotations

import copy
import hashlib
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from lit_rl.cli import key_checks, run_trust
from lit_rl.cli.build import plain
from lit_rl.cli.run_info import is_over_a_run
from lit_rl.cli.typed_words import ELSEWHERE
from lit_rl.core.errors import ConfigError
from lit_rl.reports.config_changes import changes_between
from lit_rl.reports.secrets import redact, redact_command
from lit_rl.runs.rendezvous import Rendezvous
from lit_rl.runs.run_dir import RunDir

PARTS = ("seed", "model", "data", "reward", "env", "judge", "reference", "sampling", "eval", "algo")
"""Parts that are the run's where nothing was typed. Trainer, generator and loggers are the command's."""

_OF_THE_COMMAND = ("generator", "optimizer", "scheduler")
"""Parts of `algo` that are no settings of an evaluation."""

_NOT_OF_THE_RUN = ("generator", "trainer.", "trainer=", "strategy", "logger", "allow_targets=", "hydra.searchpath=")
"""Beginnings of words about the command's own computation: they are typed again for an evaluation."""

_OF_TRAINING = (
    *(f"trainer.{name}=" for name in ("max_steps", "max_epochs", "max_time", "val_check_interval")),
    *(f"trainer.{name}=" for name in ("min_steps", "min_epochs", "check_val_every_n_epoch", "num_sanity_val_steps")),
    *("trainer.accumulate_grad_batches=", "trainer.gradient_clip_", "trainer.log_every_n_steps=", "trainer.limit_"),
    *("optimizer=", "optimizer.", "scheduler=", "scheduler."),
)
"""Beginnings of words that no evaluation reads, or that cut the validations of a training short."""

_NAMED = ("model", "data", "reward", "env", "judge", "reference", "sampling", "algo")
"""Parts that change a number's meaning, where they differ from the run's."""


def check_every_node_sees(meeting: Rendezvous, task: str, run_dir: str) -> None:
    """Refuse nodes that would evaluate by other settings: each reads the run's own copy, and one that does not see the
    folder would take those of the command. Called by all processes, once.

    Raises:
        ConfigError: they see different things there; names the folder and two of them.
    """
    over = is_over_a_run(task, run_dir)
    mine = _fingerprint(Path(run_dir).expanduser()) if over else None
    where = f"node {meeting.placement.node} ({socket.gethostname()})"
    seen = {found: node for found, node in reversed(meeting.all_gather("settings", [mine, where]))}
    if len(seen) == 1:
        return
    if (lacks := seen.pop(None, None)) is not None:
        what = f"holds the config.yaml of a run on {next(reversed(seen.values()))}, and none on {lacks}"
    else:
        what = f"holds another config.yaml on {' than on '.join(list(seen.values())[:2])}"
    raise ConfigError(
        f"run_dir={run_dir} {what}. Every node must see the same folder, since each reads the run's settings there: "
        "take a disk that all nodes share, or copy the folder of the run to each of them."
    )


def _fingerprint(folder: Path) -> str:
    return hashlib.blake2b((folder / "config.yaml").read_bytes(), digest_size=16).hexdigest()


def with_settings_of_the_run(config: DictConfig) -> tuple[DictConfig, str]:
    """Return the config with the run's settings where nothing else was typed, and a line about it.

    Raises:
        ConfigError: the run's config names code, and nobody has said `trust_run=true`; or it is no resolved config.
        StorageError: it is damaged.
    """
    run_dir = RunDir(Path(str(config.run_dir)).expanduser())
    path, run = run_dir.config_file, run_dir.read().settings()
    overrides = HydraConfig.get().overrides.task
    typed = [name.replace("/", ".").partition("@")[0] for name in key_checks.overridden_keys()]
    whole = {*typed, *(word[1:].partition(".")[0] for word in overrides if word.startswith("~"))}
    taken = [] if "experiment" in typed else [part for part in PARTS if part in run and part not in whole]
    parts = {part: _linked(run) if part == "algo" else run[part] for part in taken}
    own = {name: node for name, node in run["algo"].items() if parts.get("algo", {}).get(name) == node}
    _check_resolved({part: own if part == "algo" else run[part] for part in taken}, path)
    if "data" in taken and "data.path" in typed and (run["data"] or {}).get("task") is not None:
        raise ConfigError(
            f"data.path: the run of {run_dir.path} computed its rows. Name the group of your file too: data=jsonl."
        )
    run_trust.check(parts, config)
    made = copy.deepcopy(config)
    with open_dict(made):
        for part, node in parts.items():
            made[part] = node
        for key in typed:
            if key.partition(".")[0] in taken:
                OmegaConf.update(made, key, OmegaConf.select(config, key), merge=False, force_add=True)
        if config.task == "best_of_n" and "data" in taken and "data.path" in typed:
            _take_all_rows(made.data, typed)
    changed = changes_between(_compared(run), _compared(redact(plain(made))))
    said = "; ".join(f"{key} is {ours}, and was {theirs}" for key, theirs, ours in changed)
    how = f"but other than in the run: {said}" if changed else "for model, data, algorithm and reward"
    return made, f"Settings of {path}, {how}." if taken else ""


def _take_all_rows(data: DictConfig, typed: list[str]) -> None:
    """Evaluate all rows of a typed file, as without a run, unless others were typed."""
    if not {"data.val_path", "data.val_split"} & {*typed}:
        whole = data.get("split") is not None
        data.val_path, data.val_split = (None, data.split) if whole else (data.path, None)


def command_over(tree: dict[str, Any], run_dir: RunDir, command: str) -> str:
    """Return the command that evaluates the run of this config: short, since it reads the run's own settings.

    Args:
        tree: The run's config, in plain values.
        run_dir: Folder of the run.
        command: What the user typed. Repeated whole where an experiment was chosen, or where the run has a secret,
            which is written down nowhere.
    """
    words, parts = shlex.split(command), {part: tree[part] for part in PARTS if part in tree}
    redacted = redact(parts)
    if any(word.startswith("experiment=") for word in words) or "<redacted>" in "".join(_texts(redacted)):
        kept = [word for word in words if not word.lstrip("+~").startswith(_OF_TRAINING)]
        return shlex.join([*kept, "task=eval", "ckpt_path=last"])
    trust = ["trust_run=true"] if run_trust.code_in(parts, tree["allow_targets"]) else []
    bare = {word: word.lstrip("+~") for word in words}
    own = [word for word in words if bare[word].startswith(_NOT_OF_THE_RUN) and not bare[word].startswith(_OF_TRAINING)]
    options = [word for at, word in enumerate(words) if {word.partition("=")[0], words[at - 1]} & {*ELSEWHERE}]
    words = ["lit-rl", "eval", *options, f"run_dir={run_dir.path}", "ckpt_path=last", *trust, *own]
    return redact_command(shlex.join(words))


def _linked(run: dict[str, Any]) -> dict[str, Any]:
    """Return the algorithm with references to the parts that it repeats from the top, so that a typed word counts
    everywhere."""
    algo = dict(run["algo"])
    for name in algo:
        top = {"evaluation": "eval"}.get(name, name)
        if name in _OF_THE_COMMAND or (top in PARTS and top in run and algo[name] == run[top]):
            algo[name] = f"${{{top}}}"
    return algo


def _compared(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that change the meaning of a number, each once."""
    left_out = (*_OF_THE_COMMAND, *PARTS, "evaluation")
    algo = {name: node for name, node in tree["algo"].items() if name not in left_out}
    return {name: tree.get(name) for name in _NAMED} | {"algo": algo}


def _check_resolved(taken: dict[str, Any], path: Path) -> None:
    """Refuse references, which no run writes, and which would be followed on this machine; and redacted secrets."""
    for part, node in taken.items():
        if bad := next((text for text in _texts(node) if "${" in text or "<redacted>" in text), None):
            why = "a reference, which no run writes" if "${" in bad else "where a secret was, which no run writes down"
            raise ConfigError(
                f"{path}: {part} holds {bad[:80]!r}, {why}. Type the group too: {part}=... with its keys."
            )


def _texts(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    elif isinstance(node, dict):
        for key, value in node.items():
            yield from (*_texts(str(key)), *_texts(value))
    elif isinstance(node, list):
        for value in node:
            yield from _texts(value)
