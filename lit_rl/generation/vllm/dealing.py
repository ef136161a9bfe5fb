"""The distribution of requests over several servers: to the least loaded one, and away from one that is lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lit_rl.generation.vllm.requests import Request


@dataclass(frozen=True)
class Task:
    """A request that waits for its answer."""

    number: int
    """Its number in the work."""
    request: Request
    until: float
    """The deadline of the answer, by `time.monotonic`."""


def rooms_of(rank: int, world_size: int, servers: Sequence[int], at_once: Sequence[int]) -> dict[int, int]:
    """Return the servers in the order of a rank, each with the completions that the rank may give it.

    Ranks do not know the requests of others. So each begins at another server, and has its share of a server's
    capacity.

    Args:
        rank: This rank.
        world_size: Ranks that send requests.
        servers: Their numbers.
        at_once: Completions that each of them gets at once from all ranks together.
    """
    rooms = {server: -(-most // world_size) for server, most in zip(servers, at_once, strict=True)}
    first = rank * len(servers) // world_size
    return {server: rooms[server] for server in (*servers[first:], *servers[:first])}


class Dealer:
    """A dealer that gives each request to the server with the fewest tokens; of equals, the first. Depends on no clock.

    A server gets more as long as it has fewer completions than its capacity; other requests wait here for the first
    free server. The next turn of a request goes to the same server, whose cache holds its text.

    Args:
        rooms: Completions that each server gets at once, by its number; in the order of `rooms_of`.
    """

    def __init__(self, rooms: Mapping[int, int]) -> None:
        self._rooms = dict(rooms)
        self._running: dict[int, dict[int, Task]] = {server: {} for server in rooms}
        self._completions, self._tokens = dict.fromkeys(rooms, 0), dict.fromkeys(rooms, 0)
        self._homes: dict[int, int] = {}
        self._at_home: deque[tuple[int, Task]] = deque()
        self._waiting: deque[Task] = deque()

    @property
    def servers(self) -> list[int]:
        """The servers in use."""
        return list(self._rooms)

    @property
    def busy(self) -> bool:
        """Tell whether an answer is still to come."""
        return bool(self._waiting or self._at_home or any(self._running.values()))

    def add(self, task: Task) -> None:
        """Add a request."""
        home = self._homes.get(task.number)
        if home is None:
            self._waiting.append(task)
        else:
            self._at_home.append((home, task))

    def give(self) -> Iterator[tuple[int, Task]]:
        """Yield the requests to send now, each with its server."""
        while self._at_home:
            yield self._given(*self._at_home.popleft())
        while self._waiting and (free := [s for s, room in self._rooms.items() if self._completions[s] < room]):
            yield self._given(min(free, key=lambda server: self._tokens[server]), self._waiting.popleft())

    def _given(self, server: int, task: Task) -> tuple[int, Task]:
        self._homes[task.number] = server
        self._running[server][task.number] = task
        self._completions[server] += task.request.completions
        self._tokens[server] += task.request.most_tokens
        return server, task

    def done(self, server: int, number: int) -> bool:
        """Record an answer; return False where it comes from a lost server, and its request went to another."""
        task = self._running.get(server, {}).pop(number, None)
        if task is None:
            return False
        self._completions[server] -= task.request.completions
        self._tokens[server] -= task.request.most_tokens
        return True

    def lose(self, server: int) -> int:
        """Drop a server. Its open requests go to the others, before all others; return their number."""
        del self._rooms[server]
        left = [*self._running.pop(server).values(), *(task for home, task in self._at_home if home == server)]
        self._at_home = deque((home, task) for home, task in self._at_home if home != server)
        self._homes = {number: home for number, home in self._homes.items() if home != server}
        self._waiting.extendleft(reversed(left))
        return len(left)
