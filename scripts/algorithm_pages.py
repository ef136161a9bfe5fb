"""Write the tables of docs/algorithms/*.md: what a preset is made of, its options, its metrics, and the index.

    python scripts/algorithm_pages.py

Everything outside the markers is written by hand and kept.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import config_reference as reference
import lightning as L
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from lightning.pytorch.loggers.logger import Logger
from omegaconf import DictConfig, OmegaConf, open_dict

from lit_rl.cli import schemas
from lit_rl.cli.build import ABSENT, build, plain

PAGES = reference.ROOT / "docs" / "algorithms"
PRESETS = sorted(path.stem for path in (reference.CONF / "algo").glob("*.yaml"))
EVERYWHERE = ("beta", "reward_beta", "group_size", "minibatches", "iterations")
"""Settings of the algorithm that stand on every page."""

SMALL = {
    "data.prompts_per_rollout": 4,
    "data.task.max_operand": 6,
    "data.task.val_rows": 2,
    "sampling.max_new_tokens": 3,
}
"""A rollout that takes a tenth of a second."""

METRICS = {
    "clip_ratio/low_mean": "share of the loss tokens below the lower bound with a negative advantage: no gradient",
    "clip_ratio/low_min": "lowest such share of one completion",
    "clip_ratio/high_mean": "share of the loss tokens above the upper bound with a positive advantage: no gradient",
    "clip_ratio/high_max": "highest such share of one completion",
    "clip_ratio/region_mean": "share of the loss tokens beyond either bound",
    "clip_ratio/delta_mean": "share of the loss tokens that `delta` stops: ratio above it, negative advantage",
    "cispo_clip_ratio": "share of the loss tokens whose weight is cut; one-sided CISPO counts positive advantages only",
    "vespo/phi_seq_mean": "mean over completions of the weight phi",
    "clip_cov/share": "share of the loss tokens dropped for their covariance",
    "kl_cov/share": "share of the loss tokens with the KL penalty",
    "kl": "mean over tokens of k1 to the reference, when the rollout is taken",
    "groups/dropped": "groups without spread in the first draw",
    "groups/drawn": "spare prompts that were completed",
    "groups/empty": "places that the cap left without a group",
    "groups/kept_length": "mean length of the completions that are learned from, in tokens",
    "replay/groups": "groups of the rollout that came from the buffer",
    "replay/age": "how many policy versions old they are on average",
    "lr_critic": "learning rate of the critic when the rollout ended",
    "loss/policy_avg": "the policy's part of the loss",
    "loss/value_avg": "the critic's part, before `vf_coef`",
    "objective/entropy": "mean over completions of the sum over tokens of - log-prob, when the rollout is taken",
    "objective/kl": "mean over completions of the sum over tokens of k1 to the reference",
    "objective/non_score_reward": "mean of what the KL took off the reward, negative where it did",
    "objective/rlhf_reward": "mean reward less the KL",
    "objective/scores": "mean reward as the reward functions gave it",
    "policy/approxkl_avg": "`train/approx_kl` under TRL's name",
    "policy/clipfrac_avg": "`train/clip_ratio/region_mean` under TRL's name",
    "policy/entropy_avg": "`train/entropy` under TRL's name",
    "return/mean": "mean over tokens of the returns that the critic learns",
    "value/clipfrac_avg": "share of tokens whose clipped squared error is the larger one",
    "value/error": "mean squared error of the values",
    "value/explained_variance": "1 - Var(return - value) / Var(return); null where the returns do not vary",
    "value/mean": "mean value",
    "value/num_eos_tokens": "completions that ended by themselves, over all ranks",
    "value/ratio": "`train/ratio_mean` under TRL's name",
    "value/ratio_var": "variance of the ratio over the loss tokens of all updates of the rollout",
}
"""Meanings of the metrics that not every preset logs, without `train/`."""

COMMON = re.compile(
    r"(time|rewards|completions)/.+|reward|reward_std|frac_reward_zero_std|num_tokens|tokens_per_second"
    r"|loss|entropy|ratio_mean|approx_kl|grad_norm|skipped_steps|lr"
)
"""Metrics that every preset logs, without `train/`: docs/metrics.md has them."""


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
    schemas.register()


@functools.cache
def composed(preset: str, *overrides: str) -> tuple[DictConfig, dict[str, str]]:
    """The config of `train.py algo=PRESET OVERRIDES`, and the choice that was made in every group of `algo`.

    It is shared: copy what you change.
    """
    _register()
    GlobalHydra.instance().clear()
    with initialize_config_module("lit_rl.conf", version_base="1.3"):
        config = compose("config", [f"algo={preset}", "run_dir=run", *overrides], return_hydra_config=True)
    choices = {group: str(choice) for group, choice in config.hydra.runtime.choices.items() if group[:5] == "algo/"}
    with open_dict(config):
        del config["hydra"]
    return config, choices


def parts(config: DictConfig) -> tuple[Any, Any]:
    """The module and the data module of a config."""
    tree = plain(config)
    return build(tree["algo"]), build(tree["data"])


def trainer_of(logger: Any, **settings: Any) -> L.Trainer:
    """A Trainer that writes nothing and shows nothing."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"max_epochs": -1, "accelerator": "cpu", "log_every_n_steps": 1, "use_distributed_sampler": False}
    return L.Trainer(logger=logger, gradient_clip_val=1.0, **{**quiet, "limit_val_batches": 0, **settings})


