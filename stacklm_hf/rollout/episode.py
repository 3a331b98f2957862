"""The one episode loop: teacher, student, trainer, evaluation and `ask` all run it.

Contract: many episodes at once, each going on as soon as its own turn ends. What the policy wrote is recorded
as its own, token by token; all else (the prompt, observations, a closing `<|end|>` that the policy did not
write, the forced last turn) is the harness's. Nothing is ever cut from the left: an episode that does not fit
its context ends with `StopReason.CONTEXT_FULL`.
"""

from __future__ import annotations

import asyncio
import json
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from stacklm_hf import verify
from stacklm_hf.protocol.encoding import encode_untrusted
from stacklm_hf.protocol.tokens import ASSISTANT, END, SYSTEM, TOOL_RESULT, USER, control_ids
from stacklm_hf.protocol.wire import (
    FORCED_BODY,
    FORMAT_ERROR,
    REPEATED_CALL,
    Turn,
    neutralize,
    parse_turn,
)
from stacklm_hf.rollout.policy import Policy, PolicyError, TurnRequest
from stacklm_hf.rollout.trajectory import Step, StepKind, StopReason, Trajectory
from stacklm_hf.worlds.base import Environment, Session, Task


@dataclass(frozen=True)
class EpisodeSettings:
    """Limits of an episode.

    Args:
        max_steps: Turns before the harness forces an answer.
        max_new_tokens: Tokens of a turn.
        forced_answer_tokens: Tokens of the forced answer.
        max_context: Tokens of an episode; the policy's own limit where it is smaller.
        step_penalty: See `verify.episode_reward`.
        repeated_call_guard: Answer an exact repeat of an earlier call with `RepeatedCall` instead of running it.
    """

    max_steps: int = 6
    max_new_tokens: int = 160
    forced_answer_tokens: int = 40
    max_context: int = 8192
    step_penalty: float = 0.05
    repeated_call_guard: bool = True


@dataclass
class EpisodeEvents:
    """Callbacks of one episode, for display.

    Args:
        on_token: Each id as the policy chooses it.
        on_step: Each step as it ends.
    """

    on_token: Callable[[int], None] | None = None
    on_step: Callable[[Step], None] | None = None


def decode_turn(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """The text of a turn, in which a marker stands only for a control token.

    Text that merely spells a marker comes back neutralised, so that it cannot be taken for one.
    """
    control = {token_id: token for token, token_id in control_ids(tokenizer).items()}
    parts: list[str] = []
    plain: list[int] = []
    for token_id in [*token_ids, None]:
        if token_id is not None and token_id not in control:
            plain.append(token_id)
            continue
        if plain:
            parts.append(neutralize(str(tokenizer.decode(plain, clean_up_tokenization_spaces=False))))
            plain = []
        if token_id is not None:
            parts.append(control[token_id])
    return "".join(parts)


def prompt_ids(tokenizer: PreTrainedTokenizerBase, system: str, question: str) -> list[int]:
    """The ids of `wire.render_prompt`, made span by span.

    The question is untrusted. In one text with the markers it could name a special token of the tokenizer's own,
    such as `<|im_end|>`, which encoding as trusted text would bring to life.
    """
    control = control_ids(tokenizer)
    ids = []
    for opener, text in ((SYSTEM, system), (USER, question)):
        ids += [control[opener], *encode_untrusted(tokenizer, neutralize(text)), control[END]]
    return [*ids, control[ASSISTANT]]


def make_episode_id(task: Task, seed: int, sample: int) -> str:
    """The id of one episode of a run."""
    return f"{task.task_id}/seed{seed}/{sample}"


def _turn_seed(seed: int, task: Task, sample: int, step: int) -> int:
    entropy = [seed, zlib.crc32(f"{task.task_id}\n{task.question}".encode("utf-8", "surrogatepass")), sample, step]
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])


