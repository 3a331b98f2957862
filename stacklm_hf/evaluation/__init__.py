"""Scores with their uncertainty, a failure taxonomy that adds up, the final table and the report."""

from stacklm_hf.evaluation.failures import Failure, classify_failure, count_failures
from stacklm_hf.evaluation.metrics import (
    Difference,
    EvaluationResult,
    Score,
    compare,
    pass_at_k,
    summarize,
    wilson_interval,
)
from stacklm_hf.evaluation.report import write_report
from stacklm_hf.evaluation.table import format_markdown, format_table

__all__ = [
    "Difference",
    "EvaluationResult",
    "Failure",
    "Score",
    "classify_failure",
    "compare",
    "count_failures",
    "format_markdown",
    "format_table",
    "pass_at_k",
    "summarize",
    "wilson_interval",
    "write_report",
]
