"""`lit-rl train`: validate, fit, validate, export, sum up."""

from __future__ import annotations

import contextlib
import shlex
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console

from lit_rl.algorithms.checks.data_and_trainer import check_monitors, total_steps
from lit_rl.algorithms.loop.generating import GeneratingModule
from lit_rl.algorithms.loop.module import PolicyModule
from lit_rl.algorithms.loop.save_on_error import save_without_user_callbacks
from lit_rl.callbacks.alarms import Alarm
from lit_rl.callbacks.checkpoint_io import is_whole, step_of
from lit_rl.callbacks.graceful_stop import GracefulStop
from lit_rl.callbacks.loggers import TrackioLogger, not_written
from lit_rl.callbacks.record import Record
from lit_rl.callbacks.timed_checkpoint import save_step
from lit_rl.core import signals, upstream
from lit_rl.core.errors import SIGNALLED, ConfigError, GenerationError, LitRLError, NumericError
from lit_rl.models.sharding import full_state_dict
from lit_rl.reports import run_page
from lit_rl.reports.metric_groups import decoding_label
from lit_rl.reports.secrets import redact_command
from lit_rl.runs import closing_report
from lit_rl.runs.export_checkpoint import READER_FOLDER, card_facts, commands_for_readers
from lit_rl.runs.run_dir import RunDir
from lit_rl.runs.run_lock import RunLock
from lit_rl.runs.step_memory import explain_out_of_memory, peak_memory


@dataclass(frozen=True)
class Run:
    """One run, built."""

    module: PolicyModule
    data: L.LightningDataModule
    trainer: L.Trainer
    run_dir: RunDir
    ckpt_path: str | None
    """A checkpoint file to resume from."""
    command: str
    """The command that the user typed, so that the printed commands can repeat it."""
    dataset: str
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of single commands, by the command's name."""
    evaluation: str = ""
    """The command that evaluates the run once it has ended."""
    lock: RunLock | None = None
    """The lock that keeps other runs out of the folder. None: nothing is written, or another rank holds it."""

    @property
    def dry(self) -> bool:
        """True with `fast_dev_run`: nothing is written."""
        return bool(self.trainer.fast_dev_run)  # pyright: ignore

    @property
    def began(self) -> bool:
        """True once it trains or has trained: the state that it resumes from was loaded."""
        records = [each for each in self.trainer.callbacks if isinstance(each, Record)]  # pyright: ignore
        return any(each.began for each in records) if records else self.module.metrics_step is not None

    def close(self) -> None:
        """Stop everything that was started, and let the next run into the folder."""
        try:
            if isinstance(self.module, GeneratingModule):
                self.module.close()
            for logger in self.trainer.loggers:
                if isinstance(logger, TrackioLogger):
                    logger.end()
        finally:
            if self.lock is not None:
                self.lock.close()

    @property
    def generating(self) -> GeneratingModule:
        """The module, for commands that need completions generated or scored.

        Raises:
            ConfigError: it trains a model that scores, which has no generator and no reward.
        """
        if not isinstance(self.module, GeneratingModule):
            name = type(self.module).__name__
            raise ConfigError(
                f"{name} writes no completions, and has no reward: take an algorithm that trains a policy."
            )
        return self.module


def train(run: Run) -> int:
    """Fit, with a validation before and after; return the exit code."""
    started = time.time()
    summary = run.run_dir.read_summary() if run.ckpt_path else {}
    earlier = summary.get("seconds", 0.0)
    _note_command(run, summary)
    for ended in ("stopped_by", "exit_code"):  # of the attempt before
        summary.pop(ended, None)
    with _signals(run) as stop, closing_report.report_unwritten(run.trainer):
        _announce(run)
        if "before" not in summary and not run.dry:
            measure(run, summary, "before")
            summary["prompts"] = getattr(run.data, "prompt_form", None)
            _save(run, summary | {"status": "running"})
        elif summary.get("status") != "running" and not run.dry:  # it goes on
            _save(run, summary | {"status": "running"})
        with _saving_after_error(run, summary), signals.exits_as_errors(run.trainer):
            try:
                with explain_out_of_memory(run.module):
                    run.trainer.fit(run.module, datamodule=run.data, ckpt_path=run.ckpt_path, weights_only=True)
            except GenerationError:
                if run.trainer.is_global_zero and not run.dry and run.run_dir.last_checkpoint() is not None:
                    line = "A rollout failed. Once its cause is fixed, resume from the newest checkpoint with:"
                    line += f"\n  {run.command} ckpt_path=last"
                    Console().print(line, soft_wrap=True, markup=False, highlight=False)
                raise
            summary |= {"steps": run.trainer.global_step, "seconds": earlier + time.time() - started}
            if stop.signum is not None:
                return _stopped(run, summary, stop)
            if not run.dry:
                _save_last_step(run)
                _finish(run, summary, earlier, started)
    return 0


