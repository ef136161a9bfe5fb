"""What a file is for, where only `data.path` was typed: its data group, and the algorithm; and `lit-rl data-check`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import Any

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException

from lit_rl.cli import evaluated, small_files
from lit_rl.cli.build import ALLOWED, build, check_target, plain
from lit_rl.cli.early import TELL_THE_DATA
from lit_rl.commands.data_check import data_check, kind_of
from lit_rl.commands.first_row import first_row
from lit_rl.data.offline.example import Kind
from lit_rl.data.offline.formats import COLUMNS, USABLE
from lit_rl.errors import ConfigError, DataError, did_you_mean
from lit_rl.models import LanguageModel

GROUPS: dict[Kind | None, str] = {
    "texts": "texts",
    "pairs": "preferences",
    "verdicts": "preferences",
    "stepwise": "steps",
    None: "jsonl",
}
"""The data group of each kind; of prompts to be answered where there is none."""

COMPUTED: dict[Kind | None, str] = {
    "texts": "addition_text",
    "pairs": "addition_pairs",
    "verdicts": "addition_pairs",
    "stepwise": "addition_steps",
    None: "addition",
}
"""The same for data that comes with the package."""

ALGORITHMS: dict[Kind | None, str] = {
    "texts": "sft",
    "pairs": "dpo",
    "verdicts": "kto",
    "stepwise": "process_reward_model",
}
"""What learns from a file of each kind, where no algorithm was typed; prompts go to that of `config.yaml`."""

_OF_PROMPTS = ("best_of_n", "reward_test", "env_check")
"""Tasks that take prompts to be answered, whatever the columns."""

_OF_ANY_ROWS = ("fit", "validate", "test", "predict", "eval", "plan", "data_check")
"""Tasks whose data group is told from the columns."""

_HOW_ROWS_ARE_READ = ("path", "split", "name", "on_bad_row", "rename", "map_row")


def name_of(data: dict[str, Any]) -> str:
    """What a data node's rows are called: its path, its task, or the paths of its sources."""
    task = (data.get("task") or {}).get("_target_", "").rpartition(".")[2].lower()
    sources = data.get("sources") or []
    paths = [str(each["path"]) for each in sources if isinstance(each, dict) and each.get("path")]
    return str(data.get("path") or task or ", ".join(paths) or "several sources")


def run(config: DictConfig) -> int:
    """`lit-rl data-check`: choose the group, build the data module and look at it."""
    config, note = with_data_group(config)
    config, smaller = with_small_steps(config)
    tree = plain(config)
    sys.stdout.writelines(f"{line}\n" for line in (note, smaller) if line)
    kind = _learns_from(config) if "algo" in _typed() else None
    model = tree["algo"]["model"]
    model = LanguageModel(model) if isinstance(model, str) else build(model)
    return data_check(build(tree["data"]), model, kind=kind, **tree["data_check"])


def with_data_group(config: DictConfig) -> tuple[DictConfig, str]:
    """The config with the groups that fit `data.path`, and a line that says which; unchanged where `data` was typed.

    The algorithm decides, if one was typed; else the columns of the first row, which then choose an algorithm too.

    Raises:
        DataError: the file cannot be read, or its columns are of no format.
    """
    typed = _typed()
    if "data.path" not in typed or {"data", "experiment"} & typed:
        return config, ""
    if config.task in _OF_PROMPTS or ("algo" not in typed and "data.prompt_key" in typed):
        groups, why = ["data=jsonl"], "prompts to be answered"
    elif "algo" in typed:
        wanted = _learns_from(config)
        if config.task != "data_check":  # which says the same of every row
            _check_columns(config, wanted)
        groups, why = [f"data={GROUPS[wanted]}"], "what the algorithm learns from"
    elif config.task in _OF_ANY_ROWS:
        kind, why = _by_columns(config.data, config.allow_targets)
        groups = _groups(kind, config.task)
    else:
        return config, ""
    return _recomposed(*groups), f"{' '.join(groups)} ({why})"


