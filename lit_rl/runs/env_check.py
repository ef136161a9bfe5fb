"""`lit-rl env-check`: findings about an environment, or a set of tools, before training on it. Loads no weights, writes
nothing.

Episodes are played by scripts (`env_plays`); each finding says what was seen, why it matters and what to do.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from lit_rl.algorithms.checks import episode_checks
from lit_rl.algorithms.loop.on_policy import OnPolicyModule
from lit_rl.core.episode import message_text
from lit_rl.core.errors import ConfigError, GenerationError, LitRLError, excerpt
from lit_rl.core.process_state import preserve_generators
from lit_rl.core.rollout import PromptBatch
from lit_rl.environments.factory import EnvironmentFactory
from lit_rl.environments.frames import literal_ids
from lit_rl.environments.interaction import Interaction
from lit_rl.generation.collect import as_reward_input
from lit_rl.generation.noise import prompt_key
from lit_rl.runs.data_check import bracketed
from lit_rl.runs.env_plays import (
    NONSENSE,
    EpisodeCase,
    EpisodePlayer,
    Growth,
    PlayedEpisode,
    measure_growth,
    play_talk,
    policy_texts,
    rotated_scripts,
    tool_calls,
    write_call,
)
from lit_rl.runs.env_process import OtherProcess
from lit_rl.runs.train import Run

# ---------------------------------------------------------------------- the command


_SECONDS, _SECONDS_OF_LEAKS = 2.0, 10.0
"""Seconds for the first round of episodes, and for the search for leaks: what does not fit in is left out."""

_WAIT = 60.0
"""Seconds more than this process took for the same, after which another process is given up."""

_ROWS = 256
"""Rows of the data in which one for each kind of environment is searched."""


def env_check(run: Run, *, settings: Mapping[str, Any], actions: Sequence[str] | None = None) -> int:
    """Print an episode as the policy would read it, and the findings against learning from such episodes.

    Args:
        run: Built by the command line.
        settings: The node of `env=`, escaped for another process to instantiate.
        actions: The policy's texts, turn by turn. None: numbers, nonsense, nothing, long texts, tool calls.

    Raises:
        ConfigError: what would refuse a run: see the docs of environments; or nothing answers the policy.
        GenerationError: something is wrong. It was printed.
    """
    checked = _Checked.of(run)
    cases, calls = checked.cases(actions)
    console = Console(highlight=False)
    with preserve_generators():
        player = EpisodePlayer(checked.factory, checked.interaction.parsers, checked.interaction.max_image_pixels)
        first: list[PlayedEpisode] = []  # those that fit into the time; before all else, as another process plays them
        seconds = 0.0
        for case in cases:
            if seconds > _SECONDS:
                break
            first.append(player.play(case))
            seconds += sum(call.seconds for call in first[-1].calls)
        _print_episode(console, checked, cases[0])
        console.print()
        wrong = []
        for found in _findings(checked, player, cases[: len(first)], first, calls, settings):
            console.print(Text.assemble((f"{found.level:<6}", _STYLES[found.level]), f"{found.what}: {found.seen}"))
            for name, text in (("why", found.why), ("fix", found.fix)):
                if text:
                    console.print(Text(f"      {name}: {text}", style="dim"))
            if found.level == "WRONG":
                wrong.append(found.what)
    if wrong:
        raise GenerationError(
            f"The environment is not fit to train on: {', '.join(dict.fromkeys(wrong))} (above, marked WRONG)."
        )
    console.print(Text("\nFit to train on: nothing is wrong."))
    return 0


@dataclass(frozen=True)
class _Checked:
    """The parts of a run that are checked, as far as nothing refuses them."""

    module: OnPolicyModule
    factory: EnvironmentFactory
    interaction: Interaction
    batch: PromptBatch
    """The first row for each kind of environment."""
    kinds: list[str]
    """Kind of each of these rows."""
    episodes: int
    """Episodes of a rollout."""

    @classmethod
    def of(cls, run: Run) -> _Checked:
        """Return the parts. Everything that a run refuses before it loads weights is refused here, with the same
        messages."""
        module, data = run.generating, run.data
        module.reward_functions.run_on(run.trainer.strategy.root_device)
        factory = getattr(module, "env", None)
        if not isinstance(module, OnPolicyModule) or factory is None:
            raise ConfigError(
                "lit-rl env-check looks at what answers the policy, and env=none: nothing does. Take env=tools with "
                "env.functions=[...], or env=environment with env.path=..."
            )
        if not isinstance(factory, EnvironmentFactory):
            raise ConfigError(
                "lit-rl env-check looks at what answers the policy, and with env=rollout_func a function makes whole "
                "rollouts: there is nothing to play with. A run of a step shows what it does: trainer.max_steps=1."
            )
        assert hasattr(data, "peek")
        rows: Any = data
        rows.prepare(module.tokenizer, processor=module.model.processor, stage="predict")
        episode_checks.check_episode_rewards(factory, module.reward_functions)
        episode_checks.check_episodes(factory, module.generator, module.sampling, module.evaluation)
        interaction = episode_checks.make_episode_source(factory, module.model, rows)
        assert isinstance(interaction, Interaction)
        episode_checks.check_episode_length(module.model, interaction, rows.longest_prompt)
        module.reward_functions.bind([*rows.columns, *factory.columns])
        batch = rows.peek(_ROWS)
        first: dict[str, int] = {}
        for number in range(len(batch)):
            first.setdefault(factory.kind_of({name: of[number] for name, of in batch.columns.items()}), number)
        episodes = rows.prompts_per_rollout * module.group_size
        return cls(module, factory, interaction, _picked(batch, list(first.values())), list(first), episodes)

    def seed(self, number: int) -> int:
        """Return the seed of the episodes of a row, in the first rollout of the run."""
        return int(prompt_key(self.module.seed, 0, self.batch.rows[number], 0)) & 0x7FFFFFFF

    def cases(self, actions: Sequence[str] | None) -> tuple[list[EpisodeCase], dict[str, str | None]]:
        """Return the cases to play; and their calls with their texts, None where a call cannot be written."""
        cases: list[EpisodeCase] = []
        calls: dict[str, str | None] = {}
        tokenizer, most = self.module.tokenizer, self.factory.max_turns
        for number, kind in enumerate(self.kinds):
            if actions is not None:
                scripts = [tuple(map(str, actions))]
            else:
                texts = policy_texts(tokenizer)
                parser, toolbox = self.interaction.parsers[kind], self.factory.kinds[kind].toolbox
                if parser is not None and toolbox is not None:
                    written = {name: write_call(call, parser, tokenizer) for name, call in tool_calls(toolbox).items()}
                    calls |= written
                    texts = [*(text for text in written.values() if text is not None), *texts]
                scripts = rotated_scripts(texts, most)
            columns = {name: values[number] for name, values in self.batch.columns.items()}
            columns = {"prompt": self.batch.prompts[number], **columns}
            cases += [EpisodeCase(kind, columns, self.seed(number), script[:most]) for script in scripts]
        return cases, calls


def _picked(batch: PromptBatch, rows: Sequence[int]) -> PromptBatch:
    columns = {name: [of[row] for row in rows] for name, of in batch.columns.items()}
    prompts, ids = [batch.prompts[row] for row in rows], [batch.prompt_ids[row] for row in rows]
    return PromptBatch(prompts, ids, columns, [batch.rows[row] for row in rows], [0] * len(rows), vision=batch.vision)


def _findings(
    checked: _Checked,
    player: EpisodePlayer,
    cases: Sequence[EpisodeCase],
    first: Sequence[PlayedEpisode],
    calls: Mapping[str, str | None],
    settings: Mapping[str, Any],
) -> Iterator[EnvFinding]:
    """Yield the findings about cases, given their episodes as they were played `first`."""
    factory = checked.factory
    took = sum(call.seconds for played in first for call in played.calls)
    with closing(
        OtherProcess(settings, checked.interaction.parsers, cases, checked.interaction.max_image_pixels)
    ) as elsewhere:
        second = [player.play(case) for case in cases]
        equal = [n for n, played in enumerate(first) if played.lines == second[n].lines]
        among = [player.interleaved([cases[n], cases[(n + 1) % len(cases)]])[0] for n in equal]
        grown = measure_growth(lambda number: player.play(cases[number]), len(cases), _SECONDS_OF_LEAKS)
        yield check_calls(first)
        yield from check_repeats(first, second, elsewhere.lines(took + _WAIT))
    if equal:
        yield check_isolation([first[n] for n in equal], among)
    yield check_generators(first, at_once=factory.is_async, elsewhere=factory.pool is not None)
    yield check_leaks(grown)
    if any(kind.toolbox is not None for kind in factory.kinds.values()):
        yield from check_tool_answers(first, calls)
    yield from check_lengths(
        first, lambda text: len(literal_ids(checked.module.tokenizer, text)), factory.max_observation_tokens
    )
    yield from _reward_findings(checked)
    at_once = factory.pool.size if factory.pool is not None else math.inf if factory.is_async else 1
    rollout = EnvRollout(checked.episodes, factory.max_turns, at_once)
    yield check_times(first, factory.step_timeout, rollout)


def _reward_findings(checked: _Checked) -> Iterator[EnvFinding]:
    """Yield findings about the run's rewards for episodes in which nothing is achieved."""
    module, rewards = checked.module, {}
    for number, kind in enumerate(checked.kinds):
        batch = _picked(checked.batch, [number])
        for name, text in (("nothing", ""), ("nonsense", NONSENSE)):
            label = f"{name} said{f' to {kind}' if len(checked.kinds) > 1 else ''}:"
            try:
                talk = play_talk(
                    checked.interaction, module.tokenizer, batch, checked.seed(number),
                    [text] * checked.factory.max_turns, module.sampling.max_new_tokens,
                )  # fmt: skip
                if talk.episode.failed:  # reported with its calls
                    continue
                whole = module.tokenizer.decode(talk.written, skip_special_tokens=True)
                prompts, completions, columns = as_reward_input(batch, [whole], [talk.episode])
                scores = module.reward_functions.score(
                    prompts, completions, columns, completion_ids=[talk.written], trainer_state=module.state_at(batch)
                )
            except LitRLError as error:
                yield EnvFinding(
                    "reward", "WRONG", f"{label} {error}", "it ends the run at the first completion of this kind",
                    "give a finite number to whatever a policy may write, None where there is none to give",
                )  # fmt: skip
                continue
            total = scores.total.item()
            rewards[label] = None if math.isnan(total) else total
    if rewards:
        yield check_rewards(rewards)


