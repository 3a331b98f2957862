"""What a tool is: a name, a JSON schema and a function from arguments to one line of text.

Contract: everything that describes a tool to anybody comes from its :class:`ToolSpec`: the terse line of
the system prompt (:meth:`ToolSpec.signature`), the schema shown to a teacher (:meth:`ToolSpec.to_openai`),
the grammar of a call (`stacklm_hf.protocol.grammar`) and the check of the arguments before dispatch
(`stacklm_hf.tools.toolbox`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")


@dataclass(frozen=True)
class ToolSpec:
    """A tool's name, purpose and parameters.

    Args:
        name: Identifier of at most 64 characters.
        description: One sentence for a reader or a teacher model.
        parameters: JSON schema of type `object`. The order of `properties` is the order of the arguments in
            a rendered call and in the signature. A string property may carry a `pattern`, an integer one a
            `minimum` and a `maximum`; dispatch checks them and the grammar of a turn enforces them. `x-grammar`
            in a string property is a regular expression for the grammar alone, narrower than what dispatch takes.

    Raises:
        ValueError: The name is no identifier, or the schema is not an object schema.
    """

    name: str
    description: str
    parameters: dict[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"tool name {self.name!r} is not an identifier: use letters, digits, _ and -")
        if self.parameters.get("type") != "object" or not isinstance(self.parameters.get("properties"), dict):
            raise ValueError(
                f"parameters of tool {self.name!r} must be a JSON schema of type 'object' with 'properties'"
            )

    @property
    def properties(self) -> dict[str, dict[str, Any]]:
        """Argument name to its JSON schema, in call order."""
        return self.parameters["properties"]

    @property
    def required(self) -> tuple[str, ...]:
        """Names that a call must give; all of them where the schema does not say."""
        return tuple(self.parameters.get("required", self.properties))

    def signature(self) -> str:
        """The terse form of the system prompt, e.g. `search(query,k)`."""
        return f"{self.name}({','.join(self.properties)})"

    def to_openai(self) -> dict[str, Any]:
        """The form that chat templates and the OpenAI API take in `tools=`; without our own `x-` keys."""
        properties = {
            name: {key: value for key, value in schema.items() if not key.startswith("x-")}
            for name, schema in self.properties.items()
        }
        parameters = {**self.parameters, "properties": properties}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": parameters},
        }


@runtime_checkable
class Tool(Protocol):
    """A callable with a spec. It gets validated keyword arguments and returns the observation's text."""

    spec: ToolSpec

    def __call__(self, **arguments: Any) -> str: ...
