"""Critics of a policy: value functions ``V(s_t)``, the return to expect before response token t is chosen.

A critic is called twice: once at setup, for the module to register beside the policy, and then for values, with that
module. The trained parts of the module are the critic's alone, so its parameters and the policy's are two groups.

    critic            memory beside the policy           what the value loss trains
    SeparateCritic    a second model and its moments     all of that model
    SharedTrunk       a vector                           the vector, and the policy's own trunk
    AdapterCritic     an adapter and a vector            both; the frozen base serves policy and critic
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, float32, nn, no_grad

from lit_rl.core.branches import branches_of
from lit_rl.core.declared_settings import checked
from lit_rl.core.errors import ConfigError
from lit_rl.core.rollout import Completions, Sampling
from lit_rl.models import forward, hub_files
from lit_rl.models.adapters import check_targets
from lit_rl.models.forward_inputs import known_masks, trunk_inputs
from lit_rl.models.language_model import DEFAULT, LanguageModel
from lit_rl.models.loading import Float32Head
from lit_rl.models.modes import disable_dropout, set_checkpointing
from lit_rl.models.scoring import SEQUENCES, is_scoring, load_scoring_base
from lit_rl.models.tokenizer import different_tokens
from lit_rl.models.trunk import copied_trunk, frozen_trunk, hidden_size, recorded_outputs, trunk_of
from lit_rl.models.vision_parts import PARTS, excluded_layers
from lit_rl.ops.ranges import AtLeastOne, Positive


class ValueHead(nn.Module):
    """A head of one number a position: ``w h + b``, computed in float32, with ``w = 0`` and ``b = 0`` at the start.

    Zeros, where it does not begin as the head of a reward model: so ``V = 0`` before the first update, the first
    advantages hold no noise of a head that has learned nothing, and no random number is drawn. The head learns from the
    first step (its gradient is ``(V - R) h``), and the trunk under it from the second.

    Args:
        hidden_size: Width of the hidden states.
    """

    _no_split_modules = ("Float32Head",)
    """The weights are float32 beside a trunk that may not be, and FSDP2 wants one type a unit: so they are a unit."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = Float32Head(hidden_size, 1, dtype=float32)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    @classmethod
    def of_scores(cls, score: nn.Linear) -> ValueHead:
        """Make a head that begins as that of a reward model: ``V`` of a state is the score of the text up to it."""
        head = cls(score.in_features)
        with no_grad():
            head.linear.weight.copy_(score.weight)
            if score.bias is not None:
                head.linear.bias.copy_(score.bias)
        return head

    def forward(self, hidden: Tensor) -> Tensor:
        """``(..., h)`` of any type to float32 ``(...)``."""
        values = self.linear(hidden.reshape(-1, hidden.shape[-1]))
        return values.view(hidden.shape[:-1]).clone()  # FSDP2 warns of views: changed in place they lose its hooks


class ValueModel(nn.Module):
    """A trunk and a value head."""

    def __init__(self, trunk: nn.Module, head: ValueHead) -> None:
        super().__init__()
        self.trunk, self.head = trunk, head

    def forward(self, *, t: int, **inputs: Tensor) -> Tensor:
        """Return float32 ``(b, t)``: values of the states from which each of the last t tokens was chosen."""
        hidden = self.trunk(**inputs, use_cache=False).last_hidden_state
        return self.head(hidden[:, -(t + 1) : -1])


class Critic(Protocol):
    """The protocol. Call `module` on the initial policy: before a checkpoint is restored, and before sharding."""

    def check(self, model: LanguageModel) -> None:
        """Refuse a policy that this critic cannot serve, before any weight is loaded. Raise ConfigError."""
        ...

    def module(self, policy: nn.Module) -> nn.Module:
        """Return the module to register, place, shard and save like the policy."""
        ...

    def parameters(self, policy: nn.Module, module: nn.Module) -> list[nn.Parameter]:
        """Return the parameters of the critic's optimizer group. None of them is in the policy."""
        ...

    def values(self, policy: nn.Module, module: nn.Module, completions: Completions) -> Tensor:
        """Return float32 ``(b, t)`` with gradient. Dropout is as in the policy. Values at padding are without
        meaning."""
        ...

    def scores_and_values(
        self, policy: nn.Module, module: nn.Module, completions: Completions, sampling: Sampling, **terms: Any
    ) -> tuple[forward.TokenScores, Tensor]:
        """Return `lit_rl.models.forward.score` of the policy (``terms`` go there) and `values`, both with
        gradient."""
        ...