# ---------------------------------------------------------------------- the console


def _print_episode(console: Console, checked: _Checked, case: EpisodeCase) -> None:
    """Print the first episode as the policy reads it."""
    module = checked.module
    console.print(Text("An episode as the policy reads it; ⟦...⟧ is what it says", style="bold"))
    try:
        talk = play_talk(
            checked.interaction, module.tokenizer, _picked(checked.batch, [0]), case.seed, case.turns,
            module.sampling.max_new_tokens,
        )  # fmt: skip
    except LitRLError as error:
        console.print(Text(f"It would end the run: {error}", style="red"))
        return
    console.print(bracketed(module.tokenizer, talk.ids, talk.learned))
    episode = talk.episode
    reward = "no reward of its own" if episode.reward is None else f"its own reward is {episode.reward:g}"
    error = "" if episode.error is None else f" ({episode.error})"
    console.print(Text(f"It ended with {episode.end}{error} after {episode.turns} turns; {reward}."))


_STYLES = {"ok": "green", "note": "yellow", "WRONG": "bold red"}


# ---------------------------------------------------------------------- findings


Level = Literal["ok", "note", "WRONG"]


@dataclass(frozen=True)
class EnvFinding:
    """The result of one check."""

    what: str
    """The check, in a word or two."""
    level: Level
    seen: str
    why: str = ""
    """Its meaning for a training, where there is one."""
    fix: str = ""


