"""The contract of a generator, for the real vLLM: in this process and as a server, tied and untied."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import pickle
import re
from typing import Any

import pytest
import torch
from engine_cases import DISTRIBUTIONS, ask, drawn_from, largest_gap, logits_of, perturb, rows
from engine_fixtures import Case

from lit_rl.core.errors import ConfigError, GenerationError, NumericError
from lit_rl.core.rollout import Prompts, Sampling, Structured
from lit_rl.generation.collect import with_blocked_eos
from lit_rl.generation.generator import Generator
from lit_rl.generation.native import NativeGenerator
from lit_rl.models.forward import score

SAMPLED = Sampling(max_new_tokens=12)
GREEDY = Sampling(temperature=0, max_new_tokens=12)


def responses(case: Case, prompts: Prompts, sampling: Sampling) -> list[list[int]]:
    return [response for _, response, _ in rows(case.generator.generate(prompts, sampling), prompts)]


def texts(case: Case, prompts: Prompts, sampling: Sampling) -> list[str]:
    tokenizer = case.model.tokenizer
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in responses(case, prompts, sampling)]


def test_logprobs_are_the_policys_after_the_first_load_and_each_of_three_updates(case: Case) -> None:
    """The same prompts each time, two of them of more than two cache blocks: a cache that was not reset would show."""
    policy, prompts = case.fresh(), ask(case.model)
    assert isinstance(case.generator, Generator)
    before = case.generator.generate(prompts, GREEDY)
    assert largest_gap(policy, before, prompts) < 1e-4
    for seed in range(3):
        perturb(policy, seed)
        version = case.sync(policy)
        out = case.generator.generate(prompts, SAMPLED)
        assert out.version == version
        assert largest_gap(policy, out, prompts) < 1e-4
        assert case.generator.gap is not None and case.generator.gap.max < 1e-4
    again = case.generator.generate(prompts, GREEDY)
    assert largest_gap(policy, again, prompts) < 1e-4
    assert again.response_ids.tolist() != before.response_ids.tolist(), "the updates must have changed something"


def test_layout(tied: Case) -> None:
    tied.fresh()
    prompts = ask(tied.model, group_size=2)
    out = tied.generator.generate(prompts, SAMPLED)
    assert [ids[mask].tolist() for ids, mask in zip(out.prompt_ids, out.prompt_mask)] == [
        ids for ids in prompts.token_ids for _ in range(2)
    ]
    assert out.group_id.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert (out.response_mask.int().diff(dim=1) <= 0).all(), "padded on the right"
    assert (out.sampler_logprobs[~out.response_mask] == 0).all()
    assert out.sampler_logprobs.dtype == torch.float32
    assert out.kept_logmass is None and tied.generator.reports_kept_mass is False


def test_greedy_is_native_up_to_ties(case: Case) -> None:
    policy, prompts = case.fresh(), ask(case.model, group_size=1)
    ours = case.generator.generate(prompts, GREEDY)
    for prompt, response, _ in rows(ours, prompts):
        logits = logits_of(policy, prompt, response)
        chosen = logits.gather(1, torch.tensor(response)[:, None])[:, 0]
        assert (chosen > logits.max(1).values - 1e-4).all()
    native = NativeGenerator()
    native.sync(policy, 0)
    theirs = native.generate(prompts, GREEDY)
    same = [a == b for a, b in zip(ours.response_ids.tolist(), theirs.response_ids.tolist())]
    assert sum(same) >= 3, "a tie may decide one"


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_logprobs_are_those_of_the_distribution_drawn_from(tied: Case, name: str) -> None:
    sampling, processors = DISTRIBUTIONS[name]
    policy, prompts = tied.fresh(), ask(tied.model, group_size=2)
    out = tied.generator.generate(prompts, dataclasses.replace(sampling, max_new_tokens=10))
    for prompt, response, logprobs in rows(out, prompts):
        torch.testing.assert_close(logprobs, drawn_from(processors, policy, prompt, response), atol=1e-4, rtol=0)


def test_training_scores_by_what_the_engine_held_back_and_penalised(tied: Case) -> None:
    many = (*tied.model.eos_ids, *range(40, 60))
    policy, prompts = tied.fresh(), ask(tied.model, group_size=2, eos_ids=many)
    sampling = Sampling(max_new_tokens=10, min_new_tokens=4, repetition_penalty=1.5, temperature=1.2)
    out = with_blocked_eos(tied.generator.generate(prompts, sampling), many, sampling)
    scored, mask = score(policy, out, sampling).logprobs.detach(), out.response_mask
    torch.testing.assert_close(out.sampler_logprobs[mask], scored[mask], atol=1e-4, rtol=0)
    plain = score(policy, out, Sampling(temperature=1.2)).logprobs.detach()
    assert float((plain - scored)[mask].abs().max()) > 0.01


def test_a_setting_of_the_engines_own_is_in_its_log_probs(tied: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tied.generator, "generation_kwargs", {"presence_penalty": 1.5})
    policy, prompts = tied.fresh(), ask(tied.model, group_size=2)
    out = tied.generator.generate(prompts, Sampling(max_new_tokens=10))
    for prompt, response, logprobs in rows(out, prompts):
        logits = logits_of(policy, prompt, response).clone()
        for place in range(1, len(response)):
            logits[place, list(set(response[:place]))] -= 1.5
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
        torch.testing.assert_close(logprobs, wanted, atol=1e-4, rtol=0)


def test_keys_make_the_samples(tied: Case) -> None:
    tied.fresh()
    warm = Sampling(temperature=2.0, max_new_tokens=12)
    first = responses(tied, ask(tied.model, group_size=4), warm)
    assert responses(tied, ask(tied.model, group_size=4), warm) == first
    other = responses(tied, ask(tied.model, group_size=4, seed=1), warm)
    assert sum(a == b for a, b in zip(first, other)) < 8
    assert len({tuple(response) for response in first[:4]}) > 1, "samples of a group differ"


def test_every_end_ends_and_stays_in_the_response(tied: Case) -> None:
    tied.fresh()
    tokenizer: Any = tied.model.tokenizer
    eos_ids = (*tied.model.eos_ids, *tokenizer("23", add_special_tokens=False)["input_ids"])
    prompts = ask(tied.model, group_size=6, eos_ids=eos_ids)
    out = tied.generator.generate(prompts, dataclasses.replace(SAMPLED, temperature=2.0))
    ends = set()
    for (_, response, _), ended in zip(rows(out, prompts), out.ended.tolist()):
        assert ended == (response[-1] in eos_ids)
        assert not set(response[:-1]) & set(eos_ids)
        assert ended or len(response) == 12
        ends.add(response[-1])
    assert len(ends & set(eos_ids)) > 1, "the case needs several kinds of end"


def test_an_end_that_we_do_not_name_ends_nothing(tied: Case) -> None:
    """The engine knows the model's own EOS; whether it ends a response is for the request to say."""
    tied.fresh()
    out = tied.generator.generate(ask(tied.model, eos_ids=()), SAMPLED)
    assert (out.lengths == 12).all() and not out.ended.any()


