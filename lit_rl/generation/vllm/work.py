"""What an engine is given to do: requests that may follow from each other, while others run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from lit_rl.generation.vllm.requests import Answer, Request


class Work(ABC):
    """Abstract: requests, and what becomes of their answers. Used by one thread."""

    at_once: int
    """Requests that are there at the same time, at most."""

    @abstractmethod
    def requests(self, *, wait: bool) -> list[tuple[int, Request]]:
        """What is there to be asked and was not given out yet, each with its number.

        A number comes again once its last request is done: then both texts begin alike.

        Args:
            wait: Until there is one or more. Only where no request runs; none then means that all is done.
        """

    @abstractmethod
    def done(self, number: int, answers: list[Answer]) -> None:
        """The answers of the request that was given out last with this number."""

    @abstractmethod
    def again(self) -> None:
        """The engine was lost and is back: begin anew.

        Raises:
            ConversationsLost: others have to do that.
        """

    @property
    @abstractmethod
    def progress(self) -> tuple[int, int]:
        """Completions that are done, and those that were asked for."""


class Completing(Work):
    """Requests that are known from the beginning.

    Args:
        requests: All of them.
        on_finished: Is told of the answers of a request, by its number, as they come.
    """

    def __init__(
        self, requests: Sequence[Request], on_finished: Callable[[int, list[Answer]], None] | None = None
    ) -> None:
        self.at_once, self._all, self._on_finished = len(requests), requests, on_finished
        self._asked = sum(request.completions for request in requests)
        self.again()

    @property
    def answers(self) -> list[list[Answer]]:
        """Of each request, in order. When all is done."""
        return [self._answers[number] for number in range(self.at_once)]

    def requests(self, *, wait: bool) -> list[tuple[int, Request]]:
        given, self._requests = self._requests, []
        return given

    def done(self, number: int, answers: list[Answer]) -> None:
        self._answers[number] = answers
        if self._on_finished is not None:
            self._on_finished(number, answers)

    def again(self) -> None:
        self._requests = list(enumerate(self._all))
        self._answers: dict[int, list[Answer]] = {}

    @property
    def progress(self) -> tuple[int, int]:
        return sum(map(len, self._answers.values())), self._asked
