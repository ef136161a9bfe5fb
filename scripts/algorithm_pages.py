"""Write docs/algorithms/*.md: what a preset changes, its metrics, TRL's counterpart, and the tables of the index.

    python scripts/algorithm_pages.py

Everything outside the markers is written by hand and kept.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import config_reference as reference
import lightning as L
import yaml
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from lightning.pytorch.loggers.logger import Logger
from omegaconf import DictConfig, OmegaConf, open_dict
from source_pages import mark

from lit_rl.algorithms import DPO, GKD, ORPO, SFT
from lit_rl.algorithms.families.judged import JudgedModule
from lit_rl.algorithms.families.pairs import PairModule
from lit_rl.algorithms.families.verdicts import VerdictModule
from lit_rl.algorithms.loop.offline import OfflineModule
from lit_rl.algorithms.reward_modeling import ScalarModule
from lit_rl.cli import schemas
from lit_rl.cli.build import ABSENT, build, plain
from lit_rl.settings.base import field_owners

# ------------------------------------------------------------------------------------- presets, and small runs of them


PAGES = reference.ROOT / "docs" / "algorithms"
MARK = mark("algorithm_pages.py", "`conf/algo/` and runs", "options, metrics, curve")
"""The third line of every page, which says what of it is generated; the rest is written by hand."""
METRICS = reference.ROOT / "docs" / "metrics.md"
PRESETS = sorted(path.stem for path in (reference.CONF / "algo").glob("*.yaml"))


def parent_of(preset: str) -> str | None:
    """Return the preset that a preset's file begins with; None where it begins with a schema."""
    first = _first_default(preset)
    return None if first.startswith("/schemas/") else first


def schema_of(preset: str) -> str:
    """Return name of the schema that a preset's file takes up, or that of the preset which it begins with."""
    parent = parent_of(preset)
    return schema_of(parent) if parent else _first_default(preset).removeprefix("/schemas/").partition("@")[0]


def _first_default(preset: str) -> str:
    return yaml.safe_load((reference.CONF / "algo" / f"{preset}.yaml").read_text())["defaults"][0]


def _class_of(preset: str) -> type:
    return schemas._load(schemas.TARGETS[schema_of(preset)])


CLASSES = {name: _class_of(name) for name in PRESETS}
"""The LightningModule of each preset."""
OFFLINE = [name for name in PRESETS if issubclass(CLASSES[name], OfflineModule)]
"""Presets that learn from a data set."""
ONLINE_PAIRS = [name for name in PRESETS if issubclass(CLASSES[name], JudgedModule)]
"""Presets that write their own pairs, which a judge compares."""
ON_POLICY = [name for name in PRESETS if name not in (*OFFLINE, *ONLINE_PAIRS)]
"""Presets that learn from rewards of what they write."""

FAMILIES: dict[str, Callable[[type], bool]] = {
    "From rewards of what the policy writes": lambda kind: not issubclass(kind, OfflineModule | JudgedModule),
    "From pairs that the policy writes and a judge compares": lambda kind: issubclass(kind, JudgedModule),
    "From a data set of pairs": lambda kind: issubclass(kind, PairModule | ORPO),
    "From a data set of single good and bad completions": lambda kind: issubclass(kind, VerdictModule),
    "From texts": lambda kind: issubclass(kind, SFT | GKD),
    "Reward models": lambda kind: issubclass(kind, ScalarModule),
}
"""The tables of the index; a preset stands in the one that its class belongs to."""

EVERYWHERE = ("beta", "reward_beta", "group_size", "minibatches", "iterations")
"""Settings of the algorithm that stand on the page of every preset that begins with a schema."""

SMALL = {"data.task.max_operand": 6, "data.task.val_rows": 2}
SMALL_ROLLOUT = SMALL | {"data.prompts_per_rollout": 4, "sampling.max_new_tokens": 3}
SMALL_STEP = SMALL | {"data.batch_size": 4}
"""A rollout, or a step, that takes a tenth of a second."""

COMPLETED = {"gkd": ("experiment=gkd_addition",), "opd": ("experiment=opd_addition",)}
"""Settings without which a preset does not run."""

