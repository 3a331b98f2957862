"""The scripted teacher: a policy that reads the answer key and the observations, and speaks the wire format.

Contract: it searches (k = 2) for each fact of the key, calculates once where the shape needs it, and answers.
Every value it writes comes from an observation; where a search misses the fact it answers `unknown`, and the
filter drops the trajectory. Its thoughts restate what was found in the words of the passages, `the {attribute}
of {entity} is {value}`: a small student learns that copy long before it learns to pick a value from afar.
"""

from __future__ import annotations

import random
import re
from typing import Any

from transformers import PreTrainedTokenizerBase

from stacklm_hf.protocol.encoding import encode_untrusted
from stacklm_hf.protocol.tokens import END, TOOL_CALL, control_ids
from stacklm_hf.protocol.wire import CALC_ERROR, call_json
from stacklm_hf.rollout.policy import PolicyError, TurnOutput, TurnRequest
from stacklm_hf.rollout.trajectory import Step
from stacklm_hf.worlds.base import Task

UNKNOWN = "unknown"
_SEARCH_K = 2
_OPERATORS = {"sum": "+", "compare": "-"}
_SHAPES = {None: 1, "double": 1, "sum": 2, "compare": 2}

# Wordings: the first is the teacher's own, the others are drawn when it is sampled at a temperature.
_FIRST = {
    None: ("I need the {fact}.", "I look up the {fact}."),
    "double": ("I need the {fact}, multiplied by 2.", "I look up the {fact}, multiplied by 2."),
    "sum": ("First, the {fact}.", "I begin with the {fact}."),
    "compare": ("First, the {fact}.", "I begin with the {fact}."),
}
_NEXT = ("Next, the {fact}.", "Now I need the {fact}.")
_CALCULATE = {
    "double": ("Now multiply it by 2.", "That times 2."),
    "sum": ("Now add them.", "Now the sum."),
    # Both outcomes stand in the thought, so that the last turn copies one of them.
    "compare": (
        "If positive, {entities[0]} is larger; if negative, {entities[1]} is larger.",
        "Positive: {entities[0]} is larger; negative: {entities[1]} is larger.",
    ),
}
_DONE = ("I have everything I need.", "That is all I need.")


class ScriptedTeacher:
    """Solves tasks that carry a key.

    Args:
        tokenizer: The student's tokenizer.
        temperature: 0 for the fixed wording; above 0 each turn draws its wording from the turn's seed.
    """

    name = "scripted"
    max_context = 1 << 20

    def __init__(self, tokenizer: PreTrainedTokenizerBase, temperature: float = 0.0):
        self.tokenizer = tokenizer
        self._control = control_ids(tokenizer)
        self.temperature = temperature

    @property
    def sampling(self) -> dict[str, Any]:
        """Settings to record with each episode."""
        return {"temperature": self.temperature}

    def release(self, episode_id: str) -> None:
        """Keeps nothing."""

    async def turn(self, request: TurnRequest) -> TurnOutput:
        """Writes the next turn.

        Raises:
            PolicyError: The task carries no key, or the turn does not fit the budget.
        """
        choose = random.Random(request.seed).choice if self.temperature > 0 else (lambda options: options[0])
        thought, call, answer = _decide(request.task, request.steps, choose)
        if call is None:
            ids = encode_untrusted(self.tokenizer, f"Thought: {thought}\nAnswer: {answer}")
        else:
            ids = encode_untrusted(self.tokenizer, f"Thought: {thought}\n")
            ids += [self._control[TOOL_CALL], *encode_untrusted(self.tokenizer, call_json(*call))]
        ids.append(self._control[END])
        if len(ids) > request.max_new_tokens:
            raise PolicyError(f"the scripted turn takes {len(ids)} tokens, {request.max_new_tokens} are allowed")
        return TurnOutput(ids, [None] * len(ids), [False] * len(ids))


def find_value(observation: str, entity: str, attribute: str) -> str | None:
    """The value of a fact in an observation, read from its clause `the {attribute} of {entity} is {value}`."""
    clause = re.compile(rf"\bthe {re.escape(attribute)} of {re.escape(entity)} is (\S+?)(?=[.,;:!?)]*(?:\s|$))")
    match = clause.search(observation)
    return match.group(1) if match else None


_Call = tuple[str, dict[str, Any]]


def _decide(task: Task, steps: tuple[Step, ...], choose: Any) -> tuple[str, _Call | None, str]:
    """The thought, the call if there is one, and else the answer."""
    if task.op not in _SHAPES or len(task.facts) != _SHAPES[task.op] or len(task.queries) != len(task.facts):
        raise PolicyError(f"task {task.task_id!r} carries no key that the scripted teacher can read")
    searches = [step for step in steps if step.tool == "search"]
    values = [find_value(step.observation or "", *fact) for step, fact in zip(searches, task.facts, strict=False)]
    if None in values:
        return "The search did not find it.", None, UNKNOWN
    if len(values) < len(task.facts):
        fact = _name(task, len(values))
        wordings = _NEXT if values else _FIRST[task.op]
        thought = " ".join([*_restate(task, values), choose(wordings).format(fact=fact)])
        return thought, ("search", {"query": task.queries[len(values)], "k": _SEARCH_K}), ""
    if task.op is None:
        return " ".join(_restate(task, values)), None, str(values[0])
    results = [step.observation or "" for step in steps if step.tool == "calc"]
    if not results:
        entities = [entity for entity, _ in task.facts]
        plan = choose(_CALCULATE[task.op]).format(entities=entities)
        return " ".join([*_restate(task, values), plan]), ("calc", {"expr": _expression(task, values)}), ""
    return _conclude(task, results[-1], choose)


def _name(task: Task, index: int) -> str:
    entity, attribute = task.facts[index]
    return f"{attribute} of {entity}"


def _restate(task: Task, values: list[str | None]) -> list[str]:
    """The fact that the last search found, in the words of the passage; nothing before the first search."""
    return [f"the {_name(task, len(values) - 1)} is {values[-1]}."] if values else []


def _expression(task: Task, values: list[str | None]) -> str:
    if task.op == "double":
        return f"{values[0]}*2"
    return f"{values[0]}{_OPERATORS[task.op or '']}{values[1]}"


def _conclude(task: Task, result: str, choose: Any) -> tuple[str, None, str]:
    if result.startswith(CALC_ERROR):
        return "The calculation failed.", None, UNKNOWN
    if task.op != "compare":
        return choose(_DONE), None, result
    sign, winner = ("negative", 1) if result.startswith("-") else ("positive", 0)
    entity = task.facts[winner][0]
    return f"It is {sign}, {entity} is larger.", None, entity
