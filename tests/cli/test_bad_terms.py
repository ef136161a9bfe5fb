"""Settings of algorithms that cannot be, by the command line: exit code, key and likely fix, nothing on the disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_helpers import Command, contents, refused
from tiers import quick

ENGINE = """
from lit_rl.generation.native import NativeGenerator
class Blind(NativeGenerator):
    reports_kept_mass = False
"""
SCORES = """
def short(completions): return [1.0]
def spans(completions): return [[(0, 1, 1.0)] if text else 0.0 for text in completions]
def nan(completions): return [float("nan")] * len(completions)
def good(completions, lengths, answer): return [-n for n in lengths]
"""

ROWS: list[tuple[str, list[str], list[str]]] = [
    # the distribution that is sampled and the one that is learned
    ("bias", ["sampling.logit_bias={5: -1}"], ["sampling.logit_bias={5: -1.0}", "importance ratio"]),
    # groups
    ("group-1", ["algo=dapo", "algo.group_size=1"], ["algo.group_size=1", "2 or more", "algo=reinforce_pp"]),
    ("keep-over-group", ["algo=gfpo", "algo.group_size=3"], ["algo.groups.keep=4", "algo.group_size=3"]),
    (
        "dynamic-1",
        ["algo=ppo", "algo.group_size=1", "algo/groups=dynamic"],
        ["algo.group_size=1", "algo/groups=dynamic"],
    ),
    (
        "replay-1",
        ["algo=reinforce_pp", "algo.group_size=1", "algo/replay=buffer"],
        ["algo.group_size=1", "algo/replay=buffer", "2 or more"],
    ),
    # KL
    ("beta-ppo", ["algo=ppo", "algo.beta=-0.1"], ["algo.beta=-0.1", "[0, inf]"]),
    ("adaptive-kl", ["algo/kl_control=adaptive"], ["algo/kl_control: AdaptiveKL", "algo.beta", "algo.reward_beta"]),
    # correction
    ("weight-norm", ["algo/weight_norm=token"], ["algo/weight_norm", "algo/correction"]),
    (
        "bounds-reversed",
        ["algo/correction=token_truncate", "algo.correction.low=5"],
        ["algo.correction", "low=5.0", "high=3.0"],
    ),
    ("bounds-none", ["algo/correction=token_mask", "algo.correction.high=null"], ["algo.correction", "high=None"]),
    ("vespo-sequence", ["algo=vespo", "algo/correction=sequence_mask"], ["algo/correction", "token_truncate"]),
    ("rejection", ["algo/rejection=tokens", "algo.rejection.high=0.0"], ["algo.rejection", "high=0.0"]),
    # rewards and advantages
    ("reward-clip", ["algo.reward_clip=[5,-5]"], ["algo.reward_clip=[5, -5]", "[lowest, highest]"]),
    ("gae", ["algo=ppo", "algo.advantage.lam=2"], ["algo.advantage", "lam=2", "[0, 1]"]),
    (
        "rows-of-tokens",
        ["algo/whitening=rows", "algo/advantage=process_supervised"],
        ["algo/whitening", "whiten_rows", "process_supervised", "algo/whitening=tokens"],
    ),
    ("ppo-rows", ["algo=ppo", "algo/whitening=rows"], ["algo/whitening", "gae", "algo/whitening=tokens"]),
    ("gdpo-kl", ["algo=gdpo", "algo.reward_beta=100"], ["algo.reward_beta=100.0", "normalize_then_sum", "algo.beta"]),
    ("gdpo-shaping", ["algo=gdpo", "algo/shaping=missing_eos"], ["algo/shaping", "normalize_then_sum"]),
    ("ps-kl", ["algo=grpo_ps", "algo.reward_beta=0.05"], ["algo.reward_beta=0.05", "process_supervised", "algo.beta"]),
    ("remax-shaping", ["algo=remax", "algo/shaping=missing_eos"], ["algo/shaping", "remax", "soft_overlong"]),
    ("grpo-gae", ["algo/advantage=gae"], ["algo.advantage=gae(token_rewards, values, mask)", "all fit but gae"]),
    (
        "ppo-rows-advantage",
        ["algo=ppo", "algo/advantage=group_normalized"],
        ["algo.advantage=group_normalized(rewards, group_id)", "gae and gae_of_turns fit"],
    ),
    # a word where a group's choice belongs
    ("word-loss", ["algo.loss=cispo"], ["algo.loss='cispo'", "write algo/loss=cispo (choices: cispo,", "vespo"]),
    ("word-ratio", ["algo=cispo", "algo.loss.ratio=token"], ["write algo/loss/ratio=token (choices: sequence_mean,"]),
    ("word-entropy", ["algo.entropy=fixed"], ["write algo/entropy=fixed (choices: adaptive, fixed, none"]),
    ("word-whitening", ["algo=pass_at_k", "algo.whitening=rows"], ["write algo/whitening=rows (choices: none, rows"]),
    ("word-critic", ["algo=ppo", "algo.critic=shared_trunk"], ["write algo/critic=shared_trunk (choices: adapter"]),
    ("word-advantage", ["algo.advantage=gae"], ["write algo/advantage=gae (choices: batch_normalized"]),
    ("word-groups", ["algo.groups=dynamic"], ["write algo/groups=dynamic (choices: all, best, dynamic, top"]),
    ("word-slot", ["algo.reference=ema"], ["algo.reference='ema'", "write reference=ema (choices: adapter_base"]),
    ("word-eval", ["algo.evaluation=default"], ["algo.evaluation='default'", "write eval=default"]),
    ("word-near", ["algo.loss=cipso"], ["algo.loss='cipso'", "Did you mean 'cispo'?", "Write algo/loss=..."]),
    ("word-no-choice", ["algo.replay=true"], ["algo.replay=True", "Write algo/replay=... (choices: buffer, none"]),
    # losses
    ("ratio", ["algo=vespo", "algo/loss/ratio=token"], ["algo/loss/ratio", "the algo/loss of this run has no ratio"]),
    ("cap", ["algo=cispo", "algo.loss.cap=0"], ["algo.loss.cap=0", "(0, inf]"]),
    ("cap-dppo", ["algo=dppo_tv", "algo.loss.cap=1"], ["algo.loss.cap=1", "(1, inf]"]),
    ("temperature", ["algo=sapo", "algo.loss.temperature_positive=0"], ["algo.loss.temperature_positive=0"]),
    ("share", ["algo=kl_cov", "algo.loss.share=0"], ["algo.loss.share=0", "(0, 1]"]),
    ("kl-coef", ["algo=kl_cov", "algo.loss.kl_coef=-1"], ["algo.loss.kl_coef=-1", "[0, inf]"]),
    ("threshold", ["algo=dppo_tv", "algo.loss.threshold_low=2"], ["algo.loss.threshold_low=2", "(0, 1]"]),
    ("threshold-kl", ["algo=dppo_kl", "algo.loss.threshold_low=0"], ["algo.loss.threshold_low=0", "(0, inf]"]),
    ("gmpo", ["algo=gmpo", "algo.loss.clip_low=0"], ["algo.loss.clip_low=0", "(0, inf]"]),
    # actor and critic
    (
        "critic-adapter",
        ["algo=ppo", "algo/critic=adapter"],
        ["algo/critic=adapter", "model.lora", "algo/critic=separate"],
    ),
    ("ptx-alone", ["algo=ppo", "algo.ptx_coef=0.1"], ["algo.ptx_coef=0.1", "algo.ptx.path"]),
    ("ptx-weightless", ["algo=ppo", "algo.ptx.path=x.jsonl"], ["algo.ptx_coef=0.0", "algo.ptx.path=x.jsonl"]),
    # references
    ("no-path", ["reference=path"], ["reference.name", "reference.adapter"]),
    # choices that are not there: the list
    ("loss", ["algo/loss=cisp"], ["algo/loss=cisp", "'cispo'", "vespo", "kl_cov"]),
    ("loss-ratio", ["algo/loss/ratio=sequence"], ["algo/loss/ratio=sequence", "sequence_mean", "token"]),
    ("correction", ["algo/correction=tokn"], ["algo/correction=tokn", "token_mask", "sequence_truncate"]),
    ("reference", ["reference=copy"], ["reference=copy", "frozen_copy", "ema", "bema"]),
]


@pytest.mark.parametrize(
    "arguments, words",
    quick([pytest.param(*row, id=name) for name, *row in ROWS], {"adaptive-kl", "word-loss", "ratio"}),
)
def test_a_bad_term_is_refused_and_nothing_is_written(step: Command, cwd, arguments, words):
    refused(step(*arguments), 2, *words)
    assert contents(cwd) == []


@pytest.mark.all
@pytest.mark.parametrize(
    "arguments, words",
    [
        (["algo=reward_model", "eval.win_rate_against=base"], ["eval.win_rate_against='base'", "RewardModeling"]),
        (
            ["algo=process_reward_model", "judge=llm", "judge.base_url=https://h/v1", "judge.model=m"],
            ["judge=LLMJudge", "ProcessRewardModeling"],
        ),
    ],
    ids=["against", "judge"],
)
def test_what_writes_nothing_has_no_use_for_a_judge(command: Command, cwd, arguments, words):
    refused(command(*arguments, "trainer.max_steps=1"), 2, *words, "writes none")
    assert contents(cwd) == []


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package of the user's, allowed on the command line."""
    (tmp_path / "my_terms.py").write_text(ENGINE + SCORES)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "allow_targets=[my_terms]"


