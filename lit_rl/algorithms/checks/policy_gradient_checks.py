"""Checks of a policy-gradient objective before anything is loaded: estimators, losses, groups, corrections, sampling.

What a function reads and compares is what it declares (`lit_rl.ops.traits`).

Rows without an advantage can be left out of a forward pass where that is exact (`can_skip_zero_advantages`). With
`l_it` the loss of token t of row i and D the denominator of the step, the objective is `sum_it l_it / D`. D is counted
over all rows of the rollout, so leaving row i out is exact where `l_it = 0` whatever the policy's log-probs of the row:
then it adds neither value nor gradient. Two functions decide: the loss must vanish where the advantage does, and the
reduction must take its denominators from the step, not from the rows at hand. Where one of the two declares nothing,
no row is left out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lit_rl.algorithms.checks.argument_checks import try_settings
from lit_rl.algorithms.chosen_functions import (
    arguments_for,
    name_of,
    parameters,
    reads_column,
    setting_of,
)
from lit_rl.algorithms.optim.strategies import flattens_weights, shards_weights
from lit_rl.algorithms.rollouts.rollout_plan import BatchPlan
from lit_rl.algorithms.terms.credit import CreditAssignment, Roles, Whitening
from lit_rl.algorithms.terms.regularizers import KLControl
from lit_rl.algorithms.terms.token_weights import EngineCorrection
from lit_rl.core.declared_settings import Allowed, annotated_metadata, annotations_of
from lit_rl.core.errors import ConfigError, check_draws, in_range
from lit_rl.core.rollout import Sampling
from lit_rl.environments.environment_base import Interactive
from lit_rl.generation.generator import Generator
from lit_rl.ops.ranges import Above, Pair, Range
from lit_rl.ops.traits import AdvantageTraits, CorrectionTraits, PolicyLossTraits, ReductionTraits, traits_of

# ---------------------------------------------------------------------- estimators of advantages


Estimator = Callable[..., Any]

_BY_POSITION = ("rewards", "group_id")
_COLUMNS = (
    *("values", "weights", "lengths", "greedy_rewards", "gradient_norms", "token_rewards", "mask", "step_ends"),
    *("turn", "state", "role", "data_row"),
)
"""Columns that an estimator of rows may name."""


def require_estimator(estimator: Estimator | None, such_as: str) -> None:
    """Refuse a method without an estimator of advantages, and name one.

    Raises:
        ConfigError: there is none.
    """
    if estimator is None:
        raise ConfigError(f"algo.advantage=null: advantages need an estimator, such as algo/advantage={such_as}.")


def check_row_estimator(estimator: Estimator, algorithm: str) -> None:
    """Refuse an estimator that cannot be called with rewards of rows, or whose settings are out of range."""
    arguments = arguments_for(estimator, dict.fromkeys(_COLUMNS))
    if parameters(estimator)[:1] == ("token_rewards",) or not _binds(estimator, *_BY_POSITION, **arguments):
        raise ConfigError(
            f"algo.advantage={_signature(estimator)}: {algorithm} calls it as f(rewards, group_id, ...), where it may "
            f"name {', '.join(_COLUMNS)}. Of the choices of algo/advantage all fit but gae and gae_of_turns, which "
            "need the critic of algo=ppo."
        )
    check_ranges(estimator, "algo.advantage")


def check_estimator_inputs(
    estimator: Estimator, credit: CreditAssignment, reward_beta: float, whitening: Whitening
) -> None:
    """Refuse settings that the estimator ignores, or would apply to one side of a comparison only."""
    if credit.shaping is not None and "greedy_rewards" in parameters(estimator):
        raise ConfigError(
            f"algo/shaping: {name_of(estimator)} compares sampled completions with a greedy one, whose reward cannot "
            "be shaped, as it has no group. Set algo/shaping=none; a reward function (reward=soft_overlong, "
            "reward=cosine_length) scores both by their lengths."
        )
    traits = traits_of(estimator, AdvantageTraits)
    if traits is None:
        return
    changes = {
        "algo/shaping": credit.shaping is not None,
        "algo/reward_norm": credit.norm is not None,
        f"algo.reward_clip={list(credit.clip or ())}": credit.clip is not None,
    }
    unread = [] if traits.reads_rewards else [key for key, is_set in changes.items() if is_set]
    changed = [key for key, is_set in changes.items() if is_set]
    if changed and "data_row" in parameters(estimator):
        raise ConfigError(
            f"{', '.join(changed)}: algo/advantage={name_of(estimator)} compares rewards with values of the prompts, "
            "made of rewards as the functions return them. Leave it out, or change the rewards in the functions."
        )
    if reward_beta and not traits.reads_kl:
        unread.append(f"algo.reward_beta={reward_beta}")
    if unread:
        raise ConfigError(
            f"{', '.join(unread)}: algo/advantage={name_of(estimator)} ignores it, so it would have no effect, or "
            "not at every token. Leave it out, or set another algo/advantage (group_normalized reads them all). For a "
            "KL in the loss, set algo.beta."
        )
    whitening.check_fits(of_tokens=traits.of_tokens)


def check_role_is_read(estimator: Estimator, roles: Roles | None) -> None:
    """Refuse roles that the estimator neither reads nor compares within.

    Raises:
        ConfigError: names estimators that do.
    """
    traits = traits_of(estimator, AdvantageTraits)
    if roles is None or traits is None or traits.compares_group or "role" in parameters(estimator):
        return
    raise ConfigError(
        f"algo.role={roles.column!r}: algo/advantage={name_of(estimator)} compares no completions of a prompt and "
        "keeps no baseline of roles, so it would have no effect. Set algo/advantage=role_baseline (algo=rae), or one "
        "that compares within groups, such as group_normalized (algo=grpo); or leave algo.role out."
    )


def check_norms_are_known(estimator: Estimator, sampling: Sampling) -> None:
    """Refuse an estimator that reads norms of gradients of another distribution than the one that is sampled.

    Raises:
        ConfigError: the sampling truncates or reshapes the distribution.
    """
    if sampling.reshaped and "gradient_norms" in parameters(estimator):
        keys = ", ".join(f"sampling.{name}={getattr(sampling, name)}" for name in sampling.reshaped)
        raise ConfigError(
            f"{keys}: algo/advantage={name_of(estimator)} reads the sum of squared probabilities, which is computed of "
            "softmax(logits / temperature) alone. Leave it out, or set another algo/advantage, such as opo."
        )


def check_token_estimator(estimator: Estimator, whitening: Whitening) -> None:
    """Refuse an estimator that cannot replace `gae`, settings out of range, and a whitening that does not fit."""
    tensors = dict.fromkeys(("token_rewards", "values", "mask"))
    turns = arguments_for(estimator, {"turn": None})
    if parameters(estimator)[:2] == _BY_POSITION or not _binds(estimator, *tensors, **turns):
        raise ConfigError(
            f"algo.advantage={_signature(estimator)}: PPO calls it as f({', '.join(tensors)}) -> (advantages, "
            "returns), where it may name turn. Of the choices of algo/advantage gae and gae_of_turns fit; the others "
            "go with the algorithms that have no critic (algo=grpo, algo=rloo, algo=reinforce_pp)."
        )
    whitening.check_fits(of_tokens=True)
    check_ranges(estimator, "algo.advantage")


def compares_within_groups(estimator: Estimator) -> bool:
    """Tell whether an advantage estimator is zero for the only completion of a prompt.

    An estimator that declares nothing is called on the rewards of two prompts with one completion each, if it reads
    nothing else: one that compares with other prompts, or with nothing, distinguishes them.
    """
    if (traits := traits_of(estimator, AdvantageTraits)) is not None:
        return traits.compares_group
    if arguments_for(estimator, dict.fromkeys(_COLUMNS)):
        return False
    return not bool(estimator(torch.tensor([0.0, 1.0]), torch.arange(2)).any())


def _binds(function: Callable, *arguments: Any, **keywords: Any) -> bool:
    try:
        inspect.signature(function).bind(*arguments, **keywords)
    except TypeError:
        return False
    return True


def _signature(function: Callable) -> str:
    """Return the function's name and its required arguments."""
    known = inspect.signature(function).parameters.values()
    needed = ", ".join(parameter.name for parameter in known if parameter.default is parameter.empty)
    return f"{name_of(function)}({needed})"


