"""Settings of algorithms that cannot be, by the command line: exit code, key and likely fix, nothing on the disk.

What every constructor refuses is tested there, in algorithms/test_checks_terms.py; here is what the command line adds.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_helpers import Command, contents, refused
from tiers import quick

ROWS: list[tuple[str, list[str], list[str]]] = [
    # groups
    ("keep-over-group", ["algo=gfpo", "algo.group_size=3"], ["algo.groups.keep=4", "algo.group_size=3"]),
    # KL
    ("adaptive-kl", ["algo/kl_control=adaptive"], ["algo/kl_control: AdaptiveKL", "algo.beta", "algo.reward_beta"]),
    # a word where a group's choice belongs
    ("word-loss", ["algo.loss=cispo"], ["algo.loss='cispo'", "write algo/loss=cispo (choices: cispo,", "vespo"]),
    ("word-ratio", ["algo=cispo", "algo.loss.ratio=token"], ["write algo/loss/ratio=token (choices: sequence_mean,"]),
    ("word-slot", ["algo.reference=ema"], ["algo.reference='ema'", "write reference=ema (choices: adapter_base"]),
    ("word-eval", ["algo.evaluation=default"], ["algo.evaluation='default'", "write eval=default"]),
    ("word-near", ["algo.loss=cipso"], ["algo.loss='cipso'", "Did you mean 'cispo'?", "Write algo/loss=..."]),
    ("word-no-choice", ["algo.replay=true"], ["algo.replay=True", "Write algo/replay=... (choices: buffer, none"]),
    # losses
    ("ratio", ["algo=vespo", "algo/loss/ratio=token"], ["algo/loss/ratio", "the algo/loss of this run has no ratio"]),
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
def test_what_writes_nothing_has_no_use_for_a_judge(command: Command, cwd):
    refused(
        command("algo=reward_model", "eval.win_rate_against=base"), 2, "eval.win_rate_against='base'", "writes none"
    )
    judge = ["judge=llm", "judge.base_url=https://h/v1", "judge.model=m"]
    refused(command("algo=process_reward_model", *judge), 2, "judge=LLMJudge", "ProcessRewardModeling", "writes none")
    assert contents(cwd) == []


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
