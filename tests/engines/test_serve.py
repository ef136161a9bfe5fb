"""`lit-rl serve`: vLLM's own server as real processes, and how each end of it leaves nothing behind."""

from __future__ import annotations

import math
import os
import shlex
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from server_processes import Served, children, end, is_free, start
from waiting import until

from lit_rl.core.errors import ConfigError, GenerationError
from lit_rl.core.http_client import HTTP_LOOP
from lit_rl.core.processes import group_members
from lit_rl.generation.teacher_server import TeacherServer
from lit_rl.generation.vllm.client import Client, ServerHung, ServerRefused
from lit_rl.generation.vllm.engine_settings import API_KEY_VARIABLE, EngineSettings, model_arguments
from lit_rl.generation.vllm.launch import ServerProcess, server_arguments
from lit_rl.models import LanguageModel
from lit_rl.rewards import JudgeReward, Rewards
from lit_rl.runs.serve import Serve, serve

wait = HTTP_LOOP.wait

PROMPT = [5 + 3 * i % 200 for i in range(40)]
RANK = 4
LENGTH = 384
SOON = 240.0
"""Seconds that a start may take on a machine with other work."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(API_KEY_VARIABLE, "of-these-tests")
        running = start(tmp_path_factory.mktemp("serve"), f"model.lora.r={RANK}", f"generator.max_model_len={LENGTH}")
        try:
            yield running.wait_ready()
        finally:
            end(running)


def complete(client: Client, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": "tiny", "prompt": [PROMPT], "max_tokens": 8, "logprobs": 0, "seed": 1, "ignore_eos": True}
    asked = {**body, "return_token_ids": True, "return_tokens_as_token_ids": True, **fields}
    return wait(client.complete(asked, 60)).part("choices").value


def worst(choices: list[dict[str, Any]], policy: Any, temperature: float = 1.0) -> float:
    """The largest difference of a log-prob to the policy's."""
    gaps = []
    for choice in choices:
        assert choice["prompt_token_ids"] == PROMPT
        row = torch.tensor([PROMPT + choice["token_ids"]])
        with torch.no_grad():
            logits = policy.eval()(row).logits[0, len(PROMPT) - 1 : -1].float()
        ours = torch.log_softmax(logits / temperature, -1).gather(-1, row[0, len(PROMPT) :, None])[:, 0]
        gaps.append((ours - torch.tensor(choice["logprobs"]["token_logprobs"])).abs().max().item())
    return max(gaps)


def test_it_says_what_a_run_has_to_be_given(served):
    (line,) = [line for line in served.said.splitlines() if "generator=" in line]
    words = shlex.split(line)
    described = ["model=tiny", f"model.lora.r={RANK}", f"generator.max_model_len={LENGTH}"]
    assert words == ["generator=vllm_server", f"generator.urls=[{served.url}]", *described]
    assert f"up to {LENGTH} tokens" in served.said


def test_every_route_asks_for_the_key_and_an_open_address_needs_one(served, monkeypatch):
    """vLLM's own guard leaves those open that replace weights and call any method of a worker."""
    client = Client(served.url)
    assert wait(client.rpc("lit_rl_facts", deadline=60))
    for key in ("", "of-these-test"):
        monkeypatch.setenv(API_KEY_VARIABLE, key)
        for route in ("/collective_rpc", "/pause", "/v1/completions", "/openapi.json"):
            with pytest.raises(ServerRefused, match="401"):
                wait(client.post(route, 60.0, {}))
        wait(client.get("/health", 60.0))
    monkeypatch.setenv(API_KEY_VARIABLE, "")
    with pytest.raises(ConfigError, match=f"serve.host=0.0.0.0 without a key.*{API_KEY_VARIABLE}"):
        serve(Serve(LanguageModel("tiny"), EngineSettings(), host="0.0.0.0"))


def test_token_ids_go_in_and_come_out_with_the_models_own_logprobs(served):
    policy = LanguageModel("tiny").load()
    choices = complete(Client(served.url), n=4)
    assert len(choices) == 4 and all(len(choice["token_ids"]) == 8 for choice in choices)
    assert worst(choices, policy) < 1e-4
    assert worst(complete(Client(served.url), n=4, temperature=0.5), policy, temperature=0.5) < 1e-4


