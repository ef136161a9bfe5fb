"""Critics: what they compute, what they train, and that policy and critic do not see each other's weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import distributed, nn
from transformers import AutoConfig, AutoModelForSequenceClassification

from lit_rl.core.errors import ConfigError, StorageError
from lit_rl.core.rollout import Completions, Sampling
from lit_rl.models import LanguageModel, Lora, forward
from lit_rl.models.critics import AdapterCritic, Critic, SeparateCritic, SharedTrunk, ValueHead
from lit_rl.models.references import AdapterBase
from lit_rl.models.scoring import RewardAdapter
from lit_rl.models.sharding import full_state_dict, shard

CRITICS: list[Critic] = [SeparateCritic(), SharedTrunk(), AdapterCritic(r=2)]
every_critic = pytest.mark.parametrize("critic", CRITICS, ids=lambda critic: type(critic).__name__)
KINDS = ["full", "lora"]


def served(critic: Critic, kind: str) -> bool:
    return kind == "lora" or not isinstance(critic, AdapterCritic)


CASES = [(critic, kind) for critic in CRITICS for kind in KINDS if served(critic, kind)]
every_case = pytest.mark.parametrize(
    "critic, kind", CASES, ids=[f"{type(critic).__name__}-{kind}" for critic, kind in CASES]
)


@pytest.fixture
def describe(make_model) -> Callable[..., LanguageModel]:
    def make(kind: str, family: str = "qwen2", **settings) -> LanguageModel:
        folder = str(make_model(family, **settings.pop("config", {})))
        targets = ["c_attn"] if family == "gpt2" else "all-linear"
        return LanguageModel(folder, lora=Lora(r=2, targets=targets) if kind == "lora" else None, **settings)

    return make


@pytest.fixture
def completions(make_completions) -> Completions:
    return make_completions([[5, 6, 7], [8], [9, 10]], [[1, 2, 3, 4], [3, 258], [11]])


def wake(module: nn.Module) -> None:
    """Weights that are not zero, so that every path carries something."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))


def made(critic: Critic, policy: nn.Module) -> nn.Module:
    module = critic.module(policy)
    wake(module)
    return module


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


@every_case
def test_values_are_zero_until_the_first_update(describe, completions, critic, kind):
    policy = describe(kind).load()
    values = critic.values(policy, critic.module(policy), completions)
    assert values.shape == (3, 4) and values.dtype == torch.float32 and values.eq(0).all()
    assert values.requires_grad


@pytest.mark.parametrize("family", ["gpt2", "qwen2", "gemma2", "smollm2"])
def test_a_value_is_the_head_on_the_state_that_chooses_the_token(describe, make_completions, family):
    """Against a plain forward pass of each row without any padding; the trunk's last hidden state feeds the head."""
    policy = describe("full", family).load().eval()
    prompts, responses = [[5, 6, 7], [8], [9, 10]], [[1, 2, 3, 4], [3, 258], [11]]
    for critic in (SeparateCritic(), SharedTrunk()):
        module = made(critic, policy).eval()
        head = module if isinstance(module, ValueHead) else module.head
        trunk = policy.base_model if isinstance(module, ValueHead) else module.trunk
        values = critic.values(policy, module, make_completions(prompts, responses, left=2, right=1))
        for row, (prompt, response) in enumerate(zip(prompts, responses)):
            hidden = trunk(torch.tensor([prompt + response])).last_hidden_state
            expected = [head(hidden[0, len(prompt) - 1 + i]) for i in range(len(response))]
            torch.testing.assert_close(values[row, : len(response)], torch.stack(expected), atol=2e-5, rtol=1e-4)


def reward_model(make_model, folder: str = "scores", **changes) -> str:
    """A random classifier of the policy's family and vocabulary, as transformers saves one."""
    made = make_model("qwen2", folder)
    config = AutoConfig.from_pretrained(made, **{"num_labels": 1, "pad_token_id": 256} | changes)
    torch.manual_seed(11)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(made)
    return str(made)


