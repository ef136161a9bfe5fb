"""Text of a model never becomes markup of the page that shows it."""

from __future__ import annotations

from html.parser import HTMLParser

import markdown
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_rl.callbacks.display import html_table, markdown_table, one_line, printable


class Reader(HTMLParser):
    """The cells and heads of a table as text, and every tag that a browser would see."""

    def __init__(self) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.heads: list[str] = []
        self._now = self.cells
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag in ("td", "th"):
            self._now = self.cells if tag == "td" else self.heads
            self._now.append("")

    def handle_data(self, data: str) -> None:
        if self._now:
            self._now[-1] += data


def read(table: str) -> Reader:
    reader = Reader()
    reader.feed(table)
    reader.close()
    return reader


@given(st.text(max_size=60))
def test_a_browser_reads_the_text_back_and_no_other_tag(text: str) -> None:
    reader = read(html_table([{"completion": text, "reward": 1.0}]))
    assert reader.tags == {"table", "thead", "tbody", "tr", "th", "td", "pre"}
    assert reader.cells == [printable(text), "1.000"]


def test_scripts_and_column_names_are_escaped() -> None:
    table = html_table([{"<b>name</b>": "<script>alert(1)</script>", "reward": 0.0}])
    assert "<script" not in table and "<b>" not in table


TEXTS = st.lists(
    st.sampled_from(["<b>", "&lt;", "`", "|", "\\", "*", "_", "\n", "![a](http://far/)", " ", "x", ""])
).map("".join)


@given(st.lists(st.one_of(TEXTS, st.text(max_size=30)), min_size=2, max_size=3))
def test_what_tensorboard_makes_of_a_table_has_its_cells_as_code_and_no_other_tag(texts: list[str]) -> None:
    """By the parser that TensorBoard takes, before anything is taken out of what it makes."""
    reader = read(as_tensorboard(markdown_table([{f"column {i}": text for i, text in enumerate(texts)}])))
    assert reader.tags == {"table", "thead", "tbody", "tr", "th", "td", "code"}
    shown = [printable(text).replace("`", "'").replace("|", "\\|").replace("\n", " ") for text in texts]
    assert [cell.split() for cell in reader.cells] == [cell.split() for cell in shown]


@given(st.one_of(TEXTS, st.text(max_size=30)))
def test_the_head_of_a_column_is_shown_as_it_is(name: str) -> None:
    """Columns of the user's data stand there, whose names may be anybody's."""
    reader = read(as_tensorboard(markdown_table([{"step": 1, name: "x"}])))
    assert reader.tags == {"table", "thead", "tbody", "tr", "th", "td", "code"}
    assert [head.split() for head in reader.heads] == [["step"], one_line(name).split()]


def as_tensorboard(text: str) -> str:
    return markdown.markdown(text, extensions=["tables", "fenced_code"])


@pytest.mark.parametrize(("rewards", "colours"), [((0.0, 1.0), ["#cf222e", "#1a7f37"]), ((1.0, 1.0), ["inherit"] * 2)])
def test_colour_is_the_reward_against_the_mean(rewards: tuple[float, ...], colours: list[str]) -> None:
    rows = html_table([{"reward": reward} for reward in rewards]).split("<tr style=")[1:]
    assert [row.split('"')[1].removeprefix("color: ") for row in rows] == colours
