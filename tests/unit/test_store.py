"""The trajectory store: nothing whole is lost, nothing torn is kept, one writer at a time."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stacklm_hf.data.store import StoreLockedError, TrajectoryStore, read_trajectories
from stacklm_hf.rollout.trajectory import Step, StepKind, StopReason, Trajectory


def episode(name: str, text: str = "na\u00efve \u4f60\u597d\u2028\U0001f600") -> Trajectory:
    """A small episode with characters of two, three and four bytes, and one that is a line break to some."""
    return Trajectory(
        name,
        "task",
        "research",
        "sum",
        f"question {text}",
        "4042",
        token_ids=[1, 2, 3],
        sampled=[False, True, True],
        logprobs=[None, -0.25, 0.0],
        forced=[False, False, True],
        steps=[Step(StepKind.ANSWER, text, answer="4042")],
        answer="4042",
        reward=0.99,
        correct=True,
        stop_reason=StopReason.ANSWERED,
        sampling={"temperature": 0.7},
        seed=3,
        timing={"total": 0.5},
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "trajectories.jsonl"


def fill(path: Path, *names: str) -> None:
    with TrajectoryStore(path) as store:
        for name in names:
            assert store.append(episode(name))


def names(path: Path) -> list[str]:
    return [trajectory.episode_id for trajectory in read_trajectories(path)]


def test_what_is_appended_is_read_back_equal(path: Path) -> None:
    with TrajectoryStore(path) as store:
        assert store.append(episode("b"))
        assert store.append(episode("a", text="\ud800 is half a pair"))
        assert list(store) == [episode("b"), episode("a", text="\ud800 is half a pair")]
        assert (store.ids, len(store), "a" in store, "c" in store) == ({"a", "b"}, 2, True, False)
    assert path.read_bytes().count(b"\n") == 2
    assert "na\u00efve" in path.read_text("utf-8", errors="strict")  # readable, not escaped


def test_a_record_is_in_the_file_once_append_returns(path: Path) -> None:
    with TrajectoryStore(path) as store:
        store.append(episode("a"))
        assert names(path) == ["a"]


def test_a_run_resumes_by_id_whatever_the_order(path: Path) -> None:
    fill(path, "c", "a")
    with TrajectoryStore(path) as store:
        todo = [name for name in "abcd" if name not in store.ids]
        assert todo == ["b", "d"]
        for name in reversed(todo):
            store.append(episode(name))
    assert names(path) == ["c", "a", "d", "b"]


def test_the_same_id_is_stored_once(path: Path) -> None:
    with TrajectoryStore(path) as store:
        assert store.append(episode("a", text="first"))
        assert not store.append(episode("a", text="second"))
    assert path.read_bytes().count(b"\n") == 1


def test_of_two_records_with_one_id_the_first_counts(path: Path) -> None:
    fill(path, "a", "b")
    again = json.dumps(episode("a", text="second").to_dict())
    path.write_bytes(path.read_bytes() + again.encode() + b"\n")
    with TrajectoryStore(path) as store:
        assert len(store) == 2
        assert [trajectory.question for trajectory in store] == [episode("a").question, episode("b").question]


@settings(deadline=None, max_examples=60)
@given(cut=st.integers(min_value=0), text=st.text(max_size=12))
def test_cut_anywhere_every_whole_record_survives(
    tmp_path_factory: pytest.TempPathFactory, cut: int, text: str
) -> None:
    path = tmp_path_factory.mktemp("cut") / "t.jsonl"
    with TrajectoryStore(path, sync_seconds=1e9) as store:
        for name in "abc":
            store.append(episode(name, text))
    data = path.read_bytes()
    cut %= len(data) + 1
    path.write_bytes(data[:cut])
    # A record is whole when its closing brace is there, its newline or not.
    ends = [index for index, byte in enumerate(data) if byte == ord("\n")]
    whole = ["a", "b", "c"][: sum(end <= cut for end in ends)]
    with TrajectoryStore(path, sync_seconds=1e9) as store:
        assert store.ids == set(whole)
        store.append(episode("new", text))
        assert list(store) == [episode(name, text) for name in [*whole, "new"]]
    lines = path.read_bytes().split(b"\n")
    assert [json.loads(line)["episode_id"] for line in lines[:-1]] == [*whole, "new"]
    assert lines[-1] == b""


def test_a_line_cut_inside_a_character_is_moved_away_with_a_log_line(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(path, "a")
    torn = json.dumps(episode("b").to_dict(), ensure_ascii=False).encode()
    torn = torn[: torn.index("\u4f60".encode()) + 2]
    with pytest.raises(UnicodeDecodeError):
        torn.decode()
    path.write_bytes(path.read_bytes() + torn)
    with caplog.at_level(logging.WARNING):
        fill(path, "c")
    assert names(path) == ["a", "c"]
    assert path.with_name("trajectories.jsonl.torn").read_bytes() == torn + b"\n"
    assert f"{len(torn)} bytes of a torn last line moved to trajectories.jsonl.torn" in caplog.text


def test_a_reader_passes_over_an_unfinished_line_and_changes_nothing(path: Path) -> None:
    fill(path, "a")
    path.write_bytes(path.read_bytes() + b'{"episode_id": "b", ')
    before = path.read_bytes()
    assert names(path) == ["a"]
    assert path.read_bytes() == before


def test_a_whole_record_without_its_newline_is_kept(path: Path) -> None:
    fill(path, "a", "b")
    path.write_bytes(path.read_bytes()[:-1])
    assert names(path) == ["a", "b"]
    fill(path, "c")
    assert names(path) == ["a", "b", "c"]
    assert not path.with_name("trajectories.jsonl.torn").exists()


@pytest.mark.parametrize(
    "bad",
    [
        b"garbage",
        b"\xff\xfe\x00",
        b"\x00" * 64,
        b"[1, 2]",
        b"{}",
        b"[" * 100_000,
        b'{"episode_id": "x", "steps": [], "sampling": "{}", "timing": "{}", "stop_reason": "error"}',
        json.dumps({**episode("x").to_dict(), "sampled": [True]}).encode(),
        json.dumps({**episode("x").to_dict(), "token_ids": None}).encode(),
        json.dumps({**episode("x").to_dict(), "stop_reason": "bored"}).encode(),
        json.dumps({**episode("x").to_dict(), "episode_id": ["x"]}).encode(),
    ],
    ids=range(11),
)
def test_a_bad_line_is_reported_by_number_skipped_and_left(
    path: Path, caplog: pytest.LogCaptureFixture, bad: bytes
) -> None:
    fill(path, "a", "b")
    first, second = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([first, bad, b"", second, b""]))
    before = path.read_bytes()
    with caplog.at_level(logging.WARNING), TrajectoryStore(path) as store:
        assert store.ids == {"a", "b"}
        assert [trajectory.episode_id for trajectory in store] == ["a", "b"]
    assert "line 2: skipped, and left in the file" in caplog.text
    assert path.read_bytes() == before


@contextmanager
def small_disk(limit: int) -> Iterator[None]:
    """Makes writes past `limit` bytes of a file fail half-way, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_whole_records_and_the_append_can_be_repeated(path: Path) -> None:
    with TrajectoryStore(path) as store:
        store.append(episode("a"))
        size = path.stat().st_size
        with small_disk(size + 100), pytest.raises(OSError, match="large"):
            store.append(episode("b"))
        assert path.stat().st_size == size
        assert store.ids == {"a"}
        assert store.append(episode("b"))
    assert names(path) == ["a", "b"]


