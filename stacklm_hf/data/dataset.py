"""Trajectories as a `datasets` Dataset that TRL's SFTTrainer takes as it is.

Contract: one row an episode, with the columns of :data:`FEATURES` in that order. `input_ids` and `assistant_masks` are
the record's own ids and mask (never text encoded again); what is too long is dropped and counted, never cut.
`messages` and `text` are the same episode for readers and for other tokenizers: the chat template of
`stacklm_hf.protocol.template` gives the ids and the mask back from `messages`, for every turn that a policy writes
in the canonical form (`Thought: ...`, a line break, a call as `render_call` spells it). A marker in `text` stands for a
control token, always; one that was merely spelled is inert there and in `messages` (`< |end|>`). A malformed call has
no form in messages: its text is there, its marker inert.

A message has the keys role, content, tool_calls (arguments as a JSON string, so that Arrow never invents keys),
prefill and closed. The last two name what the harness wrote of a turn: `prefill` is the beginning of a forced
answer (`Thought: I must answer now.\\nAnswer:`), `closed` is False where the turn was cut and the harness closed it.
Keys without a value are None, which is what Arrow gives back for them, and what chat templates take for absent.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from datasets import Dataset, Features, List, Value, concatenate_datasets
from transformers import PreTrainedTokenizerBase

from stacklm_hf.protocol.tokens import ASSISTANT, END, TOOL_CALL
from stacklm_hf.protocol.wire import FORCED_BODY, neutralize
from stacklm_hf.rollout.episode import decode_turn
from stacklm_hf.rollout.trajectory import Step, StepKind, Trajectory

MESSAGE_FEATURE = {
    "role": Value("string"),
    "content": Value("string"),
    "tool_calls": List(
        {"type": Value("string"), "function": {"name": Value("string"), "arguments": Value("string")}},
    ),
    "prefill": Value("string"),
    "closed": Value("bool"),
}

FEATURES = Features(
    {
        "id": Value("string"),
        "task_id": Value("string"),
        "world": Value("string"),
        "kind": Value("string"),
        "question": Value("string"),
        "gold": Value("string"),
        "answer": Value("string"),
        "correct": Value("bool"),
        "grounded": Value("bool"),
        "reward": Value("float64"),
        "num_steps": Value("int32"),
        "stop_reason": Value("string"),
        "policy": Value("string"),
        "messages": List(MESSAGE_FEATURE),
        "text": Value("string"),
        "input_ids": List(Value("int32")),
        "assistant_masks": List(Value("int8")),
    }
)
"""The fixed columns of a dataset of trajectories, in order."""

_CHUNK = 256  # rows that are Python objects at one time; the rest is Arrow's, many times smaller
_TURN = re.compile(rf"{re.escape(ASSISTANT)}(.*?)(?:{re.escape(END)}|\Z)", re.DOTALL)


@dataclass(frozen=True)
class BuildReport:
    """What :func:`build_dataset` took and left.

    Args:
        rows: Rows of the dataset.
        too_long: Trajectories dropped for more than `max_length` tokens.
        no_tokens: Trajectories dropped because the policy wrote no token of them.
        max_length: The limit.
    """

    rows: int
    too_long: int
    no_tokens: int
    max_length: int | None

    def __str__(self) -> str:
        return (
            f"{self.rows} rows; dropped: {self.too_long} of more than {self.max_length} tokens, "
            f"{self.no_tokens} without a token of the policy"
        )


@dataclass(frozen=True)
class SupervisedShare:
    """The share that is trained on, 0 to 1.

    Args:
        tokens: Of the tokens.
        characters: Of the characters of the transcripts, markers included.
    """

    tokens: float
    characters: float


def trajectory_messages(trajectory: Trajectory) -> list[dict[str, Any]]:
    """The episode as chat messages: system, user, then each turn and its observation.

    An episode that ended with `StopReason.CONTEXT_FULL` may end with an observation that its tokens lack, because
    it did not fit.
    """
    messages = [_message("system", trajectory.system), _message("user", trajectory.question)]
    for step in trajectory.steps:
        messages.append(_assistant_message(step))
        if step.observation is not None:
            messages.append(_message("tool", step.observation))
    return messages


def build_dataset(
    trajectories: Iterable[Trajectory], tokenizer: PreTrainedTokenizerBase, max_length: int | None = 1024
) -> tuple[Dataset, BuildReport]:
    """Builds the dataset; reads the trajectories once and holds few of them at a time.

    Args:
        trajectories: Episodes that are worth learning from, e.g. `TrajectoryFilter().keep(store)`.
        tokenizer: The tokenizer that the episodes were made with; it only decodes here.
        max_length: Tokens that a row may have; None for no limit.

    Raises:
        ValueError: A record's ids and mask differ in length.
    """
    dropped = {"too_long": 0, "no_tokens": 0}

    def rows() -> Iterator[dict[str, Any]]:
        for trajectory in trajectories:
            trajectory.check()
            if max_length is not None and len(trajectory.token_ids) > max_length:
                dropped["too_long"] += 1
            elif not any(trajectory.sampled):
                dropped["no_tokens"] += 1
            else:
                yield _row(trajectory, tokenizer)

    dataset = rows_to_dataset(rows(), FEATURES)
    return dataset, BuildReport(len(dataset), **dropped, max_length=max_length)


def retokenize(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int | None = 1024
) -> tuple[Dataset, int]:
    """The same trajectories for a student with another tokenizer: ids and masks anew, from the messages.

    Args:
        dataset: A dataset of trajectories.
        tokenizer: The student's, with the nine control tokens and the chat template.
        max_length: Longer rows are dropped, not cut; None for no limit.

    Returns:
        The dataset, and the number of rows dropped.
    """
    check_columns(dataset)

    def encode(row: dict[str, Any]) -> dict[str, list[int]]:
        encoded: Any = tokenizer.apply_chat_template(
            row["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return {"input_ids": encoded["input_ids"], "assistant_masks": encoded["assistant_masks"]}

    encoded = dataset.map(encode, features=dataset.features, desc="Encoding for the student", keep_in_memory=True)
    if max_length is None:
        return encoded, 0
    kept = encoded.filter(lambda ids: len(ids) <= max_length, input_columns="input_ids", keep_in_memory=True)
    return kept, len(encoded) - len(kept)


def rows_to_dataset(rows: Iterable[dict[str, Any]], features: Features) -> Dataset:
    """A dataset from a stream of rows, turned into Arrow a few at a time.

    Args:
        rows: Rows with the keys of `features`.
        features: The columns, in order.
    """
    stream = iter(rows)
    chunks = [Dataset.from_dict({name: [] for name in features}, features=features)]
    while chunk := list(islice(stream, _CHUNK)):
        columns = {name: [row[name] for row in chunk] for name in features}
        chunks.append(Dataset.from_dict(columns, features=features))
    return concatenate_datasets(chunks) if len(chunks) > 1 else chunks[0]


def check_columns(dataset: Dataset) -> None:
    """Checks that a dataset has the fixed columns; columns beside them are allowed.

    Raises:
        ValueError: Columns are missing or of another type; one line names them.
    """
    missing = [name for name in FEATURES if name not in dataset.features]
    if missing:
        raise ValueError(f"the dataset lacks the columns {', '.join(missing)}: build it with build_dataset")
    wrong = [name for name in FEATURES if dataset.features[name] != FEATURES[name]]
    if wrong:
        found = ", ".join(f"{name} is {dataset.features[name]}, not {FEATURES[name]}" for name in wrong)
        raise ValueError(f"the dataset has columns of another type ({found}): cast them with dataset.cast_column")


def turn_spans(row: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Where the policy's own text of each turn stands in a row's `text`, as (start, end), its `<|end|>` included.

    The spans are found by the markers, each of which stands for a control token.

    Args:
        row: A row with `text` and `messages`.
    """
    spans = []
    turns = (message for message in row["messages"] if message["role"] == "assistant")
    for match, turn in zip(_TURN.finditer(row["text"]), turns, strict=False):
        start = match.start(1) + len(turn["prefill"] or "")
        end = match.end(1) if turn["closed"] is False else match.end()
        spans.append((min(start, end), end))
    return spans


