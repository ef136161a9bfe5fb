"""`train.py` and `lit-rl train`: Hydra composes. What can be refused without torch is refused before it is loaded."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, flag_override

from lit_rl.cli import (
    allowed,
    choices,
    config_files,
    data_kinds,
    early,
    ends,
    hydra_node,
    own_keys,
    quiet,
    reporting,
    stored_schemas,
    sweeping,
    transcribing,
    typed_secrets,
)
from lit_rl.cli.messages import reported
from lit_rl.cli.targets import find_here
from lit_rl.cli.whereabouts import (
    TOLD_CHECKPOINT,
    TOLD_FOLDER,
    folder_of,
    is_launched,
    is_main,
    is_sweep,
    writes_nothing,
)
from lit_rl.commands.run_lock import RunLock
from lit_rl.errors import BackendError, ConfigError, did_you_mean, seed_in_range

TASKS = (
    "fit", "eval", "validate", "test", "predict", "reward_test", "env_check", "best_of_n", "plan", "data_check", "chat",
    "serve", "doctor", "transcripts", "report", "export", "replay",
)  # fmt: skip
"""Values of `task=`."""
_OF_FILES = {"transcripts": transcribing.run, "report": reporting.run}
"""Tasks that read a run's files, for which torch is not loaded."""
_READ_A_RUN = ("replay", "chat", "export", "eval", "validate", "test", "predict", "best_of_n")
"""Tasks that take settings from the folder of a run."""
_LAUNCH = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK", TOLD_FOLDER, TOLD_CHECKPOINT)


def main() -> int:
    """Compose from `sys.argv`, run, and return the exit code (the worst one of a sweep)."""
    with config_files.bounded():
        return _main()


def _main() -> int:
    if not stored_schemas.register():
        from lit_rl.cli import schemas

        schemas.register()
    hydra_node.install()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # exceptions come to cli.messages, not to Hydra's own printer
    codes: list[int] = []
    early.check_sweep(sys.argv[1:])
    sys.argv, note = _chosen_before(sys.argv)
    here, entry = os.getpid(), str(Path(sys.argv[0]).absolute())

    @hydra.main(version_base="1.3", config_path="pkg://lit_rl.conf", config_name="config")
    def job(config: DictConfig) -> None:
        # A launcher of Hydra's (joblib, submitit) runs jobs in other processes, and hears of errors only.
        if os.getpid() != here:
            return _job_elsewhere(config, entry)
        with _one_job():
            # Reported here and not raised: a sweep goes on with its next job, and Hydra adds no line of its own.
            codes.append(reported(lambda: _noted(config)))

    if note and is_main():  # before Hydra composes, which may refuse a key that the group lacks
        sys.stdout.write(f"{note}\n")
        sys.stdout.flush()
    try:
        job()
    finally:  # a launcher brings the error of a job
        sweeping.ended()
    return max(codes, default=0)


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
        if code := _noted(config):
            raise BackendError(f"The job {HydraConfig.get().job.num} of the sweep ended with the exit code {code}.")


def _noted(config: DictConfig) -> int:
    """Run one job, and add a line to the sweep's table where it is a training of a sweep."""
    if not is_sweep() or config.task != "fit" or writes_nothing(config) or not is_main():
        return run(config)
    return sweeping.noted(run, config, folder_of(config))


def run(config: DictConfig) -> int:
    """Run one job."""
    _check(config)
    early.check(config)
    data_kinds.check(config)
    if config.task in _OF_FILES:
        return _OF_FILES[config.task](config) if is_main() else 0
    if _is_over(config):
        return 0
    _load(config.task)
    with quiet.without_root_handlers():
        from lit_rl.cli import hydra_app

    return hydra_app.run(config)


def _is_over(config: DictConfig) -> bool:
    """Tell whether the run that would be resumed has finished, and print it. Beside other processes it is printed
    where they meet."""
    if config.task != "fit" or config.ckpt_path != "last" or not config.run_dir or is_launched():
        return False
    folder = folder_of(config)
    if not ends.is_over(config.trainer, folder):
        return False
    if not writes_nothing(config):
        RunLock(folder).close()  # refuses a run that still goes on there
    ends.say_is_over(folder)
    return True


def _chosen_before(arguments: Sequence[str]) -> tuple[list[str], str]:
    """Call `data_kinds.chosen_before`, where the words name a file whose columns matter."""
    keys = {word.lstrip("+").partition("=")[0] for word in arguments}
    if "data.path" not in keys or keys & early.TELL_THE_DATA:
        return list(arguments), ""
    early.check_words(arguments)
    return data_kinds.chosen_before(arguments)


def _load(task: str) -> None:
    """Announce slow imports, in the process that the user started."""
    if "torch" in sys.modules or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    command = "train" if task == "fit" else task.replace("_", "-")
    sys.stderr.write(f"lit-rl {command}: loading torch, lightning and transformers ...\n")
    sys.stderr.flush()


def _check(config: DictConfig) -> None:
    """Refuse settings that no command takes."""
    typed = hydra_node.typed(HydraConfig.get().overrides.task, "allow_targets")
    own_keys.check_read(HydraConfig.get().runtime.choices, config)
    typed_secrets.check(config)
    if config.allow_targets and not typed:
        raise ConfigError("allow_targets is taken from the command line only: a file must not widen what it may build.")
    find_here(config.allow_targets or ())
    if config.trust_run and not hydra_node.typed(HydraConfig.get().overrides.task, "trust_run"):
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
    choices.check(config)
    if config.task == "fit":
        allowed.check_warmup(config, own_keys.typed())
    if isinstance(config.seed, int) and not isinstance(
        config.seed, bool
    ):  # here, because data and algorithm take it by names of their own
        seed_in_range("seed", config.seed)
    elif isinstance(config.seed, str | float | bool):
        raise ConfigError(f"seed={config.seed!r} is no whole number, such as seed=1.")


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
