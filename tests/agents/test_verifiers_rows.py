"""Task sets of the real verifiers as rows, and their own scorers as a reward."""

from __future__ import annotations

import asyncio
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

vf = pytest.importorskip("verifiers.v1")

from lit_rl.core.errors import ConfigError, RewardError  # noqa: E402
from lit_rl.core.task_sets import VERIFIERS_COLUMN, TaskRow  # noqa: E402
from lit_rl.data.tasks import Task, VerifiersTasks  # noqa: E402
from lit_rl.rewards import Rewards, VerifiersScore  # noqa: E402

HEAD = "import verifiers.v1 as vf\n\n\nclass Mine(vf.Task[vf.TaskData]):\n"
REWARD = "    @vf.reward\n    async def good(self, trace: vf.Trace) -> float:\n        return 1.0\n\n"
TAIL = """

class Set(vf.Taskset[Mine]):
    def load(self):
        yield Mine(vf.TaskData(prompt="a"), self.config.task)


__all__ = ["Set"]
"""


def written(folder: Path, name: str, text: str) -> str:
    """A task set in a file of the current directory; its id."""
    (folder / f"{name}.py").write_text(textwrap.dedent(text))
    return name


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(Path(__file__).parent)
    return "sums"


def test_tasks_are_rows_and_none_is_held_out_and_learned(sums: str) -> None:
    task = VerifiersTasks(sums, {"most": 4}, val_rows=5, seed=1)
    train, val = task.train(), task.val()
    assert isinstance(task, Task) and (len(train), len(val)) == (20, 5) and val == task.val()
    prompts = [row["prompt"] for row in train + val]
    assert all([m["role"] for m in each] == ["user"] for each in prompts)
    assert len({each[0]["content"] for each in prompts}) == 25
    for row in train:
        a, b = row["prompt"][0]["content"].rstrip("=").split("+")
        assert row["answer"] == str(int(a) + int(b)) == TaskRow.read(row[VERIFIERS_COLUMN]).task().data.answer
    in_order = VerifiersTasks(sums, {"most": 4}, train_rows=3).train()
    assert [row["prompt"][0]["content"] for row in in_order] == ["0+0=", "0+1=", "0+2="]


def test_the_rewards_are_the_tasks_own_by_their_weights(sums: str) -> None:
    rows = VerifiersTasks(sums, {"most": 4}, train_rows=3).train()
    rewards = Rewards(VerifiersScore())
    columns = {name: [row[name] for row in rows] for name in (VERIFIERS_COLUMN, "answer")}
    rewards.bind(list(columns))
    rewards.check(columns)
    prompts, replies = [row["prompt"] for row in rows], [" 0\n", "1 or so", "7"]
    completions = [[{"role": "assistant", "content": reply}] for reply in replies]
    scores = rewards.score(prompts, completions, columns)
    assert scores.total.tolist() == [1.5, 0, 0.5]
    assert scores.metrics["verifiers/right"] == (1.0, 3) and scores.metrics["verifiers/brief"] == (2.0, 3)
    assert scores.metrics["verifiers/characters"] == (1 + 7 + 1, 3)
    assert json.loads(scores.extras[VERIFIERS_COLUMN][0])["rewards"] == {"right": 1.0, "brief": 1.0}
    plain = rewards.score(["0+0="], ["0"], {VERIFIERS_COLUMN: [rows[0][VERIFIERS_COLUMN]], "answer": ["0"]})
    assert plain.total.tolist() == [1.5]

    async def notebook() -> list[float]:
        return rewards.score(prompts, completions, columns).total.tolist()

    assert asyncio.run(notebook()) == [1.5, 0, 0.5]


def test_rows_without_a_task_are_not_scored(sums: str) -> None:
    row = VerifiersTasks(sums, {"most": 1}, train_rows=1).train()[0]
    scores = Rewards(VerifiersScore()).score(
        [row["prompt"], ["x"]], ["0", "0"], {VERIFIERS_COLUMN: [row[VERIFIERS_COLUMN], None]}
    )
    assert scores.total.isnan().tolist() == [False, True]


