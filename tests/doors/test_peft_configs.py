"""`lora=` takes a config of PEFT: what it describes is trained, resumed and exported, and the export is the policy."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning as L
import peft
import pytest
import torch
from peft.tuners.lora import Linear as LoraLinear
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from lit_rl import GRPO, AdamW, Constant, LanguageModel, Lora, RolloutDataModule, Sampling
from lit_rl.core.errors import ConfigError
from lit_rl.core.model_paths import TINY
from lit_rl.generation.vllm.engine_settings import adapter_rank
from lit_rl.models.adapters import as_adapter
from lit_rl.models.hf_export import export_policy
from lit_rl.models.loaded_model import as_language_model
from lit_rl.models.merging import MERGED, check_merge
from lit_rl.models.references import AdapterBase, Auto, FrozenCopy, InitialAdapter
from lit_rl.models.sharding import full_state_dict
from lit_rl.models.verified_folder import ExportReport

ALL, Q = "all-linear", ["q_proj"]
CONFIGS: dict[str, peft.PeftConfig] = {
    "LORA": peft.LoraConfig(r=4, target_modules=ALL),
    "DORA": peft.LoraConfig(r=4, use_dora=True, target_modules=Q),
    "PISSA": peft.LoraConfig(r=4, init_lora_weights="pissa", target_modules=Q),
    "BOFT": peft.BOFTConfig(boft_block_size=4, target_modules=Q),
    "C3A": peft.C3AConfig(block_size=4, target_modules=Q),
    "FOURIERFT": peft.FourierFTConfig(n_frequency=20, target_modules=Q),
    "HRA": peft.HRAConfig(r=4, target_modules=Q),
    "IA3": peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "LN_TUNING": peft.LNTuningConfig(),
    "LOHA": peft.LoHaConfig(r=4, target_modules=Q),
    "LOKR": peft.LoKrConfig(r=4, target_modules=Q),
    "MISS": peft.MissConfig(r=4, target_modules=Q),
    "OFT": peft.OFTConfig(r=0, oft_block_size=4, target_modules=ALL),
    "RANDLORA": peft.RandLoraConfig(r=4, target_modules=Q),
    "VBLORA": peft.VBLoRAConfig(num_vectors=16, vector_length=8, target_modules=Q),
    "VERA": peft.VeraConfig(r=4, target_modules=Q),
}


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    training = model.training
    found = model.eval()(ids).logits
    model.train(training)
    return found


def test_every_kind_that_is_allowed_is_among_them() -> None:
    assert {config.peft_type for config in CONFIGS.values()} == set(MERGED)


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_export_is_the_policy_and_is_gone_on_with(kind: str, tmp_path: Path) -> None:
    """Merging rounds in the last bits. An OFT adapter was once lost, without an error."""
    model = LanguageModel("tiny", lora=CONFIGS[kind])
    ids = torch.tensor([model.tokenizer("17+25=").input_ids])
    base, policy = logits(model.load_base(), ids), model.load()
    torch.manual_seed(0)
    optimizer = torch.optim.Adam([each for each in policy.parameters() if each.requires_grad], lr=1e-2)
    for _ in range(2):
        policy(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = logits(policy, ids)
    moved = (trained - base).abs().max().item()
    assert moved > 0.01
    export_policy(model, full_state_dict(policy), policy, tmp_path / "hf", card="")
    reloaded = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "hf"), ids)
    assert (reloaded - trained).abs().max().item() < 1e-3 * moved
    going_on = LanguageModel("tiny", adapter=str(tmp_path / "hf" / "adapter")).load()
    torch.testing.assert_close(logits(going_on, ids), trained, rtol=0, atol=1e-3 * moved)
    assert any(each.requires_grad for each in going_on.parameters())


TIED: dict[str, dict[str, Any]] = {
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "both": {"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
    "pattern": {"target_modules": r".*(q_proj|embed_tokens)"},
    "saved embedding": {"target_modules": Q, "modules_to_save": ["embed_tokens"]},
    "saved head": {"target_modules": Q, "modules_to_save": ["lm_head"]},
    "rows of the head": {"target_modules": Q, "trainable_token_indices": {"lm_head": [3]}},
    "parameter": {"target_modules": [], "target_parameters": ["embed_tokens.weight"]},
}
"""Of the tied shipped policy: an adapter that moves one of two weights that are one. Neither a merged model nor an
engine can hold that; one was once exported as another model, and called verified."""


def given_as(door: str, config: peft.PeftConfig, folder: Path) -> LanguageModel:
    """The adapter as a config, as a folder that is gone on with, or as an object of PEFT."""
    if door == "config":
        return LanguageModel("tiny", lora=config)
    policy = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(TINY), copy.deepcopy(config))
    if door == "object":
        return as_language_model(policy, AutoTokenizer.from_pretrained(TINY))
    policy.save_pretrained(str(folder), save_embedding_layers=False)
    return LanguageModel("tiny", adapter=str(folder))


@pytest.mark.parametrize("door", ["config", "folder", "object"])
def test_an_adapter_that_splits_a_tied_weight_is_refused_before_training(door: str, tmp_path: Path) -> None:
    others = [
        peft.IA3Config(target_modules=["lm_head"], feedforward_modules=[]),
        peft.LoHaConfig(target_modules=["lm_head"]),
    ]
    for number, config in enumerate([*(peft.LoraConfig(r=4, **settings) for settings in TIED.values()), *others]):
        with pytest.raises(ConfigError, match=r"one tied weight.*trainable_token_indices"):
            given_as(door, config, tmp_path / str(number)).load()


MOVES_BOTH: dict[str, dict[str, Any]] = {
    "rows": {"target_modules": Q, "trainable_token_indices": [3, 5]},
    "saved": {"target_modules": Q, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "bare parameter": {"target_modules": [], "target_parameters": ["q_proj.weight"]},
}


@pytest.mark.parametrize(("kind", "door"), zip(MOVES_BOTH, ("config", "folder", "object")))
def test_what_moves_both_of_a_tied_weight_is_exported_as_it_was_trained(kind: str, door: str, tmp_path: Path) -> None:
    model = given_as(door, peft.LoraConfig(r=4, **MOVES_BOTH[kind]), tmp_path / "adapter")
    policy = model.load()
    torch.manual_seed(0)
    with torch.no_grad():
        for each in policy.parameters():
            each.add_(0.05 * torch.randn_like(each) if each.requires_grad else 0)
    report = export_policy(model, full_state_dict(policy), policy, tmp_path / "hf", card="")
    ids = torch.tensor([[3, 5, 7, 9]])
    trained = logits(policy, ids)
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(report.folder), ids), trained, rtol=0, atol=1e-4
    )
    adapted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(TINY), str(report.adapter))
    torch.testing.assert_close(logits(adapted, ids), trained, rtol=0, atol=1e-4)
    assert list(report.logits) == [f"The {what} from the trained policy" for what in ("model", "adapter over its base")]
    assert not report.note and all(difference < 1e-4 for difference in report.logits.values())


NO_EXPORT: dict[str, tuple[dict[str, Any], str]] = {
    "bias of its own": (
        {"lora_bias": True, "target_modules": ["o_proj"]},
        r"cannot be merged into \S+\.o_proj: .*no bias",
    ),
    "wakes up": ({"alora_invocation_tokens": [7]}, r"alora_invocation_tokens=\[7\], which .*Leave alora_invoc"),
    "layer twice": ({"layer_replication": [[0, 2], [1, 2]]}, r"layer_replication=.*Leave layer_replication out"),
    "drawn anew": ({"monteclora_config": peft.MontecloraConfig()}, "monteclora_config=.*Leave monteclora_config out"),
    "random base": ({"init_lora_weights": "pissa_niter_2"}, "pissa_niter_2.*neither a resumed run.*Use 'pissa'"),
}
"""What would be trained to the end, and then not be exported: by an error, or as an adapter over another base."""


@pytest.mark.parametrize(
    ("kind", "door"), [*((kind, "config") for kind in NO_EXPORT), ("wakes up", "folder"), ("bias of its own", "object")]
)
def test_what_could_not_be_exported_is_refused_before_training(kind: str, door: str, tmp_path: Path) -> None:
    settings, why = NO_EXPORT[kind]
    with pytest.raises(ConfigError, match=why):
        given_as(door, peft.LoraConfig(**{"r": 4, "target_modules": Q, **settings}), tmp_path).load()


def test_a_layer_that_merges_to_another_is_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = torch.get_rng_state()
    LanguageModel("tiny").load()
    merged = LoraLinear.get_delta_weight
    monkeypatch.setattr(LoraLinear, "get_delta_weight", lambda layer, adapter: 1.1 * merged(layer, adapter))
    with pytest.raises(ConfigError, match=r"model\.lora cannot be merged into model\.layers\.\d"):
        LanguageModel("tiny", lora=Lora(r=2)).load()
    monkeypatch.undo()
    torch.set_rng_state(draws)
    policy = LanguageModel("tiny", lora=Lora(r=2)).load()
    seeded = torch.get_rng_state()
    check_merge(policy, "model.lora")
    assert torch.equal(torch.get_rng_state(), seeded), "the trial draws from nobody's generator"


@pytest.mark.parametrize("config", [CONFIGS["LORA"], CONFIGS["OFT"]], ids=["lora", "oft"])
def test_the_trial_of_a_merge_is_made_on_the_cpu(config: peft.PeftConfig) -> None:
    """Every object on a GPU was once refused, as its layers do not meet numbers that are drawn on the CPU; so was one
    without storage, of which there is nothing to run."""
    policy = of_peft(config)
    with torch.device("meta"):  # as torch.set_default_device
        check_merge(policy, "The adapter of model")
        empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(TINY))
        held = peft.get_peft_model(empty, config)
        check_merge(held, "The adapter of model")
    assert as_language_model(held, AutoTokenizer.from_pretrained(TINY)).given is held


def test_the_adapter_of_an_object_is_compared_over_the_files_of_its_base(tmp_path: Path) -> None:
    """A base that was changed before, here by numbers that nobody can draw again, is in the merged model alone. The
    tokenizer pads on the right, as most do: its side was not written, and every such export failed."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    del tokenizer.init_kwargs["padding_side"]
    tokenizer.padding_side = "right"
    config = peft.LoraConfig(r=4, target_modules=Q, init_lora_weights="pissa_niter_2")
    model = as_language_model(peft.get_peft_model(AutoModelForCausalLM.from_pretrained(TINY), config), tokenizer)
    policy, ids = model.load(), torch.tensor([[3, 5, 7, 9]])
    report = export_policy(model, full_state_dict(policy), policy, tmp_path / "hf", card="A card.\n")
    reloaded = AutoModelForCausalLM.from_pretrained(report.folder)
    torch.testing.assert_close(logits(reloaded, ids), logits(policy, ids), rtol=0, atol=1e-4)
    assert report.adapter is None and not (report.folder / "adapter").exists()
    assert "adapter/ is left out" in str(report) and "q_proj.weight differs" in report.note
    assert "adapter/ is left out" in (report.folder / "README.md").read_text()
    assert AutoTokenizer.from_pretrained(report.folder).padding_side == "left" and tokenizer.padding_side == "right"


