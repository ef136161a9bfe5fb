"""Export: what is written is what was trained, key by key and bit by bit, or there is no export."""

from __future__ import annotations

import json
import os
import shutil
from mmap import PAGESIZE
from pathlib import Path

import pytest
import torch
import yaml
from no_room import fill, no_file_above, small_disk
from peft import PeftModel
from peft.tuners.lora import Linear as LoraLinear
from plain_scores import token_logits
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tiers import in_turn
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from lit_rl.algorithms import GRPO
from lit_rl.core import durable_files
from lit_rl.core.errors import ConfigError, StorageError
from lit_rl.core.model_paths import TINY
from lit_rl.models import LanguageModel, Lora
from lit_rl.models.engine_weights import write_adapter
from lit_rl.models.hf_export import ExportForm, export_policy
from lit_rl.models.loaded_model import LoadedModel
from lit_rl.models.model_card import model_card as make_card
from lit_rl.models.scoring import SEQUENCES, load_scoring
from lit_rl.models.sharding import full_state_dict
from lit_rl.models.verified_folder import unpublished_folders, verify

CARD = make_card({"base_model": "me/base", "algorithm": "grpo"})


def train_a_little(policy: nn.Module) -> None:
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))


@pytest.mark.parametrize(
    "kind, tied, cloned",
    [("gpt2", True, True), ("qwen2", True, False), ("qwen2", False, False), ("gemma2", True, True)],
)
def test_a_model_comes_back_as_it_was_trained(make_model, make_completions, tmp_path, kind, tied, cloned):
    model = LanguageModel(str(make_model(kind, tie_word_embeddings=tied)))
    policy = model.load().eval()
    train_a_little(policy)
    state = full_state_dict(policy)
    if cloned:  # as a gather over ranks gives it: tied weights are two tensors
        state = {name: tensor.clone() for name, tensor in state.items()}
    report = export_policy(model, state, policy, tmp_path / "out" / "hf", card=CARD)
    assert (report.folder, report.adapter) == (tmp_path / "out" / "hf", None)
    assert (report.max_abs_diff, report.dtype, report.tensors) == (0.0, "float32", len(state))
    assert report.parameters == sum(p.numel() for p in policy.parameters())
    completions = make_completions([[5, 6, 7]], [[1, 2]])
    reloaded = AutoModelForCausalLM.from_pretrained(report.folder)
    assert torch.equal(token_logits(reloaded, completions), token_logits(policy, completions))
    stored = load_file(report.folder / "model.safetensors")
    assert ("lm_head.weight" in stored) == (not tied)
    assert (report.folder / "README.md").read_text() == CARD
    assert [item.name for item in (tmp_path / "out").iterdir()] == ["hf"]


