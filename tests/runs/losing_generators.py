"""An engine that is lost once, where a test says."""

from __future__ import annotations

from copied_engines import CopiedPolicyGenerator

from lit_rl.core import ranks
from lit_rl.core.rollout import Completions, Prompts, Sampling
from lit_rl.generation.generator import EngineLost


class LosesWhatIsDrawnAhead(CopiedPolicyGenerator):
    """An engine that lags, and is lost on rank 1 while it draws with the weights of optimizer step 2."""

    def __init__(self) -> None:
        super().__init__(lag=1)

    def generate(self, prompts: Prompts, sampling: Sampling) -> Completions:
        if ranks.in_background_thread() and self._version == 2 and ranks.rank() == 1:
            raise EngineLost("the engine of one rank is gone")
        return super().generate(prompts, sampling)
