"""Episodes that a run recorded: their columns, the console's table, and the page of `lit-rl transcripts`."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pyarrow.parquet
import pytest
from rich.console import Console

from lit_rl.algorithms import GRPO
from lit_rl.callbacks import Samples
from lit_rl.callbacks.display import MOST_MESSAGES, ShownConversation, console_table, escape_control
from lit_rl.core.errors import ConfigError, StorageError
from lit_rl.core.rollout import Sampling
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.tasks import Repeated
from lit_rl.environments import CustomEnvironment
from lit_rl.generation import RolloutFunction
from lit_rl.generation.collect import pieces_of, response_ids
from lit_rl.models import LanguageModel
from lit_rl.reports.run_files import RunFiles
from lit_rl.reports.run_samples import (
    RecordedCompletion,
    RecordedRollout,
    RecordedTokens,
    evenly_spread,
    read_rollouts,
    whole_groups,
)
from lit_rl.reports.transcripts import transcripts, transcripts_html
from lit_rl.rewards import environment

NASTY = '</script><b onclick="x">\x1b[31m\x00\r\n&amp;é'


QUIET: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
QUIET |= {"accelerator": "cpu", "devices": 1, "enable_checkpointing": False, "gradient_clip_val": 1.0, "max_epochs": -1}


class Nasty:
    """Pays by its seed, answers with markup and control characters, and fails in some games."""

    def reset(self, *, seed: int) -> str:
        self.fails, self.pays = seed % 4 == 0, seed % 3
        return ""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self.fails:
            raise RuntimeError(NASTY)
        return NASTY, float(self.pays), self.pays > 1, False, {}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """One rollout of 32 episodes, learned from twice, so that the training's log-probs are known."""
    folder = tmp_path_factory.mktemp("run")
    limits: dict[str, Any] = {"max_turns": 3, "max_tokens": 120, "max_observation_tokens": 40}
    env = CustomEnvironment(Nasty, **limits, max_failed=1.0, seed="sample")
    settings: dict[str, Any] = {"sampling": Sampling(max_new_tokens=4), "group_size": 4, "iterations": 2}
    module = GRPO(LanguageModel("tiny"), environment, env=env, **settings)
    data = RolloutDataModule(task=Repeated("0..9=", train_rows=64, val_rows=0), prompts_per_rollout=8)
    samples = [Samples(print=0)]
    trainer = L.Trainer(**QUIET, max_steps=2, default_root_dir=folder, callbacks=samples)
    trainer.fit(module, data)
    table = pyarrow.parquet.read_table(folder / "samples" / "step_00000000.parquet").to_pylist()
    assert transcripts(folder) == 0
    return SimpleNamespace(folder=folder, module=module, table=table, page=(folder / "transcripts.html").read_text())


# ------------------------------------------------------------------ what is recorded