def _announce(run: Run) -> None:
    if not run.trainer.is_global_zero:
        return
    where = "nothing is written" if run.dry else str(run.run_dir.path)
    device = (
        f"{run.trainer.world_size} x {run.trainer.accelerator.name()}"
        if hasattr(run.trainer.accelerator, "name")
        else ""
    )
    threads = "1 thread" if torch.get_num_threads() == 1 else f"{torch.get_num_threads()} threads"
    Console().print(f"run_dir  {where}   ({device}, {threads})", soft_wrap=True, highlight=False)
    if run.ckpt_path:
        Console().print(f"resuming {run.ckpt_path}", soft_wrap=True, highlight=False)


def _note_command(run: Run, summary: dict[str, Any]) -> None:
    """Put the typed command, without secrets, into the summary: under `command` the one that began the run, under
    `went_on` those that resumed it; and into the module, for the cards of its exports."""
    if not run.command:
        return
    command, folder = redact_command(run.command), run.run_dir.path.resolve()
    start = Path(run.ckpt_path).resolve() if run.ckpt_path else None
    own = start is not None and folder in start.parents
    newest = run.run_dir.last_checkpoint() if own else None
    if newest is not None and newest.resolve() == start:
        command += " ckpt_path=last"
    elif start is not None:
        where = f"{READER_FOLDER}/{start.relative_to(folder)}" if own else run.ckpt_path
        command += f" {redact_command(shlex.join([f'ckpt_path={where}']))}"
    if not own or "command" not in summary:
        summary["command"] = command
    elif command not in summary.setdefault("went_on", []):
        summary["went_on"].append(command)
    run.module.command = commands_for_readers([summary["command"], *summary.get("went_on", [])])


# ---------------------------------------------------------------------- measuring


def measure(run: Run, summary: dict[str, Any], when: str) -> None:
    """Validate, and put the numbers into `summary` under `when`, which is `before` or `after`.

    Of every validation set reward and win rate with their intervals, `{set: {"greedy" | "sampled at T": numbers}}`, and
    under `losses` the metrics that the algorithm names as its headline.

    The `eval` group is one decoding, logged as `val/`, as validations during `fit` are; the training's temperature, if
    that is another one, is the second, logged as `val_sampled/` (`GeneratingModule.decoding_at`).
    A model that scores decodes nothing: its validation says its losses.
    """
    results: dict[str, dict[str, dict[str, float]]] = {}
    summary[when] = results
    losses = summary.setdefault("losses", {})
    losses[when] = {}
    module, data = run.module, run.data
    model, kind = module.model, getattr(module, "learns_from", None)
    ends = model.eos_ids if hasattr(module, "evaluation") else ()
    data.prepare(model.tokenizer, *([kind] if kind else []), processor=model.processor, eos_ids=ends)  # pyright: ignore
    sets = [*data.val_names, *getattr(data, "loss_names", ())]  # pyright: ignore
    if not sets or run.trainer.limit_val_batches == 0:
        return
    with explain_out_of_memory(module):
        run.trainer.validate(module, datamodule=run.data, verbose=False)
    if when == "before":
        check_monitors(run.trainer, (), "val")
    headline = getattr(module, "headline", ())
    losses[when] = {
        name: float(value)
        for name, value in run.trainer.callback_metrics.items()
        if name.startswith("val/") and any(name.endswith(f"/{leaf}") for leaf in headline)
    }
    if not isinstance(module, GeneratingModule):
        return
    _collect(run, results, "val", module.evaluation.temperature)
    training = module.sampling.temperature
    if training == module.evaluation.temperature or not module.reward_functions.names:  # nothing to compare
        return
    with module.decoding_at(training), explain_out_of_memory(module):
        run.trainer.validate(module, datamodule=run.data, verbose=False)
        _collect(run, results, f"val_{module.second_decoding}", training)


