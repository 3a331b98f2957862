"""Makes vLLM know the Stack architecture: `LLM(checkpoint)` and the server find it once this package is installed.

vLLM calls :func:`register` in each of its processes, through the entry point group `vllm.general_plugins` of
pyproject.toml. Importing this module costs nothing and does not need vLLM.
"""

from __future__ import annotations


def register() -> None:
    """Registers the model class by name; vLLM imports it when a checkpoint asks for it. Safe to call again.

    The config and the tokenizer need no more than the import of this package: see `registration`.
    """
    from vllm import ModelRegistry

    if "StackForCausalLM" not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model("StackForCausalLM", "stacklm_hf.modeling.vllm_model:StackForCausalLM")


__all__ = ["register"]
