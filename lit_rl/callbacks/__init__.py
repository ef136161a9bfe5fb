"""Callbacks: they watch and save, and never steer. Without them the trained weights are the same.

An alarm alone may end a run, or roll it back, where the user says so (`then`). Each name is imported at its first use:
readers of a run's files need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lit_rl.lazy_names import LazyNames

if TYPE_CHECKING:  # for type checkers and editors; `_PLACES` is the same for Python, and a test compares the two
    from lit_rl.callbacks.alarms import Alarm as Alarm
    from lit_rl.callbacks.alarms import ClippedShare as ClippedShare
    from lit_rl.callbacks.alarms import DeadGroups as DeadGroups
    from lit_rl.callbacks.alarms import EntropyCollapse as EntropyCollapse
    from lit_rl.callbacks.alarms import HeldOutFlat as HeldOutFlat
    from lit_rl.callbacks.alarms import KLBlowUp as KLBlowUp
    from lit_rl.callbacks.alarms import LengthDrift as LengthDrift
    from lit_rl.callbacks.alarms import RepetitionDrift as RepetitionDrift
    from lit_rl.callbacks.checkpoint_io import AtomicCheckpointIO as AtomicCheckpointIO
    from lit_rl.callbacks.ema import BEMAWeights as BEMAWeights
    from lit_rl.callbacks.ema import EMAWeights as EMAWeights
    from lit_rl.callbacks.export import Export as Export
    from lit_rl.callbacks.graceful_stop import GracefulStop as GracefulStop
    from lit_rl.callbacks.histograms import Histograms as Histograms
    from lit_rl.callbacks.hub_samples import HubSamples as HubSamples
    from lit_rl.callbacks.jsonl import JsonlLogger as JsonlLogger
    from lit_rl.callbacks.merge import MergedWeights as MergedWeights
    from lit_rl.callbacks.preference_sets import PreferenceSets as PreferenceSets
    from lit_rl.callbacks.profile import Profile as Profile
    from lit_rl.callbacks.progress import Progress as Progress
    from lit_rl.callbacks.record import Record as Record
    from lit_rl.callbacks.rollouts import Rollouts as Rollouts
    from lit_rl.callbacks.rollouts import SavedRollout as SavedRollout
    from lit_rl.callbacks.samples import Samples as Samples
    from lit_rl.callbacks.timed_checkpoint import TimedCheckpoint as TimedCheckpoint
    from lit_rl.callbacks.token_samples import TokenSamples as TokenSamples
    from lit_rl.callbacks.trackio_logger import TrackioLogger as TrackioLogger
    from lit_rl.callbacks.unwritten import let_loggers_fail as let_loggers_fail
    from lit_rl.callbacks.unwritten import not_written as not_written
    from lit_rl.callbacks.watchdog import Watchdog as Watchdog

_PLACES = {
    "alarms": "Alarm ClippedShare DeadGroups EntropyCollapse HeldOutFlat KLBlowUp LengthDrift RepetitionDrift",
    "checkpoint_io": "AtomicCheckpointIO",
    "ema": "BEMAWeights EMAWeights",
    "export": "Export",
    "graceful_stop": "GracefulStop",
    "histograms": "Histograms",
    "hub_samples": "HubSamples",
    "jsonl": "JsonlLogger",
    "merge": "MergedWeights",
    "preference_sets": "PreferenceSets",
    "profile": "Profile",
    "progress": "Progress",
    "record": "Record",
    "rollouts": "Rollouts SavedRollout",
    "samples": "Samples",
    "timed_checkpoint": "TimedCheckpoint",
    "token_samples": "TokenSamples",
    "trackio_logger": "TrackioLogger",
    "unwritten": "let_loggers_fail not_written",
    "watchdog": "Watchdog",
}
"""Public names by the module of this package that defines them."""

_NAMES = LazyNames(__name__, _PLACES)

__all__ = list(_NAMES.module_of)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _PLACES:  # a module, as if all were imported already
        return import_module(f"{__name__}.{name}")
    if name not in _NAMES.module_of:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _NAMES.load(name)


def __dir__() -> list[str]:
    return _NAMES.listed()
