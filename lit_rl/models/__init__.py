"""Models: load a policy and what its KL is measured against, score with it, shard it, export it."""

from lit_rl.models.policy.language_model import LanguageModel
from lit_rl.models.policy.lora import Lora

__all__ = ["LanguageModel", "Lora"]
