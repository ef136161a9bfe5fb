"""Names that other tools have, and paths in the place of presets: read as ours where they mean one thing."""

from __future__ import annotations

import difflib
import re
import subprocess
import sys

import pytest
from cli_helpers import Command, contents, refused, write_jsonl
from hydra._internal.utils import get_args_parser

from lit_rl import cli
from lit_rl.cli import typed_words
from lit_rl.cli.aliases import MERGED, expand_aliases, expand_export
from lit_rl.cli.listing import conf_folder, groups, neighbouring_keys, top_keys
from lit_rl.cli.typed_words import after_settings
from lit_rl.core import other_names
from lit_rl.core.errors import ConfigError

SCORE = "def score(completions, **_):\n    return [float(len(c)) for c in completions]\n"


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("lr=1e-5,1e-6", ["optimizer.lr=1e-5,1e-6"]),  # a sweep
        ("steps=10", ["trainer.max_steps=10"]),
        ("model=Qwen/Qwen2.5-0.5B", ["model=local", "model.name=Qwen/Qwen2.5-0.5B"]),
        ("model_name_or_path=./a b", ["model=local", "model.name='./a b'"]),
        ("model='./a=b'", ["model=local", "model.name='./a=b'"]),
        ("model=tiny", ["model=tiny"]),
        ("reward=./mine.py:score", ["reward=function", "reward.fn=./mine.py:score"]),
        ("reward=mine.rewards:score", ["reward=function", "reward.fn=mine.rewards:score"]),
        ("reward.fn=./mine.py:score", ["reward=function", "reward.fn=./mine.py:score"]),
        ("+lr=3", ["+lr=3"]),
        ("--cfg", ["--cfg"]),
    ],
)
def test_one_word(typed, read):
    words, new = expand_aliases([typed])
    assert words == read
    assert new == ([] if read == [typed] else read)


def test_reward_funcs_is_the_reward():
    assert expand_aliases(["reward_funcs=./mine.py:score"])[0] == ["reward=function", "reward.fn=./mine.py:score"]
    assert expand_aliases(["reward_funcs=exact_match"])[0] == ["reward=exact_match"]
    for key in ("reward_funcs", "reward"):
        many = expand_aliases([f"{key}=[./mine.py:score, my_package.rewards:brief]"])[0]
        assert many == ["reward=function", "reward.fn=[./mine.py:score,my_package.rewards:brief]"]


def test_of_many_keys_the_nearest_are_named_and_a_command_lists_all():
    with pytest.raises(ConfigError) as refusal:
        expand_aliases(["algo.group_siez=4"])
    said = str(refusal.value)
    assert re.search(r"algo has group_size(, \w+){4} and \d+ more: `lit-rl train --cfg job --package algo` lists", said)
    with pytest.raises(ConfigError) as refusal:
        expand_aliases(["nonsense_words=2"])
    top = r"nonsense_words is not a key\. The top level has (.+) and \d+ more: `lit-rl train --cfg job` lists them\."
    named = re.fullmatch(top, str(refusal.value))
    known = {*groups([conf_folder()]), *top_keys()}
    assert named and len(nearest := named[1].split(", ")) == 5 and set(nearest) <= known
    ratios = {key: difflib.SequenceMatcher(None, key, "nonsense_words").ratio() for key in known if "/" not in key}
    assert min(ratios[key] for key in nearest) >= max(ratio for key, ratio in ratios.items() if key not in nearest)
    assert neighbouring_keys("eval", "x", ["b", "a"]) == " eval has: a, b."


def test_a_reward_that_was_chosen_stays():
    words = ["reward=mine", "reward.fn=a:b", "--config-dir", "my_conf"]
    assert expand_aliases(words) == (words, [])
    assert expand_aliases(["experiment=vl_digits", "reward.fn=a:b"])[1] == []


def test_what_may_be_several_keys_names_them():
    for name in other_names.column("may_mean"):
        with pytest.raises(ConfigError, match=rf"^{name} is not a key. What it may mean: "):
            expand_aliases([f"{name}=3"])


