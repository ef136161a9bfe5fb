"""Alarms: when they look, when they ring, and what a run that stops or goes back holds then."""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from alarm_runs import AtLooks, fitted, fitted_with, saved
from runs_helpers import SMALL, assert_same, newest, rows

from lit_rl.algorithms import GRPO, SFT
from lit_rl.algorithms.optim.strategies import FSDP2Strategy
from lit_rl.callbacks import (
    Alarm,
    ClippedShare,
    DeadGroups,
    EntropyCollapse,
    HeldOutFlat,
    KLBlowUp,
    LengthDrift,
    RepetitionDrift,
)
from lit_rl.callbacks import alarms as kinds
from lit_rl.core.errors import ConfigError
from lit_rl.core.rollout import Sampling
from lit_rl.data.example_module import SupervisedDataModule
from lit_rl.data.tasks import AdditionText
from lit_rl.rewards import exact_match

ENTROPY, DEAD = "train/entropy", "train/frac_reward_zero_std"


# ---------------------------------------------------------------------- what is wrong


CUT, CLIPPED = "train/completions/clipped_ratio", "train/clip_ratio/region_mean"
RINGS: dict[str, tuple[Alarm, list[Mapping[str, float]], list[int]]] = {
    "entropy": (
        EntropyCollapse(first=2, share=0.1),
        [{ENTROPY: e} for e in (3.0, 1.0, 0.21, 0.19, 0.2)],
        [0, 0, 0, 1, 0],
    ),
    "length": (
        LengthDrift(first=1, factor=2),
        [{"train/completions/mean_length": value} for value in (100.0, 200.0, 201.0, 50.0, 49.0)],
        [0, 0, 1, 0, 1],
    ),
    "repetition": (
        RepetitionDrift(first=1, rise=0.25),
        [{"train/completions/repetition": value} for value in (0.5, 0.75, 0.76, 0.0)],
        [0, 0, 1, 0],
    ),
    "groups": (DeadGroups(most=0.9), [{DEAD: 0.89}, {DEAD: 0.9}, {}], [0, 1, 0]),
    "kl": (
        KLBlowUp(most=1.0, most_in_rollout=0.2),
        [{"train/kl": 1.0, "train/approx_kl": 0.2}, {"train/kl": 1.01}, {"train/approx_kl": 0.3}],
        [0, 1, 1],
    ),
    "clipped": (
        ClippedShare(most_completions=0.5, most_tokens=0.3),
        [{CUT: 0.5, CLIPPED: 0.3}, {CUT: 0.6}, {CLIPPED: 0.31}, {CUT: 0.6, CLIPPED: 0.4}],
        [0, 1, 1, 1],
    ),
}


@pytest.mark.parametrize(("alarm", "lines", "rings"), RINGS.values(), ids=RINGS)
def test_what_is_wrong_rings(alarm: Alarm, lines: list[Mapping[str, float]], rings: list[int]) -> None:
    """Of lines of the log, in their order."""
    assert {name for line in lines for name in line} <= {*alarm.watched}, "a run shows it no other"
    assert [alarm.problem(line) is not None for line in lines] == rings
    assert alarm.problem({}) is None  # as with algo.log_entropy=false


def test_a_reward_that_rises_where_the_held_out_one_does_not():
    """Of a mean of the rollouts since the last validation; looked at where a rollout ends."""
    alarm = HeldOutFlat(rise=0.1, window=2)

    def validated(held_out: float, proxy: float) -> bool:
        assert not alarm.notice({"val/reward"}, {"val/reward": held_out})
        assert alarm.notice({"train/reward"}, {"train/reward": proxy, "val/reward": held_out})
        return alarm.problem({}) is not None

    assert not alarm.notice({"train/reward"}, {"train/reward": 0.1})  # nothing was validated yet
    for held_out, proxy, wrong in [(0.5, 0.1, 0), (0.5, 0.15, 0), (0.5, 0.19, 0), (0.5, 0.3, 1), (0.51, 0.5, 0)]:
        assert validated(held_out, proxy) == bool(wrong), (held_out, proxy)
    again = HeldOutFlat(rise=0.1, window=2)
    again.load_state_dict(json.loads(json.dumps(alarm.state_dict())))
    assert again.state_dict() == alarm.state_dict()


# ---------------------------------------------------------------------- what can never ring