def test_min_new_tokens_and_stop_strings(tied: Case) -> None:
    tied.fresh()
    many = (*tied.model.eos_ids, *range(40, 60))
    out = tied.generator.generate(ask(tied.model, eos_ids=many), Sampling(max_new_tokens=9, min_new_tokens=4))
    assert (out.lengths > 4).all()
    assert not set(out.response_ids[:, :4].flatten().tolist()) & set(many)
    prompts = ask(tied.model, eos_ids=())
    free = responses(tied, prompts, dataclasses.replace(SAMPLED, max_new_tokens=8))
    stop = tied.model.tokenizer.decode(free[0][2:4])
    out = tied.generator.generate(prompts, dataclasses.replace(SAMPLED, max_new_tokens=8, stop=(stop,)))
    found = 0
    for (_, response, _), ended in zip(rows(out, prompts), out.ended.tolist()):
        text = tied.model.tokenizer.decode(response)
        assert ended == (stop in text)
        assert not ended or text.endswith(stop), "the token that completes it is the last"
        found += ended
    assert found


def test_bad_words_never_come(tied: Case) -> None:
    tied.fresh()
    prompts = ask(tied.model, group_size=8)
    usual = "".join(texts(tied, prompts, SAMPLED))
    word = max(set(re.findall(r"\d", usual)), key=usual.count)
    banned = texts(tied, prompts, dataclasses.replace(SAMPLED, bad_words=(word,)))
    assert usual.count(word) > 3
    assert word not in "".join(banned)


