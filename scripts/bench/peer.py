"""TRL 1.16 in an environment without lit_rl: its own trainers, with the config that they are given.

    BENCH_SPEC=spec.json python -m bench.peer                    # a contender of the benchmark
    python -m bench.peer MODEL ROWS.jsonl OUT --seconds 900 --settings JSON --lora JSON    # for scripts/real_model.py

Nothing of TRL is rebuilt. Around a contender's trainer three things are hung, as with ours: completions are ended at
their forced lengths by a logits processor (one column a token, cheaper than transformers' own `min_new_tokens`), those
of the first rollout are given, and the loop waits between steps.

On a real model GRPO trains for as many seconds as ours took. OUT gets the adapter, and `steps.jsonl`: a line an
optimizer step, with its reward and the seconds since the first step began.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from bench.protocol import FirstStep, Steps
from bench.workload import Spec, score


def config(spec: Spec) -> dict[str, Any]:
    """Return arguments of TRL's config for a workload: what fixes the work, and nothing of how it is done.

    Learning rate, optimizer, clipping and loss are TRL's defaults, which are ours too, but for the constant schedule.
    """
    work = spec.workload
    shared: dict[str, Any] = {
        "output_dir": str(spec.work / "trl"),
        "use_cpu": spec.device == "cpu",
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "max_steps": 1_000_000,
        "lr_scheduler_type": "constant",
        "learning_rate": 1e-6,
    }
    if work.method == "grpo":
        generating = {"num_generations": work.group, "max_completion_length": work.completion_tokens}
        return shared | generating | {"shuffle_dataset": False} | micro_batches(work.rows)
    return shared | {"max_length": None} | micro_batches(work.prompts)


def micro_batches(rows: int, at_once: int = 8) -> dict[str, int]:
    """Return TRL's default rows a forward pass, and as many of them as an optimizer step has."""
    size = min(rows, at_once)
    return {"per_device_train_batch_size": size, "gradient_accumulation_steps": rows // size}


def trainer_of(spec: Spec) -> Any:
    """Return the trainer, built from files."""
    from datasets import Dataset

    rows = [json.loads(line) for line in spec.rows.read_text().splitlines()]
    arguments = config(spec) | dict(spec.settings["config"])
    shared: dict[str, Any] = {"model": str(spec.model), "train_dataset": Dataset.from_list(rows)}
    if adapter := spec.settings.get("lora"):
        from peft import LoraConfig

        shared["peft_config"] = LoraConfig(task_type="CAUSAL_LM", **adapter)
    if spec.workload.method == "grpo":
        from trl import GRPOConfig, GRPOTrainer

        return GRPOTrainer(args=GRPOConfig(**arguments), reward_funcs=[score], **shared)
    if spec.workload.method == "dpo":
        from trl import DPOConfig, DPOTrainer

        return in_order(DPOTrainer)(args=DPOConfig(**arguments), **shared)
    from trl import SFTConfig, SFTTrainer

    return in_order(SFTTrainer)(args=SFTConfig(**arguments), **shared)


def in_order(kind: Any) -> Any:
    """Return the trainer, taking its rows in their order, as GRPO's `shuffle_dataset=False` does."""
    from torch.utils.data import SequentialSampler

    class InOrder(kind):
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return SequentialSampler(self.train_dataset if dataset is None else dataset)

    return InOrder


class EndsAt:
    """A logits processor: EOS at the last position of each row, and nowhere else."""

    def __init__(self, eos: int) -> None:
        self._eos, self._width = eos, 0
        self._due: dict[int, list[int]] = {}

    def rollout(self, lengths: list[int], ends: Callable[[int], bool], prompt_width: int) -> None:
        """Note the lengths of the rows that are drawn next."""
        self._width, self._due = prompt_width, {}
        for row, length in enumerate(lengths):
            if ends(length):
                self._due.setdefault(length - 1, []).append(row)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, self._eos] = -torch.inf
        due = self._due.get(input_ids.shape[1] - self._width)
        if due:
            scores[due] = -torch.inf
            scores[due, self._eos] = 0.0
        return scores


