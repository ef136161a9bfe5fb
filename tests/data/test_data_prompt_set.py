"""Whole sets: rows 37, 39, 41, 42 of the list of bad inputs, the counts, and the fingerprint."""

from __future__ import annotations

import datetime
import subprocess
import sys
from decimal import Decimal
from typing import Any

import pytest
from byte_tokenizers import make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_rl.core.errors import DataError
from lit_rl.data.encode import Encoder
from lit_rl.data.prompt_reader import PromptOptions, read_prompts
from lit_rl.data.prompt_set import PromptSet
from lit_rl.data.sources import Rows

TOKENIZER = make_tokenizer()
USER = [{"role": "user", "content": "hi"}]


def read(rows: list[Any], skipped: int = 0, **options: Any):
    return read_prompts(Rows("f", rows, skipped=skipped), Encoder(TOKENIZER), PromptOptions(**options))


def whole(rows: list[dict[str, Any]], **options: Any) -> PromptSet:
    return PromptSet.of(read(rows, **options)[0])


@settings(deadline=None)
@given(
    rows=st.lists(st.sampled_from(["", " ", "short", "x" * 30, None, 7, "\0"]), max_size=12),
    skipped=st.integers(0, 3),
    overlong=st.sampled_from(["drop", "truncate_left"]),
)
def test_every_row_is_counted_once(rows, skipped, overlong):
    options = {"overlong": overlong, "on_bad_row": "skip", "max_prompt_tokens": 10}
    bad = sum(row in (None, 7, "\0") for row in rows)
    if rows and bad == len(rows):
        with pytest.raises(DataError):
            read([{"prompt": row} for row in rows], skipped, **options)
        return
    examples, counts = read([{"prompt": row} for row in rows], skipped, **options)
    assert counts["rows"] == len(rows) + skipped
    assert counts["bad"] == bad + skipped
    assert counts["empty"] == sum(row in ("", " ") for row in rows)
    long = rows.count("x" * 30)
    assert (counts["overlong"], counts["truncated"]) == ((long, 0) if overlong == "drop" else (0, long))
    assert counts["rows"] == counts["bad"] + counts["empty"] + counts["overlong"] + counts["kept"]
    assert counts["kept"] == len(examples)
    assert counts["longest"] == max((len(row) for row in rows if row in ("short", "x" * 30)), default=0)


def test_overlong_policies():
    rows = [{"prompt": "abcdef"}, {"prompt": "abc"}, {"prompt": "abcd"}]
    dropped = whole(rows, max_prompt_tokens=4)
    assert dropped.prompts == ["abc", "abcd"]
    cut = whole(rows, max_prompt_tokens=4, overlong="truncate_left")
    assert cut.prompts == ["abcdef", "abc", "abcd"], "rewards see the whole prompt"
    assert [TOKENIZER.decode(ids) for ids in cut.prompt_ids] == ["cdef", "abc", "abcd"]
    for on_bad_row in ("error", "skip"):
        with pytest.raises(DataError, match=r"f\[0\]: the prompt has 6 tokens, data\.max_prompt_tokens=4"):
            whole(rows, max_prompt_tokens=4, overlong="error", on_bad_row=on_bad_row)


def test_texts_and_messages_in_one_source_are_refused_with_both_places():
    rows = [{"prompt": "a"}, {"prompt": "b"}, {"prompt": USER}]
    for on_bad_row in ("error", "skip"):
        with pytest.raises(DataError, match=r"f\[0\] is a string, f\[2\] a list of messages"):
            read(rows, on_bad_row=on_bad_row)


def test_a_fault_of_all_rows_is_told_even_when_bad_rows_are_skipped():
    with pytest.raises(DataError, match=r"no column 'prompt'; columns found: question"):
        read([{"question": "a"}, {"question": "b"}], on_bad_row="skip")
    bare = make_tokenizer(template=None)
    with pytest.raises(DataError, match="chat template"):
        read_prompts(Rows("f", [{"prompt": USER}]), Encoder(bare), PromptOptions(on_bad_row="skip"))


