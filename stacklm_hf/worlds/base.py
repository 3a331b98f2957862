"""What a world is: tasks with exact answers, and an environment that runs the tools for one episode.

Contract: a :class:`Task` is plain data, safe to write to JSON. An :class:`Environment` is shared by all
episodes of a run; what belongs to one episode (files, a sandbox) lives in the :class:`Session` it opens.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from stacklm_hf.tools.spec import ToolSpec


@dataclass(frozen=True)
class Task:
    """A question with its exact answer, and the key by which a scripted teacher solves it.

    Args:
        question: What the user asks; untrusted text.
        gold: The exact answer.
        kind: Task shape, e.g. `lookup`, `double`, `sum`, `compare`; `qa` where the shape is not known.
        queries: One search query per needed fact, in solving order; empty where there is no key.
        facts: `(entity, attribute)` of each needed fact.
        op: `double`, `sum`, `compare`, or None for a plain look-up.
        split: Name of the split that the task belongs to.
        task_id: Unique within a run, also between tasks that share a question.
        world: Name of the world.
    """

    question: str
    gold: str
    kind: str = "qa"
    queries: tuple[str, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    op: str | None = None
    split: str = "train"
    task_id: str = ""
    world: str = "research"

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict with lists for tuples."""
        row = asdict(self)
        row["queries"] = list(self.queries)
        row["facts"] = [list(fact) for fact in self.facts]
        return row

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> Task:
        """The inverse of :meth:`to_dict`; keys that are not fields are ignored."""
        known = {key: value for key, value in row.items() if key in cls.__dataclass_fields__}
        known["queries"] = tuple(known.get("queries") or ())
        known["facts"] = tuple((entity, attribute) for entity, attribute in known.get("facts") or ())
        return cls(**known)


class Session(Protocol):
    """The tools of one episode."""

    def call(self, tool: str, arguments: dict[str, Any]) -> str:
        """Runs a tool and returns the observation's text; errors are text too (`ToolError: reason`)."""
        ...


class Environment(Protocol):
    """A world as the episode loop sees it.

    An environment whose calls may take long (a process, a network) says so with `blocking = True`: the loop
    then runs them in threads. Without it a call must return within milliseconds.
    """

    name: str
    system_prompt: str
    tools: tuple[ToolSpec, ...]

    def open(self, task: Task) -> AbstractContextManager[Session]:
        """Opens the tools for one episode of `task`; closing it frees what the episode held."""
        ...
