"""The alarms. Each limit is a rule of thumb, and a key of the config."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from lit_rl.callbacks.alarms.base import Alarm, Then
from lit_rl.errors import in_range


class _FromTheStart(Alarm):
    """An alarm that compares a metric with its mean over the first looks of the run."""

    def __init__(self, then: Then, patience: int, roll_backs: int, first: int) -> None:
        super().__init__(then, patience, roll_backs)
        in_range(f"callbacks.{self.key}.first", first, low=1)
        self.first = first
        self._began: list[float] = []

    def problem(self, metrics: Mapping[str, float]) -> str | None:
        value = metrics.get(self.watched[0])
        if value is None:
            return None
        if len(self._began) < self.first:
            self._began.append(value)
            return None
        return self.drifted(value, sum(self._began) / len(self._began))

    @abstractmethod
    def drifted(self, value: float, before: float) -> str | None:
        """Return the problem with a value, given the mean of the first ones."""

    def memory(self) -> dict[str, Any]:
        return {"began": list(self._began)}

    def remember(self, saved: dict[str, Any]) -> None:
        self._began = list(saved["began"])


class EntropyCollapse(_FromTheStart):
    """An alarm for a policy that hardly explores: `train/entropy` is a small share of its initial mean.

    Args:
        then: See `Alarm`.
        patience: See `Alarm`.
        roll_backs: See `Alarm`.
        share: Share of the initial mean below which there is a problem, in (0, 1).
        first: Looks in the initial mean, at least 1.
    """

    key = "entropy_collapse"
    watched = ("train/entropy",)
    advice = (
        "Completions of a prompt become alike, and there is less and less to learn from: lower optimizer.lr, add "
        "algo/entropy, or raise sampling.temperature. Where the reward is as high as it can be, the run is done."
    )

    def __init__(
        self, then: Then = "warn", patience: int = 5, roll_backs: int = 2, share: float = 0.1, first: int = 5
    ) -> None:
        super().__init__(then, patience, roll_backs, first)
        in_range(f"callbacks.{self.key}.share", share, low=0, high=1, open_low=True, open_high=True)
        self.share = share

    def drifted(self, value: float, before: float) -> str | None:
        if value >= self.share * before:
            return None
        return f"train/entropy is {value:.3g} nats, below {self.share:g} of the {before:.3g} that the run began with"


class LengthDrift(_FromTheStart):
    """An alarm for completions that became several times as long or as short: often a way to game the reward.

    Args:
        then: See `Alarm`.
        patience: See `Alarm`.
        roll_backs: See `Alarm`.
        factor: Ratio to the initial mean, or its inverse, beyond which there is a problem, above 1.
        first: Looks in the initial mean, at least 1.
    """

    key = "length_drift"
    watched = ("train/completions/mean_length",)
    advice = (
        "Read what the policy writes (samples/): reasoning may grow for good reason. If not, look at how reward and "
        "loss treat length (reward=soft_overlong, algo/reduction)."
    )

    def __init__(
        self, then: Then = "warn", patience: int = 5, roll_backs: int = 2, factor: float = 4.0, first: int = 5
    ) -> None:
        super().__init__(then, patience, roll_backs, first)
        in_range(f"callbacks.{self.key}.factor", factor, low=1, open_low=True)
        self.factor = factor

    def drifted(self, value: float, before: float) -> str | None:
        if before / self.factor <= value <= before * self.factor:
            return None
        return f"completions have {value:.4g} tokens on average, and the run began with {before:.4g}"


class RepetitionDrift(_FromTheStart):
    """An alarm for completions that repeat themselves more than at the start.

    Args:
        then: See `Alarm`.
        patience: See `Alarm`.
        roll_backs: See `Alarm`.
        rise: Rise of `train/completions/repetition` above the initial mean, in (0, 1).
        first: Looks in the initial mean, at least 1.
    """

    key = "repetition_drift"
    watched = ("train/completions/repetition",)
    advice = (
        "Read what the policy writes (samples/), and what the reward gives for it; reward=repetition takes from it."
    )

    def __init__(
        self, then: Then = "warn", patience: int = 5, roll_backs: int = 2, rise: float = 0.2, first: int = 5
    ) -> None:
        super().__init__(then, patience, roll_backs, first)
        in_range(f"callbacks.{self.key}.rise", rise, low=0, high=1, open_low=True, open_high=True)
        self.rise = rise

    def drifted(self, value: float, before: float) -> str | None:
        if value <= before + self.rise:
            return None
        return f"{value:.0%} of a completion's 4-grams stood in it before, and the run began with {before:.0%}"


class DeadGroups(Alarm):
    """An alarm for groups of equal rewards, from which nothing is learned.

    Args:
        then: See `Alarm`.
        patience: See `Alarm`.
        roll_backs: See `Alarm`.
        most: Share of completions in such groups, in (0, 1], from which on there is a problem.
    """

    key = "dead_groups"
    watched = ("train/frac_reward_zero_std", "train/reward")
    essential = ("train/frac_reward_zero_std",)
    advice = (
        "Where the reward is high, the prompts are too easy by now, or the run is done; where it is low, too hard. "
        "algo/groups=dynamic draws others in their place."
    )

    def __init__(self, then: Then = "warn", patience: int = 10, roll_backs: int = 2, most: float = 0.95) -> None:
        super().__init__(then, patience, roll_backs)
        in_range(f"callbacks.{self.key}.most", most, low=0, high=1, open_low=True)
        self.most = most

    def problem(self, metrics: Mapping[str, float]) -> str | None:
        share = metrics.get("train/frac_reward_zero_std", 0.0)
        if share < self.most:
            return None
        reward = f", and the mean reward is {metrics['train/reward']:.3g}" if "train/reward" in metrics else ""
        return f"{share:.0%} of the completions are in groups of equal rewards{reward}"


class KLBlowUp(Alarm):
    """An alarm for a policy far from the reference, or that moves far within one rollout.

    Args:
        then: See `Alarm`.
        patience: See `Alarm`.
        roll_backs: See `Alarm`.
        most: KL to the reference (`train/kl`), in nats a token, above which there is a problem; above 0.
        most_in_rollout: The same for the KL to the sampling policy (`train/approx_kl`); above 0.
    """

    key = "kl_blow_up"
    watched = ("train/kl", "train/approx_kl")
    advice = "Lower optimizer.lr, raise algo.beta, or take fewer algo.minibatches and algo.iterations."

    def __init__(
        self,
        then: Then = "warn",
        patience: int = 3,
        roll_backs: int = 2,
        most: float = 1.0,
        most_in_rollout: float = 0.2,
    ) -> None:
        super().__init__(then, patience, roll_backs)
        in_range(f"callbacks.{self.key}.most", most, low=0, open_low=True)
        in_range(f"callbacks.{self.key}.most_in_rollout", most_in_rollout, low=0, open_low=True)
        self.limits = {"train/kl": most, "train/approx_kl": most_in_rollout}

    def problem(self, metrics: Mapping[str, float]) -> str | None:
        above = [
            f"{name} is {metrics[name]:.3g} nats a token, above {limit:g}"
            for name, limit in self.limits.items()
            if metrics.get(name, 0.0) > limit
        ]
        return " and ".join(above) or None


class ClippedShare(Alarm):
    """An alarm for many completions cut by the length limit, or many tokens clipped by the loss.

    Args:
        then: See `Alarm`.
        patience: See `Alarm`.
        roll_backs: See `Alarm`.
        most_completions: Share of completions cut by `sampling.max_new_tokens`, in (0, 1], above which there is a
            problem.
        most_tokens: The same for the share of tokens that the loss clips, in (0, 1].
    """

    key = "clipped_share"
    watched = ("train/completions/clipped_ratio", "train/clip_ratio/region_mean")
    advice = (
        "Completions that are cut were not finished: raise sampling.max_new_tokens, or see whether they end at all. "
        "Tokens that are clipped teach nothing: lower optimizer.lr, or take fewer updates of a rollout."
    )

    def __init__(
        self,
        then: Then = "warn",
        patience: int = 5,
        roll_backs: int = 2,
        most_completions: float = 0.5,
        most_tokens: float = 0.3,
    ) -> None:
        super().__init__(then, patience, roll_backs)
        in_range(f"callbacks.{self.key}.most_completions", most_completions, low=0, high=1, open_low=True)
        in_range(f"callbacks.{self.key}.most_tokens", most_tokens, low=0, high=1, open_low=True)
        self.most_completions, self.most_tokens = most_completions, most_tokens

    def problem(self, metrics: Mapping[str, float]) -> str | None:
        cut = metrics.get("train/completions/clipped_ratio", 0.0)
        clipped = metrics.get("train/clip_ratio/region_mean", 0.0)
        found = [f"{cut:.0%} of the completions are cut by the length limit"] if cut > self.most_completions else []
        found += [f"the loss clips {clipped:.0%} of the tokens"] if clipped > self.most_tokens else []
        return " and ".join(found) or None


class HeldOutFlat(Alarm):
    """An alarm for a training reward that rises while a held-out one does not.

    The policy then games the reward, or has memorised the prompts. At each validation the mean of `proxy` since the
    last one is compared with that of `window` validations earlier, and so is `held_out`.

    Args:
        then: See `Alarm`.
        patience: Consecutive validations with a problem before it rings, at least 1.
        roll_backs: See `Alarm`.
        proxy: The metric that is optimised.
        held_out: The metric that should rise with it, of other prompts or of another reward.
        rise: Least rise of `proxy`, in its own units, above 0.
        window: Validations to look back, at least 1.
    """

    key = "held_out_flat"
    advice = (
        "Read what the policy writes (samples/): it may have found a way to please the reward. Else there are too few "
        "prompts, or too many epochs of them."
    )

    def __init__(
        self,
        then: Then = "warn",
        patience: int = 2,
        roll_backs: int = 2,
        proxy: str = "train/reward",
        held_out: str = "val/reward",
        rise: float = 0.1,
        window: int = 3,
    ) -> None:
        super().__init__(then, patience, roll_backs)
        in_range(f"callbacks.{self.key}.rise", rise, low=0, open_low=True)
        in_range(f"callbacks.{self.key}.window", window, low=1)
        self.proxy, self.held_out, self.rise, self.window = proxy, held_out, rise, window
        self.watched = self.essential = (proxy, held_out)
        self.named_by = {proxy: "proxy", held_out: "held_out"}
        self._validated: float | None = None
        self._since: list[float] = []
        self._pairs: list[tuple[float, float]] = []

    def notice(self, new: set[str], metrics: Mapping[str, float]) -> bool:
        """Look at the end of the rollout after a validation: in the middle of one a run cannot be rolled back."""
        if self.held_out in new:
            self._validated = metrics[self.held_out]
        if self.proxy in new and math.isfinite(metrics[self.proxy]):
            self._since.append(metrics[self.proxy])
        return self.proxy in new and self._validated is not None

    def problem(self, metrics: Mapping[str, float]) -> str | None:
        since, held_out = self._since, self._validated
        self._since, self._validated = [], None
        if not since or held_out is None or not math.isfinite(held_out):
            return None
        self._pairs = [*self._pairs, (sum(since) / len(since), held_out)][-self.window - 1 :]
        (proxy_then, held_then), (proxy_now, held_now) = self._pairs[0], self._pairs[-1]
        full = len(self._pairs) == self.window + 1
        if not full or proxy_now - proxy_then < self.rise or held_now > held_then:
            return None
        return (
            f"over {self.window} validations {self.proxy} has risen from {proxy_then:.3g} to {proxy_now:.3g}, and "
            f"{self.held_out} has not: {held_then:.3g} then, {held_now:.3g} now"
        )

    def memory(self) -> dict[str, Any]:
        return {"validated": self._validated, "since": list(self._since), "pairs": [list(pair) for pair in self._pairs]}

    def remember(self, saved: dict[str, Any]) -> None:
        self._validated, self._since = saved["validated"], list(saved["since"])
        self._pairs = [(proxy, held_out) for proxy, held_out in saved["pairs"]]
