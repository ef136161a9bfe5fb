"""Weights that training could not move: half precision, in which the updates of post-training are rounded away.

Between neighbours of bfloat16 lies 1/256 to 1/128 of a weight, and AdamW moves a weight by about the learning rate:
after 10 steps at 1e-6 in bfloat16, 1.9 % of the weights of a policy had moved.
"""

from __future__ import annotations

from collections.abc import Mapping

from lightning.pytorch.strategies import DeepSpeedStrategy, Strategy
from torch import Tensor

from lit_rl.errors import ConfigError
from lit_rl.models.policy.language_model import LanguageModel

_LOST = "nearly every update of the weights would be rounded away without a word."
_MIXED = "trainer.precision=bf16-mixed, which computes in bfloat16 and keeps the weights in float32"


def settings_keep_float32(model: LanguageModel, precision: str, strategy: Strategy) -> None:
    """Refuse settings by which what is trained is narrower than float32, before anything is loaded.

    Raises:
        ConfigError: names the setting.
    """
    if isinstance(strategy, DeepSpeedStrategy):  # keeps float32 weights beside narrow ones
        return
    if precision in ("bf16-true", "16-true"):
        raise ConfigError(f"trainer.precision={precision}: {_LOST} Take {_MIXED}.")
    adapts = model.lora is not None or model.adapter is not None
    if model.dtype in ("bfloat16", "float16") and not adapts:
        raise ConfigError(
            f"model.dtype={model.dtype}: {_LOST} Take model.dtype=float32 with {_MIXED}; or train adapters, which are "
            "float32: model.lora.r=16."
        )


def weights_are_float32(trained: Mapping[str, Tensor], strategy: Strategy) -> None:
    """Refuse weights that are narrower than float32, once they are loaded.

    Args:
        trained: What gets gradients, by name.
        strategy: DeepSpeed keeps float32 weights beside narrow ones.

    Raises:
        ConfigError: names some of them.
    """
    narrow = {name: p.dtype for name, p in trained.items() if p.is_floating_point() and p.dtype.itemsize < 4}
    if not narrow or isinstance(strategy, DeepSpeedStrategy):
        return
    kinds = ", ".join(sorted({str(dtype).removeprefix("torch.") for dtype in narrow.values()}))
    names = ", ".join(list(narrow)[:3]) + (", ..." if len(narrow) > 3 else "")
    raise ConfigError(
        f"Weights to be trained are {kinds} ({names}): {_LOST} Take model.dtype=float32 and {_MIXED}. Adapters are "
        "float32 with every model.dtype, but a head or a critic that is trained beside them has the base's."
    )
