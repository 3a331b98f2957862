"""The two tools of the research world: search over passages and a calculator.

Contract: the observations are the ones of the wire format. Hits are rendered as `[1] text [2] text`, on one line;
nothing found is `NoResults`; a calculator error is `CalcError: reason`. The names and the order of the parameters
make the system prompt's `search(query,k), calc(expr)`. The key `x-grammar` of a parameter is the regular expression
that constrained decoding holds the argument to; it is narrower than what the tool accepts, so that a teacher without
that grammar may write other text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from stacklm_hf.protocol.wire import NO_RESULTS
from stacklm_hf.tools.calculator import calc
from stacklm_hf.tools.retrieval import Passage, Retriever
from stacklm_hf.tools.spec import ToolSpec

SEARCH_SPEC = ToolSpec(
    name="search",
    description="Searches the corpus and returns the best passages, numbered.",
    parameters={
        "type": "object",
        "properties": {
            "query": {
                "type": "string",
                "description": "Words to look for.",
                "maxLength": 1000,
                "x-grammar": r"[A-Za-z0-9 ._,()-]{1,64}",
            },
            "k": {"type": "integer", "description": "How many passages to return.", "minimum": 1, "maximum": 9},
        },
        "required": ["query", "k"],
    },
)

CALC_SPEC = ToolSpec(
    name="calc",
    description="Computes an arithmetic expression with + - * / // % ** and parentheses.",
    parameters={
        "type": "object",
        "properties": {
            "expr": {
                "type": "string",
                "description": "The expression, e.g. (3+4)*12.",
                "x-grammar": r"[0-9+\-*/.() ]{1,40}",
            }
        },
        "required": ["expr"],
    },
)


class SearchTool:
    """`search(query,k)` over any retriever.

    Args:
        retriever: Ranks the passages; called from many threads.
    """

    spec = SEARCH_SPEC

    def __init__(self, retriever: Retriever) -> None:
        self.retriever = retriever

    def __call__(self, **arguments: Any) -> str:
        hits = self.retriever.search(arguments["query"], arguments["k"])
        return render_hits(passage for passage, _ in hits)


class CalcTool:
    """`calc(expr)`; see :func:`stacklm_hf.tools.calculator.calc`."""

    spec = CALC_SPEC

    def __call__(self, **arguments: Any) -> str:
        return calc(arguments["expr"])


def render_hits(passages: Iterable[Passage]) -> str:
    """Passages as one line of numbered text, white space inside a passage made single; `NoResults` for none."""
    lines = [f"[{rank}] {' '.join(passage.text.split())}" for rank, passage in enumerate(passages, start=1)]
    return " ".join(lines) or NO_RESULTS
