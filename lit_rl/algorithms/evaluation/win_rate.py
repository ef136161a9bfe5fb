"""How often the policy's validation completions beat those of another model: `eval.win_rate_against`.

The other model completes the same prompts under the same evaluation sampling, once for each sampling; its completions
are kept and its weights are freed. What is compared is text, so it may be any model: it reads the prompts by its own
tokenizer and chat template.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lit_rl.algorithms.rollouts.plan import mix
from lit_rl.data.offline.options import ExampleOptions
from lit_rl.data.templates import control_tokens, encode_prompt
from lit_rl.errors import ConfigError, LitRLError
from lit_rl.generation.collect import Vocabulary, as_reward_input, collect, response_ids
from lit_rl.generation.native import for_another_policy
from lit_rl.models.policy.language_model import LanguageModel
from lit_rl.rewards.judges.base import RewardJudge, check_verdicts
from lit_rl.rewards.sums.weighted import Scores, TrainerState
from lit_rl.rollout import PromptBatch

if TYPE_CHECKING:
    from lit_rl.algorithms.loop.generating import GeneratingModule

BASE = "base"
"""The name of the policy as it was before its first step."""


@dataclass(frozen=True)
class Answer:
    """One completion of the other model."""

    text: str
    ids: list[int]


@dataclass(frozen=True)
class Duels:
    """A batch of completions beside those of the other model, completion by completion."""

    wins: Tensor
    """Float64 `(b * group,)`: probability that the policy's is better, 0.5 for a tie, NaN without a verdict."""
    theirs: list[str]
    """The other model's completions."""


