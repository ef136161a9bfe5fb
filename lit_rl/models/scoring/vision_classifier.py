"""Classifiers of texts with images, for families of which transformers has none.

They are made as transformers makes its own classifiers of decoders: `GenericForSequenceClassification` puts a head on a
family's trunk, and gives the trunk every input that it does not know itself, pixels among them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from lit_rl.models.policy.vision_parts import sees

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


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
