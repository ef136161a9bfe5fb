"""`lit-rl data-check`: what a file becomes, without a weight being read or a file written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas
import pytest
from cli_helpers import Command, contents, refused, write_jsonl

import lit_rl.data.readers
from lit_rl.core.errors import DataError
from lit_rl.data import sources
from lit_rl.data.kinds import kind_of
from lit_rl.data.sources import load_rows
from lit_rl.data.splits import first_row


@pytest.fixture
def check(command: Command, cwd: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """`lit-rl data-check` with few rows a step; nothing is loaded, and nothing stays in the current folder."""

    def load(*_: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("lit_rl.models.LanguageModel.load", load)

    def run(*arguments: str) -> Any:
        outcome = command("data-check", *arguments)
        assert contents(cwd) == []
        return outcome

    return run


def sums(count: int, **columns: Any) -> list[dict[str, Any]]:
    """Distinct sums; a column is made by its function of the right answer."""
    rows = [(n, {"prompt": f"{n}+{n + 1}=", "answer": str(2 * n + 1)}) for n in range(count)]
    return [{**row, **{name: make(2 * n + 1) for name, make in columns.items()}} for n, row in rows]


PAIRS = {"chosen": str, "rejected": lambda right: str(right + 1)}
TRIPLES = {"reference": lambda right: f"{right} of course"}
FILES = {
    "prompts": (sums(40), "data=jsonl (columns prompt, answer)", "Prompts for rollouts"),
    "texts": (sums(40, completion=str), "data=texts", "format: prompt-completion (text)"),
    "pairs": (sums(40, **PAIRS), "data=preferences", "learn from pairs; format: preference (text)"),
    "verdicts": (
        sums(40, completion=str, label=lambda right: right % 3 == 0),
        "data=preferences",
        "learn from verdicts; format: unpaired preference (text)",
    ),
    "steps": (
        sums(40, completions=lambda right: ["think", str(right)], labels=lambda right: [True, False]),
        "data=steps",
        "learn from stepwise; format: stepwise (text)",
    ),
    "whole texts": ([{"text": f"word {n}"} for n in range(40)], "data=texts", "language modelling (text)"),
    "token ids": ([{"input_ids": [n, n + 1, 2]} for n in range(40)], "data=texts", "format: tokenised"),
}


@pytest.mark.parametrize(("rows", "group", "format"), FILES.values(), ids=FILES.keys())
def test_the_group_is_told_from_the_columns(check, tmp_path, rows, group, format):
    path = write_jsonl(tmp_path / "mine.jsonl", rows)
    outcome = check(f"data.path={path}")
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith(group)
    assert format in outcome.out


def longest(outcome: Any, part: str) -> int:
    return int(re.findall(rf"Tokens of {part}: \d+ to (\d+)", outcome.out)[0])


@pytest.mark.all
def test_keys_of_the_group_that_is_told_can_be_typed(check, tmp_path):
    """Hydra knows the keys of a group only once it is chosen, and the plain `data=addition` has none of these."""
    rows = [{**row, "completion": "so " * 300} for row in sums(40, completion=str)]
    path = write_jsonl(tmp_path / "mine.jsonl", rows)
    outcome = check(f"data.path={path}", "data.max_length=64")
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith("data=texts (columns prompt, answer, completion)\n")
    assert longest(outcome, "completions") <= 64 < longest(check(f"data.path={path}"), "completions")
    # before options and after them, quoted, from the environment, with the columns under other names
    assert check("--config-dir", str(tmp_path), f"data.path='{path}'", "data.batch_size=4").code == 0
    odd = write_jsonl(tmp_path / "odd.jsonl", [{"q": row["prompt"], "a": row["answer"]} for row in rows])
    named = check(f"data.path={odd}", "data.rename={q: prompt, a: completion}", "data.learn=all", "--config-dir=.")
    assert named.code == 0 and named.out.startswith("data=texts"), named.err
    verdicts = write_jsonl(tmp_path / "v.jsonl", sums(40, completion=str, label=bool))
    assert check(f"data.path={verdicts}", "data.max_completion_tokens=4").out.startswith("data=preferences")


@pytest.mark.all
def test_the_mapped_row_is_what_tells(check, tmp_path):
    rows = [{"q": row["prompt"], "a": row["answer"], "prompt": "not this one"} for row in sums(40)]
    path = write_jsonl(tmp_path / "mine.jsonl", rows)
    words = [f"data.path={path}", "data.max_length=64", "data.map_row={_target_: hydra.utils.get_method, path: NAME}"]
    outcome = check(*(word.replace("NAME", "lit_rl.data.recipes.gsm8k") for word in words))
    refused(outcome, 3, "mine.jsonl:1", "'question'")  # called with the first row, which is none of that set
    refused(check(*(word.replace("NAME", "os.system") for word in words)), 2, "os.system", "allow_targets")


@pytest.mark.all
def test_a_wrong_key_of_the_group_is_named(check, tmp_path):
    path = write_jsonl(tmp_path / "mine.jsonl", sums(40, completion=str))
    refused(check(f"data.path={path}", "data.max_lenght=64"), 2, "data.max_lenght", "'max_length'")
    refused(check(f"data.path={path}", "data.max_length=[64"), 2, "[64")
    wrong = check(f"data.path={path}", "data.max_lenght=64")
    assert "data=texts (columns prompt, answer, completion)" in wrong.out, "the group that lacks the key is said"
    refused(check(f"data.path={tmp_path / 'none.jsonl'}", "data.max_length=64"), 3, "no such file")


@pytest.mark.all
def test_a_file_is_parsed_once(check, tmp_path, monkeypatch):
    rows = FILES["texts"][0]
    path, parsed = write_jsonl(tmp_path / "mine.jsonl", rows), []
    once = lit_rl.data.readers.parse_object
    monkeypatch.setattr("lit_rl.data.readers.parse_object", lambda line: parsed.append(line) or once(line))
    outcome = check(f"data.path={path}")
    assert outcome.code == 0, outcome.err
    assert len(rows) <= len(parsed) <= len(rows) + 2  # and the first line, to tell what it is for
    assert len(set(parsed)) == len(rows)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet", ".json"])
def test_the_first_row_is_that_of_the_whole_file_and_the_rest_is_left(tmp_path, monkeypatch, suffix):
    path = tmp_path / f"mine{suffix}"
    pandas.DataFrame({"prompt": ["a", "b"], "completion": ["c", "d"]}).pipe(
        lambda frame: {
            ".jsonl": lambda: frame.to_json(path, orient="records", lines=True),
            ".json": lambda: frame.to_json(path, orient="records"),
            ".parquet": lambda: frame.to_parquet(path),
            ".csv": lambda: frame.to_csv(path, index=False),
        }[suffix]()
    )
    rows = load_rows(path)
    if suffix != ".json":
        read = sources._READERS[suffix]

        def one(path: Path, skip: int) -> Iterator[Any]:
            yield next(read(path, skip))
            pytest.fail("read on")

        monkeypatch.setitem(sources._READERS, suffix, one)
    row, where = first_row(str(path), rename={"completion": "text"}, map_row=lambda row: {**row, "prompt": "A"})
    assert row == {"prompt": "A", "text": rows[0]["completion"]} and where == rows.where(0)


def test_a_first_row_that_cannot_be_read_is_refused_or_left_out(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": \n{"prompt": "b"}\n')
    with pytest.raises(DataError, match="mine.jsonl:1"):
        first_row(str(path))
    assert first_row(str(path), on_bad_row="skip") == ({"prompt": "b"}, f"{path}:2")
    path.write_text("")
    with pytest.raises(DataError, match="no rows"):
        first_row(str(path))


@pytest.mark.all
def test_the_algorithm_decides_where_it_is_named(check, tmp_path):
    path = write_jsonl(tmp_path / "mine.jsonl", sums(40, **PAIRS))
    told = {
        "sft": "data=texts (what the algorithm learns from)\nExamples for methods that learn from texts",
        "kto": "data=preferences (what the algorithm learns from)\nExamples for methods that learn from verdicts",
        "rloo": "data=jsonl (what the algorithm learns from)\nPrompts for rollouts",
    }
    for algo, words in told.items():
        outcome = check(f"data.path={path}", f"algo={algo}")
        assert outcome.code == 0, outcome.err
        assert outcome.out.startswith(words)
    refused(check(f"data.path={write_jsonl(tmp_path / 'p.jsonl', sums(40))}", "algo=dpo"), 3, "chosen, rejected")


@pytest.mark.all
def test_a_group_that_is_named_stays(check, tmp_path):
    path = write_jsonl(tmp_path / "mine.jsonl", sums(40, **PAIRS))
    outcome = check(f"data.path={path}", "data=texts", "data.learn=all")
    assert "data=texts (" not in outcome.out
    assert "⟦" in outcome.out and "learn from texts" in outcome.out
    assert check("algo=sft").code == 0  # the task of the preset
    verdicts = write_jsonl(tmp_path / "v.jsonl", sums(40, completion=str, label=bool))
    outcome = check(f"data.path={verdicts}", "data=preferences")
    assert "learn from verdicts" in outcome.out


def test_rows_stand_as_the_model_reads_them(check, tmp_path):
    rows = sums(40, **PAIRS)
    rows[0] |= {"prompt": "a\x1b[31m[red]b\u202ec\n", "chosen": "d\x07"}
    path = write_jsonl(tmp_path / "mine.jsonl", rows)
    outcome = check(f"data.path={path}", "data.val_fraction=0", "data_check.rows=2")
    assert outcome.code == 0, outcome.err
    assert "a\\x1b[31m[red]b\\u202ec↵\n⟦d\\x07<|im_end|>⟧\n" in outcome.out
    assert "row 1, chosen" in outcome.out and "1+2=⟦3<|im_end|>⟧\n" in outcome.out
    assert "row 1, rejected" in outcome.out and "1+2=⟦4<|im_end|>⟧\n" in outcome.out
    assert "row 2" not in outcome.out
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202e]", outcome.out)


@pytest.mark.all
@pytest.mark.parametrize("forks", [False, True])
def test_the_assistants_turns_are_marked_in_every_row_of_a_conversation(check, tmp_path, forks):
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    rows = [{"messages": [{"role": role, "content": f"{text}{n}"} for role, text in turns]} for n in range(10, 50)]
    path = write_jsonl(tmp_path / "mine.jsonl", rows)
    (tmp_path / "template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ '!' if forks and loop.last }}{{ m.content }}<|im_end|>"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}".replace("forks", str(forks).lower())
    )
    outcome = check(
        f"data.path={path}", "data=texts", "data.learn=assistant", f"model.chat_template={tmp_path / 'template.jinja'}"
    )
    assert outcome.code == 0, outcome.err
    marked = re.findall("⟦(.*?)⟧", outcome.out, re.DOTALL)[1:3]  # the first stands in the legend
    assert [text.lstrip("!")[0] for text in marked] == ["b", "d"] and all(
        text.endswith("<|im_end|>") for text in marked
    )
    short = int(re.search(r"row 0, text .*?: (\d+) tokens", outcome.out)[1])  # with one of the two replies
    said = (
        f"; 38 conversations, 76 training examples: 38 conversations became several, with {38 * short} tokens beside "
    )
    assert (said in outcome.out.replace("\n", " ")) == forks
    reply = "Tokens of completions: 5 to 5" if forks else "Tokens of replies: 4 to 4"  # b10<|im_end|>, with its mark
    assert reply in outcome.out and ("Tokens of all replies of a text: 8 to 8" in outcome.out) != forks
    assert "0 of 38 rows have the prompt of an earlier one" in outcome.out, "the rows of a conversation are no repeats"
    assert (
        ("forked 40" in outcome.out and "; kept and held_out are training examples" in outcome.out) == forks
        and "val: 0 of" in outcome.out
        and "<|im_start|>user↵\n" in outcome.out
    )


@pytest.mark.all
def test_what_a_template_leaves_out_is_said(check, tmp_path):
    says = [{"role": role, "content": f"the {role}"} for role in ("system", "user")]
    row = {"prompt": says, "completion": [{"role": "assistant", "content": "yes"}]}
    path = write_jsonl(tmp_path / "mine.jsonl", [row] * 40)
    data = [f"data.path={path}", "data=texts", "data.val_fraction=0"]
    deaf, whole = tmp_path / "deaf.jinja", tmp_path / "whole.jinja"
    deaf.write_text("{% for m in messages[1:] %}{{ m.content }}{% endfor %}")
    whole.write_text("{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}:{% endif %}")
    told = check(*data, f"model.chat_template={deaf}").out
    assert "The chat template leaves out words of the system: the system" in told
    assert "does not open the assistant's turn" in told and "words of the user" not in told
    assert "The chat template" not in check(*data, f"model.chat_template={whole}").out


@pytest.mark.all
def test_counts_lengths_columns_and_repeats(check, tmp_path):
    rows = sums(40, **PAIRS)
    rows += [rows[0], {**rows[1], "rejected": "another"}, {**rows[2], "rejected": rows[2]["chosen"]}]
    path = write_jsonl(tmp_path / "mine.jsonl", rows)
    held = write_jsonl(tmp_path / "val.jsonl", [rows[3], {**rows[4], "prompt": "never seen"}])
    outcome = check(f"data.path={path}", f"data.val_path={held}")
    assert outcome.code == 0, outcome.err
    assert "train: rows 43, equal 1, kept 42 (the longest had" in outcome.out
    assert "train: 1 of 42 rows are equal to an earlier one" in outcome.out
    assert "train: 2 of 42 rows have the prompt of an earlier one" in outcome.out
    assert "val: 1 of 2 rows have a training prompt" in outcome.out
    assert "answer (str): 1" in outcome.out
    assert "training prompt" not in outcome.err  # said once
    bars = re.findall(r"^ *[\d-]+ #+ (\d+)$", outcome.out, re.MULTILINE)
    assert sum(map(int, bars)) == 42 + 2 * 42  # every prompt, and both completions of each


@pytest.mark.all
def test_lines_fit_the_terminal(check, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    rows = [{**row, "prompt": "long " * 300 + row["prompt"]} for row in sums(40, **PAIRS)]
    path = write_jsonl(tmp_path / "mine.jsonl", rows)
    outcome = check(f"data.path={path}", "data=preferences", "data.max_length=null")
    assert outcome.code == 0, outcome.err
    assert max(map(len, outcome.out.splitlines())) <= 20


def test_bad_data_ends_with_its_message(check, tmp_path):
    few = write_jsonl(tmp_path / "few.jsonl", sums(8, **PAIRS))
    outcome = check(f"data.path={few}", "data.batch_size=32")  # fewer rows than a step takes are enough to look at
    assert outcome.code == 0 and "Tokens of completions" in outcome.out, outcome.err
    told = " ".join(outcome.out.split())
    assert "Too few rows to train on" in told and "rows are left for training" in told
    typo = write_jsonl(tmp_path / "typo.jsonl", [{"promt": f"a{n}", "reply": "b"} for n in range(40)])
    refused(check(f"data.path={typo}"), 3, "promt, reply", "data.rename", "'prompt'")
    renamed = check(f"data.path={typo}", "data.rename={promt: prompt, reply: completion}")
    assert renamed.code == 0 and renamed.out.startswith("data=texts"), renamed.err
    one = write_jsonl(tmp_path / "one.jsonl", [{"prompt": "a", "completion": "b"}] * 40)
    outcome = check(f"data.path={one}")  # one prompt: rows of it are held out
    assert outcome.code == 0 and "train: rows 40, kept 38, held_out 2" in outcome.out, outcome.err
    refused(check(f"data.path={tmp_path / 'nothing.jsonl'}"), 3, "no such file")
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    refused(check(f"data.path={tmp_path / 'broken.jsonl'}"), 3, "broken.jsonl:2")


def test_kinds_by_columns():
    assert kind_of({"prompt": "a", "chosen": "b", "rejected": "c", "messages": []}) == "pairs"
    assert kind_of({"prompt": "a", "text": "b"}) is None
    assert kind_of({"prompt": "a", "completion": None, "answer": "b"}) is None
    assert kind_of({"chosen": "a", "rejected": "b"}) == "pairs"


def test_a_reward_that_was_typed_says_what_it_thinks_of_the_answers(check: Command, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "fruit.jsonl", sums(8, answer=lambda right: f"{right} apples"))
    outcome = check(f"data.path={path}", "data.val_fraction=0", "reward=math_answer")
    told = " ".join(outcome.out.split())
    assert r"math_answer: only the same text in \boxed{...} equals 8 of 8 answers; the first is '1 apples'" in told
    assert "math_answer" not in check(f"data.path={path}", "data.val_fraction=0").out
    refused(check(f"data.path={path}", "reward=math_answer", "data.rename={answer: right}"), 4, "'answer'", "no column")


def test_a_reference_beside_a_pair_is_read_by_the_method_that_learns_it_alone(check, tmp_path):
    """A run without `algo=tpo` is DPO's, to which the column may hold anything: an answer for the reward, or none."""
    path = write_jsonl(tmp_path / "mine.jsonl", sums(40, **PAIRS, **TRIPLES))
    shown = check("algo=tpo", f"data.path={path}").out
    assert "learn from triples; format: triple preference (text)" in shown and "of course" in shown
    assert all(f"{name} (" in shown for name in ("chosen", "rejected", "reference"))
    assert "learn from pairs; format: preference (text)" in check(f"data.path={path}").out
    anything = write_jsonl(tmp_path / "any.jsonl", sums(40, **PAIRS, reference=lambda right: {"value": right}))
    assert "learn from pairs; format: preference (text)" in check(f"data.path={anything}").out
