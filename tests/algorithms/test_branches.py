"""Episodes that fork: each sampled token is learned once, behind what the policy read when it drew it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from forking_agents import forking, letters
from hypothesis import given, settings
from hypothesis import strategies as st
from small_rollouts import trainer as quiet_trainer
from torch import Tensor

from lit_rl.algorithms import GRPO, PPO, Constant
from lit_rl.algorithms.data_parallel import Ranks
from lit_rl.algorithms.evaluation.summary_statistics import Averages
from lit_rl.algorithms.optim.optimizers import ByPath
from lit_rl.algorithms.rollouts import checkpoints
from lit_rl.algorithms.rollouts.episode_outcomes import episode_metrics
from lit_rl.algorithms.terms.self_teacher import ColumnContext, SelfTeacher
from lit_rl.algorithms.terms.teachers import ModelTeacher
from lit_rl.core.branches import TokenTree, branches_of, tokens_read
from lit_rl.core.episode import Episode
from lit_rl.core.errors import ConfigError
from lit_rl.core.rollout import Completions, Sampling, join_completions, select, trim
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.generation import RolloutFunction
from lit_rl.models import LanguageModel, Lora
from lit_rl.models.critics import SeparateCritic, SharedTrunk
from lit_rl.models.forward import score
from lit_rl.ops import policy_losses, reductions

SAMPLING = Sampling(max_new_tokens=4)
PROMPTS = ([11, 12, 13, 14], [21, 22, 23])


@st.composite
def trees(draw: st.DrawFn, most: int = 4) -> TokenTree:
    """An episode of random requests: of the newest turn, of an earlier place in any text, or of another text."""
    token = st.integers(30, 34)  # few, so that texts begin alike
    tree = TokenTree()
    tree.begin(draw(st.sampled_from(PROMPTS)))
    for turn in range(draw(st.integers(1, most))):
        place, read = -1, list[int]()
        if turn:
            place = draw(st.one_of(st.just(tree.last), st.integers(tree.root, tree.last)))
            asked = draw(st.lists(token, min_size=int(place == tree.root), max_size=4))
            place, read = tree.walk(place, asked)
            if place == tree.root:
                read = [*read, 35]
        ids = draw(st.lists(token, min_size=1, max_size=4))
        tree.grow(place, read, ids, [-1.0 - number for number in range(len(ids))])
    return tree


def completions_of(episodes: Sequence[TokenTree], forks: bool = True) -> Completions:
    width, prompt = max(len(each.token_ids) for each in episodes), max(len(each.prompt_ids) for each in episodes)

    def rows(name: str, fill: Any) -> Tensor:
        return torch.tensor([[*getattr(each, name), *[fill] * (width - len(getattr(each, name)))] for each in episodes])

    lengths = torch.tensor([[len(each.token_ids)] for each in episodes])
    pads = [prompt - len(each.prompt_ids) for each in episodes]
    return Completions(
        prompt_ids=torch.tensor([[*[0] * pad, *each.prompt_ids] for pad, each in zip(pads, episodes)]),
        prompt_mask=torch.arange(prompt) >= torch.tensor(pads)[:, None],
        response_ids=rows("token_ids", 0),
        response_mask=rows("written", 0).bool(),
        sampler_logprobs=rows("logprobs", 0.0),
        ended=torch.ones(len(episodes), dtype=torch.bool),
        group_id=torch.tensor([PROMPTS.index(each.prompt_ids) for each in episodes]),
        attended=torch.arange(width) < lengths,
        turn=torch.zeros(len(episodes), width, dtype=torch.long),
        follows=rows("follows", 0) if forks else None,
    )


def policy(dtype: torch.dtype = torch.float64) -> Any:
    return LanguageModel("tiny").load().to(dtype).eval()


@pytest.fixture(scope="module")
def exact() -> Any:
    return policy()


# ------------------------------------------------------------------ the branches of a row


@settings(max_examples=150, deadline=None)
@given(st.lists(trees(), min_size=1, max_size=3))
def test_each_sampled_token_is_wanted_once_behind_what_was_read(episodes: list[TokenTree]) -> None:
    completions = completions_of(episodes)
    branches = branches_of(completions)
    rows = branches.rows
    assert int(rows.response_mask.sum()) == sum(sum(each.written) for each in episodes), "each once"
    assert not (rows.response_mask & ~rows.attended).any() and rows.follows is None
    for i, tree in enumerate(episodes):
        for column, ours in enumerate(tree.written):
            if not ours:
                continue
            row, there = int(branches.branch[i, column]), int(branches.column[i, column])
            text = [
                *rows.prompt_ids[row][rows.prompt_mask[row]].tolist(),
                *rows.response_ids[row, : there + 1].tolist(),
            ]
            assert text == tree.text(column) and rows.response_mask[row, there]
            assert rows.sampler_logprobs[row, there] == tree.logprobs[column]
        own = branches.branch[i][completions.response_mask[i]]
        assert 1 <= len(own.unique()) <= tree.branches
        most = len(tree.prompt_ids)
        assert (rows.prompt_mask[own.unique()].sum(1) <= most).all(), "no wider prompt than is planned for"
    numbers = torch.arange(rows.response_ids.numel(), dtype=torch.float64).view(rows.response_ids.shape)
    folded = branches.fold(numbers)
    assert (folded[~completions.response_mask] == 0).all()
    assert folded[completions.response_mask].unique().numel() == int(completions.response_mask.sum())


@settings(max_examples=50, deadline=None)
@given(st.lists(trees(), min_size=2, max_size=4), st.data())
def test_rows_are_selected_trimmed_and_joined_with_their_branches(
    episodes: list[TokenTree], data: st.DataObject
) -> None:
    whole = completions_of(episodes)
    number = data.draw(st.integers(0, len(episodes) - 1))
    alone, part = completions_of([episodes[number]]), trim(select(whole, torch.tensor([number])))
    for name in ("response_ids", "follows", "response_mask", "prompt_ids"):
        assert torch.equal(getattr(part, name), getattr(alone, name)), name
    joined = join_completions(alone, whole)
    assert torch.equal(
        joined.follows[1:, : whole.response_ids.shape[1]] * whole.attended, whole.follows * whole.attended
    )
    plain = completions_of([episodes[number]], forks=False)
    assert torch.equal(tokens_read(plain), plain.attended.sum(1))
    straight = join_completions(plain, whole)
    columns = torch.arange(plain.response_ids.shape[1]) - 1
    assert torch.equal(straight.follows[0, : len(columns)], columns), "each behind the one before it"
    places = [len(tree.path(last)) for tree in episodes for last in _ends(tree)]
    assert int(tokens_read(whole).sum()) == sum(places) - sum(len(tree.prompt_ids) for tree in episodes)


def _ends(tree: TokenTree) -> list[int]:
    return [place for place in range(len(tree.token_ids)) if place not in tree.follows]


def test_a_tree_by_hand() -> None:
    """A prompt, a turn, an answer and a turn; a second turn behind the first answer; a new text that begins alike."""
    tree = TokenTree()
    tree.begin([11, 12, 13, 14])
    tree.grow(-1, [], [30, 31], [-1.0, -2.0])
    tree.grow(1, [40], [32], [-3.0])
    assert tree.walk(1, [40]) == (2, []) and tree.branches == 1 and tree.branches_with(2) == 2
    tree.grow(2, [], [33], [-4.0])
    place, read = tree.walk(tree.root, [11, 12, 50, 51])
    assert (place, read) == (-3, [50, 51]) and tree.branches_with(place) == 3
    tree.grow(place, read, [34], [-5.0])
    assert tree.follows == [-1, 0, 1, 2, 2, -3, 5, 6] and tree.written == [1, 1, 0, 1, 1, 0, 0, 1]
    assert [tree.text(end) for end in _ends(tree)] == [
        [11, 12, 13, 14, 30, 31, 40, 32],
        [11, 12, 13, 14, 30, 31, 40, 33],
        [11, 12, 50, 51, 34],
    ]
    rows = branches_of(completions_of([tree])).rows
    assert rows.response_mask.sum(1).tolist() == [3, 1, 1] and rows.group_id.tolist()[:2] == [0, 0]
    assert rows.group_id[2] not in (0, 1), "another prompt is no prompt of the group"
    assert rows.prompt_mask.sum(1).tolist() == [4, 4, 4]
    assert tokens_read(completions_of([tree])).tolist() == [8 + 8 + 5 - 4]


# ------------------------------------------------------------------ scores, loss and gradient


def own_forward(model: Any, tree: TokenTree) -> list[Tensor]:
    """Log-probs of an episode's sampled tokens, each by a pass of its own over the text that was read."""
    found = []
    for place, ours in enumerate(tree.written):
        if ours:
            ids = torch.tensor([tree.text(place)])
            found.append(model(ids[:, :-1]).logits[0, -1].double().log_softmax(-1)[ids[0, -1]])
    return found


