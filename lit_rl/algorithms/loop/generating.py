"""A policy with a generator: completions, rewards, and validation by generating."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, overload

import torch
from torch import Tensor

from lit_rl.algorithms.checks import argument_checks, data_and_trainer
from lit_rl.algorithms.checks.memory import RowLengths
from lit_rl.algorithms.checks.micro_batching import device_memory
from lit_rl.algorithms.checks.model_sizes import StepFacts
from lit_rl.algorithms.checks.preference_checks import check_win_rate, warn_unused_judge
from lit_rl.algorithms.checks.strategy_checks import Feature
from lit_rl.algorithms.evaluation.summary_statistics import prefixed, sample_table
from lit_rl.algorithms.evaluation.validation import Evaluation, EvaluationRows, check_policy_scores
from lit_rl.algorithms.evaluation.win_rate import BASE, ComparedDrawing, ComparedModel, compare
from lit_rl.algorithms.loop.module import PolicyModule
from lit_rl.algorithms.optim.strategies import FSDPTPStrategy, ZeROStrategy
from lit_rl.algorithms.rollouts.episode_outcomes import check_spans, sound_rows, warn_of_failures
from lit_rl.algorithms.rollouts.phase_costs import Stopwatch
from lit_rl.algorithms.rollouts.rollout_source import EarlyRewards, RolloutSource, abort_on_all_ranks
from lit_rl.algorithms.rollouts.scored import Scored
from lit_rl.core.episode import Episode
from lit_rl.core.errors import ConfigError, check_instance
from lit_rl.core.interrupts import interruptible, run_ending_hook
from lit_rl.core.process_state import preserve_settings
from lit_rl.core.rollout import Completions, PromptBatch, Sampling
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.environments.environment_base import EpisodeSource, Interactive
from lit_rl.generation.collect import RolloutRequest, Vocabulary, as_reward_input, response_ids, texts_of
from lit_rl.generation.generator import Generator, InProcessGenerator, as_generator
from lit_rl.generation.hf import HFGenerator
from lit_rl.generation.native import NativeGenerator
from lit_rl.generation.noise import prompt_key
from lit_rl.models.forward import refuse_lookahead
from lit_rl.models.sharding import unsharded
from lit_rl.ops.reductions import Metrics
from lit_rl.rewards.classifiers import Classifier, OnRunDevice
from lit_rl.rewards.jobs import TrainerState
from lit_rl.rewards.judge_endpoint import JudgeEndpoint, judges_among, reach_judges
from lit_rl.rewards.judges import as_judge
from lit_rl.rewards.weighted_rewards import PendingRewards, Rewards, Scores
from lit_rl.settings.algorithms import GeneratingConfig
from lit_rl.settings.base import takes

DEFAULT_SAMPLING, DEFAULT_EVALUATION = Sampling(), Evaluation()
"""The default settings. Completions of the default sampling are shortened to fit the model's context."""


