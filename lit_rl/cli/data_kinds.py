"""The data that an algorithm learns from, and the kind of example that the columns of a file hold; known without
torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lit_rl.cli import key_checks
from lit_rl.cli.fast_checks import DRAW, TELL_THE_DATA
from lit_rl.cli.key_checks import typed_value
from lit_rl.cli.run_info import is_over_a_run, training_command
from lit_rl.cli.targets import ALLOWED, check_target
from lit_rl.core.errors import ConfigError, DataError, did_you_mean
from lit_rl.data.kinds import COLUMNS, Kind, format_for, is_verdict, kind_of
from lit_rl.data.rows import row_function
from lit_rl.data.splits import first_row

GROUPS: dict[Kind | None, str] = {
    "texts": "texts",
    "pairs": "preferences",
    "triples": "preferences",
    "verdicts": "preferences",
    "stepwise": "steps",
    None: "jsonl",
}
"""The data group of each kind; of prompts to be answered where there is none."""

COMPUTED: dict[Kind | None, str] = {
    "texts": "addition_text",
    "pairs": "addition_pairs",
    "triples": "addition_triples",
    "verdicts": "addition_pairs",
    "stepwise": "addition_steps",
    None: "addition",
}
"""The same for data that comes with the package."""

ALGORITHMS: dict[Kind | None, str] = {
    "texts": "sft",
    "pairs": "dpo",
    "triples": "tpo",
    "verdicts": "kto",
    "stepwise": "process_reward_model",
}
"""The algorithm for a file of each kind, where none was typed; prompts go to that of `config.yaml`."""

LEARNS_FROM: dict[str, Kind | None] = {
    **dict.fromkeys((f"lit_rl.algorithms.{name}" for name in ("SFT", "GKD")), "texts"),
    **dict.fromkeys((f"lit_rl.algorithms.{name}" for name in ("DPO", "CPO", "ORPO", "RewardModeling")), "pairs"),
    **dict.fromkeys((f"lit_rl.algorithms.{name}" for name in ("KTO", "BCO")), "verdicts"),
    "lit_rl.algorithms.TPO": "triples",
    "lit_rl.algorithms.ProcessRewardModeling": "stepwise",
    **dict.fromkeys(DRAW),
}
"""Kinds that the shipped algorithms need, as their `learns_from` says; None: prompts to be answered."""

SERVES: dict[str, tuple[Kind | None, ...]] = {
    "lit_rl.data.prompt_module.RolloutDataModule": (None,),
    "lit_rl.data.example_module.SupervisedDataModule": ("texts",),
    "lit_rl.data.example_module.PreferenceDataModule": ("pairs", "verdicts", "triples"),
    "lit_rl.data.example_module.StepwiseDataModule": ("stepwise",),
}
"""Kinds that the shipped data modules make, as their `serves` says."""

OF_PROMPTS = ("best_of_n", "reward_test", "env_check")
"""Tasks that take prompts to be answered, whatever the columns."""

OF_ANY_ROWS = ("fit", "validate", "test", "predict", "eval", "plan", "data_check")
"""Tasks whose data group depends on the columns."""

ASKS_FOR_PROMPTS = ("reward", "env", "judge")
"""Keys that are about answers to prompts: typing one means that a file is not to be imitated."""

_HOW_ROWS_ARE_READ = ("path", "split", "name", "on_bad_row", "rename", "map_row")


def check(config: DictConfig) -> None:
    """Refuse a file or a data group that the algorithm cannot learn from, as far as that is known without torch. Rows
    that a function makes, and classes of the user's, are checked once everything is loaded.

    Raises:
        ConfigError: as `check_pair`.
        DataError: the file cannot be read, or its columns are of no format.
    """
    if config.task not in ("fit", "plan", "reward_test"):
        return
    if config.algo.get("_target_") not in LEARNS_FROM or config.data.get("_target_") not in SERVES:
        return
    typed = typed_keys()
    if "data.path" not in typed or {"data", "experiment"} & typed:
        return check_pair(config)
    if config.task not in OF_PROMPTS and "algo" in typed and _is_plain(config.data):
        check_columns(config, learns_from(config))


def _is_plain(data: DictConfig) -> bool:
    """Tell whether a row is read quickly, and without code of the user's."""
    path = data.get("path")
    return isinstance(path, str) and Path(path).expanduser().is_file() and data.get("map_row") is None


