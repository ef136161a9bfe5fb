"""Episodes in training: they are learned from, rewarded, unscored where they fail, and the same after a resume."""

from __future__ import annotations

import asyncio
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from composed_configs import tree_of
from copied_engines import CopiedPolicyGenerator
from small_rollouts import EachBatch
from small_rollouts import trainer as quiet_trainer
from tiers import quick

from lit_rl.algorithms import GRPO, PPO, RLOO, Evaluation, Reinforce
from lit_rl.algorithms.data_parallel import Ranks
from lit_rl.algorithms.evaluation.summary_statistics import Averages
from lit_rl.algorithms.loop.on_policy import OnPolicyModule
from lit_rl.algorithms.optim.optimizers import ByPath
from lit_rl.algorithms.rollouts import checkpoints
from lit_rl.algorithms.rollouts.episode_outcomes import check_failures, episode_metrics, sound_rows
from lit_rl.algorithms.terms.credit import TurnRewardWarning
from lit_rl.algorithms.terms.groups import GroupReplay
from lit_rl.callbacks import PreferenceSets
from lit_rl.cli.build import build, check_answered
from lit_rl.core.episode import Episode
from lit_rl.core.errors import ConfigError, GenerationError, RewardError
from lit_rl.core.rollout import Completions, Rollout, Sampling, join_completions, select
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Repeated
from lit_rl.environments import CustomEnvironment, FunctionTools
from lit_rl.environments.games import PROMPT, GuessNumber
from lit_rl.generation import RolloutFunction
from lit_rl.generation.hf import HFContinuousGenerator, HFGenerator
from lit_rl.generation.native import NativeGenerator
from lit_rl.generation.vllm.server import VLLMServerGenerator
from lit_rl.models import LanguageModel, forward
from lit_rl.models.shared_prefix import run_shared
from lit_rl.ops.returns import centered_turns, gae_of_turns, gigpo, process_supervised
from lit_rl.rewards import Rewards, environment, from_paths

METHODS: dict[str, Any] = {"grpo": GRPO, "rloo": RLOO, "reinforce": Reinforce, "ppo": PPO}
SAMPLED = Sampling(max_new_tokens=4)


def guessing(make: Any = GuessNumber, **limits: Any) -> CustomEnvironment:
    return CustomEnvironment(make, **{"max_turns": 3, "max_tokens": 24, "max_observation_tokens": 8, **limits})


def module_of(method: Any = GRPO, *, reward: Any = environment, env: Any = None, **settings: Any) -> Any:
    env = guessing() if env is None else env
    settings = {"sampling": SAMPLED, "group_size": 4, **settings}
    return method(LanguageModel("tiny"), reward, env=env, **settings)


def trainer_of(tmp_path: Path, steps: int = 1, **settings: Any) -> L.Trainer:
    ours = {"gradient_clip_val": 1.0, "max_epochs": -1, "max_steps": steps, "limit_val_batches": 1.0}
    return quiet_trainer(tmp_path, **ours | settings)


def prompts(**settings: Any) -> RolloutDataModule:
    return RolloutDataModule(task=Repeated(PROMPT, train_rows=64, val_rows=8), **{"prompts_per_rollout": 4, **settings})


def drawn(module: Any, tmp_path: Path) -> Completions:
    """The completions of the first rollout."""
    looks = EachBatch(lambda module: module.scored.completions)
    trainer_of(tmp_path, callbacks=[looks]).fit(module, prompts())
    return looks.seen[0]


# ------------------------------------------------------------------ learning


def rewarded() -> EachBatch:
    return EachBatch(lambda module: float(module.trainer.callback_metrics["train/reward"]))


def rewards_of(form: list[str], imitated: int, game: list[str], steps: int, tmp_path: Path) -> list[float]:
    """What each rollout of a game was worth, after its form was imitated."""
    tree = tree_of(*form)
    taught = build(tree["algo"])
    trainer_of(tmp_path, imitated).fit(taught, build(tree["data"]))
    for part in (taught.policy, taught.tokenizer):
        part.save_pretrained(tmp_path / "hf")
    tree = tree_of(*game, f"model.name={tmp_path / 'hf'}")
    looks = rewarded()
    trainer_of(tmp_path, steps, callbacks=[looks]).fit(build(tree["algo"]), build(tree["data"]))
    return looks.seen


@pytest.mark.all
def test_a_game_of_several_turns_is_learned(tmp_path: Path) -> None:
    """By the shipped experiments: the form by imitation, and then to read the hints: without them the best wins 0.4."""
    seen = rewards_of(["experiment=guess_sft"], 80, ["experiment=guess"], 30, tmp_path)
    before, after = sum(seen[:3]) / 3, sum(seen[-5:]) / 5
    assert after > 0.55 and after > before + 0.08, (before, after)


