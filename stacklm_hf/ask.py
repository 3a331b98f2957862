"""Asking a question and watching the answer come: thought, call, observation, answer.

Contract: it runs the one episode loop with a display attached. Model output and documents are untrusted: control
characters that could drive a terminal are shown, never sent.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass, field
from typing import TextIO

import torch
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
    _plain: list[int] = field(default_factory=list)
    _shown: str = ""
    _held: int = 0

    def __post_init__(self) -> None:
        self._control = {token_id: token for token, token_id in control_ids(self.tokenizer).items()}

    def on_token(self, token_id: int) -> None:
        """Shows a token; bytes of a character that is not whole yet are held back."""
        marker = self._control.get(token_id)
        if marker is None:
            self._plain.append(token_id)
            self._held += 1
            text = self._decode()
            # No character has more than four bytes: what stays broken for longer is no beginning of one.
            if not text.endswith("\ufffd") or self._held >= 4:
                self._show(text)
            return
        self._end_text()
        if marker == TOOL_CALL:
            self._write("Call: ")
        elif marker != END:
            self._write(f" {marker} ")

    def on_step(self, step: Step) -> None:
        """Ends the turn and shows what came back."""
        self._end_text()
        if step.forced:
            self._write("(no steps left: asked to answer)")
        self.out.write("\n")
        if step.observation is not None:
            text = f"Observation: {printable(step.observation)}"
            self.out.write(f"{_DIM}{text}{_RESET}\n" if self.color else text + "\n")
        self.out.flush()

    def _decode(self) -> str:
        """The text since the last marker. Whole, because many tokenizers drop the blank in front of a first token."""
        return str(self.tokenizer.decode(self._plain, clean_up_tokenization_spaces=False))

    def _show(self, text: str) -> None:
        self._write(printable(text[len(self._shown) :]))
        self._shown, self._held = text, 0

    def _end_text(self) -> None:
        """Shows what is still held back, and begins anew."""
        self._show(self._decode())
        self._plain, self._shown = [], ""

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
    """A checkpoint as a policy, named by its path and a digest of its weights: a model that was trained on is another.

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
    except Exception as error:  # Whatever a broken file makes the libraries raise: KeyError, SafetensorError, ...
        reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise ValueError(f"{model!r} is no checkpoint that can be loaded: {reason}") from error
    tools = environment.tools if grammar else None
    name = f"{model}@{_digest(network)}"
    return TransformersPolicy(network, tokenizer, tools, temperature=temperature, name=name)


def _digest(network: torch.nn.Module) -> str:
    """Of a sample of every weight: training moves all of them, and reading gigabytes would keep a reader waiting."""
    digest = hashlib.blake2b(digest_size=4)
    for parameter in network.parameters():
        sample = parameter.detach().flatten()[:: max(1, parameter.numel() // 1024)]
        digest.update(sample.float().cpu().numpy().tobytes())
    return digest.hexdigest()
