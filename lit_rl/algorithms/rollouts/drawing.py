"""The completions of a rollout: drawn now, or, with `generator.lag=1`, while the rollout before it was learned from.

With a lag, rollout k takes what was asked for when rollout k - 1 began, so it was drawn with the weights of then. The
engine is then given the weights of now and asked for rollout k + 1, in a thread, while this one is learned from. What
the weights have moved since is in the log-probs that the engine reported: the correction weighs the samples by it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities import rank_zero_warn

from lit_rl.algorithms.records import Scored
from lit_rl.algorithms.rollouts import state
from lit_rl.errors import ConfigError, GenerationError, LitRLError
from lit_rl.generation.ahead import Name
from lit_rl.generation.base import EngineLost
from lit_rl.ops.step import Highest, Metrics
from lit_rl.rollout import Completions, PromptBatch, Rollout

if TYPE_CHECKING:
    from lit_rl.algorithms.loop.on_policy import OnPolicyModule


def check(module: OnPolicyModule, *, corrected: bool) -> None:
    """
    Raises:
        ConfigError: the generator lags, and cannot, or nothing corrects for it.
    """
    lag, name = module.generator.lag, type(module.generator).__name__
    if lag not in (0, 1):
        raise ConfigError(f"generator.lag={lag}: allowed are 0 (draw with the newest weights) and 1 (one rollout old).")
    if lag and module.generator.exact:
        raise ConfigError(
            f"generator.lag={lag}: {name} decodes with the policy itself, which cannot be learned from meanwhile. Take "
            "an engine that runs elsewhere (generator=vllm_server), or generator.lag=0."
        )
    if lag and not corrected:
        raise ConfigError(
            f"generator.lag={lag} draws with weights that are a rollout old, and nothing weighs the samples by what "
            "changed since: set algo/correction (auto is token_truncate here), or generator.lag=0."
        )


def taken(module: OnPolicyModule, batch: PromptBatch) -> tuple[Scored, Rollout]:
    """The rollout of these prompts: as it was scored, and as it is to be learned from."""
    completions, upcoming, kept = drawn(module, batch), batch.upcoming, None
    if module.groups is None and not module.needs_greedy_rewards:
        _ask_ahead(module, upcoming)
    scores = module.reward(batch, completions)
    if module.groups is not None:
        batch, completions, scores, kept = module.groups(module, batch, completions, scores)
    scores = module.judged(batch, completions, scores)
    greedy_rewards = module.greedy_rewards(batch) if module.needs_greedy_rewards else None
    _ask_ahead(module, upcoming)  # all that this rollout draws itself is drawn
    rollout = module.advantages(completions, scores, kept=kept, greedy_rewards=greedy_rewards)
    return Scored(batch, completions, scores, greedy_rewards), rollout


def drawn(module: OnPolicyModule, batch: PromptBatch) -> Completions:
    """The completions of the rollout's prompts.

    Raises:
        GenerationError: the generator of any rank failed. All ranks raise it here, so they can still save together.
    """
    failure: LitRLError | None = None
    completions: Completions | None = None
    try:
        completions = _drawn_ahead(module, batch)
        completions = module.generate(batch) if completions is None else completions
    except LitRLError as error:
        failure = error
    if module.world_size > 1 and module.trainer.strategy.reduce_boolean_decision(failure is not None, all=False):
        failure = failure or GenerationError("The generator of another rank failed: see what that rank says.")
        _on_every_rank(failure)
    if failure is not None:
        raise failure
    assert completions is not None
    return completions


def _on_every_rank(error: LitRLError) -> None:
    if isinstance(error, GenerationError):
        error.on_every_rank = True


def _ask_ahead(module: OnPolicyModule, upcoming: PromptBatch | None) -> None:
    """Give the engine the weights of now, and begin to draw the next rollout's completions, if that is asked for."""
    if upcoming is not None and not module.ahead.pending:
        started = time.perf_counter()
        try:
            request = module.request(upcoming)
        except GenerationError as error:
            _on_every_rank(error)  # ranks fail to update an engine together
            raise
        module.ahead.start(_name(upcoming), request)
        module._seconds["generate"] += time.perf_counter() - started  # the update of the engine: nothing else goes on


def _drawn_ahead(module: OnPolicyModule, batch: PromptBatch) -> Completions | None:
    """What was drawn for this rollout while the one before it was learned from."""
    if not module.generator.lag and not module.ahead.pending:
        return None
    started = time.perf_counter()
    found, error = None, None
    try:
        found = module.ahead.take()
    except LitRLError as failed:
        error = failed
    # All draw anew, or none, and all fail, or none: to bring an engine back is a collective.
    mine = 0 if error is None else 1 if isinstance(error, EngineLost) else 2
    worst = int(module.everyones(torch.tensor([mine])).max()) if module.trainer_or_none else mine
    if worst == 2:
        raise error or GenerationError("The generator of another rank failed: see what that rank says.")
    if error is not None:
        rank_zero_warn(f"{error} What was drawn ahead is lost with it, and drawn with the weights of now.")
    if found is None or worst:
        return None
    name, completions = found
    if name != _name(batch):
        rank_zero_warn(
            f"Completions were drawn ahead for rollout {name[0]}, and this is rollout {batch.rollout} of other "
            "prompts: they are thrown away, and drawn with the weights of now."
        )
        return None
    age, most = module.step - completions.version, module.generator.lag * module.minibatches * module.iterations
    if age > most:
        raise GenerationError(
            f"The completions of rollout {batch.rollout} are {age} optimizer steps old; with "
            f"generator.lag={module.generator.lag} they may be {most}. They are not learned from."
        )
    return module.received(batch, completions, started)


def _name(batch: PromptBatch) -> Name:
    return batch.rollout, tuple(batch.rows)


def proof_of(module: OnPolicyModule) -> Metrics:
    """What the generator saw when it held its engine's log-probs against the policy's, after the last update."""
    gap = module.generator.gap
    if gap is None:
        return {}
    mean, most = torch.tensor([gap.mean, gap.max], device=module.device)
    name = "sampling/sampling_logp_difference"
    return {f"{name}/probe_mean": (mean, torch.ones_like(mean)), f"{name}/probe_max": Highest(most)}


def state_of(module: OnPolicyModule) -> dict[str, Any]:
    """The completions drawn ahead, for a checkpoint; waits until they are."""
    found = module.ahead.drawn()
    if found is None:
        return {}
    (rollout, rows), completions = found
    return {"ahead": {"rollout": rollout, "rows": list(rows), "completions": state.to_plain(completions)}}


def load_state(module: OnPolicyModule, saved: dict[str, Any], device: torch.device) -> None:
    """The counterpart of `state_of`."""
    if ahead := saved.get("ahead"):
        name = ahead["rollout"], tuple(ahead["rows"])
        module.ahead.put(name, Completions(**state.to_device(ahead["completions"], device)))
