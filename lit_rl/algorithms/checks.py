"""What an on-policy run refuses before any weight is loaded."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import rank_zero_warn

from lit_rl.algorithms.batching import BatchPlan
from lit_rl.errors import ConfigError, did_you_mean, in_range
from lit_rl.rollout import Sampling

if TYPE_CHECKING:
    from lit_rl.algorithms.on_policy import OnPolicyModule


def sampling(algorithm: str, sampling: Sampling, group_size: int) -> None:
    """Settings under which a group teaches nothing, or the importance ratio would be wrong."""
    if group_size < 2:
        raise ConfigError(
            f"algo.group_size={group_size}: an advantage compares completions of one prompt, so {algorithm} needs 2 or "
            "more (8 is usual)."
        )
    if sampling.greedy:
        raise ConfigError(
            "sampling.temperature=0 draws the same completion for every member of a group, so every advantage is 0. "
            "Train with 1.0; greedy decoding is for evaluation (eval.temperature=0)."
        )
    if sampling.reshaped:
        keys = ", ".join(f"sampling.{name}={getattr(sampling, name)}" for name in sampling.reshaped)
        raise ConfigError(
            f"{keys}: completions would be drawn from another distribution than the importance ratio scores them under "
            "(softmax of all logits at the temperature), and the gradient would be wrong. Switch it off for training; "
            "eval.top_p and eval.top_k are free."
        )


def clipping(loss: Any, key: str = "algo.loss") -> None:
    """Ranges of the clip settings that a `functools.partial` of a loss carries."""
    settings = getattr(loss, "keywords", {})
    if (low := settings.get("clip_low")) is not None:
        in_range(f"{key}.clip_low", low, low=0, high=1, open_low=True)
    if (high := settings.get("clip_high")) is not None:
        in_range(f"{key}.clip_high", high, low=0, open_low=True)
    if (delta := settings.get("delta")) is not None:
        in_range(f"{key}.delta", delta, low=1 + (high if high is not None else low or 0.2), open_low=True)


def against_data(module: OnPolicyModule, stage: str) -> BatchPlan | None:
    """Bind the rewards to the columns, check lengths against the context, and work out the batches."""
    trainer, data = module.trainer, getattr(module.trainer, "datamodule", None)
    if data is None or not hasattr(data, "prompts_per_rollout"):
        raise ConfigError("Pass datamodule=RolloutDataModule(...) to the Trainer: other loaders do not know rollouts.")
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks):  # pyright: ignore
        raise ConfigError(
            "GradientAccumulationScheduler changes the micro-batches of a step during the run, and a rollout would no "
            "longer divide into them. Use one trainer.accumulate_grad_batches."
        )
    if stage == "fit":
        module.reward_functions.bind(data.columns)
        _context(module, "sampling", data.longest_prompt, module.sampling.max_new_tokens)
        _limits(module)
    if longest := data.longest_val_prompt:
        own = module.evaluation.max_new_tokens
        _context(module, "sampling" if own is None else "eval", longest, own or module.sampling.max_new_tokens)
    for name, columns in data.val_columns.items():
        try:
            module.reward_functions.bind(columns)
        except Exception as error:
            error.add_note(f"(in the validation set {name or 'data.val_*'})")
            raise
    if stage != "fit":
        return module.plan
    return BatchPlan(
        prompts_per_rollout=data.prompts_per_rollout,
        group_size=module.group_size,
        minibatches=module.minibatches,
        iterations=module.iterations,
        accumulate=trainer.accumulate_grad_batches,
        world_size=trainer.world_size,
        split_groups=module.split_groups,
        max_new_tokens=module.sampling.max_new_tokens,
    )


def monitors(trainer: Any, logged: Collection[str]) -> None:
    """At the end of a validation every metric has been logged once: a monitor of any other would wait for ever."""
    known = {*trainer.callback_metrics, *logged, "step", "epoch"}
    for callback in trainer.callbacks:
        monitor = getattr(callback, "monitor", None)
        if monitor is not None and monitor not in known:
            raise ConfigError(
                f"{type(callback).__name__}(monitor={monitor!r}) watches a metric that is never logged."
                f"{did_you_mean(monitor, known)} Logged are: {', '.join(sorted(known))}."
            )


def _context(module: OnPolicyModule, group: str, longest: int, new_tokens: int) -> None:
    context = module.model.context_length
    if context is not None and longest + new_tokens > context:
        raise ConfigError(
            f"The longest prompt has {longest} tokens; with {group}.max_new_tokens={new_tokens} that is "
            f"{longest + new_tokens}, but the context of {module.model.name} holds {context}. Lower "
            f"{group}.max_new_tokens to {max(1, context - longest)}, data.max_prompt_tokens to {context - new_tokens}."
        )


def _limits(module: OnPolicyModule) -> None:
    """`limit_train_batches` counts micro-batches; one that ends an epoch in the middle of a rollout wastes the rest."""
    limit, slots = module.trainer.limit_train_batches, module.slots_per_rollout
    if isinstance(limit, int) and limit % slots and not module.trainer.fast_dev_run:  # pyright: ignore
        rank_zero_warn(
            f"trainer.limit_train_batches={limit} ends every epoch in the middle of a rollout of {slots} "
            f"micro-batches: take a multiple of {slots}."
        )