def test_from_a_reward_model_a_value_is_the_score_of_the_text_so_far(describe, make_model, make_completions):
    """As transformers' own classifier gives it to each beginning of the row alone."""
    policy, folder = describe("full").load().eval(), reward_model(make_model)
    critic = SeparateCritic(folder)
    critic.check(describe("full"))
    module = critic.module(policy).eval()
    prompts, responses = [[5, 6, 7], [8], [9, 10]], [[1, 2, 3, 4], [3, 258], [11]]
    values = critic.values(policy, module, make_completions(prompts, responses, left=2, right=1))
    theirs = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    for row, (prompt, response) in enumerate(zip(prompts, responses)):
        texts = [torch.tensor([prompt + response[:i]]) for i in range(len(response))]
        scores = torch.stack([theirs(text).logits[0, 0] for text in texts])
        torch.testing.assert_close(values[row, : len(response)], scores, atol=2e-5, rtol=1e-4)
        assert scores.abs().max() > 0.01, "a head of zeros would pass"
    trained = critic.parameters(policy, module)
    assert len(trained) == len(list(module.parameters())), "all of it is trained"


def test_what_is_no_reward_model_for_a_critic_is_refused_before_weights(describe, make_model):
    with pytest.raises(ConfigError, match=r"algo.critic.model=.*num_labels=3"):
        SeparateCritic(reward_model(make_model, num_labels=3)).check(describe("full"))
    lora = LanguageModel(reward_model(make_model, "other"), lora=Lora(r=2))
    with pytest.raises(ConfigError, match="algo.critic.model.lora is set"):
        SeparateCritic(lora).check(describe("full"))


@every_case
def test_scores_and_values_are_the_score_and_the_values(describe, completions, critic, kind):
    policy, sampling = describe(kind).load().eval(), Sampling(temperature=0.7)
    module = made(critic, policy)
    scores, values = critic.scores_and_values(policy, module, completions, sampling)
    alone = forward.score(policy, completions, sampling)
    torch.testing.assert_close(scores.logprobs, alone.logprobs, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(values, critic.values(policy, module, completions), atol=1e-5, rtol=1e-5)


def test_the_shared_trunk_runs_once_and_learns_from_both(describe, completions):
    policy = describe("full").load()
    critic = SharedTrunk()
    module, calls = made(critic, policy), []
    forward.score(policy, completions, Sampling())  # the first pass of a model tries its head
    policy.base_model.register_forward_hook(lambda *args: calls.append(1))
    scores, values = critic.scores_and_values(policy, module, completions, Sampling())
    assert calls == [1]
    trunk_weight = policy.base_model.layers[0].mlp.up_proj.weight
    by_value = torch.autograd.grad(values.sum(), trunk_weight, retain_graph=True)[0]
    by_policy = torch.autograd.grad(scores.logprobs.sum(), trunk_weight)[0]
    assert by_value.abs().max() > 0 and by_policy.abs().max() > 0


@every_case
def test_the_two_groups_are_disjoint_and_a_value_loss_trains_all_of_the_critics(describe, completions, critic, kind):
    policy = describe(kind).load()
    module = made(critic, policy)
    wake(policy)
    ours = critic.parameters(policy, module)
    assert not {id(p) for p in ours} & {id(p) for p in policy.parameters()}
    assert {id(p) for p in ours} == {id(p) for p in module.parameters() if p.requires_grad}
    critic.values(policy, module, completions).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in ours)
    assert bool(gradients(policy)) == isinstance(critic, SharedTrunk)
    assert all(p.requires_grad for name, p in policy.named_parameters() if name in gradients(policy))


