"""A vLLM engine in this process: requests in, tokens with their exact logprobs out, weights pushed between.

Contract: everything that touches the engine runs in one thread of its own, in order, and has a time limit, so
that an engine that hangs is reported and never waited for. Every fault leaves the engine marked as failed; what
it held is lost, and a later use says so at once.

Logprobs are not asked of vLLM: it applies the grammar to the logits before it takes any of its logprobs (raw ones
too), and the temperature only to those after top-k and top-p. They are computed here, from the logits as the model
gave them, in a forward hook on vLLM's logits processor, which runs before the grammar is applied.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from transformers import AutoModelForCausalLM

from stacklm_hf.rollout.vllm_build import build_llm, close_llm

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams

_R = TypeVar("_R")


@dataclass(frozen=True)
class Token:
    """One sampled token.

    Args:
        request_id: The request that it belongs to.
        token_id: The token.
        logprob: Its log-probability in nats, without the grammar and at the engine's temperature.
        finish_reason: vLLM's reason where it is the request's last token, else None.
    """

    request_id: str
    token_id: int
    logprob: float
    finish_reason: str | None = None


@dataclass
class StepOutput:
    """What one step gave.

    Args:
        tokens: A token of each request that got one.
        failed: What the engine said of requests that it did not take or ended without a token, by id.
    """

    tokens: list[Token] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


class EngineThread:
    """Runs calls one after another in a daemon thread, so that a call that hangs cannot hold up the process."""

    def __init__(self, name: str = "vllm-engine") -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=_run_jobs, args=(self._jobs,), name=name, daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    def submit(self, function: Callable[[], _R]) -> Future[_R]:
        """Queues a call."""
        future: Future[_R] = Future()
        self._jobs.put((future, function))
        return future


def _run_jobs(jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (job := jobs.get()) is not None:
        future, function = job
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
        del job, future, function  # hold on to nothing while waiting


class VLLMEngine:
    """vLLM, step by step.

    Args:
        model: A checkpoint's folder or Hub name, or an `LLM` that runs in this process.
        temperature: Temperature of the logprobs; 0 is read as 1, as greedy decoding does not scale.
        timeout: Seconds that a call to the engine may take, once it is built.
        **options: Arguments of `vllm.LLM`; none with an `LLM`.

    Raises:
        ImportError: vLLM is not installed.
        ValueError: The `LLM` cannot be driven from here; the message says what to change.
    """

    def __init__(
        self, model: str | os.PathLike[str] | LLM, temperature: float = 0.0, timeout: float = 600.0, **options: Any
    ) -> None:
        self.timeout = timeout
        self.failure: str | None = None
        self._temperature = temperature or 1.0
        self._thread = EngineThread()
        self._request_ids: dict[str, str] = {}  # vLLM's own id of a request to ours
        self._rows: dict[str, int] = {}  # of the last step, by vLLM's id
        self._logprobs = torch.empty(0)
        if isinstance(model, str | os.PathLike):
            path = model
            self.llm: LLM = self.submit(lambda: build_llm(path, **options)).result()
        elif options:
            raise ValueError(f"{', '.join(options)}: an engine that is built already takes no options")
        else:
            self.llm = model
        self._runner = _model_runner(self.llm)
        self.call(lambda: _use_device(self._runner.device))
        self._expected = _expected_tensors(self.llm)
        core = self.llm.llm_engine.engine_core.engine_core
        # One batch at a time, where vLLM would have the next one under way (async scheduling): the logits of a step are
        # then those of the tokens that it returns.
        core.step_fn = core.step
        # Else a grammar is made while others step, and each turn joins a step late; there are but two, both cached.
        core.structured_output_manager._use_async_grammar_compilation = False

    @property
    def max_context(self) -> int:
        """Tokens of a prompt and its answer together."""
        return int(self.llm.llm_engine.model_config.max_model_len)

    @property
    def end_ids(self) -> set[int]:
        """Ids at which vLLM lets a grammar end: the tokenizer's and those of the generation config."""
        config = self.llm.llm_engine.model_config.try_get_generation_config()
        ids = config.get("eos_token_id") or []
        return {self.llm.get_tokenizer().eos_token_id, *([ids] if isinstance(ids, int) else ids)}

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return int(self.llm.llm_engine.model_config.get_vocab_size())

    def submit(self, function: Callable[[], _R]) -> Future[_R]:
        """Queues a call for the engine's thread.

        Raises:
            RuntimeError: The engine failed before, or was closed.
        """
        if self.failure is not None:
            raise RuntimeError(f"the engine cannot be used any more ({self.failure}): build a new one")
        return self._thread.submit(function)

    def call(self, function: Callable[[], _R]) -> _R:
        """Runs a call in the engine's thread and waits for it, as long as the time limit allows."""
        try:
            return self.submit(function).result(self.timeout)
        except TimeoutError as error:
            self.failure = f"no answer in {self.timeout:g} s"
            raise TimeoutError(f"the engine gave no answer in {self.timeout:g} s") from error

    def close(self) -> None:
        """Ends the engine, so that another one can be built; see `close_llm`."""
        self.call(lambda: close_llm(self.llm))
        self.failure = "it was closed"

    def step(self, new: list[tuple[str, list[int], SamplingParams]], dropped: list[str]) -> StepOutput:
        """Takes requests in, lets others go, and makes one token for each that is ready. Runs in the engine's thread.

        Args:
            new: Id, prompt and parameters (of output kind DELTA) of each new request.
            dropped: Ids of requests that nobody waits for any more.
        """
        from vllm.exceptions import VLLMValidationError
        from vllm.inputs import tokens_input

        engine, output = self.llm.llm_engine, StepOutput()
        self.drop(dropped)
        for request_id, token_ids, parameters in new:
            try:
                internal = engine.add_request(request_id, tokens_input(token_ids), parameters)
            except (VLLMValidationError, ValueError, TypeError) as error:
                output.failed[request_id] = str(error)
            else:
                self._request_ids[internal] = request_id
        if not engine.has_unfinished_requests():
            return output
        hook = self._runner.get_model().logits_processor.register_forward_hook(self._keep_logprobs)
        try:
            results = engine.step()
        finally:
            hook.remove()
        self._read(results, output)
        return output

    def _keep_logprobs(self, module: torch.nn.Module, arguments: Any, logits: torch.Tensor) -> None:
        """Keeps log-softmax(logits / temperature), a row for each request of the batch, shape (batch, vocabulary)."""
        ids = self._runner.input_batch.req_ids
        if len(ids) != len(logits):
            raise RuntimeError(f"vLLM computed {len(logits)} rows of logits for {len(ids)} requests")
        self._rows = {internal: row for row, internal in enumerate(ids)}
        self._logprobs = (logits.float() / self._temperature).log_softmax(-1)

    def _read(self, results: list[Any], output: StepOutput) -> None:
        """Sorts vLLM's outputs into tokens and failures."""
        internal_ids = {ours: internal for internal, ours in self._request_ids.items()}
        rows, chosen, ended = [], [], []
        for result in results:
            internal = internal_ids.get(result.request_id)
            if internal is None:
                continue  # dropped before
            (completion,) = result.outputs
            ids, reason = list(completion.token_ids), completion.finish_reason
            if len(ids) != 1 or reason not in (None, "stop", "length"):
                output.failed[result.request_id] = f"it got {len(ids)} tokens in one step and ended with {reason!r}"
                continue
            rows.append(self._rows[internal])
            chosen.append(ids[0])
            ended.append((result.request_id, reason))
            if result.finished:
                del self._request_ids[internal]
        logprobs = self._logprobs[rows, chosen].tolist() if rows else []
        for (request_id, reason), token_id, logprob in zip(ended, chosen, logprobs, strict=True):
            output.tokens.append(Token(request_id, token_id, logprob, reason))
        self.drop(output.failed)

    def drop(self, request_ids: Iterable[str]) -> None:
        """Lets requests go that have not ended. Runs in the engine's thread."""
        gone = set(request_ids)
        internal = [internal for internal, ours in self._request_ids.items() if ours in gone]
        if internal:
            self.llm.llm_engine.abort_request(internal, internal=True)
        for name in internal:
            del self._request_ids[name]

    def push_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Gives the engine new weights and forgets the cached prefixes of the old ones.

        Args:
            named_tensors: All parameters of the transformers model under its own names, any dtype and device.

        Raises:
            ValueError: Tensors are missing, unknown or of the wrong shape; the engine keeps its weights.
            RuntimeError: Turns are being written, or the engine failed; its weights are then undefined.
            TimeoutError: It gave no answer in time.
        """
        tensors = self._checked(named_tensors)
        if self.call(self.llm.llm_engine.has_unfinished_requests):
            raise RuntimeError("weights cannot change while turns are being written; nothing was pushed")
        try:
            self.call(lambda: self._load(tensors))
        except Exception as error:
            self.failure = self.failure or f"pushing weights: {error!r}"
            raise

    def _checked(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        shapes, aliases = self._expected
        tensors = {name: tensor.detach() for name, tensor in named_tensors if name not in aliases}
        missing, unknown = sorted(shapes.keys() - tensors.keys()), sorted(tensors.keys() - shapes.keys())
        misfits = [name for name in shapes.keys() & tensors.keys() if shapes[name] != tensors[name].shape]
        for what, names in (("missing", missing), ("not of this model", unknown), ("of another shape", misfits)):
            if names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                raise ValueError(f"weights {what}: {', '.join(names[:3])}{more}; nothing was pushed")
        return tensors

    def _load(self, tensors: dict[str, torch.Tensor]) -> None:
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(tensors.items())})
        self.llm.apply_model(_repack_head)
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("the cached prefixes of the old weights could not be dropped")


def _model_runner(llm: LLM) -> Any:
    """The model runner of an engine that can be driven from here.

    Raises:
        ValueError: It cannot; the message says what to change.
    """
    engine = llm.llm_engine
    config = engine.vllm_config
    worker = getattr(getattr(engine, "model_executor", None), "driver_worker", None)
    runner = getattr(worker, "model_runner", None)
    if runner is None or config.parallel_config.world_size > 1:
        raise ValueError("the engine must run in this process: set VLLM_ENABLE_V1_MULTIPROCESSING=0 before it is built")
    if runner.device.type == "cpu" and config.scheduler_config.enable_chunked_prefill:
        raise ValueError(
            "seeded requests read in chunks crash on a CPU: build the engine with enable_chunked_prefill=False"
        )
    if config.speculative_config is not None:
        raise ValueError("the engine guesses several tokens at once: build it without a speculative_config")
    if config.use_v2_model_runner:
        raise ValueError(
            "vLLM's second model runner is not supported: set VLLM_USE_V2_MODEL_RUNNER=0 before it is built"
        )
    if not hasattr(runner.get_model(), "logits_processor"):
        raise ValueError(f"{type(runner.get_model()).__name__} has no logits_processor to take the logits from")
    return runner


def _use_device(device: torch.device) -> None:
    """An accelerator is chosen for each thread."""
    from vllm.platforms import current_platform

    current_platform.set_device(device)


def _expected_tensors(llm: LLM) -> tuple[dict[str, torch.Size], set[str]]:
    """Shape of every parameter under the names of transformers, and the names that are only aliases (a tied head)."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(llm.llm_engine.model_config.hf_config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    return shapes, set(model.state_dict()) - shapes.keys()


def _repack_head(model: torch.nn.Module) -> None:
    """Packs a tied head again. On a CPU vLLM multiplies by a packed copy of it, which a reload leaves as it was: the
    tensor has been loaded as the embedding's."""
    head = getattr(model, "lm_head", None)
    if hasattr(head, "cpu_linear"):
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        dispatch_cpu_unquantized_gemm(head, remove_weight=False)


__all__ = ["EngineThread", "StepOutput", "Token", "VLLMEngine"]