@pytest.mark.exhaustive
def test_sums_of_a_generator_are_learned(tmp_path: Path) -> None:
    """By the shipped experiment, which has no turns and imitates nothing; exact answers are paid."""
    pytest.importorskip("reasoning_gym")
    tree, looks = tree_of("experiment=chain_sum"), rewarded()
    trainer_of(tmp_path, 70, callbacks=[looks]).fit(build(tree["algo"]), build(tree["data"]))
    before, after = sum(looks.seen[:5]) / 5, sum(looks.seen[-10:]) / 10
    assert before < 0.1 and after > 0.18, (before, after)


def test_an_episode_of_one_turn_is_a_completion(tmp_path: Path) -> None:
    """With an environment that ends it there and without one: the same tokens, and the same weights to the bit."""

    def evens(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        return [float(sum(token % 2 == 0 for token in ids)) for ids in completion_ids]

    kept = []
    for env in (None, guessing(max_turns=1)):
        method = partial(GRPO, LanguageModel("tiny"), evens, sampling=SAMPLED, group_size=4)
        module = method() if env is None else method(env=env)
        trainer = trainer_of(tmp_path, 2)
        trainer.fit(module, prompts())
        assert trainer.callback_metrics["train/grad_norm"] > 0
        kept.append((module.scored.completions, list(module.policy.parameters())))
    (plain, weights), (episodes, others) = kept
    assert torch.equal(plain.response_ids, episodes.response_ids)
    assert torch.equal(plain.response_mask, episodes.response_mask)
    assert all(torch.equal(mine, its) for mine, its in zip(weights, others, strict=True))


@pytest.mark.parametrize("method", quick(list(METHODS), {"ppo"}))
def test_every_method_learns_from_episodes(method: str, tmp_path: Path) -> None:
    module = module_of(METHODS[method])
    trainer = trainer_of(tmp_path, 4)  # one rollout of PPO
    trainer.fit(module, prompts())
    rollout = module.rollout
    assert rollout.completions.attended is not None
    heard = rollout.completions.attended & ~rollout.completions.response_mask
    assert heard.any() and not rollout.loss_mask[heard].any()
    metrics = trainer.callback_metrics
    assert 1 <= metrics["train/turns/mean"] <= 3 and metrics["train/completions/observation_length"] > 0
    assert metrics["train/env/failed"] == metrics["train/env/timeouts"] == 0
    assert 0 < metrics["time/environment"] < metrics["time/generate"]


def test_stored_episodes_are_learned_from_as_they_were(tmp_path: Path) -> None:
    """Every group but those of the first rollout teaches nothing, so the second learns from episodes of the first."""
    looks = EachBatch(lambda module: module.rollout)
    kept = looks.seen

    def paid(completion_ids: Sequence[Any], **_: Any) -> list[float]:
        return [0.0 if kept else float(row % 4) for row in range(len(completion_ids))]

    trainer = trainer_of(tmp_path, 2, callbacks=[looks])
    trainer.fit(module_of(reward=paid, replay=GroupReplay(8)), prompts())
    assert trainer.callback_metrics["train/replay/groups"] == 4
    known = episodes_of(kept[0])
    assert any(any(heard) for *_, heard in known)
    assert all(episode in known for episode in episodes_of(kept[1]))


def episodes_of(rollout: Rollout) -> list[tuple[list[int], list[bool], list[bool]]]:
    """Of each: its tokens, which of them are learned from, and which were heard."""
    drawn = rollout.completions
    assert drawn.attended is not None
    heard = drawn.attended & ~drawn.response_mask
    return [
        (drawn.response_ids[row, there].tolist(), rollout.loss_mask[row, there].tolist(), heard[row, there].tolist())
        for row, there in enumerate(drawn.attended)
    ]


def paid_by_turn(episodes: Sequence[Mapping[str, Any]]) -> list[list[tuple[int, float]]]:
    """Each turn is paid by what it says."""
    said = [[m["content"] for m in episode["messages"] if m["role"] == "assistant"] for episode in episodes]
    return [[(turn, float(sum(map(ord, text)) % 7)) for turn, text in enumerate(texts)] for texts in said]


@pytest.mark.parametrize(("method", "estimator"), [("grpo", gigpo), ("ppo", gae_of_turns)])
def test_turns_are_credited_one_by_one(method: str, estimator: Any, tmp_path: Path) -> None:
    """All tokens of a turn have its credit, and turns of one episode have others."""
    module = module_of(METHODS[method], reward=paid_by_turn, advantage=estimator, whitening=None)
    trainer_of(tmp_path).fit(module, prompts())
    rollout = module.rollout
    turn, mask = rollout.completions.turn, rollout.completions.response_mask
    several = (turn.masked_fill(~mask, 0).amax(1) > 0).nonzero().flatten().tolist()
    assert several and not rollout.advantages[~mask].any()
    credits = [
        {(int(k), float(a)) for k, a in zip(turn[row][mask[row]], rollout.advantages[row][mask[row]])}
        for row in several
    ]
    assert all(len(credit) == len({k for k, _ in credit}) for credit in credits)
    assert any(len({a for _, a in credit}) > 1 for credit in credits)


def test_normalised_rewards_of_turns_are_warned_of_once(tmp_path: Path) -> None:
    """Whatever the reward function is called; rewards of whole episodes and other estimators are no trap."""
    module = module_of(reward=paid_by_turn, advantage=process_supervised)
    words = "process_supervised compares the reward of a turn.*algo/advantage=centered_turns"
    with pytest.warns(UserWarning, match=words) as caught:
        trainer_of(tmp_path, 2).fit(module, prompts())
    assert sum("process_supervised compares" in str(each.message) for each in caught) == 1
    scored = module.scored
    whole = replace(scored, scores=replace(scored.scores, span_rewards=None))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TurnRewardWarning(process_supervised).check(whole)
        TurnRewardWarning(centered_turns).check(scored)
    with pytest.warns(UserWarning, match=words):
        TurnRewardWarning(partial(process_supervised, eps=1e-6)).check(scored)


def draft_and_answer(texts: Sequence[str], trainer: Any) -> dict[str, Any]:
    """Two turns, with a token between them that the policy reads."""
    draft = trainer.generate([trainer.encode(text) for text in texts])
    turns = [[*prompt, *said, 61] for prompt, said in zip(draft["prompt_ids"], draft["completion_ids"])]
    answer = trainer.generate(turns)
    pairs = list(zip(draft["completion_ids"], answer["completion_ids"]))
    logprobs = list(zip(draft["logprobs"], answer["logprobs"]))
    return {
        "prompt_ids": draft["prompt_ids"],
        "completion_ids": [[*first, 61, *second] for first, second in pairs],
        "logprobs": [[*first, 0.0, *second] for first, second in logprobs],
        "env_mask": [[1] * len(first) + [0] + [1] * len(second) for first, second in pairs],
        "drafted": [len(first) for first, _ in pairs],
    }


def drafts(completions: Sequence[str], drafted: Sequence[int]) -> list[float]:
    return [float(length) for length in drafted]


@pytest.mark.parametrize("method", quick(list(METHODS), {"grpo"}))
def test_every_method_learns_from_what_a_function_made(method: str, tmp_path: Path) -> None:
    env = RolloutFunction(draft_and_answer, columns=["drafted"], max_tokens=12)
    module = module_of(METHODS[method], env=env, reward=drafts)
    trainer = trainer_of(tmp_path, 4)  # one rollout of PPO
    trainer.fit(module, prompts())
    completions = module.rollout.completions
    assert completions.attended is not None
    heard = completions.attended & ~completions.response_mask
    assert (heard.sum(1) == 1).all() and not module.rollout.loss_mask[heard].any()
    assert (completions.response_ids[heard] == 61).all()
    assert trainer.callback_metrics["train/turns/mean"] == 2
    assert trainer.callback_metrics["train/completions/observation_length"] == 1


@pytest.mark.all
def test_what_a_reward_names_has_to_be_declared(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="needs the argument 'drafted', which is no column"):
        trainer_of(tmp_path).fit(module_of(env=RolloutFunction(draft_and_answer), reward=drafts), prompts())


# ------------------------------------------------------------------ what rewards and tables see


def test_rewards_are_given_the_episodes(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def look(prompts: Sequence[Any], completions: Sequence[Any], episodes: Sequence[Mapping[str, Any]]) -> list[float]:
        seen.update(prompts=prompts, completions=completions, episodes=episodes)
        return [float(each["turns"]) for each in episodes]

    module = module_of(reward=[look, environment])
    completions = drawn(module, tmp_path)
    assert completions.episodes is not None and len(seen["episodes"]) == 16
    for text, episode, kept in zip(seen["completions"], seen["episodes"], completions.episodes, strict=True):
        said = [message["content"] for message in episode["messages"] if message["role"] == "assistant"]
        assert text == "".join(said) and episode == kept.plain() and episode["prompt"] == PROMPT
    table = module.samples
    assert table["turns"] == [each["turns"] for each in seen["episodes"]]
    assert table["completion"] == [each.transcript() for each in completions.episodes]
    assert "episodes" not in table and set(table["end"]) <= {"done", "max_turns", "max_tokens", "cut"}


class FailsOften:
    """Raises in the games whose seed is even."""

    def reset(self, seed: int) -> None:
        self.fails = seed % 2 == 0

    def step(self, action: str) -> tuple[Any, ...]:
        if self.fails:
            raise RuntimeError("no connection")
        return "", float(sum(map(ord, action)) % 3), True, False, {}


class Counts(GuessNumber):
    """Counts its turns, fails in the third of some, and cannot be copied."""

    def __init__(self) -> None:
        self.turns, self.closed = 0, False

    def step(self, action: str) -> tuple[Any, ...]:
        self.turns += 1
        if self.turns == 3 and self.number % 2:
            raise ConnectionError("no server")
        return "?", 0.0, False, False, {}

    def close(self) -> None:
        self.closed = True

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("another object would be rewarded")


def test_rewards_get_the_objects_that_answered_as_in_trl(tmp_path: Path) -> None:
    """Those of the episodes that did not fail, in the training and in a validation, by a function that names them."""
    seen: list[tuple[list[Any], list[Any]]] = []

    def turns(environments: list[Any], episodes: list[dict[str, Any]], **kwargs: Any) -> list[float]:
        assert all(type(each) is Counts and each.closed for each in environments)
        seen.append((environments, episodes))
        return [float(each.turns) for each in environments]

    env = guessing(Counts, max_failed=1.0)
    module = module_of(reward=turns, env=env)
    data, trainer = prompts(), trainer_of(tmp_path, num_sanity_val_steps=0, limit_val_batches=1)
    trainer.fit(module, data)
    trainer.validate(module, data, verbose=False)
    assert env.columns == ("episodes",), "the user's settings are as they were"
    (given, episodes), *validations = seen
    assert len({id(each) for each in given}) == len(given) and validations
    assert [each.turns for each in given] == [each["turns"] for each in episodes]
    assert "environment" not in episodes[0]
    kept = [each.environment for each in module.scored.completions.episodes if not each.failed]
    total = module.scored.scores.total
    assert kept == given and total[~total.isnan()].tolist() == [float(each.turns) for each in given]


def names_environments(completions: list[Any], environments: list[Any]) -> list[float]:
    return [float(each.turns) for each in environments]


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("env.workers=0", {"env": partial(guessing, "lit_rl.environments.games:GuessNumber", workers=1)}),
        ("env.journal=false", {"env": partial(guessing, journal=True)}),
        ("reward.cache=0", {"reward": lambda: Rewards(names_environments, cache=9)}),
        ("reward.workers=0", {"reward": lambda: from_paths(f"{__file__}:names_environments")}),
        ("generator.lag=0", {"generator": lambda: CopiedPolicyGenerator(lag=1)}),
    ],
)
def test_objects_that_a_reward_cannot_get_are_refused(key: str, settings: dict[str, Any], tmp_path: Path) -> None:
    made = {name: make() for name, make in settings.items()}
    module = module_of(**{"reward": names_environments, **made})
    with pytest.raises(ConfigError, match="names_environments' names environments") as caught:
        trainer_of(tmp_path).fit(module, prompts())
    assert key in str(caught.value) and "name episodes instead" in str(caught.value)


