"""Why an episode failed: exactly one cause for every failed trajectory, by rules that need no model.

Contract: :func:`classify_failure` is a pure function of the record (and of the task's key, where there is one).
It never raises on a well-formed record, returns None for a correct trajectory, and one :class:`Failure` for
every other, so that :func:`count_failures` always adds up to the number of failures.

The rules. Every fault of an episode is listed with the index of the turn where it happened; a fault that the
policy made up for later is dropped; the earliest of the rest is the cause. At the same turn, the order below
decides. `Lookup` is a call of any tool but the calculator; a call `ran` unless it was malformed, a repeat, or
refused by the harness.

- ERROR: the policy or the environment broke off. Whatever came before: such an episode says nothing about the
  policy's work.
- MALFORMED: a turn that the harness could not read or run (bad JSON, unknown tool, bad arguments), a turn cut by
  its budget, or a final turn without an answer. Made up for by a later call that ran.
- REPEATED_CALL: an exact repeat, while something that the answer needs was still missing. Made up for by a later
  call that ran.
- CONTEXT_FULL, STEP_LIMIT: the episode was cut short, and no fault came before.
- BAD_QUERY: a needed fact never came up, and no lookup named it: the query was wrong, garbled or never made.
  It happened at the first lookup that neither named nor brought up a needed fact, else where the policy went on
  without the fact: its first calculation, or its last turn. Naming a fact means that the query holds all words of
  its entity and attribute (but small ones, as `the` and `of`), or all words of the task's own query for it.
- EVIDENCE_MISSED: a lookup named the fact, and the fact still came up nowhere in the episode.
- WRONG_CALCULATION: no calculation gave the gold answer, and the first one that gave a value had the wrong form
  for the shape (or gave no value at all, or there was none and the answer came from the head); or the policy saw
  both sides of a comparison and named the wrong one.
- WRONG_COPY: a calculation had the right form for the shape (`a+b`, `a*2`, or `a-b` to compare) with wrong numbers;
  or the answer was in hand and another one was given.

Where the evidence cannot be known (no task, or a task without `facts`, such as a question over one's own
documents), the rules degrade: evidence counts as found when the gold answer stands in an observation. Otherwise
it is BAD_QUERY where no lookup brought up anything (unless calculating was all that was tried), or where one of
the task's queries was never made. Else, where a calculation ran or the shape asks for one, it is WRONG_COPY if
the calculation uses a number (10 or more, or a fraction) that stands neither in the question nor in an earlier
observation, and WRONG_CALCULATION if not. Else it is EVIDENCE_MISSED.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from enum import StrEnum
from typing import NamedTuple

from stacklm_hf.protocol.wire import CALC_ERROR, FORMAT_ERROR, NO_RESULTS, REPEATED_CALL, TOOL_ERROR
from stacklm_hf.rollout.scripted import find_value
from stacklm_hf.rollout.trajectory import Step, StepKind, StopReason, Trajectory
from stacklm_hf.verify import is_correct, is_grounded
from stacklm_hf.worlds.base import Task

CALCULATOR = "calc"
COMPARE = "compare"

_NUMBER = r"\d[\d,]*(?:\.\d+)?"
# The right form of an expression without its blanks and brackets: with the right numbers it gives the gold answer, or
# tells which side of a comparison is larger.
_FORMS = {
    "double": re.compile(rf"(?:{_NUMBER}\*2(?:\.0)?|2(?:\.0)?\*{_NUMBER}|({_NUMBER})\+\1)"),
    "sum": re.compile(rf"{_NUMBER}\+{_NUMBER}"),
    COMPARE: re.compile(rf"{_NUMBER}-{_NUMBER}"),
}
_SMALL_WORDS = {"the", "a", "an", "of", "in"}  # a query names a fact with or without them
_CONSTANTS_BELOW = 10  # small whole numbers in an expression are constants ("twice"), not copied values


class Failure(StrEnum):
    """The cause of a failure, in the order that decides between faults of the same turn."""

    ERROR = "error"
    MALFORMED = "malformed"
    REPEATED_CALL = "repeated_call"
    CONTEXT_FULL = "context_full"
    STEP_LIMIT = "step_limit"
    BAD_QUERY = "bad_query"
    EVIDENCE_MISSED = "evidence_missed"
    WRONG_CALCULATION = "wrong_calculation"
    WRONG_COPY = "wrong_copy"

    @property
    def label(self) -> str:
        """For a reader, e.g. `wrong copy`."""
        return self.value.replace("_", " ")

    @property
    def meaning(self) -> str:
        """One short sentence for a reader."""
        return _MEANINGS[self]


_MEANINGS = {
    Failure.ERROR: "The policy or the environment broke off.",
    Failure.MALFORMED: "A turn could not be read, was cut short or held no answer.",
    Failure.REPEATED_CALL: "The same call again, while something was still missing.",
    Failure.CONTEXT_FULL: "The context filled up before the answer.",
    Failure.STEP_LIMIT: "The steps ran out before the answer.",
    Failure.BAD_QUERY: "A needed fact was never asked for by name.",
    Failure.EVIDENCE_MISSED: "The fact was asked for and did not come up.",
    Failure.WRONG_CALCULATION: "The calculation or comparison was the wrong one.",
    Failure.WRONG_COPY: "A value in hand was written down wrong.",
}
_RANK = {failure: rank for rank, failure in enumerate(Failure)}


class Fault(NamedTuple):
    """One fault: the index of its turn, and what it was. The smallest fault of an episode is its cause."""

    turn: int
    failure: Failure

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: first the turn, then the order of the classes."""
        return self.turn, _RANK[self.failure]


