"""Collects trajectories of the scripted teacher and builds the dataset of the verified ones.

    python recipes/collect.py --out runs/research --tasks_per_shape 400

Run again, it continues: no collected trajectory is lost or repeated. Other arguments want another `--out`.
"""

from dataclasses import dataclass, field
from pathlib import Path

from transformers import HfArgumentParser

from stacklm_hf.data.dataset import build_dataset, save_dataset, supervised_share
from stacklm_hf.data.filters import TrajectoryFilter
from stacklm_hf.data.store import read_trajectories
from stacklm_hf.evaluation.run import run_into_store
from stacklm_hf.modeling import StackTokenizerFast
from stacklm_hf.rollout import ScriptedTeacher
from stacklm_hf.stages import Stages
from stacklm_hf.training.student import build_tokenizer
from stacklm_hf.worlds.research import SeededEnvironment, make_split, make_training_pool


@dataclass
class CollectArguments:
    out: str = field(metadata={"help": "Folder for trajectories.jsonl, dataset.parquet and the tokenizer."})
    tokenizer: str | None = field(default=None, metadata={"help": "Stack tokenizer to use; trained here if unset."})
    vocab_size: int = field(default=1536, metadata={"help": "Vocabulary of a tokenizer trained here."})
    split: str = field(default="heldout", metadata={"help": "What must not be trained on: see worlds.research.SPLITS."})
    tasks_per_shape: int = field(default=400, metadata={"help": "Training tasks of each of the four shapes."})
    run_share: float = field(default=0.5, metadata={"help": "Share of them over synthetic runs of other worlds."})
    world_seeds: int = field(default=8, metadata={"help": "Number of those other worlds."})
    samples: int = field(default=1, metadata={"help": "Trajectories for each task, in words drawn anew if above 1."})
    seed: int = field(default=0, metadata={"help": "Seed of the draws."})
    max_length: int = field(default=1024, metadata={"help": "Longer trajectories are dropped and counted."})


def main() -> None:
    (arguments,) = HfArgumentParser(CollectArguments).parse_args_into_dataclasses()
    try:
        collect(arguments)
    except (ValueError, OSError, RuntimeError) as error:
        raise SystemExit(f"error: {error}") from error


def collect(arguments: CollectArguments) -> None:
    out, environment = Path(arguments.out), SeededEnvironment()
    pool = make_training_pool(0, arguments.tasks_per_shape, arguments.run_share, arguments.world_seeds)
    tasks = make_split(arguments.split, 0, pool).train
    # Episodes of other tasks in the same folder would be taken for this collection's.
    stages = Stages(out, {name: value for name, value in vars(arguments).items() if name not in ("out", "tokenizer")})
    if not arguments.tokenizer and "tokenizer" not in stages:
        with stages.stage("tokenizer"):
            build_tokenizer(out / "tokenizer", tasks, environment, arguments.vocab_size)
    tokenizer = StackTokenizerFast.from_pretrained(arguments.tokenizer or out / "tokenizer")
    teacher = ScriptedTeacher(tokenizer, temperature=0.0 if arguments.samples == 1 else 1.0)
    path = out / "trajectories.jsonl"
    run_into_store(
        teacher, tasks, environment, path, samples=arguments.samples, seed=arguments.seed, progress="collect"
    )
    chosen = TrajectoryFilter(max_length=arguments.max_length)
    dataset, _ = build_dataset(chosen.keep(read_trajectories(path)), tokenizer, arguments.max_length)
    save_dataset(dataset, out / "dataset.parquet")
    rejects = ", ".join(f"{reason} {count}" for reason, count in chosen.rejects.items()) or "none"
    print(f"kept {len(dataset)} of {chosen.total} trajectories (rejected: {rejects}); supervised share of characters "
          f"{supervised_share(dataset).characters:.3f}; {out / 'dataset.parquet'}")  # fmt: skip


if __name__ == "__main__":
    main()