class GeneratingModule(PolicyModule):
    """A `PolicyModule` with a generator and rewards, the base of all methods that train a policy."""

    @takes(GeneratingConfig)
    def __init__(self, settings: GeneratingConfig) -> None:
        argument_checks.check_reward(type(self), settings.model, settings.reward)
        check_instance("sampling", settings.sampling, Sampling, "sampling=Sampling(max_new_tokens=256), of lit_rl")
        check_instance("evaluation", settings.evaluation, Evaluation, "evaluation=Evaluation(group_size=4), of lit_rl")
        super().__init__(config=settings)
        self.reward_functions = settings.reward if isinstance(settings.reward, Rewards) else Rewards(settings.reward)
        self.generator: Generator = (
            NativeGenerator() if settings.generator is None else as_generator(settings.generator)
        )
        self.sampling, self.evaluation = settings.sampling, settings.evaluation
        self._sampling_is_chosen = settings.sampling is not DEFAULT_SAMPLING
        self.judge = as_judge(settings.judge)
        self.log_entropy = settings.log_entropy
        self.stopwatch = Stopwatch("generate", "reward", memory=self.costs.memory)
        self.source = RolloutSource(self.generator, self.stopwatch)
        self._early = EarlyRewards()
        self._evaluated: list[EvaluationRows] = []
        self._compared_model = ComparedModel(self.model)

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.micro_batches.generator = self.generator if isinstance(self.generator, InProcessGenerator) else None
        self.reward_functions.run_on(self.trainer.strategy.root_device)
        if isinstance(self.judge, OnRunDevice):
            self.judge.run_device = self.trainer.strategy.root_device

    def features(self) -> Iterator[Feature]:
        yield from super().features()
        generator, lag = self.generator, self.generator.lag
        if lag or not isinstance(generator, NativeGenerator | HFGenerator):
            setting = f"generator={type(generator).__name__}" + (f" with generator.lag={lag}" if lag else "")
            yield Feature("engine", setting, "Take generator=native or hf" + (" with lag 0" if lag else ""))
        if any(isinstance(each, Classifier) for each in self.reward_functions.functions.values()):
            yield Feature("reward model", "A reward model in this process", "Take reward functions without weights")
        if self.env is not None:
            yield Feature("environment", f"env={type(self.env).__name__}", "Leave it out")
            if self.env.max_branches > 1:
                yield Feature("branches", f"env.max_branches={self.env.max_branches}", "Set it to 1")
        if self.evaluation.win_rate_against is not None:
            yield Feature("win rate", "eval.win_rate_against", "Set it to null")

    def step_facts(self) -> StepFacts:
        data: Any = self.trainer.datamodule  # pyright: ignore
        device = device_memory(self.trainer.strategy.root_device, gigabytes=self.micro_batches.memory_gb) or 0
        grouped, decoding = isinstance(self.generator, NativeGenerator) and self.generator.speedups.grouped_cache, None
        if isinstance(self.generator, InProcessGenerator):
            longest = self.longest_prompt(max(getattr(data, "longest_prompt", 0), data.longest_val_prompt))
            new_tokens = max(self.longest_response(self.sampling), self.evaluation.max_new_tokens or 0)
            decoding = RowLengths(longest, new_tokens, self.group_size)
        engine = int(self.generator.share_of_device * device)
        return replace(super().step_facts(), engine=engine, decoding=decoding, grouped_cache=grouped)

    learns_by_judge = False
    """True if the method learns from the judge; otherwise only `eval.win_rate_against` uses it."""

    group_size = 1
    """Completions a prompt by default."""

    env: Interactive | None = None
    """Settings of the environment of multi-turn completions. None: a completion is one turn."""

    interaction: EpisodeSource | None = None
    """The source of completions of several turns, made of `env` in `setup`. None: a completion is one turn."""

    def shorten_to_context(self, longest: int) -> None:
        """Shorten the default sampling to fit after prompts of `longest` tokens. `env` limits episodes itself."""
        if not self._sampling_is_chosen and self.interaction is None and longest:
            self.sampling = data_and_trainer.shorten_sampling(self.model, self.sampling, longest)
            self._sampling_is_chosen = True

    def longest_prompt(self, longest: int) -> int:
        """Return the number of tokens of the data's longest prompt, as the policy reads it."""
        return longest if self.interaction is None else self.interaction.longest_prompt(longest)

    def longest_response(self, sampling: Sampling) -> int:
        """Return the most tokens of a completion, including what the policy reads between its turns."""
        return sampling.max_new_tokens if self.interaction is None else self.interaction.settings.max_tokens

    def configure_model(self) -> None:
        against = self.evaluation.win_rate_against
        if self.model.sees:
            self._check_draws_beside_images(against)
        if against is not None:
            data = getattr(self.trainer_or_none, "datamodule", None)
            check_win_rate(against, self.judge, self.reward_functions.names, data)
            self._compared_model.describe(against)
        elif not self.learns_by_judge:
            warn_unused_judge(type(self).__name__, self.judge)
        if self.evaluation.log_policy:
            strategy = getattr(self.trainer_or_none, "strategy", None)
            check_policy_scores(type(self).__name__, self.rolls_out, self.sampling, strategy)
        if self.policy is None and self.trainer_or_none is not None:
            reach_judges(self.served_judges.values())
        super().configure_model()
        self.generator.prepare(self.model)

    @property
    def served_judges(self) -> dict[str, JudgeEndpoint]:
        """The judges behind an API that are asked: reward functions by their names, and that of pairs."""
        asks_judge = self.learns_by_judge or self.evaluation.win_rate_against is not None
        return judges_among(self.reward_functions.functions | ({"judge=llm": self.judge} if asks_judge else {}))

    def _check_draws_beside_images(self, against: str | None) -> None:
        if not self.generator.sees:
            raise ConfigError(
                f"model.name={self.model.name!r} is a model over images, and {type(self.generator).__name__} would not "
                "show it any. Use generator=native, hf, vllm or vllm_server."
            )
        if self.interaction is not None and not self.interaction.settings.converses:
            raise ConfigError(
                f"model.name={self.model.name!r} is a model over images, and env=rollout_func would not show it any. "
                "Take env=tools, mcp or environment, or leave env out."
            )
        if against not in (None, BASE):
            raise ConfigError(
                f"eval.win_rate_against={against}: a model over images can be compared only with itself before the "
                f"training, eval.win_rate_against={BASE}."
            )

    def on_fit_start(self) -> None:
        super().on_fit_start()
        data: Any = getattr(self.trainer_or_none, "datamodule", None)
        shown = data.first_shown() if self.model.sees and hasattr(data, "first_shown") else None
        if shown is not None:
            with self.rollout_context():
                refuse_lookahead(self.policy, *shown)

    def close(self) -> None:
        """Stop the generator's engine, if it has one; another is started when it is needed again."""
        self.generator.close()

    # ------------------------------------------------------------------ generate -> reward

    @overload
    def generate(
        self, batch: PromptBatch, sampling: Sampling | None = None, group_size: int | None = None
    ) -> Completions: ...
    @overload
    def generate(self, batch: str, sampling: Sampling | None = None) -> str: ...
    @overload
    def generate(self, batch: list[str], sampling: Sampling | None = None) -> list[str]: ...
    def generate(
        self, batch: PromptBatch | str | list[str], sampling: Sampling | None = None, group_size: int | None = None
    ) -> Completions | str | list[str]:
        """Generate completions of every prompt of the batch, by default with the training's settings.

        A text, or a list of texts, gets one completion each, as text; `group_size` is 1 then.

        Raises:
            ConfigError: the policy is not loaded yet, or `batch` is neither a batch nor text.
        """
        is_text = isinstance(batch, str)
        texts: Any = [batch] if is_text else batch
        asks_in_text = isinstance(texts, list) and bool(texts) and all(isinstance(text, str) for text in texts)
        if not (isinstance(batch, PromptBatch) or asks_in_text):
            raise ConfigError(
                f"generate takes a PromptBatch, a text or a list of texts, and got a {type(batch).__name__}. Rows make "
                'a batch by a data module: data = RolloutDataModule(rows=[{"prompt": text}], val_fraction=0); '
                'data.prepare(module.tokenizer, stage="predict"); module.generate(data.peek(1)).'
            )
        if isinstance(batch, PromptBatch):
            return self.draw(batch, sampling, group_size)
        self._check_ready()
        data = RolloutDataModule([{"prompt": text} for text in texts], val_fraction=0, overlong="error")
        data.prepare(self.tokenizer, stage="predict")  # texts are tokenised like training prompts
        with self.rollout_context():
            completions = self.draw(data.peek(len(texts)), sampling, group_size=1)
        answers = texts_of(completions, self.tokenizer)
        return answers[0] if is_text else answers

    def draw(
        self,
        batch: PromptBatch,
        sampling: Sampling | None = None,
        group_size: int | None = None,
        *,
        score_early: bool = False,
    ) -> Completions:
        """Draw completions of every prompt of the batch from the generator.

        Args:
            batch: The prompts.
            sampling: Sampling settings. None: the training's.
            group_size: Completions a prompt. None: the training's.
            score_early: Let reward functions score finished completions while others are still generated, because
                `reward` is called next. Its result is the same; for other completions it starts anew.

        Raises:
            ConfigError: the policy is not loaded yet, or the environment is not set up.
        """
        self._check_ready()
        request = self.request(batch, sampling, group_size)
        functions, tokenizer, state = self.reward_functions, self.model.tokenizer, self.state_at(batch)
        with self._early.begun(functions, request, tokenizer, state, expected=score_early) as request:
            return self.source.draw(request, self.ranks)

    def _check_ready(self) -> None:
        if self.policy is None:
            raise ConfigError(
                "The policy is not loaded yet: call module.configure_model() first, then generate; a Trainer does it."
            )
        if self.env is not None and self.interaction is None:  # one turn would be taken for an episode
            raise ConfigError(
                f"{type(self).__name__} has env={type(self.env).__name__}, which reads the data of a Trainer, and no "
                "Trainer has set the module up: call trainer.validate(module, datamodule=data) before generate, or "
                "trainer.fit."
            )

    def request(
        self, batch: PromptBatch, sampling: Sampling | None = None, group_size: int | None = None
    ) -> RolloutRequest:
        """Return the request to the source of rollouts: completions of these prompts by the current policy; by default
        this rank's share of the training's groups."""
        size = group_size or self.group_size // batch.sharing
        return RolloutRequest(
            batch,
            self.policy,
            Vocabulary.of(self.model),
            interaction=self.interaction,
            version=self.global_step,
            sampling=sampling or self.sampling,
            group_size=size,
            seed=self.seed,
            first_sample=0 if group_size else batch.share * size,
        )

    @property
    def ranks_score_together(self) -> bool:
        """True if all ranks score equally often, which the comparison with another model does not."""
        return self.evaluation.win_rate_against is None

    def load_rewards(self) -> None:
        """Load the reward models, sharded over the ranks if these score equally often."""
        mesh = getattr(self.trainer.strategy, "reward_mesh", None)  # FSDP2's; None if each rank has whole models
        self.reward_functions.load(mesh if self.ranks_score_together else None)

    def reward(self, batch: PromptBatch, completions: Completions) -> Scores:
        """Score each completion with the reward functions; its text has no special tokens.

        An episode that failed by no fault of the policy is not scored.
        """
        texts, episodes = texts_of(completions, self.model.tokenizer), completions.episodes
        scores = self.reward_texts(batch, texts, response_ids(completions), episodes, self._early.take(batch))
        if episodes is not None:
            check_spans(scores, episodes)
        return scores

    def reward_together(self, batch: PromptBatch, completions: Completions) -> Scores:
        """Call `reward` on every rank: if one of them aborts, all do. A collective."""
        with abort_on_all_ranks(self.ranks):
            scores = self.reward(batch, completions)
        return self.from_tensor_group_leader(scores)

    def from_tensor_group_leader(self, mine: Any) -> Any:
        """Return the object of the first rank of our tensor-parallel group, or `mine` without one. A collective."""
        strategy = self.trainer_or_none.strategy if self.trainer_or_none else None
        return strategy.first_of_group(mine) if isinstance(strategy, FSDPTPStrategy) else mine

    def reward_texts(
        self,
        batch: PromptBatch,
        texts: Sequence[str],
        ids: Sequence[Sequence[int]],
        episodes: Sequence[Episode] | None = None,
        begun: PendingRewards | None = None,
    ) -> Scores:
        """Score completions of any model with the reward functions; those of a prompt are contiguous.

        `begun` are early calls of the functions on some of these completions.
        """
        leave = nullcontext() if self.reward_functions.waits_for_ranks else interruptible()
        with self.stopwatch.measure("reward"), leave:
            prompts, answers, columns = as_reward_input(batch, texts, episodes)
            group_size = len(texts) // len(batch.prompts)
            return self.reward_functions.score(
                prompts,
                answers,
                columns,
                completion_ids=ids,
                trainer_state=self.state_at(batch),
                rows=None if episodes is None else sound_rows(episodes),
                begun=begun,
                group_ids=[row // group_size for row in range(len(texts))],
            )

    @property
    def trainer_state(self) -> TrainerState:
        """The progress of the run, as reward functions and judges see it."""
        trainer = self.trainer_or_none
        return TrainerState(self.global_step, trainer.max_steps, trainer.current_epoch) if trainer else TrainerState()

    def state_at(self, batch: PromptBatch) -> TrainerState:
        """Return the progress of the run with the seed for functions that score this batch of one or more prompts."""
        key = prompt_key(self.seed, batch.rollout, batch.rows[0], batch.occurrences[0])
        return replace(self.trainer_state, seed=key % 2**32)

    def may_log(self, name: str) -> bool:
        """Tell whether a metric that no step has logged so far may be logged later.

        Rewards may log at any time, and a function that has applied to no completion yet has no mean.
        """
        _, _, own = name.partition("/")
        means = {f"rewards/{function}/{of}" for function in self.reward_functions.names for of in ("mean", "std")}
        return self.reward_functions.logs_metrics or own in means

    @contextmanager
    def rollout_context(self) -> Iterator[None]:
        """Disable gradients, set the Trainer's precision, and gather a sharded policy once if it decodes itself.

        User functions run inside, some of them in other threads: random draws and settings of theirs are undone.
        """
        trainer = self.trainer_or_none
        precision = trainer.precision_plugin.forward_context() if trainer else nullcontext()
        strategy = trainer.strategy if trainer else None
        whole: AbstractContextManager[None] = nullcontext()
        if isinstance(self.generator, InProcessGenerator):
            whole = strategy.whole() if isinstance(strategy, ZeROStrategy) else unsharded(self.policy)
        with preserve_settings("a rollout"), torch.no_grad(), precision, whole:
            yield

    # ------------------------------------------------------------------ validate, test, predict

    def evaluate(self, batch: PromptBatch, dataloader_idx: int = 0) -> tuple[Completions, Scores]:
        """Complete and score a batch with the evaluation's own sampling and noise that the training never uses."""
        sampling, group_size = self.evaluation.sampling(self.sampling), self.evaluation.group_size
        return self.draw_aside(replace(batch, rollout=-1 - dataloader_idx), sampling, group_size)

    def draw_aside(self, batch: PromptBatch, sampling: Sampling, group_size: int) -> tuple[Completions, Scores]:
        """Complete and score a batch outside of the training's rollouts. A collective: each rank has a batch.

        Args:
            batch: The prompts, of a rollout number below 0: its noise is then never the training's.
            sampling: Sampling settings.
            group_size: Completions a prompt.
        """
        together = abort_on_all_ranks(self.ranks)
        with run_ending_hook(), together, self.source.aside(), self.rollout_context():
            # Scoring is a collective then, so no rank may enter it while another has aborted.
            drawn = abort_on_all_ranks(self.ranks) if self.reward_functions.waits_for_ranks else nullcontext()
            with drawn:
                completions = self.draw(batch, sampling, group_size, score_early=True)
            scores = self.reward(batch, completions)
        return completions, self.from_tensor_group_leader(scores)

    def predict_step(self, batch: PromptBatch, batch_idx: int, dataloader_idx: int = 0) -> dict[str, list[Any]]:
        """Return the batch as a table: prompt, completion, each reward, length, and the data's own columns."""
        completions, scores = self.evaluate(batch, dataloader_idx)
        texts = texts_of(completions, self.model.tokenizer)
        while len(self._evaluated) <= dataloader_idx:
            self._evaluated.append(EvaluationRows())
        table = sample_table(self.global_step, batch, texts, completions.on_host, scores, advantages=None)
        wins, against = None, self.evaluation.win_rate_against
        if against is not None and not self.trainer.predicting:
            with run_ending_hook(), interruptible(alone=False):
                theirs, wins = self._compared(against, replace(batch, rollout=-1 - dataloader_idx), texts, scores)
            table = {"opponent": theirs, "win": wins.tolist()} | table
        evaluated, logs_policy = self._evaluated[dataloader_idx], self.evaluation.log_policy
        evaluated.add(batch, completions, scores, wins, self.token_statistics(completions) if logs_policy else {})
        if logs_policy and not self.trainer.predicting:
            for part in self.objective_of(Scored(batch, completions, scores)):
                evaluated.objective.add(part)
        return table

    def _compared(
        self, against: str, batch: PromptBatch, texts: Sequence[str], scores: Scores
    ) -> tuple[list[str], Tensor]:
        """Return completions of the other model, and the probability that the policy's are better, by `compare`."""
        asked = self.request(batch, self.evaluation.sampling(self.sampling), self.evaluation.group_size)
        options = getattr(getattr(self.trainer, "datamodule", None), "options", None)
        drawing = ComparedDrawing(self.source, asked, self.device, self.rollout_context)
        answers = self._compared_model.answers(against, drawing, options)
        theirs, their_rewards = [answer.text for answer in answers], None
        if self.judge.reads_rewards:
            with self.stopwatch.aside():
                their_rewards = self.reward_texts(batch, theirs, [answer.ids for answer in answers]).total
        rewards = {"our_rewards": scores.total, "their_rewards": their_rewards}
        return theirs, compare(self.judge, batch, texts, theirs, **rewards, trainer_state=self.state_at(batch))

    rolls_out = False
    """True if the method learns from its own completions."""

    second_decoding = ""
    """The suffix of the stage while `decoding_at` validates."""

    def token_statistics(self, completions: Completions) -> dict[str, Tensor]:
        """Return columns `(b, t)` of the sampled tokens for `eval.log_policy`, by name."""
        return {}

    def objective_of(self, scored: Scored) -> Iterable[Metrics]:
        """Return the parts of a batch's loss with its metrics, for `eval.log_policy`; none if it has no loss."""
        return ()

    validation_step = predict_step
    test_step = predict_step

    @contextmanager
    def decoding_at(self, temperature: float) -> Iterator[None]:
        """Validate at another temperature than the `eval` group's, by completions only.

        Metrics are logged as `val_sampled/`, or as `val_greedy/` for temperature 0; `val/` stays the `eval` group's.
        """
        configured = self.evaluation
        self.evaluation = replace(configured, temperature=temperature)
        self.second_decoding = "greedy" if temperature == 0 else "sampled"
        try:
            yield
        finally:
            self.evaluation, self.second_decoding = configured, ""

    def on_validation_epoch_start(self) -> None:
        self._evaluated = []

    on_test_epoch_start = on_validation_epoch_start

    def log_evaluation(self, stage: str) -> set[str]:
        """Log the metrics of the completions of every validation set, and return the metric names."""
        self.generator.rest()
        self._compared_model.release()
        stage += f"_{self.second_decoding}" if self.second_decoding else ""
        logged: set[str] = set()
        for name, rows in zip(self.trainer.datamodule.val_names, self._evaluated, strict=True):  # pyright: ignore
            rows.gather(self.ranks)
            if self.interaction is not None:
                warn_of_failures(name, rows.episodes, self.interaction.settings.max_failed)
            objective = rows.objective.reduce(self.ranks)
            logged |= self.log_validation(prefixed(rows.metrics() | objective, stage, name))
        return logged
