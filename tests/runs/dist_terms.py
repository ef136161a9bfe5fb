"""Short runs with one term each, in one process or in two (`dist_jobs.py`); what each run did is left in the folder."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import dist_equal
import lightning as L
import torch

# Started as a program, this file knows no folder of tests but its own.
sys.path.append(str(Path(__file__).parents[1] / "algorithms"))
from copied_engines import CopiedPolicyGenerator
from objective_terms import TWO_STEPS, EngineWithOtherLogprobs, fresh

from lit_rl.algorithms import GRPO, PPO, Constant, Reinforce
from lit_rl.algorithms.optim.optimizers import ByPath
from lit_rl.algorithms.optim.strategies import FSDP2Strategy
from lit_rl.algorithms.terms.credit import RunningNorm
from lit_rl.algorithms.terms.groups import DynamicSampling
from lit_rl.algorithms.terms.regularizers import AdaptiveEntropy, AdaptiveKL
from lit_rl.core.rollout import Sampling
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Addition
from lit_rl.models.critics import SeparateCritic
from lit_rl.models.sharding import full_state_dict
from lit_rl.ops import advantages, engine_mismatch, policy_losses, selection

STEPS = 4
FORMULAS = (
    *("clipped-delta", "gspo-token", "cispo", "cispo-two-sided", "sapo", "dppo-tv", "dppo-kl", "prime-rl", "up-grpo"),
    *("cpgd", "opo", "process", "maxrl", "pass-at-k", "lite-ppo", "vespo", "kl-cov", "ppo", "top-entropy-and-bonus"),
    *("kl-corrected-k1", "kl-corrected-k2", "kl-in-reward", "entropy-bonus", "entropy-adaptive", "top-entropy"),
)
"""Of `TWO_STEPS`, what differs from one of the others in the formula of a token or of a group, which lies on one rank
whole: that many processes do what one does is shown by the other; micro-batches: `algorithms/test_gradients.py`."""


def varied(completions: list[str], log_metric: Callable[[str, float], None]) -> list[float]:
    """Differs within most groups, and not in all. What it logs, it logs under names that not every rank sees."""
    for text in completions:
        log_metric(f"first/{ord(text[:1] or '-')}", len(text))
    return [float(len(text) % 2) for text in completions]


def uneven(completions: list[str], answer: list[str]) -> list[float]:
    """One and the same within the groups of many prompts, of which ranks have different numbers."""
    return [float(len(text) % 2) if int(right) > 7 else 0.0 for text, right in zip(completions, answer)]


def shapes() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Made anew for each run: controllers hold a state."""
    assert set(FORMULAS) < set(TWO_STEPS)
    two = {"iterations": 2}
    return {
        "ppo": (
            PPO,
            {**two, "reward_beta": 0.2, "critic": SeparateCritic(), "vf_coef": 0.5, "group_size": 2, "lr": 0.05},
        ),
        "entropy": (
            GRPO,
            {
                **two,
                "selection": partial(selection.top_entropy, share=0.3),
                "entropy": AdaptiveEntropy(coef=0.1, delta=0.05, target=10.0),
            },
        ),
        "kl-cov": (GRPO, {**two, "loss": partial(policy_losses.kl_cov_loss, share=0.2)}),
        "weights": (
            GRPO,
            {
                **two,
                "generator": EngineWithOtherLogprobs(),
                "correction": engine_mismatch.token_truncate,
                "weight_norm": engine_mismatch.normalize_sequence_weights,
            },
        ),
        "ahead": (GRPO, {"generator": CopiedPolicyGenerator(lag=1)}),
        "batch-normalized": (GRPO, {"advantage": advantages.batch_normalized}),
        "skipped": (GRPO, {"reward": uneven}),
        "dynamic": (GRPO, {"groups": DynamicSampling(6), "beta": 0.2, "kl_control": AdaptiveKL(0.01, 64)}),
        "whitened": (Reinforce, {**two, "reward_beta": 0.2, "reward_norm": RunningNorm()}),
        "vespo": (
            GRPO,
            {
                **two,
                "loss": policy_losses.vespo_loss,
                "generator": EngineWithOtherLogprobs(),
                "correction": engine_mismatch.token_truncate,
            },
        ),
        **{
            f"step-{name}": (kind, {"iterations": 2, **fresh(terms)})
            for name, (kind, terms) in TWO_STEPS.items()
            if name not in FORMULAS
        },
    }


class Seen(L.Callback):
    """The widest response of this rank in each rollout, and the rows that a gradient comes from."""

    def __init__(self) -> None:
        self.widths: list[int] = []
        self.teaching: list[int] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        self.widths.append(int(pl_module.rollout.completions.lengths.max()))
        teaching = pl_module.rows_that_teach(pl_module.rollout)
        self.teaching.append(len(pl_module.rollout) if teaching is None else int(teaching.sum()))


def run(name: str, folder: Path, devices: int, **more: Any) -> None:
    """Train and leave `name.pt` there: how weights changed (of plain SGD, so: the gradients), and what was logged."""
    algorithm, settings = shapes()[name]
    settings = {"group_size": 4, "lr": 0.1, "sampling": Sampling(max_new_tokens=6), **settings}
    module = algorithm(
        "tiny", settings.pop("reward", varied), scheduler=Constant(),
        optimizer=ByPath("torch.optim.SGD", lr=settings.pop("lr")), **settings,
    )  # fmt: skip
    on_rank = Seen()
    trainer = dist_equal.trainer(folder, devices, max_steps=STEPS, callbacks=[on_rank], gradient_clip_val=1.0, **more)
    data = RolloutDataModule(task=Addition(max_operand=5, val_rows=4), prompts_per_rollout=8)
    trainer.fit(module, datamodule=data)
    parts = {part: full_state_dict(getattr(module, part)) for part in ("policy", *module.trained_beside)}
    weights = {f"{part}.{key}": value for part, state in parts.items() for key, value in state.items()}
    metrics = dist_equal.logged(trainer)
    mine = {"widths": on_rank.widths, "teaching": on_rank.teaching}
    seen = {each: module.ranks.gather(torch.tensor([found])).tolist() for each, found in mine.items()}
    if trainer.is_global_zero:
        torch.save({"weights": weights, "metrics": metrics, **seen}, folder / f"{name}.pt")


SHARDED = ("ppo", "skipped")
"""Run under FSDP2 too: an actor and a critic, and steps from which one rank learns nothing."""


def main(folder: Path) -> None:
    for name in shapes():
        run(name, folder, 2)
    (folder / "fsdp").mkdir(exist_ok=True)
    for name in SHARDED:
        run(name, folder / "fsdp", 2, strategy=FSDP2Strategy())
