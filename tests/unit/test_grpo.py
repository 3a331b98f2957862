"""A GRPO step: on policy to 1e-4, exact where nothing is to be learned, and its health in the log."""

import copy
import math

import pytest
import torch
from peft import LoraConfig
from tiny_grpo import LARGEST_GAP, by_length, config, make, rows
from tiny_student import tiny_student, world
from transformers import AutoModelForCausalLM

from stacklm_hf.data.store import read_trajectories
from stacklm_hf.evaluation import write_report
from stacklm_hf.rollout.transformers_policy import TransformersPolicy
from stacklm_hf.training.grpo import EPISODES_FILE, AgentGRPOConfig


def one_batch(trainer):
    """The inputs of a step, as the trainer makes them, with one micro-batch."""
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))


class TestExactness:
    @pytest.mark.parametrize("grammar", [True, False])
    @pytest.mark.parametrize("temperature", [0.7, 1.0])
    def test_the_importance_ratio_is_1_before_and_after_updates(self, tmp_path, temperature, grammar):
        trainer = make(tmp_path, options={"temperature": temperature, "grammar": grammar, "max_steps": 3})
        before = copy.deepcopy(trainer.model.state_dict())
        trainer.train()
        moved = max((before[name] - weight).abs().max() for name, weight in trainer.model.state_dict().items())
        assert moved > 1e-2
        gaps = [row[LARGEST_GAP] for row in rows(trainer)]
        assert len(gaps) == 3
        assert math.expm1(max(gaps)) < 1e-4
        if grammar:  # and it had something to say
            assert any(row["tokens/trained_share"] < row["tokens/own_share"] for row in rows(trainer))

    def test_weights_perturbed_by_hand_are_those_that_sample(self, tmp_path):
        trainer = make(tmp_path, options={"gradient_accumulation_steps": 1})
        for _ in range(2):
            trainer._buffered_inputs = None
            trainer._compute_loss(trainer.model, one_batch(trainer))
            assert math.expm1(trainer._gap.pop()[LARGEST_GAP]) < 1e-4
            with torch.no_grad():
                for weight in trainer.model.parameters():
                    weight += 0.05 * torch.randn_like(weight)

    def test_a_sampler_with_stale_weights_would_be_seen(self, tmp_path):
        stale = AutoModelForCausalLM.from_pretrained(tiny_student()[0])
        policy = TransformersPolicy(stale, tiny_student()[1], world()[2].tools, temperature=0.7)
        trainer = make(tmp_path, policy=policy)
        trainer.train()
        first, second = (row[LARGEST_GAP] for row in rows(trainer))
        assert first < 1e-4
        assert second > 1e-2

    def test_with_several_updates_a_batch_the_gap_is_still_that_of_the_sampling(self, tmp_path):
        trainer = make(tmp_path, options={"num_iterations": 2, "max_steps": 4})
        trainer.train()
        assert max(row[LARGEST_GAP] for row in rows(trainer)) < 1e-4
        assert max(row["clip_ratio/region_mean"] for row in rows(trainer)) > 0  # the second pass is off policy


