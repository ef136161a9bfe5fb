"""A model that scores instead of writing: the trunk of a language model under a small fresh head.

SEQUENCES   one number a text, read at its last token      reward models
TOKENS      two logits a token, "wrong" and "right"        process reward models
"""

from __future__ import annotations

import copy
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lit_rl.errors import ConfigError, StorageError
from lit_rl.models.policy import hub, liger
from lit_rl.models.policy.checkpointing import set_checkpointing
from lit_rl.models.policy.compiled_pieces import compile_pieces
from lit_rl.models.policy.language_model import LanguageModel
from lit_rl.models.policy.loaded import LoadedModel
from lit_rl.models.policy.loading import (
    check_causal,
    continue_adapter,
    disable_dropout,
    let_gradients_through,
    quantization_config,
)
from lit_rl.models.policy.pieces import refuse_hidden_adapters
from lit_rl.models.policy.trunk import base_of
from lit_rl.models.policy.vision_parts import freeze
from lit_rl.models.scoring.vision_classifier import register_classifier

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedConfig, PreTrainedModel

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
    if isinstance(model, LoadedModel):
        return _given_scorer(model, scoring)
    if model.use_liger_kernel:
        liger.check(model.name, model.config)
    if model.adapter is not None:
        _check_adapter(model.adapter, scoring)
    base = load_scoring_base(model, scoring)
    if model.disable_dropout:
        disable_dropout(base)
    if model.use_liger_kernel:
        liger.use_kernels(base)
    if model.compile:
        compile_pieces(base)
    scorer: PreTrainedModel | PeftModel = base
    if model.lora is not None:
        scorer = model.lora.apply(base, scoring.task_type, head=[head_name(base)], frozen=model.frozen_parts)
    elif model.adapter is not None:
        scorer = continue_adapter(base, model.adapter)
    elif model.sees:
        freeze(base, model.frozen_parts)
    set_checkpointing(base, model.checkpointing)
    return scorer.train()


def _given_scorer(model: LoadedModel, scoring: Scoring) -> PreTrainedModel | PeftModel:
    """Return a classifier that is loaded already, with its head. Its config gets the pad token: it looks for the last
    other.

    Raises:
        ConfigError: it is no such classifier.
    """
    base = base_of(model.given)
    if not _is_classifier(model.config, _classifier_name(model, scoring)):
        raise ConfigError(
            f"model is a {type(base).__name__} that is loaded already, and a {scoring.auto} is trained here: give one "
            f"with num_labels={len(scoring.labels)}, or the folder or hub id of the language model to start from."
        )
    for part in (base.config, base.config.get_text_config()):
        part.pad_token_id = model.pad_id
    return model.prepared(scoring.task_type, head=(head_name(base),))


def load_scoring_base(model: LanguageModel, scoring: Scoring) -> PreTrainedModel:
    """Load the model without adapters; every weight but a fresh head's is checked to have come from the files."""
    import transformers

    found, kwargs = model.config_and_kwargs
    classifier = _classifier_name(model, scoring)
    fresh = not _is_classifier(found, classifier)
    hub.refuse_pickle("model.name", model.path, "")
    if model.attn_implementation is not None:
        kwargs = {**kwargs, "attn_implementation": model.attn_implementation}
    if model.quantization is not None:
        quantized = quantization_config(model.quantization)
        quantized.llm_int8_skip_modules = list(HEADS)  # for 4 bits too, whatever the name says
        kwargs = {**kwargs, "quantization_config": quantized}
    with hub.reading("model.name", model.name, model.path), _without_report():
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

    path = hub.resolve("model.adapter", adapter)
    with hub.reading("model.adapter", adapter, path):
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
