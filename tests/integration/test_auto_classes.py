"""`import stacklm_hf` is enough for the Auto classes, whatever was imported before it or comes after."""

from __future__ import annotations

import subprocess
import sys

import pytest

USE = """
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING
config = AutoConfig.for_model("stack", num_hidden_layers=1, vocab_size=64, hidden_size=16)
for known in (type(config), type(AutoModel.from_config(config)), type(AutoModelForCausalLM.from_config(config)),
              TOKENIZER_MAPPING[type(config)]):
    print(known.__module__, known.__name__)
import sys
print("hooks left:", sum("stacklm_hf" in type(finder).__module__ for finder in sys.meta_path))
"""
EXPECTED = """\
stacklm_hf.modeling.configuration_stack StackConfig
stacklm_hf.modeling.modeling_stack StackModel
stacklm_hf.modeling.modeling_stack StackForCausalLM
stacklm_hf.modeling.tokenization_stack StackTokenizerFast
hooks left: 0
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "imports",
    [
        "import stacklm_hf",
        "from transformers import AutoModelForCausalLM, AutoTokenizer; import stacklm_hf",
        # Modules that import AutoConfig's or AutoModel's while they are half loaded themselves.
        "import stacklm_hf; from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer",
    ],
)
def test_auto_classes_know_the_architecture(imports):
    assert run(imports + USE) == EXPECTED


def test_a_config_made_before_any_auto_class_was_imported():
    code = """
from stacklm_hf.modeling.configuration_stack import StackConfig
config = StackConfig(num_hidden_layers=1, vocab_size=64, hidden_size=16)
from transformers import AutoModelForCausalLM
print(type(AutoModelForCausalLM.from_config(config)).__name__)
"""
    assert run(code) == "StackForCausalLM\n"
