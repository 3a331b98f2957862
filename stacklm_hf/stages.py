"""A run in stages that can be killed at any moment and goes on where it stopped.

Contract: `state.json` in the run's folder names the settings and the finished stages. It is replaced in one
step, after the stage's own files are on the disk. A folder that was begun with other settings is refused, and so is
one in which another process runs a stage.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

STATE_FILE = "state.json"
LOCK_FILE = "state.lock"


class Stages:
    """The stages of a run.

    Args:
        folder: The run's folder; made where it does not exist.
        settings: What the run was started with, JSON-ready.

    Raises:
        ValueError: The folder holds a run with other settings, or its state cannot be read.
    """

    def __init__(self, folder: str | os.PathLike[str], settings: Mapping[str, Any]):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._path = self.folder / STATE_FILE
        wanted = json.loads(json.dumps(dict(settings)))
        self._state: dict[str, Any] = {"settings": wanted, "stages": {}}
        if self._path.exists():
            self._state = self._read()
            self._check(wanted)
        else:
            self._write()

    def _read(self) -> dict[str, Any]:
        try:
            state = json.loads(self._path.read_text(encoding="utf-8"))
            if not isinstance(state["settings"], dict) or not isinstance(state["stages"], dict):
                raise ValueError("settings and stages must be objects")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self._path} cannot be read ({error}): choose another folder, or delete it") from error
        return state

    def _check(self, wanted: dict[str, Any]) -> None:
        found = self._state["settings"]
        changed = sorted(key for key in {*found, *wanted} if found.get(key) != wanted.get(key))
        if changed:
            details = ", ".join(f"{key} was {found.get(key)!r}, is {wanted.get(key)!r}" for key in changed)
            raise ValueError(f"{self.folder} holds a run with other settings ({details}): choose another folder")

    def _write(self) -> None:
        temporary = self._path.with_suffix(".tmp")
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(self._state, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)

    def __contains__(self, name: str) -> bool:
        return name in self._state["stages"]

    def facts(self, name: str) -> dict[str, Any]:
        """What a finished stage left to be known."""
        return self._state["stages"][name]

    @property
    def seconds(self) -> float:
        """Time that the finished stages took, all runs together."""
        return sum(stage.get("seconds", 0.0) for stage in self._state["stages"].values())

    @contextmanager
    def stage(self, name: str) -> Iterator[dict[str, Any]]:
        """Runs a stage: it is finished when the block ends without an exception.

        Yields:
            A dict to fill with facts about the stage, JSON-ready; kept in the state file.

        Raises:
            ValueError: Another process runs a stage in this folder.
        """
        facts: dict[str, Any] = {}
        with self._alone():
            start = time.monotonic()
            yield facts
            facts["seconds"] = round(time.monotonic() - start, 2)
            self._state["stages"][name] = facts
            self._write()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Holds the folder's lock; the system frees it when the process dies, however it dies."""
        with (self.folder / LOCK_FILE).open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"another process is at work in {self.folder}: wait until it ends, or choose another folder"
                ) from None
            yield
