"""`lit-rl replay`: several objectives on one saved rollout, side by side: losses, gradients, clip fractions, and
per-token columns as a file of samples that `lit-rl report` shows."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import lightning as L
import pyarrow
import torch
from rich.console import Console
from rich.table import Column
from torch import Tensor, nn

from lit_rl.algorithms.data_parallel import Ranks
from lit_rl.algorithms.evaluation.summary_statistics import Averages, sample_table, token_columns
from lit_rl.algorithms.families.policy_gradient import PolicyGradient
from lit_rl.algorithms.rollouts import checkpoints
from lit_rl.algorithms.rollouts.rollout_plan import BatchPlan, micro_batch, rows_of_slots, step_counts, step_totals
from lit_rl.algorithms.rollouts.scored import Scored
from lit_rl.callbacks.display import ruled_table
from lit_rl.callbacks.output_files import list_tables, write_parquet
from lit_rl.callbacks.saved_rollouts import SavedRollout
from lit_rl.core import upstream
from lit_rl.core.durable_files import replacing
from lit_rl.core.errors import StorageError
from lit_rl.core.process_state import preserve_generators
from lit_rl.core.rollout import PromptBatch, Rollout
from lit_rl.generation.collect import texts_of
from lit_rl.models.forward import TokenScores
from lit_rl.ops.reductions import Metrics, masked_mean, masked_sum
from lit_rl.runs.run_dir import nan_to_null
from lit_rl.runs.saved_policy import load_saved_weights

# ---------------------------------------------------------------------- the command


_LARGE = 4 << 30
"""Bytes of gradients held at once above which a note is printed."""


@dataclass(frozen=True)
class Replay:
    """The objectives to compare, built but not loaded."""

    modules: list[tuple[str, PolicyGradient]]
    """Objectives with their names, all of one model description, one reference and one sampling."""
    rollout: SavedRollout
    source: Path
    """The file of the rollout."""
    checkpoint: Path
    """The file of the policy's weights."""
    folder: Path
    """Folder for the numbers."""
    fabric: L.Fabric
    """Device and precision."""
    notes: list[str]
    """Notes on the method for the reader."""


def replay(job: Replay) -> int:
    """Compute, print and write loss and gradient of every objective, for the whole rollout as one optimizer step.

    Raises:
        StorageError: the checkpoint is not of the run's model.
        RewardError, ConfigError: an objective needs what was not saved.
    """
    with preserve_generators():
        step = _load(job)
    notes = [*job.notes, *_notes(job, step)]
    measured = [_measure(name, module, job) for name, module in job.modules]
    gradients = [each.gradient for each in measured]
    cosines = [[_cosine(one, two) for two in gradients] for one in gradients]
    report = ReplayReport(
        rollout=str(job.source),
        rollout_step=job.rollout.step,
        completions=len(job.rollout),
        checkpoint=str(job.checkpoint),
        policy_step=step,
        notes=notes,
        objectives=[each.outcome for each in measured],
        cosines=cosines,
    )
    print_replay(report)
    path = job.folder / f"replay_{datetime.now():%Y-%m-%d_%H%M%S_%f}.json"
    try:
        path.write_text(json.dumps(nan_to_null(asdict(report)), indent=2, allow_nan=False) + "\n")
    except OSError as error:
        raise StorageError(f"{path} could not be written: {error.strerror}.") from error
    Console().print(f"numbers  {path}", soft_wrap=True, highlight=False)
    write_tokens(measured[0].tokens, job.rollout.step, job.folder, job.modules[0][1].tokenizer)
    return 0


@dataclass(frozen=True)
class ObjectiveOutcome:
    """One objective at the rollout."""

    name: str
    loss: float
    gradient_norm: float
    metrics: dict[str, float]
    """Metrics by the names of `docs/metrics.md`, without `train/`; and `advantage_size` and `no_gradient`."""


@dataclass(frozen=True)
class ReplayReport:
    """All results of a replay."""

    rollout: str
    rollout_step: int
    """Optimizer steps of the policy that drew it."""
    completions: int
    checkpoint: str
    policy_step: int
    """Optimizer steps of the policy whose gradients these are."""
    notes: list[str]
    objectives: list[ObjectiveOutcome]
    cosines: list[list[float]]
    """Cosines of every gradient with every other; NaN where one of them is 0."""


