"""`calc`: what it computes, how it writes numbers, and that no input makes it raise or take long."""

import time
import tracemalloc
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stacklm_hf.tools import calc


@pytest.mark.parametrize(
    ("expr", "value"),
    [
        # whole numbers are exact, whatever way they come about
        ("2021*2", "4042"),
        ("12/4", "3"),
        ("2.50*4", "10"),
        ("1e3", "1000"),
        ("123456789*987654321", "121932631112635269"),
        ("2**100", "1267650600228229401496703205376"),
        ("10**40/10**39", "10"),
        ("1/3*3", "1"),
        ("8**(1/3)", "2"),
        ("4**0.5", "2"),
        ("-0.0", "0"),
        # decimals as people write them
        ("3*1.1", "3.3"),
        ("0.1+0.2", "0.3"),
        ("10/4", "2.5"),
        ("1.10", "1.1"),
        ("2**-1", "0.5"),
        ("1//0.1", "10"),
        ("5.5%2", "1.5"),
        # at most 15 significant digits
        ("1/3", "0.333333333333333"),
        ("2/3", "0.666666666666667"),
        ("2**0.5", "1.4142135623731"),
        ("1.05**30", "4.32194237515066"),
        # plain from 0.000001 to 10**15, otherwise with an exponent
        ("1/1000000", "0.000001"),
        ("1/8000000", "1.25e-7"),
        ("10**15/3", "333333333333333"),
        ("10**16/3", "3.33333333333333e15"),
        ("2**0.5*1e80", "1.4142135623731e80"),
        # forms of a number
        (".5", "0.5"),
        ("1.", "1"),
        ("007", "7"),
        ("1E+2", "100"),
        ("25e-1", "2.5"),
        (" 1\t+ \n1 ", "2"),
    ],
)
def test_value_and_its_form(expr, value):
    assert calc(expr) == value


@pytest.mark.parametrize(
    ("expr", "value"),
    [
        ("2+3*4", "14"),
        ("(2+3)*4", "20"),
        ("-2**2", "-4"),
        ("(-2)**2", "4"),
        ("2**3**2", "512"),
        ("2**-1**2", "0.5"),
        ("-2*-3", "6"),
        ("2*-3**2", "-18"),
        ("--3", "3"),
        ("+-+3", "-3"),
        ("10-4-3", "3"),
        ("100/10/5", "2"),
        ("7//2*2", "6"),
        ("7//2", "3"),
        ("-7//2", "-4"),
        ("7//-2", "-4"),
        ("-7%3", "2"),
        ("7%-3", "-2"),
        ("0**0", "1"),
        ("(-1)**1001", "-1"),
        ("(-1.5)**3", "-3.375"),
    ],
)
def test_precedence_and_rounding_are_pythons(expr, value):
    assert calc(expr) == value
    assert float(value) == eval(expr)


@pytest.mark.parametrize(
    ("expr", "reason"),
    [
        ("1/0", "division by zero"),
        ("1//0.0", "division by zero"),
        ("1%(2-2)", "division by zero"),
        ("0**-1", "division by zero"),
        ("(-8)**(1/3)", "a negative number has no real power with a fractional exponent"),
        ("9**9**9**9", "the result is larger than 10**1000"),
        ("10**1000+1", "the result is larger than 10**1000"),
        ("1e999999999999", "the result is larger than 10**1000"),
        ("-2**99999", "the result is larger than 10**1000"),
        ("1.5**1e9", "the result is larger than 10**1000"),
        ("2**-99999", "the result is closer to zero than 10**-1000"),
        ("1e-999999999999", "the result is closer to zero than 10**-1000"),
        ("(1+1e-900)**1e900", "the exponent is too large"),
        ("", "nothing to compute"),
        (" \n", "nothing to compute"),
        ("1+", "the expression ends where a number is missing"),
        ("-", "the expression ends where a number is missing"),
        ("()", "expected a number before ')' at position 2"),
        ("1+*2", "expected a number before '*' at position 3"),
        ("2 3", "expected an operator before '3' at position 3"),
        ("2(3)", "expected an operator before '(' at position 2"),
        ("1.2.3", "expected an operator before '.3' at position 4"),
        ("(1", "a ( is never closed"),
        ("1)", "a ) has no ("),
        ("2^3", "unexpected character '^' at position 2; use ** for a power"),
        ("1,000", "unexpected character ',' at position 2; write numbers without separators"),
        ("1_000", "unexpected character '_' at position 2; write numbers without separators"),
        ("2×3", "unexpected character '×' at position 2; use * to multiply"),  # noqa: RUF001
        ("5−3", "unexpected character '−' at position 2; use - to subtract"),  # noqa: RUF001
        ("abs(1)", "unknown name 'abs'; only numbers and + - * / // % ** ( ) are allowed"),
        ("__import__('os')", "unexpected character '_' at position 1; write numbers without separators"),
        ("1e", "unknown name 'e'; only numbers and + - * / // % ** ( ) are allowed"),
        ("2j", "unknown name 'j'; only numbers and + - * / // % ** ( ) are allowed"),
        ("٣+1", "unexpected character '٣' at position 1; only numbers and + - * / // % ** ( ) are allowed"),
        ("\x00", "unexpected character '\\x00' at position 1; only numbers and + - * / // % ** ( ) are allowed"),
        ("\ud800", "unexpected character '\\ud800' at position 1; only numbers and + - * / // % ** ( ) are allowed"),
        ("1" * 1001, "the expression has 1001 characters, at most 1000 are allowed"),
        (None, "the expression must be text"),
        (7, "the expression must be text"),
        (b"1", "the expression must be text"),
    ],
)
def test_everything_else_is_one_line_with_the_reason(expr, reason):
    assert calc(expr) == f"CalcError: {reason}"


