"""Environments of gymnasium, played at random: texts to imitate, for the form of the game."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from typing import Any, Literal

from lit_rl.environments.demonstrations import GameDemonstrations
from lit_rl.environments.from_gymnasium import GymnasiumEnvironment
from lit_rl.environments.spaces import Choice
from lit_rl.errors import ConfigError


class RandomPlay(GameDemonstrations):
    """Episodes in which every action is drawn at random:

    `{"prompt": "lake 0", "completion": "2"}`, `{"prompt": "lake 02<|im_end|>1", "completion": "0"}`, a row for each
    turn. A policy that imitates them writes actions, and what is worth doing is left to learn.

    Args:
        id: Id of the environment, as `GymnasiumEnvironment` takes it; its actions are `Discrete`.
        prompt: A text, that of the rows which are learned from afterwards.
        options: See `GymnasiumEnvironment`.
        actions: See `GymnasiumEnvironment`.
        observation: See `GymnasiumEnvironment`.
        games: Episodes, 1 or more.
        turns: Longest episode, in turns, 1 or more.
        end: The text of the token that ends a turn of the policy.
        seed: Seed of the episodes.

    Raises:
        BackendError, ConfigError: see `GymnasiumEnvironment`.
    """

    def __init__(  # noqa: PLR0913 (one keyword a setting, as in the config)
        self,
        id: str,
        prompt: str,
        *,
        options: dict[str, Any] | None = None,
        actions: Sequence[str] = (),
        observation: Literal["value", "render"] = "value",
        games: int = 1000,
        turns: int = 8,
        end: str = "<|im_end|>",
        seed: int = 0,
    ) -> None:
        super().__init__(games, turns, end, seed)
        self._environment = GymnasiumEnvironment(id, options=options, actions=actions, observation=observation)
        if not isinstance(self._environment.actions, Choice):
            raise ConfigError(f"data.task.id={id!r}: its actions are not Discrete.")
        self._actions = self._environment.actions
        self.prompt = prompt

    def _game(self, draw: random.Random) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        with contextlib.closing(self._environment.made()) as game:
            text = self.prompt + game.reset(seed=draw.getrandbits(31))
            for _ in range(self.turns):
                action = self._actions.write(draw.randrange(self._actions.count))
                rows.append({"prompt": text, "completion": action})
                observation, _, terminated, truncated, _ = game.step(action)
                if terminated or truncated:
                    break
                text += f"{action}{self.end}{observation}"
        return rows
