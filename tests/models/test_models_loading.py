"""LanguageModel.load: every weight comes from the files, or there is an error; and the settings of a policy."""

from __future__ import annotations

import copy
import http.server
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from plain_scores import token_logits
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import lit_rl.models
from lit_rl.core.errors import BackendError, ConfigError, StorageError
from lit_rl.models import LanguageModel, Lora, modes
from lit_rl.models.loading import Float32Head
from lit_rl.models.modes import OffloadToHost, set_checkpointing
from lit_rl.models.tokenizer import load_tokenizer

KINDS = ["gpt2", "qwen2", "qwen3", "smollm2", "llama3.2", "gemma2"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_policy_is_the_saved_model_in_train_mode(make_model, kind):
    folder = make_model(kind)
    policy = LanguageModel(str(folder)).load()
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert policy.training
    assert all(p.requires_grad for p in policy.parameters())
    for name, tensor in plain.state_dict().items():
        assert torch.equal(policy.state_dict()[name], tensor), name


def test_the_shipped_policy_loads():
    model = LanguageModel()
    assert Path(model.path).parent == Path(lit_rl.models.__file__).parent
    assert model.label == "tiny"
    assert model.load().training


def test_dtypes(make_model):
    folder = make_model(dtype=torch.bfloat16)
    assert LanguageModel(str(folder)).load().dtype == torch.float32
    assert LanguageModel(str(folder), dtype="auto").load().dtype == torch.bfloat16
    assert LanguageModel(str(folder), dtype="float16").load().dtype == torch.float16


def test_an_attention_kernel_that_is_not_installed_or_unknown(make_model):
    folder = str(make_model())
    assert LanguageModel(folder, attn_implementation="eager").load().config._attn_implementation == "eager"
    with pytest.raises(BackendError, match="not installed"):
        LanguageModel(folder, attn_implementation="flash_attention_2").load()
    with pytest.raises(ConfigError, match="sdpaa"):
        LanguageModel(folder, attn_implementation="sdpaa").load()


def lacks_one(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def lacks_a_shard(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="100KB")
    sorted(folder.glob("model-*.safetensors"))[1].unlink()


def has_other_shapes(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))


DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda folder: os.truncate(folder / "model.safetensors", 30_000), r"model\.safetensors is damaged"),
    "noise": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 100),
        r"model\.safetensors is damaged",
    ),
    "empty": (lambda folder: os.truncate(folder / "model.safetensors", 0), r"model\.safetensors is damaged"),
    "none": (lambda folder: (folder / "model.safetensors").unlink(), "holds no"),
    "a weight": (lacks_one, r"lack 1 weights \(.*up_proj\.weight"),  # and no random numbers
    "a shard": (lacks_a_shard, "model-00002-of-"),
    "shapes": (has_other_shapes, "shapes"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_weights_are_refused(make_model, damage, message):
    damage(folder := make_model())
    with pytest.raises(StorageError, match=message):
        LanguageModel(str(folder)).load()


@pytest.mark.parametrize("where", ["../outside.safetensors", "absolute"])
def test_an_index_reads_nothing_outside_of_its_folder(make_model, tmp_path, where):
    folder, outside = make_model(), tmp_path / "outside.safetensors"
    (folder / "model.safetensors").rename(outside)
    save_file({"x": torch.zeros(1)}, folder / "other.safetensors")
    names = dict.fromkeys(load_file(outside), str(outside) if where == "absolute" else where)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    with pytest.raises(StorageError, match="outside of the model's folder"):
        LanguageModel(str(folder)).load()


class Canary:
    """Unpickling it makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_pickled_weights_are_refused_and_never_opened(make_model, tmp_path):
    folder, canary = make_model(), tmp_path / "canary"
    (folder / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Canary(str(canary))}, folder / "pytorch_model.bin")
    with pytest.raises(StorageError, match=r"pytorch_model\.bin.*whatever code is inside"):
        LanguageModel(str(folder)).load()
    assert not canary.exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert canary.exists(), "the canary must be able to sing"


def test_pickled_adapters_are_refused_and_never_opened(make_model, tmp_path):
    folder, canary, adapter = make_model(), tmp_path / "canary", tmp_path / "adapter"
    LanguageModel(str(folder), lora=Lora(r=2)).load().save_pretrained(adapter)
    (adapter / "adapter_model.safetensors").unlink()
    torch.save(Canary(str(canary)), adapter / "adapter_model.bin")
    with pytest.raises(StorageError, match=r"adapter_model\.bin"):
        LanguageModel(str(folder), adapter=str(adapter)).load()
    assert not canary.exists()


# --- the hub ---------------------------------------------------------------------------------------------------------


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers as the hub does for a gated, an unknown and an ailing repository, and for an unknown revision."""

    answers = {
        "/me/gated": (403, "GatedRepo"),
        "/me/typo": (401, "RepoNotFound"),
        "/me/revision": (404, "RevisionNotFound"),
        "/me/ailing": (418, ""),
        "/me/empty": (404, "EntryNotFound"),
    }

    def do_HEAD(self) -> None:
        status, code = next(answer for path, answer in self.answers.items() if path in self.path)
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def fake_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    yield
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "name, message",
    [
        ("me/gated", "is gated.*hf auth login.*hf download me/gated"),
        ("me/typo", "no public repository.*typo"),
        ("me/revision", r"not with this model\.revision"),
        ("me/ailing", "could not be fetched"),
    ],
)
def test_each_way_the_hub_says_no_has_its_own_explanation(fake_hub, name, message):
    with pytest.raises(BackendError, match=message):
        LanguageModel(name).load()


