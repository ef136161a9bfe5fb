"""What is refused before PyTorch is loaded is refused in the words of who would have refused it later.

What is refused: `refusals.yaml`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from huggingface_hub import constants
from hydra.utils import get_object
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import AcceleratorRegistry, CPUAccelerator
from lightning.pytorch.strategies import StrategyRegistry
from omegaconf import OmegaConf

from lit_rl.cli import data_kinds, fast_checks, hydra_app, hydra_start, listing, schemas, trainer_settings
from lit_rl.cli import messages as accelerators
from lit_rl.cli import schemas as stored_schemas
from lit_rl.core.errors import BackendError, ConfigError, DataError, LitRLError
from lit_rl.core.model_paths import check_model_is_readable
from lit_rl.core.user_functions import check_function
from lit_rl.rewards.contract import load_function


def test_what_an_algorithm_needs_and_a_data_module_makes_is_what_their_classes_say() -> None:
    for table, name, none in ((data_kinds.LEARNS_FROM, "learns_from", None), (data_kinds.SERVES, "serves", (None,))):
        assert {target: getattr(get_object(target), name, none) for target in table} == table
    shipped = {each for each in schemas.TARGETS.values() if re.fullmatch(r"lit_rl\.algorithms\.\w+", each)}
    assert shipped - {"lit_rl.algorithms.Evaluation"} == data_kinds.LEARNS_FROM.keys()
    assert {each for each in schemas.TARGETS.values() if each.endswith("DataModule")} == data_kinds.SERVES.keys()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is left to Lightning")
def test_a_gpu_is_refused_where_torch_can_see_none_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    assert accelerators._built() == {"cuda": bool(torch.version.cuda), "hip": bool(torch.version.hip)}
    for word in ("auto", "cpu", "tpu", None):
        accelerators.check_accelerator(word)
    if torch.cuda.is_available():
        accelerators.check_accelerator("gpu")
    cases = [
        (True, False, False, True),
        (True, False, True, False),
        (False, False, True, True),
        (False, True, False, False),
    ]
    for cuda, hip, driver, refused in cases:
        monkeypatch.setattr(accelerators, "_built", lambda built={"cuda": cuda, "hip": hip}: built)
        monkeypatch.setattr(accelerators, "_can_be_loaded", lambda library, there=driver: there)
        if not refused:
            accelerators.check_accelerator("gpu")
            continue
        with pytest.raises(BackendError, match="trainer.accelerator=cuda, and PyTorch sees no GPU"):
            accelerators.check_accelerator("cuda")
    with pytest.raises(BackendError, match="trainer.accelerator=mps"):
        accelerators.check_accelerator("mps")
    monkeypatch.setattr(accelerators, "_built", dict)  # a version of torch that does not say it
    accelerators.check_accelerator("gpu")


def test_a_model_of_the_hub_is_missing_only_where_nothing_of_it_is_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(BackendError, match="model.name='ann/x' .* `hf download ann/x`"):
        check_model_is_readable("model.name", "ann/x")
    file = tmp_path / "models--ann--x" / "snapshots" / "1a" / "config.json"
    file.parent.mkdir(parents=True)
    file.touch()
    check_model_is_readable("model.name", "ann/x")
    check_model_is_readable("model.name", "tiny")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy")  # which may know the hub
    check_model_is_readable("model.name", "ann/y")


def test_what_is_refused_early_the_constructor_refuses_in_the_same_words() -> None:
    """Of every constructor that needs nothing else; and no default is refused."""
    asked = 0
    for path, found in listing.schema_keys()["_allowed_"].items():
        target: Any = get_object(path)
        defaults = {parameter.name: parameter.default for parameter, _ in schemas.parameters(target)}
        for name, allowed in found.items():
            fast_checks._check_value(defaults[name], allowed)
            wrong = "nonsense" if "words" in allowed else int(max(allowed["low"], -9)) - 1
            if allowed.get("low") == -math.inf:
                wrong = math.nan
            with pytest.raises(ConfigError) as early_refusal:
                fast_checks._check_value(wrong, allowed)
            if path.startswith("lit_rl.") and ".ops." not in path and _needs_nothing(target):
                with pytest.raises(ConfigError) as refusal:
                    target(**{name: wrong})
                assert str(refusal.value) == str(early_refusal.value)
                asked += 1
    assert asked > 100


@pytest.mark.parametrize("wrong", ["word", 3, ["a", 3], [3, "a"]])
def test_a_list_that_is_refused_early_the_constructor_refuses_in_the_same_words(wrong: Any) -> None:
    for built, key, check in fast_checks.LISTS:
        with pytest.raises(ConfigError) as early_refusal:
            check(key, wrong)
        targets = [path for path in schemas.TARGETS.values() if path.startswith(built)]
        assert targets
        for target in targets:
            with pytest.raises(ConfigError) as refusal:
                get_object(target)(**{key.partition(".")[2]: wrong})
            assert str(refusal.value) == str(early_refusal.value)


@functools.cache
def _needs_nothing(target: Any) -> bool:
    try:
        return target() is not None
    except (TypeError, LitRLError):
        return False


def test_what_a_config_may_say_is_let_through() -> None:
    trainer = {"_target_": "lightning.Trainer", "strategy": {"_target_": "mine.Own"}}
    for devices in ("auto", 2, "2", "-1", [0, 1], "0, 1", None):
        for precision in ("bf16-true", 32, "32", None):
            config = OmegaConf.create({"trainer": {**trainer, "devices": devices, "precision": precision}})
            fast_checks.check_values(config, whole=True)
    for devices in ("two", "0 1", [0, "a"]):
        with pytest.raises(ConfigError, match="is not a number of devices"):
            fast_checks.check_values(OmegaConf.create({"trainer": {**trainer, "devices": devices}}), whole=False)
    config = OmegaConf.create({"trainer": trainer})
    config.data = {"_target_": "lit_rl.data.prompt_module.RolloutDataModule", "prompts_per_rollout": "${nowhere}"}
    fast_checks.check_values(config, whole=True)  # who builds it says so


OTHERS = ({"reward": {"fn": "./mine.py:score"}}, {"callbacks": {"own": {"_target_": "mine.Own"}}})
"""Code of others in a config."""


@pytest.mark.parametrize(("name", "word"), [("strategy", "mesh_of_mine"), ("accelerator", "chip_of_mine")])
def test_a_word_that_a_plugin_may_register_is_left_to_lightning(
    name: str, word: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ours = {"callbacks": {"print": {"_target_": "lit_rl.callbacks.Samples"}}, "data": {"path": "12:30"}}
    trainer = {"_target_": "lightning.Trainer", name: word}
    for other in OTHERS:  # what the config names may register it as it is imported
        fast_checks.check_values(OmegaConf.create({"trainer": trainer, **other}), whole=True)
    config = OmegaConf.create({"trainer": trainer, **ours})
    with pytest.raises(ConfigError, match=f"trainer.{name}='{word}' is unknown"):
        fast_checks.check_values(config, whole=True)

    with monkeypatch.context() as patch:  # an installed plugin of Lightning's
        installed = tmp_path / "plugin_of_mine-1.0.dist-info"
        installed.mkdir()
        (installed / "METADATA").write_text("Name: plugin_of_mine\nVersion: 1.0\n")
        (installed / "entry_points.txt").write_text("[lightning.pytorch.callbacks_factory]\nown = mine:callbacks\n")
        patch.syspath_prepend(tmp_path)
        fast_checks.check_values(config, whole=True)
    with monkeypatch.context() as patch:  # the words of another Lightning are not those that were written down
        patch.setattr(stored_schemas, "schema_versions", lambda: {"lightning": "9.9"})
        fast_checks.check_values(config, whole=True)
    registry: Any = StrategyRegistry if name == "strategy" else AcceleratorRegistry
    registry.register(word, CPUAccelerator)  # by the script that calls
    try:
        fast_checks.check_values(config, whole=True)
    finally:
        registry.remove(word)
    with pytest.raises(ConfigError, match=f"trainer.{name}='{word}' is unknown"):
        fast_checks.check_values(config, whole=True)


def test_a_warm_up_that_ends_behind_the_run_is_refused_where_it_was_typed() -> None:
    config = OmegaConf.create({"trainer": {"max_steps": 20}, "scheduler": {"warmup_steps": 100}})
    with pytest.raises(ConfigError, match="warmup_steps=100 is more than .* 20% of optimizer.lr"):
        fast_checks.check_warmup(config, ["scheduler.warmup_steps"])
    fast_checks.check_warmup(config, ["trainer.max_steps"])
    fast_checks.check_warmup(OmegaConf.merge(config, {"trainer": {"max_steps": 100}}), ["scheduler.warmup_steps"])


def test_the_lengths_that_are_refused_early_are_those_that_lightning_refuses() -> None:
    for name, value in (("max_steps", -2), ("max_epochs", -2), ("max_time", "1h"), ("max_time", "1:1:1:1")):
        with pytest.raises(ConfigError) as early_refusal:
            fast_checks.check_values(OmegaConf.create({"trainer": {name: value}}), whole=True)
        with pytest.raises(MisconfigurationException) as refusal:
            L.Trainer(logger=False, accelerator="cpu", **{name: value})
        for words in re.findall("must be a non-negative integer or -1|not a valid duration", str(refusal.value)):
            assert words in str(early_refusal.value)
    with pytest.raises(ConfigError, match="above 0"):  # Lightning takes it, and divides by it
        fast_checks.check_values(OmegaConf.create({"trainer": {"val_check_interval": 0}}), whole=True)
    for interval in ("abc", -1, 1.5, -0.5, "00:01:00", 0.5, 1.0, 7, 2.0, "00:01:00:00", None):
        trainer = {"val_check_interval": interval}
        refused = False
        try:
            L.Trainer(logger=False, accelerator="cpu", **trainer)
        except MisconfigurationException:
            refused = True
        with pytest.raises(ConfigError, match="val_check_interval") if refused else contextlib.nullcontext():
            fast_checks.check_values(OmegaConf.create({"trainer": trainer}), whole=True)
    for name, value in (("max_steps", -1), ("max_steps", 0), ("max_epochs", -1), ("max_time", " 00:01:00:00 ")):
        fast_checks.check_values(OmegaConf.create({"trainer": {name: value}}), whole=True)
        L.Trainer(logger=False, accelerator="cpu", **{name: value})


def test_beside_other_processes_the_run_s_folder_and_checkpoint_are_left_to_where_they_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 tells them that it fails, and a checkpoint may be on its machine alone; data is looked at by each."""
    (tmp_path / "taken").touch()
    config = OmegaConf.create({"task": "fit", "run_dir": str(tmp_path / "taken"), "ckpt_path": "none.ckpt"})
    config.data = {"_target_": "lit_rl.data.prompt_module.RolloutDataModule", "path": None}
    monkeypatch.setenv("RANK", "0")
    fast_checks.check_config(config)
    config.data.path = "none.jsonl"
    with pytest.raises(DataError, match="no such file or folder"):
        fast_checks.check_config(config)