# ---------------------------------------------------------------------- what all objectives share


def _load(job: Replay) -> int:
    """Load one policy for all modules, with the checkpoint's weights, and one reference; return its step."""
    wanted = job.rollout.ref_logprobs is None and any(module.needs_reference for _, module in job.modules)
    host = next((m for _, m in job.modules if m.needs_reference == wanted), job.modules[0][1])
    step = load_saved_weights(host, job.checkpoint, extra_keys=["reference"])  # brings a reference that moved
    upstream.convert_precision(job.fabric, host)
    host.to(job.fabric.device)
    for _, module in job.modules:
        module.policy, module.reference_policy = host.policy, host.reference_policy
        module.fabric = job.fabric  # what asks for a world size and a device asks it here
        module.to(job.fabric.device)
        module.plan = BatchPlan(  # the whole rollout as one optimizer step, cut as the run cut it
            prompts_per_rollout=len(job.rollout.rows),
            group_size=module.group_size,
            minibatches=1,
            iterations=1,
            accumulate=job.rollout.micro_batches,
            world_size=1,
            split_groups=job.rollout.split_groups,
        )
    return step


def _notes(job: Replay, step: int) -> list[str]:
    rollout, notes = job.rollout, []
    if step == rollout.step:
        notes.append("policy and rollout are of the same step: every ratio is about 1, and nothing is clipped")
    if step < rollout.step:
        notes.append("the policy is older than the rollout: ratios say how it was before, not after, an update")
    if rollout.old_logprobs is None:
        notes.append("the run took no old log-probs: those that the generator reported stand for them")
    if rollout.world_size > 1:
        notes.append(f"the rows are those of rank 0: a share of 1/{rollout.world_size} of the rollout")
    if any(module.groups is not None for _, module in job.modules):
        notes.append("groups that an objective would replace by fresh ones are left out")
    size = 4 * len(job.modules) * sum(p.numel() for p in _trained_parameters(job.modules[0][1].policy))
    if size > _LARGE:
        notes.append(f"the gradients took {size / (1 << 30):.1f} GiB of memory: name fewer losses to lower it")
    return notes


# ---------------------------------------------------------------------- one objective


@dataclass(frozen=True)
class _Measured:
    """The measurements of one objective."""

    outcome: ObjectiveOutcome
    gradient: Tensor
    """Float32, one vector, on the CPU."""
    tokens: SeenTokens


def _measure(name: str, module: PolicyGradient, job: Replay) -> _Measured:
    """Return loss and gradient of one objective, and its view of the tokens."""
    with preserve_generators():
        torch.manual_seed(module.seed)  # dropout, where there is any, and random shares are the same for all
        with job.fabric.autocast(), module.rollout_context():
            scored, rollout = _with_credit(module, job)
        module.policy.train()
        return _backward(name, module, SeenTokens.of(scored, rollout), job)


def _with_credit(module: PolicyGradient, job: Replay) -> tuple[Scored, Rollout]:
    """Return the rollout with this objective's advantages. Log-probs that were saved with it are never recomputed."""
    saved, device = job.rollout, job.fabric.device
    named = {"greedy_rewards": saved.greedy_rewards, "gradient_norms": saved.gradient_norms}
    further = {name: None if column is None else column.to(device) for name, column in named.items()}
    group = len(saved) // len(saved.rows)
    prompts = zip(saved.completions.prompt_ids[::group], saved.completions.prompt_mask[::group])
    texts = module.tokenizer.batch_decode([ids[mask].tolist() for ids, mask in prompts])
    rows = PromptBatch(texts, [], {}, saved.rows, [0] * len(saved.rows), rollout=saved.number)
    scored = Scored(rows, checkpoints.to_device_dataclass(saved.completions, device), saved.scores, **further)
    scored, _ = module.choose(scored)
    ref = None if saved.ref_logprobs is None else saved.ref_logprobs.to(device)
    if module.needs_reference and ref is None:
        ref = module.ref_logprobs(scored.completions)
    old = saved.completions.sampler_logprobs if saved.old_logprobs is None else saved.old_logprobs
    rollout, _ = module.advantages(scored, old.to(device), ref)
    return scored, rollout


