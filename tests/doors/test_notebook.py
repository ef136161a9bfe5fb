"""The notebooks run from top to bottom, the first one again in the same kernel, and what they show is true."""

from __future__ import annotations

import copy
import functools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import ipykernel_launcher
import nbformat
import pytest
import warm
from nbclient import NotebookClient

pytestmark = [pytest.mark.all, pytest.mark.xdist_group("notebooks")]

FIRST = "01_first_grpo"
FEW_SUMS = {"task=Addition()": "task=Addition(val_rows=100, max_operand=50)"}
SHORT = {
    "02_ppo_step_by_step": {"max_steps=160": "max_steps=24"},
    "03_preferences": {"max_steps=100": "max_steps=20", "[100]": "[20]"},
    "04_tools": {"trainer(70, ": "trainer(6, "},
    "05_images": {"trainer(100, folder)": "trainer(12, folder)"},
    "06_your_own_algorithm": {"max_steps=40": "max_steps=4", **FEW_SUMS},
}
"""What is replaced in each notebook so that it runs in seconds: every cell runs, and every number that is compared with
one by hand is there. That a notebook learns what its text says is for `make test-exhaustive`."""
NAMES = (FIRST, *SHORT)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one kernel, `python3`, which is this interpreter on one thread: see `warm` for what starts it."""
    folder = tmp_path_factory.mktemp("jupyter")
    spec = folder / "kernels" / "python3"
    spec.mkdir(parents=True)
    # The backend as an option: matplotlib may be loaded before the environment is read.
    argv = [sys.executable, ipykernel_launcher.__file__, "-f", "{connection_file}", "--matplotlib=inline"]
    env = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    (spec / "kernel.json").write_text(
        json.dumps({"argv": argv, "display_name": "Python 3", "language": "python", "env": env})
    )
    return folder


def read(root: Path, name: str) -> nbformat.NotebookNode:
    return nbformat.read(root / "notebooks" / f"{name}.ipynb", as_version=4)


def shorten(notebook: nbformat.NotebookNode, replaced: dict[str, str]) -> None:
    for text, shorter in replaced.items():
        assert any(text in cell.source for cell in notebook.cells), text
        for cell in notebook.cells:
            cell.source = cell.source.replace(text, shorter)


@pytest.fixture(scope="module")
def execute(kernel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[nbformat.NotebookNode], None]:
    """`execute(notebook)` runs its cells in a kernel of its own; a cell that raises ends the test."""

    def run(notebook: nbformat.NotebookNode) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("jupyter_client.launcher.Popen", warm.Popen)
            patch.setenv("JUPYTER_PATH", str(kernel))
            patch.setenv("JUPYTER_DATA_DIR", str(kernel))  # the user's own kernels come first otherwise
            where = {"metadata": {"path": str(tmp_path_factory.mktemp("cwd"))}}
            NotebookClient(notebook, timeout=600, kernel_name="python3", resources=where).execute()

    return run


@pytest.fixture(scope="module")
def cells(execute: Callable, root: Path) -> Callable[[str], list[nbformat.NotebookNode]]:
    """`cells(name)` are the cells of a notebook, run once with as many steps as `SHORT` says."""

    @functools.cache
    def run(name: str) -> list[nbformat.NotebookNode]:
        notebook = read(root, name)
        shorten(notebook, SHORT[name])
        execute(notebook)
        return notebook.cells

    return run


@pytest.fixture(scope="module")
def whole(execute: Callable, root: Path) -> Callable[[str], str]:
    """`whole(name)` is what a notebook prints as it stands."""

    @functools.cache
    def run(name: str) -> str:
        notebook = read(root, name)
        execute(notebook)
        return printed(notebook.cells)

    return run


@pytest.fixture(scope="module")
def passes(execute: Callable, root: Path) -> list[list[nbformat.NotebookNode]]:
    """The cells of two passes in one kernel; each ends with its rewards."""
    twice = read(root, FIRST)
    shorten(twice, {"max_steps=100,": "max_steps=24,", **FEW_SUMS})  # the warm-up takes 20
    twice.cells.append(nbformat.v4.new_code_cell("print('rewards', curve.tolist())"))
    size = len(twice.cells)
    again = copy.deepcopy(twice.cells)
    for cell in again:
        cell["id"] = f"{cell['id']}-again"
    twice.cells += again
    execute(twice)
    return [twice.cells[:size], twice.cells[size:]]


def printed(cells: list[nbformat.NotebookNode]) -> str:
    """Everything that the cells wrote or displayed as text."""
    parts = []
    for cell in cells:
        for output in cell.get("outputs", []):
            parts.append(output.get("text") or "")
            parts.append(output.get("data", {}).get("text/plain", ""))
    return "\n".join(parts)


def html(cells: list[nbformat.NotebookNode]) -> str:
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    return "".join(output["data"]["text/html"] for output in outputs if "text/html" in output.get("data", {}))


def test_every_notebook_is_tested(root: Path) -> None:
    assert sorted(path.stem for path in (root / "notebooks").glob("*.ipynb")) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_is_committed_without_outputs_and_uses_no_hydra(root: Path, name: str) -> None:
    notebook = read(root, name)
    assert not [cell["id"] for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")]
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    assert "hydra" not in code and "omegaconf" not in code and "lit_rl.cli" not in code


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "rise"), [(FIRST, 0.1), ("02_ppo_step_by_step", 0.1), ("06_your_own_algorithm", 0.05)]
)
def test_the_policy_learns(whole: Callable[[str], str], name: str, rise: float) -> None:
    before, after = (
        float(re.search(rf"^{when}\s+(\d\.\d+)", whole(name), re.M).group(1))  # pyright: ignore
        for when in ("before", "after")
    )
    assert after > before + rise


@pytest.mark.parametrize("which", [0, 1], ids=["first", "again"])
def test_one_step_by_hand_prefers_the_better_completions(passes: list, which: int) -> None:
    found = re.search(r"(-?\d+\.\d+) before, (-?\d+\.\d+) after", printed(passes[which]))
    assert found and float(found.group(2)) > float(found.group(1))


def test_a_second_pass_gives_the_same_numbers(passes: list) -> None:
    """No state of the first pass is left in the kernel: the same completions, rewards and step by hand."""
    for line in (r"log-prob of better .*", r"^before .*", r"^after .*", r"^rewards .*", r"group_id .*"):
        first, again = (re.search(line, printed(cells), re.M).group() for cells in passes)  # pyright: ignore
        assert first == again


def test_shows_a_curve_and_a_coloured_table(passes: list) -> None:
    cells = passes[0]
    assert any("image/png" in output.get("data", {}) for cell in cells for output in cell.get("outputs", []))
    table = html(cells)
    assert table.count("<tr style=") == 24 and "#1a7f37" in table and "#cf222e" in table


class TestPPO:
    NAME = "02_ppo_step_by_step"

    def test_advantages_by_hand_are_those_of_the_library(self, cells: Callable) -> None:
        found = re.findall(r"largest difference\s+(\d\.\de[+-]\d+)", printed(cells(self.NAME)))
        assert len(found) == 3 and all(float(number) < 1e-5 for number in found)

    def test_one_step_by_hand_moves_policy_and_critic_the_right_way(self, cells: Callable) -> None:
        text = printed(cells(self.NAME))
        changes = [
            tuple(map(float, re.search(rf"{what}: (-?\d+\.\d+) before, (-?\d+\.\d+) after", text).groups()))  # pyright: ignore
            for what in ("good minus bad tokens", "error of the critic")
        ]
        (gap, wider), (error, smaller) = changes
        assert wider > gap and smaller < error

    @pytest.mark.exhaustive
    def test_the_critic_learns(self, whole: Callable[[str], str]) -> None:
        found = re.findall(r"(\w+) answers: value (\d\.\d+)", whole(self.NAME))
        values = {name: float(value) for name, value in found}
        assert values["right"] > values["wrong"] + 0.05

    def test_shows_curves_and_coloured_tables(self, cells: Callable) -> None:
        pictures = [
            output
            for cell in cells(self.NAME)
            for output in cell.get("outputs", [])
            if "image/png" in output.get("data", {})
        ]
        assert len(pictures) == 2
        assert "#1a7f37" in html(cells(self.NAME)) and "#cf222e" in html(cells(self.NAME))


class TestPreferences:
    NAME = "03_preferences"

    def test_the_loss_by_hand_is_that_of_the_library(self, cells: Callable) -> None:
        text = printed(cells(self.NAME))
        by_hand, library = (
            float(re.search(rf"^{name}\s+(\d\.\d+)", text, re.M).group(1))  # pyright: ignore
            for name in ("by hand", r"module\.loss")
        )
        margin = re.search(r"^margins\s+(-?\d\.\d+) by hand, (-?\d\.\d+) in the metrics", text, re.M)
        assert margin and float(margin.group(1)) != 0
        assert by_hand == pytest.approx(library, abs=2e-6)
        assert float(margin.group(1)) == pytest.approx(float(margin.group(2)), abs=2e-6)

    @pytest.mark.exhaustive
    def test_both_widen_the_margin_and_only_rpo_learns_to_add(self, whole: Callable[[str], str]) -> None:
        found = re.findall(r"^(?:before|after)\s+sums right (\d\.\d+) .* margin (-?\d\.\d+)", whole(self.NAME), re.M)
        (untrained, zero), (rpo, rpo_margin), again, (dpo, dpo_margin) = [tuple(map(float, pair)) for pair in found]
        assert again == (untrained, zero) and zero == 0
        assert rpo_margin > 0.3 and dpo_margin > 0.3
        assert rpo > untrained + 0.3 and dpo < untrained

    @pytest.mark.exhaustive
    def test_plain_dpo_lets_both_completions_fall(self, whole: Callable[[str], str]) -> None:
        """What the text of the notebook says, of the very numbers that it shows."""
        moved = {
            name: (float(chosen), float(rejected))
            for name, chosen, rejected in re.findall(
                r"(\w+): log-prob of the chosen completions (\S+) nats, of the rejected ones (\S+)",
                whole(self.NAME),
            )
        }
        assert moved["RPO"][0] > 0 > moved["RPO"][1]
        assert 0 > moved["DPO"][0] > moved["DPO"][1]

    @pytest.mark.exhaustive
    def test_samples_are_right_more_often_after_rpo(self, whole: Callable[[str], str]) -> None:
        rows = re.findall(r"^(\w+)\s+of all (\d\.\d+)   best of 4 (\d\.\d+)", whole(self.NAME), re.M)
        of_all = {name: float(mean) for name, mean, _ in rows}
        assert all(float(best) >= float(mean) for _, mean, best in rows)
        assert of_all["RPO"] > of_all["untrained"] + 0.3 and of_all["DPO"] < of_all["untrained"]

    def test_shows_two_pictures_and_a_coloured_table(self, cells: Callable) -> None:
        outputs = [output for cell in cells(self.NAME) for output in cell.get("outputs", [])]
        assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
        assert html(cells(self.NAME)).count("<tr style=") == 18


class TestTools:
    NAME = "04_tools"

    def test_a_call_is_answered_and_wrong_ones_are_answered_too(self, cells: Callable) -> None:
        text = printed(cells(self.NAME))
        assert "ToolAnswer(text='425', failed=False)" in text
        assert len(re.findall(r"^    error: ", text, re.M)) == 4

    def test_what_was_read_has_no_gradient_and_what_was_written_has_that_by_hand(self, cells: Callable) -> None:
        text = printed(cells(self.NAME))
        written, mask, gradient = (
            re.search(rf"^{name}\s+(.*)$", text, re.M).group(1).split()  # pyright: ignore
            for name in ("wrote", "response_mask", "1000 x gradient")
        )
        by_hand = re.search(r"by hand 1000 x -A/N = (-\d+\.\d+)", text)
        assert by_hand and float(by_hand.group(1)) < 0
        assert mask.count("1") == len(written) == 8 and mask.count("0") == 6
        assert gradient == [by_hand.group(1) if mine == "1" else "0.00" for mine in mask]
        assert re.search(r"^read in all episodes: [1-9]\d* tokens; largest gradient 0.00$", text, re.M)

    @pytest.mark.exhaustive
    def test_the_policy_learns_to_halve_the_range(self, whole: Callable[[str], str]) -> None:
        """Who reads no hint wins 0.4."""
        text = whole(self.NAME)
        games, sampled = (
            [float(re.search(rf"^{when}\s+{what} (\d\.\d+)", text, re.M).group(1)) for when in ("before", "after")]  # pyright: ignore
            for what in ("games won", "sampled games won")
        )
        assert games[1] > 0.8 and games[1] > games[0] + 0.1
        assert sampled[1] > 0.65 and sampled[1] > sampled[0] + 0.1
        first = re.search(r"^after .*first guesses (\{.*\})$", text, re.M)
        counts = json.loads(first.group(1).replace("'", '"'))  # pyright: ignore
        assert counts.get("4", 0) + counts.get("5", 0) > 0.6 * sum(counts.values())

    def test_shows_a_picture_and_a_coloured_table(self, cells: Callable) -> None:
        outputs = [output for cell in cells(self.NAME) for output in cell.get("outputs", [])]
        assert sum("image/png" in output.get("data", {}) for output in outputs) == 1
        assert (
            html(cells(self.NAME)).count("<tr style=") == 16
            and "#1a7f37" in html(cells(self.NAME))
            and "#cf222e" in html(cells(self.NAME))
        )


class TestImages:
    NAME = "05_images"

    def test_an_answer_depends_on_its_image(self, cells: Callable) -> None:
        found = re.search(r"with another one ([+-]\d+\.\d+)", printed(cells(self.NAME)))
        assert found and float(found.group(1)) > 1

    @pytest.mark.exhaustive
    def test_the_policy_learns_to_read(self, whole: Callable[[str], str]) -> None:
        text = whole(self.NAME)
        for what in (r"digits read (\d\.\d+)", r"majority right of 24: (\d+)"):
            before, after = (float(re.search(rf"^{n}\s+{what}", text, re.M).group(1)) for n in ("before", "after"))  # pyright: ignore
            assert after > 1.3 * before

    def test_shows_a_digit_a_curve_and_what_is_read(self, cells: Callable) -> None:
        outputs = [output for cell in cells(self.NAME) for output in cell.get("outputs", [])]
        assert sum("image/png" in output.get("data", {}) for output in outputs) == 3


class TestYourOwn:
    NAME = "06_your_own_algorithm"

    def test_it_has_twenty_lines(self, cells: Callable) -> None:
        (source,) = [cell.source for cell in cells(self.NAME) if cell.source.startswith("class Patient")]
        assert len([line for line in source.splitlines() if line.strip()]) <= 20

    def test_from_the_same_advantages_its_gradient_is_that_of_grpo(self, cells: Callable) -> None:
        found = re.search(r"largest difference (\S+) of a gradient of (\d\.\d+)", printed(cells(self.NAME)))
        assert found and float(found.group(1)) < 1e-5 and float(found.group(2)) > 0.1

    def test_its_own_numbers_are_logged(self, cells: Callable) -> None:
        share = re.search(r"^share (\d\.\d+), surprise (\d\.\d+) nats a token$", printed(cells(self.NAME)), re.M)
        assert share and float(share.group(1)) == 0.04 and float(share.group(2)) > 0
