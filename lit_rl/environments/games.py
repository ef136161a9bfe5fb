"""Small games in text, so that an agent can be trained without anything of one's own, and demonstrations of them.

A number is guessed by its hints; products are found with a tool, the smallest task in which a policy learns to call
one. Loaded by worker processes too: no PyTorch.
"""

from __future__ import annotations

import random
import re
from abc import ABC, abstractmethod
from typing import Any

from lit_rl.core.declared_settings import checked
from lit_rl.core.errors import ConfigError
from lit_rl.ops.ranges import AtLeastOne, AtLeastTwo, Portion


@checked("data.task")
class GameDemonstrations(ABC):
    """Abstract: subclasses say how one game is played.

    Args:
        games: Number of games, 1 or more.
        turns: Longest game, in turns, 1 or more.
        end: The text of the token that ends a turn of the policy.
        seed: Seed of the games.
    """

    def __init__(self, games: AtLeastOne, turns: AtLeastOne, end: str, seed: int) -> None:
        self.games, self.turns, self.end, self.seed = games, turns, end, seed

    def train(self) -> list[dict[str, Any]]:
        """Return a row for each turn of each game."""
        draw = random.Random(self.seed)
        return [row for _ in range(self.games) for row in self._game(draw)]

    def val(self) -> list[dict[str, Any]]:
        """Return no rows: `env=` plays the game itself."""
        return []

    @abstractmethod
    def _game(self, draw: random.Random) -> list[dict[str, Any]]:
        """Return the rows of one game: ``prompt``, the text before the turn, and ``completion``."""


PROMPT = "0..9="


class GuessNumber:
    """The number is drawn from 0 to `highest`, by the seed. A wrong guess is answered ``>=`` where the number is larger
    and ``<=`` where it is smaller; what is no number ``?=``. The right guess ends the game and is worth 1.

    Halving the range finds one of ten numbers within four turns; guesses that read no hint find it in 4 of 10 games.
    """

    def reset(self, *, seed: int, highest: int = 9) -> None:
        self.number = random.Random(seed).randint(0, highest)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, int]]:
        """Return gymnasium's five values: observation, reward, terminated, truncated, info."""
        guess = int(action) if re.fullmatch(r"\d{1,3}", action) else None
        right = guess == self.number
        hint = "?=" if guess is None else ">=" if guess < self.number else "<="
        return "" if right else hint, float(right), right, False, {}


@checked("data.task")
class GuessDemonstrations(GameDemonstrations):
    """Games of a player who reads the hints and guesses at random among the numbers they leave:

    `{"prompt": "0..9=7<|im_end|><=", "completion": "3"}`, a row for each turn. A policy that imitates them knows the
    form of the game, and wins it as often as chance does; how to halve the range is left to learn.

    Args:
        games: Number of games, 1 or more.
        turns: Longest game, in turns, 1 or more.
        end: The text of the token that ends a turn of the policy.
        seed: Seed of the games.
    """

    def __init__(self, games: AtLeastOne = 4000, turns: AtLeastOne = 4, end: str = "<|im_end|>", seed: int = 0) -> None:
        super().__init__(games, turns, end, seed)

    def _game(self, draw: random.Random) -> list[dict[str, Any]]:
        game, rows, text, low, high = GuessNumber(), [], PROMPT, 0, 9
        game.reset(seed=draw.getrandbits(31))
        for _ in range(self.turns):
            guess = draw.randint(low, high)
            rows.append({"prompt": text, "completion": str(guess)})
            hint, _, right, _, _ = game.step(str(guess))
            if right:
                break
            low, high = (guess + 1, high) if hint == ">=" else (low, guess - 1)
            text += f"{guess}{self.end}{hint}"
        return rows


LOWEST = 2

TOOL_INSTRUCTION = (
    "To multiply two numbers, write multiply(a, b) and nothing else, and you will be told the product. "
    "Then reply with just that number."
)
"""Instructions for calling the tool, for policies whose chat template does not render tools."""


def mul(a: int, b: int) -> str:
    """Multiply two whole numbers.

    Args:
        a: The first.
        b: The second.
    """
    return f"{a * b}="  # in plain text the = marks where the policy's turn begins


def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a * b


@checked("data.task")
class Products:
    """Products of two whole numbers: `{"prompt": "17*25=", "answer": "425"}`.

    Every ordered pair of operands from 2 on is a row of exactly one of the two sets. The pairs that are held out depend
    on the arguments alone.

    Args:
        max_operand: Largest operand, 2 or more; there are `(max_operand - 1) ** 2` pairs.
        val_rows: Number of pairs held out for validation; 0 holds out none.
        seed: Seed of the held-out pairs, and of the order of the rows.
    """

    def __init__(self, max_operand: AtLeastTwo = 99, val_rows: int = 200, seed: int = 0) -> None:
        pairs = (max_operand - LOWEST + 1) ** 2
        if not 0 <= val_rows < pairs:
            raise ConfigError(
                f"data.task.val_rows={val_rows} is out of range: allowed is 0 to {pairs - 1}, because "
                f"max_operand={max_operand} makes {pairs} pairs and training needs at least one."
            )
        self.max_operand, self.val_rows, self.seed = max_operand, val_rows, seed

    def train(self) -> list[dict[str, Any]]:
        """Return the products that are not held out."""
        return [self._problem(*pair) for pair in self._pairs()[self.val_rows :]]

    def val(self) -> list[dict[str, Any]]:
        """Return the `val_rows` held-out products."""
        return [self._problem(*pair) for pair in self._pairs()[: self.val_rows]]

    def _problem(self, a: int, b: int) -> dict[str, Any]:
        return {"prompt": f"{a}*{b}=", "answer": str(a * b)}

    def _pairs(self) -> list[tuple[int, int]]:
        operands = range(LOWEST, self.max_operand + 1)
        pairs = [(a, b) for a in operands for b in operands]
        random.Random(self.seed).shuffle(pairs)
        return pairs