@every_case
def test_neither_side_moves_the_other(describe, completions, critic, kind):
    """But for the shared trunk, whose values are the policy's business."""
    policy = describe(kind).load().eval()
    module = made(critic, policy)
    values = critic.values(policy, module, completions)
    logprobs = forward.score(policy, completions, Sampling()).logprobs
    wake(module)
    assert torch.equal(forward.score(policy, completions, Sampling()).logprobs, logprobs)
    critic = copy.deepcopy(critic)
    before = critic.values(policy, module, completions)
    assert not torch.equal(before, values)
    wake(policy)
    assert torch.equal(critic.values(policy, module, completions), before) != isinstance(critic, SharedTrunk)


def test_a_separate_critic_shares_no_memory_and_starts_from_the_merged_adapter(describe, completions, tmp_path):
    fresh = describe("lora")
    policy = fresh.load()
    wake(policy)
    module = SeparateCritic().module(policy)
    assert all(p.requires_grad for p in module.parameters())
    theirs = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    assert not {p.untyped_storage().data_ptr() for p in module.parameters()} & theirs
    assert not any("lora" in name for name, _ in module.named_parameters())
    inputs = {"input_ids": torch.tensor([[5, 6, 7]])}
    torch.testing.assert_close(
        module.eval().trunk(**inputs).last_hidden_state,
        policy.eval().get_base_model().base_model(**inputs).last_hidden_state,
        atol=1e-4,
        rtol=1e-4,
    )


def test_an_adapter_critic_costs_an_adapter_and_a_vector(describe):
    policy = describe("lora").load()
    before = {name: (id(p), p.requires_grad) for name, p in policy.named_parameters()}
    module = AdapterCritic(r=2).module(policy)
    base = {id(p) for p in policy.parameters() if not p.requires_grad}
    own = [name for name, p in module.named_parameters() if id(p) not in base]
    assert own and all("lora" in name or name.startswith("head.") for name in own)
    assert {name for name, p in module.named_parameters() if p.requires_grad} == set(own)
    assert {name: (id(p), p.requires_grad) for name, p in policy.named_parameters()} == before
    assert policy.active_adapter == "default" and list(policy.peft_config) == ["default"]
    assert not any("critic" in name for name in policy.state_dict())


def test_values_of_an_adapter_critic_do_not_see_the_policys_adapter(describe, completions):
    policy = describe("lora").load().eval()
    wake(policy)
    critic = AdapterCritic(r=2)
    module = critic.module(policy)
    with torch.no_grad():
        module.head.linear.weight.normal_()
    values = critic.values(policy, module, completions)
    with policy.disable_adapter():
        hidden = policy.get_base_model().base_model(torch.tensor([[5, 6, 7, 1]])).last_hidden_state
    torch.testing.assert_close(values[0, 0], module.head(hidden[0, 2]), atol=1e-5, rtol=1e-5)


def test_the_reference_under_the_policy_leaves_the_critic_trainable(describe, completions):
    """PEFT takes the gradient flags of inactive adapters away when it switches adapters off: none of ours is there."""
    policy, critic, reference = describe("lora").load(), AdapterCritic(r=2), AdapterBase()
    module = made(critic, policy)
    with reference.scoring(policy, None) as scorer:
        forward.score(scorer, completions, Sampling())
    critic.values(policy, module, completions).sum().backward()
    assert all(p.grad is not None for p in critic.parameters(policy, module))


@every_case
def test_gradient_checkpointing_changes_no_gradient(describe, completions, critic, kind):
    """Activations are computed anew in the backward pass, when another adapter could be active."""
    found = []
    for checkpointing in (False, True):
        torch.manual_seed(0)  # of the adapters
        policy = describe(kind, gradient_checkpointing=checkpointing).load()
        wake(policy)
        module = made(critic, policy)
        scores, values = critic.scores_and_values(policy, module, completions, Sampling())
        (scores.logprobs.sum() + values.square().sum()).backward()
        found.append([gradients(policy), gradients(module)])
    for plain, checkpointed in zip(*found):
        assert plain.keys() == checkpointed.keys()
        for name in plain:
            torch.testing.assert_close(plain[name], checkpointed[name], atol=1e-5, rtol=1e-4)


