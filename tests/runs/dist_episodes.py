"""Short runs whose completions are episodes, in one process or in two (`dist_jobs.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
from dist_equal import train_and_leave, trainer

from lit_rl.algorithms import GRPO, Constant
from lit_rl.algorithms.optim.optimizers import ByPath
from lit_rl.core.rollout import Sampling
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.environments import CustomEnvironment
from lit_rl.generation import RolloutFunction
from lit_rl.rewards import environment

KINDS = ["short", "long", "long", "short", "fails", "long", "short", "long"]
"""Of the rows of an epoch: two rollouts of four."""


class ByRow:
    """Talks for as long as its row says, or is lost in its second turn."""

    def reset(self, *, seed: int, kind: str) -> str:
        self.kind, self.turns = kind, 0
        return f"{seed % 10}:"

    def step(self, action: str) -> tuple[Any, ...]:
        self.turns += 1
        if self.kind == "fails" and self.turns == 2:
            raise ConnectionError("no server")
        return "?", float(sum(map(ord, action)) % 3), self.kind == "short", False, {}


def goes_on(prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
    """Some completions are gone on with once, some twice, so that ranks ask another number of times."""
    texts = [trainer.encode(prompt) for prompt in prompts]
    out = trainer.generate(texts)
    said, logprobs = out["completion_ids"], out["logprobs"]
    wanted = {"short": 0, "long": 2, "fails": 1}
    for round_ in range(2):
        rows = [row for row, kind in enumerate(trainer.columns["kind"]) if wanted[kind] > round_]
        more = trainer.generate([texts[row] + said[row] for row in rows], rows=rows)
        for row, ids, values in zip(rows, more["completion_ids"], more["logprobs"]):
            said[row], logprobs[row] = said[row] + ids, logprobs[row] + values
    return {"prompt_ids": texts, "completion_ids": said, "logprobs": logprobs}


def characters(completions: Sequence[str]) -> list[float]:
    return [float(sum(map(ord, text)) % 5) for text in completions]


def _runs(name: str) -> tuple[Any, Any]:
    """What makes the episodes, and what rewards them."""
    if name == "function":
        return RolloutFunction(goes_on, max_tokens=16), characters
    game = CustomEnvironment(ByRow, max_turns=3, max_tokens=24, max_observation_tokens=8, max_failed=0.5)
    return game, environment


RUNS = ("game", "function")


class Drawn(L.Callback):
    """Every completion of every rollout, by its row and its number in the group, with the rank that drew it."""

    def __init__(self) -> None:
        self.rollouts: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        scored, ranks = pl_module.scored, pl_module.ranks
        completions, mine = scored.completions, {}
        mask = completions.response_mask if completions.attended is None else completions.attended
        for place, episode in enumerate(completions.episodes):
            row, number = scored.batch.rows[place // scored.group_size], place % scored.group_size
            mine[f"{row}/{number}"] = {
                "ids": completions.response_ids[place][mask[place]].tolist(),
                "written": completions.response_mask[place][mask[place]].tolist(),
                "end": episode.end,
                "turns": episode.turns,
                "rank": ranks.rank,
            }
        self.rollouts.append({name: each for part in ranks.objects(mine) for name, each in part.items()})


def run(name: str, folder: Path, devices: int) -> None:
    """Leaves the weights, the metrics and what was drawn in `NAME.pt`."""
    env, reward = _runs(name)
    module = GRPO("tiny", reward, env=env, optimizer=ByPath("torch.optim.SGD", lr=0.03), scheduler=Constant(),
                  sampling=Sampling(max_new_tokens=4), group_size=4)  # fmt: skip
    rows = [{"prompt": f"{place}=", "kind": kind} for place, kind in enumerate(KINDS)]
    data = RolloutDataModule(rows=rows, prompts_per_rollout=4, val_fraction=0.0)
    drawn = Drawn()
    # Two rollouts, one epoch. Two processes sum in another order, and each step adds to that difference: in the fourth
    # rollout one token was drawn differently on one kind of processor.
    runner = trainer(folder, devices, max_steps=2, callbacks=[drawn])
    train_and_leave(module, data, runner, folder / f"{name}.pt", rollouts=drawn.rollouts)


def main(folder: Path) -> None:
    for name in RUNS:
        run(name, folder, 2)
