"""Asking a question and watching the answer come: thought, call, observation, answer.

Contract: it runs the one episode loop with a display attached. Model output and documents are untrusted: control
characters that could drive a terminal are shown, never sent.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TextIO

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from stacklm_hf.protocol.tokens import END, TOOL_CALL, control_ids
from stacklm_hf.rollout.episode import EpisodeEvents, EpisodeSettings, run_episode
from stacklm_hf.rollout.trajectory import Step, StopReason, Trajectory
from stacklm_hf.rollout.transformers_policy import TransformersPolicy
from stacklm_hf.worlds.base import Environment, Task

_DIM, _BOLD, _RESET = "\x1b[2m", "\x1b[1m", "\x1b[0m"


def printable(text: str) -> str:
    """Text with every control character but the newline made visible, so that it cannot drive a terminal."""
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)


@dataclass
class TurnPrinter:
    """Writes a turn as its tokens come, and the observation after it.

    Args:
        tokenizer: Decodes the tokens.
        out: Where to write.
        color: Use ANSI colours.
    """

    tokenizer: PreTrainedTokenizerBase
    out: TextIO = field(default_factory=lambda: sys.stdout)
    color: bool = False
    _pending: list[int] = field(default_factory=list)
    _fresh: bool = True

    def __post_init__(self) -> None:
        self._control = {token_id: token for token, token_id in control_ids(self.tokenizer).items()}

    def on_token(self, token_id: int) -> None:
        """Shows a token; bytes of a character that is not whole yet are held back."""
        marker = self._control.get(token_id)
        if marker is None:
            self._pending.append(token_id)
            text = str(self.tokenizer.decode(self._pending, clean_up_tokenization_spaces=False))
            if text.endswith("\ufffd") and len(self._pending) < 4:
                return
            self._write(printable(text))
        elif marker == TOOL_CALL:
            self._write("Call: ")
        elif marker != END:
            self._write(f" {marker} ")
        self._pending = []

    def on_step(self, step: Step) -> None:
        """Ends the turn and shows what came back."""
        if step.forced:
            self._write("(no steps left: asked to answer)")
        self.out.write("\n")
        if step.observation is not None:
            text = f"Observation: {printable(step.observation)}"
            self.out.write(f"{_DIM}{text}{_RESET}\n" if self.color else text + "\n")
        self.out.flush()

    def _write(self, text: str) -> None:
        self.out.write(text)
        self.out.flush()


async def ask(
    question: str,
    policy: TransformersPolicy,
    environment: Environment,
    *,
    settings: EpisodeSettings | None = None,
    out: TextIO | None = None,
    color: bool = False,
) -> Trajectory:
    """Runs one episode and shows it as it goes.

    Args:
        question: What to ask.
        policy: The model.
        environment: The tools.
        settings: Limits of the episode.
        out: Where to write; standard output by default.
        color: Use ANSI colours.

    Returns:
        The trajectory; its gold answer is empty, so it counts as not correct.
    """
    out = out or sys.stdout
    printer = TurnPrinter(policy.tokenizer, out, color)
    task = Task(question, gold="", kind="ask", task_id="ask", world=environment.name, split="ask")
    events = EpisodeEvents(printer.on_token, printer.on_step)
    trajectory = await run_episode(policy, task, environment, settings, events=events)
    if trajectory.stop_reason is StopReason.ANSWERED:
        text = f"=> {printable(trajectory.answer or '(empty)')}"
        text += "" if trajectory.grounded else "   (not found in any observation: do not trust it)"
    else:
        text = f"=> no answer: {trajectory.error or trajectory.stop_reason}"
        if trajectory.answer:
            text += f" (last words: {printable(trajectory.answer)})"
    out.write(f"{_BOLD}{text}{_RESET}\n" if color else text + "\n")
    return trajectory


def load_policy(
    model: str, environment: Environment, temperature: float = 0.0, grammar: bool = True
) -> TransformersPolicy:
    """A checkpoint as a policy.

    Args:
        model: Folder or Hub id.
        environment: Its tools make the grammar.
        temperature: 0 for greedy.
        grammar: Constrain the syntax of calls.

    Raises:
        ValueError: It is no checkpoint, or its tokenizer lacks the control tokens; one line says what to do.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
        network = AutoModelForCausalLM.from_pretrained(model)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"{model!r} is no checkpoint that can be loaded: {reason}") from error
    tools = environment.tools if grammar else None
    return TransformersPolicy(network, tokenizer, tools, temperature=temperature, name=model)