# ---------------------------------------------------------------------- losses


def check_ranges(function: Callable[..., Any], key: str) -> None:
    """Check the settings that a `functools.partial` carries against the annotations of `lit_rl.ops.ranges`.

    A function that declares no range, such as a user's own, may be set to anything.

    Raises:
        ConfigError: a setting is out of its range; names the key, the value and the range.
    """
    settings = getattr(function, "keywords", {})
    for name, annotation in annotations_of(function).items():
        if (value := settings.get(name)) is None:
            continue
        for range_ in annotated_metadata(annotation):
            match range_:
                case Range():
                    Allowed(range_).check(f"{key}.{name}", value)
                case Above():
                    bound = range_.bound(**{other: setting_of(function, other) for other in parameters(range_.bound)})
                    in_range(f"{key}.{name}", value, low=bound, open_low=True)
                case Pair() if not (len(value) == 2 and range_.sound(*value)):
                    raise ConfigError(f"{key}.{name}={list(value)} must be {range_.meaning}.")


def check_declared_weights(loss: Callable[..., Any], key: str = "algo.loss") -> None:
    """Refuse a loss with a parameter `weights` whose annotation does not tell who multiplies by them.

    Raises:
        ConfigError: there is no annotation, or none that can be read.
    """
    if reads_column(loss, "weights") and annotations_of(loss).get("weights") is Any:
        raise ConfigError(
            f"{key}={name_of(loss)} takes `weights`, the engine's correction weights, without an annotation that says "
            "who multiplies by them. If the loss does, write `weights: WeightsInside = None` (from "
            "lit_rl.ops.reductions, imported at run time). If it only reads them, write `weights: Tensor | None`: its "
            "values are then multiplied by them afterwards, like those of every other loss."
        )


