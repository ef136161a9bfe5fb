"""docs/algorithms: a page for each preset; its tables come from the code, its metrics and its curve from runs."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import tiers
import torch
from composed_configs import tree_of
from doc_blocks import blocks
from doc_runs import left_as_found

import lit_rl
from lit_rl.cli import schemas
from lit_rl.cli.build import build

ROOT = Path(lit_rl.__file__).parents[1]
PAGES, IMAGES = ROOT / "docs" / "algorithms", ROOT / "docs" / "images" / "algorithms"
PRESETS = sorted(path.stem for path in (ROOT / "conf" / "algo").glob("*.yaml"))
pytestmark = [pytest.mark.all, pytest.mark.xdist_group("algorithm pages")]

HEADINGS = ["Usage", "Formula", "Options", "Metrics", "What differs from the paper", "Learning curve"]


@pytest.fixture(scope="module")
def scripts() -> Iterator[None]:
    """The scripts can be imported, as they import each other."""
    sys.path.insert(0, str(ROOT / "scripts"))
    yield
    sys.path.remove(str(ROOT / "scripts"))


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    schemas.register_schemas()


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
    text = (PAGES / f"{preset}.md").read_text()
    with left_as_found():
        assert pages.block(text, "options")[1] == pages.options(preset), "run: python scripts/algorithm_pages.py"
    assert text.splitlines()[2] == pages.MARK


@pytest.mark.parametrize("preset", tiers.all_but_exhaustive(PRESETS, PRESETS[::4]))
def test_the_metrics_of_a_page_are_those_of_a_small_rollout(pages: ModuleType, preset: str) -> None:
    with left_as_found():
        found = pages.block((PAGES / f"{preset}.md").read_text(), "metrics")[1]
        assert found == pages.metrics(preset), "run: python scripts/algorithm_pages.py"


@pytest.mark.parametrize("preset", PRESETS)
def test_a_page_has_its_headings_and_its_command_builds(pages: ModuleType, preset: str) -> None:
    path = PAGES / f"{preset}.md"
    text = path.read_text()
    assert re.findall(r"^## (.*)", text, re.M) == HEADINGS
    usage, *_ = blocks(path)
    (words,) = usage.commands
    assert words[:3] == ["python", "train.py", f"algo={preset}"]
    if len(words) > 3:
        with left_as_found():
            assert build(tree_of(*words[2:])["algo"]) is not None


def test_the_index_is_up_to_date(pages: ModuleType) -> None:
    text = (PAGES / "README.md").read_text()
    assert pages.block(text, "index")[1] == pages.index(), "run: python scripts/algorithm_pages.py"


@pytest.mark.parametrize("kind", ["online", "offline"])
def test_what_a_page_says_of_its_curve_is_what_was_measured(pages: ModuleType, curves: ModuleType, kind: str) -> None:
    presets, name, measured, section, table = {
        "online": (curves.ONLINE, "judged", curves.read(IMAGES / "curves.csv"), curves.section, curves.table),
        "offline": (
            *(pages.OFFLINE, "data set", curves.read_points(IMAGES / "offline_curves.csv")),
            *(curves.offline_section, curves.offline_table),
        ),
    }[kind]
    assert sorted(measured) == presets
    for preset in presets:
        text = (PAGES / f"{preset}.md").read_text()
        assert pages.block(text, "curve")[1] == section(measured, preset), (
            f"run: python scripts/learning_curves.py {kind} --draw-only"
        )
        fewest = 3 if preset in pages.ON_POLICY else 2
        assert len(measured[preset]) >= fewest, f"{preset}: the spread of fewer seeds says little"
    assert pages.block((PAGES / "README.md").read_text(), name)[1] == table(measured)


@pytest.mark.parametrize("figure", ["behind", "echo"])
def test_what_is_said_of_a_term_is_what_was_measured(pages: ModuleType, curves: ModuleType, figure: str) -> None:
    names, page = curves.FIGURES[figure]
    measured = curves.read(IMAGES / "terms_curves.csv")
    assert all(sorted(measured[name]) == [0, 1, 2] for name in names)
    assert pages.block(page.read_text(), figure)[1] == curves.terms_table(measured, list(names))


def test_an_engine_behind_draws_with_the_weights_of_older_rollouts(curves: ModuleType) -> None:
    """As they were: what the policy has learned since is not in them."""
    engine, policy, drawn = curves.Behind(), torch.nn.Linear(1, 1, bias=False), []
    engine._engine = SimpleNamespace(sync=lambda held, version: drawn.append((held.weight.item(), version)))
    for version in range(5):
        torch.nn.init.constant_(policy.weight, float(version))
        engine.sync(policy, version)
    assert drawn == [(float(old), old) for old in (0, 0, 0, 1, 2)] and curves.LAG == 2


def test_a_short_run_of_a_term_is_measured_and_drawn(curves: ModuleType, tmp_path: Path) -> None:
    with left_as_found():
        measured = {name: {0: curves.run_term(name, 0, rollouts=2)} for name in ("behind", "trust_region")}
    assert [count for count, _ in measured["behind"][0]] == [curves.PER_ROLLOUT, 2 * curves.PER_ROLLOUT]
    assert measured["behind"][0][0] == measured["trust_region"][0][0]  # nothing is behind yet
    curves.terms_picture(measured, list(measured), tmp_path / "behind.png")
    assert (tmp_path / "behind.png").read_bytes().startswith(b"\x89PNG")


def test_every_link_and_image_of_a_page_is_there() -> None:
    for path in PAGES.glob("*.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
            assert target.startswith("https://") or (path.parent / target).is_file(), f"{path.name}: {target}"


def test_what_trl_has_is_named_as_on_the_page_of_its_fields(pages: ModuleType) -> None:
    fields = (ROOT / "docs" / "from-trl.md").read_text()
    assert pages.TRL.keys() <= set(PRESETS)
    for preset, found in pages.TRL.items():
        for name in re.findall(r"(\w+)=", found):
            assert f"`{name}`" in fields, f"{preset}: {name}"


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


def test_of_duels_the_reward_is_the_policys_own(curves: ModuleType) -> None:
    """The opponent's completions are scored in the same call, and are no part of the curve."""
    watch, asked = curves.RolloutWatch(), []

    class Module:
        opponent_writes = True

        def reward(self, batch: object, completions: list[str]) -> object:
            asked.append(completions)
            return SimpleNamespace(total=torch.tensor([1.0, 0.0, 0.0, 0.0]))

    module = Module()
    watch.setup(None, module, "fit")
    watch.on_train_batch_start(None, module, SimpleNamespace(slot=0), 0)
    module.reward(None, ["own", "opponent's"] * 2)
    assert watch.curve == [(4, 0.5)] and len(asked) == 1


