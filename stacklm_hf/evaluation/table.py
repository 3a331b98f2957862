"""The table that an evaluation ends with: accuracy by task shape, one column per run, for a terminal or a README.

Contract: every row names its number of tasks, every accuracy its Wilson interval. The plain form never exceeds
its width: runs that do not fit side by side follow in a second block. Names of runs and shapes are untrusted
text; nothing in them can break a line or a cell.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size

from stacklm_hf.evaluation.metrics import EvaluationResult, Score, sort_kinds

ALL = "all"
MIN_WIDTH = 60
_MAX_NAME = 20
_GAP = "  "

Column = list[str]  # a head, then one cell per task shape, then the cell of all of them


def format_score(score: Score | None) -> str:
    """Accuracy and its interval, `0.98 [0.90, 1.00]`; `-` where there is nothing to report."""
    if score is None or score.n == 0:
        return "-"
    return f"{score.accuracy:.2f} [{score.low:.2f}, {score.high:.2f}]"


def format_table(results: Mapping[str, EvaluationResult], *, width: int = 80) -> str:
    """The table as plain text.

    Args:
        results: Run label to its evaluation, in the order of the columns, e.g. `before SFT`, `after SFT`.
        width: Terminal cells per line that must not be exceeded, at least 60.

    Returns:
        Lines joined by a newline, without one at the end.

    Raises:
        ValueError: There is no run, or the width is below 60.
    """
    if width < MIN_WIDTH:
        raise ValueError(f"a table needs a width of at least {MIN_WIDTH}, not {width}")
    grid = _Grid.of(results)
    blocks = ["\n".join(_lines(columns)) for columns in _blocks(grid, width)]
    return "\n\n".join([*blocks, _note(results)])


def format_markdown(results: Mapping[str, EvaluationResult]) -> str:
    """The same table in Markdown, without a limit on its width.

    Args:
        results: Run label to its evaluation, in the order of the columns.

    Raises:
        ValueError: There is no run.
    """
    grid = _Grid.of(results)
    columns = [*grid.fixed, *(column for run in grid.runs for column in run)]
    labels, *cells = [list(row) for row in zip(*columns, strict=True)]
    head = [_escape(label) for label in labels]
    rule = ["---", *("---:" for _ in head[1:])]
    body = [[_escape(kind), *scores] for kind, *scores in cells]
    lines = ["| " + " | ".join(row) + " |" for row in (head, rule, *body)]
    return "\n".join([*lines, "", _note(results)])


@dataclass
class _Grid:
    """The table's cells: columns that every block repeats, and the columns of each run."""

    fixed: list[Column]
    runs: list[list[Column]]

    @classmethod
    def of(cls, results: Mapping[str, EvaluationResult]) -> _Grid:
        if not results:
            raise ValueError("there is no evaluation to make a table of")
        kinds = sort_kinds(kind for result in results.values() for kind in result.by_kind)
        scores = [[*(result.by_kind.get(kind) for kind in kinds), result.overall] for result in results.values()]
        counts = [["n", *(str(score.tasks if score else 0) for score in column)] for column in scores]
        names = ["shape", *(_one_line(kind) or "-" for kind in kinds), ALL]
        accuracies = [
            [_one_line(label), *(format_score(score) for score in column)]
            for label, column in zip(results, scores, strict=True)
        ]
        if all(column == counts[0] for column in counts):
            return cls([names, counts[0]], [[accuracy] for accuracy in accuracies])
        return cls([names], [list(pair) for pair in zip(counts, accuracies, strict=True)])


def _blocks(grid: _Grid, width: int) -> Iterator[list[Column]]:
    """As many runs side by side as fit; at least one."""
    block: list[Column] = list(grid.fixed)
    for run in grid.runs:
        wider = [*block, *run]
        if len(block) > len(grid.fixed) and sum(map(_width, wider)) + len(_GAP) * (len(wider) - 1) > width:
            yield block
            wider = [*grid.fixed, *run]
        block = wider
    yield block


def _lines(columns: Sequence[Column]) -> Iterator[str]:
    widths = [_width(column) for column in columns]
    rule = "-" * (sum(widths) + len(_GAP) * (len(widths) - 1))
    rows = list(zip(*columns, strict=True))
    for index, row in enumerate(rows):
        if index in (1, len(rows) - 1):
            yield rule
        name, *cells = [_short(cell) for cell in row]
        padded = [set_cell_size(name, widths[0]), *map(_right, cells, widths[1:])]
        yield _GAP.join(padded).rstrip()


def _right(cell: str, width: int) -> str:
    return " " * (width - cell_len(cell)) + cell


def _width(column: Column) -> int:
    return max(cell_len(_short(cell)) for cell in column)


def _short(cell: str) -> str:
    """A name of at most `_MAX_NAME` terminal cells; numbers are never that long."""
    return cell if cell_len(cell) <= _MAX_NAME else set_cell_size(cell, _MAX_NAME - 1).rstrip() + "…"


def _one_line(text: str) -> str:
    """Untrusted text without line breaks, control and format characters."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def _escape(name: str) -> str:
    """A name that Markdown shows as it is: no cell border, no emphasis, no HTML."""
    return re.sub(r"([\\|*_`\[\]])", r"\\\1", html.escape(name, quote=False))


def _note(results: Mapping[str, EvaluationResult]) -> str:
    levels = sorted({result.confidence for result in results.values()})
    percent = " and ".join(f"{100 * level:g}%" for level in levels)
    samples = max(result.overall.n / result.overall.tasks if result.overall.tasks else 1 for result in results.values())
    several = f", up to {samples:.3g} samples each (avg@n)" if samples > 1 else ""
    return f"Accuracy [{percent} Wilson interval]; n: tasks{several}."
