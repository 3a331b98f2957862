"""What to train on and what to measure on, so that a score says what was really learned.

Contract: whatever the split, no training task that it gives out leaks one of its evaluation tasks
(`stacklm_hf.worlds.leaks`). Everything is a pure function of its arguments.

| split          | evaluation tasks                                        | never seen in training                  |
|----------------|---------------------------------------------------------|-----------------------------------------|
| `heldout`      | the 50 published held-out tasks                         | the question, also with swapped facts   |
| `runs`         | 50 tasks over the synthetic runs of the seed            | any of the facts                        |
| `reworded`     | the held-out tasks, asked in other words                | the question, and the wording           |
| `shape:<kind>` | all the seed's tasks of one shape                       | the shape                               |
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from stacklm_hf.worlds.base import Task
from stacklm_hf.worlds.leaks import decontaminate
from stacklm_hf.worlds.research.facts import REAL_FACTS, Fact, make_run_facts
from stacklm_hf.worlds.research.tasks import (
    FACTS_PER_SHAPE,
    SHAPES,
    is_valid,
    make_task,
    make_task_pool,
    make_tasks,
    render_question,
)

SPLITS: tuple[str, ...] = ("heldout", "runs", "reworded", *(f"shape:{kind}" for kind in SHAPES))

# Questions of the four shapes in words that no training question uses; placeholders as in tasks.TEMPLATES.
REWORDED_TEMPLATES: dict[str, tuple[str, ...]] = {
    "lookup": (
        "According to the documents, what is {a}?",
        "Please look up {a} and report it.",
        "I would like to know {a}. Can you find it for me?",
    ),
    "double": (
        "Take {a} and double it. How much is that?",
        "How much is two times {a}, going by the documents?",
        "Please find {a} and tell me twice that number.",
    ),
    "sum": (
        "Find {a} as well as {b}, then give their total.",
        "How much do {a} and {b} come to together?",
        "Please look up {a}, then {b}, and report their sum.",
    ),
    "compare": (
        "Name the entity with the greater number, going by {a} and {b}.",
        "Consider {a} and {b}. Whose number is higher? Reply with just that name.",
        "Please check {a} against {b} and name the entity that has the bigger one.",
    ),
}


@dataclass(frozen=True)
class Split:
    """Tasks to train on and tasks to measure on; the latter over the corpus of the split's seed.

    Args:
        name: One of `SPLITS`.
        train: Training tasks; none leaks an evaluation task.
        evaluation: Evaluation tasks, their `split` being `name`.
    """

    name: str
    train: list[Task]
    evaluation: list[Task]


def make_split(name: str, seed: int = 0, train: Iterable[Task] | None = None, n_runs_tasks: int = 50) -> Split:
    """One of the splits of a seed.

    Args:
        name: One of `SPLITS`.
        seed: Seed of the world.
        train: Tasks to train on, e.g. from :func:`make_training_pool`; what the split must not train on is
            taken out. Default: the published training tasks.
        n_runs_tasks: Evaluation tasks of the split `runs`, shared evenly by the four shapes.

    Raises:
        ValueError: There is no such split.
    """
    if name not in SPLITS:
        raise ValueError(f"unknown split {name!r}: use one of {', '.join(SPLITS)}")
    published_train, heldout = make_task_pool(seed)
    kept = list(published_train if train is None else train)
    if name == "heldout":
        evaluation = heldout
    elif name == "reworded":
        evaluation = reword(heldout)
    elif name == "runs":
        evaluation = make_runs_tasks(seed, n_runs_tasks)
        run_keys = {fact.key for fact in make_run_facts(seed)}
        kept = [task for task in kept if run_keys.isdisjoint(task.facts)]
    else:
        kind = name.removeprefix("shape:")
        by_question = {task.question: task for task in make_tasks(seed) if task.kind == kind}
        evaluation = [replace(task, split=name) for task in by_question.values()]
        kept = [task for task in kept if task.kind != kind]
    return Split(name, decontaminate(kept, evaluation), evaluation)


def reword(tasks: Sequence[Task], split: str = "reworded") -> list[Task]:
    """The same tasks, key and answer kept, asked in the words of `REWORDED_TEMPLATES`, each template in turn.

    Args:
        tasks: Tasks of the research world.
        split: Name of the new split, also added to the task ids.
    """
    turns = {kind: itertools.cycle(templates) for kind, templates in REWORDED_TEMPLATES.items()}
    reworded = []
    for task in tasks:
        facts = [Fact(entity, attribute, "") for entity, attribute in task.facts]
        question = render_question(next(turns[task.kind]), facts)
        reworded.append(replace(task, question=question, split=split, task_id=f"{task.task_id}-{split}"))
    return reworded


def make_runs_tasks(seed: int = 0, n_tasks: int = 50) -> list[Task]:
    """Tasks in the four shapes over the synthetic runs of a seed: facts that are never trained on.

    Args:
        seed: Seed of the world.
        n_tasks: How many, shared evenly by the shapes.

    Raises:
        ValueError: The runs have too few facts for that many tasks.
    """
    rng = random.Random(f"runs/{seed}")
    facts = make_run_facts(seed)
    if not 0 <= n_tasks <= len(SHAPES) * len(facts):  # a look-up for each fact is the scarcest shape
        raise ValueError(f"n_tasks must be 0 to {len(SHAPES) * len(facts)} for seed {seed}, not {n_tasks}")
    tasks: list[Task] = []
    for position, kind in enumerate(SHAPES):
        share = (n_tasks + len(SHAPES) - 1 - position) // len(SHAPES)
        stream = _name_tasks(kind, seed, "runs", _draw(kind, facts, rng))
        tasks += [replace(task, split="runs") for task in itertools.islice(stream, share)]
    return tasks


def make_training_pool(
    seed: int = 0,
    n_per_shape: int | Mapping[str, int] = 400,
    run_share: float = 0.5,
    n_world_seeds: int = 8,
    real_repeats: int = 2,
) -> list[Task]:
    """More tasks to train on, none of which leaks what the splits of the seed measure.

    Tasks over the real facts are asked over the corpus of `seed` and of the `n_world_seeds` seeds after it, in
    turn, since the passages differ. Tasks over synthetic runs (sums and compares also of a run and a real fact)
    are asked over the corpora of those other seeds, in which the same run has other values, so that a student
    learns to read and not to remember. No (entity, attribute) of the seed's own runs is used: these stay the
    split `runs`. Group the tasks by corpus with :func:`stacklm_hf.worlds.research.tasks.group_by_world_seed`.

    Args:
        seed: Seed of the world that is measured.
        n_per_shape: Tasks of each shape, one number for all or one for each.
        run_share: Share of tasks over runs. It is higher where the real facts do not suffice: they give only
            28 look-ups and 28 doubles, less those held out.
        n_world_seeds: Number of further worlds.
        real_repeats: Corpora over which the same real question is asked at most. A student that sees one fact
            mostly in one shape learns the shape by the fact, and fails on it in another.

    Returns:
        The tasks, shuffled.

    Raises:
        ValueError: A number is out of range, a shape is unknown, or the worlds have too few facts for it.
    """
    counts = dict.fromkeys(SHAPES, n_per_shape) if isinstance(n_per_shape, int) else dict(n_per_shape)
    if not set(counts) <= set(SHAPES) or min(counts.values(), default=0) < 0:
        raise ValueError(f"n_per_shape must be counts >= 0 of {', '.join(SHAPES)}, not {n_per_shape}")
    if not 0 <= run_share <= 1 or n_world_seeds < 0 or real_repeats < 0:
        raise ValueError(
            "make_training_pool needs 0 <= run_share <= 1, n_world_seeds >= 0 and real_repeats >= 0, "
            f"not {run_share}, {n_world_seeds} and {real_repeats}"
        )
    rng = random.Random(f"training pool/{seed}")
    heldout = make_task_pool(seed)[1]
    own_runs = {fact.key for fact in make_run_facts(seed)}
    worlds = list(range(seed, seed + 1 + n_world_seeds))
    runs = {world: [fact for fact in make_run_facts(world) if fact.key not in own_runs] for world in worlds[1:]}
    pool: list[Task] = []
    for kind, count in counts.items():
        shape = _real_tasks(kind, seed, worlds, heldout, min(real_repeats, len(worlds)), rng)
        shape = shape[: count - round(count * run_share)]
        streams = [
            _name_tasks(kind, world, f"pool{seed}", _draw_runs(kind, facts, rng)) for world, facts in runs.items()
        ]
        shape += itertools.islice(_take_turns(streams), count - len(shape))
        if len(shape) < count:
            raise ValueError(
                f"only {len(shape)} tasks of shape {kind}, not {count}: raise n_world_seeds (now {n_world_seeds})"
            )
        pool += shape
    rng.shuffle(pool)
    return pool


def _real_tasks(
    kind: str, seed: int, worlds: Sequence[int], heldout: Sequence[Task], repeats: int, rng: random.Random
) -> list[Task]:
    """The tasks of a shape over the real facts, each over `repeats` corpora; all of them once before any again."""
    choices = list(_draw(kind, REAL_FACTS, rng))
    tasks = []
    for repeat in range(repeats):
        for index, facts in enumerate(choices):
            world = worlds[(index + repeat) % len(worlds)]
            tasks.append(
                make_task(kind, facts, task_id=f"research-s{world}-pool{seed}-real-{kind}-{index:04d}-{repeat}")
            )
    return decontaminate(tasks, heldout)


def _draw_runs(kind: str, facts: Sequence[Fact], rng: random.Random) -> Iterator[tuple[Fact, ...]]:
    """Choices of facts with at least one of a run, each once, in random order; a pair may hold a real fact."""
    if FACTS_PER_SHAPE[kind] == 1:
        yield from _draw(kind, facts, rng)
        return
    seen: set[tuple[Fact, ...]] = set()
    everything = [*facts, *REAL_FACTS]
    # Pairs are far more than are ever asked for: drawing beats listing. The bound ends a hopeless search.
    for _ in range(20 * len(everything) ** 2 if facts else 0):
        run, other = rng.choice(facts), rng.choice(facts if rng.random() < 0.6 else REAL_FACTS)
        choice = (run, other) if rng.random() < 0.5 else (other, run)
        if run != other and choice not in seen and is_valid(kind, choice):
            seen.add(choice)
            yield choice


def _draw(kind: str, facts: Sequence[Fact], rng: random.Random) -> Iterator[tuple[Fact, ...]]:
    """All ordered choices of facts that make a task of the shape, each once, in random order."""
    choices = list(itertools.permutations(facts, FACTS_PER_SHAPE[kind]))
    rng.shuffle(choices)
    return (choice for choice in choices if is_valid(kind, choice))


def _name_tasks(kind: str, world: int, label: str, draws: Iterable[tuple[Fact, ...]]) -> Iterator[Task]:
    for index, facts in enumerate(draws):
        yield make_task(kind, facts, task_id=f"research-s{world}-{label}-{kind}-{index:04d}")


def _take_turns(streams: Sequence[Iterator[Task]]) -> Iterator[Task]:
    """One task of each stream in turn, until all are empty."""
    for row in itertools.zip_longest(*streams):
        yield from (task for task in row if task is not None)
