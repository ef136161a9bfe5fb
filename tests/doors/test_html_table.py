"""Text of a model never becomes markup of the page that shows it."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_rl.callbacks.text import html_table, printable


class Reader(HTMLParser):
    """The cells of a table as text, and every tag that a browser would see."""

    def __init__(self) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag == "td":
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        if self.cells:
            self.cells[-1] += data


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


@pytest.mark.parametrize(("rewards", "colours"), [((0.0, 1.0), ["#cf222e", "#1a7f37"]), ((1.0, 1.0), ["inherit"] * 2)])
def test_colour_is_the_reward_against_the_mean(rewards: tuple[float, ...], colours: list[str]) -> None:
    rows = html_table([{"reward": reward} for reward in rewards]).split("<tr style=")[1:]
    assert [row.split('"')[1].removeprefix("color: ") for row in rows] == colours
