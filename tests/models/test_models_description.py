"""LanguageModel before any weight is read: what it is, and what it refuses."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn
from transformers import PreTrainedTokenizerFast

from lit_rl.algorithms import GKD, GRPO, SFT, RewardModeling
from lit_rl.core.errors import BackendError, ConfigError, StorageError
from lit_rl.models import LanguageModel, Lora
from lit_rl.models.critics import SeparateCritic
from lit_rl.rewards import exact_match


def byte_tokenizer(make_model, **kwargs) -> PreTrainedTokenizerFast:
    """A tokenizer with some of its roles taken away."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(make_model(folder="source"))
    for role, token in kwargs.items():
        setattr(tokenizer, f"{role}_token", token)
    return tokenizer


def test_describing_a_model_imports_no_model_library():
    code = (
        "import sys; from lit_rl.models import LanguageModel; LanguageModel('some/model');"
        "assert not {'transformers', 'peft', 'lightning', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_description_survives_pickle_and_deepcopy_before_and_after_use(make_model):
    model = LanguageModel(str(make_model()), lora=Lora(r=2))
    for _ in range(2):
        for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
            assert (twin.name, twin.lora, twin.eos_ids, twin.pad_id) == (model.name, Lora(r=2), (258,), 256)


def test_it_tells_its_limits_and_its_name(make_model):
    model = LanguageModel(str(make_model(folder="My model=1")))
    assert model.context_length == 128
    assert model.label == "My-model-1"
    assert LanguageModel("Qwen/Qwen2.5-0.5B-Instruct").label == "Qwen2.5-0.5B-Instruct"
    assert model.tokenizer.padding_side == "left"
    assert LanguageModel(str(make_model("gpt2"))).context_length == 128


def test_every_eos_id_is_honoured(make_model):
    folder = make_model(generation={"eos_token_id": [259, 258]}, eos_token_id=7)
    assert LanguageModel(str(folder)).eos_ids == (7, 258, 259)
    assert LanguageModel(str(make_model(folder="none"))).eos_ids == (258,)


def test_without_an_eos_token_the_error_names_the_setting_that_helps(make_model):
    folder = make_model("qwen3", tokenizer=byte_tokenizer(make_model, eos=None))
    with pytest.raises(ConfigError, match=r"model\.eos_token"):
        _ = LanguageModel(str(folder)).tokenizer
    assert LanguageModel(str(folder), eos_token="<|eot|>").eos_ids == (259,)
    with pytest.raises(ConfigError, match=r"model\.eos_token='<\|eo\|>' is not in the vocabulary.*'<\|eot\|>'"):
        _ = LanguageModel(str(folder), eos_token="<|eo|>").tokenizer


@pytest.mark.parametrize("ends, pad", [([258], "<pad>"), ([256, 258], "<|im_end|>")])
def test_a_missing_pad_token_becomes_an_unused_one_and_eos_only_where_there_is_none(make_model, ends, pad, caplog):
    folder = make_model("qwen3", tokenizer=byte_tokenizer(make_model, pad=None), generation={"eos_token_id": ends})
    model = LanguageModel(str(folder))
    with caplog.at_level(logging.INFO):
        assert model.tokenizer.pad_token == pad
        _ = model.pad_id, model.tokenizer
    assert caplog.text.count("model.pad_token") == 1
    assert LanguageModel(str(folder), pad_token="<|eot|>").pad_id == 259


def test_a_tokenizer_larger_than_the_embedding_is_refused_before_weights_are_read(make_model):
    folder = make_model(vocab_size=200)
    (folder / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(ConfigError, match=r"ids up to 260.*200 rows"):
        LanguageModel(str(folder)).load()


def test_a_folder_without_a_tokenizer_is_refused(make_model):
    folder = make_model()
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ConfigError, match="without a tokenizer"):
        _ = LanguageModel(str(folder)).tokenizer


def test_chat_templates_inline_from_a_file_and_wrong(make_model, tmp_path):
    folder = make_model()
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages[0]['content'] }}!")
    for template in ("{{ messages[0]['content'] }}!", str(file)):
        tokenizer = LanguageModel(str(folder), chat_template=template).tokenizer
        assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"
    with pytest.raises(ConfigError, match=r"model\.chat_template='chta\.jinja'"):
        _ = LanguageModel(str(folder), chat_template="chta.jinja").tokenizer


def test_a_token_is_refused_without_a_word_of_it():
    with pytest.raises(ConfigError, match="HF_TOKEN") as error:
        LanguageModel("tiny", init_kwargs={"token": "hf_secret"})
    assert "hf_secret" not in str(error.value)


def test_a_policy_is_given_as_a_description_or_what_names_one(tiny_dir):
    described = LanguageModel("tiny", dtype="bfloat16")
    assert LanguageModel.of(described) is described
    for name in ("tiny", str(tiny_dir), tiny_dir):
        assert GRPO(name, exact_match).model.name == str(name)


class Loaded(nn.Linear):
    """A module in the place of a description."""

    def __init__(self):
        super().__init__(1, 1)


@pytest.mark.parametrize("model", [Loaded(), LanguageModel, None, {"name": "tiny"}, 3])
@pytest.mark.parametrize(
    ("key", "construct"),
    [
        ("model", lambda model: GRPO(model, exact_match)),
        ("model", SFT),
        ("model", RewardModeling),
        ("algo.teacher", lambda model: GKD("tiny", teacher=model)),
        ("algo.critic.model", lambda model: SeparateCritic(model)),
    ],
)
def test_a_model_object_is_refused_when_a_module_is_made(key, construct, model):
    if model is None and key == "algo.critic.model":
        return  # a copy of the policy
    came = getattr(model, "__name__", type(model).__name__)
    with pytest.raises(ConfigError, match=rf"^{key} is .*{came}.*LanguageModel\(") as error:
        construct(model)
    told = "no language model" if key == "model" else "save_pretrained"
    assert (told in str(error.value)) == isinstance(model, Loaded)


