"""`model.speedups` and `generator.speedups`: what a value means, and what is said of one that means nothing."""

from __future__ import annotations

import pickle
from dataclasses import asdict
from typing import Any

import pytest
import yaml
from cli_helpers import QUICK, Command, refused

from lit_rl.cli import lightning_app
from lit_rl.cli.typed_words import add_switches, key_of_switches
from lit_rl.core.speedups import DecodingSpeedups, ModelSpeedups, Speedups
from lit_rl.generation.native import NativeGenerator
from lit_rl.models import LanguageModel
from lit_rl.models.language_model import ForwardOptions

SIDES = {"model.speedups": ModelSpeedups, "generator.speedups": DecodingSpeedups}


@pytest.mark.parametrize(("key", "kind"), SIDES.items())
def test_what_a_value_switches_on(key: str, kind: type[Speedups]) -> None:
    usual, name = kind(), kind.names()[1]
    assert kind.read(key, "auto") == kind.read(key, {}) == usual
    assert {each for each, on in asdict(usual).items() if not on} <= {"cuda_graphs"}
    assert set(asdict(kind.read(key, "off")).values()) == {False}
    assert kind.read(key, yaml.safe_load("off")) == kind.read(key, "off"), "YAML reads the word as false"
    assert asdict(kind.read(key, {name: False})) == asdict(usual) | {name: False}
    assert kind.read(key, dict.fromkeys(kind.names(), False)) == kind.read(key, "off")


def test_no_name_is_of_both_sides() -> None:
    assert not {*ModelSpeedups.names()} & {*DecodingSpeedups.names()}


def test_of_python() -> None:
    model, generator = LanguageModel(speedups={"fused_head": False}), NativeGenerator(speedups="off")
    assert model.forward_options == ForwardOptions(fused_head=False)
    assert LanguageModel().forward_options == ForwardOptions()
    assert generator.speedups == DecodingSpeedups(False, False, False, False)
    assert pickle.loads(pickle.dumps(generator)).speedups == generator.speedups


# ------------------------------------------------------------------------------------------------- on a command line


def test_hydra_sets_all_or_some(command: Command) -> None:
    def made(*words: str) -> Any:
        outcome = command(*words, "--cfg", "job", "--package", "generator")
        assert outcome.code == 0, outcome.err
        return yaml.safe_load(outcome.out)["speedups"]

    assert made() == "auto"
    assert made("generator.speedups=off") == "off"
    assert made("generator.speedups.lean_steps=false") == {"lean_steps": False}
    some = {"lean_steps": False, "cuda_graphs": True}
    assert made("generator.speedups.lean_steps=false", "generator.speedups.cuda_graphs=true") == some
    assert made("generator.speedups={lean_steps: false, cuda_graphs: true}") == some
    assert made("lean_steps=false") == {"lean_steps": False}


def test_a_run_without_any_draws_by_the_models_own_steps(command: Command, tmp_path: Any) -> None:
    folder = tmp_path / "run"
    outcome = command(*QUICK, "generator.speedups=off", "model.speedups.fused_head=false", f"run_dir={folder}")
    assert outcome.code == 0, outcome.err
    assert '"decode_steps": "own"' in (folder / "summary.json").read_text()
    typed = yaml.safe_load((folder / "config.yaml").read_text())
    assert (typed["generator"]["speedups"], typed["model"]["speedups"]) == ("off", {"fused_head": False})


def test_a_sweep_over_a_switch_stays_as_it_is_typed() -> None:
    for word in ("generator.speedups.lean_steps=true,false", "generator.speedups=auto,off", "generator.batch_size=3"):
        assert key_of_switches(word) is None
    word = "algo.teacher.speedups.fused_head=false"
    assert key_of_switches(word) == (key := "algo.teacher.speedups")
    assert add_switches(word, key, "auto") == [f"{key}={{}}", f"++{word}"]


def test_a_switch_is_added_to_those_of_a_file_and_refused_beside_its_off(command: Command, tmp_path: Any) -> None:
    """Nothing that a file sets is lost without a word."""
    (tmp_path / "experiment").mkdir()
    for name, value in (("some", "{lean_steps: false}"), ("none", "off")):
        text = f"# @package _global_\ngenerator:\n  speedups: {value}\n"
        (tmp_path / "experiment" / f"{name}.yaml").write_text(text)
    typed = ("--config-dir", str(tmp_path), "generator.speedups.cuda_graphs=true")
    outcome = command("experiment=some", *typed, "--cfg", "job", "--package", "generator")
    assert yaml.safe_load(outcome.out)["speedups"] == {"lean_steps": False, "cuda_graphs": True}, outcome.err
    refused(command("experiment=none", *typed), 2, "generator.speedups=off and generator.speedups.cuda_graphs=true")


NATIVE = "--model.generator=lit_rl.generation.native.NativeGenerator"


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ("--model.generator.speedups=off", "off"),
        ("--model.generator.speedups={lean_steps: false}", {"lean_steps": False}),
        ("--model.generator.speedups.lean_steps=false", {"lean_steps": False}),
    ],
)
def test_lightning_sets_all_or_some(typed: str, value: Any, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["lit-rl"])
    with pytest.raises(SystemExit):
        lightning_app.main(["fit", "--model=GRPO", "--model.model=tiny", NATIVE, typed, "--print_config"])
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["model"]["init_args"]["generator"]["init_args"]["speedups"] == value