def test_where_even_taking_back_fails_the_next_append_does_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int, length: int) -> None:
        raise OSError(5, "Input/output error")

    with TrajectoryStore(path) as store:
        store.append(episode("a"))
        size = path.stat().st_size
        with monkeypatch.context() as patch, small_disk(size + 100):
            patch.setattr(os, "ftruncate", broken)
            with pytest.raises(OSError, match="Input/output"):
                store.append(episode("b"))
        assert path.stat().st_size == size + 100
        store.append(episode("b"))
        store.append(episode("c"))
    assert names(path) == ["a", "b", "c"]


def test_a_torn_line_that_cannot_be_moved_away_stays(path: Path) -> None:
    fill(path, "a")
    torn = b'{"episode_id": "b", "question": "' + b"x" * 1000
    path.write_bytes(path.read_bytes() + torn)
    before = path.read_bytes()
    with small_disk(500), pytest.raises(OSError, match="large"):
        TrajectoryStore(path)
    assert path.read_bytes() == before
    fill(path, "c")  # and the failed opening holds no lock
    assert names(path) == ["a", "c"]


def test_a_second_writer_is_refused_and_told_who_holds_it(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.jsonl"
    with TrajectoryStore(path) as store:
        store.append(episode("a"))
        link.symlink_to(path)
        for name in (path, link):
            with pytest.raises(StoreLockedError, match=f"being written by process {os.getpid()} on .*: wait until"):
                TrajectoryStore(name)
        store.append(episode("b"))
    fill(path, "c")
    assert names(path) == ["a", "b", "c"]
    assert sorted(file.name for file in path.parent.iterdir()) == ["trajectories.jsonl"]


WRITER = """
    import sys
    from tests.unit.test_store import episode
    from stacklm_hf.data.store import TrajectoryStore
    store = TrajectoryStore(sys.argv[1])
    for number in range(1_000_000):
        store.append(episode(f"{sys.argv[2]}{number}", text="\\u4f60" * 2000))
        print(number, flush=True)
"""


def test_a_killed_writer_loses_nothing_that_was_stored_and_leaves_no_lock(path: Path) -> None:
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), str(path), "x"], stdout=subprocess.PIPE, text=True, cwd=root
    )
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) >= 20:
            with pytest.raises(StoreLockedError, match=f"process {process.pid} "):
                TrajectoryStore(path)
            process.send_signal(signal.SIGKILL)
            break
    stored = int((process.stdout.read().split() or [line])[-1])
    process.wait(timeout=30)
    process.stdout.close()
    with TrajectoryStore(path) as store:
        assert {f"x{number}" for number in range(stored + 1)} <= store.ids
        assert store.append(episode("next"))