def with_small_steps(config: DictConfig) -> tuple[DictConfig, str]:
    """The config with steps that fit a small `data.path`, and a line that says so; see `small_files`."""
    typed = _typed()
    step = small_files.step_of(config, typed) if "data.path" in typed else None
    if step is None:
        return config, ""
    with_step = config.copy()
    OmegaConf.update(with_step, step.key, step.rows)
    return with_step, step.said


def _check_columns(config: DictConfig, wanted: Kind | None) -> None:
    """Refuse a file whose columns are for other algorithms than the one that was typed."""
    if wanted is None:  # a row of any format has a prompt, under a name of its own at times
        return
    kind, why = _by_columns(config.data, config.allow_targets)
    if kind != wanted and not (kind == "pairs" and "preference" in USABLE[wanted]):
        algo = f"algo={ALGORITHMS.get(kind, 'grpo')}"
        typed = [algo if word.startswith("algo=") else word for word in HydraConfig.get().overrides.task]
        raise ConfigError(
            f"{_class_of(config, 'algo').__name__} needs {_WORDS[wanted]}, and {config.data.path} has {why}: "
            f"{_WORDS[kind]}. Name columns with data.rename={{old: new}}, or type:\n  {_entered(typed)}"
        )


def _groups(kind: Kind | None, task: str) -> list[str]:
    """The choices that rows of a kind are for; the algorithm only where the task runs one."""
    algo = [f"algo={ALGORITHMS[kind]}"] if kind in ALGORITHMS and task != "data_check" else []
    return [*algo, f"data={GROUPS[kind]}"]


def check_pair(config: DictConfig) -> None:
    """Refuse a data module that makes what the algorithm does not learn from, before either is built.

    Raises:
        ConfigError: says what the algorithm learns from, what the data gives, and the line to type.
    """
    wanted, data = _learns_from(config), _class_of(config, "data")
    if config.task == "reward_test":
        wanted = None  # rewards score answers to prompts, whatever the algorithm
    gives: tuple[Kind | None, ...] = getattr(data, "serves", (None,))
    group = HydraConfig.get().runtime.choices.get("data")
    if wanted not in gives:
        who = "lit-rl reward-test" if config.task == "reward_test" else _class_of(config, "algo").__name__
        raise ConfigError(
            f"{who} needs {_WORDS[wanted]}, and data={group} ({data.__name__}) gives "
            f"{' or '.join(_WORDS[kind] for kind in gives)}. Type:\n  {_line(config, wanted)}"
        )
    if "data.path" in _typed() and config.data.get("task") is not None:
        raise ConfigError(
            f"data.path={config.data.path} is a file of yours, and data={group} is computed (came: path, task). "
            f"Type:\n  {_line(config, wanted)}"
        )


_WORDS: dict[Kind | None, str] = {
    "texts": "texts to imitate",
    "pairs": "pairs of a chosen and a rejected completion",
    "verdicts": "completions with a verdict",
    "stepwise": "steps with labels",
    None: "prompts to be answered",
}


def _line(config: DictConfig, wanted: Kind | None) -> str:
    """What was typed, with the data group of the kind that is wanted."""
    typed = list(HydraConfig.get().overrides.task)
    path = config.data.get("path")
    group = (COMPUTED if path is None else GROUPS)[wanted]
    more = [] if path is None or "data.path" in _typed() else ["data.path=FILE"]
    at = next((i for i, word in enumerate(typed) if word.startswith("data=")), len(typed))
    return _entered([*typed[:at], f"data={group}", *more, *typed[at + 1 :]])


def _entered(words: Sequence[str]) -> str:
    """The line that starts a training with these overrides, as this one was started."""
    entry = ["python", sys.argv[0]] if sys.argv[0].endswith(".py") else ["lit-rl", "train"]
    return shlex.join([*entry, *words])


