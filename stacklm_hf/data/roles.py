"""One agent's trajectories as two training sets: the query-writer and the synthesizer.

Contract: every turn of an episode is one example of one role. A search call is the query-writer's; a calculation, any
other call and the answer are the synthesizer's. An example is the whole episode up to the end of its turn (the
question, and all that was thought, called and observed so far), and only that turn is supervised, so both
roles see exactly what the one agent saw when it wrote the turn. A malformed turn is an example of nothing.

The examples have the columns of a dataset of trajectories, cut to the turn (`messages`, `text`, `input_ids`,
`assistant_masks`), so that they train by the same call; and beside them `role`, `turn` (its number, from 0), and
`prompt` and `completion`, the same text in two parts for a reader. `id` is the episode's with `#turn` behind it; the
other columns are the whole episode's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import groupby
from typing import Any

from datasets import Dataset, Features, Value

from stacklm_hf.data.dataset import FEATURES, check_columns, rows_to_dataset, turn_spans

QUERY_WRITER = "query_writer"
SYNTHESIZER = "synthesizer"

ROLE_FEATURES = Features(
    {
        **FEATURES,
        "role": Value("string"),
        "turn": Value("int32"),
        "prompt": Value("string"),
        "completion": Value("string"),
    }
)
"""The columns of a role's examples, in order."""


def split_roles(dataset: Dataset, query_tools: Collection[str] = ("search",)) -> tuple[Dataset, Dataset]:
    """Splits a dataset of trajectories by role.

    Args:
        dataset: As `build_dataset` makes it.
        query_tools: Tools whose calls the query-writer writes.

    Returns:
        The examples of the query-writer and those of the synthesizer, in the order of the dataset.

    Raises:
        ValueError: The dataset lacks the columns, or a row's turns and its mask do not fit together.
    """
    check_columns(dataset)

    def rows(role: str) -> Iterator[dict[str, Any]]:
        return (example for row in dataset for example in _examples(row, query_tools) if example["role"] == role)

    return rows_to_dataset(rows(QUERY_WRITER), ROLE_FEATURES), rows_to_dataset(rows(SYNTHESIZER), ROLE_FEATURES)


def _examples(row: dict[str, Any], query_tools: Collection[str]) -> Iterator[dict[str, Any]]:
    """One example for each well-formed turn of an episode."""
    messages = row["messages"]
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    runs, spans = _supervised_runs(row["assistant_masks"]), turn_spans(row)
    if not len(turns) == len(runs) == len(spans):
        raise ValueError(
            f"row {row['id']!r} has {len(turns)} turns, but {len(runs)} supervised runs of tokens and {len(spans)} "
            "turns in its text: filter the trajectories first"
        )
    for turn, (index, (start, end), (begin, close)) in enumerate(zip(turns, runs, spans, strict=True)):
        calls = messages[index]["tool_calls"]
        if not calls and index + 1 < len(messages):
            continue  # an observation follows a turn without a call: it was malformed
        searches = bool(calls) and calls[0]["function"]["name"] in query_tools
        yield {
            **row,
            "id": f"{row['id']}#{turn}",
            "messages": messages[: index + 1],
            "text": row["text"][:close],
            "input_ids": row["input_ids"][:end],
            "assistant_masks": [0] * start + [1] * (end - start),
            "role": QUERY_WRITER if searches else SYNTHESIZER,
            "turn": turn,
            "prompt": row["text"][:begin],
            "completion": row["text"][begin:close],
        }


def _supervised_runs(mask: list[int]) -> list[tuple[int, int]]:
    """The stretches of ones as (start, end): the harness's tokens stand between any two turns."""
    runs = []
    for own, group in groupby(enumerate(mask), key=lambda item: item[1]):
        positions = [position for position, _ in group]
        if own:
            runs.append((positions[0], positions[-1] + 1))
    return runs
