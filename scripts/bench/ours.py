"""lit_rl as a contender: the door of `train.py`, with the overrides that it is given.

Nothing of a step is rebuilt or left out. Three things are hung around it: completions are ended at their forced
lengths, those of the first rollout are given (see `bounds`), and the loop waits between steps. Forced lengths come by
the noise: a token is drawn by inverse CDF from a number that is a function of row and position alone, so a number next
to 1 draws the first token of the vocabulary, which is EOS here, and smaller ones never do. A draw costs what it always
does.

    BENCH_SPEC=spec.json python -m bench.ours

The spec is named in the environment, as Lightning starts a second process by the command line of Hydra.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from bench import workload
from bench.protocol import FirstStep, Steps, Unasked
from bench.workload import Spec, Workload
from lit_rl import cli
from lit_rl.core.rollout import Completions, Prompts, Sampling
from lit_rl.generation import noise

ALL = (
    "model=local",
    "scheduler=constant",
    "callbacks=none",
    "logger=none",
    "trainer.max_steps=1000000",
    "trainer.max_epochs=-1",
    "trainer.limit_val_batches=0",
    "trainer.enable_progress_bar=false",
    "trainer.precision=32-true",
    "data.val_fraction=0",
    "data.shuffle=false",
)
"""What is set whatever is measured: no end, no validation, rows in their order, float32 if nothing else is said."""


def overrides(spec: Spec) -> list[str]:
    """Return the command line of `train.py` for a workload, without the contender's own settings."""
    work = spec.workload
    algo = f"algo={spec.settings.get('algo', work.method)}"
    chosen = {
        "grpo": [
            algo,
            "data=jsonl",
            f"data.prompts_per_rollout={work.prompts}",
            f"data.max_prompt_tokens={work.prompt_tokens}",
            "reward=function",
            f"reward.fn={Path(workload.__file__).resolve()}:{'slow' if work.slow_rewards else 'score'}",
            f"algo.group_size={work.group}",
            f"sampling.max_new_tokens={work.completion_tokens}",
        ],
        "dpo": [algo, "data=preferences", f"data.batch_size={work.prompts}"],
        "sft": [algo, "data=texts", f"data.batch_size={work.prompts}", "optimizer.lr=1e-6"],
    }[work.method]
    if work.places is not None:
        chosen.append(f"generator.batch_size={work.places}")
    if work.micro_batches is not None:
        chosen.append(f"trainer.accumulate_grad_batches={work.micro_batches}")
    device = ["trainer.accelerator=cpu"] if spec.device == "cpu" else ["trainer.accelerator=gpu", "trainer.devices=1"]
    paths = [f"model.name={spec.model}", f"data.path={spec.rows}"]
    return [*chosen, *ALL, *paths, *device]


class Forced:
    """Ends each completion where its workload says, by the noise that tokens are drawn with."""

    BELOW = 1 - 2.0**-5
    """Numbers under this never draw the first token, as long as its probability is below 1 - this."""
    FIRST = 1 - 2.0**-24
    """The number that draws the first token."""

    def __init__(self, spec: Spec) -> None:
        self._work, self._uniform = spec.workload, noise.uniform
        self._keys, self._last = torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long)
        noise.uniform = self

    def begin(self, prompts: Prompts, lengths: list[int]) -> None:
        """Note the prompts whose completions are drawn next, and their lengths."""
        last = torch.tensor([length - 1 if self._work.ends(length) else -1 for length in lengths])
        self._keys, order = noise.row_keys(prompts.keys, prompts.group_size).sort()
        self._last = last[order]

    def __call__(self, keys: Tensor, position: int | Tensor) -> Tensor:
        """Stand in place of `noise.uniform`."""
        known, ends = self._keys.to(keys.device), self._last.to(keys.device)
        last = ends[torch.searchsorted(known, keys).clamp_(max=len(known) - 1)]
        return torch.where(last == position, self.FIRST, self.BELOW * self._uniform(keys, position))


class Rows:
    """The files' rows of the prompts that a generator is asked about: a rank is asked about its own only."""

    def __init__(self, spec: Spec) -> None:
        texts = [json.loads(line)["prompt"] for line in spec.rows.read_text().splitlines()]
        self._places, self._group = {text: i for i, text in enumerate(texts)}, spec.workload.group
        self._lengths = [length for rollout in spec.lengths() for length in rollout]
        self._given = spec.given()

    def lengths(self, prompts: Prompts) -> list[int]:
        """Return the forced length of each completion."""
        return [self._lengths[row] for row in self._rows(prompts)]

    def given(self, prompts: Prompts) -> list[list[int]]:
        """Return the completions that are given in the first rollout; in others the same again."""
        return [self._given[row % len(self._given)] for row in self._rows(prompts)]

    def _rows(self, prompts: Prompts) -> list[int]:
        assert prompts.decode is not None
        places = [self._places[prompts.decode(ids)] for ids in prompts.token_ids]
        return [place * self._group + sample for place in places for sample in range(self._group)]


