"""The loop of the on-policy methods: rollouts inside Lightning's automatic optimisation.

One rollout lasts R batches of Lightning's loop (`slots_per_rollout`). The data module yields the same prompts R times,
tagged `slot`; slot 0 takes the rollout, and each `training_step` learns from one micro-batch of it. So Lightning's
automatic optimisation (accumulation, clipping, precision, schedules, `max_steps`) has its usual meaning, and
`global_step` counts optimizer steps. No term of an objective is here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lit_rl.algorithms.checks import data_and_trainer, episode_checks, model_sizes
from lit_rl.algorithms.checks.memory import REWARD_MODELS, RowLengths
from lit_rl.algorithms.checks.micro_batching import StepRows
from lit_rl.algorithms.checks.model_sizes import StepFacts
from lit_rl.algorithms.checks.policy_gradient_checks import (
    check_comparing_rewards,
    check_shared_groups,
    check_weight_copies,
)
from lit_rl.algorithms.checks.strategy_checks import Feature, check_proven
from lit_rl.algorithms.data_parallel import data_world_size
from lit_rl.algorithms.evaluation.validation import MOST_ROWS, entropies
from lit_rl.algorithms.loop.generating import GeneratingModule
from lit_rl.algorithms.optim.strategies import drop_gradients
from lit_rl.algorithms.records import RolloutRecords
from lit_rl.algorithms.rollouts import checkpoints
from lit_rl.algorithms.rollouts.episode_outcomes import check_failures
from lit_rl.algorithms.rollouts.phase_costs import UpdateWork
from lit_rl.algorithms.rollouts.rollout_plan import (
    BatchPlan,
    Dealt,
    RowCounts,
    SeenRows,
    deal_rows,
    frozen_logprobs,
    micro_batch,
    step_counts,
    step_totals,
    with_gradient_norms,
)
from lit_rl.algorithms.rollouts.rollout_source import fail_on_all_ranks
from lit_rl.algorithms.rollouts.scored import CurriculumFeedback, Scored, Spare
from lit_rl.core.errors import ConfigError, GenerationError
from lit_rl.core.interrupts import run_ending_hook
from lit_rl.core.rollout import Completions, PromptBatch, Rollout, Sampling, Width, used_columns_of_parts
from lit_rl.core.vision_inputs import PromptVision
from lit_rl.data.visual_prompts import Processor
from lit_rl.environments.environment_base import EpisodeSource, Interactive
from lit_rl.models.forward import TokenScores, score
from lit_rl.models.model_costs import Span
from lit_rl.models.shared_prefix import worth_sharing
from lit_rl.models.vision_parts import with_image_gradients
from lit_rl.ops.kl import k3
from lit_rl.ops.reductions import Metrics, StepTokens, StepTotals
from lit_rl.rewards.judges import RewardJudge
from lit_rl.settings.algorithms import OnPolicyConfig
from lit_rl.settings.base import takes


class OnPolicyModule(GeneratingModule, ABC):
    """Abstract base of on-policy methods: subclasses define the advantage and the loss."""

    @takes(OnPolicyConfig)
    def __init__(self, settings: OnPolicyConfig) -> None:
        super().__init__(config=settings)
        self.minibatches, self.iterations = settings.minibatches, settings.iterations
        self.micro_batches.split_groups = settings.split_groups
        self.group_size, self.groups = settings.group_size, settings.groups
        check_comparing_rewards(self.reward_functions.comparing, settings.group_size)
        self.feedback: CurriculumFeedback | None = None
        """The link to the data's curriculum; None without one."""
        self.plan: BatchPlan | None = None
        self.ranks_per_group = 1
        """Ranks that complete the same prompts, each a share of every group."""
        self.rollout: Rollout | None = None
        self.scored: Scored | None = None
        self.seen: SeenRows | None = None
        """The last micro-batch that was learned from, for callbacks."""
        self._slot, self._counts = -1, torch.zeros(0)
        self._nothing_rewarded = False
        """True if the rollout to learn from has no reward on any rank: its gradient is dropped."""
        self._dealt: Dealt | None = None
        self._work: list[UpdateWork] = []
        """Work of each slot of the current rollout."""
        self._step_tokens: StepTokens | None = None
        self._records = RolloutRecords()
        self._unlogged: dict[str, float] = {}
        """Metrics of a rollout that ended between two logged steps."""

    # ------------------------------------------------------------------ interface of a method

    @abstractmethod
    def advantages(
        self, scored: Scored, old: Tensor | None = None, ref: Tensor | None = None
    ) -> tuple[Rollout, Metrics]:
        """Assign credit: make a rollout for the loss from scored completions. Runs without gradient.

        Args:
            scored: `b` completions with their rewards.
            old: `(b, t)`: their log-probs under the policy now, if `needs_old_logprobs`.
            ref: `(b, t)`: those under the reference, if `needs_reference`.
        """

    @abstractmethod
    def loss(
        self, rollout: Rollout, scores: TokenScores, totals: StepTotals, step: StepTokens | None = None
    ) -> tuple[Tensor, Metrics]:
        """Return this micro-batch's share of the objective (shares of a step sum to it), and metrics. Changes no state.

        Args:
            rollout: The micro-batch.
            scores: Log-probs and entropies of its tokens under the policy now, with gradient.
            totals: Totals of the optimizer step.
            step: The loss tokens of the whole step, if `needs_step`. None: this micro-batch is the whole step.
        """

    needs_old_logprobs = False
    """True if `advantages` gets the log-probs of the policy that took the rollout."""

    needs_greedy_rewards = False
    """True if `advantages` compares with the greedy completion of each prompt."""

    needs_gradient_norms = False
    """True if `advantages` reads how large a gradient each token has; `needs_old_logprobs` is true then."""

    compares_in_step = False
    """True if `loss` compares completions of one prompt, so that a micro-batch must contain whole groups."""

    shares_prompts = True
    """True if a group's prompt may be computed once, as the objective reads response tokens only."""

    opponent_writes = False
    """True if the second completion of each prompt is an opponent's. Samples and the logged reward leave it out."""

    needs_teacher = False
    """True if a teacher scores each rollout: `taught`."""

    needs_ref_logprobs = True
    """False if the reference is there for a teacher alone, so that `advantages` gets none of its log-probs."""

    learns_text = False
    """True if text is learned beside the rollouts: `supervised_share` is its loss."""

    needs_step = False
    """True if a term of `loss` is defined over all tokens of an optimizer step."""

    # ------------------------------------------------------------------ generate -> reward -> advantages -> loss

    def on_train_batch_start(self, batch: PromptBatch, batch_idx: int) -> None:
        if batch.slot == 0:
            self.stopwatch.reset()
            self.costs.begin()
            with run_ending_hook(), self.rollout_context(), self.source.rollout():
                rollout = self.take_rollout(batch)
            self.generator.rest()
            self.in_a_step = True
            self._begin_rollout(*rollout)
        self.in_a_step, self._slot = True, batch.slot

    def take_rollout(self, batch: PromptBatch) -> tuple[Scored, Rollout, Metrics]:
        """Generate and score completions of these prompts, and compute advantages.

        Returns the completions as scored, the rollout that is learned from, and metrics. Completions that were drawn
        ahead are taken in place of new ones.
        """
        draws_more = self.groups is not None or self.needs_greedy_rewards
        max_age = self.generator.lag * self.steps_per_rollout
        with fail_on_all_ranks(self.ranks):
            ahead = self.source.take_ahead(self.request(batch), self.ranks, max_age=max_age)
            completions = self.draw_rollout(batch) if ahead is None else ahead
        if not draws_more:
            self._finish_drawing(batch.upcoming)
        scored = Scored(batch, completions, self.reward_together(batch, completions))
        of_draw = {} if self.feedback is None else self.feedback.begin(scored, self.ranks)
        scored, selection_metrics = self.choose(scored)
        scored = self.judged(scored)
        if self.needs_greedy_rewards:
            scored = replace(scored, greedy_rewards=self.greedy_rewards(scored.batch))
        if draws_more:
            self._finish_drawing(batch.upcoming)
        reads_logprobs = self.needs_old_logprobs or self.needs_reference
        with self.stopwatch.measure("score") if reads_logprobs else nullcontext():
            scored, rollout, metrics = self.credited(scored)
        if self.needs_teacher:
            with self.stopwatch.measure("teacher"):
                rollout, of_teacher = self.taught(scored, rollout)
            metrics |= of_teacher
        if self.feedback is not None:
            self.feedback.end(self.ranks)
        return scored, rollout, of_draw | selection_metrics | metrics

    def credited(self, scored: Scored) -> tuple[Scored, Rollout, Metrics]:
        """Score the tokens as far as `advantages` reads such scores, and compute it."""
        if self.needs_gradient_norms:
            old, norms = self.old_scores(scored.completions)
            scored = replace(scored, gradient_norms=norms)
        else:
            old = self.old_logprobs(scored.completions) if self.needs_old_logprobs else None
        ref = self.reference_of(scored) if self.needs_reference and self.needs_ref_logprobs else None
        return scored, *self.advantages(scored, old, ref)

    def _finish_drawing(self, upcoming: Sequence[PromptBatch]) -> None:
        """Refuse a rollout with too many failed episodes, as soon as all of it is drawn, and request the next ones.

        Raises:
            GenerationError: see `check_failures`.
        """
        if self.env is not None:
            try:
                check_failures(self.source.episodes, self.env.max_failed, self.ranks)
            except GenerationError:
                if self.interaction is not None:
                    self.interaction.forget()
                raise
        self.source.request_ahead([self.request(batch) for batch in upcoming])

    def training_step(self, batch: PromptBatch, batch_idx: int) -> Tensor:
        assert self.rollout is not None and self.plan is not None
        step, number = divmod(batch.slot, self.plan.accumulate)
        micro = self._micro_batch(batch)
        self.costs.add(self._work[batch.slot])
        if self.needs_step and number == 0 and self.plan.accumulate * self.plan.world_size > 1:
            self._step_tokens = self.look_ahead([self._micro_batch(batch, i) for i in range(self.plan.accumulate)])
        further = {} if micro.teacher_top_ids is None else {"further_ids": micro.teacher_top_ids}
        scores = self.token_scores(micro.completions, **further)
        loss, metrics = self.loss(micro, scores, step_totals(self._counts[step], self.plan), self._step_tokens)
        shares = self.plan.accumulate * self.plan.world_size
        self._records.add({"loss": (loss, loss.new_full((), 1 / shares)), **metrics})
        self.after_micro_batch(micro, scores, self._step_tokens)
        self.seen = SeenRows.of(self.dealt_out(batch).rows[batch.slot], scores)
        # Lightning divides by the accumulated batches and averages over ranks; the loss already has its denominator.
        share = loss * shares
        if self.learns_text:
            text, metrics = self.supervised_share(batch.slot)
            self._records.add(metrics)
            share = share + text
        return with_image_gradients(share, self.trained_modules.values()) if self.model.sees else share

    # ------------------------------------------------------------------ parts of a rollout

    def draw_rollout(self, batch: PromptBatch) -> Completions:
        """Generate the completions of a rollout's prompts with the current weights; some methods mix policies here."""
        return self.draw(batch, score_early=True)

    def choose(self, scored: Scored) -> tuple[Scored, Metrics]:
        """Select the groups, and members of groups, to learn from."""
        if self.groups is None:
            return scored, {}
        datamodule = getattr(self.trainer_or_none, "datamodule", None)
        reward = self.reward if self.feedback is None else self.feedback.noting(self.reward)
        shared = scored.batch.sharing, scored.batch.share
        spare = Spare(datamodule, self.draw_rollout, self.draw, reward, self.generator.exact, *shared)
        return self.groups(scored, spare=spare, tokenizer=self.tokenizer, ranks=self.ranks)

    def judged(self, scored: Scored) -> Scored:
        """Return the rollout with the judge's verdicts. Called after `choose`; unchanged in methods without a judge."""
        return scored

    def taught(self, scored: Scored, rollout: Rollout) -> tuple[Rollout, Metrics]:
        """Return the rollout with what a teacher says of its tokens, and metrics, if `needs_teacher`."""
        raise NotImplementedError

    def greedy_rewards(self, batch: PromptBatch) -> Tensor:
        """Return the reward `(b,)` of the greedy completion of each row's prompt."""
        greedy = replace(self.sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
        counted = self.source.sampled_tokens
        with fail_on_all_ranks(self.ranks):
            completions = self.draw(batch, greedy, group_size=1, score_early=True)
        if batch.share:  # the first of the ranks that share the prompts counts them
            self.source.sampled_tokens = counted
        total = self.reward_together(batch, completions).total
        return total.to(completions.response_ids.device).repeat_interleave(self.group_size // batch.sharing)

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps that learn from a rollout."""
        return self.minibatches * self.iterations

    @property
    def ratio_is_one(self) -> bool:
        """True if a rollout is one optimizer step: the policy that learns is the one that sampled."""
        return self.steps_per_rollout == 1

    def token_scores(self, completions: Completions, **further: Any) -> TokenScores:
        """Return log-probs `(b, t)` of the response under the policy, with gradient, and entropies if logged.

        `further` are more arguments of `score`: the tokens that a teacher names.
        """
        entropy, options = self.log_entropy, self.forward_options
        return score(self.policy, completions, self.sampling, entropy=entropy, options=options, **further)

    def look_ahead(self, micro_batches: Sequence[Rollout]) -> StepTokens | None:
        """Return the loss tokens of a whole step, from its micro-batches on this rank, if `needs_step`."""
        return None

    def old_logprobs(self, completions: Completions) -> Tensor:
        """Return log-probs `(b, t)` under the policy now, without gradient. Called when the rollout is taken."""
        return self._frozen(self.policy, completions)

    def old_scores(self, completions: Completions) -> tuple[Tensor, Tensor]:
        """Return `old_logprobs`, and the squared norms `(b, t)` of their gradients by the logits, by one pass."""
        rows, options = self.rows_at_once(completions), self.forward_options
        return with_gradient_norms(self.policy, completions, sampling=self.sampling, options=options, rows_at_once=rows)

    def ref_logprobs(self, completions: Completions) -> Tensor:
        """Return log-probs `(b, t)` under the reference, without gradient."""
        with self.reference.scoring(self.policy, self.reference_policy) as scorer:
            return self._frozen(scorer, completions)

    def reference_of(self, scored: Scored) -> Tensor:
        """Return the reference's log-probs `(b, t)` for `advantages`."""
        return self.ref_logprobs(scored.completions)

    def _frozen(self, model: Any, completions: Completions, rows_at_once: int | None = None) -> Tensor:
        rows = rows_at_once or self.rows_at_once(completions)
        options = self.forward_options
        return frozen_logprobs(model, completions, sampling=self.sampling, options=options, rows_at_once=rows)

    rolls_out = True

    def token_statistics(self, completions: Completions) -> dict[str, Tensor]:
        columns = {"entropy": entropies(self.policy, completions, self.sampling, self.forward_options)}
        if self.needs_reference:
            now = self._frozen(self.policy, completions, MOST_ROWS)
            with self.reference.scoring(self.policy, self.reference_policy) as scorer:
                columns["kl"] = k3(now, self._frozen(scorer, completions, MOST_ROWS), now)
        return columns

    def rows_at_once(self, completions: Completions) -> int:
        """Return the rows of a micro-batch: scoring must not need more memory than learning."""
        if self.plan is None:  # nothing is learned
            return MOST_ROWS
        plan = self.plan
        learned = plan.prompts_per_rollout * self.group_size // plan.world_size  # a validation's batch may be larger
        return max(1, min(len(completions), learned) // (self.minibatches * plan.accumulate))

    def supervised_share(self, slot: int) -> tuple[Tensor, Metrics]:
        """Return this micro-batch's share of the loss of supervised text, times the shares, if `learns_text`."""
        raise NotImplementedError

    def rows_that_teach(self, rollout: Rollout) -> Tensor | None:
        """Return the rows, bool `(b,)`, that contribute to the loss or its gradient; only they are computed.

        None: all.
        """
        return None

    # ------------------------------------------------------------------ between steps

    def rollout_to_learn(self, rollout: Rollout) -> tuple[Rollout, Metrics]:
        """Return the rollout to learn from, made of the rollout that was drawn."""
        return rollout, {}

    def after_micro_batch(self, rollout: Rollout, scores: TokenScores, step: StepTokens | None = None) -> None:
        """Observe a micro-batch, after its `loss` and with its arguments, for terms that adapt after the step."""

    # ------------------------------------------------------------------ the clock

    def setup(self, stage: str) -> None:
        """Check everything that can be known before weights are loaded, and plan the batches."""
        super().setup(stage)
        data = data_and_trainer.rollout_data(self.trainer)
        data_and_trainer.check_one_accumulation(self.trainer, "a rollout would no longer divide into them")
        if self.env is not None:
            self.interaction = self._interaction_with(self.env, data, stage)
        self._check_data(data, stage)
        if stage == "fit":
            draws, rewards = getattr(data, "draws", None), self.reward_functions
            self.feedback = draws and CurriculumFeedback(draws, rewards, opponent_writes=self.opponent_writes)
        self.load_rewards()
        if stage == "fit":
            check_weight_copies(self.generator, self.trainer)
            self._plan_batches(data)
            data_and_trainer.check_length(self.trainer, data, self.schedules())
        elif self.micro_batches.asks_plan:
            self.micro_batches.fit_decoding(self.memory())

    def features(self) -> Iterator[Feature]:
        yield from super().features()
        if self.groups is not None:  # each rank of a tensor-parallel group would draw, or score, by itself
            yield Feature("group selection", f"algo/groups={type(self.groups).__name__}", "Set algo/groups=all")
        if getattr(getattr(self.trainer_or_none, "datamodule", None), "curriculum", None) is not None:
            yield Feature("curriculum", "data.curriculum", "Leave it out")

    def needs_whole_groups(self) -> Iterator[str]:
        """Yield what compares the completions of a prompt with each other, and so needs all of them on one rank."""
        if self.compares_in_step:
            yield type(self).__name__ if self.learns_by_judge else "algo.loss"
        yield from (f"the reward function {name!r}" for name in self.reward_functions.comparing)

    @property
    def ranks_score_together(self) -> bool:
        """True if all ranks score equally often: not if episodes may fail, or groups are drawn anew."""
        return super().ranks_score_together and self.env is None and self.groups is None

    def _interaction_with(self, env: Interactive, data: Any, stage: str) -> EpisodeSource:
        """Return the source of the policy's conversations with an environment, with sizes that fit the context.

        Raises:
            ConfigError: reward, generator or sampling are incompatible with it.
        """
        episode_checks.check_episode_rewards(env, self.reward_functions)
        env = episode_checks.with_objects(env, self.reward_functions, self.generator, data.columns)
        self._lower_turns(env)
        episode_checks.check_episodes(env, self.generator, self.sampling, self.evaluation)
        journal = episode_checks.open_journal(env, self.trainer.default_root_dir, self.trainer.global_rank)
        source = episode_checks.make_episode_source(env, self.model, data, journal)
        longest = max(data.longest_prompt if stage == "fit" else 0, data.longest_val_prompt or 0)
        new_tokens = self.sampling.max_new_tokens if self._sampling_is_chosen else 1
        new_tokens = max(new_tokens, self.evaluation.max_new_tokens or 0)
        self.env = episode_checks.shorten_episodes(env, self.model, source, longest, new_tokens)
        self._lower_turns(self.env)
        return source if self.env is env else episode_checks.make_episode_source(self.env, self.model, data, journal)

    def _lower_turns(self, env: Interactive) -> None:
        """Make turns of the default sampling no longer than an episode."""
        if not self._sampling_is_chosen and self.sampling.max_new_tokens > env.max_tokens:
            self.sampling = replace(self.sampling, max_new_tokens=env.max_tokens)

    def _check_data(self, data: Any, stage: str) -> None:
        """Bind the rewards to the data's columns; refuse rows that they cannot score, and prompts too long for the
        context."""
        episodes = () if self.env is None else self.env.columns
        self.shorten_to_context(max(data.longest_prompt if stage == "fit" else 0, data.longest_val_prompt or 0))
        if stage == "fit":
            self.reward_functions.bind([*data.columns, *episodes])
            self._fits(data.longest_prompt, self.sampling, "sampling.max_new_tokens")
            wants = "no KL term needs it. Set algo.beta or algo.reward_beta above 0 to measure the KL against it."
            data_and_trainer.warn_unused_reference(self.reference, self.needs_reference, wants)
            data_and_trainer.report_unread_columns(
                data, data.columns, self.columns_read(data.columns), sees=self.model.sees
            )
        if longest := data.longest_val_prompt:
            group = "sampling" if self.evaluation.max_new_tokens is None else "eval"
            self._fits(longest, self.evaluation.sampling(self.sampling), f"{group}.max_new_tokens")
        data_and_trainer.warn_unused_evaluation(self.evaluation, self.trainer, data.val_names, stage)
        data_and_trainer.bind_validation(self.reward_functions, data, episodes)
        data_and_trainer.check_scored_values(self.reward_functions, data, episodes)

    def columns_read(self, columns: Sequence[str]) -> set[str]:
        """Return the columns that rewards, a judge, an environment or a group selection may read."""
        asks_judge = not isinstance(self.judge, RewardJudge)
        given_all = asks_judge or self.env is not None or hasattr(self.groups, "score")
        return {*columns} if given_all else self.reward_functions.reads(columns)

    def check_processes(self, data: Any, trainer: Any) -> None:
        check_weight_copies(self.generator, trainer)
        prompts = data_and_trainer.check_prompt_data(data)
        if not getattr(prompts, "size_is_given", True):
            return  # checked once the rows are read
        plan = BatchPlan(
            prompts_per_rollout=prompts.prompts_per_rollout,
            group_size=self.group_size,
            minibatches=self.minibatches,
            iterations=self.iterations,
            accumulate=trainer.accumulate_grad_batches,
            world_size=data_world_size(trainer),
            split_groups=self.micro_batches.slices,
        )
        check_shared_groups(plan, self.needs_whole_groups())

    def _plan_batches(self, data: Any) -> None:
        """Plan the batches of a rollout, and the micro-batches of a step."""
        plan = BatchPlan(
            prompts_per_rollout=data.prompts_per_rollout,
            group_size=self.group_size,
            minibatches=self.minibatches,
            iterations=self.iterations,
            accumulate=self.micro_batches.accumulation(self.trainer),
            world_size=self.ranks.world_size,
            split_groups=self.micro_batches.slices,
            max_new_tokens=self.longest_response(self.sampling),
        )
        check_shared_groups(plan, self.needs_whole_groups())
        self.ranks_per_group = plan.ranks_per_group
        if plan.ranks_per_group > 1:
            what = f"A prompt's completions on {plan.ranks_per_group} ranks"
            instead = f"Set data.prompts_per_rollout to a multiple of {plan.world_size * plan.minibatches}"
            check_proven(type(self), [Feature("shared groups", what, instead)], self.trainer.strategy)
        rows = self.group_size // plan.ranks_per_group
        slices: Sequence[int] = (1,)  # numbers of slices that the memory plan may split a group into
        if self.micro_batches.split_groups == "auto" and not self.compares_in_step:
            slices = [parts for parts in range(1, rows + 1) if rows % parts == 0]
        step = StepRows(
            plan.units,
            rows // plan.split_groups,
            sequences=plan.completions // plan.world_size,
            whole="groups, or slices of them",
            slices=slices,
            sliced_by_hand=self.micro_batches.split_groups != "auto" and not self.compares_in_step,
        )
        self.split_step(step)
        self.plan = self._with_micro_batches(plan)
        data_and_trainer.warn_partial_rollouts(self.trainer, self.plan.slots)

    def _fits(self, longest: int, sampling: Sampling, key: str) -> None:
        """Refuse prompts and completions that do not fit the model's context, or that the engine cannot generate."""
        if self.interaction is None:
            data_and_trainer.check_context_length(self.model, key, longest, sampling.max_new_tokens)
        else:
            episode_checks.check_episode_length(self.model, self.interaction, longest)
        whole = replace(sampling, max_new_tokens=self.longest_response(sampling))
        data_and_trainer.check_engine(self.generator, whole, self.longest_prompt(longest))

    @property
    def parts_of_step(self) -> int:
        """The divisor that the user's batch settings require of a rank's prompts of a rollout."""
        return self.minibatches * self.micro_batches.parts_of_groups(self.trainer, self.group_size)

    def step_facts(self) -> StepFacts:
        facts, data = super().step_facts(), self.trainer.datamodule  # pyright: ignore
        # A remainder is refused by the batch plan.
        rows = max(1, self.group_size // self.ranks_per_group // self.micro_batches.slices)
        branches = 1 if self.env is None else self.env.max_branches  # others than the first have other prompts
        shares = rows > 1 and branches == 1 and self.shares_prompts and self.forward_options.shared_prompts
        shares = shares and model_sizes.shares_prompts(self.model)
        device: Any = self.trainer.strategy.root_device
        # With `memory_gb` the plan may be for a GPU, which does not fold.
        here = device.type == "cpu" and self.micro_batches.memory_gb is None
        folds = shares and self.forward_options.folded_attention and here
        longest, new_tokens = self.longest_prompt(data.longest_prompt), self.longest_response(self.sampling)
        lengths = RowLengths(longest, new_tokens, rows, shares=shares, folds=folds, texts=branches)
        # They are loaded by now, so measured free memory is already without them, and a user's `memory_gb` is not.
        rewards = {REWARD_MODELS: self.reward_functions.weight_bytes} if self.micro_batches.memory_gb else {}
        copies = self.generator.lag if self.generator.lag > 1 else 0
        return replace(facts, lengths=lengths, frozen={**facts.frozen, **rewards}, copies_ahead=copies)

    def _with_micro_batches(self, plan: BatchPlan) -> BatchPlan:
        taken, step = self.micro_batches.plan, self.micro_batches.step
        if taken is None or step is None:
            return plan
        split = self.micro_batches.slices * step.slices_of(taken.micro_batches)
        return replace(plan, accumulate=taken.micro_batches, split_groups=split, why=taken.why)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        if self.plan is not None:
            self.plan = self._with_micro_batches(self.plan)

    @property
    def slots_per_rollout(self) -> int:
        """Micro-batches of a rollout: the number of times that the data module repeats its batches."""
        return self.steps_per_rollout * self.trainer.accumulate_grad_batches

    @property
    def samples(self) -> dict[str, list[Any]]:
        """The last rollout as a table of text and numbers, for callbacks; empty after a resume until the next one."""
        return self._records.samples

    @property
    def plain_columns(self) -> dict[str, list[Any]]:
        """Rewards of each function, columns of the data and notes of rewards, for the rows that are learned from; empty
        if a replay buffer or an opponent put other rows in."""
        return self._records.plain_columns

    def displayed(self, scored: Scored, rollout: Rollout) -> tuple[Scored, Rollout]:
        """Return the view of a drawn rollout for records and callbacks."""
        return scored, rollout

    def _begin_rollout(self, scored: Scored, rollout: Rollout, metrics: Metrics) -> None:
        if self.plan is None:
            raise ConfigError("The module was not set up: call trainer.fit(module, datamodule=RolloutDataModule(...)).")
        self.scored, visible = self.displayed(scored, rollout)
        self.rollout, replacing = self.rollout_to_learn(rollout)
        episodes = {} if self.interaction is None else self.interaction.pop_metrics()
        of_episodes: Metrics = {
            name: (torch.full((), float(above), device=self.device), torch.full((), float(below), device=self.device))
            for name, (above, below) in episodes.items()
        }
        self._records.add(self.source.proof(self.device) | of_episodes | metrics | replacing)
        self._records.open(
            self.scored,
            visible,
            step=self.global_step,
            sampled_tokens=self.source.sampled_tokens,
            tokenizer=self.model.tokenizer,
            ranks=self.ranks,
        )
        self._nothing_rewarded = bool(self._records.unscored) and not self.needs_teacher
        if self._nothing_rewarded:  # unless a replay buffer put rewarded groups in, on any rank
            self._nothing_rewarded = not self.ranks.any(bool((~self.rollout.rewards.isnan()).any()))
        self.costs.restart()
        if self.rollout.completions.response_ids is not self.scored.completions.response_ids:
            self._records.plain_columns = {}  # of other rows
        index = scored.batch.rollout
        self._counts = step_counts(self.rollout, self.plan, seed=self.seed, index=index, ranks=self.ranks)
        self._dealt = None
        if (teaching := self.dealt_out(scored.batch).teaching) is not None:
            rows = torch.full((), float(len(teaching)), device=teaching.device)
            self._records.add({"frac_rows_skipped": (rows - teaching.sum(), rows)})

    def _micro_batch(self, batch: PromptBatch, ahead: int = 0) -> Rollout:
        """Return the rows of this slot, or of a later one."""
        dealt, slot = self.dealt_out(batch), batch.slot + ahead
        return micro_batch(dealt.rollout, dealt.rows[slot], dealt.used[slot])

    def dealt_out(self, batch: PromptBatch) -> Dealt:
        """Return the rollout to learn from, dealt out over its slots. Computed once.

        Rows that contribute nothing have no loss token in it: if one is computed anyway, so that every rank makes the
        same number of passes, no metric counts it.
        """
        if self._dealt is not None:
            return self._dealt
        assert self.rollout is not None and self.plan is not None
        rollout, teaching = self.rollout, self.rows_that_teach(self.rollout)
        rollout = replace(rollout, completions=rollout.completions.with_host())  # each slot takes its part along
        if teaching is not None:
            rollout = replace(rollout, loss_mask=rollout.loss_mask & teaching[:, None])
        counts = RowCounts.of(rollout)
        rows = deal_rows(counts, self.plan, seed=self.seed, index=batch.rollout, teaching=teaching)
        used = used_columns_of_parts(rollout.completions, rows)
        prompt = rollout.completions.prompt_ids.shape[1]
        widths = [(prompt - part[Width.PROMPT].start, part[Width.RESPONSE].stop) for part in used]
        self._work = [self._work_of(counts, *slot) for slot in zip(rows, widths)]
        self._dealt = Dealt(rollout, rows, used, teaching)
        return self._dealt

    def _work_of(self, counts: RowCounts, rows: Tensor, widths: tuple[int, int]) -> UpdateWork:
        """Return the work of a micro-batch of these rows, with these widths of prompts and responses."""
        mine = RowCounts(*(column[rows] for column in counts))
        prompts, shared = dict(zip(mine.group.tolist(), mine.prompt.tolist())), False
        if self.shares_prompts and self.forward_options.shared_prompts:
            shared = worth_sharing(self.policy, rows=len(rows), prompts=len(prompts), widths=widths)
        texts = list(zip(mine.prompt.tolist(), mine.read.tolist()))
        own = [Span(0, prompt + read) for prompt, read in texts]
        together = [Span(0, prompt) for prompt in prompts.values()]
        together += [Span(prompt, max(0, read - 1)) for prompt, read in texts]  # the last token predicts nothing
        scored = int(mine.sampled.sum())
        spans, models = together if shared else own, self.trained_modules.values()
        return UpdateWork(self.costs.flops_of_update(models, spans, own, scored), scored)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Take an optimizer step; after a rollout's last one, log its metrics before any callback can save."""

        def backward_and_drop_gradient() -> Any:
            """Run the step's backward pass, then drop its gradient: a rollout without any reward changes no weight.

            Gradients become None and not 0, so that the optimizer skips moments and weight decay too.
            """
            result = optimizer_closure() if optimizer_closure else None
            drop_gradients(optimizer, self.trainer.strategy)
            return result

        closure = backward_and_drop_gradient if self._nothing_rewarded else optimizer_closure
        super().optimizer_step(epoch, batch_idx, optimizer, closure)
        self._records.add_step(self.grad_norm, self.trainer.optimizers[0], skipped=self.broken_steps.last)
        self.after_step()
        if self.plan is None or self._slot < self.plan.slots - 1:
            return
        step, every = self.global_step + 1, self.trainer.log_every_n_steps  # pyright: ignore
        metrics = self._metrics_of_rollout(kept=False)
        self._unlogged = metrics
        if every and step // every > (step - self.steps_per_rollout) // every:
            self.write_to_loggers(metrics, step)
            self._unlogged = {}
        self.publish_metrics(metrics, step)

    def log_rest(self) -> None:
        """Log a rollout that the run ends in, too; its averages are kept for a resumed run."""
        metrics, half_used = self._unlogged, self.plan is not None and 0 <= self._slot < self.plan.slots - 1
        if half_used and self.metrics_step != self.global_step:
            metrics = self._metrics_of_rollout(kept=True)
            self.publish_metrics(metrics, self.global_step)
        if metrics and self.trainer.log_every_n_steps:  # pyright: ignore
            self.write_to_loggers(metrics, self.global_step)
            self._unlogged = {}

    def _metrics_of_rollout(self, *, kept: bool) -> dict[str, float]:
        self.costs.memory.end("update")
        metrics = self._records.close(
            self.ranks,
            seconds=self.stopwatch.seconds,
            within={**self.generator.seconds, **self.stopwatch.parts},
            coefficients=self.coefficients(),
            kept=kept,
        )
        seconds = {**self.stopwatch.seconds, "update": metrics["time/update"]}
        return metrics | self.costs.take_metrics(
            self.ranks, self.trainer, self.model.dtype, seconds=seconds, sampled=self._records.rollout_tokens
        )

    # ------------------------------------------------------------------ checkpoints

    def step_batch(self) -> dict[str, Any]:
        assert self.rollout is not None
        return {"slot": self._slot, "rollout": checkpoints.to_plain(self.rollout)}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if self.interaction is not None and self.scored is not None:
            self.interaction.saved(self.scored.batch.rollout)

    def rank_state(self) -> dict[str, Any]:
        counts = self._records.counts() | self.source.state(self.ranks)
        if self.plan is None or self.rollout is None or self._slot == self.plan.slots - 1:
            return counts  # between two rollouts
        mine = {"slot": self._slot, "seconds": dict(self.stopwatch.seconds), "parts": dict(self.stopwatch.parts)}
        mine |= {"rollout": checkpoints.to_plain(self.rollout), "totals": checkpoints.to_plain(self._counts)}
        mine["nothing_rewarded"] = self._nothing_rewarded
        return counts | self._records.half_used() | mine

    def merge_rank_states(self, saved: Sequence[dict[str, Any]]) -> dict[str, Any]:
        counts = {name: saved[0][name] for name in self._records.counts()}  # they are of all ranks
        return super().merge_rank_states(saved) | counts

    def state_kept_on_rollback(self) -> dict[str, Any]:
        return super().state_kept_on_rollback() | self._records.counts()

    @property
    def slots(self) -> int:
        return self.slots_per_rollout

    def describe_dropped_state(self, saved: Sequence[dict[str, Any]], slots: int) -> str:
        first, dropped = saved[0], []
        if "rollout" in first:
            steps = len(first["totals"])
            used = (first["slot"] + 1) * steps // slots
            dropped.append(
                f"The rollout in use is dropped after {used} of its {steps} optimizer steps, with its metrics."
            )
        if any("ahead" in each for each in saved):
            dropped.append("Completions drawn ahead are dropped, and drawn again with the current weights.")
        return " ".join([*(dropped or ["Nothing is dropped."]), "The run continues with the next rollout."])

    def vision_lookup(self) -> Callable[[int], PromptVision | None]:
        """Return the function from a training row to its images."""
        data: Any = self.trainer.datamodule  # pyright: ignore
        return getattr(data, "vision", lambda row: None)  # a data module without images has none

    def processor(self) -> Processor | None:
        """Return the processor that makes pixels of an environment's images."""
        return self.model.processor

    def load_rank_state(self, saved: dict[str, Any]) -> None:
        self._records.load_counts(saved)
        device = self.trainer.strategy.root_device  # the module itself is moved there only later
        see = self.vision_lookup()
        self.source.load_state(saved, device, see, self.processor)
        if "rollout" in saved:
            loaded = checkpoints.rollout_from_plain(saved["rollout"], device)
            self.rollout, self._dealt = checkpoints.restore_pixels(loaded, see, self.processor), None
            self._records.load_half_used(saved, device)
            self._slot, self._counts = saved["slot"], saved["totals"].to(device)
            self._nothing_rewarded = saved["nothing_rewarded"]
            self.stopwatch.load(saved["seconds"], saved["parts"])
