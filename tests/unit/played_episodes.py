"""Real episodes of the real loop, with a policy that writes given turns and tools that give given answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stacklm_hf.modeling.tokenization_stack import StackTokenizerFast
from stacklm_hf.protocol.encoding import encode_trusted, encode_untrusted
from stacklm_hf.protocol.tokens import END, TOOL_CALL
from stacklm_hf.protocol.wire import render_call
from stacklm_hf.rollout.episode import EpisodeSettings, run_episodes
from stacklm_hf.rollout.policy import TurnOutput, TurnRequest
from stacklm_hf.rollout.trajectory import Trajectory
from stacklm_hf.worlds.base import Task

TOKENIZER = StackTokenizerFast.from_native(Path(__file__).parents[1] / "data" / "native_tokenizer.json")
CUT = "<cut>"
"""At the end of a turn: the policy runs out of tokens there."""


def call(tool: str, thought: str = "Thought: I need it.", **args: Any) -> str:
    """A turn that calls a tool."""
    return f"{thought}\n{render_call(tool, args).removesuffix(END)}"


class GivenTurns:
    """A policy that writes the given turns, whatever it is asked."""

    name = "given"
    tokenizer = TOKENIZER
    max_context = 100_000
    sampling: dict[str, Any] = {"temperature": 0.0}  # noqa: RUF012

    def __init__(self, *turns: str) -> None:
        self.turns = turns

    async def turn(self, request: TurnRequest) -> TurnOutput:
        """The next turn; its call marker is a control token, and nothing else is."""
        text = self.turns[len(request.steps)]
        head, marker, tail = text.removesuffix(CUT).partition(TOOL_CALL)
        ids = encode_untrusted(TOKENIZER, head) + encode_trusted(TOKENIZER, marker) + encode_untrusted(TOKENIZER, tail)
        if not text.endswith(CUT):
            ids += encode_trusted(TOKENIZER, END)
        return TurnOutput(ids, [-0.5] * len(ids), [False] * len(ids))

    def release(self, episode_id: str) -> None:
        """Keeps nothing."""


class GivenObservations:
    """An environment whose tools give the given observations in turn."""

    name = "given world"
    system_prompt = "You are brief. Tools: search(query,k), calc(expr)."
    tools = ()

    def __init__(self, *observations: str) -> None:
        self.observations = observations

    @contextmanager
    def open(self, task: Task) -> Iterator[_Session]:
        """One episode's observations, from the first."""
        yield _Session(iter(self.observations))


class _Session:
    def __init__(self, observations: Iterator[str]) -> None:
        self.observations = observations

    def call(self, tool: str, arguments: dict[str, Any]) -> str:
        return next(self.observations)


def play(
    *turns: str,
    observations: tuple[str, ...] = ("[1] the layer count of Stack-100M is 30.", "60"),
    question: str = "What is the layer count of Stack-100M, multiplied by 2?",
    gold: str = "60",
    task_id: str = "t0",
    seed: int = 0,
    **settings: Any,
) -> Trajectory:
    """Plays one episode."""
    task = Task(question, gold, "double", task_id=task_id)
    limits = EpisodeSettings(**{"max_new_tokens": 1000, "forced_answer_tokens": 1000, **settings})
    (trajectory,) = run_episodes(GivenTurns(*turns), [task], GivenObservations(*observations), limits, seed=seed)
    return trajectory


SEARCH = call("search", query="Stack-100M layer count", k=2)
CALC = call("calc", "Thought: the layer count of Stack-100M is 30. Multiply it by 2.", expr="30*2")
ANSWER = "Thought: I have everything I need.\nAnswer: 60"


def good(**options: Any) -> Trajectory:
    """A search, a calculation and the right answer."""
    return play(SEARCH, CALC, ANSWER, **options)