@dataclass(frozen=True)
class EnvRollout:
    """The rollouts of a run, as its environments see them."""

    episodes: int
    turns: int
    """Most turns of an episode."""
    at_once: float
    """Most concurrent calls; infinity: any number."""


_GROUP = "completions of a group would play different games, and a resumed run would go on differently"


def check_calls(first: Sequence[PlayedEpisode]) -> EnvFinding:
    """Check that every call returned a valid result."""
    what, failed = "calls", list(dict.fromkeys(played.failed for played in first if played.failed is not None))
    if not failed:
        count = sum(len(played.calls) for played in first)
        return EnvFinding(
            what, "ok", f"{count} calls in {len(first)} episodes: none raised, none was late, no reward was NaN"
        )
    more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
    return EnvFinding(
        what,
        "WRONG",
        f"{_line(failed[0])}{more}",
        "an episode that fails is not learned from, and too many of them end the run (env.max_failed); a reward that "
        "is not finite, and an answer that is none, end it at once",
        "answer whatever a policy says, nonsense too, with text and a finite reward (None: no reward)",
    )


def check_repeats(
    first: Sequence[PlayedEpisode], second: Sequence[PlayedEpisode], elsewhere: Sequence[Sequence[str]] | str
) -> Iterator[EnvFinding]:
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
        yield EnvFinding(again, "WRONG", seen, why, fix)
        return
    yield EnvFinding(again, "ok", f"{len(first)} episodes played twice with new objects were equal")
    if isinstance(elsewhere, str):
        yield EnvFinding(
            other, "WRONG", f"the episodes could not be played there: {elsewhere}",
            "a run of several processes, and a resumed one, make the environment anew", "run it with python by hand",
        )  # fmt: skip
        return
    changed = next(
        (_difference(played.lines, lines) for played, lines in zip(first, fresh) if list(played.lines) != lines), None
    )
    if changed is None:
        yield EnvFinding(other, "ok", "the same episodes, with other hashes of texts (PYTHONHASHSEED) and a later time")
        return
    yield EnvFinding(
        other, "WRONG", f"same seed, same turns: {changed}",
        "ranks and a resumed run are other processes: a resumed run would differ from the uninterrupted one",
        "leave hash() of texts, the order of sets, the time and the process's id out of it",
    )  # fmt: skip


