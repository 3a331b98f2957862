"""The whole road in minutes on a CPU: world, teacher, verified trajectories, dataset, SFT, honest evaluation.

Contract: each stage leaves its files in the run's folder and is not run again. A run that was killed goes on:
finished stages are skipped, collected trajectories and measured episodes stay, training continues from its
newest checkpoint.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, ProgressCallback, set_seed

import stacklm_hf
from stacklm_hf.data.dataset import build_dataset, load_rows, save_dataset, supervised_share
from stacklm_hf.data.filters import TrajectoryFilter
from stacklm_hf.data.store import read_trajectories
from stacklm_hf.evaluation.metrics import EvaluationResult, summarize
from stacklm_hf.evaluation.report import write_report
from stacklm_hf.evaluation.run import evaluate, run_into_store
from stacklm_hf.evaluation.table import format_table
from stacklm_hf.modeling import StackConfig, write_model_card
from stacklm_hf.rollout.scripted import ScriptedTeacher
from stacklm_hf.rollout.trajectory import Trajectory
from stacklm_hf.rollout.transformers_policy import TransformersPolicy
from stacklm_hf.stages import Stages
from stacklm_hf.training.callbacks import AgentAccuracyCallback, LossBar
from stacklm_hf.training.sft import default_sft_config, last_checkpoint, make_trainer
from stacklm_hf.training.student import build_student, build_tokenizer
from stacklm_hf.worlds.base import Task
from stacklm_hf.worlds.research import SeededEnvironment, make_split, make_task_pool, make_training_pool

logger = logging.getLogger(__name__)

BEFORE, AFTER = "before SFT", "after SFT"
WORLD_SEED = 0


@dataclass(frozen=True)
class DemoSettings:
    """What a demo run is made of. Only `seed` is meant to be changed by a reader; the rest is tuned together."""

    seed: int = field(default=0, metadata={"help": "seed of the weights, the data order and the training pool"})
    preset: str = field(default="stack-demo", metadata={"help": "named size of the student"})
    vocab_size: int = field(default=1536, metadata={"help": "vocabulary of the student's tokenizer"})
    tasks: int = field(default=3200, metadata={"help": "training tasks; sums and compares get a third each"})
    run_share: float = field(default=0.5, metadata={"help": "share of them over synthetic runs of other worlds"})
    world_seeds: int = field(default=8, metadata={"help": "number of those other worlds"})
    samples: int = field(default=1, metadata={"help": "trajectories that the teacher samples for each task"})
    max_steps: int = field(default=1200, metadata={"help": "optimizer steps"})
    batch_size: int = field(default=16, metadata={"help": "trajectories a step"})
    learning_rate: float = field(default=5e-3, metadata={"help": "of AdamW: embedding and norms"})
    muon_learning_rate: float = field(default=0.02, metadata={"help": "of Muon: the matrices"})
    eval_every: int = field(default=200, metadata={"help": "steps between two measurements while training"})
    save_every: int = field(default=100, metadata={"help": "steps between two checkpoints"})


class Demo:
    """The stages of the demo.

    Args:
        folder: The run's folder.
        settings: What the run is made of.
        say: Takes each line for the reader.

    Raises:
        ValueError: The folder holds a run with other settings.
    """

    def __init__(
        self, folder: str | os.PathLike[str], settings: DemoSettings | None = None, say: Callable[[str], None] = print
    ):
        self.folder = Path(folder)
        self.settings = settings or DemoSettings()
        self.say = say
        self.stages = Stages(self.folder, {"version": stacklm_hf.__version__, **asdict(self.settings)})
        self.environment = SeededEnvironment(WORLD_SEED)
        self.heldout = make_task_pool(WORLD_SEED)[1]

    @property
    def checkpoint(self) -> Path:
        """The trained student."""
        return self.folder / "checkpoint"

    @property
    def trajectories(self) -> Path:
        """All collected trajectories."""
        return self.folder / "trajectories.jsonl"

    @property
    def dataset(self) -> Path:
        """The verified ones, as a dataset."""
        return self.folder / "dataset.parquet"

    @property
    def report(self) -> Path:
        """The report."""
        return self.folder / "report.html"

    def run(self) -> dict[str, EvaluationResult]:
        """Runs what is not done yet, prints the table and where things are, and returns the results by label."""
        steps = {
            "tokenizer": (self._tokenizer, "Tokenizer of the student"),
            "collect": (self._collect, "Trajectories of the scripted teacher, with the real tools"),
            "dataset": (self._dataset, "Dataset of the verified ones"),
            "before": (self._before, "Held-out tasks before SFT"),
            "sft": (self._sft, "SFT from random weights"),
            "after": (self._after, "Held-out tasks after SFT"),
        }
        for number, (name, (function, title)) in enumerate(steps.items(), 1):
            done = name in self.stages
            self.say(f"[{number}/{len(steps)}] {title}{' (done before)' if done else ''}")
            if not done:
                with self.stages.stage(name) as facts:
                    function(facts)
            shown = {key: value for key, value in self.stages.facts(name).items() if key != "rejects"}
            self.say("      " + ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in shown.items()))
        return self._finish()

    def training_tasks(self) -> list[Task]:
        """The training pool; no task leaks a held-out one, and no fact of the split `runs` is in it."""
        settings = self.settings
        # Two-fact shapes have far more to learn: which fact comes first, and which operand is which.
        few, many = settings.tasks // 6, settings.tasks // 3
        counts = {"lookup": few, "double": few, "sum": many, "compare": many}
        pool = make_training_pool(WORLD_SEED, counts, settings.run_share, settings.world_seeds)
        return make_split("heldout", WORLD_SEED, pool).train

    def _tokenizer(self, facts: dict[str, Any]) -> None:
        """Trains the tokenizer of the student."""
        path = self.folder / "tokenizer"
        tokenizer = build_tokenizer(path, self.training_tasks(), self.environment, self.settings.vocab_size)
        facts["vocabulary"] = len(tokenizer)

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """The student's tokenizer."""
        return AutoTokenizer.from_pretrained(self.folder / "tokenizer")

    def _collect(self, facts: dict[str, Any]) -> None:
        samples = self.settings.samples
        teacher = ScriptedTeacher(self.load_tokenizer(), temperature=0.0 if samples == 1 else 1.0)
        facts["trajectories"], errors = run_into_store(
            teacher,
            self.training_tasks(),
            self.environment,
            self.trajectories,
            samples=samples,
            seed=self.settings.seed,
            progress="collect",
        )
        facts["errors"] = len(errors)

    def _dataset(self, facts: dict[str, Any]) -> None:
        chosen = TrajectoryFilter()
        dataset, _ = build_dataset(chosen.keep(read_trajectories(self.trajectories)), self.load_tokenizer())
        questions = {task.question for task in self.heldout}
        leaked = [row for row in dataset["question"] if row in questions]
        if leaked:
            raise ValueError(f"{len(leaked)} held-out questions stand in the training data, e.g. {leaked[0]!r}")
        save_dataset(dataset, self.dataset)
        facts.update(
            seen=chosen.total,
            kept=len(dataset),
            rejects={str(reason): count for reason, count in chosen.rejects.items()},
            kinds=dict(sorted(Counter(dataset["kind"]).items())),
            supervised_share=round(supervised_share(dataset).characters, 3),
        )

    def _student(self, tokenizer: PreTrainedTokenizerBase) -> Any:
        return build_student(tokenizer, self.settings.preset, self.settings.seed)

    def _measure(self, model: Any, tokenizer: Any, tasks: Sequence[Task], name: str) -> list[Trajectory]:
        policy = TransformersPolicy(model, tokenizer, self.environment.tools, name="student")
        path = self.folder / "evaluation" / f"{name}.jsonl"
        return evaluate(policy, tasks, self.environment, path, progress=name)

    def _before(self, facts: dict[str, Any]) -> None:
        tokenizer = self.load_tokenizer()
        trajectories = self._measure(self._student(tokenizer), tokenizer, self.heldout, "before")
        facts["accuracy"] = _accuracy(trajectories)

    def _sft(self, facts: dict[str, Any]) -> None:
        settings, tokenizer = self.settings, self.load_tokenizer()
        set_seed(settings.seed)
        model = self._student(tokenizer)
        config = default_sft_config(
            self.folder / "sft",
            seed=settings.seed,
            max_steps=settings.max_steps,
            per_device_train_batch_size=settings.batch_size,
            learning_rate=settings.learning_rate,
            muon_learning_rate=settings.muon_learning_rate,
            save_steps=settings.save_every,
            logging_first_step=True,
            weight_decay=0.05,
            adam_beta2=0.95,
            warmup_steps=50,
            lr_scheduler_type="warmup_stable_decay",
            lr_scheduler_kwargs={"num_decay_steps": settings.max_steps // 2},
        )
        trainer = make_trainer(model, tokenizer, load_rows(self.dataset), config)
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(LossBar())
        trainer.add_callback(
            AgentAccuracyCallback(trainer, tokenizer, self.heldout, self.environment, settings.eval_every)
        )
        trainer.train(resume_from_checkpoint=last_checkpoint(self.folder / "sft"))
        trainer.save_model(str(self.checkpoint))
        tokenizer.save_pretrained(self.checkpoint)
        log = trainer.state.log_history
        (self.folder / "training_log.json").write_text(json.dumps(log, indent=1), encoding="utf-8")
        losses = [row["loss"] for row in log if "loss" in row]
        facts.update(
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            first_loss=round(losses[0], 3),
            last_loss=round(losses[-1], 4),
            padding_share=round(trainer.padding_share, 3),
            steps=trainer.state.global_step,
        )

    def _after(self, facts: dict[str, Any]) -> None:
        tokenizer = AutoTokenizer.from_pretrained(self.checkpoint)
        model = AutoModelForCausalLM.from_pretrained(self.checkpoint)
        for split, tasks in self.evaluation_tasks().items():
            facts[split] = _accuracy(self._measure(model, tokenizer, tasks, f"after-{split}"))

    def evaluation_tasks(self) -> dict[str, list[Task]]:
        """What is measured after SFT, by split."""
        return {name: make_split(name, WORLD_SEED).evaluation for name in ("heldout", "runs", "reworded")}

    def _finish(self) -> dict[str, EvaluationResult]:
        """Writes the report from the stored episodes and prints the table."""
        splits = self.evaluation_tasks()
        stored = {BEFORE: self._stored("before"), AFTER: self._stored("after-heldout")}
        others = {f"{AFTER}, {name}": self._stored(f"after-{name}") for name in splits if name != "heldout"}
        tasks = {task.task_id: task for group in splits.values() for task in group}
        log = json.loads((self.folder / "training_log.json").read_text(encoding="utf-8"))
        metadata = {
            **{name.replace("_", " "): value for name, value in asdict(self.settings).items()},
            "decoding": "greedy, grammar on",
            "stages": "; ".join(f"{name} {self.stages.facts(name)['seconds']:.0f} s" for name in ("collect", "sft")),
            "versions": f"stacklm_hf {stacklm_hf.__version__}, torch {torch.__version__}, "
            f"transformers {transformers.__version__}, trl {trl.__version__}, Python {platform.python_version()}",
        }
        write_report(
            self.report,
            {**stored, **others},
            title="Research world: what the student learned",
            metadata=metadata,
            training_log=log,
            tasks=tasks,
            tokenizer=self.load_tokenizer(),
        )
        results = {
            label: summarize(trajectories, tasks, label=label) for label, trajectories in {**stored, **others}.items()
        }
        main = {label: results[label] for label in stored}
        path = self.folder / "results.json"
        path.write_text(json.dumps({label: result.to_dict() for label, result in results.items()}, indent=1))
        write_model_card(self.checkpoint, StackConfig.from_pretrained(self.checkpoint), _card_rows(results))
        self._print(main, {label: results[label] for label in others})
        return results

    def _stored(self, name: str) -> list[Trajectory]:
        return list(read_trajectories(self.folder / "evaluation" / f"{name}.jsonl"))

    def _print(self, main: dict[str, EvaluationResult], others: dict[str, EvaluationResult]) -> None:
        question = "What is the RoPE base of Stack-100M, multiplied by 2? Use the corpus."
        self.say("\nTasks never trained on (seed 0), greedy, grammar on; accuracy [95% Wilson interval]\n")
        self.say(format_table(main))
        self.say("\nFarther from the training data: facts never trained on, and other words\n")
        self.say(format_table(others))
        self.say(f"\nAll stages took {self.stages.seconds / 60:.1f} min.")
        for label, path in (
            ("checkpoint", self.checkpoint),
            ("dataset", self.dataset),
            ("trajectories", self.trajectories),
            ("report", self.report),
        ):
            self.say(f"  {label:<13}{path}")
        self.say(f'\nTry next:\n  {_command()} ask --model {self.checkpoint} "{question}"')


def _command() -> str:
    """The `stacklm-hf` of this environment, as one would type it here."""
    script = Path(sys.executable).with_name("stacklm-hf")
    if not script.exists():
        return "stacklm-hf"
    return str(script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script)


def _card_rows(results: dict[str, EvaluationResult]) -> dict[str, dict[str, float]]:
    """Accuracy and its interval of every run after SFT, whole and by shape, for the model card."""
    rows = {}
    for label, result in results.items():
        if label == BEFORE:
            continue
        for kind, score in (("", result.overall), *((f", {kind}", score) for kind, score in result.by_kind.items())):
            rows[label + kind] = {"accuracy": score.accuracy, "low": score.low, "high": score.high, "n": score.n}
    return rows


def _accuracy(trajectories: Sequence[Trajectory]) -> float:
    return round(sum(trajectory.correct for trajectory in trajectories) / max(1, len(trajectories)), 3)
