"""`train.py` and `lit-rl train`: Hydra composes, and what can be refused without torch is refused before it loads.

Hydra makes objects of `hydra.callbacks`, of launchers, sweepers and loggers while it starts, before any of our code
sees the config. So its loader is replaced by one that checks what it has composed.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException

from lit_rl.cli import (
    config_files,
    data_kinds,
    fast_checks,
    key_checks,
    process,
    run_info,
    run_reports,
    schemas,
    typed_secrets,
)
from lit_rl.cli.messages import describe, report_errors
from lit_rl.cli.run_info import TOLD_CHECKPOINT, TOLD_FOLDER, folder_of, is_launched, is_sweep, writes_nothing
from lit_rl.cli.targets import ALLOWED, check_target, find_here, targets
from lit_rl.cli.typed_words import add_switches, key_of_switches, with_line_breaks
from lit_rl.core import upstream
from lit_rl.core.errors import INTERRUPTED, BackendError, ConfigError, did_you_mean, seed_in_range
from lit_rl.core.machine import is_rank_zero
from lit_rl.runs.run_lock import RunLock

# ---------------------------------------------------------------------- one command line


TASKS = (
    "fit", "eval", "validate", "test", "predict", "reward_test", "env_check", "best_of_n", "plan", "data_check", "chat",
    "serve", "doctor", "transcripts", "report", "export", "replay",
)  # fmt: skip
"""Values of `task=`."""

_OF_FILES = {"transcripts": run_reports.run_transcripts, "report": run_reports.run_report}
"""Tasks that read a run's files, for which torch is not loaded."""

_READ_A_RUN = ("replay", "chat", "export", "eval", "validate", "test", "predict", "best_of_n")
"""Tasks that take settings from the folder of a run."""

_LAUNCH = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK", TOLD_FOLDER, TOLD_CHECKPOINT)


def main() -> int:
    """Compose from `sys.argv`, run, and return the exit code (the worst one of a sweep)."""
    with upstream.before_hydra_reads(config_files.check_size):
        return _main()


def _main() -> int:
    if not schemas.register_stored():
        schemas.register_schemas()
    upstream.compose_with(Composer().load)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # exceptions come to cli.messages, not to Hydra's own printer
    codes: list[int] = []
    fast_checks.check_sweep(sys.argv[1:])
    sys.argv, note = _chosen_before(sys.argv)
    here, entry = os.getpid(), str(Path(sys.argv[0]).absolute())

    @hydra.main(version_base="1.3", config_path="pkg://lit_rl.conf", config_name="config")
    def job(config: DictConfig) -> None:
        # A launcher of Hydra's (joblib, submitit) runs jobs in other processes, and hears of errors only.
        if os.getpid() != here:
            return _job_elsewhere(config, entry)
        with _one_job():
            # Reported here and not raised: a sweep goes on with its next job, and Hydra adds no line of its own.
            codes.append(report_errors(lambda: _run_and_note(config)))

    if note and is_rank_zero():  # before Hydra composes, which may refuse a key that the group lacks
        sys.stdout.write(f"{note}\n")
        sys.stdout.flush()
    try:
        job()
    finally:  # a launcher brings the error of a job
        sweep_ended()
    return max(codes, default=0)


def _chosen_before(arguments: Sequence[str]) -> tuple[list[str], str]:
    """Call `data_kinds.chosen_before`, where the words name a file whose columns matter."""
    keys = {word.lstrip("+").partition("=")[0] for word in arguments}
    if "data.path" not in keys or keys & fast_checks.TELL_THE_DATA:
        return list(arguments), ""
    fast_checks.check_words(arguments)
    return data_kinds.chosen_before(arguments)


def _job_elsewhere(config: DictConfig, entry: str) -> None:
    """Run one job of a sweep, in a process that a launcher of Hydra's has started.

    Args:
        config: Config of the job.
        entry: The program that the user started, which is what Lightning starts for other ranks.

    Raises:
        LitRLError: as the job did; the launcher brings it to the process that the user started.
    """
    import __main__

    sys.argv, __main__.__spec__ = [entry], None
    with _one_job():
        if code := _run_and_note(config):
            raise BackendError(f"The job {HydraConfig.get().job.num} of the sweep ended with the exit code {code}.")


