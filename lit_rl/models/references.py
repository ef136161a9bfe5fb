"""References that the KL of an objective is measured against: the initial policy, an average of it, or another model.

A reference is used three times: at setup, for the module to hold beside the policy (if there is one); at every
scoring, for the module to call; and after every optimizer step, to follow the policy if it does. So an algorithm
needs no branch, and the KL is 0 at step 0 in every mode, unless another model is named.

References that move are an average of the policy's weights, taken after optimizer steps. Only what is trained moves:
with adapters their two factors, each by itself, never the base. Averages are kept in float32 where the weights are
narrower: a step of an average is a small share of a small change, which bfloat16 rounds away. Under FSDP2 every rank
moves its own shards.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lit_rl.core.declared_settings import checked
from lit_rl.core.errors import ConfigError, StorageError
from lit_rl.models import hub_files
from lit_rl.models.language_model import LanguageModel
from lit_rl.models.loading import (
    BanningHead,
    Float32Head,
    ban_placeholders,
    check_causal,
    continue_adapter,
    use_float32_head,
)
from lit_rl.models.modes import evaluation_mode
from lit_rl.models.sharding import at_least_float32, laid_out_like, local_shard, stored_parameters, values_for
from lit_rl.models.tokenizer import different_tokens, load_tokenizer
from lit_rl.models.trunk import shared_copy, trained_of_base, without_adapters
from lit_rl.ops.ranges import AtLeastOne, AtLeastZero, NotNegative, Portion, Range

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


class OnCPU:
    """A model that stays on the CPU and is called from any device: inputs go to it, logits come back.

    It is no `nn.Module`, so the module that holds it neither moves, shards nor saves it. Autocast is the caller's.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model.to("cpu")

    def __call__(self, **inputs: Any) -> Any:
        device = next(value.device for value in inputs.values() if isinstance(value, Tensor))
        with torch.autocast(
            "cpu",
            dtype=torch.get_autocast_dtype(device.type),
            enabled=torch.is_autocast_enabled(device.type),
        ):
            output = self.model(**move_data_to_device(inputs, torch.device("cpu")))
        output.logits = output.logits.to(device)
        return output

    @property
    def training(self) -> bool:
        return self.model.training

    def train(self, mode: bool = True) -> OnCPU:
        self.model.train(mode)
        return self

    def eval(self) -> OnCPU:
        return self.train(False)

    def modules(self) -> Iterator[nn.Module]:
        return self.model.modules()


Scorer = nn.Module | OnCPU
"""The module that computes a reference's logits: called like the policy."""


class Reference(Protocol):
    """The protocol. Call `module` on the initial policy: before a checkpoint is restored, and before sharding."""

    moves: ClassVar[bool]
    """True where it follows the policy, so that a checkpoint must hold its `state`."""

    def module(self, policy: nn.Module) -> Scorer | None:
        """Return the frozen module to hold. None where the policy itself serves.

        An `nn.Module` is to be registered, placed and sharded like the policy; an `OnCPU` is left where it is.
        """
        ...

    def scoring(self, policy: nn.Module, module: Scorer | None) -> AbstractContextManager[Scorer]:
        """Yield the module that computes the reference's logits. ``module`` is the result of `module`."""
        ...

    def update(self, policy: nn.Module, module: Scorer | None, step: int) -> None:
        """Follow the policy, after ``step`` optimizer steps. Every rank calls it after every step."""
        ...

    def state(self, module: Scorer | None) -> dict[str, Tensor]:
        """Return the moved tensors, for a checkpoint: whole, on the CPU. Every rank calls it."""
        ...

    def load_state(self, module: Scorer | None, state: dict[str, Tensor]) -> None:
        """Load the result of `state`."""
        ...


class Fixed:
    """The part of the protocol for a reference that never moves."""

    moves: ClassVar[bool] = False

    def update(self, policy: nn.Module, module: Scorer | None, step: int) -> None:
        """Do nothing: it never moves."""

    def state(self, module: Scorer | None) -> dict[str, Tensor]:
        return {}

    def load_state(self, module: Scorer | None, state: dict[str, Tensor]) -> None:
        """Do nothing: there is no state."""


