"""A whole GRPO run: it never ends below where it began, it resumes, and an adapter leaves its base alone."""

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from peft import LoraConfig
from tiny_grpo import LARGEST_GAP, curve, make, rows
from tiny_student import tiny_student, world
from transformers import AutoModelForCausalLM, TrainerCallback

from stacklm_hf.data.store import read_trajectories
from stacklm_hf.training.grpo import EPISODES_FILE
from stacklm_hf.training.sft import last_checkpoint
from stacklm_hf.training.weights import plain_weights, whole_model

CONFIGS = Path(__file__).parents[2] / "accelerate_configs"


def test_a_run_learns_what_it_is_paid_for(tmp_path):
    short = lambda trajectory, **_: [-episode.num_sampled / 50 for episode in trajectory]  # noqa: E731
    options = {"max_steps": 6, "beta": 0.0, "lr_scheduler_type": "constant"}
    trainer = make(tmp_path, options=options, reward_funcs=short)
    trainer.train()
    rewards = [row["reward"] for row in rows(trainer)]
    assert rewards[-1] > rewards[0] / 4


class TestKeepBest:
    OPTIONS = {"keep_best": True, "eval_steps": 1, "save_strategy": "steps", "save_steps": 2}  # noqa: RUF012

    def run(self, tmp_path, measured, **options):
        """A run in which the held-out tasks are said to go as `measured`: (right ones of 4, turns) in order."""
        trainer = make(tmp_path, options={**self.OPTIONS, **options}, eval_tasks=world()[1][:4])
        evaluate, weights = trainer.rollout.evaluate, []

        def pretend(tasks, trainer):
            weights.append(copy.deepcopy(trainer.model.state_dict()))
            episodes, (right, turns) = evaluate(tasks, trainer), measured[len(weights) - 1]
            for index, episode in enumerate(episodes):
                episode.correct = index < right
                episode.steps = (episode.steps * turns)[:turns]
            return episodes

        trainer.rollout.evaluate = pretend
        trainer.train()
        same = [
            all(torch.equal(weight, trainer.model.state_dict()[name]) for name, weight in state.items())
            for state in weights
        ]
        return trainer, same

    def test_a_run_that_only_harms_ends_where_it_began(self, tmp_path):
        trainer, same = self.run(tmp_path, [(3, 2), (2, 2), (0, 2), (2, 2)], max_steps=3)
        assert same == [True, False, False, False]
        assert [row["eval_agent_accuracy"] for row in rows(trainer, "eval_agent_accuracy")] == [0.75, 0.5, 0.0, 0.5]

    def test_it_ends_with_the_best_by_accuracy_also_between_two_checkpoints(self, tmp_path):
        _, same = self.run(tmp_path, [(1, 1), (3, 3), (2, 1)])
        assert same == [False, True, False]

    def test_of_equal_ones_the_shorter_wins_then_the_earlier(self, tmp_path):
        _, same = self.run(tmp_path, [(2, 3), (2, 2), (2, 2)])
        assert same == [False, True, False]

    def test_a_resumed_run_remembers_what_it_began_with(self, tmp_path):
        first, _ = self.run(tmp_path, [(3, 1), (0, 1), (0, 1)])
        again = make(tmp_path, options={**self.OPTIONS, "max_steps": 4}, eval_tasks=world()[1][:4])
        again.train(resume_from_checkpoint=last_checkpoint(tmp_path))
        assert again.state.best_metric == first.state.best_metric
        began = AutoModelForCausalLM.from_pretrained(tiny_student()[0]).state_dict()
        assert all(torch.equal(began[name], weight) for name, weight in again.model.state_dict().items())

    def test_measuring_changes_nothing(self, tmp_path):
        plain = make(tmp_path / "a")
        plain.train()
        measured = make(tmp_path / "b", options=self.OPTIONS)
        measured.train()
        assert curve(measured) == curve(plain)

    def test_it_needs_held_out_tasks(self, tmp_path):
        with pytest.raises(ValueError, match="keep_best needs held-out tasks"):
            make(tmp_path, options={"keep_best": True, "save_strategy": "steps"}, eval_tasks=())


class TestResume:
    @pytest.mark.parametrize("stop", [3, 4])  # once past a checkpoint, once right at one
    def test_a_stopped_run_goes_on_with_the_same_tasks_and_losses(self, tmp_path, stop):
        options = {"max_steps": 5, "save_strategy": "steps", "save_steps": 2, "save_total_limit": None}
        tasks = world()[0][:13]  # four a step, so an epoch has 3 steps and leaves a task over
        whole = make(tmp_path / "a", options=options, tasks=tasks)
        whole.train()

        class Stop(TrainerCallback):
            def on_step_begin(self, args, state, control, **kwargs):
                if state.global_step == stop:
                    raise KeyboardInterrupt

        first = make(tmp_path / "b", options=options, tasks=tasks)
        first.add_callback(Stop())
        with pytest.raises(KeyboardInterrupt):
            first.train()
        second = make(tmp_path / "b", options=options, tasks=tasks)
        second.train(resume_from_checkpoint=last_checkpoint(tmp_path / "b"))
        assert [step for step, *_ in curve(second)] == [1, 2, 3, 4, 5]
        for resumed, expected in zip(curve(second), curve(whole), strict=True):
            assert resumed == pytest.approx(expected, abs=1e-6)
        played = [[e.episode_id for e in read_trajectories(tmp_path / run / EPISODES_FILE)] for run in "ab"]
        assert played[0] == played[1]


class TestLora:
    LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], lora_dropout=0.1)

    def test_adapters_train_on_policy_and_the_base_stays(self, tmp_path):
        trainer = make(tmp_path, peft_config=self.LORA, options={"max_steps": 3})
        base = {name: weight.clone() for name, weight in trainer.model.named_parameters() if "lora_" not in name}
        trainer.train()
        assert max(row[LARGEST_GAP] for row in rows(trainer)) < 1e-4
        now = dict(trainer.model.named_parameters())
        assert all(torch.equal(weight, now[name]) for name, weight in base.items())
        assert any(weight.abs().max() > 0 for name, weight in now.items() if "lora_B" in name)

    def test_fifty_syncs_leave_the_base_bit_identical(self, tmp_path):
        trainer = make(tmp_path, peft_config=self.LORA, options={"max_steps": 1})
        trainer.train()
        before = {name: weight.clone() for name, weight in trainer.model.named_parameters()}
        for _ in range(50):
            with plain_weights(trainer) as weights:
                pushed = {name: weight.clone() for name, weight in weights}
        after = dict(trainer.model.named_parameters())
        assert all(torch.equal(weight, after[name]) for name, weight in before.items())
        plain = AutoModelForCausalLM.from_pretrained(tiny_student()[0])
        assert set(pushed) == {name for name, _ in plain.named_parameters()}
        plain.load_state_dict(pushed, strict=False)
        ids = torch.arange(20)[None]
        with torch.no_grad():
            assert torch.allclose(plain(ids).logits, trainer.model.eval()(ids).logits, atol=1e-5)


def test_a_model_that_cannot_run_alone_is_refused():
    plugin = SimpleNamespace(fsdp_version=1)
    trainer = SimpleNamespace(accelerator=SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin)))
    with pytest.raises(ValueError, match="set fsdp_version: 2"), whole_model(trainer):
        pass


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_reads_its_configs(path):
    config = load_config_from_file(str(path))
    assert config.mixed_precision == "no"  # float32, in which sampler and trainer agree
    assert (config.num_processes > 1) == (path.stem not in ("cpu", "single_gpu"))
    assert config.use_cpu == ("cpu" in path.stem)