class Contender(L.Callback):
    """Hangs on a run of `train.py`."""

    def __init__(self, spec: Spec, steps: Steps) -> None:
        self._spec, self._steps, self._first = spec, steps, FirstStep()
        self._first.open = not spec.settings.get("unrecorded")
        self._drawn, self._trained = 0, 0

    # ------------------------------------------------------------------ hung around the module

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        module: Any = pl_module
        self._hang_on_loss(module)
        if self._spec.workload.generates:
            self._hang_on_generator(module)
            module.reward = self._steps.phases.timed("reward", module.reward)

    def _hang_on_loss(self, module: Any) -> None:
        loss = module.loss

        def recorded(batch: Any, scores: Any = None, *rest: Any, **named: Any) -> Any:
            if self._spec.workload.generates:
                rows = batch.completions
                self._first.add_logprobs(rows.response_ids, scores.logprobs, rows.response_mask)
            value, metrics = loss(batch, scores, *rest, **named)
            self._first.add_loss(value)
            return value, metrics

        module.loss = recorded

    def _hang_on_generator(self, module: Any) -> None:
        generate, rows, forced = module.generator.generate, Rows(self._spec), Forced(self._spec)

        def with_lengths(prompts: Prompts, sampling: Sampling) -> Completions:
            self._drawn += 1
            if self._drawn == 1 or self._spec.settings.get("learns_alone"):
                return completions_of(rows.given(prompts), prompts, self._spec.workload, module.device)
            told = rows.lengths(prompts)
            forced.begin(prompts, told)
            completions = generate(prompts, sampling)
            if (lengths := completions.lengths.tolist()) != told:
                raise RuntimeError(f"Completions have {lengths} tokens, and were forced to {told}.")
            return completions

        module.generator.generate = self._steps.phases.timed("generate", with_lengths)

    # ------------------------------------------------------------------ between steps

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._steps.between()

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        policy: Any = pl_module.policy
        if self._first.open:
            named = whole_gradients(policy.named_parameters())  # all ranks take part where they hold shards
            if trainer.is_global_zero:
                self._first.add_gradient(named, self._spec.work, whole=trainer.world_size == 1)
            self._first.open = False
        self._steps.phases.until_the_end("optimize")

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *rest: Any) -> None:
        if trainer.global_step > self._trained:
            self._trained = trainer.global_step
            self._steps.between()


def whole_gradients(named: Iterable[tuple[str, torch.nn.Parameter]]) -> list[tuple[str, Tensor]]:
    """Return gradients by parameter, those whose shards are spread over ranks put together."""
    found = [(name, parameter.grad) for name, parameter in named if parameter.grad is not None]
    return [(name, grad.full_tensor() if isinstance(grad, DTensor) else grad) for name, grad in found]


def completions_of(ids: list[list[int]], prompts: Prompts, work: Workload, device: torch.device) -> Completions:
    """Return given token ids as a generator would."""
    width = max(map(len, ids))
    lengths = torch.tensor([len(row) for row in ids], device=device)
    mask = torch.arange(width, device=device) < lengths[:, None]
    asked = torch.tensor(prompts.token_ids, device=device).repeat_interleave(work.group, 0)
    return Completions(
        prompt_ids=asked,
        prompt_mask=torch.ones_like(asked, dtype=torch.bool),
        response_ids=torch.tensor([row + [prompts.pad_id] * (width - len(row)) for row in ids], device=device),
        response_mask=mask,
        sampler_logprobs=torch.zeros(mask.shape, device=device),
        ended=lengths < work.completion_tokens,
        group_id=torch.arange(len(prompts), device=device).repeat_interleave(work.group),
    )


def main() -> None:
    spec = Spec.read(os.environ["BENCH_SPEC"])
    first, fit = int(os.environ.get("LOCAL_RANK", "0")) == 0, L.Trainer.fit
    steps = Steps() if first else Unasked()

    def hung(trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        trainer.callbacks.append(Contender(spec, steps))  # pyright: ignore[reportAttributeAccessIssue]
        fit(trainer, *args, **kwargs)

    L.Trainer.fit = hung
    if not first:  # Lightning started it, with the command line of the first
        sys.exit(cli.run(sys.argv[1:]))
    with tempfile.TemporaryDirectory(dir=spec.work) as folder:
        sys.exit(cli.run([*overrides(spec), *spec.settings["overrides"], f"run_dir={folder}"]))


if __name__ == "__main__":
    main()