OF_A_FROZEN_MODEL = ("name", "dtype", "attn_implementation", "revision", "trust_remote_code", "init_kwargs")
"""Settings of a model beside the policy that stand on a page: the others are for training it, or for its texts."""

SPEED = r"(time|memory)/.+|tokens_per_second.*|tflops_per_second|mfu|idle_share"
EVERY_RUN = rf"{SPEED}|num_tokens|num_input_tokens_seen|loss|grad_norm|skipped_steps|lr"
EVERY_ROLLOUT = r"completions/.+|rewards/.+/(mean|std)|reward|reward_std|frac_reward_zero_std"
COMMON = {
    "offline": re.compile(EVERY_RUN),
    "pairs": re.compile(rf"{EVERY_RUN}|{EVERY_ROLLOUT}"),
    "on_policy": re.compile(rf"{EVERY_RUN}|{EVERY_ROLLOUT}|entropy|ratio_mean|approx_kl"),
}
"""Metrics that every preset of a family logs, without `train/`: docs/metrics.md has them."""


class Memory(Logger):
    """Keeps the names that are logged."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> str:
        return ""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.names |= metrics.keys()

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


@functools.cache
def _register() -> None:
    schemas.register_schemas()


@functools.cache
def composed(preset: str, *overrides: str) -> tuple[DictConfig, dict[str, str]]:
    """Return the config of `train.py algo=PRESET OVERRIDES`, and the choice that was made in every group of `algo`.

    It is shared: copy what you change.
    """
    _register()
    GlobalHydra.instance().clear()
    with initialize_config_module("lit_rl.conf", version_base="1.3"):
        config = compose("config", [f"algo={preset}", "run_dir=run", *overrides], return_hydra_config=True)
    found = config.hydra.runtime.choices
    choices = {group: str(choice) for group, choice in found.items() if group[:5] == "algo/"}
    choices |= {group: str(found[group]) for group in USUAL if _differs(preset, group, found[group], config.algo)}
    # Hydra does not report a group of which several choices are taken.
    choices |= {key.replace(".", "/"): "" for key in reference.BY_NAME if OmegaConf.select(config, key) is not None}
    with open_dict(config):
        del config["hydra"]
    return config, choices


USUAL = {"judge": None, "reference": "auto", "data": "addition", "reward": "exact_match", "optimizer": "adamw"}
"""Groups at the top that a preset may choose from, and what they are otherwise."""


def _differs(preset: str, group: str, choice: str, algo: DictConfig) -> bool:
    if group == "judge" and not issubclass(CLASSES[preset], JudgedModule):
        return False  # asked for win rates alone, as in every run
    return choice != USUAL[group] and (group in algo or group == "data")


def parts(config: DictConfig) -> tuple[Any, Any]:
    """Return the module and the data module of a config."""
    tree = plain(config)
    return build(tree["algo"]), build(tree["data"])


def silence_lightning() -> None:
    """Silence Lightning in a script's own process: a caller that imports these functions keeps its log."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def trainer_of(logger: Any, **settings: Any) -> L.Trainer:
    """Return a Trainer that writes nothing and shows nothing."""
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"max_epochs": -1, "accelerator": "cpu", "log_every_n_steps": 1, "use_distributed_sampler": False}
    return L.Trainer(logger=logger, **{**quiet, "gradient_clip_val": 1.0, "limit_val_batches": 0, **settings})


def family(preset: str) -> str:
    """Return a key of `COMMON`."""
    return "offline" if preset in OFFLINE else "pairs" if preset in ONLINE_PAIRS else "on_policy"


@functools.cache
def logged(preset: str) -> frozenset[str]:
    """Return the names that one small run of a preset logs, without `train/`, less those that every one of its family
    logs."""
    config = composed(preset, *COMPLETED.get(preset, ()))[0].copy()
    for key, value in (SMALL_STEP if preset in OFFLINE else SMALL_ROLLOUT).items():
        OmegaConf.update(config, key, value)
    module, data = parts(config)
    memory = Memory()
    steps = 1 if preset in OFFLINE else module.minibatches * module.iterations
    trainer_of(memory, max_steps=steps).fit(module, datamodule=data)
    names = {name.removeprefix("train/") for name in memory.names}
    return frozenset(name for name in names if not COMMON[family(preset)].fullmatch(name))


