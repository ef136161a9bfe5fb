"""Which data module the keys `--data.*` of LightningCLI belong to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import lightning as L
import yaml

from lit_rl import algorithms
from lit_rl.cli.config_files import check_size
from lit_rl.data.datamodule import RolloutDataModule
from lit_rl.data.offline.datamodule import PreferenceDataModule, StepwiseDataModule, SupervisedDataModule

DATA_MODULES: dict[str, type[L.LightningDataModule]] = {
    "texts": SupervisedDataModule,
    "pairs": PreferenceDataModule,
    "verdicts": PreferenceDataModule,
    "stepwise": StepwiseDataModule,
}
"""Data modules by the kind that an algorithm learns from; `RolloutDataModule` for all others."""


def data_module_of(arguments: Sequence[str]) -> type[L.LightningDataModule]:
    """Return the data module whose settings are the keys of `data`: that of the kind which the algorithm learns from.

    The algorithm is told from the arguments and from the config files that they name, the last word counting.
    """
    named, before = "", ""
    for argument in arguments:
        key, has_value, value = argument.partition("=") if argument.startswith("-") else (before, "=", argument)
        before = "" if has_value else argument
        if has_value and key in ("--config", "-c"):
            named = _model_in(Path(value)) or named
        elif has_value and key in ("--model", "--model.class_path"):
            named = value
    found = getattr(algorithms, named.rpartition(".")[2], None)
    return DATA_MODULES.get(getattr(found, "learns_from", ""), RolloutDataModule)


def _model_in(path: Path) -> str:
    """Return the class that a config file gives `model`; empty where it gives none, or cannot be read: the parser
    reports that."""
    check_size(path)
    try:
        model = (yaml.safe_load(path.read_text()) or {}).get("model")
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
        return ""
    return str(model.get("class_path", "") if isinstance(model, dict) else model or "")
