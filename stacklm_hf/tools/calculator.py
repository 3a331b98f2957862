"""A calculator for untrusted expressions: exact rationals, no `eval`, bounded time and memory.

Contract: :func:`calc` takes any object and returns one line: the value, or `CalcError: reason`. It never raises.

The language is Python's for `+ - * / // % **`, unary signs and parentheses over decimal numbers (`2`, `2.5`, `.5`,
`1e3`), with Python's precedence: `**` binds tightest and to the right (`2**3**2` is 512), a sign binds looser than
`**` on its right (`-2**2` is -4) and tighter than `*`; `//` rounds down, and `%` has the sign of its right side.

Numbers are exact fractions, not binary floats: `3*1.1` is 3.3, `0.1+0.2` is 0.3, `1/3*3` is 1, `1//0.1` is 10. Only
a power with a fractional exponent, or a fraction too long to keep, is rounded, to 50 significant digits.

A whole number is written with all its digits; any other value with 15 significant digits at most and no trailing
zeros, plainly from 0.000001 up to 10**15, and as `1.5e-7` outside of that.
"""

from __future__ import annotations

import decimal
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from stacklm_hf.protocol.wire import CALC_ERROR

# The limits together bound the time: at most _MAX_CHARS / 2 operations on numbers of at most _MAX_BITS bits.
_MAX_CHARS = 1000
_MAX_EXPONENT = 1000  # A result must lie between 10**-1000 and 10**1000, or be zero.
_MAX_BITS = 4096  # Enough for any whole number below 10**1000, and for a fraction of 50 digits within that range.
_KEPT_DIGITS = 50
_SHOWN_DIGITS = 15
_MAX_POWER = 10**30  # Above it a rounded base decides the result, not the base that was written.

_SPACE = " \t\r\n\f\v"
_TOKEN = re.compile(r"(?P<number>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)|(?P<symbol>\*\*|//|[-+*/%()])")
_NAME = re.compile(r"[^\W\d]\w*")
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "//": 2, "%": 2, "neg": 3, "pos": 3, "**": 4}
_HINTS = {
    "^": "use ** for a power",
    "\u00d7": "use * to multiply",
    "\u00b7": "use * to multiply",
    "\u00f7": "use / to divide",
    "\u2212": "use - to subtract",
    "\u2013": "use - to subtract",
    ",": "write numbers without separators",
    "_": "write numbers without separators",
    "=": "give an expression, no equation",
}

# Ten digits more than are kept, so that a root that comes out whole is whole after rounding (8**(1/3) is 2).
_CONTEXT = decimal.Context(
    prec=_KEPT_DIGITS + 10,
    Emax=2 * _MAX_EXPONENT,
    Emin=-2 * _MAX_EXPONENT,
    traps=[decimal.InvalidOperation, decimal.DivisionByZero, decimal.Overflow, decimal.Underflow],
)


class _CalcFailureError(Exception):
    """Why an expression has no value; its text is the reason after `CalcError: `."""


@dataclass(frozen=True)
class _Number:
    """A value, and whether it is exactly what the expression says or was rounded on the way."""

    value: Fraction
    exact: bool = True


def calc(expr: str) -> str:
    """Computes an arithmetic expression.

    Args:
        expr: The expression; untrusted, of any length and any content.

    Returns:
        The value as text, or `CalcError: reason`; one line in both cases.

    >>> calc("12/4"), calc("3*1.1"), calc("-2**2"), calc("1/3")
    ('3', '3.3', '-4', '0.333333333333333')
    >>> calc("1/0")
    'CalcError: division by zero'
    """
    try:
        if not isinstance(expr, str):
            raise _CalcFailureError("the expression must be text")
        if len(expr) > _MAX_CHARS:
            raise _CalcFailureError(f"the expression has {len(expr)} characters, at most {_MAX_CHARS} are allowed")
        return _render(_evaluate(expr))
    except _CalcFailureError as failure:
        return f"{CALC_ERROR} {failure}"


