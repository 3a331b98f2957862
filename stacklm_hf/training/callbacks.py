"""Callbacks of the trainers.

Contract: measuring never disturbs training: the callbacks draw no random numbers and leave the model in the
mode in which they found it, so that a run with them has the same loss curve as one without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers import (
    PreTrainedTokenizerBase,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from stacklm_hf.rollout.episode import EpisodeSettings, run_episodes
from stacklm_hf.rollout.transformers_policy import TransformersPolicy
from stacklm_hf.worlds.base import Environment, Task


class LossBar(ProgressCallback):
    """The trainer's progress bar with its newest numbers beside the rate, in place of a printed row for each."""

    def __init__(self) -> None:
        super().__init__()
        self._shown: dict[str, str] = {}

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        names = {"loss": "loss", "eval_agent_accuracy": "held-out"}
        self._shown.update({label: f"{float(logs[key]):.3g}" for key, label in names.items() if key in (logs or {})})
        if self.training_bar is not None:
            self.training_bar.set_postfix(self._shown)


class AgentAccuracyCallback(TrainerCallback):
    """Runs the student as an agent on held-out tasks while it trains, and logs `eval_agent_accuracy`.

    Args:
        trainer: The trainer, through which the numbers are logged.
        tokenizer: The student's tokenizer.
        tasks: Held-out tasks.
        environment: Runs the tools.
        every_steps: Optimizer steps between two measurements; one more is made at the end.
        max_batch: Episodes at once.
        settings: Limits of an episode.
        on_result: Called with step and accuracy.
    """

    def __init__(
        self,
        trainer: Trainer,
        tokenizer: PreTrainedTokenizerBase,
        tasks: Sequence[Task],
        environment: Environment,
        every_steps: int,
        max_batch: int = 64,
        settings: EpisodeSettings | None = None,
        on_result: Callable[[int, float], None] | None = None,
    ):
        if every_steps < 1:
            raise ValueError("every_steps must be at least 1")
        self.trainer, self.tokenizer, self.tasks, self.environment = trainer, tokenizer, list(tasks), environment
        self.every_steps, self.max_batch, self.on_result = every_steps, max_batch, on_result
        self.settings = settings or EpisodeSettings()
        self._measured_at = -1

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step % self.every_steps == 0:
            self._measure(state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step != self._measured_at:
            self._measure(state)

    def _measure(self, state: TrainerState) -> None:
        self._measured_at = state.global_step
        if not state.is_world_process_zero or not self.tasks:
            return
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        policy = TransformersPolicy(model, self.tokenizer, self.environment.tools, max_batch=self.max_batch)
        trajectories = run_episodes(policy, self.tasks, self.environment, self.settings)
        accuracy = sum(trajectory.correct for trajectory in trajectories) / len(trajectories)
        steps = sum(trajectory.num_steps for trajectory in trajectories) / len(trajectories)
        self._log({"eval_agent_accuracy": accuracy, "eval_agent_steps": steps})
        if self.on_result is not None:
            self.on_result(state.global_step, accuracy)

    def _log(self, numbers: dict[str, float]) -> None:
        """Logs beside the trainer's own row: TRL's `log` would put its training metrics into this one, and any
        `log` calls off the row that is due at this step."""
        should_log = self.trainer.control.should_log
        Trainer.log(self.trainer, numbers)
        self.trainer.control.should_log = should_log
