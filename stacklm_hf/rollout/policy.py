"""What a policy is: it gets everything written so far and returns the tokens of one turn.

Contract: the ids of a :class:`TurnOutput` are those that the policy chose, verbatim, its closing `<|end|>`
included where it chose one. A policy that cannot go on for one episode raises :class:`PolicyError`; the loop
ends that episode with `StopReason.ERROR` and goes on. Any other exception is a fault and ends the run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from stacklm_hf.rollout.trajectory import Step
from stacklm_hf.worlds.base import Task


class PolicyError(RuntimeError):
    """The policy cannot go on with this one episode."""


@dataclass(frozen=True)
class TurnRequest:
    """One turn to write.

    Args:
        episode_id: Requests of one episode share it, so that an engine can keep their cache.
        token_ids: The episode so far; ends where the policy goes on.
        max_new_tokens: Budget of the turn.
        seed: Seed of this turn's sampling; the same request and seed give the same turn.
        task: The task; only a scripted policy may read its key.
        steps: The turns so far.
        last: The harness demands a final answer: a call is not possible in this turn.
        on_token: Called with each id as it is chosen, for display.
    """

    episode_id: str
    token_ids: list[int]
    max_new_tokens: int
    seed: int
    task: Task
    steps: tuple[Step, ...] = ()
    last: bool = False
    on_token: Callable[[int], None] | None = None

    def check(self, max_context: int) -> None:
        """Raises PolicyError unless a model with a context of `max_context` tokens can serve the request."""
        if not self.token_ids or self.max_new_tokens < 1:
            raise PolicyError("a turn needs a prompt and a budget of at least one token")
        if len(self.token_ids) + self.max_new_tokens > max_context:
            raise PolicyError(f"prompt and budget exceed the model's context of {max_context} tokens")


@dataclass
class TurnOutput:
    """The tokens of one turn.

    Args:
        token_ids: Chosen ids, shape (n,).
        logprobs: See `Trajectory.logprobs`, shape (n,).
        forced: True where the grammar left one choice, shape (n,).
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    forced: list[bool] = field(default_factory=list)


class Policy(Protocol):
    """Anything that writes turns: a teacher, a student, a scripted key reader."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    max_context: int

    @property
    def sampling(self) -> dict[str, Any]:
        """Settings to record with each episode."""
        ...

    async def turn(self, request: TurnRequest) -> TurnOutput:
        """Writes one turn."""
        ...

    def release(self, episode_id: str) -> None:
        """The episode is over; drops what was kept for it."""
        ...