@in_turn(
    tied=[True, False],
    lora=[Lora(r=2), Lora(r=2, dora=True), Lora(r=2, modules_to_save=["down_proj"], targets=["q_proj"])],
)
def test_a_lora_policy_is_merged_and_its_adapter_stands_beside_it(make_model, make_completions, tmp_path, lora, tied):
    folder = str(make_model(tie_word_embeddings=tied))
    model = LanguageModel(folder, lora=lora)
    policy = model.load().eval()
    train_a_little(policy)
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    report = export_policy(model, full_state_dict(policy), policy, tmp_path / "hf", card=CARD)
    for name, tensor in policy.state_dict().items():
        assert torch.equal(tensor, before[name]), f"the export changed {name} of the policy"
    completions = make_completions([[5, 6, 7]], [[1, 2]])
    wanted = token_logits(policy, completions)
    merged = AutoModelForCausalLM.from_pretrained(report.folder)
    torch.testing.assert_close(token_logits(merged, completions), wanted, rtol=1e-4, atol=1e-4)
    assert not any("lora" in name for name in load_file(report.folder / "model.safetensors"))
    assert report.adapter == report.folder / "adapter"
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), report.adapter)
    assert torch.equal(token_logits(adapted.eval(), completions), wanted)
    assert json.loads((report.adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == folder
    continued = LanguageModel(folder, adapter=str(report.adapter)).load().eval()
    assert torch.equal(token_logits(continued, completions), wanted)


def test_two_exports_of_an_adapter_are_equal_to_the_byte(tmp_path):
    """In processes that iterate sets in other orders too: the one set in them is written in order."""
    model = LanguageModel("tiny", lora=Lora(r=2))
    policy, written = model.load(), []
    for folder in (tmp_path / "one", tmp_path / "other"):
        export_policy(model, full_state_dict(policy), policy, folder / "hf", card="A card.")
        write_adapter(policy, folder / "shipped")
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        written.append({str(path.relative_to(folder)): path.read_bytes() for path in files})
    assert written[0] == written[1]
    for adapter in ("hf/adapter", "shipped"):
        names = json.loads(written[0][f"{adapter}/adapter_config.json"])["target_modules"]
        assert names == sorted(names) and len(names) > 3


def test_a_quantised_base_is_replaced_by_the_one_that_was_published(make_model, make_completions, tmp_path):
    """The adapter is all that counts of the state. With bitsandbytes itself: tests/vision/test_vision_quantised.py."""
    model = LanguageModel(str(make_model()), lora=Lora(r=2))
    policy = model.load().eval()
    train_a_little(policy)
    model.quantization = "nf4"
    state = {n: t if "lora_" in n else torch.zeros(1, dtype=torch.uint8) for n, t in full_state_dict(policy).items()}
    report = export_policy(model, state, policy, tmp_path / "hf", card=CARD)
    merged = AutoModelForCausalLM.from_pretrained(report.folder)
    completions = make_completions([[5, 6, 7]], [[1, 2]])
    got, wanted = token_logits(merged, completions), token_logits(policy, completions)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lora", [None, Lora(r=2)])
def test_half_precision_stays_half_precision(make_model, tmp_path, lora):
    model = LanguageModel(str(make_model()), dtype="bfloat16", lora=lora)
    policy = model.load()
    report = export_policy(model, full_state_dict(policy), policy, tmp_path / "hf", card=CARD)
    assert report.dtype == "bfloat16"
    assert json.loads((report.folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert {t.dtype for t in load_file(report.folder / "model.safetensors").values()} == {torch.bfloat16}


def test_a_half_precision_state_of_a_float32_policy_says_so_in_its_config(make_model, tmp_path):
    model = LanguageModel(str(make_model()))
    policy = model.load()
    state = {name: tensor.bfloat16() for name, tensor in full_state_dict(policy).items()}
    assert export_policy(model, state, policy, tmp_path / "hf", card=CARD).dtype == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf").dtype == torch.bfloat16


@in_turn(tied=[True, False], lora=[None, Lora(r=2)])
def test_a_partial_state_is_caught_and_leaves_nothing_behind(make_model, tmp_path, tied, lora):
    model = LanguageModel(str(make_model(tie_word_embeddings=tied)), lora=lora)
    policy = model.load()
    whole = full_state_dict(policy)
    for name in (n for n in whole if "up_proj" in n or "norm.weight" in n or "embed_tokens" in n):
        partial = {key: tensor for key, tensor in whole.items() if key != name}
        with pytest.raises(StorageError, match="lacks 1 weights"):
            if tied and "embed_tokens" in name:  # its other half would fill it
                partial = {key: tensor for key, tensor in partial.items() if "lm_head" not in key}
            export_policy(model, partial, policy, tmp_path / "out" / "hf", card=CARD)
    assert not (tmp_path / "out").exists()


def test_a_state_of_other_names_or_shapes_is_refused(make_model, tmp_path):
    model = LanguageModel(str(make_model()))
    policy = model.load()
    state = full_state_dict(policy)
    with pytest.raises(StorageError, match="under the policy's own names"):
        export_policy(model, {f"policy.{n}": t for n, t in state.items()}, policy, tmp_path / "hf", card=CARD)
    with pytest.raises(StorageError, match="also holds 1"):
        export_policy(model, {**state, "more": torch.ones(1)}, policy, tmp_path / "hf", card=CARD)
    with pytest.raises(StorageError, match="do not fit"):
        export_policy(model, {**state, "model.norm.weight": torch.ones(3)}, policy, tmp_path / "hf", card=CARD)


def test_nan_weights_are_not_published(make_model, tmp_path):
    model = LanguageModel(str(make_model()))
    policy = model.load()
    policy.get_input_embeddings().weight.data[3, 3] = float("nan")
    with pytest.raises(StorageError, match="embed_tokens"):
        export_policy(model, full_state_dict(policy), policy, tmp_path / "hf", card=CARD)
    assert not (tmp_path / "hf").exists()


def exported(make_model, tmp_path) -> tuple[LanguageModel, dict[str, torch.Tensor], Path]:
    model = LanguageModel(str(make_model()))
    policy = model.load()
    export_policy(model, full_state_dict(policy), policy, tmp_path / "hf", card=CARD)
    return model, full_state_dict(policy), tmp_path / "hf"


def test_a_form_of_export_writes_the_folder_with_a_card_of_its_kind(make_model, tmp_path):
    model, form = LanguageModel(str(make_model())), ExportForm(("one-way",))
    facts = {"base_model": "x", "algorithm": "y"}
    policy = model.load()
    report = form.write(model, policy, full_state_dict(policy), tmp_path / "hf", facts)
    card = (report.folder / "README.md").read_text()
    assert "one-way" in card and form.loaded_by(model) == "AutoModelForCausalLM" in card
    scores = ExportForm(scoring=SEQUENCES, reads={"ends_with_eos": True})
    scorer = load_scoring(model, SEQUENCES)
    report = scores.write(model, scorer, full_state_dict(scorer), tmp_path / "scores", facts)
    assert scores.loaded_by(model) in (report.folder / "README.md").read_text()
    assert json.loads((report.folder / "config.json").read_text())["ends_with_eos"] is True


@pytest.mark.parametrize("named", ["PreTrainedTokenizerFast", "Qwen2TokenizerFast"])
def test_the_tokenizer_has_the_class_that_its_base_names(make_model, tmp_path, named):
    """transformers takes another for it, which engines and its own older versions may not know."""
    file = (base := make_model()) / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": named}))
    model = LanguageModel(str(base))
    report = export_policy(model, full_state_dict(policy := model.load()), policy, tmp_path / "hf", card=CARD)
    written = json.loads((report.folder / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == named and not {"is_local", "local_files_only"} & written.keys()
    configs = [json.loads((folder / "config.json").read_text()) for folder in (base, report.folder)]
    assert configs[0]["architectures"] == configs[1]["architectures"] == ["Qwen2ForCausalLM"]


CONFIGURATION = """
from transformers import Qwen2Config
class MineConfig(Qwen2Config):
    model_type = "mine"
"""
MODELING = """
from transformers import Qwen2ForCausalLM
from .configuration_mine import MineConfig
class MineForCausalLM(Qwen2ForCausalLM):
    config_class = MineConfig
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = 2 * output.logits
        return output
"""


@pytest.mark.parametrize("lora", [None, Lora(r=2)])
def test_code_that_came_with_the_base_goes_with_the_export(make_model, tmp_path, lora):
    base = make_model()
    (base / "configuration_mine.py").write_text(CONFIGURATION)
    (base / "modeling_mine.py").write_text(MODELING)
    classes = {"AutoConfig": "configuration_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}
    said = {"model_type": "mine", "architectures": ["MineForCausalLM"], "auto_map": classes}
    (base / "config.json").write_text(json.dumps(json.loads((base / "config.json").read_text()) | said))
    model = LanguageModel(str(base), trust_remote_code=True, lora=lora)
    train_a_little(policy := model.load())
    report = export_policy(model, full_state_dict(policy), policy, tmp_path / "hf", card=CARD)
    written = json.loads((report.folder / "config.json").read_text())
    assert {name: written[name] for name in said} == said
    reloaded = AutoModelForCausalLM.from_pretrained(report.folder, trust_remote_code=True)
    ids = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(reloaded(ids).logits, policy.eval()(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fault", ["merge", "adapter", "config"])
def test_a_model_that_says_something_else_is_not_published(make_model, tmp_path, monkeypatch, fault):
    """Every tensor is as it was written: only the logits tell."""
    model = LanguageModel(str(make_model()), lora=None if fault == "config" else Lora(r=2))
    policy = model.load()
    train_a_little(policy)
    if fault == "config":  # what the export takes is not what the policy was made with
        policy.config.rms_norm_eps = 0.5
    elif fault == "merge":
        merged = LoraLinear.get_delta_weight
        monkeypatch.setattr(LoraLinear, "get_delta_weight", lambda layer, adapter: 1.1 * merged(layer, adapter))
    else:
        saved = PeftModel.save_pretrained

        def saved_with_another_alpha(policy, *args, **kwargs):
            policy.peft_config["default"].lora_alpha *= 2
            saved(policy, *args, **kwargs)

        monkeypatch.setattr(PeftModel, "save_pretrained", saved_with_another_alpha)
    wrong = "The adapter over its base" if fault == "adapter" else "The model"
    with pytest.raises(StorageError, match=f"{wrong} that was written is not what was trained"):
        export_policy(model, full_state_dict(policy), policy, tmp_path / "hf", card=CARD)
    assert not (tmp_path / "hf").exists()


@in_turn(door=["folder", "typed", "object"], lora=[None, Lora(r=2)])
def test_two_weights_that_a_config_calls_one_are_two(make_model, tmp_path, door, lora):
    """transformers keeps what its files hold twice; a config that says otherwise lost the head of the export."""
    folder, typed = make_model(tie_word_embeddings=False), {"tie_word_embeddings": True}
    if door != "typed":
        (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | typed))
    model = LanguageModel(str(folder), lora=lora, init_kwargs=typed if door == "typed" else None)
    if door == "object":
        given = AutoModelForCausalLM.from_pretrained(folder)
        model = LoadedModel(given, AutoTokenizer.from_pretrained(folder), lora=lora)
    policy = model.load()
    train_a_little(policy)
    report = export_policy(model, full_state_dict(policy), policy, tmp_path / "hf", card=CARD)
    assert json.loads((report.folder / "config.json").read_text())["tie_word_embeddings"] is False
    reloaded, ids = AutoModelForCausalLM.from_pretrained(report.folder), torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(reloaded(ids).logits, policy.eval()(ids).logits, rtol=1e-4, atol=1e-4)
    assert not torch.equal(reloaded.lm_head.weight, reloaded.model.embed_tokens.weight)


@pytest.mark.parametrize("fate", ["gone", "another", "loaded otherwise"])
def test_a_base_that_is_not_what_it_was_costs_no_more_than_the_adapter_by_itself(make_model, tmp_path, fate):
    """A run of days is not lost for a folder that moved: the merged model needs it not."""
    folder = make_model()
    rope = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}
    model = LanguageModel(str(folder), lora=Lora(r=2), init_kwargs=rope if fate == "loaded otherwise" else None)
    policy = model.load()
    train_a_little(policy)
    if fate == "gone":
        shutil.rmtree(folder)
    elif fate == "another":
        other = AutoModelForCausalLM.from_pretrained(folder)
        train_a_little(other)
        other.save_pretrained(folder)
    report = export_policy(model, full_state_dict(policy), policy, tmp_path / "hf", card=CARD)
    reloaded, ids = AutoModelForCausalLM.from_pretrained(report.folder), torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(reloaded(ids).logits, policy.eval()(ids).logits, rtol=1e-4, atol=1e-4)
    said = {"gone": "was not compared over its base", "another": "is left out", "loaded otherwise": "rope_parameters="}
    assert said[fate] in str(report) and said[fate] in (report.folder / "README.md").read_text()
    assert str(tmp_path) not in (report.folder / "README.md").read_text()
    assert (report.adapter is None) == (fate == "another") == (not (report.folder / "adapter").exists())


def test_the_adapter_names_its_base_as_an_absolute_path(make_model, tmp_path, monkeypatch):
    make_model(folder="base")
    monkeypatch.chdir(tmp_path)
    for name, where in (("base", tmp_path / "base"), ("tiny", TINY)):
        model = LanguageModel(name, lora=Lora(r=2))
        report = export_policy(
            model, full_state_dict(policy := model.load()), policy, tmp_path / f"{name} hf", card=CARD
        )
        said = json.loads((report.adapter / "adapter_config.json").read_text())["base_model_name_or_path"]
        assert Path(said) == where.resolve()


def test_an_average_is_compared_with_the_policy_that_has_it(make_model, tmp_path):
    """Of a whole model the tensors alone are compared: a pass would need the weights twice."""
    for lora, said in ((Lora(r=2), {"The model from the trained policy", ADAPTER}), (None, set())):
        model = LanguageModel(str(make_model(folder=f"base {lora}")), lora=lora)
        policy = model.load()
        train_a_little(policy)
        state = {name: tensor.clone() for name, tensor in full_state_dict(policy).items()}
        train_a_little(policy)
        report = export_policy(model, state, policy, tmp_path / f"hf {lora}", card=CARD)
        assert set(report.logits) == said and all(each < 1e-4 for each in report.logits.values())
        assert str(report).startswith(f"verified: {report.tensors} tensors reloaded, largest difference 0")


ADAPTER = "The adapter over its base from the trained policy"


@pytest.mark.parametrize(
    "fault, message",
    [
        ("missing", "lacks 1 weights"),
        ("changed", r"up_proj\.weight differs by \d"),
        ("extra", "also holds 1 weights"),
        ("shape", "shapes"),
        ("dtype", r"is torch\.float32 .* was torch\.bfloat16"),
    ],
)
def test_verification_sees_every_kind_of_damage(make_model, tmp_path, fault, message):
    model, state, folder = exported(make_model, tmp_path)
    assert verify(folder, state, model.tokenizer) == 0.0
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    if fault == "missing":
        del stored[name]
    elif fault == "changed":
        stored[name][5, 7] += 1e-6
    elif fault == "shape":
        stored[name] = stored[name][:, :-1].contiguous()
    elif fault == "dtype":
        state = {key: tensor.bfloat16() for key, tensor in state.items()}
    elif fault == "extra":
        del state[name]
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StorageError, match=message):
        verify(folder, state, model.tokenizer)


@pytest.mark.parametrize("fault", ["template", "eos", "vocabulary"])
def test_verification_sees_another_tokenizer(make_model, tmp_path, fault):
    model, state, folder = exported(make_model, tmp_path)
    other = AutoTokenizer.from_pretrained(folder)
    if fault == "template":
        other.chat_template = "{{ 1 }}"
    elif fault == "eos":
        other.eos_token = "<|eot|>"
    other.save_pretrained(folder)
    if fault == "vocabulary":
        content = json.loads((folder / "tokenizer.json").read_text())
        vocabulary = content["model"]["vocab"]
        vocabulary["a"], vocabulary["e"] = vocabulary["e"], vocabulary["a"]
        (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(StorageError, match="tokenizer"):
        verify(folder, state, model.tokenizer)


def test_ids_agree_between_tokenizer_config_and_generation_config(make_model, tmp_path):
    folder = make_model(generation={"eos_token_id": [259], "pad_token_id": 3, "max_new_tokens": 77}, eos_token_id=7)
    model = LanguageModel(str(folder), pad_token="<|im_start|>")
    policy = model.load()
    out = export_policy(model, full_state_dict(policy), policy, tmp_path / "hf", card=CARD).folder
    config, generation = AutoModelForCausalLM.from_pretrained(out).config, GenerationConfig.from_pretrained(out)
    assert config.eos_token_id == generation.eos_token_id == [7, 258, 259]
    assert config.pad_token_id == generation.pad_token_id == AutoTokenizer.from_pretrained(out).pad_token_id == 257
    assert generation.max_new_tokens == 77, "what the model recommends beside its ids stays"
    assert policy.config.pad_token_id is None, "the policy's own config must stay as it is"
    assert LanguageModel(str(out)).eos_ids == (7, 258, 259)


def test_a_generation_config_that_contradicts_itself_does_not_stop_an_export(make_model, tmp_path):
    folder = make_model()
    (folder / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6, "top_p": 0.9}')
    model = LanguageModel(str(folder))
    policy = model.load()
    with pytest.warns(UserWarning, match="contradicts itself"):
        export_policy(model, full_state_dict(policy), policy, tmp_path / "hf", card=CARD)
    assert GenerationConfig.from_pretrained(tmp_path / "hf").eos_token_id == 258


def test_an_earlier_export_is_replaced_and_anything_else_is_left_alone(make_model, tmp_path):
    model, state, folder = exported(make_model, tmp_path)
    policy = model.load()
    (folder / "stale.txt").write_text("x")
    export_policy(model, state, policy, folder, card=CARD)
    assert not (folder / "stale.txt").exists()
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("x")
    (tmp_path / "file").write_text("x")
    for target in (precious, tmp_path / "file"):
        with pytest.raises(StorageError, match="not an earlier export"):
            export_policy(model, state, policy, target, card=CARD)
    with pytest.raises(StorageError, match="started from"):
        export_policy(model, state, policy, model.path, card=CARD)
    assert (precious / "thesis.txt").read_text() == "x"
    assert sorted(item.name for item in tmp_path.iterdir()) == ["file", "hf", "precious", "qwen2"]


def test_an_export_that_fails_leaves_the_earlier_one_whole(make_model, tmp_path, monkeypatch):
    monkeypatch.setattr(durable_files, "RETRY_WAITS", ())
    model, state, folder = exported(make_model, tmp_path)
    policy = model.load()
    content = {item.name: item.read_bytes() for item in folder.iterdir()}
    for where in ("os.fsync", "os.rename"):
        with monkeypatch.context() as patch, pytest.raises(StorageError, match="disk"):
            patch.setattr(where, broken_disk(where, folder))
            export_policy(model, state, policy, folder, card="new")
        assert {item.name: item.read_bytes() for item in folder.iterdir()} == content
        assert sorted(item.name for item in tmp_path.iterdir()) == ["hf", "qwen2"]
    with no_file_above(10_000), pytest.raises(StorageError, match="File too large"):  # in the middle of the weights
        export_policy(model, state, policy, folder, card="new")
    assert {item.name: item.read_bytes() for item in folder.iterdir()} == content


@pytest.mark.parametrize(
    "fits, raised",
    [((), OSError), (("config.json",), SafetensorError), (("model", "config", "_config", "chat_template"), Exception)],
    ids=["the first file", "the weights", "the tokenizer"],
)
def test_a_full_disk_is_tried_again(make_model, tmp_path, monkeypatch, fits, raised):
    """A real one, which is full at the file named; each of the libraries that write them says so in its own way."""
    model = LanguageModel(str(make_model("qwen2")))
    policy = model.load()
    disk = tmp_path / "disk"
    with small_disk(disk, 2_000_000):
        state = full_state_dict(policy)
        export_policy(model, state, policy, disk / "hf", card="old")
        before = {item.name: item.read_bytes() for item in (disk / "hf").iterdir()}
        pages = {name: -(-len(content) // PAGESIZE) for name, content in before.items()}
        ballast = fill(disk, but=PAGESIZE * sum(n for name, n in pages.items() if any(word in name for word in fits)))
        monkeypatch.setattr(durable_files, "RETRY_WAITS", (0.0,))
        with (
            pytest.warns(UserWarning, match="finds no room: .*It is tried again in 0 s"),
            pytest.raises(StorageError, match="No space left") as e,
        ):
            export_policy(model, state, policy, disk / "hf", card="new")
        assert type(e.value.__cause__) is raised
        assert {item.name: item.read_bytes() for item in (disk / "hf").iterdir()} == before
        assert sorted(item.name for item in disk.iterdir()) == ["ballast", "hf"]
        monkeypatch.setattr("time.sleep", lambda seconds: ballast.unlink())  # somebody makes room
        with pytest.warns(UserWarning, match="finds no room"):
            export_policy(model, state, policy, disk / "hf", card="new")
        assert (disk / "hf" / "README.md").read_text() == "new"


def broken_disk(where: str, folder: Path):

    real = os.rename

    def fail(*args):
        # Of the renames only the one that puts the new folder in place fails.
        if where == "os.rename" and not (Path(args[1]) == folder and ".tmp-" in str(args[0])):
            return real(*args)
        raise OSError(28, "No space left on disk")

    return fail


def test_what_killed_exports_left_is_found_and_an_earlier_one_put_back(tmp_path):
    left = [tmp_path / name for name in (".hf.old-12", ".hf.tmp-7", ".hf.old-3", ".hf.tmp-mine", ".other.tmp-7")]
    for folder in left:
        folder.mkdir()
        (folder / "whose").write_text(folder.name)
    assert set(unpublished_folders(tmp_path / "hf")) == {tmp_path / ".hf.tmp-7", tmp_path / ".hf.old-3"}
    assert (tmp_path / "hf" / "whose").read_text() == ".hf.old-12"


def test_paths_with_spaces_and_unicode(make_model, tmp_path):
    model, state, folder = exported(make_model, tmp_path)
    target = tmp_path / "a b" / "x=1 é'\"🙂" / ".." / "hf"
    shutil.rmtree(folder)
    assert export_policy(model, state, model.load(), target, card=CARD).folder == tmp_path / "a b" / "hf"


def test_the_card_is_valid_yaml_whatever_is_in_the_facts():
    facts = {
        "base_model": 'me/ba"se: [x',
        "algorithm": 'gr"po: [x',
        "results": {"reward|mean": 0.123456789, "note": "<script>\n|"},
        "versions": {"torch": "2.13.0"},
        "dataset": "gsm8k",
    }
    card = make_card(facts, tags=GRPO.export_form.tags)
    header = yaml.safe_load(card.split("---\n")[1])
    assert "base_model" not in header, "it is no owner/name"
    assert header["tags"] == ["lit_rl", "reinforcement-learning", 'gr"po: [x']
    assert header["library_name"] == "transformers"
    rows = [line for line in card.splitlines() if line.startswith("| ")]
    assert r"| reward\|mean | 0.1235 |" in rows and "| torch | 2.13.0 |" in rows
    assert "<script>" not in card
    with pytest.raises(ConfigError, match="algorithm"):
        make_card({"base_model": "x"})
    with pytest.raises(ConfigError, match="resluts"):
        make_card({"base_model": "x", "algorithm": "y", "resluts": {}})