def exported(base: Any, tokenizer: Any, config: peft.PeftConfig, folder: Path) -> tuple[Any, ExportReport]:
    """A policy over a base that came as an object, its adapter of some size, and the report of its export."""
    model = as_language_model(peft.get_peft_model(base, config), tokenizer)
    policy = model.load()
    torch.manual_seed(0)
    with torch.no_grad():
        for each in policy.parameters():
            each.add_(0.05 * torch.randn_like(each) if each.requires_grad else 0)
    return policy, export_policy(model, full_state_dict(policy), policy, folder, card="A card.\n")


@pytest.mark.parametrize(
    ("rows", "trained"), [(2, {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}), (-8, {})]
)
def test_the_adapter_of_a_resized_object_is_written(rows: int, trained: dict[str, Any], tmp_path: Path) -> None:
    """By the recipe of TRL: a token for padding, and a row for it."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    base = AutoModelForCausalLM.from_pretrained(TINY)
    wanted = base.config.vocab_size + rows
    if rows > 0:
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    else:  # of a table with rows to spare
        base.resize_token_embeddings(wanted := base.config.vocab_size + 8)
        base.save_pretrained(tmp_path / "base")
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        wanted -= 8
    folder = base.name_or_path
    base.resize_token_embeddings(wanted)
    policy, report = exported(base, tokenizer, peft.LoraConfig(r=4, target_modules=Q, **trained), tmp_path / "hf")
    assert len(report.logits) == 2 and max(report.logits.values()) < 1e-4 and report.adapter is not None
    for said in (report.note, (report.folder / "README.md").read_text()):
        assert f"only after resize_token_embeddings({wanted})" in said and "only as" not in said
    again = AutoModelForCausalLM.from_pretrained(folder)
    again.resize_token_embeddings(wanted)
    over_base = peft.PeftModel.from_pretrained(again, str(report.adapter))
    ids, common = torch.tensor([[3, 5, 7, 9]]), 250
    found, there = (logits(each, ids)[..., :common] for each in (over_base, policy))
    torch.testing.assert_close(found, there, rtol=0, atol=1e-4)


@pytest.mark.parametrize("spread", [False, True], ids=["one process", "spread over ranks"])
def test_a_resized_base_that_was_changed_too_loses_its_adapter_alone(
    spread: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the policy cannot be asked, as under FSDP, the whole export once failed."""
    monkeypatch.setattr("lit_rl.models.verified_folder._is_spread", lambda policy: spread)
    base = AutoModelForCausalLM.from_pretrained(TINY)
    base.resize_token_embeddings(base.config.vocab_size + 1)
    with torch.no_grad():
        base.get_input_embeddings().weight[3] += 1
    config = peft.LoraConfig(r=4, target_modules=Q)
    report = exported(base, AutoTokenizer.from_pretrained(TINY), config, tmp_path / "hf")[1]
    assert report.adapter is None and "adapter/ is left out" in report.note
    assert "embed_tokens.weight differs" in report.note


