"""The use of a file, where only `data.path` was typed: its data group, and the algorithm; and `lit-rl data-check`."""

from __future__ import annotations

import sys
from typing import Any

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, flag_override

from lit_rl.cli import data_kinds
from lit_rl.cli.build import build, plain
from lit_rl.cli.data_kinds import GROUPS, learns_from, typed_keys
from lit_rl.models import LanguageModel
from lit_rl.runs.data_check import data_check


def name_of(data: dict[str, Any]) -> str:
    """Return the name of a data node's rows: its path, its task, or the paths of its sources."""
    task = (data.get("task") or {}).get("_target_", "").rpartition(".")[2].lower()
    sources = data.get("sources") or []
    paths = [str(each["path"]) for each in sources if isinstance(each, dict) and each.get("path")]
    return str(data.get("path") or task or ", ".join(paths) or "several sources")


def run_data_check(config: DictConfig) -> int:
    """Run `lit-rl data-check`: choose the group, build the data module and look at it."""
    config, note = with_data_group(config)
    tree = plain(config)
    sys.stdout.write(f"{note}\n" if note else "")
    kind = learns_from(config) if "algo" in typed_keys() else None
    model = tree["algo"]["model"]
    model = LanguageModel(model) if isinstance(model, str) else build(model)
    # A model that scores has a kind of score in place of settings of validation.
    scores = kind is not None and "evaluation" not in tree["algo"]
    asked = any(key.partition(".")[0] in ("reward", "experiment") for key in typed_keys())
    names_columns = "columns" in (tree["env"] or {})  # which a rollout function gives its rewards, and no row has
    reward = build(tree["reward"]) if asked and not names_columns else None
    return data_check(build(tree["data"]), model, kind=kind, scores=scores, reward=reward, **tree["data_check"])


def with_data_group(config: DictConfig) -> tuple[DictConfig, str]:
    """Return the config with the groups that fit `data.path`, and a line that names them; unchanged where `data` was
    typed.

    The algorithm decides, if one was typed; else the columns of the first row, which then choose an algorithm too.

    Raises:
        DataError: the file cannot be read, or its columns are of no format.
    """
    typed = typed_keys()
    if "data.path" not in typed or {"data", "experiment"} & typed:
        return config, ""
    if config.task in data_kinds.OF_PROMPTS or ("algo" not in typed and "data.prompt_key" in typed):
        groups, why = ["data=jsonl"], "prompts to be answered"
    elif "algo" in typed:
        wanted = learns_from(config)
        if config.task != "data_check":  # which says the same of every row
            data_kinds.check_columns(config, wanted)
        groups, why = [f"data={GROUPS[wanted]}"], "what the algorithm learns from"
    elif config.task in data_kinds.OF_ANY_ROWS:
        asked = next((key for key in sorted(typed) if key.partition(".")[0] in data_kinds.ASKS_FOR_PROMPTS), None)
        kind, why = data_kinds.by_columns(config.data, config.allow_targets, asked)
        groups = data_kinds.groups_of(kind, config.task)
    else:
        return config, ""
    return _recomposed(*groups), f"{' '.join(groups)} ({why})"


def with_typed_prompts(config: DictConfig) -> tuple[DictConfig, str]:
    """Return the config for `lit-rl best-of-n`: all rows of `data.path` are the validation set, unless one was typed;
    and its group.

    Raises:
        DataError: as `with_data_group`.
    """
    typed = typed_keys()
    config, note = with_data_group(config)
    if "data.path" not in typed or {"data.val_path", "data.val_split"} & typed:
        return config, note
    more = ["data.val_split=${data.split}"] if config.data.split is not None else ["data.val_path=${data.path}"]
    if note:
        more.append(note.partition(" (")[0])
    return _recomposed(*more), note


def _recomposed(*more: str) -> DictConfig:
    """Compose the config of this command line with more overrides, and Hydra's record of choices to match."""
    config: Any = HydraConfig.get()
    chosen = {group: choice for group, _, choice in (word.partition("=") for word in more) if "." not in group}
    with flag_override(config, ["readonly", "struct"], [False, False]):
        config.runtime.choices.update(chosen)
    return compose("config", overrides=[*config.overrides.task, *more])
