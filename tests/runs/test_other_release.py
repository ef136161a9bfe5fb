"""The folder of a run says which lit_rl made it, and so does what another one cannot read of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from runs_helpers import SMALL

from lit_rl.reports import run_files

pytestmark = pytest.mark.all


def test_what_another_version_wrote_and_this_one_cannot_read_says_so(train, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "run"
    short = [*SMALL, "trainer.max_steps=1", "trainer.limit_val_batches=0", f"run_dir={folder}"]
    assert train(*short) == 0
    ours = run_files.installed_version()
    config, text = folder / "config.yaml", (folder / "config.yaml").read_text()
    assert text.startswith(f"# lit_rl=={ours}\n") and run_files.version_of_run(folder) == ours

    tree = yaml.safe_load(text)
    tree["algo"]["model"]["sharpness"] = tree["model"]["sharpness"] = 3  # a key that is not there any more
    on_cpu = "trainer.accelerator=cpu"
    asked = (
        ["export", f"export.folder={tmp_path / 'out'}"],
        ["replay", "replay.losses=[run]", on_cpu],
        ["eval", on_cpu],
    )
    for version, told in (("0.0.1", True), (ours, False)):
        config.write_text(f"# lit_rl=={version}\n{yaml.safe_dump(tree)}")
        before = sorted(folder.rglob("*"))
        for command in asked:
            capsys.readouterr()
            assert train(*command, f"run_dir={folder}") == 2
            said = capsys.readouterr().err
            assert "sharpness" in said and "Traceback" not in said
            assert (f"was made by lit_rl 0.0.1, and this is {ours}" in said) == told
        assert sorted(folder.rglob("*")) == before and not (tmp_path / "out").exists()

    config.write_text(text.replace(f"=={ours}", "==0.0.1"))
    (file,) = (folder / "checkpoints").glob("*.ckpt")
    saved = torch.load(file, weights_only=True)
    saved["algorithm"] = "Alchemy"
    torch.save(saved, file)
    (folder / "summary.json").unlink()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert train(*short, "trainer.max_steps=2", "ckpt_path=last") == 7
    said = capsys.readouterr().err
    assert "Alchemy wrote it" in said and "made by lit_rl 0.0.1" in said
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_folder_that_says_nothing_is_no_fault(tmp_path: Path) -> None:
    assert run_files.version_of_run(tmp_path) == ""
    (tmp_path / "config.yaml").write_bytes(b"\xff\xfe")
    assert run_files.version_of_run(tmp_path) == ""
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    assert run_files.version_of_run(tmp_path) == ""