class Logs(L.LightningModule):
    """Trains nothing, and logs these numbers of each step and each validation."""

    def __init__(self, training: Mapping[str, float], validation: Mapping[str, float]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.in_training, self.in_validation = training, validation

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.log_dict(dict(self.in_training))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log_dict(dict(self.in_validation), batch_size=1)

    def configure_optimizers(self) -> None:
        return None


def said_of(alarms: list[Alarm], logs: Logs, path: Path, steps: int = 8, **settings: Any) -> list[tuple[int, str]]:
    """What is said meanwhile of alarms, each with the batches that were over by then; 0 at the end."""
    said: list[tuple[int, str]] = []
    settings = {"val_check_interval": 5, "enable_progress_bar": False, "accelerator": "cpu", **settings}
    trainer = L.Trainer(
        default_root_dir=path, max_epochs=1, logger=False, enable_checkpointing=False, enable_model_summary=False,
        num_sanity_val_steps=0, callbacks=[*alarms], **settings,
    )  # fmt: skip
    with notices() as told:

        class Clock(L.Callback):
            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:  # pyright: ignore
                said.extend((trainer.fit_loop.total_batch_idx + 1, text) for text in told if "cannot ring" in text)
                told.clear()

            def on_train_end(self, trainer: Any, pl_module: Any) -> None:
                said.extend((0, text) for text in told if "cannot ring" in text)

        trainer.callbacks.append(Clock())  # pyright: ignore
        trainer.fit(logs, range(steps), range(1))  # pyright: ignore
    return said


def test_alarms_whose_metrics_are_not_logged_are_named_once_with_what_is_near_and_the_key(tmp_path: Path) -> None:
    """In training at its third line; in a validation at the first batch after one. train/kl is not train/lr."""
    alarms: list[Alarm] = [
        DeadGroups(then="stop"), ClippedShare(), HeldOutFlat(proxy="train/rewrd", held_out="val/nothing"), KLBlowUp(),
        RepetitionDrift(),
    ]  # fmt: skip
    logs = Logs({"train/reward": 1.0, "train/approx_kl": 0.0, "train/lr": 0.1}, {"val/reward": 1.0})
    first, second = said_of(alarms, logs, tmp_path)
    ends = (
        "Alarms that cannot ring, as this run does not log what they watch: ",
        ". callbacks.<name>=null leaves one out.",
    )
    assert [first[0], second[0]] == [3, 6]
    assert first[1].removeprefix(ends[0]).removesuffix(ends[1]) == (
        "dead_groups (train/frac_reward_zero_std), then=stop; "
        "clipped_share (train/completions/clipped_ratio; train/clip_ratio/region_mean); "
        "held_out_flat (train/rewrd, did you mean train/reward? Set callbacks.held_out_flat.proxy); "
        "repetition_drift (train/completions/repetition)"
    )
    assert second[1].removeprefix(ends[0]).removesuffix(ends[1]) == "held_out_flat (val/nothing)"


def test_where_every_alarm_may_ring_nothing_is_said_and_without_a_validation_none_is_waited_for(tmp_path: Path) -> None:
    logs = Logs({"train/reward": 1.0, "train/kl": 0.0}, {"val/reward": 1.0})
    assert said_of([HeldOutFlat(), KLBlowUp()], logs, tmp_path) == []
    ((at, said),) = said_of([HeldOutFlat(), KLBlowUp()], logs, tmp_path, limit_val_batches=0)
    assert at == 3 and "held_out_flat (val/reward)." in said and "kl_blow_up" not in said


@pytest.mark.parametrize("stopped", [False, True])
def test_a_training_that_ends_before_its_first_validation_says_so_at_its_end(stopped: bool, tmp_path: Path) -> None:
    """Where it was stopped nobody knows: the metrics might have come."""

    class Stops(L.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:  # pyright: ignore
            trainer.should_stop = stopped

    never: dict[str, Any] = {"val_check_interval": None, "check_val_every_n_epoch": 2}
    alarms: list[Any] = [KLBlowUp(), HeldOutFlat(), Stops()]
    said = said_of(alarms, Logs({"train/kl": 1.0, "train/reward": 1.0}, {"val/reward": 1.0}), tmp_path, **never)
    assert [(at, "watch: held_out_flat (val/reward)." in text) for at, text in said] == ([] if stopped else [(0, True)])


# ---------------------------------------------------------------------- what a run does


@pytest.mark.all
def test_a_run_goes_back_to_what_was_saved_before_and_on_with_the_next_prompts(tmp_path):
    alarm = AtLooks({3, 5, 6}, then="roll_back", patience=2)
    with notices() as told:
        trainer = fitted(tmp_path, alarm)
    assert trainer.global_step == 16 and alarm.looks == 8 and alarm.rolled_back == 1
    # Wrong at the ends of rollouts 5 (step 10) and 6 (step 12): step 9 was the last that was saved while all was well.
    before, back, after = saved(tmp_path, 9), saved(tmp_path, 12), saved(tmp_path, 13)
    assert_same(back["state_dict"], before["state_dict"])
    assert_same(back["optimizer_states"][0]["state"], before["optimizer_states"][0]["state"])
    assert back["global_step"] == 12 and back["lr_schedulers"] != before["lr_schedulers"]
    rates = [each["optimizer_states"][0]["param_groups"][0]["lr"] for each in (before, back, after)]
    assert rates == pytest.approx([1e-3 * (1 - step / 16) for step in (9, 12, 13)])
    tokens = [each["lit_rl"][0]["module"]["tokens_seen"] for each in (before, back, after)]
    assert tokens == sorted(tokens) and len(set(tokens)) == 3
    assert any(not torch.equal(after["state_dict"][name], back["state_dict"][name]) for name in back["state_dict"])
    (line,) = map(json.loads, (tmp_path / "alarms.jsonl").read_text().splitlines())
    assert (line["step"], line["alarm"], line["then"]) == (12, "at_looks", "roll_back")
    assert "this is look 6, 2 times in a row. The run goes on with the weights of optimizer step 9" in line["message"]
    assert told == [line["message"]]


@pytest.mark.all
def test_what_learns_from_a_data_set_goes_back_too(tmp_path: Path) -> None:
    """Wrong at the ends of steps 3 and 4: step 2 was the last that was saved while all was well."""
    alarm = AtLooks({3, 4}, then="roll_back", patience=2)
    data = SupervisedDataModule(task=AdditionText(max_operand=6, val_rows=4), batch_size=4)
    trainer = fitted_with(SFT("tiny", sampling=Sampling(max_new_tokens=6)), data, tmp_path, alarm, 5)
    assert "weights of optimizer step 2, and with the data that come next" in (tmp_path / "alarms.jsonl").read_text()
    before, back, after = (saved(tmp_path, step) for step in (2, 4, 5))
    assert trainer.global_step == 5 and alarm.rolled_back == 1
    assert_same(back["state_dict"], before["state_dict"])
    assert_same(back["optimizer_states"][0]["state"], before["optimizer_states"][0]["state"])
    assert any(not torch.equal(after["state_dict"][name], back["state_dict"][name]) for name in back["state_dict"])


@pytest.mark.all
def test_a_run_that_went_back_as_often_as_it_may_ends(tmp_path):
    alarm = AtLooks(set(range(2, 9)), then="roll_back", patience=1, roll_backs=1)
    with notices() as told:
        trainer = fitted(tmp_path, alarm, steps=4)
    back, end = (json.loads(line)["message"] for line in (tmp_path / "alarms.jsonl").read_text().splitlines())
    assert (
        "The run goes on with the weights of" in back
        and "The run was rolled back as often as allowed (roll_backs=1), and ends here" in end
    )
    assert told == [back, end]
    assert alarm.stopped_at == 6
    assert trainer.global_step == 6 and alarm.rolled_back == 1  # back at the end of rollout 2, the end at that of 3


@pytest.mark.all
def test_a_run_without_a_checkpoint_from_before_ends(tmp_path):
    """The first look is wrong; a checkpoint of another attempt, which is further on, is none of this run's."""
    alarm = AtLooks({1}, then="roll_back", patience=1)
    alarm._good.keep = lambda *a, **k: None  # pyright: ignore
    (tmp_path / "checkpoints" / "before_alarm").mkdir(parents=True)
    torch.save({"state_dict": {}, "global_step": 50}, tmp_path / "checkpoints" / "before_alarm" / "at_looks.ckpt")
    assert fitted(tmp_path, alarm, steps=3).global_step == 2
    assert "The run has no checkpoint from before that, and ends here" in (tmp_path / "alarms.jsonl").read_text()


@pytest.mark.all
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"strategy": FSDP2Strategy()}, "strategy=auto and strategy=ddp"),
        ({"enable_checkpointing": False}, "needs checkpoints"),
    ],
)
def test_a_run_that_cannot_go_back_is_refused(settings, said):
    module = GRPO("tiny", exact_match)
    trainer = L.Trainer(logger=False, accelerator="cpu", devices=1, enable_progress_bar=False, **settings)
    with pytest.raises(ConfigError, match=f"callbacks.kl_blow_up.then=roll_back .*{said}"):
        KLBlowUp(then="roll_back").setup(trainer, module, "fit")