def test_the_tokens_of_an_episode_are_those_of_the_rollout(run: SimpleNamespace) -> None:
    completions, rollout = run.module.scored.completions, run.module.rollout
    tokenizer, written = run.module.tokenizer, response_ids(completions)
    for i, (row, episode) in enumerate(zip(run.table, completions.episodes, strict=True)):
        there = completions.attended[i]
        assert row["tokens/ids"] == completions.response_ids[i][there].tolist()
        by_policy = [token for token, own in zip(row["tokens/ids"], row["tokens/by_policy"]) if own]
        assert by_policy == written[i]
        assert row["tokens/learned"] == rollout.loss_mask[i][there].tolist()
        assert row["tokens/old_logprobs"] == rollout.old_logprobs[i][there].tolist()
        assert row["tokens/sampler_logprobs"] == completions.sampler_logprobs[i][there].tolist()
        assert "".join(row["tokens/text"]) == tokenizer.decode(row["tokens/ids"])
        assert json.loads(row["messages"]) == episode.messages and row["end"] == episode.end
        assert json.loads(row["turn_rewards"]) == episode.turn_rewards
        assert (row["calls"], row["failed_calls"], row["group"]) == (0, 0, i // 4)
        learned = [a for a, loss in zip(row["tokens/advantages"], row["tokens/learned"]) if loss]
        assert row["advantage"] == pytest.approx(sum(learned) / max(1, len(learned)), abs=1e-6)
    assert any(row["end"] == "failed" for row in run.table) and any(row["turns"] > 1 for row in run.table)


TEXTS = ["17+25=", "naïve 東京 🎉🎉", "\n\n  a \x00"]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_together_the_text(text: str) -> None:
    tokenizer: Any = LanguageModel("tiny").tokenizer
    ids = tokenizer.encode(text, add_special_tokens=False)
    (pieces,) = pieces_of([ids], tokenizer)
    assert len(pieces) == len(ids) and "".join(pieces) == text


def test_a_character_that_was_cut_is_no_end_of_the_pieces() -> None:
    tokenizer: Any = LanguageModel("tiny").tokenizer
    ids = tokenizer.encode("東", add_special_tokens=False)
    assert len(ids) == 3
    (pieces,) = pieces_of([[*ids[:2], *tokenizer.encode("ab", add_special_tokens=False)]], tokenizer)
    assert pieces == ["\ufffd", "\ufffd", "a", "b"]


# ------------------------------------------------------------------ the page


class Reader(HTMLParser):
    """Every tag that a browser would see; of each episode its attributes, turns and coloured tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.episodes: list[dict[str, Any]] = []
        self.scripts: list[str] = []
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "input", "br"):
            self._open.append(tag)
        if tag == "details":
            self.episodes.append(dict(attrs) | {"tokens": [], "unread": ""})
        elif tag == "i" and "details" in self._open:
            self.episodes[-1]["tokens"].append([str(dict(attrs)["class"]).split(), ""])
        elif tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] == ["i"] and "details" in self._open:
            self.episodes[-1]["tokens"][-1][1] += data
        elif self._open[-1:] == ["script"]:
            self.scripts[-1] += data


def parsed(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert not reader._open
    return reader


def test_the_page_says_what_was_recorded_and_colours_by_its_columns(run: SimpleNamespace) -> None:
    reader = parsed(run.page)
    assert len(reader.episodes) == len(run.table) == 32
    largest = max(abs(a) for row in run.table for a in row["tokens/advantages"])
    assert largest > 0
    for episode, row in zip(reader.episodes, run.table):
        assert [text for _, text in episode["tokens"]] == [escape_control(text) for text in row["tokens/text"]]
        columns = (row[f"tokens/{name}"] for name in ("by_policy", "learned", "advantages"))
        for (classes, _), by_policy, learned, advantage in zip(episode["tokens"], *columns):
            author = ("p" if learned else "q") if by_policy else "e"
            assert classes[0] == author
            shades = [each for each in classes if each[0] in "ab"]
            assert [each[0] for each in shades] == ["ab"[advantage < 0]] * (advantage != 0)
            if abs(advantage) == largest:
                assert shades[0][1] == "4"
        assert episode["data-end"] == row["end"] and episode["data-bad"] == str(int(row["end"] == "failed"))
        assert (episode["data-reward"] == "") == (row["end"] == "failed")
        if row["end"] != "failed":
            assert any(each[0] in "rs" for classes, _ in episode["tokens"] for each in classes), "no ratio"
    kinds = {classes[0] for episode in reader.episodes for classes, _ in episode["tokens"]}
    assert {"p", "e"} <= kinds


def episode_of(number: int, tokens: int, **changes: Any) -> RecordedCompletion:
    turn, own = [i // 100 for i in range(tokens)], [i % 100 < 60 for i in range(tokens)]
    numbers = [-0.5 * one for one in own]
    of_tokens = RecordedTokens([7] * tokens, ["ab"] * tokens, turn, own, own, numbers, numbers, None)
    said = [{"role": role, "content": "ab"} for _ in range(-(-tokens // 100)) for role in ("assistant", "user")]
    fields: dict[str, Any] = {"prompt": "p", "reward": 1.0, "advantage": 0.5, "end": "done", "turn_rewards": []}
    fields |= {"calls": 0, "failed_calls": 0, "error": "", "messages": said, "tokens": of_tokens}
    return RecordedCompletion(number=number, group=number // 8, **fields | changes)


@pytest.mark.all
def test_a_turn_says_from_which_text_it_goes_on() -> None:
    """On the page beside its author, in a table between the messages."""
    said = [{"role": "assistant", "content": text} for text in ("2", "two", "again")]
    messages = [said[0], {"role": "user", "content": "short"}, *said[1:]]
    forks: list[list[int | None]] = [[1, None], [2, 0]]
    each = replace(episode_of(0, 0, messages=messages, forks=forks), tokens=None)
    page = transcripts_html("a run", [RecordedRollout("step_0", 0, 1, 1.0, [each])], 100)
    for line in ("assistant · turn 1<br>begins another text", "assistant · turn 2<br>goes on from turn 0"):
        assert line in page, line
    assert "turn 0<br>" not in page
    shown = ShownConversation(messages, [True] * 3, forks)
    assert [(line.author, line.words) for line in shown.lines()] == [
        ("assistant", "2"), ("fork", "turn 1 begins another text"), ("user", "short"), ("assistant", "two"),
        ("fork", "turn 2 goes on from turn 0"), ("assistant", "again"),
    ]  # fmt: skip
    assert str(shown).splitlines()[1:3] == ["(turn 1 begins another text)", "user: short"]


def test_many_long_episodes_make_a_page_that_a_browser_can_show() -> None:
    text = transcripts_html(
        "big", [RecordedRollout("step_0", 0, 64, 1.0, [episode_of(i, 2000) for i in range(64)])], 2000
    )
    assert text.count("<i class") > 64 * 2000 and len(text) < 12e6
    assert "tokens more" not in text


def test_what_is_beyond_the_limits_is_left_out_and_said() -> None:
    text = transcripts_html("cut", [RecordedRollout("step_0", 3, 40, 1.0, [episode_of(0, 250)])], 130)
    reader = parsed(text)
    assert len(reader.episodes[0]["tokens"]) == 130 and "120 tokens more are in the parquet file" in text
    assert "1 of 40 episodes shown" in text


def test_a_tool_that_failed_is_a_failure_to_filter_by() -> None:
    rollout = RecordedRollout("step_0", 0, 1, 1.0, [episode_of(0, 10, calls=2, failed_calls=1)])
    (found,) = parsed(transcripts_html("calls", [rollout], 100)).episodes
    assert found["data-bad"] == "1" and found["data-reward"] == "1"


def test_runs_of_one_turn_have_transcripts_too(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    columns = {"step": [4, 4], "prompt": ["1+1=", "1+2="], "completion": ["<2>", "3"], "reward": [1.0, 0.0]}
    table = pyarrow.table(columns | {"advantage": [0.5, -0.5], "ended": [True, False]})
    pyarrow.parquet.write_table(table, tmp_path / "samples" / "step_00000004.parquet")
    assert transcripts(tmp_path) == 0
    text = (tmp_path / "transcripts.html").read_text()
    assert [each["data-end"] for each in parsed(text).episodes] == ["ended", "cut"] and "&lt;2&gt;" in text


def test_groups_are_whole_and_files_from_first_to_last() -> None:
    assert [whole_groups([0, 0, 1, 1, 2, 2], most) for most in (1, 2, 3, 5, 6, 9)] == [1, 2, 2, 4, 6, 6]
    assert evenly_spread(list("abcdefg"), 4) == list("aceg")
    assert evenly_spread(["a", "b", "c"], 1) == ["c"] and evenly_spread(["a", "b"], 9) == ["a", "b"]


def test_a_folder_without_samples_and_a_damaged_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"There is no step_\*.parquet in .*transcripts.files"):
        transcripts(tmp_path)
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "step_00000000.parquet").write_bytes(b"no parquet")
    with pytest.raises(StorageError, match=r"step_00000000.parquet holds no samples"):
        read_rollouts(RunFiles(tmp_path), "step_*", 4, 64)
    with pytest.raises(ConfigError, match="transcripts.episodes"):
        transcripts(tmp_path, episodes=0)
    many: Any = "many"
    with pytest.raises(ConfigError, match="transcripts.tokens=many is not a whole number"):
        transcripts(tmp_path, tokens=many)
    with pytest.raises(ConfigError, match="transcripts.files=/tmp/x names no files"):
        transcripts(tmp_path, files="/tmp/x")


# ------------------------------------------------------------------ the console


def printed(rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, **settings: Any) -> str:
    out = io.StringIO()
    monkeypatch.setattr("rich.console.Console", lambda: Console(file=out, width=100, **settings))  # imported late
    console_table("rollout", rows)
    return out.getvalue()


MESSAGES = [
    {"role": "assistant", "content": "mul", "tool_calls": [{"function": {"name": "mul", "arguments": {"a": 2}}}]},
    {"role": "tool", "content": "4\nassistant: 5"},
    {"role": "assistant", "content": "four"},
]


def test_authors_have_colours_and_what_is_not_learned_is_dim(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"prompt": "p", "completion": ShownConversation(MESSAGES, [True, False]), "reward": 1.0}
    shown = printed([row], monkeypatch, force_terminal=True, color_system="standard")
    assert "\x1b[36massistant: mul mul(a=2)" in shown
    assert "\x1b[2;35mtool: 4" in shown and "\x1b[2;36massistant (not learned): four" in shown


def test_a_table_without_colours_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"prompt": "p", "completion": ShownConversation(MESSAGES, [True, False]), "reward": 1.0}
    shown = printed([row], monkeypatch, color_system=None)
    cells = [line.split("│")[2] for line in shown.splitlines() if line.startswith("│")]
    lines = ["assistant: mul mul(a=2)", "tool: 4", "  assistant: 5", "assistant (not learned): four"]
    assert [cell.rstrip() for cell in cells] == [f" {line}" for line in lines]


def test_a_long_episode_shows_its_beginning_and_its_end() -> None:
    said = [{"role": "assistant", "content": str(i)} for i in range(40)]
    words = [line.words for line in ShownConversation(said, [True] * 40).lines()]
    assert words == [*map(str, range(6)), f"{40 - MOST_MESSAGES} messages more", *map(str, range(34, 40))]


def test_the_table_of_a_run_shows_its_episodes(run: SimpleNamespace) -> None:
    (row,) = Samples(print=1)._pick(run.module.samples)
    shown = row["completion"]
    assert isinstance(shown, ShownConversation) and str(shown) == run.table[0]["completion"]
    assert len(shown.learned) == run.table[0]["turns"]


# ------------------------------------------------------------------ episodes of a rollout function


def asked_again(prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
    """Two turns, between which the policy is told something."""
    told = trainer.tokenizer(" <again>", add_special_tokens=False)["input_ids"]
    first = trainer.generate([trainer.encode(prompt) for prompt in prompts])
    second = trainer.generate([a + b + told for a, b in zip(first["prompt_ids"], first["completion_ids"])])
    turns = list(zip(first["completion_ids"], second["completion_ids"]))
    logprobs = list(zip(first["logprobs"], second["logprobs"]))
    return {
        "prompt_ids": first["prompt_ids"],
        "completion_ids": [a + told + b for a, b in turns],
        "logprobs": [a + [0.0] * len(told) + b for a, b in logprobs],
        "env_mask": [[1] * len(a) + [0] * len(told) + [1] * len(b) for a, b in turns],
    }


def test_turns_of_a_rollout_function_are_shown_apart(tmp_path: Path) -> None:
    """In the file, the page and the console's table, as those of an environment."""
    env = RolloutFunction(asked_again, max_tokens=40)
    settings: dict[str, Any] = {"sampling": Sampling(max_new_tokens=4), "group_size": 4}
    module = GRPO(LanguageModel("tiny"), lambda completions: [float(len(c)) for c in completions], env=env, **settings)
    data = RolloutDataModule(task=Repeated("0..9=", train_rows=64, val_rows=0), prompts_per_rollout=2)
    trainer = L.Trainer(**QUIET, max_steps=1, default_root_dir=tmp_path, callbacks=[Samples(print=0)])
    trainer.fit(module, data)
    (row, *_) = table = pyarrow.parquet.read_table(tmp_path / "samples" / "step_00000000.parquet").to_pylist()
    for each in table:
        said = json.loads(each["messages"])
        assert [message["role"] for message in said] == ["assistant", "user", "assistant"]
        by_policy = "".join(t for t, own in zip(each["tokens/text"], each["tokens/by_policy"]) if own)
        assert said[1]["content"] == " <again>" and (said[0]["content"] + said[2]["content"]) in by_policy.replace(
            "<|im_end|>", ""
        )
        assert each["completion"].count("assistant: ") == 2 and each["turns"] == 2
    (shown,) = Samples(print=1)._pick(module.samples)
    assert [line.author for line in shown["completion"].lines()] == ["assistant", "user", "assistant"]
    assert transcripts(tmp_path) == 0
    text = (tmp_path / "transcripts.html").read_text()
    assert text.count("assistant · turn 1") == len(table) and "between turns" not in text
    assert len(parsed(text).episodes) == len(table) and row["end"] in ("answered", "cut")


# ------------------------------------------------------------------ the command


def test_the_command_reads_a_run_and_takes_its_own_keys_alone(
    run: SimpleNamespace, train: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = f"run_dir={run.folder}"
    assert train("transcripts", folder, "transcripts.episodes=8") == 0
    text = (run.folder / "transcripts.html").read_text()
    assert "(8 of 32 episodes of 1 rollouts" in capsys.readouterr().out and len(parsed(text).episodes) == 8
    assert train("transcripts", folder, "algo=ppo") == 2
    assert "algo cannot be set for lit-rl transcripts" in capsys.readouterr().err
    assert train("transcripts") == 2
    assert "needs the folder of a run" in capsys.readouterr().err
