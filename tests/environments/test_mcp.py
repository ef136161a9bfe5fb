"""`env=mcp` with a real server, in processes of its own: what is told and answered, and what becomes of processes."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mcp_tools
import pytest
from mcp import Client
from talks import Talk, asked, chats, one, texts
from waiting import until
from warm import Popen

from lit_rl.algorithms import GRPO
from lit_rl.core.errors import BackendError, ConfigError
from lit_rl.core.processes import is_alive, supervised
from lit_rl.core.rollout import Sampling
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Repeated
from lit_rl.environments import MCPTools
from lit_rl.environments.observations import IMAGE_LIMIT
from lit_rl.environments.tools import ToolAnswer, Toolbox, ToolCall
from lit_rl.models import LanguageModel

SERVER = str(Path(mcp_tools.__file__))
LIMIT = 30.0
"""Seconds of a start: the machine may be busy."""


def serving(*kind: str, **limits: Any) -> MCPTools:
    return MCPTools(["python", SERVER, *kind], **{"parser": "regex", "step_timeout": LIMIT, **limits})


def box(factory: MCPTools) -> Toolbox:
    toolbox = factory.kinds["tools"].toolbox
    assert toolbox is not None
    return toolbox


def call(factory: MCPTools, name: str, **arguments: Any) -> ToolAnswer:
    """Asked in an event loop that is closed after it: the server must not live in it."""
    return asyncio.run(box(factory).answer(ToolCall(name, arguments)))


def process_of(factory: MCPTools) -> int:
    return json.loads(call(factory, "whoami").text)["pid"]


def gone(process: int, seconds: float = 30.0) -> bool:
    return until(lambda: not is_alive(process), seconds)


@pytest.fixture(scope="module")
def tools() -> MCPTools:
    """One server for what does it no harm."""
    return serving()


# ------------------------------------------------------------------ what is told, and what is answered


def test_the_policy_is_told_what_the_server_says_of_its_tools(tools: MCPTools) -> None:
    async def listed() -> list[Any]:
        async with Client(mcp_tools.server) as client:
            return (await client.list_tools()).tools

    expected = asyncio.run(listed())
    functions = [schema["function"] for schema in box(tools).schemas]
    assert [f["name"] for f in functions] == [tool.name for tool in expected] and "multiply" in box(tools).tools
    for function, tool in zip(functions, expected, strict=True):
        assert function["parameters"] == tool.input_schema and function["description"] == tool.description


ANSWERS: dict[str, tuple[str, dict[str, Any], ToolAnswer]] = {
    "number": ("multiply", {"a": 17, "b": 25}, ToolAnswer("425")),
    "objects": ("distance", {"points": [{"x": 1, "y": 2}, {"x": 0, "y": 0}], "norm": "max"}, ToolAnswer("2.0")),
    "default": ("distance", {"points": [{"x": 1, "y": 2}, {"x": 0, "y": 0}], "scale": None}, ToolAnswer("3.0")),
    "image": ("draw", {"words": "ä"}, ToolAnswer("here is ä:\n[image that cannot be shown: image/png]\ndone")),
    "raised": ("divide", {"a": 1, "b": 0}, ToolAnswer("error: divide: Error executing tool divide", failed=True)),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_what_a_tool_gives_is_the_answer(name: str, tools: MCPTools) -> None:
    tool, arguments, answer = ANSWERS[name]
    assert call(tools, tool, **arguments) == answer


def test_a_policy_that_sees_is_shown_the_image(tools: MCPTools) -> None:
    token = IMAGE_LIMIT.set(12)
    first, image, last = call(tools, "draw", words="ä").parts
    IMAGE_LIMIT.reset(token)
    assert (first["text"], last["text"]) == ("here is ä:", "done")
    assert (image["image"].width, image["image"].height) == (4, 3)


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "unknown": ("halve", {}, "there is no tool 'halve'; there are multiply,"),
    "missing": ("multiply", {"a": 3}, "'b' is a required property"),
    "too many": ("multiply", {"a": 3, "b": 4, "c": 5}, "'c' was unexpected"),
    "a word": ("multiply", {"a": "3", "b": 4}, "'3' is not of type 'integer' of a"),
    "nan": ("divide", {"a": math.nan, "b": 1.0}, "nan is no number of a"),
    "choice": ("distance", {"points": [], "norm": "two"}, "'two' is not one of ['one', 'max'] of norm"),
    "within": ("distance", {"points": [{"x": 1.0}]}, "'y' is a required property of points.0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_answered_with_what_is_wrong(name: str, tools: MCPTools) -> None:
    tool, arguments, words = WRONG[name]
    answer = call(tools, tool, **arguments)
    assert answer.failed and answer.text.startswith("error: ") and words in answer.text and "\n" not in answer.text


def test_a_conversation_through_a_chat_template(tools: MCPTools) -> None:
    def written(name: str, **arguments: Any) -> str:
        return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'

    hermes = MCPTools(["python", "-c", ""], parser="hermes", max_observation_tokens=4000)
    hermes._kinds = dict(tools.kinds)  # the same server
    turn = written("after", seconds=0.2, word="slow") + written("multiply", a=2) + written("multiply", a=2, b=3)
    talk = Talk(chats(hermes), asked([{"role": "user", "content": "2*3?"}]), [7], turn=4000)
    heard = talk.heard(0, turn)
    assert heard is not None and heard.index("slow") < heard.index("'b' is a required") < heard.index("6")
    assert talk.heard(0, "It is 6.") is None
    (episode,) = talk.over()
    answers = [message["content"] for message in episode.messages if message["role"] == "tool"]
    assert answers == ["slow", "error: multiply: 'b' is a required property", "6"]
    assert (episode.end, episode.calls, episode.failed_calls) == ("answered", 3, 1)


def test_rows_are_answered_at_the_same_time(tools: MCPTools) -> None:
    talk = Talk(texts(tools), asked(*["?"] * 8), range(8))
    began = time.monotonic()
    for row in range(8):
        talk.say(row, f'after(0.5, "word {row}")')
    heard: dict[int, str | None] = {}
    while len(heard) < 8:
        heard |= {answer.row: talk.read(answer) for answer in talk.conversations.answers(wait=True)}
    assert time.monotonic() - began < 8 * 0.5
    assert all(f"word {row}" in (text or "") for row, text in heard.items())
    talk.over()


def test_a_loop_that_is_given_up_takes_no_server_with_it(tools: MCPTools) -> None:
    interaction, process = texts(tools), process_of(tools)
    assert "12" in (Talk(interaction, asked("?"), [1]).heard(0, "multiply(3, 4)") or "")
    interaction._runner.abandon()
    assert "35" in (Talk(interaction, asked("?"), [1]).heard(0, "multiply(5, 7)") or "")
    assert process_of(tools) == process


# ------------------------------------------------------------------ limits and losses


@pytest.mark.all
def test_a_call_that_is_late_fails_its_episode_and_no_server() -> None:
    factory = serving()
    process = process_of(factory)
    factory.step_timeout = 0.5
    late = one(texts(factory), 'after(60, "never")')
    assert (late.end, late.error) == ("timeout", "the environment took longer than env.step_timeout=0.5 s")
    assert "12" in str(one(texts(factory), "multiply(3, 4)", "12").messages) and process_of(factory) == process


def test_a_killed_server_fails_the_calls_of_the_moment_and_is_started_again() -> None:
    factory = serving()
    first = process_of(factory)
    talk = Talk(texts(factory), asked(*["?"] * 3), range(3))
    for row in (0, 1):
        talk.say(row, 'after(60, "never")')
    time.sleep(0.3)
    os.kill(first, signal.SIGKILL)
    lost = [answer for _ in range(2) for answer in talk.conversations.answers(wait=True)]
    assert [(answer.row, answer.token_ids) for answer in sorted(lost, key=lambda a: a.row)] == [(0, None), (1, None)]
    assert "12" in (talk.heard(2, "multiply(3, 4)") or "")
    assert process_of(factory) != first and gone(first)
    talk.heard(2, "12")
    episodes = talk.over()
    assert [each.end for each in episodes] == ["failed", "failed", "answered"]
    assert all("was lost during a call of 'after'" in (each.error or "") for each in episodes[:2])


@pytest.mark.all
def test_a_server_that_died_between_two_calls_is_started_again_for_the_second() -> None:
    factory = serving()
    first = process_of(factory)
    os.kill(first, signal.SIGKILL)
    assert gone(first)
    time.sleep(1.0)  # until the end of its output is read
    assert process_of(factory) != first


@pytest.mark.all
def test_a_server_that_cannot_be_started_again_says_so(tmp_path: Path) -> None:
    factory = serving("once", str(tmp_path / "started"))
    talk = Talk(texts(factory), asked("?", "?"), [1, 2])
    assert talk.heard(0, "die(3)") is None and talk.heard(1, "multiply(3, 4)") is None
    first, second = talk.over()
    assert "was lost during a call of 'die'" in (first.error or "") and "gives up" in (first.error or "")
    assert second.end == "failed" and "The MCP server 'server' does not start" in (second.error or "")


# ------------------------------------------------------------------ processes end with the run

RUN = """
import asyncio, json, sys, time
from lit_rl.environments import MCPTools
from lit_rl.environments.tools import ToolCall

