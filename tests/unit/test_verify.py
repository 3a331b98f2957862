"""What counts as correct and as grounded, and what an episode earns."""

from __future__ import annotations

import time
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stacklm_hf.rollout.trajectory import Step, StepKind, Trajectory
from stacklm_hf.verify import MAX_ANSWER_CHARS, episode_reward, is_correct, is_grounded, normalize_answer

EQUAL = [
    ("4042", "4042"),
    (" 4042 ", "4042"),
    ("4042.0", "4042"),
    ("4,042", "4042"),
    ("4042.", "4042"),
    ("4042 .", "4042"),
    ("+4042", "4042"),
    ("04042", "4042"),
    ("4.042e3", "4042"),
    ("4.042E+3", "4042"),
    ("\uff14\uff10\uff14\uff12", "4042"),  # full-width
    ("\u0664\u0660\u0664\u0662", "4042"),  # Arabic
    ("40\u200b42", "4042"),  # a zero-width space, which no reader sees
    ("1e3", "1000"),
    ("1,234,567.50", "1234567.5"),
    (".5", "0.50"),
    ("-0", "0"),
    ("0e5", "0.000"),
    ("\u22125", "-5"),  # minus sign
    ("\u20135", "-5"),  # en dash
    ("1e-50", "0." + "0" * 49 + "1"),
    ("1e999999999", "10e999999998"),
    ("9007199254740993", "9007199254740993.0"),
    ("stack-100M", "Stack-100M"),
    ("Stack\u2011100M", "Stack-100M"),  # non-breaking hyphen
    ("  grouped-query\n  attention. ", "grouped-query attention"),
    ("STRASSE", "stra\u00dfe"),
    ("caf\u00e9", "cafe\u0301"),  # both normal forms
    ("New\u00a0York", "new york"),  # non-breaking space
    ("50%", "50%"),
    (4042, "4042"),  # a number from a column of a dataset
    ("2.5", 2.5),
]

DIFFERENT = [
    ("4042", "4043"),
    ("5", "-5"),
    ("9007199254740993", "9007199254740992"),  # one float
    ("0.1", "0.10000000000000001"),  # one float
    ("1,2", "12"),
    ("12,34", "1234"),
    ("1234,567", "1234567"),
    ("0,123", "123"),
    ("1.234,5", "1234.5"),
    ("1 2", "12"),
    ("1 000", "1000"),
    ("1_000", "1000"),
    ("0x10", "16"),
    ("10\u00b2", "102"),  # ten squared, which compatibility forms read as 102
    ("1\u00bd", "11/2"),
    ("1e", "1"),
    ("e3", "1000"),
    ("--5", "5"),
    ("- 5", "-5"),
    ("50%", "50"),
    ("50\uff05", "50"),  # full-width percent sign
    ("4042 km", "4042"),
    ("$5", "5"),
    ("~5", "5"),
    ("[4042]", "4042"),
    ("4042, 7", "4042"),
    ("4042 or 7", "4042"),
    ("4042...", "4042"),
    ("NewYork", "New York"),
    ("Stack-100M", "Stack-100"),
    ("1e1000000000", "1e1000000001"),
    ("1e" + "9" * 30, "1e" + "9" * 31),
]

NEVER: list[Any] = [
    *("", "   ", ".", "\u200b", "nan", "NaN", "-nan", "inf", "+inf", "-Infinity", "inf.", "\u221e", "None"),
    *(None, float("nan"), float("inf"), True, ["4042"], b"4042", 10**5000, "x" * (MAX_ANSWER_CHARS + 1)),
]


@pytest.mark.parametrize(("answer", "gold"), EQUAL)
def test_equal(answer: Any, gold: Any) -> None:
    assert is_correct(answer, gold)
    assert is_correct(gold, answer)


@pytest.mark.parametrize(("answer", "gold"), DIFFERENT)
def test_different(answer: Any, gold: Any) -> None:
    assert not is_correct(answer, gold)
    assert not is_correct(gold, answer)
    assert is_correct(answer, answer)  # not because one of them could never be right
    assert is_correct(gold, gold)


@pytest.mark.parametrize("answer", NEVER, ids=range(len(NEVER)))
def test_never_correct_not_even_against_itself(answer: Any) -> None:
    assert not is_correct(answer, answer)
    assert not is_grounded(answer, ["the answer is nan, inf, infinity, None, True and 4042 .", "1" + "0" * 5000])


def test_the_normal_form_is_readable() -> None:
    assert normalize_answer(" 4,042.50 ") == "4042.5"
    assert normalize_answer("-1.5e3") == "-1500"
    assert normalize_answer("1e999") == "1e999"
    assert normalize_answer("  Stack-100M. ") == "stack-100m"
    assert normalize_answer(None) == ""


