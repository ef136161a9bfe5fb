"""Same completions, same loss, same log-probs, same gradient: or no figure.

Every contender takes its first step with completions that all are given, in its real loop. What it made of them is
held against TRL in float32, without gradient checkpointing. A contender that computes in bfloat16 may round: by the
limits below, or, where TRL itself rounds far (in deep models), 1.5 times as far as TRL does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any

from bench.contenders import Contender
from bench.record import cosine_and_ratio, key_of
from bench.reward import exact
from bench.workload import Workload


class GateError(Exception):
    """A contender computes something else than the reference."""


@dataclass(frozen=True)
class Limits:
    """How far a contender may be off."""

    logprobs: float
    """Nats, of any token."""
    cosine: float
    """Of the gradients, at least."""
    norm: float
    """Of the gradients' norms, relative."""
    loss: float
    """Relative to the larger of 1 and the loss."""


LIMITS = {
    "float32": Limits(logprobs=1e-4, cosine=0.999, norm=1e-3, loss=1e-4),
    "bfloat16": Limits(logprobs=2e-2, cosine=0.999, norm=2e-2, loss=2e-2),
}


@dataclass(frozen=True)
class Agreement:
    """How far a contender was off."""

    tokens: int
    """Tokens whose log-probs were compared."""
    logprobs: float | None
    """Largest difference; None where log-probs are not compared (pairs, texts: their loss is made of them)."""
    cosine: float | None
    """None, as `norm`, where other parameters are trained than the reference's."""
    norm: float | None
    loss: float | None
    """None where the process held a part of the rows only."""

    def faults(self, limits: Limits) -> list[str]:
        """What is further off than it may be. A NaN is."""
        found = []
        if self.logprobs is not None and not self.logprobs <= limits.logprobs:
            found.append(f"log-probs differ by up to {self.logprobs:.2g} nats (allowed {limits.logprobs:g})")
        if self.cosine is not None and not self.cosine >= limits.cosine:
            found.append(f"the cosine of the gradients is {self.cosine:.5f} (at least {limits.cosine})")
        if self.norm is not None and not self.norm <= limits.norm:
            found.append(f"the gradients' norms differ by {self.norm:.2%} (allowed {limits.norm:.1%})")
        if self.loss is not None and not self.loss <= limits.loss:
            found.append(f"the losses differ by {self.loss:.2g} (allowed {limits.loss:g})")
        return found


def compare(reference: Mapping[str, Any], other: Mapping[str, Any], *, gradients: bool = True) -> Agreement:
    """Two first steps, as `record.read` gives them; rows that only one has are left to `missing`.

    Args:
        reference: The reference's.
        other: The other one.
        gradients: Whether both train the same parameters.

    Raises:
        KeyError: a parameter has a gradient on one side only; says which.
    """
    both = [key for key in other["logprobs"] if key in reference["logprobs"]]
    differences = [
        abs(a - b) for key in both for a, b in zip(reference["logprobs"][key], other["logprobs"][key], strict=True)
    ]
    cosine, norm = None, None
    if gradients:
        cosine, ratio = cosine_and_ratio(reference["gradient"], other["gradient"])
        norm = abs(ratio - 1)
    loss = other["loss"]
    if loss is not None:
        loss = abs(loss - reference["loss"]) / max(1.0, abs(reference["loss"]))
    largest = max(differences, key=lambda x: (x != x, x)) if differences else None
    return Agreement(len(differences), largest, cosine, norm, loss)


def missing(workload: Workload, given: Sequence[Sequence[int]], other: Mapping[str, Any]) -> int:
    """Rows that were not scored, though they teach something: one whose reward is its group's mean may be left out."""
    rewards = [exact(ids, workload.is_dead(row)) for row, ids in enumerate(given)]
    groups = [rewards[start : start + workload.group] for start in range(0, len(rewards), workload.group)]
    means = [sum(group, Fraction()) / len(group) for group in groups for _ in group]
    live = [key_of(ids) for ids, reward, mean in zip(given, rewards, means, strict=True) if reward != mean]
    return sum(key not in other["logprobs"] for key in live)


def check(
    contender: Contender,
    workload: Workload,
    first: Mapping[str, Any],
    given: Sequence[Sequence[int]],
    reference: Mapping[str, Any],
    peer_rounds: float = 0.0,
) -> dict[str, Any]:
    """How far a contender is off, and under "allowed" how many nats it may be.

    Args:
        contender: Which one.
        workload: What it computed.
        first: Its first step.
        given: The completions that all were given.
        reference: The reference's first step.
        peer_rounds: How far TRL itself is off in bfloat16, nats.

    Raises:
        GateError: further than allowed; says in what.
    """
    try:
        found = compare(reference, first, gradients=not contender.own_parameters)
    except KeyError as error:
        raise GateError(f"{workload.name}: {contender.name}: {error.args[0]}.") from error
    limits = LIMITS[contender.dtype]
    if contender.dtype == "bfloat16":
        limits = replace(limits, logprobs=max(limits.logprobs, 1.5 * peer_rounds))
    faults = found.faults(limits)
    if first["loss"] is not None and (lost := missing(workload, given, first)):
        faults.append(f"{lost} completions that teach something were not scored")
    if faults:
        raise GateError(
            f"{workload.name}: {contender.name} computes something else than the reference: {'; '.join(faults)}."
        )
    return asdict(found) | {"allowed": limits.logprobs}