def test_the_base_of_an_object_is_read_from_the_commit_that_its_adapter_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    own, main = "a" * 40, "b" * 40
    snapshots = tmp_path / "models--me--model" / "snapshots"
    base = AutoModelForCausalLM.from_pretrained(TINY)
    base.save_pretrained(snapshots / own)
    base.resize_token_embeddings(300)  # by another hand, since
    base.save_pretrained(snapshots / main)
    (refs := snapshots.parent / "refs").mkdir()
    (refs / "main").write_text(main)
    pinned = AutoModelForCausalLM.from_pretrained("me/model", revision=own)
    config = peft.LoraConfig(r=4, target_modules=Q, revision=own)  # as get_peft_model(..., revision=own) sets it
    report = exported(pinned, AutoTokenizer.from_pretrained(TINY), config, tmp_path / "hf")[1]
    assert report.adapter is not None and not report.note and len(report.logits) == 2


def of_peft(config: peft.PeftConfig | None = None, **how: Any) -> Any:
    return peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(TINY), config or peft.LoraConfig(r=4, target_modules=Q), **how
    )


def scaled() -> Any:
    policy = of_peft()
    policy.base_model.model.model.layers[1].self_attn.q_proj.scaling["default"] *= 3
    return policy


def switched_off() -> Any:
    policy = of_peft()
    policy.base_model.disable_adapter_layers()
    return policy


