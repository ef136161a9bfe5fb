"""A reference with weights of its own: it scores as that model does, in the policy's type, or is refused by name."""

from __future__ import annotations

import pytest
import torch
from reference_cases import logprobs, make_policy, score, train_a_little
from tiers import in_turn
from transformers import AutoTokenizer

from lit_rl.core.errors import BackendError, ConfigError, StorageError
from lit_rl.models import LanguageModel, Lora
from lit_rl.models.loading import Float32Head
from lit_rl.models.references import OtherModel


@pytest.fixture
def completions(make_completions):
    return make_completions([[5, 6, 7], [8]], [[1, 2], [3, 258]])


@pytest.fixture
def policy_of(make_model, tmp_path):
    def make(kind: str, **settings):
        return make_policy(kind, make_model(), tmp_path / "adapter", **settings)

    return make


@pytest.fixture
def another_adapter(make_model, tmp_path):
    """Trained otherwise, of another rank, on fewer layers."""
    model = LanguageModel(str(make_model()), lora=Lora(r=3, targets=["q_proj"])).load()
    train_a_little(model, seed=5)
    model.save_pretrained(str(tmp_path / "another"))
    return tmp_path / "another"


@pytest.fixture
def another_model(make_model, tmp_path):
    model = LanguageModel(str(make_model())).load()
    train_a_little(model, seed=6, by=0.05)
    model.save_pretrained(tmp_path / "other")
    AutoTokenizer.from_pretrained(tmp_path / "qwen2").save_pretrained(tmp_path / "other")
    return tmp_path / "other"


@in_turn(kind=["full", "continued"], device=[None, "cpu"])
def test_it_scores_as_the_other_model_does(policy_of, another_model, completions, kind, device):
    policy = policy_of(kind)
    reference = OtherModel(name=str(another_model), device=device)
    module = reference.module(policy)
    expected = logprobs(LanguageModel(str(another_model)).load(), completions)
    torch.testing.assert_close(score(policy, reference, module, completions), expected, rtol=0, atol=2e-6)
    assert (expected - logprobs(policy, completions)).abs().max() > 0.01
    bare = module if device is None else module.model
    assert not any(p.requires_grad for p in bare.parameters())


@in_turn(kind=["full", "fresh", "continued"], named=[False, True])
def test_it_scores_as_the_other_adapter_does(
    policy_of, another_model, another_adapter, tmp_path, completions, kind, named
):
    """Alone it stands on the policy's own base, and with a name on that model."""
    policy = policy_of(kind)
    flags = {name: p.requires_grad for name, p in policy.named_parameters()}
    before = logprobs(policy, completions)
    name = str(another_model) if named else None
    reference = OtherModel(name=name, adapter=str(another_adapter))
    module = reference.module(policy)
    like = LanguageModel(name or str(tmp_path / "qwen2"), adapter=str(another_adapter)).load()
    torch.testing.assert_close(
        score(policy, reference, module, completions), logprobs(like, completions), rtol=0, atol=2e-6
    )
    assert {name: p.requires_grad for name, p in policy.named_parameters()} == flags
    assert torch.equal(logprobs(policy, completions), before)


def test_an_adapter_alone_costs_only_itself(policy_of, another_adapter):
    policy = policy_of("continued")
    module = OtherModel(adapter=str(another_adapter)).module(policy)
    ours = {p.data_ptr() for p in policy.parameters()}
    own = [name for name, p in module.named_parameters() if p.data_ptr() not in ours]
    assert own and all(".lora_" in name for name in own)


def test_an_adapter_on_the_cpu_owns_its_base(policy_of, another_adapter):
    policy = policy_of("continued")
    module = OtherModel(adapter=str(another_adapter), device="cpu").module(policy)
    ours = {p.data_ptr() for p in policy.parameters()}
    assert not any(p.data_ptr() in ours for p in module.model.parameters())


def test_modules_that_the_policys_adapter_trains_in_full_are_not_its_base(make_model, another_adapter, completions):
    folder = str(make_model())
    policy = LanguageModel(folder, lora=Lora(r=2, targets=["q_proj"], modules_to_save=["lm_head"])).load()
    train_a_little(policy)
    reference = OtherModel(adapter=str(another_adapter))
    module = reference.module(policy)
    expected = logprobs(LanguageModel(folder, adapter=str(another_adapter)).load(), completions)
    torch.testing.assert_close(score(policy, reference, module, completions), expected, rtol=0, atol=2e-6)


def test_it_is_held_in_the_policys_type(policy_of, another_model):
    policy = policy_of("full", dtype="bfloat16", lm_head_fp32=True, attn_implementation="eager")
    module = OtherModel(name=str(another_model)).module(policy)
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert isinstance(module.get_output_embeddings(), Float32Head)
    assert module.config._attn_implementation == "eager"


# ------------------------------------------------------------------ refusals


def test_an_embedding_of_other_rows_is_refused_before_weights_are_read(policy_of, make_model):
    other = make_model("qwen3", vocab_size=300)
    (other / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"another vocabulary.*300 rows, the policy's 264") as caught:
        OtherModel(name=str(other)).module(policy_of("full"))
    assert caught.value.exit_code == 2


def test_another_tokenizer_under_the_same_rows_is_refused(policy_of, another_model):
    tokenizer = AutoTokenizer.from_pretrained(another_model)
    size = len(tokenizer)
    tokenizer.add_tokens(["<|think|>"])
    tokenizer.save_pretrained(another_model)
    wanted = rf"its tokenizer has {size + 1} tokens, the policy's {size}, and 1 of them .*'<\|think\|>'"
    with pytest.raises(ConfigError, match=wanted):
        OtherModel(name=str(another_model)).module(policy_of("fresh"))


def test_a_policy_without_a_folder_is_compared_by_its_rows(policy_of, another_model, completions):
    policy = policy_of("full")
    policy.name_or_path = policy.config.name_or_path = ""
    reference = OtherModel(name=str(another_model))
    assert score(policy, reference, reference.module(policy), completions).isfinite().all()


def test_errors_of_loading_name_the_references_keys(policy_of, another_model, another_adapter, make_model, offline):
    policy = policy_of("full")
    (another_model / "model.safetensors").unlink()
    with pytest.raises(StorageError, match=r"^reference\.name: .*no \*\.safetensors"):
        OtherModel(name=str(another_model)).module(policy)
    with pytest.raises(BackendError, match=r"^reference\.name='owner/model'"):
        OtherModel(name="owner/model").module(policy)
    gpt2 = LanguageModel(str(make_model("gpt2"))).load()
    with pytest.raises((ConfigError, StorageError), match=r"reference\.adapter"):
        OtherModel(adapter=str(another_adapter)).module(gpt2)
