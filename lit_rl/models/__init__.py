"""Models: load a policy and what its KL is measured against, score with it, shard it, export it."""

from lit_rl.models.adapters import Lora
from lit_rl.models.language_model import LanguageModel

__all__ = ["LanguageModel", "Lora"]
