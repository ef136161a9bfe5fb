"""Generators that fail once, where a test says."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_rl.core.errors import GenerationError
from lit_rl.core.rollout import Completions, Prompts, Sampling
from lit_rl.generation.generator import Decoded
from lit_rl.generation.native import NativeGenerator


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


class FindsNoMemory(NativeGenerator):
    """Asks PyTorch for a pebibyte while it decodes with the weights of optimizer step `FAILS_AT_STEP`, by default those
    of the start; of several processes rank 1 does."""

    def _decode(self, policy: nn.Module, *asked: Any) -> Iterator[tuple[Tensor, Decoded]]:
        here = os.environ.get("LOCAL_RANK", "1") == "1"
        if here and self._version == int(os.environ.get("FAILS_AT_STEP", "0")):
            torch.empty(2**50, dtype=torch.uint8)
        return super()._decode(policy, *asked)


class Faulty(NativeGenerator):
    """At its third request, what `FAULT_<rank>` says: it raises what is no error of ours, dies, hangs, is stopped, or
    waits for the word of another rank. It leaves `met_<rank>` in the folder `MET` before."""

    asked = 0

    def generate(self, prompts: Prompts, sampling: Sampling) -> Completions:
        self.asked += 1
        rank = os.environ.get("LOCAL_RANK", "0")
        fault = os.environ.get(f"FAULT_{rank}") if self.asked == 3 else None
        if fault is not None:
            Path(os.environ["MET"], f"met_{rank}").touch()
        if fault == "raises":
            raise LookupError("the first words")
        if fault == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "is stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault == "waits":
            torch.distributed.recv(torch.zeros(1), src=0)
        if fault == "hangs":
            time.sleep(600)
        return super().generate(prompts, sampling)