@checked("data.task")
class ProductQuestions(Products):
    """The same products as questions of a chat, behind a few words that say how the tool is called:

    `{"prompt": [{"role": "user", "content": "To multiply, write ... What is 17 times 25?"}], "answer": "425"}`

    They are for models whose chat template tells nothing of tools.

    Args:
        max_operand: See `Products`.
        val_rows: Number of products held out.
        seed: Seed of the draw.
        instruction: The words.
    """

    def __init__(
        self, max_operand: AtLeastTwo = 99, val_rows: int = 200, seed: int = 0, instruction: str = TOOL_INSTRUCTION
    ) -> None:
        super().__init__(max_operand, val_rows, seed)
        self.instruction = instruction

    def _problem(self, a: int, b: int) -> dict[str, Any]:
        question = f"{self.instruction} What is {a} times {b}?"
        return {"prompt": [{"role": "user", "content": question}], "answer": str(a * b)}


class QuestionDemonstrations(ProductQuestions):
    """The same questions answered with the tool, a row for each turn, as messages of a chat:

    the question, and `multiply(17, 25)` as `completion`; the question, that call and the tool's answer, and `425`.

    Args:
        max_operand: See `ProductQuestions`, also for the rest.
        val_rows: The products that it holds out are in no demonstration.
        seed: Seed of the draw.
        instruction: The words.
    """

    def train(self) -> list[dict[str, Any]]:
        """Return two rows for each product that is not held out."""
        return [row for pair in self._pairs()[self.val_rows :] for row in self._turns(*pair)]

    def val(self) -> list[dict[str, Any]]:
        """Return no rows: `env=tools` asks the questions themselves."""
        return []

    def _turns(self, a: int, b: int) -> list[dict[str, Any]]:
        asked, call = self._problem(a, b)["prompt"], _assistant_message(f"multiply({a}, {b})")
        answer = str(multiply(a, b))
        return [
            {"prompt": asked, "completion": [call]},
            {"prompt": [*asked, call, {"role": "tool", "content": answer}], "completion": [_assistant_message(answer)]},
        ]


@checked("data.task")
class CalculatorDemonstrations(Products):
    """The same products, solved with a calculator on which sometimes a wrong key is pressed:

    `{"prompt": "17*25=", "completion": "mul(17,25)"}`, `{"prompt": "17*25=mul(17,25)<|im_end|>425=", "completion":
    "425"}`, a row for each turn. In some the second operand is another number, and its result is answered all the
    same. A policy that imitates them knows how to call the tool and how to read it; to ask it the right thing is left
    to learn.

    Args:
        max_operand: See `Products`.
        val_rows: See `Products`. The pairs that it holds out are in no demonstration.
        wrong: Share of the demonstrations with another second operand, from 0 to 1.
        end: The text of the token that ends a turn of the policy.
        seed: See `Products`, and of the wrong operands.
    """

    def __init__(
        self,
        max_operand: AtLeastTwo = 99,
        val_rows: int = 200,
        wrong: Portion = 0.3,
        end: str = "<|im_end|>",
        seed: int = 0,
    ) -> None:
        super().__init__(max_operand, val_rows, seed)
        if wrong and max_operand == LOWEST:
            raise ConfigError(
                f"data.task.wrong={wrong} and data.task.max_operand={LOWEST}: there is one operand, and no wrong one. "
                "Take a larger max_operand, or wrong=0."
            )
        self.wrong, self.end = wrong, end

    def train(self) -> list[dict[str, Any]]:
        """Return two rows for each product that is not held out."""
        draw = random.Random(f"{self.seed} wrong operands")
        return [row for a, b in self._pairs()[self.val_rows :] for row in self._turns(a, b, draw)]

    def val(self) -> list[dict[str, Any]]:
        """Return no rows: `env=` asks for the products themselves."""
        return []

    def _turns(self, a: int, b: int, draw: random.Random) -> list[dict[str, Any]]:
        pressed = b
        if draw.random() < self.wrong:
            other = draw.randint(LOWEST, self.max_operand - 1)
            pressed = other + (other >= b)
        prompt, call, answer = f"{a}*{b}=", f"mul({a},{pressed})", mul(a, pressed)
        return [
            {"prompt": prompt, "completion": call},
            {"prompt": f"{prompt}{call}{self.end}{answer}", "completion": answer.removesuffix("=")},
        ]


def _assistant_message(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}