def check_isolation(alone: Sequence[PlayedEpisode], among: Sequence[PlayedEpisode]) -> EnvFinding:
    """Check that episodes are the same when others go on at the same time.

    Args:
        alone: Episodes.
        among: The same, each played beside another.
    """
    what = "side by side"
    lines = [_difference(a.lines, b.lines) for a, b in zip(alone, among) if a.lines != b.lines]
    if not lines:
        return EnvFinding(what, "ok", f"{len(among)} episodes, each beside another one, were as they are alone")
    return EnvFinding(
        what, "WRONG", f"another episode that went on at the same time changed this one: {lines[0]}",
        "the episodes of a rollout go on at the same time, so one row's policy would play in another row's game",
        "keep all state in self, set in reset: no class attributes, no module variables",
    )  # fmt: skip


def check_generators(first: Sequence[PlayedEpisode], *, at_once: bool, elsewhere: bool) -> EnvFinding:
    """Check that the global random generators are left alone.

    Args:
        first: Episodes.
        at_once: True if other calls run at the same time.
        elsewhere: True if they were played in workers, whose generators cannot be seen.
    """
    what = "random generators"
    if elsewhere:
        return EnvFinding(
            what, "note", "not seen in workers, which seed theirs before each call: look with env.workers=0"
        )
    moved = {name: call.name for played in first[::-1] for call in played.calls[::-1] for name in call.moved}
    if not moved:
        return EnvFinding(what, "ok", "Python's, numpy's and torch's global generators were left alone")
    where = ", ".join(f"{name} (in {call})" for name, call in moved.items())
    why = (
        "the training and other episodes draw from it too: neither repeats, and a resumed run differs"
        if at_once
        else "a run seeds all three before each call and puts them back, so it repeats; every call begins with the "
        "same numbers though, and threads, async methods and other libraries have no such guard"
    )
    fix = "in reset: self.draw = random.Random(seed), or numpy.random.default_rng(seed); draw from these alone"
    return EnvFinding(what, "WRONG", f"drawn from, or seeded: {where}", why, fix)


_REMEDIES = {
    "threads": "end it in close()",
    "child processes": "end it, and wait for it, in close()",
    "open files": "close it in close(), or use `with`",
}


def check_leaks(found: Growth) -> EnvFinding:
    """Check that episodes leave nothing behind."""
    what = "left behind"
    if not found.episodes:
        return EnvFinding(what, "note", "an episode takes too long here to play enough of them for a look")
    if not found.grown:
        return EnvFinding(what, "ok", f"no thread, process, file or memory after {2 * found.episodes} episodes")
    each = ", ".join(f"{name} +{grown:.3g}" for name, grown in found.grown.items())
    fixes = [fix for name, fix in _REMEDIES.items() if name in found.grown]
    return EnvFinding(
        what, "WRONG", f"every episode leaves something behind, over {2 * found.episodes} of them: {each}",
        "a run has hundreds of thousands of episodes, and ends when there is no more of it",
        "; ".join(fixes or ["let go of what class attributes, module variables and caches hold"]),
    )  # fmt: skip


