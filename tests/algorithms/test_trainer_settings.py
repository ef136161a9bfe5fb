"""Settings of Lightning's Trainer: each does what a Lightning user expects, or is refused before weights are loaded."""

from __future__ import annotations

import copy
import json
import re
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.tuner import Tuner

from lit_rl.algorithms import GRPO, SFT, Constant, Cosine, Linear
from lit_rl.algorithms.checks import episode_checks
from lit_rl.algorithms.checks.data_and_trainer import check_process_count, check_run_length
from lit_rl.algorithms.optim.schedules import After, ScheduleByPath, check_schedule
from lit_rl.callbacks import JsonlLogger, Progress, TimedCheckpoint
from lit_rl.core.errors import ConfigError, StorageError
from lit_rl.core.rollout import Sampling
from lit_rl.data.example_module import SupervisedDataModule
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.environments import CustomEnvironment
from lit_rl.rewards import exact_match
from lit_rl.runs.rendezvous import device_count, devices_of_launcher


class Validations(L.Callback):
    def __init__(self):
        self.at: list[int] = []

    def on_validation_start(self, trainer, pl_module):
        self.at.append(trainer.global_step)


def made(method, **changes):
    """Three optimizer steps of one micro-batch an epoch, and one batch of validation."""
    if method is SFT:
        rows = [{"prompt": f"{i}+1=", "completion": f"{i + 1}"} for i in range(8)]
        return SFT("tiny", **changes), SupervisedDataModule(rows=rows, batch_size=2, val_fraction=0.25)
    rows = [{"prompt": f"{i}+1=", "answer": f"{i + 1}"} for i in range(8)]
    module = GRPO("tiny", exact_match, group_size=2, sampling=Sampling(max_new_tokens=2), **changes)
    return module, RolloutDataModule(rows=rows, prompts_per_rollout=2, val_fraction=0.25)


def fitted(method, module=None, ckpt_path=None, changes=(), **settings):
    own, data = made(method, **dict(changes))
    quiet = {"accelerator": "cpu", "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 2}
    quiet |= {"num_sanity_val_steps": 0}
    trainer = L.Trainer(**quiet | {"logger": False, "enable_model_summary": False} | settings)
    module = own if module is None else module(own)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return trainer, own


REFUSED = {
    "interval": (
        {"val_check_interval": 100},
        r"val_check_interval=100 .* an epoch of this run has 3.*every_n_epoch=null",
    ),
    "interval-0": ({"val_check_interval": 0}, "To leave validation out, set trainer.limit_val_batches=0"),
    "interval-0.0": ({"val_check_interval": 0.0}, "To leave validation out, set trainer.limit_val_batches=0"),
    "every-0": ({"check_val_every_n_epoch": 0}, r"check_val_every_n_epoch=0 .* \[1, inf\]"),
    "every--1": ({"check_val_every_n_epoch": -1}, r"check_val_every_n_epoch=-1 .* \[1, inf\]"),
    "sanity": ({"num_sanity_val_steps": -2}, r"num_sanity_val_steps=-2 .* \[-1, inf\]"),
    "log": ({"log_every_n_steps": -1}, r"log_every_n_steps=-1 .* \[0, inf\]"),
    "clip": ({"gradient_clip_val": -1}, r"gradient_clip_val=-1 .* \[0, inf\]"),
    "val-share": ({"limit_val_batches": 0.01}, r"limit_val_batches=0.01 takes no batch: the validation has 1"),
    "train-share": (
        {"limit_train_batches": 0.3},
        r"limit_train_batches=0.3 takes no batch: an epoch has 3.*from 0.334",
    ),
    "overfit": ({"overfit_batches": 0.5}, r"overfit_batches=0.5 takes no batch: the validation has 1"),
    "endless": ({"max_epochs": -1, "max_time": "00:00:01:00"}, "the number of steps is unknown"),
    "es-late": (
        {"max_steps": 2, "callbacks": [EarlyStopping("val/x")]},
        "ends after 2 .* the first validation, which comes",
    ),
    "es-none": ({"limit_val_batches": 0, "callbacks": [EarlyStopping("val/x")]}, "it validates nothing"),
    "es-far": ({"check_val_every_n_epoch": 3, "callbacks": [EarlyStopping("val_loss")]}, "comes after 9"),
}


@pytest.mark.parametrize(
    ("case", "method"), [*((case, GRPO) for case in REFUSED), *((case, SFT) for case in ("interval", "log", "endless"))]
)
def test_what_no_run_can_use_is_refused_before_weights_are_loaded(case, method):
    settings, said = REFUSED[case]
    module, data = made(method)
    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "max_epochs": 2}
    with pytest.raises(ConfigError, match=said):
        L.Trainer(**quiet | copy.deepcopy(settings)).fit(module, datamodule=data)
    assert module.policy is None