class TestLoss:
    def test_eight_rewards_of_0_7_have_exactly_no_advantage(self, tmp_path):
        options = {"num_generations": 8, "beta": 0.0, "max_steps": 1}
        trainer = make(tmp_path, options=options, reward_funcs=lambda prompts, **_: [0.7] * len(prompts))
        before = copy.deepcopy(trainer.model.state_dict())
        trainer.train()
        (row,) = rows(trainer)
        assert (row["loss"], row["grad_norm"], row["groups/degenerate"]) == (0.0, 0.0, 1.0)
        assert all(torch.equal(before[name], weight) for name, weight in trainer.model.state_dict().items())

    def test_advantages_are_relative_to_the_group_with_its_standard_deviation(self, tmp_path):
        trainer = make(tmp_path, options={"gradient_accumulation_steps": 1})
        seen = []
        generate = trainer._generate_and_score_completions
        trainer._generate_and_score_completions = lambda inputs: seen.append(generate(inputs)) or seen[-1]
        one_batch(trainer)
        rewards = torch.tensor(by_length(trainer.rollout.last.batch)).view(-1, 4)
        expected = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        assert torch.allclose(seen[0]["advantages"].view(-1, 4), expected, atol=1e-5)

    def test_it_is_the_mean_over_all_trained_tokens_however_the_batch_is_cut(self, tmp_path):
        losses = {}
        for micro in (16, 8, 4):
            options = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": 16 // micro}
            trainer = make(tmp_path / str(micro), options={**options, "max_steps": 1, "beta": 0.0})
            trainer.train()
            losses[micro] = rows(trainer)[0]["loss"]
            own = [[s and not f for s, f in zip(e.sampled, e.forced, strict=True)] for e in trainer.rollout.last.batch]
            tokens = torch.tensor([sum(mask) for mask in own])
            rewards = torch.tensor(by_length(trainer.rollout.last.batch)).view(-1, 4)
            advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
            by_hand = -(advantages.flatten() * tokens).sum() / tokens.sum()
            assert losses[micro] == pytest.approx(by_hand.item(), abs=1e-5)

    def test_a_batch_that_is_all_masked_gives_a_finite_loss_of_0(self, tmp_path):
        options = {"max_turn_tokens": 2, "mask_truncated_completions": True, "max_steps": 1}
        trainer = make(tmp_path, options=options)
        trainer.train()
        (row,) = rows(trainer)
        assert (row["loss"], row["grad_norm"], row["agent/truncated"]) == (0.0, 0.0, 1.0)
        assert all(math.isfinite(value) for value in row.values())

    def test_what_is_outside_of_the_mask_cannot_reach_it(self, tmp_path):
        trainer = make(tmp_path, options={"gradient_accumulation_steps": 1})
        inputs = one_batch(trainer)
        outside = ~(inputs["completion_mask"] * inputs["tool_mask"]).bool()
        assert outside.any()
        loss = trainer._compute_loss(trainer.model, inputs)
        drifted = inputs["ref_per_token_logps"].masked_fill(outside, 1000.0)
        assert torch.equal(trainer._compute_loss(trainer.model, inputs | {"ref_per_token_logps": drifted}), loss)


class TestHealth:
    def test_every_row_says_how_the_run_is(self, tmp_path):
        trainer = make(tmp_path, options={"dynamic_sampling": True}, reward_funcs=by_length)
        trainer.train()
        wanted = {
            "reward", "reward_std", "kl", "entropy", "agent/accuracy", "agent/steps", "agent/calls",
            "agent/malformed_calls", "agent/repeated_calls", "groups/degenerate", "groups/fresh", "groups/replaced",
            "tokens/own_share", "tokens/own_per_second", "sampling/sampling_logp_difference/mean", LARGEST_GAP,
            "time/rollout", "time/scoring", "time/sync",
        }  # fmt: skip
        for row in rows(trainer):
            assert wanted <= set(row)
            assert any(name.startswith("agent/accuracy_") for name in row)

    def test_an_answered_turn_is_not_counted_as_clipped_and_a_cut_one_is(self, tmp_path):
        trainer = make(tmp_path, options={"max_steps": 1})
        trainer.train()
        reasons = [str(episode.stop_reason) for episode in trainer.rollout.last.batch]
        assert {"answered", "length"} <= set(reasons)
        cut = [episode for episode in trainer.rollout.last.batch if episode.steps[-1].cut]
        assert rows(trainer)[0]["completions/clipped_ratio"] == pytest.approx(len(cut) / len(reasons))

    def test_sampled_episodes_are_saved_and_open_in_the_report(self, tmp_path):
        trainer = make(tmp_path, options={"save_episodes_every": 2, "max_steps": 3})
        trainer.train()
        episodes = list(read_trajectories(tmp_path / EPISODES_FILE))
        assert [episode.sampling["step"] for episode in episodes] == [0] * 16 + [2] * 16
        report = write_report(
            tmp_path / "report.html", {"GRPO": episodes}, title="Sampled", tokenizer=tiny_student()[1]
        )
        assert "GRPO" in report.read_text()

    def test_reward_functions_get_whole_episodes_and_the_columns_of_their_tasks(self, tmp_path):
        seen = {}

        def reward(completions, **columns):
            seen.update(columns, completions=completions)
            return columns["reward"]

        trainer = make(tmp_path, options={"max_steps": 1}, reward_funcs=reward)
        trainer.train()
        by_id = {task.task_id: task for task in world()[0]}
        assert seen["gold"] == [by_id[task_id].gold for task_id in seen["task_id"]]
        for completion, steps in zip(seen["completions"], seen["steps"], strict=True):
            roles = [message["role"] for message in completion]
            assert roles.count("assistant") == steps
            assert roles[0] == "assistant"
        assert any(len(completion) > 2 for completion in seen["completions"])
        assert rows(trainer)[0]["reward"] == pytest.approx(sum(seen["reward"]) / 16, abs=1e-6)