tools = MCPTools(["python", sys.argv[1]]).kinds["tools"].toolbox
told, child = (asyncio.run(tools.answer(ToolCall(name, {}))).text for name in ("whoami", "child"))
print(json.loads(told)["pid"], child, flush=True)
time.sleep(60)
"""


def test_no_process_outlives_a_run_that_is_killed() -> None:
    run = Popen([sys.executable, "-c", RUN, SERVER], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    processes = [int(word) for word in run.stdout.readline().split()]
    assert len(processes) == 2 and all(map(is_alive, processes))
    run.kill()
    assert run.wait(30) == -signal.SIGKILL
    assert all(map(gone, processes))


def test_a_group_ends_although_nobody_reads_what_its_supervisor_says() -> None:
    """A run that was killed: its server ends as its stdin does, and the supervisor may see that first."""
    leaves = "import mcp_tools; print(mcp_tools.child(), flush=True)"
    reader, stderr = os.pipe()
    watched = subprocess.Popen(
        supervised([sys.executable, "-c", leaves], 1.0),
        cwd=Path(SERVER).parent,
        stdout=subprocess.PIPE,
        stderr=stderr,
        start_new_session=True,
        text=True,
    )
    os.close(reader)
    os.close(stderr)
    assert watched.stdout is not None
    assert gone(int(watched.stdout.readline()))
    assert watched.wait(LIMIT) == -signal.SIGKILL


@pytest.mark.all
def test_a_server_ends_with_what_asked_it() -> None:
    factory = serving()
    process = process_of(factory)
    del factory
    assert gone(process)


# ------------------------------------------------------------------ refused before weights are loaded


def test_a_server_that_breaks_is_told_with_its_last_lines_and_loads_no_weights(tmp_path: Path) -> None:
    import lightning as L

    module = GRPO(
        LanguageModel("tiny"), lambda completions: [0.0], env=serving("broken"), sampling=Sampling(max_new_tokens=4)
    )
    data = RolloutDataModule(task=Repeated("?", train_rows=8, val_rows=0), prompts_per_rollout=4)
    quiet = {"logger": False, "enable_checkpointing": False, "default_root_dir": tmp_path, "accelerator": "cpu"}
    with pytest.raises(BackendError, match=r"(?s)'server' does not start: .*RuntimeError: no database.*exit code 1"):
        L.Trainer(max_steps=1, **quiet).fit(module, data)
    assert module.policy is None


@pytest.mark.all
def test_a_server_without_tools_is_refused() -> None:
    with pytest.raises(ConfigError, match="The MCP server 'server' lists no tools"):
        serving("empty").kinds  # noqa: B018


@pytest.mark.all
def test_a_server_that_hangs_is_given_up_and_ended() -> None:
    before = set(children())
    with pytest.raises(BackendError, match=r"env.step_timeout=1 s"):
        serving("hangs", step_timeout=1.0).kinds  # noqa: B018
    assert all(map(gone, set(children()) - before))


def children() -> Iterator[int]:
    """Of this process."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = stat.read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
        if int(parent) == os.getpid():
            yield int(stat.parent.name)