def test_a_schema_comes_back_as_the_constructor_made_it() -> None:
    for name, node in schemas.all_schemas().items():
        again = stored_schemas.restore_schema(name, stored_schemas.stored_fields(node))
        assert _fields(again) == _fields(node), name


def _fields(node: Any) -> list[object]:
    return [
        (field.name, _fields(field.type) if dataclasses.is_dataclass(field.type) else field.type, _default(field))
        for field in dataclasses.fields(node)
    ]


def _default(field: dataclasses.Field) -> object:
    made = None if field.default_factory is dataclasses.MISSING else field.default_factory()
    return repr(field.default if made is None else type(made) if dataclasses.is_dataclass(made) else made)


def test_schemas_of_another_lightning_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_schemas, "schema_versions", lambda: {"lightning": "99.0"})
    assert not stored_schemas.register_stored.__wrapped__()


def test_every_task_has_something_that_runs_it() -> None:
    assert set(hydra_start.TASKS) == {
        *hydra_app.TASKS, *hydra_app._WITHOUT_A_RUN, *hydra_start._OF_FILES, "replay",
    }  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "from elsewhere import *",
        "import elsewhere as score",
        "globals()['score'] = print",
        "for score in (1, 2): pass",
        "def __getattr__(name): ...",
        "if True:\n    def score(): ...",
        "this is no Python",
    ],
)
def test_a_file_that_may_have_the_name_is_left_to_the_import(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    check_function(f"{tmp_path / 'mine.py'}:score", "reward.fn")


@pytest.mark.parametrize("path", ["mine.py:scor", "none.py:score"])
def test_the_early_message_is_the_late_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def score(): ...\nclass Other: ...\ndef _hidden(): ...\n")
    said = []
    for look in (check_function, load_function):
        with pytest.raises(ConfigError) as refused:
            look(path, "reward.fn")
        said.append(str(refused.value))
    assert said[0] == said[1]


def test_an_address_is_no_folder_to_make(tmp_path, monkeypatch):
    """Lightning writes there by fsspec."""
    monkeypatch.chdir(tmp_path)
    trainer_settings._check_root("s3://bucket/runs")
    trainer_settings._check_root("made")
    assert [each.name for each in tmp_path.iterdir()] == ["made"]


def test_a_profiler_is_named_in_any_case_as_in_lightning():
    fast_checks.check_values(OmegaConf.create({"trainer": {"profiler": "Simple"}}), whole=True)
