"""Functions by path: found, refused with a hint, pickled."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import sys

import pytest
from warm import run

from lit_rl.core.errors import ConfigError, RewardError
from lit_rl.rewards import Rewards, from_paths, load_function

SOURCE = '''
import helper_next_door

def score(prompts, completions, answer):
    """How good."""
    return [helper_next_door.POINTS] * len(completions)

def _private(completions): ...

async def yields(completions): yield 1.0

class Judge:
    def __call__(self, completions):
        return [0.5] * len(completions)

judge = Judge()
unnamed = lambda completions: [0.25] * len(completions)
LIMIT = 3
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "my_reward.py").write_text(SOURCE)
    (tmp_path / "helper_next_door.py").write_text("POINTS = 2.0\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    yield tmp_path
    assert sys.path == before
    sys.modules.pop("helper_next_door", None)


def test_relative_absolute_and_module_paths(folder):
    for path in ("./my_reward.py:score", "my_reward.py:score", f"{folder}/my_reward.py:score"):
        assert load_function(path)(["p"], ["c"], ["a"]) == [2.0]
    assert load_function("lit_rl.rewards:exact_match")([], ["a"], ["a"]) == [1.0]
    assert load_function("lit_rl.rewards.text_rewards:exact_match").__name__ == "exact_match"


def test_the_function_keeps_its_name_doc_and_signature(folder):
    function = load_function("./my_reward.py:score")
    assert (function.__name__, function.__doc__) == ("score", "How good.")
    with pytest.raises(RewardError, match="'score' needs the argument 'answer'"):
        Rewards(function).bind([])
    assert load_function("./my_reward.py:unnamed").__name__ == "unnamed"
    assert Rewards(load_function("./my_reward.py:judge")).names == ("judge",)


@pytest.mark.all
def test_a_pickle_loads_in_another_process_and_another_folder(folder, tmp_path_factory):
    data = pickle.dumps(from_paths("./my_reward.py:score"))
    code = (
        "import pickle; r = pickle.load(open('pickled', 'rb')); print(r.score(['p'], ['c'], {'answer': ['a']}).total)"
    )
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "pickled").write_bytes(data)
    done = run([sys.executable, "-c", code], cwd=elsewhere)
    assert done.stdout.strip() == "tensor([2.])", done.stderr


def test_an_edit_is_seen_by_the_next_load_and_never_by_a_copy(folder):
    function = load_function("./my_reward.py:score")
    (folder / "my_reward.py").write_text("def score(completions): return [9.0]")
    assert copy.deepcopy(function)(["p"], ["c"], ["a"]) == [2.0]
    assert load_function("./my_reward.py:score")(["c"]) == [9.0]


def test_an_unchanged_file_runs_once(folder):
    (folder / "once.py").write_text("state = []\ndef a(completions): return state\ndef b(completions): return state")
    assert load_function("./once.py:a")([]) is load_function("./once.py:b")([])


WRONG = {
    "no_file": ("./my_rewards.py:score", ConfigError, ["my_reward.py", "Did you mean 'my_reward.py'?"]),
    "not_python": ("./notes/readme:score", ConfigError, ["there is no file"]),
    "no_attribute": ("./my_reward.py:scor", ConfigError, ["score", "Did you mean 'score'?"]),
    "module_is_a_file": ("my_reward:score", ConfigError, ["'./my_reward.py:name'"]),
    "class": ("./my_reward.py:Judge", RewardError, ["is a class", "Judge(...)"]),
    "number": ("./my_reward.py:LIMIT", RewardError, ["cannot be called"]),
    "async_generator": ("./my_reward.py:yields", RewardError, ["async generator"]),
}


@pytest.mark.parametrize(("path", "error", "told"), WRONG.values(), ids=WRONG.keys())
def test_wrong_paths_say_what_there_is(folder, path, error, told):
    with pytest.raises(error) as caught:
        load_function(path)
    for part in told:
        assert part in str(caught.value)
    assert "_private" not in str(caught.value)


BROKEN = {
    "syntax": ("def score(:", "SyntaxError"),
    "name": ("score = missing", "NameError"),
    "import": ("import not_installed_at_all", "not_installed_at_all"),
    "exit": ("raise SystemExit(0)", "SystemExit"),
}


@pytest.mark.parametrize(("source", "told"), BROKEN.values(), ids=BROKEN.keys())
@pytest.mark.parametrize("as_module", [False, True], ids=["file", "module"])
def test_a_file_that_fails_on_import_is_a_reward_error(folder, monkeypatch, source, told, as_module):
    (folder / "broken_reward.py").write_text(source)
    before = set(sys.modules)
    with monkeypatch.context() as patch, pytest.raises(RewardError, match=told) as caught:
        patch.setattr(sys, "path", [*sys.path, str(folder)])
        load_function("broken_reward:score" if as_module else "./broken_reward.py:score")
    assert "broken_reward" in str(caught.value) and caught.value.__cause__ is not None
    assert not [name for name in set(sys.modules) - before if "broken_reward" in name]


def test_from_paths_names_weights_and_clashes(folder):
    (folder / "other.py").write_text("def score(completions): return [1.0]\ndef bonus(completions): return [1.0]")
    rewards = from_paths(["./my_reward.py:score", "./other.py:score", "./other.py:bonus"], [1.0, 0.5, 0.25])
    assert rewards.weights == {"my_reward.score": 1.0, "other.score": 0.5, "bonus": 0.25}
    assert rewards.score(["p"], ["c"], {"answer": ["a"]}).total.tolist() == [2.75]
    assert from_paths(["lit_rl.rewards.text_rewards:contains", "./other.py:score"]).names == ("contains", "score")
    with pytest.raises(ConfigError, match=r"other\.score"):
        from_paths(["./other.py:score", "other.py:score"])
    with pytest.raises(ConfigError, match="2 numbers"):
        from_paths(["./other.py:score", "./other.py:bonus"], [1.0])


DEFAULTS = {
    key: value for key, value in inspect.signature(from_paths).parameters.items() if key not in ("fn", "weights")
}


def test_from_paths_takes_every_setting_of_rewards_and_hands_it_on(folder):
    settings = inspect.signature(Rewards).parameters
    assert {key: settings[key].default for key in DEFAULTS} == {key: p.default for key, p in DEFAULTS.items()}
    assert set(settings) - {"functions", "weights"} == set(DEFAULTS)
    given = {"on_error": 0.5, "timeout": 7.0, "workers": 3, "memory_mb": 9, "recycle_after": 4}
    given |= {"max_concurrent": 6, "cache": 5}
    rewards = from_paths("./my_reward.py:score", **given, constant_limit=8, while_generating=False)
    assert dataclasses.asdict(rewards.settings) == given
    assert rewards.constant_limit == 8 and not rewards.while_generating
