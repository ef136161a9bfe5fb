"""Win rates of the policy's validation completions against those of another model: `eval.win_rate_against`.

The other model completes the same prompts under the same evaluation sampling, once for each sampling; its completions
are kept and its weights are freed. Texts are compared, so it may be any model: it reads the prompts by its own
tokenizer and chat template.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lit_rl.algorithms.rollouts.rollout_source import RolloutSource
from lit_rl.core.errors import ConfigError
from lit_rl.core.process_state import preserve_generators
from lit_rl.core.rollout import PromptBatch
from lit_rl.data.message_forms import tools_argument
from lit_rl.data.rendering import control_tokens, encode_prompt, row_template_kwargs
from lit_rl.generation.collect import RolloutRequest, Vocabulary, as_reward_input, response_ids, texts_of
from lit_rl.models.hub_files import rename_keys
from lit_rl.models.language_model import LanguageModel
from lit_rl.models.loaded_model import LoadedModel
from lit_rl.rewards.jobs import TrainerState
from lit_rl.rewards.judges import Judge, ask_judge, check_verdicts

BASE = "base"
"""The name of the policy before its first step."""

_AS_EVALUATION = (r"\bmodel\.name\b", "eval.win_rate_against")


@dataclass(frozen=True)
class ComparedAnswer:
    """A completion of the other model."""

    text: str
    ids: list[int]


@dataclass(frozen=True)
class ComparedDrawing:
    """The settings for drawing the other model's completions: those of the policy's, with noise of their own."""

    source: RolloutSource
    asked: RolloutRequest
    """The policy's request; `batch.rollout` distinguishes validation sets."""
    device: torch.device
    context: Callable[[], AbstractContextManager[None]]
    """The context in which completions are drawn: no gradient, the run's precision."""


class ComparedModel:
    """The other model, loaded when a prompt lacks a completion of it, and freed by `release`.

    Args:
        policy: The description of the policy, which is itself the other model for `BASE`.
    """

    def __init__(self, policy: LanguageModel) -> None:
        self.policy = policy
        self._answers: dict[tuple[Any, ...], list[ComparedAnswer]] = {}
        self._loaded: tuple[LanguageModel, nn.Module] | None = None

    def describe(self, against: str) -> LanguageModel:
        """Return the other model's description.

        Raises:
            ConfigError: there is no model of that name.
        """
        if against == BASE and isinstance(self.policy, LoadedModel):
            raise ConfigError(
                f"eval.win_rate_against={BASE} is the policy before its first step, but model is an object, which is "
                "trained in place. Pass its folder or hub id, here or as model."
            )
        if against == BASE:
            return self.policy
        with rename_keys(_AS_EVALUATION):
            return LanguageModel(against, dtype=self.policy.dtype)

    @torch.no_grad()
    def answers(self, against: str, drawing: ComparedDrawing, options: Any = None) -> list[ComparedAnswer]:
        """Return as many completions of every prompt as the policy gives; those of a prompt are neighbours.

        Args:
            against: The other model.
            drawing: Settings for drawing.
            options: Options of the data module for the encoding of prompts.
        """
        batch, sampling, group = drawing.asked.batch, drawing.asked.sampling, drawing.asked.group_size
        keys = [(against, sampling, group, batch.rollout, row) for row in batch.rows]
        if any(key not in self._answers for key in keys):
            answers = self._draw(against, drawing, options)
            self._answers |= {key: answers[i * group : (i + 1) * group] for i, key in enumerate(keys)}
        return [answer for key in keys for answer in self._answers[key]]

    def release(self) -> None:
        """Free the weights; the completions stay."""
        self._loaded = None

    def _draw(self, against: str, drawing: ComparedDrawing, options: Any) -> list[ComparedAnswer]:
        model, weights = self._load(against, drawing)
        tokenizer: Any = model.tokenizer
        batch = drawing.asked.batch
        if against != BASE:
            # Its own tokenizer and template render the prompts, with the tools and arguments of the rows, too.
            settings: dict[str, Any] = {"where": f"eval.win_rate_against={against}"}
            settings["control"] = control_tokens(tokenizer)
            shared_kwargs = dict(getattr(options, "chat_template_kwargs", None) or {})
            prompt_ids = []
            for row, prompt in enumerate(batch.prompts):
                columns = {name: values[row] for name, values in batch.columns.items()}
                kwargs = shared_kwargs | row_template_kwargs(columns, settings["where"])
                kwargs |= tools_argument(columns.get("tools"))
                prompt_ids.append(encode_prompt(tokenizer, prompt, chat_template_kwargs=kwargs, **settings))
            batch = replace(batch, prompt_ids=prompt_ids)
        asked = replace(drawing.asked, policy=weights, batch=batch, vocabulary=Vocabulary.of(model))
        with drawing.source.aside(), drawing.context():
            completions = drawing.source.draw_other(asked)
        texts = texts_of(completions, tokenizer)
        return [ComparedAnswer(*answer) for answer in zip(texts, response_ids(completions), strict=True)]

    def _load(self, against: str, drawing: ComparedDrawing) -> tuple[LanguageModel, nn.Module]:
        if self._loaded is None:
            description = self.describe(against)
            with rename_keys(_AS_EVALUATION), preserve_generators():
                torch.manual_seed(drawing.asked.seed)  # fresh adapters are random, and change nothing yet
                weights = description.load()
            self._loaded = description, weights.eval().requires_grad_(False).to(drawing.device)  # pyright: ignore
        return self._loaded


