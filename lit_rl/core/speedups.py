"""Switches of faster computations that give the same numbers, but for rounding: `model.speedups` and
`generator.speedups`.

Either key is `auto`, `off`, or a mapping from names to true and false. The names, and what `auto` switches on, are the
fields of a dataclass for each of the two. `core/other_names.yaml` has them as old keys and keywords of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, Self

from lit_rl.core.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    SpeedupsSetting = Literal["auto", "off"] | Mapping[str, bool]
    """The type of `speedups` of a model and of a generator."""
else:
    SpeedupsSetting = str | bool | dict[str, Any]
    """Whatever a file or a command line may hold, so that `Speedups.read` refuses it in its own words."""


@dataclass(frozen=True)
class Speedups:
    """Switches, a field each; the default of a field is what `auto` means."""

    @classmethod
    def read(cls, key: str, value: object) -> Self:
        """Return the switches that a setting stands for.

        Args:
            key: Key of the setting, for errors.
            value: "auto"; "off", which YAML reads as False; or a mapping from names to True and False. Names that it
                leaves out are as in "auto".

        Raises:
            ConfigError: names the key, the value, what is allowed and the nearest of it.
        """
        names = cls.names()
        if value == "auto":
            return cls()
        if value == "off" or value is False:
            return cls(**dict.fromkeys(names, False))
        if not isinstance(value, Mapping):
            near = did_you_mean(str(value), ("auto", "off"))
            raise ConfigError(
                f"{key}={value!r} is unknown: allowed is auto, off, or a mapping such as {{{names[0]}: false}}.{near}"
            )
        for name, taken in value.items():
            if name not in names:
                raise ConfigError(
                    f"{key}.{name} is unknown: allowed is {', '.join(names)}.{did_you_mean(str(name), names)}"
                )
            if not isinstance(taken, bool):
                raise ConfigError(f"{key}.{name}={taken!r} is unknown: allowed is true, false.")
        return replace(cls(), **value)

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of the switches."""
        return [field.name for field in fields(cls)]


@dataclass(frozen=True)
class ModelSpeedups(Speedups):
    """Switches of the passes that score and train (`model.speedups`).

    Args:
        fused_head: Compute log-probs from hidden states, without the logits in memory (`lit_rl.ops.fused_head`).
        shared_prompts: Compute the prompt of a group once in training too, where that is exact
            (`lit_rl.models.shared_prefix`).
        rows_by_length: Run rows of like length together, with less padding (`lit_rl.models.forward_inputs`).
        folded_attention: Attend to the keys of a shared prompt where they lie, on a CPU, in models in which a trial
            shows that this is exact, where a group has enough of them for that to be faster
            (`lit_rl.models.shared_attention`).
        fused_accumulation: Sum what the calls of a micro-batch give the embedding and the head in one tensor, on a CPU
            (`lit_rl.models.head`).
    """

    fused_head: bool = True
    shared_prompts: bool = True
    rows_by_length: bool = True
    folded_attention: bool = True
    fused_accumulation: bool = True


@dataclass(frozen=True)
class DecodingSpeedups(Speedups):
    """Switches of the native generator (`generator.speedups`).

    Args:
        grouped_cache: Hold the keys and values of a prompt once a group, with an attention of our own that reads them
            for all its rows together: less memory too. Only where a model is proven to attend so. Switched off, and
            for any other model, transformers' own attention and cache decode, in which a prompt is repeated for each
            sample.
        lean_steps: Take decode steps over such a cache by operations on the model's weights, past transformers'
            modules: faster for small models. Only where a model is proven to be made of the same operations (Llama,
            Qwen2, Qwen3, Mistral, SmolLM2, with LoRA or without). Switched off, and for any other model, its own
            modules take the steps.
        continuous_batching: Let groups that wait take the places of rows that ended, in the middle of a batch. Only
            where every layer of a model's cache keeps all of a text. Switched off, and for any other model, the next
            groups begin when all rows of those before are over.
        cuda_graphs: Capture lean steps, draws included, as CUDA graphs, and replay them: where the host cannot launch
            the operations of a step as fast as a GPU computes them, that is faster. No card has shown yet that it is,
            nor that samples stay as they are: "auto" leaves it off. Only where lean steps are taken on a CUDA device,
            and a model is proven to be captured right; not with images. Switched off, and for any other model, the
            host launches each operation of each step.
    """

    grouped_cache: bool = True
    lean_steps: bool = True
    continuous_batching: bool = True
    cuda_graphs: bool = False
