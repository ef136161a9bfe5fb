"""Teachers of a policy gradient: forms of distillation, columns of the rollout, a second model, the policy itself."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_templates import tokenizer_of
from hypothesis import given
from hypothesis import strategies as st
from online_modules import VOCABULARY, completions, scores, small_policy
from small_rollouts import EachBatch, batch, credited, trainer
from tiers import in_turn
from torch import Tensor

from lit_rl.algorithms import GRPO, RLOO, AdamW, Constant, Reinforce
from lit_rl.algorithms.data_parallel import Ranks
from lit_rl.algorithms.evaluation.summary_statistics import Averages
from lit_rl.algorithms.rollouts import checkpoints
from lit_rl.algorithms.rollouts.rollout_plan import BatchPlan, micro_batch, rows_of_slots, step_counts, step_totals
from lit_rl.algorithms.rollouts.scored import Scored
from lit_rl.algorithms.terms.self_teacher import (
    ColumnContext,
    EncodedPrompt,
    OutcomeContext,
    SelfTeacher,
    first_siblings,
    with_prompts,
)
from lit_rl.algorithms.terms.teachers import (
    ModelTeacher,
    SampledKL,
    TeacherAdvantage,
    TeacherRequest,
    TopDivergence,
    TopForwardKL,
    TopTokensLoss,
)
from lit_rl.core.episode import Episode
from lit_rl.core.errors import ConfigError, DataError
from lit_rl.core.rollout import Completions, PromptBatch, Rollout, Sampling, join_rollouts
from lit_rl.data.encode import Encoder
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.environments import CustomEnvironment, FunctionTools
from lit_rl.environments.interaction import Interaction
from lit_rl.models.forward import TokenScores, score
from lit_rl.models.frozen_teacher import top_tokens
from lit_rl.models.language_model import DEFAULT, LanguageModel
from lit_rl.models.references import EMA
from lit_rl.ops.advantages import no_advantage
from lit_rl.ops.distillation import TeacherScores, renormalized, with_tail
from lit_rl.ops.imitation import generalized_jsd
from lit_rl.ops.kl import corrected_k1, k3_with_k2_gradient
from lit_rl.ops.policy_losses import reinforce_loss
from lit_rl.ops.reductions import sequence_mean
from lit_rl.rewards import exact_match

FORMS = {
    "advantage": TeacherAdvantage(0.7),
    "sampled": SampledKL(0.7),
    "top": TopDivergence(0.7, top_k=5),
    "student's top": TopDivergence(0.7, top_k=5, top_k_of="student"),
}


def taught_by_model(form: Any = None, kind: Any = GRPO, temperature: float = 1.3, **settings: Any) -> Any:
    """A module with a small policy, and another small model as its teacher."""
    sampling = Sampling(temperature=temperature, max_new_tokens=8)
    module = kind(
        "tiny", len, **{"group_size": 2, "sampling": sampling} | settings, teacher=ModelTeacher("tiny"),
        distillation=form,
    )  # fmt: skip
    module.policy, module.teacher_policy = small_policy(0), small_policy(1).requires_grad_(False)
    return module


def taught(module: Any, drawn: Completions, rewards: list[float]) -> Rollout:
    found = Scored(batch(range(len(drawn) // 2)), drawn, scores(rewards))
    with torch.no_grad():
        return module.taught(found, credited(module, found)[0])[0]


def gradient_of(module: Any, rollout: Rollout, accumulate: int = 1) -> tuple[float, Tensor, dict[str, float]]:
    """Loss, gradient and metrics of an optimizer step, cut into so many micro-batches."""
    plan = BatchPlan(len(rollout) // 2, 2, minibatches=1, iterations=1, accumulate=accumulate, world_size=1)
    counts = step_counts(rollout, plan, seed=0, index=0)[0]
    module.policy.train()
    module.policy.zero_grad()
    total, averages = 0.0, Averages()
    for rows in rows_of_slots(rollout, plan, seed=0, index=0):
        micro = micro_batch(rollout, rows)
        further = {} if micro.teacher_top_ids is None else {"further_ids": micro.teacher_top_ids}
        now = module.token_scores(micro.completions, **further)
        loss, metrics = module.loss(micro, now, step_totals(counts, plan))
        loss.backward()
        total += loss.item()
        averages.add(metrics)
    gradient = torch.cat([p.grad.flatten() for p in module.policy.parameters()])
    return total, gradient, averages.reduce(Ranks(torch.device("cpu")))


def logits_of(model: Any, drawn: Completions) -> Tensor:
    """Logits `(n, v)` of the sampled tokens, one row at a time, without padding."""
    found = []
    for i, length in enumerate(drawn.lengths.tolist()):
        ids = torch.cat([drawn.prompt_ids[i], drawn.response_ids[i, :length]])
        found.append(model(input_ids=ids[None]).logits[0, len(drawn.prompt_ids[i]) - 1 : -1])
    return torch.cat(found)


# ------------------------------------------------------------------ the expected gradient, and GKD's


def one_token_each(prompt: Tensor) -> Completions:
    """Every token of the vocabulary once, as a response of one token to the prompt."""
    rows = VOCABULARY
    return Completions(
        prompt_ids=prompt.expand(rows, -1),
        prompt_mask=torch.ones(rows, prompt.numel(), dtype=torch.bool),
        response_ids=torch.arange(rows)[:, None],
        response_mask=torch.ones(rows, 1, dtype=torch.bool),
        sampler_logprobs=torch.zeros(rows, 1),
        ended=torch.ones(rows, dtype=torch.bool),
        group_id=torch.arange(rows) // 2,
    )


@pytest.mark.parametrize("form", [None, SampledKL(1.0, corrected_k1), SampledKL(1.0, k3_with_k2_gradient), SampledKL()])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_expected_gradient_is_that_of_gkd_at_beta_1(form: Any, temperature: float) -> None:
    module = taught_by_model(form, temperature=temperature, advantage=no_advantage)
    drawn = one_token_each(torch.tensor([5, 6, 7]))
    probabilities = (logits_of(module.policy, drawn).detach()[0] / temperature).softmax(-1)
    rollout = taught(module, drawn, [0.0] * len(drawn))
    expected = torch.zeros(())
    for row in range(VOCABULARY):  # expectation over the policy's own tokens
        pair = torch.tensor([row, row])
        expected = expected + probabilities[row] * gradient_of(module, micro_batch(rollout, pair))[1]

    module.policy.zero_grad()
    student, teacher = (logits_of(model, drawn)[:1, None] for model in (module.policy, module.teacher_policy))
    generalized_jsd(student, teacher, beta=1.0, temperature=temperature).sum().backward()
    gkd = torch.cat([p.grad.flatten() for p in module.policy.parameters()])
    torch.testing.assert_close(expected, gkd, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("support", [with_tail, renormalized])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_over_the_whole_vocabulary_the_divergence_is_that_of_gkd(beta: float, support: Any) -> None:
    form = TopDivergence(1.0, top_k=VOCABULARY, beta=beta, support=support)
    module = taught_by_model(form, advantage=no_advantage)
    drawn = completions([3, 1, 2, 4])
    loss, gradient, metrics = gradient_of(module, taught(module, drawn, [0.0] * 4))

    module.policy.zero_grad()
    student, teacher = (logits_of(model, drawn)[None] for model in (module.policy, module.teacher_policy))
    gkd = generalized_jsd(student, teacher, beta=beta, temperature=module.sampling.temperature).mean()
    gkd.backward()
    assert loss == pytest.approx(gkd.item(), abs=2e-5) == metrics["teacher/divergence"]
    assert metrics["teacher/mass"] == pytest.approx(1) == metrics["teacher/student_mass"]
    of_gkd = torch.cat([p.grad.flatten() for p in module.policy.parameters()])
    torch.testing.assert_close(gradient, of_gkd, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize(("top_k", "top_k_of"), [(4, "student"), (VOCABULARY, "teacher")])
@pytest.mark.parametrize(("alpha", "clip"), [(0.0, 1.2), (0.5, None), (0.5, 2.0), (1.0, 2.0)])
def test_the_loss_is_that_of_sdpo_in_trl(
    alpha: float, tail: bool, clip: float | None, top_k: int, top_k_of: Any
) -> None:
    """TRL's k tokens are the student's. A row has no teacher. The policy has moved since the rollout was taken: TRL's
    ratio is read at the sampled tokens."""
    trl = pytest.importorskip("trl.experimental.sdpo.loss_utils")
    form = TopDivergence(1.0, top_k, alpha, with_tail if tail else renormalized, clip, top_k_of)
    module = taught_by_model(form, advantage=no_advantage, reduction=sequence_mean)
    drawn = completions([3, 1, 2, 4])
    found = Scored(batch(range(2)), drawn, scores([1.0, 0.0, 0.0, 1.0]))
    teacher, _ = module.distillation.teacher.score(request_of(module, found))
    with_teacher = torch.tensor([True, True, False, True])
    teacher = replace(teacher, mask=teacher.mask & with_teacher[:, None])
    old = module.token_scores(drawn).logprobs.detach() + torch.linspace(-1, 1, 16).reshape(4, 4)
    rollout = replace(credited(module, found)[0], old_logprobs=old)
    loss, gradient, _ = gradient_of(module, module.distillation.at_rollout(rollout, teacher)[0])

    module.policy.zero_grad()
    student, expert = (logits_of(model, drawn) / 1.3 for model in (module.policy, module.teacher_policy))
    per_token = trl.compute_topk_self_distillation_loss(
        student, expert.detach(), distillation_topk=top_k, distillation_alpha=alpha, distillation_add_tail=tail
    )
    if clip is not None:
        own = student.log_softmax(-1).gather(1, drawn.response_ids[drawn.response_mask][:, None])[:, 0]
        per_token = trl.apply_importance_sampling_clipping(per_token, own, old[drawn.response_mask], clip)
    rows = torch.stack([row.mean() for row in per_token.split(drawn.lengths.tolist())])
    whole = (rows * with_teacher).mean()
    whole.backward()
    assert loss == pytest.approx(whole.item(), rel=1e-4, abs=2e-5)
    of_trl = torch.cat([p.grad.flatten() for p in module.policy.parameters()])
    torch.testing.assert_close(gradient, of_trl, rtol=1e-3, atol=2e-5)


def test_the_students_tokens_are_compared_by_hand() -> None:
    """Of each token the policy's k likeliest, and what the teacher gives to these; rows of a pass change nothing."""
    module = taught_by_model(TopDivergence(top_k=3, top_k_of="student"))
    drawn = completions([3, 1, 2, 4])
    found = Scored(batch(range(2)), drawn, scores([0.0] * 4))
    request = request_of(module, found)
    said, _ = module.distillation.teacher.score(request)
    student, expert = ((logits_of(m, drawn) / 1.3).log_softmax(-1) for m in (module.policy, module.teacher_policy))
    ids, sampled = student.topk(3).indices, drawn.response_ids[drawn.response_mask][:, None]
    assert said.top_ids[drawn.response_mask].equal(ids)
    torch.testing.assert_close(said.top_log_probs[drawn.response_mask], expert.gather(1, ids).detach())
    torch.testing.assert_close(said.log_probs[drawn.response_mask], expert.gather(1, sampled)[:, 0].detach())
    whole, _ = module.distillation.teacher.score(replace(request, rows_at_once=4))
    torch.testing.assert_close(whole.top_log_probs, said.top_log_probs)
    assert request.overlap(said) == {}  # it would be 1


