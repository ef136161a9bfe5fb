"""A policy that writes and is scored: generation, rewards, and validation by generating."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lit_rl.algorithms.evaluation.tables import sample_table
from lit_rl.algorithms.evaluation.validation import Evaluation, EvaluationRows, prefixed
from lit_rl.algorithms.evaluation.win_rate import Opponent
from lit_rl.algorithms.loop.module import PolicyModule
from lit_rl.algorithms.preflight import on_policy as checks
from lit_rl.generation.ahead import Ahead
from lit_rl.generation.base import Generator, is_exact
from lit_rl.generation.collect import Vocabulary, as_reward_input, request, response_ids
from lit_rl.generation.native import NativeGenerator
from lit_rl.models.policy.sharding import unsharded
from lit_rl.rewards.judges.base import Judge
from lit_rl.rewards.judges.functions import as_judge
from lit_rl.rewards.sums.weighted import Rewards, Scores, TrainerState
from lit_rl.rollout import Completions, PromptBatch, Sampling


class GeneratingModule(PolicyModule):
    """A `PolicyModule` with a generator and rewards. Every algorithm validates with it, whatever it learns from.

    Args:
        model: The policy: a description, or its name, folder or hub id.
        reward: Reward functions and weights, or one function.
        generator: Draws the completions. None is the in-process decode loop.
        sampling: How training completions are drawn.
        evaluation: How validation samples.
        judge: Says which of two completions is better: a judge of `lit_rl.rewards`, or a function. None compares
            the summed rewards. Asked by `eval.win_rate_against`.
        shared: What every `PolicyModule` takes.
    """

    def __init__(
        self,
        model: Any,
        reward: Any,
        *,
        generator: Generator | None = None,
        sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
        evaluation: Evaluation = Evaluation(),  # noqa: B008 (frozen)
        judge: Judge | Callable[..., Any] | None = None,
        **shared: Any,
    ) -> None:
        super().__init__(model, **shared)
        self.reward_functions = reward if isinstance(reward, Rewards) else Rewards(reward)
        self.generator: Generator = NativeGenerator() if generator is None else generator
        self.sampling, self.evaluation = sampling, evaluation
        self.judge = as_judge(judge)
        self._seconds = {"generate": 0.0, "reward": 0.0}
        self._sampled = 0
        self._evaluated: list[EvaluationRows] = []
        self._opponent = Opponent()
        self.ahead = Ahead()

    generates = True
    """Whether validation prompts are written to; without it data modules hand out no loaders of prompts."""

    learns_by_judge = False
    """Whether the judge decides what is learned; otherwise `eval.win_rate_against` alone asks it."""

    group_size = 1
    """Completions a prompt, where nothing else is asked for."""

    def configure_model(self) -> None:
        self._opponent.check(self)
        super().configure_model()
        if hasattr(self.generator, "prepare"):
            self.generator.prepare(self.model)  # pyright: ignore[reportAttributeAccessIssue]

    def close(self) -> None:
        """Stop the generator's engine, where it has one; another is started when it is needed again."""
        if hasattr(self.generator, "close"):
            self.generator.close()  # pyright: ignore[reportAttributeAccessIssue]

    def generate(
        self, batch: PromptBatch, sampling: Sampling | None = None, group_size: int | None = None
    ) -> Completions:
        """Completions of every prompt of the batch, with the training's settings unless told otherwise."""
        started = time.perf_counter()
        return self.received(batch, self.request(batch, sampling, group_size)(), started)

    def request(
        self, batch: PromptBatch, sampling: Sampling | None = None, group_size: int | None = None
    ) -> Callable[[], Completions]:
        """Give the generator the weights of now. What is returned draws the completions when it is called."""
        self.ahead.wait()  # the weights of a request in flight stay as they are
        return request(
            self.generator,
            self.policy,
            batch,
            sampling=sampling or self.sampling,
            group_size=group_size or self.group_size,
            vocabulary=Vocabulary.of(self.model),
            version=self.step,
            seed=self.seed,
        )

    def received(self, batch: PromptBatch, completions: Completions, started: float) -> Completions:
        """Completions of this rank's prompts as those of a rollout, waited for since `started`."""
        self._seconds["generate"] += time.perf_counter() - started
        self._sampled += int(completions.lengths.sum())
        return replace(completions, group_id=completions.group_id + self.global_rank * len(batch))

    @property
    def sampled_tokens(self) -> int:
        """Tokens that this rank has drawn for the rollout at hand, also those that nothing was learned from."""
        return self._sampled

    def reward(self, batch: PromptBatch, completions: Completions) -> Scores:
        """What the reward functions say of each completion, special tokens left out of the text."""
        ids = response_ids(completions)
        return self.reward_texts(batch, self.tokenizer.batch_decode(ids, skip_special_tokens=True), ids)

    def reward_texts(self, batch: PromptBatch, texts: Sequence[str], ids: Sequence[Sequence[int]]) -> Scores:
        """What the reward functions say of completions, whoever wrote them; those of a prompt are neighbours."""
        started = time.perf_counter()
        prompts, answers, columns = as_reward_input(batch, texts, len(texts) // len(batch))
        trainer = self.trainer_or_none
        now = TrainerState(self.step, trainer.max_steps, trainer.current_epoch) if trainer else TrainerState()
        scores = self.reward_functions.score(prompts, answers, columns, completion_ids=ids, trainer_state=now)
        self._seconds["reward"] += time.perf_counter() - started
        return scores

    def judged(self, batch: PromptBatch, completions: Completions, scores: Scores) -> Scores:
        """What is known of training completions once those of a prompt were compared; most algorithms compare none."""
        return scores

    def greedy_rewards(self, batch: PromptBatch) -> Tensor:
        """`(b,)`: the reward of the likeliest completion of each row's prompt."""
        greedy = replace(self.sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
        completions = self.generate(batch, greedy, group_size=1)
        total = self.reward(batch, completions).total
        return total.to(completions.response_ids.device).repeat_interleave(self.group_size)

    @contextmanager
    def rollout_context(self) -> Iterator[None]:
        """No gradient, the Trainer's precision, and a sharded policy gathered once where it is what decodes."""
        trainer = self.trainer_or_none
        precision = trainer.precision_plugin.forward_context() if trainer else nullcontext()
        whole = unsharded(self.policy) if is_exact(self.generator) else nullcontext()
        with torch.no_grad(), precision, whole:
            yield

    def rest(self) -> None:
        """Nothing is drawn for now: an engine may give its memory back."""
        if hasattr(self.generator, "rest"):
            self.generator.rest()  # pyright: ignore[reportAttributeAccessIssue]

    # ------------------------------------------------------------------ validate, test, predict

    def evaluate(self, batch: PromptBatch, dataloader_idx: int = 0) -> tuple[Completions, Scores]:
        """Complete and score a batch with the evaluation's own sampling; its noise is never the training's."""
        apart = replace(batch, rollout=-1 - dataloader_idx)
        seconds, sampled = dict(self._seconds), self._sampled  # of the training's rollout
        with self.rollout_context():
            completions = self.generate(apart, self.evaluation.sampling(self.sampling), self.evaluation.group_size)
            scores = self.reward(apart, completions)
        self._seconds, self._sampled = seconds, sampled
        return completions, scores

    def predict_step(self, batch: PromptBatch, batch_idx: int, dataloader_idx: int = 0) -> dict[str, list[Any]]:
        """The batch as a table: prompt, completion, each reward, length, and the data's own columns."""
        completions, scores = self.evaluate(batch, dataloader_idx)
        texts = self.tokenizer.batch_decode(response_ids(completions), skip_special_tokens=True)
        while len(self._evaluated) <= dataloader_idx:
            self._evaluated.append(EvaluationRows())
        table = sample_table(self.step, batch, texts, completions, scores, advantages=None)
        wins = None
        if self.evaluation.win_rate_against is not None and not self.trainer.predicting:
            seconds = dict(self._seconds)
            duels = self._opponent.duels(self, batch, texts, scores, dataloader_idx)
            self._seconds, wins = seconds, duels.wins
            table = {"opponent": duels.theirs, "win": wins.tolist()} | table
        self._evaluated[dataloader_idx].add(batch, completions, scores, wins)
        return table

    validation_step = predict_step
    test_step = predict_step

    def on_validation_epoch_start(self) -> None:
        self._evaluated = []

    on_test_epoch_start = on_validation_epoch_start

    def on_validation_epoch_end(self) -> None:
        self._end_evaluation("val")

    def on_test_epoch_end(self) -> None:
        self._end_evaluation("test")

    def _end_evaluation(self, stage: str) -> None:
        self.rest()
        logged = self.log_generated(stage)
        if self.trainer.state.fn == TrainerFn.FITTING and not self.trainer.sanity_checking:
            checks.monitors(self.trainer, logged)

    def log_generated(self, stage: str) -> set[str]:
        """Log what the completions of every validation set were like; returns the names."""
        self._opponent.release()
        logged: set[str] = set()
        for name, rows in zip(self.trainer.datamodule.val_names, self._evaluated, strict=True):  # pyright: ignore
            rows.gather()
            logged |= self.log_validation(prefixed(rows.metrics(), stage, name))
        return logged

    def log_validation(self, metrics: dict[str, float]) -> set[str]:
        """Log under the number of the step; returns the names."""
        fitting = self.trainer.state.fn == TrainerFn.FITTING
        if fitting and not self.trainer.sanity_checking:
            for logger in self.trainer.loggers:  # Lightning's own way counts a step less at an epoch's end
                logger.log_metrics(metrics, step=self.step)
        self.log_dict(metrics, logger=not fitting, batch_size=1)
        return set(metrics)
