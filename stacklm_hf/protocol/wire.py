"""The wire format: how spans are rendered to text, and how a turn of a policy is read.

Contract: the format is fixed (checkpoints and datasets depend on it). Rendering takes untrusted text and
returns text in which only the harness's own control markers are live; :func:`parse_turn` takes whatever a
model wrote, never raises, and returns one defined :class:`Turn`.

    <|system|>SYSTEM<|end|><|user|>QUESTION<|end|>
    <|assistant|>Thought: ...\\n<|tool_call|>{"tool": "search", "args": {"query": "...", "k": 2}}<|end|>
    <|tool_result|>OBSERVATION<|end|>
    <|assistant|>Thought: ...\\nAnswer: 4042<|end|>

without line breaks between the spans.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from stacklm_hf.protocol.tokens import ASSISTANT, END, SPECIAL_TOKENS, SYSTEM, TOOL_CALL, TOOL_RESULT, USER

PREAMBLE = "You are a narrow research assistant. Think, then either call a tool or give a final answer."
NO_RESULTS = "NoResults"
CALC_ERROR = "CalcError:"
TOOL_ERROR = "ToolError:"
REPEATED_CALL = "RepeatedCall: you already ran this; use the prior result."
FORMAT_ERROR = "FormatError: emit a valid JSON tool call."
FORCED_BODY = "Thought: I must answer now.\nAnswer:"
FORCED_TURN = ASSISTANT + FORCED_BODY
THOUGHT_LABEL = "Thought:"
ANSWER_LABEL = "Answer:"

_MARKER = re.compile("|".join(re.escape(token) for token in SPECIAL_TOKENS))
_MAX_DEPTH = 64  # of a call's JSON; far below what exhausts the stack of any reader behind this one
_ANSWER = re.compile(rf"^{ANSWER_LABEL}", re.MULTILINE)


def neutralize(text: str) -> str:
    """Makes control markers in untrusted text inert and leaves them readable: `<|end|>` becomes `< |end|>`.

    Idempotent, and the identity on text without a marker.
    """
    return _MARKER.sub(lambda match: "< " + match.group()[1:], text)


def has_marker(text: str) -> bool:
    """Whether one of the nine control markers stands in the text."""
    return _MARKER.search(text) is not None


def system_prompt(signatures: Iterable[str], preamble: str = PREAMBLE) -> str:
    """The system prompt: the preamble and the terse tool line, e.g. `Tools: search(query,k), calc(expr).`

    Args:
        signatures: `ToolSpec.signature()` of each tool, in order.
    """
    line = ", ".join(signatures)
    return f"{preamble} Tools: {line}." if line else preamble


def render_system(text: str) -> str:
    """The system span."""
    return f"{SYSTEM}{neutralize(text)}{END}"


def render_user(text: str) -> str:
    """The user span."""
    return f"{USER}{neutralize(text)}{END}"


def render_prompt(system: str, question: str) -> str:
    """The start of an episode, up to where the policy writes its first turn."""
    return f"{render_system(system)}{render_user(question)}{ASSISTANT}"


def call_json(tool: str, args: Mapping[str, Any]) -> str:
    """The body of a call. A control marker inside is escaped as JSON (`\\u003c|end|>`), so nothing is lost.

    Raises:
        ValueError: A value is not JSON (NaN, an object of another type, a lone surrogate).
    """
    try:
        text = json.dumps({"tool": tool, "args": dict(args)}, ensure_ascii=False, allow_nan=False)
        text.encode("utf-8")
    except (TypeError, ValueError) as error:
        raise ValueError(f"arguments of tool {tool!r} are not JSON: {error}") from error
    return escape_json_markers(text)


def escape_json_markers(text: str) -> str:
    """Writes the `<` of each control marker in a JSON text as its escape; the JSON value stays the same."""
    return _MARKER.sub(lambda match: "\\u003c" + match.group()[1:], text)


def render_call(tool: str, args: Mapping[str, Any]) -> str:
    """A call with its markers: `<|tool_call|>{"tool": ..., "args": {...}}<|end|>`.

    Raises:
        ValueError: A value is not JSON.
    """
    return f"{TOOL_CALL}{call_json(tool, args)}{END}"


def render_result(text: str) -> str:
    """An observation with its markers: `<|tool_result|>text<|end|>`."""
    return f"{TOOL_RESULT}{neutralize(text)}{END}"


@dataclass(frozen=True)
class Turn:
    """What a turn of a policy means.

    Args:
        kind: `call`, `answer` (final) or `malformed`.
        thought: Text of the thought without its label.
        tool: Tool name of a call.
        args: Arguments of a call.
        answer: The final answer; may be empty.
        error: Why a turn is malformed.
    """

    kind: Literal["call", "answer", "malformed"]
    thought: str = ""
    tool: str | None = None
    args: dict[str, Any] = field(default_factory=dict)
    answer: str | None = None
    error: str | None = None


def parse_turn(text: str) -> Turn:
    """Reads a turn; never raises.

    A turn with a tool call marker is a call, or malformed. One without is final: its answer is what follows
    the first `Answer:` that begins a line (else the first anywhere), or the whole text without one. Any
    other control marker inside a turn makes it malformed, whatever stands around it.

    Args:
        text: The turn as text, with or without its closing `<|end|>`.
    """
    text = text.removesuffix(END)
    body, marker, call = text.partition(TOOL_CALL)
    if has_marker(body) or has_marker(call):
        return Turn("malformed", thought=_thought(body), error="a control token inside the turn")
    if not marker:
        return _final(text)
    thought = _thought(body)
    try:
        tool, args = _read_call(call)
    except ValueError as error:
        return Turn("malformed", thought=thought, error=str(error))
    return Turn("call", thought=thought, tool=tool, args=args)


def _thought(text: str) -> str:
    return text.strip().removeprefix(THOUGHT_LABEL).strip()


def _final(text: str) -> Turn:
    match = _ANSWER.search(text)
    start = match.start() if match else text.find(ANSWER_LABEL)
    if start < 0:
        return Turn("answer", answer=text.strip())
    return Turn("answer", thought=_thought(text[:start]), answer=text[start + len(ANSWER_LABEL) :].strip())


def _read_call(text: str) -> tuple[str, dict[str, Any]]:
    """Raises ValueError (of which JSONDecodeError is one) unless the text is exactly one well-formed call."""
    try:
        value = json.loads(
            text, object_pairs_hook=_object, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_integer
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("a call must be a JSON object")
    unknown = set(value) - {"tool", "args"}
    if unknown:
        raise ValueError(f"unexpected key {min(unknown)!r} in the call")
    tool, args = value.get("tool"), value.get("args", {})
    if not isinstance(tool, str) or not tool:
        raise ValueError("a call must name its tool")
    if not isinstance(args, dict):
        raise ValueError("args must be a JSON object")
    _check_depth(args)
    call_json(tool, args)
    return tool, args


def _check_depth(value: Any) -> None:
    """Bounds the nesting by a number: what the stack still takes differs from caller to caller."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item if isinstance(item, list) else ())
        ]
        if not level:
            return
    raise ValueError("nested too deeply")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("duplicate key")
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is out of range")
    return value


def _integer(text: str) -> int:
    # int() of thousands of digits is quadratic, and Python refuses it with a message about its own settings
    if len(text) > 100:
        raise ValueError("a number is out of range")
    return int(text)