class _OwnTrunk:
    """The common part of critics whose module is a `ValueModel`."""

    def parameters(self, policy: nn.Module, module: nn.Module) -> list[nn.Parameter]:
        return [p for p in module.parameters() if p.requires_grad]

    def values(self, policy: nn.Module, module: nn.Module, completions: Completions) -> Tensor:
        if completions.follows is not None:
            branches = branches_of(completions)
            return branches.fold(self.values(policy, module, branches.rows))
        with _mode_of(policy, module), known_masks(completions.on_host.attention_mask):
            return module(t=completions.response_ids.shape[1], **trunk_inputs(policy, completions))

    def scores_and_values(
        self, policy: nn.Module, module: nn.Module, completions: Completions, sampling: Sampling, **terms: Any
    ) -> tuple[forward.TokenScores, Tensor]:
        return forward.score(policy, completions, sampling, **terms), self.values(policy, module, completions)


@dataclass(frozen=True)
class SeparateCritic(_OwnTrunk):
    """A model of its own with a value head, trained in full.

    Args:
        model: What the critic starts from, by name, folder or hub id; null is a copy of the initial policy. A language
            model gets a new value head; of a reward model, a sequence classifier with one label, the trunk and the
            score head go on as the critic's, so that a value is at first the score of the text so far.
    """

    model: LanguageModel | str | None = None

    def __post_init__(self) -> None:
        if self.model is not None:
            with hub_files.rename_keys((r"\bmodel\.name\b", "algo.critic.model")):
                object.__setattr__(self, "model", LanguageModel.of(self.model, "algo.critic.model"))

    def check(self, model: LanguageModel) -> None:
        """Raise ConfigError where the copy could not be trained, or the other model reads other token ids."""
        if self.model is None:
            if model.quantization is not None:
                raise ConfigError(
                    f"algo.critic: a copy of the policy would be trained in full, and model.quantization="
                    f"{model.quantization} cannot be. Use algo/critic=adapter, or name an algo.critic.model."
                )
            return
        assert isinstance(self.model, LanguageModel)
        if is_scoring(self.model, SEQUENCES):
            if self.model.config.num_labels != 1:
                raise ConfigError(
                    f"algo.critic.model={self.model.name!r} is a classifier with "
                    f"num_labels={self.model.config.num_labels}, and a value is one number. Take a reward model with "
                    "one label, or a language model, which gets a new head."
                )
            for key in ("lora", "adapter", "quantization"):
                if getattr(self.model, key) is not None:
                    raise ConfigError(
                        f"algo.critic.model.{key} is set, and a critic that starts from a reward model is trained in "
                        "full. Remove it, or take algo/critic=adapter."
                    )
        if self.model.sees != model.sees:
            raise ConfigError(
                f"algo.critic.model={self.model.name!r} and model.name={model.name!r}: one of them is a model over "
                "images and the other is not. Take two of a kind."
            )
        own_tokens, policy_tokens = self.model.tokenizer.get_vocab(), model.tokenizer.get_vocab()
        if own_tokens != policy_tokens:
            other = different_tokens(own_tokens, policy_tokens)
            raise ConfigError(
                f"algo.critic.model={self.model.name!r} has another vocabulary than model.name={model.name!r} "
                f"({len(own_tokens)} and {len(policy_tokens)} tokens, {len(other)} with other ids, such as "
                f"{other[:3]}), so it would read the policy's token ids as other text. Take a model of the same family."
            )

    def module(self, policy: nn.Module) -> nn.Module:
        """Return a trunk and a value head.

        Raises:
            ConfigError: the score of a reward model is not one linear map of a causal model's hidden state.
            StorageError, BackendError: as `LanguageModel.load`.
        """
        model: Any = self.model
        if model is None:
            return ValueModel(copied_trunk(policy), ValueHead(hidden_size(policy))).train()
        if not is_scoring(model, SEQUENCES):
            loaded = model.load()
            return ValueModel(trunk_of(loaded), ValueHead(hidden_size(loaded))).train()
        scorer = load_scoring_base(model, SEQUENCES)
        head = getattr(scorer, "score", None)
        if not isinstance(head, nn.Linear):
            raise ConfigError(
                f"algo.critic.model={model.name!r} is a {type(scorer).__name__}, whose score is no linear map of the "
                "last token's hidden state. Take a reward model over a decoder, such as one of algo=reward_model."
            )
        if model.disable_dropout:
            disable_dropout(scorer)
        set_checkpointing(scorer, model.checkpointing)
        return ValueModel(trunk_of(scorer), ValueHead.of_scores(head)).train()