def test_a_function_in_a_worker_gets_no_objects_that_another_names(tmp_path: Path) -> None:
    told = "def gets_all(completions, **kwargs):\n    return [float('environments' in kwargs)] * len(completions)\n"
    (tmp_path / "mine.py").write_text(told)
    rewards = Rewards({"mine": names_like_counts, **from_paths(f"{tmp_path}/mine.py:gets_all").functions})
    module = module_of(reward=rewards, env=guessing())
    trainer_of(tmp_path, limit_val_batches=0, num_sanity_val_steps=0).fit(module, prompts())
    assert set(module.scored.scores.values[:, 1].tolist()) == {0.0}


def names_like_counts(environments: list[Any]) -> list[float]:
    return [float(each.number) for each in environments]


def test_what_failed_is_unscored_counted_and_moves_nothing(tmp_path: Path) -> None:
    module = module_of(env=guessing(FailsOften, max_failed=1.0, seed="sample"))
    trainer = trainer_of(tmp_path)
    trainer.fit(module, prompts())
    failed = torch.tensor([each.failed for each in module.scored.completions.episodes])
    assert failed.any() and not failed.all()
    assert module.scored.scores.total.isnan().tolist() == failed.tolist()
    assert (module.rollout.advantages[failed] == 0).all()
    assert trainer.callback_metrics["train/env/failed"] == failed.float().mean()
    assert module.rollout.completions.episodes is None, "what is learned from holds tensors alone"


