"""Names that a run and its samples have themselves: what a function logs stands beside them, never in their place."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from lit_rl.errors import RewardError

_IN_GROUPS = {
    "": (
        "reward reward_std frac_reward_zero_std frac_rows_skipped num_tokens num_input_tokens_seen loss entropy "
        "kl ratio_mean approx_kl cispo_clip_ratio off_policy_kept policy_loss entropy_coef kl_coef reward_kl_coef "
        "ptx_loss lr_critic grad_norm skipped_steps lr contain_eos_token model_contain_eos_token "
        "ref_contain_eos_token beta alpha mixture_coef aux_loss"
    ),
    "completions": (
        "mean_length min_length max_length clipped_ratio mean_terminated_length min_terminated_length "
        "max_terminated_length repetition unscored observation_length"
    ),
    "turns": "mean max",
    "tools": "call_frequency failure_frequency parse_failures",
    "template": "rewritten",
    "env": "failed timeouts cut seconds_mean seconds_p50 seconds_max",
    "groups": "dropped drawn empty kept_length best_reward tied unscored",
    "replay": "groups age",
    "sampling/sampling_logp_difference": "mean max probe_mean probe_max",
    "sampling/importance_sampling_ratio": "mean min max",
    "sampling": "kl k3 chi2 ppl_ratio ess truncated masked kept_mass rejected",
    "sampling/staleness": "mean max",
    "objective": "scores kl entropy non_score_reward rlhf_reward scores_margin model_scores ref_scores",
    "value": "num_eos_tokens ratio ratio_var clipfrac_avg error mean explained_variance",
    "clip_ratio": "low_mean high_mean region_mean low_min high_max delta_mean",
    "vespo": "phi_seq_mean",
    "clip_cov": "share",
    "kl_cov": "share",
    "policy": "approxkl_avg clipfrac_avg entropy_avg",
    "loss": "policy_avg value_avg dpo xpo kl score",
    "return": "mean",
    "rewards": "chosen rejected accuracies margins probabilities",
    "logps": "chosen rejected",
    "judge": "failures ties",
}

METRICS = {f"{group}/{name}".lstrip("/") for group, names in _IN_GROUPS.items() for name in names.split()}
"""Metrics that methods on rollouts log under ``train/``, whatever the settings of the run at hand: a `kl` that
belongs to a reward would be read as the policy's. A test compares them with docs/metrics.md."""

_OF_A_FUNCTION = re.compile(r"rewards/.+/(mean|std|failure_ratio|timeout_ratio|cache_hit_ratio)")

COLUMNS = {"step", "rank", "prompt", "completion", "reward", "advantage", "length", "ended"}
COLUMNS |= {"opponent", "opponent_reward", "win", "win_rate"}
"""Columns that samples have themselves, beside those of `_OF_SAMPLES`."""

EPISODE_COLUMNS = {"group", "turns", "end", "turn_rewards", "episode_reward", "calls", "failed_calls", "messages"}
EPISODE_COLUMNS |= {"unreadable_calls", "observed_tokens", "episode_error", "returned_images"}
"""Columns that they have besides where something answers the policy."""

_OF_SAMPLES = re.compile(r"rewards/[^/]+|tokens/.*")


def is_taken(name: str) -> bool:
    """Tell whether a run logs ``train/<name>`` itself."""
    return name in METRICS or _OF_A_FUNCTION.fullmatch(name) is not None


def check_metrics(function: str, names: Iterable[str]) -> None:
    """Refuse metric names that the run logs itself.

    Raises:
        RewardError: names a free one.
    """
    for name in names:
        if is_taken(name):
            raise RewardError(
                f"log_metric({name!r}, ...) of {function!r}: train/{name} is a metric of the run's own. Log it under "
                f"another name; {_free(function, name)!r} is free."
            )


def check_columns(function: str, names: Iterable[str], of_the_data: Collection[str]) -> None:
    """Refuse extra columns that the samples have already.

    Raises:
        RewardError: names a free one.
    """
    taken = COLUMNS | EPISODE_COLUMNS if "episodes" in of_the_data else COLUMNS
    for name in names:
        if name in taken or _OF_SAMPLES.fullmatch(name) or name in of_the_data:
            whose = "the data have" if name in of_the_data else "the samples have"
            raise RewardError(
                f"log_extra({name!r}, ...) of {function!r}: {whose} a column of this name. Note it under another one; "
                f"{_free(function, name)!r} is free."
            )


def _free(function: str, name: str) -> str:
    return f"{function}/{name.replace('/', '_')}"