@checked("algo.critic")
@dataclass(frozen=True)
class AdapterCritic(_OwnTrunk):
    """A LoRA adapter (2106.09685) and a value head on the policy's frozen base, which policy and critic share.

    The base's layers are there twice and their weights once, so each side sees its own adapter and nothing is switched
    between them: exports and generation know of no second adapter.

    Args:
        r: Rank of the adapter, at least 1.
        alpha: The adapter's output is multiplied by alpha / r.
        targets: Names of the linear layers that get an adapter; a regular expression of whole names in the trunk; or
            "all-linear". The last two mean layers of the text, and names those of a projector too.
    """

    r: AtLeastOne = 16
    alpha: Positive = 32
    targets: str | list[str] = "all-linear"

    def __post_init__(self) -> None:
        check_targets("algo.critic.targets", self.targets)

    def check(self, model: LanguageModel) -> None:
        """Raise ConfigError where the policy has no frozen base."""
        if model.lora is None and model.adapter is None:
            raise ConfigError(
                "algo/critic=adapter puts an adapter on the policy's frozen base, but every weight of this policy is "
                "trained. Set model.lora or model.adapter, or use algo/critic=separate or algo/critic=shared_trunk."
            )

    def module(self, policy: nn.Module) -> nn.Module:
        """Return the critic of a policy.

        Raises:
            ConfigError: the policy has no frozen base, or ``targets`` names none of its layers.
        """
        from peft import LoraConfig, get_peft_model

        trunk: Any = frozen_trunk(policy, "algo/critic=adapter")
        frozen = PARTS if isinstance(self.targets, str) else ("vision",)
        config = LoraConfig(
            r=self.r,
            lora_alpha=self.alpha,  # pyright: ignore[reportArgumentType]  # PEFT says int and only ever divides it
            target_modules=self.targets if isinstance(self.targets, str) else list(self.targets),
            exclude_modules=excluded_layers(trunk, self.targets, frozen) or None,
        )
        try:
            with torch.device("cpu"):  # the same adapter on every device; PEFT puts it beside its layers
                adapted = get_peft_model(trunk, config, adapter_name="critic")
        except ValueError as error:
            linear = {name.rpartition(".")[2] for name, part in trunk.named_modules() if isinstance(part, nn.Linear)}
            raise ConfigError(
                f"algo.critic.targets={self.targets!r}: {error} Linear layers are {', '.join(sorted(linear))}."
            ) from error
        return ValueModel(adapted, ValueHead(hidden_size(policy))).train()


@dataclass(frozen=True)
class SharedTrunk:
    """A value head on the policy's own trunk.

    The gradient of the value loss trains the trunk too, scaled by its weight in the objective: the least memory, and
    one forward pass for log-probs and values.
    """

    def check(self, model: LanguageModel) -> None:
        """Accept any policy."""

    def module(self, policy: nn.Module) -> nn.Module:
        trunk_of(policy)  # refused at setup, not at the first step
        return ValueHead(hidden_size(policy))

    def parameters(self, policy: nn.Module, module: nn.Module) -> list[nn.Parameter]:
        return list(module.parameters())

    def values(self, policy: nn.Module, module: nn.Module, completions: Completions) -> Tensor:
        if completions.follows is not None:
            branches = branches_of(completions)
            return branches.fold(self.values(policy, module, branches.rows))
        with recorded_outputs(trunk_of(policy)) as outputs, known_masks(completions.on_host.attention_mask):
            # Through the policy's own forward, whose hooks bring sharded weights together. Its head gets one position.
            policy(**trunk_inputs(policy, completions), logits_to_keep=1, use_cache=False)
        return module(_response_states(outputs, completions))

    def scores_and_values(
        self, policy: nn.Module, module: nn.Module, completions: Completions, sampling: Sampling, **terms: Any
    ) -> tuple[forward.TokenScores, Tensor]:
        if completions.follows is not None:
            branches = branches_of(completions)
            scores, values = self.scores_and_values(policy, module, branches.rows, sampling, **terms)
            return scores.mapped(branches.fold), branches.fold(values)
        # One pass over whole rows, whose hidden states are those that the value head reads.
        terms["options"] = terms.get("options", DEFAULT).in_one_call
        with recorded_outputs(trunk_of(policy)) as outputs:
            scores = forward.score(policy, completions, sampling, **terms)
        return scores, module(_response_states(outputs, completions))


def _response_states(outputs: list[Any], completions: Completions) -> Tensor:
    # Of the pass that was scored: the first one of a model may come after a trial of its head.
    hidden = outputs[-1].last_hidden_state
    return hidden[:, -(completions.response_ids.shape[1] + 1) : -1]


@contextmanager
def _mode_of(policy: nn.Module, module: nn.Module) -> Iterator[None]:
    """Switch dropout on or off as in the policy."""
    before = module.training
    module.train(policy.training)
    try:
        yield
    finally:
        module.train(before)
