"""The memory plan: its formulas against what autograd really keeps, and the cut that is chosen from them."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import warm
from live_tensors import Live
from peft import LoraConfig, get_peft_model
from small_rollouts import trainer as quiet_trainer
from tiers import in_turn
from transformers import AutoModelForCausalLM, GPT2Config, MambaConfig, Qwen2Config

from lit_rl.algorithms import DPO, GKD, GRPO, ORPO, PPO, SFT
from lit_rl.algorithms.checks import memory as memory_module
from lit_rl.algorithms.checks import micro_batching
from lit_rl.algorithms.checks.memory import AuxiliaryTexts, GatheredWeights, Memory, Network, NumberSizes, RowLengths
from lit_rl.algorithms.checks.micro_batching import (
    KEPT_FREE,
    MicroBatches,
    MicroBatchPlan,
    StepRows,
    available_memory,
    device_memory,
    fewest_micro_batches,
    largest_decode_batch,
    memory_budget,
    plan_micro_batches,
    rows_scored_at_once,
)
from lit_rl.algorithms.checks.model_sizes import (
    StepFacts,
    ddp_buckets,
    gathered_weights,
    masters_at_once,
    memory_of_step,
    number_sizes,
    policy_network,
    reference_bytes,
    stored_bytes,
)
from lit_rl.algorithms.optim.optimizers import AdamW, AdamWSplit, ByPath
from lit_rl.algorithms.terms.teachers import ModelTeacher, TopForwardKL
from lit_rl.core.errors import ConfigError
from lit_rl.core.examples import TokenBatch
from lit_rl.core.rollout import Completions, Sampling
from lit_rl.data.example_module import PreferenceDataModule, SupervisedDataModule
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Addition
from lit_rl.generation.native import NativeGenerator
from lit_rl.models import LanguageModel, Lora
from lit_rl.models.critics import SeparateCritic, SharedTrunk
from lit_rl.models.forward import score, score_texts
from lit_rl.models.language_model import ForwardOptions
from lit_rl.models.model_costs import ModelShape, _counted
from lit_rl.models.references import BEMA, EMA, FrozenCopy, Mixing, OnCPU
from lit_rl.models.shared_prefix import can_share
from lit_rl.ops import folded_attention
from lit_rl.ops import fused_head as of_heads
from lit_rl.ops import logprobs as of_logits
from lit_rl.ops.fused_head import Distribution
from lit_rl.rewards import exact_match

CONFIG = Qwen2Config(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    tie_word_embeddings=True,
)
SHAPE = ModelShape.of(CONFIG)


def memory(**changes) -> Memory:
    policy = Network(SHAPE, SHAPE.parameters, 4 * SHAPE.parameters)
    lengths = RowLengths(40, 24, group=4, shares=True)
    return replace(Memory(policy, NumberSizes(), lengths, decoding=lengths, others={"reference": 1000}), **changes)


def completions(prompts: int, group: int, p: int, t: int) -> Completions:
    b = prompts * group
    mask = torch.ones(prompts, p, dtype=torch.bool)
    mask[0, :3] = False
    return Completions(
        prompt_ids=torch.randint(0, 512, (prompts, p)).repeat_interleave(group, 0),
        prompt_mask=mask.repeat_interleave(group, 0),
        response_ids=torch.randint(0, 512, (b, t)),
        response_mask=torch.ones(b, t, dtype=torch.bool),
        sampler_logprobs=torch.zeros(b, t),
        ended=torch.ones(b, dtype=torch.bool),
        group_id=torch.arange(prompts).repeat_interleave(group),
        version=0,
    )


def kept_by_autograd(
    model: torch.nn.Module,
    rows: Completions,
    *,
    shared: bool,
    precision: str,
    folded: bool = False,
    texts: TokenBatch | None = None,
) -> int:
    """Bytes that a forward pass, and one of texts after it, keep for the backward pass, parameters left out."""
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = tensor  # held, so that no address comes twice
        return tensor

    keep = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with keep, torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
        score(model, rows, Sampling(), options=ForwardOptions(True, shared, False, folded))
        if texts is not None:
            score_texts(model, texts)
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


PRECISIONS = pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])


def model_of(precision: str, **how) -> torch.nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIG), **how).train()
    return model.to(torch.bfloat16) if precision == "bf16-true" else model


def activations(precision: str, lengths: RowLengths, described: LanguageModel | None = None, **more) -> float:
    """What is planned for eight rows."""
    numbers = NumberSizes.of(precision, 8)
    policy = policy_network(described or LanguageModel("tiny"), SHAPE, numbers, "fused")
    plan = memory(policy=policy, numbers=numbers, lengths=lengths, **more).plan(8, 8, steps_in_parts=False)
    return plan.learning["activations"]


@PRECISIONS
@pytest.mark.parametrize("rank", [0, 8], ids=["full", "lora"])
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_planned_activations_are_what_autograd_keeps(shared, rank, precision):
    model = model_of(precision)
    if rank:
        model = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM"))
    kept = kept_by_autograd(model, completions(2, 4, 64, 64), shared=shared, precision=precision)
    described = LanguageModel("tiny", lora=Lora(r=rank) if rank else None)
    assert activations(precision, RowLengths(64, 64, group=4, shares=shared), described) == pytest.approx(
        kept, rel=0.07
    )


@PRECISIONS
@pytest.mark.parametrize("response", [30, 64], ids=["weights are kept", "weights are computed anew"])
def test_folded_attention_is_planned_with_what_it_keeps(response, precision, monkeypatch):
    monkeypatch.setattr(folded_attention, "WORTH", 0)
    model, rows = model_of(precision), completions(2, 4, 64, response)
    kept, repeated = (
        kept_by_autograd(model, rows, shared=True, precision=precision, folded=folded) for folded in (True, False)
    )
    assert activations(precision, RowLengths(64, response, group=4, shares=True, folds=True)) == pytest.approx(
        kept, rel=0.07
    )
    assert kept < repeated


@PRECISIONS
def test_texts_that_are_learned_beside_the_rows_are_planned_with_their_graph(precision):
    model, rows = model_of(precision), completions(2, 4, 64, 64)
    texts = TokenBatch(torch.randint(0, 512, (3, 80)), *torch.ones(2, 3, 80, dtype=torch.bool))
    kept, alone = (
        kept_by_autograd(model, rows, shared=False, precision=precision, texts=beside) for beside in (texts, None)
    )
    beside = AuxiliaryTexts(texts=6, rows=16, tokens=80)
    assert activations(precision, RowLengths(64, 64, group=4), auxiliary=beside) == pytest.approx(kept, rel=0.07)
    assert kept > 1.1 * alone
    assert AuxiliaryTexts(texts=5, rows=32, tokens=80).call(8).rows == 2  # five texts over four micro-batches


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_eager_attention_is_planned_with_the_weights_of_all_pairs(precision):
    model = model_of(precision, attn_implementation="eager")
    kept = kept_by_autograd(model, completions(2, 4, 64, 64), shared=False, precision=precision)
    described = LanguageModel("tiny", attn_implementation="eager")
    assert activations(precision, RowLengths(64, 64, group=4), described) == pytest.approx(kept, rel=0.07)


@pytest.mark.parametrize(
    ("tokens", "block", "part", "logit"),
    [
        (tokens, block, (2**12, 2**20)[at % 2], (4, 2)[at // 2 % 2])
        for at, (tokens, block) in enumerate(product([3, 50, 64, 96, 200, 300, 700], [2**14, 2**16, 2**20]))
    ],
)
def test_the_head_works_in_the_memory_that_is_planned(monkeypatch, tokens, block, part, logit):
    """Blocks of all tokens and of some, of all of the vocabulary's slices and a narrow last one; kept, and not."""
    vocabulary = 1000
    monkeypatch.setattr(of_logits, "block_numbers", lambda *_: block)
    monkeypatch.setattr(of_heads, "_PART", part)
    for module in (of_heads, memory_module):
        monkeypatch.setattr(module, "KEPT", 2**20)
        monkeypatch.setattr(module, "COLUMNS", 256)
    dtype = {4: torch.float32, 2: torch.bfloat16}[logit]
    hidden = torch.randn(tokens, 1, dtype=dtype, requires_grad=True)
    weight, ids = torch.randn(vocabulary, 1, dtype=dtype, requires_grad=True), torch.zeros(tokens, dtype=torch.long)
    with Live() as live:
        of_heads.linear_logprobs(hidden, weight, ids, Distribution(entropy=True)).logprobs.sum().backward()
    shape = replace(SHAPE, vocabulary=vocabulary)
    planned = memory(policy=Network(shape, 1, 1, logit=logit), block=block, part=part)._head_bytes(tokens)
    assert 0.75 * planned < live.peak < 1.02 * planned + 100 * (tokens + vocabulary)  # numbers a token, and a gradient