LOG_PROBS = st.floats(-60, 0, width=32)


@given(
    st.sampled_from([TopDivergence, TopForwardKL]),
    st.lists(st.tuples(LOG_PROBS, LOG_PROBS, st.booleans()), min_size=1, max_size=6),
    st.floats(1, 100),
)
def test_a_ratio_weighs_each_token_up_to_its_bound_and_passes_no_gradient(kind: Any, tokens: Any, clip: float) -> None:
    """By hand: min(exp(log S - log S of the rollout), clip), of the sampled token; 0 where the teacher is silent."""
    now, old, heard = (torch.tensor([column]) for column in zip(*tokens))
    now = now.requires_grad_()
    further = torch.tensor([0.3, 0.2]).log().repeat(1, len(tokens), 1).requires_grad_()
    teacher = TeacherScores(
        now.detach(), heard, further.detach().long(), torch.tensor([0.6, 0.1]).log().expand_as(further)
    )
    scored, silent = TokenScores(now, further=further), torch.where(heard, old, torch.nan)
    plain, metrics = kind(0.7, 2).losses(teacher, scored, silent)
    found, weighted = kind(0.7, 2, ratio_clip=clip).losses(teacher, scored, silent)
    ratios = [min(math.exp(min(max(a - b, -20), 20)), clip) if spoken else 0.0 for a, b, spoken in tokens]
    torch.testing.assert_close(found, plain * torch.tensor([ratios]), rtol=1e-4, atol=1e-7)
    slopes = torch.autograd.grad(found.sum(), (further, now), allow_unused=True)
    (slope,) = torch.autograd.grad((plain * torch.tensor([ratios])).sum(), further)
    torch.testing.assert_close(slopes[0], slope, rtol=1e-4, atol=1e-7)
    assert slopes[1] is None
    assert metrics == weighted  # the divergence that is logged is without it


