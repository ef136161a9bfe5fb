"""docs/algorithms: a page for each preset; its tables come from the code, its metrics and its curve from runs.

Presets that learn from rewards have a curve; those of preference and supervised methods have none.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from doc_blocks import blocks, table_rows
from doc_runs import left_as_found
from hydra import compose, initialize_config_module

import lit_rl
from lit_rl.cli import schemas
from lit_rl.cli.build import build, plain

ROOT = Path(lit_rl.__file__).parents[1]
PAGES, IMAGES = ROOT / "docs" / "algorithms", ROOT / "docs" / "images" / "algorithms"
PRESETS = sorted(path.stem for path in (ROOT / "conf" / "algo").glob("*.yaml"))
HEADINGS = ["Usage", "Formula", "Options", "Metrics", "What differs from the paper"]


@pytest.fixture(scope="module")
def scripts() -> Iterator[None]:
    """The scripts can be imported, as they import each other."""
    sys.path.insert(0, str(ROOT / "scripts"))
    yield
    sys.path.remove(str(ROOT / "scripts"))


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    schemas.register()


@pytest.fixture(scope="module")
def pages(scripts: None) -> ModuleType:
    import algorithm_pages  # pyright: ignore

    return algorithm_pages


@pytest.fixture(scope="module")
def curves(scripts: None) -> ModuleType:
    pytest.importorskip("matplotlib")
    import learning_curves  # pyright: ignore

    return learning_curves


def test_there_is_a_page_for_each_preset_and_no_other() -> None:
    assert sorted(path.stem for path in PAGES.glob("*.md") if path.stem != "README") == PRESETS


@pytest.mark.parametrize("preset", PRESETS)
def test_the_tables_of_a_page_are_those_of_the_code(pages: ModuleType, preset: str) -> None:
    """The options are generated anew; the names of the metrics come from a small rollout."""
    text = (PAGES / f"{preset}.md").read_text()
    with left_as_found():
        assert pages.block(text, "options")[1] == pages.options(preset), "run: python scripts/algorithm_pages.py"
        logged = pages.logged(preset)
    assert pages.block(text, "metrics")[1] == pages.metrics(logged, preset), "run: python scripts/algorithm_pages.py"
    assert {f"train/{name}" for name in logged} == {
        row[0].strip("`") for row in table_rows(PAGES / f"{preset}.md", "Metrics")
    }


@pytest.mark.parametrize("preset", PRESETS)
def test_a_page_has_its_headings_and_its_command_builds(pages: ModuleType, preset: str) -> None:
    path = PAGES / f"{preset}.md"
    text = path.read_text()
    assert re.findall(r"^## (.*)", text, re.M) == [*HEADINGS, *["Learning curve"] * (preset in pages.ON_POLICY)]
    usage, *_ = blocks(path)
    (words,) = usage.commands
    assert words[:3] == ["python", "train.py", f"algo={preset}"]
    if len(words) > 3:
        with left_as_found(), initialize_config_module("lit_rl.conf", version_base="1.3"):
            assert build(plain(compose("config", overrides=words[2:]))["algo"]) is not None


def test_the_index_is_up_to_date(pages: ModuleType) -> None:
    text = (PAGES / "README.md").read_text()
    assert pages.block(text, "index")[1] == pages.index(), "run: python scripts/algorithm_pages.py"


def test_what_a_page_says_of_its_curve_is_what_was_measured(pages: ModuleType, curves: ModuleType) -> None:
    measured = curves.read(IMAGES / "curves.csv")
    assert sorted(measured) == pages.ON_POLICY
    for preset in pages.ON_POLICY:
        text = (PAGES / f"{preset}.md").read_text()
        assert pages.block(text, "curve")[1] == curves.section(measured, preset), (
            "run: python scripts/learning_curves.py"
        )
        assert len(measured[preset]) >= 3, f"{preset}: the spread of fewer seeds says little"


def test_every_link_and_image_of_a_page_is_there() -> None:
    for path in PAGES.glob("*.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
            assert (path.parent / target).is_file(), f"{path.name}: {target}"


def test_every_metric_with_a_meaning_is_on_a_page(pages: ModuleType) -> None:
    told = {row[0].strip("`") for preset in PRESETS for row in table_rows(PAGES / f"{preset}.md", "Metrics")}
    assert told == {f"train/{name}" for name in pages.METRICS}


def test_a_short_run_is_measured_and_drawn(curves: ModuleType, tmp_path: Path) -> None:
    """Two presets: counted completions, one reward a rollout, and every figure."""
    size = curves.PER_ROLLOUT
    with left_as_found():
        measured = {name: {seed: curves.run(name, seed, rollouts=2) for seed in (0, 1)} for name in ("grpo", "remax")}
    assert [count for count, _ in measured["grpo"][0]] == [size, 2 * size]
    assert [count for count, _ in measured["remax"][0]] == [size, 3 * size]  # greedy ones come after the sampled ones
    assert all(0 <= reward <= 1 for seeds in measured.values() for curve in seeds.values() for _, reward in curve)
    curves.save(tmp_path / "curves.csv", measured)
    again = curves.read(tmp_path / "curves.csv")
    assert [count for count, _ in again["grpo"][1]] == [size, 2 * size]
    assert again["grpo"][1][1][1] == pytest.approx(measured["grpo"][1][1][1], abs=1e-3)
    curves.pictures(measured, ["grpo", "remax"], tmp_path)
    for name in ("grpo", "remax", "overview"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_curve_of_a_seed_is_smoothed_and_ends_are_means(curves: ModuleType) -> None:
    line = [(64 * n, float(n)) for n in range(100)]
    means = curves.smooth(line)
    assert len(means) == 100
    assert means[50] == pytest.approx(50) and means[0] == pytest.approx(2)  # rollouts 0 to 4
    assert curves.final(line) == pytest.approx(sum(range(90, 100)) / 10)
