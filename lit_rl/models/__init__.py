"""Models: policies, references, critics and scoring models; their loading, passes, sharding and export."""

from lit_rl.models.adapters import Lora
from lit_rl.models.language_model import LanguageModel

__all__ = ["LanguageModel", "Lora"]
