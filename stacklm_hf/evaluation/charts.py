"""The figures of the report as plain geometry, which its template draws as inline SVG.

Contract: pure functions from numbers to JSON-like rows; nothing here writes markup, so nothing here has to
escape. Horizontal positions are percentages, so that a chart fits a phone and a desk without scaling its text.
Values that cannot be drawn (NaN, infinities) are left out, and the caption counts them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from numbers import Real
from statistics import fmean
from typing import Any

from stacklm_hf.evaluation.failures import Failure
from stacklm_hf.evaluation.metrics import Difference, EvaluationResult, Score, compare, sort_kinds
from stacklm_hf.evaluation.table import ALL

MARKER_SHAPES = ("M-5,0a5,5 0 1,0 10,0a5,5 0 1,0 -10,0", "M-4.5,-4.5h9v9h-9z", "M0,-6L6,0L0,6L-6,0z", "M0,-5.5L6,5H-6z")
"""One path per run around (0, 0): circle, square, diamond, triangle. Runs differ by more than their colour."""

MAX_POINTS = 500
_PLOT_WIDTH, _PLOT_HEIGHT = 1000, 200


def shape_rows(results: Sequence[EvaluationResult]) -> list[dict[str, Any]]:
    """Accuracy of every run by task shape, all shapes last: chart marks and table cells."""
    changes = compare(results[0], results[-1]) if len(results) > 1 else {}
    rows = [
        _score_row(kind, [result.by_kind.get(kind) for result in results], results, changes.get(kind))
        for kind in sort_kinds(kind for result in results for kind in result.by_kind)
    ]
    total = _score_row(ALL, [result.overall for result in results], results, changes.get(ALL))
    return [*rows, {**total, "total": True}]


def split_rows(results: Sequence[EvaluationResult]) -> list[dict[str, Any]]:
    """Accuracy of every run by split; empty where there is one split only."""
    splits = sort_kinds(split for result in results for split in result.by_split)
    if len(splits) < 2:
        return []
    return [_score_row(split, [result.by_split.get(split) for result in results], results) for split in splits]


def failure_rows(results: Sequence[EvaluationResult]) -> list[dict[str, Any]]:
    """Failures of every run by cause, causes that never occurred left out."""
    most = max(max(result.failures.values(), default=0) for result in results)
    return [
        {
            "outcome": str(failure),
            "name": failure.label,
            "meaning": failure.meaning,
            "bars": [_bar(run, result.failures.get(failure, 0), most) for run, result in enumerate(results)],
        }
        for failure in Failure
        if any(result.failures.get(failure, 0) for result in results)
    ]


def effort_rows(results: Sequence[EvaluationResult]) -> list[dict[str, Any]]:
    """Calls, steps and tokens per episode of every run."""
    names = {"calls": "tool calls", "steps": "steps", "own_tokens": "own tokens", "total_tokens": "total tokens"}
    rows = []
    for field, name in names.items():
        values = [getattr(result.overall, field) for result in results]
        bars = [{**_bar(run, value, max(values)), "text": f"{value:,.1f}"} for run, value in enumerate(values)]
        rows.append({"name": name, "bars": bars})
    return rows


def training_panels(log: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Line charts of a training log: loss, held-out accuracy and reward, each where the log has it.

    Args:
        log: Rows as a trainer logs them. A row needs `step`; a key that is or ends in `loss`, `accuracy` or `reward`
            makes a line of the chart of that name (`loss`, `eval_loss`, `heldout_accuracy`), but for the accuracy of
            single tokens and the mean that a trainer logs at its end (`train_loss`).
    """
    rows = [row for row in log if isinstance(row.get("step"), Real)]
    panels = []
    for title, ending in (("Loss", "loss"), ("Accuracy while training", "accuracy"), ("Reward", "reward")):
        keys = sorted({key for row in rows for key in row if key == ending or key.endswith(f"_{ending}")})
        series = {key: _series(rows, key) for key in keys if "token" not in key and key != "train_loss"}
        series = {key: points for key, points in series.items() if points}
        if series:
            panels.append(_panel(title, series, unit=ending == "accuracy"))
    return panels


