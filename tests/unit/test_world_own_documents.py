"""A user's documents and question/answer pairs make a world, or one line says what is wrong with them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stacklm_hf.worlds import Task, World, is_leak
from stacklm_hf.worlds.research import load_documents, load_qa_pairs, make_tasks, qa_pairs

PAIRS = [{"question": "Where is the archive?", "answer": "Basel"}, {"question": "How many rooms?", "answer": 12}]
DOCUMENTS = [{"text": "The archive is in Basel."}, {"text": "The archive has 12 rooms."}]


def one_line(error: pytest.ExceptionInfo[ValueError]) -> str:
    (line,) = str(error.value).splitlines()
    assert len(line) < 1200
    return line


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "b" / "long.md").write_text(" ".join(f"word{i}" for i in range(100)), encoding="utf-8")
    (tmp_path / "a.TXT").write_text("\ufeffDie Bücherei hat 12 Räume.", encoding="utf-8")
    (tmp_path / ".git" / "notes.txt").write_text("hidden", encoding="utf-8")
    return tmp_path


def test_a_folder_is_read_by_path_and_long_files_are_chunked(folder: Path) -> None:
    passages = load_documents(folder)
    assert [passage.doc_id for passage in passages] == ["a.TXT-0", "b/long.md-0", "b/long.md-1"]
    assert passages[0].text == "Die Bücherei hat 12 Räume."
    assert passages[2].text.split()[0] == "word64"
    assert load_documents(str(folder / "a.TXT")) == passages[:1]


def test_files_of_other_kinds_are_left_out_aloud(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "scan.pdf").write_bytes(b"%PDF")
    with caplog.at_level(logging.WARNING):
        assert len(load_documents(folder)) == 3
    assert "1 files in" in caplog.text
    assert "not .txt or .md" in caplog.text


def test_rows_a_dataset_and_row_files_are_the_same_documents(tmp_path: Path) -> None:
    expected = load_documents(DOCUMENTS)
    assert [passage.doc_id for passage in expected] == ["doc-0000-0", "doc-0001-0"]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in DOCUMENTS))
    (tmp_path / "d.csv").write_text("text\n" + "".join(row["text"] + "\n" for row in DOCUMENTS))
    dataset = datasets.Dataset.from_list(DOCUMENTS)
    for source in (dataset, dataset.to_iterable_dataset(), tmp_path / "d.jsonl", tmp_path / "d.csv", iter(DOCUMENTS)):
        assert load_documents(source) == expected
    renamed = [{"name": f"n{i}", "body": row["text"]} for i, row in enumerate(DOCUMENTS)]
    named = load_documents(renamed, text_column="body", id_column="name")
    assert [passage.doc_id for passage in named] == ["n0-0", "n1-0"]


def test_pairs_in_every_form_are_the_same_tasks(tmp_path: Path) -> None:
    expected = load_qa_pairs(PAIRS, world="mine", heldout_share=0)
    assert expected[1] == Task("How many rooms?", "12", kind="qa", split="train", task_id="mine-0001", world="mine")
    (tmp_path / "p.jsonl").write_text("\n\n".join(json.dumps(row) for row in PAIRS), encoding="utf-8-sig")
    (tmp_path / "p.csv").write_text("question,gold\nWhere is the archive?,Basel\n  How many rooms? ,12\n")
    as_text = [{**row, "answer": str(row["answer"])} for row in PAIRS]
    for source in (tmp_path / "p.jsonl", tmp_path / "p.csv", datasets.Dataset.from_list(as_text)):
        assert load_qa_pairs(source, world="mine", heldout_share=0) == expected


def test_qa_pairs_of_tasks_can_be_read_back() -> None:
    tasks = make_tasks(0)
    again = load_qa_pairs(qa_pairs(tasks), world="again")
    assert [(task.question, task.gold) for task in again] == [(task.question, task.gold) for task in tasks]


def test_the_key_is_read_where_it_is_there() -> None:
    tasks = make_tasks(0)
    rows = [{**task.to_dict(), "world": "ignored"} for task in tasks]
    text_rows = [{**row, "queries": json.dumps(row["queries"]), "facts": json.dumps(row["facts"])} for row in rows]
    for source in (rows, text_rows, datasets.Dataset.from_list(rows)):
        assert load_qa_pairs(source, world="research") == tasks
    (single,) = load_qa_pairs([{**PAIRS[0], "queries": "archive place", "op": None, "kind": ""}], world="mine")
    assert (single.queries, single.op, single.kind, single.facts) == (("archive place",), None, "qa", ())


def test_some_pairs_are_held_out_the_same_each_time_and_a_split_column_wins() -> None:
    rows: list[dict[str, Any]] = [{"question": f"Question {i}?", "answer": str(i)} for i in range(50)]
    rows += [{**row, "question": row["question"].upper(), "split": "train"} for row in rows]
    tasks = load_qa_pairs(rows, world="mine", heldout_share=0.2, seed=1)
    assert tasks == load_qa_pairs(rows, world="mine", heldout_share=0.2, seed=1)
    assert tasks != load_qa_pairs(rows, world="mine", heldout_share=0.2, seed=2)
    train, heldout = World("mine", [], tasks).split()
    assert len(heldout) == 10
    assert len(train) == 80, "the ten held-out questions also stand in the training rows, in capitals"
    assert not any(is_leak(task, heldout) for task in train)


def test_documents_and_pairs_make_a_world_whose_tools_answer(folder: Path) -> None:
    world = World.from_documents(folder, PAIRS, name="library", heldout_share=0.5)
    assert [task.task_id for task in world.tasks] == ["library-0000", "library-0001"]
    environment = world.environment()
    assert environment.name == "library"
    with environment.open(world.tasks[1]) as session:
        assert session.call("search", {"query": "Räume", "k": 3}) == "[1] Die Bücherei hat 12 Räume."


def test_a_file_that_is_not_utf8_is_named_and_nothing_is_dropped(folder: Path) -> None:
    (folder / "latin.txt").write_bytes("Räume".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8 \(byte 1\): save it as UTF-8") as error:
        load_documents(folder)
    one_line(error)


@pytest.mark.parametrize("make", [lambda path: path, lambda path: path / "missing", lambda path: path / "a.pdf"])
def test_no_documents_is_an_error(tmp_path: Path, make: Any) -> None:
    (tmp_path / "a.pdf").write_bytes(b"%PDF")
    with pytest.raises(ValueError, match=r"no text in|no such file or folder") as error:
        load_documents(make(tmp_path))
    assert str(tmp_path) in one_line(error)


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([], "no text in the given list: give at least one document"),
        ([{"text": " \n"}], "no text in the given list"),
        ([{"body": "x", "id": 1}], "row 1: no column 'text' (there are: body, id)"),
        ([{"text": "x"}, {"text": None}], "row 2: column 'text' holds a NoneType, not text"),
        ([{"text": "x"}, "y"], "row 2 is a str, not a dict of columns"),
        ([{"text": "\ud800"}], "row 1: half a surrogate pair at character 0"),
        (datasets.DatasetDict(train=datasets.Dataset.from_list(DOCUMENTS)), "several tables (train): give one of them"),
    ],
)
def test_bad_document_rows_are_named_in_one_line(documents: Any, message: str) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        load_documents(documents)
    assert message in one_line(error)


def test_documents_that_share_an_id_are_refused() -> None:
    with pytest.raises(ValueError, match="name 'x' stands 2 times") as error:
        load_documents([{"name": "x", "text": "a"}, {"name": "x", "text": "b"}], id_column="name")
    one_line(error)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"q": "x", "answer": "y"}, "no column 'question' (there are: q, answer)"),
        ({"question": "x", "a": "y"}, "no column answer, gold or gold_answer (there are: question, a)"),
        ({"question": "x", "answer": "  "}, "column 'answer' is empty"),
        ({"question": "x", "gold": None}, "column 'gold' is empty"),
        ({"question": "x", "gold": float("nan")}, "column 'gold' is empty"),
        ({"question": "", "gold": "y"}, "column 'question' is empty"),
        ({"question": "x", "gold": "None"}, "column 'gold' holds 'None', which never counts as correct"),
        ({"question": "x", "answer": float("inf")}, "column 'answer' holds 'inf', which never counts as correct"),
        ({"question": "x", "answer": {"text": ["y"]}}, "column 'answer' holds a dict, not text or a number"),
        ({"question": "x", "answer": "\udfff"}, "half a surrogate pair"),
        ({"question": "x", "answer": "y", "queries": "[1"}, "column 'queries' holds no valid JSON"),
        ({"question": "x", "answer": "y", "queries": [1]}, "column 'queries' must be a list of texts"),
        ({"question": "x", "answer": "y", "facts": [["a"]]}, "column 'facts' must be a list of [entity, attribute]"),
        ({"question": "x", "answer": "y", "facts": {"ab": 1}}, "column 'facts' must be a list of [entity, attribute]"),
        ({"question": "x", "answer": "y", "queries": ["\ud800"]}, "half a surrogate pair"),
        ({"question": "x", "answer": "y", "facts": [["a", "\ud800"]]}, "half a surrogate pair"),
        ({"question\u2028" * 500: "x", "answer": "y"}, "no column 'question'"),
        ({"question": "x", "answer": "y", "task_id": "mine-0000"}, "task_id 'mine-0000' stands 2 times"),
    ],
)
def test_bad_pairs_are_named_in_one_line(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="question/answer pairs in the given list") as error:
        load_qa_pairs([PAIRS[0], row], world="mine")
    assert message in one_line(error)


def test_an_answer_column_that_is_filled_is_preferred_to_an_empty_one() -> None:
    (task,) = load_qa_pairs([{"question": "x", "answer": None, "gold": "y"}], world="mine")
    assert task.gold == "y"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", '{"question": "x", "answer": "y"}\n{"question": \n[1]\n', "line 2 is no JSON object"),
        ("p.jsonl", '{"question": "x", "answer": "y"}\n[1]\n', "line 2 is a list, not a dict of columns"),
        ("p.csv", "question,answer\nx\n", "line 2: column 'answer' is empty"),
        ("p.csv", "question,answer\nx,y,z\n", "line 2 has more cells than the header"),
        ("p.csv", "question,answer\n" + "x" * 200_000 + ",y\n", "is no CSV"),
        ("p.csv", "", "no question/answer pair in"),
        ("p.xlsx", "x", "neither a .jsonl nor a .csv file"),
    ],
)
def test_bad_pair_files_are_named_in_one_line(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=r".") as error:
        load_qa_pairs(tmp_path / name, world="mine")
    assert message in one_line(error)
    assert name in str(error.value)


def test_a_missing_file_and_an_impossible_share_are_named() -> None:
    with pytest.raises(ValueError, match=r"no such file: nowhere\.csv"):
        load_qa_pairs("nowhere.csv", world="mine")
    with pytest.raises(ValueError, match="heldout_share must be between 0 and 1, not 20"):
        load_qa_pairs(PAIRS, world="mine", heldout_share=20)


def test_of_many_problems_the_first_are_shown_and_the_others_counted() -> None:
    with pytest.raises(ValueError, match=r"row 1: .*row 2: .*row 3: .*; and 7 more$") as error:
        load_qa_pairs([{"question": "x", "answer": ""}] * 10, world="mine")
    one_line(error)


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["question", "answer", "gold", "queries", "facts", "op", "split", "kind", "task_id"]),
            st.none() | st.text(max_size=8) | st.floats() | st.lists(st.text(max_size=3) | st.integers(), max_size=3),
        ),
        max_size=4,
    )
)
def test_any_rows_give_one_task_each_or_one_line(rows: list[dict[str, Any]]) -> None:
    message = ""
    tasks: list[Task] = []
    try:
        tasks = load_qa_pairs(rows, world="mine")
    except ValueError as error:
        message = str(error)
    assert len(message.splitlines()) == (0 if tasks else 1)
    if tasks:
        assert len(tasks) == len(rows)
        assert all(task.question.strip() and task.gold.strip() for task in tasks)
        assert len({task.task_id for task in tasks}) == len(tasks)
