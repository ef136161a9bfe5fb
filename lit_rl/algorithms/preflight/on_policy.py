"""What an on-policy run refuses before any weight is loaded."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lit_rl.algorithms.preflight import estimators as estimator_checks
from lit_rl.algorithms.preflight.estimators import columns_to_rows, is_ours, two_prompts
from lit_rl.algorithms.preflight.losses import loss_settings
from lit_rl.algorithms.ranks import parameters
from lit_rl.algorithms.rollouts import drawing
from lit_rl.algorithms.rollouts.plan import BatchPlan
from lit_rl.algorithms.terms.best_of_group import BestOfGroup
from lit_rl.algorithms.terms.controllers import AdaptiveKL
from lit_rl.algorithms.terms.groups import DynamicSampling, TopOfGroup
from lit_rl.errors import ConfigError, did_you_mean, in_range
from lit_rl.generation.base import Generator
from lit_rl.models.reference.base import Auto

if TYPE_CHECKING:
    from lit_rl.algorithms.families.policy_gradient import PolicyGradient
    from lit_rl.algorithms.loop.generating import GeneratingModule
    from lit_rl.algorithms.loop.on_policy import OnPolicyModule
    from lit_rl.rollout import Sampling


def terms(module: PolicyGradient) -> None:
    """Ranges and combinations of the terms of an objective, before anything is loaded."""
    name = type(module).__name__
    if not module.reward_functions.names:
        raise ConfigError(f"{name} learns from rewards, and there is no function: set reward, such as exact_match.")
    sampling_draws(module)
    drawing.check(module, corrected=module.correction is not None)
    estimator_checks.check_call(module.advantage, name)
    loss_settings(module.policy_loss)
    for key, probe in _probes(module).items():
        settings(key, probe)
    estimator_checks.check_what_it_reads(module)
    if module.group_size < 2 and module.compares_completions:
        raise ConfigError(
            f"algo.group_size={module.group_size}: this advantage compares completions of one prompt, so {name} needs "
            "2 or more (8 is usual). For one completion a prompt take algo=reinforce_pp or algo=remax."
        )
    in_range("algo.group_size", module.group_size, low=1)
    _spread(module)
    for key in ("beta", "reward_beta", "router_aux_loss_coef"):
        in_range(f"algo.{key}", getattr(module, key), low=0)
    for key in ("advantage_clip", "off_policy_threshold"):
        if (value := getattr(module, key)) is not None:
            in_range(f"algo.{key}", value, low=0, open_low=True)
    _groups(module)
    clip = module.reward_clip
    if clip is not None and not (len(clip) == 2 and clip[0] < clip[1]):
        raise ConfigError(f"algo.reward_clip={list(clip)} must be [lowest, highest], such as [-10, 10].")
    if isinstance(module.kl_control, AdaptiveKL) and not (module.beta or module.reward_beta):
        raise ConfigError(
            "algo/kl_control=adaptive changes the weight of a KL term, and there is none: set algo.beta (KL in the "
            "loss) or algo.reward_beta (KL in the reward) above 0."
        )
    if module.weight_norm is not None and module.correction is None:
        raise ConfigError("algo/weight_norm brings weights to mean 1, and there are none: set algo/correction too.")
    if "weights" in parameters(module.policy_loss) and module.correction is not None:
        _token_weights_only(module.correction)


def settings(key: str, probe: Callable[[], Any]) -> None:
    """Refuse a term that refuses its own settings: call it once, before anything is loaded."""
    try:
        probe()
    except ValueError as error:
        raise ConfigError(f"algo.{key}: {error}") from error


def _probes(module: PolicyGradient) -> dict[str, Callable[[], Any]]:
    """Calls of the terms that check their own settings, with a row of two tokens: a term is refused before it runs."""
    row, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    terms = {"loss": (row, row, torch.zeros(1), mask), "correction": (row, row, mask), "rejection": (row, row, mask)}
    terms["selection"] = (row, mask)
    functions = {"loss": module.policy_loss} | {key: getattr(module, key) for key in terms if key != "loss"}
    probes: dict[str, Callable[[], Any]] = {
        key: partial(functions[key], *row) for key, row in terms.items() if functions[key] is not None
    }
    columns = two_prompts()
    for key in ("advantage", "shaping"):
        function = getattr(module, key)
        if is_ours(function):  # a user's own may hold a state
            probes[key] = partial(columns_to_rows, function, columns)
    return probes


def _token_weights_only(correction: Callable[..., Tensor]) -> None:
    """A loss that takes the weights in itself multiplies those of a row's tokens: a row's own would count n times."""
    row, mask = torch.tensor([[0.0, 0.5]]), torch.ones(1, 2, dtype=torch.bool)
    weights = correction(row, torch.zeros(1, 2), mask)
    if weights[0, 0] == weights[0, 1]:
        raise ConfigError(
            "algo/correction: this loss takes the product of the weights of a row's tokens, and a sequence's weight is "
            "such a product already. Take algo/correction=token_truncate or token_mask."
        )


def _groups(module: PolicyGradient) -> None:
    """Members of groups that are chosen must be there to choose from."""
    if isinstance(module.groups, TopOfGroup):
        module.groups.fits(module.group_size)
    if isinstance(module.groups, BestOfGroup):
        module.groups.fits(module)


def _spread(module: PolicyGradient) -> None:
    """What chooses groups by their spread finds none in a group of one completion, and the run would learn nothing."""
    terms = {"algo/groups=dynamic": isinstance(module.groups, DynamicSampling), "algo/replay=buffer": module.replay}
    for key in (key for key, is_set in terms.items() if is_set and module.group_size < 2):
        raise ConfigError(
            f"algo.group_size={module.group_size} with {key}: the rewards of one completion have no spread, so every "
            f"group would count as one that teaches nothing. Take algo.group_size=2 or more, or leave {key} out."
        )


_UNSCORED = ("repetition_penalty", "min_new_tokens", "bad_words", "logit_bias", "structured")
"""Settings of `Sampling` that change what is drawn and that training's log-probs know nothing of."""