def logged(preset: str) -> set[str]:
    """The names that one small rollout of a preset logs, without `train/`, less those that every preset logs."""
    config = composed(preset)[0].copy()
    for key, value in SMALL.items():
        OmegaConf.update(config, key, value)
    module, data = parts(config)
    memory = Memory()
    trainer_of(memory, max_steps=module.minibatches * module.iterations).fit(module, datamodule=data)
    names = {name.removeprefix("train/") for name in memory.names}
    return {name for name in names if not COMMON.fullmatch(name)}


# -------------------------------------------------------------------------------------------------------- the options


def options(preset: str) -> str:
    """What the preset is made of, and every key of it."""
    config, choices = composed(preset)
    rows = ["| choice | | |", "|---|---|---|"]
    keys = ["| key | default | |", "|---|---|---|"]
    algo: Any = OmegaConf.to_container(config.algo, resolve=False)
    for group in sorted(choices, key=_order):
        node = OmegaConf.select(config, group.replace("/", "."))
        if not _in_force(algo, group, node):
            continue
        comment = reference.first_comment(reference.CONF / group / f"{choices[group]}.yaml")
        rows.append(f"| `{group}=` | `{choices[group]}` | {comment} |")
        part: Any = OmegaConf.to_container(node, resolve=False)
        keys += _keys(group.replace("/", "."), part, [key for key in part if key not in reference.SLOTS])
    return "\n".join([*rows, "", *keys, *_keys("algo", algo, _own_keys(algo))])


def _order(group: str) -> int:
    """Groups in the order in which they are read: loss, ratio, advantage, reduction, what else there is."""
    first = ["algo/loss", "algo/loss/ratio", "algo/advantage", "algo/whitening", "algo/reduction"]
    return first.index(group) if group in first else len(first)


def _in_force(algo: dict[str, Any], group: str, node: Any) -> bool:
    """Whether a choice does anything in the preset: a KL without weight does not."""
    weights = {"algo/kl": "beta", "algo/reward_kl": "reward_beta"}
    if node is None or node.get("_target_") == ABSENT or group == "algo/kl_control":
        return False
    return group not in weights or algo[weights[group]] > 0


def _own_keys(algo: dict[str, Any]) -> list[str]:
    """Settings of the algorithm itself: when it learns, what its class is about, and what the preset changes."""
    target = schemas._load(algo["_target_"])
    own = getattr(vars(target).get("__init__"), "__kwdefaults__", {})
    about = [name for name in own if name not in reference.SLOTS]
    usual = {name: default for name, default, _ in reference.settings(target.__name__)}
    changed = [name for name, default in usual.items() if _is_plain(algo[name]) and algo[name] != default]
    return list(dict.fromkeys([*EVERYWHERE, *(name for name in [*about, *changed] if _is_plain(algo[name]))]))


def _is_plain(value: Any) -> bool:
    """A number, a text that is no interpolation, or null."""
    return not isinstance(value, dict) and not (isinstance(value, str) and value.startswith("${"))


def _keys(prefix: str, node: dict[str, Any], wanted: list[str]) -> Iterator[str]:
    """A line for each of these settings of a node, with the value that it has in the preset."""
    names = {path: name for name, path in {**schemas.TARGETS, **schemas.functions()}.items()}
    for key, _, meaning in reference.settings(names[node["_target_"]]):
        if key in wanted:
            value = node[key]["_target_"] if isinstance(node[key], dict) else node[key]
            yield f"| `{prefix}.{key}` | {reference.shown(value)} | {reference.cell(meaning)} |"


# ------------------------------------------------------------------------------------------------- metrics, and pages


def metrics(names: set[str]) -> str:
    """The table of a page for these names."""
    rows = [f"| `train/{name}` | {METRICS[name]} |" for name in METRICS if name in names]
    assert len(rows) == len(names), f"no meaning for {sorted(names - METRICS.keys())}"
    return "\n".join(["| name | |", "|---|---|", *rows]) if rows else "None of its own."


def block(text: str, name: str) -> re.Match[str]:
    """What stands between the markers of a block, as group 1."""
    found = re.search(rf"<!-- {name}: [^\n]*-->\n\n(.*?)\n\n<!-- end -->", text, re.DOTALL)
    assert found is not None, f"no block {name}"
    return found


def index() -> str:
    """The table of docs/algorithms/README.md."""
    comments = {name: reference.first_comment(reference.CONF / "algo" / f"{name}.yaml") for name in PRESETS}
    rows = [f"| [{name}]({name}.md) | {comment} |" for name, comment in comments.items()]
    return "\n".join(["| `algo=` | |", "|---|---|", *rows])


def write(path: Path, contents: dict[str, str]) -> None:
    """Put these contents between the markers of a page's blocks."""
    text = path.read_text()
    for name, content in contents.items():
        found = block(text, name)
        text = text[: found.start(1)] + content + text[found.end(1) :]
    path.write_text(text)


def main() -> None:
    for preset in PRESETS:
        write(PAGES / f"{preset}.md", {"options": options(preset), "metrics": metrics(logged(preset))})
    write(PAGES / "README.md", {"index": index()})


if __name__ == "__main__":
    main()
