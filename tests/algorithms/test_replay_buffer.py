"""Good groups of earlier rollouts in the place of those that teach nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_rollouts import EachBatch, completions, rollout, trainer

from lit_rl.algorithms import GRPO, AdamW, Constant
from lit_rl.algorithms.data_parallel import Ranks
from lit_rl.algorithms.terms.groups import GroupReplay
from lit_rl.core.rollout import Rollout, Sampling, columns_of, select, trim_rollout
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Addition
from lit_rl.ops.policy_losses import clipped_policy_loss
from lit_rl.ops.reductions import Metrics


def learned(buffer: GroupReplay, fresh: Rollout, seed: int = 3) -> Rollout:
    """What is learned from instead of this."""
    return buffer(fresh, seed=seed, ranks=Ranks())[0]


def means(metrics: Metrics) -> dict[str, float]:
    return {name: float(a / b) if b else 0.0 for name, (a, b) in metrics.items()}  # pyright: ignore


SIZES = st.sampled_from([0.0, 0.0, 0.5, 1.0, 2.0, 3.0])


def rollout_of(sizes: list[float], version: int, *, per_token: bool = False, width: int = 3) -> Rollout:
    """Groups of two, one reward up and one down by the size; 0 is a group that teaches nothing."""
    count = 2 * len(sizes)
    drawn = completions([1 + (i + version) % width for i in range(count)], 2, version=version, first=1000 * version + 1)
    rewards = torch.tensor([sign * size for size in sizes for sign in (1.0, -1.0)])
    ids = drawn.response_ids.float()
    return rollout(
        rewards,
        rewards[:, None] * drawn.response_mask if per_token else rewards,
        drawn,
        old_logprobs=-ids / 7,
        weights=ids / 3,
        ref_logprobs=-ids / 9,
    )


def groups(rollout: Rollout) -> list[Rollout]:
    """One for each group, without padding, under group id 0."""
    return [trim_rollout(select(rollout, torch.tensor([2 * i, 2 * i + 1]))) for i in range(len(rollout) // 2)]


def same(a: Rollout, b: Rollout) -> bool:
    """In every tensor but the group's number."""
    pairs = zip((*columns_of(a), *columns_of(a.completions)), (*columns_of(b), *columns_of(b.completions)), strict=True)
    fields = [(x, y) for (name, _, x), (_, _, y) in pairs if name != "group_id"]
    assert len(fields) > 15
    return all((x is None and y is None) or (x.shape == y.shape and torch.equal(x, y)) for x, y in fields)


def score_of(group: Rollout) -> float:
    """By hand: the sizes of the advantages of two rows times the deviation of their rewards."""
    return float(group.advantages.abs().sum() * (group.rewards[0] - group.rewards[1]).abs() / 2**0.5)


RUNS = st.lists(st.lists(SIZES, min_size=1, max_size=4), min_size=1, max_size=5)


@given(RUNS, st.integers(1, 5), st.booleans())
def test_flat_groups_are_replaced_by_stored_ones_and_nothing_else_changes(runs, size, per_token):
    buffer, stored = GroupReplay(size), []
    for version, sizes in enumerate(runs):
        fresh = rollout_of(sizes, version, per_token=per_token, width=2 + version % 3)
        out, metrics = buffer(fresh, seed=3, ranks=Ranks())
        logged = means(metrics)
        assert torch.equal(out.completions.group_id, fresh.completions.group_id)
        replaced = []
        for before, after, was in zip(groups(fresh), groups(out), sizes):
            if was:
                assert same(before, after)
            elif not same(before, after):
                replaced.append(next(i for i, group in enumerate(stored) if same(group, after)))
        flat = sizes.count(0.0)
        assert len(replaced) == len(set(replaced)) == min(flat, len(stored))
        assert logged["replay/groups"] == len(replaced)
        ages = [version - stored[i].completions.version for i in replaced]
        assert logged["replay/age"] == pytest.approx(sum(ages) / len(ages) if ages else 0.0)
        stored = sorted([*stored, *(g for g, s in zip(groups(fresh), sizes) if s)], key=score_of, reverse=True)[:size]
        kept = [value for value, _ in buffer._groups]
        assert kept == sorted(kept, reverse=True) and len(kept) <= size
        assert kept == pytest.approx([score_of(group) for group in stored])


