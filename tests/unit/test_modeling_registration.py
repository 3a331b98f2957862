"""`import stacklm_hf` costs nothing, and its names load on first use."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

import stacklm_hf
import stacklm_hf.modeling


def test_importing_the_package_imports_neither_torch_nor_transformers():
    code = "import sys, stacklm_hf; print({'torch', 'transformers'} & set(sys.modules))"
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert time.perf_counter() - start < 2
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("module", [stacklm_hf, stacklm_hf.modeling], ids=lambda module: module.__name__)
def test_every_public_name_loads_and_no_other(module):
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'StackGPT'"):
        module.StackGPT  # noqa: B018
