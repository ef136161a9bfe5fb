"""Models that score instead of writing: the trunk of a language model under a small head.

    SEQUENCES       one number a text, read at its last token      reward models
    TOKENS          two logits a token, "wrong" and "right"        process reward models
    RewardAdapter   one number a text, by an adapter and a head on the policy's own frozen base

Classifiers of texts with images are made for families of which transformers has none, as transformers makes its own
classifiers of decoders: `GenericForSequenceClassification` puts a head on a family's trunk, and gives the trunk every
input that it does not know itself, pixels among them.
"""

from __future__ import annotations

import copy
import inspect
import math
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from lit_rl.core.errors import ConfigError, StorageError
from lit_rl.core.examples import TokenBatch
from lit_rl.core.rollout import Completions
from lit_rl.models import hub_files, kernels
from lit_rl.models.forward import no_router_error
from lit_rl.models.forward_inputs import known_masks, text_inputs, trunk_inputs
from lit_rl.models.language_model import LanguageModel
from lit_rl.models.loaded_model import LoadedModel
from lit_rl.models.loading import (
    check_causal,
    let_gradients_through,
    quantization_config,
)
from lit_rl.models.merging import refuse_hidden_adapters
from lit_rl.models.modes import evaluation_mode
from lit_rl.models.trunk import base_of, frozen_trunk, recorded_outputs
from lit_rl.models.vision_parts import sees

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedConfig, PreTrainedModel


def register_classifier(config: PreTrainedConfig) -> None:
    """Let `AutoModelForSequenceClassification` make and load models of this config, if it is one over images.

    A model that was exported by `RewardModeling` is loaded outside of this package after the same call.
    """
    from transformers import AutoModelForImageTextToText, AutoModelForSequenceClassification
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping as renames_of
    from transformers.conversion_mapping import register_checkpoint_conversion_mapping
    from transformers.modeling_layers import GenericForSequenceClassification

    kind, writers = type(config), cast(Any, AutoModelForImageTextToText._model_mapping)
    if not sees(config) or kind in AutoModelForSequenceClassification._model_mapping or kind not in writers:
        return
    family = next(each for each in writers[kind].__mro__ if each.__name__.endswith("PreTrainedModel"))
    name = family.__name__.replace("PreTrainedModel", "ForSequenceClassification")
    made = type(name, (GenericForSequenceClassification, family), {"__module__": __name__})
    renamed = renames_of(writers[kind].__name__) or renames_of(config.model_type)
    if renamed:  # how older files of the family name its weights
        register_checkpoint_conversion_mapping(name, renamed, overwrite=True)
    AutoModelForSequenceClassification.register(kind, made, exist_ok=True)
    # exist_ok: else transformers passes over a class for a config of its own, without a word.


HEADS = ("score", "classifier")
"""Names of the head of a classifier in transformers."""


@dataclass(frozen=True)
class Scoring:
    """A kind of scoring model: its outputs, and its names in transformers, PEFT and on the hub."""

    auto: str
    """The class of transformers that loads it."""
    task_type: str
    """PEFT's task type."""
    pipeline: str
    """The hub's pipeline tag."""
    labels: tuple[str, ...]
    """The label of each output."""


SEQUENCES = Scoring("AutoModelForSequenceClassification", "SEQ_CLS", "text-classification", ("reward",))
# Two classes and not one logit, because that is what TRL 0.26 trained and what readers of such models expect.
TOKENS = Scoring("AutoModelForTokenClassification", "TOKEN_CLS", "token-classification", ("wrong", "right"))


def check_scoring(model: LanguageModel, scoring: Scoring) -> None:
    """Refuse, before any weight is loaded, what cannot be made into a scoring model.

    Raises:
        ConfigError: no causal language model, and no such classifier either; one over images that should score steps;
            transformers has no classifier for its family; a pad token that ends texts too; or a setting that is of
            language models only.
    """
    config = model.config
    if model.sees and scoring is not SEQUENCES:
        raise ConfigError(
            f"model.name={model.name!r} is a model over images, and scores of steps are learned from text alone."
        )
    classifier = _classifier_name(model, scoring)
    if not _is_classifier(config, classifier):
        check_causal(model.name, config)
    elif config.num_labels != len(scoring.labels):
        raise ConfigError(
            f"model.name={model.name!r} is a {classifier} with num_labels={config.num_labels}; to go on training it "
            f"must have {len(scoring.labels)}. Start from its language model instead."
        )
    if model.lm_head_fp32:
        raise ConfigError("model.lm_head_fp32 is of the head over the vocabulary, which a scoring model does not have.")
    end = model.tokenizer.eos_token_id
    if scoring is SEQUENCES and model.pad_id == end:
        unused = [token for token in model.tokenizer.all_special_tokens if token != model.tokenizer.eos_token]
        typed = shlex.quote(f"model.pad_token={unused[0]}") if unused else ""
        raise ConfigError(
            f"The tokenizer of {model.name!r} pads with {model.tokenizer.pad_token!r}, its EOS, and a sequence "
            "classifier reads the score at the last token that is not the pad: it would step over the end of the text. "
            f"Set model.pad_token to a token that ends no text{f', such as {typed}' if unused else ''}."
        )


