"""What counts as correct and as grounded, and what an episode earns.

Contract: answers are untrusted text. Nothing here raises on one, and none costs more than its length: a number
is compared by its digits and its exponent and never written out, so `1e999999999` is as cheap as `1`.

What equals what (`tests/unit/test_verify.py` holds this table):

| answer | | gold | why |
|---|---|---|---|
| ` 4042 `, `4042.`, `4042.0`, `4,042`, `+4042`, `04042`, `4.042e3` | = | `4042` | one number, however written |
| 4042 in full-width, Arabic or any other decimal digits | = | `4042` | |
| `1e3` | = | `1000` | |
| -5 with a minus sign or an en dash | = | `-5` | one dash; `-0` is `0` |
| `stack-100M`, or with a non-breaking hyphen | = | `Stack-100M` | case and dashes of names |
| `grouped-query\\n attention.` | = | `grouped-query attention` | spacing, and one full stop at the end |
| `9007199254740993` | not | `9007199254740992` | exact, never a float |
| `1,2`, `12,34`, `0,123` | not | `12`, `1234`, `123` | a comma only groups thousands |
| `1 2`, `1_000`, `0x10`, 10 squared | not | `12`, `1000`, `16`, `102` | not numbers as people write them |
| `50%`, `4042 km`, `$5`, `~5` | not | `50`, `4042`, `5`, `5` | no sign or unit is dropped |
| `[4042]`, `4042, 7`, `4042 or 7` | not | `4042` | no list is cut down |
| `NewYork` | not | `New York` | spacing may differ, not be absent |
| empty, blank, a lone full stop, None, `none` | not | anything, itself too | never correct |
| `nan`, `inf`, `infinity`, its sign; with + or - | not | anything, itself too | never correct |
| more than 10,000 characters | not | anything, itself too | never correct |

A world in which "nothing" is an answer therefore calls it by a word of its own, such as `NOT_FOUND`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from numbers import Real
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stacklm_hf.rollout.trajectory import Trajectory

MAX_ANSWER_CHARS = 10_000
"""Longer texts are no answers."""

_PLAIN_DIGITS = 40  # numbers that need no more digits than this are written out, others in powers of ten
_EXPONENT_DIGITS = 18

_DASHES = dict.fromkeys((0x2010, 0x2011, 0x2012, 0x2013, 0x2212, 0xFE58, 0xFE63), "-")
_FULLWIDTH = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}  # the ASCII block of CJK fonts
_CHARACTERS = {**_DASHES, **_FULLWIDTH}

_GROUPED_OR_PLAIN = r"[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]*"
_NUMBER = re.compile(rf"([+-]?)(?=\.?[0-9])({_GROUPED_OR_PLAIN})(?:\.([0-9]*))?(?:e([+-]?)0*([0-9]+))?")
_NEVER = re.compile(r"[+-]?(?:nan|inf|infinity|∞)|none|")

# A numeral as it stands in running text. It begins where no word, number, path or fraction goes on, and ends
# likewise; possessive, so that it is read whole or not at all and in linear time.
_NUMERAL = re.compile(
    r"(?<!\w)(?<!\w[-/])(?<![0-9][.,])"
    r"([+-]?(?:[0-9][0-9.,]*+|\.[0-9]++)(?:(?<![.,])e[+-]?[0-9]++)?+)"
    r"(?!\w|%|[-/][0-9])"
)
_HIT_MARKER = re.compile(r"(?:^|(?<= ))\[[0-9]{1,3}\] ")


def normalize_answer(text: str | float | None) -> str:
    """The form in which two answers are compared; idempotent.

    A number becomes its shortest plain form (`4,042.50` gives `4042.5`), in powers of ten where that would need
    more than 40 digits (`1e999`); any other text is case-folded, with single spaces, ASCII digits and dashes, and
    without a final full stop.

    Args:
        text: An answer; a number (as a column of a dataset may hold) is taken as it prints.

    Returns:
        The normal form; empty for what can be no answer: None, another type, more than 10,000 characters.
    """
    if isinstance(text, Real) and not isinstance(text, bool):
        try:
            text = str(text)
        except ValueError:  # Python refuses to print integers of more than 4,300 digits
            return ""
    if not isinstance(text, str) or len(text) > MAX_ANSWER_CHARS:
        return ""
    text = _fold(text)
    if text.endswith(".") and not text[:-1].rstrip().endswith("."):  # an ellipsis is more than a full stop
        text = text[:-1].rstrip()
    number = _canonical_number(text)
    return text if number is None else number


def is_correct(answer: str | float | None, gold: str | float | None) -> bool:
    """Whether an answer equals the gold answer; the table above says when. Symmetric, and never raises.

    Args:
        answer: What the policy answered.
        gold: The exact answer.
    """
    value = normalize_answer(answer)
    return not _NEVER.fullmatch(value) and value == normalize_answer(gold)


def is_grounded(answer: str | float | None, observations: Iterable[str]) -> bool:
    """Whether the answer stands in an observation as a whole number or as whole words.

    A number is looked for by its value (`10,000` grounds `10000`) and never inside another number, word, range,
    date, fraction or percentage: `2012`, `3.12`, `R-12`, `12M`, `12-13`, `12/5` and `12%` do not ground 12, while
    `12-layer`, `12.` and `(12)` do. Other text is looked for in its normal form. The rank markers of search
    hits (`[1] ... [2] ...`) are the harness's and ground nothing.

    Args:
        answer: What the policy answered.
        observations: What the tools returned, in any order.
    """
    value = normalize_answer(answer)
    if _NEVER.fullmatch(value):
        return False
    if _canonical_number(value) is not None:
        return any(value in _numbers(_evidence(text)) for text in observations)
    pattern = _whole_words(value)
    return any(pattern.search(_evidence(text)) for text in observations)


def episode_reward(trajectory: Trajectory, max_steps: int = 6, step_penalty: float = 0.05) -> float:
    """The reward of an episode: `correct - step_penalty * steps / max_steps`.

    Args:
        trajectory: An episode whose `correct` is set. Every turn is a step, malformed calls and the harness's
            forced last answer included, so an episode that had to be forced pays slightly more than the penalty.
        max_steps: The episode's step limit, at least 1.
        step_penalty: What a whole episode's worth of steps costs.

    Raises:
        ValueError: `max_steps` is less than 1.
    """
    if max_steps < 1:
        raise ValueError(f"max_steps must be at least 1, is {max_steps}")
    return float(trajectory.correct) - step_penalty * trajectory.num_steps / max_steps


def _fold(text: str) -> str:
    """Case, spacing, digits, dashes and Unicode form made one; every step is linear in the text."""
    if not text.isascii():
        # NFC, not NFKC: the latter reads 10² as 102. What no reader sees (soft hyphens, joiners, marks of
        # direction) goes, and decimal digits of any script are read as digits.
        text = unicodedata.normalize("NFC", text).translate(_CHARACTERS)
        text = "".join(_fold_character(character) for character in text)
    return " ".join(unicodedata.normalize("NFC", text.casefold()).split())


def _fold_character(character: str) -> str:
    category = unicodedata.category(character)
    if category == "Nd":
        return str(unicodedata.decimal(character))
    return "" if category == "Cf" else character


def _canonical_number(text: str) -> str | None:
    """The one spelling of the number that the whole text is, None where it is none."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    sign, whole, fraction, exponent_sign, exponent = match.groups(default="")
    digits = (whole.replace(",", "") + fraction).lstrip("0")
    significant = digits.rstrip("0")
    if not significant:
        return "0"
    if len(exponent) > _EXPONENT_DIGITS:
        return None  # no number of any use: stays text, equal only to itself
    power = int(f"{exponent_sign}{exponent or 0}") - len(fraction) + len(digits) - len(significant)
    return ("-" if sign == "-" else "") + _spell(significant, power)