@pytest.mark.all
def test_an_engine_that_cannot_say_what_it_cut(step: Command, cwd, mine):
    engine = "generator={_target_: my_terms.Blind}"
    outcome = step("sampling.top_p=0.9", "~generator", f"+{engine}", mine)
    refused(outcome, 2, "sampling.top_p=0.9", "Blind", "generator=native", "eval.top_p")
    assert contents(cwd) == []


@pytest.mark.all
@pytest.mark.parametrize("name", ["short", "nan"])
def test_a_score_of_ones_own_that_is_not_one_number_a_completion(step: Command, mine, name):
    score = f"algo.groups.score._target_=my_terms.{name}"
    refused(
        step("algo=gfpo", "algo.group_size=4", "algo.groups.keep=2", score, mine, "run_dir=run"), 4, "algo.groups.score"
    )


@pytest.mark.all
def test_a_rows_advantage_is_whitened_over_tokens(step: Command):
    outcome = step("algo/whitening=tokens", "run_dir=run")
    assert outcome.code == 0, outcome.err


@pytest.mark.all
def test_a_greedy_baseline_is_normalised_and_clipped(step: Command):
    outcome = step("algo=remax", "algo/reward_norm=running", "algo.reward_clip=[-2,2]", "run_dir=run")
    assert outcome.code == 0, outcome.err


