"""Episodes as TRL's rollouts: a `rollout_func` over the one episode loop.

Contract: what the trainer gets is what the sampler made, verbatim: ids, log-probabilities and the loss mask of an
episode have one length, whatever ended it. The loss mask holds the tokens that the policy wrote and chose: nothing
that the harness or a tool wrote, and no token that the grammar forced. Which episodes are played, and with which
random numbers, depends on the seed, the step and the tasks alone, never on how many processes share the work. An
episode that fails is played again, and ends the run when it fails again; it is never trained on.

A prompt names its task (`prompt_dataset`), since a question may be that of several tasks with other answers. The
fields of the task that was really played (`task_id`, `kind`, `question`, `gold`) and of how it went (`correct`,
`steps`, `reward`, `stop_reason`, `trajectory`) reach the reward functions as columns.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from accelerate.utils import gather_object
from datasets import Dataset
from transformers import PreTrainedModel

from stacklm_hf.rollout.episode import EpisodeSettings, make_episode_id, run_episodes_async
from stacklm_hf.rollout.policy import Policy
from stacklm_hf.rollout.trajectory import StopReason, Trajectory
from stacklm_hf.rollout.transformers_policy import TransformersPolicy
from stacklm_hf.training.health import degenerate_groups, is_truncated
from stacklm_hf.training.weights import plain_weights, whole_model
from stacklm_hf.worlds.base import Environment, Task

logger = logging.getLogger(__name__)

Job = tuple[Task, int]
"""A task and the number of its sample."""


def prompt_dataset(tasks: Iterable[Task], system_prompt: str) -> Dataset:
    """Tasks as the dataset of a GRPOTrainer.

    Args:
        tasks: The tasks; their ids must differ.
        system_prompt: `Environment.system_prompt`.

    Returns:
        Columns `prompt` (messages; the user's names its task under `task_id`), `task_id`, `kind`, `world`, `split`,
        `question` and `gold`.

    Raises:
        ValueError: There is no task, one has no id, or two have the same.
    """
    tasks = list(tasks)
    if not tasks:
        raise ValueError("there is no task to train on")
    repeated = [
        task_id for task_id, count in Counter(task.task_id for task in tasks).items() if count > 1 or not task_id
    ]
    if repeated:
        raise ValueError(f"every task needs an id of its own, but {repeated[0]!r} is that of several or empty")
    names = ("task_id", "kind", "world", "split", "question", "gold")
    rows = [
        {
            "prompt": [
                {"role": "system", "content": system_prompt, "task_id": None},
                {"role": "user", "content": task.question, "task_id": task.task_id},
            ],
            **{name: getattr(task, name) for name in names},
        }
        for task in tasks
    ]
    return Dataset.from_list(rows)


def training_tokens(episode: Trajectory) -> dict[str, list[Any]]:
    """An episode as a trainer takes it.

    Returns:
        `prompt_ids`: all before the first token of the policy; `completion_ids`: all the rest; and for each of the
        latter `logprobs`, 0 where the policy did not write the token, and `env_mask`, the loss mask: 1 where the
        policy wrote the token and the grammar left it a choice.

    Raises:
        ValueError: The policy wrote nothing, or recorded no log-probabilities.
    """
    episode.check()
    if not any(episode.sampled):
        raise ValueError(
            f"the policy wrote nothing in episode {episode.episode_id} ({episode.stop_reason}): its prompt has to fit "
            "the tokens of an episode"
        )
    start = episode.sampled.index(True)
    own, forced = episode.sampled[start:], episode.forced[start:]
    logprobs = [logprob if is_own else 0.0 for logprob, is_own in zip(episode.logprobs[start:], own, strict=True)]
    if None in logprobs:
        raise ValueError(f"policy {episode.policy!r} records no log-probabilities: it cannot be trained on")
    return {
        "prompt_ids": episode.token_ids[:start],
        "completion_ids": episode.token_ids[start:],
        "logprobs": logprobs,
        "env_mask": [int(is_own and not is_forced) for is_own, is_forced in zip(own, forced, strict=True)],
    }


def episode_reward(reward: Sequence[float], **columns: Any) -> list[float]:
    """The reward function: what the episode loop scored, `correct - step_penalty * steps / max_steps`.

    Args:
        reward: One value for each episode; a column of the rollout.
        columns: The other columns, not read.
    """
    return list(reward)


@dataclass
class RolloutRecord:
    """What the last rollout was, the same on every process.

    Args:
        batch: The episodes that are trained on, those of all processes, samples of a group next to each other.
        discarded: Episodes of groups that taught nothing and were replaced, or did not replace one.
        seconds: Time of it all.
        sync_seconds: Time of that for handing the weights to the engine.
        fresh_groups: Groups played beside those asked for.
        replaced_groups: Groups of the batch that were replaced.
    """

    batch: list[Trajectory] = field(default_factory=list)
    discarded: list[Trajectory] = field(default_factory=list)
    seconds: float = 0.0
    sync_seconds: float = 0.0
    fresh_groups: int = 0
    replaced_groups: int = 0


class AgentRollout:
    """A `rollout_func` for `trl.GRPOTrainer`: every sample is a whole episode with the real tools.

    Args:
        tasks: The training tasks, those that a prompt may name.
        environment: Runs the tools.
        settings: Limits of an episode.
        policy: The engine that samples, or a function that makes it when the trainer is there, from the trainer. One
            with a method `push_weights(weights)` is given the trainer's weights, as an iterator over `(name, tensor)`,
            before each rollout, unless TRL itself syncs them (`use_vllm`). Default: the trainer's own model by
            `TransformersPolicy`, at the trainer's temperature.
        grammar: Constrain the syntax of calls, where the default engine samples.
        batch_size: Episodes at once on a process.
        fresh_groups: Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): groups of fresh tasks that may be
            played in one rollout to replace groups with equal rewards, as a multiple of the groups in the batch.
            0 switches it off.
        retries: How often an episode that failed is played again.
    """

    def __init__(
        self,
        tasks: Iterable[Task],
        environment: Environment,
        settings: EpisodeSettings | None = None,
        *,
        policy: Policy | Callable[[Any], Policy] | None = None,
        grammar: bool = True,
        batch_size: int = 64,
        fresh_groups: float = 0.0,
        retries: int = 2,
    ):
        self.tasks = {task.task_id: task for task in tasks}
        self.environment, self.settings = environment, settings or EpisodeSettings()
        self.policy: Any = policy
        self.grammar, self.batch_size, self.fresh_groups, self.retries = grammar, batch_size, fresh_groups, retries
        self.last = RolloutRecord()
        self._engines: dict[float, TransformersPolicy] = {}
        self._drawn: tuple[tuple[int, bool], int] = ((-1, False), 0)

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Plays one episode for each prompt; all processes call it together.

        Args:
            prompts: The prompts of this process, each repeated for every sample of its group.
            trainer: A `trl.GRPOTrainer`, of which TRL leaves most attributes without a type.

        Raises:
            ValueError: A prompt names no task, or a task's prompt does not fit an episode.
            RuntimeError: An episode failed for good; the message names it.
        """
        start = time.perf_counter()
        training = trainer.model.training
        self.last = RolloutRecord()
        offset = sum(gather_object([len(prompts)])[: trainer.accelerator.process_index])
        jobs = _number(
            [self.tasks[task_id] for task_id in gather_object([self._task_id(prompt) for prompt in prompts])]
        )
        seed = self._seed(trainer)
        with self._engine(trainer) as policy:
            batch = self._play(jobs, policy, trainer, seed)
            if training and self.fresh_groups > 0:
                self._refresh(batch, policy, trainer, seed)
        self.last.batch, self.last.seconds = batch, time.perf_counter() - start
        return self._columns(batch[offset : offset + len(prompts)], trainer)

    def evaluate(self, tasks: Sequence[Task], trainer: Any) -> list[Trajectory]:
        """Plays one greedy episode of each task with the trainer's model, and draws no random number.

        All processes call it together and get all trajectories, in the order of the tasks.
        """
        with whole_model(trainer) as model:
            policy = self._transformers_policy(model, trainer, temperature=0.0)
            return self._play([(task, 0) for task in tasks], policy, trainer, seed=0)

    def _task_id(self, prompt: Any) -> str:
        ids = [message.get("task_id") for message in prompt] if isinstance(prompt, list) else []
        named = [task_id for task_id in ids if task_id is not None]
        if len(named) != 1 or named[0] not in self.tasks:
            raise ValueError(
                f"a prompt has to name one of the training tasks, as those of prompt_dataset() do: {prompt}"
            )
        return named[0]

    def _seed(self, trainer: Any) -> int:
        """A seed of its own for each rollout of the run, the same after a resume."""
        key = (trainer.state.global_step, trainer.model.training)
        self._drawn = (key, self._drawn[1] + 1 if self._drawn[0] == key else 0)
        entropy = [abs(trainer.args.seed), key[0], int(key[1]), self._drawn[1]]
        return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1)

    @contextmanager
    def _engine(self, trainer: Any) -> Iterator[Policy]:
        """The engine, with the weights that the trainer has now."""
        if self.policy is None:
            with whole_model(trainer) as model:
                yield self._transformers_policy(model, trainer, trainer.temperature)
            return
        if callable(self.policy):
            self.policy = self.policy(trainer)
        push = getattr(self.policy, "push_weights", None)
        if push is not None and not trainer.use_vllm:
            start = time.perf_counter()
            with plain_weights(trainer) as weights:
                push(weights)
            self.last.sync_seconds = time.perf_counter() - start
        yield self.policy

    def _transformers_policy(self, model: PreTrainedModel, trainer: Any, temperature: float) -> TransformersPolicy:
        """Kept between rollouts with its compiled grammar and its cache; the model in it is the one in training."""
        policy = self._engines.get(temperature)
        if policy is None or policy.model is not model:
            policy = self._engines[temperature] = TransformersPolicy(
                model,
                trainer.processing_class,
                self.environment.tools if self.grammar else None,
                temperature=temperature,
                top_p=trainer.top_p if temperature else 1.0,
                top_k=trainer.top_k if temperature else 0,
                max_batch=self.batch_size,
            )
        return policy

    def _play(self, jobs: Sequence[Job], policy: Policy, trainer: Any, seed: int) -> list[Trajectory]:
        """Shares the jobs among the processes; each gets all trajectories, in the order of the jobs."""
        rank, world = trainer.accelerator.process_index, trainer.accelerator.num_processes
        share = jobs[len(jobs) * rank // world : len(jobs) * (rank + 1) // world]
        episodes = self._play_share(share, policy, seed) if share else []
        for episode in episodes:
            episode.sampling["step"] = trainer.state.global_step
        return gather_object(episodes)

    def _play_share(self, jobs: Sequence[Job], policy: Policy, seed: int) -> list[Trajectory]:
        ids = [make_episode_id(task, seed, sample) for task, sample in jobs]
        tasks = list({task.task_id: task for task, _ in jobs}.values())
        done: dict[str, Trajectory] = {}
        open_ids = set(ids)
        for attempt in range(self.retries + 1):
            episodes = _finish(
                run_episodes_async(
                    policy,
                    tasks,
                    self.environment,
                    self.settings,
                    samples=1 + max(sample for _, sample in jobs),
                    seed=seed,
                    concurrency=self.batch_size,
                    skip=lambda episode_id, wanted=frozenset(open_ids): episode_id not in wanted,  # type: ignore[misc]
                )
            )
            failed = [episode for episode in episodes if episode.stop_reason is StopReason.ERROR]
            done |= {episode.episode_id: episode for episode in episodes}
            open_ids = {episode.episode_id for episode in failed}
            if not failed:
                return [done[episode_id] for episode_id in ids]
            logger.warning(
                "%d episodes failed in attempt %d of %d, e.g. %s: %s",
                len(failed), attempt + 1, self.retries + 1, failed[0].episode_id, failed[0].error,
            )  # fmt: skip
        raise RuntimeError(
            f"episode {failed[0].episode_id} failed {self.retries + 1} times, {len(failed)} episodes of the step in "
            f"all: {failed[0].error}"
        )

    def _refresh(self, batch: list[Trajectory], policy: Policy, trainer: Any, seed: int) -> None:
        """Replaces groups with equal rewards by groups of fresh tasks, in place, as long as the budget lasts.

        Every process sees the whole batch, so all of them decide alike.
        """
        size = trainer.num_generations
        budget = int(self.fresh_groups * (len(batch) // size))
        seen = {episode.task_id for episode in batch}
        fresh = [task for task in self.tasks.values() if task.task_id not in seen]
        random.Random(seed).shuffle(fresh)
        while True:
            stale = [index for index, is_stale in enumerate(degenerate_groups(_rewards(batch), size)) if is_stale]
            count = min(len(stale), budget - self.last.fresh_groups, len(fresh))
            if not count:
                return
            chosen = [fresh.pop() for _ in range(count)]
            played = self._play([(task, sample) for task in chosen for sample in range(size)], policy, trainer, seed)
            self.last.fresh_groups += count
            groups = [played[start : start + size] for start in range(0, len(played), size)]
            for group in groups:
                if any(degenerate_groups(_rewards(group), size)):
                    self.last.discarded += group
                    continue
                start = stale.pop(0) * size
                self.last.discarded += batch[start : start + size]
                batch[start : start + size] = group
                self.last.replaced_groups += 1

    def _columns(self, episodes: Sequence[Trajectory], trainer: Any) -> dict[str, list[Any]]:
        tokens = [training_tokens(episode) for episode in episodes]
        if trainer.mask_truncated_completions:
            # TRL looks for an end token, which the harness puts behind every turn.
            for row, episode in zip(tokens, episodes, strict=True):
                row["env_mask"] = [0] * len(row["env_mask"]) if is_truncated(episode) else row["env_mask"]
        names = ("prompt_ids", "completion_ids", "logprobs", "env_mask")
        return {
            **{name: [row[name] for row in tokens] for name in names},
            **{
                name: [getattr(episode, name) for episode in episodes]
                for name in ("task_id", "kind", "question", "gold", "correct", "reward")
            },
            "steps": [episode.num_steps for episode in episodes],
            "stop_reason": [str(episode.stop_reason) for episode in episodes],
            "trajectory": list(episodes),
        }


def _number(tasks: Sequence[Task]) -> list[Job]:
    """Gives each occurrence of a task a sample number of its own."""
    counts: Counter[str] = Counter()
    jobs = []
    for task in tasks:
        jobs.append((task, counts[task.task_id]))
        counts[task.task_id] += 1
    return jobs


def _rewards(episodes: Sequence[Trajectory]) -> list[float]:
    return [math.nan if episode.reward is None else episode.reward for episode in episodes]


def _finish(coroutine: Coroutine[Any, Any, list[Trajectory]]) -> list[Trajectory]:
    """Runs a coroutine to its end, also from a notebook, in whose thread an event loop runs already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()
