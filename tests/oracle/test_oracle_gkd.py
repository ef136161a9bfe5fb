"""GKD against TRL 1.16: the divergence, also over a top k, and a step's loss and gradient on TRL's own batch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracle_cases import Outcome, assert_same_step, backward
from oracle_trl import save_policy

from lit_rl.algorithms import GKD
from lit_rl.algorithms.gkd import as_tokens
from lit_rl.core.examples import TextBatch, TokenBatch, Totals
from lit_rl.core.rollout import Completions
from lit_rl.models import LanguageModel
from lit_rl.ops.distillation import prefix_weights, renormalized, token_advantages, top_divergence, with_tail
from lit_rl.ops.imitation import generalized_jsd

ROWS = [("one", " yes"), ("a longer one", " long"), ("q", "a"), ("to be", " or not")]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
BETAS = (0.0, 0.1, 0.5, 1.0)


@pytest.fixture(scope="module", params=["full", "lora"])
def trl(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A trainer whose student is away from its teacher."""
    return make_trainer(tmp_path_factory.mktemp(request.param), lora=request.param == "lora")


def make_trainer(folder: Path, *, lora: bool) -> Any:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    tokenizer = save_policy(folder / "model")
    tokenizer.chat_template = TEMPLATE
    rows = [
        {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}
        for prompt, answer in ROWS
    ]
    args = GKDConfig(
        output_dir=str(folder),
        per_device_train_batch_size=len(ROWS),
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to="none",
    )
    trainer: Any = GKDTrainer(
        model=str(folder / "model"),
        teacher_model=AutoModelForCausalLM.from_pretrained(folder / "model"),
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=3, target_modules=["q_proj", "v_proj"]) if lora else None,
    )
    generator = torch.Generator().manual_seed(5)
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            width = 0.2 if lora else 0.3 * parameter.detach().std()
            parameter.data += width * torch.randn(parameter.shape, generator=generator)
    trainer.model.train()
    return trainer


def trained(model: Any) -> Any:
    """Stands for a model of which only what is trained is there."""
    return SimpleNamespace(parameters=lambda: [p for p in model.parameters() if p.requires_grad])


def their_batch(trl: Any) -> dict[str, torch.Tensor]:
    return trl.data_collator([trl.train_dataset[i] for i in range(len(ROWS))])


def theirs(trl: Any, batch: dict[str, torch.Tensor], beta: float) -> Outcome:
    trl.beta = beta
    return backward(trained(trl.model), [trl.compute_loss(trl.model, batch)])


def our_module(trl: Any, **settings: Any) -> GKD:
    module = GKD(LanguageModel("tiny"), teacher="tiny", **settings)
    module.policy, module.teacher_policy = trl.model, trl.teacher_model
    return module


def ours(trl: Any, batch: dict[str, torch.Tensor], beta: float) -> Outcome:
    mask = batch["labels"] != -100
    tokens = TokenBatch(batch["input_ids"], batch["attention_mask"].bool(), mask)
    totals = Totals(rows=len(mask), tokens=int(mask.sum()), attended=int(batch["attention_mask"].sum()))
    loss, _ = our_module(trl, beta=beta).loss(TextBatch(tokens, list(range(len(mask))), totals))
    return backward(trained(trl.model), [loss])


@pytest.mark.parametrize("beta", BETAS)
def test_a_step_on_the_data(trl: Any, beta: float) -> None:
    batch = their_batch(trl)
    assert_same_step(ours(trl, batch, beta), theirs(trl, batch, beta))


def test_a_step_on_samples(trl: Any) -> None:
    """What TRL's student writes, in the frames of both: theirs pads prompts on the left, ours all on the right."""
    batch = their_batch(trl)
    prompts = batch["prompts"].shape[1]
    trl.generation_config.max_new_tokens = 6
    trl.model.config.output_router_logits = False  # transformers 5.19 cannot sum up a decode step's
    torch.manual_seed(0)
    trl.model.eval()
    ids, attended, labels = trl.generate_on_policy_outputs(trl.model, batch, trl.generation_config)
    trl.model.train()
    other = theirs(trl, {"input_ids": ids, "attention_mask": attended, "labels": labels}, 0.3)

    response = labels[:, prompts:] != -100
    completions = Completions(
        prompt_ids=ids[:, :prompts],
        prompt_mask=attended[:, :prompts].bool(),
        response_ids=ids[:, prompts:],
        response_mask=response,
        sampler_logprobs=torch.zeros(response.shape),
        ended=torch.ones(len(ids), dtype=torch.bool),
        group_id=torch.arange(len(ids)),
    )
    tokens = TokenBatch(*as_tokens(completions, torch.device("cpu")))
    totals = Totals(rows=len(ids), tokens=int(response.sum()), attended=int(tokens.attention_mask.sum()))
    loss, _ = our_module(trl, beta=0.3).loss(TextBatch(tokens, list(range(len(ids))), totals))
    assert_same_step(backward(trained(trl.model), [loss]), other)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