STRUCTURED = {
    "regex": (Structured(regex=r"[ab]{3}-\d"), lambda text: re.fullmatch(r"[ab]{3}-\d", text)),
    "choice": (Structured(choice=("yes", "no")), lambda text: text in ("yes", "no")),
    "grammar": (Structured(grammar='root ::= "(" [0-9]+ ")"'), lambda text: re.match(r"\(\d+", text)),
    "json": (
        Structured(json_schema={"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
                                "additionalProperties": False}),
        lambda text: isinstance(json.loads(text)["a"], bool),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STRUCTURED)
def test_structured_responses_have_their_form(tied: Case, name: str) -> None:
    tied.fresh()
    structured, fits = STRUCTURED[name]
    prompts = dataclasses.replace(ask(tied.model, group_size=2), token_ids=ask(tied.model).token_ids[:2], keys=[1, 2])
    written = texts(tied, prompts, Sampling(max_new_tokens=40, structured=structured))
    assert all(fits(text) for text in written), written


def test_more_prompt_tokens_at_once_than_a_step_takes(tied: Case) -> None:
    """vLLM 0.32 would cut a prompt over two steps, rewind its seeded generator, which a CPU's cannot, and die."""
    policy, prompts = tied.fresh(), ask(tied.model)
    long = [[*prompts.token_ids[2], 5 + row] for row in range(20)]
    many = dataclasses.replace(prompts, token_ids=long, keys=list(range(20)), group_size=4)
    assert sum(map(len, long)) > 4096
    assert largest_gap(policy, tied.generator.generate(many, SAMPLED), many) < 1e-4


def test_nothing_to_update_costs_nothing(tied: Case) -> None:
    """A validation syncs before each of its batches; what the engine holds already is not sent again."""
    policy = tied.fresh()
    probed = tied.generator.gap
    tied.generator.sync(policy, tied._version)
    assert tied.generator.gap is probed
    perturb(policy, 1)  # the same version: weights changed behind the counter, as an average of weights does
    tied.generator.sync(policy, tied._version)
    assert tied.generator.gap is not probed
    assert largest_gap(policy, tied.generator.generate(ask(tied.model), SAMPLED), ask(tied.model)) < 1e-4


def test_the_host_is_undisturbed(started: Any) -> None:
    """Global random state, threads and environment are what they were; vLLM changes all of them."""
    case = started("vllm-tied")
    policy = case.fresh()
    torch.manual_seed(7)
    before, variables, setter = torch.get_rng_state(), dict(os.environ), torch.set_num_threads
    case.generator.close()
    perturb(policy, 3)
    case.sync(policy)
    case.generator.generate(ask(case.model), SAMPLED)
    assert torch.equal(torch.get_rng_state(), before)
    changed = {name for name in {*variables, *os.environ} if variables.get(name) != os.environ.get(name)}
    assert all(name.startswith(("VLLM_", "DO_NOT_TRACK", "TORCHDYNAMO")) for name in changed), changed
    assert torch.set_num_threads is setter and torch.get_num_threads() == 1


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda generator: pickle.loads(pickle.dumps(generator))], ids=["deepcopy", "pickle"]
)
def test_a_copy_leaves_engine_and_policy_behind(tied: Case, copied: Any) -> None:
    tied.fresh()
    twin = copied(tied.generator)
    assert twin.engine is None and twin.settings == tied.generator.settings
    tied.generator.push = "merged"
    assert copied(tied.generator)._sender._push == "merged"
    tied.generator.push = "auto"
    with pytest.raises(GenerationError, match="before sync"):
        twin.generate(ask(tied.model), SAMPLED)


def test_what_does_not_fit_is_refused(tied: Case) -> None:
    tied.fresh()
    for temperature in (2.5, 0.001):
        with pytest.raises(ConfigError, match=rf"sampling\.temperature={temperature} .*0\.01 to 2"):
            tied.generator.generate(ask(tied.model), Sampling(temperature=temperature, max_new_tokens=4))
    with pytest.raises(ConfigError, match=r"max_new_tokens=400 is"):
        tied.generator.generate(ask(tied.model), Sampling(max_new_tokens=400))
    with pytest.raises(GenerationError, match="no tokens"):
        tied.generator.generate(dataclasses.replace(ask(tied.model), token_ids=[[], [3], [3], [3]]), SAMPLED)


def test_nan_weights_are_an_error(tied: Case) -> None:
    policy = tied.fresh()
    with torch.no_grad():
        policy.model.norm.weight[0] = torch.nan
    with pytest.raises(NumericError, match="NaN"):
        tied.sync(policy)
    tied.fresh()
