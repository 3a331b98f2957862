"""Questions over the facts of the research world, with exact answers and the key to solve them.

Contract: `make_tasks` and `make_task_pool` are pure functions of their arguments, and for seed 0 they give the
published tasks to the byte and in order. The published pool leaks: some of its held-out tasks stand in the
training part too, word for word or with the two facts swapped. It is kept as published; training uses
`stacklm_hf.worlds.research.splits`, which takes such tasks out.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from stacklm_hf.worlds.base import Task
from stacklm_hf.worlds.research.facts import REAL_FACTS, Fact

SHAPES: tuple[str, ...] = ("lookup", "double", "sum", "compare")
FACTS_PER_SHAPE: dict[str, int] = {"lookup": 1, "double": 1, "sum": 2, "compare": 2}
N_DRAWS = 120  # pairs drawn for the sums, and again for the compares

# Placeholders: {a} is the first fact as "the ATTRIBUTE of ENTITY", {b} the second.
TEMPLATES: dict[str, str] = {
    "lookup": "What is {a}? Use the corpus.",
    "double": "What is {a}, multiplied by 2? Use the corpus.",
    "sum": "What do you get if you add {a} to {b}? Use the corpus.",
    "compare": "Which is larger, {a} or {b}? Answer with the entity name. Use the corpus.",
}

_TASK_ID = re.compile(r"research-s(-?\d+)-")


def render_question(template: str, facts: Sequence[Fact]) -> str:
    """Fills `{a}` and `{b}` of a question template with the phrases `the ATTRIBUTE of ENTITY`."""
    phrases = [f"the {fact.attribute} of {fact.entity}" for fact in facts]
    return template.format(a=phrases[0], b=phrases[-1])


def is_valid(kind: str, facts: Sequence[Fact]) -> bool:
    """Whether the facts make a question of this shape with one answer: a compare needs two entities and two values."""
    if kind != "compare":
        return True
    first, second = facts
    return first.entity != second.entity and first.value != second.value


def solve(kind: str, facts: Sequence[Fact]) -> str:
    """The exact answer.

    Raises:
        ValueError: The shape is unknown.
    """
    values = [int(fact.value) for fact in facts]
    if kind == "lookup":
        return facts[0].value
    if kind == "double":
        return str(2 * values[0])
    if kind == "sum":
        return str(values[0] + values[1])
    if kind == "compare":
        return facts[0].entity if values[0] > values[1] else facts[1].entity
    raise ValueError(f"unknown task shape {kind!r}: use one of {', '.join(SHAPES)}")


def make_task(kind: str, facts: Sequence[Fact], *, task_id: str, split: str = "train") -> Task:
    """One task with its answer and its key.

    Args:
        kind: One of `SHAPES`.
        facts: One fact, or two for a sum or a compare, in the order in which the question names them.
        task_id: See :func:`world_seed_of` for its form.
        split: Name of the split.

    Raises:
        ValueError: The shape is unknown, or the facts do not fit it.
    """
    gold = solve(kind, facts)
    if len(facts) != FACTS_PER_SHAPE[kind] or not is_valid(kind, facts):
        raise ValueError(f"these facts make no {kind}: {[fact.key for fact in facts]}")
    return Task(
        question=render_question(TEMPLATES[kind], facts),
        gold=gold,
        kind=kind,
        queries=tuple(fact.query for fact in facts),
        facts=tuple(fact.key for fact in facts),
        op=None if kind == "lookup" else kind,
        split=split,
        task_id=task_id,
    )


def make_tasks(seed: int = 0) -> list[Task]:
    """All tasks of a seed over the 28 real facts, before any shuffle.

    All look-ups and all doubles, then 120 pairs drawn for sums and 120 for compares from
    `random.Random(seed + 1)`; a compare of one entity with itself or of equal values is dropped. A pair may be
    drawn twice, so a question may occur twice; its task ids still differ.

    Args:
        seed: Seed of the world.
    """
    rng = random.Random(seed + 1)
    drawn: list[tuple[str, list[Fact]]] = [("lookup", [fact]) for fact in REAL_FACTS]
    drawn += [("double", [fact]) for fact in REAL_FACTS]
    for kind in ("sum", "compare"):
        drawn += [(kind, rng.sample(REAL_FACTS, 2)) for _ in range(N_DRAWS)]
    kept = [(kind, facts) for kind, facts in drawn if is_valid(kind, facts)]
    return [
        make_task(kind, facts, task_id=f"research-s{seed}-{kind}-{index:03d}")
        for index, (kind, facts) in enumerate(kept)
    ]


def make_task_pool(seed: int = 0, n_train: int = 200, n_heldout: int = 50) -> tuple[list[Task], list[Task]]:
    """The published split: the tasks of a seed, shuffled with `random.Random(seed + 2)` and cut in two.

    The two parts are as published and NOT free of leaks; for training take
    :func:`stacklm_hf.worlds.research.splits.make_split` or
    :func:`stacklm_hf.worlds.research.splits.make_training_pool`.

    Args:
        seed: Seed of the world.
        n_train: Tasks in the training part.
        n_heldout: Tasks in the held-out part.

    Returns:
        `(train, heldout)`.

    Raises:
        ValueError: The seed has fewer tasks than asked for.
    """
    tasks = make_tasks(seed)
    if min(n_train, n_heldout) < 0 or n_train + n_heldout > len(tasks):
        raise ValueError(
            f"seed {seed} has {len(tasks)} tasks, not {n_train} + {n_heldout}: ask for fewer, "
            "or take make_training_pool for more training tasks"
        )
    random.Random(seed + 2).shuffle(tasks)
    heldout = tasks[n_train : n_train + n_heldout]
    return tasks[:n_train], [replace(task, split="heldout") for task in heldout]


def qa_pairs(tasks: Iterable[Task]) -> list[dict[str, str]]:
    """Rows of `question` and `gold_answer`, without the key: what a user's own question set looks like."""
    return [{"question": task.question, "gold_answer": task.gold} for task in tasks]


def world_seed_of(task: Task) -> int:
    """The seed of the corpus that a task of the research world is asked over.

    It stands in the task id, `research-s{seed}-...`, since the same question has other answers in other worlds.

    Raises:
        ValueError: The task is not one of the research world.
    """
    match = _TASK_ID.match(task.task_id) if task.world == "research" else None
    if match is None:
        raise ValueError(f"task {task.task_id!r} names no world seed: expected an id like 'research-s0-...'")
    return int(match[1])


def group_by_world_seed(tasks: Iterable[Task]) -> dict[int, list[Task]]:
    """Tasks by the seed of the corpus that they need, seeds in rising order, tasks in the order given."""
    groups: dict[int, list[Task]] = {}
    for task in tasks:
        groups.setdefault(world_seed_of(task), []).append(task)
    return dict(sorted(groups.items()))