def supervised_share(dataset: Dataset) -> SupervisedShare:
    """The share of a dataset's tokens and characters that the policy wrote and that is trained on.

    Args:
        dataset: A dataset of trajectories; 0 is the share of an empty one.
    """
    tokens = own_tokens = characters = own_characters = 0
    for row in dataset.select_columns(["text", "messages", "assistant_masks"]):
        tokens += len(row["assistant_masks"])
        own_tokens += sum(row["assistant_masks"])
        characters += len(row["text"])
        own_characters += sum(end - start for start, end in turn_spans(row))
    return SupervisedShare(own_tokens / max(1, tokens), own_characters / max(1, characters))


def save_dataset(dataset: Dataset, path: str | os.PathLike[str]) -> Path:
    """Writes a Parquet file that is there whole or not at all; `load_dataset("parquet", ...)` reads it as well.

    Args:
        dataset: Any dataset.
        path: The file, named `*.parquet`; its folder is made, and an older file is replaced.

    Returns:
        The path.

    Raises:
        ValueError: The name does not end in `.parquet`.
    """
    path = Path(path)
    if path.suffix != ".parquet":
        raise ValueError(f"a dataset is saved as one Parquet file: name it *.parquet, not {path.name!r}")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, because a rename is atomic only within a file system.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            dataset.to_parquet(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def load_rows(path: str | os.PathLike[str]) -> Dataset:
    """Reads a file of :func:`save_dataset` with its features, past the cache of `datasets`.

    Raises:
        OSError: The file does not exist or cannot be read.
        pyarrow.ArrowInvalid: The file is not a Parquet file.
    """
    return Dataset(pq.read_table(path))


def _row(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    row = {
        "id": trajectory.episode_id,
        "task_id": trajectory.task_id,
        "world": trajectory.world,
        "kind": trajectory.kind,
        "question": trajectory.question,
        "gold": trajectory.gold,
        "answer": trajectory.answer,
        "correct": trajectory.correct,
        "grounded": trajectory.grounded,
        "reward": trajectory.reward,
        "num_steps": trajectory.num_steps,
        "stop_reason": str(trajectory.stop_reason),
        "policy": trajectory.policy,
        "messages": trajectory_messages(trajectory),
        "text": decode_turn(tokenizer, trajectory.token_ids),
        "input_ids": trajectory.token_ids,
        "assistant_masks": [int(own) for own in trajectory.sampled],
    }
    return {name: _utf8(value) if isinstance(value, str) else value for name, value in row.items()}


def _message(role: str, content: str, **values: Any) -> dict[str, Any]:
    # Neutralised here too, although the template does it: other templates do not.
    message = {"role": role, "content": _utf8(neutralize(content)), "tool_calls": None, "prefill": None, "closed": None}
    return {**message, **values}


def _assistant_message(step: Step) -> dict[str, Any]:
    values: dict[str, Any] = {}
    content = step.text
    if step.kind is StepKind.CALL:
        content = _before_call(step.text)
        function = {"name": _utf8(step.tool or ""), "arguments": _utf8(step.arguments or "{}")}
        values["tool_calls"] = [{"type": "function", "function": function}]
    elif step.forced:
        content = step.text.removeprefix(FORCED_BODY)
        values["prefill"] = FORCED_BODY
    if step.cut:
        values["closed"] = False
    return _message("assistant", content, **values)


def _before_call(text: str) -> str:
    """What stands in front of a call, without the line break that the template puts there by itself."""
    head = text.partition(TOOL_CALL)[0]
    shorter = head.removesuffix("\n")
    return shorter if shorter and not shorter.endswith("\n") else head


def _utf8(text: str) -> str:
    """Text as Arrow takes it: half of a surrogate pair becomes U+FFFD, as it does when it is encoded."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