def test_beta_of_rloo_is_another_one():
    assert expand_aliases(["algo=dpo", "beta=0.1"])[0] == ["algo=dpo", "algo.beta=0.1"]


@pytest.mark.parametrize("word", ["algo=grpoo", "model=gpt2", "sampling.topp=0.9", "num_generation=8", "algo.lr=1e-5"])
def test_what_a_folder_of_ones_own_may_hold_is_left_to_hydra(word):
    assert expand_aliases([word, "--config-dir", "mine"])[0][0] == word


def test_one_sentence_for_every_name_that_is_understood():
    for name in ("use_peft", "scale_rewards", "gradient_accumulation_steps", "batch_size", "loss_type", "epsilon"):
        for word in (f"{name}=1", f"algo.{name}=1"):
            with pytest.raises(ConfigError) as refusal:
                expand_aliases([word])
            said = str(refusal.value)
            assert said.startswith(f"{word.partition('=')[0]} is not a key. ") and "...." not in said
            assert (f"{name} is TRL's name. Here: " in said) != ("What it may mean: " in said)
            assert " has " not in said and "lists them" not in said  # no list of keys


def test_export_takes_what_its_issue_calls_its_words(capsys, tmp_path):
    words = ["run_dir=x", "push_to_hub=me/x", "export.merge=true", "export.private=false"]
    assert expand_export(words) == (["run_dir=x", "export.push_to_hub=me/x", "export.private=false"], MERGED)


def test_no_word_is_offered_to_who_typed_it():
    for name in other_names.column("TRL"):
        assert f"mean {name!r}?" not in f"{other_names.from_page(name)}{other_names.near_name(name)}"


@pytest.mark.parametrize(
    "added", ["+callbacks.mine.every=2", "+schemas@callbacks.mine=EarlyStopping", "experiment=guess"]
)
def test_keys_that_another_word_brings_are_left_to_hydra(added):
    assert expand_aliases([added, "callbacks.mime.every=3"]) == ([added, "callbacks.mime.every=3"], [])


def test_words_that_end_in_nothing_or_follow_an_option_are_left_alone():
    removed = ["~logger", "~callbacks.samples", "logger=[csv, wandb]", "~generator", "+generator._target_=mine.Mine"]
    for words in (["sampling.stop=", "seed=1"], ["--config-dir", "data", "seed=1"], removed):
        assert expand_aliases(words) == (words, [])


@pytest.mark.parametrize(
    ("typed", "sorted_words"),
    [
        ("seed=1 -m lr=1,2 max_steps=1", "seed=1 lr=1,2 max_steps=1 -m"),
        ("seed=1 --cfg job temperature=1", "seed=1 temperature=1 --cfg job"),
        ("--cfg=job seed=1 --resolve -p algo ~logger", "seed=1 ~logger --cfg=job --resolve -p algo"),
        ("--config-dir a=b seed=1 -cn x +y=2", "seed=1 +y=2 --config-dir a=b -cn x"),
        ("-i seed=1", "seed=1 -i"),
        ("--info defaults seed=1", "seed=1 --info defaults"),
    ],
)
def test_options_and_settings_may_be_mixed(typed, sorted_words):
    words = after_settings(typed.split())
    assert words == sorted_words.split()
    options = next(at for at, word in enumerate(words) if word.startswith("-"))
    assert get_args_parser().parse_args(words).overrides == words[:options]


def test_the_options_are_those_of_hydra():
    known = {name for action in get_args_parser()._actions for name in action.option_strings}
    assert known == {*typed_words.ALL} - {"-s"}  # which argparse takes for -sc
    takes_one = {
        name for action in get_args_parser()._actions if action.nargs is None for name in action.option_strings
    }
    assert takes_one == {*typed_words.WITH_A_VALUE}