@pytest.mark.parametrize(("most", "seen"), [(1, 1), (3, 3), (32, 8)])
def test_no_more_completions_are_scored_at_a_time_than_asked(cwd: Path, most: int, seen: int) -> None:
    """And as many as that where there are; the scores are those of one after another."""
    body = """
        import asyncio
        import verifiers.v1 as vf

        now, highest = [0], [0]

        class Mine(vf.Task[vf.TaskData]):
            @vf.reward
            async def slow(self, trace: vf.Trace) -> float:
                now[0] += 1
                highest[0] = max(*highest, *now)
                await asyncio.sleep(0.05)
                now[0] -= 1
                return float(trace.last_reply)
    """
    id = written(cwd, f"crowd_{most}", textwrap.dedent(body) + TAIL)
    row = VerifiersTasks(id).train()[0]
    rewards = Rewards(VerifiersScore(max_concurrent=most))
    scores = rewards.score(
        [row["prompt"]] * 8, [str(n) for n in range(8)], {VERIFIERS_COLUMN: [row[VERIFIERS_COLUMN]] * 8}
    )
    assert scores.total.tolist() == list(range(8))
    assert sys.modules[id].highest == [seen]


def test_settings_weights_and_judges_are_those_of_verifiers(cwd: Path) -> None:
    (cwd / "more_rewards.py").write_text("async def always(trace):\n    return 2.0\n")
    settings = {"task": {"rewards": {"always": {"fn": "more_rewards.py:always", "weight": 3.0}, "good": {"weight": 0}}}}
    id = written(cwd, "weighed", HEAD + REWARD + TAIL)
    row = VerifiersTasks(id, settings).train()[0]
    scores = Rewards(VerifiersScore()).score([row["prompt"]], ["x"], {VERIFIERS_COLUMN: [row[VERIFIERS_COLUMN]]})
    assert scores.total.tolist() == [6.0]


def test_math_is_verified_with_its_time_limit(cwd: Path) -> None:
    """Beside the main thread math-verify raises, and verifiers' own helper takes that for a wrong answer."""
    body = """
        from verifiers.v1.utils.score import verify_boxed_math_answer
        import verifiers.v1 as vf

        class Mine(vf.Task[vf.TaskData]):
            @vf.reward
            async def right(self, trace: vf.Trace) -> float:
                return verify_boxed_math_answer(trace.last_reply, "1/2")
    """
    row = VerifiersTasks(written(cwd, "halves", textwrap.dedent(body) + TAIL)).train()[0]
    scores = Rewards(VerifiersScore()).score(
        [row["prompt"]] * 2, [r"\boxed{0.5}", r"\boxed{3}"], {VERIFIERS_COLUMN: [row[VERIFIERS_COLUMN]] * 2}
    )
    assert scores.total.tolist() == [1.0, 0.0]


def test_system_prompts_and_messages_are_shown(cwd: Path) -> None:
    body = """
        import verifiers.v1 as vf

        class Mine(vf.Task[vf.TaskData]):
            @vf.reward
            async def seen(self, trace: vf.Trace) -> float:
                return float([m.role for m in trace.messages] == ["system", "user", "assistant", "user", "assistant"]
                             and trace.num_turns == 1)

        class Set(vf.Taskset[Mine]):
            def load(self):
                asked = [vf.UserMessage(content="1+1"), vf.AssistantMessage(content="2"), vf.UserMessage(content="2+2")]
                yield Mine(vf.TaskData(system_prompt="Add.", prompt=asked), self.config.task)

        __all__ = ["Set"]
    """
    row = VerifiersTasks(written(cwd, "shots", body)).train()[0]
    assert [(m["role"], m["content"]) for m in row["prompt"]] == [
        ("system", "Add."), ("user", "1+1"), ("assistant", "2"), ("user", "2+2"),
    ]  # fmt: skip
    scores = Rewards(VerifiersScore()).score(
        [row["prompt"]], [[{"role": "assistant", "content": "4"}]], {VERIFIERS_COLUMN: [row[VERIFIERS_COLUMN]]}
    )
    assert scores.total.tolist() == [1.0]