def test_a_ratio_by_hand_and_none_with_one_step() -> None:
    """The policy gives half to both tokens, the teacher 0.75 and 0.25: KL(T || S) = 0.75 log 1.5 + 0.25 log 0.5."""
    form = TopDivergence(2.0, 2, 0.0, renormalized, ratio_clip=1.5)
    further = torch.full((1, 3, 2), 0.5).log()
    teacher = TeacherScores(
        torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool), torch.zeros(1, 3, 2, dtype=torch.long),
        torch.tensor([0.75, 0.25]).log().expand(1, 3, 2),
    )  # fmt: skip
    now, old = torch.tensor([[0.6, 0.5, 0.2]]).log(), torch.tensor([[0.1, 0.4, 0.8]]).log()
    kl = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    losses = form.losses(teacher, TokenScores(now, further=further), old)[0]
    torch.testing.assert_close(losses, 2 * kl * torch.tensor([[1.5, 1.25, 0.25]]))  # ratios of 6, 1.25 and 0.25

    drawn = completions([3, 1, 2, 4])
    steps = []
    for clip in (None, 1.5):
        module = taught_by_model(TopDivergence(1.0, top_k=5, ratio_clip=clip))
        assert not module.needs_old_logprobs
        steps.append(gradient_of(module, taught(module, drawn, [0.0] * 4)))
    assert steps[0][0] == steps[1][0] and torch.equal(steps[0][1], steps[1][1])
    assert taught_by_model(TopDivergence(top_k=5, ratio_clip=1.5), iterations=2).needs_old_logprobs


def test_the_gradient_of_the_advantage_is_that_of_trls_sampled_tokens() -> None:
    trl = pytest.importorskip("trl.experimental.sdpo.loss_utils")
    module = taught_by_model(advantage=no_advantage)
    drawn = completions([3, 1, 2, 4])
    _, gradient, _ = gradient_of(module, taught(module, drawn, [0.0] * 4))
    module.policy.zero_grad()
    student, expert = (logits_of(model, drawn)[None] / 1.3 for model in (module.policy, module.teacher_policy))
    ids = drawn.response_ids[drawn.response_mask][None]
    trl.compute_sampled_token_self_distillation_loss(
        student, expert.detach(), ids, distillation_alpha=1.0
    ).mean().backward()
    of_trl = torch.cat([p.grad.flatten() for p in module.policy.parameters()])
    torch.testing.assert_close(gradient, of_trl, rtol=1e-3, atol=1e-5)


# ------------------------------------------------------------------ laws of the term