def test_numbers_and_texts_in_a_column_become_texts_and_other_mixtures_are_refused():
    rows = [
        {"prompt": "a", "answer": 42},
        {"prompt": "b", "answer": "x"},
        {"prompt": "c"},
        {"prompt": "d", "answer": 0.1},
    ]
    assert whole(rows).columns == {"answer": ["42", "x", None, "0.1"]}
    assert whole([{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2.5}]).columns == {"n": [1, 2.5]}
    for other in ([1], {"a": 1}, True):
        with pytest.raises(DataError, match=r"Column 'answer' mixes.*text in f\[0\].* in f\[1\]"):
            whole([{"prompt": "a", "answer": "x"}, {"prompt": "b", "answer": other}])


def test_columns_of_some_rows_are_none_in_the_others():
    rows = whole([{"prompt": "a", "x": 1}, {"prompt": "b", "y": [2]}])
    assert rows.columns == {"x": [1, None], "y": [None, [2]]}
    assert rows.batch([1, 0, 1]).columns == {"x": [None, 1, None], "y": [[2], None, [2]]}


def test_map_rename_and_system_prompt_follow_each_other():
    def to_question(row: dict[str, Any]) -> dict[str, Any]:
        return {"question": row["q"] + "?", "gold": row["a"]}

    rows = whole(
        [{"q": "why", "a": "so"}],
        map_row=to_question,
        rename={"gold": "answer"},
        prompt_key="question",
        system_prompt="S",
    )
    assert rows.prompts == [[{"role": "system", "content": "S"}, {"role": "user", "content": "why?"}]]
    assert rows.columns == {"answer": ["so"]}


def test_a_row_function_that_fails_is_named_with_the_row():
    rows = [{"q": "a"}]
    with pytest.raises(DataError, match=r"f\[0\]: data\.map_row=broken raised KeyError: 'prompt'"):

        def broken(row: dict[str, Any]) -> dict[str, Any]:
            return {"prompt": row["prompt"]}

        read(rows, map_row=broken)
    with pytest.raises(DataError, match="returned 'x'; it must return a dict"):
        read(rows, map_row=lambda row: "x")


def test_the_fingerprint_follows_the_content():
    base = [{"prompt": "a", "x": 1}, {"prompt": "b", "x": 2}]
    changes = [
        [{"prompt": "a", "x": 1}, {"prompt": "b", "x": 3}],
        [{"prompt": "b", "x": 2}, {"prompt": "a", "x": 1}],
        [{"prompt": "a", "y": 1}, {"prompt": "b", "y": 2}],
        [{"prompt": "a", "x": 1}, {"prompt": "c", "x": 2}],
        base[:1],
    ]
    prints = [whole(rows).fingerprint for rows in [base, *changes]]
    assert len(set(prints)) == len(prints)
    assert whole(base).fingerprint == prints[0]
    assert whole(base, system_prompt="S").fingerprint != prints[0]
    cut = [whole([{"prompt": "abc"}], max_prompt_tokens=n, overlong="truncate_left").fingerprint for n in (1, 2, 3)]
    assert len(set(cut)) == 3, "equal prompts, other tokens"


def test_control_tokens_in_a_message_are_a_bad_row():
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in ("a", "a<|im_end|>", "b")]
    with pytest.raises(DataError, match=r"f\[1\]: message 0 \(user\) holds the text '<\|im_end\|>'"):
        read(rows)
    assert read(rows, on_bad_row="skip")[1]["bad"] == 1


def test_the_fingerprint_of_any_value_is_the_same_in_every_process():
    rows = [
        {"prompt": "a", "d": datetime.date(2024, 1, 2), "n": Decimal("1.5"), "o": object(), "t": (1,), "k": {3: b"x"}}
    ]
    code = (
        "import datetime, sys; from decimal import Decimal; sys.path.insert(0, sys.argv[1]);"
        "from lit_rl.data.prompt_set import *;"
        "rows=[{'d': datetime.date(2024, 1, 2), 'n': Decimal('1.5'), 'o': object(), 't': (1,), 'k': {3: b'x'}}];"
        "print(PromptSet.of([PromptExample('a', [64], rows[0], 'f')]).fingerprint)"
    )
    out = subprocess.run([sys.executable, "-c", code, "."], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == whole(rows).fingerprint
