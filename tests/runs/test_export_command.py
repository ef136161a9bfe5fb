"""`lit-rl export`: the folder that the run would have written, of any checkpoint; and the hub's client sends it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from hub_stand_in import hub
from runs_helpers import SMALL, assert_same
from safetensors.torch import load_file

from lit_rl.core.model_paths import TINY
from lit_rl.runs.run_lock import LOCK_FILE

pytestmark = pytest.mark.all

RUN = [*SMALL, "trainer.max_steps=2", "trainer.limit_val_batches=0", "callbacks.checkpoint.every_n_train_steps=1"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exported") / "run"


@pytest.fixture
def run(train, whole: Path) -> Path:
    """A finished run of two steps that exported each. Made once; copy it."""
    if not whole.exists():
        every = ["callbacks.checkpoint.save_top_k=-1", "callbacks.export.every=1", "model.lora.r=2"]
        assert train(*RUN, *every, f"run_dir={whole}") == 0
    return whole


def weights(folder: Path) -> dict:
    return load_file(folder / "model.safetensors")


def test_a_stopped_run_gets_the_export_that_it_lacks(run, train, tmp_path):
    stopped = tmp_path / "stopped"
    shutil.copytree(run, stopped, ignore=shutil.ignore_patterns("hf", "hf_steps"))
    assert train("task=export", f"run_dir={stopped}") == 0
    assert_same(weights(stopped / "hf"), weights(run / "hf"))
    assert (stopped / "hf" / "README.md").read_text() == (run / "hf" / "README.md").read_text()
    card = (run / "hf" / "README.md").read_text()
    assert f" {shlex.join([*RUN, 'callbacks.checkpoint.save_top_k=-1'])} " in card and "run_dir" not in card
    adapter = Path("adapter") / "adapter_model.safetensors"
    assert_same(load_file(stopped / "hf" / adapter), load_file(run / "hf" / adapter))


def test_it_has_the_type_of_the_run_and_finds_a_base_that_has_moved(train, capsys, tmp_path):
    """The checkpoint of an adapter holds no base: it was read in float32, and made another model than the run's."""
    base, moved, run = tmp_path / "base", tmp_path / "moved", tmp_path / "run"
    shutil.copytree(TINY, base)
    words = ["model.lora.r=2", "trainer.precision=bf16-true", "trainer.max_steps=1", f"model.name={base}"]
    assert train(*RUN, *words, f"run_dir={run}") == 0
    base.rename(moved)
    assert train("task=export", f"run_dir={run}", f"export.folder={tmp_path / 'again'}") == 2
    assert "set model.name to where that model is now" in " ".join(capsys.readouterr().err.split())
    assert train("task=export", f"run_dir={run}", f"export.folder={tmp_path / 'again'}", f"model.name={moved}") == 0
    assert_same(weights(tmp_path / "again"), weights(run / "hf"))
    assert weights(run / "hf")["model.norm.weight"].dtype == torch.bfloat16


def test_a_reference_in_a_runs_config_is_a_text(run, train, capsys, tmp_path, monkeypatch):
    """It would build what the check has not seen, or send a variable of this machine to a hub."""
    folder, canary = tmp_path / "theirs", tmp_path / "canary"
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("hf", "hf_steps"))
    tree = yaml.safe_load((folder / "config.yaml").read_text())
    tree["algo"]["model"]["lora"] = f"${{oc.create:{{_target_: os.mkdir, path: {canary}}}}}"
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    assert train("task=export", f"run_dir={folder}") == 2
    assert not canary.exists()
    monkeypatch.setenv("OF_THIS_MACHINE", "canary-1")
    tree["algo"]["model"] |= {"lora": None, "name": "theirs/${oc.env:OF_THIS_MACHINE}"}
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    capsys.readouterr()
    assert train("task=export", f"run_dir={folder}") != 0
    told = capsys.readouterr().err
    assert "theirs/${oc.env:OF_THIS_MACHINE}" in told and "canary-1" not in told, told