def sampling_draws(module: OnPolicyModule) -> None:
    """Settings under which a group teaches nothing, or the importance ratio would be wrong."""
    sampling, generator = module.sampling, module.generator
    if sampling.greedy:
        raise ConfigError(
            "sampling.temperature=0 draws one and the same completion for a whole group, so every advantage is 0. A "
            "greedy choice has no log-probability to learn from. Train with 1.0; greedy decoding is for evaluation "
            "(eval.temperature=0)."
        )
    # A weight is the ratio of the training's distribution to the one that was drawn from, whatever made the two differ.
    weighted = not generator.exact and getattr(module, "correction", None) is not None
    history = [name for name in sampling.reshaped if name in _UNSCORED]
    if history and not weighted:
        keys = ", ".join(f"sampling.{name}={getattr(sampling, name)}" for name in history)
        raise ConfigError(
            f"{keys}: tokens would be drawn from a distribution that the log-probs of training are not taken under: "
            "the importance ratio would be wrong. Switch it off for training "
            f"(a reward against repetition: reward=repetition){_weights_would_do(generator)}."
        )
    if sampling.reshaped and not weighted and not generator.reports_kept_mass:
        keys = ", ".join(f"sampling.{name}={getattr(sampling, name)}" for name in sampling.reshaped)
        raise ConfigError(
            f"{keys}: {type(generator).__name__} does not report how much probability it cut off, so its log-probs "
            "cannot be compared with the training's. Switch it off for training, or take generator=native"
            f"{_weights_would_do(generator)}; eval.top_p and eval.top_k are free."
        )


def _weights_would_do(generator: Generator) -> str:
    return "" if generator.exact else ", or weight the samples (algo/correction=token_truncate)"


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
        context(module, "sampling", data.longest_prompt, module.sampling.max_new_tokens)
        _engine(module, module.sampling, data.longest_prompt)
        _limits(module)
        _reference(module)
    if longest := data.longest_val_prompt:
        _engine(module, module.evaluation.sampling(module.sampling), longest)
        own = module.evaluation.max_new_tokens
        context(module, "sampling" if own is None else "eval", longest, own or module.sampling.max_new_tokens)
    bind_val(module, data)
    module.reward_functions.load()
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


def _engine(module: GeneratingModule, sampling: Sampling, longest: int) -> None:
    """What an engine says of the lengths and settings that it will be asked for."""
    module.generator.check(sampling, longest)


def bind_val(module: GeneratingModule, data: Any) -> None:
    """Check the rewards against the columns of every validation set."""
    for name, columns in data.val_columns.items():
        try:
            module.reward_functions.bind(columns)
        except Exception as error:
            error.add_note(f"(in the validation set {name or 'data.val_*'})")
            raise


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


def context(
    module: GeneratingModule,
    group: str,
    longest: int,
    new_tokens: int,
    prompt_key: str = "data.max_prompt_tokens",
) -> None:
    """Refuse prompts and completions that the model's context cannot hold; `prompt_key` is what bounds prompts."""
    holds = module.model.context_length
    if holds is None or longest + new_tokens <= holds:
        return
    prompts = f", or {prompt_key} to {holds - new_tokens}" if holds > new_tokens else ""
    raise ConfigError(
        f"The longest prompt has {longest} tokens; with {group}.max_new_tokens={new_tokens} that is "
        f"{longest + new_tokens}, but the context of {module.model.name} holds {holds}. Lower "
        f"{group}.max_new_tokens to {max(1, holds - longest)}{prompts}."
    )


def _reference(module: OnPolicyModule) -> None:
    if not (module.needs_reference or isinstance(module.reference, Auto)):
        rank_zero_warn(
            f"reference={type(module.reference).__name__} is not loaded: no KL term needs it. Set algo.beta or "
            "algo.reward_beta above 0 to measure the KL against it."
        )


def _limits(module: OnPolicyModule) -> None:
    """`limit_train_batches` counts micro-batches; one that ends an epoch in the middle of a rollout wastes the rest."""
    limit, slots = module.trainer.limit_train_batches, module.slots_per_rollout
    if isinstance(limit, int) and limit % slots and not module.trainer.fast_dev_run:  # pyright: ignore
        rank_zero_warn(
            f"trainer.limit_train_batches={limit} ends every epoch in the middle of a rollout of {slots} "
            f"micro-batches: take a multiple of {slots}."
        )
