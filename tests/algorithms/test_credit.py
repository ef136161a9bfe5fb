"""From what rewards said to rewards of rows and tokens, in the order that the objective states."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_rollouts import batch, completions, scores
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lit_rl.algorithms import GRPO, RLOO, Reinforce
from lit_rl.algorithms.evaluation.summary_statistics import Averages
from lit_rl.algorithms.rollouts.scored import Scored
from lit_rl.algorithms.terms.credit import RoleBaseline, Roles, RunningNorm, states_of, token_rewards, within_roles
from lit_rl.algorithms.terms.regularizers import AdaptiveKL, FixedEntropy
from lit_rl.core.episode import Episode
from lit_rl.core.errors import ConfigError, RewardError
from lit_rl.core.rollout import Completions, Rollout, Sampling
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.ops import advantages, returns, selection
from lit_rl.ops.advantages import missing_eos
from lit_rl.ops.kl import k2
from lit_rl.ops.policy_losses import clipped_policy_loss
from lit_rl.ops.reductions import Metrics
from lit_rl.rewards.weighted_rewards import Scores

CHARACTERS = "ab é€😀"
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


@functools.cache
def tokenizer() -> Any:
    """Byte-level, with merges of letters, inside a character and across two characters, and an EOS."""

    def symbols(text: str) -> str:
        return BYTES.pre_tokenize_str(text)[0][0]

    euro, accent = symbols("€"), symbols("é")
    merges = [("a", "b"), ("ab", "a"), (euro[0], euro[1]), (accent[0], accent[1]), (accent, "a")]
    vocabulary = {token: i for i, token in enumerate([*ALPHABET, *(one + two for one, two in merges)])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer, backend.decoder = BYTES, decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")


def bytes_of(token: int) -> int:
    """How many bytes of text a token writes: one for each symbol; special tokens write none."""
    return 0 if token in tokenizer().all_special_ids else len(tokenizer().convert_ids_to_tokens(token))


def completions_of(texts: list[str]) -> Completions:
    """Each text, tokenised, with EOS after it."""
    rows = [[*tokenizer()(text).input_ids, tokenizer().eos_token_id] for text in texts]
    drawn = completions([len(row) for row in rows], 1)
    ids = torch.tensor([row + [0] * (drawn.response_ids.shape[1] - len(row)) for row in rows])
    return dataclasses.replace(drawn, response_ids=ids)


VALUES = st.integers(-8, 8).map(lambda n: n / 4)  # sums of these are exact


@st.composite
def texts_and_spans(draw: Any) -> tuple[str, float, list[tuple[int, int, float]]]:
    text = draw(st.text(CHARACTERS, min_size=1, max_size=8))
    places = st.integers(0, len(text) - 1).flatmap(lambda s: st.tuples(st.just(s), st.integers(s + 1, len(text))))
    spans = draw(st.lists(st.tuples(places, VALUES).map(lambda p: (*p[0], p[1])), max_size=3))
    return text, draw(st.one_of(VALUES, st.just(math.nan))), spans


@given(st.lists(texts_and_spans(), min_size=1, max_size=3))
def test_a_span_is_earned_at_the_token_that_writes_its_last_byte_and_the_rest_at_the_last_token(rows):
    texts, rewards, spans = zip(*rows)
    drawn = completions_of(list(texts))
    out, ends = token_rewards(torch.tensor(rewards), drawn, list(spans), tokenizer())
    for i, (text, reward, row_spans) in enumerate(rows):
        length = int(drawn.lengths[i])
        expected = torch.zeros(out.shape[1])
        last = {length - 1} if math.isnan(reward) or not row_spans else set()
        if not math.isnan(reward):
            written = torch.tensor([bytes_of(int(token)) for token in drawn.response_ids[i, :length]]).cumsum(0)
            rest = reward
            for _, end, value in row_spans:
                token = int((written >= len(text[:end].encode())).nonzero()[0])
                expected[token] += value
                last.add(token)
                rest -= value
            expected[length - 1] += rest
            assert out[i].sum() == reward
        assert torch.equal(out[i], expected)
        assert set(ends[i].nonzero().flatten().tolist()) == last
    assert not out[~drawn.response_mask].any() and not ends[~drawn.response_mask].any()


def test_a_span_of_a_second_turn_is_earned_behind_the_observation():
    """The policy writes `ab`, a tool two tokens, the policy `é`: the third character stands in the last column."""
    ids = [tokenizer()(text).input_ids for text in ("a", "b", "é")]
    assert [len(one) for one in ids] == [1, 1, 1]
    written, tool = [one[0] for one in ids], [0, 0]
    drawn = completions([5], 1)
    drawn = dataclasses.replace(
        drawn,
        response_ids=torch.tensor([written[:2] + tool + written[2:]]),
        response_mask=torch.tensor([[True, True, False, False, True]]),
        attended=torch.ones(1, 5, dtype=torch.bool),
    )
    out, ends = token_rewards(torch.tensor([3.0]), drawn, [[(1, 2, 0.5), (2, 3, 2.5)]], tokenizer())
    assert out.tolist() == [[0, 0.5, 0, 0, 2.5]]
    assert ends.tolist() == [[False, True, False, False, True]]


def test_without_spans_a_row_earns_at_its_last_token():
    out, ends = token_rewards(torch.tensor([2.0, math.nan, -1.0]), completions([3, 2, 1], 3), None, None)
    assert out.tolist() == [[0, 0, 2], [0, 0, 0], [-1, 0, 0]]
    assert ends.tolist() == [[False, False, True], [False, True, False], [True, False, False]]


# ---------------------------------------------------------------------- the order of the steps, by hand

OLD = torch.tensor([[-1.0, -2.0], [-0.5, 0.0], [-1.0, -1.0], [-2.0, -1.0]])
REF = torch.tensor([[-1.5, -1.0], [-1.0, 9.0], [-1.0, -3.0], [-2.5, -1.0]])
"""k1 = old - ref: rows 0.5, -1 (sum -0.5); 0.5 (one token); 0, 2 (sum 2); 0.5, 0 (sum 0.5)."""
KL = torch.tensor([-0.5, 0.5, 2.0, 0.5])


def by_hand(monkeypatch: Any, algorithm: Any = GRPO, **settings: Any) -> Any:
    """A module without weights, whose log-probs are the ones above."""
    module = algorithm("tiny", len, **{"group_size": 2, "advantage": advantages.raw, **settings})
    monkeypatch.setattr(module, "old_logprobs", lambda completions: OLD)
    monkeypatch.setattr(module, "ref_logprobs", lambda completions: REF)
    return module


def drawn() -> Completions:
    return completions([2, 1, 2, 2], 2)


def taken(module: Any, completions: Completions, said: Scores, **more: Any) -> tuple[Rollout, Metrics]:
    """The rollout of scored completions, each prompt with as many as it has, and what was logged of it."""
    prompts = batch(range(len(completions.group_id.unique())))
    scored = Scored(prompts, completions, said, **more)
    old = module.old_logprobs(completions) if module.needs_old_logprobs else None
    ref = module.reference_of(scored) if module.needs_reference else None
    return module.advantages(scored, old, ref)


def credited(module: Any, completions: Completions, said: Scores, **more: Any) -> Rollout:
    return taken(module, completions, said, **more)[0]


def logged(metrics: Metrics) -> dict[str, float]:
    averages = Averages()
    averages.add(metrics)
    return averages.reduce()


def test_shaping_comes_before_the_norm_and_the_clip_before_the_kl(monkeypatch):
    module = by_hand(
        monkeypatch, shaping=functools.partial(missing_eos, penalty=2.0), reward_norm=RunningNorm(eps=0.0),
        reward_clip=(-0.5, 10), reward_beta=0.1,
    )  # fmt: skip
    ended = torch.tensor([True, True, False, True])
    rollout = credited(module, dataclasses.replace(drawn(), ended=ended), scores([1.0, 2.0, 3.0, 4.0]))
    shaped = torch.tensor([1.0, 2.0, 1.0, 4.0])  # mean 2, deviation sqrt(2)
    clipped = ((shaped - 2) / math.sqrt(2)).clamp(min=-0.5)
    assert clipped.tolist()[0] == clipped.tolist()[2] == -0.5
    torch.testing.assert_close(rollout.rewards, clipped - 0.1 * KL)
    torch.testing.assert_close(rollout.advantages, rollout.rewards)


def test_the_kl_is_taken_off_token_by_token(monkeypatch):
    got: dict[str, torch.Tensor] = {}

    def estimator(rewards, group_id, token_rewards, mask):
        got.update(token_rewards=token_rewards, mask=mask)
        return token_rewards

    module = by_hand(monkeypatch, advantage=estimator, reward_beta=0.1)
    rollout, metrics = taken(module, drawn(), scores([1.0, 2.0, math.nan, 4.0]))
    # every token pays for its own KL, the last one has the reward; the unscored row neither earns nor pays
    expected = torch.tensor([[-0.05, 1.1], [1.95, 0.0], [0.0, 0.0], [-0.05, 4.0]])
    torch.testing.assert_close(got["token_rewards"], expected)
    torch.testing.assert_close(got["token_rewards"].sum(1)[[0, 1, 3]], rollout.rewards[[0, 1, 3]])
    assert rollout.rewards[2].isnan() and torch.equal(got["mask"], drawn().response_mask)
    assert rollout.ref_logprobs is None  # the loss has no KL term
    assert logged(metrics)["kl"] == pytest.approx(float(KL.sum()) / 7)


def test_another_estimator_of_the_kl_in_the_reward(monkeypatch):
    module = by_hand(monkeypatch, RLOO, reward_beta=1.0, reward_kl=k2, advantage=advantages.raw)
    rollout = credited(module, drawn(), scores([0.0] * 4))
    k2s = torch.where(drawn().response_mask, (OLD - REF).square() / 2, 0.0).sum(1)
    torch.testing.assert_close(rollout.advantages, -k2s)


def test_the_adaptive_weight_is_that_of_the_rollouts_before(monkeypatch):
    module = by_hand(monkeypatch, reward_beta=0.5, kl_control=AdaptiveKL(target=0.1, horizon=8))
    # the mean over rows of the mean KL of their tokens: (-0.25 + 0.5 + 1 + 0.25) / 4 = 0.375; far above the target
    factor = 1.0
    for _ in range(3):
        rollout = credited(module, drawn(), scores([0.0] * 4))
        torch.testing.assert_close(rollout.rewards, -0.5 * factor * KL)
        assert rollout.kl_factor == factor
        factor *= 1 + 0.2 * 4 / 8
        assert module.kl.control.factor == pytest.approx(factor)


def test_the_adaptive_weight_hears_the_mean_over_rows(monkeypatch):
    module = by_hand(monkeypatch, beta=0.5, kl_control=AdaptiveKL(target=0.375, horizon=8))
    rollout = credited(module, drawn(), scores([0.0] * 4))
    assert module.kl.control.factor == pytest.approx(1.0)  # exactly on target
    assert rollout.ref_logprobs is REF and torch.equal(rollout.rewards, torch.zeros(4))  # this one is in the loss


def test_a_row_that_is_left_out_is_in_no_statistic(monkeypatch):
    module = by_hand(monkeypatch, advantage=advantages.group_normalized, reward_norm=RunningNorm(eps=0.0))
    rollout = credited(module, drawn(), scores([1.0, 2.0, 3.0, 4.0]), kept=torch.tensor([True, True, True, False]))
    assert rollout.rewards.tolist() == pytest.approx([-1.0, 0.0, 1.0, math.nan], nan_ok=True)
    assert rollout.advantages[2:].tolist() == [0, 0]  # alone in its group
    assert rollout.loss_mask.any(1).tolist() == [True, True, True, False]


def test_advantages_are_whitened_and_then_clipped(monkeypatch):
    module = by_hand(monkeypatch, whitening=functools.partial(advantages.whiten_rows, eps=0.0), advantage_clip=0.9)
    rollout = credited(module, drawn(), scores([1.0, 2.0, math.nan, 3.0]))
    assert rollout.advantages.tolist() == pytest.approx([-0.9, 0.0, 0.0, 0.9])


def test_truncated_rows_have_an_advantage_and_no_loss(monkeypatch):
    module = by_hand(monkeypatch, mask_truncated=True)
    ended = torch.tensor([True, False, True, True])
    rollout = credited(module, dataclasses.replace(drawn(), ended=ended), scores([1.0, 2.0, 3.0, 4.0]))
    assert torch.equal(rollout.loss_mask, drawn().response_mask & ended[:, None])
    assert rollout.advantages.tolist() == [1, 2, 3, 4]


def test_whitened_by_tokens_an_advantage_of_a_row_counts_at_each_of_its_tokens(monkeypatch):
    module = by_hand(monkeypatch, whitening=functools.partial(advantages.whiten_tokens, eps=0.0))
    rollout = credited(module, drawn(), scores([1.0, 2.0, math.nan, 4.0]))
    # tokens 1, 1, 2, 4, 4: mean 2.4, variance 9.2 / 4
    expected = (torch.tensor([[1.0, 1.0], [2.0, 2.4], [2.4, 2.4], [4.0, 4.0]]) - 2.4) / math.sqrt(2.3)
    torch.testing.assert_close(rollout.advantages, expected)


def test_a_users_advantages_of_tokens_are_not_whitened_by_rows(monkeypatch):
    def mine(rewards, group_id, mask):
        return rewards[:, None] * mask

    module = by_hand(monkeypatch, advantage=mine, whitening=advantages.whiten_rows)
    with pytest.raises(ConfigError, match=r"algo/whitening: whiten_rows .* mine .*algo/whitening=tokens"):
        credited(module, drawn(), scores([1.0, 2.0, 3.0, 4.0]))


SPANS = [[(0, 1, 0.5)], [], [(0, 1, 2.0)], []]
ON_ROWS = {
    "algo.shaping": {"shaping": missing_eos},
    "algo.reward_norm": {"reward_norm": RunningNorm()},
    "algo.reward_clip": {"reward_clip": (-1, 1)},
}


@pytest.mark.parametrize("key, settings", ON_ROWS.items(), ids=ON_ROWS)
def test_what_changes_rewards_of_rows_is_refused_where_rewards_are_of_spans(monkeypatch, key, settings):
    module = by_hand(monkeypatch, **settings)
    with pytest.raises(ConfigError, match=rf"{key} changes .*spans"):
        credited(module, drawn(), scores([1.0, 2.0, 3.0, 4.0], span_rewards=SPANS))


def test_a_kl_in_the_reward_goes_with_spans(monkeypatch):
    module = by_hand(monkeypatch, reward_beta=0.1)
    monkeypatch.setattr(type(module), "tokenizer", tokenizer())
    drawn_texts = dataclasses.replace(drawn(), response_ids=torch.tensor([[0, 1], [2, 0], [3, 4], [5, 6]]))
    rollout = credited(module, drawn_texts, scores([1.0, 2.0, 3.0, 4.0], span_rewards=SPANS))
    torch.testing.assert_close(rollout.rewards, torch.tensor([1.0, 2.0, 3.0, 4.0]) - 0.1 * KL)


@pytest.mark.parametrize(
    "betas, logged_as",
    [
        ({"beta": 0.5}, {"kl_coef": 0.5}),
        ({"reward_beta": 0.2}, {"reward_kl_coef": 0.2}),
        ({"beta": 0.5, "reward_beta": 0.2}, {"kl_coef": 0.5, "reward_kl_coef": 0.2}),
    ],
)
def test_both_weights_of_the_kl_are_logged(betas, logged_as):
    module = GRPO("tiny", len, kl_control=AdaptiveKL(target=0.1, horizon=8), **betas)
    module.kl.control.update(1.0, 4)
    factor = module.kl.control.factor
    assert factor > 1
    assert module.coefficients() == pytest.approx({name: weight * factor for name, weight in logged_as.items()})


# ---------------------------------------------------------------------- what a user's own function gets


def test_an_estimator_gets_every_column_that_it_names(monkeypatch):
    got: dict[str, Any] = {}

    def mine(r, g, values, weights, lengths, greedy_rewards, token_rewards, mask, step_ends, *, scale):
        got.update(locals())
        return r * scale

    module = by_hand(monkeypatch, advantage=functools.partial(mine, scale=3.0))
    assert module.needs_greedy_rewards
    table = [[1.0, 0.0], [1.0, math.nan], [0.5, 0.5], [math.nan, math.nan]]
    greedy = torch.tensor([0.5, 0.5, 0.0, 0.0])
    rollout = credited(module, drawn(), scores(table), greedy_rewards=greedy)
    assert rollout.advantages.tolist() == pytest.approx([3, 3, 3, math.nan], nan_ok=True)
    assert got["r"].tolist() == pytest.approx([1, 1, 1, math.nan], nan_ok=True)
    assert got["g"].tolist() == [0, 0, 1, 1] and got["lengths"].tolist() == [2, 1, 2, 2]
    torch.testing.assert_close(got["values"], torch.tensor(table), equal_nan=True)
    assert got["weights"].tolist() == [[1.0, 1.0]] * 4 and torch.equal(got["greedy_rewards"], greedy)
    assert got["token_rewards"].tolist() == [[0, 1], [1, 0], [0, 1], [0, 0]]
    assert torch.equal(got["mask"], drawn().response_mask)
    assert got["step_ends"].tolist() == [[False, True], [True, False], [False, True], [False, True]]


def test_values_of_a_row_that_is_left_out_are_unscored(monkeypatch):
    got = {}

    def mine(rewards, group_id, values):
        got["values"] = values
        return rewards

    module = by_hand(monkeypatch, advantage=mine)
    kept = torch.tensor([True, False, True, True])
    credited(module, drawn(), scores([[1.0, 2.0]] * 4), kept=kept)
    assert torch.equal(got["values"].isnan().all(1), ~kept)


def test_a_shaping_function_gets_lengths_and_ends(monkeypatch):
    def mine(rewards, group_id, ended, lengths):
        return rewards - lengths - 10.0 * ~ended

    module = by_hand(monkeypatch, shaping=mine)
    ended = torch.tensor([True, False, True, True])
    rollout = credited(module, dataclasses.replace(drawn(), ended=ended), scores([1.0, 2.0, 3.0, 4.0]))
    assert rollout.rewards.tolist() == [-1, -9, 1, 2]


def test_a_loss_gets_weights_and_step_if_it_names_them_and_only_then():
    got: list[set[str]] = []

    def plain(logprobs, old_logprobs, advantages, mask):
        got.append(set())
        return clipped_policy_loss(logprobs, old_logprobs, advantages, mask)

    def curious(
        logprobs, old_logprobs, advantages, mask, weights: torch.Tensor | None = None, step=None, *, delta=None
    ):
        got.append({name for name, value in {"weights": weights, "step": step}.items() if value is None})
        return plain(logprobs, old_logprobs, advantages, mask)

    assert not GRPO("tiny", len, loss=plain).needs_step
    assert GRPO("tiny", len, loss=curious).needs_step
    assert GRPO("tiny", len, loss=lambda *columns, **everything: curious(*columns, **everything)).needs_step
    assert GRPO("tiny", len, loss=functools.partial(curious, delta=4.0)).needs_step
    assert got  # each was tried once when its module was made


def test_the_step_is_scored_ahead_only_for_terms_that_are_taken_over_it():
    per_row, bonus = selection.top_entropy_per_sequence, FixedEntropy(0.01)
    assert not GRPO("tiny", len, selection=per_row).needs_step
    assert not GRPO("tiny", len, entropy=bonus).needs_step
    assert GRPO("tiny", len, selection=selection.top_entropy).needs_step
    assert GRPO("tiny", len, selection=lambda e, m, **rest: selection.top_entropy(e, m, **rest)).needs_step
    assert GRPO("tiny", len, selection=per_row, entropy=bonus).needs_step  # the bonus is a mean over what acts


# ---------------------------------------------------------------------- the greedy baseline


@pytest.mark.parametrize("estimator", [advantages.remax, returns.remax_return_to_go])
def test_a_greedy_reward_is_normalised_and_clipped_as_those_that_it_is_compared_with(monkeypatch, estimator):
    norm = RunningNorm(eps=0.0)
    module = by_hand(monkeypatch, advantage=estimator, reward_norm=norm, reward_clip=(-1.0, 0.5))
    greedy = torch.tensor([2.5, -7.0, 30.0, math.nan])
    rollout = credited(module, drawn(), scores([1.0, 2.0, 3.0, 4.0]), greedy_rewards=greedy)
    std = math.sqrt(5 / 3)  # of 1, 2, 3, 4; the greedy ones are not among them
    expected = [-1.0 - 0.0, -0.5 / std + 1.0, 0.5 / std - 0.5, 0.0]
    firsts = rollout.advantages if rollout.advantages.ndim == 1 else rollout.advantages[:, 0]
    assert firsts.tolist() == pytest.approx(expected)
    assert norm.state()["count"] == 4


def test_remax_subtracts_the_reward_of_the_greedy_completion():
    def length(completions):
        return [float(len(text)) for text in completions]

    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(2)]
    data = RolloutDataModule(rows=rows, prompts_per_rollout=8, val_fraction=0)
    sampling = Sampling(max_new_tokens=6, temperature=1.3, top_k=5)
    module = Reinforce("tiny", length, advantage=advantages.remax, group_size=2, sampling=sampling)
    module.configure_model()
    data.prepare(module.tokenizer)
    prompts = data.peek(8)
    with module.rollout_context():
        greedy = module.generate(prompts, Sampling(max_new_tokens=6, temperature=0.0), group_size=1)
        baseline = module.greedy_rewards(prompts)
        drawn = module.generate(prompts)
        said = module.reward(prompts, drawn)
        rollout = credited(module, drawn, said, greedy_rewards=baseline)
    texts = module.tokenizer.batch_decode(
        [row[m].tolist() for row, m in zip(greedy.response_ids, greedy.response_mask)], skip_special_tokens=True
    )
    expected = torch.tensor([float(len(text)) for text in texts]).repeat_interleave(2)
    assert torch.equal(baseline, expected)
    torch.testing.assert_close(rollout.advantages, said.total - expected)
    assert (said.total != expected).any()


def test_the_reward_of_a_turn_is_earned_at_its_last_token() -> None:
    """Two turns of 2 and 1 tokens with an observation between them, a part of the reward that has no turn, and a row of
    one turn."""
    sampled = torch.tensor([[1, 1, 0, 0, 1, 0], [1, 1, 1, 0, 0, 0]]).bool()
    turns = torch.tensor([[0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0]])
    rows = dataclasses.replace(completions([6, 6], 2), response_mask=sampled, turn=turns)
    parts = [[(0, 0.5), (1, 2.0), (0, 0.25)], [(0, 3.0)]]
    earned, ends = token_rewards(torch.tensor([3.0, 3.0]), rows, parts, tokenizer())
    assert earned.tolist() == [[0, 0.75, 0, 0, 2.25, 0], [0, 0, 3, 0, 0, 0]]
    assert ends.tolist() == [[False, True, False, False, True, False], [False, False, True, False, False, False]]
    assert earned[(~sampled)].sum() == 0
    with pytest.raises(RewardError, match=r"turn 2 of a completion with 2 turns"):
        token_rewards(torch.tensor([1.0, 1.0]), rows, [[(2, 1.0)], []], tokenizer())
    alone = dataclasses.replace(rows, turn=None)
    assert token_rewards(torch.tensor([3.0, 3.0]), alone, [[], [(0, 3.0)]], tokenizer())[0][1].tolist()[2] == 3.0


# ------------------------------------------------------------------ the state that a turn began in


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=3), st.integers(0, 2))
def test_turns_that_read_the_same_began_in_one_state(answers: list[list[int]], padding: int) -> None:
    """The number goes by the newest answer alone: in whatever row, turn and column it stands, and whether the policy
    wrote the token that ends a turn (7), or was cut and that token was read."""

    def episode(answers: list[list[int]], cut: bool) -> list[tuple[int, int, bool]]:
        tokens = [(9, 0, True), (7, 0, not cut)]
        for turn, answer in enumerate(answers):
            tokens += [(token, turn, False) for token in answer]
            tokens += [(9, turn + 1, True), (8, turn + 1, True), (7, turn + 1, not cut)]
        return tokens[:-1]

    rows = [episode(answers, cut=False), episode(answers[::-1], cut=True)]
    width = max(map(len, rows)) + padding
    ids, turn, sampled = (
        torch.tensor([[each[i] for each in row] + [0] * (width - len(row)) for row in rows]) for i in range(3)
    )
    there = torch.tensor([[column < len(row) for column in range(width)] for row in rows])
    made = dataclasses.replace(
        completions([width] * 2, 1), response_ids=ids, turn=turn, response_mask=sampled.bool(), attended=there
    )
    found = states_of(made, 7)
    for row, order in enumerate((answers, answers[::-1])):
        assert not found[row, 0] and (found[row][sampled[row].bool() & (turn[row] > 0)] != 0).all()
        for number, answer in enumerate(order, start=1):
            at = (turn[row] == number) & sampled[row].bool()
            for other, texts in enumerate((answers, answers[::-1])):
                for place, text in enumerate(texts, start=1):
                    there_too = (turn[other] == place) & sampled[other].bool()
                    assert (found[row, at][0] == found[other, there_too][0]) == (answer == text)


# ---------------------------------------------------------------------- roles


def in_roles(roles: list[Any], said: Scores, *, group_size: int = 1, of_episodes: bool = False, **more: Any) -> Scored:
    """Prompts with a column of roles, or episodes with one each."""
    drawn = completions([2] * len(said.total), group_size)
    if of_episodes:
        episodes = (Episode(prompt="", messages=[], end="done", turns=1, extra={"player": each}) for each in roles)
        return Scored(
            batch(range(len(roles) // group_size)), dataclasses.replace(drawn, episodes=tuple(episodes)), said
        )
    prompts = dataclasses.replace(batch(range(len(roles))), columns={"player": roles})
    return Scored(prompts, drawn, said, **more)


def test_the_baseline_of_a_role_is_read_before_it_learns_of_the_rollout(monkeypatch):
    """Two rollouts; the second begins with 0.25 (1 + 3) / 2 = 0.5 for white, and 0.25 (-2) = -0.5 for black."""
    estimator = RoleBaseline(decay=0.75)
    module = by_hand(monkeypatch, Reinforce, advantage=estimator, role="player", group_size=1)
    first, metrics = module.advantages(in_roles(["white", "black", "white"], scores([1.0, -2.0, 3.0])))
    assert first.advantages.tolist() == [1, -2, 3], "before the first rollout nothing was earned"
    assert {name: value for name, value in logged(metrics).items() if name.startswith("role/")} == {
        "role/white/reward": 2.0, "role/white/baseline": 0.5, "role/black/reward": -2.0, "role/black/baseline": -0.5,
    }  # fmt: skip
    saved = module.rank_state()["terms"]["advantage"]
    second, metrics = module.advantages(in_roles(["black", "white", "black"], scores([1.0, 1.0, math.nan])))
    assert second.advantages.tolist() == [1.5, 0.5, 0.0], "a row without a reward has no advantage"
    found = logged(metrics)
    assert found["role/black/baseline"] == pytest.approx(0.75 * -0.5 + 0.25 * 1), "and is in no average"
    assert found["role/white/baseline"] == pytest.approx(0.75 * 0.5 + 0.25 * 1)
    resumed = by_hand(monkeypatch, Reinforce, advantage=RoleBaseline(decay=0.75), role="player", group_size=1)
    resumed.advantage.load_state(saved)
    again = resumed.advantages(in_roles(["black", "white", "black"], scores([1.0, 1.0, math.nan])))[0]
    assert torch.equal(again.advantages, second.advantages)


def test_without_roles_there_is_one_baseline(monkeypatch):
    module = by_hand(monkeypatch, Reinforce, advantage=RoleBaseline(decay=0.0), group_size=1)
    module.advantages(in_roles(["white", "black"], scores([1.0, 3.0])))
    assert module.advantages(in_roles(["white", "black"], scores([1.0, 5.0])))[0].advantages.tolist() == [-1, 3]


def test_completions_are_compared_with_those_of_their_role_only(monkeypatch):
    """Groups of four: in the first both roles, in the second one; shaping goes by them too."""
    module = by_hand(monkeypatch, advantage=advantages.centered, role="player", group_size=4)
    rewards = [1.0, 10.0, 3.0, 14.0, 1.0, 2.0, 3.0, 6.0]
    roles = ["solver", "proposer", "solver", "proposer", *["solver"] * 4]
    rollout = module.advantages(in_roles(roles, scores(rewards), group_size=4, of_episodes=True))[0]
    assert rollout.advantages.tolist() == [-1, -2, 1, 2, -2, -1, 0, 3]
    assert rollout.completions.group_id.tolist() == [0] * 4 + [1] * 4, "whole groups are learned together, as ever"
    shaped = functools.partial(advantages.relative_length_penalty, weight=0.5)
    module = by_hand(monkeypatch, role="player", group_size=4, shaping=shaped, advantage=advantages.leave_one_out)
    rewards = module.advantages(in_roles(roles, scores(rewards), group_size=4, of_episodes=True))[0].rewards
    assert rewards.tolist() == [0, 4, 2, 8, -0.5, 0.5, 1.5, 4.5], "less half of the mean of the role's rewards"


def test_a_part_of_a_role_is_compared_with_itself_and_has_the_baseline_of_the_role(monkeypatch):
    """One group: two proposers, and two attempts at the problem of each. The first problem is the easy one."""
    roles = ["proposer", "proposer", "solver:p1", "solver: p1", "solver:p2", "solver:p2"]
    rewards = scores([0.0, 4.0, 5.0, 9.0, 0.0, 2.0])
    module = by_hand(monkeypatch, advantage=advantages.centered, role="player", group_size=6)
    compared, metrics = module.advantages(in_roles(roles, rewards, group_size=6, of_episodes=True))
    assert compared.advantages.tolist() == [-2, 2, -2, 2, -1, 1]
    assert {name: float(total / count) for name, (total, count) in metrics.items() if name.startswith("role/")} == {
        "role/proposer/reward": 2,
        "role/solver/reward": 4,
    }
    module = by_hand(monkeypatch, Reinforce, advantage=RoleBaseline(decay=0.0), role="player", group_size=6)
    for expected in ([0, 4, 5, 9, 0, 2], [-2, 2, 1, 5, -4, -2]):
        rollout = module.advantages(in_roles(roles, rewards, group_size=6, of_episodes=True))[0]
        assert rollout.advantages.tolist() == expected
    Roles("player").check({"player": [f"solver:{problem}" for problem in range(100)]}, ())


@given(st.lists(st.tuples(st.integers(0, 2**40), st.sampled_from(["a", "b", 3])), min_size=1, max_size=20))
def test_numbers_are_equal_for_equal_prompts_and_roles_alone(rows):
    groups, roles = zip(*rows)
    numbers, whole = Roles("player").numbers(in_roles(list(roles), scores([0.0] * len(rows))))
    assert torch.equal(numbers, whole), "no role has parts"
    found = within_roles(torch.tensor(groups), numbers).tolist()
    assert len(set(found)) == len(set(rows)) == len(set(zip(rows, found)))


def test_roles_that_are_missing_or_none_are_refused_before_anything_is_loaded():
    roles = Roles("player")
    with pytest.raises(ConfigError, match=r"algo.role='player' is no column.*Columns: plaier, score.*'plaier'"):
        roles.check({"plaier": ["white"]}, ("score",))
    roles.check({"answer": ["1"]}, ("score", "player"))
    for empty in (None, "", " "):
        with pytest.raises(ConfigError, match="row 1 of the training rows has no value"):
            roles.check({"player": ["white", empty]}, ())
    with pytest.raises(ConfigError, match="row 0 of the training rows has ':p7', which is no role"):
        Roles("player").check({"player": [":p7"]}, ())
    with pytest.raises(ConfigError, match="more than 64 values"):
        Roles("player").check({"player": range(65)}, ())
