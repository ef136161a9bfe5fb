"""Checkpoints that are not what was written: of a flipped, a cut and a missing piece nothing is read."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runs_helpers import SMALL

from lit_rl.callbacks import AtomicCheckpointIO
from lit_rl.callbacks.checkpoint_io import is_whole, verify
from lit_rl.core.durable_files import MANIFEST, write_manifest
from lit_rl.core.errors import StorageError
from lit_rl.runs.run_dir import RunDir

STATE = {"state_dict": {"weight": torch.arange(300.0)}, "global_step": 7}


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << at % 8
    path.write_bytes(content)


def test_a_flipped_bit_of_a_file_is_found_or_harmless(tmp_path: Path) -> None:
    path, disk = tmp_path / "step.ckpt", AtomicCheckpointIO()
    disk.save_checkpoint(STATE, path)
    content, found = path.read_bytes(), 0
    assert is_whole(path)
    for at in range(0, len(content), 3):
        flip(path, at)
        if is_whole(path):  # it is padding, or a field that nobody reads
            loaded = disk.load_checkpoint(path)
            assert torch.equal(loaded["state_dict"]["weight"], STATE["state_dict"]["weight"]) and len(loaded) == 2
        else:
            found += 1
        path.write_bytes(content)
    assert found > len(content) / 6
    path.write_bytes(content[:-1])
    assert not is_whole(path)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flipped": lambda folder: flip(folder / "global_step7" / "rank1.pt", 9),
    "cut": lambda folder: (folder / "global_step7" / "rank1.pt").write_bytes(b"second ran"),
    "missing": lambda folder: (folder / "global_step7" / "rank0.pt").unlink(),
    "no manifest": lambda folder: (folder / MANIFEST).unlink(),
    "no manifest to read": lambda folder: (folder / MANIFEST).write_text("{"),
    "an empty manifest": lambda folder: (folder / MANIFEST).write_text("{}"),
    "no index": lambda folder: (folder / "latest").unlink(),
}


def write_pieces(folder: Path) -> None:
    """As DeepSpeed names them."""
    (folder / "global_step7").mkdir(parents=True)
    for name, content in {"rank0.pt": b"first rank", "rank1.pt": b"second rank"}.items():
        (folder / "global_step7" / name).write_bytes(content)
    (folder / "latest").write_text("global_step7")
    write_manifest(folder)


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_folder_is_what_its_manifest_says(kind: str, tmp_path: Path) -> None:
    """`ckpt_path=last` goes on from the one before."""
    run_dir = RunDir(tmp_path)
    older, newer = (run_dir.checkpoints / f"step_0000000{step}.ckpt" for step in (3, 7))
    write_pieces(older)
    write_pieces(newer)
    assert run_dir.newest_checkpoint() == (newer, [])
    DAMAGE[kind](newer)
    assert run_dir.newest_checkpoint() == (older, [newer])


def test_a_folder_of_lightnings_fsdp_has_an_index_and_no_manifest(tmp_path: Path) -> None:
    folder = tmp_path / "step.ckpt"
    folder.mkdir()
    for name in ("meta.pt", "__0_0.distcp", "__1_0.distcp"):
        (folder / name).write_bytes(b"piece")
    with pytest.raises(StorageError, match=r"\.metadata, the index of its pieces, is missing"):
        verify(folder)
    (folder / ".metadata").write_bytes(b"index")
    verify(folder)


def flip_a_weight(path: Path) -> None:
    """One bit in the middle of the largest tensor of a file."""
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda part: part.file_size)
    flip(path, largest.header_offset + 200 + largest.file_size // 2)


def test_a_file_that_was_asked_for_is_read_whole_before_it_is_trained_on(train, tmp_path: Path, capsys) -> None:
    run = tmp_path / "run"
    every = ["callbacks.checkpoint.every_n_train_steps=1", "callbacks.checkpoint.save_top_k=-1"]
    assert train(*SMALL, *every, "trainer.max_steps=2", "trainer.limit_val_batches=0", f"run_dir={run}") == 0
    older, newer = sorted((run / "checkpoints").glob("*.ckpt"))
    flip_a_weight(newer)
    assert train(*SMALL, "trainer.max_steps=3", f"run_dir={tmp_path / 'next'}", f"ckpt_path={newer}") == 7
    said = capsys.readouterr().err
    assert str(newer) in said and "it is damaged" in said and f"ckpt_path={older}" in said
    assert not (tmp_path / "next").exists()


def write_text(path: Path) -> None:
    path.write_text("a note\n" * 30)


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "text": (write_text, "it is a file of text"),
    "empty": (lambda path: path.write_bytes(b""), "it is empty"),
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:900]), "it is cut short"),
    "flipped": (flip_a_weight, "it is damaged: .*/data/0 in it does not have its checksum"),
    "pickle": (lambda path: path.write_bytes(pickle.dumps({"state_dict": {}})), "it is a pickle, .* runs code"),
    "object": (lambda path: torch.save({"state_dict": {}, "a": Path}, path), r"a Python object \(pathlib\S*Path\)"),
    "list": (lambda path: torch.save([1], path), "it holds no state_dict"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_cannot_be_used_is_said_in_plain_words(kind: str, tmp_path: Path) -> None:
    path, disk = tmp_path / "step_2.ckpt", AtomicCheckpointIO()
    disk.save_checkpoint(STATE, path)
    spoil, words = WRONG[kind]
    spoil(path)
    with pytest.raises(StorageError, match=words) as alone:
        disk.load_checkpoint(path, weights_only=True)
    assert "There is no other whole checkpoint" in str(alone.value) and "weights_only" not in str(alone.value)
    disk.save_checkpoint(STATE, tmp_path / "step_1.ckpt")
    with pytest.raises(StorageError, match=r"beside it is ckpt_path=.*step_1\.ckpt"):
        disk.load_checkpoint(path, weights_only=True)
