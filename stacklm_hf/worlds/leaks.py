"""Which training tasks give a held-out task away.

Contract: a training task leaks when it asks a held-out question (whatever its case, spacing and Unicode form), or
when it is of the same kind over the same facts in any order: `a + b` gives `b + a` away, and a question in other
words the same question. Works for every world; tasks without facts are compared by their questions.
"""

from __future__ import annotations

from collections.abc import Iterable

from stacklm_hf.tools.retrieval import fold
from stacklm_hf.worlds.base import Task


def leak_keys(task: Task) -> set[tuple[object, ...]]:
    """What must not be shared between training and held-out tasks; two tasks that share a key leak."""
    keys: set[tuple[object, ...]] = {("question", " ".join(fold(task.question).split()))}
    if task.facts:
        keys.add(("facts", task.kind, *sorted(task.facts)))
    return keys


def is_leak(task: Task, heldout: Iterable[Task]) -> bool:
    """Whether training on `task` gives one of the held-out tasks away. For many tasks use :func:`decontaminate`."""
    keys = leak_keys(task)
    return any(keys & leak_keys(other) for other in heldout)


def decontaminate(train: Iterable[Task], heldout: Iterable[Task]) -> list[Task]:
    """The training tasks that give no held-out task away, in order.

    Args:
        train: Tasks to train on.
        heldout: Tasks to measure on.
    """
    forbidden = set().union(*(leak_keys(task) for task in heldout))
    return [task for task in train if forbidden.isdisjoint(leak_keys(task))]
