"""Whether a GRPO run is healthy, in numbers: what its episodes do, what its groups teach, and if it is on policy.

Contract: pure functions of a batch of episodes, and one accumulator. A share of nothing is 0, never NaN.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from stacklm_hf.protocol.wire import REPEATED_CALL
from stacklm_hf.rollout.trajectory import StepKind, StopReason, Trajectory


def is_truncated(episode: Trajectory) -> bool:
    """Whether a budget ended the episode: it did not fit its context, or its last turn was cut."""
    return episode.stop_reason is StopReason.CONTEXT_FULL or (bool(episode.steps) and episode.steps[-1].cut)


def num_trained(episode: Trajectory) -> int:
    """Tokens that the loss covers: written by the policy, and a choice of its own."""
    return sum(own and not forced for own, forced in zip(episode.sampled, episode.forced, strict=True))


def degenerate_groups(rewards: Sequence[float] | torch.Tensor, size: int) -> list[bool]:
    """Which groups have equal rewards, and so no gradient. Compared exactly: no mean of equal numbers is involved.

    Args:
        rewards: Shape (groups * size,), the samples of a group next to each other; NaN for a sample without one.
        size: Samples of a group.

    Returns:
        One entry for each group; True also where at most one sample has a reward.
    """
    groups = torch.as_tensor(rewards).detach().cpu().double().view(-1, size)
    missing = groups.isnan()
    low = groups.masked_fill(missing, torch.inf).amin(1)
    high = groups.masked_fill(missing, -torch.inf).amax(1)
    return (low >= high).tolist()


def episode_metrics(episodes: Sequence[Trajectory]) -> dict[str, float]:
    """What a batch of episodes was like.

    Args:
        episodes: At least one.

    Returns:
        By name, ready to be logged. Under `agent/`: accuracy, and accuracy by task shape; turns, calls, malformed and
        repeated calls per episode; shares of episodes whose answer the harness had to force, and that a budget
        ended. Under `tokens/`: of the real (not padding) tokens, the share that the policy wrote and the share that
        is trained on.
    """
    steps = [step for episode in episodes for step in episode.steps]
    by_kind: dict[str, list[bool]] = defaultdict(list)
    for episode in episodes:
        by_kind[episode.kind].append(episode.correct)
    own, trained = sum(episode.num_sampled for episode in episodes), sum(map(num_trained, episodes))
    counts = {
        "accuracy": sum(episode.correct for episode in episodes),
        "steps": len(steps),
        "calls": sum(step.kind is StepKind.CALL for step in steps),
        "malformed_calls": sum(step.kind is StepKind.MALFORMED for step in steps),
        "repeated_calls": sum(step.observation == REPEATED_CALL for step in steps),
        "forced_answers": sum(episode.stop_reason is StopReason.STEP_LIMIT for episode in episodes),
        "truncated": sum(map(is_truncated, episodes)),
    }
    metrics = {f"agent/{name}": count / len(episodes) for name, count in counts.items()}
    metrics |= {f"agent/accuracy_{kind}": sum(group) / len(group) for kind, group in sorted(by_kind.items())}
    real = max(1, sum(len(episode.token_ids) for episode in episodes))
    return metrics | {"tokens/own_share": own / real, "tokens/trained_share": trained / real}


class LogprobGap:
    """How far the sampler's log-probabilities are from the trainer's, over all tokens trained on since last asked.

    On policy the importance ratio of a token is `exp` of its gap, so a gap of 0 is a ratio of 1.
    """

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._sum = self._max = 0.0
        self._count = 0

    def add(self, absolute_sum: float, count: int, largest: float) -> None:
        """Adds the gaps of a micro-batch, all processes together.

        Args:
            absolute_sum: Sum of the absolute gaps.
            count: Tokens.
            largest: Largest absolute gap.
        """
        self._sum += absolute_sum
        self._count += count
        self._max = max(self._max, largest)

    def pop(self) -> dict[str, float]:
        """Mean and maximum of the absolute gaps in nats, empty without a token; starts anew."""
        if not self._count:
            return {}
        metrics = {
            "sampling/sampling_logp_difference/mean": self._sum / self._count,
            "sampling/sampling_logp_difference/max": self._max,
        }
        self._clear()
        return metrics
