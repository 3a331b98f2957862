"""The one record of an episode, from the teacher to the trainer, the evaluation and the report.

Contract: token ids, and for each of them whether the policy sampled it, its logprob and whether the grammar
forced it, are recorded as the tokens are made and never recovered from text. The record goes through JSON
and through Arrow without loss.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class StopReason(StrEnum):
    """Why an episode ended."""

    ANSWERED = "answered"  # the policy gave a final turn by itself
    STEP_LIMIT = "step_limit"  # no steps left: the harness forced a last answer
    CONTEXT_FULL = "context_full"  # the next turn or observation did not fit; nothing was cut from the left
    LENGTH = "length"  # a turn without a call was cut by the token budget of a turn
    ERROR = "error"  # the policy or the environment failed; `error` says how


class StepKind(StrEnum):
    """What a turn of the policy was."""

    CALL = "call"
    ANSWER = "answer"
    MALFORMED = "malformed"


@dataclass
class Step:
    """One turn of the policy and what came back.

    Args:
        kind: What the turn was.
        text: The turn's text exactly as written by the policy (control markers readable, no closing end).
        thought: The thought, without its `Thought:` label.
        tool: Name of the called tool, None without a well-formed call.
        arguments: The call's arguments as a JSON string, so that Arrow never invents keys.
        observation: What the harness answered, None for a final turn.
        answer: The final answer, None for a call.
        cut: The turn reached its token budget before the policy closed it.
        forced: The turn is the harness's forced last answer.
    """

    kind: StepKind
    text: str
    thought: str = ""
    tool: str | None = None
    arguments: str | None = None
    observation: str | None = None
    answer: str | None = None
    cut: bool = False
    forced: bool = False


@dataclass
class Trajectory:
    """One whole episode.

    Args:
        episode_id: Unique within a run: task id, seed and sample index.
        token_ids: The whole episode, shape (length,).
        sampled: True where the policy itself wrote the token, shape (length,). This is the loss mask.
        logprobs: Log-probability of each sampled token in nats, under the policy at its sampling temperature
            and without the grammar; None elsewhere. Shape (length,).
        forced: True where the grammar left one choice, shape (length,).
        steps: The turns, readable.
        reward: Scalar in [-1, 1], None where it was not scored.
        correct: The answer equals the gold answer (`stacklm_hf.verify.is_correct`).
        grounded: The answer stands in an observation.
        sampling: Temperature and the like, JSON-ready.
        timing: Seconds by name, e.g. `total`, `policy`, `tools`.
        error: What failed, with `StopReason.ERROR`.
    """

    episode_id: str
    task_id: str
    world: str
    kind: str
    question: str
    gold: str
    token_ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    forced: list[bool] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    answer: str | None = None
    reward: float | None = None
    correct: bool = False
    grounded: bool = False
    stop_reason: StopReason = StopReason.ERROR
    policy: str = ""
    split: str = ""
    system: str = ""
    sampling: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    timing: dict[str, float] = field(default_factory=dict)
    error: str | None = None

    @property
    def num_steps(self) -> int:
        """Turns taken, the forced one included."""
        return len(self.steps)

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy itself wrote."""
        return sum(self.sampled)

    @property
    def observations(self) -> list[str]:
        """All observations in order."""
        return [step.observation for step in self.steps if step.observation is not None]

    def to_dict(self) -> dict[str, Any]:
        """JSON- and Arrow-ready; free-form dicts become JSON strings so that Arrow keeps them as they are.

        The lists of tokens are those of the trajectory, not copies.
        """
        # Not asdict(): it copies every token of every list.
        row = dict(vars(self))
        row["stop_reason"] = str(self.stop_reason)
        row["steps"] = [{**vars(step), "kind": str(step.kind)} for step in self.steps]
        row["sampling"] = json.dumps(self.sampling, sort_keys=True)
        row["timing"] = json.dumps(self.timing, sort_keys=True)
        return row

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> Trajectory:
        """The inverse of :meth:`to_dict`.

        Raises:
            ValueError: A field is missing or of the wrong form; the message names the record.
        """
        try:
            values = {key: value for key, value in row.items() if key in cls.__dataclass_fields__}
            values["stop_reason"] = StopReason(values["stop_reason"])
            values["steps"] = [Step(**{**step, "kind": StepKind(step["kind"])}) for step in values["steps"]]
            values["sampling"] = json.loads(values["sampling"])
            values["timing"] = json.loads(values["timing"])
            trajectory = cls(**values)
            trajectory.check()
            _check_types(trajectory)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a trajectory record ({row.get('episode_id', 'no episode_id')}): {error}") from error
        return trajectory

    def check(self) -> None:
        """Raises ValueError unless ids, mask, logprobs and forced flags have one length."""
        lengths = {len(self.token_ids), len(self.sampled), len(self.logprobs), len(self.forced)}
        if len(lengths) != 1:
            raise ValueError(f"episode {self.episode_id!r}: ids, mask, logprobs and forced flags differ in length")


def _check_types(trajectory: Trajectory) -> None:
    """Raises TypeError where a field of a record that was read is of another type than it was written with."""
    for name in ("episode_id", "task_id", "world", "kind", "question", "gold", "policy", "split", "system"):
        if not isinstance(getattr(trajectory, name), str):
            raise TypeError(f"{name} is not text")
    elements: dict[str, tuple[type, ...]] = {
        "token_ids": (int,),
        "sampled": (bool,),
        "forced": (bool,),
        "logprobs": (float, int, type(None)),
    }
    for name, kinds in elements.items():
        values = getattr(trajectory, name)
        if not isinstance(values, list) or not all(isinstance(value, kinds) for value in values):
            raise TypeError(f"{name} holds values of another type")
