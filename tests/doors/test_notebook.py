"""The notebook runs from top to bottom, and again in the same kernel, and what it shows is true."""

from __future__ import annotations

import copy
import json
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

"""What one pass may take on one thread."""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one kernel, `python3`, which is this interpreter on one thread."""
    folder = tmp_path_factory.mktemp("jupyter")
    spec = folder / "kernels" / "python3"
    spec.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    env = {
        "OMP_NUM_THREADS": "1",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "CUDA_VISIBLE_DEVICES": "",
    }
    (spec / "kernel.json").write_text(
        json.dumps({"argv": argv, "display_name": "Python 3", "language": "python", "env": env})
    )
    return folder


@pytest.fixture(scope="module")
def notebook(root: Path) -> nbformat.NotebookNode:
    return nbformat.read(root / "notebooks" / "01_first_grpo.ipynb", as_version=4)


@pytest.fixture(scope="module")
def passes(
    kernel: Path, notebook: nbformat.NotebookNode, tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[list[nbformat.NotebookNode], float]]:
    """The cells of two passes in one kernel."""
    twice = copy.deepcopy(notebook)
    size = len(twice.cells)
    again = copy.deepcopy(twice.cells)
    for cell in again:
        cell["id"] = f"{cell['id']}-again"
    twice.cells += again
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(kernel))
        patch.setenv("JUPYTER_DATA_DIR", str(kernel))  # the user's own kernels come first otherwise
        client = NotebookClient(
            twice,
            timeout=600,
            kernel_name="python3",
            resources={"metadata": {"path": str(tmp_path_factory.mktemp("cwd"))}},
        )
        client.execute()
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


def test_is_committed_without_outputs(notebook: nbformat.NotebookNode) -> None:
    assert not [cell["id"] for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")]


def test_uses_no_hydra(notebook: nbformat.NotebookNode) -> None:
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    assert "hydra" not in code and "omegaconf" not in code and "lit_rl.cli" not in code


@pytest.mark.parametrize("which", [0, 1], ids=["first", "again"])
def test_the_policy_learns(passes: list, which: int) -> None:
    cells = passes[which]
    before, after = (
        float(re.search(rf"^{name}\s+(\d\.\d+)", printed(cells), re.M).group(1))  # pyright: ignore
        for name in ("before", "after")
    )
    assert after > before + 0.1


@pytest.mark.parametrize("which", [0, 1], ids=["first", "again"])
def test_one_step_by_hand_prefers_the_better_completions(passes: list, which: int) -> None:
    found = re.search(r"(-?\d+\.\d+) before, (-?\d+\.\d+) after", printed(passes[which]))
    assert found and float(found.group(2)) > float(found.group(1))


def test_a_second_pass_gives_the_same_numbers(passes: list) -> None:
    """No state of the first pass is left in the kernel: the same completions, rewards and step by hand."""
    for line in (r"log-prob of better .*", r"^before .*", r"^after .*", r"group_id .*"):
        first, again = (re.search(line, printed(cells), re.M).group() for cells in passes)  # pyright: ignore
        assert first == again


def test_shows_a_curve_and_a_coloured_table(passes: list) -> None:
    cells = passes[0]
    assert any("image/png" in output.get("data", {}) for cell in cells for output in cell.get("outputs", []))
    table = html(cells)
    assert table.count("<tr style=") == 24 and "#1a7f37" in table and "#cf222e" in table
