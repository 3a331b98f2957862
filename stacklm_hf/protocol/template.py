"""The chat template of the wire format, and the response template that reads a turn back.

Contract: the ids and the mask that the chat template gives for a list of messages are those of the token-native
path, span by span: control tokens split the text before anything else is done to it, so what stands between two
of them is encoded as if alone. The template keeps prefixes and carries generation markers, and a tokenizer that
has both templates needs no patching by TRL. Both are plain data and are saved with the tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.resources import files
from typing import Any

from stacklm_hf.protocol.tokens import ASSISTANT, SPECIAL_TOKENS
from stacklm_hf.protocol.wire import PREAMBLE

_BODY = files("stacklm_hf.protocol").joinpath("chat_template.jinja").read_text(encoding="utf-8")

# A turn ends at its first end token; what may follow it in a padded batch is no part of it. `<|eos|>` ends the
# turn of a model that was only pre-trained.
_TURN_END = r"<\|(?:end|eos)\|>[\s\S]*"

RESPONSE_TEMPLATE: dict[str, Any] = {
    "version": 1,
    "defaults": {"role": "assistant", "content": ""},
    "start_anchor": ASSISTANT,
    "fields": {
        # The thought, verbatim. A single line break in front of a call is left to the chat template, which adds it.
        "content": {"close_pattern": _TURN_END, "content_args": {"strip": False}},
        "tool_calls": {
            "open_pattern": r"(?<=[^\n])\n<\|tool_call\|>|<\|tool_call\|>",
            "close_pattern": _TURN_END,
            "content": "json",
            "repeats": True,
            "transform": {
                "type": "function",
                "function": {"name": "{content.tool}", "arguments": "{content.args}"},
            },
        },
    },
}
"""What `tokenizer.parse_response(ids, prefix=...)` reads a turn by: `content` is the thought (or the answer),
`tool_calls` the call with its arguments as a dict. A call that is no JSON object with `tool` and `args` raises
ValueError, which TRL takes for a turn of plain text."""


def build_chat_template(other_markers: Iterable[str] = ()) -> str:
    """The chat template, as Jinja text that transformers, TRL and vLLM take.

    Args:
        other_markers: Special tokens beside the nine that text of messages must not become either: those of the
            host tokenizer that the nine were added to. A marker of one character cannot be taken apart and is
            left out.

    Returns:
        The template's text.
    """
    markers = [*SPECIAL_TOKENS, *(marker for marker in other_markers if len(marker) > 1)]
    table = [
        [marker, f"{marker[0]} {marker[1:]}", f"\\u{ord(marker[0]):04x}{marker[1:]}"]
        for marker in sorted(dict.fromkeys(markers), key=len, reverse=True)
        if ord(marker[0]) < 0x10000  # a JSON escape holds one UTF-16 unit
    ]
    head = f"{{%- set markers = {_literal(table)} -%}}\n{{%- set preamble = {_literal(PREAMBLE)} -%}}\n"
    return head + _BODY


def _literal(value: Any) -> str:
    """A Jinja literal: JSON's strings and lists are Jinja's too."""
    return json.dumps(value, ensure_ascii=False)


CHAT_TEMPLATE = build_chat_template()
"""The chat template of native tokenizers."""