def classify_failure(trajectory: Trajectory, task: Task | None = None) -> Failure | None:
    """The first cause of a failed trajectory, None for a correct one.

    Args:
        trajectory: The record.
        task: Its task with the key (`queries`, `facts`, `op`); without it, or with an empty key, the rules
            degrade as the module says.
    """
    if trajectory.correct:
        return None
    if trajectory.stop_reason is StopReason.ERROR:
        return Failure.ERROR
    faults = _Episode(trajectory, task).faults()
    return min(faults, key=lambda fault: fault.order).failure


def count_failures(trajectories: Iterable[Trajectory], tasks: Mapping[str, Task] | None = None) -> dict[Failure, int]:
    """Failures by cause, every class present; the counts add up to the failed trajectories.

    Args:
        trajectories: The records, correct ones included.
        tasks: Tasks by `task_id`, as far as they are known.
    """
    tasks = tasks or {}
    causes = (classify_failure(trajectory, tasks.get(trajectory.task_id)) for trajectory in trajectories)
    counts = Counter(cause for cause in causes if cause is not None)
    return {failure: counts[failure] for failure in Failure}


class _Episode:
    """One failed episode as the rules see it."""

    def __init__(self, trajectory: Trajectory, task: Task | None) -> None:
        self.trajectory = trajectory
        self.steps = trajectory.steps
        self.gold = trajectory.gold
        self.facts = task.facts if task else ()
        self.queries = task.queries if task else ()
        known_op = trajectory.kind if trajectory.kind in _FORMS else None
        self.op = task.op if task and task.op else known_op
        self.ran = [index for index, step in enumerate(self.steps) if _ran(step)]
        self.lookups = [index for index in self.ran if self.steps[index].tool != CALCULATOR]
        self.calculations = [index for index in self.ran if self.steps[index].tool == CALCULATOR]
        # The turn that ended the episode; a full context ended it after the last turn that there is.
        self.full = trajectory.stop_reason is StopReason.CONTEXT_FULL
        self.end = len(self.steps) if self.full else max(len(self.steps) - 1, 0)

    def faults(self) -> list[Fault]:
        """All faults that were not made up for; never empty."""
        found = [*self._broken_turns(), *self._cut_short()]
        found += self._evidence_by_facts() if self.facts else self._evidence_by_gold()
        found += self._calculation()
        # Evidence in hand, calculation right, and still not correct: the answer was written down wrong.
        return [*found, Fault(self.end, Failure.WRONG_COPY)]

    def _broken_turns(self) -> Iterator[Fault]:
        last_run = self.ran[-1] if self.ran else -1
        for index, step in enumerate(self.steps):
            if index < last_run or step.forced or (self.full and step.cut):
                continue  # the policy went on with a call that ran, or the limit came first and cut the turn
            if _is_repeat(step):
                if not self._in_hand(index):
                    yield Fault(index, Failure.REPEATED_CALL)
            elif _is_refused(step):
                yield Fault(index, Failure.MALFORMED)
        stop = self.trajectory.stop_reason
        no_answer = stop is StopReason.ANSWERED and not (self.trajectory.answer or "").strip()
        if no_answer or stop is StopReason.LENGTH:
            yield Fault(self.end, Failure.MALFORMED)

    def _cut_short(self) -> Iterator[Fault]:
        if self.full:
            yield Fault(self.end, Failure.CONTEXT_FULL)
        elif self.trajectory.stop_reason is StopReason.STEP_LIMIT:
            yield Fault(self.end, Failure.STEP_LIMIT)

    def _evidence_by_facts(self) -> Iterator[Fault]:
        queries = dict(zip(self.facts, self.queries, strict=False))
        keys = {fact: {" ".join(fact), queries.get(fact, " ".join(fact))} for fact in self.facts}
        asked = {
            fact: [i for i in self.lookups if any(_names(_query(self.steps[i]), key) for key in keys[fact])]
            for fact in self.facts
        }
        shown = {fact: [i for i in self.ran if find_value(self._observation(i), *fact)] for fact in self.facts}
        to_the_point = {i for turns in (*asked.values(), *shown.values()) for i in turns}
        astray = [i for i in self.lookups if i not in to_the_point]
        for fact in self.facts:
            if shown[fact]:
                continue
            if asked[fact]:
                yield Fault(asked[fact][0], Failure.EVIDENCE_MISSED)
            else:
                yield Fault(astray[0] if astray else self._went_on(), Failure.BAD_QUERY)

    def _evidence_by_gold(self) -> Iterator[Fault]:
        pure_calculation = bool(self.calculations) and not self.lookups and not self.queries
        if self._in_hand(len(self.steps)) or pure_calculation:
            return
        empty = [i for i in self.lookups if self._observation(i).strip() == NO_RESULTS]
        unasked = [q for q in self.queries if not any(_names(_query(self.steps[i]), q) for i in self.lookups)]
        if len(empty) == len(self.lookups) or unasked:
            yield Fault(empty[0] if empty else self._went_on(), Failure.BAD_QUERY)
        elif not self._needs_calculation():
            yield Fault(self.lookups[0], Failure.EVIDENCE_MISSED)

    def _calculation(self) -> Iterator[Fault]:
        if self.op == COMPARE:
            yield from self._comparison()
            return
        if not self._needs_calculation():
            return
        if any(is_correct(self._observation(i), self.gold) for i in self.calculations):
            return
        valued = [i for i in self.calculations if not self._observation(i).startswith(CALC_ERROR)]
        if not valued:
            yield Fault(self.calculations[0] if self.calculations else self.end, Failure.WRONG_CALCULATION)
        elif self._wrong_numbers(valued[0]):
            yield Fault(valued[0], Failure.WRONG_COPY)
        else:
            yield Fault(valued[0], Failure.WRONG_CALCULATION)

    def _comparison(self) -> Iterator[Fault]:
        """A difference of two numbers that are not the evidence's, or the wrong side named."""
        values = [find_value(self._observation(i), *fact) or "" for fact in self.facts for i in self.ran]
        evidence = _numbers(" ".join(values))
        asked = {i: _query(self.steps[i]) for i in self.calculations}
        differences = [i for i, expr in asked.items() if _FORMS[COMPARE].fullmatch(_squeeze(expr))]
        if self.facts and differences and not any(_numbers(asked[i]) <= evidence for i in differences):
            yield Fault(differences[0], Failure.WRONG_COPY)
        others = [entity for entity, _ in self.facts if not is_correct(entity, self.gold)]
        if any(is_correct(self.trajectory.answer, entity) for entity in others):
            yield Fault(self.end, Failure.WRONG_CALCULATION)

    def _needs_calculation(self) -> bool:
        if self.facts or self.op is not None:
            return self.op not in (None, COMPARE)
        return bool(self.calculations) and not self._in_hand(len(self.steps))

    def _wrong_numbers(self, index: int) -> bool:
        """Whether a calculation with the wrong result has the right form, and so the wrong numbers."""
        expression = _query(self.steps[index])
        form = _FORMS.get(self.op or "")
        if form is not None and self.facts:
            return form.fullmatch(_squeeze(expression)) is not None
        seen = _numbers(" ".join([self.trajectory.question, *(self._observation(i) for i in range(index))]))
        return any(number not in seen for number in _numbers(expression) if not _is_constant(number))

    def _in_hand(self, before: int) -> bool:
        """Whether the observations before a turn already held all that the answer needs."""
        earlier = [i for i in self.ran if i < before]
        if self.facts and self.op in (None, COMPARE):
            return all(any(find_value(self._observation(i), *fact) for i in earlier) for fact in self.facts)
        if self.facts:
            return any(is_correct(self._observation(i), self.gold) for i in earlier if i in self.calculations)
        return is_grounded(self.gold, [self._observation(i) for i in earlier])

    def _went_on(self) -> int:
        """Where the policy went on without a fact: its first calculation, else its last turn."""
        return self.calculations[0] if self.calculations else self.end

    def _observation(self, index: int) -> str:
        return self.steps[index].observation or ""


