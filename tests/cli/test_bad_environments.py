"""What is wrong with tools, environments and their templates ends the run with its exit code and a message.

Faults 1 to 12 of the 25 that an episode may have; the others, which show while it goes on, are in
test_episode_faults.py. The model is a folder without weights: reaching them would be exit 7.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from cli_helpers import Command, refused, write_jsonl
from small_models import save_tokenizer
from tiers import quick

HERE = Path(__file__).parent
MINE = '''
def untyped(a, b: int) -> int:
    """Add.

    Args:
        a: One.
        b: The other.
    """
    return a + b


def undocumented(a: int) -> int:
    return a


def double(a: int) -> int:
    """Double it.

    Args:
        a: The number.
    """
    return 2 * a


def paid(completions):
    return [0.0 for _ in completions]


class NoReset:
    def step(self, action: str):
        return "", 0.0, True, False, {}


class StepAndTools:
    def reset(self):
        pass

    def step(self, action: str):
        return "", 0.0, True, False, {}

    def move(self, by: int) -> int:
        """Move.

        Args:
            by: How far.
        """
        return by


class Game:
    def reset(self, *, seed: int):
        pass

    def step(self, action: str):
        return "", 0.0, True, False, {}


THE_ONE = Game()


def the_one():
    return THE_ONE
'''
CHAT = "data.task.prompt=[{role: user, content: go}]"
TOOLS = ["env=tools", "env.parser=hermes", "reward=function", "reward.fn=./mine.py:paid"]
DOUBLE = [*TOOLS, "env.functions=[./mine.py:double]"]
WHOLE = "{% for m in messages %}{{ m['content'] }}{% for c in m.tool_calls or [] %}{{ c }}{% endfor %}"
TEMPLATES = {
    "drops-calls": "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}",
    "drops-answers": "{% for m in messages if m['role'] != 'tool' %}"
    "{{ m['content'] }}{% for c in m.tool_calls or [] %}{{ c }}{% endfor %}{{ eos_token }}{% endfor %}",
    "no-end": WHOLE + "{% endfor %}",
    "untold": WHOLE + "{{ eos_token }}{% endfor %}",
}


def game(name: str) -> list[str]:
    return ["env=environment", f"env.path=./mine.py:{name}", "reward=environment"]


def chat(template: str) -> list[str]:
    return [*DOUBLE, CHAT, f"model.chat_template={template}.jinja"]


CASES: dict[str, tuple[list[str], list[str]]] = {
    "fault_01_no_type": (
        [*TOOLS, "env.functions=[./mine.py:untyped]"],
        ["The tool 'untyped' cannot be described", "Argument a is missing a type hint"],
    ),
    "fault_01_no_docstring": (
        [*TOOLS, "env.functions=[./mine.py:undocumented]"],
        ["The tool 'undocumented'", "docstring"],
    ),
    "fault_02_one_name": (
        [*TOOLS, f"env.functions=[./mine.py:double,{HERE}/small_tools.py:double]"],
        ["Two tools are called 'double'", "rename one"],
    ),
    "fault_03_no_reset": (game("NoReset"), ["NoReset, which has no method reset"]),
    "fault_03_step_and_tools": (
        game("StepAndTools"),
        ["step(self, action) and the public methods move", "env.style=step"],
    ),
    "fault_03_column_seed": (
        [*game("Game"), "data=jsonl", "data.path=seeds.jsonl", "data.val_fraction=0"],
        ["a column 'seed'", "data.rename"],
    ),
    "fault_04_one_object": (game("the_one"), ["the_one returned the same object twice", "Return a new object"]),
    "fault_05_drops_calls": (
        chat("drops-calls"),
        ["The chat template of", "weightless", "drops the calls", "model.chat_template"],
    ),
    "fault_05_drops_answers": (
        chat("drops-answers"),
        ["The chat template of", "weightless", "drops the messages of the tool"],
    ),
    "fault_06_no_terminator": (
        chat("no-end"),
        ["No token that ends a turn", "qqalphaqq", "eos_token_id", "weightless"],
    ),
    "fault_05_drops_tools": (chat("untold"), ["The chat template of", "does not tell the policy of the tools: double"]),
    "fault_07_no_parser": (
        [*DOUBLE, "env.parser=auto"],
        ["env.parser=auto", "env.parser to hermes, llama3", "or to regex with env.call_pattern"],
    ),
    "fault_08_context": (
        [*DOUBLE, "env.max_tokens=4000"],
        ["An episode may have 4002 tokens", "the context of", "holds 256", "env.max_tokens"],
    ),
    "fault_09_environment": (
        [
            *("env=environment", "env.path={game: './mine.py:Game'}", "reward=environment"),
            *("data=jsonl", "data.path=kinds.jsonl", "data.val_fraction=0"),
        ],
        ["The column 'environment' of a row is 'gane'", "Did you mean 'game'"],
    ),
    "fault_10_no_reward": (
        ["env=tools", "env.parser=hermes", "env.functions=[./mine.py:double]", "reward=environment"],
        ["reward=environment takes the reward of the environments", "env= has none with a reward"],
    ),
    "fault_11_no_turns": ([*DOUBLE, "env.max_turns=0"], ["env.max_turns=0 is out of range: allowed is [1,"]),
}


PACKAGES = {"fault_12_gymnasium": "gymnasium", "fault_12_mcp": "mcp"}


@pytest.mark.parametrize("case", quick(CASES, {"fault_02_one_name", "fault_05_drops_calls"}))
def test_a_bad_environment_is_refused_before_any_weight_is_read(step: Command, cwd: Path, case: str) -> None:
    (cwd / "mine.py").write_text(MINE)
    write_jsonl(cwd / "seeds.jsonl", [{"prompt": f"{n}=", "seed": n} for n in range(8)])
    write_jsonl(cwd / "kinds.jsonl", [{"prompt": f"{n}=", "environment": "gane"} for n in range(8)])
    for name, text in TEMPLATES.items():
        (cwd / f"{name}.jinja").write_text(text)
    overrides, words = CASES[case]
    model = ["model=local", f"model.name={save_tokenizer(cwd / 'weightless')}"]
    data = [] if "data=jsonl" in overrides else ["data=repeated", "data.task.prompt=go"]
    short = ["env.max_tokens=32", "env.max_observation_tokens=8"]
    refused(step(*model, *data, *short, *overrides, "run_dir=run"), 2, *words)


@pytest.mark.all
@pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)
def test_a_package_that_is_missing_is_named_with_its_pip_line(
    step: Command, cwd: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    """Exit 8, as for every package that was asked for and is not there."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    kinds = {
        "gymnasium": ["env=gymnasium", "env.id=FrozenLake-v1", "reward=environment"],
        "mcp": ["env=mcp", "env.command=[python,server.py]", "env.parser=regex"],
    }
    short = ["env.max_tokens=32", "env.max_observation_tokens=8"]
    asked = ["data=repeated", "data.task.prompt=go", *short, *kinds[package]]
    refused(step(*asked, "run_dir=run"), 8, f"env={package}", f"pip install 'lit-rl[{package}]'")
