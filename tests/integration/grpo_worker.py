"""What a process of `test_grpo_processes.py` does: `accelerate launch grpo_worker.py MODE STUDENT OUT`.

MODE is `train`, `stop` (after the first step), `resume` (from the newest checkpoint in OUT), `raise` (the second
process fails in its first rollout) or `shard` (FSDP 2 on the CPU). Each process writes what it saw to
OUT/MODE-RANK.json.
"""

import json
import os
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

import stacklm_hf  # noqa: F401 (registers the Auto classes)
from stacklm_hf.training.grpo import AgentGRPOConfig, make_grpo_trainer
from stacklm_hf.training.sft import last_checkpoint
from stacklm_hf.training.weights import unsharded
from stacklm_hf.worlds.research import ResearchEnvironment, build_corpus, make_task_pool

STEPS, BATCH, GROUP = 3, 12, 4  # three groups: with two processes the middle one is on both


def by_length(trajectory, **columns):
    return [len(episode.token_ids) % 7 / 7 for episode in trajectory]


class StopAfterOne(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = True


def train(mode: str, student: str, out: str) -> dict:
    """Trains on five tasks, of which an epoch takes three; measures on three tasks, which two processes share.

    No episode is right and steps cost nothing, so that every group is stale to dynamic sampling.
    """
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    config = AgentGRPOConfig(
        out, max_steps=STEPS, per_device_train_batch_size=BATCH // world_size, num_generations=GROUP,
        learning_rate=3e-3, step_penalty=0.0, max_turns=3, max_turn_tokens=32, forced_answer_tokens=12,
        max_episode_tokens=400, dynamic_sampling=True, dynamic_sampling_budget=1.0, eval_steps=1, save_steps=1,
        save_total_limit=None, use_cpu=True, report_to="none", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    tasks, heldout = ([task for task in part if len(task.facts) == 1] for part in make_task_pool())
    trainer = make_grpo_trainer(
        student, AutoTokenizer.from_pretrained(student), tasks[:5], ResearchEnvironment(build_corpus()), config,
        eval_tasks=heldout[:3], reward_funcs=by_length,
    )  # fmt: skip
    seen: dict = {"advantages": [], "episodes": []}
    score = trainer._generate_and_score_completions

    def record(inputs):
        if mode == "raise" and trainer.accelerator.process_index == 1:
            raise RuntimeError("the second process has had enough")
        output = score(inputs)
        seen["advantages"].append(output["advantages"].tolist())
        seen["episodes"].append([episode.episode_id for episode in trainer.rollout.last.batch])
        return output

    trainer._generate_and_score_completions = record
    if mode == "stop":
        trainer.add_callback(StopAfterOne())
    trainer.train(resume_from_checkpoint=last_checkpoint(out) if mode == "resume" else None)
    seen["log"] = trainer.state.log_history
    return seen


def shard(student: str) -> dict:
    """Samples with a sharded model: the processes run different numbers of forward passes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    model = AutoModelForCausalLM.from_pretrained(student).eval()
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        expected = model(ids).logits
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with unsharded(model):
        for _ in range(1 + 3 * torch.distributed.get_rank()):
            with torch.inference_mode():
                alone = model(ids).logits
        whole = all(type(parameter.data) is torch.Tensor for parameter in model.parameters())
    sharded = all(hasattr(parameter, "full_tensor") for parameter in model.parameters())
    together = model(ids).logits
    together.sum().backward()
    same = torch.allclose(alone, expected, atol=1e-5) and torch.allclose(together, expected, atol=1e-5)
    return {"same": same, "whole": whole, "sharded": sharded}


def main() -> None:
    mode, student, out = sys.argv[1:4]
    seen = shard(student) if mode == "shard" else train(mode, student, out)
    Path(out).mkdir(parents=True, exist_ok=True)
    (Path(out) / f"{mode}-{os.environ.get('RANK', 0)}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