def check_columns(config: DictConfig, wanted: Kind | None) -> None:
    """Refuse a file whose columns are for other algorithms than the one that was typed."""
    if wanted is None:  # a row of any format has a prompt, under a name of its own at times
        return _check_answers(config)
    row, where = _first(config.data, config.allow_targets)
    kind, why = _kind_in(row, where)
    served = format_for(row, wanted)
    if served is None or (served == "prompt-completion" and is_verdict(row)):
        raise ConfigError(
            f"{_name_of(config, 'algo')} needs {_WORDS[wanted]}, and {config.data.path} has {why}: "
            f"{_WORDS[kind]}. Name columns with data.rename={{old:new}}, or type:\n  {_with_algorithm_of(kind)}"
        )


UNTYPED_REWARD = ("exact_match", "answer")
"""The reward of `config.yaml`, and the column that it needs."""


def _check_answers(config: DictConfig) -> None:
    """Refuse a file of another kind than prompts, where no reward was typed and it lacks the column of the default
    one. A reward of the user's reports missing columns itself."""
    name, column = UNTYPED_REWARD
    chosen = HydraConfig.get().runtime.choices.get("reward") == name
    if (
        not chosen
        or not _is_plain(config.data)
        or {key.partition(".")[0] for key in typed_keys()} & {"reward", "judge", "env"}
    ):
        return
    row, _ = _first(config.data, config.allow_targets)
    kind = kind_of(row)
    if kind is not None and column not in row:
        raise ConfigError(
            f"{_name_of(config, 'algo')} needs {_WORDS[None]}, and {config.data.path} has {_columns_of(row)}: "
            f"{_WORDS[kind]}. reward={name} needs the column {column!r}: name it with data.rename={{old:{column}}}, "
            f"choose another reward (lit-rl list reward), or type:\n  {_with_algorithm_of(kind)}"
        )


def _with_algorithm_of(kind: Kind | None) -> str:
    """Return the typed line, with the algorithm that learns from rows of this kind."""
    algo = f"algo={ALGORITHMS.get(kind, 'grpo')}"
    return training_command([algo if word.startswith("algo=") else word for word in HydraConfig.get().overrides.task])


def groups_of(kind: Kind | None, task: str) -> list[str]:
    """Return the choices that rows of a kind are for; the algorithm only where the task runs one."""
    algo = [f"algo={ALGORITHMS[kind]}"] if kind in ALGORITHMS and task != "data_check" else []
    return [*algo, f"data={GROUPS[kind]}"]


def check_pair(config: DictConfig) -> None:
    """Refuse a data module that makes another kind than the algorithm learns from, before either is built.

    Raises:
        ConfigError: says what the algorithm learns from, what the data gives, and the line to type.
    """
    wanted = learns_from(config)
    if config.task == "reward_test":
        wanted = None  # rewards score answers to prompts, whatever the algorithm
    gives = _serves(config)
    group = HydraConfig.get().runtime.choices.get("data")
    if wanted not in gives:
        who = "lit-rl reward-test" if config.task == "reward_test" else _name_of(config, "algo")
        raise ConfigError(
            f"{who} needs {_WORDS[wanted]}, and data={group} ({_name_of(config, 'data')}) gives "
            f"{' or '.join(_WORDS[kind] for kind in gives)}. Type:\n  {_line(config, wanted)}"
        )
    if "data.path" in typed_keys() and config.data.get("task") is not None:
        raise ConfigError(
            f"data.path={config.data.path} is a file of yours, and data={group} is computed (came: path, task). "
            f"Type:\n  {_line(config, wanted)}"
        )


_WORDS: dict[Kind | None, str] = {
    "texts": "texts to imitate",
    "pairs": "pairs of a chosen and a rejected completion",
    "triples": "triples of a chosen, a rejected and a reference completion",
    "verdicts": "completions with a verdict",
    "stepwise": "steps with labels",
    None: "prompts to be answered",
}


def _line(config: DictConfig, wanted: Kind | None) -> str:
    """Return the typed line, with the data group of the kind that is wanted."""
    typed = list(HydraConfig.get().overrides.task)
    path = config.data.get("path")
    group = (COMPUTED if path is None else GROUPS)[wanted]
    more = [] if path is None or "data.path" in typed_keys() else ["data.path=FILE"]
    at = next((i for i, word in enumerate(typed) if word.startswith("data=")), len(typed))
    return training_command([*typed[:at], f"data={group}", *more, *typed[at + 1 :]])


