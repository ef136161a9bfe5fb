"""A row is read alike whatever it is for: by a function at a path, with its tools, with images in front of a text."""

from __future__ import annotations

import copy
import functools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import trl

from lit_rl.core.errors import ConfigError, DataError
from lit_rl.data.example_module import PreferenceDataModule, StepwiseDataModule, SupervisedDataModule
from lit_rl.data.kinds import is_verdict, kind_of
from lit_rl.data.prompt_module import RolloutDataModule
from lit_rl.data.recipes import gsm8k
from lit_rl.data.rendering import KWARGS_COLUMN
from lit_rl.data.rows import row_function
from lit_rl.data.splits import first_row, parse_sources
from lit_rl.data.tasks import Digits
from lit_rl.models import LanguageModel

ASK, REPLY = [{"role": "user", "content": "1+1?"}], [{"role": "assistant", "content": "2"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
TEMPLATE = "{{ (tools or []) | tojson }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


@pytest.fixture
def told():
    tokenizer = LanguageModel("tiny").tokenizer
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO)
    logging.getLogger("lightning.pytorch").propagate = True
    return lambda: [record.getMessage() for record in caplog.records]


# ---------------------------------------------------------------------- map_row


def test_a_row_function_is_named_by_file_or_module(tmp_path, monkeypatch):
    (tmp_path / "m.py").write_text("def f(row):\n    return {'prompt': row['q'], 'answer': 'a'}\n")
    monkeypatch.chdir(tmp_path)
    for path in ("./m.py:f", f"{tmp_path}/m.py:f"):
        function = row_function(path)
        assert function is not None and function({"q": "1"}) == {"prompt": "1", "answer": "a"}
    assert row_function("lit_rl.data.recipes.gsm8k") is row_function("lit_rl.data.recipes:gsm8k") is gsm8k
    assert row_function(gsm8k) is gsm8k and row_function(None) is None
    (source,) = parse_sources([{"path": "a.jsonl", "map_row": "./m.py:f"}])
    assert source.own({"q": "1"}, "a:1") == {"prompt": "1", "answer": "a"}
    (tmp_path / "q.jsonl").write_text('{"q": "1+1="}\n')
    assert first_row("q.jsonl", map_row=row_function("./m.py:f"))[0] == {"prompt": "1+1=", "answer": "a"}
    data = RolloutDataModule(path="q.jsonl", map_row="./m.py:f", val_fraction=0)
    data.prepare(LanguageModel("tiny").tokenizer)
    assert data.peek(1).prompts == ["1+1="]


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("./m.py:g", ConfigError, r"there is no 'g'\. There are: f"),
        ("./m.py:word", ConfigError, r"data\.map_row='\./m\.py:word' is no function from row to row"),
        ("./broken.py:f", DataError, r"data\.map_row: importing .*broken\.py failed with ZeroDivisionError"),
    ],
)
def test_what_names_no_row_function_is_refused_by_its_key(tmp_path, monkeypatch, path, error, message):
    (tmp_path / "m.py").write_text("word = 'no function'\ndef f(row):\n    return row\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        RolloutDataModule(rows=[{"prompt": "a"}], map_row=path)


def changing(row):
    row["prompt"].append({"role": "user", "content": "More?"})
    row["prompt"][0]["content"] += "!"
    row["tags"].append("seen")
    row["done"] = True
    return row


def test_rows_that_a_function_changes_in_place_are_what_they_were():
    rows: list[dict[str, Any]] = [{"prompt": copy.deepcopy(ASK), "tags": []} for _ in range(2)]
    before = copy.deepcopy(rows)
    data = RolloutDataModule(rows=rows, map_row=changing, val_fraction=0)
    for _ in range(2):  # two policies, two tokenizers
        data.prepare(LanguageModel("tiny").tokenizer)
        assert data.peek(1).prompts == [[{"role": "user", "content": "1+1?!"}, {"role": "user", "content": "More?"}]]
        assert data.peek(1).columns == {"tags": [["seen"]], "done": [True]}
    assert rows == before


# ---------------------------------------------------------------------- tools


def test_a_prompt_is_told_of_its_rows_tools_as_a_text_to_imitate_is(told):
    for tools in (TOOLS, str(TOOLS)):
        asked = RolloutDataModule([{"prompt": ASK, "tools": tools}], val_fraction=0)
        asked.prepare(told)
        learned = SupervisedDataModule([{"prompt": ASK, "completion": REPLY, "tools": tools}], val_fraction=0)
        learned.prepare(told)
        (example,) = learned.corpus.train.examples
        ids = asked.peek(1).prompt_ids[0]
        assert ids == example.texts[0].ids[: len(ids)] and '"name": "add"' in told.decode(ids)
        assert asked.peek(1).columns["tools"] == [TOOLS]


@pytest.mark.parametrize(
    ("row", "word"),
    [({"prompt": "1+1=", "tools": TOOLS}, "plain text"), ({"prompt": ASK, "tools": ["add"]}, "holds no JSON schemas")],
)
def test_tools_that_no_prompt_shows_stay_a_column_and_that_is_said_once(told, said, row, word):
    data = RolloutDataModule([row] * 3, val_fraction=0)
    data.prepare(told)
    assert data.peek(1).columns["tools"] == [row["tools"]]
    assert "add" not in told.decode(data.peek(1).prompt_ids[0])
    assert len([line for line in said() if "the column tools" in line and word in line]) == 1


# ---------------------------------------------------------------------- arguments of the chat template

QWEN3 = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
OTHER = [{"role": "assistant", "content": "3"}]
ROWS: dict[str, tuple[Any, dict[str, Any]]] = {
    "prompts": (RolloutDataModule, {}),
    "prompt-completion": (SupervisedDataModule, {"completion": REPLY}),
    "messages": (SupervisedDataModule, {"prompt": None, "messages": ASK + REPLY}),
    "pairs": (PreferenceDataModule, {"chosen": REPLY, "rejected": OTHER}),
    "implicit pairs": (PreferenceDataModule, {"prompt": None, "chosen": ASK + REPLY, "rejected": ASK + OTHER}),
    "verdicts": (PreferenceDataModule, {"completion": REPLY, "label": True}),
    "stepwise": (StepwiseDataModule, {"completions": ["2"], "labels": [True]}),
}


def tokens_of(data: Any) -> list[Any]:
    if isinstance(data, RolloutDataModule):
        return data.peek(9).prompt_ids
    return [(text.ids, text.learned, text.prompt_tokens) for e in data.corpus.train.examples for text in e.texts]


@pytest.mark.parametrize("kind", ROWS)
def test_a_rows_own_arguments_of_the_template_are_those_of_the_run_for_this_row_alone(told, kind):
    told.chat_template = QWEN3
    module, columns = ROWS[kind]

    def tokens(*own: Any, **run: Any) -> list[Any]:
        rows = [{"prompt": ASK, **columns, **({} if each is None else {KWARGS_COLUMN: each})} for each in own]
        rows = [{key: value for key, value in row.items() if value is not None} for row in rows]
        data = module(rows, val_fraction=0, **run)
        data.prepare(told, **({"kind": "verdicts"} if kind == "verdicts" else {}))
        return tokens_of(data)

    off, on = {"enable_thinking": False}, {"enable_thinking": True}
    plain, quiet = tokens(None), tokens(None, chat_template_kwargs=off)
    assert kind == "implicit pairs" or plain != quiet, "the template reads it"
    assert tokens(off, None, json.dumps(off), repr(off), {"other": None}) == quiet + plain + quiet + quiet + plain
    assert tokens(on, None, chat_template_kwargs=off) == plain + quiet, "a row's goes before the run's"
    with pytest.raises(DataError, match=r"cannot set chat_template: .*model\.chat_template"):
        tokens({"chat_template": "{{ 1 }}"})
    with pytest.raises(DataError, match="chat_template_kwargs is 'no'; an object of arguments"):
        tokens("no")


def test_a_prompt_with_arguments_of_its_own_has_the_text_that_trl_gives_it(told):
    told.chat_template = QWEN3
    row = {"prompt": ASK, KWARGS_COLUMN: {"enable_thinking": False}}
    data = RolloutDataModule([row], val_fraction=0)
    data.prepare(told)
    assert told.decode(data.peek(1).prompt_ids[0]) == trl.apply_chat_template(row, told)["prompt"]
    assert data.peek(1).columns[KWARGS_COLUMN] == [row[KWARGS_COLUMN]], "a column too, as its tools are"


def test_arguments_of_rows_that_no_template_reads_are_said(told, said):
    row = {"prompt": "1+1=", KWARGS_COLUMN: {"enable_thinking": False}}
    RolloutDataModule([row] * 3, val_fraction=0).prepare(told)
    SupervisedDataModule([row | {"completion": "2"}] * 3, val_fraction=0).prepare(told)
    assert len([line for line in said() if "the column chat_template_kwargs does nothing: " in line]) == 2
    for module, columns in ((RolloutDataModule, {}), (SupervisedDataModule, {"completion": REPLY})):
        with pytest.warns(UserWarning, match="^think of the rows' chat_template_kwargs does nothing: "):
            module([{"prompt": ASK, KWARGS_COLUMN: {"think": 1}, **columns}] * 3, val_fraction=0).prepare(told)


def test_another_template_is_another_fingerprint_so_stored_log_probs_are_not_taken_for_its_own(told):
    row = {"prompt": ASK, "chosen": REPLY, "rejected": [{"role": "assistant", "content": "3"}]}
    data = PreferenceDataModule([row], val_fraction=0)
    data.prepare(told)
    other = LanguageModel("tiny").tokenizer
    other.chat_template = TEMPLATE.replace(": ", " = ")
    before = data.corpus.train.fingerprint
    data.prepare(other)
    assert data.corpus.train.fingerprint != before


# ---------------------------------------------------------------------- verdicts


@pytest.mark.parametrize("label", [True, False, 0, 1, 0.0, 1.0, "True", "false", " 0 ", "1", "1.0", "yes", "NO"])
def test_a_label_that_is_a_verdict_for_kto_is_one_for_sft(label):
    row = {"prompt": "1+1=", "completion": "2", "label": label}
    assert is_verdict(row) and kind_of(row) == "verdicts"
    with pytest.raises(DataError, match="label says whether the completion is good"):
        SupervisedDataModule([row], val_fraction=0).prepare(LanguageModel("tiny").tokenizer)
    data = PreferenceDataModule([row], val_fraction=0)
    data.prepare(LanguageModel("tiny").tokenizer, "verdicts")
    assert data.corpus.train.examples[0].desirable == (str(label).strip().lower() in ("true", "1", "1.0", "yes"))


@pytest.mark.parametrize("label", ["news", 2, -1, 0.5, "", None, [1]])
def test_any_other_label_is_a_column(label):
    row = {"prompt": "1+1=", "completion": "2", "label": label}
    SupervisedDataModule([row], val_fraction=0).prepare(LanguageModel("tiny").tokenizer)


# ---------------------------------------------------------------------- images


@pytest.fixture(scope="module")
def seeing():
    return LanguageModel("digits")


@functools.cache
def digit() -> bytes:
    return Digits().val()[0]["image"]


def read(model, module, rows, kind=()):
    data = module(rows=rows, val_fraction=0)
    data.prepare(model.tokenizer, *kind, processor=model.processor)
    return data


def test_a_text_beside_an_image_is_a_message_with_the_image_first(seeing, said):
    ask = [{"role": "user", "content": "Which digit?"}]
    parts = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which digit?"}]}]
    of_text, of_messages, of_parts = (
        read(seeing, RolloutDataModule, [{"prompt": prompt, "image": digit()}] * 2)
        for prompt in ("Which digit?", ask, parts)
    )
    assert of_text.fingerprint == of_messages.fingerprint == of_parts.fingerprint
    assert of_text.peek(1).prompts == [parts]
    assert len([line for line in said() if "images first" in line]) == 1


def test_rows_without_an_image_among_them_are_messages_too(seeing):
    rows = [{"prompt": "How many?", "image": None}, {"prompt": "Which digit?", "image": digit()}, {"prompt": "Hm?"}]
    data = read(seeing, RolloutDataModule, rows)
    messages = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    assert data.fingerprint == read(seeing, RolloutDataModule, messages).fingerprint
    assert read(seeing, RolloutDataModule, rows[:1]).peek(1).prompts == ["How many?"]  # where none has one, as ever


@pytest.mark.parametrize(
    ("module", "row", "kind"),
    [
        (SupervisedDataModule, {"completion": "7"}, ()),
        (PreferenceDataModule, {"chosen": "7", "rejected": "8"}, ()),
        (PreferenceDataModule, {"completion": "7", "label": True}, ("verdicts",)),
    ],
)
def test_what_is_learned_from_has_the_image_first_too(seeing, module, row, kind):
    rows = [{"prompt": "Which?", "image": digit(), **row}, {"prompt": "How many?", "image": None, **row}]
    data = read(seeing, module, rows, kind)
    messages = [{**each, "prompt": [{"role": "user", "content": each["prompt"]}]} for each in rows]
    assert data.corpus.train.fingerprint == read(seeing, module, messages, kind).corpus.train.fingerprint
    assert data.corpus.formats[0].endswith("(messages)")


OWN = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
IN_PARTS = [{"role": "user", "content": [{"type": "text", "text": "1+1?", "cache_control": {"type": "ephemeral"}}]}]


@pytest.mark.parametrize(
    ("prompt", "settings", "line"),
    [
        (OWN, {"system_prompt": "Be long."}, "system message of its own, and data.system_prompt is not put before it"),
        (OWN, {"system_prompt": "Be brief."}, ""),
        (ASK, {"system_prompt": "Be long."}, ""),
        (IN_PARTS, {}, "parts of messages have keys that are not read: cache_control"),
        ([{"role": "user", "content": [{"type": "text", "text": "1+1?", "image": None}]}], {}, ""),
    ],
)
@pytest.mark.parametrize("module", [RolloutDataModule, SupervisedDataModule])
def test_what_a_message_says_and_nobody_reads_is_named(told, said, module, prompt, settings, line):
    row = {"prompt": prompt, **({} if module is RolloutDataModule else {"completion": REPLY})}
    module([row] * 3, val_fraction=0.0, **settings).prepare(told)
    lines = [each for each in said() if "system message" in each or "not read" in each]
    assert len(lines) == bool(line) and line in "".join(lines)


def test_a_share_that_holds_nothing_out_is_named(told, said):
    row = {"prompt": ASK}
    RolloutDataModule([row] * 3, val=[row], val_fraction=0.3).prepare(told)
    RolloutDataModule([row] * 3, val=[row]).prepare(told)
    assert len([line for line in said() if "data.val_fraction=0.3 holds nothing out" in line]) == 1
