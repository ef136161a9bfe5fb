"""A generator that fails once, where a test says."""

from __future__ import annotations

import os

from lit_rl.errors import GenerationError
from lit_rl.generation.native import NativeGenerator
from lit_rl.rollout import Completions, Prompts, Sampling


class FailsAt(NativeGenerator):
    """Fails at its `call`-th request (from 0) with the weights of optimizer step `step`.

    In processes of their own, `FAILS_AT_STEP` is the step, and `FAILS_ON_RANK` the only rank that fails.
    """

    step, call = int(os.environ.get("FAILS_AT_STEP", "-1")), 0
    rank = os.environ.get("FAILS_ON_RANK", "")
    asked = 0

    def generate(self, prompts: Prompts, sampling: Sampling) -> Completions:
        if self._version == self.step and self.rank in ("", os.environ.get("LOCAL_RANK", "0")):
            if self.asked == self.call:
                raise GenerationError("the engine died: its last words")
            self.asked += 1
        return super().generate(prompts, sampling)
