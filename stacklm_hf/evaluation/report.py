"""The report of an evaluation: one HTML file, no network, every trajectory readable.

Contract: the file opens from a disk or a mail, and asks nothing of a network (its Content-Security-Policy forbids
it). All that comes from a model, a document, a question or a log is untrusted: text reaches the page through
autoescaping, or as JSON with `<`, `>` and `&` escaped that the script shows as text nodes; scripts and styles
run by their hash only. Tables and figures count every trajectory; where the list of trajectories is capped, the
page says so.

The model's own tokens are told from the world's by the record's token mask (`Trajectory.sampled`), and control
tokens from text that merely spells one by their ids.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import jinja2

from stacklm_hf.evaluation import charts
from stacklm_hf.evaluation.failures import Failure, classify_failure
from stacklm_hf.evaluation.metrics import CONFIDENCE, EvaluationResult, compare, sort_kinds, summarize
from stacklm_hf.protocol.tokens import ASSISTANT, END, SYSTEM, TOOL_CALL, TOOL_RESULT, USER
from stacklm_hf.protocol.wire import FORCED_BODY
from stacklm_hf.rollout.trajectory import StepKind, Trajectory
from stacklm_hf.worlds.base import Task

MAX_TRAJECTORIES = 2000
MAX_SPAN_CHARS = 20_000
CORRECT = "correct"

# Codes of a span, as report.js knows them.
WORLD, OWN, FORCED, CONTROL, OWN_CONTROL, LEFT_OUT = range(6)
Span = tuple[int, str]


class Decoder(Protocol):
    """What the report needs of a tokenizer; every Hugging Face tokenizer has it."""

    @property
    def all_special_ids(self) -> Sequence[int]:
        """Ids of the control tokens."""
        ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> Any:
        """The text of the ids."""
        ...


def write_report(
    path: str | os.PathLike[str],
    runs: Mapping[str, Iterable[Trajectory]],
    *,
    title: str = "Evaluation",
    metadata: Mapping[str, Any] | None = None,
    training_log: Iterable[Mapping[str, Any]] = (),
    tasks: Mapping[str, Task] | None = None,
    tokenizer: Decoder | None = None,
    max_trajectories: int = MAX_TRAJECTORIES,
    confidence: float = CONFIDENCE,
) -> Path:
    """Writes the report, in one step: a reader never sees half a file.

    Args:
        path: File to write, e.g. `report.html`; its folder is made.
        runs: Run label to its trajectories, in the order to show, e.g. `before SFT`, `after SFT`.
        title: Heading of the page.
        metadata: What a reader must know to judge or repeat the run: model, seed, settings, versions.
        training_log: Rows of the trainer's log; see :func:`stacklm_hf.evaluation.charts.training_panels`.
        tasks: Tasks by `task_id`, so that the failures can be told apart by the key.
        tokenizer: Decodes the episodes. Without it they are shown by their recorded turns.
        max_trajectories: Most trajectories to list. Above it the runs share the room evenly and failures
            come before correct ones; the page says what is left out.
        confidence: Of the intervals.

    Returns:
        The path written.

    Raises:
        ValueError: There is no run.
    """
    if not runs:
        raise ValueError("a report needs at least one run: give {'after SFT': trajectories}")
    tasks = tasks or {}
    episodes = {label: list(trajectories) for label, trajectories in runs.items()}
    results = [summarize(group, tasks, label=label, confidence=confidence) for label, group in episodes.items()]
    outcomes = [[_outcome(episode, tasks.get(episode.task_id)) for episode in group] for group in episodes.values()]
    kept = _keep(outcomes, max_trajectories)
    groups = list(episodes.values())
    listed = [
        _episode_row(run, groups[run][index], outcomes[run][index], tokenizer)
        for run, indices in enumerate(kept)
        for index in indices
    ]
    page = _render(
        title=title,
        results=results,
        metadata=metadata or {},
        panels=charts.training_panels(training_log),
        data=_data(list(episodes), listed),
        cap_note=_cap_note([len(indices) for indices in kept], [len(group) for group in groups]),
    )
    return _write(Path(path), page)


def episode_spans(trajectory: Trajectory, tokenizer: Decoder | None = None) -> list[Span]:
    """An episode as `(code, text)` spans that tell the model's own tokens from the world's.

    Args:
        trajectory: The record.
        tokenizer: Decodes its ids. Without it, or for a record without ids, the spans come from the
            recorded turns, which do not tell what a grammar forced.
    """
    if tokenizer is None or not trajectory.token_ids:
        spans = _spans_of_steps(trajectory)
    else:
        spans = _spans_of_tokens(trajectory, tokenizer)
    return [part for span in spans if span[1] for part in _bounded(span)]


def _spans_of_tokens(trajectory: Trajectory, tokenizer: Decoder) -> list[Span]:
    special = set(tokenizer.all_special_ids)
    ids, sampled, forced = trajectory.token_ids, trajectory.sampled, trajectory.forced

    def decode(indices: Iterable[int]) -> str:
        part = [ids[index] for index in indices]
        return str(tokenizer.decode(part, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    spans: list[Span] = []
    for (own, control), group in groupby(range(len(ids)), key=lambda i: (sampled[i], ids[i] in special)):
        indices = list(group)
        if control:
            spans += [(OWN_CONTROL if own else CONTROL, decode([index])) for index in indices]
        elif not own:
            spans.append((WORLD, decode(indices)))
        else:
            whole = decode(indices)
            parts = [
                (FORCED if by_grammar else OWN, decode(part))
                for by_grammar, part in groupby(indices, key=lambda i: forced[i])
            ]
            # A character may take several tokens, and the grammar may have forced the last of them only.
            intact = "".join(text for _, text in parts) == whole
            spans += parts if intact else [(OWN, whole)]
    return spans


def _spans_of_steps(trajectory: Trajectory) -> list[Span]:
    spans: list[Span] = []
    for marker, text in ((SYSTEM, trajectory.system), (USER, trajectory.question)):
        spans += [(CONTROL, marker), (WORLD, text), (CONTROL, END)]
    for step in trajectory.steps:
        spans.append((CONTROL, ASSISTANT))
        text = step.text
        if step.forced and text.startswith(FORCED_BODY):
            spans.append((WORLD, FORCED_BODY))
            text = text.removeprefix(FORCED_BODY)
        thought, marker, call = text.partition(TOOL_CALL)
        spans += [(OWN, thought), (OWN_CONTROL, marker), (OWN, call), (CONTROL if step.cut else OWN_CONTROL, END)]
        if step.observation is not None:
            spans += [(CONTROL, TOOL_RESULT), (WORLD, step.observation), (CONTROL, END)]
    return spans


def _bounded(span: Span) -> list[Span]:
    """The span, or its two ends with the count of what is left out between."""
    code, text = span
    if len(text) <= MAX_SPAN_CHARS:
        return [span]
    half = MAX_SPAN_CHARS // 2
    note = f" [{len(text) - 2 * half:,} characters not shown] "
    return [(code, text[:half]), (LEFT_OUT, note), (code, text[-half:])]


def _outcome(trajectory: Trajectory, task: Task | None) -> str:
    failure = classify_failure(trajectory, task)
    return CORRECT if failure is None else str(failure)


def _keep(outcomes: Sequence[Sequence[str]], limit: int) -> list[list[int]]:
    """Which episodes of each run to list, in their order: an even share of the room, failures first."""
    room = max(limit, 0)
    quotas = [0] * len(outcomes)
    # The smallest runs first: what they leave over goes to the larger ones.
    for position, run in enumerate(sorted(range(len(outcomes)), key=lambda run: len(outcomes[run]))):
        quotas[run] = min(len(outcomes[run]), room // (len(outcomes) - position))
        room -= quotas[run]
    kept = []
    for quota, run_outcomes in zip(quotas, outcomes, strict=True):
        failures_first = sorted(range(len(run_outcomes)), key=lambda index: run_outcomes[index] == CORRECT)
        kept.append(sorted(failures_first[:quota]))
    return kept


def _cap_note(kept: Sequence[int], totals: Sequence[int]) -> str:
    if sum(kept) == sum(totals):
        return ""
    return (
        f"Listed here: {sum(kept):,} of {sum(totals):,} trajectories, an even share of every run and failures first. "
        "All figures and tables above count every trajectory."
    )


def _episode_row(run: int, trajectory: Trajectory, outcome: str, tokenizer: Decoder | None) -> dict[str, Any]:
    finite = trajectory.reward is not None and math.isfinite(trajectory.reward)
    return {
        "id": trajectory.episode_id,
        "task": trajectory.task_id,
        "run": run,
        "kind": trajectory.kind,
        "split": trajectory.split,
        "outcome": outcome,
        "question": trajectory.question,
        "answer": trajectory.answer,
        "gold": trajectory.gold,
        "grounded": trajectory.grounded,
        "stop": str(trajectory.stop_reason),
        "error": trajectory.error,
        "calls": sum(step.kind is StepKind.CALL for step in trajectory.steps),
        "steps": trajectory.num_steps,
        "own": trajectory.num_sampled,
        "total": len(trajectory.token_ids),
        "reward": round(trajectory.reward, 4) if trajectory.reward is not None and finite else None,
        "policy": trajectory.policy,
        "spans": episode_spans(trajectory, tokenizer),
    }


def _data(labels: Sequence[str], episodes: Sequence[Mapping[str, Any]]) -> str:
    """The list of trajectories as JSON that is inert inside a script element."""
    value = {
        "runs": labels,
        "outcomes": {CORRECT: CORRECT, **{str(failure): failure.label for failure in Failure}},
        "kinds": sort_kinds(episode["kind"] for episode in episodes),
        "splits": sort_kinds(episode["split"] for episode in episodes),
        "episodes": episodes,
    }
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _render(
    *,
    title: str,
    results: Sequence[EvaluationResult],
    metadata: Mapping[str, Any],
    panels: Sequence[Mapping[str, Any]],
    data: str,
    cap_note: str,
) -> str:
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    css, js = _asset("report.css"), _asset("report.js")
    return environment.from_string(_asset("report.html")).render(
        title=title,
        lead=_lead(results),
        confidence=f"{100 * results[0].confidence:g}%",
        shapes=charts.MARKER_SHAPES,
        runs=[_tile(index, result) for index, result in enumerate(results)],
        shape_rows=charts.shape_rows(results),
        split_rows=charts.split_rows(results),
        changed=_change_note(results),
        panels=panels,
        failure_rows=charts.failure_rows(results),
        failure_note=_failure_note(results),
        effort_rows=charts.effort_rows(results),
        metadata=[(key, _text(value)) for key, value in metadata.items()],
        cap_note=cap_note,
        data=data,
        css=css,
        css_hash=_hash(css),
        js=js,
        js_hash=_hash(js),
    )


def _asset(name: str) -> str:
    """A file of the package as it stands."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _lead(results: Sequence[EvaluationResult]) -> str:
    parts = [f"{result.label}: {result.overall.correct} of {result.overall.n} correct" for result in results]
    return "; ".join(parts) + "."


