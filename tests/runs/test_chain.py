"""SFT, a reward model, PPO and online DPO with it, DPO from rollouts: the committed chain, each stage from the last.

In every run with a hundredth of its steps, and two at least, which is enough to see that each stage begins where it
should; in `make test-exhaustive` with all of them, and every stage is better than the one before.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import warm

pytestmark = [pytest.mark.chain, pytest.mark.all, pytest.mark.xdist_group("chain")]


@pytest.fixture(scope="module", params=["0.01", pytest.param("1", marks=pytest.mark.exhaustive)])
def out(tmp_path_factory: pytest.TempPathFactory, root: Path, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path_factory.mktemp("chain")
    command = [sys.executable, str(root / "scripts" / "chain.py"), str(folder), "--share", request.param]
    command += ["--picture", str(folder / "chain.png")]
    result = warm.run(command, timeout=2400)
    assert result.returncode == 0, result.stderr[-3000:]
    (folder / "said").write_text(result.stdout)
    return folder


@pytest.fixture(scope="module")
def found(out: Path) -> dict[str, Any]:
    return json.loads((out / "chain.json").read_text())


STAGES = ["sft", "dpo", "ppo", "online_dpo"]
whole = pytest.mark.parametrize("out", [pytest.param("1", marks=pytest.mark.exhaustive)], indirect=True)


def test_a_policy_begins_with_the_one_before(found):
    begins = {stage: found["policies"][stage]["begins"] for stage in STAGES}
    assert begins == {"sft": "tiny", "dpo": "sft", "ppo": "sft", "online_dpo": "sft"}


@whole
@pytest.mark.parametrize("stage", STAGES)
def test_a_policy_is_better_than_the_one_it_began_with(found, stage):
    """On sums that no stage has seen, beyond the 95 % interval of the difference over prompts."""
    _, low, _ = found["policies"][stage]["gain"]
    assert low > 0


@whole
def test_the_reward_model_has_learned_to_tell_right_from_wrong(found):
    before, after = found["reward_model"]
    assert abs(before - 0.5) < 0.1
    assert after > 0.85


def test_what_learned_by_the_reward_model_saw_no_right_answer(out):
    for stage in ("ppo", "online_dpo"):
        config = (out / stage / "config.yaml").read_text()
        assert f"name: {out}/reward_model/hf" in config
        assert "exact_match" not in config


def test_rollouts_are_those_of_the_model_before_them(out):
    """The stage that pairs completions moves no weight that its reader could notice."""
    import torch
    from safetensors.torch import load_file

    before, after = (load_file(out / stage / "hf" / "model.safetensors") for stage in ("sft", "rollouts"))
    assert all(torch.allclose(before[name], after[name], rtol=0, atol=1e-8) for name in before)


def test_a_finished_chain_is_measured_again_and_not_run_again(out, root):
    command = [sys.executable, str(root / "scripts" / "chain.py"), str(out)]
    result = warm.run(command, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "python train.py" not in result.stdout
    assert "online_dpo" in result.stdout
    assert "python train.py" in (out / "said").read_text()
    assert (out / "chain.png").stat().st_size > 10_000