@checked("reference")
class Held:
    """A second module, on the policy's device or on the CPU.

    Args:
        device: "cpu" keeps it on the CPU, with a whole copy of all weights; null places it like the policy.
    """

    def __init__(self, device: Literal["cpu"] | None = None) -> None:
        self.device: Literal["cpu"] | None = device

    def copied(self, policy: nn.Module) -> nn.Module:
        """Return a copy, which shares weights that nothing trains, unless it is to stay behind when the policy
        moves."""
        return shared_copy(policy) if self.device is None else copy.deepcopy(policy)

    def hold(self, model: nn.Module) -> Scorer:
        """Return the model frozen, and where it belongs."""
        model = model.eval().requires_grad_(False)
        return OnCPU(model) if self.device == "cpu" else model

    @contextmanager
    def scoring(self, policy: nn.Module, module: Scorer | None) -> Iterator[Scorer]:
        assert module is not None, f"{type(self).__name__} scores with the module that it made"
        module.eval()  # the module that holds it may have called train() on all its parts
        yield module


class Copy(Held):
    """A copy of the initial policy, adapters included. Weights that nothing trains are shared, not copied."""

    def module(self, policy: nn.Module) -> Scorer:
        return self.hold(self.copied(policy))


class FrozenCopy(Copy, Fixed):
    """A frozen copy of the initial policy, adapters included. Weights that nothing trains are shared, not copied.

    Args:
        device: "cpu" keeps it on the CPU, with a whole copy of all weights; null places it like the policy.
    """


class InitialAdapter(FrozenCopy):
    """A frozen copy of the initial adapter, over the policy's own base: for a policy that continues a trained adapter.

    `FrozenCopy` does the same where the policy has adapters. This one refuses a policy without, so it can never cost a
    second model. It stands beside the policy and not inside: the policy's adapters, flags and exports never know of it.
    Under FSDP2 the shared base is sharded once more.
    """

    def __init__(self) -> None:
        super().__init__()

    def module(self, policy: nn.Module) -> Scorer:
        """Return a frozen copy. Raise ConfigError for a policy without adapters."""
        return super().module(_require_peft(policy, "initial_adapter", "the adapters that it began with"))


class AdapterBase(Fixed):
    """The policy with its adapters switched off: no second model. It is the initial policy only for fresh adapters."""

    def module(self, policy: nn.Module) -> None:
        """Raise ConfigError for a policy without adapters, or with weights of its base that are trained too."""
        _require_peft(policy, "adapter_base", "itself without its adapters")
        if trained := trained_of_base(policy):
            raise ConfigError(
                "reference=adapter_base measures the policy's KL against itself without its adapters, and "
                f"{len(trained)} weights of its base are trained beside them ({', '.join(trained[:3])}): the reference "
                "would move with them. Use reference=frozen_copy."
            )

    @contextmanager
    def scoring(self, policy: nn.Module, module: Scorer | None) -> Iterator[Scorer]:
        adapted = _require_peft(policy, "adapter_base", "itself without its adapters")
        trained = [(parameter, parameter.requires_grad) for parameter in policy.parameters()]
        try:
            with evaluation_mode(policy), adapted.disable_adapter():
                yield policy
        finally:
            for parameter, flag in trained:  # switching adapters on again makes every part of them trainable
                parameter.requires_grad_(flag)


FROZEN_COPIES: dict[Literal["cpu"] | None, FrozenCopy] = {None: FrozenCopy(), "cpu": FrozenCopy("cpu")}
"""The two frozen copies, which hold nothing: `Auto` asks for one at every step."""


