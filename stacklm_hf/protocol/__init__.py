"""Special tokens, rendering, parsing, the grammar of a turn and the chat template."""

from stacklm_hf.protocol.encoding import encode_trusted, encode_untrusted
from stacklm_hf.protocol.tokens import SPECIAL_TOKENS
from stacklm_hf.protocol.wire import (
    Turn,
    neutralize,
    parse_turn,
    render_call,
    render_prompt,
    render_result,
    render_system,
    render_user,
    system_prompt,
)

__all__ = [
    "SPECIAL_TOKENS",
    "Turn",
    "encode_trusted",
    "encode_untrusted",
    "neutralize",
    "parse_turn",
    "render_call",
    "render_prompt",
    "render_result",
    "render_system",
    "render_user",
    "system_prompt",
]