@pytest.mark.parametrize("beta", BETAS)
def test_the_divergence(beta: float, temperature: float) -> None:
    from trl.experimental.gkd import GKDTrainer

    student, teacher = torch.randn(2, 3, 5, 11, generator=torch.Generator().manual_seed(1)).mul(2).unbind(0)
    student.requires_grad_(True)
    labels = torch.ones(3, 5, dtype=torch.long)
    labels[0, :2], labels[2, 4:] = -100, -100
    other = GKDTrainer.generalized_jsd_loss(student, teacher, labels=labels, beta=beta, temperature=temperature)
    (slope,) = torch.autograd.grad(other, student)
    mask = labels != -100
    mine = generalized_jsd(student, teacher, beta=beta, temperature=temperature)[mask].sum() / mask.sum()
    torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.autograd.grad(mine, student)[0], slope, rtol=1e-5, atol=1e-7)


def test_trl_leaves_the_temperature_out_of_the_loss(trl: Any) -> None:
    """Its `temperature` is of the sampling alone; ours is of the divergence, and the sampling has its own."""
    batch, before = their_batch(trl), trl.temperature
    plain = theirs(trl, batch, 0.5)
    trl.temperature = 3.0
    try:
        assert theirs(trl, batch, 0.5).loss == plain.loss
    finally:
        trl.temperature = before


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("k", [1, 4])
def test_a_divergence_over_a_top_k_is_that_of_sdpo_and_of_server_distillation(k, beta):
    from trl.experimental.sdpo.loss_utils import compute_topk_self_distillation_loss
    from trl.experimental.server_distillation.server_distillation_trainer import _add_tail_bucket, _jsd_divergence

    student, teacher = torch.randn(2, 2, 3, 11, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
    mask = torch.ones(2, 3, dtype=torch.bool)
    for support in (with_tail, renormalized):
        ids = student.topk(k).indices  # SDPO's support is the student's
        s, t = (each.log_softmax(-1).gather(-1, ids) for each in (student, teacher))
        wanted = compute_topk_self_distillation_loss(
            student,
            teacher,
            distillation_topk=k,
            distillation_alpha=beta,
            distillation_add_tail=support is with_tail,
        )
        torch.testing.assert_close(top_divergence(s, t, mask, beta=beta, support=support), wanted)
    ids = teacher.topk(k).indices
    s, t = (each.log_softmax(-1).gather(-1, ids) for each in (student, teacher))
    valid = torch.ones_like(s, dtype=torch.bool)
    (more, seen), (others, _) = _add_tail_bucket(s, valid), _add_tail_bucket(t, valid)
    torch.testing.assert_close(top_divergence(s, t, mask, beta=beta), _jsd_divergence(more, others, beta, seen).sum(-1))


def test_the_weights_of_iw_opd_are_trls():
    from collections import defaultdict

    from trl.experimental.iw_opd.iw_opd_trainer import IWOPDTrainer

    generator = torch.Generator().manual_seed(3)
    logits, tokens = torch.randn(2, 5, 7, generator=generator), torch.randint(7, (2, 5), generator=generator)
    teacher, rollout = -4 * torch.rand(2, 2, 5, generator=generator)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)
    theirs: Any = SimpleNamespace(
        temperature=1.0,
        iw_opd_gamma=0.5,
        iw_opd_epsilon=1e-8,
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
    )
    wanted = IWOPDTrainer._compute_iw_opd_loss(
        theirs, logits, tokens, tokens.masked_fill(~mask, -100), teacher.masked_fill(~mask, torch.nan), rollout
    )
    advantages = token_advantages(teacher, rollout, mask)
    logprobs = logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    found = -(prefix_weights(advantages, mask) * advantages * logprobs)[mask].mean()
    torch.testing.assert_close(found, wanted)