@in_turn(name=FORMS, kind=[GRPO, RLOO, Reinforce])
def test_a_step_does_not_depend_on_micro_batches_or_padding(kind: Any, name: str) -> None:
    settings = {"reward_beta": 0.0} if kind is RLOO else {}
    module = taught_by_model(FORMS[name], kind, **settings)
    rollout = taught(module, completions([3, 1, 2, 4, 4, 2]), [1.0, 0.0, 0.5, 0.0, 0.0, 1.0])
    whole = gradient_of(module, rollout)
    parts = gradient_of(module, rollout, accumulate=3)
    assert whole[0] == pytest.approx(parts[0], abs=1e-6)
    torch.testing.assert_close(whole[1], parts[1], rtol=1e-4, atol=1e-6)
    assert whole[2] == pytest.approx(parts[2], rel=1e-4, abs=1e-6)

    longer = replace(
        rollout, completions=padded(rollout.completions), **{
            column: None if (value := getattr(rollout, column)) is None else widened(value, column)
            for column in ("advantages", "loss_mask", "old_logprobs", "teacher_logprobs", "teacher_mask",
                           "teacher_top_ids", "teacher_top_logprobs")
        },
    )  # fmt: skip
    torch.testing.assert_close(gradient_of(module, longer)[1], whole[1], rtol=1e-4, atol=1e-6)


def widened(value: Tensor, column: str) -> Tensor:
    if value.ndim == 1:
        return value
    anything = torch.nan if column.startswith("teacher_") and value.is_floating_point() else 0
    return torch.cat([value, value.new_full((len(value), 3, *value.shape[2:]), anything)], 1)


def padded(drawn: Completions) -> Completions:
    names = ("response_ids", "response_mask", "sampler_logprobs")
    return replace(drawn, **{name: widened(getattr(drawn, name), name) for name in names})