# -------------------------------------------------------------------------------------------------------- the options


TRL = {
    "bnpo": '`GRPOConfig(loss_type="bnpo")`',
    "cispo": '`GRPOConfig(loss_type="cispo", epsilon_high=5.0)`',
    "dapo": "`GRPOConfig(epsilon_high=0.28, mask_truncated_completions=True)`, without dynamic sampling",
    "dr_grpo": '`GRPOConfig(loss_type="dr_grpo", scale_rewards="none")`',
    "gdpo": '`GRPOConfig(multi_objective_aggregation="normalize_then_sum")`',
    "grpo": "`GRPOConfig()`",
    "gspo": '`GRPOConfig(loss_type="grpo", importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4)`',
    "high_entropy": "`GRPOConfig(top_entropy_quantile=0.2)`",
    "lite_ppo": '`GRPOConfig(scale_rewards="batch")`',
    "luspo": '`GRPOConfig(loss_type="luspo", importance_sampling_level="sequence")`',
    "sapo": '`GRPOConfig(loss_type="sapo")`',
    "vespo": '`GRPOConfig(loss_type="vespo")`',
    "rloo": "`RLOOConfig()`",
    "ppo": "`PPOTrainer`, until 0.26",
    "sft": "`SFTConfig()`",
    "dft": '`SFTConfig(loss_type="dft")`',
    "gkd": "`GKDConfig()`, experimental",
    "sdft": "`SDFTConfig()`, experimental",
    "sdpo": '`SDPOConfig(distillation_mode="topk_logits")`, experimental',
    "cdpo": "",  # TRL's sigmoid loss does not read label_smoothing
    "ld_dpo": "`DPOConfig(ld_alpha=0.5)`",
    "mpo": '`DPOConfig(loss_type=["sigmoid", "bco_pair", "sft"], loss_weights=[0.8, 0.2, 1.0])`',
    "tr_dpo": "`DPOConfig(sync_ref_model=True)`",
    "wpo": "`DPOConfig(use_weighting=True)`",
    "kto": "`KTOConfig()`",
    "apo_zero_unpaired": '`KTOConfig(loss_type="apo_zero_unpaired")`',
    "bco": "`BCOTrainer`, until 0.26",
    "alphapo": '`CPOConfig(loss_type="alphapo", cpo_alpha=0)`, experimental',
    "cpo": "`CPOConfig()`, experimental",
    "cpo_simpo": '`CPOConfig(loss_type="simpo")`, experimental',
    "simpo": '`CPOConfig(loss_type="simpo", cpo_alpha=0)`, experimental',
    "tpo": "`TPOConfig()`, experimental",
    "orpo": "`ORPOConfig()`, experimental",
    "online_dpo": "`OnlineDPOConfig()`, experimental",
    "online_ipo": '`OnlineDPOConfig(loss_type="ipo")`, experimental',
    "nash_md": "`NashMDTrainer`, until 0.26",
    "xpo": "`XPOTrainer`, until 0.26",
    "reward_model": "`RewardConfig()`",
    "process_reward_model": "`PRMTrainer`, until 0.26",
}
"""What TRL has for a preset, where it is more than the losses of `algo/preference`, which have TRL's names."""


def options(preset: str) -> str:
    """Return what a preset changes of the one that it begins with, or what it is made of; and TRL's counterpart."""
    parent = parent_of(preset)
    lines = [_made_of(preset)] if parent is None else [_changes(preset, parent)]
    lines.append("Every key: [algo](../configuration/algo.md).")
    if found := _in_trl(preset):
        lines[-1] += f" In TRL: {found} ([all fields](../from-trl.md))."
    return "\n\n".join(lines)


def _in_trl(preset: str) -> str:
    losses = list(composed(preset)[0].algo.get("preference") or {})
    if preset in TRL or CLASSES[preset] is not DPO:
        return TRL.get(preset, "")
    shown = f'["{losses[0]}"]' if len(losses) == 1 else str(losses).replace("'", '"')
    return f"`DPOConfig(loss_type={shown})`"


