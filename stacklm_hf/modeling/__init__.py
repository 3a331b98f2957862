"""The Stack architecture in the Hugging Face ecosystem: configuration, model, tokenizer, native import, exports.

Names are imported on first use, so that importing this package costs nothing; `registration` does the same for the
Auto classes. It knows nothing of the rooms above but the token names.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stacklm_hf.modeling.add_tokens import AgentTokens, add_agent_tokens
    from stacklm_hf.modeling.configuration_stack import PRESETS, StackConfig
    from stacklm_hf.modeling.convert import convert_native
    from stacklm_hf.modeling.export import export_qwen3
    from stacklm_hf.modeling.model_card import render_model_card, write_model_card
    from stacklm_hf.modeling.modeling_stack import StackForCausalLM, StackModel
    from stacklm_hf.modeling.tokenization_stack import StackTokenizerFast, generation_defaults, train_stack_tokenizer

_HOME = {
    "AgentTokens": "add_tokens",
    "add_agent_tokens": "add_tokens",
    "PRESETS": "configuration_stack",
    "StackConfig": "configuration_stack",
    "StackForCausalLM": "modeling_stack",
    "StackModel": "modeling_stack",
    "StackTokenizerFast": "tokenization_stack",
    "generation_defaults": "tokenization_stack",
    "train_stack_tokenizer": "tokenization_stack",
    "convert_native": "convert",
    "export_qwen3": "export",
    "render_model_card": "model_card",
    "write_model_card": "model_card",
}

__all__ = [
    "PRESETS",
    "AgentTokens",
    "StackConfig",
    "StackForCausalLM",
    "StackModel",
    "StackTokenizerFast",
    "add_agent_tokens",
    "convert_native",
    "export_qwen3",
    "generation_defaults",
    "render_model_card",
    "train_stack_tokenizer",
    "write_model_card",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
