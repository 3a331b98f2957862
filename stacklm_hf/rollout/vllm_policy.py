"""vLLM as a policy: an engine in this process, kept full, that each episode joins again as soon as its turn ends.

Contract: token ids are those that vLLM sampled, verbatim, the closing `<|end|>` included. Logprobs are those of
`Trajectory.logprobs`: at the sampling temperature, without the grammar (see `vllm_engine` for how). The grammar is
the structural tag of the whole turn, given to vLLM's structured outputs. A turn's random numbers depend on its seed
alone; its logits depend on who else is in the batch by the rounding of float arithmetic, no more.

A request that the engine refuses or breaks off ends its episode with :class:`PolicyError`. An engine that fails,
or makes no token within the time limit, ends the run; the error names the episode. Needs vLLM (`stacklm-hf[vllm]`).
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from stacklm_hf.protocol.grammar import TurnGrammar
from stacklm_hf.protocol.tokens import END, control_ids
from stacklm_hf.rollout.policy import PolicyError, TurnOutput, TurnRequest
from stacklm_hf.rollout.vllm_engine import StepOutput, Token, VLLMEngine
from stacklm_hf.tools.spec import ToolSpec

if TYPE_CHECKING:
    import xgrammar
    from vllm import LLM, SamplingParams

# vLLM raises lower temperatures to this one.
_LOWEST_TEMPERATURE = 0.01
# Between steps that made no token (a grammar is being compiled), so that waiting takes no core.
_IDLE_SECONDS = 0.002


@dataclass
class _Running:
    """A turn being written."""

    request: TurnRequest
    future: asyncio.Future[TurnOutput]
    matcher: xgrammar.GrammarMatcher | None
    output: TurnOutput = field(default_factory=TurnOutput)


class VLLMPolicy:
    """Samples turns from a vLLM engine in this process.

    Args:
        model: A checkpoint's folder or Hub name, or an `LLM` in this process (`vllm_build.build_llm` builds one).
        tokenizer: Holds the nine control tokens; the checkpoint's own by default.
        tools: Tools of the environment; they make the grammar. None samples without a grammar.
        temperature: 0 for greedy decoding, else from 0.01 to 2.
        top_p: Mass of the nucleus, 1 for all.
        top_k: Candidates, 0 for all.
        timeout: Seconds without a token after which the engine counts as failed.
        name: Recorded with each episode.
        **options: Arguments of `vllm.LLM`, e.g. `dtype`, `max_num_seqs` (turns written at once) or
            `gpu_memory_utilization`.

    Raises:
        ImportError: vLLM is not installed.
        ValueError: An option is out of range, or the `LLM` cannot be driven from here.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | LLM,
        tokenizer: PreTrainedTokenizerBase | None = None,
        tools: Sequence[ToolSpec] | None = None,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        timeout: float = 600.0,
        name: str = "student",
        **options: Any,
    ):
        if (temperature and not _LOWEST_TEMPERATURE <= temperature <= 2) or not 0 < top_p <= 1 or top_k < 0:
            raise ValueError("temperature must be 0 or in [0.01, 2], top_p in (0, 1], top_k >= 0")
        self.temperature, self.top_p, self.top_k, self.name = temperature, top_p, top_k, name
        self.engine = VLLMEngine(model, temperature, timeout, **options)
        self.tokenizer = tokenizer or AutoTokenizer.from_pretrained(self.engine.llm.llm_engine.model_config.tokenizer)
        self.max_context = self.engine.max_context
        self.end_id = control_ids(self.tokenizer)[END]
        self.grammar = self.last_grammar = None
        if tools is not None:
            if self.engine.end_ids != {self.end_id}:
                raise ValueError(
                    f"tokenizer and generation config end at {sorted(self.engine.end_ids)}, a turn at {self.end_id}: "
                    f"let both end at {END} alone, as add_agent_tokens does"
                )
            specs = [(tool.name, tool.parameters) for tool in tools]
            self.grammar = TurnGrammar(self.tokenizer, specs, vocab_size=self.engine.vocab_size)
            self.last_grammar = TurnGrammar(self.tokenizer, (), vocab_size=self.engine.vocab_size)
        self._turns = 0
        self._waiting: list[_Running] = []
        self._running: dict[str, _Running] = {}  # by the id of the request
        self._driver: asyncio.Task[None] | None = None

    @property
    def sampling(self) -> dict[str, Any]:
        """Settings to record with each episode."""
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "grammar": self.grammar is not None,
            "engine": "vllm",
        }

    def release(self, episode_id: str) -> None:
        """Nothing to do: vLLM keeps the prefixes of an episode, and drops them when it needs their room."""

    def push_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Gives the engine new weights, e.g. `model.named_parameters()`; see `VLLMEngine.push_weights`."""
        self.engine.push_weights(named_tensors)

    async def turn(self, request: TurnRequest) -> TurnOutput:
        """Writes one turn; see `Policy`."""
        request.check(self.max_context)
        grammar = self.last_grammar if request.last else self.grammar
        loop = asyncio.get_running_loop()
        turn = _Running(request, loop.create_future(), grammar.matcher() if grammar is not None else None)
        self._waiting.append(turn)
        if self._driver is None or self._driver.done():
            self._driver = loop.create_task(self._drive())
        return await turn.future

    async def _drive(self) -> None:
        """Steps the engine until no turn is left. While it works, and between steps, the episodes whose turn has
        ended run their tool and hand in the next turn, which joins at the next step."""
        last_token = time.monotonic()
        try:
            while True:
                await asyncio.sleep(0)
                dropped = [name for name, turn in self._running.items() if turn.future.done()]
                for name in dropped:
                    del self._running[name]
                self._waiting = [turn for turn in self._waiting if not turn.future.done()]
                if not (self._running or self._waiting or dropped):
                    return
                output = await self._step(dropped)
                if output.tokens or output.failed:
                    last_token = time.monotonic()
                    self._give(output)
                elif self._running:
                    if time.monotonic() - last_token > self.engine.timeout:
                        raise self._engine_fault(TimeoutError(f"no token in {self.engine.timeout:g} s"))
                    await asyncio.sleep(_IDLE_SECONDS)
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._abandon()

    async def _step(self, dropped: list[str]) -> StepOutput:
        new = []
        for turn in self._waiting:
            name = f"{turn.request.episode_id}#{self._turns}"
            self._turns += 1
            self._running[name] = turn
            new.append((name, turn.request.token_ids, self._parameters(turn.request)))
        self._waiting = []
        future = asyncio.wrap_future(self.engine.submit(lambda: self.engine.step(new, dropped)))
        done, _ = await asyncio.wait([future], timeout=self.engine.timeout)
        if not done:
            raise self._engine_fault(TimeoutError(f"no answer in {self.engine.timeout:g} s"))
        if (error := future.exception()) is not None:
            raise self._engine_fault(error)
        return future.result()

    def _engine_fault(self, error: BaseException) -> BaseException:
        """Marks the engine as failed, unless it was already."""
        self.engine.failure = self.engine.failure or repr(error)
        return error

    def _parameters(self, request: TurnRequest) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        grammar = self.last_grammar if request.last else self.grammar
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=request.seed % 2**63,
            max_tokens=request.max_new_tokens,
            stop_token_ids=[self.end_id],
            ignore_eos=True,  # the end of a turn is <|end|>, whatever else the generation config may name
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            structured_outputs=grammar and StructuredOutputsParams(structural_tag=json.dumps(grammar.tag)),
        )

    def _give(self, output: StepOutput) -> None:
        for token in output.tokens:
            turn = self._running.get(token.request_id)
            if turn is not None:
                self._take(turn, token)
        for name, reason in output.failed.items():
            turn = self._running.pop(name, None)
            if turn is not None and not turn.future.done():
                episode = turn.request.episode_id
                turn.future.set_exception(PolicyError(f"the engine failed the request of episode {episode}: {reason}"))

    def _take(self, turn: _Running, token: Token) -> None:
        turn.output.token_ids.append(token.token_id)
        turn.output.logprobs.append(token.logprob)
        turn.output.forced.append(self._is_forced(turn.matcher, token.token_id))
        if turn.request.on_token is not None:
            turn.request.on_token(token.token_id)
        if token.finish_reason is not None:
            del self._running[token.request_id]
            if not turn.future.done():
                turn.future.set_result(turn.output)

    def _is_forced(self, matcher: xgrammar.GrammarMatcher | None, token_id: int) -> bool:
        """Whether the grammar left this token as the only choice; moves the matcher past it."""
        if matcher is None:
            return False
        import xgrammar

        bitmask = xgrammar.allocate_token_bitmask(1, self.engine.vocab_size)
        matcher.fill_next_token_bitmask(bitmask)
        if not matcher.accept_token(token_id):
            raise RuntimeError(f"the engine chose token {token_id}, which the grammar refuses")
        return int(np.bitwise_count(bitmask.numpy().view(np.uint32)).sum()) == 1

    def _fail(self, error: BaseException) -> None:
        """Every open turn learns of the fault, so that no episode waits for ever."""
        for turn in [*self._running.values(), *self._waiting]:
            if not turn.future.done():
                fault = RuntimeError(f"the engine failed in episode {turn.request.episode_id}: {error!r}")
                fault.__cause__ = error
                turn.future.set_exception(fault)

    def _abandon(self) -> None:
        """Lets go what is left in the engine: of a run that was interrupted, or of a fault."""
        left = list(self._running)
        self._running, self._waiting = {}, []
        if left and self.engine.failure is None:
            self.engine.submit(lambda: self.engine.drop(left))


__all__ = ["VLLMPolicy"]