def test_threads_may_share_a_store(path: Path) -> None:
    with TrajectoryStore(path) as store:

        def work(name: str) -> None:
            for number in range(20):
                store.append(episode(f"{name}{number}"))

        threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(store) == 80
    assert len(names(path)) == 80


@pytest.mark.parametrize(("sync_seconds", "expected"), [(0.0, 3), (1e9, 0)])
def test_how_often_records_are_forced_to_the_disk(
    path: Path, monkeypatch: pytest.MonkeyPatch, sync_seconds: float, expected: int
) -> None:
    real: Callable[[int], None] = os.fsync
    calls: list[int] = []
    with TrajectoryStore(path, sync_seconds=sync_seconds) as store:
        monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(fd), real(fd)))
        for name in "abc":
            store.append(episode(name))
        assert len(calls) == expected
    assert len(calls) == expected + 1  # closing always does


def test_what_is_not_json_is_refused_by_name_and_not_written(path: Path) -> None:
    bad = episode("bad")
    bad.logprobs = [None, float("nan"), 0.0]
    ragged = episode("ragged")
    ragged.sampled = [True]
    with TrajectoryStore(path) as store:
        for trajectory in (bad, ragged):
            with pytest.raises(ValueError, match=f"episode '{trajectory.episode_id}' cannot be stored"):
                store.append(trajectory)
        assert len(store) == 0
    assert path.read_bytes() == b""


def test_a_closed_store_says_so(path: Path) -> None:
    store = TrajectoryStore(path)
    store.close()
    store.close()
    with pytest.raises(ValueError, match="is closed: open the store again"):
        store.append(episode("a"))


def test_a_forked_child_may_not_append(path: Path) -> None:
    with TrajectoryStore(path) as store:
        child = os.fork()
        if child == 0:
            try:
                store.append(episode("child"))
            except RuntimeError as error:
                store.close()
                os._exit(7 if "append from that process only" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        with pytest.raises(StoreLockedError):  # the child's end has not unlocked it
            TrajectoryStore(path)
        assert store.append(episode("parent"))
    assert names(path) == ["parent"]


def test_resuming_holds_the_ids_in_memory_and_not_the_records(path: Path) -> None:
    with TrajectoryStore(path) as store:
        for number in range(300):
            store.append(episode(f"e{number}", text="x" * 20_000))
    size = path.stat().st_size
    assert size > 10_000_000
    tracemalloc.start()
    try:
        with TrajectoryStore(path) as store:
            assert sum(1 for _ in store) == 300
            peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < size / 20
