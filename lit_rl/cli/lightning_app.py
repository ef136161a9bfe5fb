"""`lit-rl fit|validate|test|predict`: the same classes and the same defaults through LightningCLI.

The keys are those of the constructors: `--model` is the LightningModule (GRPO, RLOO, Reinforce, PPO), `--model.model`
its policy.
Optimizer, schedule and reference stand at the top, as in the Hydra door: `--optimizer=AdamW --optimizer.lr=1e-5`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.resources
import inspect
import re
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import yaml
from jsonargparse import set_parsing_settings
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console

from lit_rl import callbacks
from lit_rl.algorithms.checks.strategy_checks import check_trainable_settings
from lit_rl.algorithms.loop.module import PolicyModule
from lit_rl.algorithms.optim import optimizers, schedules
from lit_rl.algorithms.optim.schedules import ScheduleByPath
from lit_rl.algorithms.rollouts.checkpoints import check_algorithm_kind
from lit_rl.callbacks import AtomicCheckpointIO, Export, GracefulStop, JsonlLogger, let_loggers_fail
from lit_rl.callbacks.checkpoint_io import read_lazily, verify_once
from lit_rl.cli import config_files, lightning_arguments, process, run_info
from lit_rl.cli.build import check_trainer
from lit_rl.cli.lightning_arguments import data_module_of
from lit_rl.cli.lightning_messages import in_one_sentence
from lit_rl.cli.listing import neighbouring_keys
from lit_rl.cli.run_failures import record_error, record_lost_rank
from lit_rl.cli.schemas import PYTHON_ONLY, parameters
from lit_rl.cli.targets import ALLOWED, find_here
from lit_rl.cli.trainer_settings import Accumulation, Asked, cut_by, settle_precision, trainer_precision
from lit_rl.core import upstream
from lit_rl.core.errors import SIGNALLED, BackendError, ConfigError, StorageError, did_you_mean
from lit_rl.core.signals import exits_as_errors, remove_requeue_handler, requeue_signal
from lit_rl.core.user_functions import is_file_path
from lit_rl.data.tasks import Task
from lit_rl.models import references
from lit_rl.reports import run_files, run_page
from lit_rl.reports.secrets import redact, redact_command
from lit_rl.runs import closing_report, evaluate, train
from lit_rl.runs.export_checkpoint import commands_for_readers
from lit_rl.runs.rank_processes import end_children, wait_for_children, watching_children
from lit_rl.runs.rendezvous import devices_of_launcher
from lit_rl.runs.run_dir import RunDir
from lit_rl.runs.run_lock import RunLock
from lit_rl.runs.step_memory import explain_out_of_memory
from lit_rl.runs.train import Run

CONFIG_NAME = "lit_rl_config.yaml"

FACTORIES = {
    "optimizer": (optimizers.AdamW, optimizers.AdamW8bit, optimizers.AdamWSplit, optimizers.ByPath),
    "scheduler": (schedules.Linear, schedules.Cosine, schedules.Constant, ScheduleByPath),
    "reference": (
        *(references.Auto, references.FrozenCopy, references.AdapterBase, references.InitialAdapter),
        *(references.EMA, references.BEMA, references.Mixing, references.OtherModel),
    ),
}
"""Slots of a module that are keys of their own, as they are groups of the Hydra command line. Left inside the module,
jsonargparse would read the protocol of a factory as "a class of what the call returns" and take torch's optimizers for
ours, with other defaults. It would refuse every reference, too: a context manager's signature is not that of the
function that it is made from."""


def main(arguments: list[str]) -> int:
    """Run `[command, --key=value, ...]`; return the exit code."""
    process.filter_warnings()
    sys.argv = [sys.argv[0], *arguments]  # Lightning starts the processes of other ranks with it
    cli = command_line(arguments)
    stop = GracefulStop.of(cli.trainer)
    return SIGNALLED + stop.signum if stop and stop.signum else 0


def command_line(arguments: Sequence[str], *, run: bool = True) -> CommandLine:
    """Parse, check and build; then run the command that stands first, or with `run=False` (no command) nothing more.

    Raises:
        LitRLError: as a constructor raised it; a ConfigError for what the parser refuses.
    """
    for name in callbacks.__all__:  # jsonargparse knows a class by its short name once it is imported
        getattr(callbacks, name)
    by_hand = _named_on_the_command_line(arguments)
    versions = [f"lightning=={L.__version__}", f"lit_rl=={run_files.installed_version()}"]
    settings: dict[str, Any] = {"exit_on_error": False, "dump_header": versions}
    checked = upstream.before_jsonargparse_reads(config_files.check_size)
    with _importing_only(by_hand), checked, lightning_arguments.read_at_every_depth():
        return CommandLine(
            PolicyModule,
            data_module_of(arguments),
            subclass_mode_model=True,
            save_config_callback=SaveConfig,
            trainer_defaults=trainer_defaults(),
            seed_everything_default=0,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            parser_kwargs=settings | {name: dict(settings) for name in CommandLine.subcommands()},
            args=list(arguments),
            run=run,
        )


def trainer_defaults() -> dict[str, Any]:
    """Return the defaults of the Hydra command line, from its own file: no default stands twice. Loggers and callbacks
    are the config's."""
    file = importlib.resources.files("lit_rl.conf") / "trainer" / "default.yaml"
    settings = yaml.safe_load(file.read_text())
    return {name: value for name, value in settings.items() if name not in ("defaults", "logger", "callbacks")}


