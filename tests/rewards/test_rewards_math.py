"""Final answers: found in a text, and compared."""

from __future__ import annotations

import warnings
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from math_verify import parse, verify

from lit_rl.rewards import MathAccuracy, Rewards, boxed, final_answer, math_answer
from lit_rl.rewards.math_rewards import golden_part, normalise, number, same_answer

BOXES = {
    r"so \boxed{5}.": "5",
    r"\boxed{1} then \boxed{2}": "2",
    r"\boxed{\frac{1}{2}}": r"\frac{1}{2}",
    r"\boxed{\sqrt{\frac{a}{b^{2}}}} }": r"\sqrt{\frac{a}{b^{2}}}",
    r"\boxed {7}": "7",
    r"\boxed{\{1,2\}}": r"\{1,2\}",
    r"\boxed{\}}": r"\}",
    r"\boxed{x=\boxed{5}}": "5",
    r"\boxed{5} and cut off: \boxed{6": "5",
    r"an open { brace \boxed{5}": "5",
    r"} \boxed{5}": "5",
    r"\boxed{}": "",
    r"\boxed{5": None,
    r"\boxed": None,
    "5": None,
    "": None,
}


@pytest.mark.parametrize(("text", "box"), BOXES.items())
def test_boxed(text, box):
    assert boxed(text) == box


@given(st.recursive(st.text("ab\\frac12 ", max_size=4).filter(lambda t: not t.endswith("\\")), lambda inner: st.tuples(
    inner, inner).map(lambda pair: pair[0] + "{" + pair[1] + "}"), max_leaves=6))  # fmt: skip
def test_boxed_returns_what_was_boxed(content):
    assert boxed(rf"first \boxed{{0}}, then \boxed{{{content}}} end") == content


def test_a_flood_of_open_boxes_is_read_in_one_pass():
    assert boxed(r"\boxed{" * 100_000) is None
    assert final_answer("1," * 100_000) == "1"


NUMBERS = {
    "It is 1,234.": "1,234",
    "first 3 then 4": "4",
    "10-5": "5",
    "x = -5": "-5",
    "costs $1,000.50 a month": "$1,000.50",
    "one half is 1/2.": "1/2",
    r"so $\frac{1}{2}$": r"\frac{1}{2}",
    "1, 2, 3": "3",
    "2e3": "2e3",
    "It is 2½ m": "2½",
    "score of question 7 9/10": "9/10",
    " -1 1/2. ": "-1 1/2",
    "In 2023 1/3": "1/3",
    "none at all": None,
    "": None,
}


@pytest.mark.parametrize(("text", "found"), NUMBERS.items())
def test_final_answer_without_a_box_is_the_last_number(text, found):
    assert final_answer(text) == found


def test_a_box_wins_over_later_numbers():
    assert final_answer(r"\boxed{5}, not 6") == "5"


