"""Running episodes into a file, for collecting and for evaluating alike.

Contract: every finished episode is in the file at once; called again, only what is missing is run. An episode that
ended with an error is not finished: it is reported, not stored, and run again the next time. A file that another
policy, another tokenizer or other settings wrote is refused, never mixed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from stacklm_hf.data.store import TrajectoryStore, read_trajectories
from stacklm_hf.rollout.episode import EpisodeSettings, make_episode_id, prompt_ids, run_episodes
from stacklm_hf.rollout.policy import Policy
from stacklm_hf.rollout.trajectory import StopReason, Trajectory
from stacklm_hf.worlds.base import Environment, Task

logger = logging.getLogger(__name__)


def run_into_store(
    policy: Policy,
    tasks: Iterable[Task],
    environment: Environment,
    path: str | os.PathLike[str],
    settings: EpisodeSettings | None = None,
    *,
    samples: int = 1,
    seed: int = 0,
    concurrency: int = 64,
    progress: str | None = None,
) -> tuple[int, dict[str, str]]:
    """Runs what the store lacks.

    Args:
        path: JSONL file of trajectories; made where it does not exist.
        progress: Label of a progress bar; None for none.

    Returns:
        Episodes in the store afterwards, and the errors of those that failed, by episode id.

    Raises:
        ValueError: The store was written by another policy, with another tokenizer or other sampling settings.
    """
    first = next(read_trajectories(path), None) if Path(path).exists() else None
    if first is not None:
        _check_origin(first, policy, path)
    errors: dict[str, str] = {}
    with TrajectoryStore(path) as store:

        def keep(trajectory: Trajectory) -> None:
            if trajectory.stop_reason is StopReason.ERROR:
                errors[trajectory.episode_id] = trajectory.error or "unknown error"
                logger.warning("episode %s failed: %s", trajectory.episode_id, trajectory.error)
            else:
                store.append(trajectory)

        run_episodes(
            policy,
            tasks,
            environment,
            settings,
            samples=samples,
            seed=seed,
            concurrency=concurrency,
            skip=store.__contains__,
            on_trajectory=keep,
            keep=False,
            progress=progress,
        )
        return len(store), errors


def _check_origin(stored: Trajectory, policy: Policy, path: str | os.PathLike[str]) -> None:
    if (stored.policy, stored.sampling) != (policy.name, dict(policy.sampling)):
        raise ValueError(
            f"{path} holds episodes of policy {stored.policy!r} with {stored.sampling}, not of {policy.name!r} with "
            f"{dict(policy.sampling)}: name another file"
        )
    prompt = prompt_ids(policy.tokenizer, stored.system, stored.question)
    # An episode whose prompt did not fit has no ids to tell by.
    if stored.token_ids and stored.token_ids[: len(prompt)] != prompt:
        raise ValueError(f"{path} holds episodes that were made with another tokenizer: name another file")


def evaluate(
    policy: Policy,
    tasks: Sequence[Task],
    environment: Environment,
    path: str | os.PathLike[str],
    settings: EpisodeSettings | None = None,
    *,
    samples: int = 1,
    seed: int = 0,
    concurrency: int = 64,
    progress: str | None = None,
) -> list[Trajectory]:
    """Runs a policy on tasks, and returns their trajectories in the order of the tasks; see :func:`run_into_store`.

    Raises:
        ValueError: See :func:`run_into_store`.
        RuntimeError: Episodes failed; the message names one. What ended well is stored.
    """
    _, errors = run_into_store(
        policy,
        tasks,
        environment,
        path,
        settings,
        samples=samples,
        seed=seed,
        concurrency=concurrency,
        progress=progress,
    )
    if errors:
        episode_id, reason = next(iter(errors.items()))
        raise RuntimeError(
            f"{len(errors)} episodes failed, e.g. {episode_id}: {reason}; the others are in {path}: run again"
        )
    stored = {trajectory.episode_id: trajectory for trajectory in read_trajectories(path)}
    ids = [make_episode_id(task, seed, sample) for task in tasks for sample in range(samples)]
    return [stored[episode_id] for episode_id in ids]
