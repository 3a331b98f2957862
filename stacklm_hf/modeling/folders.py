"""Writes a folder of a model whole or not at all, even where the process is killed in the middle."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Without these a folder does not load: the tokenizer needs the first, the model the second.
_OPENERS = ("tokenizer.json", "config.json")


@contextmanager
def whole_folder(out_dir: Path) -> Iterator[Path]:
    """Yield a scratch folder whose files move to `out_dir` if the block succeeds, and vanish if it does not.

    A folder that is new appears in one step. In one that exists, what it held before stops to load first, and the new
    files load only once they are all there.

    Args:
        out_dir: Folder to write. Files of the same names there are replaced, and so are weights, whatever their names;
            others stay.

    Raises:
        ValueError: If `out_dir` is a file.
    """
    if out_dir.exists() and not out_dir.is_dir():
        raise ValueError(f"{out_dir} is a file: give a folder to write to")
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    # Beside its destination, so that moving is renaming.
    private = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", dir=out_dir.parent))
    scratch = private / "files"  # with the permissions of any folder, which a mkdtemp has not
    try:
        scratch.mkdir()
        yield scratch
        if out_dir.exists():
            _replace_files(scratch, out_dir)
        else:
            scratch.rename(out_dir)
    finally:
        shutil.rmtree(private, ignore_errors=True)


def _replace_files(scratch: Path, out_dir: Path) -> None:
    new = {file.name for file in scratch.iterdir()}
    openers = [name for name in _OPENERS if name in new]
    for name in reversed(openers):
        (out_dir / name).unlink(missing_ok=True)
    # transformers takes one file of weights before an index of several: those of another model must not stay.
    for weights in out_dir.glob("model*.safetensors*"):
        if weights.name not in new:
            weights.unlink()
    for name in [*sorted(new - set(openers)), *openers]:
        os.replace(scratch / name, out_dir / name)


__all__ = ["whole_folder"]
