"""Replay of episodes: a journal of replies on disk, and an environment that can be made again in mid-episode.

`env.journal` holds the replies of rollouts that no checkpoint holds yet. Its folder has a file of JSON Lines for each
rollout and rank. A line is handed to the operating system before the policy reads the reply: a killed process loses
the reply it waited for, and no other (a power failure may lose more).

`ReplayableEnvironment` repeats an episode's calls to a new environment where the worker or the run was killed. The new
one has to answer the same; else the episode fails, since the policy would go on in another world than the one it read
of. Replies that the journal holds are not requested again, unless a later one is missing.
"""

from __future__ import annotations

import base64
import copy
import dataclasses
import hashlib
import io
import json
import os
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from lit_rl.core.episode import End
from lit_rl.core.errors import ConfigError, LitRLError, StorageError, excerpt
from lit_rl.core.process_state import is_raised_by_user_code
from lit_rl.core.visuals import ImageRef
from lit_rl.environments.environment_base import Environment, Opening, Reply, Turn
from lit_rl.environments.environment_pool import ObjectLost
from lit_rl.environments.runner import CALL_CONTEXT, NoReply, TimedOut


@dataclass(frozen=True)
class JournalEntry:
    """The result of one call of an environment."""

    result: Any = None
    """An opening, a reply, or a reward."""
    failed: tuple[End, str] | None = None
    """The end of an episode that failed here, and the error."""


EpisodeName = tuple[int, ...]
"""The name of an episode in its rollout: number of the request, data row, occurrence, sample, seed."""
_EntryKey = tuple[str, str | None]
"""A place in an episode: ``reset``, a turn's number or ``reward``, and the digest of the action; None: of any."""