def _backward(name: str, module: PolicyGradient, seen: SeenTokens, job: Replay) -> _Measured:
    plan, saved, rollout = module.plan, job.rollout, seen.rollout
    assert plan is not None
    (counts,) = step_counts(rollout, plan, seed=module.seed, index=saved.number)
    slots = rows_of_slots(rollout, plan, seed=module.seed, index=saved.number)
    micros = [micro_batch(rollout, rows) for rows in slots]
    with job.fabric.autocast():
        step = module.look_ahead(micros) if module.needs_step and len(micros) > 1 else None
    parameters = _trained_parameters(module.policy)
    gradient = torch.zeros(sum(p.numel() for p in parameters))
    averages, total = Averages(), 0.0
    for rows, micro in zip(slots, micros):
        with job.fabric.autocast():
            scores = module.token_scores(micro.completions)
            scores.logprobs.retain_grad()
            loss, metrics = module.loss(micro, scores, step_totals(counts, plan), step)
        seen.add(rows, scores)
        loss.backward()
        total += float(loss.detach())
        start = 0
        for p in parameters:
            if p.grad is not None:
                gradient[start : start + p.numel()] += p.grad.detach().float().flatten().cpu()
                p.grad = None
            start += p.numel()
        averages.add(metrics | _token_statistics(micro, scores.logprobs.grad))
    numbers = averages.reduce(Ranks(job.fabric.device))
    return _Measured(ObjectiveOutcome(name, total, math.sqrt(_dot(gradient, gradient)), numbers), gradient, seen)


def _token_statistics(micro: Rollout, gradient: Tensor | None) -> Metrics:
    """Return the mean size of an advantage, and the share of loss tokens whose log-prob the objective does not move."""
    mask, advantages = micro.loss_mask, micro.advantages
    assert advantages is not None
    per_token = advantages if advantages.ndim == 2 else advantages[:, None].expand(mask.shape)
    still = torch.ones_like(mask) if gradient is None else gradient == 0
    return {
        "advantage_size": (masked_sum(per_token.abs(), mask), mask.sum()),
        "no_gradient": ((still & mask).sum(), mask.sum()),
    }


def _trained_parameters(policy: nn.Module) -> list[nn.Parameter]:
    return [p for p in policy.parameters() if p.requires_grad]


_CHUNK = 1 << 24


def _dot(one: Tensor, two: Tensor) -> float:
    """Return the dot product in float64, a piece at a time: float32 sums over millions of entries lose digits."""
    return sum(float(a.double() @ b.double()) for a, b in zip(one.split(_CHUNK), two.split(_CHUNK)))


def _cosine(one: Tensor, two: Tensor) -> float:
    """Return the cosine of two vectors; NaN where one of them is 0."""
    sizes: Any = math.sqrt(_dot(one, one)) * math.sqrt(_dot(two, two))
    return _dot(one, two) / sizes if sizes else math.nan


# ---------------------------------------------------------------------- the report


_ACROSS = 7
"""Objectives in one block of the matrix: as many as 80 columns hold."""

CLIP_SHARES = ("clip_ratio/region_mean", "cispo_clip_ratio")
"""Names under which losses report the share of tokens that they clip."""


def print_replay(report: ReplayReport) -> None:
    """Print two tables that fit into 80 columns, and the notes."""
    console = Console()
    title = (
        f"Rollout of step {report.rollout_step} ({report.completions} completions), policy of step {report.policy_step}"
    )
    columns = ["loss", "gradient\nnorm", "cosine", "clipped", "mean\n|A|", "no\ngradient"]
    table = ruled_table(title, _columns("objective", columns))
    for outcome, cosine in zip(report.objectives, report.cosines[0]):
        clipped = next((outcome.metrics[name] for name in CLIP_SHARES if name in outcome.metrics), math.nan)
        sizes = [f"{outcome.loss:.3g}", f"{outcome.gradient_norm:.3g}", _share(cosine), _share(clipped)]
        rest = [f"{outcome.metrics['advantage_size']:.3g}", _share(outcome.metrics["no_gradient"])]
        table.add_row(outcome.name, *sizes, *rest)
    console.print(table)
    names = [outcome.name for outcome in report.objectives]
    for start in range(0, len(names) if len(names) > 2 else 0, _ACROSS):
        columns = range(start, min(start + _ACROSS, len(names)))
        matrix = ruled_table("Cosines of the gradients", _columns("", [str(column + 1) for column in columns]))
        for row, name in enumerate(names):
            matrix.add_row(f"{row + 1} {name}", *(_share(report.cosines[row][column]) for column in columns))
        console.print()
        console.print(matrix)
    console.print()
    for note in report.notes:
        console.print(f"note: {note}", highlight=False, markup=False)