def _collect(run: Run, results: dict[str, dict[str, dict[str, float]]], stage: str, temperature: float) -> None:
    """Add the metrics of the last validation for every set, by decoding."""
    drawn = decoding_label(temperature)
    for key, value in run.trainer.callback_metrics.items():
        head, _, leaf = key.rpartition("/")
        first, _, name = head.partition("/")
        if leaf in closing_report.TABLE_METRICS and first == stage:
            results.setdefault(name, {}).setdefault(drawn, {})[leaf] = float(value)


# ---------------------------------------------------------------------- the end in order


def _finish(run: Run, summary: dict[str, Any], earlier: float, started: float) -> None:
    """Measure, export, sum up, and print the paths of everything."""
    # A checkpoint is written at the end of a step, before Lightning counts that step for its loggers, and its epoch. A
    # fit that goes on from the very last step trains nothing and counts neither, so the validation after it would be
    # logged under the step before. So both are counted here, where Lightning has not.
    loop = run.trainer.fit_loop
    upstream.count_steps_as_logged(run.trainer)
    epochs: Any = loop.epoch_progress
    for counted in (epochs.total, epochs.current):
        counted.completed = max(counted.completed, counted.started)  # a resume may leave out the count of a start
        counted.processed = max(counted.processed, counted.completed)
    measure(run, summary, "after")
    summary["export"] = export(run, summary)
    summary["data"] = run.data.report  # pyright: ignore
    summary["phases"] = closing_report.phase_totals(run.run_dir.metrics)
    summary["judges"] = closing_report.judge_totals(run.module)
    alarms = (each for each in run.trainer.callbacks if isinstance(each, Alarm))  # pyright: ignore
    alarm = next((each for each in alarms if each.stopped_at is not None), None)
    if alarm is None:
        summary["status"] = "finished"
    else:
        planned = f" of {run.trainer.max_steps}" if run.trainer.max_steps > 0 else ""
        by = f"alarm {alarm.key} at step {alarm.stopped_at}{planned}"
        summary |= {"status": "stopped", "stopped_by": by}
    summary["seconds"] = earlier + time.time() - started
    _save(run, summary)
    if run.trainer.is_global_zero:
        closing_report.closing_table(summary)
        run_page.write_run_page_at_end(run.run_dir.path)
        _print_closing_lines(run, summary)


def export(
    run: Run, summary: dict[str, Any], around: contextlib.AbstractContextManager[Any] | None = None
) -> str | None:
    """Write and verify `hf/` on rank 0, and note its step in the summary; return one line on the verification.

    Args:
        around: Context manager that handles its failure; None lets that be raised.
    """
    module = run.module
    state = full_state_dict(module.policy)
    line = None
    if run.trainer.is_global_zero:
        facts = card_facts(module.model.name, type(module).__name__.lower(), run.dataset, summary)
        with around or contextlib.nullcontext():
            done = module.export(state, run.run_dir.hf, facts)
            summary["hf_step"] = run.trainer.global_step
            line = str(done)
    run.trainer.strategy.barrier()
    return line


def _save_last_step(run: Run) -> Path:
    """Write the last step as a checkpoint, where the saving interval did not hit it; return its path."""
    target = run.run_dir.checkpoints / f"step_{run.trainer.global_step:08d}.ckpt"
    # Of a resumed run it may be a damaged one that was passed over.
    saved = target.exists() and (run.ckpt_path is None or is_whole(target))
    # Rank 0 knows: other nodes may have file systems of their own.
    if run.trainer.checkpoint_callback is not None and not run.trainer.strategy.broadcast(saved):
        save_step(run.trainer, target)
    return target


def _save(run: Run, summary: dict[str, Any]) -> None:
    if run.trainer.is_global_zero:
        missing = [str(each) for each in not_written(run.trainer)]
        summary = summary | {"peak_memory": peak_memory(), "phase_memory": run.module.costs.memory.held}
        if steps := getattr(getattr(run.module, "generator", None), "steps", None):
            summary["decode_steps"] = steps
        run.run_dir.write_summary(summary | ({"not_written": missing} if missing else {}))


