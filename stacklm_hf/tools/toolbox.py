"""The one door to the tools: arguments are checked before a tool runs, and whatever goes wrong becomes text.

Contract: :meth:`ToolBox.call` returns a string for any name and any arguments, and raises nothing but what stops the
process (KeyboardInterrupt, SystemExit). A call that cannot run gives `ToolError: reason` on one line. An observation
is bounded in length and can be encoded as UTF-8. The box holds no state, so one serves many threads.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from stacklm_hf.protocol.wire import TOOL_ERROR
from stacklm_hf.tools.schema import check_arguments
from stacklm_hf.tools.spec import Tool, ToolSpec

logger = logging.getLogger(__name__)

_REASON_CHARS = 200
_CUT = " [cut]"


class ToolBox:
    """A set of tools with distinct names.

    Args:
        tools: The tools, in the order in which the system prompt lists them.
        max_observation_chars: Longer observations are cut there, and end in ` [cut]`. The default holds nine chunks
            of 80 words.

    Raises:
        ValueError: Two tools have the same name, or the bound is too small for an error message.
    """

    def __init__(self, tools: Sequence[Tool], *, max_observation_chars: int = 8000) -> None:
        if max_observation_chars < 2 * _REASON_CHARS:
            raise ValueError(f"max_observation_chars must be at least {2 * _REASON_CHARS}, got {max_observation_chars}")
        self._tools: dict[str, Tool] = {}
        for tool in tools:
            if tool.spec.name in self._tools:
                raise ValueError(f"two tools are named {tool.spec.name!r}: give each its own name")
            self._tools[tool.spec.name] = tool
        self.max_observation_chars = max_observation_chars

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        """What the tools are, in the order given."""
        return tuple(tool.spec for tool in self._tools.values())

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Checks the arguments, runs the tool and returns its observation, or `ToolError: reason`.

        Args:
            name: Name of a tool; untrusted.
            arguments: Argument name to JSON value; untrusted.
        """
        tool = self._tools.get(name) if isinstance(name, str) else None
        if tool is None:
            return _error(f"unknown tool {name!r:.60}; the tools are {', '.join(self._tools) or 'none'}")
        problem = check_arguments(tool.spec, arguments)
        if problem is not None:
            return _error(problem)
        try:
            observation = tool(**arguments)
        except Exception as error:  # The boundary: a tool's failure is an observation, not the end of a run.
            logger.warning("tool %s failed", name, exc_info=True)
            return _error(f"{name} failed with {type(error).__name__}: {error}")
        if not isinstance(observation, str):
            return _error(f"{name} returned {type(observation).__name__} instead of text")
        if len(observation) > self.max_observation_chars:
            observation = observation[: self.max_observation_chars - len(_CUT)] + _CUT
        return _encodable(observation)


def _error(reason: str) -> str:
    line = " ".join(_encodable(reason).split())
    if len(line) > _REASON_CHARS:
        line = line[: _REASON_CHARS - len(_CUT)] + _CUT
    return f"{TOOL_ERROR} {line}"


def _encodable(text: str) -> str:
    """Replaces lone surrogates, which a JSON escape can carry and no tokenizer takes."""
    return text.encode("utf-8", "replace").decode()
