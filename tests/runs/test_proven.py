"""The table of what a strategy is proven with is what the tests of that strategy compare with one process."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import dist_equal
import pytest
import test_dist_mesh
from dist_equal import scorer_in
from lightning.pytorch.strategies import DDPStrategy, Strategy

from lit_rl.algorithms import GRPO, KTO
from lit_rl.algorithms.checks.strategy_checks import PROVEN, Feature, Proven, check_proven
from lit_rl.algorithms.optim.strategies import FSDPTPStrategy, ZeROStrategy
from lit_rl.core.errors import ConfigError

sys.path.append(str(Path(__file__).parents[1] / "zero"))

import zero_runs


def compared(shapes: Iterable[Sequence[str]], folder: Path) -> Proven:
    """The methods and the features of the runs that tests compare."""
    methods, features = set(), set()
    for words in shapes:
        scorer = zero_runs.SCORED in words
        name = [f"reward.functions.reward_model.name={scorer_in(folder)}"] if scorer else []
        module, _ = dist_equal.parts(*words, *name)
        methods.add(type(module).__name__)
        features |= {feature.name for feature in module.features()}
    return Proven(tuple(methods), tuple(features))


@pytest.mark.parametrize(
    ("strategy", "shapes"),
    [
        ("DeepSpeed", [[*zero_runs.WORDS, *words] for words in zero_runs.SHAPES.values()]),
        ("strategy=fsdp_tp", [*test_dist_mesh.SHAPES.values()]),
    ],
)
def test_what_is_proven_is_what_is_compared(strategy: str, shapes: list[list[str]], tmp_path: Path) -> None:
    found = compared(shapes, tmp_path)
    assert sorted(found.methods) == sorted(PROVEN[strategy].methods)
    assert sorted(found.features) == sorted(PROVEN[strategy].features)


class Mine(GRPO):
    """A method of a user's."""


@pytest.mark.parametrize("kind", [ZeROStrategy, FSDPTPStrategy])
def test_the_table_decides(kind: type[Strategy]) -> None:
    """A method that is derived from a proven one is proven; a feature is refused by its setting, with a way out."""
    strategy = kind.__new__(kind)  # DeepSpeed need not be installed
    check_proven(Mine, (), strategy)
    with pytest.raises(ConfigError, match="algo=KTO was never .*GRPO.* and SFT .*strategy=ddp"):
        check_proven(KTO, (), strategy)
    replay = Feature("replay", "algo/replay", "Set algo/replay=none")
    with pytest.raises(ConfigError, match="algo/replay was never .* Set algo/replay=none"):
        check_proven(GRPO, [replay], strategy)


def test_a_strategy_without_a_line_takes_everything() -> None:
    check_proven(KTO, [Feature("replay", "algo/replay", "")], DDPStrategy())