def _print_closing_lines(run: Run, summary: dict[str, Any]) -> None:
    folder, loaded_by = run.run_dir.path, run.module.export_form.loaded_by(run.module.model)
    model = None if summary["export"] is None else run.run_dir.hf
    logged = any(isinstance(logger, TensorBoardLogger) for logger in run.trainer.loggers)
    scores = isinstance(run.module, GeneratingModule) and run.module.reward_functions.names
    sampled = " eval.group_size=8 eval.temperature=1" if scores else ""
    lines = closing_report.closing_lines(
        closing_report.RunOutputs(
            folder, Path(run.trainer.default_root_dir), model, summary["export"] or "", folder if logged else None
        ),
        f"{run.evaluation}{sampled}",
        f"lit-rl chat run_dir={shlex.quote(str(folder))}",
        loaded_by,
        summary.get("prompts"),
        list(closing_report.tracker_lines(run.trainer.loggers)),
    )
    for line in lines:
        Console().print(line, soft_wrap=True, markup=False, highlight=False)


# ---------------------------------------------------------------------- the end by an error


@contextlib.contextmanager
def _saving_after_error(run: Run, summary: dict[str, Any]) -> Iterator[None]:
    """Write the checkpoint and the model even if an error follows the last step (of a callback, a logger, the last
    validation). After an earlier error the checkpoint is `GracefulStop`'s, and the model is written where there is
    none. With several processes a single rank cannot save the state that all of them hold."""
    try:
        yield
    except Exception as error:
        if isinstance(getattr(error.__cause__, "__context__", None), signals.ExitBySignal):
            raise  # Ctrl-C once more: nobody waits for a model to be written
        with contextlib.suppress(Exception):  # nothing may hide the error itself
            save_after_error(run, summary, error)
            if "hf_step" in summary:
                _save(run, summary)
        raise


def save_after_error(run: Run, summary: dict[str, Any], error: Exception) -> None:
    """Save the weights of a run that ends with an error, as far as they are not saved; the error gets a note of it.

    Args:
        run: The run.
        summary: Gets the step of the export.
        error: The error that ended it.
    """
    trainer, step = run.trainer, run.trainer.global_step
    spoiled = isinstance(error, NumericError) or run.module.optimizer_is_stepping
    if run.dry or trainer.world_size > 1 or not run.began or not step or spoiled:
        return
    ended = trainer.should_stop or step >= total_steps(trainer)
    target = run.run_dir.checkpoints / f"step_{step:08d}.ckpt"
    if ended:
        with contextlib.suppress(Exception, SystemExit):  # of a callback that fails to save, which may have ended it
            save_without_user_callbacks(trainer, lambda: _save_last_step(run))
    saved = target.exists() and is_whole(target)
    if saved and not ended:
        return
    if summary.get("hf_step") != step:
        export(run, summary)
    if saved:
        kept = (
            f"Nothing that was learned in {step} steps is lost: the checkpoint {target} and the model {run.run_dir.hf}."
        )
    else:
        kept = f"The weights of {step} steps are kept as the model {run.run_dir.hf}; no checkpoint of that step is."
    error.add_note(kept)


def note_failure(run: Run, code: int) -> None:
    """Add to the summary that an error has ended the run, for programs that wait for its end.

    Args:
        code: The exit code.
    """
    if run.dry or not run.trainer.is_global_zero:
        return
    with contextlib.suppress(Exception):  # nothing may hide the error itself
        summary = run.run_dir.read_summary()
        if summary.get("status") in ("finished", "stopped"):
            return  # the training itself had ended
        missing = [str(each) for each in not_written(run.trainer)]
        summary |= {"status": "failed", "steps": run.trainer.global_step, "exit_code": code}
        run.run_dir.write_summary(summary | ({"not_written": missing} if missing else {}))


# ---------------------------------------------------------------------- the end by a signal