def test_an_unscored_group_is_replaced_too_and_never_stored():
    buffer = GroupReplay(4)
    good = learned(buffer, rollout_of([1.0], 0))
    nothing = rollout_of([0.0], 1)
    nothing = select(nothing, torch.tensor([0, 1]))
    nothing.rewards.fill_(torch.nan)
    assert same(groups(learned(buffer, nothing))[0], groups(good)[0])
    assert len(buffer._groups) == 1


def test_groups_are_drawn_in_proportion_to_their_scores():
    drawn = []
    for seed in range(400):
        buffer = GroupReplay(4)
        learned(buffer, rollout_of([1.0, 2.0], 0), seed)  # scores in the proportion of 1 to 4
        drawn.append(float(learned(buffer, rollout_of([0.0], 1), seed).rewards[0]))
    assert drawn.count(2.0) / len(drawn) == pytest.approx(0.8, abs=0.05)


def test_another_number_of_ranks_shares_the_groups_out_by_their_scores():
    """Two ranks' buffers to three and to one: no group twice, none lost that there is room for."""
    first, second = GroupReplay(3), GroupReplay(3)
    learned(first, rollout_of([1.0, 3.0, 0.5], 0))
    learned(second, rollout_of([2.0, 0.0], 1))
    saved = [buffer.state() for buffer in (first, second)]
    best = [score_of(group) for group in groups(rollout_of([3.0, 2.0, 1.0, 0.5], 0))]
    for world_size, expected in ((3, [[best[0], best[3]], [best[1]], [best[2]]]), (1, [best[:3]])):
        for rank, scores in enumerate(expected):
            again = GroupReplay(3)
            again.load_state(again.redistribute(saved, rank, world_size))
            assert [score for score, _ in again._groups] == pytest.approx(scores)
            assert again._rollouts == 1


# ---------------------------------------------------------------------- in a run


def test_the_ratio_of_a_replayed_group_is_to_the_policy_that_sampled_it(tmp_path):
    """Its old log-probs are those of its own rollout, and the loss compares the policy now with exactly these."""

    def even(completions: list[str], answer: list[str]) -> list[float]:
        return [float(len(text) % 2 == 0) if int(a) % 2 else 1.0 for text, a in zip(completions, answer)]

    seen_by_loss: list[tuple[torch.Tensor, torch.Tensor]] = []

    def loss(logprobs, old_logprobs, advantages, mask):
        seen_by_loss.append((logprobs.detach().clone(), old_logprobs.clone()))
        return clipped_policy_loss(logprobs, old_logprobs, advantages, mask)

    module = GRPO(
        "tiny", even, replay=GroupReplay(8), loss=loss, group_size=4, sampling=Sampling(max_new_tokens=4),
        optimizer=AdamW(lr=3e-3), scheduler=Constant(),
    )  # fmt: skip
    assert module.ratio_is_one and module.needs_old_logprobs
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]
    looks = EachBatch(lambda m: m.rollout)
    fit = trainer(tmp_path, max_steps=4, max_epochs=-1, callbacks=[looks])
    seen_by_loss.clear()
    fit.fit(module, datamodule=RolloutDataModule(rows=rows, prompts_per_rollout=8, val_fraction=0))

    earlier: dict[tuple[int, ...], list[torch.Tensor]] = {}
    replayed = 0
    for drawn, (now, old) in zip(looks.seen, seen_by_loss, strict=True):
        ids, mask, prompts = drawn.completions.response_ids, drawn.completions.response_mask, drawn.completions
        assert torch.equal(old[mask[:, : old.shape[1]]], drawn.old_logprobs[mask])
        for row in range(len(drawn)):
            text = (*prompts.prompt_ids[row][prompts.prompt_mask[row]].tolist(), -1, *ids[row][mask[row]].tolist())
            mine = drawn.old_logprobs[row][mask[row]]
            if not torch.allclose(now[row, : len(mine)], mine, atol=1e-5):  # of an earlier policy
                assert any(torch.equal(known, mine) for known in earlier[text])
                replayed += 1
            earlier.setdefault(text, []).append(mine)
    assert replayed > 0