def test_the_distillation_is_a_sum_with_the_rewards() -> None:
    drawn, rewards = completions([3, 1, 2, 4]), [1.0, 0.0, 0.0, 1.0]
    for form in FORMS.values():
        both = gradient_of(module := taught_by_model(form), taught(module, drawn, rewards))[1]
        alone = gradient_of(module := taught_by_model(form), taught(module, drawn, [0.0] * 4))[1]
        plain = GRPO("tiny", len, group_size=2, sampling=module.sampling)
        plain.policy = small_policy(0)
        found = Scored(batch(range(2)), drawn, scores(rewards))
        of_rewards = gradient_of(plain, credited(plain, found)[0])[1]
        torch.testing.assert_close(both, alone + of_rewards, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", [TeacherAdvantage, SampledKL, TopDivergence, TopForwardKL])
def test_twice_the_weight_of_a_teacher_teaches_twice_as_much(kind: Any) -> None:
    drawn, found = completions([3, 1, 2, 4]), []
    for coef in (0.35, 0.7):
        form = kind(coef, top_k=5) if issubclass(kind, TopTokensLoss) else kind(coef)
        module = taught_by_model(form, advantage=no_advantage)
        found.append(gradient_of(module, taught(module, drawn, [0.0] * 4))[1])
    torch.testing.assert_close(2 * found[0], found[1], rtol=1e-4, atol=1e-7)
    assert found[0].abs().max() > 1e-4


def test_the_advantage_of_a_token_is_the_log_ratio_at_the_temperature_of_the_sampling() -> None:
    module = taught_by_model(TeacherAdvantage(0.5), temperature=0.7)
    drawn = completions([3, 1, 2, 4])
    rollout = taught(module, drawn, [1.0, 0.0, 0.0, 1.0])
    ids = drawn.response_ids[drawn.response_mask]
    teacher, student = (
        (logits_of(model, drawn) / 0.7).log_softmax(-1).gather(1, ids[:, None])[:, 0]
        for model in (module.teacher_policy, module.policy)
    )
    of_rewards = torch.tensor([1.0, -1.0, -1.0, 1.0])[:, None] * 0.5 / (0.5**0.5 + 1e-4)
    of_rewards = of_rewards.expand(drawn.response_mask.shape)[drawn.response_mask]
    torch.testing.assert_close(rollout.advantages[drawn.response_mask], of_rewards + 0.5 * (teacher - student).detach())
    assert not rollout.advantages[0].requires_grad


def test_a_teacher_that_is_the_policy_teaches_nothing() -> None:
    for form in FORMS.values():
        module = taught_by_model(form, advantage=no_advantage, loss=reinforce_loss)
        module.teacher_policy = small_policy(0).requires_grad_(False)
        loss, gradient, _ = gradient_of(module, taught(module, completions([3, 1, 2, 4]), [1.0, 0.0, 0.0, 1.0]))
        assert loss == pytest.approx(0, abs=1e-6) and gradient.abs().max() < 1e-6


def test_what_a_teacher_says_outside_its_mask_changes_nothing() -> None:
    for form in FORMS.values():
        module = taught_by_model(form)
        drawn = completions([3, 1, 2, 4])
        found = Scored(batch(range(2)), drawn, scores([1.0, 0.0, 0.0, 1.0]))
        rollout, _ = credited(module, found)
        teacher, _ = module.distillation.teacher.score(request_of(module, found))
        mask = teacher.mask.clone()
        mask[1:3] = False
        clean = module.distillation.at_rollout(rollout, replace(teacher, mask=mask))
        spoilt = replace(
            teacher,
            mask=mask,
            log_probs=teacher.log_probs.masked_fill(~mask, -torch.inf),
            top_log_probs=None if teacher.top_log_probs is None else teacher.top_log_probs.masked_fill(
                ~mask[..., None], torch.nan
            ),
        )  # fmt: skip
        dirty = module.distillation.at_rollout(rollout, spoilt)
        one, two = (gradient_of(module, each[0]) for each in (clean, dirty))
        assert torch.equal(one[1], two[1]) and one[2] == two[2]
        above, below = clean[1]["teacher/coverage"]
        assert above / below == 0.5
        assert all(value[0].isfinite() for value in dirty[1].values())


def request_of(module: Any, found: Scored) -> Any:
    return TeacherRequest(
        found, top=module.distillation.form.top, sampling=module.sampling, policy=module.policy,
        held=module.teacher_policy, reference=lambda: module.reference.scoring(module.policy, None),
        encoder=lambda: module._encoder, source=None, options=DEFAULT, rows_at_once=2,
        top_of=module.distillation.form.top_of,
    )  # fmt: skip


def test_alone_only_tokens_with_an_opinion_are_tokens_of_the_loss() -> None:
    drawn = completions([3, 1, 2, 4])
    module = taught_by_model(TopDivergence(1.0, top_k=5), advantage=no_advantage)
    found = Scored(batch(range(2)), drawn, scores([1.0, 0.0, 0.0, 1.0]))
    teacher, _ = module.distillation.teacher.score(request_of(module, found))
    half = replace(teacher, mask=teacher.mask & (torch.arange(4) < 2)[:, None])
    rollout, _ = module.distillation.at_rollout(credited(module, found)[0], half)
    assert torch.equal(rollout.loss_mask, half.mask)
    loss, _, metrics = gradient_of(module, rollout)
    assert loss == pytest.approx(metrics["teacher/divergence"], rel=1e-5)  # the mean over these alone

    beside = taught_by_model(TopDivergence(1.0, top_k=5))
    rollout, _ = beside.distillation.at_rollout(credited(beside, found)[0], half)
    assert torch.equal(rollout.loss_mask, drawn.response_mask)


def test_columns_of_a_teacher_survive_a_checkpoint_and_a_join() -> None:
    module = taught_by_model(FORMS["top"])
    short, long = (taught(module, completions(lengths), [1.0, 0.0]) for lengths in ([2, 1], [3, 4]))
    plain = checkpoints.to_plain(long)
    back = checkpoints.rollout_from_plain(plain, torch.device("cpu"))
    for name in ("teacher_logprobs", "teacher_mask", "teacher_top_ids", "teacher_top_logprobs"):
        assert torch.equal(getattr(back, name), getattr(long, name))
    joined = join_rollouts(short, long)
    assert joined.teacher_top_ids.shape == (4, 4, 5)
    assert torch.equal(micro_batch(joined, torch.tensor([0, 1])).teacher_top_ids, short.teacher_top_ids)
    assert torch.equal(micro_batch(joined, torch.tensor([2, 3])).teacher_top_ids, long.teacher_top_ids)


# ------------------------------------------------------------------ scores of further tokens


@pytest.mark.parametrize("changes", [{}, {"fused_head": False}, {"shared_prompts": False}])
def test_further_tokens_are_scored_by_the_same_pass(changes: dict[str, bool]) -> None:
    """With rows of one length or many, shared prompts or not, a head that is fused or not."""
    model, sampling, options = (
        small_policy(0),
        Sampling(temperature=0.8, max_new_tokens=40),
        replace(DEFAULT, **changes),
    )
    drawn = completions([30, 1, 2, 28, 3, 30])
    ids = torch.randint(0, VOCABULARY, (*drawn.response_ids.shape, 3), generator=torch.Generator().manual_seed(3))
    found = score(model, drawn, sampling, entropy=True, entropy_gradient=True, further_ids=ids, options=options)
    plain = score(model, drawn, sampling, entropy=True, entropy_gradient=True, options=options)
    mask = drawn.response_mask
    torch.testing.assert_close(found.logprobs[mask], plain.logprobs[mask])
    torch.testing.assert_close(found.entropy[mask], plain.entropy[mask])
    by_hand = (logits_of(model, drawn) / 0.8).log_softmax(-1).gather(1, ids[mask])
    torch.testing.assert_close(found.further[mask], by_hand, rtol=1e-4, atol=1e-5)

    weights = torch.randn(by_hand.shape, generator=torch.Generator().manual_seed(4))
    learned = (found.further[mask] * weights).sum() + found.logprobs[mask].sum()
    one = torch.autograd.grad(learned, list(model.parameters()))
    own = (logits_of(model, drawn) / 0.8).log_softmax(-1).gather(1, drawn.response_ids[mask][:, None])
    two = torch.autograd.grad((by_hand * weights).sum() + own.sum(), list(model.parameters()))
    for first, second in zip(one, two, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("fused", [True, False])
def test_the_likeliest_tokens_are_those_of_the_softmax(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from lit_rl.models import frozen_teacher

    monkeypatch.setattr(frozen_teacher, "LOGITS_PER_BLOCK", 2 * VOCABULARY)
    if not fused:
        monkeypatch.setattr(frozen_teacher, "has_separable_head", lambda model: False)
    model, drawn = small_policy(0), completions([3, 1, 2, 4])
    values, ids = top_tokens(model, drawn, 4, Sampling(temperature=0.8), tokens=10)
    best = (logits_of(model, drawn) / 0.8).log_softmax(-1)[:, :10].topk(4)
    assert torch.equal(ids[drawn.response_mask], best.indices) and not values.requires_grad
    torch.testing.assert_close(values[drawn.response_mask], best.values.detach())
    assert not values[~drawn.response_mask].any()


# ------------------------------------------------------------------ the policy as its own teacher

PAIRS = (3, 4), (5, 9), (8, 7), (2, 2)
SUMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b), "easier": f"{b}+{a}="} for a, b in PAIRS]


