"""`lit-rl eval` over a run's folder scores by the run's own data and reward, and names what was typed otherwise."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_helpers import QUICK, refused, write_jsonl

from lit_rl.cli.run_info import is_over_a_run
from lit_rl.cli.run_settings import command_over
from lit_rl.runs.run_dir import RunDir

ROWS = [{"prompt": f"{n}+{n}=", "answer": "no number"} for n in range(8)]
EVAL = ["eval", "run_dir=run", "ckpt_path=last", "logger=none", "trainer.accelerator=cpu", "trainer.devices=1"]


def result(run: Path) -> dict[str, float]:
    """Of the newest evaluation."""
    folder = max(run.glob("eval_*"), key=lambda path: path.stat().st_mtime_ns)
    found = json.loads((folder / "summary.json").read_text())["metrics"]
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()
    return found


def test_what_is_no_folder_of_a_run_has_no_settings(tmp_path: Path) -> None:
    for name in ("x" * 5000, "~nobody-of-that-name/x", str(tmp_path), "", None):
        assert not is_over_a_run("eval", name)
    (tmp_path / "config.yaml").touch()
    assert is_over_a_run("eval", str(tmp_path)) and not is_over_a_run("fit", str(tmp_path))
    (tmp_path / "config.yaml").write_text("trainer: {max_steps: 3}\nmodel: {}\n")  # of the user, or LightningCLI's
    assert not is_over_a_run("eval", str(tmp_path))


def test_the_line_that_evaluates_types_again_what_is_not_the_run_s(tmp_path: Path) -> None:
    tree = {"allow_targets": [], "model": {"name": "tiny"}, "data": {"path": "a.jsonl"}, "algo": {"beta": 0.1}}
    own = ["trainer.devices=2", "generator=vllm", "logger=none"]
    training = ["trainer.max_steps=9", "optimizer.lr=1e-5", "trainer.gradient_clip_algorithm=value"]
    training += ["trainer.limit_val_batches=0", "+trainer.limit_train_batches=2", "trainer.check_val_every_n_epoch=2"]
    words = ["model=tiny", *training, "data.path=a.jsonl", *own]

    def told(tree: dict[str, Any], *words: str) -> list[str]:
        command = shlex.join(["python", "train.py", *words, f"run_dir={tmp_path}"])
        return shlex.split(command_over(tree, RunDir(tmp_path), command))

    short = ["lit-rl", "eval", f"run_dir={tmp_path}", "ckpt_path=last"]
    assert told(tree, *words) == [*short, *own]
    code = {"functions": {"f": {"_target_": "lit_rl.rewards.FunctionFromPath", "path": "./mine.py:f"}}}
    assert told({**tree, "reward": code}, *words) == [*short, "trust_run=true", *own]
    groups = ["--config-dir", "my conf"]
    assert told(tree, *groups, "algo=mine") == [*short[:2], *groups, *short[2:]]
    # What the run cannot say, or an experiment would choose anew, is typed again as a whole.
    for run, word in (({**tree, "data": {"token": "s3cret"}}, "data=x"), (tree, "experiment=guess")):
        kept = ["python", "train.py", word, f"run_dir={tmp_path}"]
        assert told(run, word, *training) == [*kept, "task=eval", "ckpt_path=last"]


def test_a_run_on_own_rows_is_scored_on_them_and_other_words_are_named(command, cwd):
    """The default data are sums that this policy gets right at times; the run's own rows have no right answer."""
    write_jsonl(cwd / "rows.jsonl", ROWS)
    own = ["data=jsonl", "data.path=rows.jsonl", "data.val_path=rows.jsonl", "algo.beta=0.01", "run_dir=run"]
    trained = command("train", *QUICK, *own, "callbacks.samples.print=0")
    assert trained.code == 0, trained.err

    bare = command(*EVAL)
    assert bare.code == 0, bare.err
    found = result(cwd / "run")
    assert found["val/reward"] == 0 and found["val/prompts"] == 8 and "val/rewards/exact_match/mean" in found
    assert "Settings of run/config.yaml, for model, data, algorithm and reward." in bare.out
    assert re.search(r"Evaluation of run/checkpoints/\S+: greedy$", bare.out, re.M)

    other = command(*EVAL, "reward=length", "eval.limit=4", "sampling.max_new_tokens=3", "algo.group_size=2")
    assert other.code == 0, other.err
    found = result(cwd / "run")
    assert found["val/rewards/length/mean"] == 1 and found["val/prompts"] == 4
    (line,) = (line for line in other.out.splitlines() if "other than in the run" in line)
    for word in ("reward.functions.exact_match", "reward.functions.length", "sampling.max_new_tokens is 3, and was 6"):
        assert word in line
    assert "data" not in line and "algo" not in line and "eval" not in line

    (last,) = (line for line in trained.out.splitlines() if line.startswith("evaluate it"))
    assert shlex.split(last)[2:6] == ["lit-rl", "eval", "run_dir=run", "ckpt_path=last"] and "data" not in last
    as_told = command(*shlex.split(last)[3:])
    assert as_told.code == 0 and "for model, data, algorithm and reward" in as_told.out, as_told.err
    assert re.search(r"Evaluation of .*: sampled at 1, \d+ completions a prompt$", as_told.out, re.M), as_told.out
    result(cwd / "run")

    best = ["best-of-n", *EVAL[1:], "eval.group_size=2", "eval.temperature=1"]
    own = command(*best)
    assert own.code == 0 and "2 completions of 8 prompts" in own.out, own.err
    (rows,) = (cwd / "run").glob("best_of_n_*/best_of_n.jsonl")
    assert {json.loads(line)["prompt"] for line in rows.read_text().splitlines()} <= {row["prompt"] for row in ROWS}
    write_jsonl(cwd / "others.jsonl", ROWS[:3])
    others = command(*best, "data.path=others.jsonl")
    assert others.code == 0 and "2 completions of 3 prompts" in others.out, others.err

    refused(command(EVAL[0], "-m", *EVAL[1:], "eval.limit=2,4"), 2, "cannot be a sweep (-m)")

    _hostile(command, cwd)


