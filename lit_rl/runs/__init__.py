"""The commands of `lit-rl` around a Trainer's `fit` and `validate`, one file each, and the life of a run's processes.
They know no config format."""

from __future__ import annotations