def compare(
    judge: Judge,
    batch: PromptBatch,
    ours: Sequence[str],
    theirs: Sequence[str],
    *,
    our_rewards: Tensor,
    their_rewards: Tensor | None = None,
    trainer_state: TrainerState | None = None,
) -> Tensor:
    """Ask the judge which of two completions is better, the i-th of ours or the i-th of theirs.

    Args:
        judge: The judge.
        batch: The prompts.
        ours: The policy's completions; those of a prompt are neighbours.
        theirs: As many of the other model's.
        our_rewards: `(b * group,)` summed rewards, NaN where none applies.
        their_rewards: The same of theirs. None: the judge reads no rewards.
        trainer_state: Progress of the training, for the judge.

    Returns:
        Float64 `(b * group,)`: the probability that ours is better, 0.5 for a tie, NaN without a verdict.
    """
    prompts, our_messages, columns = as_reward_input(batch, ours)
    _, their_messages, _ = as_reward_input(batch, theirs)
    second: list[float | None] = [None] * len(ours) if their_rewards is None else _or_none(their_rewards)
    # A judge may favour the first completion: every other time that is the other model's.
    swapped = [i % 2 == 1 for i in range(len(ours))]
    firsts, seconds = _order_pairs(our_messages, their_messages, swapped)
    first_rewards, second_rewards = _order_pairs(_or_none(our_rewards), second, swapped)
    verdicts: Any = ask_judge(
        judge,
        prompts,
        firsts,
        seconds,
        first_rewards=first_rewards,
        second_rewards=second_rewards,
        trainer_state=trainer_state,
        **columns,
    )
    verdicts = check_verdicts(type(judge).__name__, verdicts, len(ours))
    wins = [math.nan if v is None else 1 - v if swap else v for v, swap in zip(verdicts, swapped)]
    return torch.tensor(wins, dtype=torch.float64)


def _order_pairs(ours: Sequence[Any], theirs: Sequence[Any], swapped: Sequence[bool]) -> tuple[list[Any], list[Any]]:
    """Return the first and second side of each comparison: ours and theirs, or swapped."""
    pairs = [(b, a) if swap else (a, b) for a, b, swap in zip(ours, theirs, swapped, strict=True)]
    return [a for a, _ in pairs], [b for _, b in pairs]


def _or_none(values: Tensor) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values.tolist()]