@pytest.mark.all
def test_alarms_that_warn_change_no_bit_and_one_that_stops_ends_a_run(train, tmp_path, capsys):
    quick = [*SMALL, "trainer.max_steps=6", "algo.minibatches=2", "algo.beta=0.01"]
    assert train(*quick, f"run_dir={tmp_path / 'plain'}") == 0
    there = {name for row in rows(tmp_path / "plain") for name in row}
    assert {(alarm.key, name) for alarm in every_kind() for name in alarm.watched if name not in there} == set()
    loud = ["callbacks=alarms", "callbacks.kl_blow_up.most_in_rollout=1e-30", "callbacks.kl_blow_up.patience=2"]
    loud.append("callbacks.held_out_flat.proxy=train/rewrd")
    with notices() as told:
        assert train(*quick, *loud, f"run_dir={tmp_path / 'loud'}") == 0
    assert_same(newest(tmp_path / "loud")["state_dict"], newest(tmp_path / "plain")["state_dict"])
    assert rows(tmp_path / "loud") == rows(tmp_path / "plain")
    (line,) = (tmp_path / "loud" / "alarms.jsonl").read_text().splitlines()  # once, until it is right again
    said, silent, at_the_end = told
    assert "watch: held_out_flat (val/reward)." in at_the_end, "validated before and after, and never between"
    assert silent.startswith("Alarms that cannot ring") and "watch: held_out_flat (train/rewrd, did you" in silent
    assert said == json.loads(line)["message"] and said.startswith("Alarm kl_blow_up at optimizer step 4: ")
    assert ", 2 times in a row. " in said
    capsys.readouterr()
    with notices() as told:
        assert train(*quick, *loud, "callbacks.kl_blow_up.then=stop", f"run_dir={tmp_path / 'ended'}") == 0
    (line,) = (tmp_path / "ended" / "alarms.jsonl").read_text().splitlines()
    assert told == [json.loads(line)["message"]]
    assert "The run ends here. " in json.loads(line)["message"]
    summary = json.loads((tmp_path / "ended" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("stopped", 4)
    assert summary["stopped_by"] == "alarm kl_blow_up at step 4 of 6"
    out = capsys.readouterr().out
    assert "alarms.jsonl" in out and "stopped by alarm kl_blow_up at step 4 of 6" in out
    page = (tmp_path / "ended" / "report.html").read_text()
    assert '<span class="status stopped">stopped by alarm kl_blow_up at step 4 of 6</span>' in page
    assert (tmp_path / "ended" / "hf" / "model.safetensors").is_file()
    again = ["callbacks.kl_blow_up.most_in_rollout=1e9", f"run_dir={tmp_path / 'ended'}"]
    assert train(*quick, *again[1:]) == 2  # as in the folder of a run that came to its end
    assert train(*quick, *loud, *again, "ckpt_path=last") == 0
    summary = json.loads((tmp_path / "ended" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 6) and "stopped_by" not in summary


def every_kind() -> list[Alarm]:
    """One of each that is shipped."""
    there = [each for each in vars(kinds).values() if isinstance(each, type) and issubclass(each, Alarm)]
    return [each() for each in there if not inspect.isabstract(each)]


@contextlib.contextmanager
def notices() -> Iterator[list[str]]:
    """What Lightning's messages say of alarms meanwhile, in order."""
    told: list[str] = []
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    handler = logging.Handler()
    handler.addFilter(lambda record: "larm" in record.getMessage())
    handler.emit = lambda record: told.append(record.getMessage())
    logger.addHandler(handler)
    try:
        yield told
    finally:
        logger.removeHandler(handler)
