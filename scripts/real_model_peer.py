"""TRL's GRPO on SmolLM2-135M-Instruct, for as many seconds as ours took: the other half of `scripts/real_model.py`.

    .venv-peer/bin/python scripts/real_model_peer.py MODEL ROWS.jsonl OUT --seconds 900 --settings JSON --lora JSON

Runs in an environment without lit_rl. OUT gets the adapter, and `steps.jsonl`: a line an optimizer step, with its
reward and the seconds since the first step began.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from bench.frozen_head import lay_rows_together
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("rows", type=Path, help="JSONL of prompts, as chats, and answers")
    parser.add_argument("out", type=Path, help="a new folder")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--settings", type=json.loads, required=True, help="of GRPOConfig, as JSON")
    parser.add_argument("--lora", type=json.loads, required=True, help="of LoraConfig, as JSON")
    given = parser.parse_args()
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
    main()