class Journal:
    """The journal of a run's replies.

    Args:
        folder: Folder of the files; made when there is something to write.
        rank: Rank of this process. Each writes a file of its own, and reads those of all.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._rollout = -1
        self._file: io.FileIO | None = None
        self._entries: dict[EpisodeName, dict[_EntryKey, JournalEntry]] = {}
        self._requests: list[Any] = []
        self._saved = -1

    def request(self, rollout: int, asked: Any) -> Callable[..., EpisodeJournal]:
        """Return a function that names the episodes of one request of a rollout: by row, occurrence, sample and seed.

        Args:
            rollout: Index, 0 or more.
            asked: The request. The same object again is the same request, drawn once more after an engine was lost.

        Raises:
            StorageError: the files cannot be read.
        """
        if rollout != self._rollout:
            self._open(rollout)
        number = next((n for n, other in enumerate(self._requests) if other is asked), len(self._requests))
        if number == len(self._requests):
            self._requests.append(asked)
        return lambda *name: EpisodeJournal(self, (number, *name))

    def saved(self, rollout: int) -> None:
        """Prepare for a checkpoint that holds this rollout. Replies of the rollouts in the checkpoint before it are
        removed: that one is complete, so a resumed run begins after them."""
        for path in self._folder.glob("rollout_*.rank_*.jsonl"):
            number = path.name.removeprefix("rollout_").partition(".")[0]
            if number.isdigit() and int(number) <= self._saved:
                path.unlink(missing_ok=True)
        self._saved = max(rollout, self._saved)

    def forget(self) -> None:
        """Remove the replies of the current rollout, so that a resumed run requests them again."""
        self._file = None
        self._path.unlink(missing_ok=True)
        self._entries = {}

    def known(self, name: EpisodeName, place: _EntryKey) -> JournalEntry | None:
        """Return the entry of a call that was made before; None where there is none."""
        entries = self._entries.get(name, {})
        return entries.get(place) or entries.get((place[0], None))

    def write(self, name: EpisodeName, place: _EntryKey, entry: JournalEntry) -> None:
        """Append a line.

        Raises:
            StorageError: it cannot be written.
            ConfigError: the reply is more than text, numbers, lists and dicts of these.
        """
        self._entries.setdefault(name, {})[place] = entry
        try:
            line = json.dumps([name, *place, _plain(entry.result), entry.failed], default=_image_as_json)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"env.journal cannot write a reply of the environment: {error}.") from error
        try:
            if self._file is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._file = io.FileIO(self._path, "a")
            data = f"{line}\n".encode()
            while data:  # a system may take less than it is given, where the disk is nearly full
                data = data[self._file.write(data) or 0 :]
        except OSError as error:
            raise StorageError(f"env.journal: {self._path} cannot be written: {error}.") from error

    @property
    def _path(self) -> Path:
        return self._folder / f"rollout_{self._rollout}.rank_{self._rank}.jsonl"

    def _open(self, rollout: int) -> None:
        self._rollout, self._file, self._requests, self._entries = rollout, None, [], {}
        if self._path.exists():
            data = self._path.read_bytes()
            if data and not data.endswith(b"\n"):  # a process was killed while it wrote
                os.truncate(self._path, data.rfind(b"\n") + 1)
        for path in sorted(self._folder.glob(f"rollout_{rollout}.rank_*.jsonl")):
            self._read(path)

    def _read(self, path: Path) -> None:
        try:
            for line in path.read_bytes().splitlines(keepends=True):
                if line.endswith(b"\n"):
                    name, at, action, given, failed = json.loads(line)
                    entry = JournalEntry(_reply(at, given), None if failed is None else (failed[0], failed[1]))
                    self._entries.setdefault(tuple(name), {})[at, action] = entry
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise StorageError(
                f"env.journal: {path} cannot be read: {error}. Remove the file to ask the environments again."
            ) from error


class EpisodeJournal:
    """The journal of one episode.

    Args:
        journal: Journal of the run.
        name: Name of the episode.
    """

    def __init__(self, journal: Journal, name: EpisodeName) -> None:
        self._journal, self._name = journal, name

    def known(self, at: str, action: str | None) -> JournalEntry | None:
        """Return the entry of a call that was made before; see `write`."""
        return self._journal.known(self._name, (at, _digest(action)))

    def write(self, at: str, action: str | None, entry: JournalEntry) -> None:
        """Write the result of a call.

        Args:
            at: ``reset``, the turn's number, or ``reward``.
            action: Action of the policy; None: none, or any.
            entry: Result of the call.
        """
        self._journal.write(self._name, (at, _digest(action)), entry)


def _digest(action: str | None) -> str | None:
    return None if action is None else hashlib.sha256(action.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def canonical_json(given: Any) -> str:
    """Return an opening, a reply or a reward as JSON text, equal where they are."""
    return json.dumps(_plain(given), default=repr, sort_keys=True)


def _plain(given: Any) -> Any:
    """Return a reply as a dict that shares its values: images in it are still references."""
    if not isinstance(given, Reply):
        return given
    return {each.name: getattr(given, each.name) for each in dataclasses.fields(given)}


def _image_as_json(value: Any) -> dict[str, Any]:
    """Return an image as JSON, with its bytes.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(value, ImageRef):
        raise TypeError(f"{type(value).__name__} is neither text nor numbers")
    data = base64.b64encode(value.read()).decode()
    return {"name": value.name, "width": value.width, "height": value.height, "data": data}


def _reply(at: str, given: Any) -> Any:
    if not at.isdigit() or given is None:
        return _with_images(given) if at == "reset" else given
    reply = Reply(**cast("dict[str, Any]", given))
    return dataclasses.replace(reply, messages=_with_images(reply.messages))


def _with_images(given: Any) -> Any:
    """Return messages or parts with references in the place of serialized images."""
    if not isinstance(given, list):
        return given
    found: list[Any] = []
    for each in given:
        if "role" in each:
            found.append({**each, "content": _with_images(each["content"])})
        elif "image" in each:
            held = each["image"]
            image = ImageRef.held(held["name"], held["width"], held["height"], base64.b64decode(held["data"]))
            found.append({**each, "image": image})
        else:
            found.append(each)
    return found


_Ask = Callable[[Environment], Coroutine[Any, Any, Any]]


class FailedBefore(Exception):
    """The error for an episode that failed at this call according to the journal.

    Args:
        end: End of the episode.
        error: Error of the episode.
    """

    def __init__(self, end: End, error: str) -> None:
        super().__init__(error)
        self.end: End = end


