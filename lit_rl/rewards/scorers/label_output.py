"""Which of the numbers of a sequence classifier is the reward, and on which scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor

from lit_rl.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

OUTPUTS = ("logit", "probability", "log_probability")


def label_index(config: PreTrainedConfig, label: int | str | None, name: str) -> int:
    """Return the column of the logits.

    Args:
        config: Of the classifier.
        label: Its number, or its name in `id2label`; None where there is one only.
        name: Of the model, for messages.

    Raises:
        ConfigError: no label is named and there are several, or there is no such label.
    """
    names: dict[int, str] = {int(index): text for index, text in (config.id2label or {}).items()}
    count: int = config.num_labels  # pyright: ignore[reportAssignmentType]  # transformers makes it of id2label
    told = ", ".join(f"{index} ({names.get(index, index)})" for index in range(count))
    if label is None:
        if count == 1:
            return 0
        raise ConfigError(
            f"name={name!r} is a classifier with num_labels={count}, and a reward is one number. Set label to the one "
            f"that is the reward: {told}. Or take a model that was trained with num_labels=1."
        )
    if isinstance(label, str):
        found = [index for index, text in names.items() if text == label]
        if len(found) != 1:
            near = did_you_mean(label, list(names.values()))
            raise ConfigError(f"label={label!r} is no label of {name!r}, or several: allowed is {told}.{near}")
        return found[0]
    if isinstance(label, bool) or not 0 <= label < count:
        raise ConfigError(f"label={label!r} is no label of {name!r}: allowed is {told}.")
    return label


def scale_of(config: PreTrainedConfig, output: str) -> Callable[[Tensor], Tensor]:
    """Return the function from logits `(b, labels)` to the scale that `output` names, of the same shape.

    One label alone, and each where a text may have several (`problem_type=multi_label_classification`), has the
    probability sigmoid(logit); otherwise labels exclude each other, and it is a softmax.
    """
    if output == "logit":
        return lambda logits: logits
    alone = config.num_labels == 1 or config.problem_type == "multi_label_classification"
    logs: Any = F.logsigmoid if alone else lambda logits: F.log_softmax(logits, dim=-1)
    return logs if output == "log_probability" else lambda logits: logs(logits).exp()
