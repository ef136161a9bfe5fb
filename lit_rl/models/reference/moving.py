"""References that follow the policy: an average of its weights, taken after optimizer steps.

Only what is trained moves: with adapters their two factors, each by itself, never the base. Averages are kept in
float32 where the weights are narrower: a step of an average is a small share of a small change, which bfloat16 rounds
away. Under FSDP2 every rank moves its own shards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lit_rl.errors import StorageError, in_range
from lit_rl.models.policy.shards import laid_out, local, stored_parameters, values_for, wide
from lit_rl.models.reference.base import Copy, OnCPU, Scorer

_AVERAGE, _INITIAL = "average", "initial"


class Moving(Copy, ABC):
    """An abstract copy of the policy whose trained parameters follow the policy's.

    Args:
        device: "cpu" keeps it on the CPU, with a whole copy of all weights; null places it like the policy.
    """

    moves: ClassVar[bool] = True

    def __init__(self, device: Literal["cpu"] | None = None) -> None:
        super().__init__(device)
        self._names: tuple[str, ...] = ()
        self._kept: dict[str, dict[str, Tensor]] = {_AVERAGE: {}, _INITIAL: {}}

    def module(self, policy: nn.Module) -> Scorer:
        self._names = tuple(name for name, parameter in policy.named_parameters() if parameter.requires_grad)
        self._kept = {_AVERAGE: {}, _INITIAL: {}}
        return super().module(policy)

    @abstractmethod
    def move(self, name: str, theirs: Tensor, ours: Tensor, step: int) -> None:
        """Move one parameter of ours towards the policy's of that name, after ``step`` optimizer steps."""

    def kept_copies(self, *, narrow: bool) -> int:
        """Return the number of float32 copies of the trained weights that are kept beside the module."""
        return int(narrow)

    def due(self, step: int) -> bool:
        """Tell whether the reference is updated at this step."""
        return True

    @torch.no_grad()
    def update(self, policy: nn.Module, module: Scorer | None, step: int) -> None:
        if not self.due(step):
            return
        ours, theirs = self._moving(module), stored_parameters(policy, self._names)
        for name, parameter in ours.items():
            self.move(name, theirs[name].detach(), parameter.detach(), step)

    def average(self, name: str, parameter: Tensor) -> Tensor:
        """Return the float32 tensor that accumulates: the parameter itself where it is that wide."""
        if parameter.dtype == wide(parameter.dtype):
            return parameter
        return self.keep(_AVERAGE, name, parameter)

    def keep(self, kind: str, name: str, value: Tensor) -> Tensor:
        """Return a float32 tensor that begins as ``value`` and is part of the state."""
        kept = self._kept[kind]
        if name not in kept:
            kept[name] = value.to(wide(value.dtype), copy=True)
        elif kept[name].device != value.device:  # loaded before the module was moved
            kept[name] = kept[name].to(value.device)
        return kept[name]

    @torch.no_grad()
    def state(self, module: Scorer | None) -> dict[str, Tensor]:
        """Return whole tensors on the CPU: the moved parameters by name, and averages as ``average/name``.

        A collective where the module is sharded: rank 0 gets the tensors, the other ranks an empty dict.
        """
        found = dict(self._moving(module))
        found |= {f"{kind}/{name}": tensor for kind, kept in self._kept.items() for name, tensor in kept.items()}
        sharded = any(isinstance(tensor, DTensor) for tensor in found.values())
        keep = not sharded or torch.distributed.get_rank() == 0
        state: dict[str, Tensor] = {}
        for name, tensor in found.items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if keep:
                state[name] = whole.detach().to("cpu", copy=True)
        return state

    @torch.no_grad()
    def load_state(self, module: Scorer | None, state: dict[str, Tensor]) -> None:
        """Load the state. Raise StorageError where it is of another model or of another kind of reference."""
        ours = self._moving(module)
        _check(state, ours, self._kept)
        self._kept = {_AVERAGE: {}, _INITIAL: {}}
        for key, whole in state.items():
            kind, _, name = key.rpartition("/")
            if kind:
                self._kept[kind][name] = laid_out(whole, ours[name])
            else:
                ours[name].copy_(laid_out(whole, ours[name]))

    def _moving(self, module: Scorer | None) -> dict[str, Tensor]:
        assert module is not None, f"{type(self).__name__} moves the module that it made"
        return stored_parameters(module.model if isinstance(module, OnCPU) else module, self._names)


class EMA(Moving):
    """The exponential moving average of the policy: after every step ``ref <- decay * ref + (1 - decay) * policy``.

    Args:
        decay: Share of the reference that is kept at a step, in [0, 1]; 1 never moves it, 0 is the policy itself.
        device: "cpu" keeps it on the CPU, with a whole copy of all weights; null places it like the policy.

    Raises:
        ConfigError: ``decay`` is outside its range.
    """

    def __init__(self, decay: float = 0.992, device: Literal["cpu"] | None = None) -> None:
        super().__init__(device)
        in_range("reference.decay", decay, low=0, high=1)
        self.decay = decay

    def move(self, name: str, theirs: Tensor, ours: Tensor, step: int) -> None:
        _mix(theirs, ours, self.average(name, ours), 1 - self.decay)