@contextlib.contextmanager
def _one_job() -> Iterator[None]:
    """Make Lightning's relaunch of `sys.argv` mean this job, and leave nothing behind for the sweep's next one.

    In a sweep `sys.argv` holds the whole sweep: a process started for rank 1 would run all of it.
    """
    config, argv = HydraConfig.get(), list(sys.argv)
    before = {name: os.environ.get(name) for name in _LAUNCH}
    if is_sweep():
        sys.argv = [argv[0], *config.overrides.task, "hydra.mode=RUN"]
        inner: Any = HydraConfig.instance().cfg
        with flag_override(inner.hydra, ["readonly", "struct"], [False, False]):
            inner.hydra.run.dir = "."
    try:
        yield
    finally:
        sys.argv = argv
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if "torch" in sys.modules:
            import torch.distributed as dist

            if dist.is_available() and dist.is_initialized():
                dist.destroy_process_group()


# ---------------------------------------------------------------------- one job


def check_and_run(config: DictConfig) -> int:
    """Check the settings of one job, and run it."""
    _check(config)
    fast_checks.check_config(config)
    data_kinds.check(config)
    if config.task in _OF_FILES:
        return _OF_FILES[config.task](config) if is_rank_zero() else 0
    if _is_over(config):
        return 0
    _load(config.task)
    with process.without_root_handlers():
        from lit_rl.cli import hydra_app

    return hydra_app.run_job(config)


def _check(config: DictConfig) -> None:
    """Refuse settings that no command takes."""
    typed = was_typed(HydraConfig.get().overrides.task, "allow_targets")
    key_checks.check_top_keys(HydraConfig.get().runtime.choices, config)
    typed_secrets.check_secrets(config)
    if config.allow_targets and not typed:
        raise ConfigError("allow_targets is taken from the command line only: a file must not widen what it may build.")
    find_here(config.allow_targets or ())
    if config.trust_run and not was_typed(HydraConfig.get().overrides.task, "trust_run"):
        raise ConfigError("trust_run is taken from the command line only: a file must not vouch for another.")
    if config.trust_run and config.task not in _READ_A_RUN:
        raise ConfigError(
            "trust_run is a key of lit-rl replay, chat, export, eval and best-of-n: no other command reads a run's "
            "config."
        )
    if config.task == "replay":
        return
    if config.replay.losses or config.replay.rollout:
        raise ConfigError("replay.* are keys of lit-rl replay (task=replay): no other command reads them.")
    if config.task not in TASKS:
        raise ConfigError(f"task={config.task}: allowed is {', '.join(TASKS)}.{did_you_mean(config.task, TASKS)}")
    key_checks.check_choices(config)
    if config.task == "fit":
        fast_checks.check_warmup(config, key_checks.overridden_keys())
    if isinstance(config.seed, int) and not isinstance(
        config.seed, bool
    ):  # here, because data and algorithm take it by names of their own
        seed_in_range("seed", config.seed)
    elif isinstance(config.seed, str | float | bool):
        raise ConfigError(f"seed={config.seed!r} is not a whole number, such as seed=1.")


def _is_over(config: DictConfig) -> bool:
    """Tell whether the run that would be resumed has finished, and print it. Beside other processes it is printed
    where they meet."""
    if config.task != "fit" or config.ckpt_path != "last" or not config.run_dir or is_launched():
        return False
    folder = folder_of(config)
    if not run_info.is_run_over(config.trainer, folder):
        return False
    if not writes_nothing(config):
        RunLock(folder).close()  # refuses a run that still goes on there
    run_info.print_run_over(folder)
    return True


def _load(task: str) -> None:
    """Announce slow imports, in rank 0."""
    if "torch" in sys.modules or not is_rank_zero():
        return
    command = "train" if task == "fit" else task.replace("_", "-")
    sys.stderr.write(f"lit-rl {command}: loading torch, lightning and transformers ...\n")
    sys.stderr.flush()


# ---------------------------------------------------------------------- jobs of a sweep


_FOLDER = "LIT_RL_SWEEP"
"""Variable with the sweep's folder. Jobs that a launcher of Hydra's starts in other processes inherit it."""


def sweep_began(config: DictConfig) -> None:
    """Remember the folder of a sweep that begins.

    Args:
        config: Config of the whole sweep, with Hydra's node. Its `run_dir` is the user's, and the same for all jobs.
    """
    folder = config.get("run_dir") or config.hydra.sweep.dir
    os.environ[_FOLDER] = str(Path(str(folder)).expanduser().absolute())


