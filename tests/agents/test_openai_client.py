"""The openai package, which comes with verifiers, as the client of an agent: what it sends again is answered again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

openai = pytest.importorskip("openai")
import httpx  # noqa: E402  (comes with it)

from lit_rl.core.rollout import PromptBatch, Sampling  # noqa: E402
from lit_rl.generation import ChatEndpoint, RolloutFunction  # noqa: E402
from lit_rl.generation.collect import RolloutRequest, Vocabulary  # noqa: E402
from lit_rl.generation.native import NativeGenerator  # noqa: E402
from lit_rl.generation.rollout_function import RolloutCalls  # noqa: E402
from lit_rl.models import LanguageModel  # noqa: E402

ASKED = [{"role": "user", "content": "17+25="}]


class LosesAnswers(httpx.HTTPTransport):
    """Every first answer is lost on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.lost: list[bytes] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answer, body = super().handle_request(request), request.read()
        if body not in self.lost:
            answer.read()
            self.lost.append(body)
            raise httpx.ReadError("the answer was lost", request=request)
        return answer


def test_what_the_client_sends_again_is_answered_as_before() -> None:
    model = LanguageModel("tiny")
    lines = [LosesAnswers() for _ in range(3)]

    def turns(row: int, url: str) -> list[str]:
        http = httpx.Client(transport=lines[row])
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=2, http_client=http)
        messages: list[Any] = list(ASKED)
        for _ in range(2):
            said = client.chat.completions.create(model="policy", messages=messages).choices[0].message
            messages += [{"role": "assistant", "content": said.content}, {"role": "user", "content": "again"}]
        return [message["content"] for message in messages if message["role"] == "assistant"]

    async def agent(row: int, url: str) -> list[str]:
        return await asyncio.to_thread(turns, row, url)

    played: list[Any] = []

    def function(prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        played.append(ChatEndpoint(trainer).play(agent))
        return played[0].rollout

    source = RolloutCalls(RolloutFunction(function), model.tokenizer, {}, 80)
    drawn = RolloutRequest(
        PromptBatch([ASKED], [[1]], {}, [0], [0]),
        model.load().eval(),
        sampling=Sampling(max_new_tokens=6),
        group_size=3,
        vocabulary=Vocabulary.of(model),
        version=0,
        seed=3,
        interaction=source,
    ).send_to(NativeGenerator())()
    assert [len(line.lost) for line in lines] == [2, 2, 2] and drawn.turn is not None
    assert drawn.turn.max() == 1, "two turns, and no third one was drawn"
    for row, texts in enumerate(played[0].results):
        assert isinstance(texts, list), texts
        ids = [drawn.response_ids[row][drawn.response_mask[row] & (drawn.turn[row] == turn)] for turn in (0, 1)]
        assert texts == [model.tokenizer.decode(part, skip_special_tokens=True) for part in ids]