def test_an_engine_is_given_the_weights_before_each_rollout(tmp_path):
    class Engine(TransformersPolicy):
        pushed = 0

        def push_weights(self, weights):
            self.pushed += 1
            self.model.load_state_dict(dict(weights), strict=False)

    def engine(trainer):
        (path, tokenizer), tools = tiny_student(), world()[2].tools
        return Engine(AutoModelForCausalLM.from_pretrained(path), tokenizer, tools, temperature=trainer.temperature)

    trainer = make(tmp_path, policy=engine)
    trainer.train()
    assert trainer.rollout.policy.pushed == 2
    assert max(row[LARGEST_GAP] for row in rows(trainer)) < 1e-4
    assert all(row["time/sync"] > 0 for row in rows(trainer))


class TestConfig:
    def test_the_defaults_are_those_that_are_documented(self, tmp_path):
        c = AgentGRPOConfig(str(tmp_path), use_cpu=True)
        assert (c.num_generations, c.max_turns, c.temperature, c.epsilon, c.beta) == (8, 6, 0.7, 0.2, 0.02)
        assert (c.loss_type, c.scale_rewards, c.num_iterations) == ("dapo", "group", 1)
        assert c.episode_settings.max_steps == 6
        assert c.episode_settings.step_penalty == 0.05

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"temperature": 0.0}, "temperature must be above 0"),
            ({"min_p": 0.1}, "without min_p"),
            ({"dynamic_sampling": True, "dynamic_sampling_budget": 0.0}, "dynamic_sampling_budget above 0"),
            ({"save_strategy": "steps", "save_steps": 3, "num_iterations": 2}, "does not resume exactly"),
        ],
    )
    def test_what_cannot_work_is_said_at_once(self, tmp_path, options, message):
        with pytest.raises(ValueError, match=message):
            config(tmp_path, **options)

    def test_an_engine_of_trl_that_nothing_samples_with_is_not_started(self, tmp_path):
        with pytest.raises(ValueError, match="give a policy that does"):
            make(tmp_path, options={"use_vllm": True})

    def test_an_adapter_that_trains_token_rows_is_refused(self, tmp_path):
        lora = LoraConfig(target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [0]})
        with pytest.raises(ValueError, match="does not see trained token rows"):
            make(tmp_path, peft_config=lora)

    def test_a_model_that_was_never_saved_has_no_reference(self, tmp_path):
        model = AutoModelForCausalLM.from_pretrained(tiny_student()[0])
        model.config._name_or_path = ""
        with pytest.raises(ValueError, match="save it first, or set beta to 0"):
            make(tmp_path, model=model)
        assert make(tmp_path, model=model, options={"beta": 0.0}).ref_model is None