PAIRS = [{"prompt": f"{n}+30=", "chosen": f"{n + 30}", "rejected": f"{n + 3000}"} for n in range(10, 20)]
TEXTS = [{"prompt": f"{n}+30=", "completion": f"{n + 30}"} for n in range(10, 20)]


@pytest.mark.parametrize(
    ("algorithm", "planned"),
    [
        (lambda: DPO("tiny"), RowLengths(6, 5, texts=2)),  # "3010" and the end, of the rejected reply
        (lambda: ORPO("tiny"), RowLengths(0, 11, texts=2)),  # the prompt's tokens are scored, too
        (lambda: DPO(LanguageModel("tiny", speedups={"fused_head": False})), RowLengths(0, 11, texts=2)),
        (lambda: SFT("tiny"), RowLengths(6, 3)),
        (lambda: GKD("tiny", teacher="tiny", sampling=Sampling(max_new_tokens=7)), RowLengths(6, 7)),
        (lambda: GKD("tiny", teacher="tiny", on_policy_fraction=0.0), RowLengths(6, 3)),
    ],
    ids=["dpo", "orpo", "logits", "sft", "gkd", "gkd of the data"],
)
def test_a_plan_has_the_tokens_that_a_step_scores(monkeypatch, algorithm, planned):
    module = algorithm()
    kind = PreferenceDataModule if planned.texts == 2 else SupervisedDataModule
    data = kind(rows=PAIRS if planned.texts == 2 else TEXTS, batch_size=2, val_fraction=0.0)
    data.prepare(module.tokenizer)
    on_a_cpu = SimpleNamespace(root_device=torch.device("cpu"))
    monkeypatch.setattr(type(module), "trainer", SimpleNamespace(datamodule=data, strategy=on_a_cpu))
    assert module.step_facts().lengths == planned