class Contender(TrainerCallback):
    """Hangs on a trainer."""

    def __init__(self, spec: Spec, steps: Steps, trainer: Any) -> None:
        self._spec, self._steps, self._first, self._rollouts = spec, steps, FirstStep(), 0
        self._first.open = not spec.settings.get("unrecorded")
        self._trainer = trainer
        self._hang_on_step(trainer)
        if spec.workload.generates:
            self._hang_on_generation(trainer)
            self._hang_on_logprobs(trainer)

    def _hang_on_step(self, trainer: Any) -> None:
        step, clip, phases = trainer.training_step, trainer._clip_grad_norm, self._steps.phases

        def recorded(*args: Any, **kwargs: Any) -> Tensor:
            share = step(*args, **kwargs)
            self._first.add_loss(share)
            return share

        def before_clipping(model: Any) -> Any:
            named = trainer.accelerator.unwrap_model(model).named_parameters()
            self._first.add_gradient(((name, p.grad) for name, p in named if p.grad is not None), self._spec.work)
            phases.until_the_end("optimize")
            return clip(model)

        trainer.training_step, trainer._clip_grad_norm = recorded, before_clipping

    def _hang_on_generation(self, trainer: Any) -> None:
        spec, phases, turn = self._spec, self._steps.phases, trainer._generate_single_turn
        lengths, ends = spec.lengths(), EndsAt(trainer.processing_class.eos_token_id)
        trainer.model.generate = functools.partial(trainer.model.generate, logits_processor=[ends])

        def with_lengths(prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
            number, self._rollouts = self._rollouts, self._rollouts + 1
            if number == 0:
                return spec.given(), None
            told = lengths[number % len(lengths)]
            ends.rollout(told, spec.workload.ends, max(map(len, prompt_ids)))
            ids, logprobs = turn(prompt_ids, *args, **kwargs)
            if [len(row) for row in ids] != told:
                raise RuntimeError(f"Completions have {[len(row) for row in ids]} tokens, and were forced to {told}.")
            return ids, logprobs

        trainer._generate_single_turn = phases.timed("generate", with_lengths)
        trainer._calculate_rewards = phases.timed("reward", trainer._calculate_rewards)

    def _hang_on_logprobs(self, trainer: Any) -> None:
        score = trainer._get_per_token_logps_and_entropies

        def recorded(model: Any, input_ids: Tensor, attention_mask: Tensor, count: int, *args: Any, **kw: Any) -> Any:
            scored = score(model, input_ids, attention_mask, count, *args, **kw)
            self._first.add_logprobs(input_ids[:, -count:], scored[0], attention_mask[:, -count:])
            return scored

        trainer._get_per_token_logps_and_entropies = recorded

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._steps.between()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._steps.between()


def contend() -> None:
    spec = Spec.read(os.environ["BENCH_SPEC"])
    steps = Steps()
    trainer = trainer_of(spec)
    if spec.settings.get("rows_together"):
        lay_rows_together(trainer.model)
    trainer.add_callback(Contender(spec, steps, trainer))
    trainer.train()


def lay_rows_together(model: Any) -> None:
    """Let the head of a model, or of PEFT's wrapper of one, copy what it reads together.

    With LoRA on a CPU it keeps a frozen head as fast as one that is trained. The head reads the last places of each
    row, a slice whose rows lie apart. torch folds such a product into one if the weight is trained; of a frozen weight
    it makes one product a row, over as many views of the head, and in bfloat16 on a CPU that takes up to hundreds of
    times as long. A slice that is copied together first is folded again, with the same numbers.
    """
    model.get_output_embeddings().register_forward_pre_hook(lambda _, given: (given[0].contiguous(), *given[1:]))


# ----------------------------------------------------------------------------------------------------- on a real model


def exact_match(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 for a reply that is the answer and nothing else, as `lit_rl.rewards.exact_match` has it."""
    replies = [completion[0]["content"].strip() for completion in completions]
    return [float(reply == right) for reply, right in zip(replies, answer, strict=True)]


class StopsAfter(TrainerCallback):
    """Writes down every step, and ends the training after so many seconds.

    Args:
        seconds: Since the first step began.
        file: Where the steps go.
    """

    def __init__(self, seconds: float, file: Path) -> None:
        self._seconds, self._file, self._began = seconds, file, 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "reward" in logs:
            line = {"step": state.global_step, "reward": logs["reward"], "seconds": time.perf_counter() - self._began}
            with self._file.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = time.perf_counter() - self._began > self._seconds


def train_real_model() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("rows", type=Path, help="JSONL of prompts, as chats, and answers")
    parser.add_argument("out", type=Path, help="a new folder")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--settings", type=json.loads, required=True, help="of GRPOConfig, as JSON")
    parser.add_argument("--lora", type=json.loads, required=True, help="of LoraConfig, as JSON")
    given = parser.parse_args()
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    given.out.mkdir(parents=True)
    rows = [json.loads(line) for line in given.rows.read_text().splitlines()]
    shared = {"output_dir": str(given.out / "trl"), "report_to": "none", "save_strategy": "no", "logging_steps": 1}
    trainer = GRPOTrainer(
        model=given.model,
        args=GRPOConfig(use_cpu=True, disable_tqdm=True, max_steps=1_000_000, **shared, **given.settings),
        reward_funcs=[exact_match],
        train_dataset=Dataset.from_list(rows),
        peft_config=LoraConfig(task_type="CAUSAL_LM", **given.lora),
        callbacks=[StopsAfter(given.seconds, given.out / "steps.jsonl")],
    )
    lay_rows_together(trainer.model)
    trainer.train()
    trainer.save_model(str(given.out / "adapter"))


if __name__ == "__main__":
    train_real_model() if sys.argv[1:] else contend()