def _run_and_note(config: DictConfig) -> int:
    """Run one job, and add a line to the sweep's table where it is a training of a sweep."""
    if not is_sweep() or config.task != "fit" or writes_nothing(config) or not is_rank_zero():
        return check_and_run(config)
    return run_noted_job(check_and_run, config, folder_of(config))


def run_noted_job(run: Callable[[DictConfig], int], config: DictConfig, folder: Path) -> int:
    """Run a training, and add a line about its start and one about its end where it is a job of a sweep.

    Args:
        run: Runs the job, and returns the exit code.
        config: Config of the job.
        folder: Folder of the run, which need not exist.
    """
    sweep = os.environ.get(_FOLDER)
    if not sweep or HydraConfig.get().mode != RunMode.MULTIRUN:
        return run(config)
    with process.without_root_handlers():
        from lit_rl.reports.run_files import RunFiles
        from lit_rl.reports.sweep import note_job

    job = HydraConfig.get()
    begin = {"job": job.job.num, "overrides": list(job.overrides.task), "folder": str(folder.absolute())}
    begin |= {"earlier_run": True} if RunFiles(folder).holds_a_run else {}
    note_job(Path(sweep), begin)
    try:
        code = run(config)
    except BaseException as error:
        described = describe(error)
        interrupted = {"exit_code": INTERRUPTED} if isinstance(error, KeyboardInterrupt) else {}
        end = {name: described[name] for name in ("exit_code", "error", "message")} | interrupted
        note_job(Path(sweep), begin | end)
        raise
    note_job(Path(sweep), begin | {"exit_code": code})
    return code


def sweep_ended() -> None:
    """Write the table and the page after the last job, where any job of a training began."""
    if (sweep := os.environ.pop(_FOLDER, None)) is None or not is_rank_zero():
        return
    from lit_rl.reports.sweep import write_sweep_at_end

    write_sweep_at_end(Path(sweep))


# ---------------------------------------------------------------------- Hydra's own node


_PLUGINS = ("hydra._internal.core_plugins.", "hydra_plugins.")

_BUILT = ("callbacks", "launcher", "sweeper")

_LOGGING = ("hydra_logging", "job_logging")

_CLASSES = ("logging.StreamHandler", "logging.NullHandler", "logging.Formatter", "colorlog.ColoredFormatter")

_LOG_FILE = "${hydra.runtime.output_dir}/${hydra.job.name}.log"
"""File of Hydra's own `hydra/job_logging=default`; any other file might be one of the user's."""

_STREAMS = ("ext://sys.stdout", "ext://sys.stderr")

_IS_IT_A_SWEEP = {"run_mode": RunMode.MULTIRUN, "from_shell": True, "validate_sweep_overrides": False}
"""Arguments with which `Hydra.get_mode` composes."""

_MAY_SWEEP = re.compile(r"^(-m$|--mu)|^[+~]*hydra[./]|,|\(")
"""Words that may make a sweep or are about Hydra itself. Other words among them cost a second composition."""


class Composer:
    """The composing of one command line, which Hydra asks for twice: to find out whether it is a sweep, and to run it.

    The second time takes half a second of a start. So where no word can make a sweep, the first config is the one of
    the run.
    """

    def __init__(self) -> None:
        self._composed: tuple[list[str], DictConfig] | None = None

    def load(
        self, compose: Callable[..., DictConfig], config_name: str | None, overrides: list[str], **named: Any
    ) -> DictConfig:
        """Compose a config, and check it before anything reads it; see `load_checked` for the arguments."""
        words, kept = list(overrides), self._composed
        self._composed = None
        if named == _IS_IT_A_SWEEP and not any(_MAY_SWEEP.search(word) for word in (*words, *sys.argv[1:])):
            config = load_checked(compose, config_name, words, **named | {"run_mode": RunMode.RUN})
            if config.hydra.mode is None:
                with flag_override(config.hydra, ["readonly", "struct"], [False, False]):
                    config.hydra.mode = RunMode.RUN
                    config.hydra.overrides.hydra.append("hydra.mode=RUN")  # as Hydra would type it
                self._composed = words, config
            return config
        if kept is not None and kept[0] == words and named.get("run_mode") == RunMode.RUN:
            return kept[1]
        return load_checked(compose, config_name, overrides, **named)