@pytest.mark.parametrize("size", [8, None])
def test_stored_groups_teach_in_a_rollout_without_any_reward(tmp_path, size):
    """Without a buffer such a rollout moves no weight."""
    called: list[int] = []

    def once(completions: list[str], answer: list[str]) -> list[float | None]:
        called.append(len(completions))
        return [float(len(text) % 2 == 0) if len(called) == 1 else None for text in completions]

    module = GRPO(
        "tiny", once, replay=None if size is None else GroupReplay(size), group_size=4,
        sampling=Sampling(max_new_tokens=4, temperature=1.5), optimizer=AdamW(lr=1e-3), scheduler=Constant(),
    )  # fmt: skip
    looks = EachBatch(lambda one: torch.cat([weight.detach().flatten() for weight in one.policy.parameters()]))
    data = RolloutDataModule(task=Addition(max_operand=9, val_rows=4), prompts_per_rollout=8)
    trainer(tmp_path, max_steps=2, max_epochs=-1, callbacks=[looks]).fit(module, datamodule=data)
    first, second = looks.seen
    assert called == [32, 32] and torch.equal(first, second) is (size is None)


def odd_length(completions: list[str], answer: list[str]) -> list[float]:
    """Of the answer and the completion together, so that a reward belongs to its row of the data."""
    return [float((len(text) + len(right)) % 2) if int(right) % 3 else 0.0 for text, right in zip(completions, answer)]


def test_samples_and_metrics_are_of_what_was_drawn(tmp_path, monkeypatch):
    drawn, read = [], []
    draw = GRPO.draw

    def counted(self, *args, **more):
        completions = draw(self, *args, **more)
        drawn.append(int(completions.lengths.sum()))
        read.append(int(completions.attention_mask.sum()))
        return completions

    monkeypatch.setattr(GRPO, "draw", counted)
    module = GRPO(
        "tiny", odd_length, group_size=2, replay=GroupReplay(16), sampling=Sampling(max_new_tokens=4, temperature=1.5),
        optimizer=AdamW(lr=1e-3), scheduler=Constant(),
    )  # fmt: skip
    looks = EachBatch(lambda one: (one.samples, dict(one.trainer.callback_metrics), one.rollout.completions.lengths))
    data = RolloutDataModule(task=Addition(max_operand=9, val_rows=4), prompts_per_rollout=8)
    trainer(tmp_path, max_steps=6, max_epochs=-1, callbacks=[looks]).fit(module, datamodule=data)
    replayed = 0.0
    for step, (samples, metrics, lengths) in enumerate(looks.seen):
        assert samples["reward"] == odd_length(samples["completion"], samples["answer"])
        answers = [str(sum(map(int, prompt.rstrip("=").split("+")))) for prompt in samples["prompt"]]
        assert answers == samples["answer"]
        assert sum(samples["length"]) == drawn[step]
        assert metrics["train/completions/mean_length"] == pytest.approx(drawn[step] / 16)
        assert metrics["train/num_tokens"] == sum(drawn[: step + 1])
        assert metrics["train/num_input_tokens_seen"] == sum(read[: step + 1])
        replayed += float(metrics["train/replay/groups"]) * (lengths.tolist() != samples["length"])
        pairs = [[samples[key][i : i + 2] for key in ("reward", "advantage")] for i in range(0, 16, 2)]
        assert all((rewards[0] == rewards[1]) == (advantages == [0, 0]) for rewards, advantages in pairs)
    assert replayed > 0, "nothing was replayed, so nothing was tested"