def _is_repeat(step: Step) -> bool:
    return step.kind is StepKind.CALL and step.observation == REPEATED_CALL


def _is_refused(step: Step) -> bool:
    """A turn that the harness could not read, or a call that it would not run."""
    observation = step.observation or ""
    refused = observation == FORMAT_ERROR or observation.startswith(TOOL_ERROR)
    return step.kind is StepKind.MALFORMED or (step.kind is StepKind.CALL and refused)


def _ran(step: Step) -> bool:
    """A call with an observation of its tool; one whose observation did not fit in the context has none."""
    called = step.kind is StepKind.CALL and step.observation is not None
    return called and not _is_repeat(step) and not _is_refused(step)


def _query(step: Step) -> str:
    """What a call asks: its text arguments, joined."""
    try:
        arguments = json.loads(step.arguments or "{}")
    except (ValueError, RecursionError):
        return step.arguments or ""
    values = arguments.values() if isinstance(arguments, dict) else [arguments]
    return " ".join(value for value in values if isinstance(value, str))


def _squeeze(expression: str) -> str:
    return re.sub(r"[\s()]", "", expression)


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold())) - _SMALL_WORDS


def _names(query: str, key: str) -> bool:
    """Whether the query holds every word of the key, small ones aside."""
    return _words(key) <= _words(query)


def _numbers(text: str) -> set[Decimal]:
    return {Decimal(number.replace(",", "")) for number in re.findall(_NUMBER, text)}


def _is_constant(number: Decimal) -> bool:
    return number < _CONSTANTS_BELOW and number == int(number)