# ---------------------------------------------------------------------- rows without an advantage


def can_skip_zero_advantages(loss: Callable[..., Any], reduction: Callable[..., Any]) -> bool:
    """Tell whether rows whose advantages are all 0 change neither value nor gradient of the objective.

    Args:
        loss: `(logprobs, old_logprobs, advantages, mask) -> ((b, t), metrics)`.
        reduction: `(per_token, mask, totals) -> scalar`.
    """
    of_loss, of_reduction = traits_of(loss, PolicyLossTraits), traits_of(reduction, ReductionTraits)
    if of_loss is None or of_reduction is None:
        return False
    if of_loss.but_for is not None and setting_of(loss, of_loss.but_for) != 0:
        return False
    return of_loss.zero_without_advantage and of_reduction.adds_rows


# ---------------------------------------------------------------------- combinations of terms


def require_rewards(algorithm: str, names: tuple[str, ...]) -> None:
    """Refuse a run without a reward function.

    Raises:
        ConfigError: there is no reward function to learn from.
    """
    if not names:
        raise ConfigError(
            f"{algorithm} learns from rewards, but there is no reward function. Set reward, such as exact_match."
        )


def check_term_settings(
    loss: Callable, selection: Callable | None, engine: EngineCorrection, shaping: Callable | None
) -> None:
    """Call each term that checks its own settings once, with a row of two tokens, and check those of the shaping.

    Args:
        loss: Loss of each token.
        selection: Selection of tokens, if any.
        engine: The engine correction, with its functions.
        shaping: Shaping of the rewards of rows, if any.

    Raises:
        ConfigError: one refuses its settings.
    """
    row, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    probes: dict[str, tuple[Callable | None, tuple[Tensor, ...]]] = {
        "loss": (loss, (row, row, torch.zeros(1), mask)),
        "correction": (engine.correction, (row, row, mask)),
        "rejection": (engine.rejection, (row, row, mask)),
        "selection": (selection, (row, mask)),
    }
    for key, (function, arguments) in probes.items():
        if function is not None:
            try_settings(key, partial(function, *arguments))
    if shaping is not None:
        check_ranges(shaping, "algo.shaping")


def check_group_size(algorithm: str, group_size: int, *, compares_completions: Callable[[], bool]) -> None:
    """Refuse groups of one where the advantage compares completions of a prompt.

    Raises:
        ConfigError: the advantage compares completions of a prompt, and there is one.
    """
    if group_size < 2 and compares_completions():  # called only then: it may try out a user's estimator
        raise ConfigError(
            f"algo.group_size={group_size}: this advantage compares completions of one prompt, so {algorithm} needs "
            "2 or more (8 is usual). For one completion a prompt take algo=reinforce_pp or algo=remax."
        )


def check_comparing_rewards(comparing: Sequence[str], group_size: int) -> None:
    """Refuse reward functions that compare the completions of a prompt where there is one.

    Args:
        comparing: Names of such functions.
        group_size: Completions of a prompt.

    Raises:
        ConfigError: names the function.
    """
    if comparing and group_size < 2:
        raise ConfigError(
            f"algo.group_size={group_size}: the reward function {comparing[0]!r} compares the completions of a prompt "
            "with each other, and there is one, which has no reward. Set it to 2 or more (8 is usual), or a reward "
            "such as reward=judge."
        )