def check_lengths(first: Sequence[PlayedEpisode], tokens: Callable[[str], int], most: int) -> Iterator[EnvFinding]:
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
        yield EnvFinding(
            what, "WRONG", f"reset began with {longest} tokens, and env.max_observation_tokens={most}",
            "it is cut there: the policy reads the beginning of its problem only",
            f"env.max_observation_tokens={longest}, or say less",
        )  # fmt: skip
    answers = {
        text: sum(tokens(message_text(message)) for message in reply.messages)
        for played in first
        for text, reply in played.replies
    }
    text, longest = max(answers.items(), key=lambda item: item[1], default=("", 0))
    if longest > most:
        yield EnvFinding(
            what, "note", f"{excerpt(repr(text), 40)} was answered with {longest} tokens: above "
            f"env.max_observation_tokens={most}", "the answer is cut there, and the policy reads that it was",
            "say less, or raise env.max_observation_tokens with env.max_tokens",
        )  # fmt: skip
    elif max(openings.values(), default=0) <= most:
        yield EnvFinding(what, "ok", f"answers have up to {longest} tokens, of {most} that they may have")


def check_tool_answers(first: Sequence[PlayedEpisode], calls: Mapping[str, str | None]) -> Iterator[EnvFinding]:
    """Check that tool calls are answered with something to read.

    Args:
        first: Episodes.
        calls: Each call's description, with the policy's text for it; None: it cannot be written.
    """
    what = "tools"
    if unwritten := [name for name, text in calls.items() if text is None]:
        yield EnvFinding(
            what, "note", f"not looked at: {', '.join(unwritten)}; env.parser reads no form of a call known here",
            "", "env_check.actions=[...] with calls as your policy writes them",
        )  # fmt: skip
    answers = {
        text: " ".join(map(message_text, reply.messages))
        for played in first
        for text, reply in played.replies
        if reply.calls
    }
    wrong = False
    for text, answer in answers.items():
        if "Traceback (most recent call last)" in answer:
            wrong = True
            yield EnvFinding(
                what, "WRONG", f"{excerpt(text)} was answered with a traceback: {excerpt(answer[-80:])}",
                "the policy reads, and pays for, the insides of your code", "answer in a line what was wrong",
            )  # fmt: skip
        elif "gave no answer that can be written" in answer:
            wrong = True
            yield EnvFinding(
                what, "WRONG", f"{excerpt(text)}: {answer}", "the policy reads an error whatever it calls it with",
                "return text, numbers, or lists and dicts of these",
            )  # fmt: skip
        elif " raised " in answer and answer.startswith("error: "):
            yield EnvFinding(
                what, "note", f"{excerpt(text)} was answered {excerpt(answer, 160)}",
                "example values may be senseless to it; the policy reads this text", "does it say what to mend?",
            )  # fmt: skip
    if not wrong and answers:
        yield EnvFinding(
            what, "ok", f"{len(answers)} turns with calls were answered in text, errors without a traceback"
        )


def check_rewards(rewards: Mapping[str, float | None]) -> EnvFinding:
    """Check the rewards of episodes in which nothing, or nonsense, is written.

    Args:
        rewards: Reward of the episode by the text that is written in it; None where it has none.
    """
    what = "pay for nothing"
    seen = ", ".join(f"{label} {'no reward' if value is None else f'{value:g}'}" for label, value in rewards.items())
    if not any(value is not None and value > 0 for value in rewards.values()):
        return EnvFinding(what, "ok", seen)
    return EnvFinding(
        what, "WRONG", seen,
        "what pays without any work is learned first, and a group that earns it throughout has no gradient",
        "give 0 where nothing was achieved, and look how the answer is read (an empty match, a default of 1)",
    )  # fmt: skip


def check_times(first: Sequence[PlayedEpisode], limit: float, rollout: EnvRollout) -> EnvFinding:
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
    order = {1: "one call after another", math.inf: "all at once"}.get(rollout.at_once, f"{rollout.at_once} at a time")
    seen = (
        f"a reset takes {_ms(resets)}, an answer {_ms(answers)}; the limit is env.step_timeout={limit:g} s. A rollout "
        f"of {rollout.episodes} episodes of {rollout.turns} turns waits {whole:.2g} s "
        f"({order})"
    )
    if longest < limit / 2:
        return EnvFinding("time", "ok", seen)
    return EnvFinding(
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
