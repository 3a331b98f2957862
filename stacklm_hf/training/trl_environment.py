"""A world for TRL's own tool loop: an environment as the class that `GRPOTrainer(environment_factory=...)` takes.

Contract: the class has one method for each tool, with the tool's arguments and description, so that TRL renders the
same schema and dispatches the same calls as the episode loop does; observations are those of the world. TRL's loop
renders prompts and reads turns by the chat template, waits for the slowest episode at every turn and samples without
a grammar; who wants the loop of this package takes `stacklm_hf.training.rollouts` instead.

    trainer = GRPOTrainer(
        model,
        reward_funcs=environment_reward,
        args=GRPOConfig(max_tool_calling_iterations=6, ...),
        train_dataset=prompt_dataset(tasks, environment.system_prompt),
        processing_class=tokenizer,
        environment_factory=make_trl_environment(environment),
    )
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from stacklm_hf.protocol.wire import REPEATED_CALL, parse_turn
from stacklm_hf.tools.spec import ToolSpec
from stacklm_hf.verify import is_correct
from stacklm_hf.worlds.base import Environment, Session, Task

_TYPES: dict[str, type] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "array": list,
    "object": dict,
}
_RESERVED = {"reset", "get_reward"}


class TRLEnvironment:
    """One episode at a time of an environment; a subclass of it has the tools as methods.

    Attributes:
        environment: The world; set by :func:`make_trl_environment`.
        repeated_call_guard: Answer an exact repeat of an earlier call with `RepeatedCall` instead of running it.
        task: The task of the episode, None before the first.
    """

    environment: Environment
    repeated_call_guard: bool = True

    def __init__(self) -> None:
        self.task: Task | None = None
        self._stack = ExitStack()
        self._session: Session | None = None
        self._calls: set[str] = set()

    def reset(self, **columns: Any) -> None:
        """Ends the episode before and opens one for the task of a row of `prompt_dataset`.

        Args:
            columns: The row.

        Raises:
            ValueError: The row holds no task.
        """
        if not columns.get("task_id") or "question" not in columns or "gold" not in columns:
            raise ValueError("a row has to hold task_id, question and gold: make the dataset with prompt_dataset()")
        self._stack.close()
        self.task, self._calls = Task.from_dict(columns), set()
        self._session = self._stack.enter_context(self.environment.open(self.task))

    def _call(self, tool: str, arguments: dict[str, Any]) -> str:
        if self._session is None:
            raise RuntimeError("no episode is open: call reset first")
        key = json.dumps([tool, arguments], sort_keys=True, default=str)
        if self.repeated_call_guard and key in self._calls:
            return REPEATED_CALL
        self._calls.add(key)
        return self._session.call(tool, arguments)


def make_trl_environment(environment: Environment, repeated_call_guard: bool = True) -> type[TRLEnvironment]:
    """The class for `environment_factory`.

    Args:
        environment: The world; shared by all instances, each of which holds one episode.
        repeated_call_guard: See `TRLEnvironment`.

    Raises:
        ValueError: A tool has a name that TRL keeps for itself.
    """
    members: dict[str, Any] = {"environment": environment, "repeated_call_guard": repeated_call_guard}
    for spec in environment.tools:
        if spec.name in _RESERVED or spec.name.startswith("_"):
            raise ValueError(f"a tool cannot be named {spec.name!r} in TRL: rename it")
        members[spec.name] = _make_method(spec)
    name = "".join(part.title() for part in environment.name.replace("-", "_").split("_")) + "Environment"
    return type(name, (TRLEnvironment,), members)


def _make_method(spec: ToolSpec) -> Callable[..., str]:
    """A method whose signature and docstring give the schema of the tool."""

    # No signature of its own in the code: a call with wrong arguments is for the world to answer, not for Python.
    def method(self: TRLEnvironment, **arguments: Any) -> str:
        return self._call(spec.name, {name: value for name, value in arguments.items() if value is not None})

    types = {name: _TYPES.get(schema.get("type", "string"), str) for name, schema in spec.properties.items()}
    optional = {name for name in types if name not in spec.required}
    annotations: dict[str, Any] = {name: kind | None if name in optional else kind for name, kind in types.items()}
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter("self", kind)]
    for name in sorted(types, key=lambda name: name in optional):  # stable: those with a default come last
        default = None if name in optional else inspect.Parameter.empty
        parameters.append(inspect.Parameter(name, kind, default=default, annotation=annotations[name]))
    lines = [f"    {name}: {_sentence(schema.get('description', name))}" for name, schema in spec.properties.items()]
    arguments = ["", "Args:", *lines] if lines else []
    method.__name__ = method.__qualname__ = spec.name
    method.__doc__ = "\n".join([_sentence(spec.description), *arguments, "", "Returns:", "    The observation."])
    method.__annotations__ = {**annotations, "return": str}
    method.__signature__ = inspect.Signature(parameters, return_annotation=str)  # type: ignore[attr-defined]
    return method


def _sentence(text: str) -> str:
    return " ".join(text.split())


def environment_reward(
    completions: Sequence[Any],
    environments: Sequence[TRLEnvironment],
    *,
    max_steps: int = 6,
    step_penalty: float = 0.05,
    **columns: Any,
) -> list[float]:
    """The reward of this package for TRL's loop: `correct - step_penalty * steps / max_steps`.

    Args:
        completions: The messages of each episode.
        environments: Its environment, which knows the gold answer.
        max_steps: The step limit; as `max_tool_calling_iterations`.
        step_penalty: What a whole episode's worth of steps costs.
        columns: Not read.
    """
    rewards = []
    for messages, environment in zip(completions, environments, strict=True):
        turns = [message for message in messages if message["role"] == "assistant"]
        last = turns[-1] if turns else {}
        answer = None if last.get("tool_calls") else parse_turn(last.get("content") or "").answer
        correct = environment.task is not None and is_correct(answer, environment.task.gold)
        rewards.append(float(correct) - step_penalty * len(turns) / max_steps)
    return rewards
