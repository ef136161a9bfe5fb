"""What a run sends to the hub by the hub's own client, `samples/` and exports: no failure of it ends a run."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from hub_stand_in import HubStandIn, hub
from huggingface_hub import constants
from lightning.pytorch.trainer.states import TrainerFn
from runs_helpers import SMALL

from lit_rl.callbacks import Export, GracefulStop, HubSamples
from lit_rl.callbacks.hub_samples import CARD
from lit_rl.callbacks.output_files import write_parquet
from lit_rl.core import machine
from lit_rl.core.errors import ConfigError


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch):
    with hub(token="hf_of_a_test") as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
        yield found


def trainer(folder: Path, **changes: Any) -> Any:
    fields = {"default_root_dir": str(folder), "is_global_zero": True, "fast_dev_run": False, "global_step": 3}
    return SimpleNamespace(**fields | {"callbacks": []} | changes)


def put(folder: Path, *names: str) -> None:
    (folder / "samples").mkdir(parents=True, exist_ok=True)
    for name in names:
        write_parquet({"step": [0], "prompt": [name], "reward": [0.0]}, folder / "samples" / name)


BATCH: Any = (None, None, None, 0)


def held(stand_in: HubStandIn) -> set[str]:
    return set(stand_in.files.get("ann/said", {}))


def test_what_is_new_is_sent_what_was_joined_is_removed_and_files_of_others_stay(stand_in, tmp_path):
    run, callback = tmp_path / "a" / "x", HubSamples("ann/said")
    stand_in.files["ann/said"] = {"README.md": b"mine", "other/step_00000000.parquet": b"", "a_x/notes.txt": b"",
                                  "a_x/step_00000009.parquet": b"of a later step"}  # fmt: skip
    put(run, "step_00000000.parquet", "step_00000001.parquet", "mine.parquet")
    callback.teardown(trainer(run), None, "fit")  # pyright: ignore
    theirs = {"README.md", "other/step_00000000.parquet", "a_x/notes.txt"}
    assert held(stand_in) == theirs | {"a_x/step_00000000.parquet", "a_x/step_00000001.parquet"}
    (made,) = stand_in.made
    assert made["type"] == "dataset" and "private" in (made.get("visibility"), *made)
    assert stand_in.files["ann/said"]["README.md"] == b"mine" and stand_in.messages == ["lit_rl, a_x, step 3"]

    (run / "samples" / "step_00000000.parquet").rename(run / "samples" / "step_00000000-00000000.parquet")
    callback.teardown(trainer(run), None, "fit")  # pyright: ignore
    assert held(stand_in) == theirs | {"a_x/step_00000000-00000000.parquet", "a_x/step_00000001.parquet"}
    callback.teardown(trainer(run), None, "fit")  # pyright: ignore
    assert len(stand_in.messages) == 2 and len(stand_in.made) == 1, "nothing was new"


def test_runs_of_one_name_in_two_folders_keep_their_files(stand_in, tmp_path):
    """As the jobs of two sweeps."""
    for sweep in ("first", "second"):
        put(tmp_path / sweep / "0", f"step_0000000{len(sweep)}.parquet")
        HubSamples("ann/said").teardown(trainer(tmp_path / sweep / "0"), None, "fit")  # pyright: ignore
    files = {"first_0/step_00000005.parquet", "second_0/step_00000006.parquet"}
    assert held(stand_in) == files | {"README.md"}


def test_it_is_sent_when_the_minutes_are_over_and_by_rank_0_alone(stand_in, tmp_path):
    put(tmp_path / "a" / "x", "step_00000000.parquet")
    later, now = HubSamples("ann/said"), HubSamples("ann/said", minutes=1e-9)
    later.on_train_batch_end(trainer(tmp_path / "a" / "x"), *BATCH)
    now.on_train_batch_end(trainer(tmp_path / "a" / "x", is_global_zero=False), *BATCH)
    HubSamples().teardown(trainer(tmp_path / "a" / "x"), None, "fit")  # pyright: ignore
    assert not stand_in.made
    now.on_train_batch_end(trainer(tmp_path / "a" / "x"), *BATCH)
    until(lambda: held(stand_in))
    assert held(stand_in) == {"README.md", "a_x/step_00000000.parquet"}
    assert stand_in.files["ann/said"]["README.md"].decode() == CARD
    told = yaml.safe_load(CARD.split("---")[1])["configs"]
    assert [each["config_name"] for each in told] == ["rollouts", "tokens", "validations"]


def until(true: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_push_is_beside_the_training_alone_and_of_a_copy(stand_in, tmp_path):
    run, callback = tmp_path / "a" / "x", HubSamples("ann/said", minutes=1e-9)
    put(run, "step_00000000.parquet")
    first = run / "samples" / "step_00000000.parquet"
    content = first.read_bytes()
    stand_in.answers.clear()
    callback.on_train_batch_end(trainer(run), *BATCH)
    first.write_bytes(b"joined, or cut back")
    first.unlink()  # while its push begins
    put(run, "step_00000001.parquet")
    until(lambda: stand_in.at_once)
    for step in range(3):
        callback.on_train_batch_end(trainer(run, global_step=4 + step), *BATCH)
    assert not stand_in.messages and stand_in.at_once == 1, "steps went on, and none began a second push"

    threading.Timer(0.2, stand_in.answers.set).start()
    callback.teardown(trainer(run, global_step=9), None, "fit")  # pyright: ignore
    assert stand_in.messages == ["lit_rl, a_x, step 3", "lit_rl, a_x, step 9"] and stand_in.most_at_once == 1
    assert stand_in.earlier["ann/said"][0]["a_x/step_00000000.parquet"] == content
    assert held(stand_in) == {"README.md", "a_x/step_00000001.parquet"}, "the last state"


def test_the_end_waits_no_longer_than_it_may_and_a_signal_not_at_all(stand_in, tmp_path):
    put(tmp_path / "a" / "x", "step_00000000.parquet")
    stop = GracefulStop()
    stop.signum = 15
    HubSamples("ann/said").teardown(trainer(tmp_path / "a" / "x", callbacks=[stop]), None, "fit")  # pyright: ignore
    assert not stand_in.made
    stand_in.answers.clear()
    callback = HubSamples("ann/said", wait=0.1)
    with pytest.warns(UserWarning, match="HubSamples failed .*: it was not over after 0.1 seconds"):
        callback.teardown(trainer(tmp_path / "a" / "x"), None, "fit")  # pyright: ignore


@pytest.mark.parametrize("there", ["http://127.0.0.1:9", "http://hub.invalid"])
def test_a_hub_that_cannot_be_reached_is_not_waited_for(there, tmp_path, monkeypatch):
    """A closed port, and a name that has no address: minutes, with the client's retries, of the listing."""
    for proxy in machine._PROXIES:
        monkeypatch.delenv(proxy, raising=False)
    monkeypatch.setattr(machine, "_offline_by_lit_rl", False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", there)
    put(tmp_path / "a" / "x", "val_00000000_t0.0.parquet")
    began = time.monotonic()
    with pytest.warns(UserWarning, match="ConnectionError: the hub was not asked"):
        HubSamples("ann/said").teardown(trainer(tmp_path / "a" / "x"), None, "validate")  # pyright: ignore
    assert time.monotonic() - began < 10


@pytest.mark.all
def test_a_run_whose_hub_refuses_it_ends_well_and_its_next_part_sends_all(stand_in, train, tmp_path, monkeypatch):
    words = [*SMALL, "callbacks.hub_samples.repo=ann/said", "callbacks.hub_samples.private=false"]
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    with pytest.warns(UserWarning, match="HubSamples failed in sending samples to ann/said") as warned:
        assert train(*words, "trainer.max_steps=1", f"run_dir={tmp_path / 'run'}") == 0
    assert len([each for each in warned if "HubSamples" in str(each.message)]) == 1 and not stand_in.files
    assert re.search("HubSamples, [0-9]+ calls failed", (tmp_path / "run" / "summary.json").read_text())

    monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
    stand_in.answers.clear()  # until the run has trained three steps more, while its first push is under way

    def trained() -> None:
        until(lambda: stand_in.at_once and '"step": 4' in (tmp_path / "run" / "metrics.jsonl").read_text())
        went_on.append(True)
        stand_in.answers.set()

    went_on: list[bool] = []
    watch = threading.Thread(target=trained)
    watch.start()
    words += ["callbacks.hub_samples.minutes=1e-9", "trainer.max_steps=4"]
    assert train(*words, f"run_dir={tmp_path / 'run'}", "ckpt_path=last") == 0
    watch.join()
    assert went_on and stand_in.most_at_once == 1
    sent = {path.removeprefix(f"{tmp_path.name}_run/"): content for path, content in stand_in.files["ann/said"].items()}
    del sent["README.md"]
    assert sent == {path.name: path.read_bytes() for path in (tmp_path / "run" / "samples").iterdir()}
    assert any(name.startswith("val_00000004") for name in sent), "the validation behind the training too"
    assert "private" not in (
        stand_in.made[-1].get("visibility"),
        *(k for k, v in stand_in.made[-1].items() if v is True),
    )


# ------------------------------------------------------------------ exports


class Run:
    """A training with the callback: `step(n)` ends optimizer step n, `validated(reward)` a validation."""

    def __init__(self, folder: Path, mode: str = "max", **settings: Any) -> None:
        self.callback = Export(str(folder), **settings)
        self.module: Any = SimpleNamespace(
            policy=torch.nn.Linear(1, 1), model=SimpleNamespace(name="tiny"), export=self._written
        )
        self.trainer: Any = trainer(
            folder, global_step=0, callback_metrics={}, sanity_checking=False, datamodule=None,
            checkpoint_callback=SimpleNamespace(monitor="val/reward", mode=mode),
            state=SimpleNamespace(fn=TrainerFn.FITTING),
            strategy=SimpleNamespace(barrier=lambda: None, broadcast=lambda value: value),
        )  # fmt: skip
        self.callback.setup(self.trainer, self.module, "fit")
        self.callback.on_train_start(self.trainer, self.module)

    def _written(self, weights: Any, folder: Path, card: Any) -> None:
        folder.mkdir(parents=True)
        (folder / "model.txt").write_text(f"step {self.trainer.global_step}")

    def step(self, number: int, beside: bool = False) -> None:
        self.trainer.global_step = number
        self.callback.on_train_batch_end(self.trainer, self.module, None, None, 0)
        if not beside:
            until(lambda: not self.callback._pushes.busy())

    def validated(self, reward: float) -> None:
        self.trainer.callback_metrics = {"val/reward": torch.tensor(reward)}
        self.callback.on_validation_end(self.trainer, self.module)
        until(lambda: not self.callback._pushes.busy())

    def end(self) -> None:
        self.callback.on_train_end(self.trainer, self.module)
        self.callback.teardown(self.trainer, self.module, "fit")


def on_hub(stand_in: HubStandIn, branch: str = "") -> str:
    return stand_in.files.get(f"ann/adds{branch}", {}).get("model.txt", b"").decode()


def test_every_export_is_sent_and_the_last_step_too(stand_in, tmp_path):
    run = Run(tmp_path, every=2, push_to_hub="ann/adds")
    for step in range(1, 4):
        run.step(step)
    assert on_hub(stand_in) == "step 2" and stand_in.messages == ["lit_rl, step 2"]
    run.end()
    assert on_hub(stand_in) == "step 3" and stand_in.messages == ["lit_rl, step 2", "lit_rl, step 3"]
    (made, *_) = stand_in.made
    assert made["name"] == "adds" and "private" in (made.get("visibility"), *made) and "type" not in made


@pytest.mark.parametrize(("mode", "sign"), [("max", 1), ("min", -1)])
def test_the_best_is_on_main_alone_in_its_folder_and_the_newest_on_a_branch(stand_in, tmp_path, mode, sign):
    run = Run(tmp_path, mode, every=1, best=True, push_to_hub="ann/adds")
    for step, reward in enumerate([0.2, float("nan"), 0.5, 0.4, 0.5], start=1):
        run.step(step)
        run.validated(sign * reward)
    run.end()
    assert on_hub(stand_in) == "step 3" and on_hub(stand_in, "@newest") == "step 5"
    assert f"lit_rl, step 3, best val/reward {sign * 0.5:g}" in stand_in.messages
    assert sorted(each.name for each in tmp_path.glob("best_*")) == ["best_00000003"]
    resumed = Run(tmp_path, mode, best=True)
    resumed.callback.load_state_dict(run.callback.state_dict())
    resumed.step(6)
    resumed.validated(sign * 0.45)
    assert (tmp_path / "best_00000003").exists(), "a resumed run knows the best"
    resumed.validated(sign * 0.6)
    assert [each.name for each in tmp_path.glob("best_*")] == ["best_00000006"]


def test_a_push_that_fails_is_warned_of_and_the_next_or_the_end_makes_up_for_it(stand_in, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    run = Run(tmp_path, every=1, push_to_hub="ann/adds")
    with pytest.warns(UserWarning, match="Export failed in sending weights to ann/adds"):
        run.step(1)
    run.step(2)
    assert run.callback.unwritten.failures == 2 and not stand_in.files
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
    run.end()
    assert stand_in.messages == ["lit_rl, step 2"], "what failed last is tried once more"


def test_steps_go_on_beside_a_push_and_the_newest_follows_it(stand_in, tmp_path):
    run = Run(tmp_path, every=1, push_to_hub="ann/adds", wait=30.0)
    stand_in.answers.clear()
    run.step(1, beside=True)
    until(lambda: stand_in.at_once)
    for step in (2, 3):
        run.step(step, beside=True)
    assert not stand_in.messages and stand_in.at_once == 1
    threading.Timer(0.2, stand_in.answers.set).start()
    run.end()
    assert stand_in.messages == ["lit_rl, step 1", "lit_rl, step 3"] and stand_in.most_at_once == 1
    late = Run(tmp_path / "late", every=1, push_to_hub="ann/adds", wait=0.1)
    stand_in.answers.clear()
    late.step(1, beside=True)
    with pytest.warns(UserWarning, match="it was not over after 0.1 seconds"):
        late.end()


def test_what_would_send_nothing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"callbacks.export.push_to_hub=ann/adds.*callbacks.export.best=true"):
        Export("x", push_to_hub="ann/adds")
    with pytest.raises(ConfigError, match=r"callbacks.export.push_to_hub='adds' has no owner"):
        Export("x", every=1, push_to_hub="adds")
    run = Run(tmp_path, best=True)
    run.trainer.checkpoint_callback.monitor = "step"
    with pytest.raises(ConfigError, match=r"callbacks.checkpoint.monitor=step, which is no metric"):
        run.callback.setup(run.trainer, run.module, "fit")
    run.trainer.checkpoint_callback.monitor = "val/rewrad"
    with pytest.raises(ConfigError, match=r"logged no val/rewrad.*There are: val/reward"):
        run.validated(0.5)


@pytest.mark.all
def test_a_run_sends_its_best_and_its_newest_export(stand_in, train, tmp_path):
    words = [*SMALL, "callbacks.export.every=2", "callbacks.export.best=true", "callbacks.export.push_to_hub=ann/adds"]
    words += ["callbacks.checkpoint.monitor=val/reward", "trainer.max_steps=3", "trainer.val_check_interval=1"]
    assert train(*words, f"run_dir={tmp_path}") == 0
    (best,) = (tmp_path / "hf_steps").glob("best_*")
    for folder, branch in ((best, ""), (tmp_path / "hf_steps" / "step_00000003", "@newest")):
        taken = {name: content for name, content in stand_in.files[f"ann/adds{branch}"].items() if name != "README.md"}
        assert taken == {each.name: each.read_bytes() for each in folder.iterdir() if each.name != "README.md"}
    assert not any("hf_of_a_test" in (tmp_path / name).read_text() for name in ("config.yaml", "summary.json"))