def _made_of(preset: str) -> str:
    """Return the choices and the main settings of a preset that begins with a schema."""
    config, choices = composed(preset)
    algo: Any = OmegaConf.to_container(config.algo, resolve=False)
    parts = [
        f"`{group}={name}`"
        for group in sorted(choices, key=_order)
        if _in_force(algo, group, OmegaConf.select(config, group.replace("/", ".")))
        for name in _names(config, group, choices[group])
    ]
    keys = [f"`algo.{name}={reference.shown(algo[name]).strip('`')}`" for name in _own_keys(algo) if name in algo]
    return f"Choices: {', '.join(parts)}." + (f"\n\nSettings: {', '.join(keys)}." if keys else "")


def _changes(preset: str, parent: str) -> str:
    """Return a line for each choice and each setting that differs from another preset."""
    (config, choices), (before, chosen) = composed(preset), composed(parent)
    algo: Any = OmegaConf.to_container(config.algo, resolve=False)
    rows = [f"| differs from [{parent}]({parent}.md) | here | there | |", "|---|---|---|---|"]
    new: list[str] = []
    for group in sorted({**choices, **chosen}, key=_order):
        prefix = group.replace("/", ".")
        here = _names(config, group, choices.get(group, "")) if _is_used(algo, config, group) else []
        there = _names(before, group, chosen.get(group, USUAL.get(group) or ""))
        if here != there and here:
            added = [name for name in here if name not in there]
            new += [f"{prefix}.{name}" if prefix in reference.BY_NAME else prefix for name in added]
            comments = [reference.first_comment(reference.CONF / group / f"{name}.yaml") for name in added]
            rows.append(f"| `{group}` | {_code(here)} | {_code(there)} | {'; '.join(comments)} |")
    for key, value in _values("algo", algo):
        old = OmegaConf.select(before, key)
        at = next((part for part in new if key.startswith(f"{part}.")), None)
        if at is not None or _plain(old) != value:
            rows.append(
                f"| `{key}` | {reference.shown(value)} | {'' if at else reference.shown(_plain(old))} | "
                f"{_meaning(config, key)} |"
            )
    return "\n".join(rows)


def _is_used(algo: dict[str, Any], config: DictConfig, group: str) -> bool:
    return _in_force(algo, group, OmegaConf.select(config, group.replace("/", ".")))


def _names(config: DictConfig, group: str, choice: str) -> list[str]:
    """Return what a group has chosen: several names where choices stand side by side."""
    prefix = group.replace("/", ".")
    if prefix not in reference.BY_NAME:
        return [choice] if choice else []
    node: Any = OmegaConf.to_container(OmegaConf.select(config, prefix) or OmegaConf.create(), resolve=False)
    return [name for name, settings in node.items() if settings is not None]  # another preset may have taken one off


def _code(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=False) if OmegaConf.is_config(value) else value