NOT_ALONE = {
    "reward": (REWARD.replace("self, trace: vf.Trace", "self, trace: vf.Trace, runtime: vf.Runtime"),
               "@reward good reads the runtime"),
    "metric": (REWARD + "    @vf.metric\n    async def files(self, runtime):\n        return 0.0\n",
               "@metric files reads the runtime"),
    "setup": (REWARD + "    async def setup(self, trace, runtime):\n        pass\n", "setup reads the runtime"),
    "container": ("    NEEDS_CONTAINER = True\n\n" + REWARD, "Mine needs a container"),
    "nothing": ("    pass\n", "Mine has no @reward"),
    "intercept": (REWARD + "    @vf.intercept\n    async def mend(self, response: vf.Response):\n        return None\n",
                  "@intercept mend changes what is said"),
    "tools": (REWARD + "    @classmethod\n    def toolsets(cls, _):\n        return [Search(vf.ToolsetConfig())]\n",
              "Search gives it tools"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_ALONE)
def test_what_needs_more_than_a_completion_is_refused_before_the_run(cwd: Path, name: str) -> None:
    body, words = NOT_ALONE[name]
    head = (
        HEAD.replace("class Mine", "class Search(vf.Toolset):\n    pass\n\n\nclass Mine") if name == "tools" else HEAD
    )
    row = VerifiersTasks(written(cwd, f"not_alone_{name}", head + body + TAIL)).train()[0]
    with pytest.raises(ConfigError, match=f"not_alone_{name}.*{words}.*VerifiersHarness"):
        VerifiersScore().check_columns({VERIFIERS_COLUMN: [row[VERIFIERS_COLUMN]]})
    VerifiersScore().check_columns({VERIFIERS_COLUMN: [row[VERIFIERS_COLUMN]]}, ["episodes", "verifiers_scores"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"id": "no_such_set"}, "no task set of verifiers.*no_such_set"),
        ({"id": "json"}, "no task set of verifiers"),
        ({"id": "sums", "settings": {"moist": 3}}, "data.task.settings.*moist.*most"),
        ({"id": "sums", "settings": {"most": "many"}}, "data.task.settings.*Its settings: most, system_prompt, task"),
        ({"id": "sums", "settings": {"most": 1}, "train_rows": 5}, "has 4 different prompts"),
        ({"id": "sums", "settings": {"most": 1}, "val_rows": 4}, "has 4 different prompts"),
    ],
)
def test_what_cannot_be_loaded_is_refused(arguments: dict[str, Any], words: str, sums: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        VerifiersTasks(**arguments).train()


def test_a_set_without_end_says_how_many(cwd: Path) -> None:
    body = (
        HEAD
        + REWARD
        + TAIL.replace("    def load", "    INFINITE = True\n\n    def load").replace(
            'yield Mine(vf.TaskData(prompt="a")', 'while True:\n            yield Mine(vf.TaskData(prompt="a")'
        )
    )
    id = written(cwd, "endless", body)
    with pytest.raises(ConfigError, match="for ever.*train_rows"):
        VerifiersTasks(id).train()
    with pytest.raises(ConfigError, match="has 1 different prompts"):
        VerifiersTasks(id, train_rows=2).train()
    assert len(VerifiersTasks(id, train_rows=1, seed=0).train()) == 1


def test_a_task_that_nobody_opens_or_that_does_not_survive_is_refused(cwd: Path) -> None:
    silent = (HEAD + REWARD + TAIL).replace('prompt="a"', 'name="a"')
    with pytest.raises(ConfigError, match="has no prompt"):
        VerifiersTasks(written(cwd, "silent", silent)).train()
    undeclared = (HEAD + REWARD + TAIL).replace("class Set(vf.Taskset[Mine])", "class Set(vf.Taskset)")
    with pytest.raises(ConfigError, match="is another one when it is made again"):
        VerifiersTasks(written(cwd, "undeclared", undeclared)).train()


def test_a_scorer_that_raises_is_an_error_of_the_reward(cwd: Path) -> None:
    body = HEAD + REWARD.replace("return 1.0", "return 1.0 / len(trace.last_reply)") + TAIL
    row = VerifiersTasks(written(cwd, "divides", body)).train()[0]
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        Rewards(VerifiersScore()).score([row["prompt"]], [""], {VERIFIERS_COLUMN: [row[VERIFIERS_COLUMN]]})
    kept = Rewards(VerifiersScore(), on_error=-1.0).score(
        [row["prompt"]] * 2, ["", "ab"], {VERIFIERS_COLUMN: [row[VERIFIERS_COLUMN]] * 2}
    )
    assert kept.total.tolist() == [-1.0, 0.5]