class Opponent:
    """The other model: loaded when a prompt has no completion of it yet, and let go by `release`."""

    def __init__(self) -> None:
        self._answers: dict[tuple[Any, ...], list[Answer]] = {}
        self._loaded: tuple[LanguageModel, nn.Module] | None = None

    def check(self, module: GeneratingModule) -> None:
        """Refuse what cannot be compared, before anything is loaded.

        Raises:
            ConfigError: there is nothing to compare by or no prompt to compare at, or no model of that name.
            RewardError: the judge needs what is no column of a validation set.
        """
        against = module.evaluation.win_rate_against
        judge = module.judge
        if against is None:
            if not (module.learns_by_judge or isinstance(judge, RewardJudge)):
                rank_zero_warn(
                    f"judge={type(judge).__name__} is never asked: {type(module).__name__} learns from no judge, and "
                    "eval.win_rate_against is not set."
                )
            return
        if judge.reads_rewards and not module.reward_functions.names:
            raise ConfigError(
                f"eval.win_rate_against={against!r} compares completions by a judge or by the summed reward, and there "
                "is neither: set reward, such as exact_match, or take a judge that needs none (judge=llm, "
                "judge=function, judge=pairwise)."
            )
        data = _data_of(module)
        if not getattr(data, "val_names", True):
            raise ConfigError(
                f"eval.win_rate_against={against!r} compares completions of validation prompts, and there are none. "
                "Set data.val_path, or data.val_fraction above 0; rows of whole texts have no prompts."
            )
        for columns in getattr(data, "val_columns", {}).values():
            judge.bind(columns)
        self._describe(module, against)

    @torch.no_grad()
    def duels(
        self, module: GeneratingModule, batch: PromptBatch, texts: Sequence[str], scores: Scores, dataloader_idx: int
    ) -> Duels:
        """Compare the policy's completions with as many of the other model's, the i-th with the i-th.

        Args:
            module: Asked for its generator, rewards and judge.
            batch: The prompts.
            texts: The policy's completions; those of a prompt are neighbours.
            scores: What the rewards said of them.
            dataloader_idx: Which validation set it is.
        """
        answers = self._complete(module, batch, dataloader_idx)
        theirs, group = [answer.text for answer in answers], len(texts) // len(batch)
        prompts, ours, columns = as_reward_input(batch, texts, group)
        _, others, _ = as_reward_input(batch, theirs, group)
        judge: Any = module.judge
        second: list[float | None] = [None] * len(texts)
        if judge.reads_rewards:
            second = _or_none(module.reward_texts(batch, theirs, [answer.ids for answer in answers]).total)
        # A judge may favour what it reads first: every other time that is the other model's completion.
        turned = [i % 2 == 1 for i in range(len(texts))]
        first_seen, last_seen = _seats(ours, others, turned)
        first_rewards, last_rewards = _seats(_or_none(scores.total), second, turned)
        trainer = module.trainer_or_none
        verdicts = judge(
            prompts,
            first_seen,
            last_seen,
            first_rewards=first_rewards,
            second_rewards=last_rewards,
            trainer_state=TrainerState(module.step, trainer.max_steps, trainer.current_epoch) if trainer else None,
            **columns,
        )
        verdicts = check_verdicts(type(judge).__name__, verdicts, len(texts))
        wins = [math.nan if v is None else 1 - v if turn else v for v, turn in zip(verdicts, turned)]
        return Duels(torch.tensor(wins, dtype=torch.float64), theirs)

    def release(self) -> None:
        """Free the weights; the completions stay."""
        self._loaded = None

    # ------------------------------------------------------------------ its completions

    def _complete(self, module: GeneratingModule, batch: PromptBatch, dataloader_idx: int) -> list[Answer]:
        evaluation = module.evaluation
        against, sampling, group = (
            evaluation.win_rate_against,
            evaluation.sampling(module.sampling),
            evaluation.group_size,
        )
        assert against is not None
        keys = [(against, sampling, group, dataloader_idx, row) for row in batch.rows]
        if any(key not in self._answers for key in keys):
            model, policy = self._load(module, against)
            tokenizer: Any = model.tokenizer
            with module.rollout_context():
                completions = collect(
                    copy.copy(for_another_policy(module.generator)),  # the policy's never holds other weights
                    policy,
                    replace(batch, prompt_ids=_prompt_ids(module, model, batch, against), rollout=-1 - dataloader_idx),
                    sampling=sampling,
                    group_size=group,
                    vocabulary=Vocabulary.of(model),
                    version=module.step,
                    seed=mix(module.seed, 1),  # two equal models draw apart, as two different ones would
                )
            ids = response_ids(completions)
            texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
            drawn = [Answer(*answer) for answer in zip(texts, ids, strict=True)]
            self._answers |= {key: drawn[i * group : (i + 1) * group] for i, key in enumerate(keys)}
        return [answer for key in keys for answer in self._answers[key]]

    def _load(self, module: GeneratingModule, against: str) -> tuple[LanguageModel, nn.Module]:
        if self._loaded is None:
            description = self._describe(module, against)
            with _keys_of_the_evaluation(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(module.seed)  # fresh adapters are random, and change nothing yet
                policy = description.load()
            self._loaded = description, policy.eval().requires_grad_(False).to(module.device)  # pyright: ignore
        return self._loaded

    def _describe(self, module: GeneratingModule, against: str) -> LanguageModel:
        if against == BASE:
            return module.model
        with _keys_of_the_evaluation():
            return LanguageModel(against, dtype=module.model.dtype)


def _data_of(module: GeneratingModule) -> Any:
    return getattr(module.trainer_or_none, "datamodule", None)


def _prompt_ids(module: GeneratingModule, model: LanguageModel, batch: PromptBatch, against: str) -> list[list[int]]:
    if against == BASE:
        return list(batch.prompt_ids)
    options = getattr(_data_of(module), "options", None)
    settings: dict[str, Any] = {"where": f"eval.win_rate_against={against}", "control": control_tokens(model.tokenizer)}
    given = dict(getattr(options, "chat_template_kwargs", None) or {})
    # The policy reads a row's tools where the data are examples; a column of prompts alone is for rewards only.
    columns = batch.columns.get("tools") if isinstance(options, ExampleOptions) else None
    return [
        encode_prompt(
            model.tokenizer, prompt, chat_template_kwargs=given | ({"tools": tools} if tools else {}), **settings
        )
        for prompt, tools in zip(batch.prompts, columns or [None] * len(batch))
    ]


def _seats(ours: Sequence[Any], theirs: Sequence[Any], turned: Sequence[bool]) -> tuple[list[Any], list[Any]]:
    """What sits first and what sits second in each comparison: ours and theirs, or the other way round."""
    pairs = [(b, a) if turn else (a, b) for a, b, turn in zip(ours, theirs, turned, strict=True)]
    return [a for a, _ in pairs], [b for _, b in pairs]


def _or_none(values: Tensor) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values.tolist()]


@contextmanager
def _keys_of_the_evaluation() -> Iterator[None]:
    """The loader's errors name the policy's keys."""
    try:
        yield
    except LitRLError as error:
        raise type(error)(re.sub(r"\bmodel\.name\b", "eval.win_rate_against", str(error))) from error
