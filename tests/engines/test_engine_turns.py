"""Conversations with the real vLLM, in this process and as a server: the part of the contract that has turns."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_cases import DISTRIBUTIONS, ask, drawn_from, logits_of, perturb
from engine_fixtures import Case
from turn_cases import MAX_TOKENS, Scripted, assert_rows_are_what_was_told, reply, rows_of

from lit_rl.core.episode import PolicyTurn, Responder
from lit_rl.core.errors import ConfigError
from lit_rl.core.rollout import Completions, PromptBatch, Prompts, Sampling
from lit_rl.environments.games import GuessNumber
from lit_rl.environments.interaction import Interaction
from lit_rl.environments.user_environments import CustomEnvironment
from lit_rl.generation import RolloutFunction
from lit_rl.generation.collect import RolloutRequest, Vocabulary
from lit_rl.generation.rollout_function import RolloutCalls
from lit_rl.generation.vllm.server import VLLMServerGenerator

SAMPLED = Sampling(max_new_tokens=6)


def asked(case: Case, **changes: Any) -> Prompts:
    """Rows that end often, and differ."""
    many = (*case.model.eos_ids, *range(40, 60))
    return ask(case.model, **({"eos_ids": many} | changes))


def talk(
    case: Case, sampling: Sampling = SAMPLED, responder: Responder | None = None, **changes: Any
) -> tuple[Completions, Prompts]:
    prompts = dataclasses.replace(asked(case, **changes), responder=responder or Scripted(reply))
    return case.generator.generate(prompts, sampling), prompts


def largest_gap(policy: Any, out: Completions, prompts: Prompts) -> float:
    """Between the engine's log-probs and those of an unpadded pass over the whole text, in nats."""
    gaps = []
    for row, (ids, sampled, _, _) in enumerate(rows_of(out)):
        fresh = logits_of(policy, prompts.token_ids[row // prompts.group_size], ids).log_softmax(-1)
        fresh = fresh.gather(1, torch.tensor(ids)[:, None])[:, 0] * torch.tensor(sampled)
        gaps.append((out.sampler_logprobs[row, : len(ids)] - fresh).abs().max().item())
    return max(gaps)


def test_what_was_said_and_heard_stands_in_its_row(tied: Case) -> None:
    policy, responder = tied.fresh(), Scripted(reply)
    out, prompts = talk(tied, responder=responder)
    assert out.attended is not None and out.kept_logmass is None
    turns = assert_rows_are_what_was_told(out, responder)
    assert max(len(ids) for ids, _, _, _ in rows_of(out)) <= MAX_TOKENS
    for said in (each for told in responder.told.values() for each in told):
        assert said.ended == (said.token_ids[-1] in prompts.eos_ids)
    assert len(set(turns)) >= 3, "the case needs all kinds"
    assert (out.sampler_logprobs[~out.response_mask] == 0).all()
    assert largest_gap(policy, out, prompts) < 1e-4


@pytest.mark.parametrize("name", ["top_p", "min_p", "penalty", "bias"])
def test_turns_are_drawn_from_the_distribution_that_is_asked_for(tied: Case, name: str) -> None:
    """In every turn, after all that was said and heard before it."""
    sampling, processors = DISTRIBUTIONS[name]
    policy = tied.fresh()
    out, prompts = talk(tied, dataclasses.replace(sampling, max_new_tokens=6))
    for row, (ids, sampled, _, _) in enumerate(rows_of(out)):
        expected = drawn_from(processors, policy, prompts.token_ids[row // prompts.group_size], ids)
        found, own = out.sampler_logprobs[row, : len(ids)], torch.tensor(sampled)
        torch.testing.assert_close(found[own], expected[own], atol=1e-4, rtol=0)
    assert out.turn is not None and int(out.turn.max()) > 1


def test_weights_of_an_update_are_read_by_later_turns_too(tied: Case) -> None:
    """Long prompts, of which blocks stay in the engine's cache from turn to turn: they must not outlive an update."""
    policy = tied.fresh()
    before, _ = talk(tied)
    perturb(policy, 3)
    tied.sync(policy)
    out, prompts = talk(tied)
    assert largest_gap(policy, out, prompts) < 1e-4
    assert out.response_ids.tolist() != before.response_ids.tolist(), "the update must have changed something"


def test_neither_batch_nor_order_of_answers_changes_a_sample(tied: Case) -> None:
    tied.fresh()
    together = rows_of(talk(tied)[0])
    assert rows_of(talk(tied)[0]) == together
    assert rows_of(talk(tied, responder=Scripted(reply, at_once=1))[0]) == together
    one = asked(tied)
    alone, _ = talk(tied, token_ids=one.token_ids[1:2], keys=one.keys[1:2])
    assert rows_of(alone) == together[3:6]
    assert rows_of(talk(tied, seed=1)[0]) != together


def test_turns_of_a_row_are_drawn_anew(tied: Case) -> None:
    """The seed of a turn is its own: with the first turn's, each would repeat it where the texts allow."""
    tied.fresh()
    flat = Sampling(max_new_tokens=6, temperature=2.0)
    out, _ = talk(tied, flat, Scripted(lambda said: None if said.turn == 2 else []), eos_ids=(), group_size=6)
    said = [[row[0][6 * turn : 6 * turn + 6] for turn in range(3)] for row in rows_of(out)]
    assert sum(first in others for first, *others in said) <= 2
    assert len({str(turns) for turns in said[:6]}) > 3, "samples of a group differ"


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_conversations_of_one_turn_are_the_usual_completions(tied: Case, temperature: float) -> None:
    tied.fresh()
    sampling = Sampling(max_new_tokens=6, temperature=temperature)
    out, prompts = talk(tied, sampling, Scripted(lambda said: None))
    usual = tied.generator.generate(dataclasses.replace(prompts, responder=None), sampling)
    assert torch.equal(out.response_ids, usual.response_ids) and torch.equal(out.response_mask, usual.response_mask)
    torch.testing.assert_close(out.sampler_logprobs, usual.sampler_logprobs, atol=1e-4, rtol=0)


def test_a_row_waits_for_nobody(tied: Case) -> None:
    """One row's answer comes when all other rows are over: they had said everything by then."""

    class Late(Scripted):
        def answers(self, *, wait: bool) -> Any:
            first = [each for each in self._waiting if each.row == 0 and len(self.told[0]) == 1]
            others = [each for each in self._waiting if each not in first]
            self._waiting = first if others or not wait else []
            if not others and wait and first:
                said_before.append(sum(len(told) for row, told in self.told.items() if row))
            return others or (first if wait else [])

    tied.fresh()
    said_before: list[int] = []

    def until_three(said: PolicyTurn) -> list[int] | None:
        return None if said.turn == 2 else [7]

    responder = Late(until_three, max_tokens=40)
    out, _ = talk(tied, responder=responder)
    assert [len(responder.told[row]) for row in range(12)] == [3] * 12
    assert said_before == [33], "the others had said all of their turns when the first row was answered"
    assert rows_of(out) == rows_of(talk(tied, responder=Scripted(until_three, max_tokens=40))[0])


def test_a_conversation_that_the_engine_cannot_hold_is_refused(tied: Case) -> None:
    tied.fresh()
    facts = tied.generator.facts
    assert facts is not None
    tied.generator.facts = dataclasses.replace(facts, max_model_len=320)
    try:
        with pytest.raises(ConfigError, match=r"env\.max_tokens=24 is more.*generator\.max_model_len to 325"):
            talk(tied)
    finally:
        tied.generator.facts = facts


def test_an_error_of_an_environment_leaves_the_engine_well(tied: Case) -> None:
    """What ran for others is ended with it, and no answer of then comes into a later rollout."""

    def fails(said: PolicyTurn) -> list[int]:
        if said.turn == 1:
            raise ConfigError("what the environment says")
        return [5]

    policy = tied.fresh()
    expected = rows_of(talk(tied)[0])
    with pytest.raises(ConfigError, match="what the environment says"):
        talk(tied, responder=Scripted(fails))
    assert rows_of(talk(tied)[0]) == expected
    perturb(policy, 5)
    tied.sync(policy)


def draft_and_answer(prompts: Any, trainer: Any) -> dict[str, Any]:
    """Two turns, with a token between them; rows that ended have one."""
    draft = trainer.generate([trainer.encode(prompt) for prompt in prompts])
    rows = [row for row, ended in enumerate(draft["ended"]) if not ended]
    texts = [[*draft["prompt_ids"][row], *draft["completion_ids"][row], 7] for row in rows]
    answer = trainer.generate(texts, rows=rows)
    masks = [[1] * len(ids) for ids in draft["completion_ids"]]
    for row, ids, logprobs in zip(rows, answer["completion_ids"], answer["logprobs"]):
        draft["completion_ids"][row] += [7, *ids]
        draft["logprobs"][row] += [0.0, *logprobs]
        masks[row] += [0, *[1] * len(ids)]
    return {name: draft[name] for name in ("prompt_ids", "completion_ids", "logprobs")} | {"env_mask": masks}


def test_a_rollout_function_asks_the_engine(tied: Case) -> None:
    policy, tokenizer = tied.fresh(), tied.model.tokenizer
    texts = ["12+30=", "7+1="]
    ids = [list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    vocabulary, short = Vocabulary.of(tied.model), Sampling(max_new_tokens=2)  # too short for some answers
    source = RolloutCalls(RolloutFunction(draft_and_answer), tokenizer, {}, 8)
    settings = {"sampling": short, "group_size": 6, "vocabulary": vocabulary, "version": tied._version, "seed": 0}
    batch = PromptBatch(texts, ids, {}, [0, 1], [0, 0])
    out = RolloutRequest(batch, policy, **settings, interaction=source).send_to(tied.generator)()
    assert out.turn is not None and out.attended is not None
    heard = out.attended & ~out.response_mask
    assert heard.any() and out.turn.max() == 1 and (out.response_ids[heard] == 7).all()
    assert largest_gap(policy, out, vocabulary.prompts(ids, [0, 0], 6)) < 1e-4


class Killing(GuessNumber):
    """Ends the server that a test names, at the turn that it says, once."""

    _turns, _at, _kill = 0, 0, staticmethod(lambda: None)

    def step(self, action: str) -> Any:
        Killing._turns += 1
        if Killing._turns == Killing._at:
            Killing._kill()
        return super().step(action)


def test_a_server_that_dies_in_the_middle_comes_back_and_conversations_begin_anew(
    started: Callable[[str], Case],
) -> None:
    served = started("server-tied")
    policy, model, generator = served.fresh(), served.model, served.generator
    tokenizer: Any = model.tokenizer
    batch = PromptBatch(
        ["0..9="] * 4, [tokenizer("0..9=", add_special_tokens=False)["input_ids"]] * 4, {}, [0, 1, 2, 3], [0] * 4
    )

    def draw() -> Completions:
        factory = CustomEnvironment(Killing, max_turns=4, max_tokens=60)
        eos_ids = (*model.eos_ids, *range(40, 60))
        interaction = Interaction(factory, tokenizer, eos_ids=eos_ids, chat=False, template_kwargs={})
        vocabulary = dataclasses.replace(Vocabulary.of(model), eos_ids=eos_ids)
        settings = {"sampling": Sampling(max_new_tokens=6), "group_size": 3, "vocabulary": vocabulary, "seed": 0}
        return RolloutRequest(batch, policy, **settings, version=served._version, interaction=interaction).send_to(
            generator
        )()

    def kill() -> None:
        assert isinstance(generator, VLLMServerGenerator) and generator._process is not None
        assert generator._process.group is not None
        os.killpg(generator._process.group, signal.SIGKILL)

    undisturbed = draw()
    assert undisturbed.turn is not None and undisturbed.turn.max() > 0, "the case needs turns"
    Killing._turns, Killing._at, Killing._kill = 0, 9, staticmethod(kill)
    with pytest.warns(UserWarning, match="in the middle of 12 conversations"):
        out = draw()
    assert Killing._turns > 9
    assert rows_of(out) == rows_of(undisturbed)
    assert out.episodes == tuple(
        dataclasses.replace(theirs, seconds=ours.seconds)
        for ours, theirs in zip(out.episodes or (), undisturbed.episodes or ())
    )