def self_taught(context: Any, form: Any = None, rows: Any = SUMS, **settings: Any) -> Any:
    """GRPO of the shipped policy, which teaches itself, and its data."""
    teacher = settings.pop("teacher", None) or SelfTeacher(context, "live")
    module = GRPO(
        "tiny", exact_match, teacher=teacher, distillation=form,
        **{"group_size": 4, "sampling": Sampling(max_new_tokens=5), "optimizer": AdamW(lr=1e-3)} | settings,
    )  # fmt: skip
    return module, RolloutDataModule(rows, prompts_per_rollout=4, val_fraction=0)


def rollouts_of(tmp_path: Path, module: Any, data: Any, steps: int = 1, **how: Any) -> list[Any]:
    looks = EachBatch(lambda module: (module.scored, module.rollout))
    trainer(tmp_path, max_steps=steps, max_epochs=-1, callbacks=[looks], **how).fit(module, datamodule=data)
    return looks.seen


@pytest.mark.parametrize("name", FORMS)
def test_without_a_context_and_with_live_weights_the_policy_teaches_itself_nothing(name: str, tmp_path: Path) -> None:
    context = ColumnContext("prompt_again", template="$context")
    rows = [row | {"prompt_again": row["prompt"]} for row in SUMS]
    module, data = self_taught(context, FORMS[name], rows, advantage=no_advantage)
    module.configure_model()
    before = [p.detach().clone() for p in module.policy.parameters()]
    ((_, rollout),) = rollouts_of(tmp_path, module, data)
    assert rollout.teacher_mask.equal(rollout.completions.response_mask)
    if rollout.old_logprobs is not None:
        assert rollout.teacher_logprobs[rollout.teacher_mask].equal(rollout.old_logprobs[rollout.teacher_mask])
        assert not rollout.advantages.any()
    assert module.trainer.callback_metrics["train/grad_norm"] < 1e-5
    assert all((now - then).abs().max() < 3e-3 for now, then in zip(module.policy.parameters(), before))


@pytest.mark.parametrize(("weights", "steps"), [("live", 1), ("reference", 2)])
def test_the_response_is_scored_behind_the_other_prompt(weights: Any, steps: int, tmp_path: Path) -> None:
    """By hand: a plain forward pass over the prompt with its context and the same response tokens."""
    teacher = SelfTeacher(ColumnContext("answer", template="$prompt$context\n$prompt"), weights)
    module, data = self_taught(None, teacher=teacher, sampling=Sampling(0.7, max_new_tokens=5))
    scored, rollout = rollouts_of(tmp_path, module, data, steps)[-1]
    start = LanguageModel("tiny").load().eval()  # live weights of the first rollout, and the reference's of the second
    drawn, tokenizer = rollout.completions, module.tokenizer
    for row in range(len(drawn)):
        sums = scored.batch.prompts[row // 4], scored.batch.columns["answer"][row // 4]
        prompt = tokenizer(f"{sums[0]}{sums[1]}\n{sums[0]}").input_ids
        response = drawn.response_ids[row][drawn.response_mask[row]]
        logits = start(torch.tensor([[*prompt, *response.tolist()]])).logits[0, len(prompt) - 1 : -1]
        by_hand = (logits / 0.7).log_softmax(-1).gather(1, response[:, None])[:, 0].detach()
        said = rollout.teacher_logprobs[row][drawn.response_mask[row]]
        torch.testing.assert_close(said, by_hand, atol=1e-4, rtol=1e-4)
    shown = "".join(map(str, module.samples["prompt"]))
    assert "\n" not in shown, "the context is in the samples"


def test_rows_without_a_context_drop_out_and_are_counted(tmp_path: Path) -> None:
    hints = "7+7=", None, "  ", "9" * 600  # the last one is too long
    rows = [row | {"hint": hint} for row, hint in zip(SUMS, hints)]
    module, data = self_taught(ColumnContext("hint", template="$context"), rows=rows)
    ((scored, rollout),) = rollouts_of(tmp_path, module, data)
    taught = {row for row, learned in zip(scored.batch.rows, rollout.teacher_mask.any(1)[::4].tolist()) if learned}
    assert taught == {0}
    logged = module.trainer.callback_metrics
    assert logged["train/teacher/coverage"] == 0.25 == logged["train/teacher/left_out"]


def test_the_first_successful_sibling_is_shown_and_never_the_own_answer() -> None:
    success = torch.tensor([False, True, True, False, False, True, False, False, False])
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 1])
    assert first_siblings(success, groups) == [1, 2, 1, 1, 5, None, None, None, 5]

    module = GRPO("tiny", len, group_size=2)
    drawn = replace(completions([3, 3, 3, 3]), response_ids=torch.tensor([[22, 23, 256]] * 2 + [[24, 25, 256]] * 2))
    found = Scored(batch(range(2)), drawn, scores([1.0, 0.0, float("nan"), 0.9]))
    context = OutcomeContext(template="$prompt|$context", solution_template="<$solution>", feedback="answer",
                             feedback_template="!$feedback")  # fmt: skip
    assert context.texts(found, module.tokenizer) == ["!0", "<78>\n\n!0", "!1", "!1"]
    assert OutcomeContext(siblings="none", feedback="answer").texts(found, module.tokenizer)[0].endswith("\n\n0")
    assert OutcomeContext(threshold=0.9).texts(found, module.tokenizer)[2].endswith("9:")
    below = replace(found, scores=scores([-0.4, -0.6, -0.5, float("nan")]))  # penalties: a success is below 0 too
    assert [text is not None for text in OutcomeContext(threshold=-0.5).texts(below, module.tokenizer)] == [
        False, True, False, True,
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"algo\.teacher\.context\.threshold=inf"):
        OutcomeContext(threshold=math.inf)
    own = replace(found, scores=replace(found.scores, extras={"said": ["a", None, "", "$solution $feedback"]}))
    context = OutcomeContext(threshold=2, feedback="said", feedback_template="$feedback")
    assert context.texts(own, module.tokenizer) == ["a", None, None, "$solution $feedback"]  # in one pass