def test_a_mistyped_folder_gets_a_suggestion(make_model):
    folder = make_model(folder="my-policy")
    with pytest.raises(ConfigError, match="'my-policy'"):
        LanguageModel(str(folder.with_name("my-polcy")))


def test_a_pinned_commit_makes_remote_code_possible():
    assert LanguageModel("x/y", trust_remote_code=True, revision="0123456789abcdef" * 2 + "01234567").revision


def edit(folder: Path, **changes) -> str:
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"architectures": ["Qwen2ForSequenceClassification"]}, "Qwen2ForSequenceClassification; a causal"),
        ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}, "encoder-decoder"),
        ({"architectures": ["Qwen2AudioForConditionalGeneration"], "model_type": "qwen2_audio"}, "sound"),
        ({"architectures": ["ViTForImageClassification"], "model_type": "vit"}, "a causal"),
        ({"model_type": "unheard-of"}, "unheard-of"),
    ],
)
def test_what_is_no_causal_language_model_is_refused(make_model, changes, message):
    with pytest.raises(ConfigError, match=message):
        LanguageModel(edit(make_model(), **changes)).load()


def test_code_that_comes_with_a_model_is_not_run(make_model):
    folder = make_model()
    canary = folder / "ran"
    (folder / "code.py").write_text(f"open({str(canary)!r}, 'w').close()\nclass Config: pass\n")
    with pytest.raises(ConfigError, match=r"Such code can do anything.*model\.trust_remote_code"):
        LanguageModel(edit(folder, model_type="new", auto_map={"AutoConfig": "code.Config"})).load()
    assert not canary.exists()


def test_overrides_of_the_config_reach_the_config_and_the_weights(make_model):
    model = LanguageModel(str(make_model()), init_kwargs={"max_position_embeddings": 64, "attention_dropout": 0.5})
    assert model.context_length == 64
    assert model.load().config.attention_dropout == 0.5


def test_an_override_that_the_model_does_not_know_is_refused_before_weights_are_read(make_model):
    model = LanguageModel(str(make_model()), init_kwargs={"max_positon_embeddings": 64})
    with pytest.raises(ConfigError, match=r"init_kwargs\.max_positon_embeddings is no field"):
        _ = model.config
    with pytest.raises(ConfigError, match="Did you mean 'max_position_embeddings'"):
        _ = model.context_length
    assert LanguageModel(str(make_model()), init_kwargs={"low_cpu_mem_usage": True}).load()


def test_quantisation_without_its_package_tells_how_to_install_it(make_model, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BackendError, match=r"pip install 'lit-rl\[quant\]'"):
        LanguageModel(str(make_model()), quantization="nf4", lora=Lora()).load()


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
BROKEN = {
    "config cut": ("config.json", "{", StorageError, r"config\.json is damaged.*no JSON object.*Fetch it again"),
    "config of wrong types": (
        "config.json",
        '{"model_type": "qwen2", "hidden_size": "big"}',
        ConfigError,
        "'hidden_size'",
    ),
    "tokenizer cut": ("tokenizer.json", '{"version', StorageError, r"tokenizer\.json is damaged"),
    "tokenizer of git": ("tokenizer.json", POINTER, StorageError, r"tokenizer\.json .*run `git lfs pull`"),
    "settings as a list": ("tokenizer_config.json", "[1]", StorageError, r"tokenizer_config\.json is damaged"),
    "an end that is text": ("generation_config.json", '{"eos_token_id": "x"}', ConfigError, "eos_token_id is 'x'"),
    "weights of git": ("model.safetensors", POINTER, StorageError, r"model\.safetensors .*run `git lfs pull`"),
}


@pytest.mark.parametrize("file, content, error, message", BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_named(make_model, file, content, error, message):
    folder = make_model()
    (folder / file).write_text(content)
    model = LanguageModel(str(folder))
    with pytest.raises(error, match=message):
        _ = model.config, model.tokenizer, model.load()


@pytest.mark.parametrize(
    "files, message",
    [
        (
            ["adapter_config.json", "adapter_model.safetensors"],
            r"is an adapter: set model\.adapter='.*', and model\.name",
        ),
        (["model-q4.gguf"], "holds GGUF, made for inference"),
        (["notes.txt"], r"holds no config\.json; it holds notes\.txt"),
        ([], r"holds no config\.json; it holds nothing"),
        (
            ["config.yaml"],
            r"is the folder of a run\. Its model is model\.name=.*/hf; `lit-rl export run_dir=.*` makes it",
        ),
        (["config.yaml", "hf/config.json"], r"is the folder of a run\. Its model is model\.name=.*/hf\.$"),
    ],
    ids=["adapter", "gguf", "other", "empty", "run", "exported"],
)
def test_a_folder_that_is_no_model_says_what_it_is(tmp_path, files, message):
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("{}")
    for part in ("tokenizer", "config"):
        with pytest.raises(ConfigError, match=message):
            getattr(LanguageModel(str(tmp_path)), part)


def test_a_file_is_no_model(make_model):
    folder = make_model()
    (folder / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="is a file of GGUF, made for inference"):
        LanguageModel(str(folder / "model.gguf"))
    with pytest.raises(ConfigError, match=r"is a file\. Give the folder"):
        LanguageModel(str(folder / "config.json"))
    with pytest.raises(ConfigError, match=r"model\.adapter: .* holds a whole model, and no adapter"):
        LanguageModel(str(folder), adapter=str(folder)).load()