@every_case
def test_dropout_is_as_in_the_policy(describe, completions, critic, kind):
    policy = describe(kind, config={"attention_dropout": 0.5}).load()
    module = made(critic, policy)
    mode = module.training

    def twice() -> bool:
        return torch.equal(critic.values(policy, module, completions), critic.values(policy, module, completions))

    assert not twice()
    policy.eval()
    assert twice()
    assert module.training == mode


def test_the_mode_comes_back_when_the_forward_pass_fails(describe, make_completions):
    policy = describe("full").load().eval()
    critic = SeparateCritic()
    module = critic.module(policy)
    with pytest.raises(IndexError):
        critic.values(policy, module, make_completions([[5]], [[100_000]]))
    assert module.training
    shared = SharedTrunk()
    with pytest.raises(IndexError):
        shared.values(policy, shared.module(policy), make_completions([[5]], [[100_000]]))
    assert not policy.base_model._forward_hooks


@every_critic
def test_half_precision_trunks_have_float32_values(describe, completions, critic):
    policy = describe("lora", dtype="bfloat16").load()
    module = critic.module(policy)
    head = module if isinstance(module, ValueHead) else module.head
    assert head.linear.weight.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        values = critic.values(policy, module, completions)
    assert values.dtype == torch.float32


class TestChecks:
    def test_an_adapter_needs_a_frozen_base(self, describe):
        for refuse in (lambda: AdapterCritic().check(describe("full")), lambda: _adapter_on(describe("full").load())):
            with pytest.raises(ConfigError, match=r"model\.lora"):
                refuse()
        AdapterCritic().check(describe("lora"))

    def test_another_model_reads_the_same_ids(self, make_model, describe, completions):
        policy = describe("full")
        larger = SeparateCritic(str(make_model("qwen2", "larger", hidden_size=128)))
        larger.check(policy)
        loaded = policy.load()
        assert larger.values(loaded, larger.module(loaded), completions).shape == (3, 4)
        with pytest.raises(ConfigError, match=r"algo\.critic\.model='tiny' has another vocabulary"):
            SeparateCritic("tiny").check(policy)

    def test_a_copy_of_quantised_weights_cannot_be_trained(self, describe):
        quantised = describe("lora")
        quantised.quantization = "nf4"
        with pytest.raises(ConfigError, match="algo/critic=adapter"):
            SeparateCritic().check(quantised)
        AdapterCritic().check(quantised)
        SharedTrunk().check(quantised)

    def test_targets_that_match_nothing_are_refused(self, describe):
        with pytest.raises(ConfigError, match=r"algo\.critic\.targets.*q_proj"):
            AdapterCritic(targets=["q_prj"]).module(describe("lora").load())


def _adapter_on(policy: nn.Module) -> nn.Module:
    return AdapterCritic().module(policy)