def added() -> Any:
    policy = AutoModelForCausalLM.from_pretrained(TINY)
    policy.add_adapter(peft.LoraConfig(r=4, target_modules=Q))
    return policy


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (scaled, r"layers\.1\.self_attn\.q_proj is scaled by 6, .*by 2: set"),
        (switched_off, "is switched off: call enable_adapter_layers"),
        (added, r"has an adapter inside \(\S+q_proj\).*PeftModel\.from_pretrained"),
        (
            lambda: peft.get_peft_model(of_peft(), peft.LoraConfig(r=2, target_modules=["k_proj"])),
            "stands inside another PeftModel",
        ),
    ],
    ids=["scaled", "switched off", "added", "twice"],
)
def test_an_object_that_its_config_does_not_describe_is_refused_before_training(made: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        as_language_model(made(), AutoTokenizer.from_pretrained(TINY))


def test_a_folder_of_a_model_with_an_adapter_in_it_is_refused(tmp_path: Path) -> None:
    """transformers reads the base that the adapter names, puts the adapter on and says nothing."""
    AutoModelForCausalLM.from_pretrained(TINY).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(tmp_path)
    of_peft().save_pretrained(str(tmp_path), save_embedding_layers=False)
    for lora in (None, Lora(r=2)):
        with pytest.raises(ConfigError, match=r"model\.name=.*adapter inside.*model\.adapter"):
            LanguageModel(str(tmp_path), lora=lora).load()


def test_an_adapter_of_any_name_is_exported(tmp_path: Path) -> None:
    saved = peft.LoraConfig(r=4, target_modules=Q, modules_to_save=["norm"], trainable_token_indices=[3])
    model = as_language_model(of_peft(saved, adapter_name="model"), AutoTokenizer.from_pretrained(TINY))
    policy, ids = model.load(), torch.tensor([[3, 5, 7, 9]])
    torch.manual_seed(0)
    with torch.no_grad():
        for each in policy.parameters():
            each.add_(0.05 * torch.randn_like(each) if each.requires_grad else 0)
    report = export_policy(model, full_state_dict(policy), policy, tmp_path / "hf", card="")
    assert len(report.logits) == 2 and all(difference < 1e-4 for difference in report.logits.values())
    going_on = LanguageModel("tiny", adapter=str(report.adapter)).load()
    torch.testing.assert_close(logits(going_on, ids), logits(policy, ids), rtol=0, atol=1e-4)


BESIDE = {
    "bare parameter": peft.LoraConfig(r=4, target_modules=[], target_parameters=["q_proj.weight"]),
    "biases": peft.LoraConfig(r=4, target_modules=Q, bias="all"),
    "biases of layers": peft.LoraConfig(r=4, target_modules=Q, bias="lora_only"),
    "rows": peft.LoraConfig(r=4, target_modules=Q, trainable_token_indices=[3, 5]),
    "saved": peft.LoraConfig(r=4, target_modules=Q, modules_to_save=["norm"]),
}


@pytest.mark.parametrize(
    ("kind", "reference"), [*((kind, Auto) for kind in BESIDE), ("biases", FrozenCopy), ("saved", InitialAdapter)]
)
def test_the_reference_stays_where_the_policy_began(kind: str, reference: Any) -> None:
    """Adapters that are switched off leave trained biases of the base on: the KL was measured against these."""
    ids = torch.tensor([[3, 5, 7, 9]])
    policy = LanguageModel("tiny", lora=BESIDE[kind]).load()
    began, chosen = logits(policy, ids), reference()
    module = chosen.module(policy)
    torch.manual_seed(0)
    with torch.no_grad():
        for each in policy.parameters():
            each.add_(0.05 * torch.randn_like(each) if each.requires_grad else 0)
    with chosen.scoring(policy, module) as scorer:
        assert torch.equal(logits(scorer, ids), began)
    assert (logits(policy, ids) - began).abs().max() > 0.01


def test_a_base_that_is_trained_beside_its_adapter_is_no_reference_and_no_adapter() -> None:
    with pytest.raises(ConfigError, match=r"reference=adapter_base.*frozen_copy"):
        AdapterBase().module(LanguageModel("tiny", lora=BESIDE["biases"]).load())
    policy = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(TINY), peft.LoraConfig(r=4, target_modules=Q))
    policy.base_model.model.model.norm.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"model\.norm\.weight.*modules_to_save"):
        as_language_model(policy, AutoTokenizer.from_pretrained(TINY))