class Mixing(Moving):
    """TR-DPO's soft update (2404.09656): every n steps ``ref <- alpha * policy + (1 - alpha) * ref``.

    Args:
        alpha: Share of the policy, in [0, 1]; 1 replaces the reference (the paper's hard update).
        every: Optimizer steps between two updates, at least 1.
        device: "cpu" keeps it on the CPU, with a whole copy of all weights; null places it like the policy.

    Raises:
        ConfigError: a setting is outside its range.
    """

    def __init__(self, alpha: float = 0.6, every: int = 512, device: Literal["cpu"] | None = None) -> None:
        super().__init__(device)
        in_range("reference.alpha", alpha, low=0, high=1)
        in_range("reference.every", every, low=1)
        self.alpha, self.every = alpha, every

    def due(self, step: int) -> bool:
        return step % self.every == 0

    def move(self, name: str, theirs: Tensor, ours: Tensor, step: int) -> None:
        _mix(theirs, ours, self.average(name, ours), self.alpha)


class BEMA(Moving):
    """The bias-corrected average of the policy (2508.00180), which lags behind it less than an EMA does.

    With the policy theta_t after t optimizer steps, at every ``every``-th step after ``burn_in``::

        average <- (1 - beta_t) * average + beta_t * theta_t        beta_t  = (lag + multiplier * t) ** -ema_power
        ref     <- average + alpha_t * (theta_t - theta_0)          alpha_t = (lag + multiplier * t) ** -bias_power

    theta_0, and the average's first value, is the policy after ``burn_in`` steps. The paper's letters are kappa and eta
    for the powers, rho for the lag, gamma for the multiplier, phi for ``every`` and tau for the burn-in. Two float32
    copies of what is trained are kept beside the reference.

    Args:
        ema_power: How fast the weight beta of a new policy falls; 0 makes the average the policy itself.
        bias_power: How fast the weight alpha of the correction falls; a large one is a plain average.
        lag: Steps that the averaging pretends to have behind it at step 0, at least 1.
        multiplier: How much a step counts against the lag, at least 0.
        every: Optimizer steps between two updates, at least 1.
        burn_in: Optimizer steps before the averaging begins; the reference is the initial policy until then.
        device: "cpu" keeps it on the CPU, with a whole copy of all weights; null places it like the policy.

    Raises:
        ConfigError: a setting is outside its range.
    """

    def __init__(
        self,
        ema_power: float = 0.5,
        bias_power: float = 0.2,
        lag: float = 10.0,
        multiplier: float = 1.0,
        every: int = 400,
        burn_in: int = 0,
        device: Literal["cpu"] | None = None,
    ) -> None:
        super().__init__(device)
        in_range("reference.ema_power", ema_power, low=0)
        in_range("reference.bias_power", bias_power, low=0)
        in_range("reference.lag", lag, low=1)
        in_range("reference.multiplier", multiplier, low=0)
        in_range("reference.every", every, low=1)
        in_range("reference.burn_in", burn_in, low=0)
        self.ema_power, self.bias_power, self.lag, self.multiplier = ema_power, bias_power, lag, multiplier
        self.every, self.burn_in = every, burn_in

    def kept_copies(self, *, narrow: bool) -> int:
        return 2

    def due(self, step: int) -> bool:
        return step >= self.burn_in and (step - self.burn_in) % self.every == 0

    def move(self, name: str, theirs: Tensor, ours: Tensor, step: int) -> None:
        now = values_for(ours, theirs)
        if self.burn_in and name not in self._kept[_INITIAL]:
            # The first step that is due ends the burn-in: what is averaged begins here, and the reference stays.
            for kind in (_INITIAL, _AVERAGE):
                local(self.keep(kind, name, ours)).copy_(now)
            return
        # Without a burn-in the reference itself still is the policy of step 0 when it is first looked at.
        initial, average = (local(self.keep(kind, name, ours)) for kind in (_INITIAL, _AVERAGE))
        time = self.lag + self.multiplier * step
        average.lerp_(now, time**-self.ema_power)
        local(ours).copy_(average + time**-self.bias_power * (now - initial))


def _mix(theirs: Tensor, ours: Tensor, average: Tensor, weight: float) -> None:
    """Compute ``average + weight * (theirs - average)``, exact at 0 and at 1, and round it into ours."""
    local(average).lerp_(values_for(ours, theirs), weight)
    if average is not ours:
        local(ours).copy_(local(average))


def _check(state: dict[str, Tensor], ours: dict[str, Tensor], kinds: Iterable[str]) -> None:
    wrong = sorted(ours.keys() - state.keys())
    for key, tensor in state.items():
        kind, _, name = key.rpartition("/")
        if kind not in ("", *kinds) or name not in ours or tensor.shape != ours[name].shape:
            wrong.append(key)
    if wrong:
        raise StorageError(
            f"The checkpoint holds no reference of this kind and shape: {len(wrong)} tensors are missing, unexpected "
            f"or of other shapes ({', '.join(wrong[:5])}). Resume with the model and reference settings of the run's "
            "config.yaml."
        )
