"""Runs of the command line in this process."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator

from hydra.core.global_hydra import GlobalHydra
from lightning.pytorch.utilities.seed import isolate_rng

SMALL = ["trainer.max_steps=1", "eval.limit=4", "sampling.max_new_tokens=6", "callbacks.samples.print=0"]
"""One optimizer step, validated on four prompts."""


@contextlib.contextmanager
def left_as_found() -> Iterator[None]:
    """Hydra's singletons, `sys.argv`, the environment, the root logger and the random numbers as they were."""
    argv, environment, root = sys.argv, dict(os.environ), logging.getLogger()
    handlers, level = list(root.handlers), root.level
    for name in ("LIT_RL_RUN_DIR", "LOCAL_RANK"):
        os.environ.pop(name, None)
    GlobalHydra.instance().clear()
    try:
        with warnings.catch_warnings(), isolate_rng():
            yield
    finally:
        sys.argv = argv
        os.environ.clear()
        os.environ.update(environment)
        root.handlers[:], root.level = handlers, level
        GlobalHydra.instance().clear()
