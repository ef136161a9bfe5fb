"""Conversations with vLLM: a request for each row and turn, and no row waits for another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from lit_rl.errors import ConfigError
from lit_rl.generation.base import ConversationsLost
from lit_rl.generation.batches import Decoded, assemble
from lit_rl.generation.responses import Responses
from lit_rl.generation.vllm.requests import Answer, Request, checked, turn_request
from lit_rl.generation.vllm.work import Work
from lit_rl.rollout import Completions, Prompts, Sampling
from lit_rl.turns import Heard


class Conversing(Work):
    """The conversations of all rows of a request, numbered as the completions are.

    The first turns equal those without a responder. The seed of a later one is made of the prompt's key, the turn and
    the sample, and so depends on no other row. A row's earlier text is in the engine's prefix cache, except for the
    last block.

    Args:
        prompts: The requested completions; their responder answers.
        sampling: How to draw; ``max_new_tokens`` are those of a turn.
        version: The version of the engine's weights.
        never: Forbidden tokens.
        kwargs: Further fields of every request, by vLLM's names.
    """

    def __init__(
        self,
        prompts: Prompts,
        sampling: Sampling,
        version: int,
        never: Sequence[int] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.at_once = len(prompts) * prompts.group_size
        self._prompts, self._sampling, self._version, self._never = prompts, sampling, version, never
        self._kwargs = kwargs
        self._responses = Responses(prompts, sampling, self.at_once, torch.device("cpu"))
        self._requests = [(row, self._request(row)) for row in range(self.at_once)]
        self._open = self.at_once

    def requests(self, *, wait: bool) -> list[tuple[int, Request]]:
        responder = self._prompts.responder
        assert responder is not None
        given, self._requests = self._requests, []
        while self._open and not given:
            heard = responder.answers(wait=wait)
            for each in heard:
                _refuse_images(each)
                if self._responses.hear(each):
                    given.append((each.row, self._request(each.row)))
                else:
                    self._open -= 1
            if not wait:
                break
        return given

    def done(self, number: int, answers: list[Answer]) -> None:
        responder, (answer,) = self._prompts.responder, answers
        assert responder is not None
        checked(answer, number, self._version, self._never)
        self._responses.take(number, answer.token_ids, answer.logprobs, ended=answer.ended)
        (said,) = self._responses.said([number])
        responder.tell(said)

    def again(self) -> None:
        raise ConversationsLost(f"The engine was lost in the middle of {self.at_once} conversations, and is back.")

    @property
    def progress(self) -> tuple[int, int]:
        return self.at_once - self._open, self.at_once

    def completions(self, device: torch.device) -> Completions:
        """Return the finished conversations on this device."""
        said = replace(self._responses.decoded(), kept_logmass=None)  # the engine does not report it
        moved: dict[str, Any] = {name: None if part is None else part.to(device) for name, part in vars(said).items()}
        rows = torch.arange(self.at_once)
        return assemble(self._prompts, [(rows, Decoded(**moved))], version=self._version, device=device)

    def _request(self, row: int) -> Request:
        """Return the next turn of a row, with its text so far and the room for it."""
        turn, (text,), room = self._responses.turn(row), self._responses.texts([row]), self._responses.room(row)
        return turn_request(self._prompts, self._sampling, row, turn, text, room, self._kwargs)


def _refuse_images(heard: Heard) -> None:
    """Refuse an answer with an image: an engine gets tokens, and shows images of prompts alone.

    Raises:
        ConfigError: an answer shows one.
    """
    if heard.seen:
        raise ConfigError(
            "A tool or an environment returned an image, and generator=vllm and vllm_server show images of prompts "
            "alone. Take generator=native, or hf."
        )