@contextlib.contextmanager
def _signals(run: Run) -> Iterator[GracefulStop]:
    """Yield the callback that catches signals during training (one that never catches any, where there is none).

    Around the training, in a validation or an export, a signal ends the process at once: all that is trained is saved.
    """
    stop = GracefulStop.of(run.trainer)
    if stop is None or signals.requeue_signal(run.trainer) is None:
        signals.remove_requeue_handler()

    def note_exit(number: int) -> None:
        if not run.dry:
            summary = run.run_dir.read_summary()
            if summary.get("status") == "running":
                with contextlib.suppress(OSError):  # of a full disk: the exit code says it too
                    run.run_dir.write_summary(summary | {"status": "stopped"})
            Console(stderr=True).print(_resume_lines(run), soft_wrap=True, markup=False, highlight=False)
        signals.requeue_if_asked(number, run.trainer)

    with signals.exit_on_signal(run.trainer, note_exit) if stop else contextlib.nullcontext():
        yield stop or GracefulStop()


def _stopped(run: Run, summary: dict[str, Any], stop: GracefulStop) -> int:
    """Save the rest after a signal during training, and print the command that resumes."""
    if not run.dry and run.trainer.global_step and not stop.gave_up:  # otherwise it is within a step
        _save_last_step(run)
    if run.trainer.is_global_zero and not run.dry:
        _save(run, summary | {"status": "stopped"})
        run_page.write_run_page_at_end(run.run_dir.path)
        exports = stop.signum == signal.SIGINT and stop.saved is not None
        lines = _resume_lines(run) + ("" if exports else _export_command(run))
        Console().print(lines, soft_wrap=True, markup=False, highlight=False)
    if stop.signum == signal.SIGINT and stop.saved is not None and not run.dry:
        _export_stopped(run, summary)
    return SIGNALLED + (stop.signum or 0)


def _export_stopped(run: Run, summary: dict[str, Any]) -> None:
    """Export after the checkpoint if the signal was Ctrl-C: other signals announce an end within seconds. One more
    Ctrl-C skips it."""
    say, main = Console(), run.trainer.is_global_zero
    if main:
        say.print(f"Writing its model to {run.run_dir.hf}; Ctrl-C ends at once ...", soft_wrap=True, highlight=False)
    summary = summary | {"after": {}}  # of an earlier end: these weights were not validated
    line = export(run, summary, _explain_later_export(run))
    if main and line is not None:
        _save(run, summary | {"status": "stopped"})
        say.print(f"model         {run.run_dir.hf}  ({line})", soft_wrap=True, markup=False, highlight=False)


@contextlib.contextmanager
def _explain_later_export(run: Run) -> Iterator[None]:
    """Point to a later export from the checkpoint where the model cannot be written now. A defect keeps its
    traceback."""
    try:
        yield
    except (LitRLError, OSError) as error:
        line = f"It could not be written ({type(error).__name__}: {error}); the checkpoint is saved."
        Console().print(f"{line}{_export_command(run)}", soft_wrap=True, markup=False, highlight=False)


def _export_command(run: Run) -> str:
    """Return a line with the command that exports a checkpoint of the run."""
    if not any(run.run_dir.checkpoints.glob("*.ckpt")):
        return ""
    return f"\nFor its model, without going on:\n  lit-rl export run_dir={shlex.quote(str(run.run_dir.path))}"


def _resume_lines(run: Run) -> str:
    """Return lines on what is saved, and the command that resumes. With nothing saved the same command begins anew."""
    step, command = run.trainer.global_step, f"\n  {run.command} ckpt_path=last"
    newest = max((step_of(path) for path in run.run_dir.checkpoints.glob("*.ckpt")), default=None)
    if newest is not None:
        known = f"step {newest}" if newest >= 0 else "a checkpoint whose name has no step"
        saved = f"at step {step}, saved" if newest == step else f"What is saved is {known}"
        return f"Stopped{' ' if newest == step else '. '}{saved}. Go on with:{command}"
    if run.trainer.checkpoint_callback is None:
        return f"Stopped at step {step}. Nothing is saved: the run writes no checkpoints. Begin anew with:{command}"
    if run.ckpt_path is not None:  # of another run
        command = f"\n  {run.command} ckpt_path={run.ckpt_path}"
    where = f"at step {step}, before the first checkpoint" if step else "before the first optimizer step was over"
    return f"Stopped {where}: nothing is saved. Begin anew with:{command}"