def half_fail(texts: Sequence[str], trainer: Any) -> dict[str, Any]:
    """Every other completion is lost."""
    made = draft_and_answer(texts, trainer)
    return made | {"episode_error": ["no connection" if row % 2 else None for row in range(len(texts))]}


def test_what_a_function_marks_as_failed_is_unscored_counted_and_moves_nothing(tmp_path: Path) -> None:
    """It is in no baseline: the others have the advantages that they have without it."""
    asked: list[int] = []

    def rated(completions: Sequence[str]) -> list[float]:
        asked.append(len(completions))
        return [float(sum(map(ord, text)) % 7) for text in completions]

    module = module_of(env=RolloutFunction(half_fail, max_tokens=12, max_failed=0.5), reward=rated)
    trainer = trainer_of(tmp_path, limit_val_batches=0)
    trainer.fit(module, prompts())
    failed, scores = torch.arange(16) % 2 == 1, module.scored.scores.total
    assert asked == [8] and scores.isnan().tolist() == failed.tolist()
    assert (module.rollout.advantages[failed] == 0).all() and (module.rollout.advantages[~failed] != 0).any()
    of_group = scores[~failed].view(4, 2)
    sums = module.rollout.advantages[~failed].view(4, 2).sum(1)
    assert (of_group.std(1) > 0).any() and sums.abs().max() < 1e-4
    assert trainer.callback_metrics["train/env/failed"] == 0.5
    with pytest.raises(GenerationError, match="8 of 16 episodes .*env.max_failed=0.1"):
        trainer_of(tmp_path, limit_val_batches=0).fit(
            module_of(env=RolloutFunction(half_fail, max_tokens=12), reward=rated), prompts()
        )
    assert asked == [8], "asked about a rollout that nobody learns from"


