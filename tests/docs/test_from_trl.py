"""docs/from-trl.md has every field of sixteen of TRL's configs, with defaults that differ, and keys that exist."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trl
import yaml
from composed_configs import tree_of
from doc_blocks import blocks, table_rows
from doc_runs import left_as_found, script
from tiers import quick

from lit_rl.algorithms.rollouts.rollout_plan import BatchPlan
from lit_rl.core.other_names import column
from lit_rl.models import Lora

ALGO = {"GRPOConfig": "algo=grpo", "RLOOConfig": "algo=rloo"}
OFFLINE = {
    "DPOConfig": "algo=dpo",
    "KTOConfig": "algo=kto",
    "SFTConfig": "algo=sft",
    "RewardConfig": "algo=reward_model",
    "CPOConfig": "algo=cpo",
    "TPOConfig": "algo=tpo",
    "ORPOConfig": "algo=orpo",
    "GKDConfig": "algo=gkd",
}
ONLINE = {"OnlineDPOConfig": "algo=online_dpo"}
SELF_TAUGHT = {"SDPOConfig": "algo=sdpo", "SDFTConfig": "algo=sdft"}
TAUGHT = {name: "algo=opd" for name in ("DistillationConfig", "ServerDistillationConfig", "IWOPDConfig")} | SELF_TAUGHT
ALL = ALGO | OFFLINE | ONLINE | TAUGHT
EXPERIMENTAL = {
    "CPOConfig": "cpo",
    "TPOConfig": "tpo",
    "ORPOConfig": "orpo",
    "GKDConfig": "gkd",
    "OnlineDPOConfig": "online_dpo",
    "ServerDistillationConfig": "server_distillation",
    "IWOPDConfig": "iw_opd",
    "SDPOConfig": "sdpo",
    "SDFTConfig": "sdft",
}
PARENT = {"GKDConfig": "SFTConfig", "ServerDistillationConfig": "DistillationConfig"}
"""Whose table holds for what is not in its own."""
SHARED = {
    "Fields of SDPO and SDFT": [*SELF_TAUGHT],
    "Fields of trainers with a teacher": [*TAUGHT],
    "Fields of methods that generate": [*ALGO, *ONLINE, *TAUGHT],
    "Fields of all data-set methods": [*OFFLINE],
    "Fields inherited from transformers.TrainingArguments": [*ALL],
}
"""Tables of several configs: a row holds for what these have and their own tables leave out."""
DEFAULTS = re.compile(r"^((?:`[^`]+`, )*)here (`[^`]+`(?:, `[^`]+`)*)(?=: |$)")
"""How a cell begins that says defaults: those of TRL, and ours."""
REQUIRED = ("model.name", "data.path")
USUAL = ["data.path=mine.jsonl", "model=local", "model.name=m"]
DATA = {"algo=sft": "texts", "algo=gkd": "texts"} | {
    f"algo={name}": "preferences" for name in ("dpo", "kto", "reward_model", "cpo", "tpo", "orpo")
}
UNMAPPED = ("not needed", "not built")
NEEDED = {
    "optimizer=by_path": "optimizer.path=torch.optim.SGD",
    "scheduler=by_path": "scheduler.path=torch.optim.lr_scheduler.StepLR",
    "env=tools": "env.functions=[lit_rl.environments.games:mul]",
}
"""What a choice has no default for."""

Tree = dict[str, Any]


@functools.cache
def peer(name: str) -> dict[str, Any]:
    """Fields of a config of TRL and their defaults."""
    home = f"trl.experimental.{EXPERIMENTAL[name]}" if name in EXPERIMENTAL else "trl.trainer"
    stem = EXPERIMENTAL.get(name, name.removesuffix("Config").lower())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*trl.experimental")
        module = importlib.import_module(f"{home}.{stem}_config")
    return defaults_of(getattr(module, name))


def defaults_of(config: Any) -> dict[str, Any]:
    found = {}
    for field in dataclasses.fields(config):
        made = field.default_factory is not dataclasses.MISSING
        found[field.name] = field.default_factory() if made else field.default  # pyright: ignore
    return found


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def values(cell: str) -> list[Any]:
    """What a cell of defaults says. YAML reads 1e-6 as a string, and `no` and `none` are words here."""

    def read(text: str) -> Any:
        if text in ("no", "none"):
            return text
        found = yaml.safe_load(text)
        return float(found) if isinstance(found, str) and re.fullmatch(r"[\d.]+e-?\d+", found) else found

    return [read(text) for text in quoted(cell)]


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a table."""

    fields: list[str]
    choices: list[str]
    keys: list[str]
    theirs: list[Any]
    """Defaults, where the line says them; so are `ours`. It does where they differ."""
    ours: list[Any]
    mapped: bool
    trainer: str
    """The config that the line is about; of those of several, one that it holds for."""


