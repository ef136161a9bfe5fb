"""Write the tables of docs/algorithms/*.md: what a preset is made of, its options, its metrics, and the index.

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

from lit_rl.algorithms import CPO, GKD, ORPO, SFT, NashMD, ProcessRewardModeling
from lit_rl.algorithms.families.judged import JudgedModule
from lit_rl.algorithms.families.pairs import PairModule
from lit_rl.algorithms.families.verdicts import VerdictModule
from lit_rl.algorithms.loop.offline import OfflineModule
from lit_rl.algorithms.reward_modeling import ScalarModule
from lit_rl.cli import schemas
from lit_rl.cli.build import ABSENT, build, plain
from lit_rl.settings.base import field_owners

# --------------------------------------------------------------------------- what metrics mean that not every run logs


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
    "frac_rows_skipped": "share of rows without an advantage: no gradient, so no forward pass either",
    "groups/dropped": "groups without spread in the first draw",
    "groups/drawn": "spare prompts that were completed",
    "groups/empty": "places that the cap left without a group",
    "groups/kept_length": "mean length of the completions that are learned from, in tokens",
    "replay/groups": "groups of the rollout that came from the buffer",
    "replay/age": "how many policy versions old they are on average",
    "lr_critic": "learning rate of the critic when the rollout ended",
    "loss/policy_avg": "the policy's part of the loss",
    "loss/value_avg": "the critic's part, before `vf_coef`",
    "groups/best_reward": "mean reward of the completions that were chosen",
    "groups/tied": "share of groups with several best completions",
    "groups/unscored": "groups without a scored completion, over all ranks",
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
    "objective/scores_margin": "mean distance of the rewards of the two completions of a prompt",
    "objective/model_scores": "mean reward of the policy's completions",
    "objective/ref_scores": "mean reward of the reference's completions",
    "loss/dpo": "mean preference loss of the pairs that are learned from",
    "loss/xpo": "mean of the exploration bonus",
    "loss/kl": "the KL's part of the loss, mean over judged completions",
    "loss/score": "the preference's part of the loss, mean over judged completions",
    "rewards/probabilities": "mean probability of the policy's completion to win, by the judge",
    "rewards/chosen": "mean of beta times the log ratio of the chosen completions",
    "rewards/rejected": "the same of the rejected ones",
    "rewards/accuracies": "share of pairs whose chosen completion has the higher of the two",
    "rewards/margins": "mean of the chosen one less the rejected one",
    "logps/chosen": "mean log-prob of the chosen completions, summed over their tokens",
    "logps/rejected": "the same of the rejected ones",
    "logits/chosen": "mean logit over the vocabulary and the tokens of the chosen completions",
    "logits/rejected": "the same of the rejected ones",
    "nll_loss": "mean of - log-prob over the tokens of the chosen completions",
    "log_odds_ratio": "mean of log sigma(log odds of the chosen completion less that of the rejected one)",
    "log_odds_chosen": "mean of the log odds of the chosen completion less that of the rejected one",
    "count/chosen": "desirable rows of an optimizer step, over all ranks",
    "count/rejected": "the others",
    "delta": "the reward shift",
    "judge/failures": "share of comparisons without a verdict",
    "judge/ties": "share of prompts whose completions win equally often: nothing is learned from them",
    "contain_eos_token": "share of the completions that are learned from which ended by themselves",
    "model_contain_eos_token": "share of the policy's completions that ended by themselves",
    "ref_contain_eos_token": "share of the opponent's",
    "entropy": "mean entropy of the next-token distribution over the learned tokens, in nats",
    "mean_token_accuracy": "share of the chosen completions' tokens that the policy finds the most likely",
    "on_policy": "share of the optimizer steps that the student wrote",
    "teacher/entropy": "mean entropy of the teacher's next-token distribution, in nats",
    "completions/mean_length": "mean number of learned tokens a completion",
    "accuracy": "share of pairs whose chosen completion has the higher reward",
    "margin": "mean of the reward of the chosen completion less that of the rejected one",
    "min_reward": "lowest reward",
    "mean_reward": "mean reward of both sides",
    "max_reward": "highest reward",
    "beta": "`algo.beta` of the epoch",
    "alpha": "`algo.alpha` of the epoch",
    "mixture_coef": "`algo.mixture_coef` of the epoch",
}
"""Meanings of the metrics that not every preset logs, without `train/`."""

OF_VERDICTS = {
    "rewards/chosen": "mean of beta times the log ratio over the desirable completions of a step",
    "rewards/rejected": "the same over the undesirable ones",
    "rewards/margins": "the first less the second",
    "logps/chosen": "mean log-prob of the desirable completions, summed over their tokens",
    "logps/rejected": "the same of the undesirable ones",
    "logits/chosen": "mean logit over the vocabulary and the tokens of the desirable completions",
    "logits/rejected": "the same of the undesirable ones",
    "kl": "the baseline z0",
}
OF_TEXTS = {"mean_token_accuracy": "share of the learned tokens that the policy finds the most likely"}
PER_PAIR_KL = {
    "objective/kl": "mean over completions of the log ratio to the reference, summed over tokens",
    "objective/entropy": "mean over completions of the sum over tokens of - log-prob",
    "objective/non_score_reward": "mean of - beta times that log ratio",
    "objective/rlhf_reward": "mean of the reward and that",
    "objective/scores": "mean reward, less the penalty of completions that did not end",
}
MEANINGS: dict[type, dict[str, str]] = {
    VerdictModule: OF_VERDICTS,
    SFT: OF_TEXTS,
    GKD: OF_TEXTS,
    CPO: {"rewards/chosen": "mean of beta times the reward: the log-prob, or what the loss takes of it per token"}
    | {
        "logps/chosen": "mean log-prob of the chosen completions: per token where the loss is of log-probs per token",
    },
    ORPO: {
        "rewards/chosen": "mean of beta times the log-prob per token of the chosen completions",
        "logps/chosen": "mean of the log-prob per token of the chosen completions",
        "nll_loss": "mean of - log-prob over the tokens of prompts and chosen completions",
    },
    ProcessRewardModeling: {"accuracy": "share of labelled steps whose more likely class is the label"},
    NashMD: PER_PAIR_KL
    | {
        "rewards/chosen": "mean reward of the policy's completions",
        "rewards/rejected": "mean reward of the mixture's",
        "rewards/margins": "mean of the first less the second",
        "rewards/accuracies": "share of judged prompts where the policy's completion is more likely to win",
        "judge/ties": "share of prompts whose two completions are as likely to win: only their KL is learned from",
    },
    JudgedModule: PER_PAIR_KL,
}
"""What a name means in the presets of a class, where that is something else; the first class that fits."""


# ------------------------------------------------------------------------------------- presets, and small runs of them


PAGES = reference.ROOT / "docs" / "algorithms"
PRESETS = sorted(path.stem for path in (reference.CONF / "algo").glob("*.yaml"))


def schema_of(preset: str) -> str:
    """Return name of the schema that a preset's file takes up, or that of the preset which it begins with."""
    first, *_ = yaml.safe_load((reference.CONF / "algo" / f"{preset}.yaml").read_text())["defaults"]
    return first.removeprefix("/schemas/").partition("@")[0] if first.startswith("/schemas/") else schema_of(first)


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
    "Models that score": lambda kind: issubclass(kind, ScalarModule),
}
"""The tables of the index; a preset stands in the one that its class belongs to."""

