"""GKD: generalised knowledge distillation, arXiv:2306.13649.

For completions y of a step's prompts x, student S and frozen teacher T over the tokens of one tokenizer:

    divergence     D_t = beta KL(T || M) + (1 - beta) KL(S || M),  M = beta T + (1 - beta) S,  at each token of y
                   beta 0 is KL(T || S), 1 is KL(S || T)   (eq. 1; both by softmax(logits / temperature))
    objective      sum_t D_t / number of completion tokens, of the whole optimizer step

The writer of y is drawn for each optimizer step (algorithm 1, by steps; the paper draws by batches): with probability
`on_policy_fraction` the student, whose own mistakes are then corrected; otherwise the data, or the teacher with
`teacher_completions` (sequence-level distillation, 1606.07947). No gradient goes through the sampling.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_rl.algorithms.checks.data_and_trainer import NeedsAllRows, check_context_length, longest_rewritten_prompt
from lit_rl.algorithms.checks.model_sizes import StepFacts, frozen_bytes
from lit_rl.algorithms.data_parallel import Ranks
from lit_rl.algorithms.loop.offline import OfflinePolicyModule
from lit_rl.algorithms.rollouts.rollout_plan import mix
from lit_rl.algorithms.terms.whole_step import WholeStep
from lit_rl.core.errors import ConfigError
from lit_rl.core.examples import ExampleBatch, TextBatch, TokenBatch, Totals
from lit_rl.core.interrupts import run_ending_hook
from lit_rl.core.rollout import Completions, PromptBatch
from lit_rl.models.forward import refuse_leaks
from lit_rl.models.frozen_teacher import Teacher, distillation_scores
from lit_rl.models.references import OnCPU, Scorer
from lit_rl.models.sharding import unsharded
from lit_rl.ops.imitation import generalized_jsd
from lit_rl.ops.reductions import Metrics, mean_of
from lit_rl.settings.algorithms import GKDConfig
from lit_rl.settings.base import takes

Writer = Literal["data", "student", "teacher"]
"""The writer of the completions of an optimizer step."""


class GKD(OfflinePolicyModule):
    """Generalised knowledge distillation."""

    learns_from = "texts"
    takes_images = False

    @takes(GKDConfig)
    def __init__(self, settings: GKDConfig) -> None:
        super().__init__(config=settings)
        if settings.teacher_completions and settings.on_policy_fraction == 1:
            raise ConfigError(
                "algo.teacher_completions=true lets the teacher generate where the student does not, but with "
                "algo.on_policy_fraction=1 the student always does. Lower the fraction, or leave the other out."
            )
        self.teacher = Teacher(settings.teacher, self.model, settings.teacher_device)
        self.beta, self.temperature = settings.beta, settings.temperature
        self.on_policy_fraction, self.teacher_completions = settings.on_policy_fraction, settings.teacher_completions
        self.teacher_policy: Scorer | None = None
        self._fresh: tuple[ExampleBatch, ...] = ()

    # ------------------------------------------------------------------ the teacher

    def companions(self, policy: nn.Module) -> dict[str, Any]:
        """Return the teacher, which no checkpoint contains, like a reference."""
        return super().companions(policy) | {"teacher_policy": self.teacher.module()}

    def step_facts(self) -> StepFacts:
        facts = super().step_facts()
        teacher = {} if self.teacher.device == "cpu" else {"teacher": frozen_bytes(self.teacher.model)}
        return replace(facts, head="compared", frozen={**facts.frozen, **teacher})

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.teacher.check_vocabulary()
        if stage == "fit":
            self.teacher.check_differs()
            if self.rewrites:
                longest, new_tokens = self._longest_prompt(), self.sampling.max_new_tokens
                check_context_length(self.model, "sampling.max_new_tokens", longest, new_tokens, "data.max_length")

    def refuse_leaks(self) -> None:
        super().refuse_leaks()
        with self.teacher.scoring(self.policy, self.teacher_policy) as teacher:
            refuse_leaks(teacher)  # pyright: ignore

    # ------------------------------------------------------------------ the writer of completions

    @property
    def rewrites(self) -> bool:
        """True if completions of the data are replaced in some steps."""
        return self.on_policy_fraction > 0 or self.teacher_completions

    def longest_text(self) -> int:
        longest = super().longest_text()
        return max(longest, self._longest_prompt() + self.sampling.max_new_tokens) if self.rewrites else longest

    def most_scored_tokens(self) -> int:
        scored = super().most_scored_tokens()
        return max(scored, self.sampling.max_new_tokens) if self.rewrites else scored

    def _longest_prompt(self) -> int:
        """Return the number of tokens of the longest prompt that a completion is generated for."""
        data: Any = self.trainer.datamodule  # pyright: ignore
        return longest_rewritten_prompt(data.options, data.corpus.train.examples)

    def reads_all_rows(self) -> Iterator[NeedsAllRows]:
        yield from super().reads_all_rows()
        if self.rewrites:
            yield NeedsAllRows(
                "algo.on_policy_fraction above 0 and algo.teacher_completions=true look for the prompt of",
                "set algo.on_policy_fraction=0 and algo.teacher_completions=false",
            )

    def on_train_batch_start(self, batch: ExampleBatch, batch_idx: int) -> None:
        if batch.slot == 0:
            writer = writer_of(
                batch.step,
                seed=self.seed,
                on_policy_fraction=self.on_policy_fraction,
                teacher_completions=self.teacher_completions,
            )
            self._fresh = () if writer == "data" else self.rewritten(batch, writer)
            batch = self._fresh[0] if self._fresh else batch
            one = torch.ones((), device=self.device)
            length = (one * batch.totals.tokens, one * max(1, batch.totals.rows))
            self._records.add({"on_policy": (one * (writer == "student"), one), "completions/mean_length": length})
        super().on_train_batch_start(batch, batch_idx)

    def training_step(self, batch: ExampleBatch, batch_idx: int) -> Tensor:
        return super().training_step(self._fresh[batch.slot] if self._fresh else batch, batch_idx)

    def rewritten(self, batch: ExampleBatch, writer: Writer) -> tuple[ExampleBatch, ...]:
        """Return all micro-batches of this rank's step with completions of the student or the teacher. A collective.

        Args:
            batch: The step's first micro-batch.
            writer: The student or the teacher.

        Raises:
            GenerationError: a generated token is not in the tokenizer.
        """
        micro_batches = batch.whole or (batch,)
        prompts = prompts_to_rewrite(micro_batches, self.ranks)
        with run_ending_hook(), self.rollout_context():
            if writer == "student":
                completions = self.draw(prompts)
            else:
                held = self.teacher_policy
                teacher: nn.Module = held.model if isinstance(held, OnCPU) else held  # pyright: ignore
                with unsharded(teacher), self.source.aside():  # `time/generate` is what the student takes
                    completions = self.source.draw_other(replace(self.request(prompts), policy=teacher))
        self.generator.rest()
        self.teacher.check_written(completions.response_ids, writer)
        ids, attended, learned = as_tokens(completions, self.ranks.device)
        row_counts = [len(micro) for micro in micro_batches]
        parts = []
        for part in zip(*(field.split(row_counts) for field in (ids, attended, learned))):
            width = max(2, int(part[1].any(0).sum()))  # without columns that are padding in every row
            parts.append(TokenBatch(*(field[:, :width] for field in part)))
        counts = self.ranks.gather(torch.stack([learned.sum(1), attended.sum(1)], 1)).tolist()
        old, tokens, texts = micro_batches[0].totals, sum(row[0] for row in counts), tuple(row[1] for row in counts)
        totals = Totals(old.rows, tokens, sum(texts), old.shares, texts=texts, learned=tokens)
        return tuple(
            replace(micro, tokens=part, totals=totals, whole=())
            for micro, part in zip(micro_batches, parts, strict=True)
        )

    # ------------------------------------------------------------------ loss

    def denominator(self, totals: Totals) -> int:
        return max(1, totals.tokens)

    def loss(self, batch: TextBatch, whole: WholeStep | None = None) -> tuple[Tensor, Metrics]:
        divergence = partial(generalized_jsd, beta=self.beta, temperature=self.temperature)
        with self.teacher.scoring(self.policy, self.teacher_policy) as teacher:
            found = distillation_scores(
                self.policy,
                teacher,  # pyright: ignore
                batch.tokens,
                divergence,
                shared_tokens=self.teacher.shared_tokens,
                entropies=self.log_entropy,
                router_aux=self.router_aux_loss_coef > 0,
                fused=self.forward_options.fused_head,
            )
        loss = found.divergence.sum() / self.denominator(batch.totals)
        everywhere = torch.ones_like(found.correct, dtype=torch.bool)
        metrics: Metrics = {"mean_token_accuracy": mean_of(found.correct, everywhere)}
        if found.entropy is not None and found.teacher_entropy is not None:
            metrics["entropy"] = mean_of(found.entropy, everywhere)
            metrics["teacher/entropy"] = mean_of(found.teacher_entropy, everywhere)
        loss, aux = self.with_aux(loss, found.aux_loss, batch.totals)
        return loss, metrics | aux


def writer_of(step: int, *, seed: int, on_policy_fraction: float, teacher_completions: bool) -> Writer:
    """Draw the writer of an optimizer step's completions, from the step's number: all ranks and resumed runs agree."""
    if random.Random(mix(seed, step)).random() < on_policy_fraction:
        return "student"
    return "teacher" if teacher_completions else "data"


def prompts_to_rewrite(micro_batches: Sequence[ExampleBatch], ranks: Ranks) -> PromptBatch:
    """Return the prompts of this rank's part of a step: the tokens of each text before the first learned one.

    A collective: a row that is twice in a step gets two samples, whichever ranks have it.
    """
    prompt_ids = []
    for micro in micro_batches:
        first = torch.where(micro.tokens.loss_mask.any(1), micro.tokens.loss_mask.int().argmax(1), 1)
        texts = micro.tokens.input_ids.tolist()
        prompt_ids += [ids[:length] for ids, length in zip(texts, first.tolist())]
    rows = [row for micro in micro_batches for row in micro.rows]
    rows_of_ranks = ranks.gather(torch.tensor(rows)).tolist()
    seen: Counter[int] = Counter(rows_of_ranks[: ranks.rank * len(rows)])
    occurrences = []  # of each row on lower ranks, then earlier on this one
    for row in rows:
        occurrences.append(seen[row])
        seen[row] += 1
    return PromptBatch(
        prompts=[""] * len(rows),
        prompt_ids=prompt_ids,
        columns={},
        rows=rows,
        occurrences=occurrences,
        rollout=micro_batches[0].step,
    )


def as_tokens(completions: Completions, device: torch.device | str) -> tuple[Tensor, Tensor, Tensor]:
    """Return `input_ids`, `attention_mask` and `loss_mask` `(b, s)` of prompts with completions, right-padded."""
    ids = torch.cat([completions.prompt_ids, completions.response_ids], 1)
    attended = completions.attention_mask
    learned = F.pad(completions.response_mask, (completions.prompt_ids.shape[1], 0))
    order = (~attended).int().argsort(dim=1, stable=True)
    return tuple(field.gather(1, order).to(device) for field in (ids, attended, learned))  # pyright: ignore