@pytest.mark.all
def test_too_many_failures_end_the_run_before_a_reward_is_asked(tmp_path: Path) -> None:
    """And its journal forgets them: the run is resumed with a mended environment."""

    def never(completions: Sequence[Any]) -> list[float]:
        raise AssertionError("asked about a rollout that nobody learns from")

    with pytest.raises(GenerationError, match=r"episodes failed.*env.max_failed=0.1.*RuntimeError: no connection"):
        module = module_of(reward=never, env=guessing(FailsOften, seed="sample", journal=True))
        trainer_of(tmp_path, limit_val_batches=0).fit(module, prompts())
    assert list((tmp_path / "env_journal").iterdir()) == []


class CannotBegin(GuessNumber):
    """In the games whose seed is even, there is nobody to begin with: no message is ever said."""

    def reset(self, *, seed: int) -> Any:
        if seed % 2 == 0:
            raise ConnectionError("no server")
        return super().reset(seed=seed)


def plain_chat(tmp_path: Path) -> dict[str, Any]:
    """The shipped policy with a chat template, and prompts that are messages."""
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}{{ m['content'] }}"
        "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    )
    task = Repeated([{"role": "user", "content": PROMPT}], train_rows=64, val_rows=0)
    return {
        "model": LanguageModel("tiny", chat_template=str(template)),
        "data": RolloutDataModule(task=task, prompts_per_rollout=4),
    }


@pytest.mark.parametrize("share", ["some", "all"])
def test_what_failed_is_never_handed_to_a_reward_function(share: str, tmp_path: Path) -> None:
    """As TRL's functions are written: an episode that never began has no last message."""
    asked: list[int] = []

    def last_word(completions: Sequence[Any], log_extra: Any) -> list[float]:
        asked.append(len(completions))
        words = [each[-1]["content"] for each in completions]
        log_extra("word", words)
        return [float(len(word)) for word in words]

    class Never(CannotBegin):
        def reset(self, *, seed: int) -> Any:
            return super().reset(seed=2)

    made, chat = CannotBegin if share == "some" else Never, plain_chat(tmp_path)
    env = guessing(made, max_failed=1.0, seed="sample")
    module = GRPO(chat["model"], last_word, env=env, sampling=SAMPLED, group_size=4)
    trainer_of(tmp_path).fit(module, chat["data"])
    failed = [each.failed for each in module.scored.completions.episodes]
    assert asked == ([failed.count(False)] if share == "some" else []) and any(failed)
    assert module.scored.scores.total.isnan().tolist() == failed
    if share == "some":
        assert [word is None for word in module.samples["word"]] == failed


class Waits(GuessNumber):
    """Takes so long that only some of a rollout are answered within its time."""

    def step(self, action: str) -> tuple[Any, ...]:
        time.sleep(0.2)
        return super().step(action)


@pytest.mark.all
def test_what_is_out_of_time_is_unscored_and_the_others_are_learned_from(tmp_path: Path) -> None:
    env = guessing(Waits, max_failed=1.0, rollout_timeout=1.0)
    module = module_of(env=env, reward=lambda completions: [float(len(c) % 2) for c in completions])
    trainer = trainer_of(tmp_path, limit_val_batches=0)
    trainer.fit(module, prompts())
    episodes = module.scored.completions.episodes
    late = [each.end == "timeout" for each in episodes]
    assert any(late) and all("env.rollout_timeout=1 s" in each.error for each in episodes if each.end == "timeout")
    assert module.scored.scores.total.isnan().tolist() == late
    assert trainer.callback_metrics["train/env/timeouts"] == sum(late) / 16 and trainer.global_step == 1


def test_a_group_that_failed_as_a_whole_moves_nothing(tmp_path: Path) -> None:
    """One seed a prompt: its episodes fail together, and neither they nor another group learns from it."""
    module = module_of(env=guessing(FailsOften, max_failed=1.0))
    trainer_of(tmp_path).fit(module, prompts())
    failed = torch.tensor([each.failed for each in module.scored.completions.episodes]).reshape(4, 4)
    assert (failed.all(1) | ~failed.any(1)).all() and failed.any() and not failed.all()
    advantages = module.rollout.advantages
    assert (advantages.reshape(4, 4, -1)[failed.all(1)] == 0).all() and advantages.any(), advantages


