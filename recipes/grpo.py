"""GRPO on whole episodes with real tools, from an SFT checkpoint, with TRL's GRPOTrainer.

    accelerate launch --config_file accelerate_configs/cpu.yaml recipes/grpo.py --config recipes/grpo_research.yaml

`--engine vllm` samples with vLLM in this process instead of the model in training; with `--use_vllm` as well it is
TRL's colocated engine. `--use_peft --lora_target_modules all-linear` trains a LoRA. Sampled episodes go to
`episodes.jsonl`. A run that stopped continues from its newest checkpoint, and a run ends with the best model by the
held-out tasks, so never below where it began.
"""

from dataclasses import dataclass, field

from transformers import AutoTokenizer
from trl import ModelConfig, TrlParser

import stacklm_hf  # noqa: F401 (registers the Auto classes)
from stacklm_hf.training.grpo import AgentGRPOConfig, make_grpo_trainer
from stacklm_hf.training.sft import last_checkpoint, make_peft_config
from stacklm_hf.worlds.research import SPLITS, SeededEnvironment, make_split, make_training_pool


@dataclass
class GRPOArguments:
    engine: str = field(default="transformers", metadata={"help": "What samples: transformers or vllm."})
    eval_split: str = field(default="heldout", metadata={"help": f"What to measure on: {', '.join(SPLITS)}."})
    tasks_per_shape: int = field(default=400, metadata={"help": "Training tasks of each of the four shapes."})
    run_share: float = field(default=0.5, metadata={"help": "Share of them over synthetic runs of other worlds."})
    world_seeds: int = field(default=8, metadata={"help": "Number of those other worlds."})


def main() -> None:
    parser = TrlParser((GRPOArguments, AgentGRPOConfig, ModelConfig))
    arguments, config, model_arguments = parser.parse_args_and_config()
    path = model_arguments.model_name_or_path
    if not path or arguments.engine not in ("transformers", "vllm"):
        raise SystemExit("error: say what to train from (--model_name_or_path), and --engine transformers or vllm")
    tokenizer, environment = AutoTokenizer.from_pretrained(path), SeededEnvironment()
    pool = make_training_pool(0, arguments.tasks_per_shape, arguments.run_share, arguments.world_seeds)
    split = make_split(arguments.eval_split, 0, pool)

    def make_vllm_policy(trainer):
        from stacklm_hf.rollout.vllm_policy import VLLMPolicy

        engine, options = path, {"dtype": "bfloat16" if config.bf16 else "float32"}
        if config.use_vllm:  # TRL built one, and syncs its weights
            engine, options = trainer.vllm_generation.llm, {}
        return VLLMPolicy(
            engine, tokenizer, environment.tools if config.grammar else None, temperature=config.temperature,
            top_p=config.top_p, top_k=config.top_k, **options,
        )  # fmt: skip

    trainer = make_grpo_trainer(
        path, tokenizer, split.train, environment, config, eval_tasks=split.evaluation,
        policy=make_vllm_policy if arguments.engine == "vllm" else None,
        peft_config=make_peft_config(model_arguments),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=last_checkpoint(config.output_dir))
    trainer.save_model(config.output_dir)
    tokenizer.save_pretrained(config.output_dir)
    if trainer.accelerator.is_main_process:
        measured = [row for row in trainer.state.log_history if "eval_agent_score" in row]
        best = max(measured, key=lambda row: row["eval_agent_score"], default=None)
        for name, row in {"before": measured[0], "best": best}.items() if measured else ():
            accuracy, steps = row["eval_agent_accuracy"], row["eval_agent_steps"]
            print(f"{name} (step {row['step']}): accuracy {accuracy:.3f}, {steps:.2f} steps per episode")
    if config.push_to_hub:
        trainer.push_to_hub()


if __name__ == "__main__":
    main()