def test_a_repository_that_lacks_a_file_is_no_fault_of_the_network(fake_hub):
    with pytest.raises((StorageError, ConfigError), match="me/empty"):
        LanguageModel("me/empty").load()


def test_a_hub_that_cannot_be_reached(offline, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    for read in ("config", "tokenizer", "generation_config"):
        with pytest.raises(BackendError, match=r"local cache.*`hf download me/model`"):
            getattr(LanguageModel("me/model"), read)


def test_a_cached_model_loads_offline_and_silently(offline, make_model, monkeypatch, tmp_path, caplog):
    commit = "0123456789abcdef0123456789abcdef01234567"
    home = tmp_path / "cache" / "models--me--model"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text(commit)
    (home / "snapshots").mkdir()
    make_model().rename(home / "snapshots" / commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    for settings in ({}, {"revision": commit}):
        model = LanguageModel("me/model", **settings)
        assert model.load().training
        assert model.eos_ids == (258,)
    os.remove(home / "snapshots" / commit / "generation_config.json")
    assert LanguageModel("me/model").generation_config is None
    assert not caplog.records


# --- settings of a policy --------------------------------------------------------------------------------------------


def test_dropout_can_be_switched_off(make_model, make_completions):
    completions = make_completions([[1, 2, 3]], [[4, 5]])
    for kind, changes in (("gpt2", {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5}), ("qwen2", {})):
        folder = make_model(kind, folder=f"{kind}-dropout", **(changes or {"attention_dropout": 0.5}))
        noisy, quiet = (LanguageModel(str(folder), disable_dropout=off).load() for off in (False, True))
        assert not torch.equal(token_logits(noisy, completions), token_logits(noisy, completions))
        assert torch.equal(token_logits(quiet, completions), token_logits(quiet, completions))


@pytest.mark.parametrize("tied", [True, False])
def test_a_float32_head_computes_in_float32_and_leaves_the_embedding_alone(make_model, make_completions, tied):
    folder = make_model(tie_word_embeddings=tied)
    completions = make_completions([[1, 2, 3]], [[4, 5]])
    half = LanguageModel(str(folder), dtype="bfloat16").load()
    exact = LanguageModel(str(folder), dtype="bfloat16", lm_head_fp32=True).load()
    assert half.state_dict().keys() == exact.state_dict().keys()
    assert {p.dtype for p in exact.parameters()} == {torch.bfloat16}
    assert (exact.get_output_embeddings().weight is exact.get_input_embeddings().weight) == tied
    with torch.autocast("cpu", torch.bfloat16):
        logits = token_logits(exact, completions)
    assert logits.dtype == torch.float32
    hidden = {}
    exact.get_output_embeddings().register_forward_pre_hook(lambda module, args: hidden.update(h=args[0]))
    logits = token_logits(exact, completions)
    wanted = hidden["h"].double() @ exact.get_output_embeddings().weight.double().T
    torch.testing.assert_close(logits.double(), wanted[:, -3:-1], rtol=1e-5, atol=1e-5)
    assert (token_logits(half, completions).double() - wanted[:, -3:-1]).abs().max() > 1e-3
    logits.sum().backward()
    assert exact.get_output_embeddings().weight.grad is not None
    assert isinstance(copy.deepcopy(exact).get_output_embeddings(), Float32Head)


@pytest.mark.parametrize("lora", [None, Lora(r=2)])
def test_gradient_checkpointing_changes_no_gradient(make_model, make_completions, lora):
    folder = make_model()
    completions = make_completions([[1, 2, 3]], [[4, 5]])
    gradients = []
    for on in (False, True):
        torch.manual_seed(1)
        policy = LanguageModel(str(folder), lora=lora, gradient_checkpointing=on).load()
        assert any(getattr(m, "gradient_checkpointing", False) for m in policy.modules()) == on
        # A cubic, so that the gradient depends on what the forward pass keeps.
        token_logits(policy, completions).pow(3).sum().backward()
        gradients.append({n: p.grad for n, p in policy.named_parameters() if p.requires_grad})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert gradient is not None and torch.allclose(gradient, gradients[1][name], rtol=1e-5, atol=1e-6), name


def test_checkpoints_on_the_host_keep_only_the_inputs_of_layers_there(make_model, make_completions, monkeypatch):
    """No GPU is here: what would leave one is copied within the host."""
    moved = []

    class Copying(OffloadToHost):
        def away(self, tensor):
            return tensor.requires_grad

        def pack(self, tensor):
            packed = super().pack(tensor)
            moved.extend([tuple(tensor.shape)] if packed[1] is not tensor else [])
            return packed

    monkeypatch.setattr(modes, "OffloadToHost", Copying)
    folder, completions = make_model(), make_completions([[1, 2, 3]], [[4, 5]])
    gradients = []
    for kind in (True, "offload"):
        policy = LanguageModel(str(folder), gradient_checkpointing=kind).load()
        token_logits(policy, completions).pow(3).sum().backward()
        gradients.append({n: p.grad for n, p in policy.named_parameters()})
    config = policy.config
    assert moved == [(1, 5, config.hidden_size)] * config.num_hidden_layers
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name
    set_checkpointing(policy, False)
    token_logits(policy, completions).sum().backward()
    assert len(moved) == config.num_hidden_layers


# --- adapters --------------------------------------------------------------------------------------------------------


def train_a_little(policy: nn.Module) -> None:
    for name, parameter in policy.named_parameters():
        if parameter.requires_grad:
            generator = torch.Generator().manual_seed(len(name))
            parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize(
    "lora", [Lora(r=2), Lora(r=2, dora=True), Lora(r=2, rslora=True, targets=["q_proj", "up_proj"])]
)
def test_fresh_adapters_change_nothing_and_alone_are_trained(make_model, make_completions, lora):
    folder = make_model()
    completions = make_completions([[1, 2, 3]], [[4, 5]])
    policy, base = LanguageModel(str(folder), lora=lora).load(), LanguageModel(str(folder)).load()
    torch.testing.assert_close(token_logits(policy, completions), token_logits(base, completions), rtol=0, atol=1e-4)
    trained = [name for name, p in policy.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    assert not any("lm_head" in name for name in trained)


def test_rslora_scales_by_the_root_of_the_rank(make_model):
    folder = make_model()
    for rslora, wanted in ((False, 32 / 4), (True, 32 / 2)):
        policy = LanguageModel(str(folder), lora=Lora(r=4, alpha=32, rslora=rslora)).load()
        scalings = {m.scaling["default"] for m in policy.modules() if isinstance(getattr(m, "scaling", None), dict)}
        assert scalings == {wanted}


def test_an_adapter_is_continued_as_it_was_saved(make_model, make_completions, tmp_path):
    folder = make_model()
    completions = make_completions([[1, 2, 3]], [[4, 5]])
    first = LanguageModel(str(folder), lora=Lora(r=2)).load()
    train_a_little(first)
    first.save_pretrained(tmp_path / "adapter")
    second = LanguageModel(str(folder), adapter=str(tmp_path / "adapter")).load()
    assert torch.equal(token_logits(first, completions), token_logits(second, completions))
    assert {n for n, p in first.named_parameters() if p.requires_grad} == {
        n for n, p in second.named_parameters() if p.requires_grad
    }


@pytest.mark.filterwarnings("ignore:Found missing adapter keys")
def test_an_adapter_that_does_not_fit_is_refused(make_model, tmp_path):
    folder = make_model()
    LanguageModel(str(folder), lora=Lora(r=2)).load().save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    weights = load_file(file)
    weights["base_model.model.model.layers.7.mlp.up_proj.lora_A.weight"] = weights.pop(next(iter(weights)))
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(StorageError, match="2 weights are on one side only"):
        LanguageModel(str(folder), adapter=str(tmp_path / "adapter")).load()


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"targets": ["query"]}, "targets names 'query'.*down_proj, embed_tokens, gate_proj.*q_proj"),
        ({"targets": ["q_proj", "query"]}, "'query'"),
        ({"targets": ".*nothing"}, "nothing.*down_proj"),
        ({"modules_to_save": ["score"]}, "modules_to_save names 'score'"),
        ({"modules_to_save": ["lm_head"]}, "one tied weight"),
        ({"targets": ["embed_tokens"]}, "one tied weight"),
    ],
)
def test_lora_names_that_match_nothing_or_split_a_tied_weight(make_model, settings, message):
    folder = make_model("smollm2")
    with pytest.raises(ConfigError, match=message):
        LanguageModel(str(folder), lora=Lora(r=2, **settings)).load()


def test_a_long_text_is_not_warned_of_by_its_tokenizer(tiny_dir, monkeypatch):
    """Lengths are checked where the row and the key can be named; transformers' own line would say neither."""
    said = []
    monkeypatch.setattr(logging.getLogger("transformers.tokenization_utils_base"), "warning", said.append)
    ours, theirs = load_tokenizer("tiny", str(tiny_dir)), AutoTokenizer.from_pretrained(tiny_dir)
    for tokenizer in (ours, theirs):
        assert len(tokenizer("1+" * tokenizer.model_max_length)["input_ids"]) > tokenizer.model_max_length
    assert len(said) == 1, "the line that is silenced is still transformers' own"