class Auto(Held, Fixed):
    """`AdapterBase` where the policy carries adapters that change nothing yet (``model.lora``), else `FrozenCopy`.

    A policy that continues a trained adapter (``model.adapter``) is measured against that adapter, not its base.

    Args:
        device: Where the frozen copy is held, if there is one: "cpu", or null for the policy's own device.
    """

    def module(self, policy: nn.Module) -> Scorer | None:
        return None if carries_fresh_adapter(policy) else FROZEN_COPIES[self.device].module(policy)

    @contextmanager
    def scoring(self, policy: nn.Module, module: Scorer | None) -> Iterator[Scorer]:
        reference: Reference = AdapterBase() if module is None else FROZEN_COPIES[self.device]
        with reference.scoring(policy, module) as scorer:
            yield scorer


class ReferenceFree(Fixed):
    """No reference: its log-probs count as 0, so that log ratios are the policy's log-probs."""

    def module(self, policy: nn.Module) -> None:
        return None

    def scoring(self, policy: nn.Module, module: Scorer | None) -> AbstractContextManager[Scorer]:
        raise ConfigError(
            "reference=free computes no log-probs, and this algorithm needs them: take another reference, such as auto."
        )


def carries_fresh_adapter(policy: nn.Module) -> bool:
    """Tell whether a LoRA policy equals its base, and its base stays: every ``lora_B`` is zero, as initialised."""
    if trained_of_base(policy):
        return False
    up = [p for name, p in policy.named_parameters() if ".lora_B." in name or ".lora_embedding_B." in name]
    return bool(up) and not any(p.any() for p in up)


def _require_peft(policy: nn.Module, choice: str, what: str) -> PeftModel:
    from peft import PeftModel

    if not isinstance(policy, PeftModel):
        raise ConfigError(
            f"reference={choice} measures the policy's KL against {what}, but the policy has no adapters. "
            "Set model.lora or model.adapter, or use reference=frozen_copy."
        )
    return policy


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
    def move(self, name: str, source: Tensor, target: Tensor, step: int) -> None:
        """Move the reference's parameter `target` towards the policy's, `source`, after `step` optimizer steps."""

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
        targets, sources = self._moving(module), stored_parameters(policy, self._names)
        for name, parameter in targets.items():
            self.move(name, sources[name].detach(), parameter.detach(), step)

    def average(self, name: str, parameter: Tensor) -> Tensor:
        """Return the float32 tensor that accumulates: the parameter itself where it is that wide."""
        if parameter.dtype == at_least_float32(parameter.dtype):
            return parameter
        return self.keep(_AVERAGE, name, parameter)

    def keep(self, kind: str, name: str, value: Tensor) -> Tensor:
        """Return a float32 tensor that begins as ``value`` and is part of the state."""
        kept = self._kept[kind]
        if name not in kept:
            kept[name] = value.to(at_least_float32(value.dtype), copy=True)
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
        targets = self._moving(module)
        _check_state(state, targets, self._kept)
        self._kept = {_AVERAGE: {}, _INITIAL: {}}
        for key, whole in state.items():
            kind, _, name = key.rpartition("/")
            if kind:
                self._kept[kind][name] = laid_out_like(whole, targets[name])
            else:
                targets[name].copy_(laid_out_like(whole, targets[name]))

    def _moving(self, module: Scorer | None) -> dict[str, Tensor]:
        assert module is not None, f"{type(self).__name__} moves the module that it made"
        return stored_parameters(module.model if isinstance(module, OnCPU) else module, self._names)


@checked("reference")
class EMA(Moving):
    """The exponential moving average of the policy: after every step ``ref <- decay * ref + (1 - decay) * policy``.

    Args:
        decay: Share of the reference that is kept at a step, in [0, 1]; 1 never moves it, 0 is the policy itself.
        device: "cpu" keeps it on the CPU, with a whole copy of all weights; null places it like the policy.

    Raises:
        ConfigError: ``decay`` is outside its range.
    """

    def __init__(self, decay: Portion = 0.992, device: Literal["cpu"] | None = None) -> None:
        super().__init__(device)
        self.decay = decay

    def move(self, name: str, source: Tensor, target: Tensor, step: int) -> None:
        _mix(source, target, self.average(name, target), 1 - self.decay)


