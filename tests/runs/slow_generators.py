"""Generators of which a rollout lasts for minutes, where a test says."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from signalling_rewards import say_when_and_send
from torch import Tensor, nn

from lit_rl.core.interrupts import Interrupted
from lit_rl.generation.generator import Decoded
from lit_rl.generation.native import NativeGenerator


class SlowNative(NativeGenerator):
    """Half a minute a token with the weights of optimizer step `SLOW_AT`. A second after it has begun, it leaves
    `met_<rank>` in the folder `MET`, or sends the process a signal where there is none."""

    def _decode(self, policy: nn.Module, *asked: Any) -> Iterator[tuple[Tensor, Decoded]]:
        decoded = super()._decode(policy, *asked)
        if self._version != int(os.environ.get("SLOW_AT", "-1")):
            yield from decoded
            return
        threading.Timer(1.0, _say_that_it_has_begun).start()
        hook = policy.register_forward_pre_hook(lambda *_: time.sleep(30))
        try:
            yield from decoded
        finally:
            hook.remove()


class Stubborn(NativeGenerator):
    """Takes the weights of optimizer step `SLOW_AT` for two minutes, whoever asks it to give that up."""

    def sync(self, policy: nn.Module, version: int) -> None:
        super().sync(policy, version)
        until = time.monotonic() + (120 if version == int(os.environ.get("SLOW_AT", "-1")) else 0)
        if time.monotonic() < until:
            _say_that_it_has_begun()
        while time.monotonic() < until:
            with contextlib.suppress(Interrupted):
                time.sleep(0.5)


def _say_that_it_has_begun() -> None:
    if "MET" in os.environ:
        Path(os.environ["MET"], f"met_{os.environ.get('LOCAL_RANK') or os.environ.get('SLURM_LOCALID')}").touch()
    else:
        say_when_and_send(os.getpid())