@pytest.mark.parametrize(
    ("settings", "at"),
    [
        ({"val_check_interval": 2}, [2, 5]),
        ({"val_check_interval": 4, "check_val_every_n_epoch": None}, [4]),
        ({"val_check_interval": 100, "limit_val_batches": 0}, []),
        ({"check_val_every_n_epoch": 2}, [6]),
    ],
)
def test_validation_comes_where_lightning_has_it(settings, at):
    seen = Validations()
    fitted(SFT, callbacks=[seen], **settings)
    assert seen.at == at


@pytest.mark.parametrize(
    ("interval", "every", "first"),
    [(1.0, 1, 10), (0.25, 1, 2), (4, 1, 4), (4, 3, 24), (1.0, 2, 20), (25, None, 25), (1.0, None, 10)],
)
def test_a_monitor_of_a_validation_needs_as_many_steps(interval, every, first):
    """As Lightning's loop counts: a share of the epoch in whole micro-batches, a number within every n-th epoch."""
    trainer: SimpleNamespace = SimpleNamespace(
        **{"fast_dev_run": False, "limit_train_batches": 1.0, "limit_val_batches": 1.0, "overfit_batches": 0.0},
        **{"val_check_interval": interval, "check_val_every_n_epoch": every, "accumulate_grad_batches": 1},
        callbacks=[EarlyStopping("val/loss")],
    )
    check_run_length(trainer, 10, first, [3])
    with pytest.raises(ConfigError, match=f"the first validation, which comes after {first}"):
        check_run_length(trainer, 10, first - 1, [3])


def test_a_metric_of_the_training_that_is_not_in_its_first_line_is_refused_at_the_first_step():
    with pytest.raises(ConfigError, match=r"EarlyStopping\(monitor='train/rewrd'\).* Did you mean 'train/reward'"):
        fitted(GRPO, callbacks=[EarlyStopping("train/rewrd")])