@pytest.mark.all
def test_spans_of_several_messages_are_refused(tmp_path: Path) -> None:
    def spans(completions: Sequence[Any]) -> list[Any]:
        return [[(0, 1, 1.0)] for _ in completions]

    chat = plain_chat(tmp_path)
    module = GRPO(chat["model"], spans, env=guessing(), sampling=SAMPLED, group_size=4)
    with pytest.raises(RewardError, match="spans of characters for an episode of several messages"):
        trainer_of(tmp_path).fit(module, chat["data"])


# ------------------------------------------------------------------ the same samples, whatever the engine


def rows_of(completions: Completions) -> list[tuple[list[int], list[bool]]]:
    assert completions.attended is not None
    return [
        (ids[there].tolist(), mask[there].tolist())
        for ids, mask, there in zip(completions.response_ids, completions.response_mask, completions.attended)
    ]


ENGINES = {
    "native-places": lambda: NativeGenerator(batch_size=4),
    "hf": HFGenerator,
    "hf_continuous": HFContinuousGenerator,
}


@pytest.mark.parametrize("engine", quick(list(ENGINES), {"native-places"}))
def test_an_episode_is_the_same_whatever_draws_it(engine: str, tmp_path: Path) -> None:
    expected = drawn(module_of(), tmp_path)
    found = drawn(module_of(generator=ENGINES[engine]()), tmp_path)
    assert rows_of(found) == rows_of(expected)
    assert found.episodes is not None and expected.episodes is not None
    assert [each.messages for each in found.episodes] == [each.messages for each in expected.episodes]
    turns = [each.turns for each in expected.episodes]
    assert max(turns) > 1, "nobody was answered"


class WaitsByTheText(GuessNumber):
    """Answers after a while that depends on what was said: what is asked first is not answered first."""

    asked: ClassVar[list[str]] = []
    answered: ClassVar[list[str]] = []

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, int]]:  # type: ignore[override]
        self.asked.append(action)
        await asyncio.sleep(0.004 * (sum(map(ord, action)) % 7))
        self.answered.append(action)
        return super().step(action)


@pytest.mark.all
def test_the_order_of_answers_changes_no_sample(tmp_path: Path) -> None:
    WaitsByTheText.asked.clear()
    WaitsByTheText.answered.clear()
    assert rows_of(drawn(module_of(env=guessing(WaitsByTheText)), tmp_path)) == rows_of(drawn(module_of(), tmp_path))
    assert sorted(WaitsByTheText.asked) == sorted(WaitsByTheText.answered)
    assert WaitsByTheText.asked != WaitsByTheText.answered