@pytest.fixture(scope="module")
def page(root: Path) -> Path:
    return root / "docs" / "from-trl.md"


def lines(page: Path) -> Iterator[Line]:
    own: dict[str, set[str]] = {name: set() for name in ALL}
    for trainer in ALL:
        for row in table_rows(page, f"Fields of {trainer}"):
            line = line_of(row, trainer)
            own[trainer] |= set(line.fields)
            yield line
    for trainer, parent in PARENT.items():
        for row in table_rows(page, f"Fields of {parent}"):
            line = line_of(row, trainer)
            if not own[trainer] & set(line.fields):
                own[trainer] |= set(line.fields)
                yield line
    for heading, trainers in SHARED.items():
        for row, trainer in ((row, trainer) for row in table_rows(page, heading) for trainer in trainers):
            line = line_of(row, trainer)
            left = [name for name in line.fields if name in peer(trainer) and name not in own[trainer]]
            if left:
                assert left == line.fields or not line.mapped, f"{trainer} has only {left} of the row {row[0]}"
                own[trainer] |= set(left)
                yield dataclasses.replace(line, fields=left)


def line_of(row: list[str], trainer: str) -> Line:
    trl, here, differs = row
    named = [] if here in UNMAPPED else quoted(here)
    assert named or here in UNMAPPED, f"{trl}: {here!r} is neither a key nor one of {UNMAPPED}"
    choices = [name for name in named if "=" in name]
    keys = [name for name in named if "=" not in name]
    theirs, ours = found.groups() if (found := DEFAULTS.match(differs)) else ("", "")
    return Line(quoted(trl), choices, keys, values(theirs), values(ours), bool(named), trainer)


def same(found: list[Any], usual: list[Any]) -> bool:
    """Whether they are the same values; null, false, 0 and empty are. A key may hold several fields in a list."""
    if len(usual) > 1 and len(found) == 1:
        return found[0] == usual
    return [value or None for value in found] == [value or None for value in usual]


def check_defaults(line: Line, found: list[Any], defaults: dict[str, Any]) -> None:
    """A line says both defaults, or ours alone, where they differ; where they do not it says none."""
    usual = [getattr(defaults[name], "value", defaults[name]) for name in line.fields]
    assert not line.theirs or line.theirs == usual, line.fields
    if line.keys:
        assert found == line.ours if line.ours else same(found, usual), (line.fields, found, usual)
        assert not line.ours or len(usual) > 1 or found != usual, f"{line.fields} has the same default"


@pytest.fixture(scope="module")
def composed() -> Iterator[Any]:
    """The resolved config of a command."""
    with left_as_found():
        yield lambda *overrides: tree_of(*USUAL, *data_of(overrides), *overrides)


def data_of(overrides: tuple[str, ...]) -> list[str]:
    """What a command of this preset learns from."""
    kinds = [f"data={DATA[word]}" for word in overrides if word in DATA]
    needed = [NEEDED[word] for word in overrides if word in NEEDED]
    return [*(kinds or ["data=jsonl", "reward=function", "reward.fn=a:b"]), *needed]


def at(tree: Any, key: str) -> Any:
    for name in key.split("."):
        tree = tree[name]
    return tree


@pytest.mark.parametrize("trainer", ALL)
def test_every_field_is_mapped_once_and_none_that_is_gone(page: Path, trainer: str) -> None:
    told = [name for line in lines(page) if line.trainer == trainer for name in line.fields]
    assert len(told) == len(set(told)), [name for name in told if told.count(name) > 1]
    assert set(told) == set(peer(trainer))


def test_no_shared_row_is_left_over(page: Path) -> None:
    for heading, trainers in SHARED.items():
        there = set().union(*(peer(trainer) for trainer in trainers))
        assert {name for row in table_rows(page, heading) for name in quoted(row[0])} <= there


def together(found: list[Line], algo: str) -> Iterator[tuple[dict[str, str], list[Line]]]:
    """The lines with choices, in as few compositions as they fit; each has `algo`, unless it names one itself."""
    batches: list[tuple[dict[str, str], list[Line]]] = []
    for line in found:
        wanted = dict(choice.split("=") for choice in [algo, *line.choices])
        for chosen, members in batches:
            if all(chosen.get(group, choice) == choice for group, choice in wanted.items()):
                chosen |= wanted
                members.append(line)
                break
        else:
            batches.append((wanted, [line]))
    yield from batches


