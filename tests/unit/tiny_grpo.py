"""Short GRPO runs of the tiny student, for tests."""

from tiny_student import tiny_student, world

from stacklm_hf.training.grpo import AgentGRPOConfig, AgentGRPOTrainer, make_grpo_trainer

LARGEST_GAP = "sampling/sampling_logp_difference/max"


def config(folder, **options) -> AgentGRPOConfig:
    defaults = {
        "max_steps": 2, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "num_generations": 4,
        "learning_rate": 1e-2, "max_turns": 3, "max_turn_tokens": 32, "forced_answer_tokens": 12,
        "max_episode_tokens": 400, "use_cpu": True, "report_to": "none", "disable_tqdm": True, "keep_best": False,
        "save_strategy": "no", "dataloader_pin_memory": False,
    }  # fmt: skip
    return AgentGRPOConfig(str(folder), **{**defaults, **options})


def by_length(trajectory, **columns) -> list[float]:
    """A reward under which samples differ, whatever the student can do."""
    return [len(episode.token_ids) % 7 / 7 for episode in trajectory]


def make(folder, *, options=None, tasks=None, **arguments) -> AgentGRPOTrainer:
    """A trainer of the tiny student.

    Args:
        options: Of the configuration.
        arguments: Of `make_grpo_trainer`.
    """
    path, tokenizer = tiny_student()
    train, heldout, environment = world()
    arguments = {"reward_funcs": by_length, "eval_tasks": heldout[:3], "model": path, **arguments}
    return make_grpo_trainer(
        tokenizer=tokenizer,
        tasks=tasks or train[:12],
        environment=environment,
        config=config(folder, **(options or {})),
        **arguments,
    )


def rows(trainer, key="loss") -> list[dict[str, float]]:
    """The rows of the log that have a key."""
    return [row for row in trainer.state.log_history if key in row]


def curve(trainer) -> list[tuple[float, ...]]:
    """Step, loss, reward and KL of each row."""
    return [(row["step"], row["loss"], row["reward"], row["kl"]) for row in rows(trainer)]
