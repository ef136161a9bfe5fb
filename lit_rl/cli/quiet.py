"""Warnings of other packages that a user of ours can do nothing about."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

_NOT_OURS = (
    r".*LeafSpec.*",
    r".*does not have many workers.*",
    r".*in eval mode.*",
    r".*Checkpoint directory .* exists and is not empty.*",
    r".*was configured so 100%.*",
    r".*`isinstance\(treespec.*",
    r".*GPU available but not used.*",
    r".*sync_dist=True.*",  # the module reduces by itself
    r".*have no logger configured.*",
    r"Total length of `list` across ranks is zero.*",  # no validation set, of which the data module tells
    r".*all_gather is deprecated.*",
    r"The dirpath has changed.*",
    r".*The total number of parameters detected may be inaccurate.*",
    r"Sparse invariant checks are implicitly disabled.*",  # torch before 2.13, though they are switched off by name
    r"`is_gradient_checkpointing` is deprecated.*",  # PEFT asks by the old name
    r".*FSDP2-wrapped module .* returned a view tensor.*",  # logits, never changed in place
)


_BANNERS = ("GPU available", "TPU available", "HPU available", "💡 Tip", "`Trainer", "Restor", "Loaded model weights")


def _made_visible(record: logging.LogRecord) -> bool:
    """Filter Lightning's lines: drop those of every start, and escape control characters of the others."""
    from lit_rl.callbacks.text import visible

    record.msg, record.args = visible(record.getMessage()), ()
    return not record.msg.startswith(_BANNERS)


class _Visible:
    """A writer of warnings like Lightning's that escapes control characters, in names of data and rewards."""

    def __init__(self, form: Any) -> None:
        self.form = form

    def __call__(self, *told: Any, **more: Any) -> str:
        from lit_rl.callbacks.text import visible

        return visible(self.form(*told, **more))


def filter_warnings() -> None:
    """Silence these warnings, and the banners that Lightning and transformers write at every start; and escape control
    characters of the rest."""
    for pattern in _NOT_OURS:
        warnings.filterwarnings("ignore", message=pattern)
    if not isinstance(warnings.formatwarning, _Visible):
        warnings.formatwarning = _Visible(warnings.formatwarning)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_made_visible)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()


@contextlib.contextmanager
def without_root_handlers() -> Iterator[None]:
    """Hide the root logger's handlers in this block: Lightning, as it is imported, propagates its messages where there
    is one, and Hydra has added one by now: each message would come twice."""
    root = logging.getLogger()
    handlers, root.handlers[:] = list(root.handlers), []
    try:
        yield
    finally:
        root.handlers[:] = handlers
