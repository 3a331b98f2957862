"""The facts and the tasks of the research world are the published ones, to the byte and in order."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from stacklm_hf.worlds.research import Task, make_facts, make_task_pool, make_tasks, qa_pairs, world_seed_of
from stacklm_hf.worlds.research.facts import REAL_FACTS, make_run_facts
from stacklm_hf.worlds.research.tasks import FACTS_PER_SHAPE, SHAPES, group_by_world_seed, make_task

DATA = Path(__file__).parents[1] / "data"
PUBLISHED_KEYS = ("split", "kind", "question", "gold", "queries", "facts", "op")


def published_line(task: Task) -> str:
    row = task.to_dict()
    return json.dumps({key: row[key] for key in PUBLISHED_KEYS})


def test_the_facts_of_seed_0_are_the_published_ones_in_order() -> None:
    published = json.loads((DATA / "facts_seed0.json").read_text())
    ours = [[f"doc-{index:04d}-0", fact.entity, fact.attribute, fact.value] for index, fact in enumerate(make_facts(0))]
    assert ours == published


def test_the_task_pool_of_seed_0_is_the_published_one_byte_for_byte() -> None:
    train, heldout = make_task_pool()
    assert (len(train), len(heldout)) == (200, 50)
    ours = "".join(published_line(task) + "\n" for task in train + heldout)
    assert ours.encode() == (DATA / "tasks_seed0.jsonl").read_bytes()


def test_seed_0_has_262_tasks() -> None:
    assert Counter(task.kind for task in make_tasks(0)) == {"lookup": 28, "double": 28, "sum": 120, "compare": 86}


def test_facts_and_tasks_follow_from_the_seed_alone() -> None:
    assert make_facts(3) == make_facts(3) != make_facts(4)
    assert make_tasks(3) == make_tasks(3) != make_tasks(4)
    assert make_facts(3)[:28] == list(REAL_FACTS) == make_facts(0, n_distractors=0)


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_fewer_runs_are_the_first_of_more_runs(seed: int) -> None:
    assert make_run_facts(seed, 5) == make_run_facts(seed)[:10]


@pytest.mark.parametrize("seed", range(4))
def test_the_gold_answer_follows_from_the_facts_that_the_key_names(seed: int) -> None:
    values = {fact.key: int(fact.value) for fact in REAL_FACTS}
    for task in make_tasks(seed):
        found = [values[fact] for fact in task.facts]
        expected = {
            "lookup": str(found[0]),
            "double": str(found[0] * 2),
            "sum": str(sum(found)),
            "compare": max(task.facts, key=lambda fact: values[fact])[0],
        }[task.kind]
        assert task.gold == expected
        assert task.queries == tuple(f"{entity} {attribute}" for entity, attribute in task.facts)
        assert all(f"the {attribute} of {entity}" in task.question for entity, attribute in task.facts)
        assert len(task.facts) == FACTS_PER_SHAPE[task.kind]


@pytest.mark.parametrize("seed", range(8))
def test_a_compare_never_has_a_tie_or_one_entity_twice(seed: int) -> None:
    values = {fact.key: fact.value for fact in REAL_FACTS}
    for task in make_tasks(seed):
        if task.kind == "compare":
            first, second = task.facts
            assert first[0] != second[0]
            assert values[first] != values[second]


def test_task_ids_are_unique_though_a_question_may_occur_twice() -> None:
    tasks = make_tasks(0)
    assert len({task.task_id for task in tasks}) == len(tasks)
    assert len({task.question for task in tasks}) < len(tasks)


def test_every_query_fits_the_grammar_of_a_search_call() -> None:
    for seed in range(3):
        assert all(re.fullmatch(r"[A-Za-z0-9 ._,()-]{1,64}", fact.query) for fact in make_facts(seed))


def test_asking_for_more_tasks_than_there_are_says_so() -> None:
    with pytest.raises(ValueError, match="seed 0 has 262 tasks, not 250 \\+ 50"):
        make_task_pool(0, n_train=250, n_heldout=50)
    with pytest.raises(ValueError, match="ask for fewer"):
        make_task_pool(0, n_train=-1)


def test_qa_pairs_give_the_answer_and_no_key() -> None:
    task = make_tasks(0)[0]
    assert qa_pairs([task]) == [{"question": task.question, "gold_answer": "512"}]


def test_a_task_names_the_world_that_it_is_asked_over() -> None:
    tasks = [*make_tasks(12)[:2], *make_tasks(3)[:1]]
    assert [world_seed_of(task) for task in tasks] == [12, 12, 3]
    assert group_by_world_seed(tasks) == {3: tasks[2:], 12: tasks[:2]}
    for stranger in (Task("q", "a", task_id="mine-1"), Task("q", "a", task_id="research-s1-x", world="mine")):
        with pytest.raises(ValueError, match="names no world seed"):
            world_seed_of(stranger)


def test_a_task_goes_through_json_unchanged() -> None:
    for task in make_tasks(0):
        assert Task.from_dict(json.loads(json.dumps(task.to_dict()))) == task


def test_facts_that_do_not_fit_a_shape_are_refused() -> None:
    one, other = REAL_FACTS[0], REAL_FACTS[1]  # the same entity
    for kind, facts in [("compare", [one, other]), ("lookup", [one, other]), ("median", [one])]:
        with pytest.raises(ValueError, match=r"make no|unknown task shape"):
            make_task(kind, facts, task_id="research-s0-x")
    assert set(SHAPES) == set(FACTS_PER_SHAPE)
