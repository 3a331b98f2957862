"""Rollouts: what the sampler made reaches the trainer verbatim, each task its own, and no episode is lost."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from datasets import load_dataset
from episode_builder import LOOKUP, answer, episode, forced, search
from hypothesis import given
from hypothesis import strategies as st

from stacklm_hf.modeling.tokenization_stack import train_stack_tokenizer
from stacklm_hf.protocol.encoding import encode_untrusted
from stacklm_hf.protocol.tokens import END, TOOL_CALL, control_ids
from stacklm_hf.protocol.wire import FORCED_BODY, call_json
from stacklm_hf.rollout import EpisodeSettings, PolicyError, Trajectory, TurnOutput
from stacklm_hf.rollout.trajectory import StopReason
from stacklm_hf.training.rollouts import AgentRollout, episode_reward, prompt_dataset, training_tokens
from stacklm_hf.worlds.base import Task
from stacklm_hf.worlds.research import ResearchEnvironment
from stacklm_hf.worlds.research.corpus import Passage

TOKENIZER = train_stack_tokenizer([], 265)
CONTROL = control_ids(TOKENIZER)
WORLD = ResearchEnvironment([Passage("p", "the layer count of Stack-100M is 30. " * 3)])


class FakePolicy:
    """Writes what `write(request)` returns: an answer, a call as (tool, args), or an exception to raise."""

    name, tokenizer, max_context, sampling = "fake", TOKENIZER, 4096, {"temperature": 0.7}

    def __init__(self, write):
        self.write, self.requests = write, []

    async def turn(self, request):
        self.requests.append(request)
        turn = self.write(request)
        if isinstance(turn, Exception):
            raise turn
        if isinstance(turn, tuple):
            ids = [CONTROL[TOOL_CALL], *encode_untrusted(TOKENIZER, call_json(*turn))]
        else:
            ids = encode_untrusted(TOKENIZER, turn)
        ids = [*ids, CONTROL[END]][: request.max_new_tokens]
        forced = [index == 1 for index in range(len(ids))]
        return TurnOutput(ids, [-0.25 - index for index in range(len(ids))], forced)

    def release(self, episode_id):
        pass


def fake_trainer(step=0, seed=42, training=True, generations=4):
    return SimpleNamespace(
        accelerator=Accelerator(cpu=True),
        args=SimpleNamespace(seed=seed),
        state=SimpleNamespace(global_step=step),
        model=SimpleNamespace(training=training),
        num_generations=generations,
        use_vllm=False,
        mask_truncated_completions=False,
    )


def tasks(count=3, question="What is the layer count of Stack-100M?"):
    return [Task(f"{question} ({i})", str(i), "lookup", task_id=f"task-{i}") for i in range(count)]


def prompts(tasks, times):
    return [prompt for prompt in prompt_dataset(tasks, WORLD.system_prompt)["prompt"] for _ in range(times)]


class TestPromptDataset:
    def test_a_prompt_names_its_task_and_columns_hold_the_rest(self, tmp_path):
        dataset = prompt_dataset(tasks(2), "Be brief.")
        dataset.to_parquet(tmp_path / "d.parquet")
        back = load_dataset("parquet", data_files=str(tmp_path / "d.parquet"), split="train", cache_dir=str(tmp_path))
        for row, task in zip(back, tasks(2), strict=True):
            assert [message["role"] for message in row["prompt"]] == ["system", "user"]
            assert [message["task_id"] for message in row["prompt"]] == [None, task.task_id]
            assert Task.from_dict(row) == task

    @pytest.mark.parametrize("wrong", [[], [replace(tasks()[0], task_id="")], [tasks()[0], tasks()[0]]])
    def test_tasks_without_ids_of_their_own_are_refused(self, wrong):
        with pytest.raises(ValueError, match=r"an id of its own|no task"):
            prompt_dataset(wrong, "")


class TestTrainingTokens:
    def test_the_policy_s_choices_are_trained_on_and_nothing_else(self):
        record = episode(LOOKUP, search("layer count", "[1] it is 30"), answer("30"))
        row = training_tokens(record)
        assert row["prompt_ids"] + row["completion_ids"] == record.token_ids
        start = len(row["prompt_ids"])
        assert record.sampled[start]
        assert not any(record.sampled[:start])
        expected = [own and not out for own, out in zip(record.sampled, record.forced, strict=True)]
        assert row["env_mask"] == [int(own) for own in expected[start:]]
        assert 0 < sum(row["env_mask"]) < record.num_sampled

    def test_of_a_forced_last_turn_only_the_answer_is_trained_on(self):
        record = episode(LOOKUP, forced(" 30"))
        text = "".join(chr(i) for i, own in zip(record.token_ids, record.sampled, strict=True) if own and i < 0x110000)
        assert text == " 30"
        assert training_tokens(record)["completion_ids"][0] == ord(" ")

    @given(st.data())
    def test_lengths_are_equal_for_any_record(self, data):
        sampled = data.draw(st.lists(st.booleans(), min_size=1, max_size=30))
        numbers = st.floats(-9, 0)
        record = Trajectory("e", "t", "w", "k", "q", "g", token_ids=list(range(len(sampled))), sampled=sampled)
        record.forced = [own and data.draw(st.booleans()) for own in sampled]
        record.logprobs = [data.draw(numbers) if own else None for own in sampled]
        if not any(sampled):
            with pytest.raises(ValueError, match="wrote nothing in episode e"):
                training_tokens(record)
            return
        row = training_tokens(record)
        assert len(row["completion_ids"]) == len(row["logprobs"]) == len(row["env_mask"])
        assert row["prompt_ids"] + row["completion_ids"] == record.token_ids
        for own, logprob, given_logprob in zip(
            sampled[len(row["prompt_ids"]) :], row["logprobs"], record.logprobs[len(row["prompt_ids"]) :], strict=True
        ):
            assert logprob == (given_logprob if own else 0.0)

    def test_a_policy_without_log_probabilities_cannot_be_trained_on(self):
        record = episode(LOOKUP, answer("30"))
        record.logprobs = [None] * len(record.logprobs)
        with pytest.raises(ValueError, match="'by hand' records no log-probabilities"):
            training_tokens(record)


class TestBudgets:
    def play(self, write, prompt_count=1, **settings):
        rollout = AgentRollout(tasks(), WORLD, EpisodeSettings(**settings), policy=FakePolicy(write))
        output = rollout(prompts(tasks()[:1], prompt_count), fake_trainer())
        for name in ("completion_ids", "logprobs", "env_mask"):
            assert [len(row) for row in output[name]] == [len(row) for row in output["completion_ids"]]
        return output, rollout.last.batch

    def test_an_observation_that_overruns_the_episode_ends_it_after_the_call(self):
        output, (record,) = self.play(lambda _: ("search", {"query": "layer count", "k": 1}), max_context=290)
        assert output["stop_reason"] == [StopReason.CONTEXT_FULL]
        assert output["prompt_ids"][0] + output["completion_ids"][0] == record.token_ids
        assert output["completion_ids"][0][-1] == CONTROL[END]
        assert sum(output["env_mask"][0]) == len(output["completion_ids"][0]) - 1  # all but the forced one

    def test_the_end_that_the_harness_wrote_is_not_trained_on(self):
        output, _ = self.play(lambda _: "Thought: on and on", max_new_tokens=8)
        assert output["stop_reason"] == [StopReason.LENGTH]
        assert output["completion_ids"][0][-1] == CONTROL[END]
        assert output["env_mask"] == [[1, 0, 1, 1, 1, 1, 1, 1, 0]]
        assert output["logprobs"][0][-1] == 0.0

    def test_the_step_limit_forces_an_answer_of_which_the_harness_s_words_are_masked(self):
        calls = lambda request: " 30" if request.last else ("calc", {"expr": f"{len(request.steps)}+1"})  # noqa: E731
        output, _ = self.play(calls, max_steps=2)
        assert output["stop_reason"] == [StopReason.STEP_LIMIT]
        assert output["steps"] == [3]
        ids, mask = output["completion_ids"][0], output["env_mask"][0]
        assert mask[-4:] == [1, 0, 1, 1]  # " 30" and its end; the second token is forced
        body = encode_untrusted(TOKENIZER, FORCED_BODY)
        assert ids[-4 - len(body) : -4] == body
        assert not any(mask[-4 - len(body) : -4])

    def test_a_prompt_that_does_not_fit_is_an_error_that_names_the_episode(self):
        with pytest.raises(ValueError, match="wrote nothing in episode task-0/"):
            self.play(lambda _: "Answer: 0", max_context=50)


class TestTasks:
    def test_two_tasks_with_one_question_do_not_mix(self):
        twins = [Task("Which?", gold, task_id=f"twin-{gold}") for gold in ("a", "b")]
        policy = FakePolicy(lambda request: f"Answer: {request.task.gold if request.task.gold == 'a' else 'no'}")
        output = AgentRollout(twins, WORLD, policy=policy)(prompts(twins, 2), fake_trainer())
        assert output["gold"] == ["a", "a", "b", "b"]
        assert output["correct"] == [True, True, False, False]
        assert output["reward"] == pytest.approx([1 - 0.05 / 6] * 2 + [-0.05 / 6] * 2)
        assert episode_reward(prompts=None, completions=None, **output) == output["reward"]

    @pytest.mark.parametrize(
        "prompt", ["What?", [{"role": "user", "content": "What?"}], [{"role": "user", "content": "", "task_id": "?"}]]
    )
    def test_a_prompt_without_a_known_task_is_refused(self, prompt):
        with pytest.raises(ValueError, match="name one of the training tasks"):
            AgentRollout(tasks(), WORLD, policy=FakePolicy(lambda _: "x"))([prompt], fake_trainer())


class TestSeeds:
    def seeds(self, rollout, trainer, times=3, count=2):
        rollout.policy.requests.clear()
        rollout(prompts(tasks()[:count], times), trainer)
        return [request.seed for request in rollout.policy.requests]

    def rollout(self):
        return AgentRollout(tasks(), WORLD, policy=FakePolicy(lambda _: "Answer: 1"))

    def test_every_sample_of_every_step_has_its_own(self):
        rollout = self.rollout()
        drawn = self.seeds(rollout, fake_trainer(0)) + self.seeds(rollout, fake_trainer(0))
        drawn += self.seeds(rollout, fake_trainer(1)) + self.seeds(rollout, fake_trainer(1, seed=7))
        assert len(set(drawn)) == len(drawn) == 24

    def test_a_task_that_comes_twice_in_a_batch_is_played_anew(self):
        rollout = self.rollout()
        rollout(prompts(tasks()[:1], 2) + prompts(tasks()[:1], 2), fake_trainer())
        assert len({request.seed for request in rollout.policy.requests}) == 4
        assert len({record.episode_id for record in rollout.last.batch}) == 4

    def test_a_resumed_run_draws_the_same(self):
        assert self.seeds(self.rollout(), fake_trainer(5)) == self.seeds(self.rollout(), fake_trainer(5))


class TestFailures:
    def test_an_episode_that_fails_once_is_played_again(self):
        broken = [PolicyError("timeout")]
        rollout = AgentRollout(tasks(), WORLD, policy=FakePolicy(lambda _: broken.pop() if broken else "Answer: 0"))
        output = rollout(prompts(tasks(), 2), fake_trainer())
        assert output["correct"] == [True, True, False, False, False, False]
        assert len(rollout.policy.requests) == 7

    def test_one_that_always_fails_ends_the_run_and_is_named(self):
        write = lambda request: PolicyError("timeout") if request.task.gold == "1" else "Answer: 0"  # noqa: E731
        rollout = AgentRollout(tasks(), WORLD, policy=FakePolicy(write), retries=1)
        with pytest.raises(RuntimeError, match=r"episode task-1/seed\d+/0 failed 2 times, 2 episodes.*timeout"):
            rollout(prompts(tasks(), 2), fake_trainer())

    def test_a_fault_of_the_engine_is_not_swallowed(self):
        rollout = AgentRollout(tasks(), WORLD, policy=FakePolicy(lambda _: OSError("engine died")))
        with pytest.raises(OSError, match="engine died"):
            rollout(prompts(tasks(), 2), fake_trainer())


class TestDynamicSampling:
    """Tasks below 3 are always right, those up to 7 always wrong, the others are solved by every second sample."""

    @staticmethod
    def write(request):
        number = int(request.task.gold)
        lucky = number < 3 or (number >= 8 and int(request.episode_id.rsplit("/", 1)[1]) % 2)
        return f"Answer: {number if lucky else 'no'}"

    def rollout(self, budget, count=40, **options):
        return AgentRollout(tasks(count), WORLD, policy=FakePolicy(self.write), fresh_groups=budget, **options)

    def test_groups_without_a_gradient_are_replaced_by_fresh_tasks(self):
        rollout, batch = self.rollout(3.0), [*tasks(10)[:2], tasks(10)[9]]
        output = rollout(prompts(batch, 4), fake_trainer())
        ids = output["task_id"]
        assert ids[8:] == ["task-9"] * 4  # it teaches, so it stays
        assert not {"task-0", "task-1"} & set(ids)
        assert len(set(ids)) == 3
        for start in (0, 4, 8):
            assert len(set(ids[start : start + 4])) == 1
            assert len(set(output["reward"][start : start + 4])) == 2
        assert rollout.last.replaced_groups == 2
        assert output["gold"] == [task_id.removeprefix("task-") for task_id in ids]
        discarded = {record.task_id for record in rollout.last.discarded}
        assert {"task-0", "task-1"} <= discarded
        assert len(rollout.last.discarded) == 4 * rollout.last.fresh_groups

    def test_the_budget_holds_and_what_cannot_be_replaced_stays(self):
        rollout = self.rollout(1.5, count=8)  # only hopeless tasks
        output = rollout(prompts(tasks(8)[:2], 4), fake_trainer())
        assert output["task_id"] == ["task-0"] * 4 + ["task-1"] * 4
        assert (rollout.last.fresh_groups, rollout.last.replaced_groups) == (3, 0)
        assert len(rollout.policy.requests) == (2 + 3) * 4

    def test_it_stops_where_no_fresh_task_is_left(self):
        rollout = self.rollout(100, count=4)
        rollout(prompts(tasks(4)[:2], 4), fake_trainer())
        assert rollout.last.fresh_groups == 2

    def test_a_resumed_run_takes_the_same_fresh_tasks(self):
        runs = [self.rollout(3.0)(prompts(tasks(2), 4), fake_trainer(7))["task_id"] for _ in range(2)]
        assert runs[0] == runs[1]

    def test_off_by_default_and_never_while_evaluating(self):
        for rollout, trainer in ((self.rollout(0), fake_trainer()), (self.rollout(3), fake_trainer(training=False))):
            rollout(prompts(tasks(2), 4), trainer)
            assert rollout.last.fresh_groups == 0


def test_it_runs_where_an_event_loop_runs_already():
    async def notebook():
        rollout = AgentRollout(tasks(), WORLD, policy=FakePolicy(lambda _: "Answer: 0"))
        return rollout(prompts(tasks(), 1), fake_trainer())

    assert asyncio.run(notebook())["correct"] == [True, False, False]


def test_truncated_completions_are_masked_where_the_trainer_asks_for_it():
    trainer = fake_trainer()
    trainer.mask_truncated_completions = True
    write = lambda request: "Answer: 0" if request.task.gold == "0" else "Answer: much too long"  # noqa: E731
    rollout = AgentRollout(tasks(), WORLD, EpisodeSettings(max_new_tokens=12), policy=FakePolicy(write))
    output = rollout(prompts(tasks()[:2], 1), trainer)
    assert torch.tensor(output["env_mask"][0]).sum() == len(output["env_mask"][0]) - 1
    assert not any(output["env_mask"][1])