@pytest.mark.parametrize("expr", ["10**1000", "9" * 1000, "0*9**999", "0e999999999999", "(-1)**9**300", "1**9**300"])
def test_the_edge_of_the_range_has_a_value(expr):
    assert int(calc(expr)) == eval(expr.replace("0e999999999999", "0").replace("9**300", "9"))


def _nested(depth: int) -> str:
    return "(" * depth + "1" + ")" * depth


HOSTILE = {
    "towers": "9**" * 333 + "9",
    "towers of roots": "2" + "**.1" * 249,
    "roots of roots": "(" * 140 + "1.1" + "**1.1)" * 140,
    "squarings": "(" * 150 + "1.0000001" + ")**2" * 150,
    "long denominators": "+".join(f"1/{n}" for n in range(1001, 1142)),
    "near one": "+".join(["(1+1e-29)**1e29"] * 60),
    "large remainders": "1e999%7e-999+" * 71 + "1",
    "many brackets": _nested(499),
    "thousands of brackets": _nested(100_000),
    "never closed": "(" * 1000,
    "a megabyte of digits": "9" * 1_000_000,
    "a megabyte of signs": "-" * 1_000_000 + "1",
    "a megabyte of spaces": " " * 1_000_000,
    "signs": "-" * 999 + "1",
    "combining marks": "1" + "\u0301\u0316" * 400,
}


@pytest.mark.parametrize("expr", HOSTILE.values(), ids=HOSTILE)
def test_hostile_input_costs_little(expr):
    start = time.perf_counter()
    result = calc(expr)
    assert time.perf_counter() - start < 0.1
    tracemalloc.start()
    calc(expr)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5_000_000  # bytes; 50 MB are allowed
    assert len(result) <= 1001
    assert result.isprintable()


@given(st.one_of(st.text(), st.text(alphabet="0123456789.eE+-*/%() ", max_size=80), st.none(), st.binary()))
@settings(max_examples=500)
def test_never_raises_and_gives_one_line(expr):
    result = calc(expr)
    assert result.isprintable()
    assert result.startswith("CalcError: ") or float(Decimal(result)) is not None


@st.composite
def _expressions(draw, depth=3):
    """An expression and its value by Python's own operators on fractions (None for a division by zero)."""
    if depth == 0 or draw(st.booleans()):
        digits = draw(st.integers(0, 9999))
        text = draw(st.sampled_from([f"{digits}", f"{digits / 100:.2f}", f"{digits}e-1"]))
        return text, Fraction(text)
    if draw(st.integers(0, 3)) == 0:
        text, value = draw(_expressions(depth=depth - 1))
        return f"-({text})", None if value is None else -value
    left, a = draw(_expressions(depth=depth - 1))
    right, b = draw(_expressions(depth=depth - 1))
    operator = draw(st.sampled_from(["+", "-", "*", "/", "//", "%"]))
    text = f"({left}){operator}({right})"
    if a is None or b is None:
        return text, None
    try:
        return text, Fraction(eval(f"a{operator}b", {"a": a, "b": b}))
    except ZeroDivisionError:
        return text, None


@given(_expressions())
@settings(max_examples=300)
def test_agrees_with_python_on_fractions(case):
    text, value = case
    result = calc(text)
    if value is None:
        assert result == "CalcError: division by zero"
    elif value.denominator == 1:
        assert result == str(value)
    else:
        assert abs(Fraction(result) - value) <= abs(value) * Fraction(1, 10**14)


_ATOM = st.integers(0, 9).map(str)


@given(
    st.recursive(
        _ATOM,
        lambda inner: st.one_of(
            st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//", "%"]), inner).map("".join),
            inner.map(lambda text: f"-{text}"),
            inner.map(lambda text: f"({text})"),
            st.tuples(_ATOM, st.sampled_from(["**", "**-"]), _ATOM).map("".join),
        ),
        max_leaves=6,
    )
)
@settings(max_examples=300)
def test_parses_like_python_without_brackets_to_help(text):
    """Precedence and associativity: Python's parse of the same text, computed on fractions."""
    source = "".join(f"F({token})" if token.isdigit() else token for token in text)
    try:
        value = Fraction(eval(source, {"F": Fraction}))
    except ZeroDivisionError:
        assert calc(text) == "CalcError: division by zero"
        return
    except (OverflowError, TypeError, ValueError):
        return
    assert abs(Fraction(calc(text)) - value) <= abs(value) * Fraction(1, 10**14)


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**9), max_value=10**9, places=5))
def test_a_decimal_comes_back_as_written_without_trailing_zeros(number):
    result = calc(f"{number:f}")
    assert Decimal(result) == number
    assert "." not in result or not result.endswith("0")
    if abs(number) >= Decimal("0.000001"):
        assert "e" not in result