def load_scoring(model: LanguageModel, scoring: Scoring) -> PreTrainedModel | PeftModel:
    """Load the model on the CPU, in train mode, with a fresh head drawn by torch's own generator at its seed.

    A classifier of the same kind keeps its head and goes on from it. With LoRA the head is trained in full beside the
    adapters. A fresh token classifier has no dropout before its head, whatever transformers' default is.

    Raises:
        ConfigError: see `check_scoring`; or an adapter that is of another kind.
        StorageError, BackendError: as `LanguageModel.load`.
    """
    check_scoring(model, scoring)
    if model.use_liger_kernel:
        kernels.check_liger(model.name, model.config)
    if model.adapter is not None:
        _check_adapter(model.adapter, scoring)
    given = isinstance(model, LoadedModel)
    base = _given_scorer(model, scoring) if given else load_scoring_base(model, scoring)
    return model.prepared(base, scoring.task_type, head=[head_name(base)])


def _given_scorer(model: LoadedModel, scoring: Scoring) -> PreTrainedModel:
    """Return a classifier that is loaded already, with its head. Its config gets the pad token: it looks for the last
    other.

    Raises:
        ConfigError: it is no such classifier, or its head is quantised.
    """
    base = base_of(model.given)
    if not _is_classifier(model.config, _classifier_name(model, scoring)):
        raise ConfigError(
            f"model is a {type(base).__name__} that is loaded already, and a {scoring.auto} is trained here: give one "
            f"with num_labels={len(scoring.labels)}, or the folder or hub id of the language model to start from."
        )
    name = head_name(base)
    if not all(p.is_floating_point() for p in getattr(base, name).parameters()):
        raise ConfigError(
            f"model is a {type(base).__name__} whose head, {name}, is quantised, and it is trained: load it with "
            f"BitsAndBytesConfig(..., llm_int8_skip_modules=[{name!r}]), which is of 4 bits too."
        )
    for part in (base.config, base.config.get_text_config()):
        part.pad_token_id = model.pad_id
    return model.load_base()


def load_scoring_base(model: LanguageModel, scoring: Scoring) -> PreTrainedModel:
    """Load the model without adapters; every weight but a fresh head's is checked to have come from the files."""
    import transformers

    found, kwargs = model.config_and_kwargs
    classifier = _classifier_name(model, scoring)
    fresh = not _is_classifier(found, classifier)
    hub_files.refuse_pickle("model.name", model.path, "")
    if model.attn_implementation is not None:
        kwargs = {**kwargs, "attn_implementation": model.attn_implementation}
    if model.quantization is not None:
        quantized = quantization_config(model.quantization)
        quantized.llm_int8_skip_modules = list(HEADS)  # for 4 bits too, whatever the name says
        kwargs = {**kwargs, "quantization_config": quantized}
    with hub_files.reading("model.name", model.name, model.path), _without_report():
        loaded: Any = getattr(transformers, scoring.auto).from_pretrained(
            model.path,
            config=scoring_config(model, found, scoring),
            dtype=model.dtype,
            revision=model.revision,
            trust_remote_code=model.trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
            **kwargs,
        )
    base, info = loaded
    missing = sorted(name for name in info["missing_keys"] if not (fresh and name.partition(".")[0] in HEADS))
    if missing:
        raise StorageError(
            f"model.name={model.name!r}: its files lack {len(missing)} weights ({', '.join(missing[:5])}), which "
            "transformers filled with random numbers. Fetch the model again, or check that config.json belongs to it."
        )
    refuse_hidden_adapters(base, f"model.name={model.name!r}")
    if model.quantization is not None:
        let_gradients_through(base)
    if fresh:
        _draw_on_the_cpu(base, getattr(base, head_name(base)))
    return base


@torch.no_grad()
def _draw_on_the_cpu(base: PreTrainedModel, head: nn.Module) -> None:
    """Draw a fresh head anew where transformers has drawn it on another device: one seed means one head."""
    device = next(head.parameters()).device
    if device.type == "cpu":
        return
    head.to("cpu")
    parts: list[Any] = [*head.modules(), *head.parameters()]
    for part in parts:
        part._is_hf_initialized = False  # transformers draws nothing twice
    head.apply(base._initialize_weights)
    head.to(device)


