"""`lit-rl env-check`: is an environment, or a set of tools, fit to train on? Loads no weights, writes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from lit_rl.algorithms.loop.on_policy import OnPolicyModule
from lit_rl.algorithms.preflight import environments as preflight
from lit_rl.commands import env_findings as findings
from lit_rl.commands.data_check import bracketed
from lit_rl.commands.env_actions import NONSENSE, calls, scripts, texts, written
from lit_rl.commands.env_elsewhere import Elsewhere
from lit_rl.commands.env_findings import Finding
from lit_rl.commands.env_growth import growth
from lit_rl.commands.env_plays import Case, Played, Player
from lit_rl.commands.env_talk import talk
from lit_rl.commands.train import Run
from lit_rl.environments.factory import EnvironmentFactory
from lit_rl.environments.frames import literal_ids
from lit_rl.environments.interaction import Interaction
from lit_rl.errors import ConfigError, GenerationError, LitRLError
from lit_rl.generation.collect import as_reward_input
from lit_rl.generation.noise import prompt_key
from lit_rl.process_state import generators_kept
from lit_rl.rollout import PromptBatch

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
        settings: The node of `env=`, for another process to build.
        actions: The policy's texts, turn by turn. None: numbers, nonsense, nothing, long texts, tool calls.

    Raises:
        ConfigError: what would refuse a run: see the docs of environments; or nothing answers the policy.
        GenerationError: something is wrong. It was printed.
    """
    checked = _Checked.of(run)
    cases, asked = checked.cases(actions)
    console = Console(highlight=False)
    with generators_kept():
        player = Player(checked.factory, checked.interaction.parsers, checked.interaction.max_image_pixels)
        first = list(_within(player, cases, _SECONDS))  # before all else, as another process plays them
        _show(console, checked, cases[0])
        look = _Look(checked, player, cases[: len(first)], first)
        wrong = [each.what for each in _told(console, _findings(look, asked, settings))]
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
        preflight.rewarded(factory, module.reward_functions)
        preflight.fits(factory, module.generator, module.sampling, module.evaluation)
        interaction = preflight.source_of(factory, module.model, rows)
        assert isinstance(interaction, Interaction)
        preflight.fits_context(module.model, interaction, rows.longest_prompt)
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

    def columns(self, number: int) -> dict[str, Any]:
        """Return the prompt and the other columns of a row."""
        return {"prompt": self.batch.prompts[number], **{name: of[number] for name, of in self.batch.columns.items()}}

    def cases(self, actions: Sequence[str] | None) -> tuple[list[Case], dict[str, str | None]]:
        """Return the cases to play; and their calls with their texts, None where a call cannot be written."""
        cases, asked, parsers = [], {}, self.interaction.parsers
        for number, kind in enumerate(self.kinds):
            said = [*map(str, actions or ())]
            if actions is None:
                said, parser, toolbox = texts(self.module.tokenizer), parsers[kind], self.factory.kinds[kind].toolbox
                if parser is not None and toolbox is not None:
                    called = {
                        name: written(call, parser, self.module.tokenizer) for name, call in calls(toolbox).items()
                    }
                    asked |= called
                    said = [*(text for text in called.values() if text is not None), *said]
            turns = [tuple(said)] if actions is not None else scripts(said, self.factory.max_turns)
            seed, columns = self.seed(number), self.columns(number)
            cases += [Case(kind, columns, seed, each[: self.factory.max_turns]) for each in turns]
        return cases, asked


def _picked(batch: PromptBatch, rows: Sequence[int]) -> PromptBatch:
    columns = {name: [of[row] for row in rows] for name, of in batch.columns.items()}
    prompts, ids = [batch.prompts[row] for row in rows], [batch.prompt_ids[row] for row in rows]
    return PromptBatch(prompts, ids, columns, [batch.rows[row] for row in rows], [0] * len(rows), vision=batch.vision)


# ---------------------------------------------------------------------- what is looked at


@dataclass(frozen=True)
class _Look:
    """Episodes that were played once, by the player that can play them again."""

    checked: _Checked
    player: Player
    cases: Sequence[Case]
    first: Sequence[Played]


