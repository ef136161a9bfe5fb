"""SFT: a step is one gradient however it is cut, padded or packed; NEFTune's noise; it learns from nothing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from small_rollouts import trainer as quiet_trainer
from tiers import in_turn
from transformers import AutoConfig, AutoModelForCausalLM

from lit_rl.algorithms import SFT, AdamW, Constant
from lit_rl.algorithms.loop import offline as offline_policy
from lit_rl.cli import schemas
from lit_rl.cli.build import build, plain
from lit_rl.core.examples import TextBatch, TokenBatch
from lit_rl.core.rollout import Sampling
from lit_rl.data.example_module import SupervisedDataModule
from lit_rl.data.loaders import ExampleLoader
from lit_rl.data.order import RolloutOrder
from lit_rl.data.tasks import AdditionText
from lit_rl.models import LanguageModel, Lora
from lit_rl.ops.imitation import cross_entropy, dft

ROWS = [
    {"prompt": "1+1=", "completion": "2"},
    {"prompt": "12+13=", "completion": "25, as twelve and thirteen are"},
    {"prompt": "q", "completion": "a"},
    {"prompt": "a long question: ", "completion": "no"},
    {"prompt": "99+1=", "completion": "100"},
    {"prompt": "x", "completion": "yz" * 9},
    {"prompt": "5+5=", "completion": "10"},
    {"prompt": "7+8=", "completion": "15"},
]
"""Completions of 2 to 31 tokens, so micro-batches have uneven counts."""


def module_of(lora: bool = False, **settings: Any) -> SFT:
    module = SFT(LanguageModel("tiny", lora=Lora(r=2) if lora else None), **settings)
    module.configure_model()
    module.policy.train()
    return module


def steps_of(accumulate: int = 1, **data: Any) -> Iterator[TextBatch]:
    module = SupervisedDataModule(rows=ROWS, **{"val_fraction": 0, "batch_size": 1, **data})
    module.prepare(LanguageModel("tiny").tokenizer)
    train = module.corpus.train
    order = RolloutOrder((len(train),), len(train), shuffle=False)
    return iter(ExampleLoader(train, order, accumulate=accumulate, group_by_length=True))  # pyright: ignore


def gradient(module: SFT, batches: list[TextBatch]) -> torch.Tensor:
    module.policy.zero_grad()
    for batch in batches:
        module.loss(batch)[0].backward()
    return torch.cat([p.grad.flatten() for p in module.policy.parameters() if p.grad is not None])


def wider(batch: TextBatch, columns: int) -> TextBatch:
    """The same texts with more padding."""

    def pad(values: torch.Tensor | None, value: int) -> torch.Tensor | None:
        return None if values is None else torch.nn.functional.pad(values, (0, columns), value=value)

    tokens = batch.tokens
    last = None if tokens.segment is None else torch.cat([tokens.segment] + [tokens.segment[:, -1:]] * columns, 1)
    found = TokenBatch(pad(tokens.input_ids, 256), pad(tokens.attention_mask, 0), pad(tokens.loss_mask, 0), last)  # pyright: ignore
    return dataclasses.replace(batch, tokens=found)


def assert_close(one: torch.Tensor, other: torch.Tensor) -> None:
    assert (one - other).norm() <= 1e-5 * other.norm() and other.norm() > 1e-3


# ------------------------------------------------------------------ the losses


def test_the_losses_by_hand():
    logprobs = torch.tensor([[0.5, 0.25, 1.0]]).log().requires_grad_()
    torch.testing.assert_close(cross_entropy(logprobs), torch.tensor([[math.log(2), math.log(4), 0.0]]))
    loss = dft(logprobs)
    torch.testing.assert_close(loss, torch.tensor([[0.5 * math.log(2), 0.25 * math.log(4), 0.0]]))
    (found,) = torch.autograd.grad(loss.sum(), logprobs)
    torch.testing.assert_close(found, -torch.tensor([[0.5, 0.25, 1.0]]))


# ------------------------------------------------------------------ one gradient a step


@in_turn(packing=["none", "best_fit"], settings=[{}, {"neftune_alpha": 5.0}])
def test_padding_changes_nothing(settings, packing):
    module = module_of(**settings)
    batches = list(steps_of(packing=packing, max_length=48))
    assert_close(gradient(module, [wider(batch, 7) for batch in batches]), gradient(module, batches))


def test_packings_learn_what_rows_of_one_text_do():
    module = module_of()
    wanted = gradient(module, list(steps_of()))
    for length in (40, 64, 200):
        batches = list(steps_of(packing="best_fit", max_length=length))
        (batch,) = batches
        assert batch.tokens.segment is not None and len(batch) < len(ROWS)
        assert_close(gradient(module, batches), wanted)


def test_only_the_completion_is_learned_unless_told_otherwise():
    counts = {learn: next(steps_of(learn=learn)).totals.tokens for learn in ("completion", "all")}
    completions = sum(len(row["completion"]) + 1 for row in ROWS)
    assert counts == {"completion": completions, "all": completions + sum(len(row["prompt"]) - 1 for row in ROWS)}


# ------------------------------------------------------------------ NEFTune


def noise_of(module: SFT, batch: TextBatch) -> torch.Tensor:
    """`(b, s, d)`: what a forward pass of the loss adds to the embeddings."""
    seen: list[torch.Tensor] = []
    embedding = module.policy.get_input_embeddings()
    with module.noise(batch):
        handle = embedding.register_forward_hook(lambda module, args, output: seen.append(output))
        module.text_scores(batch.tokens)
    handle.remove()
    return (seen[-1] - embedding(batch.tokens.input_ids)).detach()  # the first may be a trial of the model


def test_without_it_nothing_changes_and_with_it_only_training_does():
    plain_module, noisy = module_of(), module_of(neftune_alpha=5.0)
    (batch,) = steps_of()
    wanted = plain_module.loss(batch)[0]
    assert not torch.equal(noisy.loss(batch)[0], wanted)
    assert not noisy.policy.get_input_embeddings()._forward_hooks, "nothing stays on the model"
    noisy.policy.eval()
    assert torch.equal(noisy.loss(batch)[0], plain_module.loss(batch)[0])
    ids = batch.tokens.input_ids
    assert torch.equal(noisy.policy(ids).logits, plain_module.policy(ids).logits)
    assert all(torch.equal(p, q) for p, q in zip(noisy.policy.parameters(), plain_module.policy.parameters()))
    assert noisy.policy.state_dict().keys() == plain_module.policy.state_dict().keys()


@pytest.mark.parametrize("packing", ["none", "best_fit"])
def test_the_noise_is_uniform_and_as_wide_as_the_paper_says(packing):
    module = module_of(neftune_alpha=5.0)
    (batch,) = steps_of(packing=packing, max_length=64)
    noise, tokens = noise_of(module, batch), batch.tokens
    segment = torch.zeros_like(tokens.input_ids) if tokens.segment is None else tokens.segment
    assert noise[~tokens.attention_mask].abs().max() == 0
    for row in range(len(batch)):
        for text in segment[row].unique():
            part = noise[row][tokens.attention_mask[row] & (segment[row] == text)]
            bound = 5.0 / math.sqrt(part.numel())  # alpha / sqrt(L d)
            assert part.abs().max() <= bound * 1.001 and part.abs().max() > 0.95 * bound
            assert part.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.15)


def test_the_noise_depends_on_seed_step_and_row_alone():
    module = module_of(neftune_alpha=5.0)
    (batch,) = steps_of()
    torch.manual_seed(1)
    wanted = noise_of(module, batch)
    torch.manual_seed(2)
    assert torch.equal(noise_of(module, batch), wanted)
    second = list(steps_of(4))[1]  # two rows, as another rank or another micro-batch would have them
    width = second.tokens.input_ids.shape[1]
    torch.testing.assert_close(noise_of(module, second), wanted[second.rows, :width], rtol=1e-4, atol=1e-6)
    later = noise_of(module, dataclasses.replace(batch, step=1))
    other = noise_of(module_of(neftune_alpha=5.0, seed=1), batch)
    for found in (later, other):
        assert (found - wanted).abs().max() > 0.01 and found.abs().max() > 0


def test_the_noise_reaches_a_lora_policy():
    module = module_of(lora=True, neftune_alpha=5.0)
    (batch,) = steps_of()
    assert noise_of(module, batch).abs().max() > 0
    assert not torch.equal(module.loss(batch)[0], module_of(lora=True).loss(batch)[0])


# ------------------------------------------------------------------ runs


def trainer_of(tmp_path: Path, steps: int, **settings: Any) -> L.Trainer:
    return quiet_trainer(tmp_path, **{"max_steps": steps, "limit_val_batches": 1.0, **settings})


@pytest.mark.parametrize("packing", ["none", "best_fit"])
def test_a_packed_run_looks_whether_texts_are_kept_apart(tmp_path, monkeypatch, packing):
    asked = []
    monkeypatch.setattr(offline_policy, "refuse_leaks", asked.append)
    module = SFT("tiny", sampling=Sampling(max_new_tokens=2))
    data = SupervisedDataModule(rows=ROWS, val_fraction=0, batch_size=1, packing=packing, max_length=48)
    trainer_of(tmp_path, 1, limit_val_batches=0).fit(module, datamodule=data)
    assert asked == ([] if packing == "none" else [module.policy])


# DFT begins slowly where the model knows nothing: its gradient has the factor pi(token).
@pytest.mark.parametrize("imitation, reached", [(cross_entropy, 0.5), (dft, 0.25)])
def test_a_random_model_learns_to_write_sums(tmp_path, imitation, reached):
    torch.manual_seed(0)
    source = LanguageModel("tiny")
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source.path)).save_pretrained(tmp_path / "random")
    source.tokenizer.save_pretrained(tmp_path / "random")
    module = SFT(
        str(tmp_path / "random"),
        imitation=imitation,
        optimizer=AdamW(lr=3e-3),
        scheduler=Constant(warmup_steps=5),
        sampling=Sampling(max_new_tokens=4),
    )
    data = SupervisedDataModule(task=AdditionText(max_operand=12, val_rows=40), batch_size=32)
    trainer = trainer_of(tmp_path, 40, num_sanity_val_steps=0, check_val_every_n_epoch=None, val_check_interval=1000)
    trainer.validate(module, datamodule=data, verbose=False)
    before = float(trainer.callback_metrics["val/mean_token_accuracy"])
    trainer.fit(module, datamodule=data)
    trainer.validate(module, datamodule=data, verbose=False)
    after = float(trainer.callback_metrics["val/mean_token_accuracy"])
    print(f"{before:.3f} -> {after:.3f}")
    assert before < 0.1 and after > reached


@pytest.mark.parametrize(("algo", "experiment"), [("sft", "lora_without_regret_sft"), ("grpo", "lora_without_regret")])
def test_lora_without_regret_composes_and_runs_on_the_tiny_policy(tmp_path, algo, experiment):
    schemas.register_schemas()
    GlobalHydra.instance().clear()
    with initialize_config_module("lit_rl.conf", version_base="1.3"):
        few = ["data.task.max_operand=12", "data.task.val_rows=10", f"algo={algo}", "run_dir=run"]
        tree = plain(compose("config", [f"experiment={experiment}", *few]))
        usual = plain(compose("config", ["model=qwen0.5b", *few]))
    GlobalHydra.instance().clear()
    assert tree["optimizer"]["lr"] == pytest.approx(10 * usual["optimizer"]["lr"])
    module, data = build(tree["algo"]), build(tree["data"])
    assert (module.model.lora.r, module.model.lora.targets) == (32, "all-linear")
    trainer_of(tmp_path, 1, limit_val_batches=0).fit(module, datamodule=data)
    adapted = {
        name.split(".lora_A")[0].split(".")[-1] for name, _ in module.policy.named_parameters() if "lora_A" in name
    }
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    moved = [p for name, p in module.policy.named_parameters() if "lora_B" in name]
    assert len(moved) == 14 and all(p.abs().max() > 0 for p in moved)