def test_it_judges_completions_as_a_reward(served):
    """The policy that ships is no judge: its replies are of a form that the server enforces, or counted as failures."""
    rubric = {"criteria": [{"name": "good", "text": "Is it good?"}]}
    regex = r'\{"good": \{"reason": "[a-z ]{1,8}", "verdict": "(no|yes)"\}\}'
    forced = {"response_format": None, "structured_outputs": {"regex": regex}}
    for extra_body in (forced, None):
        judge = JudgeReward(
            f"{served.url}/v1",
            "tiny",
            rubric=rubric,
            template="$criteria\n$prompt$completion\n$form",
            max_tokens=96,
            extra_body=extra_body,
            key_env=API_KEY_VARIABLE,
        )
        rewards = Rewards({"judge": judge})
        scores = rewards.score(["1+1="] * 3, ["2", "3", "2"], {}, completion_ids=[[1]] * 3)
        means = {name.rpartition("/")[2]: total / count for name, (total, count) in scores.metrics.items()}
        assert means["unanswered"] == 0 and means["requests"] == 2 / 3  # equal ones are asked about once
        assert 20 < means["prompt_tokens"] < LENGTH and 0 < means["completion_tokens"] <= 96
        values = scores.total.tolist()
        assert set(values) <= {0.0, 1.0} if extra_body else means["unparsable"] == sum(map(math.isnan, values)) / 3


def test_it_teaches_by_the_log_probs_of_given_tokens(served):
    """At temperature 1 whatever a request says, which is why another one is refused."""
    model = LanguageModel("tiny")
    rows, starts, vocabulary = [PROMPT, PROMPT[:20] * 2 + [7], [3, 4]], [30, 1, 0], len(model.tokenizer)
    teacher = TeacherServer(f"{served.url}/v1", key_env=API_KEY_VARIABLE)
    for k in (0, 5, vocabulary):
        teacher.connect(model.tokenizer, k)
        for row, begin, found in zip(rows, starts, teacher.score_rows(rows, starts, k), strict=True):
            with torch.no_grad():
                logprobs = model.load().eval()(torch.tensor([row])).logits[0, :-1].float().log_softmax(-1)
            first = max(begin, 1)
            wanted, given = logprobs[first - 1 :], slice(first - begin, None)
            own = wanted.gather(-1, torch.tensor(row[first:])[:, None])[:, 0]
            torch.testing.assert_close(found.log_probs[given], own, atol=1e-4, rtol=0)
            ids, values = found.top_ids[given], found.top_log_probs[given]
            torch.testing.assert_close(values, wanted.gather(-1, ids), atol=1e-4, rtol=0)
            torch.testing.assert_close(values, wanted.topk(k).values, atol=1e-4, rtol=0)
            assert begin > 0 or (found.log_probs[0].isnan() and found.top_log_probs[0].isnan().all())
    asked = [
        complete(Client(served.url), max_tokens=1, prompt_logprobs=2, temperature=temperature, top_p=top_p)
        for temperature, top_p in ((1.0, 1.0), (0.3, 0.5))
    ]
    assert asked[0][0]["prompt_logprobs"] == asked[1][0]["prompt_logprobs"]


def test_a_teacher_says_what_is_wrong_with_it(served, monkeypatch):
    model = LanguageModel("tiny")
    with pytest.raises(GenerationError, match=r"reads 384 tokens"):
        teacher = TeacherServer(f"{served.url}/v1", key_env=API_KEY_VARIABLE)
        teacher.connect(model.tokenizer, 0)
        teacher.score_rows([[5] * LENGTH], [1], 0)
    with pytest.raises(ConfigError, match="max allowed.*--max-logprobs"):
        teacher.connect(model.tokenizer, 10**4)
    with pytest.raises(ConfigError, match="different vocabularies"):
        teacher.connect(LanguageModel("digits").tokenizer, 0)
    with pytest.raises(GenerationError, match=r"401.*key_env=None"):
        TeacherServer(f"{served.url}/v1").connect(model.tokenizer, 0)