def check_shared_groups(plan: BatchPlan, comparing: Iterable[str]) -> None:
    """Refuse parts that compare the completions of a prompt where several ranks share them.

    Args:
        plan: The batch sizes.
        comparing: Names of such parts.

    Raises:
        ConfigError: names the part, and the numbers of prompts that keep groups on one rank.
    """
    shared, unit = plan.ranks_per_group, plan.world_size * plan.minibatches
    for name in comparing if shared > 1 else ():
        above = -(-plan.prompts_per_rollout // unit) * unit
        raise ConfigError(
            f"data.prompts_per_rollout={plan.prompts_per_rollout}: of {plan.world_size} ranks {shared} would share the "
            f"completions of a prompt, and {name} compares all of them with each other, on one rank. Set it to a "
            f"multiple of {unit}, such as {above}."
        )


def check_greedy_rewards(estimator: Estimator, comparing: Sequence[str]) -> None:
    """Refuse reward functions that compare the completions of a prompt where the greedy one is scored alone.

    Raises:
        ConfigError: names the estimator and the function.
    """
    if comparing and "greedy_rewards" in parameters(estimator):
        raise ConfigError(
            f"The reward function {comparing[0]!r} compares the completions of a prompt with each other, and "
            f"algo.advantage={name_of(estimator)} scores the greedy completion alone, which has no reward. Take "
            "another algo.advantage, or a reward such as reward=judge."
        )


def check_controller(control: KLControl, *weights: float) -> None:
    """Refuse a controller without a KL term to control, or without the attribute `adapts`.

    Raises:
        ConfigError: the controller changes the weight of a KL, and there is none; or it has no `adapts`.
    """
    if not hasattr(control, "adapts"):
        raise ConfigError(
            f"algo.kl_control={type(control).__name__} has no attribute `adapts`, which tells whether its factor "
            "changes during the run. Set `adapts = True` in the class, or False where `update` does nothing."
        )
    if control.adapts and not any(weights):
        raise ConfigError(
            f"algo/kl_control: {type(control).__name__} changes the weight of a KL term, but there is none. Set "
            "algo.beta (KL in the loss) or algo.reward_beta (KL in the reward) above 0."
        )


def check_engine_weights(engine: EngineCorrection, *, multiplied_by_loss: bool) -> None:
    """Refuse a normalisation without weights, and weights of rows in a loss that multiplies those of tokens.

    Args:
        engine: The correction, and its normalisation.
        multiplied_by_loss: Whether the loss applies the weights itself.

    Raises:
        ConfigError: names what to take.
    """
    if engine.correction is None:
        if engine.normalisation is not None:
            raise ConfigError("algo/weight_norm scales weights to mean 1, but there are none. Set algo/correction too.")
        return
    if not multiplied_by_loss:
        return
    if _weighs_rows(engine.correction):  # a row's weight would count once for each of its tokens
        raise ConfigError(
            "algo/correction: this loss multiplies the weights of a row's tokens, but this correction's weights are of "
            "whole sequences, each such a product already. Set algo/correction=token_truncate or token_mask."
        )


def _weighs_rows(correction: Callable[..., Tensor]) -> bool:
    """Tell whether an engine correction gives all tokens of a row one weight; one that declares nothing is tried."""
    if (traits := traits_of(correction, CorrectionTraits)) is not None:
        return traits.of_rows
    weights = correction(torch.tensor([[0.0, 0.5]]), torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool))
    return bool(weights[0, 0] == weights[0, 1])


def check_branches(env: Interactive | None, *, echo_coef: float, teaches: bool) -> None:
    """Refuse terms that read the tokens of a completion as one text where it may have several.

    Args:
        env: The environment.
        echo_coef: Weight of the tokens that it writes.
        teaches: Whether there is a teacher.

    Raises:
        ConfigError: names the term and the fix.
    """
    if env is None or env.max_branches == 1:
        return
    for key, is_on in ((f"algo.echo_coef={echo_coef}", bool(echo_coef)), ("algo.teacher", teaches)):
        if is_on:
            raise ConfigError(
                f"{key} reads the tokens of a completion as one text, and with env.max_branches={env.max_branches} it "
                "may have several. Set env.max_branches=1, or leave the other out."
            )


