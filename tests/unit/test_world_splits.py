"""No training task gives an evaluation task away, in any split, and each split measures what its name says."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stacklm_hf.worlds.research import (
    SHAPES,
    SPLITS,
    Task,
    decontaminate,
    group_by_world_seed,
    is_leak,
    make_facts,
    make_split,
    make_task_pool,
    make_training_pool,
    world_seed_of,
)
from stacklm_hf.worlds.research.facts import REAL_FACTS, make_run_facts
from stacklm_hf.worlds.research.splits import REWORDED_TEMPLATES
from stacklm_hf.worlds.research.tasks import TEMPLATES, render_question


@cache
def cached_pool(seed: int) -> list[Task]:
    return make_training_pool(seed, n_per_shape=200)


def test_the_published_split_leaks_five_training_tasks_and_decontamination_takes_out_just_these() -> None:
    train, heldout = make_task_pool(0)
    questions = {task.question for task in heldout}
    unordered = {(task.kind, frozenset(task.facts)) for task in heldout}
    word_for_word = [task for task in train if task.question in questions]
    any_order = [task for task in train if (task.kind, frozenset(task.facts)) in unordered]
    assert (len(word_for_word), len(any_order)) == (2, 5)
    assert decontaminate(train, heldout) == [task for task in train if task not in any_order]
    assert [task for task in train if is_leak(task, heldout)] == any_order


def test_swapped_facts_and_other_words_leak_and_other_shapes_do_not() -> None:
    pair = (("A", "size"), ("B", "size"))
    heldout = Task("Add A to B.", "3", kind="sum", facts=pair)
    assert is_leak(Task("Add B to A.", "3", kind="sum", facts=pair[::-1]), [heldout])
    assert is_leak(Task("A plus B?", "3", kind="sum", facts=pair), [heldout])
    assert is_leak(Task(" add  a TO b.", "3"), [heldout])
    assert is_leak(Task("Who wrote the re\u0301sume\u0301?", "A"), [Task("Who wrote the résumé?", "A")])
    assert not is_leak(Task("A or B?", "A", kind="compare", facts=pair), [heldout])
    assert not is_leak(Task("Something else.", "3"), [heldout])
    assert not is_leak(heldout, [])


@given(st.randoms(use_true_random=False), st.integers(0, 60))
@settings(max_examples=30, deadline=None)
def test_whatever_is_held_out_nothing_leaks_and_nothing_else_is_lost(rng, n_heldout: int) -> None:
    tasks = [task for part in make_task_pool(0) for task in part]
    rng.shuffle(tasks)
    heldout, train = tasks[:n_heldout], tasks[n_heldout:]
    kept = decontaminate(train, heldout)
    assert not any(is_leak(task, heldout) for task in kept)
    assert all(is_leak(task, heldout) for task in train if task not in kept)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", SPLITS)
def test_no_split_trains_on_what_it_measures(name: str, seed: int) -> None:
    for train in (None, cached_pool(seed)):
        split = make_split(name, seed, train)
        questions = {task.question for task in split.evaluation}
        unordered = {(task.kind, frozenset(task.facts)) for task in split.evaluation}
        assert split.train
        assert split.evaluation
        assert not any(task.question in questions for task in split.train)
        assert not any((task.kind, frozenset(task.facts)) in unordered for task in split.train)
        assert {task.split for task in split.evaluation} == {name}
        assert len({task.task_id for task in split.train + split.evaluation}) == len(split.train + split.evaluation)
        assert split == make_split(name, seed, train)


def test_the_runs_split_asks_the_four_shapes_over_facts_that_are_never_trained_on() -> None:
    pool = make_training_pool(0)
    split = make_split("runs", 0, pool)
    run_values = {fact.key: fact.value for fact in make_run_facts(0)}
    assert Counter(task.kind for task in split.evaluation) == {"lookup": 13, "double": 13, "sum": 12, "compare": 12}
    assert all(fact in run_values for task in split.evaluation for fact in task.facts)
    assert not any(fact in run_values for task in split.train for fact in task.facts)
    assert split.train == pool, "the training pool never touches the runs of its seed"
    intruder = replace(split.evaluation[0], kind="other", question="other words")
    assert make_split("runs", 0, [*pool, intruder]).train == pool


def test_the_runs_give_960_tasks_and_no_more() -> None:
    assert len(make_split("runs", n_runs_tasks=960).evaluation) == 960
    for wrong in (961, -1):
        with pytest.raises(ValueError, match="n_tasks must be 0 to 960"):
            make_split("runs", n_runs_tasks=wrong)


def test_the_reworded_split_is_the_held_out_one_in_words_never_trained_on() -> None:
    heldout, reworded = make_split("heldout").evaluation, make_split("reworded").evaluation
    assert len(reworded) == 50
    for before, after in zip(heldout, reworded, strict=True):
        assert (after.gold, after.facts, after.queries, after.kind) == (
            before.gold,
            before.facts,
            before.queries,
            before.kind,
        )
        assert all(f"the {attribute} of {entity}" in after.question for entity, attribute in after.facts)
    trained = {task.question for part in make_task_pool(0) for task in part}
    assert trained.isdisjoint(task.question for task in reworded)


def test_every_shape_has_three_more_wordings_that_no_training_template_shares() -> None:
    facts = [REAL_FACTS[0], REAL_FACTS[12]]
    for kind in SHAPES:
        wordings = {render_question(template, facts) for template in REWORDED_TEMPLATES[kind]}
        assert len(wordings) >= 3
        assert wordings.isdisjoint(render_question(template, facts) for template in TEMPLATES.values())


@pytest.mark.parametrize("kind", SHAPES)
def test_a_shape_held_out_is_measured_in_full_and_not_trained_at_all(kind: str) -> None:
    split = make_split(f"shape:{kind}")
    assert {task.kind for task in split.evaluation} == {kind}
    assert {task.kind for task in split.train} == set(SHAPES) - {kind}
    assert len(split.evaluation) == len({task.question for task in split.evaluation}) >= 28


def test_an_unknown_split_is_named_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match="unknown split 'test': use one of heldout, runs, reworded, shape:lookup"):
        make_split("test")


@pytest.mark.parametrize("seed", [0, 5])
def test_the_training_pool_is_balanced_and_free_of_leaks(seed: int) -> None:
    pool = make_training_pool(seed, n_per_shape=150, run_share=0.4, n_world_seeds=3)
    assert Counter(task.kind for task in pool) == dict.fromkeys(SHAPES, 150)
    heldout = make_task_pool(seed)[1]
    assert not any(is_leak(task, heldout) for task in pool)
    own_runs = {fact.key for fact in make_run_facts(seed)}
    assert not any(fact in own_runs for task in pool for fact in task.facts)
    assert len({task.task_id for task in pool}) == len(pool)
    assert pool == make_training_pool(seed, n_per_shape=150, run_share=0.4, n_world_seeds=3)


def test_the_training_pool_asks_every_real_lookup_and_double_that_is_not_held_out_over_a_few_corpora() -> None:
    heldout = Counter(task.kind for task in make_task_pool(0)[1])
    real = {fact.key for fact in REAL_FACTS}
    for repeats in (1, 2):
        pool = [task for task in make_training_pool(0, real_repeats=repeats) if set(task.facts) <= real]
        kinds = Counter(task.kind for task in pool)
        assert kinds["lookup"] == repeats * (28 - heldout["lookup"])
        assert kinds["double"] == repeats * (28 - heldout["double"])
        assert kinds["sum"] == kinds["compare"] == 200
        asked = Counter(task.question for task in pool)
        assert max(asked.values()) == repeats
        assert len({(task.question, world_seed_of(task)) for task in pool}) == len(pool)


def test_shapes_may_have_their_own_numbers() -> None:
    pool = make_training_pool(0, {"lookup": 30, "sum": 70})
    assert Counter(task.kind for task in pool) == {"lookup": 30, "sum": 70}


def test_every_task_of_the_pool_is_right_in_the_world_that_it_names() -> None:
    groups = group_by_world_seed(make_training_pool(0, n_per_shape=100, n_world_seeds=4))
    assert list(groups) == [0, 1, 2, 3, 4]
    for seed, tasks in groups.items():
        values = {fact.key: int(fact.value) for fact in make_facts(seed)}
        for task in tasks:
            found = [values[fact] for fact in task.facts]
            right = {"lookup": found[0], "double": 2 * found[0], "sum": sum(found)}.get(task.kind)
            assert task.gold == (task.facts[found.index(max(found))][0] if right is None else str(right))


def test_a_pool_that_the_worlds_cannot_fill_says_what_to_raise() -> None:
    with pytest.raises(ValueError, match="only 26 tasks of shape lookup, not 50: raise n_world_seeds"):
        make_training_pool(0, n_per_shape=50, run_share=0, n_world_seeds=0)
    for wrong in ({"run_share": 1.5}, {"n_world_seeds": -1}, {"real_repeats": -1}):
        with pytest.raises(ValueError, match="make_training_pool needs"):
            make_training_pool(0, **wrong)
    for counts in (-1, {"lookup": -1}, {"riddle": 1}):
        with pytest.raises(ValueError, match="n_per_shape must be counts >= 0"):
            make_training_pool(0, n_per_shape=counts)
    assert make_training_pool(0, n_per_shape=0) == []
