"""The transformers engine: batched, cached between turns, and exactly what the model alone would have said."""

import asyncio

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from stacklm_hf.modeling.configuration_stack import StackConfig
from stacklm_hf.modeling.modeling_stack import StackForCausalLM
from stacklm_hf.modeling.tokenization_stack import train_stack_tokenizer
from stacklm_hf.protocol import parse_turn
from stacklm_hf.rollout import EpisodeSettings, PolicyError, TurnRequest, run_episodes
from stacklm_hf.rollout.transformers_policy import TransformersPolicy, _sample_rows
from stacklm_hf.worlds.base import Task
from stacklm_hf.worlds.research import ResearchEnvironment, build_corpus, make_task_pool

TASK = Task("q", "4", task_id="t")
SETTINGS = EpisodeSettings(max_new_tokens=24, forced_answer_tokens=12, max_steps=3)


@pytest.fixture(scope="module")
def tokenizer():
    return train_stack_tokenizer([passage.text for passage in build_corpus()], 512)


def tiny(tokenizer, kind="stack", layers=4):
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 1024,
        # Far from uniform, so that a wrong mask or position changes the argmax.
        "initializer_range": 0.3,
    }
    torch.manual_seed(0)
    if kind == "stack":
        return StackForCausalLM(StackConfig(**sizes)).eval()
    return Qwen3ForCausalLM(Qwen3Config(**sizes)).eval()


@pytest.fixture(scope="module")
def model(tokenizer):
    return tiny(tokenizer)


@pytest.fixture(scope="module")
def world():
    return make_task_pool()[1][:12], ResearchEnvironment(build_corpus())


def turns(policy, prompts, max_new_tokens=16, seeds=None):
    async def main():
        requests = [
            TurnRequest(f"e{index}", prompt, max_new_tokens, (seeds or range(99))[index], TASK)
            for index, prompt in enumerate(prompts)
        ]
        return await asyncio.gather(*map(policy.turn, requests))

    return asyncio.run(main())


PROMPTS = [[5, 9, 200, 31], [7] * 40, [3, 1, 4, 1, 5, 9, 2, 6], [400]]


@pytest.mark.parametrize("kind", ["stack", "qwen3"])
def test_greedy_turns_equal_generate_one_by_one(tokenizer, kind):
    model = tiny(tokenizer, kind)
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    for prompt, output in zip(PROMPTS, turns(TransformersPolicy(model, tokenizer), PROMPTS), strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=end)
        assert output.token_ids == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("grammar", [False, True])
def test_logprobs_are_those_of_the_model_at_the_sampling_temperature(tokenizer, model, world, temperature, grammar):
    tasks, environment = world
    policy = TransformersPolicy(model, tokenizer, environment.tools if grammar else None, temperature=temperature)
    for trajectory in run_episodes(policy, tasks, environment, SETTINGS):
        with torch.no_grad():
            logits = model(torch.tensor([trajectory.token_ids])).logits[0] / (temperature or 1.0)
        logprobs = logits.log_softmax(-1)
        for position, sampled in enumerate(trajectory.sampled):
            if sampled:
                expected = logprobs[position - 1, trajectory.token_ids[position]].item()
                assert trajectory.logprobs[position] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("max_batch", [1, 3, 64])
def test_who_else_is_in_the_batch_changes_nothing(tokenizer, model, world, max_batch):
    tasks, environment = world
    outcomes = []
    for width in (max_batch, 5):
        policy = TransformersPolicy(model, tokenizer, environment.tools, temperature=1.0, max_batch=width)
        outcomes.append([t.token_ids for t in run_episodes(policy, tasks, environment, SETTINGS, samples=2, seed=3)])
    assert outcomes[0] == outcomes[1]


def test_only_what_is_new_is_fed(tokenizer, model):
    fed = []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    policy = TransformersPolicy(model, tokenizer)

    async def two_turns():
        first = await policy.turn(TurnRequest("e", [1, 2, 3], 4, 0, TASK))
        history = [1, 2, 3, *first.token_ids, 8, 9]
        return await policy.turn(TurnRequest("e", history, 2, 0, TASK)), history

    second, history = asyncio.run(two_turns())
    handle.remove()
    # The prompt, three tokens one by one; then the fourth with the two new ones, and one more.
    assert fed == [3, 1, 1, 1, 3, 1]
    assert second.token_ids == turns(TransformersPolicy(model, tokenizer), [history], max_new_tokens=2)[0].token_ids


