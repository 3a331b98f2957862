"""Which trajectories are worth learning from.

Contract: a trajectory is kept or rejected for exactly one reason, the first that holds in the order of
:class:`RejectReason`; kept and rejected add up to what was seen. Correctness and grounding are those that the
episode loop recorded (`stacklm_hf.verify`, or the world's own check); the filter decides on nothing but the record,
so that the same store always gives the same dataset.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from stacklm_hf.protocol.tokens import SPECIAL_TOKENS, TOOL_CALL
from stacklm_hf.protocol.wire import REPEATED_CALL
from stacklm_hf.rollout.trajectory import Step, StepKind, StopReason, Trajectory


class RejectReason(StrEnum):
    """Why a trajectory is not kept, in the order of the checks."""

    ERROR = "error"  # the policy or the environment failed
    STEP_LIMIT = "step_limit"  # the harness had to force the answer
    CONTEXT_FULL = "context_full"  # the episode did not fit
    CUT_TURN = "cut_turn"  # a turn reached its token budget: its end is not the policy's
    NOT_ANSWERED = "not_answered"  # no final turn, or an empty answer
    NO_TOKENS = "no_tokens"  # the policy wrote no token: there is nothing to train on
    CONTROL_TOKEN = "control_token"  # a control marker in the policy's text, live or merely spelled
    MALFORMED_CALL = "malformed_call"  # a call that does not parse would be trained on
    REPEATED_CALL = "repeated_call"  # so would a call that the guard had to stop
    INVENTED_OBSERVATION = "invented_observation"  # the policy wrote a tool's answer itself
    INCORRECT = "incorrect"  # not the gold answer
    UNGROUNDED = "ungrounded"  # right, but the answer stands in no observation: known or guessed
    TOO_LONG = "too_long"  # more tokens than a training example may have; never cut instead
    DUPLICATE = "duplicate"  # the same token ids as one that was kept
    TASK_FULL = "task_full"  # enough of this task were kept


_STOP_REASONS = {
    StopReason.ERROR: RejectReason.ERROR,
    StopReason.STEP_LIMIT: RejectReason.STEP_LIMIT,
    StopReason.CONTEXT_FULL: RejectReason.CONTEXT_FULL,
    StopReason.LENGTH: RejectReason.CUT_TURN,
}

# The episode loop leaves a marker live only where a control token stands; text that spells one has a space in it.
_MARKER = re.compile("|".join("< ?" + re.escape(token[1:]) for token in SPECIAL_TOKENS))
# What models write who play the tool themselves: ReAct's label, or the tags and headings of common chat formats.
_INVENTED = re.compile(
    r"^[ \t]*(?:observation|(?:tool|function)[ _-]?(?:result|response|output)s?)[ \t]*[0-9]*[ \t]*:"
    r"|</?(?:tool|function)_(?:result|response|output)s?>",
    re.IGNORECASE | re.MULTILINE,
)


@dataclass
class TrajectoryFilter:
    """Decides on a stream of trajectories, one at a time; what it remembers of each is 16 bytes.

    Args:
        max_length: Tokens that a training example may have; None for no limit.
        max_per_task: Trajectories to keep of one task; None for no limit.
        require_grounded: Reject a correct answer that stands in no observation.
        kept: Number kept so far.
        rejects: Number rejected so far, by reason.
    """

    max_length: int | None = 1024
    max_per_task: int | None = None
    require_grounded: bool = True
    kept: int = 0
    rejects: Counter[RejectReason] = field(default_factory=Counter)
    _seen: set[bytes] = field(default_factory=set, repr=False)
    _per_task: Counter[str] = field(default_factory=Counter, repr=False)

    @property
    def total(self) -> int:
        """Trajectories seen."""
        return self.kept + self.rejects.total()

    def check(self, trajectory: Trajectory) -> RejectReason | None:
        """Counts a trajectory and says why it is rejected, None where it is kept."""
        fingerprint = _fingerprint(trajectory.token_ids)
        reason = self._quality(trajectory) or self._selection(trajectory, fingerprint)
        if reason is not None:
            self.rejects[reason] += 1
            return reason
        self.kept += 1
        self._seen.add(fingerprint)
        self._per_task[trajectory.task_id] += 1
        return None

    def keep(self, trajectories: Iterable[Trajectory]) -> Iterator[Trajectory]:
        """Passes on the trajectories that are kept, lazily."""
        return (trajectory for trajectory in trajectories if self.check(trajectory) is None)

    def _quality(self, trajectory: Trajectory) -> RejectReason | None:
        """What is wrong with this one, whatever else was kept."""
        if trajectory.stop_reason in _STOP_REASONS:
            return _STOP_REASONS[trajectory.stop_reason]
        steps = trajectory.steps
        if any(step.cut for step in steps):
            return RejectReason.CUT_TURN
        if not steps or steps[-1].kind is not StepKind.ANSWER or not (trajectory.answer or "").strip():
            return RejectReason.NOT_ANSWERED
        if not any(trajectory.sampled):
            return RejectReason.NO_TOKENS
        if any(_has_control_token(step) for step in steps):
            return RejectReason.CONTROL_TOKEN
        if any(step.kind is StepKind.MALFORMED for step in steps):
            return RejectReason.MALFORMED_CALL
        if REPEATED_CALL in trajectory.observations:
            return RejectReason.REPEATED_CALL
        if any(_INVENTED.search(step.text) for step in steps):
            return RejectReason.INVENTED_OBSERVATION
        if not trajectory.correct:
            return RejectReason.INCORRECT
        if self.require_grounded and not trajectory.grounded:
            return RejectReason.UNGROUNDED
        return None

    def _selection(self, trajectory: Trajectory, fingerprint: bytes) -> RejectReason | None:
        """Whether a good one is wanted too."""
        if self.max_length is not None and len(trajectory.token_ids) > self.max_length:
            return RejectReason.TOO_LONG
        if fingerprint in self._seen:
            return RejectReason.DUPLICATE
        if self.max_per_task is not None and self._per_task[trajectory.task_id] >= self.max_per_task:
            return RejectReason.TASK_FULL
        return None


@dataclass(frozen=True)
class FilterResult:
    """What :func:`filter_trajectories` found.

    Args:
        kept: The trajectories to learn from, in order.
        rejects: Number rejected, by reason.
    """

    kept: list[Trajectory]
    rejects: Counter[RejectReason]

    @property
    def total(self) -> int:
        """Trajectories seen."""
        return len(self.kept) + self.rejects.total()


def filter_trajectories(
    trajectories: Iterable[Trajectory],
    *,
    max_length: int | None = 1024,
    max_per_task: int | None = None,
    require_grounded: bool = True,
) -> FilterResult:
    """Keeps the trajectories worth learning from; of equal ones the first. See :class:`TrajectoryFilter`.

    The kept ones are held in memory: for a large store give `TrajectoryFilter(...).keep(store)` to
    `build_dataset` instead.
    """
    chosen = TrajectoryFilter(max_length, max_per_task, require_grounded)
    kept = list(chosen.keep(trajectories))
    return FilterResult(kept, chosen.rejects)


def _fingerprint(token_ids: list[int]) -> bytes:
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=16).digest()


def _has_control_token(step: Step) -> bool:
    """Whether the policy's text holds a marker beside the one that opens a call."""
    text = step.text if step.kind is StepKind.ANSWER else step.text.replace(TOOL_CALL, "", 1)
    # In the call's JSON a marker may hide behind an escape; the arguments are what it stands for.
    return any(_MARKER.search(part) for part in (text, step.arguments or ""))