@checked("reference")
class Mixing(Moving):
    """TR-DPO's soft update (2404.09656): every n steps ``ref <- alpha * policy + (1 - alpha) * ref``.

    Args:
        alpha: Share of the policy, in [0, 1]; 1 replaces the reference (the paper's hard update).
        every: Optimizer steps between two updates, at least 1.
        device: "cpu" keeps it on the CPU, with a whole copy of all weights; null places it like the policy.

    Raises:
        ConfigError: a setting is outside its range.
    """

    def __init__(self, alpha: Portion = 0.6, every: AtLeastOne = 512, device: Literal["cpu"] | None = None) -> None:
        super().__init__(device)
        self.alpha, self.every = alpha, every

    def due(self, step: int) -> bool:
        return step % self.every == 0

    def move(self, name: str, source: Tensor, target: Tensor, step: int) -> None:
        _mix(source, target, self.average(name, target), self.alpha)


@checked("reference")
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
        ema_power: NotNegative = 0.5,
        bias_power: NotNegative = 0.2,
        lag: Annotated[float, Range(1)] = 10.0,
        multiplier: NotNegative = 1.0,
        every: AtLeastOne = 400,
        burn_in: AtLeastZero = 0,
        device: Literal["cpu"] | None = None,
    ) -> None:
        super().__init__(device)
        self.ema_power, self.bias_power, self.lag, self.multiplier = ema_power, bias_power, lag, multiplier
        self.every, self.burn_in = every, burn_in

    def kept_copies(self, *, narrow: bool) -> int:
        return 2

    def due(self, step: int) -> bool:
        return step >= self.burn_in and (step - self.burn_in) % self.every == 0

    def move(self, name: str, source: Tensor, target: Tensor, step: int) -> None:
        values = values_for(target, source)
        if self.burn_in and name not in self._kept[_INITIAL]:
            # The first step that is due ends the burn-in: what is averaged begins here, and the reference stays.
            for kind in (_INITIAL, _AVERAGE):
                local_shard(self.keep(kind, name, target)).copy_(values)
            return
        # Without a burn-in the reference itself still is the policy of step 0 when it is first looked at.
        initial, average = (local_shard(self.keep(kind, name, target)) for kind in (_INITIAL, _AVERAGE))
        time = self.lag + self.multiplier * step
        average.lerp_(values, time**-self.ema_power)
        local_shard(target).copy_(average + time**-self.bias_power * (values - initial))


def _mix(source: Tensor, target: Tensor, average: Tensor, weight: float) -> None:
    """Compute ``average + weight * (source - average)``, exact at 0 and at 1, and round it into the target."""
    local_shard(average).lerp_(values_for(target, source), weight)
    if average is not target:
        local_shard(target).copy_(local_shard(average))


def _check_state(state: dict[str, Tensor], targets: dict[str, Tensor], kinds: Iterable[str]) -> None:
    wrong = sorted(targets.keys() - state.keys())
    for key, tensor in state.items():
        kind, _, name = key.rpartition("/")
        if kind not in ("", *kinds) or name not in targets or tensor.shape != targets[name].shape:
            wrong.append(key)
    if wrong:
        raise StorageError(
            f"The checkpoint holds no reference of this kind and shape: {len(wrong)} tensors are missing, unexpected "
            f"or of other shapes ({', '.join(wrong[:5])}). Resume with the model and reference settings of the run's "
            "config.yaml."
        )


_AS_REFERENCE = (r"\bmodel\.(name|adapter|revision|trust_remote_code)\b", r"reference.\1")


