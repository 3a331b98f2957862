"""The research environment speaks the published protocol and runs the real tools, for any number of episodes."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stacklm_hf.tools import BM25Retriever, Passage
from stacklm_hf.worlds import Environment, ResearchEnvironment, World
from stacklm_hf.worlds.research import build_corpus, is_leak, make_task_pool

PROTOCOL = json.loads((Path(__file__).parents[1] / "data" / "protocol.json").read_text())


def test_the_system_prompt_is_the_published_one() -> None:
    environment: Environment = ResearchEnvironment(build_corpus(0))
    assert environment.system_prompt == PROTOCOL["system_prompt"]
    assert environment.name == "research"
    assert [spec.name for spec in environment.tools] == ["search", "calc"]


def test_an_episode_searches_and_calculates() -> None:
    world = World.research(seed=0)
    with world.environment().open(world.tasks[0]) as session:
        observation = session.call("search", {"query": "Stack-100M RoPE base", "k": 2})
        assert "the RoPE base of Stack-100M is 10000" in observation
        assert observation.startswith("[1] ")
        assert "[2] " in observation
        assert session.call("calc", {"expr": "10000*2"}) == "20000"
        assert session.call("search", {"query": "zzzz", "k": 2}) == PROTOCOL["observations"]["no_results"]
        assert session.call("browse", {}).startswith(PROTOCOL["observations"]["tool_error_prefix"])


def test_each_fact_of_each_task_is_in_the_two_hits_of_its_query() -> None:
    world = World.research(seed=0)
    environment = world.environment()
    for task in world.tasks:
        with environment.open(task) as session:
            for query, (entity, attribute) in zip(task.queries, task.facts, strict=True):
                assert f"the {attribute} of {entity} is " in session.call("search", {"query": query, "k": 2})


def test_many_episodes_at_once_see_what_one_sees() -> None:
    world = World.research(seed=0)
    environment = world.environment()

    def first_hit(index: int) -> str:
        with environment.open(world.tasks[index]) as session:
            return session.call("search", {"query": world.tasks[index].queries[0], "k": 1})

    alone = [first_hit(index) for index in range(100)]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(first_hit, range(100))) == alone


def test_another_retriever_takes_the_place_of_bm25() -> None:
    class LastPassage:
        def search(self, query: str, k: int) -> list[tuple[Passage, float]]:
            return [(corpus[-1], 1.0)]

    corpus = build_corpus(0)
    world = World("mine", corpus, [])
    environment = world.environment(LastPassage())
    assert environment.name == "mine"
    with environment.open(make_task_pool(0)[0][0]) as session:
        assert session.call("search", {"query": "x", "k": 1}) == f"[1] {corpus[-1].text}"
    assert isinstance(world.environment().retriever, BM25Retriever)


def test_the_built_in_world_has_the_published_tasks_and_splits_them_without_a_leak() -> None:
    world = World.research(seed=0)
    train, heldout = world.split()
    assert world.tasks == [task for part in make_task_pool(0) for task in part]
    assert heldout == make_task_pool(0)[1]
    assert len(train) == 195
    assert not any(is_leak(task, heldout) for task in train)