def test_an_adapter_of_the_models_rank_fits_and_a_higher_one_does_not(served, tmp_path):
    from lit_rl.models import Lora

    client = Client(served.url)
    for rank in (RANK, 2 * RANK + 1):
        policy = LanguageModel("tiny", lora=Lora(r=rank)).load()
        torch.manual_seed(rank)
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        policy.save_pretrained(str(tmp_path / str(rank)))
        if rank > RANK:
            with pytest.raises(ServerRefused, match="rank"):
                wait(client.load_adapter("policy", str(tmp_path / str(rank)), 30))
        else:
            wait(client.load_adapter("policy", str(tmp_path / str(rank)), 30))
            choices = complete(client, model="policy", n=2)
            assert worst(choices, policy) < 1e-4 < worst(choices, LanguageModel("tiny").load())
            wait(client.post("/v1/unload_lora_adapter", 30, {"lora_name": "policy"}))
    assert list(wait(client.models(10))) == ["tiny"]


def test_what_updates_weights_can_be_called(served):
    client = Client(served.url)
    (facts,) = wait(client.rpc("lit_rl_facts", deadline=10))
    assert facts["logprobs_mode"] == "processed_logprobs" and facts["dtype"] == "float32"
    assert facts["max_lora_rank"] >= RANK
    assert wait(client.world_size(10)) == 1
    wait(client.pause(10))
    assert wait(client.get("/is_paused", 10)).value == {"is_paused": True}
    began = time.monotonic()
    with pytest.raises(ServerHung, match="within 0.7 seconds"):
        wait(client.complete({"model": "tiny", "prompt": [PROMPT], "max_tokens": 1}, 0.7))
    assert time.monotonic() - began < 3
    wait(client.reset_caches(10))
    wait(client.resume(10))
    assert wait(client.get("/is_paused", 10)).value == {"is_paused": False}
    assert len(complete(client)[0]["token_ids"]) == 8
    with pytest.raises(ServerRefused, match="no_such_method") as refusal:
        wait(client.rpc("no_such_method", deadline=10))
    assert refusal.value.status == 500


def test_a_stopped_server_hangs_and_goes_on(served):
    client = Client(served.url)
    os.killpg(served.group, signal.SIGSTOP)
    try:
        with pytest.raises(ServerHung, match="within 0.5 seconds"):
            wait(client.health(0.5))
    finally:
        os.killpg(served.group, signal.SIGCONT)
    wait(client.health(10))


def test_a_server_that_dies_ends_the_command_with_its_last_lines(served):
    """The last test of it. (Ctrl-C: `test_engine_runs.py`, where a run loses its server for good.)"""
    group = served.group
    assert len(group_members(group)) >= 3 and not is_free(served.url)
    engine = [pid for pid in group_members(group) if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(engine[0], signal.SIGKILL)
    _, err = served.process.communicate(timeout=60)
    assert served.process.returncode == 5, err
    assert "ended" in err and "The last lines of" in err and "Traceback" not in err.partition("The last lines")[0]
    assert group_members(group) == [] and is_free(served.url)


@pytest.mark.parametrize("number, code, processes", [(signal.SIGTERM, 143, 2), (signal.SIGKILL, -9, 4)])
def test_a_parent_that_is_ended_while_the_server_starts_leaves_no_orphan(tmp_path, number, code, processes):
    running = start(tmp_path)
    try:
        # Two are the supervisor and the server; four have what the server starts among them.
        assert until(lambda: any(len(group_members(g)) >= processes for g in children(running.process.pid)), SOON)
        group = running.group
        running.process.send_signal(number)
        assert running.process.wait(60) == code
        assert until(lambda: not group_members(group), 20)
    finally:
        end(running)


def test_a_server_that_cannot_start_says_why(tmp_path):
    settings = EngineSettings(max_model_len=10**6)
    engine = settings.engine_arguments(model_dtype="float32", cpu=True) | model_arguments(LanguageModel("tiny"))
    arguments = server_arguments(engine, name="tiny", host="127.0.0.1", port=0)
    server = ServerProcess(arguments, url="http://127.0.0.1:9", cpu=True, log=tmp_path / "log")
    server.start()
    group = server.group
    assert group is not None
    with pytest.raises(
        GenerationError, match=r"(?s)before it was ready.\nIts first error: \S*Error: .*The last.*1000000"
    ):
        server.wait_healthy(SOON)
    assert group_members(group) == [] and not server.alive


def test_a_taken_port_is_said_before_anything_starts(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        outcome = start(tmp_path, f"serve.port={port}")
        _, err = outcome.process.communicate(timeout=SOON)
        assert outcome.process.returncode == 2 and f"serve.port={port}" in err and "Traceback" not in err
    assert not (tmp_path / "server.log").exists()