@pytest.mark.parametrize("trainer", quick(ALL, {"GRPOConfig", "DPOConfig"}))
def test_every_key_exists_and_has_that_default(page: Path, trainer: str, composed: Any) -> None:
    found = [line for line in lines(page) if line.trainer == trainer and line.mapped]
    plain_keys = [line for line in found if not line.choices]
    assert len(plain_keys) > 30
    batches = [({"algo": ALL[trainer].removeprefix("algo=")}, plain_keys)]
    batches += together([line for line in found if line.choices], ALL[trainer])
    for chosen, members in batches:
        tree = composed(*(f"{group}={choice}" for group, choice in chosen.items()))  # refuses unknown choices
        for line in members:
            check_defaults(line, [at(tree, key) for key in line.keys], peer(trainer))


@pytest.mark.all
def test_the_keys_of_ppo_exist_and_have_that_default(page: Path) -> None:
    """TRL's side is read on the page alone: 1.16 has no PPO."""
    mapped = [line for line in (line_of(row, "") for row in table_rows(page, "PPO, as TRL had it")) if line.mapped]
    with left_as_found():
        plain = tree_of("algo=ppo")
        for line in mapped:
            tree = tree_of("algo=ppo", *line.choices) if line.choices else plain  # refuses unknown choices
            found = [at(tree, key) for key in line.keys]
            assert not line.ours or found == line.ours, line.fields


def test_trl_has_no_other_trainer_of_a_method_here() -> None:
    """The page says which it no longer has."""
    homes = [Path(trl.__file__).parent / home for home in ("trainer", "experimental")]
    there = {path.stem for home in homes for path in home.iterdir()}
    assert (
        not {
            "ppo",
            "ppo_config",
            "bco",
            "nash_md",
            "xpo",
            "prm",
            "bco_config",
            "nash_md_config",
            "xpo_config",
            "prm_config",
        }
        & there
    )
    assert there >= set(EXPERIMENTAL.values())


LOSSES = {
    "dapo": ("clipped_policy_loss", "token_ratio", "token_mean"),
    "grpo": ("clipped_policy_loss", "token_ratio", "sequence_mean"),
    "bnpo": ("clipped_policy_loss", "token_ratio", "local_token_mean"),
    "dr_grpo": ("clipped_policy_loss", "token_ratio", "constant_mean"),
    "cispo": ("cispo_loss", "token_ratio", "token_mean"),
    "sapo": ("sapo_loss", "token_ratio", "sequence_mean"),
    "vespo": ("vespo_loss", None, "token_mean"),
    "luspo": ("clipped_policy_loss", "sequence_mean_ratio", "sequence_total"),
}
"""Loss, level of the ratio and reduction, as the tests of tests/oracle compare them with TRL's loss types."""


@pytest.mark.all
def test_the_loss_types_are_what_is_compared_with_trl(page: Path, composed: Any) -> None:
    told = {quoted(row[0])[0]: row[1:] for row in table_rows(page, "Loss types")}
    assert told.keys() == LOSSES.keys()
    for loss_type, cells in told.items():
        whole = [words for cell in cells for words in quoted(cell) if words.startswith("algo=")]
        assert whole
        for words in whole:
            if words in ("algo=dapo", "algo=dr_grpo"):  # more than the loss type alone
                continue
            algo = composed(*words.split())["algo"]
            ratio = algo["loss"].get("ratio", {}).get("_target_", "").rpartition(".")[2] or None
            found = [algo[part]["_target_"].rpartition(".")[2] for part in ("loss", "reduction")]
            assert (found[0], ratio, found[1]) == LOSSES[loss_type], words


def commands(page: Path) -> list[list[str]]:
    found = [words[2:] for block in blocks(page) for words in block.commands]
    assert all(words[:2] == ["python", "train.py"] for block in blocks(page) for words in block.commands)
    return found


@pytest.mark.all
def test_every_command_composes(page: Path, composed: Any) -> None:
    assert len(commands(page)) == 3
    for overrides in commands(page):
        composed(*overrides)


def script_arguments(page: Path) -> dict[str, Any]:
    """Keyword arguments of `GRPOConfig` in the example's script."""
    (script,) = [block.text for block in blocks(page) if block.file == "train_with_trl.py"]
    calls = [node for node in ast.walk(ast.parse(script)) if isinstance(node, ast.Call)]
    (config,) = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "GRPOConfig"]
    return {str(word.arg): ast.literal_eval(word.value) for word in config.keywords}