@settings(max_examples=15, deadline=None)
@given(episodes=st.lists(trees(3), min_size=1, max_size=3))
def test_loss_and_gradient_are_those_of_the_texts_scored_apart(exact: Any, episodes: list[TokenTree]) -> None:
    model = exact
    completions, weights = completions_of(episodes), list(model.parameters())
    factor = torch.linspace(-1, 2, completions.response_ids.numel(), dtype=torch.float64).view_as(completions.follows)
    scores = score(model, completions, SAMPLING, entropy=True)
    mask = completions.response_mask
    ours = (scores.logprobs.double() * factor)[mask].sum()
    apart = torch.stack([logprob for tree in episodes for logprob in own_forward(model, tree)])
    torch.testing.assert_close(scores.logprobs[mask].double(), apart, atol=1e-8, rtol=0)
    theirs = (apart * factor[mask]).sum()
    for mine, other in zip(torch.autograd.grad(ours, weights), torch.autograd.grad(theirs, weights), strict=True):
        torch.testing.assert_close(mine, other, atol=3e-6, rtol=1e-5)  # norms are float32
    assert scores.entropy is not None and (scores.entropy[mask] >= 0).all()


@pytest.mark.parametrize("critic", [SeparateCritic(), SharedTrunk()], ids=["separate", "shared"])
def test_values_are_those_of_the_texts(critic: Any, exact: Any) -> None:
    tree = TokenTree()
    tree.begin(PROMPTS[0])
    tree.grow(-1, [], [30, 31], [-1.0] * 2)
    tree.grow(0, [40], [32, 33], [-1.0] * 2)
    tree.grow(tree.root, [50, 51, 52, 53, 54, 55], [34], [-1.0])
    completions, module = completions_of([tree]), critic.module(exact)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        values = critic.values(exact, module, completions)
        scores, same = critic.scores_and_values(exact, module, completions, SAMPLING)
        torch.testing.assert_close(values, same)
        torch.testing.assert_close(scores.logprobs, score(exact, completions, SAMPLING).logprobs)
        for place, ours in enumerate(tree.written):
            text = TokenTree()
            text.begin(tree.text(place)[:-1])
            text.grow(-1, [], tree.text(place)[-1:], [-1.0])
            plain = replace(completions_of([tree]), follows=None)
            one = {"prompt_ids": torch.tensor([text.prompt_ids]), "response_ids": torch.tensor([text.token_ids])}
            one |= {"prompt_mask": one["prompt_ids"] > 0, "response_mask": one["response_ids"] > 0, "attended": None}
            alone = replace(plain, **one, turn=None, sampler_logprobs=torch.zeros(1, 1))
            expected = critic.values(exact, module, alone)[0, 0] if ours else torch.zeros(())
            torch.testing.assert_close(values[0, place], expected.to(values.dtype))


