"""The client of a teacher that is a server, against a stand-in that answers as vLLM does, or late, or badly."""

from __future__ import annotations

import copy
import json
import math
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from standin_server import Behaviour, Handler, StandIn, answers, breaks_off, hangs, standing_in

from lit_rl.core.errors import ConfigError, GenerationError
from lit_rl.core.rollout import Sampling
from lit_rl.generation.teacher_server import TeacherServer
from lit_rl.models import LanguageModel

TOKENIZER = LanguageModel("tiny").tokenizer
ROW = [5, 6, 7, 8]


def logprob(position: int, token: int) -> float:
    """What the stand-in says of a token: half of the rest for each next one, from a token that is its position."""
    return -math.log(2) * (1 + (token - position) % 512)


def listed(ids: list[int], k: int) -> list[Any]:
    """As vLLM lists them: the token itself, and the k likeliest."""
    found: list[Any] = [None]
    for at, token in enumerate(ids[1:], start=1):
        tokens = dict.fromkeys([token, *(at + i for i in range(k))])
        found.append({str(each): {"logprob": logprob(at, each), "rank": 1, "decoded_token": "x"} for each in tokens})
    return found


def completion(body: dict[str, Any]) -> dict[str, Any]:
    prompt = body["prompt"]
    ids = prompt if isinstance(prompt, list) else TOKENIZER(prompt, add_special_tokens=False)["input_ids"]
    choice = {"index": 0, "text": "", "finish_reason": "length", "token_ids": [3], "prompt_token_ids": ids}
    return (
        {"choices": [{**choice, "prompt_logprobs": listed(ids, body["prompt_logprobs"])}]}
        if "prompt_logprobs" in body
        else {"choices": [choice]}
    )


class StandInTeacher:
    """Not vLLM: a stand-in that answers by a rule, and as a test tells it to."""

    def __init__(self) -> None:
        self.models: list[dict[str, Any]] = [{"id": "large", "max_model_len": 64}]
        self.change: Callable[[dict[str, Any]], Any] = lambda answer: answer
        self.first: list[Behaviour] = []
        self.lock, self.now, self.most = threading.Lock(), 0, 0
        self.delay = 0.0

    def __call__(self, handler: Handler) -> None:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
            behaviour = self.first.pop(0) if self.first and handler.command == "POST" else None
        time.sleep(self.delay)
        try:
            if behaviour is not None:
                behaviour(handler)
            elif handler.path == "/v1/models":
                answers({"data": self.models})(handler)
            else:
                answers(self.change(completion(handler.asked)))(handler)
        finally:
            with self.lock:
                self.now -= 1


@pytest.fixture
def rule() -> StandInTeacher:
    return StandInTeacher()


@pytest.fixture
def server(rule: StandInTeacher) -> Iterator[StandIn]:
    with standing_in(rule) as server:
        yield server


def teacher_at(server: StandIn, **settings: Any) -> TeacherServer:
    return TeacherServer(f"{server.url}/v1", **{"backoff": 0.01, "timeout": 5.0, **settings})


def connected(server: StandIn, k: int = 2, **settings: Any) -> TeacherServer:
    teacher = teacher_at(server, **settings)
    teacher.connect(TOKENIZER, k)
    server.seen.clear()
    return teacher


# ------------------------------------------------------------------ what comes back


def test_a_row_has_the_log_probs_of_its_tokens_and_the_likeliest_ones_in_order(server):
    (found,) = connected(server).score_rows([ROW], [2], 2)
    assert found.log_probs.tolist() == pytest.approx([logprob(2, 7), logprob(3, 8)])
    assert found.top_ids.tolist() == [[2, 3], [3, 4]]
    torch.testing.assert_close(found.top_log_probs, torch.tensor([[0.5, 0.25]] * 2).log())
    ((verb, path, _, body),) = server.seen
    assert (verb, path) == ("POST", "/v1/completions")
    asked = {"model": "large", "prompt": ROW, "prompt_logprobs": 2, "max_tokens": 1, "temperature": 1.0}
    assert body == {**asked, "return_token_ids": True}


def test_a_first_token_has_none_and_without_k_there_are_no_likeliest_ones(server):
    (found, empty) = connected(server, 0).score_rows([ROW, ROW], [0, 4], 0)
    assert found.log_probs[0].isnan() and found.log_probs[1:].isfinite().all()
    assert found.top_ids.shape == (4, 0) and empty.log_probs.shape == (0,)
    assert len(server.seen) == 1  # nothing is asked about nothing


def test_rows_come_back_in_their_order(server, rule):
    rows = [[5, 6, at] for at in range(10, 30)]
    found = connected(server, 0, concurrency=3).score_rows(rows, [2] * 20, 0)
    assert [each.log_probs.item() for each in found] == pytest.approx([logprob(2, row[2]) for row in rows])
    assert rule.most <= 3