@pytest.mark.parametrize("config", [CONFIG, GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=100)])
def test_the_shape_counts_what_the_model_has(config):
    model, shape = AutoModelForCausalLM.from_config(config), ModelShape.of(config)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert trained == sum(4 * (linear.inputs + linear.outputs) * linear.count for linear in shape.adapted("all-linear"))


@pytest.mark.parametrize(
    "targets",
    [r".*\.(q|v)_proj", ".*q_proj", r"model\.layers\.1\..*_proj", ["mlp.down_proj", "v_proj"], ["0.self_attn.k_proj"]],
)
def test_the_plan_sees_the_adapters_that_peft_makes(targets):
    """A regular expression once matched none, so that the memory of a run with it was that of no adapter."""
    model = AutoModelForCausalLM.from_config(CONFIG)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    described, numbers = LanguageModel("tiny", lora=Lora(r=4, targets=targets)), NumberSizes.of("32-true", 8)
    assert policy_network(described, ModelShape.of(CONFIG), numbers, "fused").trained == trained > 0


@pytest.mark.parametrize("room", [3 * 2**20, 5 * 2**20, 10 * 2**20, 2**30])
def test_the_cut_is_the_coarsest_that_fits(room):
    step, plan_of = StepRows(units=12, rows=4, sequences=48), memory()
    fits = [
        count
        for count in (1, 2, 3, 4, 6, 12)
        if sum(plan_of.plan(48 // count, 1, steps_in_parts=count > 1).learning.values()) <= room
    ]
    if not fits:
        with pytest.raises(ConfigError, match=r"does not fit.*activations.*Set one of"):
            fewest_micro_batches(step, plan_of, room)
        return
    found = fewest_micro_batches(step, plan_of, room)
    assert found.micro_batches == fits[0]
    assert found.decoded == largest_decode_batch(plan_of, room)
    bounds = [sum(plan_of.plan(1, found.decoded * n, steps_in_parts=False).generating.values()) for n in (1, 2)]
    assert bounds[0] <= room < bounds[1] or found.decoded == 2**20


def test_where_a_group_is_too_large_it_is_cut_and_then_activations_are_computed_twice():
    step, plan_of = StepRows(units=3, rows=4, sequences=12, slices=(1, 2, 4)), memory(may_recompute=True)
    assert step.cuts() == {1: 12, 3: 4, 6: 2, 12: 1}
    assert [step.slices_of(count) for count in step.cuts()] == [1, 1, 2, 4]

    def least(rows: int, sizes: Memory = plan_of) -> int:
        return sizes.plan(rows, 1, steps_in_parts=True).total

    assert fewest_micro_batches(step, plan_of, least(2)).micro_batches == 6
    found = fewest_micro_batches(step, plan_of, least(1) - 1)
    assert found.recompute and "gradient checkpointing" in found.why
    assert not fewest_micro_batches(step, plan_of, least(1)).recompute
    with pytest.raises(ConfigError, match=r"1 row it needs"):
        fewest_micro_batches(step, plan_of, least(1, plan_of.recomputing()) - 1)
    offloading = memory(may_recompute=True, may_offload=True)
    found = fewest_micro_batches(step, offloading, least(1, plan_of.recomputing()) - 1)
    assert found.recompute and found.offload and "on the host" in found.why
    assert not fewest_micro_batches(step, offloading, least(1, plan_of.recomputing())).offload
    with pytest.raises(ConfigError, match=r"model.gradient_checkpointing=true") as refused:
        fewest_micro_batches(step, memory(), least(1) - 1)
    assert "split_groups" not in str(refused.value)  # it was cut by the plan
    by_hand = StepRows(units=3, rows=4, sequences=12, sliced_by_hand=True)
    with pytest.raises(ConfigError, match=r"algo.split_groups=2 or more"):
        fewest_micro_batches(by_hand, memory(), least(1) - 1)
    assert plan_micro_batches(2, 1, step, plan_of, 2**30)[0].micro_batches == 6


def test_what_is_offloaded_has_to_fit_on_the_host():
    step, of_row = StepRows(units=4, rows=4, slices=(1, 2, 4)), SHAPE.layers * (40 + 24) * 4 * SHAPE.hidden
    by_hand, by_itself = memory().recomputing(offload=True), memory(may_recompute=True, may_offload=True)
    assert by_hand.plan(8, 1, steps_in_parts=True).host == 8 * of_row
    assert memory().recomputing().plan(8, 1, steps_in_parts=True).host == 0
    for rows, micro_batches in {16: 1, 15: 2, 5: 4, 1: 16}.items():
        assert fewest_micro_batches(step, replace(by_hand, host=rows * of_row), 2**30).micro_batches == micro_batches
    room = memory().recomputing().plan(1, 1, steps_in_parts=True).total - 1
    assert fewest_micro_batches(step, replace(by_itself, host=of_row), room).offload
    for sizes in (by_hand, by_itself):
        with pytest.raises(ConfigError, match=r"Offloading keeps .* in main memory, which can give"):
            fewest_micro_batches(step, replace(sizes, host=of_row - 1), room)
    assert "in main memory" in plan_micro_batches(None, 1, step, replace(by_hand, host=of_row - 1), 2**30)[1]


def test_memory_grows_with_the_micro_batch_and_not_with_the_step():
    totals = [sum(memory().plan(rows, 8, steps_in_parts=True).learning.values()) for rows in (4, 8, 16, 32)]
    assert totals == sorted(set(totals))
    whole = [fewest_micro_batches(StepRows(n, 4), memory(), 16 * 2**20).micro_batches for n in (8, 16, 32)]
    assert whole[1] == 2 * whole[0] and whole[2] == 4 * whole[0]


def test_checkpointing_adapters_and_narrow_numbers_need_less():
    def learning(**changes) -> int:
        return sum(memory(**changes).plan(16, 16, steps_in_parts=True).learning.values())

    policy = Network(SHAPE, SHAPE.parameters, 4 * SHAPE.parameters)
    own = RowLengths(40, 24, group=4)
    assert learning(policy=replace(policy, checkpointing=True), lengths=own) < learning(lengths=own)
    assert learning(policy=Network(SHAPE, 1000, 4 * SHAPE.parameters, adapters=100)) < learning()
    assert learning(numbers=NumberSizes.of("bf16-mixed", 8)) < learning()
    assert learning() < learning(policy=replace(policy, head="logits"))


def test_by_hand_is_taken_or_refused_with_the_nearest():
    step = StepRows(units=6, rows=4)
    found, warning = plan_micro_batches(8, 1, step, memory(), 2**30)
    assert found is not None and found.micro_batches == 3 and not warning
    with pytest.raises(ConfigError, match="micro_batch_size=10.*8, 12, 4"):
        plan_micro_batches(10, 1, step, memory(), 2**30)
    for size in (8, "auto"):
        with pytest.raises(ConfigError, match="both set"):
            split(MicroBatches(size), a_trainer(accumulate=2))


def test_what_the_user_says_is_warned_about_with_the_setting_that_fits():
    step, plan_of = StepRows(units=12, rows=4, sequences=48), memory()
    room = plan_of.plan(12, 1, steps_in_parts=True).total
    found, warning = plan_micro_batches(None, 2, step, plan_of, room)
    assert found is None and "trainer.accumulate_grad_batches=4" in warning and "activations" in warning
    assert not plan_micro_batches(None, 12, step, plan_of, room)[1].count("accumulate_grad_batches=4")
    needed = plan_of.plan(24, 48, steps_in_parts=True).total
    assert (
        plan_micro_batches(None, 2, step, plan_of, room, needed - 1)[1]
        and not plan_micro_batches(None, 2, step, plan_of, room, needed)[1]
    )


# ---------------------------------------------------------------------- the micro-batches of a run, without a Trainer


def a_trainer(accumulate: int = 1) -> SimpleNamespace:
    """What micro-batches need of a Trainer."""
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    return SimpleNamespace(accumulate_grad_batches=accumulate, strategy=strategy, num_devices=1)


STEP = StepRows(units=8, rows=1, sequences=8)


def split(
    micro_batches: MicroBatches, trainer: SimpleNamespace, sizes: Memory | None = None, step: StepRows = STEP
) -> None:
    micro_batches.begin(step, trainer, checkpointing=False)
    micro_batches.split(trainer, sizes)


@pytest.mark.parametrize("size", [2, "auto"])
def test_a_plan_is_applied_to_the_trainer_and_taken_back(size):
    room = sum(memory().plan(2, 1, steps_in_parts=True).learning.values())
    micro_batches, trainer = MicroBatches(size), a_trainer()
    for _ in range(2):  # a second fit of the same module
        split(micro_batches, trainer, replace(memory(), budget=room))
        assert trainer.accumulate_grad_batches == 4 and micro_batches.accumulation(trainer) == 1
        assert micro_batches.parts_of_rows(trainer) == (2 if size == 2 else 1)
        micro_batches.restore(trainer)
        assert trainer.accumulate_grad_batches == 1


def test_a_second_fit_of_other_batches_is_split_anew():
    """Where one micro-batch was enough, the plan cannot be told from the Trainer's default."""
    micro_batches, trainer = MicroBatches(8), a_trainer()
    split(micro_batches, trainer)
    assert trainer.accumulate_grad_batches == 1
    micro_batches.restore(trainer)
    split(micro_batches, trainer, step=StepRows(units=32, rows=1))
    assert trainer.accumulate_grad_batches == 4 and micro_batches.accumulation(trainer) == 1
    split(micro_batches, trainer, step=StepRows(units=16, rows=1))  # without `restore`
    assert trainer.accumulate_grad_batches == 2 and micro_batches.accumulation(trainer) == 1


def test_what_the_user_set_on_the_trainer_is_kept():
    micro_batches, trainer = MicroBatches(None), a_trainer(accumulate=4)
    for _ in range(2):
        split(micro_batches, trainer)
        assert micro_batches.plan is None and micro_batches.accumulation(trainer) == 4
        micro_batches.restore(trainer)
    assert trainer.accumulate_grad_batches == 4


def test_a_resumed_plan_is_applied_whatever_memory_is_free():
    generator, trainer = NativeGenerator(), a_trainer()
    micro_batches = MicroBatches("auto")
    micro_batches.texts = 2
    micro_batches.generator = generator
    split(micro_batches, trainer, replace(memory(), budget=2**40))
    assert trainer.accumulate_grad_batches == 1
    micro_batches.resume(MicroBatchPlan(4, 2, "4", scored=3), trainer)
    assert trainer.accumulate_grad_batches == 4 and micro_batches.accumulation(trainer) == 1
    assert generator.bound == micro_batches.decoded_at_once == 2 and micro_batches.most_texts == 6
    split(micro_batches, trainer, replace(memory(), budget=2**40))
    assert trainer.accumulate_grad_batches == 4 and not micro_batches.asks_plan


def test_a_validation_alone_is_bounded_by_memory_too():
    micro_batches = MicroBatches("auto")
    micro_batches.texts = 1
    micro_batches.generator = NativeGenerator()
    assert micro_batches.asks_plan and micro_batches.most_texts is None
    micro_batches.fit_decoding(
        replace(memory(), budget=sum(memory().plan(1, 4, steps_in_parts=False).generating.values()))
    )
    assert micro_batches.generator.bound == 4
    sizes = replace(memory(), budget=sum(memory().plan(2, 1, steps_in_parts=False).learning.values()))
    micro_batches.fit_scoring(sizes)
    most = micro_batches.most_texts
    assert most is not None and most > rows_scored_at_once(sizes, sizes.budget or 0)  # nothing is learned
    micro_batches.fit_scoring(None)
    assert micro_batches.most_texts == most


def test_free_memory_is_measured_once_and_counts_what_is_loaded(monkeypatch):
    monkeypatch.setattr(micro_batching, "available_memory", lambda: 1000)
    micro_batches, trainer = MicroBatches(None), a_trainer()
    assert micro_batches.budgets(trainer) == (500, None)
    monkeypatch.setattr(micro_batching, "available_memory", lambda: 10)
    assert micro_batches.budgets(trainer) == (500, None)  # the policy is loaded by now
    micro_batches = MicroBatches(None)
    micro_batches.memory_gb = 1.0
    assert micro_batches.budgets(trainer) == (int(2**30 * (1 - KEPT_FREE)), None)


def test_the_memory_of_a_step_is_made_of_its_facts():
    trainer, model = a_trainer(), LanguageModel("tiny")
    trainer.precision, trainer.world_size = "32-true", 1
    facts = StepFacts(lengths=RowLengths(8, 8), decoding=RowLengths(8, 9), engine=3, frozen={"teacher": 5})
    found = memory_of_step(facts, model, AdamW(), trainer, budget=7)
    assert found is not None and found.critic is None and found.policy.head == "fused"
    assert (found.lengths, found.decoding) == (facts.lengths, facts.decoding)
    assert (found.engine, found.budget, found.host) == (3, 7, None)
    assert found.others == {"reference": 0, "teacher": 5}
    facts = replace(facts, reference=FrozenCopy(), copies_ahead=2, critic=SeparateCritic(), head="compared")
    found = memory_of_step(facts, model, AdamW(), trainer)
    assert found is not None and found.critic is not None and found.policy.head == "compared"
    weights = found.policy.weight_bytes
    assert found.others == {"reference": weights, "teacher": 5, "copies for rollouts ahead": 2 * weights}
    plain = memory_of_step(facts, LanguageModel("tiny", speedups={"fused_head": False}), AdamW(), trainer)
    assert plain is not None and plain.policy.head == "logits"
    assert memory_of_step(replace(facts, lengths=None), model, AdamW(), trainer) is None


def test_the_tokens_that_a_teacher_names_are_planned(tmp_path):
    policy = LanguageModel("tiny", init_kwargs={"num_hidden_layers": 1, "layer_types": ["full_attention"]})
    terms = {"teacher": ModelTeacher("tiny"), "distillation": TopForwardKL(top_k=3)}
    module = GRPO(policy, exact_match, group_size=2, sampling=Sampling(max_new_tokens=4), **terms)
    data = RolloutDataModule(task=Addition(max_operand=5, val_rows=0), prompts_per_rollout=2)
    quiet_trainer(tmp_path, max_steps=1).fit(module, datamodule=data)
    assert module.rollout is not None
    named = (module.rollout.teacher_top_ids, module.rollout.teacher_top_logprobs)
    a_token = sum(each.nbytes // each.shape[1] for each in named)  # of the four rows
    assert module.step_facts().frozen["tokens of the teacher"] == 4 * a_token > 0


def test_the_room_is_bounded_by_the_container(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    8000 kB\n")
    assert available_memory(tmp_path) == 8000 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.current").write_text("1024\n")
    (group / "memory.max").write_text("max\n")
    assert available_memory(tmp_path) == 8000 * 1024
    (group / "memory.max").write_text(f"{5 * 2**20}\n")
    assert available_memory(tmp_path) == 5 * 2**20 - 1024
    assert memory_budget(torch.device("cpu"), gigabytes=2) == pytest.approx(2**31 * (1 - KEPT_FREE), abs=1)


def test_the_buckets_of_ddp_stand_beside_gradients_that_are_not_in_them():
    """By hand: 1000 weights that are trained, and adapters of 100 as the critic's."""
    policy, critic = Network(SHAPE, 1000, 4000), Network(SHAPE, 100, 400, adapters=8, head="none")
    wide, narrow = NumberSizes(), NumberSizes.of("bf16-true", 8)

    def beside(numbers: NumberSizes, *, viewed: bool, steps_in_parts: bool) -> int:
        held = ddp_buckets([policy, critic], numbers, viewed=viewed)
        plan = memory(policy=policy, critic=critic, buckets=held, decoding=None).plan(
            1, 1, steps_in_parts=steps_in_parts
        )
        return plan.learning.get("buckets", 0)

    assert beside(wide, viewed=False, steps_in_parts=False) == beside(wide, viewed=True, steps_in_parts=True) == 4400
    assert beside(wide, viewed=True, steps_in_parts=False) == 0
    assert beside(narrow, viewed=True, steps_in_parts=False) == 2400


@pytest.mark.parametrize("view", [False, True])
def test_ddp_holds_gradients_twice_but_where_one_micro_batch_lies_in_its_buckets(view, tmp_path):
    """Which the plan counts: told by the addresses of real gradients, over steps of one micro-batch and of two."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8), gradient_as_bucket_view=view)
        parameters = list(model.parameters())

        def storages() -> set[int]:
            return {p.grad.untyped_storage().data_ptr() for p in parameters if p.grad is not None}

        for _ in range(3):
            for parameter in parameters:
                parameter.grad = None
            with model.no_sync():
                model(torch.ones(1, 8)).sum().backward()
            assert len(storages()) == 2  # two tensors of their own, beside the bucket
            model(torch.ones(1, 8)).sum().backward()
            assert len(storages()) == (1 if view else 2)
    finally:
        # Before its group: what is destroyed last waits for gloo's thread, and as a part of the model it would keep
        # Python's lock meanwhile, for which that thread waits.
        model = None
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("precision", "optimizer", "held", "at_once"),
    [
        ("bf16-true", AdamW(), 16, 2**23 + 2**23),  # a bucket, overfilled by one that is as large
        ("bf16-true", ByPath("torch.optim.SGD"), 8, 2**23 + 2**23),
        ("bf16-true", ByPath("torch.optim.Adafactor"), 16, 2**23 + 2**24),  # overfilled by the head
        ("bf16-true", ByPath("mine.Prodigy"), 16, 2**26),  # all together
        ("bf16-true", AdamWSplit(), 10, 0),
        ("32-true", AdamW(), 16, 0),
    ],
)
def test_a_narrow_weight_has_a_remainder_and_a_step_makes_the_masters_of_some(precision, optimizer, held, at_once):
    shape = replace(SHAPE, parameters=2**26, hidden=2**10, inner=2**12, vocabulary=2**14)
    numbers = number_sizes(LanguageModel("tiny"), precision, optimizer)
    policy = policy_network(LanguageModel("tiny"), shape, numbers, "fused")
    masters = masters_at_once([policy], numbers, optimizer)
    assert masters == 4 * at_once
    run = memory(policy=policy, numbers=numbers, others={})
    assert sum(run.held(steps_in_parts=False).values()) == held * 2**26
    alone, beside = (m.plan(1, 1, steps_in_parts=False).learning for m in (run, replace(run, masters=masters)))
    tokens = sum(beside[name] for name in ("activations", "logits", "working memory"))
    assert tokens == max(masters, sum(alone[name] for name in ("activations", "logits", "working memory")))


def test_adapters_are_float32_and_have_no_masters():
    described = LanguageModel("tiny", lora=Lora(r=4))
    numbers = number_sizes(described, "bf16-true", AdamW())
    policy = policy_network(described, SHAPE, numbers, "fused")
    assert masters_at_once([policy], numbers, AdamW()) == 0


@pytest.mark.parametrize(("precision", "g"), [("bf16-true", 2), ("32-true", 4), ("bf16-mixed", 4)])
def test_fsdp2_spreads_float32_shards_and_holds_whole_what_computes(precision, g):
    """By hand, over 4 ranks: 100 of 800 weights are the embedding, which is the head; 2 layers have 350 each."""
    shape = replace(SHAPE, parameters=800, layers=2, hidden=10, vocabulary=10, tied=True)
    described = LanguageModel("tiny")
    numbers = number_sizes(described, precision, AdamW(), shards=True)
    policy = policy_network(described, shape, numbers, "fused")
    critic = Network(shape, 800, 3200, head="none")
    run = memory(
        policy=policy,
        numbers=numbers,
        critic=critic,
        others={"reference": 3200, "reward models": 1000},
        engine=500,
        spread_over=4,
        gathered=gathered_weights(policy, numbers, critic, reference=True, stored=stored_bytes(described, numbers)),
    )
    plan = run.plan(4, 4, steps_in_parts=True)
    for parts in (plan.learning, plan.generating):
        assert (parts["weights"], parts["critic"], parts["reference"]) == (800, 800, 800)  # 4 bytes of 800, by 4
        assert (parts["gradients"], parts["optimizer"]) == (4 * 1600 // 4, 8 * 1600 // 4)  # and no masters beside them
        assert (parts["reward models"], parts["engine"]) == (1000, 500)  # whole on every rank
    # Three embeddings, and a layer with the next one; while it decodes, all of the policy and two embeddings.
    assert plan.learning["gathered weights"] == g * (3 * 100 + 2 * 350)
    assert plan.generating["gathered weights"] == g * (800 + 2 * 100)
    assert plan.learning["whole gradients"] == (g + 4) * 350
    alone = replace(run, spread_over=1, gathered=None).plan(4, 4, steps_in_parts=True)
    assert "gathered weights" not in {**alone.learning, **alone.generating}


@pytest.mark.parametrize(
    ("algorithm", "shares"),
    [
        (lambda: GRPO("tiny", len), True),
        (lambda: GRPO("tiny", len, router_aux_loss_coef=0.1), False),
        (lambda: GRPO(LanguageModel("tiny", lora=Lora(r=2)), len), True),
        (lambda: GRPO(LanguageModel("tiny", lora=Lora(r=2, dropout=0.1)), len), False),
        (lambda: GRPO(LanguageModel("tiny", speedups={"shared_prompts": False}), len), False),
        (lambda: PPO("tiny", len, group_size=8), True),
        (lambda: PPO("tiny", len, group_size=8, critic=SharedTrunk()), False),
        (lambda: PPO("tiny", len, group_size=1), False),
    ],
    ids=["grpo", "router", "adapters", "dropout", "off", "ppo", "shared trunk", "no group"],
)
def test_prompts_are_planned_once_only_where_they_run_once(monkeypatch, algorithm, shares):
    module = algorithm()
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    data = SimpleNamespace(longest_prompt=9, longest_val_prompt=0)
    monkeypatch.setattr(type(module), "trainer", SimpleNamespace(datamodule=data, strategy=strategy))
    assert module.step_facts().lengths.shares == shares


@pytest.mark.parametrize(
    ("config", "shares", "drops_out"),
    [
        (CONFIG, True, False),
        (GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=100), True, True),
        (MambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=64), False, False),
    ],
    ids=["qwen2", "gpt2", "mamba"],
)
def test_a_model_without_storage_tells_whether_prompts_can_be_shared(config, shares, drops_out):
    model = AutoModelForCausalLM.from_config(config)
    counted = _counted(type(config), config.to_json_string(use_diff=False))
    assert (counted.shares, counted.drops_out) == (shares, drops_out)
    assert can_share(model.train()) == (shares and not drops_out)
    assert can_share(model.eval()) == shares


@in_turn(
    make=[FrozenCopy, EMA, lambda: Mixing(every=1), lambda: BEMA(every=1), lambda: EMA(device="cpu")],
    dtype=[torch.float32, torch.bfloat16],
)
def test_averages_of_a_reference_are_planned_beside_it(make, dtype):
    reference, model = make(), AutoModelForCausalLM.from_config(CONFIG).to(dtype)
    numbers = NumberSizes.of("bf16-true" if dtype == torch.bfloat16 else "32-true", 8)
    policy = policy_network(LanguageModel("tiny"), SHAPE, numbers, "fused")
    planned = reference_bytes(reference, LanguageModel("tiny"), policy, numbers)
    module = reference.module(model)
    if isinstance(module, OnCPU):
        assert planned == 0
        return
    reference.update(model, module, 1)
    kept = sum(tensor.nbytes for held in getattr(reference, "_kept", {}).values() for tensor in held.values())
    assert planned == sum(weight.nbytes for weight in module.parameters()) + kept


def test_an_engine_has_its_share_of_the_whole_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (40, 80))
    assert device_memory(torch.device("cuda", 0)) == 80
    assert device_memory(torch.device("cuda", 0), gigabytes=2) == 2**31
    assert device_memory(torch.device("cpu")) is None


ADAPTED = Network(SHAPE, 100, 4 * SHAPE.parameters + 400, adapters=8)
NARROW = NumberSizes.of("bf16-true", 8)
GATHERED = GatheredWeights(0, 0, 0)
LESS = {"model.lora.r", "optimizer=adamw_split", "optimizer=adamw_8bit"}
ROUNDED, MADE_NARROW = "trainer.precision=bf16-true and", "trainer.precision=bf16-true ("
SETTINGS = {*LESS, ROUNDED, MADE_NARROW, "trainer.precision=bf16-mixed", "model.quantization", "strategy=fsdp"}
HELPS = {
    "float32": ({}, LESS | {ROUNDED, MADE_NARROW}),
    "bfloat16": ({"numbers": NARROW}, LESS),
    "two devices": ({"numbers": NARROW, "ranks": 2}, LESS | {"strategy=fsdp"}),
    "split already": ({"numbers": NumberSizes.of("bf16-true", 2)}, {"model.lora.r"}),
    "fsdp2": ({"spread_over": 2, "ranks": 2, "gathered": GATHERED}, {"model.lora.r", MADE_NARROW}),
    "fsdp": ({"spread_over": 2, "ranks": 2}, {"model.lora.r"}),
    "adapters": ({"policy": ADAPTED}, {"model.quantization", MADE_NARROW}),
    "adapters, autocast": (
        {"policy": ADAPTED, "numbers": NumberSizes.of("bf16-mixed", 8)}, {"model.quantization", MADE_NARROW},
    ),
    "narrow base": (
        {"policy": replace(ADAPTED, weight_bytes=2 * SHAPE.parameters + 400, narrow=True), "ranks": 2},
        {"model.quantization", "strategy=fsdp"},
    ),
    "quantised already": ({"policy": replace(ADAPTED, weight_bytes=SHAPE.parameters, narrow=True), "ranks": 2}, set()),
    "a copy as critic": (
        {"policy": ADAPTED, "critic": Network(SHAPE, SHAPE.trunk, 4 * SHAPE.trunk, head="none")}, {MADE_NARROW},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "helps"), HELPS.values(), ids=HELPS)
def test_where_weights_are_the_larger_share_what_makes_them_smaller_is_named(changes, helps):
    with pytest.raises(ConfigError, match="Set one of") as refused:
        fewest_micro_batches(
            StepRows(1, 1), memory(lengths=RowLengths(1, 1), decoding=None, block=512, **changes), 2**10
        )
    named = str(refused.value).partition("Set one of: ")[2]
    assert {setting for setting in SETTINGS if setting in named} == helps


def test_where_tokens_are_the_larger_share_weights_are_left_alone():
    with pytest.raises(ConfigError, match=r"trainer.precision=bf16-mixed") as refused:
        fewest_micro_batches(StepRows(1, 1), memory(lengths=RowLengths(2000, 2000), decoding=None), 2**10)
    assert "optimizer=" not in str(refused.value) and "bf16-true" not in str(refused.value)


def test_a_gpu_gives_out_what_no_tensor_is_in_and_what_the_plan_counts(monkeypatch):
    """By hand: of 80, another process has 10; torch holds 30, a reward model 14 of them, the policy 6."""
    of_device = {"mem_get_info": (40, 80), "memory_reserved": 30, "memory_allocated": 20}
    for name, size in of_device.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, size=size: size)
    gpu = torch.device("cuda", 0)
    assert memory_budget(gpu, planned=6) == int((80 - 10 - 14) * (1 - KEPT_FREE))
    assert memory_budget(gpu) == int((80 - 10 - 14 - 6) * (1 - KEPT_FREE))


def test_float32_adapters_read_wide_numbers_beside_narrow_weights_only():
    described = LanguageModel("tiny", lora=Lora(r=2, targets=["q_proj", "down_proj"]))
    wide = {
        precision: policy_network(described, SHAPE, NumberSizes.of(precision, 8), "fused").widened
        for precision in ("32-true", "bf16-mixed", "bf16-true")
    }
    assert wide == {"32-true": 0, "bf16-mixed": 0, "bf16-true": SHAPE.layers * (SHAPE.hidden + SHAPE.inner)}


@pytest.mark.all
def test_the_page_of_hardware_has_the_plans_of_now(root):
    done = warm.run([sys.executable, str(root / "scripts" / "plans.py"), "gpus", "--check"])
    assert done.returncode == 0, "python scripts/plans.py gpus"


@pytest.mark.all
def test_the_plan_is_near_what_a_process_takes(root):
    case = '{"shape": "7m", "method": "grpo", "rows": 16}'
    command = [sys.executable, root / "scripts" / "plans.py", "memory", "--case", case]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["planned"] == pytest.approx(found["measured"], rel=0.1)


def test_shards_on_the_host_take_its_memory_and_not_that_of_the_device():
    spread = memory(gathered=GATHERED, spread_over=2, engine=100)
    on_host = replace(spread, shards_on_host=True)
    here, there = (sizes.plan(2, 1, steps_in_parts=False) for sizes in (spread, on_host))
    moved = (4 + 4 + 8) * SHAPE.parameters // 2 + 1000 // 2
    assert here.host == 0 and there.host == pytest.approx(moved, abs=4)
    assert here.learning["engine"] == there.learning["engine"] == 100
    for before, after in ((here.learning, there.learning), (here.generating, there.generating)):
        assert sum(before.values()) - sum(after.values()) == there.host
    fitting = there.host + (1 << 30)
    step = StepRows(units=1, rows=4, sequences=4)
    assert fewest_micro_batches(step, replace(on_host, host=fitting), 1 << 40).micro_batches == 1
    with pytest.raises(ConfigError, match="in main memory, which can give"):
        fewest_micro_batches(step, replace(on_host, host=there.host // 2), 1 << 40)