def run(folder: Path, lora: Any) -> GRPO:
    module = GRPO(
        LanguageModel("tiny", lora=lora),
        lambda prompts, completions, **columns: [float(len(set(text))) for text in completions],
        sampling=Sampling(max_new_tokens=3),
        group_size=4,
        beta=0.1,
        optimizer=AdamW(lr=0.05),
        scheduler=Constant(),
    )
    rows = [{"prompt": f"{n}+1="} for n in range(4)]
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(max_steps=1, accelerator="cpu", default_root_dir=folder, enable_checkpointing=False, **quiet)
    trainer.fit(module, datamodule=RolloutDataModule(rows=rows, prompts_per_rollout=2, val_fraction=0))
    trainer.save_checkpoint(folder / "1.ckpt")
    return module


@pytest.mark.parametrize("kind", ["OFT", "IA3", "VERA"])
def test_a_run_is_saved_without_its_base_and_exported(kind: str, tmp_path: Path) -> None:
    module = run(tmp_path, CONFIGS[kind])
    held = torch.load(tmp_path / "1.ckpt", weights_only=True)["state_dict"]
    assert held and not any(name.endswith("embed_tokens.weight") for name in held)
    facts = {"base_model": "tiny", "algorithm": "grpo"}
    module.export(full_state_dict(module.policy), tmp_path / "hf", facts)
    ids = torch.tensor([module.tokenizer("17+25=").input_ids])
    reloaded = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "hf"), ids)
    torch.testing.assert_close(reloaded, logits(module.policy, ids), rtol=0, atol=1e-4)
    assert not torch.allclose(reloaded, logits(module.model.load_base(), ids), atol=1e-2)