def load_checked(
    compose: Callable[..., DictConfig], config_name: str | None, overrides: list[str], **named: Any
) -> DictConfig:
    """Compose a config, and check it before anything reads it.

    Args:
        compose: `ConfigLoader.load_configuration` of Hydra.
        config_name: Its first argument.
        overrides: Words of the command line.
        named: Its other arguments.
    """
    words = with_line_breaks(overrides)
    switches = {word: key for word in words if (key := key_of_switches(word)) is not None}
    others: Any = compose(config_name, [word for word in words if word not in switches], **named) if switches else {}
    read = [
        add_switches(word, switches[word], OmegaConf.select(others, switches[word])) if word in switches else [word]
        for word in words
    ]
    config = compose(config_name, [each for words in read for each in words], **named)
    check_hydra_node(config, overrides)
    # The record holds words as they were typed: jobs of a sweep, and a config with more groups, are composed of it.
    typed = {words[-1]: word for words, word in zip(read, overrides, strict=True)}
    with flag_override(config.hydra, ["readonly", "struct"], [False, False]):
        config.hydra.overrides.task = [typed[word] for word in config.hydra.overrides.task if word in typed]
    # To find out whether it is a sweep at all, Hydra composes as for one and takes any override.
    if named["run_mode"] == RunMode.MULTIRUN and named.get("validate_sweep_overrides", True):
        sweep_began(config)
    return config


def check_hydra_node(config: DictConfig, overrides: Sequence[str]) -> None:
    """Refuse settings that would run code, or write where they should not.

    Args:
        config: As it was composed, with Hydra's node.
        overrides: As they were typed: `allow_targets` of a file widens nothing.

    Raises:
        ConfigError: names the key.
    """
    if (hydra := config.get("hydra")) is None:
        return
    mine = config.get("allow_targets") if was_typed(overrides, "allow_targets") else None
    if mine is not None and not (OmegaConf.is_list(mine) and all(isinstance(name, str) for name in mine)):
        names = mine if isinstance(mine, str) else "my_package"
        raise ConfigError(f"allow_targets={mine} is no list of packages: type 'allow_targets=[{names}]'.")
    allowed = (*ALLOWED, *_PLUGINS, *(f"{name}." for name in mine or ()))
    for name in (*_BUILT, *_LOGGING):
        node = _followed(hydra, name, f"hydra.{name}")
        for key, target in targets(node, f"hydra.{name}"):
            check_target(key, target, allowed)
        for key, told in _refused(node, f"hydra.{name}") if name in _LOGGING else ():
            raise ConfigError(f"{key}={told!r}: a config may choose {', '.join(_CLASSES)}, and standard output.")
    if hydra.job.env_set and not was_typed(overrides, "hydra.job.env_set"):
        raise ConfigError("hydra.job.env_set is taken from the command line only: variables choose what programs load.")


def was_typed(overrides: Sequence[str], key: str) -> bool:
    """Tell whether the command line sets this key, or one below it."""
    return any(f"{override.lstrip('+').partition('=')[0]}.".startswith(f"{key}.") for override in overrides)


def _followed(parent: Any, name: Any, key: str) -> Any:
    """Return the plain values of a node. References are followed; a text with a reference in it stays a text."""
    if OmegaConf.is_missing(parent, name):
        return None
    if OmegaConf.is_interpolation(parent, name):
        written: Any = OmegaConf.to_container(parent, resolve=False)
        text = str(written[name])
        if text.startswith("${") and ":" in text:
            raise ConfigError(f"{key}={text}: what a resolver makes of it is known too late here; write it out.")
        try:
            raw = parent[name]
        except OmegaConfBaseException:
            return text
        if not OmegaConf.is_config(raw):
            return text
    else:
        raw = parent[name]
    if OmegaConf.is_dict(raw):
        return {inner: _followed(raw, inner, f"{key}.{inner}") for inner in raw}
    if OmegaConf.is_list(raw):
        return [_followed(raw, i, f"{key}[{i}]") for i in range(len(raw))]
    return raw


def _refused(node: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield an entry that `logging.config.dictConfig` would call or import beyond the needs of a log."""
    if isinstance(node, str) and node.startswith("ext://") and node not in _STREAMS:
        yield key, node
    elif isinstance(node, list):
        for i, item in enumerate(node):
            yield from _refused(item, f"{key}[{i}]")
    elif isinstance(node, dict):
        files = node.get("class") == "logging.FileHandler" and node.get("filename") == _LOG_FILE
        for name in ("()", "class"):
            if name in node and node[name] not in _CLASSES and not files:
                yield f"{key}.{name}", str(node[name])
        for name, item in node.items():
            yield from _refused(item, f"{key}.{name}")