def _evaluate(expr: str) -> _Number:
    """Dijkstra's shunting-yard: two stacks instead of recursion, so that brackets cannot exhaust the call stack."""
    values: list[_Number] = []
    operators: list[str] = []
    want_operand = True
    position = 0
    while True:
        while position < len(expr) and expr[position] in _SPACE:
            position += 1
        if position == len(expr):
            break
        match = _TOKEN.match(expr, position)
        if match is None:
            raise _CalcFailureError(_unexpected(expr, position))
        token = match.group()
        if want_operand:
            want_operand = _take_operand(token, match.lastgroup == "number", values, operators, position)
        else:
            want_operand = _take_operator(token, match.lastgroup == "number", values, operators, position)
        position = match.end()
    if want_operand:
        raise _CalcFailureError(
            "the expression ends where a number is missing" if expr.strip(_SPACE) else "nothing to compute"
        )
    while operators:
        if operators[-1] == "(":
            raise _CalcFailureError("a ( is never closed")
        _apply(operators.pop(), values)
    return values[0]


def _take_operand(token: str, is_number: bool, values: list[_Number], operators: list[str], position: int) -> bool:
    """Consumes a token where a number, a sign or an opening bracket must stand; says if one still must."""
    if is_number:
        values.append(_literal(token))
        return False
    if token == "(":
        operators.append(token)
    elif token in "+-":
        operators.append("neg" if token == "-" else "pos")
    else:
        raise _CalcFailureError(f"expected a number before {token!r} at position {position + 1}")
    return True


def _take_operator(token: str, is_number: bool, values: list[_Number], operators: list[str], position: int) -> bool:
    """Consumes a token where an operator or a closing bracket must stand; says if a number must follow."""
    if is_number or token == "(":
        raise _CalcFailureError(f"expected an operator before {token[:20]!r} at position {position + 1}")
    if token == ")":
        while operators and operators[-1] != "(":
            _apply(operators.pop(), values)
        if not operators:
            raise _CalcFailureError("a ) has no (")
        operators.pop()
        return False
    precedence = _PRECEDENCE[token]
    while operators and operators[-1] != "(":
        above = _PRECEDENCE[operators[-1]]
        if above < precedence or (above == precedence and token == "**"):  # ** groups to the right
            break
        _apply(operators.pop(), values)
    operators.append(token)
    return True


def _unexpected(expr: str, position: int) -> str:
    character = expr[position]
    name = _NAME.match(expr, position)
    if name is not None and character not in _HINTS:
        return f"unknown name {name.group()[:20]!r}; only numbers and + - * / // % ** ( ) are allowed"
    shown = repr(character) if character.isprintable() else ascii(character)
    hint = _HINTS.get(character, "only numbers and + - * / // % ** ( ) are allowed")
    return f"unexpected character {shown} at position {position + 1}; {hint}"


def _literal(text: str) -> _Number:
    mantissa, _, exponent = text.lower().partition("e")
    # Fraction would build 10**exponent, whatever the exponent is.
    if exponent and len(exponent.lstrip("+-0")) > len(str(_MAX_EXPONENT)):
        if not mantissa.strip("0."):
            return _Number(Fraction(0))
        raise _range_error(too_large=not exponent.startswith("-"))
    return _bounded(Fraction(text), exact=True)


def _apply(operator: str, values: list[_Number]) -> None:
    """Replaces the operands on top of the stack by the result."""
    right = values.pop()
    if operator == "pos":
        values.append(right)
    elif operator == "neg":
        values.append(_Number(-right.value, right.exact))
    else:
        left = values.pop()
        if operator == "**":
            values.append(_power(left, right))
        else:
            values.append(_bounded(_BINARY[operator](left.value, right.value), left.exact and right.exact))


def _divide(operation: Callable[[Fraction, Fraction], Fraction | int]) -> Callable[[Fraction, Fraction], Fraction]:
    def checked(left: Fraction, right: Fraction) -> Fraction:
        if not right:
            raise _CalcFailureError("division by zero")
        return Fraction(operation(left, right))

    return checked


