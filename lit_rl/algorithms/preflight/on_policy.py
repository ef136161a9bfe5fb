"""Until preflight/offline.py and gkd take values."""

from __future__ import annotations

from typing import Any

from lit_rl.algorithms.preflight.data import bind_validation, fits_context
from lit_rl.algorithms.preflight.settings import settings as settings


def context(module: Any, *more: Any) -> None:
    fits_context(module.model, *more)


def bind_val(module: Any, data: Any) -> None:
    bind_validation(module.reward_functions, data)