class ReplayDiverged(NoReply):
    """The error for a new environment that answers the replayed calls otherwise."""


@dataclass(frozen=True)
class _PastCall:
    """A past call, with its seed and its result."""

    ask: _Ask
    seed: int
    result: Any


class ReplayableEnvironment(Environment):
    """An environment that remembers its calls and can replay them.

    Args:
        make: Makes one.
        has_state: True if a new environment has to replay all past calls.
        journal: Journal of the episode; None: nothing outlives this process.
    """

    def __init__(self, make: Callable[[], Environment], *, has_state: bool, journal: EpisodeJournal | None) -> None:
        self._make, self._has_state, self._journal = make, has_state, journal
        self._made: Environment | None = None
        self._past: list[_PastCall] = []
        self._turns = 0
        self._at: tuple[str, str | None] = ("reset", None)
        """The current or next call, and its action where it is known."""
        self._over, self._lock = False, threading.Lock()

    async def reset(self, seed: int, row: Mapping[str, Any]) -> Opening:
        return await self._ask("reset", None, lambda made: made.reset(seed, copy.deepcopy(dict(row))))

    async def answer(self, turn: Turn) -> Reply:
        reply = await self._ask(str(self._turns), f"{turn.cut} {turn.written}", lambda made: made.answer(turn))
        self._turns += 1
        self._at = (str(self._turns), None)
        return reply

    async def reward(self) -> float | None:
        return await self._ask("reward", None, lambda made: made.reward())

    async def close(self) -> None:
        with self._lock:
            self._over = True  # the time of closing does not count for the episode
        if self._made is not None:
            await self._made.close()

    def timed_out(self, error: str) -> None:
        self._write(JournalEntry(failed=("timeout", error)), last=True)

    # ------------------------------------------------------------------ one call

    async def _ask(self, at: str, action: str | None, ask: _Ask) -> Any:
        self._at = at, action
        seed, entry = CALL_CONTEXT.get().seed, self._journal and self._journal.known(at, action)
        if entry is None:
            result = await self._call_now(ask)
        elif entry.failed is not None:
            raise FailedBefore(*entry.failed)
        else:
            result = entry.result
        self._past.append(_PastCall(ask, seed, result))
        return result

    async def _call_now(self, ask: _Ask) -> Any:
        while True:
            try:
                if self._made is None:
                    self._made = self._make()
                    if self._has_state and self._past:  # lost in the middle of its episode
                        await self._replay(self._made)
                result = await ask(self._made)
            except ObjectLost:
                self._made = None
                continue
            except (LitRLError, TimedOut):
                raise
            except BaseException as error:
                if not is_raised_by_user_code(error):
                    raise
                self._write(JournalEntry(failed=("failed", error_line(error))))
                raise
            self._write(JournalEntry(result=result))
            return result

    async def _replay(self, made: Environment) -> None:
        now = CALL_CONTEXT.get()
        for past in self._past:
            CALL_CONTEXT.set(now.with_seed(past.seed))
            result = await past.ask(made)
            if canonical_json(result) != canonical_json(past.result):
                raise ReplayDiverged(
                    f"made anew in the middle of its episode, it gave {_short_reply(result)} and not "
                    f"{_short_reply(past.result)}"
                )
        CALL_CONTEXT.set(now.with_seed(now.seed))

    def _write(self, entry: JournalEntry, *, last: bool = False) -> None:
        """Write to the journal, unless the episode has ended at a limit meanwhile."""
        with self._lock:
            if self._journal is not None and not self._over:
                self._journal.write(*self._at, entry)
            self._over = self._over or last


def error_line(error: BaseException) -> str:
    """Return an error of an environment in one line."""
    return excerpt(f"{type(error).__name__}: {error}", 200)


def _short_reply(given: Any) -> str:
    """Return a result for a message: its text and reward."""
    if isinstance(given, Reply):
        text = " ".join(str(message["content"]) for message in given.messages)
        given = text if given.reward is None else f"{text} ({given.reward})"
    return excerpt(repr(given), 50)
