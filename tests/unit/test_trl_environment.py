"""The world in TRL's own tool loop: the same schema, observations and reward, without our rollout."""

import pytest
from tiny_student import tiny_student, world
from transformers.utils import get_json_schema
from trl import GRPOConfig, GRPOTrainer

from stacklm_hf.protocol.encoding import encode_trusted
from stacklm_hf.protocol.wire import REPEATED_CALL, render_prompt
from stacklm_hf.tools.spec import ToolSpec
from stacklm_hf.training.rollouts import prompt_dataset
from stacklm_hf.training.trl_environment import environment_reward, make_trl_environment
from stacklm_hf.worlds.base import Task
from stacklm_hf.worlds.research import SeededEnvironment

TASK = Task("What is the RoPE base of Stack-100M?", "10000", "lookup", task_id="research-s0-x")


@pytest.fixture(scope="module")
def factory():
    return make_trl_environment(world()[2])


@pytest.fixture
def episode(factory):
    environment = factory()
    environment.reset(**prompt_dataset([TASK], "")[0])
    return environment


class TestTools:
    def test_the_schema_is_that_of_the_tool(self, episode):
        for spec in world()[2].tools:
            schema = get_json_schema(getattr(episode, spec.name))["function"]
            ours = spec.to_openai()["function"]
            assert (schema["name"], schema["description"]) == (ours["name"], ours["description"])
            for name, argument in ours["parameters"]["properties"].items():
                theirs = schema["parameters"]["properties"][name]
                assert theirs["type"] == argument["type"]
                assert theirs["description"] == argument["description"]
            assert schema["parameters"]["required"] == ours["parameters"]["required"]

    def test_an_argument_that_may_be_left_out_is_not_required(self):
        spec = ToolSpec("look", "Looks.", {"type": "object", "required": ["b"], "properties": {
            "a": {"type": "integer", "description": "How far."}, "b": {"type": "string", "description": "Where."},
        }})  # fmt: skip
        environment = type("World", (), {"name": "w", "system_prompt": "", "tools": (spec,)})()
        schema = get_json_schema(make_trl_environment(environment)().look)["function"]["parameters"]
        assert schema["required"] == ["b"]
        assert set(schema["properties"]) == {"a", "b"}

    def test_observations_are_those_of_the_world(self, episode):
        session = world()[2].open(TASK)
        with session as tools:
            query = {"query": "RoPE base of Stack-100M", "k": 1}
            assert episode.search(**query) == tools.call("search", query)
            assert "10000" in tools.call("search", query)
        assert episode.calc(expr="2*10000") == "20000"

    def test_a_wrong_call_is_answered_and_never_raises(self, episode):
        assert episode.search(query="x", far=True).startswith("ToolError: ")
        assert episode.calc(expr="1/0") == "CalcError: division by zero"

    def test_a_repeat_is_told_so_until_the_next_episode(self, episode):
        assert episode.calc(expr="1+1") == "2"
        assert episode.calc(expr="1+1") == REPEATED_CALL
        episode.reset(**TASK.to_dict())
        assert episode.calc(expr="1+1") == "2"

    def test_the_guard_can_be_switched_off(self):
        environment = make_trl_environment(world()[2], repeated_call_guard=False)()
        environment.reset(**TASK.to_dict())
        assert [environment.calc(expr="1+1") for _ in range(2)] == ["2", "2"]


class TestEpisodes:
    def test_each_task_is_asked_over_its_own_corpus_and_closed_after(self):
        opened = []

        class Watched(SeededEnvironment):
            def open(self, task):
                opened.append(task)
                return super().open(task)

        environment = make_trl_environment(Watched())()
        for seed in (0, 1):
            environment.reset(**{**TASK.to_dict(), "task_id": f"research-s{seed}-x", "prompt": "ignored"})
        assert [task.task_id for task in opened] == ["research-s0-x", "research-s1-x"]

    def test_what_is_missing_is_said(self, factory):
        with pytest.raises(RuntimeError, match="call reset first"):
            factory().calc(expr="1+1")
        with pytest.raises(ValueError, match="prompt_dataset"):
            factory().reset(prompt="What?")

    def test_a_tool_cannot_take_a_name_of_trl(self):
        spec = ToolSpec("reset", "Resets.")
        environment = type("World", (), {"name": "w", "system_prompt": "", "tools": (spec,)})()
        with pytest.raises(ValueError, match="cannot be named 'reset'"):
            make_trl_environment(environment)


class TestReward:
    CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "calc"}}]}  # noqa: RUF012

    @pytest.mark.parametrize(
        ("messages", "reward"),
        [
            ([{"role": "assistant", "content": "Thought: x\nAnswer: 10,000"}], 1 - 0.05 / 6),
            ([CALL, {"role": "tool", "content": "1"}, {"role": "assistant", "content": "10000"}], 1 - 0.05 * 2 / 6),
            ([{"role": "assistant", "content": "Answer: 1000"}], -0.05 / 6),
            ([CALL, {"role": "tool", "content": "10000"}], -0.05 / 6),  # never answered
            ([], 0.0),
        ],
    )
    def test_it_is_that_of_the_episode_loop(self, episode, messages, reward):
        assert environment_reward([messages], [episode]) == [pytest.approx(reward)]


def test_trl_trains_in_the_world_without_our_rollout(tmp_path, factory):
    path, tokenizer = tiny_student()
    train, _, environment = world()
    calls = []

    class Counted(factory):
        def _call(self, tool, arguments):
            calls.append(tool)
            return super()._call(tool, arguments)

    config = GRPOConfig(
        str(tmp_path), max_steps=1, per_device_train_batch_size=16, num_generations=4, max_completion_length=150,
        max_tool_calling_iterations=2, use_cpu=True, bf16=False, report_to="none", save_strategy="no", beta=0.0,
        disable_tqdm=True, temperature=0.7,
    )  # fmt: skip
    trainer = GRPOTrainer(
        path,
        reward_funcs=environment_reward,
        args=config,
        train_dataset=prompt_dataset(train, environment.system_prompt),
        processing_class=tokenizer,
        environment_factory=Counted,
    )
    trainer.train()
    row = trainer.state.log_history[0]
    assert row["rewards/environment_reward/mean"] < 1
    assert row["tools/call_frequency"] > 0
    assert len(calls) == pytest.approx(16 * row["tools/call_frequency"])


def test_trl_s_prompt_is_that_of_the_episode_loop(episode):
    _, tokenizer = tiny_student()
    environment = world()[2]
    messages = prompt_dataset([TASK], environment.system_prompt)[0]["prompt"]
    ids = tokenizer.apply_chat_template(
        messages, tools=[episode.search, episode.calc], add_generation_prompt=True, return_dict=False
    )
    assert ids == encode_trusted(tokenizer, render_prompt(environment.system_prompt, TASK.question))
