"""What is wrong with tools, environments and their templates ends the run with its exit code and a message.

One of each part that refuses; what exactly each refuses is tested in tests/environments. The model is a folder without
weights: reaching them would be exit 7.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_helpers import Command, refused, write_jsonl
from small_models import save_tokenizer
from tiers import quick

HERE = Path(__file__).parent
MINE = '''
def double(a: int) -> int:
    """Double it.

    Args:
        a: The number.
    """
    return 2 * a


def paid(completions):
    return [0.0 for _ in completions]


class Game:
    def reset(self, *, seed: int):
        pass

    def step(self, action: str):
        return "", 0.0, True, False, {}

'''
CHAT = "data.task.prompt=[{role: user, content: go}]"
TOOLS = ["env=tools", "env.parser=hermes", "reward=function", "reward.fn=./mine.py:paid"]
DOUBLE = [*TOOLS, "env.functions=[./mine.py:double]"]
DROPS_CALLS = "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"


def game(name: str) -> list[str]:
    return ["env=environment", f"env.path=./mine.py:{name}", "reward=environment"]


CASES: dict[str, tuple[list[str], list[str]]] = {
    "one_name": (
        [*TOOLS, f"env.functions=[./mine.py:double,{HERE}/small_tools.py:double]"],
        ["Two tools are called 'double'", "rename one"],
    ),
    "column_seed": (
        [*game("Game"), "data=jsonl", "data.path=seeds.jsonl", "data.val_fraction=0"],
        ["a column 'seed'", "data.rename"],
    ),
    "drops_calls": (
        [*DOUBLE, CHAT, "model.chat_template=drops-calls.jinja"],
        ["The chat template of", "weightless", "drops the calls", "model.chat_template"],
    ),
    "context": (
        [*DOUBLE, "env.max_tokens=4000"],
        ["An episode may have 4002 tokens", "the context of", "holds 256", "env.max_tokens"],
    ),
    "no_reward": (
        ["env=tools", "env.parser=hermes", "env.functions=[./mine.py:double]", "reward=environment"],
        ["reward=environment takes the reward of the environments", "env= has none with a reward"],
    ),
}


@pytest.mark.parametrize("case", quick(CASES, {"one_name", "drops_calls"}))
def test_a_bad_environment_is_refused_before_any_weight_is_read(step: Command, cwd: Path, case: str) -> None:
    (cwd / "mine.py").write_text(MINE)
    write_jsonl(cwd / "seeds.jsonl", [{"prompt": f"{n}=", "seed": n} for n in range(8)])
    (cwd / "drops-calls.jinja").write_text(DROPS_CALLS)
    overrides, words = CASES[case]
    model = ["model=local", f"model.name={save_tokenizer(cwd / 'weightless')}"]
    data = [] if "data=jsonl" in overrides else ["data=repeated", "data.task.prompt=go"]
    short = ["env.max_tokens=32", "env.max_observation_tokens=8"]
    refused(step(*model, *data, *short, *overrides, "run_dir=run"), 2, *words)