def test_a_context_is_put_into_the_last_message_of_the_user() -> None:
    context = ColumnContext("hint")
    asked = {"role": "user", "content": "$context?"}
    before = [{"role": "system", "content": "s"}, {"role": "user", "content": "before"}]
    after = {"role": "assistant", "content": "x"}
    shown = {"role": "user", "content": "$context?\n\nbecause"}
    assert context.prompt([*before, asked, after], "because", "row 1") == [*before, shown, after]
    with pytest.raises(DataError, match="row 1"):
        context.prompt(before[:1], "because", "row 1")
    image, text = {"type": "image"}, {"type": "text", "text": "$context?"}
    for parts, told in (
        ([text, image, text], [text, image, {"type": "text", "text": "$context?\n\nbecause"}]),
        ([image], [image, {"type": "text", "text": "\n\nbecause"}]),
    ):
        shown = [*before, {"role": "user", "content": told}]
        assert context.prompt([*before, {"role": "user", "content": parts}], "because", "row 1") == shown


# ------------------------------------------------------------------ of episodes


class Echo:
    """Two turns, in which the environment counts the letters."""

    def reset(self, seed: int, answer: str) -> str:
        return f"+{answer}="

    def step(self, action: str) -> tuple[Any, ...]:
        self.turns = getattr(self, "turns", 0) + 1
        return f"{len(action)}.", float(self.turns), self.turns == 2, False, {}


def test_an_episode_is_scored_behind_its_prompt_with_what_the_environment_said(tmp_path: Path) -> None:
    """By hand: a plain forward pass over the episode's prompt with the last answer, and the tokens of both sides."""
    context = OutcomeContext(
        siblings="none", feedback="episodes", feedback_template="$feedback", template="$context $prompt"
    )
    for form in (TeacherAdvantage(), TopDivergence(top_k=5, top_k_of="student")):
        module, data = self_taught(
            context, form, env=CustomEnvironment(Echo, max_turns=3, max_tokens=24), advantage=no_advantage
        )
        ((scored, rollout),) = rollouts_of(tmp_path, module, data)
        start, drawn = LanguageModel("tiny").load().eval(), rollout.completions
        assert rollout.teacher_mask.equal(drawn.response_mask) and drawn.observed.any()
        for row, episode in enumerate(scored.completions.episodes):
            i = row // 4
            opened = f"{scored.batch.prompts[i]}+{scored.batch.columns['answer'][i]}="
            assert episode.prompt == opened and [m["role"] for m in episode.messages] == ["assistant", "user"] * 2
            last = f"{len(episode.messages[2]['content'])}."  # the policy has not read it
            prompt = module.tokenizer(f"{last} {opened}").input_ids
            there, sampled = drawn.attended[row], drawn.response_mask[row]
            response = drawn.response_ids[row][there]
            logits = start(torch.tensor([[*prompt, *response.tolist()]])).logits[0, len(prompt) - 1 : -1]
            by_hand = logits.log_softmax(-1).detach()[sampled[there]]
            said = rollout.teacher_logprobs[row][sampled]
            own = by_hand.gather(1, drawn.response_ids[row][sampled][:, None])[:, 0]
            torch.testing.assert_close(said, own, atol=1e-4, rtol=1e-4)
            if rollout.teacher_top_ids is not None:
                ids = rollout.teacher_top_ids[row][sampled]
                wanted = by_hand.gather(1, ids)
                torch.testing.assert_close(rollout.teacher_top_logprobs[row][sampled], wanted, atol=1e-4, rtol=1e-4)
                text = module.tokenizer(opened).input_ids  # the policy read no context
                logits = start(torch.tensor([[*text, *response.tolist()]])).logits[0, len(text) - 1 : -1]
                assert ids.sort().values.equal(logits[sampled[there]].topk(5).indices.sort().values)


def test_the_prompt_of_an_episode_keeps_its_tools() -> None:
    """Shown its own words as the context, the teacher reads the very prompt of the policy; else only these differ."""

    def double(a: int) -> int:
        """Double a number.

        Args:
            a: The number.
        """
        return 2 * a

    tokenizer, ends = tokenizer_of("qwen2_5")
    source = Interaction(FunctionTools([double]), tokenizer, eos_ids=tuple(ends), chat=True, template_kwargs={})
    prompt, drawn = [{"role": "user", "content": "What is 2 * 7?"}], completions([3, 1])
    asked = PromptBatch([prompt], [[1]], {}, [0], [0])
    opened, conversations = source.begin(asked, [7, 7], max_new_tokens=8)
    conversations.close()
    episodes = tuple(Episode(opened[0].prompt, [], "answered", 0) for _ in range(2))
    found = Scored(asked, replace(drawn, episodes=episodes), scores([0.0, 0.0]))
    teacher = SelfTeacher(ColumnContext("hint", template="$context"), "live")
    own, other = teacher._prompts(found, ["What is 2 * 7?", "Say 14."], Encoder(tokenizer), source)
    assert own.ids == opened[0].ids and "double" in tokenizer.decode(own.ids)
    assert tokenizer.decode(other.ids) == tokenizer.decode(own.ids).replace("What is 2 * 7?", "Say 14.")