def _columns(first: str, numbers: list[str]) -> list[Column]:
    return [Column(first, no_wrap=True), *(Column(name, justify="right", no_wrap=True) for name in numbers)]


def _share(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"


# ---------------------------------------------------------------------- the tokens of the first objective


@dataclass(frozen=True)
class SeenTokens:
    """A rollout with one objective's credit, and the policy's numbers for its tokens."""

    scored: Scored
    rollout: Rollout
    logprobs: Tensor
    """Float32 `(b, t)`: log-probs of the policy whose gradient was taken; filled part by part."""
    entropies: Tensor
    """Entropies of its next-token distributions, likewise; NaN until a part with them is added."""

    @classmethod
    def of(cls, scored: Scored, rollout: Rollout) -> SeenTokens:
        """Return the rollout before any part of it was scored."""
        shape, device = rollout.loss_mask.shape, rollout.loss_mask.device
        return cls(scored, rollout, torch.zeros(shape, device=device), torch.full(shape, torch.nan, device=device))

    def add(self, rows: Tensor, scores: TokenScores) -> None:
        """Add a micro-batch: its rows, which are trimmed on the right."""
        self.logprobs[rows, : scores.logprobs.shape[1]] = scores.logprobs.detach()
        if scores.entropy is not None:
            self.entropies[rows, : scores.entropy.shape[1]] = scores.entropy.detach()


def write_tokens(seen: SeenTokens, step: int, folder: Path, tokenizer: Any) -> None:
    """Write `samples/replay_<step>.parquet` in the run's folder, and print its path.

    Raises:
        StorageError: it cannot be written.
    """
    target = folder / "samples" / f"replay_{step:08d}.parquet"
    try:
        target.parent.mkdir(exist_ok=True)
        table = _token_table(seen, step, tokenizer)
        with replacing(target, f"{target.stem}.partial") as partial:
            write_parquet(table | _with_columns_of_rollout_file(table, step, target.parent), partial)
    except OSError as error:
        raise StorageError(f"{target} could not be written: {error.strerror}.") from error
    text = f"tokens   {target}  (lit-rl report run_dir={folder} shows them)"
    Console().print(text, soft_wrap=True, highlight=False, markup=False)


def _with_columns_of_rollout_file(table: dict[str, list[Any]], step: int, folder: Path) -> dict[str, list[Any]]:
    """Add columns that the rollout's own file has and this table lacks (rank, the data's, notes of rewards), where
    both have the same completions in the same order."""
    stored = next((each for each in list_tables(folder) if each.name == f"step_{step:08d}"), None)
    if stored is None:
        return {}
    with contextlib.suppress(OSError, pyarrow.ArrowException, KeyError):
        lacking = [name for name in stored.columns() if name not in table]
        written = stored.read(["completion", *lacking]).to_pydict()
        if written.pop("completion") == table["completion"]:
            return written
    return {}


def _token_table(seen: SeenTokens, step: int, tokenizer: Any) -> dict[str, list[Any]]:
    scored, rollout = seen.scored, seen.rollout
    completions, advantages = scored.completions, rollout.advantages
    if advantages is not None and advantages.ndim == 2:
        advantages = masked_mean(advantages, rollout.loss_mask, 1)
    texts = texts_of(completions, tokenizer)
    table = sample_table(step, scored.batch, texts, completions, scored.scores, advantages)
    more = {"logprobs": seen.logprobs}
    if not bool(seen.entropies[completions.response_mask].isnan().any()):
        more["entropies"] = seen.entropies
    if rollout.ref_logprobs is not None:
        more["ref_logprobs"] = rollout.ref_logprobs
    return table | token_columns(completions, rollout, tokenizer, more)