@pytest.mark.parametrize("reduction", ["sequence_mean", "token_mean"])
def test_an_episode_is_the_sequence(reduction: str, exact: Any) -> None:
    """The mean over sequences weighs each episode alike, however many texts it has; the mean over tokens each token."""
    fork, line = TokenTree(), TokenTree()
    for tree in (fork, line):
        tree.begin(PROMPTS[0])
        tree.grow(-1, [], [30, 31], [-1.0] * 2)
    fork.grow(fork.root, [41, 42], [33], [-1.0])
    completions = completions_of([fork, line])
    logprobs = score(exact, completions, SAMPLING).logprobs.detach()
    mask, advantages = completions.response_mask, torch.tensor([1.0, -1.0])
    tokens, _ = policy_losses.clipped_policy_loss(logprobs, logprobs, advantages, mask)
    totals = reductions.StepTotals(torch.tensor(2.0), torch.tensor(5.0), torch.tensor(2.0), 1)
    found = getattr(reductions, reduction)(tokens, mask, totals)
    expected = {"sequence_mean": (-1 + 1) / 2, "token_mean": (-3 + 2) / 5}[reduction]
    assert float(found) == pytest.approx(expected, abs=1e-6)


# ------------------------------------------------------------------ training


def module_of(method: Any = GRPO, **settings: Any) -> Any:
    env = RolloutFunction(forking, max_tokens=24, max_branches=3)
    given = {"sampling": SAMPLING, "group_size": 4, "optimizer": ByPath("torch.optim.SGD", lr=0.05)}
    return method(LanguageModel("tiny"), letters, env=env, **{**given, "scheduler": Constant(), **settings})


def fit(module: Any, folder: Path, steps: int = 2, *, ckpt_path: Path | None = None, **settings: Any) -> L.Trainer:
    trainer = quiet_trainer(folder, **{"max_epochs": -1, "max_steps": steps, **settings})
    rows = [{"prompt": f"{number}="} for number in range(8)]
    data = RolloutDataModule(rows=rows, prompts_per_rollout=4, val_fraction=0.0)
    trainer.fit(module, data, ckpt_path=ckpt_path, weights_only=False)
    return trainer


def same_weights(one: Any, other: Any, **tolerance: float) -> None:
    state = other.policy.state_dict()
    for name, tensor in one.policy.state_dict().items():
        torch.testing.assert_close(tensor, state[name], **{"atol": 0.0, "rtol": 0.0, **tolerance})