SAME = [
    ("72", "72.0"),
    ("1,234", "1234"),
    ("1{,}234", "1234"),
    (r"1\,234\,567", "1234567"),
    ("$18", "18"),
    (r"\$18.00", "18"),
    ("0.50", r"\frac{1}{2}"),
    (".5", "1/2"),
    (r"\dfrac{1}{2}", r"\frac{1}{2}"),
    (r"\tfrac12", r"\frac{1}{2}"),
    (r"\frac1{72}", r"\frac{1}{72}"),
    (r"\frac{2}{4}", "0.5"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"),
    (r"1\frac{1}{2}", "1.5"),
    (r"5\text{ cm}", "5"),
    (r"5\ \mathrm{cm}^2", "5"),
    (r"5 \text{ cm}.", "5"),
    (r"\text{Evelyn}", "Evelyn"),
    (r"90^\circ", "90"),
    (r"90^{\circ}", "90"),
    (r"50\%", "50"),
    ("x = 5", "5"),
    ("5.", "5"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
    (r"\dfrac{\sqrt{3}}{2}", r"\frac{\sqrt{3}}{2}"),
    ("−5", "-5"),
    ("1e3", "1000"),
    ("+5", "5"),
    ("½", "0.5"),
    ("-2½", "-5/2"),
    ("1 1/2", "3/2"),
    ("1 1/2", "1½"),
    ("€5", "£5.0"),
    (r"\cfrac{1}{2}", "1/2"),
]
DIFFERENT = [
    ("72", "73"),
    ("5", "-5"),
    ("0.333", r"\frac{1}{3}"),
    ("1234", "1.234"),
    ("12", "1,2"),
    (r"\frac{1}{2}", r"\frac{2}{1}"),
    (r"\frac{1}{0}", "0"),
    ("1/0", "0"),
    (r"\text{yes}", r"\text{no}"),
    ("(1,2)", "(2,1)"),
    ("", "0"),
    ("50", "0.5"),
    ("1 1/2", "5.5"),
    ("__import__('os')", "0"),
]


@pytest.mark.parametrize(("given_answer", "gold"), SAME)
def test_same_answers(given_answer, gold):
    assert same_answer(given_answer, gold) and same_answer(gold, given_answer)


@pytest.mark.parametrize(("given_answer", "gold"), DIFFERENT)
def test_different_answers(given_answer, gold):
    assert not same_answer(given_answer, gold) and not same_answer(gold, given_answer)


# Thin spaces between thousands, a final point, a percent sign and exponents: the peer finds no number in these.
OURS_ALONE = {r"1\,234\,567", r"5 \text{ cm}.", "5.", r"50\%", "1e3", "½", "-2½", "1 1/2", "€5", r"\cfrac{1}{2}"}


@pytest.mark.parametrize(("given_answer", "gold"), [pair for pair in SAME + DIFFERENT if pair[0] not in OURS_ALONE])
def test_the_peer_gives_the_same_verdict(given_answer, gold):
    peer = verify(parse(rf"$\boxed{{{gold}}}$"), parse(rf"$\boxed{{{given_answer}}}$"))
    assert same_answer(given_answer, gold) == peer


@given(st.fractions(max_denominator=1000), st.fractions(max_denominator=1000))
def test_fractions_are_equal_exactly_where_their_values_are(left, right):
    def latex(value: Fraction) -> str:
        return rf"{'-' if value < 0 else ''}\dfrac{{{abs(value.numerator)}}}{{{value.denominator}}}"

    assert number(normalise(latex(left))) == left
    assert same_answer(latex(left), f"{left.numerator}/{left.denominator}")
    assert same_answer(latex(left), latex(right)) == (left == right)


@given(st.integers(-(10**12), 10**12), st.integers(0, 3))
def test_separators_and_trailing_zeros_change_nothing(value, zeros):
    spelled = f"${value:,}" + ("." + "0" * zeros if zeros else "")
    assert same_answer(spelled, str(value))
    assert not same_answer(spelled, str(value + 1))


@given(st.text(r"\{}$%.,/-−0123456789eE frac boxed text=()", max_size=40))
@example("1e" + "9" * 9)
@example("1e999")
@example("9" * 5000)
@example("१")
def test_any_text_is_equal_to_itself_and_never_raises(text):
    assert same_answer(text, text)
    assert math_answer([], [text], ["5"])[0] in (0.0, 1.0)
    assert normalise(text).count(" ") == 0


def test_math_answer():
    completions = [r"\boxed{\frac{1}{2}}", "the answer is 0.5", r"\boxed{2}", "no idea", "7", r"\boxed{3}"]
    answers = ["0.5", 0.5, "0.5", "0.5", None, r"We find $x=\boxed{3}$"]
    assert math_answer([], completions, answers) == [1.0, 1.0, 0.0, 0.0, None, 1.0]


def test_math_answer_on_messages_through_rewards():
    completions = [[{"role": "assistant", "content": r"\boxed{1{,}000}"}], [{"role": "assistant", "content": ""}]]
    scores = Rewards(math_answer).score([[], []], completions, {"answer": [1000, 1000]})
    assert scores.total.tolist() == [1.0, 0.0]


GOLDEN = {
    "−5": ["-5", r"\boxed{−5}", "so −5.", "$-5$"],
    "1,000": ["1000", "1,000.", r"\boxed{1{,}000}"],
    "$-5": ["-5", "-$5", r"\boxed{-5}"],
    "-$5": ["-5", "$-5", r"\boxed{-5}"],
    "5.": ["5", "5.0", r"\boxed{5}"],
    "5\\%": ["5", "5%", r"\boxed{5\%}"],
    "5%": ["5", r"\boxed{5\%}"],
    "−1/2": ["-0.5", r"\boxed{-\frac{1}{2}}"],
    "2+3=5, so\n#### 5": ["5", r"\boxed{5}"],
}
"""Answers as data sets have them, and completions that give them."""


@pytest.mark.parametrize("gold", GOLDEN)
def test_answers_of_data_sets_are_read_as_people_write_them(gold):
    right = GOLDEN[gold]
    assert math_answer([], right, [gold] * len(right)) == [1.0] * len(right)
    wrong = ["5" if "5" not in right[0] or "-" in right[0] else "-5", "10", ""]
    assert math_answer([], wrong, [gold] * 3) == [0.0] * 3
    boxes = [completion for completion in right if "boxed" in completion]
    assert MathAccuracy()([], boxes, [gold] * len(boxes)) == [1.0] * len(boxes)
    assert MathAccuracy()([], [rf"\boxed{{{text}}}" for text in wrong], [gold] * 3) == [0.0] * 3


ANSWERS = st.one_of(
    st.sampled_from(
        ["5 apples", "x^2", "½", "1,000", "$3", "50%", r"\dfrac{1}{2}", r"\frac{1}{2", "(1, 2)", "yes", "}"]
    ),
    st.text("1/.,- x\\{}^$%½", min_size=1),
)


@given(st.lists(ANSWERS, min_size=1, max_size=5))
def test_answers_that_a_completion_cannot_simply_give_are_said_before_a_run(answers):
    answers = [answer for answer in answers if normalise(golden_part(answer)) and answer.strip()]
    parts = [golden_part(answer) for answer in answers]
    plainly = [math_answer([""], [f": {part}."], [answer]) == [1.0] for part, answer in zip(parts, answers)]
    boxed_up = [math_answer([""], [rf"\boxed{{{part}}}"], [answer]) == [1.0] for part, answer in zip(parts, answers)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        Rewards(math_answer).check({"answer": answers})
    lines = "".join(str(each.message) for each in said)
    count, never = sum(not any(both) for both in zip(plainly, boxed_up)), "no completion can equal"
    assert (f"{never} {count} of {len(answers)} answers" in lines) == (count > 0)
    assert ("in \\boxed{...} equals" in lines) == any(b and not p for p, b in zip(plainly, boxed_up))


def test_of_many_answers_the_first_are_looked_at(monkeypatch):
    monkeypatch.setattr("lit_rl.rewards.math_rewards._CHECKED_ANSWERS", 2)
    with pytest.warns(UserWarning, match=r"2 of the 3 answers .* 'x\^2' of row 1"):
        Rewards(math_answer).check({"answer": ["5", "x^2", "x^2", "y^2"]})


def test_answers_that_math_verify_cannot_read_are_said():
    with pytest.warns(UserWarning, match=r"1 of the first 2 answers .*first is '\$'"):
        Rewards(MathAccuracy()).check({"answer": ["5", "$", None, "5"]})