def scoring_config(model: LanguageModel, found: PreTrainedConfig, scoring: Scoring) -> PreTrainedConfig:
    """Return the config of the scoring model: labels, the ids of padding and EOS, and no dropout before a fresh
    head."""
    config = copy.deepcopy(found)
    config.id2label = dict(enumerate(scoring.labels))  # num_labels follows from it
    config.label2id = {label: i for i, label in enumerate(scoring.labels)}
    for part in (config, config.get_text_config()):
        part.pad_token_id = model.pad_id
    if not _is_classifier(found, _classifier_name(model, scoring)):
        config.classifier_dropout = 0.0
    return config


def is_scoring(model: LanguageModel, scoring: Scoring) -> bool:
    """Tell whether its files are those of such a classifier, and not of a language model."""
    import transformers

    if scoring is SEQUENCES:
        register_classifier(model.config)
    known = getattr(transformers, scoring.auto)._model_mapping
    return type(model.config) in known and _is_classifier(model.config, known[type(model.config)].__name__)


def head_name(base: Any) -> str:
    """Return the name of the head among the model's modules."""
    return next(name for name in HEADS if hasattr(base, name))


def _classifier_name(model: LanguageModel, scoring: Scoring) -> str:
    """Return the class of transformers for a model of this family.

    Raises:
        ConfigError: there is none.
    """
    import transformers

    if scoring is SEQUENCES:
        register_classifier(model.config)
    mapping = getattr(transformers, scoring.auto)._model_mapping
    if type(model.config) not in mapping:
        raise ConfigError(
            f"model.name={model.name!r}: transformers has no {scoring.auto} for {model.config.model_type}. Take a "
            "model of another family, such as Qwen, Llama or Gemma."
        )
    return mapping[type(model.config)].__name__


def _is_classifier(config: PreTrainedConfig, classifier: str) -> bool:
    return classifier in (config.architectures or [])


def _check_adapter(adapter: str, scoring: Scoring) -> None:
    from peft import PeftConfig

    path = hub_files.resolve("model.adapter", adapter)
    with hub_files.reading("model.adapter", adapter, path):
        task_type = PeftConfig.from_pretrained(path).task_type
    if task_type != scoring.task_type:
        raise ConfigError(
            f"model.adapter={adapter!r} was trained for {task_type}, and this method trains one for "
            f"{scoring.task_type}. To start from what a language model's adapter has learned, merge it into the model "
            "(every run of lit_rl exports the merged model as hf/) and give that as model.name, with a new model.lora."
        )


