"""Supervised fine-tuning on a dataset of trajectories, with TRL's SFTTrainer.

    accelerate launch --config_file accelerate_configs/cpu.yaml recipes/sft.py --config recipes/sft_research.yaml

The student is a named size from random weights (`--student stack-demo`), or any causal language model
(`--model_name_or_path Qwen/Qwen3-0.6B`): the nine control tokens are added where it lacks them. `--use_peft` trains a
LoRA. A run that stopped continues from its newest checkpoint.
"""

from dataclasses import dataclass, field

from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import ModelConfig, TrlParser

import stacklm_hf  # noqa: F401 (registers the Auto classes)
from stacklm_hf.data.dataset import load_rows, retokenize
from stacklm_hf.modeling import add_agent_tokens
from stacklm_hf.training.callbacks import AgentAccuracyCallback
from stacklm_hf.training.sft import AgentSFTConfig, last_checkpoint, make_peft_config, make_trainer
from stacklm_hf.training.student import build_student
from stacklm_hf.worlds.research import SeededEnvironment, make_split


@dataclass
class SFTArguments:
    dataset: str = field(metadata={"help": "dataset.parquet of a collection."})
    tokenizer: str | None = field(default=None, metadata={"help": "Tokenizer of a student from random weights."})
    student: str | None = field(default=None, metadata={"help": "Named size to train from random weights."})
    eval_split: str = field(default="heldout", metadata={"help": "Split to measure the agent on while it trains."})
    eval_every: int = field(default=400, metadata={"help": "Steps between two measurements; 0 for none."})


def main() -> None:
    parser = TrlParser((SFTArguments, AgentSFTConfig, ModelConfig))
    arguments, config, model_arguments = parser.parse_args_and_config()
    dataset = load_rows(arguments.dataset)
    if model_arguments.model_name_or_path:
        name, trust = model_arguments.model_name_or_path, config.trust_remote_code
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust)
        model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=trust)
        added = add_agent_tokens(model, tokenizer)
        dataset, dropped = retokenize(dataset, tokenizer, config.max_length)
        print(f"{len(dataset)} trajectories for this tokenizer, {dropped} dropped as longer than {config.max_length}")
    elif arguments.student and arguments.tokenizer:
        tokenizer, added = AutoTokenizer.from_pretrained(arguments.tokenizer), None
        model = build_student(tokenizer, arguments.student, config.seed)
    else:
        raise SystemExit("error: say which model to train: --model_name_or_path, or --student with --tokenizer")
    trainer = make_trainer(model, tokenizer, dataset, config, peft_config=make_peft_config(model_arguments, added))
    if arguments.eval_every:
        tasks = make_split(arguments.eval_split).evaluation
        trainer.add_callback(
            AgentAccuracyCallback(trainer, tokenizer, tasks, SeededEnvironment(), arguments.eval_every)
        )
    trainer.train(resume_from_checkpoint=last_checkpoint(config.output_dir))
    trainer.save_model(config.output_dir)
    if config.push_to_hub:
        trainer.push_to_hub()


if __name__ == "__main__":
    main()