def check_observations(coef: float, env: Interactive | None, sampling: Sampling) -> None:
    """Refuse to learn what an environment writes where nothing does, or where its log-probs would be of something else.

    Args:
        coef: Weight of the term; 0: none.
        env: The environment.
        sampling: Sampling of the training.

    Raises:
        ConfigError: names the setting and the fix.
    """
    if not coef:
        return
    if env is None:
        raise ConfigError(
            f"algo.echo_coef={coef}: the term learns the tokens that tools or an environment write, and nothing "
            "answers the policy. Set env, such as env=tools, or leave it out."
        )
    if sampling.reshaped:
        keys = ", ".join(f"sampling.{name}={getattr(sampling, name)}" for name in sampling.reshaped)
        raise ConfigError(
            f"{keys}: algo.echo_coef={coef} learns what an environment wrote under softmax(logits / temperature), and "
            "these change the distribution that the policy writes from. Leave one of them out."
        )


# ---------------------------------------------------------------------- sampling and lag


_CUTTING = ("top_p", "top_k", "min_p")
"""Settings that rule out tokens by probability: engine and training may rule out different ones."""


def check_sampling(sampling: Sampling, generator: Generator, *, weighted: bool) -> None:
    """Refuse settings under which a group teaches nothing, or the importance ratio would be wrong.

    Args:
        sampling: Sampling of the training.
        generator: The generator.
        weighted: Whether `algo/correction` weights samples against the engine.

    Raises:
        ConfigError: names the settings.
    """
    check_draws(sampling.temperature)
    # A weight is the ratio of the training's distribution to the sampled one, whatever the difference.
    accounted_for = weighted and not generator.exact
    if sampling.unscored and not accounted_for:
        keys = ", ".join(f"sampling.{name}={getattr(sampling, name)}" for name in sampling.unscored)
        raise ConfigError(
            f"{keys}: tokens would be sampled from another distribution than the one that training scores, so the "
            f"importance ratio would be wrong. Switch it off for training{_weights_hint(generator)}."
        )
    if generator.reshaped_by and not accounted_for:
        names = ", ".join(f"generator.generation_kwargs.{name}" for name in generator.reshaped_by)
        raise ConfigError(
            f"{names}: tokens would be sampled from another distribution than the one that training scores, so the "
            "importance ratio would be wrong. sampling.repetition_penalty and min_new_tokens are scored exactly. "
            "Leave it out, or weight the samples (algo/correction=token_truncate, of the methods that have it)."
        )
    cutting = [name for name in sampling.reshaped if name in _CUTTING]
    if cutting and not accounted_for and not generator.reports_kept_mass:
        keys = ", ".join(f"sampling.{name}={getattr(sampling, name)}" for name in cutting)
        raise ConfigError(
            f"{keys}: {type(generator).__name__} does not report how much probability it cut off, so its log-probs "
            "cannot be compared with the training's. Switch it off for training, or take generator=native"
            f"{_weights_hint(generator)}; eval.top_p and eval.top_k are free."
        )


def _weights_hint(generator: Generator) -> str:
    return "" if generator.exact else ", or weight the samples (algo/correction=token_truncate)"


def check_lag(generator: Generator, *, weighted: bool) -> None:
    """Refuse a lag that the generator does not support, or that nothing corrects for.

    Raises:
        ConfigError: names what to set.
    """
    lag, name = generator.lag, type(generator).__name__
    if not isinstance(lag, int) or lag < 0:
        raise ConfigError(
            f"generator.lag={lag} is not allowed. It is a whole number of rollouts: 0 samples with the newest weights, "
            "1 with those of one rollout before, and so on."
        )
    if lag and generator.exact:
        raise ConfigError(
            f"generator.lag={lag}: {name} decodes with the policy itself, which cannot learn at the same time. Set an "
            "engine with a copy of the weights (generator=vllm_server), or generator.lag=0."
        )
    if lag and not weighted:
        raise ConfigError(
            f"generator.lag={lag} samples with weights of an earlier rollout, but nothing corrects for what changed "
            "since. Set algo/correction (auto is token_truncate here), or generator.lag=0."
        )


def check_weight_copies(generator: Generator, trainer: Any) -> None:
    """Refuse to draw more than one rollout ahead where a process cannot copy the weights by itself.

    Raises:
        ConfigError: several processes, or a strategy that may take weights apart.
    """
    lag, processes = generator.lag, trainer.world_size
    if lag < 2 or (processes == 1 and not shards_weights(trainer.strategy) and not flattens_weights(trainer.strategy)):
        return
    raise ConfigError(
        f"generator.lag={lag} works in one process with whole weights only, because a background thread sends the "
        f"engine a copy of them and cannot wait for other processes. This run has world size {processes} with "
        f"{type(trainer.strategy).__name__}. Set generator.lag=1, or trainer.devices=1 and strategy=auto."
    )