def test_a_setting_behind_an_option_reaches_hydra(command: Command, cwd):
    outcome = command("seed=1", "--cfg", "job", "--package", "sampling", "sampling.max_new_tokens=6")
    assert outcome.code == 0 and "max_new_tokens: 6" in outcome.out, outcome.err


def test_a_key_of_another_choice_says_which_has_it(command: Command, cwd):
    for key in ("generator.generation_kwargs.top_h", "generator.generation_kwargs"):
        outcome = command(f"{key}=1")
        refused(outcome, 2, "generator=hf, vllm or vllm_server has it, and the generator that is chosen here does not.")
    refused(command("generator.static_cache=true"), 2, "generator=hf has it, and")
    assert "has it" not in command("algo=dpo", "algo.group_size=2").err  # many have


@pytest.mark.parametrize(
    ("words", "same"),
    [(["help"], ["--help"]), (["help", "report"], ["report", "--help"]), (["version"], ["--version"])],
)
def test_help_and_version_without_dashes(capsys, monkeypatch, words, same):
    monkeypatch.setattr(sys, "argv", ["lit-rl"])
    assert (cli.run(words), cli.run(same)) == (0, 0)
    said = capsys.readouterr().out
    assert said and said[: len(said) // 2] == said[len(said) // 2 :]


def test_a_typo_is_refused_before_torch_is_loaded():
    code = (
        "import sys\nfrom lit_rl import cli\n"
        "assert cli.run(['algo.group_siez=4']) == 2 and not {'torch', 'lightning', 'hydra'} & set(sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "Did you mean 'group_size'?" in ran.stderr and "loading torch" not in ran.stderr


def test_every_name_stands_for_a_key_that_there_is(command: Command, cwd):
    values = {
        "losses": "[grpo]",
        "model_name_or_path": "./a",
        "gradient_checkpointing": "true",
        "output_dir": "x",
        "dataset_name": "y",
        "reward_funcs": "./a.py:f",
    }
    for names, algo in ((set(other_names.column("key")) - {"max_length"}, "grpo"), ({"max_length"}, "dpo")):
        words = [f"{name}={values.get(name, 1)}" for name in sorted(names)]
        outcome = command(
            "--cfg", "job", f"algo={algo}", "data=jsonl" if algo == "grpo" else "data=preferences", *words
        )
        assert outcome.code == 0, outcome.err


def test_a_run_by_other_words(command: Command, cwd, tmp_path, tiny_dir):
    (cwd / "mine.py").write_text(SCORE)
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": f"{n}+1="} for n in range(8)])
    words = [f"model={tiny_dir}", "lr=1e-4", "num_generations=2", "max_completion_length=4", "reward=./mine.py:score"]
    small = ["data.prompts_per_rollout=2", "trainer.fast_dev_run=1", "trainer.accelerator=cpu"]
    outcome = command(*words, f"data.path={path}", *small)
    assert outcome.code == 0, outcome.err
    assert "Read as model=local" in outcome.err and "optimizer.lr=1e-4 algo.group_size=2" in outcome.err
    refused(command("batch_size=8"), 2, "data.prompts_per_rollout", "data.batch_size")
    assert contents(cwd) == ["mine.py"] or contents(cwd)[0] == "__pycache__"


def test_a_home_is_found_behind_the_equals_sign(monkeypatch: pytest.MonkeyPatch):
    """Where shells leave it alone, and Hydra's grammar has no such word."""
    monkeypatch.setenv("HOME", "/home/some one")
    words, read = expand_aliases(["data.path=~/x.jsonl", "run_dir=~", "~callbacks.samples"])
    assert words == ["data.path='/home/some one/x.jsonl'", "run_dir='/home/some one'", "~callbacks.samples"]
    assert read == words[:2]


def test_values_of_options_are_no_commands(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", ["lit-rl"])
    for words in (["--config-name", "test", "--cfg"], ["--config-dir", str(tmp_path), "-cn", "fit", "--cfg"]):
        assert cli.run(words) == 2
        assert "stands before" not in capsys.readouterr().err
