"""What a run that learns from a data set refuses before any weight is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import rank_zero_warn

from lit_rl.algorithms.preflight import on_policy as checks
from lit_rl.algorithms.rollouts.plan import OfflinePlan
from lit_rl.errors import ConfigError
from lit_rl.models.reference.base import Auto

if TYPE_CHECKING:
    from lit_rl.algorithms.loop.offline import OfflineModule

MODULES = {
    "texts": "SupervisedDataModule(...) (data=texts)",
    "pairs": "PreferenceDataModule(...) (data=preferences)",
    "verdicts": "PreferenceDataModule(...) (data=preferences)",
    "stepwise": "StepwiseDataModule(...) (data=steps)",
}
"""The data module of each kind, and its config."""


def against_data(module: OfflineModule, stage: str) -> OfflinePlan | None:
    """Bind the rewards to the columns, check lengths against the context, and work out the batches.

    Raises:
        ConfigError: the Trainer has no data module of the right kind, or batches do not divide.
        RewardError: a reward needs what is no column.
    """
    trainer, data = module.trainer, getattr(module.trainer, "datamodule", None)
    if module.learns_from not in getattr(data, "serves", ()):
        came = "no data module" if data is None else type(data).__name__
        raise ConfigError(
            f"{type(module).__name__} learns from {module.learns_from}; the Trainer got {came}. Pass datamodule="
            f"{MODULES[module.learns_from]}."
        )
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks):  # pyright: ignore
        raise ConfigError(
            "GradientAccumulationScheduler changes the micro-batches of a step during the run, and data.batch_size "
            "counts the rows of a whole step. Use one trainer.accumulate_grad_batches."
        )
    _context(module, data)
    checks.bind_val(module, data)
    module.reward_functions.load()
    if not (module.needs_reference or isinstance(module.reference, Auto)):
        rank_zero_warn(
            f"reference={type(module.reference).__name__} is not loaded: {type(module).__name__} has no use for one."
        )
    if stage != "fit":
        return module.plan
    if data.stream_buffer is not None:  # pyright: ignore
        _needs_no_whole_set(module)
    return OfflinePlan(
        batch_size=data.batch_size,  # pyright: ignore
        accumulate=trainer.accumulate_grad_batches,
        world_size=trainer.world_size,
        rows=len(data.corpus.train),  # pyright: ignore
        stream_buffer=data.stream_buffer,  # pyright: ignore
    )


def _needs_no_whole_set(module: OfflineModule) -> None:
    """A stream is never there all at once, so what looks at every row before the first step cannot be."""
    writes = getattr(module, "on_policy_fraction", 0) > 0 or getattr(module, "teacher_completions", False)
    for is_set, what, instead in (
        (module.precomputed, "algo.precompute_reference=true asks the reference about", "set it to false"),
        (
            getattr(module, "prompt_weights", None),
            "algo/prompt_weights=density_ratio is fitted to a sample of",
            "take algo/prompt_weights=none",
        ),
        (
            writes,
            "algo.on_policy_fraction above 0 and algo.teacher_completions=true look for the prompt of",
            "set algo.on_policy_fraction=0 and algo.teacher_completions=false",
        ),
    ):
        if is_set:
            raise ConfigError(
                f"data.stream_buffer: {what} all rows before the first step, and a stream is never there all at once. "
                f"Leave data.stream_buffer out, or {instead}."
            )


def _context(module: OfflineModule, data) -> None:
    context = module.model.context_length
    if context is not None and data.longest_text > context:
        streamed = getattr(data, "stream_buffer", None) is not None  # then it is what a later row may have
        longest = "A row of a stream may have" if streamed else "The longest row has"
        raise ConfigError(
            f"{longest} {data.longest_text} tokens, but the context of {module.model.name} holds {context}: "
            f"lower data.max_length to {context}."
        )
    if longest := data.longest_val_prompt:
        own = module.evaluation.max_new_tokens
        group, new_tokens = ("sampling", module.sampling.max_new_tokens) if own is None else ("eval", own)
        checks.context(module, group, longest, new_tokens, "data.max_length")
