"""A resumed run equals the uninterrupted one bit for bit, with everything that holds a state switched on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from dist_resumed import PPO
from dist_resumed import STATEFUL as TERMS
from runs_helpers import SMALL, assert_same, assert_same_run, interrupted, newest, rows

EVERY_STEP = ["callbacks.checkpoint.every_n_train_steps=1", "callbacks.checkpoint.save_top_k=-1"]
QUICK = [*SMALL, "trainer.limit_val_batches=0"]
STATEFUL = [*TERMS, "trainer.accumulate_grad_batches=2"]


def terms(run_dir: Path) -> dict[str, Any]:
    """What the newest checkpoint holds beside weights."""
    saved = newest(run_dir)
    return {"reference": saved.get("reference"), **saved["lit_rl"][0]["module"]}


def assert_resumes(train, tmp_path: Path, overrides: list[str], steps: tuple[int, ...]) -> Path:
    whole = tmp_path / "whole"
    assert train(*overrides, f"run_dir={whole}") == 0
    for step in steps:
        again = tmp_path / f"from_{step}"
        interrupted(whole, again, step)
        assert train(*overrides, f"run_dir={again}", "ckpt_path=last") == 0
        assert_same_run(whole, again)
        assert_same(terms(whole), terms(again), "terms")
        assert_same(
            [rank["module"] for rank in newest(whole)["lit_rl"]], [r["module"] for r in newest(again)["lit_rl"]]
        )
    return whole


def test_everything_that_holds_a_state_goes_on_from_the_middle_of_a_rollout(train, tmp_path):
    whole = assert_resumes(train, tmp_path, [*QUICK, *EVERY_STEP, *STATEFUL], (7, 8))
    table = [row for row in rows(whole) if "train/reward" in row]
    # all of it was at work, so all of it was compared
    assert table[-1]["train/replay/groups"] > 0 and table[-1]["train/groups/drawn"] > 0
    assert len({row["train/kl_coef"] for row in table}) == len({row["train/entropy_coef"] for row in table}) == 3
    saved = terms(whole)
    assert set(saved["terms"]) == {"kl_control", "reward_norm", "entropy", "groups", "replay"}
    assert saved["terms"]["groups"]["position"] > 0 and saved["terms"]["reward_norm"]["count"] > 0
    assert saved["terms"]["replay"]["groups"] and saved["reference"]


SHAPES = {
    "separate": [],
    "shared-trunk": ["algo/critic=shared_trunk", "algo/kl_control=adaptive", "algo.critic_warmup=2"],
    "adapters": ["model.lora.r=4", "algo/critic=adapter", "reference=adapter_base", "algo/critic_scheduler=cosine"],
}


@pytest.mark.all
@pytest.mark.parametrize("shape", SHAPES)
def test_an_actor_and_a_critic_go_on_from_the_middle_of_a_rollout(shape, train, tmp_path):
    whole = assert_resumes(train, tmp_path, [*QUICK, *EVERY_STEP, *PPO, "trainer.max_steps=8", *SHAPES[shape]], (3,))
    names = newest(whole)["state_dict"]
    assert {name.partition(".")[0] for name in names} == {"policy", "critic"}
    if shape == "adapters":
        assert all("lora_" in name or "head" in name for name in names)


@pytest.mark.all
def test_supervised_text_goes_on_where_it_was(train, tmp_path):
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"{n}+{n}={2 * n}"}) + "\n" for n in range(7)))
    ptx = [f"algo.ptx.path={texts}", "algo.ptx.batch_size=3", "algo.ptx_coef=0.2"]
    assert_resumes(train, tmp_path, [*QUICK, *EVERY_STEP, *PPO, "trainer.max_steps=8", *ptx], (3,))


OTHERS = {
    "no-critic": (
        ["algo=ppo"],
        ["algo=ppo", "algo/critic=shared_trunk"],
        ["not of this model", "unexpected", "critic."],
    ),
    "no-reference": (["algo.beta=0.1"], ["algo.beta=0.1", "reference=ema"], ["lacks its weights", "reference=EMA"]),
    "no-norm": ([], ["algo/reward_norm=running"], ["algo.reward_norm", "RunningNorm"]),
    "other-groups": (["algo/groups=top", "algo.groups.keep=2"], ["algo/groups=dynamic"], ["algo.groups"]),
    "other-control": (["algo.beta=0.1"], ["algo.beta=0.1", "algo/kl_control=adaptive"], ["AdaptiveKL"]),
}


@pytest.mark.all
@pytest.mark.parametrize(("first", "second", "words"), OTHERS.values(), ids=OTHERS)
def test_a_checkpoint_of_other_terms_is_refused(first, second, words, train, tmp_path, capsys):
    run_dir = f"run_dir={tmp_path / 'run'}"
    assert train(*QUICK, "trainer.max_steps=1", run_dir, *first) == 0
    (tmp_path / "run" / "summary.json").unlink()
    assert train(*QUICK, "trainer.max_steps=2", run_dir, "ckpt_path=last", *second) == 7
    said = capsys.readouterr().err
    assert "Traceback" not in said
    for word in [*words, "config.yaml"]:
        assert word in said
