"""GRPO: TRL's GRPOTrainer on episodes of the one loop, with the health of a run in its log.

Contract: a step trains on exactly the tokens that the policy chose (`stacklm_hf.training.rollouts`). Advantages are
relative to the group and divided by its standard deviation; a group of equal rewards has exactly none. The loss is
the mean over all trained tokens of the whole batch, whatever the number of processes and micro-batches; tokens
outside of the loss mask cannot reach it, and a batch without any gives a loss of 0. With `keep_best` a run never
ends below where it began. A run that stopped resumes to the same tasks, random numbers and losses.

Exactness: the log-probability of a sampled token is that of the model at the sampling temperature over the whole
vocabulary, `log_softmax(logits / T)`, taken before the grammar (or top-p, top-k) cuts anything off. TRL's trainer
divides its logits by the same T and knows of no grammar, so with unchanged weights the two agree on every token,
forced or not, and the importance ratio is 1. The sampler draws from the cut distribution, `pi(a) / Z` with Z the mass
of what is allowed. Had it reported that, the ratio would be Z, below 1 wherever the grammar binds, and a correction
by it (TRL's for vLLM) would weigh tokens by how much the grammar helped. Leaving Z out treats the grammar as part of
the world: a token is credited as the model's own choice among what the world lets happen, and one where it left no
choice (Z is all that it did) is not trained on. This holds in float32; in bfloat16 the engines round differently, which
`sampling/sampling_logp_difference` shows.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer
from trl.trainer.utils import RepeatSampler

from stacklm_hf.data.dataset import trajectory_messages
from stacklm_hf.data.store import TrajectoryStore
from stacklm_hf.protocol.tokens import END, control_ids
from stacklm_hf.rollout.policy import Policy
from stacklm_hf.training.grpo_config import EPISODES_FILE, AgentGRPOConfig
from stacklm_hf.training.health import LogprobGap, degenerate_groups, episode_metrics, is_truncated, num_trained
from stacklm_hf.training.rollouts import AgentRollout, episode_reward, prompt_dataset
from stacklm_hf.worlds.base import Environment, Task


class AgentGRPOTrainer(GRPOTrainer):
    """GRPOTrainer whose rollouts are episodes.

    Beside what TRL logs, each row has `stacklm_hf.training.health.episode_metrics`; under `groups/` the share of
    groups with equal rewards, and with dynamic sampling the fresh and the replaced groups; `tokens/own_per_second`
    of the rollout; the gap between sampler and trainer; and under `time/` seconds of rollout, weight sync and scoring.

    Args:
        rollout: Plays the episodes.
        kwargs: TRL's arguments. `train_dataset` and `eval_dataset` are made by `prompt_dataset`.
    """

    args: AgentGRPOConfig

    def __init__(self, *, rollout: AgentRollout, **kwargs: Any):
        self.rollout = rollout
        self._gap = LogprobGap()
        self._scored: tuple[torch.Tensor, dict[str, Any]] | None = None
        self._rewards: torch.Tensor | None = None
        self._store: TrajectoryStore | None = None
        with warnings.catch_warnings():
            # The one thing that it warns of is what this class is pinned to a range of TRL's versions for.
            warnings.filterwarnings("ignore", message="You are using 'rollout_func'")
            super().__init__(rollout_func=rollout, **kwargs)
        end = control_ids(self._tokenizer)[END]
        if end not in self.eos_token_ids:
            # A host tokenizer has an end of its own; an episode ends with ours.
            self.eos_token_ids = [*self.eos_token_ids, end]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trains; see `transformers.Trainer.train`."""
        try:
            return super().train(*args, **kwargs)
        finally:
            if self._store is not None:
                self._store.close()
                self._store = None

    @property
    def _mode(self) -> str:
        """Under which name TRL keeps the metrics of now."""
        assert self.model is not None
        return "train" if self.model.training else "eval"

    # Rollout and advantages

    def _generate(self, prompts: list[Any]) -> Any:
        result = list(super()._generate(prompts))
        episodes = result[5]["trajectory"]
        # TRL parses a completion as one turn; the record has them all.
        result[3] = [trajectory_messages(episode)[2:] for episode in episodes]
        # It tells a cut completion by its last token, which the harness makes the end of a turn in any case.
        whole = [episode for episode in self.rollout.last.batch if not is_truncated(episode)]
        lengths = [num_trained(episode) for episode in whole] or [0]
        metrics = self._metrics[self._mode]
        metrics["completions/clipped_ratio"][-1] = 1 - len(whole) / len(self.rollout.last.batch)
        metrics["completions/mean_terminated_length"][-1] = sum(lengths) / len(lengths)
        metrics["completions/min_terminated_length"][-1] = float(min(lengths))
        metrics["completions/max_terminated_length"][-1] = float(max(lengths))
        return tuple(result)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._rewards = super()._calculate_rewards(*args, **kwargs)
        return self._rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        size: Any = self.num_generations if self._mode == "train" else self.num_generations_eval
        start = time.perf_counter()
        output = super()._generate_and_score_completions(inputs)
        seconds = time.perf_counter() - start
        assert self._rewards is not None
        weighted = self._rewards * self.reward_weights.to(self._rewards.device)
        totals = weighted.nansum(1).masked_fill(self._rewards.isnan().all(1), math.nan)
        flags = degenerate_groups(totals, size)
        # The mean of eight rewards of 0.7 is not 0.7 in float32, and what is left over would be scaled up.
        local = torch.tensor(flags, device=output["advantages"].device).repeat_interleave(size)
        first = self.accelerator.process_index * len(inputs)
        output["advantages"] = output["advantages"].masked_fill(local[first : first + len(inputs)], 0.0)
        self._record(flags, seconds)
        return output

    def _record(self, flags: list[bool], seconds: float) -> None:
        """Logs the health of a rollout, and saves its episodes."""
        last = self.rollout.last
        played = [*last.batch, *last.discarded]
        numbers = episode_metrics(last.batch) | {
            "groups/degenerate": sum(flags) / len(flags),
            "tokens/own_per_second": sum(episode.num_sampled for episode in played) / last.seconds,
            "time/rollout": last.seconds - last.sync_seconds,
            "time/sync": last.sync_seconds,
            "time/scoring": seconds - last.seconds,
        }
        if self.args.dynamic_sampling:
            numbers |= {"groups/fresh": last.fresh_groups, "groups/replaced": last.replaced_groups}
        for name, value in numbers.items():
            self._metrics[self._mode][name].append(value)
        every = self.args.save_episodes_every
        if every and self.state.global_step % every == 0 and self.accelerator.is_main_process:
            if self._store is None:
                self._store = TrajectoryStore(Path(self._get_output_dir(None)) / EPISODES_FILE)
            for episode in played:
                self._store.append(episode)

    # Loss

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        logps, *others = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        if self._scored is not None:
            mask, inputs = self._scored
            logps = logps.masked_fill(~mask, 0.0)
            self._note_gap(mask, inputs.get("old_per_token_logps", logps.detach()), inputs["sampling_per_token_logps"])
        return logps, *others

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """TRL's loss, over log-probabilities that are 0 outside of the loss mask.

        Nothing trains the model on those tokens, so its log-probabilities may drift there until the KL term, an
        exponential of their difference, overflows; and an infinity times a mask of 0 is NaN.
        """
        mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
        names = ("ref_per_token_logps", "old_per_token_logps", "sampling_per_token_logps")
        inputs = inputs | {name: inputs[name].masked_fill(~mask, 0.0) for name in names if name in inputs}
        self._scored = mask, inputs
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self._scored = None

    def _note_gap(self, mask: torch.Tensor, trainer: torch.Tensor, sampler: torch.Tensor) -> None:
        """Compares log-probabilities at the weights that sampled, those before the first update on the batch."""
        if self.use_vllm and self.vllm_importance_sampling_correction:
            return  # TRL logs it itself
        gap = (trainer - sampler).abs()
        numbers = torch.stack([gap.sum(), mask.sum().to(gap), gap.max()])
        numbers = self.accelerator.gather(numbers[None])
        self._gap.add(numbers[:, 0].sum().item(), int(numbers[:, 1].sum()), numbers[:, 2].max().item())

    # Log, evaluation, resume

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        metrics = self._metrics[self._mode]
        if self._mode == "train":
            metrics |= {name: [value] for name, value in self._gap.pop().items()}
        for name in [name for name, values in metrics.items() if all(map(math.isnan, values))]:
            del metrics[name]  # a mean over no token; TRL would log None
        super().log(logs, start_time)

    def evaluate(
        self, eval_dataset: Dataset | None = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Plays the held-out tasks greedily.

        Args:
            eval_dataset: Made by `prompt_dataset`; default: the trainer's own.
            ignore_keys: Not used.
            metric_key_prefix: Put in front of the names.

        Returns:
            `agent_accuracy`, also by task shape, `agent_steps` per episode, and `agent_score`, by which models are
            compared: the accuracy, less so little for the steps that these only decide between equals.

        Raises:
            ValueError: There are no held-out tasks.
        """
        dataset: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ValueError("there are no held-out tasks: give the trainer an eval_dataset")
        episodes = self.rollout.evaluate([Task.from_dict(row) for row in dataset], self)
        numbers = episode_metrics(episodes)
        accuracy, steps = numbers["agent/accuracy"], numbers["agent/steps"]
        most_steps = self.rollout.settings.max_steps + 1
        score = accuracy - steps / (most_steps + 1) / len(episodes)
        shapes = {name: value for name, value in numbers.items() if name.startswith("agent/accuracy_")}
        numbers = {"agent/accuracy": accuracy, "agent/steps": steps, "agent/score": score, **shapes}
        metrics = {f"{metric_key_prefix}_{name.replace('/', '_')}": value for name, value in numbers.items()}
        # Not self.log: it would put the training metrics, which wait for their own row, into this one.
        Trainer.log(self, dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> dict[str, float]:
        at_start = skip_scheduler  # asked for by eval_on_start only
        if at_start and self.state.best_metric is not None:
            return {}  # resumed: measured before
        metrics = super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)
        if at_start and self.args.keep_best:
            # The Trainer compares only what it measures after a step; what training began with counts as well.
            self._determine_best_metric(metrics, trial)
            folder = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            self.state.best_model_checkpoint = os.path.join(self._get_output_dir(trial), folder)
            self._save_checkpoint(self.model, trial)
        return metrics

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        is_best = super()._determine_best_metric(metrics, trial)
        if is_best and self.args.keep_best:
            self.control.should_save = True  # also between two save_steps
        return is_best

    def _get_train_sampler(self, dataset: Dataset | None = None) -> RepeatSampler:
        return EpochSampler(self, super()._get_train_sampler(dataset))


class EpochSampler(RepeatSampler):
    """TRL's sampler with an order that depends on the seed and the epoch alone.

    TRL's draws the next order from one generator, so that a run that resumes in its second epoch would get the tasks
    of the first one again.

    Args:
        trainer: Knows the epoch.
        sampler: What to take the rest from.
    """

    def __init__(self, trainer: Trainer, sampler: Any):
        vars(self).update(vars(sampler))
        self._trainer = trainer

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            # Rounding must not take the last step of an epoch for the next epoch or the other way round.
            epoch = int((self._trainer.state.epoch or 0) + 1e-6)
            self.generator.manual_seed((self.seed or 0) + epoch)
        yield from super().__iter__()


def make_grpo_trainer(
    model: PreTrainedModel | str,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Iterable[Task],
    environment: Environment,
    config: AgentGRPOConfig,
    *,
    eval_tasks: Iterable[Task] = (),
    policy: Policy | Callable[[Any], Policy] | None = None,
    peft_config: Any = None,
    reward_funcs: Callable[..., list[float]] | list[Callable[..., list[float]]] = episode_reward,
) -> AgentGRPOTrainer:
    """A trainer over the tasks of a world.

    Args:
        model: The SFT checkpoint, as a path or loaded from one.
        tokenizer: Its tokenizer.
        tasks: Training tasks.
        environment: Runs the tools.
        config: The options.
        eval_tasks: Held-out tasks; needed with `config.keep_best`.
        policy: The engine, or a function that makes it from the trainer; see `AgentRollout`. TRL's own vLLM engine
            (`use_vllm`, colocated) is `lambda trainer: VLLMPolicy(trainer.vllm_generation.llm, ...)`.
        peft_config: Trains an adapter.
        reward_funcs: What an episode is worth, as TRL's reward functions. Dynamic sampling goes by
            `episode_reward` whatever is given here.

    Raises:
        ValueError: Held-out tasks are missing, tasks have no ids of their own, the adapter trains token rows, an
            engine of TRL would run for nothing, or the model was never saved, so that the KL term has nothing to
            start from.
    """
    tasks, eval_tasks = list(tasks), list(eval_tasks)
    if config.keep_best and not eval_tasks:
        raise ValueError("keep_best needs held-out tasks: give eval_tasks, or set keep_best to False")
    if config.beta and peft_config is None and not isinstance(model, str) and not model.config._name_or_path:
        raise ValueError("the KL term loads the model again from where it was saved: save it first, or set beta to 0")
    if getattr(peft_config, "trainable_token_indices", None):
        raise ValueError("TRL's fused head does not see trained token rows: train those in SFT and merge the adapter")
    if config.use_vllm and policy is None:
        raise ValueError("use_vllm starts TRL's engine, and nothing samples with it: give a policy that does")
    rollout = AgentRollout(
        tasks,
        environment,
        config.episode_settings,
        policy=policy,
        grammar=config.grammar,
        batch_size=config.rollout_batch_size,
        fresh_groups=config.dynamic_sampling_budget if config.dynamic_sampling else 0.0,
        retries=config.rollout_retries,
    )
    return AgentGRPOTrainer(
        rollout=rollout,
        model=model,
        args=config,
        train_dataset=prompt_dataset(tasks, environment.system_prompt),
        eval_dataset=prompt_dataset(eval_tasks, environment.system_prompt) if eval_tasks else None,
        processing_class=tokenizer,
        peft_config=peft_config,
        reward_funcs=reward_funcs,
    )


__all__ = ["EPISODES_FILE", "AgentGRPOConfig", "AgentGRPOTrainer", "EpochSampler", "make_grpo_trainer"]
