"""Registers the Stack classes for transformers' Auto classes without importing torch or transformers.

`import stacklm_hf` must make `AutoModelForCausalLM.from_pretrained` work and still take well under two seconds, where
torch and transformers' Auto classes alone take longer than that. So each class is registered when transformers comes
to need it:

- the config and the tokenizer, when transformers imports the module of `AutoConfig` or `AutoTokenizer`: an import
  hook, gone once it has fired;
- the models, when the first `StackConfig` is made: an Auto class picks a model by its config. (Not when `AutoModel`'s
  module is imported: Qwen3's own module imports that one, and would be asked for its classes half loaded.)

Config and tokenizer can be imported from within transformers' imports because they depend on its base classes only.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def register_auto_classes() -> None:
    """Have every Auto class know the Stack classes from its first use on. Cheap, and safe to call again."""
    _after_import("stacklm_hf.modeling.configuration_stack", _register_models_on_first_use)
    _after_import("transformers.models.auto.configuration_auto", _register_config)
    _after_import("transformers.models.auto.tokenization_auto", _register_tokenizer)


def _register_config() -> None:
    from transformers.models.auto.configuration_auto import AutoConfig

    from stacklm_hf.modeling.configuration_stack import StackConfig

    AutoConfig.register("stack", StackConfig, exist_ok=True)


def _register_models_on_first_use() -> None:
    from stacklm_hf.modeling.configuration_stack import StackConfig

    StackConfig._before_first_use = _register_models


def _register_models() -> None:
    from transformers import AutoModel, AutoModelForCausalLM

    from stacklm_hf.modeling.configuration_stack import StackConfig
    from stacklm_hf.modeling.modeling_stack import StackForCausalLM, StackModel

    AutoModel.register(StackConfig, StackModel, exist_ok=True)
    AutoModelForCausalLM.register(StackConfig, StackForCausalLM, exist_ok=True)


def _register_tokenizer() -> None:
    from transformers.models.auto.tokenization_auto import AutoTokenizer

    from stacklm_hf.modeling.configuration_stack import StackConfig
    from stacklm_hf.modeling.tokenization_stack import StackTokenizerFast

    AutoTokenizer.register(StackConfig, tokenizer_class=StackTokenizerFast, exist_ok=True)


class _ImportHook(MetaPathFinder):
    """Calls `callback` once, right after the module `name` has been loaded by whoever finds it."""

    def __init__(self, name: str, callback: Callable[[], None]) -> None:
        self.name, self.callback = name, callback

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)  # before the search below, which would find this hook again
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load, callback = spec.loader.exec_module, self.callback

            def exec_module(module: ModuleType) -> None:
                load(module)
                callback()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _after_import(name: str, callback: Callable[[], None]) -> None:
    """Run `callback` now if the module `name` is loaded, else when it is."""
    if name in sys.modules:
        callback()
    elif not any(isinstance(finder, _ImportHook) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _ImportHook(name, callback))