def _score_row(
    name: str, scores: Sequence[Score | None], results: Sequence[EvaluationResult], change: Difference | None = None
) -> dict[str, Any]:
    present = [(run, score) for run, score in enumerate(scores) if score is not None and score.n]
    titles = {
        run: f"{results[run].label}: {_value(score)} {_interval(score)}, n = {score.tasks}" for run, score in present
    }
    counts = list(dict.fromkeys(str(score.tasks if score else 0) for score in scores))
    return {
        "name": name or "(none)",
        "total": False,
        "tasks": " / ".join(counts) + (" task" if counts == ["1"] else " tasks"),
        "alt": f"{name}. " + "; ".join(titles.values()),
        "marks": [
            {
                "run": run,
                "value": _percent(score.accuracy),
                "low": _percent(score.low),
                "high": _percent(score.high),
                "title": titles[run],
            }
            for run, score in present
        ],
        "cells": [
            {"value": _value(score), "interval": _interval(score)} if score is not None and score.n else None
            for score in scores
        ],
        "change": change and {"value": f"{change.change:+.2f}", "interval": f"[{change.low:+.2f}, {change.high:+.2f}]"},
    }


def _value(score: Score) -> str:
    return f"{score.accuracy:.2f}"


def _interval(score: Score) -> str:
    return f"[{score.low:.2f}, {score.high:.2f}]"


def _bar(run: int, count: float, most: float) -> dict[str, Any]:
    return {"run": run, "count": f"{count:,}", "width": _percent(count / most) if most else 0}


def _percent(share: float) -> float:
    return round(100 * share, 2)


def _series(rows: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    return [(float(row["step"]), float(row[key])) for row in rows if isinstance(row.get(key), Real)]


def _panel(title: str, series: Mapping[str, list[tuple[float, float]]], *, unit: bool) -> dict[str, Any]:
    """One chart; `unit` fixes its vertical axis to 0 to 1."""
    drawn = {key: [point for point in points if all(map(math.isfinite, point))] for key, points in series.items()}
    left_out = sum(len(points) - len(drawn[key]) for key, points in series.items())
    points = [point for part in drawn.values() for point in part]
    x_low, x_high = min((x for x, _ in points), default=0), max((x for x, _ in points), default=1)
    low, high = (0.0, 1.0) if unit else _bounds([y for _, y in points])

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / (x_high - x_low) if x_high > x_low else 0.5
        return round(_PLOT_WIDTH * across, 2), round(_PLOT_HEIGHT * (high - y) / (high - low), 2)

    lines = []
    for key, part in drawn.items():
        thinned = _thin(part)
        spots = [place(x, y) for x, y in thinned]
        # Few points are measurements worth a mark of their own; many are a curve.
        dots = [
            {"x": spot[0], "y": spot[1], "title": f"step {x:g}: {y:.4g}"}
            for spot, (x, y) in zip(spots, thinned, strict=True)
            if len(thinned) <= 40
        ]
        lines.append({"name": key, "points": " ".join(f"{x},{y}" for x, y in spots), "dots": dots})
    ends = "; ".join(f"{key} from {part[0][1]:.4g} to {part[-1][1]:.4g}" for key, part in drawn.items() if part)
    caption = f"By step: {ends or 'nothing that could be drawn'}."
    if any(len(part) > MAX_POINTS for part in drawn.values()):
        caption += f" Longer curves are drawn as {MAX_POINTS} means of neighbouring rows."
    if left_out:
        caption += f" Left out: {left_out} values that are not finite."
    return {
        "title": title,
        "lines": lines,
        "grid": [round(_PLOT_HEIGHT * part / 4, 1) for part in range(4)],
        "y_ticks": [f"{high - (high - low) * part / 4:.3g}" for part in range(5)],
        "x_ticks": [f"{x_low:,.0f}", f"{(x_low + x_high) / 2:,.0f}", f"{x_high:,.0f}"],
        "alt": f"{title}. {caption}",
        "caption": caption,
    }


def _thin(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most MAX_POINTS points: means over equal runs of neighbours."""
    if len(points) <= MAX_POINTS:
        return points
    edges = [len(points) * part // MAX_POINTS for part in range(MAX_POINTS + 1)]
    groups = [points[start:end] for start, end in pairwise(edges)]
    return [(fmean(x for x, _ in group), fmean(y for _, y in group)) for group in groups]


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    """An axis of four even, round intervals around the values; it begins at 0 where no value is below."""
    low, high = min([0.0, *values]), max([0.0, *values])
    unit = 10 ** math.floor(math.log10((high - low) / 4 or 1.0))
    for factor in (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 7.5, 10, 15, 20):
        step = unit * factor
        floor = step * math.floor(low / step)
        if floor + 4 * step >= high * 0.9999:
            break
    return floor, max(floor + 4 * step, high)