@settings(deadline=None)
@given(st.text(max_size=40) | st.from_regex(r"\A[-+]?[0-9,]{1,8}\.?[0-9]{0,4}(e[-+]?[0-9]{1,3})?\.?\Z"))
def test_normalising_never_raises_and_is_idempotent(text: str) -> None:
    once = normalize_answer(text)
    assert normalize_answer(once) == once


@settings(deadline=None)
@given(st.decimals(-(10**15), 10**15, places=6), st.integers(-60, 60))
def test_a_number_is_its_exact_value(number: Decimal, shift: int) -> None:
    text = f"{number}e{shift}"
    assert Decimal(normalize_answer(text)) == Decimal(text)
    assert is_correct(text, f"{Decimal(text):f}")
    assert not is_correct(text, f"{number + Decimal('0.000001')}e{shift}")


@settings(deadline=None)
@given(st.integers())
def test_thousands_may_be_grouped(number: int) -> None:
    assert is_correct(f"{number:,}", str(number))


@pytest.mark.parametrize(
    "text",
    [
        "1e999999999",
        "-1e-999999999",
        "1e" + "9" * 9_000,
        "9" * MAX_ANSWER_CHARS,
        "1," * 5_000,
        "9" * 10**7,
        "\u0661" * MAX_ANSWER_CHARS,
        " " * 10**7,
    ],
    ids=range(8),
)
def test_hostile_answers_cost_nothing(text: str) -> None:
    start = time.process_time()
    assert not is_correct(text, "4042")
    assert not is_grounded(text, ["4042"])
    assert not is_grounded("4042", [text[:100_000]])
    assert time.process_time() - start < 0.5


@pytest.mark.parametrize(
    "observation",
    [
        *("12", "is 12.", "(12)", "a 12-layer model", "12.0", "1.2e1", "x,12", '{"n": 12}', "3,12,7", "=12;"),
        *("a\n12\nb", "[1] first [2] the layer count is 12", "\uff11\uff12", "12..."),
    ],
)
def test_a_whole_number_grounds(observation: str) -> None:
    assert is_grounded("12", ["nothing", observation])


@pytest.mark.parametrize(
    "observation",
    [
        *("2012", "120", "12.5", "3.12", "1,12", "12,013", "R-12", "12M", "x12", "12_3", "12-13", "2024-12-01"),
        *("12/5", "5/12", "12%", "-12", "\u221212", "1.12.3", "[1] first [12] second", "twelve", "", "12e1"),
    ],
)
def test_part_of_something_else_does_not_ground(observation: str) -> None:
    assert not is_grounded("12", [observation])


def test_numbers_are_compared_by_value() -> None:
    assert is_grounded("10000", ["the RoPE base of Stack-100M is 10,000."])
    assert is_grounded("1e4", ["10000"])
    assert is_grounded("-5", ["it fell by \u22125 degrees"])
    assert not is_grounded("9007199254740993", ["9007199254740992"])


def test_names_ground_as_whole_words() -> None:
    passage = "[1] The hidden size of Stack-100M is 512. [2] Grouped-query\nattention, of 2023."
    assert is_grounded("stack-100m", [passage])
    assert is_grounded("grouped-query attention", [passage])
    assert not is_grounded("Stack-100", [passage])
    assert not is_grounded("tack-100M", [passage])
    assert not is_grounded("R-01", ["ablation run R-012"])
    assert not is_grounded("5 km", ["2.5 km"])
    assert not is_grounded("layer 3", ["layer 3.5"])
    assert is_grounded("50%", ["a share of 50%."])
    assert not is_grounded("50%", ["a share of 150%"])


def test_an_answer_is_no_pattern() -> None:
    assert not is_grounded(".*", ["anything"])
    assert is_grounded("a+b(", ["so a+b( it is"])


@settings(deadline=None)
@given(st.text(max_size=30), st.lists(st.text(max_size=60), max_size=3))
def test_grounding_never_raises(answer: str, observations: list[str]) -> None:
    is_grounded(answer, observations)


def test_nothing_grounds_without_observations() -> None:
    assert not is_grounded("12", [])


def _episode(correct: bool, steps: int) -> Trajectory:
    turns = [Step(StepKind.CALL, "x") for _ in range(steps)]
    return Trajectory("e", "t", "research", "sum", "q", "1", steps=turns, correct=correct)


def test_the_reward_is_correctness_less_the_step_penalty() -> None:
    assert episode_reward(_episode(True, 3)) == pytest.approx(1 - 0.05 * 3 / 6)
    assert episode_reward(_episode(False, 6)) == pytest.approx(-0.05)
    assert episode_reward(_episode(True, 0)) == 1.0
    assert episode_reward(_episode(True, 2), max_steps=4, step_penalty=0.2) == pytest.approx(0.9)


def test_a_step_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="max_steps must be at least 1"):
        episode_reward(_episode(True, 1), max_steps=0)
