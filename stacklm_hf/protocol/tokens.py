"""The nine control tokens, in id order: they are the last nine ids of the vocabulary."""

from __future__ import annotations

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