@contextmanager
def _without_report() -> Iterator[None]:
    """Silence transformers' warning about the missing head and the unused one: both are meant."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def scoring_logits(model: nn.Module, tokens: TokenBatch, *, router_aux: bool = False) -> tuple[Tensor, Tensor | None]:
    """Return float32 logits with gradient, `(b, labels)` of sequences or `(b, s, labels)` of tokens, and the router's
    loss.

    transformers' classifiers keep their trunk's router logits to themselves; the loss is made of these as the language
    model of the same family makes its own, so on equal weights both report the same number.

    Args:
        model: A sequence or token classifier; under PEFT with the adapter that is active.
        tokens: `b` rows, one text each.
        router_aux: Whether to compute the load-balancing loss of a mixture of experts (2101.03961, eq. 4 to 6): over
            the attended tokens and all layers, without its coefficient. A 0-dim tensor with gradient; None otherwise.

    Raises:
        ConfigError: the model has no router whose load could be balanced.
    """
    inputs: dict[str, Any] = {"input_ids": tokens.input_ids, "attention_mask": tokens.attention_mask.long()}
    if tokens.vision is not None:
        inputs |= text_inputs(model, tokens)
    if not router_aux:
        with known_masks(tokens.on_host.attention_mask):
            return model(**inputs, use_cache=False).logits.float(), None
    base = base_of(model)
    balance = _load_balancing(base)
    if balance is None:
        raise no_router_error(model)
    with recorded_outputs(base.base_model) as outputs, known_masks(tokens.on_host.attention_mask):
        logits = model(**inputs, use_cache=False, output_router_logits=True).logits.float()
    routed = getattr(outputs[-1], "router_logits", None)
    if not routed:
        raise no_router_error(model)
    return logits, balance(routed, inputs["attention_mask"])


def _load_balancing(base: Any) -> Callable[[Any, Tensor], Tensor] | None:
    """Return the load-balancing loss of the family's language model, from router logits and the attention mask; None:
    none.

    FSDP2 gives a model a class of its own, so the family's file is that of some class above it.
    """
    homes = (sys.modules[cls.__module__] for cls in type(base).__mro__)
    function = next((found for home in homes if (found := getattr(home, "load_balancing_loss_func", None))), None)
    if function is None:
        return None
    config = base.config.get_text_config()
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", 0)
    known = {"num_experts": experts, "top_k": config.num_experts_per_tok, "num_keys": math.isqrt(experts)}
    settings = {name: value for name, value in known.items() if name in inspect.signature(function).parameters}
    return lambda routed, mask: function(routed, **settings, attention_mask=mask)


@dataclass(frozen=True)
class RewardAdapter:
    """A trained LoRA adapter and score head on the same base model as the policy, as one more frozen adapter.

    It reads the policy's own tokens, so it must have been trained with the policy's chat template.

    Args:
        path: A PEFT sequence-classification adapter with one label: a folder or a hub id.
    """

    path: str

    def check(self, model: LanguageModel) -> None:
        """Raise ConfigError where the policy has no frozen base."""
        if model.lora is None and model.adapter is None:
            raise ConfigError(
                f"The reward adapter {self.path!r} scores on the policy's frozen base, but every weight of this policy "
                "is trained. Set model.lora or model.adapter, or load the reward model by itself."
            )

    def module(self, policy: nn.Module) -> nn.Module:
        """Return the frozen module to register beside the policy: before a checkpoint is restored, and before sharding.

        Raises:
            ConfigError: the policy has no frozen base, or the adapter is no sequence classifier with one label.
            StorageError: the adapter's weights are pickled, missing, or of another base model.
        """
        key, path = "The reward adapter", hub_files.resolve("The reward adapter", self.path)
        trunk = frozen_trunk(policy, f"{key} {self.path!r}")
        hub_files.refuse_pickle(key, path, "adapter_model")
        with hub_files.reading(key, self.path, path):
            return (
                _RewardModel(_load_adapter(self.path, path, _empty_classifier(policy, trunk)))
                .eval()
                .requires_grad_(False)
            )

    @torch.no_grad()
    def rewards(self, policy: nn.Module, module: nn.Module, completions: Completions) -> Tensor:
        """Return float32 ``(b,)``: the score at the last token of each response, without dropout."""
        with evaluation_mode(module):
            return module(**trunk_inputs(policy, completions))


class _RewardModel(nn.Module):
    """A classifier that scores at each row's last attended token.

    Transformers' own classifier looks for the last token that is not the pad token instead, and would step over an EOS
    that serves as pad.
    """

    def __init__(self, classifier: PeftModel) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, **inputs: Tensor) -> Tensor:
        model = base_of(self.classifier)
        hidden = model.base_model(**inputs, use_cache=False).last_hidden_state
        mask = inputs["attention_mask"]
        last = mask.shape[1] - 1 - mask.flip(1).argmax(1)
        return (
            getattr(model, head_name(model))(hidden[torch.arange(len(mask), device=mask.device), last])
            .squeeze(-1)
            .float()
        )


def _empty_classifier(policy: nn.Module, trunk: nn.Module) -> Any:
    """Return a sequence classifier of the policy's family around ``trunk``, with an empty head."""
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoModelForSequenceClassification

    config = copy.deepcopy(base_of(policy).config)
    register_classifier(config)
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ConfigError(f"transformers has no sequence classifier for {config.model_type}, so no reward adapter.")
    config.num_labels = 1
    with torch.device("meta"):
        classifier: Any = AutoModelForSequenceClassification.from_config(config)
    setattr(classifier, classifier.base_model_prefix, trunk)
    head = getattr(classifier, head_name(classifier)).to_empty(device="cpu").to(next(trunk.parameters()).dtype)
    nn.init.zeros_(head.get_parameter("weight"))  # never used: the adapter brings its own
    return classifier


def _load_adapter(name: str, path: str, classifier: Any) -> PeftModel:
    from peft import PeftConfig, PeftModel, PeftType, get_peft_model_state_dict
    from peft.utils import load_peft_weights

    config = PeftConfig.from_pretrained(path)
    if config.peft_type != PeftType.LORA or config.task_type != "SEQ_CLS":
        raise ConfigError(
            f"{name!r} is a {config.peft_type} adapter for {config.task_type}: a reward adapter is a LoRA adapter for "
            "SEQ_CLS, sequence classification."
        )
    stored = load_peft_weights(path, device="cpu")
    for key, tensor in stored.items():
        if key.rpartition(".")[0].endswith(HEADS) and tensor.shape[0] != 1:
            raise ConfigError(f"{name!r} has {tensor.shape[0]} labels: a reward adapter has one.")
    try:
        loaded = PeftModel.from_pretrained(classifier, path, is_trainable=False)
    except (RuntimeError, ValueError) as error:
        raise StorageError(f"The reward adapter {name!r} does not fit the policy's base: {error}") from error
    wanted = get_peft_model_state_dict(loaded, save_embedding_layers=False).keys()
    if wrong := sorted(wanted ^ stored.keys()):
        raise StorageError(
            f"The reward adapter {name!r} does not fit the policy's base: {len(wrong)} weights are on one side only "
            f"({', '.join(wrong[:5])}). Was it trained on another base model?"
        )
    return loaded
