"""Environments and tools that workers load by their paths. Told to, they do what ends or stalls a process."""

from __future__ import annotations

import os
import random
import re
import sys
import threading
import time
from typing import Any

LIVING: list[int] = []


def act(word: str) -> None:
    """What a text says, where it says something that a training must survive."""
    if word == "hang":
        time.sleep(3)
    if word == "spin":
        re.match("(a+)+$", "a" * 64 + "b")  # in C, which gives Python's lock to nobody
    if word == "exit":
        os._exit(3)
    if word == "kill":
        os.kill(os.getpid(), 9)
    if word == "memory":
        bytearray(50 * 2**30)
    if word == "raise":
        raise KeyError("gold")
    if word == "leave":
        sys.exit(0)


class Counts:
    """Counts its turns, and draws from the global generator."""

    def __init__(self) -> None:
        self.turns = 0
        LIVING.append(1)

    def reset(self, *, seed: int, prompt: str = "") -> str:
        self.start = seed % 10
        return f" from {self.start}, drawn {random.randrange(1000)}: "

    def step(self, action: str) -> tuple[Any, ...]:
        act(action)
        if action.startswith("sleep"):
            time.sleep(float(action[5:]))
        self.turns += 1
        info = {"lock": threading.Lock()}  # which cannot leave a process
        told = f"{action} {self.start + self.turns} drawn {random.randrange(1000)}"
        return told, float(self.turns), action == "stop", False, info

    def close(self) -> None:
        LIVING.pop()


class Where(Counts):
    """Says in which process it lives, and how many live there."""

    def step(self, action: str) -> tuple[Any, ...]:
        act(action)
        return f"{os.getpid()} {len(LIVING)} {'torch' in sys.modules}", 0.0, False, False, {}


class Forgets(Counts):
    """Answers by the process that it lives in."""

    def step(self, action: str) -> tuple[Any, ...]:
        act(action)
        return str(os.getpid()), 0.0, False, False, {}


class Shop:
    """A class whose methods are tools."""

    async def reset(self) -> None:
        self.bought: list[str] = []

    def buy(self, name: str) -> list[str]:
        """Buy something.

        Args:
            name: What.
        """
        act(name)
        self.bought.append(name)
        return self.bought

    def get_reward(self) -> float:
        return float(len(self.bought))


def double(a: int) -> int:
    """Double a number.

    Args:
        a: The number.
    """
    return 2 * a


def do(what: str) -> str:
    """Do something.

    Args:
        what: What.
    """
    act(what)
    return "done"


def thing() -> object:
    """Something that is neither text nor JSON."""
    return threading.Lock()


def as_number(text: str) -> int:
    """An action of gymnasium's."""
    act(text)
    if not text.isdigit():
        raise ValueError("write a number")
    return int(text)


class Unrepeatable(Counts):
    """Never says the same twice."""

    def reset(self, *, seed: int, prompt: str = "") -> str:
        super().reset(seed=seed)
        return "ask: "

    def step(self, action: str) -> tuple[Any, ...]:
        act(action)
        return os.urandom(4).hex(), time.time(), action == "stop", False, {}

    def get_reward(self) -> float:
        return time.time()