@pytest.fixture(scope="module")
def short(curves: ModuleType) -> dict[str, dict[int, list]]:
    """Four optimizer steps of four presets, validated after two and four."""
    with left_as_found(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "SCORER_OPERAND", curves.OPERAND)  # to encode all pairs takes longer than the steps
        seeds = {"dpo": (0, 1), "kto": (0,), "reward_model": (0,), "gkd": (0,)}
        return {
            name: {seed: curves.run_offline(name, seed, steps=4, every=2) for seed in of} for name, of in seeds.items()
        }


def test_a_short_offline_run_is_measured_before_and_between_its_steps(curves: ModuleType, short: dict) -> None:
    assert all([point.step for point in curve] == [0, 2, 4] for seeds in short.values() for curve in seeds.values())
    start = {name: seeds[0][0] for name, seeds in short.items()}
    assert start["dpo"].answered == start["kto"].answered != start["gkd"].answered
    assert start["reward_model"].answered is None and start["reward_model"].told_apart is not None
    assert start["dpo"].told_apart is start["kto"].told_apart is None
    after = {name: seeds[0][-1].told_apart for name, seeds in short.items()}
    assert 0.3 < after["dpo"] < 1 and 0.3 < after["kto"] < 1
    assert short["dpo"][0][0].logp == pytest.approx(short["kto"][0][0].logp, abs=1e-3)  # of the same right answers


def test_offline_curves_are_saved_and_drawn(curves: ModuleType, short: dict, tmp_path: Path) -> None:
    curves.save_points(tmp_path / "curves.csv", short)
    again = curves.read_points(tmp_path / "curves.csv")
    for name, seeds in short.items():
        for seed, curve in seeds.items():
            for point, kept in zip(curve, again[name][seed], strict=True):
                assert kept == pytest.approx(point, abs=1e-2, nan_ok=True)
    curves.offline_pictures(short, list(short), tmp_path)
    for name in short:
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_an_offline_section_tells_the_last_point_of_every_seed(curves: ModuleType) -> None:
    point = curves.Point
    found = {
        "dpo": {
            0: [point(0, 0.4, None, -2.0), point(10, 0.2, 0.7, -3.0)],
            1: [point(0, 0.4, None, -2.0), point(10, 0.3, 0.9, -5.0)],
        },
        "rpo": {0: [point(0, 0.4, None, -2.0), point(10, 0.9, 0.8, -1.0)]},
    }
    text = curves.offline_section(found, "dpo")
    assert "0.40 before, 0.25 (seeds: 0.20 to 0.30) after" in text
    assert "0.80 (seeds: 0.70 to 0.90)" in text and "`val/logps/chosen`: -2.00 before, -4.00 after" in text
    rows = curves.offline_table(found).splitlines()
    assert [row.split("]")[0] for row in rows[2:]] == ["| [rpo", "| [dpo"]  # the best first


def test_what_is_missing_is_trained_a_seed_of_all_before_the_next(curves: ModuleType, tmp_path: Path) -> None:
    known = {"a": {0: [1]}}
    every = curves.Asked(["a", "b"], [0, 1], tmp_path, missing=False, draw_only=False)
    assert every.jobs(known) == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert replace(every, missing=True).jobs(known) == [("b", 0), ("a", 1), ("b", 1)]
    assert replace(every, draw_only=True).jobs(known) == []
    saved = []
    curves.train(every.jobs(known), known, lambda *job: [job], lambda all: saved.append(len(all)), str)
    assert saved == [1, 2, 2, 2] and known["b"][1] == [("b", 1)]  # after every run