def _hostile(command, cwd: Path) -> None:
    """The folder of somebody else: no code, and nothing of this machine, until the command line trusts it."""
    config = cwd / "run" / "config.yaml"
    tree = yaml.safe_load(config.read_text())
    (cwd / "theirs.py").write_text(
        "open(__file__ + '.canary', 'w').close()\ndef f(completions): return [0.5] * len(completions)\n"
    )
    code = {"functions": {"f": {"_target_": "lit_rl.rewards.FunctionFromPath", "path": f"{cwd}/theirs.py:f"}}}
    theirs = {**tree["reward"], **code}
    config.write_text(yaml.safe_dump({**tree, "reward": theirs, "algo": {**tree["algo"], "reward": theirs}}))
    for words in (EVAL, ["best-of-n", *EVAL[1:]]):
        refused(command(*words), 2, "FunctionFromPath", "trust_run=true")
    config.write_text(yaml.safe_dump({**tree, "algo": {**tree["algo"], "reward": theirs}}))
    refused(command(*EVAL), 2, "algo.reward", "trust_run=true")
    assert not list(cwd.glob("*.canary"))
    config.write_text(yaml.safe_dump({**tree, "data": {**tree["data"], "path": "${oc.env:HOME}"}}))
    refused(command(*EVAL), 2, "data holds '${oc.env:HOME}'")
    config.write_text(yaml.safe_dump({**tree, "data": {**tree["data"], "path": "https://<redacted>a.b/c.jsonl"}}))
    refused(command(*EVAL), 2, "data holds", "where a secret was", "data=...")
    secret = {**tree["reward"], "weights": "<redacted>"}
    config.write_text(yaml.safe_dump({**tree, "reward": secret, "algo": {**tree["algo"], "reward": secret}}))
    refused(command(*EVAL), 2, "reward holds '<redacted>'")
    typed = command(*EVAL, "reward=exact_match")  # then the run's is not read
    assert typed.code == 0 and result(cwd / "run")["val/reward"] == 0, typed.err
    config.write_text(yaml.safe_dump({**tree, "reward": theirs, "algo": {**tree["algo"], "reward": theirs}}))
    trusted = command(*EVAL, "trust_run=true")
    assert trusted.code == 0 and result(cwd / "run")["val/reward"] == pytest.approx(0.5)