def test_requests_under_way_are_shared_by_the_processes_of_a_run(server, rule, monkeypatch):
    teacher = connected(server, 0)
    monkeypatch.setattr("lit_rl.core.ranks.world_size", lambda: 4)
    twin = pickle.loads(pickle.dumps(teacher))
    twin._name, twin._vocabulary, rule.delay = "large", len(TOKENIZER), 0.1
    twin.score_rows([ROW] * 24, [1] * 24, 0)
    assert 4 <= rule.most <= 8


def test_a_token_that_the_teacher_excludes_is_minus_infinity(server, rule):
    def exclude(answer):
        answer["choices"][0]["prompt_logprobs"][3]["8"]["logprob"] = -9999.0
        return answer

    teacher = connected(server, 0)
    rule.change = exclude
    (found,) = teacher.score_rows([ROW], [2], 0)
    assert found.log_probs.tolist() == [pytest.approx(logprob(2, 7)), -math.inf]


def test_where_a_likeliest_token_is_none_of_the_students_there_are_none(server, rule):
    def rename(answer):
        entry = answer["choices"][0]["prompt_logprobs"][3]
        entry[str(len(TOKENIZER))] = entry.pop("3")
        return answer

    teacher = connected(server)
    rule.change = rename
    (found,) = teacher.score_rows([ROW], [2], 2)
    assert found.top_ids.tolist() == [[2, 3], [0, 0]] and found.top_log_probs.isnan().tolist() == [
        [False] * 2,
        [True] * 2,
    ]
    assert found.log_probs.isfinite().all()


# ------------------------------------------------------------------ at start


def test_the_one_model_is_taken_and_several_have_to_be_named(server, rule):
    assert "large at" in repr(connected(server))
    rule.models = [{"id": "large", "max_model_len": None}, {"id": "larger"}]
    assert "larger at" in repr(connected(server, model="larger"))
    with pytest.raises(ConfigError, match=r"algo\.teacher\.model is not set.*large, larger"):
        connected(server)
    with pytest.raises(ConfigError, match=r"algo\.teacher\.model='small'.*large, larger"):
        connected(server, model="small")


def test_another_vocabulary_is_refused(server, rule):
    def other(answer):
        answer["choices"][0]["prompt_token_ids"] = [1, 2, 3]
        return answer

    rule.change = other
    with pytest.raises(ConfigError, match=r"\[1, 2, 3\], the student as .*different vocabularies"):
        connected(server)


def test_special_tokens_are_compared_too(server):
    teacher_at(server).connect(TOKENIZER, 0)
    prompts = [body["prompt"] for _, _, _, body in server.seen if body is not None]
    assert set(map(str, TOKENIZER.all_special_tokens)) <= {each for each in prompts if isinstance(each, str)}


def test_fewer_tokens_than_are_asked_for_are_refused_with_the_flag(server, rule):
    said = "Requested prompt logprobs of 50, which is greater than max allowed: 20"

    def refuse(handler: Handler) -> None:
        asks = (handler.asked or {}).get("prompt_logprobs", 0) > 20
        answers({"error": {"message": said}}, 400)(handler) if asks else rule(handler)

    with standing_in(refuse) as picky:
        connected(picky, 20)
        with pytest.raises(ConfigError, match=r"max allowed: 20.*--max-logprobs.*algo\.distillation\.top_k"):
            connected(picky, 50)


