"""The work of an engine: requests that may follow from each other, while others run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from lit_rl.generation.vllm.requests import Answer, Request


class Work(ABC):
    """Abstract: requests, and the use of their answers. Used by one thread."""

    at_once: int
    """Most requests at the same time."""

    @abstractmethod
    def requests(self, *, wait: bool) -> list[tuple[int, Request]]:
        """Return the requests that are ready and were not returned yet, each with its number.

        A number comes again once its last request is done: then both texts begin alike.

        Args:
            wait: Wait until there is one or more. Only where no request runs; none then means that all is done.
        """

    @abstractmethod
    def done(self, number: int, answers: list[Answer]) -> None:
        """Take the answers of the last request with this number."""

    @abstractmethod
    def again(self) -> None:
        """Begin again: the engine was lost and is back.

        Raises:
            ConversationsLost: others have to do that.
        """

    @property
    @abstractmethod
    def progress(self) -> tuple[int, int]:
        """The numbers of done and of requested completions."""


class Completing(Work):
    """Requests that are known from the beginning.

    Args:
        requests: All of them.
        on_finished: Called with the number of a request and its answers, as they arrive.
    """

    def __init__(
        self, requests: Sequence[Request], on_finished: Callable[[int, list[Answer]], None] | None = None
    ) -> None:
        self.at_once, self._all, self._on_finished = len(requests), requests, on_finished
        self._asked = sum(request.completions for request in requests)
        self.again()

    @property
    def answers(self) -> list[list[Answer]]:
        """The answers to each request, in order, when all is done."""
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