def test_another_history_under_the_same_id_starts_afresh(tokenizer, model):
    policy = TransformersPolicy(model, tokenizer)

    async def two_turns():
        await policy.turn(TurnRequest("e", [1, 2, 3], 4, 0, TASK))
        return await policy.turn(TurnRequest("e", [1, 7, 3, 9, 9, 9, 9, 9], 6, 0, TASK))

    expected = turns(TransformersPolicy(model, tokenizer), [[1, 7, 3, 9, 9, 9, 9, 9]], max_new_tokens=6)[0]
    assert asyncio.run(two_turns()).token_ids == expected.token_ids


def test_slots_are_given_back(tokenizer, model, world):
    tasks, environment = world
    policy = TransformersPolicy(model, tokenizer, environment.tools, max_batch=4)
    run_episodes(policy, tasks, environment, SETTINGS)
    assert sorted(policy._free) == [0, 1, 2, 3]
    assert not policy._slots


def test_with_the_grammar_on_no_turn_is_malformed(tokenizer, model, world):
    tasks, environment = world
    policy = TransformersPolicy(model, tokenizer, environment.tools, temperature=1.5)
    trajectories = run_episodes(policy, tasks, environment, EpisodeSettings(max_new_tokens=300), samples=2)
    closed = [step for t in trajectories for step in t.steps if not step.cut]
    assert closed
    assert all(parse_turn(step.text).kind != "malformed" for step in closed)
    assert any(any(t.forced) for t in trajectories)  # the end of a call is the only choice there


def test_the_same_seed_gives_the_same_turn_and_another_one_another(tokenizer, model):
    policy = TransformersPolicy(model, tokenizer, temperature=1.0)
    first, second, third = (turns(policy, PROMPTS, seeds=seeds) for seeds in ([1] * 4, [1] * 4, [2] * 4))
    assert first == second
    assert first != third


def test_tokens_are_shown_as_they_are_chosen(tokenizer, model):
    seen = []

    async def main():
        policy = TransformersPolicy(model, tokenizer)
        return await policy.turn(TurnRequest("e", [1, 2], 5, 0, TASK, on_token=seen.append))

    assert asyncio.run(main()).token_ids == seen


def test_a_fault_in_the_model_reaches_every_open_episode_and_names_it(tokenizer, model):
    policy = TransformersPolicy(model, tokenizer)
    with pytest.raises(RuntimeError, match=r"the engine failed in episode e\d"):
        turns(policy, [[len(tokenizer) + 5], [1, 2]])  # an id outside the embedding


def test_requests_that_cannot_be_served_say_so(tokenizer, model):
    policy = TransformersPolicy(model, tokenizer)
    for prompt, budget in (([], 5), ([1], 0), ([1] * 1020, 10)):
        with pytest.raises(PolicyError):
            turns(policy, [prompt], max_new_tokens=budget)


@pytest.mark.parametrize(
    "options", [{"temperature": -1}, {"temperature": float("nan")}, {"top_p": 0}, {"top_k": -1}, {"max_batch": 0}]
)
def test_options_out_of_range_are_refused(tokenizer, model, options):
    with pytest.raises(ValueError, match="must be"):
        TransformersPolicy(model, tokenizer, **options)


def test_a_model_with_sliding_windows_is_refused(tokenizer):
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, use_sliding_window=True, sliding_window=8, max_window_layers=1,
    )  # fmt: skip
    with pytest.raises(ValueError, match="full attention"):
        TransformersPolicy(Qwen3ForCausalLM(config), tokenizer)


def test_training_mode_is_left_as_it_was(tokenizer, model):
    model.train()
    turns(TransformersPolicy(model, tokenizer), PROMPTS)
    assert model.training
    model.eval()


class TestSampling:
    logits = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log()

    def draw(self, uniform, **options):
        return _sample_rows(self.logits, torch.tensor([uniform]), options.get("top_p", 1.0), options.get("top_k", 0))

    @pytest.mark.parametrize(("uniform", "token"), [(0.0, 0), (0.49, 0), (0.51, 1), (0.76, 2), (0.99, 3)])
    def test_it_inverts_the_distribution(self, uniform, token):
        assert self.draw(uniform).item() == token

    def test_top_k_and_top_p_leave_the_head(self):
        grid = torch.linspace(0, 1 - 1e-9, 101).tolist()
        assert {self.draw(u, top_k=2).item() for u in grid} == {0, 1}
        assert {self.draw(u, top_p=0.5).item() for u in grid} == {0}
        assert {self.draw(u, top_p=0.51).item() for u in grid} == {0, 1}

    def test_what_the_grammar_forbids_is_never_drawn(self):
        logits = torch.tensor([[float("-inf"), 1.0, float("-inf"), 0.0]])
        for uniform in (0.0, 0.5, 1 - 1e-12):
            assert _sample_rows(logits, torch.tensor([uniform]), 1.0, 0).item() in {1, 3}