def _tile(index: int, result: EvaluationResult) -> dict[str, Any]:
    score = result.overall
    facts = [("grounded", f"{score.grounded:.2f}"), ("calls", f"{score.calls:.1f}"), ("steps", f"{score.steps:.1f}")]
    facts += [(f"pass@{k}", f"{value:.2f}") for k, value in score.pass_at.items() if k > 1]
    samples = f", {score.n} episodes" if score.n != score.tasks else ""
    return {
        "index": index,
        "label": result.label,
        "accuracy": f"{score.accuracy:.2f}" if score.n else "no episodes",
        "note": f"[{score.low:.2f}, {score.high:.2f}], n = {score.tasks} tasks{samples}",
        "facts": facts if score.n else [],
    }


def _change_note(results: Sequence[EvaluationResult]) -> str:
    """What the column `change` says, empty without a second run."""
    if len(results) < 2:
        return ""
    first, last = results[0], results[-1]
    change = compare(first, last)["all"]
    note = f"Change from {first.label} to {last.label}, with Newcombe's interval."
    if change.shared:
        p = "p < 0.001" if change.p_value < 0.001 else f"p = {change.p_value:.3f}"
        note += (
            f" Of {change.shared} shared tasks {change.gained} went better and {change.lost} worse (sign test, {p})."
        )
    return note


def _failure_note(results: Sequence[EvaluationResult]) -> str:
    counts = "; ".join(f"{result.label}: {sum(result.failures.values())} of {result.overall.n}" for result in results)
    return f"Failed episodes. {counts}. Each has exactly one cause: the first fault that was not made up for."


def _text(value: Any) -> str:
    if isinstance(value, Mapping | list | tuple):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


def _write(path: Path, page: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Lone surrogates, which a JSON escape can bring in, have no UTF-8 form.
    content = page.encode("utf-8", "replace")
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)  # a temporary file is readable by its owner alone
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path