@pytest.fixture
def mesh() -> Iterator[distributed.device_mesh.DeviceMesh]:
    """FSDP2 over one process: its hooks and types are those of many."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield distributed.device_mesh.init_device_mesh("cpu", (1,))
    finally:
        distributed.destroy_process_group()


@every_case
def test_sharded_critics_compute_the_same(describe, completions, mesh, critic, kind):
    whole = describe(kind)
    found = []
    for sharded in (False, True):
        torch.manual_seed(0)  # of the adapters
        policy = whole.load()
        wake(policy)
        module = made(critic, policy)
        if sharded:
            shard(policy, mesh)
            shard(module, mesh)
        scores, values = critic.scores_and_values(policy, module, completions, Sampling())
        (scores.logprobs.sum() + values.square().sum()).backward()
        grads = {
            name: grad.full_tensor() if isinstance(grad, distributed.tensor.DTensor) else grad
            for part in (policy, module)
            for name, grad in gradients(part).items()
        }
        found.append((values.detach(), grads))
        assert full_state_dict(module).keys() == module.state_dict().keys()
    (values, grads), (sharded_values, sharded_grads) = found
    torch.testing.assert_close(values, sharded_values, atol=1e-5, rtol=1e-5)
    assert grads.keys() == sharded_grads.keys()
    for name in grads:
        torch.testing.assert_close(grads[name], sharded_grads[name], atol=1e-5, rtol=1e-4)


class TestRewardAdapter:
    @pytest.fixture
    def folder(self, describe, tmp_path) -> str:
        """A reward model trained elsewhere: a LoRA adapter and a score head on the same base."""
        from peft import LoraConfig, get_peft_model

        base = AutoModelForSequenceClassification.from_pretrained(describe("lora").path, num_labels=1)
        config = LoraConfig(task_type="SEQ_CLS", r=3, target_modules="all-linear", modules_to_save=["score"])
        model = get_peft_model(base, config)
        wake(model)
        model.save_pretrained(str(tmp_path / "reward"))
        return str(tmp_path / "reward")

    def test_the_rewards_are_those_of_the_reward_model(self, describe, make_completions, folder):
        from peft import PeftModel

        description = describe("lora")
        policy = description.load()
        wake(policy)
        prompts, responses = [[5, 6, 7], [8], [9, 10]], [[1, 2, 3, 4], [3, 258], [11]]
        adapter = RewardAdapter(folder)
        adapter.check(description)
        module = adapter.module(policy)
        assert not any(p.requires_grad for p in module.parameters())
        rewards = adapter.rewards(policy, module, make_completions(prompts, responses, left=1, right=2))
        base = AutoModelForSequenceClassification.from_pretrained(description.path, num_labels=1)
        theirs = PeftModel.from_pretrained(base, folder).eval()
        theirs.config.pad_token_id = None
        for row, (prompt, response) in enumerate(zip(prompts, responses)):
            expected = theirs(torch.tensor([prompt + response])).logits[0, 0]
            torch.testing.assert_close(rewards[row], expected.detach(), atol=1e-5, rtol=1e-4)
        assert rewards.unique().numel() == 3

    def test_four_models_on_one_base(self, describe, completions, folder):
        """Policy, reference, value and reward: the frozen weights are there once."""
        policy = describe("lora").load()
        critic, reward = AdapterCritic(r=2), RewardAdapter(folder)
        parts = [critic.module(policy), reward.module(policy)]
        base = {id(p) for p in policy.parameters() if not p.requires_grad}
        extra = {name for part in parts for name, p in part.named_parameters() if id(p) not in base}
        assert all("lora" in name or "score" in name or name.startswith("head.") for name in extra)
        before = reward.rewards(policy, parts[1], completions)
        wake(policy)
        wake(parts[0])
        assert torch.equal(reward.rewards(policy, parts[1], completions), before)

    def test_what_is_no_reward_adapter_is_refused(self, describe, make_model, folder, tmp_path):
        policy = describe("lora").load()
        with pytest.raises(ConfigError, match=r"model\.lora"):
            RewardAdapter(folder).check(describe("full"))
        with pytest.raises(ConfigError, match="no such folder"):
            RewardAdapter("./nowhere").module(policy)
        policy.save_pretrained(tmp_path / "causal")
        with pytest.raises(ConfigError, match="SEQ_CLS"):
            RewardAdapter(str(tmp_path / "causal")).module(policy)
        other = LanguageModel(str(make_model("qwen2", "wide", hidden_size=128)), lora=Lora(r=2)).load()
        with pytest.raises(StorageError, match="does not fit"):
            RewardAdapter(folder).module(other)
        gpt2 = LanguageModel(str(make_model("gpt2")), lora=Lora(r=2, targets=["c_attn"])).load()
        with pytest.raises(StorageError, match="does not fit"):
            RewardAdapter(folder).module(gpt2)
