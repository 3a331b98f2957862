"""The filter: what is kept, and the one reason for each that is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from played_episodes import ANSWER, CALC, CUT, SEARCH, call, good, play

from stacklm_hf.data.filters import RejectReason, TrajectoryFilter, filter_trajectories
from stacklm_hf.rollout.trajectory import StopReason, Trajectory


def reason(trajectory: Trajectory, **options: Any) -> RejectReason | None:
    return TrajectoryFilter(**options).check(trajectory)


def test_a_correct_and_grounded_episode_is_kept() -> None:
    assert reason(good()) is None


def answered_without_looking() -> Trajectory:
    return play("Thought: I know it.\nAnswer: 60")


REJECTED = {
    RejectReason.ERROR: [
        lambda: replace(good(), stop_reason=StopReason.ERROR, error="timeout"),
    ],
    RejectReason.STEP_LIMIT: [
        lambda: play(SEARCH, CALC, " 60", max_steps=2),  # right, but forced
    ],
    RejectReason.CONTEXT_FULL: [
        lambda: play(SEARCH, observations=("x" * 500,), max_context=300),
    ],
    RejectReason.CUT_TURN: [
        lambda: play(SEARCH + CUT, CALC, ANSWER),
        lambda: play(SEARCH, CALC, ANSWER + CUT),
    ],
    RejectReason.NOT_ANSWERED: [
        lambda: play(SEARCH, CALC, "Thought: hm.\nAnswer:"),
        lambda: play(SEARCH, CALC, "  "),
        lambda: replace(good(), steps=[]),
    ],
    RejectReason.NO_TOKENS: [
        lambda: replace(good(), token_ids=[], sampled=[], logprobs=[], forced=[]),
    ],
    RejectReason.CONTROL_TOKEN: [
        lambda: play(SEARCH, CALC, "Thought: the token <|end|> is next.\nAnswer: 60"),  # merely spelled
        lambda: play(SEARCH, CALC, "Thought: x < |tool_result|> y\nAnswer: 60"),
        lambda: play(call("search", query="what is <|eos|>", k=2), CALC, ANSWER),  # escaped in the JSON
        lambda: play(SEARCH + "<|tool_result|>", CALC, ANSWER),
    ],
    RejectReason.MALFORMED_CALL: [
        lambda: play('Thought: x\n<|tool_call|>{"tool": "calc"', SEARCH, CALC, ANSWER),
    ],
    RejectReason.REPEATED_CALL: [
        lambda: play(SEARCH, SEARCH, CALC, ANSWER),
    ],
    RejectReason.INVENTED_OBSERVATION: [
        lambda: play(SEARCH, CALC, "Thought: x\nObservation: 60\nAnswer: 60"),
        lambda: play(SEARCH, CALC, "Thought: x\ntool result 2: it is 60\nAnswer: 60"),
        lambda: play(SEARCH, CALC, "Thought: <tool_response>60</tool_response>\nAnswer: 60"),
    ],
    RejectReason.INCORRECT: [
        lambda: play(SEARCH, CALC, "Answer: 61"),
        lambda: play(SEARCH, CALC, "the answer is 60"),  # without `Answer:` the whole text is the answer
    ],
    RejectReason.UNGROUNDED: [
        answered_without_looking,
        lambda: play(SEARCH, ANSWER, observations=("[1] of 2060 [2] and 60%",)),
    ],
}


@pytest.mark.parametrize(
    ("expected", "make"), [(expected, make) for expected, makers in REJECTED.items() for make in makers]
)
def test_a_reject_has_its_reason(expected: RejectReason, make: Any) -> None:
    assert reason(make()) is expected


def test_every_reason_is_tested() -> None:
    elsewhere = {RejectReason.TOO_LONG, RejectReason.DUPLICATE, RejectReason.TASK_FULL}
    assert set(REJECTED) | elsewhere == set(RejectReason)


def test_of_several_reasons_the_first_in_the_order_holds() -> None:
    trajectory = play('Thought: x <|end|>\n<|tool_call|>{"tool": 1', SEARCH, "Answer: 61")
    assert reason(trajectory) is RejectReason.CONTROL_TOKEN
    assert reason(replace(trajectory, stop_reason=StopReason.ERROR)) is RejectReason.ERROR
    assert reason(play("Answer: 61"), max_length=1) is RejectReason.INCORRECT


def test_ordinary_words_are_no_invented_observation() -> None:
    text = "Thought: my observation: all is well. A tool result is 60.\nAnswer: 60"
    assert reason(play(SEARCH, CALC, text)) is None


def test_control_markers_of_the_world_are_not_the_policys() -> None:
    trajectory = good(
        question="What does <|end|> mean?", observations=("[1] <|end|> Observation: 30 <tool_response>", "60")
    )
    assert reason(trajectory) is None


def test_grounding_can_be_waived() -> None:
    assert reason(answered_without_looking(), require_grounded=False) is None


def test_too_long_is_rejected_and_never_cut() -> None:
    trajectory = good()
    length = len(trajectory.token_ids)
    assert reason(trajectory, max_length=length) is None
    assert reason(trajectory, max_length=length - 1) is RejectReason.TOO_LONG
    assert reason(trajectory, max_length=None) is None
    assert len(trajectory.token_ids) == length


def test_of_equal_token_ids_the_first_is_kept() -> None:
    first, second = good(seed=0), good(seed=1)
    other = play(SEARCH, CALC, "Thought: Done.\nAnswer: 60")
    result = filter_trajectories([first, second, other])
    assert [trajectory.episode_id for trajectory in result.kept] == [first.episode_id, other.episode_id]
    assert result.rejects == {RejectReason.DUPLICATE: 1}


def test_one_that_was_rejected_makes_no_duplicate() -> None:
    wrong, right = replace(good(), correct=False), good(seed=1)
    result = filter_trajectories([wrong, right])
    assert result.kept == [right]
    assert result.rejects == {RejectReason.INCORRECT: 1}


def test_at_most_so_many_of_a_task_are_kept() -> None:
    texts = [f"Thought: way {number}.\nAnswer: 60" for number in range(3)]
    trajectories = [
        play(SEARCH, CALC, text, task_id=task, question=f"Question {task}") for text in texts for task in ("a", "b")
    ]
    result = filter_trajectories(trajectories, max_per_task=2)
    assert result.kept == trajectories[:4]
    assert result.rejects == {RejectReason.TASK_FULL: 2}


POOL = [
    good(),
    good(seed=1),
    play(SEARCH, CALC, "Thought: Done.\nAnswer: 60"),
    answered_without_looking(),
    play("Answer: 61"),
    play(SEARCH + CUT, CALC, ANSWER),
]


@settings(deadline=None)
@given(st.lists(st.sampled_from(POOL), max_size=30), st.none() | st.integers(0, 3))
def test_kept_and_rejected_add_up(trajectories: list[Trajectory], max_per_task: int | None) -> None:
    result = filter_trajectories(trajectories, max_per_task=max_per_task)
    assert result.total == len(result.kept) + sum(result.rejects.values()) == len(trajectories)
    assert filter_trajectories(result.kept, max_per_task=max_per_task).kept == result.kept


def test_a_stream_is_filtered_lazily() -> None:
    chosen = TrajectoryFilter()
    stream = chosen.keep(iter(POOL))
    assert next(stream) is POOL[0]
    assert (chosen.total, chosen.kept) == (1, 1)
    assert next(stream) is POOL[2]
    assert (chosen.total, chosen.kept, chosen.rejects) == (3, 2, {RejectReason.DUPLICATE: 1})
