"""A logger of metrics and tables to Trackio, a local database of runs with a dashboard in the browser."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only


class TrackioLogger(Logger):
    """A logger of metrics and samples to Trackio's database, `trackio/` in the Hugging Face cache or `TRACKIO_DIR`.

    `trackio show` opens the dashboard. Nothing leaves the machine unless a Space is named.

    Args:
        project: Project of the dashboard.
        run: The run's name there; null takes a generated one. An existing run is continued.
        space_id: A Space of the hub that receives the logs, such as user/name; null keeps them local.

    Raises:
        ModuleNotFoundError: Trackio is not installed.
    """

    def __init__(self, project: str = "lit_rl", run: str | None = None, space_id: str | None = None) -> None:
        super().__init__()
        import trackio  # pyright: ignore[reportMissingImports]  # noqa: F401  # if missing, fail at the start

        self.project, self.run, self.space_id = project, run, space_id
        self._experiment: Any = None

    @property
    def name(self) -> str:
        return self.project

    @property
    def version(self) -> str | None:
        return self.run

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The run of Trackio, started by the first access."""
        if self._experiment is None:
            import trackio  # pyright: ignore[reportMissingImports]

            self._experiment = trackio.init(
                self.project, name=self.run, space_id=self.space_id, resume="allow", embed=False, auto_log_gpu=False,
                auto_log_cpu=False,
            )  # fmt: skip
            self.run = self._experiment.name  # logs after `end` continue it
        return self._experiment

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.experiment.log(dict(metrics), step=step)

    @rank_zero_only
    def log_table(self, key: str, columns: Sequence[str], data: Sequence[Sequence[Any]], step: int) -> None:
        """Log rows as one table."""
        import trackio  # pyright: ignore[reportMissingImports]

        self.experiment.log({key: trackio.Table(columns=list(columns), data=list(data))}, step=step)

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Do nothing: config.yaml holds them."""

    def finalize(self, status: str) -> None:
        """Do nothing: Lightning calls it several times in a run, with each validation."""

    def end(self) -> None:
        """Write pending logs, and end Trackio's run; a later call resumes it. Else Trackio does so at the process's
        end."""
        if self._experiment is not None:
            import trackio  # pyright: ignore[reportMissingImports]

            self._experiment = None
            trackio.finish()