class LogsLate:
    """A reward that logs a metric from its third batch on."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, completions, log_metric):
        self.calls += 1
        if self.calls > 2:
            log_metric("late", float(self.calls))
        return [float(len(completion)) for completion in completions]


def fitted_late(strict: bool, **settings):
    """Five steps of a reward that logs from its third batch on, under a callback that watches what it logs."""
    stops = EarlyStopping("train/late", mode="max", patience=9, strict=strict)

    def module(own):
        return GRPO("tiny", LogsLate(), group_size=2, sampling=own.sampling)

    trainer, _ = fitted(GRPO, module, callbacks=[stops], max_steps=5, **settings)
    return trainer, stops


def test_a_monitor_waits_for_a_metric_that_a_function_logs_in_some_rollouts():
    trainer, stops = fitted_late(True, limit_val_batches=0)
    assert trainer.global_step == 5
    assert stops.best_score >= 3.0
    trainer, stops = fitted_late(False, val_check_interval=1)
    assert trainer.global_step == 5
    assert stops.best_score >= 3.0


def test_a_monitor_that_cannot_wait_is_refused_at_the_first_validation():
    with pytest.raises(ConfigError, match=r"'train/late'\) watches"):
        fitted_late(True, val_check_interval=1)


# ---------------------------------------------------------------------- the last steps


@pytest.mark.parametrize(
    ("method", "changes", "settings", "steps"),
    [
        (SFT, {}, {"max_steps": 5, "log_every_n_steps": 3}, [3, 5]),
        (SFT, {}, {"max_steps": 6, "log_every_n_steps": 3}, [3, 6]),
        (SFT, {}, {"max_steps": 2, "log_every_n_steps": 0}, []),
        (GRPO, {"minibatches": 2}, {"max_steps": 3}, [2, 3]),
        (GRPO, {}, {"max_steps": 4, "log_every_n_steps": 3}, [3, 4]),
        (GRPO, {}, {"max_epochs": 1, "log_every_n_steps": 2}, [2, 3]),
    ],
)
def test_the_last_step_has_a_line_of_its_own_numbers(tmp_path, capfd, method, changes, settings, steps):
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    callbacks = [Progress(seconds_between_lines=1e6)]
    settings = {"log_every_n_steps": 1, "limit_val_batches": 0, "max_epochs": 9} | settings
    trainer, module = fitted(
        method, changes=changes.items(), logger=logger, callbacks=callbacks, enable_progress_bar=True, **settings
    )
    lines = [json.loads(line) for line in logger.path.read_text().splitlines()] if logger.path.exists() else []
    assert [line["step"] for line in lines] == steps
    said = capfd.readouterr().out
    if steps:
        assert lines[-1]["train/lr"] > 0, "of the step itself, not of one that never comes"
        assert f"loss={lines[-1]['train/loss']:.3f}" in said.splitlines()[-1]
        assert module.metrics_step == trainer.global_step and "at step" not in said


def test_the_line_of_the_last_steps_is_that_of_these_steps_and_changes_nothing():
    """The averages go on for a run that is made longer: the line of steps 4 to 6 is the mean of them."""
    _, module = fitted(SFT, max_steps=5, log_every_n_steps=3, limit_val_batches=0, max_epochs=9)
    held = module.rank_state()["averages"]["means"]["loss"]
    shown = float(module.trainer.callback_metrics["train/loss"])
    assert shown == pytest.approx(float(held[0] / held[1]))


def test_numbers_of_an_earlier_step_are_called_so():
    bar = Progress()
    bar._bar, bar._began = SimpleNamespace(total=9), (0.0, 0)
    module, trainer = SimpleNamespace(metrics_step=3), SimpleNamespace(global_step=4)
    assert "at step 3: reward=1" in bar._line(trainer, module, {"reward": "reward=1"})
    module.metrics_step = 4
    assert "at step" not in bar._line(trainer, module, {"reward": "reward=1"})


# ---------------------------------------------------------------------- schedules


@pytest.mark.parametrize(
    "schedule",
    [
        *(kind(warmup_steps=100) for kind in (Linear, Cosine, Constant)),
        ScheduleByPath("torch.optim.lr_scheduler.StepLR", 100, {"step_size": 1}),
        After(5, Linear(100)),
    ],
)
def test_a_warm_up_that_the_run_does_not_end_is_said(schedule, caplog):
    with caplog.at_level("INFO"):
        check_schedule(schedule, 100)
        assert not caplog.messages
        check_schedule(schedule, 20)
    assert re.search("warmup_steps=100, and the run has 20 optimizer steps: .* 20% of optimizer.lr", caplog.text)


# ---------------------------------------------------------------------- the best checkpoint


def test_of_equal_scores_the_earliest_checkpoint_stays():
    """As Lightning, transformers and Keras have it: another one has to be better."""
    best = TimedCheckpoint(monitor="val/reward", mode="max", save_top_k=1)
    trainer = SimpleNamespace(strategy=SimpleNamespace(reduce_boolean_decision=lambda decision: decision))
    assert best.check_monitor_top_k(trainer, torch.tensor(1.0))
    best.best_k_models, best.kth_best_model_path = {"first": torch.tensor(1.0)}, "first"
    assert not best.check_monitor_top_k(trainer, torch.tensor(1.0))
    assert best.check_monitor_top_k(trainer, torch.tensor(1.01))


# ---------------------------------------------------------------------- processes, tuners, checkpoints


def test_torchrun_gives_the_devices_that_nobody_typed(monkeypatch):
    assert devices_of_launcher("auto") == "auto"
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert devices_of_launcher("auto") == 2 and devices_of_launcher(1) == 1
    check_process_count(2, 2)
    with pytest.raises(ConfigError, match="torchrun started 4 processes.*trainer.devices=1.*devices=2 .*num_nodes=2"):
        check_process_count(1, 1)
    assert [device_count(each) for each in (2, "2", "0,1", [0, 1], "auto", -1)] == [2, 2, 2, 2, None, None]
    with pytest.raises(ConfigError, match="torchrun started 4 processes"):
        fitted(SFT, devices=1)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04abc", b"no zip at all"])
def test_a_file_that_is_no_checkpoint_is_called_so(tmp_path, content):
    (tmp_path / "x.ckpt").write_bytes(content)
    with pytest.raises(StorageError, match=r"x\.ckpt' is no checkpoint: "):
        fitted(SFT, ckpt_path=tmp_path / "x.ckpt")


def test_what_lightning_does_to_other_modules_is_answered():
    module, data = made(GRPO)
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, max_steps=1)
    with pytest.raises(ConfigError, match=r"Tuner.lr_find .*lit-rl train -m optimizer.lr="):
        Tuner(trainer).lr_find(module, datamodule=data)
    module, data = made(SFT)
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, max_steps=1)
    with pytest.raises(ConfigError, match=r"Tuner.scale_batch_size .*SFT\(micro_batch_size='auto'\)"):
        Tuner(trainer).scale_batch_size(module, datamodule=data)
    with pytest.raises(ConfigError, match=r"torch\.compile\(SFT\(\.\.\.\)\)"):
        fitted(SFT, module=torch.compile)


# ---------------------------------------------------------------------- sizes of env that nobody typed


class Game:
    def reset(self, **columns):
        return "Say 1."

    def step(self, action):
        return "no", float("1" in action), True, False, {}


@pytest.mark.parametrize(
    ("given", "holds", "sizes"),
    [
        ({}, 512, (380, 126)),  # 512 - 6 of the prompt; a quarter of that for what it begins with
        ({}, 8192, (2048, 512)),
        ({"max_tokens": 300}, 512, (300, 126)),
        ({"max_observation_tokens": 100}, 512, (406, 100)),
        ({"max_tokens": 600}, 512, (600, 512)),  # refused later, by what was typed
        ({}, 20, (2048, 512)),  # no room for a turn
    ],
)
def test_sizes_of_env_that_nobody_gave_fit_the_context(given, holds, sizes):
    env = CustomEnvironment(Game, **given)
    parts = lambda longest: {  # noqa: E731
        **{"the longest prompt": longest, "the tools": 0},
        **{"env.max_observation_tokens": env.max_observation_tokens, "env.max_tokens": env.max_tokens},
    }
    model = SimpleNamespace(context_length=holds, name="m")
    fitted_env = episode_checks.shorten_episodes(env, model, SimpleNamespace(lengths=parts), longest=6, new_tokens=16)
    assert (fitted_env.max_tokens, fitted_env.max_observation_tokens) == sizes
    assert (env.max_tokens, env.max_observation_tokens) == (
        given.get("max_tokens", 2048),
        given.get("max_observation_tokens", 512),
    )


def test_an_environment_trains_in_a_small_context(recwarn):
    rows = [{"prompt": f"{i}"} for i in range(4)]
    module = GRPO("tiny", lambda completions, **_: [0.0] * len(completions), env=CustomEnvironment(Game), group_size=2)
    data = RolloutDataModule(rows=rows, prompts_per_rollout=2, val_fraction=0)
    L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, max_steps=1).fit(module, datamodule=data)
    assert module.env.max_tokens + module.env.max_observation_tokens < module.model.context_length == 512
    assert sum("the context of tiny (512 tokens)" in str(each.message) for each in recwarn) == 1