def chosen_before(arguments: Sequence[str]) -> tuple[list[str], str]:
    """The words of a command with the groups that fit `data.path`, and a line that says which.

    Before Hydra composes: it knows the keys of a group only, so `data.max_length=64` needs the group first. Left as
    they are where `with_data_group` chooses without a look at the columns, where the words cannot be read alone (a
    value that stands elsewhere), and where they are another command's.

    Args:
        arguments: `sys.argv`.

    Raises:
        DataError: as `with_data_group`.
    """
    words, kept = list(arguments), (list(arguments), "")
    overrides = [word for word in words[1:] if "=" in word and not word.startswith("-")]
    task = next((word.partition("=")[2] for word in reversed(overrides) if word.startswith("task=")), "fit")
    run_dir = next((word.partition("=")[2] for word in reversed(overrides) if word.startswith("run_dir=")), None)
    if task not in _OF_ANY_ROWS or evaluated.is_over_a_run(task, run_dir):
        return kept
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
        given = {override.key_or_group: override.value() for override in parsed if not override.is_sweep_override()}
        elsewhere = TELL_THE_DATA & {override.key_or_group for override in parsed}
        if elsewhere or not isinstance(given.get("data.path"), str):
            return kept
        tree = OmegaConf.create({"allow_targets": []})
        for key, value in given.items():
            if key == "allow_targets" or key.startswith("data."):
                OmegaConf.update(tree, key, value, force_add=True)
        OmegaConf.resolve(tree)
    except (HydraException, OmegaConfBaseException):  # Hydra says what is wrong, if anything is
        return kept
    kind, why = _by_columns(tree.data, tree.allow_targets)
    at, groups = words.index(overrides[0]), _groups(kind, task)  # among the other overrides, which stand in one row
    return [*words[:at], *groups, *words[at:]], f"{' '.join(groups)} ({why})"


def with_given_prompts(config: DictConfig) -> tuple[DictConfig, str]:
    """For `lit-rl best-of-n`: all rows of `data.path` are the validation set, unless one was typed; and its group.

    Raises:
        DataError: as `with_data_group`.
    """
    typed = _typed()
    config, note = with_data_group(config)
    if "data.path" not in typed or {"data.val_path", "data.val_split"} & typed:
        return config, note
    more = ["data.val_split=${data.split}"] if config.data.split is not None else ["data.val_path=${data.path}"]
    if note:
        more.append(note.partition(" (")[0])
    return _recomposed(*more), note


def _recomposed(*more: str) -> DictConfig:
    """The config of this command line with more overrides, and Hydra's record of what was chosen to match."""
    config: Any = HydraConfig.get()
    chosen = {group: choice for group, _, choice in (word.partition("=") for word in more) if "." not in group}
    with flag_override(config, ["readonly", "struct"], [False, False]):
        config.runtime.choices.update(chosen)
    return compose("config", overrides=[*config.overrides.task, *more])


def _typed() -> set[str]:
    """The keys and groups of the command line."""
    return {override.lstrip("+~").partition("=")[0].partition("@")[0] for override in HydraConfig.get().overrides.task}


def _learns_from(config: DictConfig) -> Kind | None:
    return getattr(_class_of(config, "algo"), "learns_from", None)


def _class_of(config: DictConfig, key: str) -> Any:
    """What the target of a group names."""
    target = config[key]["_target_"]
    check_target(key, target, (*ALLOWED, *(f"{name}." for name in config.allow_targets)))
    return get_object(target)


def _by_columns(data: DictConfig, allow: Sequence[str]) -> tuple[Kind | None, str]:
    """What the first row's columns are for, and the reason in words.

    Args:
        data: Those settings of `data` that say how a row is read.
        allow: What `allow_targets` allows.
    """
    given = {key: data.get(key) for key in _HOW_ROWS_ARE_READ}
    tree = plain(OmegaConf.create({"data": given, "allow_targets": list(allow)}))["data"]
    reading = {key: build(node) if key == "map_row" else node for key, node in tree.items() if node is not None}
    row, where = first_row(**reading)
    kind = kind_of(row)
    if kind is None and "prompt" not in row:
        known = dict.fromkeys(column for columns in COLUMNS.values() for column in columns)
        near = next((hint for column in row if (hint := did_you_mean(column, known))), "")
        needed = "; ".join(dict.fromkeys(", ".join(columns) for columns in COLUMNS.values()))
        raise DataError(
            f"{where}: columns found: {', '.join(row) or 'none'}; they are of no format that is known. Known "
            f"are prompt (to be answered) and {needed}. Name columns with data.rename={{old: new}}, or say data=jsonl "
            f"and data.prompt_key.{near}"
        )
    return kind, f"columns {', '.join(name for name, value in row.items() if value is not None)}"