def test_what_is_shown_of_an_episode() -> None:
    """A sibling's whole conversation; of the own one the last answer, if there is one, and perhaps only for want of a
    sibling."""
    module, drawn = GRPO("tiny", len, group_size=2), completions([3, 3, 3, 3])
    drawn = replace(drawn, response_ids=torch.tensor([[22, 23, 256]] * 4))
    said = lambda text: {"role": "assistant", "content": text}  # noqa: E731
    heard = lambda text: {"role": "tool", "content": text}  # noqa: E731
    talks = [
        [said("a"), heard("1"), said("b"), heard("2"), heard("3")], [said("a"), heard("4"), said("b")],
        [said("a")], [said("a"), heard(" ")],
    ]  # fmt: skip
    episodes = tuple(Episode("p", talk, "answered", 2) for talk in talks)
    found = Scored(batch(range(2)), replace(drawn, episodes=episodes), scores([1.0, 0.0, 0.0, 0.0]))
    parts: Any = {"feedback": "episodes", "feedback_template": "!$feedback", "solution_template": "<$solution>"}
    solved = "<assistant: a\ntool: 1\nassistant: b\ntool: 2\ntool: 3>"
    assert OutcomeContext(**parts).texts(found, module.tokenizer) == ["!2\n3", f"{solved}\n\n!4", None, None]
    wanting = OutcomeContext(**parts, feedback_shown="without_solution")
    assert wanting.texts(found, module.tokenizer) == ["!2\n3", solved, None, None]
    with pytest.raises(ConfigError, match="episodes"):
        OutcomeContext(**parts).texts(replace(found, completions=drawn), module.tokenizer)


def test_other_prompts_stand_before_the_same_responses() -> None:
    drawn = completions([3, 1, 2, 4])
    behind = with_prompts(drawn, [None, EncodedPrompt([9]), EncodedPrompt([1, 2, 3, 4, 5]), None])
    rows = [ids[mask].tolist() for ids, mask in zip(behind.prompt_ids, behind.prompt_mask)]
    assert rows == [drawn.prompt_ids[0].tolist(), [9], [1, 2, 3, 4, 5], drawn.prompt_ids[3].tolist()]
    assert behind.response_ids is drawn.response_ids
    told = score(small_policy(0), behind, Sampling()).logprobs
    plain = replace(drawn, prompt_ids=torch.tensor([[1, 2, 3, 4, 5]]), prompt_mask=torch.ones(1, 5, dtype=torch.bool))
    alone = replace(plain, **{name: getattr(drawn, name)[2:3] for name in (
        "response_ids", "response_mask", "sampler_logprobs", "ended", "group_id")})  # fmt: skip
    torch.testing.assert_close(told[2, :2], score(small_policy(0), alone, Sampling()).logprobs[0, :2])


@pytest.mark.parametrize("minibatches", [1, 2])
def test_an_average_of_the_policy_teaches_it(minibatches: int, tmp_path: Path) -> None:
    """With the reference's weights at that moment, which follow after every optimizer step."""
    teacher = SelfTeacher(ColumnContext("easier", template="$context"))
    module, data = self_taught(None, teacher=teacher, reference=EMA(0.5), minibatches=minibatches)
    seen = rollouts_of(tmp_path, module, data, steps=4 * minibatches)
    firsts = seen[::minibatches]
    gaps = [float((r.teacher_logprobs - r.old_logprobs)[r.teacher_mask].abs().max()) for _, r in firsts]
    assert len({round(gap, 6) for gap in gaps}) == len(gaps) and module.reference_policy is not None
    assert all(rollout.ref_logprobs is None for _, rollout in seen)
    assert "train/kl" not in module.trainer.callback_metrics


@pytest.mark.parametrize("context", ["column", "feedback"])
def test_the_policy_learns_to_answer_as_it_does_behind_the_context(context: str, tmp_path: Path) -> None:
    """Prompts in a form that it hardly reads, and as context the form that it reads."""
    pairs = [(n * 37 % 100, n * 59 % 100) for n in range(1, 97)]
    rows = [{"prompt": f"#{a}+{b}=", "answer": str(a + b), "plain": f"{a}+{b}="} for a, b in pairs]
    shown = ColumnContext("plain", template="$context")
    if context == "feedback":
        shown = OutcomeContext(
            siblings="none", feedback="plain", feedback_template="$feedback", template="$context"
        )  # fmt: skip
    module = Reinforce(
        "tiny", exact_match, teacher=SelfTeacher(shown), distillation=TopDivergence(top_k=20, beta=0.0),
        advantage=no_advantage, group_size=2, sampling=Sampling(max_new_tokens=5), optimizer=AdamW(lr=1e-3),
        scheduler=Constant(),
    )  # fmt: skip
    data = RolloutDataModule(rows, prompts_per_rollout=32, val_fraction=0)
    looks = EachBatch(lambda module: float(module.trainer.callback_metrics["train/teacher/divergence"]))
    trainer(tmp_path, max_steps=24, max_epochs=-1, callbacks=[looks]).fit(module, datamodule=data)
    assert sum(looks.seen[-3:]) < 0.5 * sum(looks.seen[:3]), looks.seen