def test_episodes_of_a_prompt_share_its_prefix_where_they_are_learned_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt of a group is computed once, and log-probs and gradient are those of rows that have their own."""
    calls: list[int] = []

    def counted(model: Any, completions: Completions, *rest: Any) -> Any:
        calls.append(len(completions))
        return run_shared(model, completions, *rest)

    monkeypatch.setattr(forward, "run_shared", counted)
    task = Repeated("the number is between 0 and 9, and " * 2 + PROMPT, train_rows=64, val_rows=0)
    module = module_of(optimizer=ByPath("torch.optim.SGD", lr=1e-30))
    trainer_of(tmp_path).fit(module, RolloutDataModule(task=task, prompts_per_rollout=4))
    assert calls and min(calls) >= 4, "the training forward took another path"
    rollout: Rollout = module.rollout
    heard = rollout.completions.attended & ~rollout.completions.response_mask
    assert heard.any()
    found = []
    for options in (module.forward_options, replace(module.forward_options, shared_prompts=False)):
        module.policy.zero_grad()
        scores = forward.score(module.policy, rollout.completions, module.sampling, options=options)
        (scores.logprobs * rollout.loss_mask).sum().backward()
        found.append([scores.logprobs[rollout.loss_mask], *(each.grad.clone() for each in module.policy.parameters())])
    for ours, own in zip(*found):
        torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------ what is refused before weights are loaded


class Deaf(NativeGenerator):
    converses = False


def double(a: int) -> int:
    """Double a number.

    Args:
        a: The number.
    """
    return 2 * a


class TwoKinds:
    """Rows for one environment, and for another one to validate on."""

    def train(self) -> list[dict[str, Any]]:
        return [{"prompt": f"{i}=", "environment": "a"} for i in range(8)]

    def val(self) -> list[dict[str, Any]]:
        return [{"prompt": "b=", "environment": "b"}]


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "generator": (
        lambda: module_of(generator=Deaf()),
        prompts,
        "Deaf draws completions of a single turn.*native, hf, hf_continuous, vllm or vllm_server",
    ),
    "lag": (
        lambda: module_of(generator=VLLMServerGenerator(urls=["http://127.0.0.1:9"], lag=1)),
        prompts,
        "generator.lag=1 draws while the policy learns",
    ),
    "truncation": (
        lambda: module_of(env=RolloutFunction(draft_and_answer), reward=drafts, sampling=Sampling(top_k=3)),
        prompts,
        "a rollout function does not return how much.*top_k=0",
    ),
    "its own reward": (
        lambda: module_of(env=RolloutFunction(draft_and_answer)),
        prompts,
        "reward=environment takes the reward of the environments",
    ),
    "turn": (
        lambda: module_of(env=guessing(max_tokens=3)),
        prompts,
        "env.max_tokens=3 is less than sampling.max_new_tokens=4",
    ),
    "turn of the evaluation": (
        lambda: module_of(evaluation=Evaluation(max_new_tokens=100)),
        prompts,
        "env.max_tokens=24 is less than eval.max_new_tokens=100",
    ),
    "environment of a validation row": (
        lambda: module_of(env=guessing({"a": GuessNumber})),
        lambda: RolloutDataModule(task=TwoKinds(), prompts_per_rollout=4),
        "The column 'environment' of a row is 'b', but env.path has a",
    ),
    "context": (
        lambda: module_of(env=guessing(max_tokens=600)),
        prompts,
        r"may have 613 tokens \(the longest prompt 5, env.max_observation_tokens 8, env.max_tokens 600\)",
    ),
    "truncated": (module_of, lambda: prompts(overlong="truncate_left"), "data.overlong=truncate_left"),
    "parser": (
        lambda: module_of(env=FunctionTools([double], max_tokens=32), reward=lambda completions: [0.0]),
        prompts,
        "env.parser=auto",
    ),
    "reward": (
        lambda: module_of(env=FunctionTools([double], max_tokens=32, parser="hermes")),
        prompts,
        "reward=environment takes the reward of the environments",
    ),
    "column": (
        module_of,
        lambda: RolloutDataModule(rows=[{"prompt": f"{i}=", "seed": 1} for i in range(40)], prompts_per_rollout=4),
        "a column 'seed'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_converse_is_refused_before_weights_are_loaded(case: str, tmp_path: Path) -> None:
    make, data, words = REFUSED[case]
    module: OnPolicyModule = make()
    with pytest.raises(ConfigError, match=words):
        trainer_of(tmp_path).fit(module, data())
    assert module.policy is None


def test_one_turn_is_never_taken_for_an_episode(tmp_path: Path) -> None:
    """By hand, before a Trainer has connected the environment with the data."""
    module, data = module_of(), prompts()
    module.configure_model()
    data.prepare(module.tokenizer)
    with pytest.raises(ConfigError, match="GRPO has env=CustomEnvironment.*: call trainer"):
        module.generate(data.peek(2))
    trainer_of(tmp_path).validate(module, data, verbose=False)
    with module.rollout_context():
        completions = module.generate(data.peek(2))
    assert completions.episodes is not None and len(completions.episodes) == 8


@pytest.mark.all
def test_episodes_without_an_environment_are_refused(tmp_path: Path) -> None:
    module = GRPO(LanguageModel("tiny"), environment, sampling=SAMPLED, group_size=4)
    with pytest.raises(RewardError, match="'episodes'.*env="):
        trainer_of(tmp_path).fit(module, prompts())

    def as_in_trl(completions: Sequence[Any], environments: Sequence[Any]) -> list[float]:
        return [each.score for each in environments]

    module = GRPO(LanguageModel("tiny"), as_in_trl, sampling=SAMPLED, group_size=4)
    with pytest.raises(RewardError, match=r"'environments'.*only if a class of yours answers the policy"):
        trainer_of(tmp_path).fit(module, prompts())


@pytest.mark.all
def test_validation_plays_the_same_games_each_time(tmp_path: Path) -> None:
    module, data = module_of(), prompts()
    trainer = trainer_of(tmp_path, limit_val_batches=None)

    def played() -> dict[str, float]:
        trainer.validate(module, data, verbose=False)
        numbers = {name: float(value) for name, value in trainer.callback_metrics.items()}
        return {name: value for name, value in numbers.items() if "seconds" not in name and not math.isnan(value)}

    first = played()
    assert played() == first and 1 <= first["val/turns/mean"] <= first["val/turns/max"] <= 3
    assert first["val/env/failed"] == 0 and first["val/completions/observation_length"] > 0


def test_a_validation_counts_what_failed_and_leaves_it_out(tmp_path: Path) -> None:
    module = module_of(env=guessing(CannotBegin, seed="sample"), evaluation=Evaluation(group_size=2, temperature=1.0))
    trainer = trainer_of(tmp_path, limit_val_batches=None)
    with pytest.warns(UserWarning, match=r"of 16 episodes failed.*max_failed=0.1"):
        trainer.validate(module, prompts(), verbose=False)
    logged = trainer.callback_metrics
    assert 0.1 < logged["val/env/failed"] < 1 and logged["val/reward"] >= 0 and logged["val/env/timeouts"] == 0


# ------------------------------------------------------------------ by hand


def episode(end: str = "done", **values: Any) -> Episode:
    return Episode("?", [{"role": "assistant", "content": "a"}], **{"end": end, "turns": 1, **values})  # type: ignore[arg-type]


def test_metrics_by_hand() -> None:
    episodes = [
        episode(turns=1, observed_tokens=4, calls=1, failed_calls=1, unreadable_calls=1, seconds=0.5),
        episode("failed", turns=2, calls=3, failed_calls=1, seconds=1.5),
        episode("timeout", turns=3),
        episode("max_tokens", turns=2),
    ]
    averages = Averages()
    averages.add(episode_metrics(episodes, Ranks()))
    assert averages.reduce() == {
        "turns/mean": 2.0,
        "turns/max": 3.0,
        "completions/observation_length": 1.0,
        "tools/call_frequency": 1.0,
        "tools/failure_frequency": 0.5,
        "tools/parse_failures": 0.25,
        "env/failed": 0.25,
        "env/timeouts": 0.25,
        "env/cut": 0.25,
        "env/seconds_mean": 0.5,
        "env/seconds_p50": 0.25,
        "env/seconds_max": 1.5,
    }


def test_scores_of_what_failed_are_none() -> None:
    def places(completions: Sequence[str], answer: Sequence[str], log_extra: Any) -> list[Any]:
        log_extra("seen", answer)
        return [[(0, 2.0)] for _ in completions]

    rows = sound_rows([episode("failed"), episode(), episode("timeout"), episode("cut")])
    found = Rewards(places).score(["?"] * 4, ["a"] * 4, {"answer": list("abcd")}, rows=rows)
    assert found.total.isnan().tolist() == found.values[:, 0].isnan().tolist() == [True, False, True, False]
    assert found.total[1] == 2.0 and found.extras == {"seen": [None, "b", None, "d"]}
    assert found.weights.tolist() == [[0.0], [1.0], [0.0], [1.0]]
    assert found.span_rewards == [[], [(0, 2.0)], [], [(0, 2.0)]]
    nothing = Rewards(places).score(["?"], ["a"], {"answer": ["a"]}, rows=[])
    assert nothing.total.isnan().tolist() == [True] and nothing.values.shape == (1, 1)


@pytest.mark.all
def test_episodes_go_with_their_rows(tmp_path: Path) -> None:
    completions = drawn(module_of(), tmp_path)
    assert completions.episodes is not None
    picked = select(completions, torch.tensor([3, 0]))
    assert picked.episodes == (completions.episodes[3], completions.episodes[0])
    both = join_completions(picked, completions)
    assert both.episodes == (*picked.episodes, *completions.episodes)
    torch.save(checkpoints.to_plain(completions), tmp_path / "rows.pt")
    plain = torch.load(tmp_path / "rows.pt", weights_only=True)
    assert checkpoints.completions_from_plain(plain, torch.device("cpu")).episodes == completions.episodes


def test_failures_are_counted_over_a_rollout_and_its_ranks() -> None:
    drawn = [episode(), episode("failed", error="a")]
    drawn += [episode("timeout", error="b"), episode("failed", error="a"), episode("max_turns")]
    check_failures(drawn, 0.6, Ranks())
    with pytest.raises(GenerationError, match="3 of 5 .*env.max_failed=0.5 of them; 2 times: a") as told:
        check_failures(drawn, 0.5, Ranks())
    assert told.value.on_every_rank and told.value.exit_code == 5
    check_failures([], 0.0, Ranks())


@pytest.mark.all
def test_what_does_not_know_episodes_refuses_them(tmp_path: Path) -> None:
    compared = module_of(evaluation=Evaluation(win_rate_against="base"))
    with pytest.raises(ConfigError, match=r"eval.win_rate_against='base' compares"):
        trainer_of(tmp_path).fit(compared, prompts())
    with pytest.raises(ConfigError, match=r"preference_sets writes completions of one turn"):
        trainer_of(tmp_path, callbacks=[PreferenceSets()]).fit(module_of(), prompts())
    tree = tree_of(
        "algo=dpo", "env=environment", "env.path=lit_rl.environments.games:GuessNumber", "data=addition_pairs"
    )
    with pytest.raises(ConfigError, match=r"env=CustomEnvironment .* DPO"):
        check_answered(build(tree["algo"]), tree)


@pytest.mark.all
@pytest.mark.parametrize("name", ["best", "dynamic"])
def test_groups_are_chosen_of_episodes(name: str, tmp_path: Path) -> None:
    """Whole groups are drawn anew, or some of their members alone are learned from."""
    advantage = ["algo/advantage=constant"] if name == "best" else []
    tree = tree_of("experiment=guess", f"algo/groups={name}", *advantage)
    module = build(tree["algo"])
    trainer_of(tmp_path).fit(module, prompts())
    rollout = module.rollout
    assert rollout.completions.attended is not None and (rollout.loss_mask <= rollout.completions.response_mask).all()
    assert len(module.scored.completions.episodes) == len(rollout)


@pytest.mark.all
def test_the_greedy_episode_is_a_baseline(tmp_path: Path) -> None:
    tree = tree_of("experiment=guess", "algo=remax")
    module = build(tree["algo"])
    trainer_of(tmp_path).fit(module, prompts())
    assert module.scored.greedy_rewards is not None and not module.scored.greedy_rewards.isnan().any()