def test_episodes_are_the_members_of_a_group_and_the_generator_drew_what_is_scored(tmp_path: Path) -> None:
    module = module_of()
    trainer = fit(module, tmp_path, 1)
    rollout, completions = module.rollout, module.rollout.completions
    assert len(completions) == 16 and completions.follows is not None, "a row is an episode"
    assert (rollout.advantages.view(4, 4, -1).sum(1).abs() < 1e-4).all(), "in its group each counts once"
    before = LanguageModel("tiny").load().eval()
    drawn = score(before, completions, SAMPLING).logprobs
    mask = completions.response_mask
    torch.testing.assert_close(drawn[mask], completions.sampler_logprobs[mask], atol=1e-4, rtol=0)
    episodes = module.scored.completions.episodes
    assert [each.branches for each in episodes[:4]] == [1, 1, 2, 2]
    assert [each.forks for each in episodes[:4]] == [[], [], [[2, -1]], [[2, None]]]
    assert [each.turns for each in episodes[:4]] == [1, 2, 3, 3]
    assert [message["role"] for message in episodes[2].messages] == ["assistant", "user", "assistant", "assistant"]
    metrics = trainer.callback_metrics
    assert metrics["train/branches/mean"] == 1.5 and metrics["train/branches/max"] == 2
    assert metrics["train/branches/forked"] == 0.5 and metrics["train/branches/refused"] == 0
    assert "turn 2 goes on from the prompt" in module.samples["completion"][2]
    assert module.samples["branches"][:4] == [1, 1, 2, 2]


def test_how_a_step_is_cut_changes_no_weight(tmp_path: Path) -> None:
    whole, cut = module_of(), module_of()
    fit(whole, tmp_path)
    fit(cut, tmp_path, accumulate_grad_batches=4)
    same_weights(whole, cut, atol=2e-6)
    start = LanguageModel("tiny").load().state_dict()
    moved = max(float((value - start[name]).abs().max()) for name, value in whole.policy.state_dict().items())
    assert moved > 1e-4
    planned = whole.step_facts().lengths
    whole.env.max_branches = 1
    alone = whole.step_facts().lengths
    assert (planned.texts, planned.shares, alone.texts, alone.shares) == (3, False, 1, True), (
        "memory is planned for all"
    )


def test_a_rollout_in_a_file_forks_as_it_did(exact: Any) -> None:
    tree = TokenTree()
    tree.begin(PROMPTS[1])
    tree.grow(-1, [], [30], [-1.0])
    tree.grow(tree.root, [40], [31], [-2.0])
    completions = completions_of([tree])
    again = checkpoints.completions_from_plain(checkpoints.to_plain(completions), torch.device("cpu"))
    torch.testing.assert_close(
        score(exact, again, SAMPLING).logprobs, score(exact, completions, SAMPLING).logprobs, atol=0, rtol=0
    )


def test_what_reads_one_text_alone_is_refused() -> None:
    env = RolloutFunction(forking, max_branches=2)
    for key, term in (
        ("algo.echo_coef=0.1", {"echo_coef": 0.1}),
        ("algo.teacher", {"teacher": ModelTeacher("tiny")}),
    ):
        with pytest.raises(ConfigError, match=f"{key} reads .*env.max_branches=2"):
            GRPO("tiny", letters, env=env, **term)
    with pytest.raises(ConfigError, match="env=RolloutFunction: a function of yours writes the prompts.*=model"):
        GRPO("tiny", letters, env=RolloutFunction(forking), teacher=SelfTeacher(ColumnContext("hint")))
    with pytest.raises(ConfigError, match="algo.reward_adapter .*env.max_branches=2"):
        PPO(
            LanguageModel("tiny", lora=Lora(r=2)), letters, env=env, reward_adapter="owner/reward", critic=SharedTrunk()
        )


def test_metrics_by_hand() -> None:
    def episode(**values: Any) -> Episode:
        return Episode("?", [{"role": "assistant", "content": "a"}], **{"end": "done", "turns": 1, **values})

    many = [episode(branches=1), episode(branches=3, read_again=8), episode(branches=2, end="max_branches")]
    averages = Averages()
    averages.add(episode_metrics([*many, episode(branches=1)], Ranks()))
    found = {name: value for name, value in averages.reduce().items() if name.startswith("branches/")}
    assert found == {
        "branches/mean": 1.75,
        "branches/max": 3.0,
        "branches/forked": 0.5,
        "branches/refused": 0.25,
        "branches/read_again": 2.0,
    }
    assert many[2].cut and not math.isnan(found["branches/mean"])
    assert not any(name.startswith("branches/") for name in episode_metrics([episode()], Ranks()))
