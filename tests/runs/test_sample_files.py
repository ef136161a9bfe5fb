"""`samples/` on the disk: a file a rollout, a hundred joined, nothing lost or doubled by a kill or a resume."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import datasets
import pyarrow.parquet
import pytest
import warm
from PIL import Image

from lit_rl.callbacks import output_files
from lit_rl.callbacks.output_files import SAMPLE_FILES, list_tables, restore_sample_files, write_table
from lit_rl.core.visuals import ImageRef


def table(step: int, **more: list) -> dict[str, list]:
    rows = {"step": [step] * 2, "prompt": [f"p{step}"] * 2, "completion": ["x" * 9, "\ud7ff\n"], "reward": [0.5, step]}
    return rows | more


def written(folder: Path, steps: range, name: str = "step_{:08d}") -> None:
    folder.mkdir(exist_ok=True)
    for step in steps:
        write_table(table(step), folder / f"{name.format(step)}.parquet")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def steps(folder: Path) -> list[int]:
    return [found.read(["step"]).column("step")[0].as_py() for found in list_tables(folder)]


@pytest.fixture
def of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_files, "JOINED", 3)


def test_a_file_a_hundred_rollouts_and_all_of_them_are_read(tmp_path: Path) -> None:
    written(tmp_path, range(0, 402, 2))
    assert names(tmp_path) == [
        "step_00000000-00000198.parquet",
        *["step_00000200-00000398.parquet", "step_00000400.parquet"],
    ]
    assert steps(tmp_path) == list(range(0, 402, 2))
    (one,) = [found for found in list_tables(tmp_path) if found.name == "step_00000042"]
    assert one.read().to_pydict() == table(42)
    joined = pyarrow.parquet.read_table(tmp_path / "step_00000000-00000198.parquet").to_pydict()
    assert joined["step"] == [step for step in range(0, 200, 2) for _ in range(2)], "as any reader of parquet sees it"


def test_validations_are_joined_by_set_and_decoding(tmp_path: Path, of_three: None) -> None:
    for name in ("val_{:08d}_t0", "val_{:08d}_t0.7_hard-1"):
        written(tmp_path, range(4), name)
    (tmp_path / "mine.parquet").write_bytes(b"mine")
    ours = [name for name in names(tmp_path) if name != "mine.parquet"]
    assert ours == [
        *["val_00000000-00000002_t0.7_hard-1.parquet", "val_00000000-00000002_t0.parquet"],
        *["val_00000003_t0.7_hard-1.parquet", "val_00000003_t0.parquet"],
    ]
    assert all(any(Path(name).match(pattern) for pattern in SAMPLE_FILES) for name in ours), "a resume knows them"


def test_columns_that_come_go_and_change_their_kind(tmp_path: Path, of_three: None) -> None:
    """What one rollout lacks is no column of it; whole numbers become others, and what fits nothing else JSON."""
    more = [{}, {"note": [1, 2]}, {"note": [0.5, None], "seen": [True, False]}, {"note": [3, 4]}]
    more += [{"note": ["a", None]}, {"note": [[1], [2]]}, {}]
    for step, columns in enumerate(more):
        write_table(table(step, **columns), tmp_path / f"step_{step:08d}.parquet")
    assert len(names(tmp_path)) == 3
    found = [each.read().to_pydict() for each in list_tables(tmp_path)]
    assert found[:3] == [table(step, **columns) for step, columns in enumerate(more[:3])]
    assert [each.get("note") for each in found[3:]] == [["3", "4"], ["a", None], ["[1]", "[2]"], None]
    assert "seen" not in found[3]


def test_images_are_given_back_from_a_joined_file(tmp_path: Path, of_three: None) -> None:
    Image.new("RGB", (2, 2)).save(png := io.BytesIO(), "png")
    for step in range(4):
        seen = {"image": [ImageRef.held("one", 2, 2, png.getvalue()), None]} if step else {}
        write_table(table(step, **seen), tmp_path / f"step_{step:08d}.parquet")
    path = tmp_path / "step_00000000-00000002.parquet"
    rows = datasets.load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    assert [row["image"] and row["image"].size for row in rows] == [None, None, (2, 2), None, (2, 2), None]
    restore_sample_files(tmp_path, {"step_00000000.parquet", "step_00000001.parquet"})
    rows = datasets.load_dataset("parquet", data_files=str(tmp_path / "step_00000001.parquet"), split="train")
    assert rows[0]["image"].size == (2, 2)


KILLED = """
import os, pathlib, sys
from lit_rl.callbacks import output_files as sample_files
sample_files.JOINED = 3
place = sys.argv[2]
if place == "joining":  # the joined file is not whole yet
    sample_files.flush = lambda path: os.kill(os.getpid(), 9)
elif place == "joined":  # it is, and the second of the others is about to go
    unlink = pathlib.Path.unlink
    pathlib.Path.unlink = lambda path, *a, **k: os.kill(os.getpid(), 9) if "0001." in path.name else unlink(path)
sys.path.insert(0, "tests/runs")
from test_sample_files import written
written(pathlib.Path(sys.argv[1]), range(4))
"""


@pytest.mark.parametrize("place", ["joining", "joined"])
@pytest.mark.all
def test_a_kill_loses_and_doubles_nothing(place: str, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), str(root / "tests")])}
    command = [sys.executable, "-c", KILLED, str(tmp_path / "samples"), place]
    done = warm.run(command, cwd=root, env=environment)
    assert done.returncode == -9, done.stderr
    folder = tmp_path / "samples"
    assert steps(folder) == [0, 1, 2, 3] and len(names(folder)) > 2
    restore_sample_files(folder, {f"step_{step:08d}.parquet" for step in range(2)})
    assert names(folder) == ["step_00000000.parquet", "step_00000001.parquet"] and steps(folder) == [0, 1]


def test_a_resume_leaves_joined_files_that_the_checkpoint_knew(tmp_path: Path, of_three: None) -> None:
    written(tmp_path, range(8))
    noted = {"step_00000000-00000002.parquet", "step_00000003.parquet", "step_00000004.parquet"}
    (tmp_path / "step_00000099.partial").write_bytes(b"half")
    restore_sample_files(tmp_path, noted)
    assert set(names(tmp_path)) == noted and steps(tmp_path) == [0, 1, 2, 3, 4]
    restore_sample_files(tmp_path, noted)
    assert set(names(tmp_path)) == noted