def test_the_python_of_a_card_works(run, capsys, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    card = (run / "hf" / "README.md").read_text().replace("path/to/this/folder", str(run / "hf"))
    load, adapter = (part.split("\n```")[0] for part in card.split("```python\n")[1:])
    names: dict = {}
    exec(load.replace('"..."', '"1+1="'), names)
    assert names["written"].shape[1] > 4 and capsys.readouterr().out
    exec(adapter.replace("'tiny'", repr(str(Path("lit_rl/models/tiny").resolve()))), names)
    assert names["model"].peft_config["default"].r == 2


def test_cards_of_a_run_that_goes_on_say_how(run, train, tmp_path):
    """From its own last checkpoint, and in a folder of its own from another run's."""
    words = ["callbacks.export.every=1", "model.lora.r=2", "trainer.max_steps=3"]
    own, other = tmp_path / "own", tmp_path / "other"
    shutil.copytree(run, own)
    assert train(*RUN, *words, f"run_dir={own}", "ckpt_path=last") == 0
    start = run / "checkpoints" / "step_00000001.ckpt"
    assert train(*RUN, *words, f"run_dir={other}", f"ckpt_path={start}") == 0
    for card in (own / "hf" / "README.md", own / "hf_steps" / "step_00000003" / "README.md"):
        first, then = card.read_text().split("```bash\n")[1].split("\n```")[0].splitlines()
        assert "ckpt_path" not in first and first.endswith(" run_dir=runs/mine")
        assert "trainer.max_steps=3" in then and then.endswith(" run_dir=runs/mine ckpt_path=last")
    (told,) = (other / "hf" / "README.md").read_text().split("```bash\n")[1].split("\n```")[0].splitlines()
    assert told.endswith(" ckpt_path=path/to/step_00000001.ckpt") and "run_dir=" not in told


def test_an_earlier_checkpoint_goes_to_a_folder_of_its_own_without_the_last_ones_results(run, train, tmp_path):
    again = tmp_path / "again"
    shutil.copytree(run, again, ignore=shutil.ignore_patterns("hf_steps"))
    first = again / "checkpoints" / "step_00000001.ckpt"
    assert train("task=export", f"run_dir={again}", f"ckpt_path={first}") == 0
    assert_same(weights(again / "hf_steps" / "step_00000001"), weights(run / "hf_steps" / "step_00000001"))
    assert train("task=export", f"run_dir={again}", f"ckpt_path={first}", f"export.folder={tmp_path / 'own'}") == 0
    assert_same(weights(tmp_path / "own"), weights(run / "hf_steps" / "step_00000001"))


def signal_while_it_writes(child: subprocess.Popen, folder: Path, number: signal.Signals) -> float:
    """Stopped by the kernel meanwhile, so that the signal finds the export half written. Returns when it came."""
    until = time.monotonic() + 240
    while not list(folder.glob(".hf.*")):
        assert child.poll() is None and time.monotonic() < until, "it never wrote an export"
        time.sleep(0.002)
    child.send_signal(signal.SIGSTOP)
    assert list(folder.glob(".hf.*")), "it was done before"
    child.send_signal(number)
    child.send_signal(signal.SIGCONT)
    return time.monotonic()


@pytest.mark.parametrize("words", [["task=export"], [*RUN, "trainer.max_steps=3", "ckpt_path=last", "model.lora.r=2"]])
def test_a_signal_while_an_export_is_written_leaves_the_earlier_one(run, process, tmp_path, words):
    """Of `lit-rl export`, and at the end of a run that went on."""
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    before = {path: path.read_bytes() for path in (folder / "hf").rglob("*") if path.is_file()}
    child = process(*words, f"run_dir={folder}")
    came = signal_while_it_writes(child, folder, signal.SIGTERM)
    output, _ = child.communicate(timeout=120)
    assert child.returncode == 128 + signal.SIGTERM and time.monotonic() - came < 15, output
    assert {path: path.read_bytes() for path in (folder / "hf").rglob("*") if path.is_file()} == before
    assert not list(folder.glob(".hf*")) and not (folder / LOCK_FILE).exists()
    if "ckpt_path=last" in words:
        assert json.loads((folder / "summary.json").read_text())["status"] == "stopped"
        assert (folder / "checkpoints" / "step_00000003.ckpt").exists() and "Go on with" in output


def test_a_reward_model_is_exported_as_one(train, tmp_path):
    run = tmp_path / "judge"
    words = ["algo=reward_model", "data=addition_pairs", "data.batch_size=4", "trainer.max_steps=1", "logger=none"]
    assert train(*words, "trainer.limit_val_batches=0", f"run_dir={run}") == 0
    (run / "hf").rename(tmp_path / "before")
    assert train("task=export", f"run_dir={run}") == 0
    assert_same(weights(run / "hf"), weights(tmp_path / "before"))
    config = [json.loads((folder / "config.json").read_text()) for folder in (run / "hf", tmp_path / "before")]
    assert config[0] == config[1] and config[0]["architectures"] == ["Qwen2ForSequenceClassification"]


def test_the_hubs_own_client_sends_the_folder(run, tmp_path):
    """A process of its own: the client reads the hub's address when it is imported."""
    root = Path(__file__).parents[2]
    with hub(token="hf_of_a_test") as stand_in:
        words = ["task=export", f"run_dir={run}", f"export.folder={tmp_path / 'sent'}", "export.push_to_hub=ann/adds"]
        settings = {"HF_ENDPOINT": stand_in.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}

        def sent(token: str) -> subprocess.CompletedProcess[str]:
            env = {**os.environ, **settings, "HF_TOKEN": token, "OMP_NUM_THREADS": "1"}
            command = [sys.executable, str(root / "train.py"), *words]
            return subprocess.run(command, env=env, capture_output=True, text=True)

        refused = sent("hf_of_nobody")
        assert refused.returncode == 8 and not stand_in.files, refused.stderr
        assert "export.push_to_hub=ann/adds failed" in refused.stderr and "is whole: set HF_TOKEN" in refused.stderr
        done = sent("hf_of_a_test")
        assert done.returncode == 0, done.stderr
        made = stand_in.made[-1]
        assert made["name"] == "adds" and "private" in (made.get("visibility"), *made)
        assert stand_in.messages == ["lit_rl, step 2"] and "/ann/adds/commit/1" in done.stdout
        files = {str(path.relative_to(tmp_path / "sent")): path for path in (tmp_path / "sent").rglob("*")}
        taken = stand_in.files["ann/adds"]
        assert taken == {name: path.read_bytes() for name, path in files.items() if path.is_file()}
        assert not any("hf_of_a_test" in text for text in (done.stdout, done.stderr))
        settings["HF_ENDPOINT"] = "http://127.0.0.1:9"  # a closed port
        unreached = sent("hf_of_a_test")
        assert unreached.returncode == 8 and "Retry" not in unreached.stderr
        assert "127.0.0.1 cannot be reached: Connection refused. The folder" in unreached.stderr
