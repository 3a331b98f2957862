"""Any `transformers` causal language model as a policy: batched, with the cache kept between turns.

Contract: turns that are asked for while others run join the batch at the next token. The keys and values of an
episode stay in its slot until the episode ends, so a turn feeds only what is new. Token ids and logprobs are
those of the sampling itself. The random numbers of a turn depend on its seed alone, never on who else is in
the batch.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from stacklm_hf.protocol.grammar import TurnGrammar
from stacklm_hf.protocol.tokens import END, control_ids
from stacklm_hf.rollout.policy import TurnOutput, TurnRequest
from stacklm_hf.rollout.slot_cache import SlotCache, SlotPlan
from stacklm_hf.tools.spec import ToolSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    import xgrammar


@dataclass
class _Slot:
    """A row of the cache and the tokens whose keys and values it holds."""

    row: int
    token_ids: list[int] = field(default_factory=list)


@dataclass
class _Running:
    """A turn being written."""

    request: TurnRequest
    future: asyncio.Future[TurnOutput]
    slot: _Slot
    rng: np.random.Generator
    matcher: xgrammar.GrammarMatcher | None
    output: TurnOutput = field(default_factory=TurnOutput)

    @property
    def pending(self) -> list[int]:
        """Tokens that the slot does not hold yet."""
        held = len(self.slot.token_ids)
        prompt = self.request.token_ids
        if held < len(prompt):
            return prompt[held:]
        return self.output.token_ids[held - len(prompt) :]


class TransformersPolicy:
    """Samples turns from a model in this process.

    Args:
        model: A causal language model with full attention in every layer.
        tokenizer: Holds the nine control tokens.
        tools: Tools of the environment; they make the grammar. None samples without a grammar.
        temperature: 0 for greedy decoding.
        top_p: Mass of the nucleus, 1 for all.
        top_k: Candidates, 0 for all.
        max_batch: Episodes that hold a slot at once; others wait.
        prefill_tokens: Tokens fed in one forward when turns begin; bounds the memory of a prefill.
        name: Recorded with each episode.

    Raises:
        ValueError: The model's cache cannot be kept in slots, or an option is out of range.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[ToolSpec] | None = None,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        max_batch: int = 64,
        prefill_tokens: int = 8192,
        name: str = "student",
    ):
        if not 0 <= temperature < float("inf") or not 0 < top_p <= 1 or top_k < 0 or max_batch < 1:
            raise ValueError("temperature and top_k must be finite and >= 0, top_p in (0, 1], max_batch >= 1")
        config = model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise ValueError(f"only full attention can keep its cache between turns, this model has {sorted(kinds)}")
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.temperature, self.top_p, self.top_k = temperature, top_p, top_k
        self.max_context = int(getattr(config, "max_position_embeddings", 0) or 1 << 20)
        self.prefill_tokens = prefill_tokens
        self.end_id = control_ids(tokenizer)[END]
        width = model.get_output_embeddings().weight.shape[0]
        self.grammar = self.last_grammar = None
        if tools is not None:
            specs = [(tool.name, tool.parameters) for tool in tools]
            self.grammar = TurnGrammar(tokenizer, specs, vocab_size=width)
            self.last_grammar = TurnGrammar(tokenizer, (), vocab_size=width)
        self._cache = SlotCache(config.num_hidden_layers, max_batch)
        self._free = list(range(max_batch - 1, -1, -1))
        self._slots: dict[str, _Slot] = {}
        self._waiting: list[tuple[TurnRequest, asyncio.Future[TurnOutput]]] = []
        self._running: list[_Running] = []
        self._driver: asyncio.Task[None] | None = None

    @property
    def sampling(self) -> dict[str, Any]:
        """Settings to record with each episode."""
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "grammar": self.grammar is not None,
        }

    def release(self, episode_id: str) -> None:
        """Gives the episode's slot back."""
        slot = self._slots.pop(episode_id, None)
        if slot is not None:
            self._free.append(slot.row)
            # Low rows first: a batch of rows 0..n-1 is read without a copy.
            self._free.sort(reverse=True)

    async def turn(self, request: TurnRequest) -> TurnOutput:
        """Writes one turn; see `Policy`."""
        request.check(self.max_context)
        future: asyncio.Future[TurnOutput] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        if self._driver is None or self._driver.done():
            self._driver = asyncio.get_running_loop().create_task(self._drive())
        return await future

    async def _drive(self) -> None:
        """Steps the batch until no turn is left. One pass of the event loop between steps lets the episodes
        whose turn has just ended run their tool and hand in the next turn."""
        was_training = self.model.training
        self.model.eval()
        try:
            while True:
                await asyncio.sleep(0)
                self._running = [turn for turn in self._running if not turn.future.done()]
                self._waiting = [(request, future) for request, future in self._waiting if not future.done()]
                if not self._running and not self._waiting:
                    return
                with torch.inference_mode():
                    self._step()
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self.model.train(was_training)

    def _fail(self, error: BaseException) -> None:
        """Every open turn learns of the fault, so that no episode waits for ever."""
        pending = [(turn.request, turn.future) for turn in self._running] + self._waiting
        self._running, self._waiting = [], []
        for request, future in pending:
            if not future.done():
                fault = RuntimeError(f"the engine failed in episode {request.episode_id}: {error!r}")
                fault.__cause__ = error
                future.set_exception(fault)

    def _step(self) -> None:
        decoding = list(self._running)
        starting = self._admit()
        if starting:
            starting.sort(key=lambda turn: len(turn.pending))
            for batch in self._prefill_batches(starting):
                self._forward(batch)
        elif decoding:
            decoding.sort(key=lambda turn: turn.slot.row)
            self._forward(decoding)

    def _admit(self) -> list[_Running]:
        """Turns that have a slot, or get one, begin."""
        started: list[_Running] = []
        waiting = []
        for request, future in self._waiting:
            slot = self._slots.get(request.episode_id)
            if slot is None:
                if not self._free:
                    waiting.append((request, future))
                    continue
                slot = self._slots[request.episode_id] = _Slot(self._free.pop())
            if slot.token_ids != request.token_ids[: len(slot.token_ids)] or len(slot.token_ids) >= len(
                request.token_ids
            ):
                slot.token_ids = []
            grammar = self.last_grammar if request.last else self.grammar
            matcher = grammar.matcher() if grammar is not None else None
            started.append(_Running(request, future, slot, np.random.default_rng(request.seed), matcher))
        self._waiting = waiting
        self._running.extend(started)
        return started

    def _prefill_batches(self, turns: list[_Running]) -> list[list[_Running]]:
        """Turns of like length together, each batch within the token budget."""
        batches: list[list[_Running]] = []
        for turn in turns:
            width = len(turn.pending)  # turns come in rising order, so this is the width of the batch
            if batches and width * (len(batches[-1]) + 1) <= self.prefill_tokens:
                batches[-1].append(turn)
            else:
                batches.append([turn])
        return batches

    def _forward(self, turns: list[_Running]) -> None:
        """Feeds what is pending of each turn and samples its next token."""
        pending = [turn.pending for turn in turns]
        plan = SlotPlan(
            [turn.slot.row for turn in turns],
            [len(turn.slot.token_ids) for turn in turns],
            [len(ids) for ids in pending],
        )
        self._cache.prepare(plan)
        input_ids = torch.tensor([[0] * (plan.width - len(ids)) + ids for ids in pending])
        device, dtype = self.model.device, self.model.dtype
        output = self.model(
            input_ids=input_ids.to(device),
            attention_mask=plan.attention_mask(dtype).to(device),
            position_ids=plan.position_ids().to(device),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        for turn, ids in zip(turns, pending, strict=True):
            turn.slot.token_ids.extend(ids)
        self._sample(turns, output.logits[:, -1].float().cpu())

    def _sample(self, turns: list[_Running], logits: torch.Tensor) -> None:
        """Chooses the next token of each turn from logits of shape (batch, vocabulary)."""
        if self.temperature > 0:
            logits = logits / self.temperature
        normalizer = logits.logsumexp(-1)
        masked, forced = self._constrain(turns, logits)
        if self.temperature > 0:
            uniforms = torch.tensor([turn.rng.random() for turn in turns], dtype=torch.float64)
            chosen = _sample_rows(masked, uniforms, self.top_p, self.top_k)
        else:
            chosen = masked.argmax(-1)
        logprobs = logits.gather(-1, chosen[:, None])[:, 0] - normalizer
        for turn, token_id, logprob, is_forced in zip(turns, chosen.tolist(), logprobs.tolist(), forced, strict=True):
            self._take(turn, token_id, logprob, is_forced)

    def _constrain(self, turns: list[_Running], logits: torch.Tensor) -> tuple[torch.Tensor, list[bool]]:
        """Logits with what the grammar forbids at -inf, and where it leaves one choice."""
        if self.grammar is None:
            return logits, [False] * len(turns)
        import xgrammar

        bitmask = xgrammar.allocate_token_bitmask(len(turns), self.grammar.vocab_size)
        for row, turn in enumerate(turns):
            assert turn.matcher is not None
            turn.matcher.fill_next_token_bitmask(bitmask, row)
        masked = logits.clone()
        xgrammar.apply_token_bitmask_inplace(masked, bitmask)
        counts = np.bitwise_count(bitmask.numpy().view(np.uint32)).sum(-1)
        return masked, (counts == 1).tolist()

    def _take(self, turn: _Running, token_id: int, logprob: float, forced: bool) -> None:
        turn.output.token_ids.append(token_id)
        turn.output.logprobs.append(logprob)
        turn.output.forced.append(forced)
        if turn.matcher is not None and not turn.matcher.accept_token(token_id):
            raise RuntimeError(f"the grammar refuses token {token_id} that it had allowed")
        if turn.request.on_token is not None:
            turn.request.on_token(token_id)
        if token_id == self.end_id or len(turn.output.token_ids) >= turn.request.max_new_tokens:
            self._running.remove(turn)
            if not turn.future.done():
                turn.future.set_result(turn.output)


def _sample_rows(logits: torch.Tensor, uniforms: torch.Tensor, top_p: float, top_k: int) -> torch.Tensor:
    """Draws one token a row by inverting the cumulative distribution at the row's own uniform number.

    The distribution is accumulated in id order: in order of probability, rounding could swap two tokens of the
    tail, and with them the draw.

    Args:
        logits: Shape (batch, vocabulary), scaled by the temperature.
        uniforms: Shape (batch,), each in [0, 1).
    """
    probabilities = logits.double().softmax(-1)
    if top_k or top_p < 1:
        descending, order = probabilities.sort(-1, descending=True)
        # A token stays while the mass before it is below top_p; the first always does.
        dropped = descending.cumsum(-1) - descending >= top_p
        if top_k:
            dropped[:, top_k:] = True
        probabilities = probabilities.masked_fill(dropped.scatter(-1, order, dropped), 0)
    cumulative = probabilities.cumsum(-1)
    drawn = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)
    # Rounding may carry a draw past the last token that is possible.
    last = torch.where(probabilities > 0, torch.arange(probabilities.shape[-1]), 0).amax(-1, keepdim=True)
    return torch.minimum(drawn, last)[:, 0]