@checked("reference")
class OtherModel(Held, Fixed):
    """Other weights than the policy's, frozen, in the policy's type: a model, an adapter on it, or an adapter alone.

    An adapter alone stands on the policy's own base, whose frozen weights are shared. A model must have the policy's
    vocabulary: the KL compares the two token by token. The KL at step 0 is 0 only if these are the policy's weights.

    Args:
        name: The model: "tiny", a folder, or a hub id; null takes the policy's own base.
        adapter: A PEFT LoRA adapter to put on it: a folder or a hub id.
        revision: Branch, tag or commit of the model's hub repository.
        trust_remote_code: Run Python code that comes with the model, from the hub only with ``revision`` a commit.
        device: "cpu" keeps it on the CPU; null places it like the policy.

    Raises:
        ConfigError: neither ``name`` nor ``adapter`` is given, one of them is no name, or they do not fit together.
    """

    def __init__(
        self,
        name: str | None = None,
        adapter: str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        device: Literal["cpu"] | None = None,
    ) -> None:
        super().__init__(device)
        if name is None and adapter is None:
            raise ConfigError(
                "reference=path needs reference.name (a folder or hub id of a model), reference.adapter (of an "
                "adapter), or both. For the policy as it begins, use reference=frozen_copy."
            )
        if name is None and (revision is not None or trust_remote_code):
            raise ConfigError(
                "reference.revision and reference.trust_remote_code are those of reference.name, which is null: set "
                "it, or leave them out."
            )
        self.adapter = adapter
        if adapter is not None:
            hub_files.resolve("reference.adapter", adapter)
        self._settings: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
        with hub_files.rename_keys(_AS_REFERENCE):
            self.model = None if name is None else LanguageModel(name, **self._settings)

    def module(self, policy: nn.Module) -> Scorer:
        """Load the module. Raise ConfigError for another vocabulary, and what loading a model raises."""
        from peft import PeftModel

        found: Any = policy
        with hub_files.rename_keys(_AS_REFERENCE):
            if self.model is not None:
                base = self._load(self.model, found)
            else:  # the policy without its adapters: as it was loaded, where it has none
                copied: Any = self.copied(found)
                base = without_adapters(copied) if isinstance(copied, PeftModel) else copied
            model = base if self.adapter is None else continue_adapter(base, self.adapter)
        return self.hold(model)

    def _load(self, model: LanguageModel, policy: Any) -> PreTrainedModel:
        check_causal(model.name, model.config)
        self._check_vocabulary(model, policy)
        dtype: Any = str(policy.dtype).removeprefix("torch.")
        alike = LanguageModel(
            model.name,
            dtype=dtype,
            attn_implementation=policy.config._attn_implementation,
            **self._settings,
        )
        base = alike.load_base()
        head = policy.get_output_embeddings()
        if isinstance(head, Float32Head) or (isinstance(head, BanningHead) and head.exact):
            use_float32_head(base)
        if isinstance(head, BanningHead):
            ban_placeholders(base)
        return base

    def _check_vocabulary(self, model: LanguageModel, policy: Any) -> None:
        """Compare the rows of the embeddings, which any model has, and the tokens where the policy has a folder."""
        rows, needed = (config.get_text_config().vocab_size for config in (model.config, policy.config))
        if rows != needed:
            raise _other_vocabulary(model.name, f"its embedding has {rows} rows, the policy's {needed}")
        if not policy.name_or_path:
            return
        reference_tokens = load_tokenizer(model.name, model.path, **self._settings).get_vocab()
        # With the hub settings that the policy was read with: the reference does not decide what it may run.
        commit = getattr(policy.config, "_commit_hash", None)  # None for a folder
        remote = type(policy.config).__module__.startswith("transformers_modules")
        home = policy.name_or_path
        policy_tokens = load_tokenizer(home, home, revision=commit, trust_remote_code=remote).get_vocab()
        different = different_tokens(reference_tokens, policy_tokens)
        if different:
            raise _other_vocabulary(
                model.name,
                f"its tokenizer has {len(reference_tokens)} tokens, the policy's {len(policy_tokens)}, and "
                f"{len(different)} of them are not the same token under the same id "
                f"({', '.join(map(repr, different[:3]))})",
            )


def _other_vocabulary(name: str, how: str) -> ConfigError:
    return ConfigError(
        f"reference.name={name!r} has another vocabulary than the policy: {how}. The KL compares the two token by "
        "token, so the reference must be of the policy's own family. A model of another one can be a reward model, "
        "which reads text."
    )