EVERYWHERE = ("beta", "reward_beta", "group_size", "minibatches", "iterations")
"""Settings of the algorithm that stand on every page."""

SMALL = {"data.task.max_operand": 6, "data.task.val_rows": 2}
SMALL_ROLLOUT = SMALL | {"data.prompts_per_rollout": 4, "sampling.max_new_tokens": 3}
SMALL_STEP = SMALL | {"data.batch_size": 4}
"""A rollout, or a step, that takes a tenth of a second."""

COMPLETED = {"gkd": ("experiment=gkd_addition",)}
"""Settings without which a preset does not run."""

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
    return L.Trainer(logger=logger, gradient_clip_val=1.0, **{**quiet, "limit_val_batches": 0, **settings})


def family(preset: str) -> str:
    """Return a key of `COMMON`."""
    return "offline" if preset in OFFLINE else "pairs" if preset in ONLINE_PAIRS else "on_policy"


def logged(preset: str) -> set[str]:
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
    return {name for name in names if not COMMON[family(preset)].fullmatch(name)}


# -------------------------------------------------------------------------------------------------------- the options


def options(preset: str) -> str:
    """Return what the preset is made of, and every key of it."""
    config, choices = composed(preset)
    rows = ["| choice | | |", "|---|---|---|"]
    keys = ["| key | default | |", "|---|---|---|"]
    algo: Any = OmegaConf.to_container(config.algo, resolve=False)
    for group in sorted(choices, key=_order):
        node = OmegaConf.select(config, group.replace("/", "."))
        if not _in_force(algo, group, node):
            continue
        part: Any = OmegaConf.to_container(node, resolve=False)
        for choice, prefix, settings in _chosen(group, choices[group], part):
            comment = reference.first_comment(reference.CONF / group / f"{choice}.yaml")
            rows.append(f"| `{group}=` | `{choice}` | {comment} |")
            if group not in ALONE:
                keys += _keys(prefix, settings, [key for key in settings if key not in reference.SLOTS])
    return "\n".join([*rows, "", *keys, *_keys("algo", algo, _own_keys(algo))])


