"""Trackio, which keeps runs in a database of this machine and shows them in a browser: metrics and tables."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only


class TrackioLogger(Logger):
    """Writes metrics and samples to Trackio's database, `trackio/` in the cache of Hugging Face or in `TRACKIO_DIR`.

    `trackio show` opens the dashboard. Nothing leaves the machine unless a Space is named.

    Args:
        project: Of the dashboard.
        run: The run's name there; null takes one that Trackio makes up. One that is there already is gone on with.
        space_id: A Space of the hub that gets what is logged, such as user/name; null keeps it here.

    Raises:
        ModuleNotFoundError: Trackio is not installed.
    """

    def __init__(self, project: str = "lit_rl", run: str | None = None, space_id: str | None = None) -> None:
        super().__init__()
        import trackio  # pyright: ignore[reportMissingImports]  # noqa: F401  # missing is said at the start

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
        """Trackio's run, which begins with the first call."""
        if self._experiment is None:
            import trackio  # pyright: ignore[reportMissingImports]

            self._experiment = trackio.init(
                self.project, name=self.run, space_id=self.space_id, resume="allow", embed=False, auto_log_gpu=False,
                auto_log_cpu=False,
            )  # fmt: skip
            self.run = self._experiment.name  # whatever is logged after `end` goes on in it
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
        """Nothing: config.yaml holds them."""

    def finalize(self, status: str) -> None:
        """Nothing: a training ends several times for Lightning, with each validation around it."""

    def end(self) -> None:
        """Write what waits, and end Trackio's run; a later call begins it again. Without it Trackio does so at the end
        of the process."""
        if self._experiment is not None:
            import trackio  # pyright: ignore[reportMissingImports]

            self._experiment = None
            trackio.finish()