def _values(prefix: str, node: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the settings below a node that are values, by their whole keys."""
    for name, value in node.items():
        key = f"{prefix}.{name}"
        if isinstance(value, dict) and ("_target_" in value or key in reference.BY_NAME):
            if value.get("_target_") == schemas.TARGETS["LanguageModel"]:
                value = {each: value[each] for each in OF_A_FROZEN_MODEL}
            if value.get("_target_") != ABSENT:
                yield from _values(key, value)
        elif isinstance(value, dict) and any(isinstance(each, dict) for each in value.values()):
            yield from _values(key, value)
        elif _is_value(name, value):
            yield key, value


def _is_value(name: str, value: Any) -> bool:
    """Return whether it is a setting: a number, a text that is no interpolation, a list, numbers by name, or null."""
    return not name.startswith("_") and not (isinstance(value, str) and value.startswith("${"))


def _meaning(config: DictConfig, key: str) -> str:
    """Return the first sentence of a setting."""
    above, _, name = key.rpartition(".")
    names = {path: schema for schema, path in {**schemas.TARGETS, **schemas.public_functions()}.items()}
    found = names.get((OmegaConf.select(config, above) or {}).get("_target_", ""))
    texts = {each: text for each, _, text in reference.settings(found)} if found else {}
    return reference.cell(reference.short(texts.get(name, "")))


def _order(group: str) -> int:
    """Return the place of a group where they are read: loss, ratio, advantage, reduction, what else there is."""
    first = ["algo/loss", "algo/loss/ratio", "algo/advantage", "algo/whitening", "algo/reduction"]
    first += ["algo/preference", "algo/verdict", "algo/imitation"]
    last = ["judge", "reference", "data", "reward", "optimizer"]
    return first.index(group) if group in first else len(first) + (1 + last.index(group) if group in last else 0)


def _in_force(algo: dict[str, Any], group: str, node: Any) -> bool:
    """Return whether a choice does anything in the preset: a KL without weight does not."""
    weights = {"algo/kl": "beta", "algo/reward_kl": "reward_beta", "algo/ptx_loss": "ptx_coef"}
    if node is None or node.get("_target_") == ABSENT or group == "algo/kl_control":
        return False
    return group not in weights or algo[weights[group]] > 0


def _own_keys(algo: dict[str, Any]) -> list[str]:
    """Return settings of the algorithm itself: when it learns, and what its class is about."""
    target = schemas._load(algo["_target_"])
    family = target.__base__.__init__.settings.__mro__  # what the class adds to it is its own
    own = [name for name, owner in field_owners(target.__init__.settings).items() if owner not in family]
    about = [name for name in own if name not in reference.SLOTS]
    return list(dict.fromkeys(name for name in [*EVERYWHERE, *about] if name in algo and _is_number(algo[name])))


def _is_number(value: Any) -> bool:
    """Return a number, a text that is no interpolation, numbers by name, or null."""
    if isinstance(value, dict):
        return bool(value) and "_target_" not in value and not any(isinstance(each, dict) for each in value.values())
    return not (isinstance(value, str) and value.startswith("${"))


# ------------------------------------------------------------------------------------------------- metrics, and pages


def metrics(preset: str) -> str:
    """Return the names that a preset logs, in the order of docs/metrics.md: beside those of every run, or those that
    the preset does not log which it begins with."""
    parent = parent_of(preset)
    names, before = logged(preset), logged(parent) if parent else frozenset()
    lines = [f"Those of [{parent}]({parent}.md)" if parent else "Beside those of [every run](../metrics.md)"]
    lines += [f"also: {_listed(names - before)}"] if names - before else []
    lines += [f"not: {_listed(before - names)}"] if before - names else []
    return f"{'; '.join(lines)}."


def _listed(names: frozenset[str]) -> str:
    described = re.findall(r"^\| `train/([^`]+)`", METRICS.read_text(), re.MULTILINE)
    assert names <= {*described}, f"docs/metrics.md lacks {sorted(names - {*described})}"
    return ", ".join(f"`train/{name}`" for name in described if name in names)


def block(text: str, name: str) -> re.Match[str]:
    """Return what stands between the markers of a block, as group 1."""
    found = re.search(rf"<!-- {name}(?:: [^\n]*)? -->\n\n(.*?)\n\n<!-- end -->", text, re.DOTALL)
    assert found is not None, f"no block {name}"
    return found


def index() -> str:
    """Return the tables of docs/algorithms/README.md, one a family."""
    comments = {name: reference.first_comment(reference.CONF / "algo" / f"{name}.yaml") for name in PRESETS}
    tables = []
    for title, belongs in FAMILIES.items():
        rows = [f"| [{name}]({name}.md) | {comments.pop(name)} |" for name in PRESETS if belongs(CLASSES[name])]
        tables.append("\n".join([f"### {title}", "", "| `algo=` | |", "|---|---|", *rows]))
    assert not comments, f"no family for {sorted(comments)}"
    return "\n\n".join(tables)


def write(path: Path, contents: dict[str, str]) -> None:
    """Put these contents between the markers of a page's blocks."""
    text = path.read_text()
    for name, content in contents.items():
        found = block(text, name)
        text = text[: found.start(1)] + content + text[found.end(1) :]
    path.write_text(text)


def main() -> None:
    silence_lightning()
    for preset in PRESETS:
        write(PAGES / f"{preset}.md", {"options": options(preset), "metrics": metrics(preset)})
    write(PAGES / "README.md", {"index": index()})


if __name__ == "__main__":
    main()
