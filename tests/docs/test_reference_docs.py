"""Documents that are made from the code, or that compute, are up to date."""

from __future__ import annotations

import doctest
import json
import re
from pathlib import Path

import pytest
from doc_blocks import table_rows
from doc_runs import left_as_found, script
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from lit_rl.cli import listing, schemas
from lit_rl.core.speedups import DecodingSpeedups, ModelSpeedups
from lit_rl.reports import config_changes


def test_the_configuration_reference_is_up_to_date(root: Path) -> None:
    reference = script(root, "config_reference")
    assert reference.DOCUMENT.read_text() == reference.document(), "run: python scripts/config_reference.py"
    for group in reference.GROUPS:
        said = (reference.PAGES / f"{group}.md").read_text()
        assert said == reference.page(group), "run: python scripts/config_reference.py"
    assert {path.stem for path in reference.PAGES.glob("*.md")} == reference.GROUPS.keys()
    assert listing.SCHEMA_KEYS.read_text() == reference.schema_keys(), "run: python scripts/config_reference.py"
    assert config_changes.DEFAULTS_FILE.read_text() == reference.usual(), "run: python scripts/config_reference.py"


def test_the_page_of_errors_is_up_to_date(root: Path) -> None:
    reference = script(root, "source_pages")
    assert reference.ERRORS.read_text() == reference.errors_page(), "run: python scripts/source_pages.py errors"
    assert {"ConfigError", "StorageError"} <= {kind.__name__ for kind in reference.classes()}
    assert {message.kind for message in reference.shown_messages()} == {kind.__name__ for kind in reference.classes()}


def test_the_messages_of_errors_are_read_from_the_source(root: Path) -> None:
    reference = script(root, "source_pages")
    source = """
def f(path, one):
    raise DataError(f"The file {path.name} is empty: take another one." + one + did_you_mean("a", b))
    raise ValueError("not ours")
    raise ConfigError(elsewhere(3))
"""
    assert list(reference.raised(source)) == [
        ("DataError", "The file <name> is empty: take another one.<one>"),
        ("ConfigError", "<...>"),
    ]
    source = """
FORM = "allowed is a.b:c"
def f(key, why="no text"):
    wanted = f"{key} wants a model"
    also = "one thing"
    also += "another"
    why = "it is so"
    raise DataError(f"{wanted}: {FORM}, {OTHER}, {also}, {why}.")
def g(FORM):
    raise DataError(FORM)
"""
    assert list(reference.raised(source, {"OTHER": "what is imported"})) == [
        ("DataError", "<key> wants a model: allowed is a.b:c, what is imported, <also>, <why>."),
        ("DataError", "<form>"),
    ], "a name that stands for one text is read as that text"
    kept = reference.Message("DataError", "data/x", "The file <name> is empty: take a|b.")
    assert kept.row == "| `The file <name> is empty:` | `take a\\|b.` |"


def test_the_names_on_the_pages_of_the_api_are_up_to_date(root: Path) -> None:
    pages = script(root, "source_pages")
    stale = [
        path.name
        for path in pages.PAGES.glob("*.md")
        if pages.MODULE.search(text := path.read_text()) and pages.written(text) != text
    ]
    assert not stale and pages.MODULES.read_text() == pages.modules_page(), "run: python scripts/source_pages.py api"
    assert all(pages.API_MARK in path.read_text() for path in pages.PAGES.glob("*.md") if path.stem != "README")
    assert pages.offered("lit_rl.algorithms.gkd", "GKD") == ["GKD"], "and no helper"
    assert "writer_of" in pages.offered("lit_rl.algorithms.gkd", "")
    with pytest.raises(SystemExit, match="has no public Nobody"):
        pages.offered("lit_rl.algorithms.gkd", "GKD, Nobody")


