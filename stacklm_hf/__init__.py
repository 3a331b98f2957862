"""Small language models that use tools reliably, in the Hugging Face ecosystem.

Importing this package registers the Stack architecture for transformers' Auto classes, and imports neither torch nor
transformers: the names below are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from stacklm_hf.modeling.registration import register_auto_classes

if TYPE_CHECKING:
    from stacklm_hf.modeling import StackConfig, StackForCausalLM, StackModel, StackTokenizerFast

__version__ = "0.1.0"

__all__ = ["StackConfig", "StackForCausalLM", "StackModel", "StackTokenizerFast"]

register_auto_classes()


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("stacklm_hf.modeling"), name)
