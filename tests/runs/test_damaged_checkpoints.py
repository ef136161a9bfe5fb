"""Checkpoints that are not what was written: of a flipped, a cut and a missing piece nothing is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lit_rl.callbacks import AtomicCheckpointIO
from lit_rl.callbacks.checkpoint_io import is_whole
from lit_rl.durable import MANIFEST, write_manifest

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
    "no manifest to read": lambda folder: (folder / MANIFEST).write_text("{"),
    "no index": lambda folder: (folder / "latest").unlink(),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_folder_is_what_its_manifest_says(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "step.ckpt"
    (folder / "global_step7").mkdir(parents=True)
    for name, content in {"rank0.pt": b"first rank", "rank1.pt": b"second rank"}.items():
        (folder / "global_step7" / name).write_bytes(content)
    (folder / "latest").write_text("global_step7")
    assert is_whole(folder), "an earlier version wrote no manifest"
    write_manifest(folder)
    assert is_whole(folder)
    DAMAGE[kind](folder)
    assert not is_whole(folder)
