"""`strategy=fsdp_tp`: a tensor-parallel group of two, and two of them under FSDP2, do what one process does."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import dist_equal
import dist_jobs
import dist_mesh
import pytest
import torch
from dist_equal import assert_same_metrics, left
from dist_mesh import OTHERS, SHAPES, STEPS, STOP
from runs_helpers import assert_same

pytestmark = [pytest.mark.dist, pytest.mark.all]

TWO = ("grpo", "dpo", "grpo-adamw")
"""Of two processes in every run; SFT is run with the other families."""

assert_equal_runs = partial(dist_equal.assert_equal_runs, beyond=2e-6, moved=1e-3)


@pytest.fixture(scope="module")
def families(two_ranks: Path) -> Path:
    """Where models of other families are, made before the two processes began."""
    return two_ranks


@pytest.fixture(scope="module")
def two(two_ranks: Path) -> Path:
    return two_ranks / "mesh"


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, families: Path) -> Any:
    """`one(name)`: what one process does, made when it is first asked for."""
    folder, made = tmp_path_factory.mktemp("one"), {}

    def of(name: str) -> Any:
        if name not in made:
            other = [f"model.name={families / name}"] if name in OTHERS else []
            dist_mesh.run(name, folder, 1, *other, shape="sft" if other else "")
            made[name] = left(folder, name)
        return made[name]

    return of


def saved(folder: Path, name: str, step: int = STEPS) -> Any:
    return torch.load(folder / name / f"step={step}.ckpt", weights_only=True)


def assert_same_training(one: Any, other: Any, name: str, families: Path) -> None:
    assert one["metrics"]["train/grad_norm"] > dist_mesh.CLIP, "nothing was clipped"
    share = 2e-3 if name == "grpo-adamw" else 2e-4  # AdamW divides by the gradient's size, however small that is
    assert_equal_runs(one, other, share=share, start=str(families / name) if name in OTHERS else "tiny")


@pytest.mark.parametrize("name", [*TWO, *OTHERS])
def test_a_tensor_parallel_group_equals_one_process(name: str, two: Path, one: Any, families: Path) -> None:
    """Weights after four clipped steps, norms of gradients, rewards and validation.

    The second rank's reward function says other numbers than the first one's: these do not count.
    """
    assert_same_training(one(name), left(two, name), name, families)


@pytest.mark.parametrize("name", ["grpo-adamw", "grpo"])
def test_a_group_goes_on_with_the_bits_of_the_whole_run(name: str, two: Path) -> None:
    """With moments of each weight, and with SGD, which has none."""
    first, second = saved(two, name), saved(two, f"{name}-again")
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch", "lit_rl"):
        assert_same(first[part], second[part], part)
    assert_same_metrics(left(two, name)["metrics"], left(two, f"{name}-again")["metrics"])
    assert not (two / f"{name}-again" / f"step={STOP - 1}.ckpt").exists(), "it began anew"
    assert len(first["lit_rl"]) == 1, "the ranks of a group count as one"
    assert left(two, name)["senders"] == [0], "rows that two ranks have are written once"


def test_two_groups_under_fsdp_equal_one_process(tmp_path: Path, one: Any, families: Path) -> None:
    """Four processes: two draw the same rows, two others the rest. Its checkpoint has the rows of two ranks."""
    four = dist_equal.in_processes(dist_jobs.__file__, tmp_path, "mesh_of_four") / "mesh_of_four"
    assert_same_training(one("grpo"), left(four, "grpo"), "grpo", families)
    assert left(four, "grpo")["senders"] == [0, 2], "the first rank of each group sends its rows"
    ranks = [each["module"]["rollout"]["completions"]["response_ids"] for each in saved(four, "grpo", STOP)["lit_rl"]]
    assert len(ranks) == 2 and (ranks[0].shape != ranks[1].shape or not torch.equal(*ranks))


@pytest.mark.exhaustive
def test_every_shape_on_two_groups_equals_one_process(tmp_path: Path, one: Any, families: Path) -> None:
    for kind in OTHERS:
        (tmp_path / kind).symlink_to(families / kind)
    four = dist_equal.in_processes(dist_jobs.__file__, tmp_path, "mesh_of_four_all") / "mesh_of_four_all"
    for name in [*SHAPES, *OTHERS]:
        assert_same_training(one(name), left(four, name), name, families)
    first, second = saved(four, "grpo-adamw"), saved(four, "grpo-adamw-again")
    for part in ("state_dict", "optimizer_states", "lit_rl"):
        assert_same(first[part], second[part], part)