@pytest.mark.all
def test_every_key_of_the_reference_is_a_key(root: Path) -> None:
    """The places of the classes are written by hand in the script: the composed configs must have these keys."""
    keys: set[str] = set()
    variants = [
        [],
        ["algo=rloo", "optimizer=adamw_8bit", "scheduler=cosine", "generator=hf"],
        ["optimizer=by_path", "scheduler=by_path", "reward=function"],
        ["reward=recipes"],
        ["reward=joint"],
        *([f"judge={name}"] for name in ("function", "pairwise", "llm", "pairrm")),
        *([f"reference={name}"] for name in ("path", "ema", "bema", "mixing")),
        *([f"generator={name}"] for name in ("hf_continuous", "vllm", "vllm_server")),
        ["callbacks=preference_sets"],
        ["callbacks=ema"],
        ["callbacks=bema"],
        ["callbacks=merge"],
        ["callbacks=alarms"],
        *([f"data={name}"] for name in ("largest", "reasoning_gym", "repeated", "products")),
        *([f"data={name}"] for name in ("guess_text", "calculator_text", "random_play")),
        *([f"env={name}"] for name in ("tools", "mcp", "environment", "gymnasium", "rollout_func")),
    ]
    with left_as_found(), initialize_config_module("lit_rl.conf", version_base="1.3"):
        schemas.register_schemas()
        seen: set[str] = set()
        for path in sorted((root / "conf" / "algo").rglob("*.yaml")):
            found = set(re.findall(r"/schemas/(\w+)@", path.read_text()))
            if found <= seen:
                continue  # keys come from schemas: composing another file that has these finds no more
            seen |= found
            group, _, choice = path.relative_to(root / "conf").with_suffix("").as_posix().rpartition("/")
            base = next((extra for place, extra in BASES.items() if group.startswith(place)), [])
            variants.append([*base, f"{group}={choice}"])
        for overrides in together(variants):
            tree = OmegaConf.to_container(compose("config", overrides=overrides), resolve=False)
            keys |= set(paths(tree))
    for key, kind in (("model.speedups", ModelSpeedups), ("generator.speedups", DecodingSpeedups)):
        keys |= {f"{key}.{name}" for name in kind.names()} if key in keys else set()  # the default is a word
    told = [row[0].strip("`") for row in table_rows(root / "docs" / "configuration.md", "Keys at the top")]
    for page in sorted((root / "docs" / "configuration").glob("*.md")):
        if "## Every key\n" in page.read_text():
            told += [row[0].strip("`") for row in table_rows(page, "Every key")]
    assert len(told) > 400
    assert not set(told) - keys


def together(variants: list[list[str]]) -> list[list[str]]:
    """The same choices in fewer configs: each goes into the first that chooses nothing else of its groups."""
    configs: list[dict[str, str]] = []
    for overrides in variants:
        chosen = {"algo": "grpo"} | dict(override.split("=", 1) for override in overrides)
        home = next((config for config in configs if _agree(config, chosen) and _agree(chosen, config)), {})
        if not home:
            configs.append(home)
        home.update(chosen)
    return [[f"{group}={choice}" for group, choice in config.items()] for config in configs]


def _agree(one: dict[str, str], other: dict[str, str]) -> bool:
    """Whether no group of `one` is chosen otherwise by `other`, nor lies in one that `other` alone chooses."""
    parents = {group: {above for above in other if group.startswith(f"{above}/")} for group in one}
    return all(other.get(group, choice) == choice and parents[group] <= one.keys() for group, choice in one.items())


BASES = {
    "algo/critic": ["algo=ppo"],
    "algo/rejection/": ["algo/rejection=tokens"],
    "algo/divergence": ["algo=dpo"],
    "algo/preference": ["algo=dpo"],
    "algo/imitation": ["algo=sft"],
    "algo/verdict": ["algo=kto"],
    "algo/prompt_weights": ["algo=bco"],
    "algo/distillation/estimator": ["algo/distillation=reverse_kl"],
    "algo/distillation/support": ["algo/distillation=top_k"],
    "algo/teacher/context": ["algo/teacher=self"],
}
"""What a sub-group needs to be there."""


def paths(tree: object, head: str = "") -> list[str]:
    if not isinstance(tree, dict):
        return []
    here = [f"{head}{name}" for name in tree]
    return here + [path for name, node in tree.items() for path in paths(node, f"{head}{name}.")]


def test_the_batch_arithmetic_is_right(root: Path) -> None:
    failed, ran = doctest.testfile(
        str(root / "docs" / "batch-arithmetic.md"), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE
    )
    assert ran >= 7 and not failed


@pytest.mark.all
@pytest.mark.parametrize("sampled", [True, False])
def test_the_learning_curve_is_drawn(root: Path, tmp_path: Path, sampled: bool) -> None:
    """With and without a second decoding; a step that was validated twice is drawn once."""
    pytest.importorskip("matplotlib")
    run_curves = script(root, "run_curves")
    interval = {"reward_low": 0.4, "reward_high": 0.6}
    rows: list[dict] = [
        {"step": 0, "val/reward": mean, "val/reward_low": 0.4, "val/reward_high": 0.6} for mean in (0.5, 0.1)
    ]
    rows += [
        {"step": n, "train/reward": 0.5, "train/frac_reward_zero_std": 0.1, "train/completions/mean_length": None}
        for n in range(1, 9)
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    if sampled:
        rows += [{"step": step, **{f"val_sampled/{end}": 0.45 for end in ("reward", *interval)}} for step in (0, 8)]
        (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
        both = {"": {"greedy": {"reward": 0.5, **interval}, "sampled at 1": {"reward": 0.45, **interval}}}
        (tmp_path / "summary.json").write_text(json.dumps({"before": both, "after": both}))
    assert [row["val/reward"] for row in run_curves.validations(rows, "val/reward")] == [0.5]
    run_curves.plot(tmp_path, tmp_path / "curve.png")
    assert re.match(rb"\x89PNG", (tmp_path / "curve.png").read_bytes())
