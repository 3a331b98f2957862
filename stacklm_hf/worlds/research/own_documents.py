"""Reads a user's own documents and question/answer pairs into passages and tasks.

Contract: all input is read and checked before anything is returned. Whatever is wrong with it raises one
ValueError of one line that names the places and says what to do; no file and no row is dropped to get around
an error. Texts are taken as they are and stay untrusted.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import logging
import math
import os
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from stacklm_hf.tools.retrieval import Passage
from stacklm_hf.verify import is_correct
from stacklm_hf.worlds.base import Task
from stacklm_hf.worlds.research.corpus import CHUNK_OVERLAP, CHUNK_WORDS, chunk_passages

logger = logging.getLogger(__name__)

DOCUMENT_SUFFIXES = (".txt", ".md")
ROW_SUFFIXES = (".jsonl", ".csv")
ANSWER_COLUMNS = ("answer", "gold", "gold_answer")
_SHOWN_PROBLEMS = 3
_PROBLEM_CHARS = 240
_ACCEPTED = "a .txt or .md file, or a row with a text column"

Row = Mapping[str, Any]
Rows = str | os.PathLike[str] | Iterable[Row]
"""A .jsonl or .csv file, or rows: a `datasets` dataset or any iterable of dicts."""


def load_documents(
    documents: Rows,
    *,
    text_column: str = "text",
    id_column: str | None = None,
    words: int = CHUNK_WORDS,
    overlap: int = CHUNK_OVERLAP,
) -> list[Passage]:
    """Reads and chunks documents.

    Args:
        documents: A folder, read with its subfolders for .txt and .md files (hidden ones are left alone); one such
            file; or rows with a text column.
        text_column: Column of rows that holds the text.
        id_column: Column of rows that holds a unique id. Default: `doc-{index:04d}`. For files the id is the
            path relative to the folder.
        words: Words per chunk.
        overlap: Words shared by neighbouring chunks.

    Returns:
        Passages in order of the documents, with ids `{document id}-{chunk}`.

    Raises:
        ValueError: A file cannot be read or is not UTF-8, a row has no text or no unique id, or there is no text
            at all.
    """
    problems: list[str] = []
    if isinstance(documents, str | os.PathLike) and Path(documents).suffix.lower() not in ROW_SUFFIXES:
        texts = list(_read_files(Path(documents), problems))
    else:
        texts = list(_read_texts(documents, text_column, id_column, problems))
    _raise_problems(f"documents in {_name(documents)}", problems)
    passages: list[Passage] = []
    blank = []
    for document_id, text in texts:
        chunks = chunk_passages(document_id, text, words, overlap)
        passages += chunks
        if not chunks:
            blank.append(document_id)
    if not passages:
        raise ValueError(f"no text in {_name(documents)}: give at least one document with words in it ({_ACCEPTED})")
    if blank:
        logger.warning("%d blank documents give no passage, e.g. %s", len(blank), blank[0])
    return passages


def load_qa_pairs(qa_pairs: Rows, *, world: str, heldout_share: float = 0.2, seed: int = 0) -> list[Task]:
    """Reads question/answer pairs as tasks.

    Columns: `question`; one of `answer`, `gold`, `gold_answer`. Where there, also `kind`, `op`, `queries` (a list, a
    JSON list, or one query), `facts` (pairs of entity and attribute, as a list or as JSON), `split` and `task_id`.
    Without `queries` there is no key: a scripted teacher cannot solve the task, a real one can.

    Args:
        qa_pairs: A .jsonl or .csv file, or rows.
        world: Name of the world; task ids are `{world}-{index:04d}` unless the rows bring their own.
        heldout_share: Share of the rows without a `split` that become `heldout`; the others become `train`.
        seed: Seed of that choice.

    Returns:
        One task for each row, in order.

    Raises:
        ValueError: A column is missing, a question or an answer is empty, an answer is one that can never be correct
            (`nan`, `none` and the like; see `stacklm_hf.verify`), a task id is not unique, or there is
            no row at all.
    """
    if not 0 <= heldout_share <= 1:
        raise ValueError(f"heldout_share must be between 0 and 1, not {heldout_share}")
    problems: list[str] = []
    fields = []
    for index, (place, row) in enumerate(_read_rows(qa_pairs, problems)):
        try:
            fields.append(_task_fields(row, f"{world}-{index:04d}", world))
        except ValueError as error:
            problems.append(f"{place}: {error}")
    problems += _repeated("task_id", (field["task_id"] for field in fields))
    _raise_problems(f"question/answer pairs in {_name(qa_pairs)}", problems)
    if not fields:
        raise ValueError(f"no question/answer pair in {_name(qa_pairs)}: give at least one")
    unsplit = [field for field in fields if not field["split"]]
    random.Random(f"split/{seed}").shuffle(unsplit)
    n_heldout = round(heldout_share * len(unsplit))
    for position, field in enumerate(unsplit):
        field["split"] = "heldout" if position < n_heldout else "train"
    return [Task(**field) for field in fields]


def _task_fields(row: Row, task_id: str, world: str) -> dict[str, Any]:
    """The fields of a task; `split` is empty where the row has none.

    Raises:
        ValueError: A column is missing, empty or of the wrong form, or no answer could ever be correct.
    """
    answer_column = next((name for name in ANSWER_COLUMNS if row.get(name) is not None), None)
    if answer_column is None and not any(name in row for name in ANSWER_COLUMNS):
        raise ValueError(f"no column {', '.join(ANSWER_COLUMNS[:-1])} or {ANSWER_COLUMNS[-1]}{_columns(row)}")
    answer_column = answer_column or next(name for name in ANSWER_COLUMNS if name in row)
    gold = _text(row, answer_column)
    if not is_correct(gold, gold):
        raise ValueError(f"column {answer_column!r} holds {gold!r:.60}, which never counts as correct: use other words")
    return {
        "question": _text(row, "question"),
        "gold": gold,
        "kind": _optional_text(row, "kind") or "qa",
        "queries": _read_queries(row.get("queries")),
        "facts": _read_facts(row.get("facts")),
        "op": _optional_text(row, "op") or None,
        "split": _optional_text(row, "split"),
        "task_id": _optional_text(row, "task_id") or task_id,
        "world": world,
    }


def _read_queries(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = _json(value, "queries") if value.lstrip().startswith("[") else [value]
    queries = [] if value is None else value
    if not isinstance(queries, list | tuple) or not all(isinstance(query, str) for query in queries):
        raise ValueError("column 'queries' must be a list of texts")
    return tuple(_encodable(query.strip()) for query in queries if query.strip())


def _read_facts(value: Any) -> tuple[tuple[str, str], ...]:
    if isinstance(value, str):
        value = _json(value, "facts") if value.strip() else None
    facts = [] if value is None else value
    try:
        pairs = [(entity, attribute) for entity, attribute in facts]
    except (TypeError, ValueError):
        pairs = [(None, None)]
    if isinstance(facts, Mapping) or not all(isinstance(part, str) for pair in pairs for part in pair):
        raise ValueError("column 'facts' must be a list of [entity, attribute] pairs")
    return tuple((_encodable(entity), _encodable(attribute)) for entity, attribute in pairs)


def _json(text: str, column: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"column {column!r} holds no valid JSON ({error})") from error


def _text(row: Row, column: str) -> str:
    """A cell as stripped text; numbers are written as people write them.

    Raises:
        ValueError: The column is missing, or the cell is blank or neither text nor a number.
    """
    if column not in row:
        raise ValueError(f"no column {column!r}{_columns(row)}")
    value = row[column]
    if value is None or (isinstance(value, float) and math.isnan(value)):
        value = ""
    if not isinstance(value, str | int | float):
        raise ValueError(f"column {column!r} holds a {type(value).__name__}, not text or a number")
    text = str(value).strip()
    if not text:
        raise ValueError(f"column {column!r} is empty")
    return _encodable(text)


def _optional_text(row: Row, column: str) -> str:
    value = row.get(column)
    blank = value is None or (isinstance(value, str) and not value.strip())
    return "" if blank else _text(row, column)


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"half a surrogate pair at character {error.start}: no valid Unicode text") from error
    return text


def _read_files(path: Path, problems: list[str]) -> Iterator[tuple[str, str]]:
    """`(relative path, text)` of each document in a folder, by path; or of the one file."""
    if path.is_file():
        files, root = [path], path.parent
    elif path.is_dir():
        files, root = [file for file in path.rglob("*") if file.is_file()], path
    else:
        raise ValueError(f"no such file or folder: {path}")
    visible = {file.relative_to(root).as_posix(): file for file in files if not _is_hidden(file.relative_to(root))}
    names = sorted(name for name, file in visible.items() if file.suffix.lower() in DOCUMENT_SUFFIXES)
    if len(names) < len(visible):
        kinds = " or ".join(DOCUMENT_SUFFIXES)
        logger.warning("%d files in %s are not %s and are left out", len(visible) - len(names), path, kinds)
    for name in names:
        try:
            yield name, _read_utf8(visible[name])
        except ValueError as error:
            problems.append(str(error))


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _read_utf8(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 (byte {error.start}): save it as UTF-8, or move it away") from error


def _read_texts(
    documents: Rows, text_column: str, id_column: str | None, problems: list[str]
) -> Iterator[tuple[str, str]]:
    ids = []
    for index, (place, row) in enumerate(_read_rows(documents, problems)):
        try:
            text = row.get(text_column)
            if not isinstance(text, str):
                raise ValueError(
                    f"column {text_column!r} holds a {type(text).__name__}, not text"
                    if text_column in row
                    else f"no column {text_column!r}{_columns(row)}"
                )
            ids.append(_text(row, id_column) if id_column else f"doc-{index:04d}")
            yield ids[-1], _encodable(text)
        except ValueError as error:
            problems.append(f"{place}: {error}")
    problems += _repeated(id_column or "id", ids)


def _read_rows(source: Rows, problems: list[str]) -> Iterator[tuple[str, Row]]:
    """`(place, row)` of each row; `place` is for messages, counted from 1."""
    if isinstance(source, Mapping):
        raise ValueError(f"{_name(source)} holds several tables ({', '.join(map(str, source))}): give one of them")
    rows: Iterable[tuple[str, Any]]
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        if path.suffix.lower() not in ROW_SUFFIXES:
            raise ValueError(f"{path} is neither a .jsonl nor a .csv file")
        if not path.is_file():
            raise ValueError(f"no such file: {path}")
        read = _read_jsonl if path.suffix.lower() == ".jsonl" else _read_csv
        rows = read(_read_utf8(path), problems)
    else:
        rows = ((f"row {number}", row) for number, row in enumerate(source, start=1))
    for place, row in rows:
        if isinstance(row, Mapping):
            yield place, row
        else:
            problems.append(f"{place} is a {type(row).__name__}, not a dict of columns")


def _read_jsonl(text: str, problems: list[str]) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.split("\n"), start=1):  # not splitlines: JSON text may hold U+2028
        if line.strip():
            try:
                yield f"line {number}", json.loads(line)
            except (ValueError, RecursionError) as error:
                problems.append(f"line {number} is no JSON object ({error})")


def _read_csv(text: str, problems: list[str]) -> Iterator[tuple[str, Any]]:
    reader = csv.DictReader(io.StringIO(text, newline=""))
    try:
        for row in reader:
            if None in row:
                problems.append(f"line {reader.line_num} has more cells than the header")
            else:
                yield f"line {reader.line_num}", row
    except csv.Error as error:
        problems.append(f"line {reader.line_num} is no CSV ({error})")


def _repeated(column: str, values: Iterable[str]) -> list[str]:
    counts: dict[str, int] = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    return [f"{column} {value!r} stands {count} times" for value, count in counts.items() if count > 1]


def _columns(row: Row) -> str:
    return f" (there are: {', '.join(map(str, itertools.islice(row, 12))) or 'none'})"


def _name(source: Any) -> str:
    return str(source) if isinstance(source, str | os.PathLike) else f"the given {type(source).__name__}"


def _shorten(problem: str) -> str:
    """One line of bounded length: a message may quote the user's data."""
    line = " ".join(problem.split())
    return line if len(line) <= _PROBLEM_CHARS else f"{line[:_PROBLEM_CHARS]}..."


def _raise_problems(what: str, problems: list[str]) -> None:
    if problems:
        shown = "; ".join(_shorten(problem) for problem in problems[:_SHOWN_PROBLEMS])
        more = f"; and {len(problems) - _SHOWN_PROBLEMS} more" if len(problems) > _SHOWN_PROBLEMS else ""
        raise ValueError(f"cannot use the {what}: {shown}{more}")
