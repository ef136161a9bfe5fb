"""What `lit-rl env-check` concludes from episodes that were played: what was seen, why it matters, what mends it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lit_rl.commands.env_growth import Growth
from lit_rl.commands.env_plays import Played
from lit_rl.data.checks import excerpt
from lit_rl.episodes import words_of

Level = Literal["ok", "note", "WRONG"]


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    what: str
    """The check, in a word or two."""
    level: Level
    seen: str
    why: str = ""
    """Its meaning for a training, where there is one."""
    fix: str = ""


@dataclass(frozen=True)
class Rollout:
    """The rollouts of a run, as its environments see them."""

    episodes: int
    turns: int
    """Most turns of an episode."""
    at_once: float
    """Most concurrent calls; infinity: any number."""


_GROUP = "completions of a group would play different games, and a resumed run would go on differently"


def works(first: Sequence[Played]) -> Finding:
    """Check that every call returned a valid result."""
    what, failed = "calls", list(dict.fromkeys(played.failed for played in first if played.failed is not None))
    if not failed:
        count = sum(len(played.calls) for played in first)
        return Finding(
            what, "ok", f"{count} calls in {len(first)} episodes: none raised, none was late, no reward was NaN"
        )
    more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
    return Finding(
        what,
        "WRONG",
        f"{_line(failed[0])}{more}",
        "an episode that fails is not learned from, and too many of them end the run (env.max_failed); a reward that "
        "is not finite, and an answer that is none, end it at once",
        "answer whatever a policy says, nonsense too, with text and a finite reward (None: no reward)",
    )


def repeats(
    first: Sequence[Played], second: Sequence[Played], elsewhere: Sequence[Sequence[str]] | str
) -> Iterator[Finding]:
    """Check that the same seed and turns make the same episode: again in this process, and in another one.

    Args:
        first: Episodes.
        second: The same, played again.
        elsewhere: The lines of the same in another process; or why there are none.
    """
    again, other = "the same again", "in another process"
    differing = [n for n, played in enumerate(first) if played.lines != second[n].lines]
    fresh = [] if isinstance(elsewhere, str) else [list(lines) for lines in elsewhere]
    if differing:
        where = differing[0]
        seen = f"same seed, same turns, two new objects: {_difference(first[where].lines, second[where].lines)}"
        if fresh == [list(played.lines) for played in first]:
            why = f"an earlier episode changes a later one (a new process begins as this one did), so {_GROUP}"
            fix = "keep all state in self, set in reset: no class attributes, module variables or files that go on"
        else:
            why, fix = _GROUP, "draw from random.Random(seed) with the seed that reset gets; answer by no clock"
        yield Finding(again, "WRONG", seen, why, fix)
        return
    yield Finding(again, "ok", f"{len(first)} episodes played twice with new objects were equal")
    if isinstance(elsewhere, str):
        yield Finding(
            other, "WRONG", f"the episodes could not be played there: {elsewhere}",
            "a run of several processes, and a resumed one, make the environment anew", "run it with python by hand",
        )  # fmt: skip
        return
    lines = next(
        (_difference(played.lines, there) for played, there in zip(first, fresh) if list(played.lines) != there), None
    )
    if lines is None:
        yield Finding(other, "ok", "the same episodes, with other hashes of texts (PYTHONHASHSEED) and a later time")
        return
    yield Finding(
        other, "WRONG", f"same seed, same turns: {lines}",
        "ranks and a resumed run are other processes: a resumed run would differ from the uninterrupted one",
        "leave hash() of texts, the order of sets, the time and the process's id out of it",
    )  # fmt: skip


def stands_alone(alone: Sequence[Played], among: Sequence[Played]) -> Finding:
    """Check that episodes are the same when others go on at the same time.

    Args:
        alone: Episodes.
        among: The same, each played beside another.
    """
    what = "side by side"
    lines = [_difference(a.lines, b.lines) for a, b in zip(alone, among) if a.lines != b.lines]
    if not lines:
        return Finding(what, "ok", f"{len(among)} episodes, each beside another one, were as they are alone")
    return Finding(
        what, "WRONG", f"another episode that went on at the same time changed this one: {lines[0]}",
        "the episodes of a rollout go on at the same time, so one row's policy would play in another row's game",
        "keep all state in self, set in reset: no class attributes, no module variables",
    )  # fmt: skip


def generators(first: Sequence[Played], *, at_once: bool, elsewhere: bool) -> Finding:
    """Check that the global random generators are left alone.

    Args:
        first: Episodes.
        at_once: True if other calls run at the same time.
        elsewhere: True if they were played in workers, whose generators cannot be seen.
    """
    what = "random generators"
    if elsewhere:
        return Finding(what, "note", "not seen in workers, which seed theirs before each call: look with env.workers=0")
    moved = {name: call.name for played in first[::-1] for call in played.calls[::-1] for name in call.moved}
    if not moved:
        return Finding(what, "ok", "Python's, numpy's and torch's global generators were left alone")
    where = ", ".join(f"{name} (in {call})" for name, call in moved.items())
    why = (
        "the training and other episodes draw from it too: neither repeats, and a resumed run differs"
        if at_once
        else "a run seeds all three before each call and puts them back, so it repeats; every call begins with the "
        "same numbers though, and threads, async methods and other libraries have no such guard"
    )
    fix = "in reset: self.draw = random.Random(seed), or numpy.random.default_rng(seed); draw from these alone"
    return Finding(what, "WRONG", f"drawn from, or seeded: {where}", why, fix)


_REMEDIES = {
    "threads": "end it in close()",
    "child processes": "end it, and wait for it, in close()",
    "open files": "close it in close(), or use `with`",
}


def leaks(found: Growth) -> Finding:
    """Check that episodes leave nothing behind."""
    what = "left behind"
    if not found.episodes:
        return Finding(what, "note", "an episode takes too long here to play enough of them for a look")
    if not found.grown:
        return Finding(what, "ok", f"no thread, process, file or memory after {2 * found.episodes} episodes")
    each = ", ".join(f"{name} +{grown:.3g}" for name, grown in found.grown.items())
    fixes = [fix for name, fix in _REMEDIES.items() if name in found.grown]
    return Finding(
        what, "WRONG", f"every episode leaves something behind, over {2 * found.episodes} of them: {each}",
        "a run has hundreds of thousands of episodes, and ends when there is no more of it",
        "; ".join(fixes or ["let go of what class attributes, module variables and caches hold"]),
    )  # fmt: skip


def lengths(first: Sequence[Played], tokens: Callable[[str], int], most: int) -> Iterator[Finding]:
    """Check that the policy's texts to read are within its limit.

    Args:
        first: Episodes.
        tokens: Counts the tokens of a text.
        most: `env.max_observation_tokens`.
    """
    what = "lengths"
    openings = {played.opening: tokens(played.opening) for played in first}
    longest = max(openings.values(), default=0)
    if longest > most:
        yield Finding(
            what, "WRONG", f"reset began with {longest} tokens, and env.max_observation_tokens={most}",
            "it is cut there: the policy reads the beginning of its problem only",
            f"env.max_observation_tokens={longest}, or say less",
        )  # fmt: skip
    answers = {
        text: sum(tokens(words_of(message)) for message in reply.messages)
        for played in first
        for text, reply in played.replies
    }
    text, longest = max(answers.items(), key=lambda item: item[1], default=("", 0))
    if longest > most:
        yield Finding(
            what, "note", f"{excerpt(repr(text), 40)} was answered with {longest} tokens: above "
            f"env.max_observation_tokens={most}", "the answer is cut there, and the policy reads that it was",
            "say less, or raise env.max_observation_tokens with env.max_tokens",
        )  # fmt: skip
    elif max(openings.values(), default=0) <= most:
        yield Finding(what, "ok", f"answers have up to {longest} tokens, of {most} that they may have")


def tools(first: Sequence[Played], calls: Mapping[str, str | None]) -> Iterator[Finding]:
    """Check that tool calls are answered with something to read.

    Args:
        first: Episodes.
        calls: Each call's description, with the policy's text for it; None: it cannot be written.
    """
    what = "tools"
    if unwritten := [name for name, text in calls.items() if text is None]:
        yield Finding(
            what, "note", f"not looked at: {', '.join(unwritten)}; env.parser reads no form of a call known here",
            "", "env_check.actions=[...] with calls as your policy writes them",
        )  # fmt: skip
    answers = {
        text: " ".join(map(words_of, reply.messages))
        for played in first
        for text, reply in played.replies
        if reply.calls
    }
    wrong = False
    for text, answer in answers.items():
        if "Traceback (most recent call last)" in answer:
            wrong = True
            yield Finding(
                what, "WRONG", f"{excerpt(text)} was answered with a traceback: {excerpt(answer[-80:])}",
                "the policy reads, and pays for, the insides of your code", "answer in a line what was wrong",
            )  # fmt: skip
        elif "gave no answer that can be written" in answer:
            wrong = True
            yield Finding(
                what, "WRONG", f"{excerpt(text)}: {answer}", "the policy reads an error whatever it calls it with",
                "return text, numbers, or lists and dicts of these",
            )  # fmt: skip
        elif " raised " in answer and answer.startswith("error: "):
            yield Finding(
                what, "note", f"{excerpt(text)} was answered {excerpt(answer, 160)}",
                "example values may be senseless to it; the policy reads this text", "does it say what to mend?",
            )  # fmt: skip
    if not wrong and answers:
        yield Finding(what, "ok", f"{len(answers)} turns with calls were answered in text, errors without a traceback")


def pay(rewards: Mapping[str, float | None]) -> Finding:
    """Check the rewards of episodes in which nothing, or nonsense, is written.

    Args:
        rewards: Reward of the episode by the text that is written in it; None where it has none.
    """
    what = "pay for nothing"
    told = ", ".join(f"{said} {'no reward' if value is None else f'{value:g}'}" for said, value in rewards.items())
    if not any(value is not None and value > 0 for value in rewards.values()):
        return Finding(what, "ok", told)
    return Finding(
        what, "WRONG", told,
        "what pays without any work is learned first, and a group that earns it throughout has no gradient",
        "give 0 where nothing was achieved, and look how the answer is read (an empty match, a default of 1)",
    )  # fmt: skip


def times(first: Sequence[Played], limit: float, rollout: Rollout) -> Finding:
    """Report the times of calls, and what follows for a rollout.

    Args:
        first: Episodes.
        limit: `env.step_timeout`, seconds.
        rollout: The run's rollouts.
    """
    resets = [call.seconds for played in first for call in played.calls if call.name == "reset"]
    answers = [call.seconds for played in first for call in played.calls if call.name.startswith("turn")] or [0.0]
    longest = max(*resets, *answers)
    episode = statistics.mean(resets) + rollout.turns * statistics.mean(answers)
    whole = episode * max(1.0, rollout.episodes / rollout.at_once)
    how = {1: "one call after another", math.inf: "all at once"}.get(rollout.at_once, f"{rollout.at_once} at a time")
    seen = (
        f"a reset takes {_ms(resets)}, an answer {_ms(answers)}; the limit is env.step_timeout={limit:g} s. A rollout "
        f"of {rollout.episodes} episodes of {rollout.turns} turns waits {whole:.2g} s "
        f"({how})"
    )
    if longest < limit / 2:
        return Finding("time", "ok", seen)
    return Finding(
        "time", "WRONG", seen, "calls at their limit are episodes that are lost", "make it faster, or raise the limit"
    )


def _ms(seconds: Sequence[float]) -> str:
    return f"{1000 * statistics.median(seconds):.2g} ms ({1000 * max(seconds):.2g} at most)"


def _difference(one: Sequence[str], other: Sequence[str]) -> str:
    """Return the first line that differs."""
    pairs = zip([*one, "it was over"], [*other, "it was over"])
    a, b = next((a, b) for a, b in pairs if a != b)
    return f"{_line(a)}, and then {_line(b)}"


def _line(text: str) -> str:
    return excerpt(text, 200)
