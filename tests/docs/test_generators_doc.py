"""docs/generators.md: its keys are keys, its tables of speeds are what the script writes."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType

import pytest
from composed_configs import config_of
from doc_blocks import blocks, table_rows
from doc_runs import left_as_found
from omegaconf import OmegaConf

from lit_rl.cli.build import plain


@pytest.fixture(scope="module")
def page(root: Path) -> Path:
    return root / "docs" / "generators.md"


@pytest.fixture(scope="module")
def speed(root: Path) -> ModuleType:
    sys.path.insert(0, str(root / "scripts"))
    try:
        spec = importlib.util.spec_from_file_location("generation_speed", root / "scripts" / "generation_speed.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["generation_speed"] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(root / "scripts"))
    return module


def composed(*overrides: str) -> dict:
    with left_as_found():
        config = config_of(*overrides)
        plain(config)
        return OmegaConf.to_container(config, resolve=False)  # pyright: ignore


def test_the_generator_of_your_own_is_one(page: Path) -> None:
    (example,) = (block.text for block in blocks(page) if block.language == "python")
    names: dict = {}
    exec(example, names)  # a page of ours
    assert names["module"].generator.exact is False


def test_every_member_of_a_generator_is_in_its_table(page: Path) -> None:
    from lit_rl.generation import Generator

    told = " ".join(row[0] for row in table_rows(page, "Write your own"))
    assert set(re.findall(r"`(\w+)", told)) == {name for name in vars(Generator) if not name.startswith("_")}


@pytest.mark.all
def test_every_generator_is_in_the_first_table_and_every_key_is_one(page: Path, root: Path) -> None:
    choices = {path.stem for path in (root / "conf" / "generator").glob("*.yaml")}
    assert {
        name for row in table_rows(page)[: len(choices)] for name in re.findall(r"generator=(\w+)", row[0])
    } == choices
    trees = [composed(f"generator={choice}") for choice in choices]
    for group in ("generator", "sampling", "doctor"):
        told = set(re.findall(rf"`{group}\.(\w+)", page.read_text()))
        assert told and told <= set().union(*(tree[group] for tree in trees)), group


def test_every_key_of_the_sampling_is_in_its_table(page: Path) -> None:
    from lit_rl.core.rollout import Sampling, Structured

    cells = [row[0] for row in table_rows(page, "What a response may hold") if row[0].startswith("`sampling.")]
    (forms,) = re.findall(r"structured\.{([\w,]+)}", " ".join(cells))
    assert sorted(forms.split(",")) == sorted(each.name for each in fields(Structured))
    told = re.findall(r"`(?:sampling\.)?(\w+)", " ".join(cells))
    assert sorted(told) == sorted(each.name for each in fields(Sampling))


def test_the_limits_are_those_of_the_probe(page: Path) -> None:
    from lit_rl.generation.vllm.weight_probe import LIMITS

    rows = table_rows(page, "The proof after every update")
    for name, limit in LIMITS.items():
        (cell,) = [row[2] for row in rows if row[0].endswith(f"in {name}")]
        assert [float(number) for number in cell.split(",")] == [limit.mean, limit.max], name


def test_the_speeds_are_tables_of_every_generator(page: Path, speed: ModuleType) -> None:
    for name in speed.CASES:
        text = re.search(rf"<!-- speed {name}: [^\n]*-->\n\n(.*?)\n\n<!-- end -->", page.read_text(), re.DOTALL)
        assert text is not None, name
        rows = [line.split("|")[1:-1] for line in text[1].splitlines() if line.startswith("| `")]
        assert [row[0].strip(" `") for row in rows] == list(speed.GENERATORS), name
        for row in rows:
            median, native = float(row[1]), float(rows[0][1])
            assert float(row[3]) == pytest.approx(median / native, abs=0.02), row


@pytest.mark.all
def test_the_script_measures(speed: ModuleType) -> None:
    case = replace(speed.CASES["tiny"], prompts=2, completions=2, prompt_tokens=5, new_tokens=4, rounds=2)
    names = ["native", "hf"] + ([] if importlib.util.find_spec("vllm") else ["vllm"])
    measured = speed.measure(case, names)
    assert [len(one.speeds) for one in measured[:2]] == [2, 2]
    lines = speed.table(case, measured, (0.5, 0.7)).splitlines()
    assert lines[2].startswith("| `native` |") and "| 1.00 |" in lines[2]
    assert lines[3].startswith("| `hf` |")
    assert len(names) == 2 or "vLLM is not installed" in lines[4]
    assert "2 prompts of 5 tokens, 2 completions of 4 each, 2 alternating rounds" in lines[-1]
    rounds = [speed.prompts_of(case, speed.LanguageModel("tiny"), n).token_ids for n in (1, 2)]
    assert rounds[0] != rounds[1], "no cache may answer"
