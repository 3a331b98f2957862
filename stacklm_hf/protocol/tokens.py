"""The nine control tokens, in id order: they are the last nine ids of the vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BOS = "<|bos|>"
EOS = "<|eos|>"
PAD = "<|pad|>"
SYSTEM = "<|system|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
END = "<|end|>"
TOOL_CALL = "<|tool_call|>"
TOOL_RESULT = "<|tool_result|>"

SPECIAL_TOKENS: tuple[str, ...] = (BOS, EOS, PAD, SYSTEM, USER, ASSISTANT, END, TOOL_CALL, TOOL_RESULT)


def control_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """The id of each control token.

    Raises:
        ValueError: The tokenizer lacks one of the nine.
    """
    # Not get_vocab(): it copies the whole vocabulary, and this is asked in every turn.
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    missing = [
        token
        for token, token_id in ids.items()
        if not isinstance(token_id, int) or tokenizer.convert_ids_to_tokens(token_id) != token
    ]
    if missing:
        raise ValueError(f"the tokenizer lacks {', '.join(missing)}: add them with stacklm_hf.add_agent_tokens")
    return {token: token_id for token, token_id in ids.items() if isinstance(token_id, int)}