def chosen_before(arguments: Sequence[str]) -> tuple[list[str], str]:
    """Return the words of a command with the groups that fit `data.path`, and a line that names them.

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
    task, run_dir = typed_value(overrides, "task") or "fit", typed_value(overrides, "run_dir")
    if task not in OF_ANY_ROWS or is_over_a_run(task, run_dir):
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
    asked = next((key for key in given if key.partition(".")[0] in ASKS_FOR_PROMPTS), None)
    kind, why = by_columns(tree.data, tree.allow_targets, asked)
    at, groups = words.index(overrides[0]), groups_of(kind, task)  # among the other overrides, which stand in one row
    return [*words[:at], *groups, *words[at:]], f"{' '.join(groups)} ({why})"


def typed_keys() -> set[str]:
    """Return the keys and groups of the command line."""
    return {key.partition("@")[0] for key in key_checks.overridden_keys()}


def learns_from(config: DictConfig) -> Kind | None:
    """Return the kind that the algorithm needs; None: prompts to be answered."""
    target = config.algo._target_
    return LEARNS_FROM[target] if target in LEARNS_FROM else getattr(_class_of(config, "algo"), "learns_from", None)


def _serves(config: DictConfig) -> tuple[Kind | None, ...]:
    target = config.data._target_
    return SERVES[target] if target in SERVES else getattr(_class_of(config, "data"), "serves", (None,))


def _name_of(config: DictConfig, key: str) -> str:
    return str(config[key]._target_).rpartition(".")[2]


def _class_of(config: DictConfig, key: str) -> Any:
    """Return the class that the target of a group names."""
    target = config[key]["_target_"]
    check_target(key, target, (*ALLOWED, *(f"{name}." for name in config.allow_targets)))
    return get_object(target)


def by_columns(data: DictConfig, allow: Sequence[str], asked: str | None = None) -> tuple[Kind | None, str]:
    """Return the kind of example that the first row's columns hold, and the reason in words.

    Args:
        data: Those settings of `data` that say how a row is read.
        allow: Packages of `allow_targets`.
        asked: A key that was typed and asks for prompts to be answered, whatever the other columns.

    Raises:
        DataError: the columns are of no format that is known.
        ConfigError: such a key was typed, and the row has no prompt.
    """
    row, where = _first(data, allow)
    kind, why = _kind_in(row, where)
    if kind is None or asked is None:
        return kind, why
    if row.get("prompt") is None:
        raise ConfigError(
            f"{asked} was typed, which is about answers to prompts, and {data.path} has {why}: {_WORDS[kind]}. Type "
            f"algo={ALGORITHMS[kind]} to learn from the rows as they are, or name the prompts with "
            "data.rename={old:prompt}."
        )
    return None, f"prompts to be answered, as {asked} was typed; algo={ALGORITHMS[kind]} would learn from {why}"


def _kind_in(row: dict[str, Any], where: str) -> tuple[Kind | None, str]:
    kind = kind_of(row)
    if kind is None and "prompt" not in row:
        known = dict.fromkeys(column for columns in COLUMNS.values() for column in columns)
        near = next((hint for column in row if (hint := did_you_mean(column, known))), "")
        needed = "; ".join(dict.fromkeys(", ".join(columns) for columns in COLUMNS.values()))
        raise DataError(
            f"{where}: columns found: {', '.join(row) or 'none'}; they are of no format that is known. Known "
            f"are prompt (to be answered) and {needed}. Name columns with data.rename={{old:new}}, or say data=jsonl "
            f"and data.prompt_key.{near}"
        )
    return kind, _columns_of(row)


def _columns_of(row: dict[str, Any]) -> str:
    return f"columns {', '.join(name for name, value in row.items() if value is not None)}"


def _first(data: DictConfig, allow: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Return the first row of `data.path` as it is read, and its place."""
    given: Any = OmegaConf.create({key: data.get(key) for key in _HOW_ROWS_ARE_READ})
    container: Any = OmegaConf.to_container(given, resolve=True)
    reading = {key: node for key, node in container.items() if node is not None}
    if isinstance(reading.get("map_row"), str):
        reading["map_row"] = row_function(reading["map_row"])
    elif "map_row" in reading:
        from lit_rl.cli.build import build, plain

        reading["map_row"] = build(
            plain(OmegaConf.create({"data": given, "allow_targets": list(allow)}))["data"]["map_row"]
        )
    return first_row(**reading)