def test_lora_of_peft_is_lora_of_ours() -> None:
    """The same adapters at the same seed, and the config that came stays as it was."""
    config = peft.LoraConfig(r=4, lora_alpha=32, target_modules="all-linear")
    policies = []
    for lora in (Lora(r=4), config):
        torch.manual_seed(0)
        policies.append(dict(LanguageModel("tiny", lora=lora).load().named_parameters()))
    assert policies[0].keys() == policies[1].keys()
    assert all(torch.equal(tensor, policies[1][name]) for name, tensor in policies[0].items())
    assert config.task_type is None and config.target_modules == "all-linear"


def test_engines_hold_plain_lora_alone() -> None:
    ranks = {kind: adapter_rank(LanguageModel("tiny", lora=CONFIGS[kind])) for kind in ("LORA", "DORA", "OFT")}
    assert ranks == {"LORA": 4, "DORA": None, "OFT": None}


def test_flags_of_what_is_excluded_stand_where_they_may() -> None:
    """A classifier's head is excluded too, beside what the user excludes."""
    excluded = peft.LoraConfig(r=2, target_modules=ALL, exclude_modules="(?i).*Q_PROJ|.*mlp.*")
    base = AutoModelForSequenceClassification.from_pretrained(TINY, num_labels=1)
    policy = as_adapter(excluded).apply(base, "SEQ_CLS", head=["score"])
    found = {name.split(".lora_A")[0].rpartition(".")[2] for name, _ in policy.named_parameters() if ".lora_A" in name}
    assert found == {"k_proj", "v_proj", "o_proj"}