_BINARY: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
    "/": _divide(lambda left, right: left / right),
    "//": _divide(lambda left, right: left // right),
    "%": _divide(lambda left, right: left % right),
}


def _power(left: _Number, right: _Number) -> _Number:
    base, exponent = left.value, right.value
    exact = left.exact and right.exact
    if exponent == 0 or base == 1:
        return _Number(Fraction(1), exact)
    if base == 0:
        if exponent < 0:
            raise _CalcFailureError("division by zero")
        return _Number(Fraction(0), exact)
    whole = exponent.denominator == 1
    if base < 0 and not whole:
        raise _CalcFailureError("a negative number has no real power with a fractional exponent")
    if base == -1:
        return _Number(Fraction(1 if exponent % 2 == 0 else -1), exact)
    if whole:
        bits = max(_bits(base.numerator), _bits(base.denominator)) * abs(exponent.numerator)
        if bits <= 2 * _MAX_BITS:  # Small enough to compute; _bounded decides if it is small enough to keep.
            return _bounded(base**exponent.numerator, exact)
    if abs(exponent) > _MAX_POWER:
        raise _CalcFailureError("the exponent is too large")
    try:
        result = _CONTEXT.power(_to_decimal(abs(base)), _to_decimal(exponent))
    except decimal.Overflow:
        raise _range_error(too_large=True) from None
    except decimal.Underflow:
        raise _range_error(too_large=False) from None
    sign = -1 if base < 0 and exponent % 2 else 1
    return _bounded(sign * _rounded(result), exact=False)


def _bounded(value: Fraction, exact: bool) -> _Number:
    """Refuses a value out of range, and rounds a fraction that grew too long."""
    if not value:
        return _Number(value, exact)
    # Digits before the decimal point, give or take one: enough to keep the exact comparison below cheap.
    magnitude = (_bits(value.numerator) - _bits(value.denominator)) * math.log10(2)
    far = abs(magnitude) > _MAX_EXPONENT + 1
    if far or (abs(magnitude) > _MAX_EXPONENT - 1 and not _LOWEST <= abs(value) <= _HIGHEST):
        raise _range_error(too_large=magnitude > 0)
    if value.denominator != 1 and max(_bits(value.numerator), _bits(value.denominator)) > _MAX_BITS:
        return _Number(_rounded(_to_decimal(value)), exact=False)
    return _Number(value, exact)


_HIGHEST = Fraction(10**_MAX_EXPONENT)
_LOWEST = 1 / _HIGHEST


def _range_error(too_large: bool) -> _CalcFailureError:
    bound = f"10**{_MAX_EXPONENT}" if too_large else f"10**-{_MAX_EXPONENT}"
    return _CalcFailureError(f"the result is {'larger' if too_large else 'closer to zero'} than {bound}")


def _bits(number: int) -> int:
    return abs(number).bit_length()


def _to_decimal(value: Fraction) -> Decimal:
    return _CONTEXT.divide(Decimal(value.numerator), Decimal(value.denominator))


def _rounded(value: Decimal) -> Fraction:
    return Fraction(decimal.Context(prec=_KEPT_DIGITS).plus(value))


def _render(number: _Number) -> str:
    value = number.value
    if value.denominator == 1 and (number.exact or abs(value) < 10**_SHOWN_DIGITS):
        return str(value.numerator)
    shown = decimal.Context(prec=_SHOWN_DIGITS, rounding=decimal.ROUND_HALF_EVEN)
    digits = shown.divide(Decimal(value.numerator), Decimal(value.denominator)).normalize(shown)
    if -6 <= digits.adjusted() < _SHOWN_DIGITS:
        return f"{digits:f}"
    mantissa = digits.scaleb(-digits.adjusted(), shown)
    return f"{mantissa:f}e{digits.adjusted()}"