@pytest.mark.parametrize("wrong", [{"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
def test_a_rollout_at_another_temperature_is_refused(server, wrong):
    teacher = teacher_at(server)
    teacher.refuse_other_sampling(Sampling())
    with pytest.raises(ConfigError, match=rf"sampling\.{next(iter(wrong))}=.*temperature=1\.0.*algo/teacher=model"):
        teacher.refuse_other_sampling(Sampling(**wrong))


@pytest.mark.parametrize(
    "given, words",
    [
        ({"base_url": "http://far.example/v1"}, r"^algo\.teacher\.base_url: 'http://far.example/v1'.*allow_http"),
        ({"base_url": "near:8000"}, r"^algo\.teacher\.base_url"),
        ({"base_url": "https://me:s3cret@near.example"}, r"^algo\.teacher\.base_url: (?!.*s3cret)"),
        ({"key_env": "NO_SUCH_KEY"}, r"^algo\.teacher\.key_env='NO_SUCH_KEY'"),
        ({"concurrency": 0}, r"algo\.teacher\.concurrency=0"),
        ({"attempts": 0}, r"algo\.teacher\.attempts=0"),
        ({"timeout": 0}, r"algo\.teacher\.timeout=0"),
        ({"backoff": -1}, r"algo\.teacher\.backoff=-1"),
        ({"patience": -1}, r"algo\.teacher\.patience=-1"),
    ],
)
def test_bad_settings_are_refused_with_their_key(given, words):
    with pytest.raises(ConfigError, match=words):
        TeacherServer(**{"base_url": "https://near.example/v1", **given})


# ------------------------------------------------------------------ faults


def test_a_request_that_fails_is_sent_again_and_a_refusal_is_not(server, rule):
    teacher = connected(server)
    rule.first = [breaks_off, answers("busy", 500), answers("no json")]
    (found,) = teacher.score_rows([ROW], [2], 2)
    assert found.log_probs.isfinite().all() and len(server.seen) == 4
    rule.first = [answers({"error": {"message": "no such token"}}, 400)]
    with pytest.raises(GenerationError, match="400.*no such token"):
        teacher.score_rows([ROW], [2], 2)
    assert len(server.seen) == 5


def test_a_server_that_asks_for_it_is_left_alone(server, rule):
    def later(handler: Handler) -> None:
        handler.send_response(429)
        handler.send_header("Retry-After", "0.3")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    teacher = connected(server, attempts=1)
    rule.first, began = [later], time.monotonic()
    teacher.score_rows([ROW], [2], 2)
    assert time.monotonic() - began > 0.3


def test_a_lost_server_ends_the_run_with_the_generators_code(server, rule):
    teacher = connected(server, attempts=2, timeout=0.2)
    rule.first = [hangs(), hangs()]
    with pytest.raises(GenerationError, match=r"within 0.2 seconds.*asked 2 times.*algo\.teacher\.timeout") as lost:
        teacher.score_rows([ROW], [2], 2)
    assert lost.value.exit_code == 5
    with pytest.raises(GenerationError, match=r"^The teacher at \S+:9/v1: GET /models: Connection refused\. Is the"):
        TeacherServer("http://127.0.0.1:9/v1", attempts=1).connect(TOKENIZER, 0)


def test_the_first_row_that_fails_ends_the_others(server, rule):
    teacher = connected(server, attempts=1, concurrency=4)
    rule.first = [hangs(), hangs(), answers("", 400)]
    began = time.monotonic()
    with pytest.raises(GenerationError, match="400"):
        teacher.score_rows([ROW] * 3, [2] * 3, 2)
    assert time.monotonic() - began < 2


def test_a_row_that_is_too_long_is_refused_before_it_is_sent(server):
    teacher = connected(server)
    teacher.score_rows([[5] * 63], [60], 0)
    with pytest.raises(GenerationError, match=r"reads 64 tokens.*has 64.*--max-model-len"):
        teacher.score_rows([[5] * 64], [60], 0)
    assert len(server.seen) == 1


def spoil(value: Any) -> Callable[[dict[str, Any]], Any]:
    """Replace the log-prob of the row's last token."""

    def change(answer: dict[str, Any]) -> Any:
        answer["choices"][0]["prompt_logprobs"][-1]["8"]["logprob"] = value
        return answer

    return change


def put(name: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    def change(answer: dict[str, Any]) -> Any:
        answer["choices"][0][name] = value
        return answer

    return change


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda answer: {"choices": []}, "choices"),
        (lambda answer: [], "choices"),
        (put("prompt_logprobs", None), "prompt_logprobs is null"),
        (put("prompt_logprobs", [None] * 3), "a list of 4, one for each token, not of 3"),
        (put("prompt_logprobs", [None] * 4), r"prompt_logprobs\[2\] is null.*object of token ids"),
        (put("prompt_logprobs", [{"a": {}}] * 4), r"prompt_logprobs\[2\]"),
        (
            put("prompt_logprobs", [{"7": {"logprob": -1}, "8": {"logprob": -2}}] * 3 + [{"1": {"logprob": -1}}]),
            "token 8",
        ),
        (put("prompt_token_ids", [5, 6, 7]), "the token ids that were sent"),
        (spoil("x"), r"prompt_logprobs\[3\]\.8\.logprob.*a number of at most 0"),
        (spoil(True), "a number of at most 0"),
        (spoil(1.5), "a number of at most 0"),
        (spoil(0.0), "mass is at most 1.*--logprobs-mode"),
    ],
)
def test_an_answer_that_is_not_vllms_is_no_log_prob(server, rule, change, words):
    teacher = connected(server, attempts=1)
    rule.change = change
    with pytest.raises(GenerationError, match=rf"none of vLLM's: .*{words}"):
        teacher.score_rows([ROW], [2], 2)


def test_fewer_likeliest_tokens_than_asked_for_are_refused(server, rule):
    teacher = connected(server, attempts=1)
    rule.change = put("prompt_logprobs", [None, *({str(token): {"logprob": -1.0}} for token in ROW[1:])])
    with pytest.raises(GenerationError, match="2 tokens or more"):
        teacher.score_rows([ROW], [2], 2)


def test_the_key_is_sent_and_said_nowhere(server, rule, monkeypatch):
    monkeypatch.setenv("MY_KEY", "s3cret")
    teacher = connected(server, key_env="MY_KEY")
    for twin in (copy.deepcopy(teacher), pickle.loads(pickle.dumps(teacher))):
        assert "s3cret" not in repr(vars(twin)) and "s3cret" not in json.dumps(twin.__getstate__())
    rule.first = [answers("", 401)]
    with pytest.raises(GenerationError, match=r"algo\.teacher\.key_env=MY_KEY") as refused:
        teacher.score_rows([ROW], [2], 2)
    assert "s3cret" not in str(refused.value)
    assert {headers["Authorization"] for _, _, headers, _ in server.seen} == {"Bearer s3cret"}
