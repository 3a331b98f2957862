"""The dataset: the record's own ids and mask, and messages from which the chat template gives the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, Value, load_dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from played_episodes import ANSWER, CALC, CUT, SEARCH, TOKENIZER, call, good, play

from stacklm_hf.data.dataset import (
    FEATURES,
    build_dataset,
    check_columns,
    load_rows,
    save_dataset,
    supervised_share,
    trajectory_messages,
    turn_spans,
)
from stacklm_hf.protocol.wire import FORCED_BODY
from stacklm_hf.rollout.trajectory import Trajectory


def rows(*trajectories: Trajectory) -> Dataset:
    return build_dataset(trajectories, TOKENIZER, max_length=None)[0]


def through_the_template(messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    encoded = TOKENIZER.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    return encoded["input_ids"], encoded["assistant_masks"]


def test_the_columns_are_the_fixed_ones_in_order() -> None:
    dataset = rows(good())
    assert dataset.column_names == [
        *("id", "task_id", "world", "kind", "question", "gold", "answer", "correct", "grounded", "reward"),
        *("num_steps", "stop_reason", "policy", "messages", "text", "input_ids", "assistant_masks"),
    ]
    assert dataset.features == FEATURES


def test_a_row_is_the_record() -> None:
    trajectory = good()
    row = rows(trajectory)[0]
    assert row["id"] == trajectory.episode_id
    assert row["input_ids"] == trajectory.token_ids
    assert row["assistant_masks"] == [int(own) for own in trajectory.sampled]
    assert row["text"] == (
        "<|system|>You are brief. Tools: search(query,k), calc(expr).<|end|>"
        "<|user|>What is the layer count of Stack-100M, multiplied by 2?<|end|>"
        '<|assistant|>Thought: I need it.\n<|tool_call|>{"tool": "search", "args": '
        '{"query": "Stack-100M layer count", "k": 2}}<|end|>'
        "<|tool_result|>[1] the layer count of Stack-100M is 30.<|end|>"
        "<|assistant|>Thought: the layer count of Stack-100M is 30. Multiply it by 2.\n"
        '<|tool_call|>{"tool": "calc", "args": {"expr": "30*2"}}<|end|>'
        "<|tool_result|>60<|end|><|assistant|>Thought: I have everything I need.\nAnswer: 60<|end|>"
    )
    expected = ("t0", "given world", "double", trajectory.question, "60", "60", True, True, 3, "answered", "given")
    names = ("task_id", "world", "kind", "question", "gold", "answer", "correct", "grounded", "num_steps")
    assert tuple(row[name] for name in (*names, "stop_reason", "policy")) == expected
    assert row["reward"] == pytest.approx(1 - 0.05 * 3 / 6)


def test_messages_are_what_chat_templates_take() -> None:
    def message(role: str, content: str, **values: Any) -> dict[str, Any]:
        empty = {"tool_calls": None, "prefill": None, "closed": None}
        return {"role": role, "content": content, **empty, **values}

    def calls(name: str, arguments: str) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": name, "arguments": arguments}}]

    assert rows(good())[0]["messages"] == [
        message("system", "You are brief. Tools: search(query,k), calc(expr)."),
        message("user", "What is the layer count of Stack-100M, multiplied by 2?"),
        message(
            "assistant",
            "Thought: I need it.",
            tool_calls=calls("search", '{"query": "Stack-100M layer count", "k": 2}'),
        ),
        message("tool", "[1] the layer count of Stack-100M is 30."),
        message(
            "assistant",
            "Thought: the layer count of Stack-100M is 30. Multiply it by 2.",
            tool_calls=calls("calc", '{"expr": "30*2"}'),
        ),
        message("tool", "60"),
        message("assistant", "Thought: I have everything I need.\nAnswer: 60"),
    ]


EPISODES = {
    "good": lambda: good(),
    "answered at once": lambda: play("no idea at all"),
    "no thought before a call": lambda: play('<|tool_call|>{"tool": "calc", "args": {"expr": "1"}}', ANSWER),
    "blank lines before a call": lambda: play(call("calc", "Thought: x\n\n", expr="1"), ANSWER),
    "only a line break before a call": lambda: play(call("calc", "", expr="1"), ANSWER),
    "markers in untrusted text": lambda: play(
        call("search", query="<|tool_call|>", k=2),
        ANSWER,
        question="What does <|end|> mean?",
        observations=("[1] <|tool_result|> and <|assistant|>",),
    ),
    "cut answer": lambda: play(SEARCH, CALC, ANSWER + CUT),
    "cut call": lambda: play(SEARCH + CUT, CALC, ANSWER),
    "step limit, with a call that was run": lambda: play(SEARCH, CALC, " 60", max_steps=2),
    "step limit, cut": lambda: play(SEARCH, " it is 6" + CUT, max_steps=1),
    "repeated call": lambda: play(SEARCH, SEARCH, CALC, ANSWER),
    "no arguments": lambda: play(call("calc"), ANSWER),
    "nested and non-ASCII arguments": lambda: play(call("f", a={"b": [1.5, None, True, "\u00e9\u4f60\n"]}), ANSWER),
}


@pytest.mark.parametrize("name", EPISODES)
def test_the_template_gives_the_rows_ids_and_mask_from_its_messages(name: str) -> None:
    row = rows(EPISODES[name]())[0]
    assert through_the_template(row["messages"]) == (row["input_ids"], row["assistant_masks"])
    assert row["text"] == TOKENIZER.apply_chat_template(row["messages"], tokenize=False)


# Any text but half surrogates, which no tokenizer takes.
TEXT = st.text(max_size=30)


@settings(deadline=None)
@given(question=TEXT, thought=TEXT, value=TEXT, observation=TEXT, answer=TEXT)
def test_whatever_the_texts_are_the_template_agrees(
    question: str, thought: str, value: str, observation: str, answer: str
) -> None:
    turn = call("search", f"Thought: {thought}.", query=value, k=1)
    trajectory = play(turn, f"Thought: y\nAnswer: {answer}", question=question, observations=(observation,))
    row = rows(trajectory)[0]
    assert through_the_template(row["messages"]) == (row["input_ids"], row["assistant_masks"])
    (argument,) = next(message["tool_calls"] for message in row["messages"] if message["tool_calls"])
    assert json.loads(argument["function"]["arguments"]) == {"query": value, "k": 1}


def test_a_forced_answer_is_the_harnesss_prefill_and_the_policys_content() -> None:
    last = trajectory_messages(play(SEARCH, CALC, " 60", max_steps=2))[-1]
    assert (last["prefill"], last["content"], last["closed"]) == (FORCED_BODY, " 60", None)


def test_a_cut_turn_was_not_closed_by_the_policy() -> None:
    messages = trajectory_messages(play(SEARCH, CALC, ANSWER + CUT))
    assert [message["closed"] for message in messages if message["role"] == "assistant"] == [None, None, False]


def test_a_malformed_call_is_inert_text() -> None:
    messages = trajectory_messages(play('Thought: x\n<|tool_call|>{"tool": "calc"', ANSWER))
    assert (messages[2]["content"], messages[2]["tool_calls"]) == ('Thought: x\n< |tool_call|>{"tool": "calc"', None)
    assert messages[3]["role"] == "tool"


def test_a_marker_that_the_policy_merely_spelled_is_inert_in_text_and_messages() -> None:
    trajectory = play("Thought: <|user|> said <|end|>\nAnswer: <|eos|>")
    row = rows(trajectory)[0]
    assert row["input_ids"] == trajectory.token_ids  # the ids are what was written
    assert row["text"].endswith("<|assistant|>Thought: < |user|> said < |end|>\nAnswer: < |eos|><|end|>")
    assert row["messages"][-1]["content"] == "Thought: < |user|> said < |end|>\nAnswer: < |eos|>"
    ((start, end),) = turn_spans(row)
    assert row["text"][start:end] == row["messages"][-1]["content"] + "<|end|>"


def test_half_a_surrogate_pair_does_not_stop_the_dataset() -> None:
    trajectory = replace(
        good(), episode_id="e\ud800", policy="p\ud800", question="\ud800?", gold="\udfff", answer="a\ud800"
    )
    row = rows(trajectory)[0]
    assert (row["question"], row["gold"], row["answer"]) == ("\ufffd?", "\ufffd", "a\ufffd")
    assert row["messages"][1]["content"] == "\ufffd?"


def test_what_is_too_long_is_dropped_whole_and_counted() -> None:
    short, long = good(), good(observations=("[1] is 30. " + "x" * 400, "60"))
    limit = len(short.token_ids)
    dataset, report = build_dataset([long, short, long], TOKENIZER, max_length=limit)
    assert [row["input_ids"] for row in dataset] == [short.token_ids]
    assert (report.rows, report.too_long, report.max_length) == (1, 2, limit)
    assert str(report) == f"1 rows; dropped: 2 of more than {limit} tokens, 0 without a token of the policy"


def test_an_episode_without_a_token_of_the_policy_is_dropped_and_counted() -> None:
    empty = replace(good(), sampled=[False] * len(good().token_ids))
    dataset, report = build_dataset([empty, good()], TOKENIZER)
    assert (len(dataset), report.no_tokens) == (1, 1)


def test_a_mask_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        build_dataset([replace(good(), sampled=[True])], TOKENIZER)


def test_missing_values_stay_missing() -> None:
    row = rows(replace(good(), reward=None, answer=None))[0]
    assert (row["reward"], row["answer"]) == (None, None)


def test_no_trajectories_make_an_empty_dataset_with_the_columns() -> None:
    dataset, report = build_dataset([], TOKENIZER)
    assert (len(dataset), report.rows) == (0, 0)
    assert dataset.features == FEATURES
    assert supervised_share(dataset).tokens == 0


def test_more_rows_than_a_chunk_keep_their_order() -> None:
    trajectory = good()
    dataset, report = build_dataset((replace(trajectory, episode_id=f"e{n}") for n in range(600)), TOKENIZER)
    assert dataset["id"][:] == [f"e{n}" for n in range(600)]
    assert report.rows == 600


def test_spans_of_the_text_are_what_the_mask_marks() -> None:
    for make in EPISODES.values():
        row = rows(make())[0]
        own = [token for token, mask in zip(row["input_ids"], row["assistant_masks"], strict=True) if mask]
        assert "".join(row["text"][start:end] for start, end in turn_spans(row)) == TOKENIZER.decode(own)


def test_the_supervised_share() -> None:
    trajectory = good()
    share = supervised_share(rows(trajectory))
    assert share.tokens == sum(trajectory.sampled) / len(trajectory.sampled)
    own = [token for token, mask in zip(trajectory.token_ids, trajectory.sampled, strict=True) if mask]
    assert share.characters == len(TOKENIZER.decode(own)) / len(TOKENIZER.decode(trajectory.token_ids))


def test_right_columns_pass_and_more_are_allowed() -> None:
    check_columns(rows(good()).add_column("note", ["mine"]))


def test_wrong_columns_are_named_in_one_line() -> None:
    dataset = rows(good())
    with pytest.raises(ValueError, match=r"^the dataset lacks the columns gold, input_ids: build it with .*$"):
        check_columns(dataset.remove_columns(["input_ids", "gold"]))
    with pytest.raises(
        ValueError, match=r"^the dataset has columns of another type \(num_steps is Value\('string'\).*$"
    ):
        check_columns(dataset.cast_column("num_steps", Value("string")))


def test_a_saved_dataset_comes_back_equal(tmp_path: Path) -> None:
    dataset = rows(good(), EPISODES["markers in untrusted text"]())
    path = save_dataset(dataset, tmp_path / "new" / "data.parquet")
    loaded = load_rows(path)
    assert loaded.features == FEATURES
    assert loaded.to_list() == dataset.to_list()
    assert [file.name for file in path.parent.iterdir()] == ["data.parquet"]
    hub = load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    assert hub.features == FEATURES
    assert hub.to_list() == dataset.to_list()


def test_a_shuffled_dataset_is_saved_in_its_order(tmp_path: Path) -> None:
    dataset = rows(good(seed=1), good(seed=2), good(seed=3)).select([2, 0])
    assert load_rows(save_dataset(dataset, tmp_path / "d.parquet"))["id"][:] == ["t0/seed3/0", "t0/seed1/0"]


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_dataset(rows(good()), tmp_path / "d.parquet")
    before = path.read_bytes()

    def half(self: Dataset, file: Any) -> None:
        file.write(b"PAR1 half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Dataset, "to_parquet", half)
    with pytest.raises(OSError, match="No space left"):
        save_dataset(rows(good(), good(seed=1)), path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["d.parquet"]


def test_another_file_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"name it \*.parquet"):
        save_dataset(rows(good()), tmp_path / "d.json")
