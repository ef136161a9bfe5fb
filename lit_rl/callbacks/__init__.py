"""Callbacks: they watch and save, and never steer. Without them the trained weights are the same.

What may end a run are alarms, where the user says so (`then`), a signal, and the watchdog; an alarm may also roll it
back. Each name is imported at its first use:
readers of a run's files need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lit_rl.core.lazy_names import LazyNames

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
    from lit_rl.callbacks.exported_weights import BEMAWeights as BEMAWeights
    from lit_rl.callbacks.exported_weights import EMAWeights as EMAWeights
    from lit_rl.callbacks.exported_weights import Export as Export
    from lit_rl.callbacks.exported_weights import MergedWeights as MergedWeights
    from lit_rl.callbacks.graceful_stop import GracefulStop as GracefulStop
    from lit_rl.callbacks.hub_samples import HubSamples as HubSamples
    from lit_rl.callbacks.loggers import JsonlLogger as JsonlLogger
    from lit_rl.callbacks.loggers import TrackioLogger as TrackioLogger
    from lit_rl.callbacks.loggers import let_loggers_fail as let_loggers_fail
    from lit_rl.callbacks.loggers import not_written as not_written
    from lit_rl.callbacks.preference_sets import PreferenceSets as PreferenceSets
    from lit_rl.callbacks.profile import Profile as Profile
    from lit_rl.callbacks.progress import Progress as Progress
    from lit_rl.callbacks.record import Record as Record
    from lit_rl.callbacks.samples import Histograms as Histograms
    from lit_rl.callbacks.samples import Samples as Samples
    from lit_rl.callbacks.samples import TokenSamples as TokenSamples
    from lit_rl.callbacks.saved_rollouts import Rollouts as Rollouts
    from lit_rl.callbacks.saved_rollouts import SavedRollout as SavedRollout
    from lit_rl.callbacks.timed_checkpoint import TimedCheckpoint as TimedCheckpoint
    from lit_rl.callbacks.watchdog import Watchdog as Watchdog

_PLACES = {
    "alarms": "Alarm ClippedShare DeadGroups EntropyCollapse HeldOutFlat KLBlowUp LengthDrift RepetitionDrift",
    "checkpoint_io": "AtomicCheckpointIO",
    "exported_weights": "BEMAWeights EMAWeights Export MergedWeights",
    "graceful_stop": "GracefulStop",
    "hub_samples": "HubSamples",
    "loggers": "JsonlLogger TrackioLogger let_loggers_fail not_written",
    "preference_sets": "PreferenceSets",
    "profile": "Profile",
    "progress": "Progress",
    "record": "Record",
    "samples": "Histograms Samples TokenSamples",
    "saved_rollouts": "Rollouts SavedRollout",
    "timed_checkpoint": "TimedCheckpoint",
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