@dataclass
class _Episode:
    """The state of one running episode."""

    policy: Policy
    task: Task
    environment: Environment
    settings: EpisodeSettings
    trajectory: Trajectory
    sample: int
    events: EpisodeEvents
    timing: dict[str, float] = field(default_factory=lambda: {"policy": 0.0, "tools": 0.0})
    calls: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.control = control_ids(self.policy.tokenizer)
        self.end_id = self.control[END]
        self.max_context = min(self.settings.max_context, self.policy.max_context)

    def harness(self, token_ids: Sequence[int]) -> None:
        """Records tokens that the policy did not write."""
        count = len(token_ids)
        self.trajectory.token_ids.extend(token_ids)
        self.trajectory.sampled.extend([False] * count)
        self.trajectory.logprobs.extend([None] * count)
        self.trajectory.forced.extend([False] * count)

    @property
    def room(self) -> int:
        """Tokens that fit before the harness's closing <|end|>."""
        return self.max_context - len(self.trajectory.token_ids) - 1

    async def run(self) -> StopReason:
        prompt = prompt_ids(self.policy.tokenizer, self.environment.system_prompt, self.task.question)
        if len(prompt) > self.max_context - 2:
            return StopReason.CONTEXT_FULL
        self.harness(prompt)
        with ExitStack() as stack:
            session = stack.enter_context(self.environment.open(self.task))
            for _ in range(self.settings.max_steps):
                stop = await self.step(session)
                if stop is not None:
                    return stop
        return await self.forced_answer()

    async def step(self, session: Session) -> StopReason | None:
        """One turn and its observation; returns why the episode ends, None to go on."""
        if self.room < 1:
            return StopReason.CONTEXT_FULL
        budget = min(self.settings.max_new_tokens, self.room)
        text, cut = await self.write(budget, last=False)
        turn = parse_turn(text)
        step = Step(StepKind(turn.kind), text, thought=turn.thought, answer=turn.answer, cut=cut)
        if turn.kind == "answer":
            self.add(step)
            if not cut:
                return StopReason.ANSWERED
            return StopReason.CONTEXT_FULL if budget < self.settings.max_new_tokens else StopReason.LENGTH
        step.observation = await self.observe(session, turn, step)
        self.add(step)
        return self.give(step.observation)

    def add(self, step: Step) -> None:
        self.trajectory.steps.append(step)
        if self.events.on_step:
            self.events.on_step(step)

    async def write(self, budget: int, last: bool) -> tuple[str, bool]:
        """Lets the policy write; returns the turn's text without its end, and whether it was cut."""
        request = TurnRequest(
            self.trajectory.episode_id,
            list(self.trajectory.token_ids),
            budget,
            _turn_seed(self.trajectory.seed, self.task, self.sample, len(self.trajectory.steps)),
            self.task,
            tuple(self.trajectory.steps),
            last,
            self.events.on_token,
        )
        start = time.perf_counter()
        output = await self.policy.turn(request)
        self.timing["policy"] += time.perf_counter() - start
        ids = output.token_ids
        if len(ids) > budget:
            raise PolicyError(f"the policy wrote {len(ids)} tokens where {budget} were allowed")
        self.trajectory.token_ids.extend(ids)
        self.trajectory.sampled.extend([True] * len(ids))
        self.trajectory.logprobs.extend(output.logprobs)
        self.trajectory.forced.extend(output.forced)
        self.trajectory.check()
        cut = not ids or ids[-1] != self.end_id
        if cut:
            self.harness([self.end_id])
        return decode_turn(self.policy.tokenizer, ids if cut else ids[:-1]), cut

    async def observe(self, session: Session, turn: Turn, step: Step) -> str:
        """Runs a call, or says why it does not run."""
        if turn.kind == "malformed" or turn.tool is None:
            return FORMAT_ERROR
        step.tool = turn.tool
        step.arguments = json.dumps(turn.args, ensure_ascii=False)
        key = json.dumps([turn.tool, turn.args], sort_keys=True)
        if self.settings.repeated_call_guard and key in self.calls:
            return REPEATED_CALL
        self.calls.add(key)
        start = time.perf_counter()
        if getattr(self.environment, "blocking", False):
            text = await asyncio.to_thread(session.call, turn.tool, turn.args)
        else:
            text = session.call(turn.tool, turn.args)
        self.timing["tools"] += time.perf_counter() - start
        return neutralize(text)

    def give(self, observation: str) -> StopReason | None:
        """Appends the observation, or ends the episode where it does not fit."""
        text = encode_untrusted(self.policy.tokenizer, observation)
        span = [self.control[TOOL_RESULT], *text, self.end_id, self.control[ASSISTANT]]
        if len(span) >= self.room:
            return StopReason.CONTEXT_FULL
        self.harness(span)
        return None

    async def forced_answer(self) -> StopReason:
        """No steps left: the harness begins the last turn, and the policy may only answer."""
        body = encode_untrusted(self.policy.tokenizer, FORCED_BODY)
        if len(body) >= self.room:
            return StopReason.CONTEXT_FULL
        self.harness(body)
        text, cut = await self.write(min(self.settings.forced_answer_tokens, self.room), last=True)
        turn = parse_turn(FORCED_BODY + text)
        kind = StepKind.ANSWER if turn.kind == "answer" else StepKind.MALFORMED
        self.add(Step(kind, FORCED_BODY + text, thought=turn.thought, answer=turn.answer, cut=cut, forced=True))
        return StopReason.STEP_LIMIT


def _score(trajectory: Trajectory, settings: EpisodeSettings) -> None:
    answers = [step.answer for step in trajectory.steps if step.kind is StepKind.ANSWER]
    trajectory.answer = answers[-1] if answers else None
    trajectory.correct = trajectory.answer is not None and verify.is_correct(trajectory.answer, trajectory.gold)
    trajectory.grounded = trajectory.answer is not None and verify.is_grounded(
        trajectory.answer, trajectory.observations
    )
    trajectory.reward = verify.episode_reward(
        trajectory, max_steps=settings.max_steps, step_penalty=settings.step_penalty
    )


