"""The options of a GRPO run: TRL's, with the defaults of this package, and those of an episode.

Contract: every option has a help text, and what cannot work is said before anything is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from trl import GRPOConfig

from stacklm_hf.rollout.episode import EpisodeSettings

EPISODES_FILE = "episodes.jsonl"


@dataclass
class AgentGRPOConfig(GRPOConfig):
    """TRL's GRPOConfig with the defaults of this package, and what an episode needs.

    See the help text of each field; all other options are TRL's.

    Raises:
        ValueError: An option is out of range, is one that the engines do not know, or would make a resumed run
            differ from one that never stopped.
    """

    num_generations: int = field(default=8, metadata={"help": "Episodes of each task; they make a group."})
    temperature: float = field(default=0.7, metadata={"help": "Sampling temperature, above 0."})
    epsilon: float = field(default=0.2, metadata={"help": "Clip of the importance ratio: 1 - epsilon to 1 + epsilon."})
    beta: float = field(
        default=0.02,
        metadata={"help": "Weight of the KL term to the model that training began with; 0 loads no second model."},
    )
    loss_type: str = field(
        default="dapo",
        metadata={"help": "How token losses are averaged. 'dapo': over all trained tokens of the whole batch."},
    )
    scale_rewards: str = field(
        default="group",
        metadata={"help": "'group' divides the advantages of a group by the standard deviation of its rewards."},
    )
    num_generations_eval: int | None = field(default=1, metadata={"help": "Held-out tasks are played once, greedily."})
    disable_dropout: bool = field(
        default=True, metadata={"help": "No dropout, also none of a LoRA, so that sampler and trainer agree."}
    )
    bf16: bool = field(
        default=False,
        metadata={"help": "bfloat16 for the trainer's forward. Off: in float32 sampler and trainer agree to 1e-4."},
    )
    gradient_checkpointing: bool = field(
        default=False, metadata={"help": "Less memory for a slower backward; small models need it not."}
    )
    logging_steps: float = field(default=1, metadata={"help": "Steps between two rows of the log."})
    eval_steps: float | None = field(default=20, metadata={"help": "Steps between two measurements (keep_best)."})
    save_steps: float = field(default=20, metadata={"help": "Steps between two checkpoints, a multiple of eval_steps."})
    save_total_limit: int | None = field(default=2, metadata={"help": "Checkpoints to keep; the best one stays."})

    max_turns: int = field(default=6, metadata={"help": "Turns of an episode before an answer is forced."})
    max_turn_tokens: int = field(default=160, metadata={"help": "Tokens of a turn."})
    forced_answer_tokens: int = field(default=40, metadata={"help": "Tokens of a forced answer."})
    max_episode_tokens: int = field(
        default=1024, metadata={"help": "Tokens of an episode, prompt and observations included; it bounds memory."}
    )
    step_penalty: float = field(
        default=0.05, metadata={"help": "The reward is correct - step_penalty * steps / max_turns."}
    )
    grammar: bool = field(default=True, metadata={"help": "Constrain the syntax of calls while sampling."})
    rollout_batch_size: int = field(default=64, metadata={"help": "Episodes at once on a process."})
    rollout_retries: int = field(default=2, metadata={"help": "How often a failed episode is played again."})
    dynamic_sampling: bool = field(
        default=False, metadata={"help": "Replace groups of equal rewards, which teach nothing, by fresh tasks."}
    )
    dynamic_sampling_budget: float = field(
        default=2.0, metadata={"help": "Fresh groups a rollout may play for that, per group of the batch."}
    )
    save_episodes_every: int = field(
        default=1, metadata={"help": f"Steps between two whose episodes go to {EPISODES_FILE}; 0 for none."}
    )
    keep_best: bool = field(
        default=True,
        metadata={
            "help": "Measure the agent on held-out tasks before training, every eval_steps and at the end, and end "
            "with the best model: by accuracy, then by fewer steps per episode. Needs held-out tasks."
        },
    )

    def __post_init__(self) -> None:
        if self.keep_best:
            self.eval_strategy, self.eval_on_start = "steps", True
            self.load_best_model_at_end, self.metric_for_best_model = True, "agent_score"
            self.greater_is_better = True
        super().__post_init__()
        if self.temperature <= 0:
            raise ValueError(f"temperature must be above 0, not {self.temperature}: equal samples teach nothing")
        if self.min_p or self.repetition_penalty != 1.0:
            raise ValueError("the engines sample without min_p and repetition_penalty: leave them unset")
        if self.dynamic_sampling and self.dynamic_sampling_budget <= 0:
            raise ValueError("dynamic sampling needs a dynamic_sampling_budget above 0")
        window = (self.steps_per_generation or 1) * self.num_iterations
        if self.save_strategy == "steps" and (self.save_steps * self.gradient_accumulation_steps) % window:
            raise ValueError(
                f"a checkpoint every {self.save_steps} steps can fall between two rollouts, from where a run does not "
                f"resume exactly: make save_steps * gradient_accumulation_steps a multiple of {window}"
            )

    @property
    def device(self) -> torch.device:
        """The device; plain `cpu` where accelerate says `cpu:0`, a name that `torch.load` does not take on resume."""
        device = super().device
        return torch.device("cpu") if device.type == "cpu" else device

    @property
    def episode_settings(self) -> EpisodeSettings:
        """The limits of an episode."""
        return EpisodeSettings(
            max_steps=self.max_turns,
            max_new_tokens=self.max_turn_tokens,
            forced_answer_tokens=self.forced_answer_tokens,
            max_context=self.max_episode_tokens,
            step_penalty=self.step_penalty,
        )
