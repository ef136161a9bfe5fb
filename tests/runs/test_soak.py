"""What `scripts/soak.py` says of runs: that a leak is one, and that a run has none."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from lit_rl.runs.env_plays import held_resources

COUNTS = {"open files": 5.0, "threads": 2.0, "child processes": 1.0}


@pytest.fixture
def soak(root: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(root / "scripts"))
    import soak

    yield soak
    sys.modules.pop("soak")


def looks(leak: float = 0.0, **more: float) -> list[dict[str, float]]:
    """Of 150 steps that fill a pool of 50 MiB in the first third, jump by 20 MiB for a moment, and leak so many KiB."""
    return [
        {"step": step, "KiB of memory": 1e5 + 1000 * min(step, 50) + 20_000 * (step == 100) + leak * step}
        | {"Python objects": 1e6, "KiB of children": 0.0}
        | COUNTS
        | ({name: COUNTS[name] + more[name] for name in more} if step > 120 else {})
        for step in range(5, 155, 5)
    ]


def test_a_pool_that_fills_and_a_look_that_is_odd_are_no_leak(soak) -> None:
    verdict = soak.judged(looks())
    assert (verdict.memory, verdict.grown) == (0.0, ())
    assert soak.judged(looks(leak=20)).grown == ()


def test_what_grows_is_named(soak) -> None:
    verdict = soak.judged(looks(leak=64))
    assert verdict.memory == pytest.approx(64) and verdict.grown == ("memory",)
    for name in COUNTS:
        assert soak.judged(looks(**{name: 1.0})).grown == (name,)
    with pytest.raises(ValueError, match="8 looks say nothing"):
        soak.judged(looks()[:8])


def test_the_names_are_those_that_are_counted(soak) -> None:
    assert {"KiB of memory", "Python objects", *soak.FLAT} <= held_resources().keys()


def test_every_preset_has_its_settings(soak) -> None:
    assert {"grpo", "dpo", "turn_ppo"} <= set(soak.PRESETS) and soak.NEEDS.keys() <= set(soak.PRESETS)
    assert soak.settings_of("kto") == ["algo=kto", *soak.PAIRS]
    assert soak.settings_of("grpo") == ["algo=grpo", *soak.WRITES, *soak.GROUPS]
    assert soak.settings_of("online_dpo") == ["algo=online_dpo", *soak.WRITES], "its pairs stay pairs"


@pytest.mark.exhaustive
@pytest.mark.parametrize("leak", [0, 256])
@pytest.mark.parametrize("family", ["grpo", "sft"])
def test_a_run_is_flat_and_a_planted_leak_is_found(soak, family: str, leak: int, tmp_path: Path) -> None:
    verdict = soak.judged(soak.looked_at(family, 60, tmp_path, f"+callbacks.looks.leak={leak}"))
    assert verdict.memory == pytest.approx(leak, abs=soak.BOUND)
    assert verdict.grown == (("memory",) if leak else ())


@pytest.mark.exhaustive
@pytest.mark.parametrize("calls, grown", [(10, ()), (0, ("worker processes",))], ids=["renewed", "never renewed"])
def test_a_leaking_reward_is_contained_where_its_process_is_renewed(soak, calls: int, grown: tuple, tmp_path: Path):
    verdict = soak.judged(soak.looked_at("leaking-reward", 60, tmp_path, f"reward.recycle_after={calls}"))
    assert verdict.grown == grown
