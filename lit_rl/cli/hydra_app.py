"""`train.py` and `lit-rl train`, after Hydra has composed: resolve and build the config, and run the command."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import shlex
import signal
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from lit_rl.algorithms.checks.data_and_trainer import check_process_count
from lit_rl.algorithms.checks.strategy_checks import check_trainable_settings
from lit_rl.algorithms.rollouts.checkpoints import check_algorithm_kind
from lit_rl.callbacks.checkpoint_io import read_lazily, verify
from lit_rl.cli import (
    data_choice,
    data_kinds,
    exporting,
    fast_checks,
    key_checks,
    model_commands,
    process,
    replays,
    run_info,
    run_settings,
)
from lit_rl.cli.build import build, check_answered, check_judged, escape_for_hydra, plain
from lit_rl.cli.messages import exit_code_of
from lit_rl.cli.run_failures import record_error, record_lost_rank
from lit_rl.cli.run_info import (
    COMPUTE_NOTHING,
    EVALUATE,
    TOLD_CHECKPOINT,
    TOLD_FOLDER,
    folder_of,
    is_over_a_run,
    is_sweep,
    writes_nothing,
)
from lit_rl.cli.trainer_settings import cut_by, settle_precision, trainer_of, trainer_precision
from lit_rl.core import upstream
from lit_rl.core.errors import BackendError, ConfigError, StorageError
from lit_rl.core.machine import is_rank_zero
from lit_rl.core.signals import exit_on_signal, is_requeued
from lit_rl.data.example_module import ExampleDataModule
from lit_rl.reports import run_files, run_page
from lit_rl.reports.secrets import redact
from lit_rl.runs import env_check, evaluate, plan, reward_test, train
from lit_rl.runs.rank_processes import end_children, wait_for_children, watching_children
from lit_rl.runs.rendezvous import (
    Rendezvous,
    device_count,
    devices_of_launcher,
    find_placement,
    receive_start,
    send_finished,
    send_start,
)
from lit_rl.runs.run_dir import RunDir, StartKind
from lit_rl.runs.run_lock import RunLock
from lit_rl.runs.train import Run

TASKS = {
    "fit": train.train,
    "eval": evaluate.evaluate,
    "validate": evaluate.evaluate,
    "test": evaluate.evaluate_test,
    "predict": evaluate.predict_completions,
    "reward_test": lambda run: reward_test.reward_test(run, **run.options["reward_test"]),
    "env_check": lambda run: env_check.env_check(run, **run.options["env_check"]),
    "best_of_n": evaluate.best_of_n,
    "plan": lambda run: plan.plan(run, **run.options["plan"]),
}
_WITHOUT_A_RUN = {
    "data_check": data_choice.run_data_check,
    "chat": model_commands.run_chat,
    "serve": model_commands.run_serve,
    "doctor": model_commands.run_doctor,
    "export": exporting.run_export,
}
"""Tasks that need no Trainer and no folder. Rank 0 runs them, and builds its objects."""
_TOGETHER = ("fit", "eval", "validate", "test", "predict", "best_of_n")
"""Tasks that take all processes of a run."""


def run_job(config: DictConfig) -> int:
    """Run one job."""
    process.filter_warnings()
    if config.task in _TOGETHER:
        config.trainer.devices = devices_of_launcher(config.trainer.get("devices"))
    if not config.run_dir:
        return _run_task(config)
    with run_files.note_other_version(Path(str(config.run_dir)).expanduser()):
        return _run_task(config)


def _run_task(config: DictConfig) -> int:
    if config.task == "replay":
        return replays.run_replay(config) if is_rank_zero() else 0
    if config.task in _WITHOUT_A_RUN:
        return _WITHOUT_A_RUN[config.task](config) if is_rank_zero() else 0
    if not is_rank_zero() and TOLD_FOLDER in os.environ:
        config = _with_stored_settings(config)
        return _run_as_other_rank(config, RunDir(Path(os.environ[TOLD_FOLDER])), os.environ[TOLD_CHECKPOINT] or None)
    # What nodes see of a run's folder they read once they have met: one that sees another one must not leave alone.
    meet_first = config.task in EVALUATE and config.run_dir
    meeting = _meeting(config) if meet_first else None
    try:
        if meeting is not None:
            run_settings.check_every_node_sees(meeting, config.task, config.run_dir)
        config = _with_stored_settings(config)
        meeting = meeting if meet_first else _meeting(config)
        if meeting is None or is_rank_zero():
            return _run_as_rank_0(config, meeting)
        return 0 if (start := receive_start(meeting)) is None else _run_as_other_rank(config, *start, meeting)
    except Exception as error:
        if meeting is not None:
            meeting.abort_others(error)
        raise


def _with_stored_settings(config: DictConfig) -> DictConfig:
    """Return the config with the settings of the run that is evaluated, or with the group that the data choose."""
    if is_over_a_run(config.task, config.run_dir):
        if is_sweep():
            raise fast_checks.no_sweep_error(config.task, config.run_dir)
        config, note = run_settings.with_settings_of_the_run(config)
    else:
        with_groups = data_choice.with_typed_prompts if config.task == "best_of_n" else data_choice.with_data_group
        config, note = with_groups(config)
    if note and is_rank_zero():
        sys.stdout.write(f"{note}\n")
    return config


def _run_as_other_rank(
    config: DictConfig, run_dir: RunDir, ckpt_path: str | None, meeting: Rendezvous | None = None
) -> int:
    """Run in a process that is not rank 0, and gets the start of the run from it."""
    config.ckpt_path = ckpt_path
    os.environ[TOLD_FOLDER], os.environ[TOLD_CHECKPOINT] = str(run_dir.path), ckpt_path or ""
    return _run(config, run_dir, "resumed", None, run_dir.missing_folders(), meeting)


def _run_as_rank_0(config: DictConfig, meeting: Rendezvous | None) -> int:
    """Run in rank 0, or in any process without a rendezvous (`mpirun`): it decides how the run starts."""
    fast_checks.check_evaluated(config)  # which processes that a launcher has started left to this one
    run_dir = RunDir(folder_of(config))
    writes = is_rank_zero() and not writes_nothing(config)
    # What a run that still goes on there has saved so far decides nothing.
    lock = RunLock(run_dir.path) if writes and config.task == "fit" and run_dir.read().holds_a_run else None
    with contextlib.closing(lock) if lock is not None else contextlib.nullcontext():
        if config.task == "fit" and is_requeued():
            _resume_requeued(config, run_dir)
        finished = config.task == "fit" and config.ckpt_path == "last" and run_dir.read().finished
        if finished and not run_info.is_run_over(config.trainer, run_dir.path):
            _print_run_goes_on(config, run_dir)
        elif finished:
            run_info.print_run_over(run_dir.path)
            if meeting is not None:
                send_finished(meeting)
            return 0
        newest = config.ckpt_path == "last"
        start = _start(config, run_dir)
        named_by_time = not config.run_dir and not is_sweep()
        if config.task != "fit" and config.run_dir:
            run_dir = RunDir(run_dir.path / f"{config.task}_{datetime.now():%Y-%m-%d_%H%M%S}")
            named_by_time = True
        missing = run_dir.missing_folders()
        if writes and named_by_time:
            run_dir, missing = _reserved(run_dir.path)
        # Processes that Lightning starts for other ranks are told, so that all agree.
        os.environ[TOLD_FOLDER], os.environ[TOLD_CHECKPOINT] = str(run_dir.path.absolute()), config.ckpt_path or ""
        if meeting is not None:
            send_start(meeting, run_dir, config.ckpt_path, newest=newest)
        return _run(config, run_dir, start, lock, missing, meeting)


def _meeting(config: DictConfig) -> Rendezvous | None:
    """Return the rendezvous with the processes that this one has not started, where the task takes them."""
    nodes = config.trainer.get("num_nodes") or 1
    if config.task not in _TOGETHER or (place := find_placement(nodes)) is None:
        return None
    if (devices := device_count(config.trainer.get("devices"))) is not None:
        check_process_count(devices, nodes)
    job: Any = HydraConfig.get().job
    return Rendezvous(place, shlex.join([*_entry(), *sys.argv[1:]]), OmegaConf.select(job, "num") or 0)


def _run(
    config: DictConfig,
    run_dir: RunDir,
    start: StartKind,
    lock: RunLock | None,
    missing: list[Path],
    meeting: Rendezvous | None,
) -> int:
    config.run_dir = str(run_dir.path)
    # A first validation is made again by the next start: without a step it is no reason to keep a folder.
    fits = config.task == "fit"
    kept_for = "train/" if fits else ""
    resumes = fits and start == "resumed"
    stood = run_dir.snapshot() if resumes and is_rank_zero() and not writes_nothing(config) else None
    job = None
    try:
        with contextlib.ExitStack() as around:
            job = around.enter_context(contextlib.closing(assemble(config, run_dir, start, lock)))
            if meeting is not None:
                meeting.wait_until_ready()
            try:
                leaves = contextlib.nullcontext() if fits else exit_on_signal(job.trainer, _print_ended_by)
                on_loss = functools.partial(_record_lost_rank, job, config.task, start)
                with watching_children(job.trainer, on_loss), leaves:
                    code = TASKS[config.task](job)
                wait_for_children(job.trainer.strategy.launcher)
                return code
            except Exception as error:
                upstream.disarm_lightning_observer()
                refused = resumes and not job.began
                if stood is not None and refused:
                    around.callback(run_dir.restore, stood)  # behind the end of other ranks, while we hold the lock
                around.callback(end_children, job.trainer.strategy.launcher)
                if not job.dry:
                    heard = record_error(error, run_dir, job.trainer, job.command)
                    if fits and not refused:
                        train.note_failure(job, exit_code_of(heard or error))
                    begun = run_dir.would_keep(missing, kept_for) and run_dir.metrics.is_file()
                    if fits and job.trainer.is_global_zero and begun and not refused:
                        run_page.write_run_page_at_end(run_dir.path)
                    if heard is not None:
                        raise heard from error
                raise
    except (Exception, SystemExit) as error:
        if is_rank_zero() and (not fits or not isinstance(error, SystemExit)):
            run_dir.withdraw(missing, kept_for)
        if stood is not None and isinstance(error, Exception) and job is None:
            run_dir.restore(stood)
        raise


def _record_lost_rank(job: Run, task: str, start: StartKind, error: BackendError) -> int:
    code = record_lost_rank(error, None if job.dry else job.run_dir, job.trainer, job.command)
    if task == "fit" and (start != "resumed" or job.began):
        train.note_failure(job, code)
    return code


def _print_ended_by(number: int) -> None:
    sys.stderr.write(f"{signal.Signals(number).name}: ended before it was done.\n")


def _start(config: DictConfig, run_dir: RunDir) -> StartKind:
    """Return how the run starts; `ckpt_path` becomes a file."""
    asked, config.ckpt_path = config.ckpt_path, _checkpoint(config, run_dir)
    path = config.ckpt_path
    if path is not None and run_dir.path.resolve() in Path(path).resolve().parents:
        return "resumed"
    return "anew" if asked == "last" else "new"


def _print_run_goes_on(config: DictConfig, run_dir: RunDir) -> None:
    if is_rank_zero():
        sys.stdout.write(
            f"{run_dir.path} holds a run that finished after {run_dir.steps} steps, and trainer.max_steps or "
            "max_epochs ends this one later: it goes on. A schedule of the learning rate goes on as one of the new "
            "length, so the weights are not those of a run that had this end from its start.\n"
        )


def _resume_requeued(config: DictConfig, run_dir: RunDir) -> None:
    """Resume a job that Slurm has started again with the same command."""
    if not config.run_dir:
        raise ConfigError(
            "Slurm has started this job again, and nobody knows in which folder it began: give jobs a run_dir, such as "
            "run_dir=runs/$SLURM_JOB_ID."
        )
    if config.ckpt_path is None or run_dir.last_checkpoint() is not None:
        config.ckpt_path = "last"
        if is_rank_zero():
            sys.stdout.write(f"Slurm has started this job again: as ckpt_path=last, in {run_dir.path}.\n")


def assemble(config: DictConfig, run_dir: RunDir, start: StartKind, lock: RunLock | None = None) -> Run:
    """Build everything and open the run directory; its files are untouched until the settings are valid.

    Args:
        config: The composed config.
        run_dir: Folder of the run.
        start: Kind of start.
        lock: Lock of the folder, where it is held already.
    """
    tree, dry = plain(config), writes_nothing(config)
    data_kinds.check_pair(config)
    if tree["task"] == "plan":
        tree |= {"callbacks": {}}
        tree["trainer"] |= {"limit_val_batches": 0, "enable_progress_bar": False}
    module, data = build(tree["algo"]), build(tree["data"])
    check_judged(module, tree)
    check_answered(module, tree)
    key_checks.warn_unread(config)
    module.micro_batches.memory_gb = tree["plan"]["memory_gb"]
    if tree["task"] == "fit" and config.ckpt_path is not None:
        check_algorithm_kind(
            read_lazily(Path(config.ckpt_path)), type(module)
        )  # before anything of its folder is replaced
    settings, asked = tree["trainer"], tree["trainer"]["precision"]
    settings["max_epochs"] = run_info.max_epochs(settings)
    settings["accumulate_grad_batches"] = cut_by(module, settings["accumulate_grad_batches"])
    settings["precision"] = given = trainer_precision(settings, config.ckpt_path)
    trainer = trainer_of(tree, run_dir, dry)
    if choice := settle_precision(asked, given, trainer, module):
        settings["precision"] = choice.precision
        if trainer.is_global_zero and tree["task"] not in COMPUTE_NOTHING:
            choice.say()
    if tree["task"] in ("fit", "plan"):
        check_trainable_settings(module.model, str(trainer.precision), trainer.strategy)
        if isinstance(data, ExampleDataModule):
            data.check_trainer(trainer)
        if trainer.world_size > 1:
            module.check_processes(data, trainer)
    if not dry and not trainer.is_global_zero:
        run_dir.make()
    elif not dry:
        lock = run_dir.open(start, lock)
        if start == "anew":
            run_dir.clear_record()
        if start != "new" and tree["task"] == "fit":
            run_dir.remove_partial()
        run_dir.write_config(yaml.safe_dump(redact(tree), sort_keys=False))
    options = {name: tree[name] for name in ("reward_test", "plan")}
    options["env_check"] = {"settings": escape_for_hydra(tree["env"]), **tree["env_check"]}
    command = _command(run_dir)
    what = command, data_choice.name_of(tree["data"]), options, run_settings.command_over(tree, run_dir, command)
    return Run(module, data, trainer, run_dir, config.ckpt_path, *what, lock)


def _reserved(path: Path) -> tuple[RunDir, list[Path]]:
    """Make the folder, with a number behind its name where another run began in the same second. Return it, and the
    folders that were made."""
    missing = [parent for parent in path.parents if not parent.exists()]
    for number in itertools.count(1):
        name = path if number == 1 else path.with_name(f"{path.name}_{number}")
        with contextlib.suppress(FileExistsError):
            name.mkdir(parents=True)
            return RunDir(name), [name, *missing]
    raise AssertionError("a counter does not end")


def _checkpoint(config: DictConfig, run_dir: RunDir) -> str | None:
    if config.ckpt_path is None:
        return None
    if config.ckpt_path != "last":
        fast_checks.check_checkpoint(config.ckpt_path)
        verify(Path(config.ckpt_path))
        return str(config.ckpt_path)
    last, damaged = run_dir.newest_checkpoint()
    if last is None and damaged:
        names = " and ".join(path.name for path in damaged)
        raise StorageError(
            f"ckpt_path=last: {damaged[0]} is damaged, and there is no older checkpoint that is whole. To start anew "
            f"on purpose take another run_dir; or remove {names}: then ckpt_path=last starts anew here, and removes "
            "what this run has recorded."
        )
    if last is None and config.task != "fit":
        raise run_files.no_checkpoint_error(run_dir.path)
    if is_rank_zero():
        if last is None:
            sys.stdout.write(f"No checkpoint in {run_dir.checkpoints}: starting anew.\n")
        elif damaged:
            sys.stdout.write(f"Damaged: {', '.join(map(str, damaged))}. Going on from {last.name}, which is whole.\n")
    return str(last) if last else None


def _entry() -> list[str]:
    return ["python", sys.argv[0]] if sys.argv[0].endswith(".py") else ["lit-rl", "train"]


def _command(run_dir: RunDir) -> str:
    ours = ("ckpt_path=", "run_dir=", "hydra.mode=")
    overrides = [argument for argument in sys.argv[1:] if not argument.startswith(ours)]
    return shlex.join([*_entry(), *overrides, f"run_dir={run_dir.path}"])