class WithKeywords:
    """A function of tensors with settings of its own, for configs, as Hydra makes with `_partial_`.

    Args:
        function: A loss, an advantage, a KL or a reduction, such as `lit_rl.ops.policy_losses.clipped_policy_loss`.
        keywords: Its keyword-only arguments, such as `{clip_high: 0.28}`.
    """

    def __init__(self, function: Callable, keywords: dict[str, Any]) -> None:
        known = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
        for name in keywords:
            if name not in known:
                command = f"python -m pydoc {function.__module__}.{function.__qualname__}"
                listed = neighbouring_keys(function.__name__, name, known, command) or " It has none."
                raise ConfigError(f"{name} is no setting of {function.__name__}.{did_you_mean(name, known)}{listed}")
        self.func, self.keywords = function, dict(keywords)
        self.__signature__ = inspect.signature(function)  # a term is given what its signature names

    def __call__(self, *tensors: Any, **columns: Any) -> Any:
        return self.func(*tensors, **columns, **self.keywords)


class CommandLine(LightningCLI):
    """LightningCLI that refuses in one sentence."""

    trainer: L.Trainer
    model: Any
    datamodule: Any
    summary: dict[str, Any]

    def before_fit(self) -> None:
        """Refuse settings that Lightning lets pass and no run can use, as the Hydra command line does."""
        if GracefulStop.of(self.trainer) is None or requeue_signal(self.trainer) is None:
            remove_requeue_handler()
        self.place_metrics()
        checkpoint = self._setting("ckpt_path")
        if checkpoint is not None and Path(checkpoint).exists():
            verify_once(Path(checkpoint))
            if isinstance(self.model, PolicyModule):
                check_algorithm_kind(read_lazily(Path(checkpoint)), type(self.model))
        check_trainer(self.trainer, self._setting("trainer")["precision"])
        if isinstance(self.model, PolicyModule):
            check_trainable_settings(self.model.model, str(self.trainer.precision), self.trainer.strategy)
            if self.trainer.world_size > 1:
                self.model.check_processes(self.datamodule, self.trainer)
        for config in self._saved_configs():
            config.begin(self.trainer)
        self.summary = {"began": time.time()}
        if isinstance(self.model, PolicyModule):
            self.model.command = commands_for_readers([redact_command(_command())])
        if self._setting("ckpt_path") is None and not self.trainer.fast_dev_run:  # pyright: ignore
            train.measure(self._run_of(), self.summary, "before")

    def place_metrics(self) -> None:
        """Let a JsonlLogger without a path write into the folder of the Trainer's first logger: runs do not share a
        file."""
        for logger in self.trainer.loggers:
            if isinstance(logger, JsonlLogger) and logger.path is None:
                logger.path = RunDir(_folder(self.trainer)).metrics

    before_validate = before_test = place_metrics

    def after_fit(self) -> None:
        """Print the closing table of `train`: results before and after, and the time by phase."""
        remove_requeue_handler()  # a job that has learned all is not to begin again
        if (stop := GracefulStop.of(self.trainer)) and stop.signum:
            return self._say_what_is_saved(stop)
        if self.trainer.fast_dev_run:  # pyright: ignore
            return
        run, summary = self._run_of(), self.summary
        train.measure(run, summary, "after")
        summary["seconds"] = time.time() - summary["began"]
        if run.run_dir.metrics.is_file():  # of a JsonlLogger
            summary["phases"] = closing_report.phase_totals(run.run_dir.metrics)
        summary["judges"] = closing_report.judge_totals(run.module)
        if self.trainer.is_global_zero:
            closing_report.closing_table(summary)
            run_page.write_run_page_or_hint(RunDir(_folder_of_metrics(self.trainer)))
            for line in self._where_everything_is(run.run_dir.path):
                Console().print(line, soft_wrap=True, markup=False, highlight=False)

    def _where_everything_is(self, folder: Path) -> list[str]:
        """Return the closing lines of `train`, for the files of this run.

        Args:
            folder: Of the config. One rank alone cannot ask the Trainer for it.
        """
        model, saved = next(reversed(_exports(self.trainer)), None), _newest_checkpoint(self.trainer)
        curves = [Path(each.log_dir) for each in self.trainer.loggers if isinstance(each, TensorBoardLogger)]
        config = shlex.quote(str(folder / CONFIG_NAME))
        lines = closing_report.closing_lines(
            closing_report.RunOutputs(
                _folder_of_metrics(self.trainer),
                Path(self.trainer.default_root_dir),
                model,
                "verified as it was written" if model else "",
                next(iter(curves), None),
            ),
            f"lit-rl validate --config {config} --ckpt_path {shlex.quote(str(saved))} --trainer.logger false"
            if saved
            else "",
            f"lit-rl chat model={shlex.quote(str(model))}" if model else None,
            getattr(self.model, "loaded_by", "AutoModelForCausalLM"),
            getattr(self.datamodule, "prompt_form", None),
            list(closing_report.tracker_lines(self.trainer.loggers)),
        )
        if not (Path(self.trainer.default_root_dir) / "samples").is_dir():
            lines.append(f"samples       none are written; every completion as parquet: add {_TO_WRITE_SAMPLES}")
        if model is None:
            lines.append(f"model         no export; a folder for transformers at every N steps: add {_TO_EXPORT}")
        return lines

    def _say_what_is_saved(self, stop: GracefulStop) -> None:
        step = self.trainer.global_step
        line = f"Stopped at step {step}. Nothing is saved: the Trainer has no checkpoint callback."
        if self.trainer.checkpoint_callback is not None:
            line = f"Stopped before an optimizer step of this start was over (step {step}): nothing new is saved."
        if stop.saved is not None:
            line = f"Stopped at step {step}, saved. Go on with the same command and --ckpt_path={stop.saved}"
        if self.trainer.is_global_zero:
            Console().print(line, soft_wrap=True, markup=False, highlight=False)

    def _setting(self, key: str) -> Any:
        """Return the value of a key of the command that runs, as it was parsed."""
        return self.config.get(str(self.subcommand), self.config).get(key)

    def _built(self, key: str) -> Any:
        """Return the object that was built for a key of the command that runs."""
        return self.config_init.get(str(self.subcommand), self.config_init).get(key)

    def _run_of(self) -> Run:
        folder, resumed = RunDir(_folder(self.trainer)), self._setting("ckpt_path")
        return Run(self.model, self.datamodule, self.trainer, folder, resumed, command="", dataset="")

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        commands = LightningCLI.subcommands()
        commands["predict"] |= {"return_predictions", "weights_only"}  # `predict` below decides them
        return commands

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        skipped: set[str | int] = {"accumulate_grad_batches", "precision"}
        parser.add_class_arguments(
            L.Trainer, "trainer", fail_untyped=False, instantiate=False, sub_configs=True, skip=skipped
        )
        parser.add_argument(
            "--trainer.accumulate_grad_batches",
            type=Accumulation,
            help="Micro-batches an optimizer step; auto takes as few as fit into memory.",
        )
        parser.add_argument(
            "--trainer.precision",
            type=Asked,
            help="As Lightning's; auto is bf16-true where the device has units for bfloat16, 32-true elsewhere.",
        )
        parser.set_defaults({f"trainer.{name}": value for name, value in self.trainer_defaults.items()})
        skipped_of_model = {*FACTORIES, *PYTHON_ONLY}
        parser.add_subclass_arguments(PolicyModule, "model", fail_untyped=False, required=True, skip=skipped_of_model)
        data: Any = self.datamodule_class
        parser.add_class_arguments(data, "data", fail_untyped=False, sub_configs=True, skip={"task"})
        parser.add_argument(
            "--data.task",
            type=Task | None,  # pyright: ignore[reportArgumentType]  # jsonargparse takes any type expression
            default=None,
            help="An object whose `train()` and `val()` return rows, such as `lit_rl.data.tasks.Addition`.",
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        for key, classes in FACTORIES.items():
            parser.add_subclass_arguments(
                classes, key, required=False, help=f"The module's {key}; null is its default."
            )
        parser.add_argument(
            "--allow_targets",
            type=list[str],
            default=[],
            help="Your own packages that a `class_path` may name, by hand on the command line: [my_package].",
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        with in_one_sentence(FACTORIES):
            self.config = parser.parse_args(args)
        section = self.config.get(str(self.config.get("subcommand")), self.config)
        _write_where_it_is_typed(section, list(args or ()))
        extra = set(section.get("allow_targets") or []) - set(_named_on_the_command_line(args))
        if extra:
            raise ConfigError(
                f"allow_targets={sorted(extra)} stands in a config file. It counts only where you type it: "
                f"--allow_targets=[{','.join(sorted(extra))}]."
            )

    def _parse_ckpt_path(self) -> None:
        """Take settings from the user's words alone. Lightning would take those in a checkpoint, which somebody else
        may have written, and would read the whole file for them before anybody has looked at it."""

    def instantiate_classes(self) -> None:
        self._check_nulls()
        self._check_row_functions()
        with in_one_sentence(FACTORIES):
            # The module is built last: its constructor is given what stands in the keys beside it, and checks it.
            self.config_init = self.parser.instantiate(self.config, instantiators=[(_later, PolicyModule, True)])
            self.datamodule = self._built("data")
            self.model = self._module(self._built("model"))
            self.trainer = self.instantiate_trainer()

    def _check_row_functions(self) -> None:
        """Refuse a function from row to row by a dotted name that no config may build: jsonargparse sees a text."""
        data, given = self._setting("data") or {}, self._setting("allow_targets") or ()
        allowed = (*ALLOWED, *(f"{name}." for name in given))
        for each in (data, *(data.get("sources") or ())):
            name = each.get("map_row") if hasattr(each, "get") else None
            if isinstance(name, str) and ":" not in name and not is_file_path(name) and not name.startswith(allowed):
                raise ConfigError(
                    f"data.map_row={name!r} is not on the list of what a config may build "
                    f"({', '.join(f'{prefix}*' for prefix in ALLOWED)}). Name a function of your own by its path, "
                    "--data.map_row=./file.py:name or package.module:name, or allow its package on the command line: "
                    f"--allow_targets=[{name.split('.')[0]}]."
                )

    def _check_nulls(self) -> None:
        lightning_arguments.check_nulls("data", self._setting("data"), self.datamodule_class)
        lightning_arguments.check_nulls("trainer", self._setting("trainer"), L.Trainer)
        for key in ("model", *FACTORIES):
            if (spec := self._setting(key)) is not None:
                lightning_arguments.check_nulls(key, spec)

    def _module(self, make: partial[PolicyModule]) -> PolicyModule:
        chosen = {key: self._built(key) for key in FACTORIES}
        given = {key: factory for key, factory in chosen.items() if factory is not None}
        taken = {parameter.name for parameter, _ in parameters(make.func)}
        module = make(**{key: factory for key, factory in given.items() if key in taken})
        for key in given.keys() - taken:  # a module of the user's, or a reference for a method that has no use for one
            setattr(module, key, given[key])
        return module

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        given = self._built("trainer")["plugins"]
        plugins = [] if given is None else list(given) if isinstance(given, list) else [given]
        settings = self._built("trainer")
        kwargs["max_epochs"] = run_info.max_epochs(settings)
        kwargs["devices"] = devices_of_launcher(settings["devices"])
        kwargs["accumulate_grad_batches"] = cut_by(self.model, settings["accumulate_grad_batches"])
        kwargs["precision"] = given = trainer_precision(settings, self._setting("ckpt_path"))
        try:
            trainer = super().instantiate_trainer(plugins=[*plugins, AtomicCheckpointIO()], **kwargs)
        except TypeError as error:  # it checks settings one by one, and names the one that it refuses
            raise ConfigError(f"trainer: {error}") from error
        if choice := settle_precision(settings["precision"], given, trainer, self.model):
            self._setting("trainer")["precision"] = choice.precision  # as `SaveConfig` writes it
            if trainer.is_global_zero:
                choice.say()
        return let_loggers_fail(trainer)

    def _run_subcommand(self, subcommand: str) -> None:
        with closing_report.report_unwritten(self.trainer):
            try:
                told = (
                    explain_out_of_memory(self.model)
                    if isinstance(self.model, PolicyModule)
                    else contextlib.nullcontext()
                )
                exits = exits_as_errors(self.trainer) if subcommand == "fit" else contextlib.nullcontext()
                with watching_children(self.trainer, self._give_up), exits, told:
                    super()._run_subcommand(subcommand)
                wait_for_children(self.trainer.strategy.launcher)
            except Exception as error:
                if subcommand == "fit" and isinstance(self.model, PolicyModule):
                    with contextlib.suppress(Exception):  # nothing may hide the error itself
                        train.save_after_error(self._run_of(), {}, error)
                self._write_down(error)
                raise
            except SystemExit:  # of Slurm's signal before the training: the job begins anew in the same folder
                self._leave()
                raise
            finally:
                for config in self._saved_configs():
                    config.close()

    def _write_down(self, error: Exception) -> None:
        """Record a failed fit as `train` does; a folder that this start did not take is left alone."""
        upstream.disarm_lightning_observer()
        with contextlib.ExitStack() as around:
            around.callback(end_children, self.trainer.strategy.launcher)
            for config in self._saved_configs():
                if config.run_dir is None:
                    continue
                heard = record_error(error, config.run_dir, self.trainer, _command())
                if self.trainer.is_global_zero:
                    config.leave(self.trainer)
                if heard is not None:
                    raise heard from error

    def _leave(self) -> None:
        for config in self._saved_configs():
            if config.run_dir is not None and self.trainer.is_global_zero:
                config.leave(self.trainer)

    def _give_up(self, error: BackendError) -> int:
        begun = (config.run_dir for config in self._saved_configs() if config.run_dir is not None)
        return record_lost_rank(error, next(begun, None), self.trainer, _command())

    def _saved_configs(self) -> list[SaveConfig]:
        """Return the config callbacks; none with `fast_dev_run`, where nothing is written."""
        return [each for each in self.trainer.callbacks if isinstance(each, SaveConfig)]  # pyright: ignore

    def predict(self, model: Any, datamodule: Any, ckpt_path: str | None = None) -> None:
        """Write completions of the validation prompts, one JSON line each, to `predictions.jsonl`."""
        run_dir = RunDir(_folder(self.trainer))
        run_dir.path.mkdir(parents=True, exist_ok=True)
        evaluate.predict_completions(Run(model, datamodule, self.trainer, run_dir, ckpt_path, command="", dataset=""))


class SaveConfig(SaveConfigCallback):
    """The config of a `fit` beside its logs, without secrets. Another run's is never overwritten."""

    run_dir: RunDir | None = None
    """Folder of the metrics, once this run has begun there."""
    folder = Path()
    """Folder of the config. The Trainer's `log_dir` is a collective, which a single rank that fails cannot ask for."""
    missing: Sequence[Path] = ()
    """Folders that this start makes, the innermost first."""
    wrote_first = False
    """True if the folder had no config before this start."""
    lock: RunLock | None = None
    """The lock that keeps other runs out of the folder, on rank 0."""

    def begin(self, trainer: L.Trainer) -> None:
        """Refuse, before anything is measured, a folder that another run writes into, or has written into.

        Raises:
            StorageError: it is in use, is a file, or cannot be written.
            ConfigError: it holds another run's config.
        """
        folder = _folder(trainer)
        missing = RunDir(folder).missing_folders()
        if trainer.is_global_zero:
            self.lock = _locked(folder)
            if folder in missing:  # the lock is in it, so the CSVLogger takes it for one with earlier logs
                written = re.escape(str(trainer.log_dir or folder))  # as the logger writes it
                warnings.filterwarnings("ignore", f"Experiment logs directory {written} exists")
            self._refuse(folder, self._is_of_another(folder, trainer))
        self.run_dir = RunDir(_folder_of_metrics(trainer))
        self.folder, self.missing = folder, missing
        if trainer.is_global_zero and (folder / CONFIG_NAME).exists():
            self.run_dir.error_file.unlink(missing_ok=True)  # of the attempt before

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self.run_dir is not None:  # another rank may have found another version to be the next
            self.run_dir = RunDir(trainer.strategy.broadcast(self.run_dir.path))
        if stage != "fit":
            return
        folder = _folder(trainer)
        self._refuse(folder, trainer.strategy.broadcast(self._is_of_another(folder, trainer)))
        if trainer.is_global_zero:
            folder.mkdir(parents=True, exist_ok=True)
            self.wrote_first = not (folder / CONFIG_NAME).exists()
            (folder / CONFIG_NAME).write_text(yaml.safe_dump(self._tree(), sort_keys=False))

    def close(self) -> None:
        """Let the next run into the folder. May be called again."""
        if self.lock is not None:
            self.lock.close()

    def leave(self, trainer: L.Trainer) -> None:
        """Clean up after a failed start: write the page if anything was learned, else remove the folder."""
        assert self.run_dir is not None
        folder, kept_for = RunDir(self.folder), "train/"
        if self.wrote_first and trainer.global_step == 0:  # else the next start would find another run's config
            (folder.path / CONFIG_NAME).unlink(missing_ok=True)
        if trainer.global_step > 0 or folder.would_keep(self.missing, kept_for):
            if self.run_dir.metrics.is_file():
                run_page.write_run_page_at_end(self.run_dir.path)
            return
        folder.withdraw(self.missing, kept_for)

    def _tree(self) -> dict[str, Any]:
        """Return the config as it is written, without secrets."""
        return redact(yaml.safe_load(self.parser.dump(self.config, skip_none=False)))

    def _is_of_another(self, folder: Path, trainer: L.Trainer) -> bool:
        return (folder / CONFIG_NAME).exists() and not self._goes_on_in(folder, trainer)

    def _refuse(self, folder: Path, refused: bool) -> None:
        if refused:
            found = ""
            if self.config.get("ckpt_path") == "last":
                found = " (--ckpt_path=last finds no last.ckpt of that run: ModelCheckpoint writes it with save_last)"
            raise ConfigError(
                f"{folder / CONFIG_NAME} belongs to another run. Give this one its own folder "
                "(trainer.default_root_dir, or the logger's version), or go on with that one: --ckpt_path with a "
                f"checkpoint in this folder{found}."
            )

    def _goes_on_in(self, folder: Path, trainer: L.Trainer) -> bool:
        """Tell whether the checkpoint to resume lies in the folder. (`trainer.ckpt_path` is not known yet.)"""
        given = self.config.get("ckpt_path")
        if given == "last":
            return _has_last(trainer) or self._is_own(folder)
        # Lightning ends with an error of its own where it finds none of these.
        return given is not None and (given in ("best", "hpc") or folder.resolve() in Path(given).resolve().parents)

    def _is_own(self, folder: Path) -> bool:
        """Tell whether this very config stands there: a run that died before its first checkpoint begins anew."""
        try:
            there = yaml.safe_load((folder / CONFIG_NAME).read_text())
        except (OSError, ValueError, yaml.YAMLError):
            return False
        return isinstance(there, dict) and {**there, "ckpt_path": None} == {**self._tree(), "ckpt_path": None}


def _has_last(trainer: L.Trainer) -> bool:
    """Tell whether Lightning finds a checkpoint for `ckpt_path=last`. Where it finds none it begins anew, with a
    warning."""
    found: list[Any] = [each for each in trainer.callbacks if isinstance(each, ModelCheckpoint)]  # pyright: ignore
    return any(upstream.has_last_checkpoint(each, trainer) for each in found)


def _locked(folder: Path) -> RunLock:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"The run's folder {folder} cannot be made ({error.strerror}). Take another trainer.default_root_dir, or "
            "another folder of the logger."
        ) from error
    return RunLock(folder, "trainer.default_root_dir")


def _later(class_type: type, *arguments: Any, **keywords: Any) -> Any:
    """Return a class and its arguments, to be built by a call."""
    return partial(class_type, *arguments, **keywords)


def _command() -> str:
    """Return the typed command, with each key and its value as one word, so that a secret's name stands beside it."""
    words = ["lit-rl"]
    for word in sys.argv[1:]:
        if words[-1].startswith("--") and "=" not in words[-1] and not word.startswith("--"):
            words[-1] += f"={word}"
        else:
            words.append(word)
    return shlex.join(words)


def _write_where_it_is_typed(section: Any, words: Sequence[str]) -> None:
    """Let the loggers of a config file write into a typed `default_root_dir` too, unless these were typed as well:
    typed words win over a file."""
    names = {word.partition("=")[0] for word in words}
    if "--trainer.default_root_dir" not in names or any(name.startswith("--trainer.logger") for name in names):
        return
    folder, loggers = section.get("trainer.default_root_dir"), section.get("trainer.logger")
    for logger in loggers if isinstance(loggers, list) else [loggers]:
        if hasattr(logger, "get") and logger.get("init_args.save_dir") is not None:
            logger["init_args.save_dir"] = folder


_TO_WRITE_SAMPLES = "--trainer.callbacks+=lit_rl.callbacks.Samples"
_TO_EXPORT = (
    "--trainer.callbacks+=lit_rl.callbacks.Export --trainer.callbacks.folder=FOLDER --trainer.callbacks.every=N"
)


def _exports(trainer: L.Trainer) -> list[Path]:
    """Return the exports of the callback that writes models, the newest last."""
    found = (each.folder for each in trainer.callbacks if isinstance(each, Export))  # pyright: ignore
    return [path for folder in found for path in sorted(folder.glob("step_*")) if path.is_dir()]


def _newest_checkpoint(trainer: L.Trainer) -> Path | None:
    callback: Any = trainer.checkpoint_callback
    saved = getattr(callback, "last_model_path", "") or getattr(callback, "best_model_path", "")
    return Path(saved) if saved else None


def _folder(trainer: L.Trainer) -> Path:
    """Return the folder that the run writes to. A logger may have no folder (JsonlLogger); then it is the Trainer's."""
    return Path(trainer.log_dir or trainer.default_root_dir)


def _folder_of_metrics(trainer: L.Trainer) -> Path:
    """Return the folder of the JsonlLogger; the Trainer's where there is none."""
    paths = (logger.path for logger in trainer.loggers if isinstance(logger, JsonlLogger) and logger.path)
    return next((path.parent for path in paths), Path(trainer.default_root_dir))


# ---------------------------------------------------------------------- what a config may name


def _named_on_the_command_line(arguments: Sequence[str]) -> list[str]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--allow_targets", "--allow_targets+", action="append", default=[])
    given = ",".join(parser.parse_known_args(list(arguments))[0].allow_targets)
    return [name for name in re.split(r"[\s,\[\]'\"]+", given) if name]


@contextmanager
def _importing_only(by_hand: Sequence[str]) -> Iterator[None]:
    """Let jsonargparse import only paths on the list of the Hydra command line and those that the user named.

    It checks a path before it is imported, and again where the object really comes from.
    """
    find_here(by_hand)
    allowed = [prefix.rstrip(".") for prefix in ALLOWED]
    set_parsing_settings(
        import_path_denylist=["*"],
        import_path_allowlist=[*allowed, *by_hand],
        instantiate_subclass_spec_in_any=False,
        subclasses_enabled=[kind for kinds in FACTORIES.values() for kind in kinds],  # dataclasses are not, by default
    )
    try:
        yield
    finally:
        if only_now := sorted(set(by_hand) - set(allowed)):
            set_parsing_settings(import_path_denylist=only_now)
