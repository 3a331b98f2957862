"""Real (not padding) tokens per second of SFT, against SFTTrainer with its defaults on the same data and model.

    python tests/benchmarks/bench_sft.py [--steps 20]

Both train the same fresh model in the same precision and batch size; what differs is how batches are made.
"""

import argparse
import tempfile
import time

from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from stacklm_hf.data import build_dataset
from stacklm_hf.rollout import ScriptedTeacher, run_episodes
from stacklm_hf.training.sft import cpu_supports_bf16, default_sft_config, make_trainer
from stacklm_hf.training.student import build_student, build_tokenizer
from stacklm_hf.worlds.research import SeededEnvironment, make_training_pool


class Meter(TrainerCallback):
    """Seconds from the end of the warm-up to the end."""

    def __init__(self, warmup: int):
        self.warmup = warmup

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.warmup:
            self.start, self.tokens = time.perf_counter(), state.num_input_tokens_seen

    def on_train_end(self, args, state, control, **kwargs):
        self.seconds = time.perf_counter() - self.start
        self.tokens = state.num_input_tokens_seen - self.tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=6)
    options = parser.parse_args()
    environment, tasks = SeededEnvironment(), make_training_pool(0, 120)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = build_tokenizer(f"{folder}/tokenizer", tasks, environment, 1024)
        dataset, _ = build_dataset(run_episodes(ScriptedTeacher(tokenizer), tasks, environment), tokenizer)
        common = {
            "max_steps": options.steps,
            "per_device_train_batch_size": 16,
            "bf16": cpu_supports_bf16(),
            "use_cpu": True,
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
            "include_num_input_tokens_seen": "non_padding",
            "logging_steps": 1000,
        }
        ours = make_trainer(
            build_student(tokenizer, "stack-demo", 0), tokenizer, dataset, default_sft_config(f"{folder}/a", **common)
        )
        defaults = SFTTrainer(
            model=build_student(tokenizer, "stack-demo", 0),
            args=SFTConfig(f"{folder}/b", **common),
            train_dataset=dataset.select_columns(["input_ids", "assistant_masks"]),
            processing_class=tokenizer,
        )
        float32 = make_trainer(
            build_student(tokenizer, "stack-demo", 0),
            tokenizer,
            dataset,
            default_sft_config(f"{folder}/c", **{**common, "bf16": False}),
        )
        rates = {}
        for name, trainer in {"ours": ours, "SFTTrainer's defaults": defaults, "ours in float32": float32}.items():
            meter = Meter(options.warmup)
            trainer.add_callback(meter)
            trainer.train()
            rates[name] = meter.tokens / meter.seconds
    print("real tokens per second")
    for name, rate in rates.items():
        print(f"  {name:<22} {rate:8.0f}   ours is {rates['ours'] / rate:.2f}x")
    print(f"  padding share of ours: {ours.padding_share:.3f}")


if __name__ == "__main__":
    main()