def _spell(digits: str, power: int) -> str:
    """`digits` times ten to the `power`, plain where that is short."""
    if power == 0 or 0 < power <= _PLAIN_DIGITS - len(digits):
        return digits + "0" * power
    if -_PLAIN_DIGITS <= power < 0:
        digits = digits.rjust(1 - power, "0")
        return f"{digits[:power]}.{digits[power:]}"
    return f"{digits}e{power}"


def _evidence(observation: str) -> str:
    if observation.startswith("[1] "):
        observation = _HIT_MARKER.sub("", observation)
    return _fold(observation)


def _numbers(text: str) -> Iterator[str]:
    """The normal form of each numeral that stands whole in a folded text."""
    for match in _NUMERAL.finditer(text):
        numeral = match.group(1).rstrip(".,")
        number = _canonical_number(numeral)
        if number is not None:
            yield number
        elif numeral.count(",") >= 2:
            # Two commas that group no thousands make a list (a row of a table); one may be a decimal comma.
            yield from filter(None, map(_canonical_number, numeral.split(",")))


def _whole_words(value: str) -> re.Pattern[str]:
    """Matches the text where neither of its ends goes on as a word or a number."""
    before = r"(?<!\w)" if value[0].isalnum() else ""
    after = r"(?!\w)" if value[-1].isalnum() else ""
    if value[0].isdigit():
        before += r"(?<![0-9][.,])"
    if value[-1].isdigit():
        after += r"(?![.,][0-9])"
    return re.compile(before + re.escape(value) + after)