ALONE = ("data", "reward")
"""Groups at the top that a preset chooses from, and whose settings are the run's."""


def _chosen(group: str, choice: str, part: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield each choice of a group, where its settings stand, and these: several, where choices stand side by side."""
    prefix = group.replace("/", ".")
    if prefix not in reference.BY_NAME:
        yield choice, prefix, part
        return
    for name, settings in part.items():
        if settings is not None:  # a preset further up chose another
            yield name, f"{prefix}.{name}", settings


def _order(group: str) -> int:
    """Return the place of a group where they are read: loss, ratio, advantage, reduction, what else there is."""
    first = ["algo/loss", "algo/loss/ratio", "algo/advantage", "algo/whitening", "algo/reduction"]
    first += ["algo/preference", "algo/verdict", "algo/imitation"]
    last = ["judge", "reference", "data", "reward", "optimizer"]
    return first.index(group) if group in first else len(first) + (1 + last.index(group) if group in last else 0)


def _in_force(algo: dict[str, Any], group: str, node: Any) -> bool:
    """Return whether a choice does anything in the preset: a KL without weight does not."""
    weights = {"algo/kl": "beta", "algo/reward_kl": "reward_beta"}
    if node is None or node.get("_target_") == ABSENT or group == "algo/kl_control":
        return False
    return group not in weights or algo[weights[group]] > 0


def _own_keys(algo: dict[str, Any]) -> list[str]:
    """Return settings of the algorithm itself: when it learns, what its class is about, and what the preset changes."""
    target = schemas._load(algo["_target_"])
    family = target.__base__.__init__.settings.__mro__  # what the class adds to it is its own
    own = [name for name, owner in field_owners(target.__init__.settings).items() if owner not in family]
    about = [name for name in own if name not in reference.SLOTS]
    usual = {name: default for name, default, _ in reference.settings(target.__name__)}
    changed = [name for name, default in usual.items() if _is_plain(algo[name]) and algo[name] != default]
    return list(dict.fromkeys([*EVERYWHERE, *(name for name in [*about, *changed] if _is_plain(algo[name]))]))


def _is_plain(value: Any) -> bool:
    """Return a number, a text that is no interpolation, numbers by name, or null."""
    if isinstance(value, dict):
        return bool(value) and "_target_" not in value and not any(isinstance(each, dict) for each in value.values())
    return not (isinstance(value, str) and value.startswith("${"))


def _keys(prefix: str, node: dict[str, Any], wanted: list[str]) -> Iterator[str]:
    """Yield a line for each of these settings of a node, with the value that it has in the preset."""
    names = {path: name for name, path in {**schemas.TARGETS, **schemas.public_functions()}.items()}
    for key, _, meaning in reference.settings(names[node["_target_"]]):
        if key in wanted:
            value = node[key].get("_target_", node[key]) if isinstance(node[key], dict) else node[key]
            yield f"| `{prefix}.{key}` | {reference.shown(value)} | {reference.cell(meaning)} |"


# ------------------------------------------------------------------------------------------------- metrics, and pages


def metrics(names: set[str], preset: str) -> str:
    """Return the table of a page for these names."""
    own = next((texts for kind, texts in MEANINGS.items() if issubclass(CLASSES[preset], kind)), {})
    rows = [f"| `train/{name}` | {own.get(name, METRICS[name])} |" for name in METRICS if name in names]
    assert len(rows) == len(names), f"no meaning for {sorted(names - METRICS.keys())}"
    return "\n".join(["| name | |", "|---|---|", *rows]) if rows else "None of its own."


def block(text: str, name: str) -> re.Match[str]:
    """Return what stands between the markers of a block, as group 1."""
    found = re.search(rf"<!-- {name}: [^\n]*-->\n\n(.*?)\n\n<!-- end -->", text, re.DOTALL)
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
        write(PAGES / f"{preset}.md", {"options": options(preset), "metrics": metrics(logged(preset), preset)})
    write(PAGES / "README.md", {"index": index()})


if __name__ == "__main__":
    main()
