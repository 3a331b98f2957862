"""Running episodes into a file: resumed, never mixed, errors told and not stored."""

import pytest

from stacklm_hf.data.store import read_trajectories
from stacklm_hf.evaluation.run import evaluate, run_into_store
from stacklm_hf.modeling.tokenization_stack import train_stack_tokenizer
from stacklm_hf.rollout import EpisodeSettings, PolicyError, ScriptedTeacher
from stacklm_hf.worlds.base import Task
from stacklm_hf.worlds.research import (
    ResearchEnvironment,
    SeededEnvironment,
    build_corpus,
    make_task_pool,
    make_training_pool,
)

SETTINGS = EpisodeSettings(max_new_tokens=400)


@pytest.fixture(scope="module")
def teacher():
    return ScriptedTeacher(train_stack_tokenizer([], 265))


@pytest.fixture(scope="module")
def world():
    return make_task_pool()[1][:6], ResearchEnvironment(build_corpus())


class Failing(ScriptedTeacher):
    """Gives up on some tasks, and counts its turns."""

    def __init__(self, tokenizer, bad=()):
        super().__init__(tokenizer)
        self.bad, self.turns = set(bad), 0

    async def turn(self, request):
        self.turns += 1
        if request.task.task_id in self.bad:
            raise PolicyError("server said 500")
        return await super().turn(request)


def test_results_come_in_the_order_of_the_tasks(teacher, world, tmp_path):
    tasks, environment = world
    trajectories = evaluate(teacher, tasks, environment, tmp_path / "e.jsonl", SETTINGS, samples=2, concurrency=3)
    assert [t.task_id for t in trajectories] == [task.task_id for task in tasks for _ in range(2)]
    assert all(t.correct for t in trajectories)


def test_a_second_run_does_only_what_is_missing(teacher, world, tmp_path):
    tasks, environment = world
    path = tmp_path / "e.jsonl"
    run_into_store(teacher, tasks[:4], environment, path, SETTINGS)
    counting = Failing(teacher.tokenizer)
    count, errors = run_into_store(counting, tasks, environment, path, SETTINGS)
    assert (count, errors) == (6, {})
    assert counting.turns == sum(t.num_steps for t in list(read_trajectories(path))[4:])


def test_failed_episodes_are_told_and_run_again(teacher, world, tmp_path):
    tasks, environment = world
    path = tmp_path / "e.jsonl"
    with pytest.raises(RuntimeError, match=r"1 episodes failed, e\.g\. .*server said 500"):
        evaluate(Failing(teacher.tokenizer, [tasks[2].task_id]), tasks, environment, path, SETTINGS)
    assert len(list(read_trajectories(path))) == 5
    assert len(evaluate(Failing(teacher.tokenizer), tasks, environment, path, SETTINGS)) == 6


def test_a_file_of_another_policy_is_refused(teacher, world, tmp_path):
    tasks, environment = world
    path = tmp_path / "e.jsonl"
    run_into_store(teacher, tasks, environment, path, SETTINGS)
    other = ScriptedTeacher(teacher.tokenizer, temperature=1.0)
    with pytest.raises(ValueError, match="name another file"):
        run_into_store(other, tasks, environment, path, SETTINGS)


def test_a_file_made_with_another_tokenizer_is_refused(teacher, world, tmp_path):
    tasks, environment = world
    path = tmp_path / "e.jsonl"
    run_into_store(teacher, tasks, environment, path, SETTINGS)
    other = ScriptedTeacher(train_stack_tokenizer([task.question for task in tasks], 300))
    with pytest.raises(ValueError, match="another tokenizer: name another file"):
        run_into_store(other, tasks, environment, path, SETTINGS)


def test_tasks_of_many_worlds_are_each_asked_over_their_own_corpus(teacher, tmp_path):
    tasks = make_training_pool(0, 12, 0.5, 3)
    trajectories = evaluate(teacher, tasks, SeededEnvironment(), tmp_path / "e.jsonl", SETTINGS)
    assert len({task.task_id.split("-")[1] for task in tasks}) > 2
    assert all(t.correct and t.grounded for t in trajectories)


def test_a_task_of_no_seed_is_named():
    with pytest.raises(ValueError, match="names no world seed"):
        SeededEnvironment().open(Task("q", "a", task_id="mine"))
