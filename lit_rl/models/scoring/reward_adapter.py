"""A reward model that is an adapter: it scores on the policy's frozen base, and costs an adapter of memory."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lit_rl.errors import ConfigError, StorageError
from lit_rl.models.policy import hub
from lit_rl.models.policy.language_model import LanguageModel
from lit_rl.models.policy.modes import evaluation_mode
from lit_rl.models.policy.positions import trunk_inputs
from lit_rl.models.policy.trunk import base_of, frozen_trunk
from lit_rl.models.scoring.vision_classifier import register_classifier
from lit_rl.rollout import Completions

if TYPE_CHECKING:
    from peft import PeftModel

_HEADS = ("score", "classifier")
"""Names of the head of a sequence classifier in transformers."""


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
        key, path = "The reward adapter", hub.resolve("The reward adapter", self.path)
        trunk = frozen_trunk(policy, f"{key} {self.path!r}")
        hub.refuse_pickle(key, path, "adapter_model")
        with hub.reading(key, self.path, path):
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
        return _score_head(model)(hidden[torch.arange(len(mask), device=mask.device), last]).squeeze(-1).float()


def _score_head(classifier: Any) -> nn.Module:
    return next(getattr(classifier, name) for name in _HEADS if hasattr(classifier, name))


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
    head = _score_head(classifier).to_empty(device="cpu").to(next(trunk.parameters()).dtype)
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
        if key.rpartition(".")[0].endswith(_HEADS) and tensor.shape[0] != 1:
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