@pytest.mark.all
@pytest.mark.parametrize("key", ["algo/shaping=missing_eos", "algo/reward_norm=running", "algo.reward_clip=[-1,1]"])
def test_what_changes_rewards_of_rows_does_not_go_with_spans(step: Command, mine, key):
    outcome = step("reward=function", "reward.fn=my_terms:spans", key, mine, "run_dir=run")
    refused(outcome, 2, key.partition("=")[0].replace("/", "."), "spans")


@pytest.mark.all
def test_a_score_of_ones_own_decides(step: Command, mine):
    score = "algo.groups.score._target_=my_terms.good"
    outcome = step("algo=gfpo", "algo.group_size=4", "algo.groups.keep=2", score, mine, "run_dir=run")
    assert outcome.code == 0, outcome.err


@pytest.mark.all
def test_supervised_text_that_is_not_there(step: Command, cwd: Path):
    outcome = step("algo=ppo", "algo.ptx.path=gone.jsonl", "algo.ptx_coef=0.1", "run_dir=run")
    refused(outcome, 3, "gone.jsonl", "no such file", "algo.ptx")


@pytest.mark.all
def test_a_reference_that_nothing_needs_is_not_loaded_and_the_run_says_so(step: Command, cwd: Path):
    """One that would be refused if it were loaded: the policy has no adapters."""
    with pytest.warns(UserWarning, match="is not loaded") as caught:
        outcome = step("reference=adapter_base", "run_dir=run")
    assert outcome.code == 0, outcome.err
    (line,) = [text for warning in caught if "is not loaded" in (text := str(warning.message))]
    assert "AdapterBase" in line and "algo.beta" in line and "\n" not in line
    refused(step("reference=adapter_base", "algo.beta=0.1", "run_dir=other"), 2, "reference=adapter_base", "model.lora")
    assert json.loads((cwd / "run" / "summary.json").read_text())["status"] == "finished"
