"""Every turn is one example of one role, with all that came before it and nothing after."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from datasets import Dataset
from played_episodes import ANSWER, CALC, SEARCH, TOKENIZER, call, good, play

from stacklm_hf.data.dataset import FEATURES, build_dataset, check_columns
from stacklm_hf.data.roles import ROLE_FEATURES, split_roles
from stacklm_hf.rollout.episode import run_episodes
from stacklm_hf.rollout.scripted import ScriptedTeacher
from stacklm_hf.rollout.trajectory import Trajectory
from stacklm_hf.worlds.research import ResearchEnvironment, build_corpus, make_task_pool

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "protocol.json").read_text())


def split(*trajectories: Trajectory) -> tuple[Dataset, Dataset]:
    return split_roles(build_dataset(trajectories, TOKENIZER, max_length=None)[0])


def test_a_search_is_the_query_writers_and_the_rest_the_synthesizers() -> None:
    writer, synthesizer = split(good(), good(seed=1))
    assert writer["id"][:] == ["t0/seed0/0#0", "t0/seed1/0#0"]
    assert synthesizer["id"][:] == ["t0/seed0/0#1", "t0/seed0/0#2", "t0/seed1/0#1", "t0/seed1/0#2"]
    assert set(writer["role"]) == {"query_writer"}
    assert set(synthesizer["role"]) == {"synthesizer"}
    assert synthesizer["turn"][:] == [1, 2, 1, 2]


def test_an_example_is_the_episode_up_to_its_turn() -> None:
    trajectory = good()
    _, synthesizer = split(trajectory)
    calculation = synthesizer[0]
    assert calculation["prompt"].endswith("<|tool_result|>[1] the layer count of Stack-100M is 30.<|end|><|assistant|>")
    assert calculation["completion"] == (
        "Thought: the layer count of Stack-100M is 30. Multiply it by 2.\n"
        '<|tool_call|>{"tool": "calc", "args": {"expr": "30*2"}}<|end|>'
    )
    assert calculation["text"] == calculation["prompt"] + calculation["completion"]
    assert calculation["input_ids"] == trajectory.token_ids[: len(calculation["input_ids"])]
    assert TOKENIZER.decode(calculation["input_ids"]) == calculation["text"]
    assert [message["role"] for message in calculation["messages"]] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]


def test_only_its_own_turn_is_supervised() -> None:
    trajectory = good()
    covered = [0] * len(trajectory.token_ids)
    for examples in split(trajectory):
        for row in examples:
            own = [token for token, mask in zip(row["input_ids"], row["assistant_masks"], strict=True) if mask]
            assert TOKENIZER.decode(own) == row["completion"]
            for position, mask in enumerate(row["assistant_masks"]):
                covered[position] += mask
    # Together the examples supervise what the episode supervises, each token once.
    assert covered == [int(own) for own in trajectory.sampled]


def test_the_examples_train_by_the_same_call() -> None:
    for examples in split(good()):
        check_columns(examples)
        assert examples.features == ROLE_FEATURES
        assert examples.column_names[: len(FEATURES)] == list(FEATURES)


def test_the_scripted_set_has_the_published_numbers() -> None:
    train, _ = make_task_pool(seed=0)
    trajectories = run_episodes(ScriptedTeacher(TOKENIZER), train, ResearchEnvironment(build_corpus(seed=0)))
    expected = VECTORS["scripted_train_pool"]
    assert sum(trajectory.correct and trajectory.grounded for trajectory in trajectories) == expected["solved"]
    writer, synthesizer = split(*trajectories)
    assert len(writer) == expected["query_writer_examples"]
    assert len(synthesizer) == expected["synthesizer_examples"]


def test_a_malformed_turn_is_an_example_of_nothing() -> None:
    writer, synthesizer = split(play('Thought: x\n<|tool_call|>{"tool": "search"', SEARCH, CALC, ANSWER))
    assert writer["turn"][:] == [1]
    assert synthesizer["turn"][:] == [2, 3]


def test_other_tools_can_be_the_query_writers() -> None:
    dataset, _ = build_dataset([play(call("read", path="a"), CALC, ANSWER)], TOKENIZER)
    writer, synthesizer = split_roles(dataset, query_tools=("search", "read"))
    assert (len(writer), len(synthesizer)) == (1, 2)


def test_a_forced_answer_supervises_what_the_policy_wrote_of_it() -> None:
    _, synthesizer = split(play(SEARCH, " 30", max_steps=1))
    assert synthesizer[0]["completion"] == " 30<|end|>"
    assert synthesizer[0]["prompt"].endswith("<|assistant|>Thought: I must answer now.\nAnswer:")


def test_turns_and_mask_that_do_not_fit_together_are_refused() -> None:
    trajectory = good()
    mask = list(trajectory.sampled)
    for position in range(mask.index(True), len(mask)):
        if not mask[position]:
            break  # the first turn is unmarked now
        mask[position] = False
    with pytest.raises(ValueError, match=r"row 't0/seed0/0' has 3 turns, but 2 supervised runs .* filter"):
        split(replace(trajectory, sampled=mask))


def test_other_datasets_are_refused() -> None:
    dataset, _ = build_dataset([good()], TOKENIZER)
    with pytest.raises(ValueError, match="lacks the columns messages"):
        split_roles(dataset.remove_columns("messages"))


def test_an_empty_dataset_splits_into_empty_ones() -> None:
    assert [len(examples) for examples in split()] == [0, 0]
