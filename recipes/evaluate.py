"""Evaluates a checkpoint as an agent on the research world and writes report.html.

    python recipes/evaluate.py --model runs/demo/checkpoint --out runs/eval --splits heldout runs reworded

Greedy by default; `--temperature 0.7 --samples 8` gives avg@8 and pass@8. Run again, it continues.
Another model, or the same one trained on, wants another `--out`.
"""

from dataclasses import dataclass, field
from pathlib import Path

from transformers import HfArgumentParser

import stacklm_hf  # noqa: F401 (registers the Auto classes)
from stacklm_hf.ask import load_policy
from stacklm_hf.evaluation.metrics import summarize
from stacklm_hf.evaluation.report import write_report
from stacklm_hf.evaluation.run import evaluate
from stacklm_hf.evaluation.table import format_table
from stacklm_hf.worlds.research import SPLITS, SeededEnvironment, make_split


@dataclass
class EvaluateArguments:
    model: str = field(metadata={"help": "Checkpoint folder or Hub id."})
    out: str = field(metadata={"help": "Folder for the episodes and report.html."})
    splits: list[str] = field(default_factory=lambda: ["heldout"], metadata={"help": f"Any of {', '.join(SPLITS)}."})
    samples: int = field(default=1, metadata={"help": "Episodes of each task."})
    temperature: float = field(default=0.0, metadata={"help": "0 for greedy."})
    seed: int = field(default=0, metadata={"help": "Seed of the sampling."})
    grammar: bool = field(default=True, metadata={"help": "Constrain the syntax of calls."})


def main() -> None:
    (arguments,) = HfArgumentParser(EvaluateArguments).parse_args_into_dataclasses()
    try:
        measure(arguments)
    except (ValueError, OSError, RuntimeError) as error:
        raise SystemExit(f"error: {error}") from error


def measure(arguments: EvaluateArguments) -> None:
    environment, out = SeededEnvironment(), Path(arguments.out)
    tasks = {name: make_split(name).evaluation for name in arguments.splits}
    policy = load_policy(arguments.model, environment, arguments.temperature, grammar=arguments.grammar)
    runs = {
        name: evaluate(policy, split, environment, out / f"{name.replace(':', '-')}.jsonl",
                       samples=arguments.samples, seed=arguments.seed, progress=name)
        for name, split in tasks.items()
    }  # fmt: skip
    by_id = {task.task_id: task for split in tasks.values() for task in split}
    print(format_table({name: summarize(run, by_id, label=name) for name, run in runs.items()}))
    report = write_report(out / "report.html", runs, title=f"Evaluation of {arguments.model}", tasks=by_id,
                          metadata=dict(vars(arguments)), tokenizer=policy.tokenizer)  # fmt: skip
    print(report)


if __name__ == "__main__":
    main()
