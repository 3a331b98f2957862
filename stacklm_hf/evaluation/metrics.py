"""Accuracy with honest uncertainty, by task shape and by split, and what an answer costs.

Contract: :func:`summarize` is a pure function from trajectories to an :class:`EvaluationResult`, plain data that
goes through JSON without loss. Nothing is weighted or left out: every trajectory that goes in is counted in
`overall` once, and once in its shape and its split; episodes that ended in an error count as wrong.

With several samples per task, accuracy is avg@n: the share of correct samples of a task, averaged over the tasks.
The samples of one task are not independent, so its interval counts tasks, not samples: with s = accuracy times
tasks "successes" among the tasks. As the variance of a share in [0, 1] of mean p is at most p(1-p), this errs on the
wide side.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import NormalDist, fmean
from typing import Any, NamedTuple

from stacklm_hf.evaluation.failures import count_failures
from stacklm_hf.rollout.trajectory import StepKind, Trajectory
from stacklm_hf.worlds.base import Task

CONFIDENCE = 0.95
SHAPE_ORDER = ("lookup", "double", "sum", "compare")  # known shapes first, by length; the others by name


class Interval(NamedTuple):
    """A confidence interval of a proportion or of a difference of two."""

    low: float
    high: float


def wilson_interval(successes: float, n: int, confidence: float = CONFIDENCE) -> Interval:
    """The Wilson score interval of a proportion (E. B. Wilson, JASA 22, 1927, pp. 209-212), no continuity correction.

    (p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n), with p = successes / n and z the normal quantile of
    (1 + confidence) / 2. Unlike p ± z·se it stays within [0, 1] and is of use at p = 0 and p = 1.

    Args:
        successes: Between 0 and n; a fraction where accuracy is averaged over samples.
        n: Number of trials. With n = 0 nothing is known: (0, 1).
        confidence: Between 0 and 1, both excluded.

    Raises:
        ValueError: An argument is out of its range.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, not {confidence}")
    if n < 0 or not 0 <= successes <= n:
        raise ValueError(f"successes must lie between 0 and n, not {successes} of {n}")
    if n == 0:
        return Interval(0.0, 1.0)
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    p = successes / n
    center = p + z * z / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    # The ends are exact by the formula; rounding would leave 1e-17 in the place of 0.
    low = 0.0 if successes == 0 else (center - half) / scale
    high = 1.0 if successes == n else (center + half) / scale
    return Interval(low, high)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """The chance that at least one of k samples is correct, from n >= k samples, without bias.

    1 - C(n - correct, k) / C(n, k) (Chen et al., Evaluating Large Language Models Trained on Code, 2021,
    arXiv 2107.03374, equation 1).

    Raises:
        ValueError: Not 1 <= k <= n, or not 0 <= correct <= n.
    """
    if not 1 <= k <= n or not 0 <= correct <= n:
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= correct <= n, not k={k}, n={n}, correct={correct}")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


@dataclass(frozen=True)
class Score:
    """The numbers of one group of trajectories.

    Args:
        n: Episodes.
        tasks: Different tasks among them.
        correct: Correct episodes.
        accuracy: Share of correct samples of a task, averaged over tasks (avg@n); 0 where n is 0.
        low: Lower end of its Wilson interval, over tasks.
        high: Upper end.
        grounded: Share of episodes whose answer stands in an observation.
        calls: Tool calls per episode, well-formed ones.
        steps: Turns per episode.
        own_tokens: Tokens that the policy wrote, per episode.
        total_tokens: Tokens of the whole episode, prompt and observations included.
        pass_at: k to pass@k averaged over tasks, for k = 1, 2, 4, ... and the most samples that every task has;
            empty where a task has one sample only.
    """

    n: int = 0
    tasks: int = 0
    correct: int = 0
    accuracy: float = 0.0
    low: float = 0.0
    high: float = 1.0
    grounded: float = 0.0
    calls: float = 0.0
    steps: float = 0.0
    own_tokens: float = 0.0
    total_tokens: float = 0.0
    pass_at: dict[int, float] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Score:
        """The inverse of `asdict`, also after JSON made the keys of `pass_at` text."""
        return cls(**{**row, "pass_at": {int(k): value for k, value in row["pass_at"].items()}})


@dataclass(frozen=True)
class TaskScore:
    """How one task went: what a paired comparison needs."""

    kind: str
    split: str
    n: int
    correct: int


