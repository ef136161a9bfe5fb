"""vLLM in this process, beside the policy: `generator=vllm`."""

from __future__ import annotations

import tempfile
from typing import Any, Literal

from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from lit_rl.errors import ConfigError, one_of
from lit_rl.generation import ranks
from lit_rl.generation.vllm import settings as vllm_settings
from lit_rl.generation.vllm.engine import Engine
from lit_rl.generation.vllm.generator import EngineGenerator
from lit_rl.generation.vllm.in_process_engine import InProcessEngine
from lit_rl.generation.vllm.model_files import write_model_files
from lit_rl.generation.vllm.work import Completing, Work
from lit_rl.models.policy.device import device_of
from lit_rl.vllm_package import require_vllm


class VLLMGenerator(EngineGenerator):
    """vLLM in this process, an engine on every rank.

    The engine is built at the first `sync`, after the strategy was set up: building it is a collective. It loads no
    weights from the disk; the policy's are sent.

    Args:
        sleep: Give the engine's memory back to the training between rollouts: "auto" does so on a GPU (a CPU's is not
            freed by it), or "always" or "never".
        shared: Arguments of `EngineGenerator`.

    Raises:
        ConfigError: a setting out of range.
        BackendError: vLLM is not installed.
    """

    def __init__(self, *, sleep: Literal["auto", "always", "never"] = "auto", **shared: Any) -> None:
        super().__init__(**shared)
        one_of("generator.sleep", sleep, ("auto", "always", "never"))
        self.sleep = sleep
        require_vllm("generator=vllm")
        if sleep == "always" and vllm_settings.runs_on_cpu():
            rank_zero_warn("generator.sleep=always: vLLM on a CPU ignores it, and frees no memory.")

    _OF_THE_ENGINE = (*EngineGenerator._OF_THE_ENGINE, "_asleep")

    def _forget(self) -> None:
        super()._forget()
        self._asleep = False

    def _start(self, policy: nn.Module) -> Engine:
        settings = self.settings_for(policy)
        if ranks.world_size() % settings.tensor_parallel_size:
            raise ConfigError(
                f"generator.tensor_parallel_size={settings.tensor_parallel_size} does not divide the "
                f"{ranks.world_size()} ranks of the run, which share engines: take a divisor, or generator=vllm_server."
            )
        sleeps = self.sleep == "always" or (self.sleep == "auto" and not vllm_settings.runs_on_cpu())
        self.sleeps = sleeps
        with tempfile.TemporaryDirectory(prefix="lit_rl_model_") as folder:
            write_model_files(policy, self.model, folder)
            how = {"sleeps": sleeps, "trust_remote_code": self.model.trust_remote_code}
            return InProcessEngine(folder, settings, device=device_of(policy), **how)

    def check_converses(self) -> None:
        self.check_asked_alone()

    def check_asked_alone(self) -> None:
        size = self.settings.tensor_parallel_size
        if size > 1:
            raise ConfigError(
                f"generator=vllm with generator.tensor_parallel_size={size} does not go with env=: ranks that share an "
                "engine go through the same requests in step. Take generator=vllm_server, or an engine a rank."
            )

    def _run(self, work: Work) -> None:
        """Do the work; ranks that share an engine send it the prompts of all of them, and keep their own answers."""
        size = self.settings.tensor_parallel_size
        if size == 1:
            return super()._run(work)
        first = ranks.rank() // size * size
        mine = [request for _, request in work.requests(wait=False)]
        of_group = ranks.gather_objects(mine)[first : first + size]
        whole = Completing([request for theirs in of_group for request in theirs])
        super()._run(whole)
        start = sum(map(len, of_group[: ranks.rank() - first]))
        for number, answers in enumerate(whole.answers[start : start + len(mine)]):
            work.done(number, answers)

    # ------------------------------------------------------------------ sleep

    @property
    def share_of_device(self) -> float:
        if vllm_settings.runs_on_cpu() or self.sleep != "never":
            return 0.0
        return self.settings.gpu_memory_utilization

    def sync(self, policy: nn.Module, version: int) -> None:
        if self._asleep and self.engine is not None:
            engine = self.engine
            ranks.together(lambda: engine.wake("weights"))
            self._pushed = None  # nothing of them was kept
            self._sender.forget()
        super().sync(policy, version)

    def _push(self, policy: nn.Module, version: int) -> None:
        super()._push(policy, version)
        if self._asleep and self.engine is not None:
            engine = self.engine
            ranks.together(lambda: engine.wake("kv_cache"))
            self._asleep = False

    def rest(self) -> None:
        """Give the engine's memory to the training until the next sync."""
        if self.engine is not None and self.sleeps and not self._asleep:
            self.engine.sleep()
            self._asleep = True
