"""Completions, rollouts and Trainers of the smallest kind, and several ranks in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lit_rl.algorithms import data_parallel as processes
from lit_rl.algorithms.rollouts.scored import Scored
from lit_rl.core.rollout import Completions, PromptBatch, Rollout
from lit_rl.ops.reductions import Metrics
from lit_rl.rewards.weighted_rewards import Scores

ONE = torch.device("cpu")


def completions(lengths: Sequence[int], group_size: int, *, version: int = 0, first: int = 1) -> Completions:
    """Rows of the given lengths; token t of row i is ``first + 100 * i + t``, so every token can be told apart."""
    t = max(lengths)
    count = torch.tensor(lengths)
    mask = torch.arange(t)[None] < count[:, None]
    ids = (first + 100 * torch.arange(len(lengths))[:, None] + torch.arange(t)[None]) * mask
    rows = len(lengths)
    return Completions(
        prompt_ids=torch.full((rows, 2), first),
        prompt_mask=torch.ones(rows, 2, dtype=torch.bool),
        response_ids=ids,
        response_mask=mask,
        sampler_logprobs=-ids.float() / 1000,
        ended=torch.ones(rows, dtype=torch.bool),
        group_id=torch.arange(rows) // group_size,
        version=version,
    )


def scores(values: Sequence[Sequence[float]] | Sequence[float], **more: Any) -> Scores:
    """Of one function, or of several with weight 1; NaN where one does not apply."""
    table = torch.tensor(values, dtype=torch.float32)
    table = table[:, None] if table.ndim == 1 else table
    applies = ~table.isnan()
    total = torch.where(applies.any(1), table.nansum(1), torch.nan)
    return Scores(tuple(f"f{i}" for i in range(table.shape[1])), table, total, torch.ones_like(table), **more)


def batch(rows: Sequence[int], **more: Any) -> PromptBatch:
    """Prompts that say which row of the data they are."""
    return PromptBatch(
        prompts=[f"prompt {row}" for row in rows],
        prompt_ids=[[row] for row in rows],
        columns={"answer": [str(row) for row in rows]},
        rows=list(rows),
        occurrences=[0] * len(rows),
        **more,
    )


def rollout(rewards: Tensor, advantages: Tensor, drawn: Completions, **more: Any) -> Rollout:
    return Rollout(drawn, rewards, advantages, drawn.response_mask, **more)


def scored(drawn: Completions, said: Scores, **more: Any) -> Scored:
    """Completions and their scores, under prompts that are numbered from 0."""
    return Scored(batch(range(len(drawn.group_id.unique()))), drawn, said, **more)


def credited(module: Any, found: Scored) -> tuple[Rollout, Metrics]:
    """What a module's `take_rollout` makes of completions that are scored and chosen."""
    with torch.no_grad():
        old = module.old_logprobs(found.completions) if module.needs_old_logprobs else None
        ref = module.reference_of(found) if module.needs_reference else None
        return module.advantages(found, old, ref)


def trainer(tmp_path: Any, **settings: Any) -> L.Trainer:
    """A quiet Trainer on the CPU that writes nothing."""
    return L.Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "default_root_dir": tmp_path,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "limit_val_batches": 0,
            **settings,
        }
    )


class EachBatch(L.Callback):
    """Calls a function with the module after every micro-batch, and keeps what it returns."""

    def __init__(self, look: Callable[[Any], Any]) -> None:
        self.look = look
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        self.seen.append(self.look(pl_module))


class Ranks:
    """Several ranks as threads of this process, with the collectives that `lit_rl.algorithms.data_parallel` uses.

    `Ranks(2).run(function)` calls `function(module)` on each, with a stand-in for a module that knows nothing but its
    `ranks`, and returns what each gave.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._barrier = threading.Barrier(count, timeout=30)
        self._given: list[Any] = [None] * count
        self._local = threading.local()

    def module(self, rank: int) -> Any:
        return SimpleNamespace(ranks=Thread(self, rank))

    def all_reduce(self, tensor: Tensor, operation: Any = None, group: Any = None) -> None:
        """In the place of `torch.distributed.all_reduce`; called from a rank's thread."""
        every = torch.stack(self.exchange(self._local.rank, tensor.clone()))
        largest = operation == torch.distributed.ReduceOp.MAX
        tensor.copy_(every.amax(0) if largest else every.sum(0))

    def run(self, function: Callable[..., Any]) -> list[Any]:
        results: list[Any] = [None] * self.count

        def work(rank: int) -> None:
            self._local.rank = rank
            try:
                results[rank] = function(self.module(rank))
            except BaseException as error:  # raised below, in the test's own thread
                results[rank] = error
                self._barrier.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        errors = [result for result in results if isinstance(result, BaseException)]
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return results

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """What every rank gives, in their order."""
        self._given[rank] = value
        self._barrier.wait()
        everyone = list(self._given)
        self._barrier.wait()
        return everyone


class Thread(processes.Ranks):
    """The processes of a run as one of these threads sees them."""

    def __init__(self, group: Ranks, rank: int) -> None:
        super().__init__(ONE, rank, group.count)
        object.__setattr__(self, "_group", group)

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        return self._group.exchange(self.rank, tensor)  # pyright: ignore

    def objects(self, mine: Any) -> list[Any]:
        return self._group.exchange(self.rank, mine)  # pyright: ignore