@dataclass(frozen=True)
class EvaluationResult:
    """An evaluation in numbers.

    Args:
        label: Name of the run, e.g. `after SFT`.
        overall: All trajectories.
        by_kind: By task shape, known shapes first.
        by_split: By split.
        by_split_kind: By split, then by shape.
        failures: Failed episodes by cause (`stacklm_hf.evaluation.failures.Failure`), every cause present.
        stop_reasons: Episodes by stop reason.
        per_task: By task id.
        policies: Names of the policies seen, sorted.
        confidence: Of the intervals.
    """

    label: str
    overall: Score
    by_kind: dict[str, Score]
    by_split: dict[str, Score]
    by_split_kind: dict[str, dict[str, Score]]
    failures: dict[str, int]
    stop_reasons: dict[str, int]
    per_task: dict[str, TaskScore]
    policies: list[str]
    confidence: float = CONFIDENCE

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        return asdict(self)

    def to_json(self) -> str:
        """JSON text with an indent of 2."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False)

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> EvaluationResult:
        """The inverse of :meth:`to_dict`.

        Raises:
            ValueError: A field is missing or of the wrong form.
        """
        try:
            values = dict(row)
            values["overall"] = Score.from_dict(row["overall"])
            values["by_kind"] = _scores(row["by_kind"])
            values["by_split"] = _scores(row["by_split"])
            values["by_split_kind"] = {split: _scores(kinds) for split, kinds in row["by_split_kind"].items()}
            values["per_task"] = {task_id: TaskScore(**score) for task_id, score in row["per_task"].items()}
            return cls(**values)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not an evaluation result: {error!r}") from error

    @classmethod
    def from_json(cls, text: str) -> EvaluationResult:
        """The inverse of :meth:`to_json`.

        Raises:
            ValueError: The text is not JSON, or no evaluation result.
        """
        return cls.from_dict(json.loads(text))


def summarize(
    trajectories: Iterable[Trajectory],
    tasks: Mapping[str, Task] | None = None,
    *,
    label: str = "",
    confidence: float = CONFIDENCE,
) -> EvaluationResult:
    """Counts an evaluation.

    Args:
        trajectories: The episodes, one or several per task.
        tasks: Tasks by `task_id`, so that the failures can be told apart by the key.
        label: Name of the run.
        confidence: Of the intervals.

    Returns:
        The result; without any trajectory, one with `n` of 0 and the interval (0, 1).
    """
    episodes = list(trajectories)
    by_split = _group(episodes, "split")
    return EvaluationResult(
        label=label,
        overall=_score(episodes, confidence),
        by_kind={kind: _score(group, confidence) for kind, group in _group(episodes, "kind").items()},
        by_split={split: _score(group, confidence) for split, group in by_split.items()},
        by_split_kind={
            split: {kind: _score(part, confidence) for kind, part in _group(group, "kind").items()}
            for split, group in by_split.items()
        },
        failures={str(cause): count for cause, count in count_failures(episodes, tasks).items()},
        stop_reasons=dict(sorted(Counter(str(episode.stop_reason) for episode in episodes).items())),
        per_task={
            task_id: TaskScore(group[0].kind, group[0].split, len(group), sum(t.correct for t in group))
            for task_id, group in _by_task(episodes).items()
        },
        policies=sorted({episode.policy for episode in episodes}),
        confidence=confidence,
    )


@dataclass(frozen=True)
class Difference:
    """How one group changed from one evaluation to another.

    Args:
        before: Accuracy before.
        after: Accuracy after.
        change: after - before.
        low: Lower end of the interval of the change.
        high: Upper end.
        shared: Tasks in both evaluations.
        gained: Shared tasks that went better.
        lost: Shared tasks that went worse.
        p_value: Exact two-sided sign test over the gained and the lost ones (McNemar's test in its exact form,
            Psychometrika 12, 1947, where each task has one sample); 1 where there are none.
    """

    before: float
    after: float
    change: float
    low: float
    high: float
    shared: int
    gained: int
    lost: int
    p_value: float


def compare(before: EvaluationResult, after: EvaluationResult) -> dict[str, Difference]:
    """What changed, by task shape, with `all` as the last entry.

    The interval is Newcombe's for independent proportions (Statistics in Medicine 17, 1998, pp. 873-890, method
    10), built from the two Wilson intervals. Where both evaluations ran the same tasks it is wider than a paired
    one would be; the sign test over the shared tasks uses the pairing.

    Args:
        before: The earlier evaluation.
        after: The later one. Shapes that only one of the two has are left out.

    Raises:
        ValueError: The two have different confidence levels.
    """
    if before.confidence != after.confidence:
        raise ValueError(f"cannot compare intervals of {before.confidence} with intervals of {after.confidence}")
    kinds = [kind for kind in before.by_kind if kind in after.by_kind]
    pairs = {kind: (before.by_kind[kind], after.by_kind[kind]) for kind in kinds}
    differences = {kind: _difference(*pair, _paired(before, after, kind)) for kind, pair in pairs.items()}
    # A shape of one's own may be called "all"; the whole still comes last and under its name.
    differences.pop("all", None)
    differences["all"] = _difference(before.overall, after.overall, _paired(before, after, None))
    return differences


def sort_kinds(kinds: Iterable[str]) -> list[str]:
    """Known shapes by length, then the others by name."""
    known = {kind: rank for rank, kind in enumerate(SHAPE_ORDER)}
    return sorted(set(kinds), key=lambda kind: (known.get(kind, len(known)), kind))


def _scores(rows: Mapping[str, Any]) -> dict[str, Score]:
    return {name: Score.from_dict(row) for name, row in rows.items()}


def _group(episodes: Sequence[Trajectory], attribute: str) -> dict[str, list[Trajectory]]:
    groups: dict[str, list[Trajectory]] = defaultdict(list)
    for episode in episodes:
        groups[getattr(episode, attribute)].append(episode)
    return {name: groups[name] for name in sort_kinds(groups)}


def _by_task(episodes: Sequence[Trajectory]) -> dict[str, list[Trajectory]]:
    """Episodes by task; one without a task id is a task of its own."""
    groups: dict[str, list[Trajectory]] = defaultdict(list)
    for episode in episodes:
        groups[episode.task_id or episode.episode_id].append(episode)
    return dict(groups)


def _score(episodes: Sequence[Trajectory], confidence: float) -> Score:
    if not episodes:
        return Score()
    counts = [(len(group), sum(episode.correct for episode in group)) for group in _by_task(episodes).values()]
    accuracy = fmean(correct / n for n, correct in counts)
    interval = wilson_interval(accuracy * len(counts), len(counts), confidence)
    samples = min(n for n, _ in counts)
    ks = sorted({samples, *(2**power for power in range(samples.bit_length()))}) if samples > 1 else []
    return Score(
        n=len(episodes),
        tasks=len(counts),
        correct=sum(correct for _, correct in counts),
        accuracy=accuracy,
        low=interval.low,
        high=interval.high,
        grounded=fmean(episode.grounded for episode in episodes),
        calls=fmean(sum(step.kind is StepKind.CALL for step in episode.steps) for episode in episodes),
        steps=fmean(episode.num_steps for episode in episodes),
        own_tokens=fmean(episode.num_sampled for episode in episodes),
        total_tokens=fmean(len(episode.token_ids) for episode in episodes),
        pass_at={k: fmean(pass_at_k(n, correct, k) for n, correct in counts) for k in ks},
    )


def _paired(before: EvaluationResult, after: EvaluationResult, kind: str | None) -> tuple[int, int, int]:
    """Shared, gained and lost tasks."""
    shared = [
        (score.correct / score.n, after.per_task[task_id].correct / after.per_task[task_id].n)
        for task_id, score in before.per_task.items()
        if task_id in after.per_task and kind in (None, score.kind)
    ]
    return len(shared), sum(late > early for early, late in shared), sum(late < early for early, late in shared)


def _difference(before: Score, after: Score, paired: tuple[int, int, int]) -> Difference:
    shared, gained, lost = paired
    change = after.accuracy - before.accuracy
    return Difference(
        before=before.accuracy,
        after=after.accuracy,
        change=change,
        low=change - math.hypot(after.accuracy - after.low, before.high - before.accuracy),
        high=change + math.hypot(after.high - after.accuracy, before.accuracy - before.low),
        shared=shared,
        gained=gained,
        lost=lost,
        p_value=_sign_test(gained, lost),
    )


def _sign_test(gained: int, lost: int) -> float:
    n = gained + lost
    if n == 0:
        return 1.0
    tail = sum(math.comb(n, i) for i in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / 2**n)