def _findings(look: _Look, asked: Mapping[str, str | None], settings: Mapping[str, Any]) -> Iterator[Finding]:
    checked, player, cases, first = look.checked, look.player, look.cases, look.first
    factory = checked.factory
    took = sum(call.seconds for played in first for call in played.calls)
    with closing(
        Elsewhere(settings, checked.interaction.parsers, cases, checked.interaction.max_image_pixels)
    ) as elsewhere:
        second = [player.play(case) for case in cases]
        equal = [n for n, played in enumerate(first) if played.lines == second[n].lines]
        among = [player.interleaved([cases[n], cases[(n + 1) % len(cases)]])[0] for n in equal]
        grown = growth(lambda number: _played(player, cases[number]), len(cases), _SECONDS_OF_LEAKS)
        yield findings.works(first)
        yield from findings.repeats(first, second, elsewhere.lines(took + _WAIT))
    if equal:
        yield findings.stands_alone([first[n] for n in equal], among)
    yield findings.generators(first, at_once=factory.is_async, elsewhere=factory.pool is not None)
    yield findings.leaks(grown)
    if any(kind.toolbox is not None for kind in factory.kinds.values()):
        yield from findings.tools(first, asked)
    yield from findings.lengths(first, _counted(checked), factory.max_observation_tokens)
    yield from _pay(checked)
    at_once = factory.pool.size if factory.pool is not None else math.inf if factory.is_async else 1
    rollout = findings.Rollout(checked.episodes, factory.max_turns, at_once)
    yield findings.times(first, factory.step_timeout, rollout)


def _played(player: Player, case: Case) -> None:
    player.play(case)


def _within(player: Player, cases: Sequence[Case], seconds: float) -> Iterator[Played]:
    """Yield the episodes that fit into the time, one at least."""
    spent = 0.0
    for case in cases:
        if spent > seconds:
            return
        played = player.play(case)
        spent += sum(call.seconds for call in played.calls)
        yield played


def _counted(checked: _Checked) -> Any:
    return lambda text: len(literal_ids(checked.module.tokenizer, text))


def _pay(checked: _Checked) -> Iterator[Finding]:
    """Yield findings about the run's rewards for episodes in which nothing is achieved."""
    module, rewards = checked.module, {}
    for number, kind in enumerate(checked.kinds):
        batch = _picked(checked.batch, [number])
        for name, text in (("nothing", ""), ("nonsense", NONSENSE)):
            said = f"{name} said{f' to {kind}' if len(checked.kinds) > 1 else ''}:"
            try:
                told = talk(
                    checked.interaction, module.tokenizer, batch, checked.seed(number),
                    [text] * checked.factory.max_turns, module.sampling.max_new_tokens,
                )  # fmt: skip
                if told.episode.failed:  # said of its calls
                    continue
                whole = module.tokenizer.decode(told.said, skip_special_tokens=True)
                prompts, completions, columns = as_reward_input(batch, [whole], 1, [told.episode])
                scores = module.reward_functions.score(
                    prompts, completions, columns, completion_ids=[told.said], trainer_state=module.state_at(batch)
                )
            except LitRLError as error:
                yield Finding(
                    "reward", "WRONG", f"{said} {error}", "it ends the run at the first completion of this kind",
                    "give a finite number to whatever a policy may write, None where there is none to give",
                )  # fmt: skip
                continue
            total = scores.total.item()
            rewards[said] = None if math.isnan(total) else total
    if rewards:
        yield findings.pay(rewards)


# ---------------------------------------------------------------------- how it is shown


def _show(console: Console, checked: _Checked, case: Case) -> None:
    """Print the first episode as the policy reads it."""
    module = checked.module
    console.print(Text("An episode as the policy reads it; ⟦...⟧ is what it says", style="bold"))
    try:
        told = talk(
            checked.interaction, module.tokenizer, _picked(checked.batch, [0]), case.seed, case.turns,
            module.sampling.max_new_tokens,
        )  # fmt: skip
    except LitRLError as error:
        console.print(Text(f"It would end the run: {error}", style="red"))
        return
    console.print(bracketed(module.tokenizer, told.ids, told.learned))
    reward = "no reward of its own" if told.episode.reward is None else f"its own reward is {told.episode.reward:g}"
    error = "" if told.episode.error is None else f" ({told.episode.error})"
    console.print(Text(f"It ended with {told.episode.end}{error} after {told.episode.turns} turns; {reward}."))


_STYLES = {"ok": "green", "note": "yellow", "WRONG": "bold red"}


def _told(console: Console, found: Iterator[Finding]) -> Iterator[Finding]:
    """Print each finding; return those that are wrong."""
    console.print()
    for each in found:
        console.print(Text.assemble((f"{each.level:<6}", _STYLES[each.level]), f"{each.what}: {each.seen}"))
        for name, text in (("why", each.why), ("fix", each.fix)):
            if text:
                console.print(Text(f"      {name}: {text}", style="dim"))
        if each.level == "WRONG":
            yield each
