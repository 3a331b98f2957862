"""What vLLM support is where vLLM is not: nothing to import, nothing to pay, and a clear word on what is missing."""

import gc
import subprocess
import sys
import threading
import time
from importlib.metadata import entry_points
from types import ModuleType

import pytest

from stacklm_hf.modeling.vllm_plugin import register
from stacklm_hf.rollout.vllm_build import build_llm
from stacklm_hf.rollout.vllm_engine import EngineThread
from stacklm_hf.rollout.vllm_policy import VLLMPolicy


def test_importing_the_plugin_and_the_policy_does_not_import_vllm():
    code = (
        "import stacklm_hf.modeling.vllm_plugin, sys; assert 'torch' not in sys.modules\n"
        "import stacklm_hf.rollout.vllm_policy; assert 'vllm' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_vllm_finds_the_plugin_by_its_entry_point():
    (found,) = entry_points(group="vllm.general_plugins", name="stacklm_hf")
    assert found.load() is register


def test_the_architecture_is_registered_once_and_by_name(monkeypatch):
    class ModelRegistry:
        known: dict[str, str] = {}  # noqa: RUF012

        @classmethod
        def get_supported_archs(cls):
            return cls.known.keys()

        @classmethod
        def register_model(cls, name, model):
            assert name not in cls.known
            cls.known[name] = model

    fake = ModuleType("vllm")
    fake.ModelRegistry = ModelRegistry
    monkeypatch.setitem(sys.modules, "vllm", fake)
    register()
    register()
    assert ModelRegistry.known == {"StackForCausalLM": "stacklm_hf.modeling.vllm_model:StackForCausalLM"}


def test_without_vllm_the_policy_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    for build in (build_llm, VLLMPolicy):
        with pytest.raises(ImportError, match=r"pip install .stacklm-hf\[vllm\]"):
            build("no-such-checkpoint")


class TestEngineThread:
    def test_calls_run_in_order_in_one_thread_of_their_own(self):
        thread, seen = EngineThread(), []
        futures = [thread.submit(lambda n=n: seen.append((n, threading.get_ident()))) for n in range(20)]
        futures[-1].result(10)
        assert [number for number, _ in seen] == list(range(20))
        assert len({ident for _, ident in seen} | {threading.get_ident()}) == 2

    def test_an_error_comes_back_and_the_next_call_runs(self):
        thread = EngineThread()
        failed, fine = thread.submit(lambda: 1 / 0), thread.submit(lambda: 7)
        with pytest.raises(ZeroDivisionError):
            failed.result(10)
        assert fine.result(10) == 7

    def test_a_call_that_was_cancelled_does_not_run(self):
        thread, go, seen = EngineThread(), threading.Event(), []
        thread.submit(lambda: go.wait(10))
        cancelled = thread.submit(lambda: seen.append(1))
        assert cancelled.cancel()
        go.set()
        thread.submit(lambda: None).result(10)
        assert not seen

    def test_it_ends_with_its_owner(self):
        name = "engine-thread-of-this-test"
        thread = EngineThread(name)
        thread.submit(lambda: None).result(10)
        assert any(running.name == name for running in threading.enumerate())
        del thread
        gc.collect()
        deadline = time.monotonic() + 10
        while any(running.name == name for running in threading.enumerate()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
