"""GRPO: episodes per second against TRL's own tool loop, the engine against its raw decode rate, and a step in parts.

    python tests/benchmarks/bench_grpo.py [--model runs/demo/checkpoint] [--engine vllm]

Both loops play the same tasks with the same model at the same temperature. TRL's is `GRPOTrainer` with an
`environment_factory`: `generate` for all episodes at once, turn by turn, without a grammar. Without --model a student
of demo size is trained for some steps first, so that its episodes call tools and end.
"""

import argparse
import asyncio
import tempfile
import time

import torch
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from stacklm_hf.data import build_dataset
from stacklm_hf.rollout import ScriptedTeacher, TurnRequest, run_episodes
from stacklm_hf.rollout.transformers_policy import TransformersPolicy
from stacklm_hf.training.grpo import AgentGRPOConfig, make_grpo_trainer
from stacklm_hf.training.rollouts import prompt_dataset
from stacklm_hf.training.sft import default_sft_config, make_trainer
from stacklm_hf.training.student import build_student, build_tokenizer
from stacklm_hf.training.trl_environment import environment_reward, make_trl_environment
from stacklm_hf.worlds.base import Task
from stacklm_hf.worlds.research import SeededEnvironment, make_task_pool

TEMPERATURE, GROUP = 0.7, 8
COMMON = {"num_generations": GROUP, "temperature": TEMPERATURE, "learning_rate": 1e-5, "bf16": False, "use_cpu": True,
          "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "gradient_checkpointing": False,
          "dataloader_pin_memory": False, "shuffle_dataset": False, "logging_steps": 1}  # fmt: skip


class Clock:
    """Adds up the seconds that a method takes."""

    def __init__(self, owner: object, name: str):
        self.seconds, self._method = 0.0, getattr(owner, name)
        setattr(owner, name, self)

    def __call__(self, *args, **kwargs):
        start = time.perf_counter()
        try:
            return self._method(*args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - start


def train_student(folder: str, environment: SeededEnvironment, tasks: list[Task], steps: int) -> None:
    tokenizer = build_tokenizer(folder, tasks, environment, 1024)
    dataset, _ = build_dataset(run_episodes(ScriptedTeacher(tokenizer), tasks, environment), tokenizer)
    model = build_student(tokenizer, "stack-demo", 0)
    options = {"max_steps": steps, "learning_rate": 5e-3, "muon_learning_rate": 0.02, "per_device_train_batch_size": 16}
    config = default_sft_config(f"{folder}/sft", **options, bf16=False, save_strategy="no", report_to="none")
    make_trainer(model, tokenizer, dataset, config).train()
    model.save_pretrained(folder)


def raw_decode_rate(model: torch.nn.Module, tokenizer: object, batch: int, context: int, tokens: int) -> float:
    """Tokens per second of the transformers engine that only decodes: full batch, no tools, no grammar, no end."""
    policy = TransformersPolicy(model, tokenizer, None, temperature=TEMPERATURE, max_batch=batch)
    policy.end_id = -1
    prompt, starts = [300] * context, []

    async def main() -> None:
        requests = [
            TurnRequest(
                f"e{i}", prompt, tokens, i, Task("q", "a"), on_token=lambda _: starts.append(time.perf_counter())
            )
            for i in range(batch)
        ]
        await asyncio.gather(*(policy.turn(request) for request in requests))

    asyncio.run(main())
    return batch * (tokens - 1) / (starts[-1] - starts[batch - 1])  # from the end of the prefill on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="checkpoint folder; default: a student trained here")
    parser.add_argument("--sft_steps", type=int, default=150, help="steps of that training")
    parser.add_argument("--episodes", type=int, default=128, help="episodes of a rollout, a multiple of 8")
    parser.add_argument("--batch", type=int, default=64, help="episodes at once")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--steps", type=int, default=3, help="GRPO steps, of which the first is not counted")
    options = parser.parse_args()
    environment, tasks = SeededEnvironment(), make_task_pool()[0]
    with tempfile.TemporaryDirectory() as folder:
        path = options.model or folder
        if not options.model:
            train_student(folder, environment, tasks, options.sft_steps)
        tokenizer = AutoTokenizer.from_pretrained(path)
        micro = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": options.episodes // 16}
        common = {**COMMON, **micro, "max_steps": options.steps}

        def engine(trainer):
            from stacklm_hf.rollout.vllm_policy import VLLMPolicy

            return VLLMPolicy(path, tokenizer, environment.tools, temperature=TEMPERATURE, dtype="float32",
                              max_num_seqs=options.batch)  # fmt: skip

        config = AgentGRPOConfig(f"{folder}/ours", **common, rollout_batch_size=options.batch, keep_best=False)
        ours = make_grpo_trainer(
            path, tokenizer, tasks, environment, config, policy=engine if options.engine == "vllm" else None
        )
        clocks = {"forward": Clock(ours, "compute_loss"), "backward": Clock(ours.accelerator, "backward")}
        ours.train()
        log = [row for row in ours.state.log_history if "time/rollout" in row]
        counted = log[1:]
        seconds = sum(row["time/rollout"] for row in counted) / len(counted)
        own = max(row["tokens/own_per_second"] for row in counted)

        theirs = GRPOTrainer(
            path,
            reward_funcs=environment_reward,
            args=GRPOConfig(f"{folder}/theirs", **{**common, "max_steps": 2}, beta=0.02, max_completion_length=800,
                            max_tool_calling_iterations=6),
            train_dataset=prompt_dataset(tasks, environment.system_prompt),
            processing_class=tokenizer,
            environment_factory=make_trl_environment(environment),
        )  # fmt: skip
        clock = Clock(theirs, "_generate")
        theirs.train()
        their_seconds = clock.seconds / 2
        mean_length = sum(len(episode.token_ids) for episode in ours.rollout.last.batch) / options.episodes
        context = int(mean_length / 2)
        raw = max(raw_decode_rate(ours.model, tokenizer, options.batch, context, 64) for _ in range(3))

    print(f"{options.engine} engine, {options.episodes} episodes of {counted[-1]['agent/steps']:.1f} turns and "
          f"{mean_length:.0f} tokens, {options.batch} at once")  # fmt: skip
    print(f"  ours           {options.episodes / seconds:8.2f} episodes/s")
    print(
        f"  TRL's own loop {options.episodes / their_seconds:8.2f} episodes/s   ours is {their_seconds / seconds:.1f}x"
    )
    print(f"  own tokens     {own:8.0f} tokens/s; the transformers engine decodes {raw:.0f} at batch {options.batch}: "
          f"{own / raw:.2f}")  # fmt: skip
    parts = {
        name: sum(row[f"time/{name}"] for row in counted) / len(counted) for name in ("rollout", "sync", "scoring")
    }
    parts |= {name: clock.seconds / len(log) for name, clock in clocks.items()}
    whole = sum(row["step_time"] for row in counted) / len(counted)
    print(f"  a step of {whole:.1f} s: " + ", ".join(f"{name} {part:.2f} s ({part / whole:.0%})"
                                                   for name, part in parts.items()))  # fmt: skip


if __name__ == "__main__":
    main()
