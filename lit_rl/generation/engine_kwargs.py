"""Engine settings without a key in `Sampling`: the allowed ones, and those that change the distribution.

There are four kinds. A setting with a key in `Sampling` is set there, where the scoring of training reads it. A setting
of the generator's own may not be set. One that changes the distribution is in the log-probs of the engine, and
not in those of training: samples are weighted for it, or kept out of training. All others are free. A name that only
the engine knows counts as one that changes the distribution.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lit_rl.core.errors import ConfigError, did_you_mean

KEY = "generator.generation_kwargs"


@dataclass(frozen=True)
class EngineNames:
    """The names of an engine's settings, by their effect."""

    engine: str
    """Its name in messages."""
    keys: Mapping[str, str]
    """Settings with a key of their own: the name, and the key."""
    own: frozenset[str]
    """Settings that the generator sets, or that would have no effect on its draws."""
    free: frozenset[str]
    """Settings that do not change the distribution."""
    reshaping: frozenset[str]
    """Settings that change the distribution."""

    def knows(self, names: Iterable[str]) -> bool:
        """Tell whether all of these are known here."""
        return set(names) <= {*self.keys, *self.own, *self.free, *self.reshaping}

    def reshaped_by(self, settings: Mapping[str, Any], also: Iterable[str] = ()) -> tuple[str, ...]:
        """Return those of the given names that change the distribution.

        Args:
            settings: Settings by the engine's names.
            also: Names that the engine's class has beside those that are known here.

        Raises:
            ConfigError: the engine knows no such setting, or it is set elsewhere, or not to be set.
        """
        known = {*self.free, *self.reshaping, *(set(also) - self.own - self.keys.keys())}
        for name in settings:
            setting = f"{KEY}.{name}={settings[name]!r}"
            if name in self.keys:
                raise ConfigError(
                    f"{setting} has a key of its own, which training reads as well: set {self.keys[name]} instead."
                )
            if name in self.own:
                raise ConfigError(
                    f"{setting}: lit_rl sets it for {self.engine}, or draws in its place: it would have no effect. "
                    f"Leave it out; {self.engine} takes {', '.join(sorted(known))}."
                )
            if name not in known:
                near = did_you_mean(name, [*known, *self.keys])
                raise ConfigError(
                    f"{setting}: {self.engine} has no such setting.{near} It takes {', '.join(sorted(known))}."
                )
        return tuple(name for name in settings if name not in self.free)


_SHARED_KEYS = {
    name: f"sampling.{name}" for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "bad_words")
}

VLLM_NAMES = EngineNames(
    engine="vLLM's SamplingParams",
    keys=_SHARED_KEYS
    | {
        "n": "algo.group_size",
        "max_tokens": "sampling.max_new_tokens",
        "min_tokens": "sampling.min_new_tokens",
        "stop": "sampling.stop",
        "logit_bias": "sampling.logit_bias",
        "structured_outputs": "sampling.structured",
        "seed": "seed",
    },
    own=frozenset(
        {
            "stop_token_ids",
            "detokenize",
            "skip_special_tokens",
            "ignore_eos",
            "logprobs",
            "prompt_logprobs",
            "prompt_logprob_token_ids",
            "output_kind",
            "prompt_logprob_start",
            "logprob_token_ids",
            "flat_logprobs",
            "include_stop_str_in_output",
            "skip_clone",
            "stream_interval",
            "output_text_buffer_length",
            "routed_experts_prompt_start",
            "trace_decode_token_ids",
            "repetition_detection",
        }
    ),
    free=frozenset(
        {
            "spaces_between_special_tokens",
            "skip_reading_prefix_cache",
        }
    ),
    reshaping=frozenset(
        {
            "presence_penalty",
            "frequency_penalty",
            "allowed_token_ids",
            "thinking_token_budget",
            "watermarking",
            "extra_args",
        }
    ),
)
"""The names of vLLM 0.32. A server takes the same names in the body of a request."""

_HF_RESHAPING = frozenset(
    {
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "encoder_repetition_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
        "sequence_bias",
        "exponential_decay_length_penalty",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "remove_invalid_values",
    }
)
_HF_FREE = frozenset(
    {
        "prefill_chunk_size",
        "cache_config",
        "compile_config",
        "disable_compile",
    }
)


def transformers_names(names: Iterable[str]) -> EngineNames:
    """Return the names of `GenerationConfig`, which are given: all but a few choose a token, and lit_rl does that
    itself."""
    keys = _SHARED_KEYS | {
        "max_new_tokens": "sampling.max_new_tokens",
        "max_length": "sampling.max_new_tokens",
        "min_new_tokens": "sampling.min_new_tokens",
        "min_length": "sampling.min_new_tokens",
        "stop_strings": "sampling.stop",
        "bad_words_ids": "sampling.bad_words",
        "do_sample": "sampling.temperature",
        "num_return_sequences": "algo.group_size",
        "cache_implementation": "generator.static_cache",
    }
    own = frozenset(name for name in names if not name.startswith("_")) - _HF_FREE - _HF_RESHAPING - keys.keys()
    return EngineNames("transformers' GenerationConfig", keys, own, _HF_FREE, _HF_RESHAPING)