@pytest.mark.all
def test_the_example_says_the_same_twice(page: Path, composed: Any) -> None:
    """Every argument of the script has its key in the command, with the same value where both have the same unit."""
    arguments, command = script_arguments(page), commands(page)[0]
    tree, given = composed(*command), dict(word.split("=", 1) for word in command)
    line_of = {name: line for line in lines(page) if line.trainer == "GRPOConfig" for name in line.fields}
    other_units = {"per_device_train_batch_size", "steps_per_generation", "loss_type", "bf16"}
    for name, value in arguments.items():
        line = line_of[name]
        assert any(key in given for key in line.keys) or {c.split("=")[0] for c in line.choices} & given.keys(), name
        if name not in other_units:
            assert [at(tree, key) for key in line.keys] == [value], name
    assert given["algo/reduction"] == "sequence" and given["trainer.precision"] == "bf16-mixed"


@pytest.mark.all
def test_the_batches_of_the_example_are_the_same(page: Path, composed: Any) -> None:
    trl, tree = script_arguments(page), composed(*commands(page)[0])
    plan = BatchPlan(
        prompts_per_rollout=tree["data"]["prompts_per_rollout"],
        group_size=tree["algo"]["group_size"],
        minibatches=tree["algo"]["minibatches"],
        iterations=tree["algo"]["iterations"],
        accumulate=tree["trainer"]["accumulate_grad_batches"],
        world_size=1,
    )
    micro_batch = trl["per_device_train_batch_size"]
    assert plan.completions == micro_batch * trl["steps_per_generation"]
    assert plan.completions // plan.minibatches == micro_batch * trl["gradient_accumulation_steps"]
    assert plan.completions // plan.minibatches // plan.accumulate == micro_batch


def test_the_messages_say_what_the_tables_say(root: Path) -> None:
    made = script(root, "source_pages")
    assert made.TABLE.read_text() == made.other_names(), "run: python scripts/source_pages.py names"
    names = made.names_of_trl()
    for config in ("ModelConfig", "ScriptArguments"):
        assert defaults_of(getattr(trl, config)).keys() <= names.keys(), config
    for name, key in column("key").items():  # what is read without a question is what its row says
        assert name not in names or key in names[name] or key == "model", name


@pytest.mark.parametrize("config", ["ModelConfig", "ScriptArguments"])
def test_the_fields_of_its_command_line_are_told(page: Path, config: str, composed: Any) -> None:
    tree, defaults = composed("algo=dpo"), defaults_of(getattr(trl, config))
    told = [line_of(row, config) for row in table_rows(page, f"Fields of {config}")]
    tree["model"]["lora"] = {name: each.default for name, each in inspect.signature(Lora).parameters.items()}
    assert sorted(name for line in told for name in line.fields) == sorted(defaults)
    for line in told:
        found = [at(tree, key) for key in line.keys]
        if not set(line.keys) & set(REQUIRED):
            check_defaults(line, found, defaults)


WITHOUT_A_FIELD = {
    "min_new_tokens": "sampling.min_new_tokens",
    "repetition_penalty": "sampling.repetition_penalty",
    "num_tokens": "train/num_input_tokens_seen",
    "count/chosen": "train/count/chosen",
    "critic that starts from a reward model": "algo.critic.model",
    "eval_kl": "val/kl",
    "eval_entropy": "val/entropy",
    "eval_clip_ratio": "val/clip_ratio",
    "eval_loss": "val/loss",
    "A2POTrainer": "algo=a2po",
    "MergeModelCallback": "callbacks=merge",
    "PairRMJudge": "judge=pairrm",
    "chat_template_kwargs": "chat_template_kwargs",
    "model_init_kwargs`, for reward models": "reward.functions.reward_model.init_kwargs",
    "scheduler of torch": "scheduler=by_path",
    "ema_power": "callbacks.bema.ema_power",
    "several labels": "reward.functions.reward_model.label",
    "joint function": "reward=joint",
    "DatasetConfig`'s `columns": "columns",
    "rename_columns` and `map": "map_row",
}
"""What people look for by a name that is no field, as the left column of a table has it, and what it is here."""


def test_what_is_no_field_stands_in_a_left_column(page: Path) -> None:
    rows = [row for row in table_rows(page) if len(row) == 3]
    for name, here in WITHOUT_A_FIELD.items():
        found = [row for row in rows if name in row[0]]
        assert any(here in " ".join(row[1:]) for row in found), f"{name}: {found}"


def test_the_keys_and_metrics_of_what_is_no_field_exist(page: Path, root: Path, composed: Any) -> None:
    tree, metrics = composed("algo=grpo", "scheduler=by_path"), (root / "docs" / "metrics.md").read_text()
    for _, here, _ in table_rows(page, "Metrics and generation keys"):
        for word in quoted(here):
            key = word.partition("=")[0]
            assert f"`{key}`" in metrics if "/" in key else at(tree, key) is not ..., word
