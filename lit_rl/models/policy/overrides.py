"""Fields of a model's config that a user overrides when it is loaded: one that no such model has is refused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from lit_rl.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def check_overrides(
    key: str,
    names: Iterable[str],
    config: PreTrainedConfig,
    model: str,
    *,
    beside: Sequence[str],
    elsewhere: Iterable[str] = (),
) -> None:
    """Refuse what no model of this kind knows, and transformers would give its constructor.

    Args:
        key: Where the names stand: "init_kwargs".
        names: The user's.
        config: Of the model as its files have it.
        model: Its name.
        beside: Arguments of `from_pretrained` that are taken too.
        elsewhere: Fields that are set by other keys, and are not hinted at.

    Raises:
        ConfigError: a name is no field of the config and not in ``beside``.
    """
    hidden = set(elsewhere)
    fields = sorted(field for field in config.to_dict() if not field.startswith("_") and field not in hidden)
    for name in names:
        if name not in fields and name not in beside:
            raise ConfigError(
                f"{key}.{name} is no field of the config of {model!r} (a {config.model_type}), nor one of "
                f"{', '.join(beside)}.{did_you_mean(name, (*fields, *beside))}"
            )
