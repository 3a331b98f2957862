"""The grammar of a turn, made from the tool specs: one xgrammar structural tag for every engine.

Contract: inside a call the syntax is constrained so far that it cannot be malformed; the decision to call or
to answer never is, and the thought is free text without control tokens. `<|end|>` is not part of the grammar:
it is the stop token, which a matcher allows exactly where a turn may end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stacklm_hf.protocol.tokens import END, TOOL_CALL, control_ids

if TYPE_CHECKING:
    import xgrammar
    from transformers import PreTrainedTokenizerBase

_JSON_STRING = r'"([^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9A-Fa-f]{4})*"'
_INTEGER = r"-?(0|[1-9][0-9]{0,17})"
_NUMBER = _INTEGER + r"(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,2})?"
_MAX_ENUMERATED = 1000


def call_regex(name: str, parameters: dict[str, Any]) -> str:
    """The regular expression of a call's JSON body.

    Args:
        name: The tool's name.
        parameters: JSON schema of the arguments. `x-grammar` in a string property is the regular expression
            of its characters, narrower than what dispatch accepts; so is `pattern`.

    Raises:
        ValueError: A part of the schema cannot be constrained; the message names it.
    """
    tool = re.escape(json.dumps(name, ensure_ascii=False))
    return r"\{" + f'"tool": {tool}, "args": {_object_regex(parameters, name)}' + r"\}"


def _object_regex(schema: dict[str, Any], where: str) -> str:
    properties = schema.get("properties")
    if properties is None:
        raise ValueError(f"{where}: an object without 'properties' cannot be constrained")
    required = set(schema.get("required", properties))
    members = [
        (re.escape(json.dumps(key, ensure_ascii=False)) + ": " + _value_regex(value, f"{where}.{key}"), key in required)
        for key, value in properties.items()
    ]
    return r"\{" + _members_regex(members) + r"\}"


def _members_regex(members: list[tuple[str, bool]]) -> str:
    """Members in order, the optional ones present or not, with ", " between those that are present."""
    leading = next((index for index, (_, is_required) in enumerate(members) if is_required), len(members))
    starts = []
    for start in range(min(leading + 1, len(members))):
        rest = "".join(f"(, {member})" + ("" if needed else "?") for member, needed in members[start + 1 :])
        starts.append(members[start][0] + rest)
    body = "(" + "|".join(starts) + ")"
    return body + "?" if leading == len(members) else body


def _value_regex(schema: dict[str, Any], where: str) -> str:
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return "(" + "|".join(re.escape(json.dumps(value, ensure_ascii=False)) for value in values) + ")"
    kind = schema.get("type")
    if isinstance(kind, list):
        return "(" + "|".join(_value_regex({**schema, "type": one}, where) for one in kind) + ")"
    if "anyOf" in schema:
        return "(" + "|".join(_value_regex(one, where) for one in schema["anyOf"]) + ")"
    if kind == "string":
        return _string_regex(schema)
    if kind == "integer":
        return _integer_regex(schema)
    if kind == "array":
        item = _value_regex(schema.get("items") or {"type": "string"}, f"{where}[]")
        return rf"\[({item}(, {item})*)?\]"
    if kind == "object":
        return _object_regex(schema, where)
    simple = {"number": _NUMBER, "boolean": "(true|false)", "null": "null"}
    if kind not in simple:
        raise ValueError(f"{where}: a schema of type {kind!r} cannot be constrained; give it a JSON type")
    return simple[kind]


def _string_regex(schema: dict[str, Any]) -> str:
    characters = schema.get("x-grammar") or schema.get("pattern")
    if characters is None:
        return _JSON_STRING
    return '"' + characters.removeprefix("^").removesuffix("$") + '"'


def _integer_regex(schema: dict[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is None or high is None or high - low >= _MAX_ENUMERATED:
        return _INTEGER
    if low >= 0 and high <= 9:
        return f"[{low}-{high}]"
    return "(" + "|".join(str(value) for value in range(low, high + 1)) + ")"


def structural_tag(
    tools: Sequence[tuple[str, dict[str, Any]]], excluded: Sequence[int], call_id: int, max_tokens: int | None = None
) -> dict[str, Any]:
    """The structural tag of a whole turn, for xgrammar and for vLLM's `structural_tag`.

    Args:
        tools: `(name, parameters)` of each tool.
        excluded: Ids that the free text may not hold.
        call_id: Id of `<|tool_call|>`.
        max_tokens: Tokens that the free text may take; None for as many as the turn has.
    """
    thought: dict[str, Any] = {"type": "any_tokens", "exclude_tokens": sorted(excluded)}
    if max_tokens is not None:
        thought["max_tokens"] = max_tokens
    elements: list[dict[str, Any]] = [thought]
    if tools:
        bodies = [{"type": "regex", "pattern": call_regex(name, parameters)} for name, parameters in tools]
        body = bodies[0] if len(bodies) == 1 else {"type": "or", "elements": bodies}
        call = {"type": "sequence", "elements": [{"type": "token", "token": call_id}, body]}
        elements.append({"type": "optional", "content": call})
    return {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}


def excluded_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that no free text may hold: the nine, and every other special token of the tokenizer."""
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return sorted(special.union(control_ids(tokenizer).values()))


class TurnGrammar:
    """The grammar of a turn, compiled for a tokenizer; shared by all episodes of a run.

    Args:
        tokenizer: Holds the nine control tokens.
        tools: `(name, parameters)` of each tool.
        vocab_size: Width of the model's logits; the tokenizer's length by default.
        max_tokens: Tokens that the thought may take.

    Raises:
        ValueError: The tokenizer lacks a control token, or a tool's schema cannot be constrained.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[tuple[str, dict[str, Any]]],
        vocab_size: int | None = None,
        max_tokens: int | None = None,
    ):
        import xgrammar

        self.vocab_size = vocab_size or len(tokenizer)
        control = control_ids(tokenizer)
        self.end_id = control[END]
        self.tag = structural_tag(tools, excluded_ids(tokenizer), control[TOOL_CALL], max_tokens)
        info = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=self.vocab_size, stop_token_ids=[self.end_id]
        )
        self._compiled = xgrammar.GrammarCompiler(info).compile_structural_tag(json.dumps(self.tag))

    def matcher(self) -> xgrammar.GrammarMatcher:
        """A fresh matcher for one turn."""
        import xgrammar

        return xgrammar.GrammarMatcher(self._compiled)
