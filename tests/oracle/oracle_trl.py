"""TRL 1.16's side: its own rollout and its own loss, on a trainer whose settings are changed in place.

Nothing of TRL is rebuilt. `_generate_and_score_completions` and `_compute_loss` run as they are; only the completions
are given to them. A trainer is made once, since that costs seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from oracle_cases import (
    BASE,
    GIVEN,
    GROUP,
    LIMIT,
    PROMPTS,
    ROWS,
    TEMPERATURE,
    WEIGHTS,
    Case,
    Outcome,
    Settings,
    backward,
    first,
    response_ids,
    second,
)
from torch import Tensor

from lit_rl.algorithms.rollouts.rollout_plan import frozen_logprobs
from lit_rl.core.rollout import Completions, Sampling


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def save_policy(folder: Path, tokenizer: Any = None) -> Any:
    """A mixture of experts, so that the router's loss is there to compare; returns its tokenizer."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    tokenizer = make_tokenizer() if tokenizer is None else tokenizer
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_experts=3,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,  # pyright: ignore
        initializer_range=0.2,  # far from uniform, so that entropies and ratios differ between tokens
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


@dataclass(eq=False)
class Oracle:
    """A trainer of TRL, the weights at three times, and what an engine said of the completions."""

    trainer: Any
    weights: dict[str, dict[str, Tensor]]

    @classmethod
    def of(
        cls,
        trainer_class: Any,
        config_class: Any,
        folder: Path,
        *,
        tokenizer: Any = None,
        prompts: Sequence[Any] = ("ab", "cde"),
        longest: int = LIMIT,
        **more: Any,
    ) -> Oracle:
        """A trainer of these prompts; `more` are further arguments of its constructor."""
        from datasets import Dataset

        tokenizer = save_policy(folder / "model", tokenizer)
        args = config_class(
            output_dir=str(folder),
            per_device_train_batch_size=GROUP,
            gradient_accumulation_steps=2,
            num_generations=GROUP,
            max_completion_length=longest,
            temperature=TEMPERATURE,
            beta=0.1,  # makes a reference; switched off where a test does not want it
            reward_weights=list(WEIGHTS.values()),
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            report_to="none",
        )
        trainer = trainer_class(
            model=str(folder / "model"),
            args=args,
            reward_funcs=[first, second],
            train_dataset=Dataset.from_dict({"prompt": [*prompts] * 4}),
            processing_class=tokenizer,
            **more,
        )
        reports = config_class.__name__ == "GRPOConfig"  # RLOO has no use for log-probs of the engine
        trainer._generate_single_turn = lambda *_: (GIVEN["ids"], GIVEN["logprobs"]) if reports else GIVEN["ids"]
        trainer.model.train()
        return cls(trainer, _three_weights(trainer.model))

    @property
    def model(self) -> Any:
        return self.trainer.model

    def at(self, time: str) -> None:
        """Give the policy its weights of then, and the reference its own."""
        self.model.load_state_dict(self.weights[time])
        self.trainer.ref_model.load_state_dict(self.weights["reference"])

    def configure(self, settings: Settings, case: Case) -> None:
        """Set in place what TRL's `__init__` takes from its config."""
        trainer, merged = self.trainer, BASE | dict(settings)
        for name, value in merged.items():
            for place in (trainer, trainer.args):
                if hasattr(place, name):
                    setattr(place, name, value)
        trainer.epsilon_low = merged["epsilon"]
        trainer.epsilon_high = merged["epsilon"] if merged["epsilon_high"] is None else merged["epsilon_high"]
        trainer.aux_loss_enabled = merged["router_aux_loss_coef"] != 0
        trainer._entropy_bonus_enabled = merged["entropy_coef"] != 0 or merged["use_adaptive_entropy"]
        trainer._last_world_entropy, trainer._entropy_window_stats = math.inf, None
        trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = case.micro_batches
        trainer.args.gradient_accumulation_steps = case.micro_batches
        trainer._metrics["train"].clear()

    def take(self, settings: Settings, case: Case, completions: Completions) -> dict[str, Any]:
        """TRL's rollout, made of these completions with the weights of then."""
        self.configure(settings, case)
        engine = [row[mask].tolist() for row, mask in zip(completions.sampler_logprobs, completions.response_mask)]
        GIVEN.update(first=case.first, second=case.second, ids=response_ids(case))
        GIVEN["logprobs"] = engine if settings.get("use_vllm") else None
        self.at("rollout")
        return self.trainer._generate_and_score_completions([{"prompt": prompt} for prompt in PROMPTS])

    def step(self, micro_batches: list[Any]) -> Outcome:
        """TRL's loss of an optimizer step, with the weights that are set."""
        trainer, count, shares = self.trainer, len(micro_batches), []
        for number, micro in enumerate(micro_batches, start=1):
            trainer.accelerator.gradient_state._set_sync_gradients(number == count)
            loss = trainer._compute_loss(self.model, micro)
            shares.append(loss if hasattr(trainer, "loss_type") else loss / count)  # RLOO leaves it to the Trainer
        return backward(self.model, shares)


def _three_weights(model: Any) -> dict[str, dict[str, Tensor]]:
    """Of the policy that took the rollout, of the one that learns from it, and of the reference."""
    generator = torch.Generator().manual_seed(2)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def moved(by: float) -> dict[str, Tensor]:
        return {name: x + by * x.std() * torch.randn(x.shape, generator=generator) for name, x in start.items()}

    return {"rollout": start, "update": moved(0.08), "reference": moved(0.12)}


def completions_of(oracle: Oracle, case: Case) -> Completions:
    return _completions_of(oracle, case.lengths, case.cut)


@cache
def _completions_of(oracle: Oracle, lengths: tuple[int, ...], cut: tuple[int, ...]) -> Completions:
    """Padded as our generators do, and scored by an engine that is a little off and left out one token."""
    case = Case(lengths=lengths, cut=cut)
    prompts = oracle.trainer.processing_class(PROMPTS, return_tensors="pt", padding=True)
    mask = torch.arange(max(case.lengths)) < torch.tensor(case.lengths).unsqueeze(1)
    ids = torch.zeros(mask.shape, dtype=torch.long)
    ids[mask] = torch.tensor([token for row in response_ids(case) for token in row])
    completions = Completions(
        prompt_ids=prompts["input_ids"],
        prompt_mask=prompts["attention_mask"].bool(),
        response_ids=ids,
        response_mask=mask,
        sampler_logprobs=torch.zeros(mask.shape),
        ended=torch.tensor([i not in case.cut for i in range(ROWS)]),
        group_id=torch.arange(2).repeat_interleave(GROUP),
    )
    oracle.at("rollout")
    exact = frozen_logprobs(oracle.model, completions, sampling=Sampling(temperature=TEMPERATURE), rows_at_once=ROWS)
    noise = torch.randn(mask.shape, generator=torch.Generator().manual_seed(4))
    engine = exact + 0.5 * noise
    engine[1, 2] = torch.nan
    return replace(completions, sampler_logprobs=engine.masked_fill(~mask, 0.0))


def theirs(oracle: Oracle, settings: Settings, case: Case, completions: Completions) -> Outcome:
    """TRL's step: its own rollout with the weights of then, its own loss with the weights of now."""
    from trl.trainer.utils import split_tensor_dict

    taken = oracle.take(settings, case, completions)
    oracle.at(case.now)
    outcome = oracle.step(split_tensor_dict(taken, case.micro_batches))
    metrics = {name: list(values) for name, values in oracle.trainer._metrics["train"].items()}
    return replace(outcome, advantages=taken["advantages"], metrics=metrics)