@pytest.mark.all
def test_two_tools_of_one_name_are_refused_and_can_be_chosen_from() -> None:
    command = ["python", SERVER]
    with pytest.raises(ConfigError, match=r"tool 'multiply'.*env.servers.b.tools="):
        MCPTools(servers={"a": {"command": command}, "b": {"command": command}}).kinds  # noqa: B018
    chosen = MCPTools(
        servers={
            "a": {"command": command, "tools": ["multiply", "divide"]},
            "b": {"command": command, "tools": ["whoami"], "env": {"WHERE": "b"}},
        },
        step_timeout=LIMIT,
    )
    assert list(box(chosen).tools) == ["multiply", "divide", "whoami"]
    told = json.loads(call(chosen, "whoami").text)
    assert told["env"]["WHERE"] == "b" and Path(told["python"]).parent == Path(sys.executable).parent
    assert "OMP_NUM_THREADS" in os.environ and "OMP_NUM_THREADS" not in told["env"], "no variable that nobody gave it"
    with pytest.raises(ConfigError, match="'mutliply', .*Did you mean 'multiply'"):
        MCPTools(servers={"a": {"command": command, "tools": ["mutliply"]}}, step_timeout=LIMIT).kinds  # noqa: B018


def test_without_the_package_the_line_to_install_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(BackendError, match=r"pip install 'lit-rl\[mcp\]'"):
        serving()


# ------------------------------------------------------------------ an address


@pytest.mark.all
def test_a_server_at_an_address_is_asked_and_asked_again_when_it_is_back() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def started() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, SERVER, "http", str(port)], stderr=subprocess.DEVNULL)

    def factory() -> MCPTools:
        return MCPTools(servers={"far": {"url": f"http://127.0.0.1:{port}/mcp"}}, parser="regex", step_timeout=LIMIT)

    with pytest.raises(BackendError, match="'far' does not start: "):
        factory().kinds  # noqa: B018
    process = started()
    try:
        wait_for(port)
        far = factory()
        assert call(far, "multiply", a=3, b=4) == ToolAnswer("12")
        process.kill()
        process.wait()
        assert one(texts(far), "multiply(3, 4)").end == "failed"
        process = started()
        wait_for(port)
        assert call(far, "multiply", a=3, b=4) == ToolAnswer("12")
    finally:
        process.kill()
        process.wait()


def wait_for(port: int) -> None:
    until = time.monotonic() + LIMIT
    while time.monotonic() < until:
        with socket.socket() as trying:
            if trying.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError("it does not listen")
