"""Writes a folder whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_folder(out_dir: Path) -> Iterator[Path]:
    """Yield a scratch folder whose files move to `out_dir` if the block succeeds, and vanish if it does not.

    Args:
        out_dir: Folder to write. Files of the same names there are replaced, others stay.

    Raises:
        ValueError: If `out_dir` is a file.
    """
    if out_dir.exists() and not out_dir.is_dir():
        raise ValueError(f"{out_dir} is a file: give a folder to write to")
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    # Beside its destination, so that moving is renaming.
    scratch = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", dir=out_dir.parent))
    try:
        yield scratch
        out_dir.mkdir(exist_ok=True)
        for file in sorted(scratch.iterdir()):
            os.replace(file, out_dir / file.name)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