async def run_episode(
    policy: Policy,
    task: Task,
    environment: Environment,
    settings: EpisodeSettings | None = None,
    *,
    seed: int = 0,
    sample: int = 0,
    events: EpisodeEvents | None = None,
) -> Trajectory:
    """Runs one episode; see :func:`run_episodes`."""
    settings = settings or EpisodeSettings()
    trajectory = Trajectory(
        make_episode_id(task, seed, sample),
        task.task_id,
        environment.name,
        task.kind,
        neutralize(task.question),
        task.gold,
        policy=policy.name,
        split=task.split,
        system=neutralize(environment.system_prompt),
        sampling=dict(policy.sampling),
        seed=seed,
    )
    episode = _Episode(policy, task, environment, settings, trajectory, sample, events or EpisodeEvents())
    start = time.perf_counter()
    try:
        trajectory.stop_reason = await episode.run()
    except PolicyError as error:
        trajectory.stop_reason, trajectory.error = StopReason.ERROR, str(error)
    finally:
        policy.release(trajectory.episode_id)
    _score(trajectory, settings)
    trajectory.timing = {"total": time.perf_counter() - start, **episode.timing}
    trajectory.timing = {name: round(seconds, 6) for name, seconds in trajectory.timing.items()}
    return trajectory


async def run_episodes_async(
    policy: Policy,
    tasks: Iterable[Task],
    environment: Environment,
    settings: EpisodeSettings | None = None,
    *,
    samples: int = 1,
    seed: int = 0,
    concurrency: int = 64,
    skip: Callable[[str], bool] | None = None,
    on_trajectory: Callable[[Trajectory], Any] | None = None,
    keep: bool = True,
    progress: str | None = None,
) -> list[Trajectory]:
    """The coroutine behind :func:`run_episodes`, for callers that have an event loop."""
    if samples < 1 or seed < 0:
        raise ValueError(f"samples must be at least 1 and seed at least 0, not {samples} and {seed}")
    tasks = list(tasks)
    if len({task.task_id for task in tasks}) < len(tasks):
        # Episodes of one id would share a slot of the engine and a place in the store.
        raise ValueError("two tasks share a task_id: give each its own (stacklm_hf.rollout.episode.with_task_ids)")
    jobs = [
        (task, sample)
        for task in tasks
        for sample in range(samples)
        if skip is None or not skip(make_episode_id(task, seed, sample))
    ]
    results: list[Trajectory | None] = [None] * len(jobs)
    queue = iter(enumerate(jobs))
    bar = tqdm(total=len(jobs), desc=progress, unit="ep", disable=progress is None)

    async def worker() -> None:
        for index, (task, sample) in queue:
            trajectory = await run_episode(policy, task, environment, settings, seed=seed, sample=sample)
            if on_trajectory is not None:
                on_trajectory(trajectory)
            if keep:
                results[index] = trajectory
            bar.update()

    with bar:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(max(1, concurrency), len(jobs))):
                    group.create_task(worker())
        except BaseExceptionGroup as errors:
            # The first fault is the cause; the others are its siblings being cancelled.
            raise errors.exceptions[0] from None
    return [trajectory for trajectory in results if trajectory is not None]


def run_episodes(
    policy: Policy,
    tasks: Iterable[Task],
    environment: Environment,
    settings: EpisodeSettings | None = None,
    **options: Any,
) -> list[Trajectory]:
    """Runs `samples` episodes of each task, many at once.

    Args:
        policy: Writes the turns.
        tasks: What to solve.
        environment: Runs the tools.
        settings: Limits of an episode.
        samples: Episodes of each task.
        seed: Seed of the run; with the sample's number it seeds each episode.
        concurrency: Episodes in flight.
        skip: Called with an episode id; True leaves the episode out (it is done already).
        on_trajectory: Called with each trajectory as it ends, in the order of ending.
        keep: Return the trajectories; False leaves them to `on_trajectory` and holds none in memory.
        progress: Label of a progress bar; None for none.

    Returns:
        The trajectories in the order of the tasks, samples of a task next to each other.

    Raises:
        ValueError: `samples` is less than 1, `seed` less than 0, or two tasks share a `task_id`.
        RuntimeError: Called from a running event loop; use :func:`run_episodes_async` there.
    """
    return asyncio.run(run_episodes_async(policy, tasks, environment, settings, **options))


def with_task_ids(tasks: Iterable[Task], prefix: str) -> list[Task]:
    """Gives tasks without an id one, unique within the list."""
    return [
        task if task.task_id else replace(task, task_id=f"{prefix}-{index:05d}") for index, task in enumerate(tasks)
    ]
