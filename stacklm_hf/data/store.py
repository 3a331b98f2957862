"""The append-only store of trajectories: one JSON record a line, safe to kill at any moment.

Contract:

- An episode is stored once :meth:`TrajectoryStore.append` returns. Its line goes to the kernel in one write, so it
  survives the death of the process at once, and a crash of the machine within `sync_seconds`.
- Only whole lines count. A write that fails (a full disk) is taken back before the error is raised. What a killed
  writer left of a line is moved to `<file>.torn` when the next writer opens the file, and never joined to the
  next record; a whole record that only lacks its newline is kept. Nothing else is ever deleted.
- A line in the middle that is no record is reported with its number, skipped and left where it is.
- An episode id counts once, whatever the order: the first record wins. `store.ids` is what a run resumes from.
- One writer at a time: the file is locked (`flock`), and a second writer is told who holds it. Readers need no lock;
  a reader beside a running writer sees a prefix of its records.
- Memory grows with the ids and never with the records.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Set
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from stacklm_hf.rollout.trajectory import Trajectory

logger = logging.getLogger(__name__)

_BLOCK = 1 << 16


class StoreLockedError(RuntimeError):
    """Another writer holds the store."""


class TrajectoryStore:
    """Opens a store for appending; iterating over it reads the file from its start.

    Args:
        path: The JSONL file; made, with its folder, where it does not exist.
        sync_seconds: At most so long after an append the record is forced to the disk, by the next append or by
            closing; 0 forces each one. Only a crash of the whole machine can lose what is not forced yet.

    Raises:
        StoreLockedError: Another writer has the file open.
        OSError: The file cannot be opened, or a torn line cannot be moved away; the file is then as it was.
    """

    def __init__(self, path: str | os.PathLike[str], *, sync_seconds: float = 5.0) -> None:
        self.path = Path(path).resolve()  # one name for the owner's note, whatever link led here
        self.sync_seconds = sync_seconds
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._mutex = threading.Lock()
        self._pid = os.getpid()
        self._torn_from: int | None = None
        self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115 (closed by close)
        self._fd = self._file.fileno()
        try:
            self._lock()
            self._repair()
            self._ids = {trajectory.episode_id for trajectory in read_trajectories(self.path)}
            os.fsync(self._fd)
            _sync_folder(self.path.parent)
            self._synced = time.monotonic()
        except BaseException:
            self._file.close()
            raise

    @property
    def ids(self) -> Set[str]:
        """Ids of the stored episodes; a live view."""
        return self._ids

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, episode_id: object) -> bool:
        return episode_id in self._ids

    def __iter__(self) -> Iterator[Trajectory]:
        """Reads the stored episodes lazily, in the order of the file."""
        return read_trajectories(self.path)

    def append(self, trajectory: Trajectory) -> bool:
        """Stores an episode; safe to call from several threads.

        Args:
            trajectory: The episode.

        Returns:
            False where its id is stored already: nothing is written then.

        Raises:
            ValueError: The store is closed, or the record is not JSON (a logprob that is NaN or infinite).
            OSError: The record could not be written, e.g. the disk is full. The file ends at the last whole
                record, the store stays usable, and the same record can be appended again.
        """
        line = _encode(trajectory)
        with self._mutex:
            if self._file.closed:
                raise ValueError(f"{self.path} is closed: open the store again to append to it")
            if os.getpid() != self._pid:
                raise RuntimeError(f"{self.path} was opened by process {self._pid}: append from that process only")
            if trajectory.episode_id in self._ids:
                return False
            self._write(line)
            self._ids.add(trajectory.episode_id)
            if time.monotonic() - self._synced >= self.sync_seconds:
                self._sync()
        return True

    def close(self) -> None:
        """Forces everything to the disk and lets the next writer in; closing twice is harmless."""
        with self._mutex:
            if self._file.closed:
                return
            try:
                if os.getpid() == self._pid:
                    self._sync()
                    self._owner.unlink(missing_ok=True)  # a note, not the lock: removing it races with nobody
            finally:
                self._file.close()

    def __enter__(self) -> TrajectoryStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _owner(self) -> Path:
        """Who writes, for the message to a second writer."""
        return self.path.with_name(self.path.name + ".owner")

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = "another process"
            with suppress(OSError):
                owner = self._owner.read_text(encoding="utf-8").strip() or owner
            raise StoreLockedError(
                f"{self.path} is being written by {owner}: wait until it ends, stop it, or write to another path"
            ) from None
        with suppress(OSError):  # only a courtesy; a full disk must not keep a store from opening
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            self._owner.write_text(f"process {self._pid} on {socket.gethostname()} since {since}\n", encoding="utf-8")

    def _repair(self) -> None:
        """Ends the file at a whole line."""
        size = os.fstat(self._fd).st_size
        start = _last_line_start(self._fd, size)
        if start == size:
            return
        tail = _read_all(self._fd, start, size)
        if _is_object(tail):
            self._write(b"\n")
            return
        torn = self.path.with_name(self.path.name + ".torn")
        with torn.open("ab") as file:
            file.write(tail + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.ftruncate(self._fd, start)
        logger.warning("%s: %d bytes of a torn last line moved to %s", self.path, len(tail), torn.name)

    def _write(self, data: bytes) -> None:
        """Writes all or nothing."""
        self._take_back()
        end = os.fstat(self._fd).st_size
        try:
            written = 0
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except BaseException:
            self._torn_from = end
            self._take_back()
            raise

    def _take_back(self) -> None:
        """Cuts off what a failed write left; where even that fails, it is due before the next write."""
        if self._torn_from is not None:
            os.ftruncate(self._fd, self._torn_from)
            self._torn_from = None

    def _sync(self) -> None:
        os.fsync(self._fd)
        self._synced = time.monotonic()


def read_trajectories(path: str | os.PathLike[str]) -> Iterator[Trajectory]:
    """Reads a store lazily and without its lock; also while a writer is at work.

    Lines that are no records are reported with their number and skipped, and so is what comes again under an id
    seen before. An unfinished last line, which a writer beside us may be about to finish, is passed over.

    Args:
        path: The JSONL file.

    Raises:
        OSError: The file cannot be read.
    """
    seen: set[str] = set()
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            if not line.endswith(b"\n") and not _is_object(line):
                logger.info("%s line %d: not finished", path, number)
                return
            try:
                trajectory = Trajectory.from_dict(_decode(line))
                if not isinstance(trajectory.episode_id, str):
                    raise ValueError("its episode_id is not a string")
            except (TypeError, ValueError) as error:
                logger.warning("%s line %d: skipped, and left in the file: %s", path, number, error)
                continue
            if trajectory.episode_id in seen:
                logger.debug("%s line %d: episode %s again, skipped", path, number, trajectory.episode_id)
                continue
            seen.add(trajectory.episode_id)
            yield trajectory


def _encode(trajectory: Trajectory) -> bytes:
    try:
        trajectory.check()
        row = trajectory.to_dict()
        text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"episode {trajectory.episode_id!r} cannot be stored: {error}") from error
    try:
        return text.encode("utf-8") + b"\n"
    except UnicodeEncodeError:  # half of a surrogate pair in some model's text: JSON escapes keep it
        return json.dumps(row, allow_nan=False).encode("ascii") + b"\n"


def _decode(line: bytes) -> dict[str, object]:
    """Raises ValueError, of which bad JSON and bad UTF-8 are two, unless the line is a JSON object."""
    try:
        row = json.loads(line.decode("utf-8"))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    return row


def _is_object(line: bytes) -> bool:
    """Whether a line without newline is whole: the end of an object is its last byte."""
    try:
        _decode(line)
    except ValueError:
        return False
    return True


def _last_line_start(fd: int, size: int) -> int:
    """Offset after the last newline, read from the end."""
    end = size
    while end > 0:
        begin = max(0, end - _BLOCK)
        newline = os.pread(fd, end - begin, begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        end = begin
    return 0


def _read_all(fd: int, begin: int, end: int) -> bytes:
    parts = []
    while begin < end:
        part = os.pread(fd, end - begin, begin)
        if not part:
            break
        parts.append(part)
        begin += len(part)
    return b"".join(parts)


def _sync_folder(folder: Path) -> None:
    """Makes a new file's name durable; some network file systems cannot, and need not."""
    with suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
