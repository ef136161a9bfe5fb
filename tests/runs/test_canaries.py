"""What comes from elsewhere carries a canary, which leaves a trace where it is run; and secrets stay outside."""

from __future__ import annotations

import copy
import json
import os
import shlex
import time
from pathlib import Path

import pytest
import torch
import yaml
from omegaconf import OmegaConf
from runs_helpers import SMALL
from secret_examples import HARMLESS, LONG, OF_A_FORM, OF_A_NAME

import lit_rl
from lit_rl.callbacks import SavedRollout
from lit_rl.core.errors import DataError, StorageError
from lit_rl.data.rendering import render_prompt
from lit_rl.models import LanguageModel
from lit_rl.reports.secrets import CONTEXT_FORMS, SECRET_NAMES, TOKEN_FORMS, redact, redact_command
from lit_rl.runs.closing_report import closing_table


class Canary:
    """Pickled, it is code: whoever unpickles it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_pickled_code_in_a_checkpoint_or_a_saved_rollout_is_not_run(train, tmp_path: Path, capsys):
    canary, file = tmp_path / "canary", tmp_path / "theirs.ckpt"
    torch.save({"state_dict": {"weight": Canary(canary)}, "epoch": 0, "global_step": 1}, file)
    with pytest.raises(StorageError, match="is no rollout"):
        SavedRollout.read(file)
    assert train(*SMALL, f"run_dir={tmp_path / 'run'}", f"ckpt_path={file}") == 7
    said = capsys.readouterr().err
    assert str(file) in said and "Traceback" not in said and not canary.exists() and not (tmp_path / "run").exists()
    torch.load(file, weights_only=False)
    assert canary.exists(), "the canary must be able to sing"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ lipsum.__globals__['os'].mkdir('CANARY') }}",
        "{{ cycler.__init__.__globals__.os.mkdir('CANARY') }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_chat_template_reaches_nothing_beyond_its_messages(template, tmp_path: Path):
    tokenizer = copy.deepcopy(LanguageModel("tiny").tokenizer)
    tokenizer.chat_template = template.replace("CANARY", str(tmp_path / "canary"))
    with pytest.raises(DataError, match="refuses the messages"):
        render_prompt(tokenizer, [{"role": "user", "content": "1+1"}], "row 0", {})
    assert not (tmp_path / "canary").exists()


def test_no_secret_stands_in_any_file_of_a_run(train, tmp_path: Path, monkeypatch):
    held = {
        name: f"sk-{name}abcdefghijklmnopqrstuvwxyz" for name in ("HF_TOKEN", "WANDB_API_KEY", "VLLM_API_KEY", "MINE")
    }
    for name, value in held.items():
        monkeypatch.setenv(name, value)
    words = [*SMALL, "trainer.max_steps=1", "trainer.limit_val_batches=0", f"run_dir={tmp_path / 'run'}"]
    assert train(*words, "logger=[csv,tensorboard]", "sampling.stop=['${oc.env:MINE}']") == 0
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    found = [(path.name, secret) for path in files for secret in held.values() if secret.encode() in path.read_bytes()]
    assert len(files) > 5 and found == []


SECRET_PARTS = ("geheim1", LONG[:17], "YW5uOmdlaGVpbTE", "BEGIN", "Q3EGR7T2", "d04f2e11", "0a1b2c3d", "klmnop1234")


@pytest.mark.parametrize("what", [*TOKEN_FORMS, *CONTEXT_FORMS])
def test_a_secret_of_a_known_form_is_redacted_wherever_it_stands(what: str) -> None:
    for secret in OF_A_FORM[what]:
        assert any(part in secret for part in SECRET_PARTS)
        written = [redact({"note": secret, "all": ["a", secret]}), redact_command(shlex.join([f"a.note={secret}"]))]
        if what != "a header of HTTP":  # which begins a line
            written += [redact(f"ValueError: {secret} is refused"), redact_command(shlex.join(["x", f"a=[{secret}]"]))]
        for each in written:
            assert "<redacted>" in str(each) and not [part for part in SECRET_PARTS if part in str(each)], secret


@pytest.mark.parametrize("name", [*SECRET_NAMES, *OF_A_NAME])
def test_a_secret_by_the_name_of_its_key_is_redacted(name: str) -> None:
    written = [redact({"a": {name: "geheim1"}}), redact_command(f"+a.{name}=geheim1 --{name}=geheim1")]
    assert all("<redacted>" in str(each) and "geheim1" not in str(each) for each in written)


def test_forty_hexadecimal_digits_are_taken_out_where_no_revision_is_named() -> None:
    digits = "0a1b2c3d" * 5
    written = [redact({"note": digits}), redact_command(f"+a.note={digits}")]
    assert all("<redacted>" in str(each) and digits not in str(each) for each in written)


def test_what_is_no_secret_is_written_as_it_is() -> None:
    command = shlex.join(HARMLESS)
    assert shlex.split(redact_command(command)) == shlex.split(command)
    tree = OmegaConf.to_container(OmegaConf.from_dotlist([word.replace("'", "") for word in HARMLESS]), resolve=False)
    assert redact(tree) == tree
    shipped = [yaml.safe_load(path.read_text()) for path in CONFIGS]
    assert len(shipped) > 100 and redact(shipped) == shipped


@pytest.mark.parametrize(
    "part", ["a", "token-", "a:", "eyJ-", "basic aB", "sk-", "x=token", "https://a:", "-----BEGIN "]
)
def test_a_long_text_is_redacted_in_no_time(part: str) -> None:
    began = time.process_time()
    redact({"note": part * (60_000 // len(part)), "name": f"basic {part * 5_000}"})
    assert time.process_time() - began < 5.0


CONFIGS = sorted((Path(lit_rl.__file__).parents[1] / "conf").rglob("*.yaml"))


def test_names_of_validation_sets_and_losses_control_no_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    odd = "../x\x1b[31m\n[red]y"
    numbers = {"reward": 1.0, "reward_low": 0.5, "reward_high": 1.0}
    closing_table({"after": {odd: {"greedy": numbers}}, "losses": {"after": {f"val/{odd}/loss": 1.0}}, "seconds": 1.0})
    said = capsys.readouterr().out
    assert "\x1b" not in said and said.count(r"../x\x1b[31m\n[red]y") == 2


HOSTILE = "../../out\x1b[2J<script>alert(1)</script>[red]a[/nope] `b` | ![c](http://evil.invalid/c.png)<img src=x>"
"""A name that leads out of a folder, and is markup of a terminal, of rich, of HTML and of Markdown."""


@pytest.mark.all
def test_names_that_are_paths_and_markup_reach_nothing_outside_a_run(process, train, tmp_path: Path) -> None:
    """Of rewards, of what they log, of validation sets and of columns, through a whole run and its pages."""
    absolute = f"{tmp_path}/elsewhere/{HOSTILE}"
    rows = [{"prompt": f"{i}+1=", "answer": str(i), HOSTILE: HOSTILE, absolute: "[/x]"} for i in range(4)]
    data, reward, folder = tmp_path / "rows.jsonl", tmp_path / "mine.py", tmp_path / "below" / "runs" / "run"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward.write_text(LOGS.format(HOSTILE))
    mine = {"_target_": "lit_rl.rewards.FunctionFromPath", "path": f"{reward}:score"}
    config = {
        "defaults": [{"override /data": "jsonl"}, {"override /reward": "length"}],
        "data": {"path": str(data), "val_path": {HOSTILE: str(data), absolute: str(data)}},
        "reward": {"functions": {HOSTILE: mine, absolute: mine | {"path": f"{reward}:quiet"}}},
    }
    experiment = tmp_path / "configs" / "experiment" / "mine.yaml"
    experiment.parent.mkdir(parents=True)
    experiment.write_text(f"# @package _global_\n{yaml.safe_dump(config)}")
    folder.parent.mkdir(parents=True)
    before = set(tmp_path.rglob("*"))
    words = ["--config-dir", str(tmp_path / "configs"), "experiment=mine", "logger=[csv,tensorboard]"]
    words += ["trainer.max_steps=1", "data.prompts_per_rollout=2", "algo.group_size=2", "sampling.max_new_tokens=4"]
    child = process(*words, f"run_dir={folder}", "callbacks.samples.print=2", cwd=folder.parent)
    said, _ = child.communicate(timeout=120)
    assert child.returncode == 0, said
    for task in ("report", "transcripts"):
        assert train(f"task={task}", f"run_dir={folder}") == 0
    outside = [path for path in {*tmp_path.rglob("*")} - before if folder not in (path, *path.parents)]
    assert outside == [] and not any("\x1b" in path.name for path in folder.rglob("*"))
    assert "rows of val/../../out" in said and r"\x1b[2J<script>" in said, "a warning and a table name the sets"
    assert "\x1b" not in said
    pages = list(folder.rglob("*.html"))
    assert {page.name for page in pages} >= {"report.html", "transcripts.html"}
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert "\x1b" not in text and "<script>alert" not in text and "<img" not in text, page
    assert r"out\x1b[2J" in (folder / "report.html").read_text()
    card = (folder / "hf" / "README.md").read_text().partition("## Results")[2]
    assert r"out\x1b[2J&lt;script>" in card and "\x1b" not in card
    assert "<script" not in card and "<img" not in card and "](" not in card, "nothing is loaded where it is shown"


def test_the_message_of_an_error_controls_no_terminal(train, tmp_path: Path, capsys) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({HOSTILE: "1+1="}))
    assert train("data=jsonl", f"data.path={data}", f"run_dir={tmp_path / 'run'}", "model=tiny") == 3
    said = capsys.readouterr().err
    assert r"out\x1b[2J<script>" in said and "\x1b" not in said


LOGS = """
def score(completions, log_metric):
    log_metric({!r}, 1.0)
    return [float(len(each)) for each in completions]

def quiet(completions):
    return [float(len(each)) for each in completions]
"""
