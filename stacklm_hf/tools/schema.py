"""The check of a call's arguments against the JSON schema of a :class:`ToolSpec`.

Contract: the keywords that describe a tool's parameters are checked: type, enum, const, anyOf, minimum, maximum,
exclusiveMinimum, exclusiveMaximum, minLength, maxLength, pattern, minItems, maxItems, items, properties, required
and additionalProperties. Other keywords, `x-grammar` and `format` among them, are notes to a reader or to the grammar
and are not checked. Three rules are stricter than JSON Schema, because the arguments become keyword arguments of a
function: a key that is no property is an error, a `pattern` must match the whole string, and 2.0 is no integer.
"""

from __future__ import annotations

import re
from typing import Any

from stacklm_hf.tools.spec import ToolSpec

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def check_arguments(spec: ToolSpec, arguments: object) -> str | None:
    """Says in one line what is wrong with the arguments of a call, or returns None.

    Args:
        spec: The tool; trusted.
        arguments: What the model gave; untrusted.
    """
    if not isinstance(arguments, dict):
        return "the arguments must be an object"
    return _check_object({"required": spec.required, "additionalProperties": False, **spec.parameters}, arguments, "")


def _check(schema: dict[str, Any], value: object, where: str) -> str | None:
    """The first problem of `value`, named `where`, or None."""
    types = schema.get("type")
    if types is not None:
        allowed = [types] if isinstance(types, str) else list(types)
        if not any(_is_type(value, name) for name in allowed):
            return f"{where} must be of type {' or '.join(allowed)}, got {_type_name(value)}"
    if "enum" in schema and not any(_same(value, option) for option in schema["enum"]):
        return f"{where} must be one of {', '.join(map(repr, schema['enum']))}"
    if "const" in schema and not _same(value, schema["const"]):
        return f"{where} must be {schema['const']!r}"
    if "anyOf" in schema:
        problems = [_check(option, value, where) for option in schema["anyOf"]]
        if all(problems):
            return problems[0]
    if isinstance(value, str):
        return _check_string(schema, value, where)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _check_number(schema, value, where)
    if isinstance(value, list):
        return _check_array(schema, value, where)
    if isinstance(value, dict):
        return _check_object(schema, value, where)
    return None


def _check_string(schema: dict[str, Any], value: str, where: str) -> str | None:
    if len(value) < schema.get("minLength", 0):
        return f"{where} must have at least {schema['minLength']} characters"
    if len(value) > schema.get("maxLength", len(value)):
        return f"{where} must have at most {schema['maxLength']} characters"
    if "pattern" in schema and not re.fullmatch(schema["pattern"], value):
        return f"{where} must match {schema['pattern']}"
    return None


def _check_number(schema: dict[str, Any], value: float, where: str) -> str | None:
    if value != value:
        return f"{where} must be a number, got NaN"
    if value < schema.get("minimum", value):
        return f"{where} must be at least {schema['minimum']}"
    if value > schema.get("maximum", value):
        return f"{where} must be at most {schema['maximum']}"
    if "exclusiveMinimum" in schema and not value > schema["exclusiveMinimum"]:
        return f"{where} must be above {schema['exclusiveMinimum']}"
    if "exclusiveMaximum" in schema and not value < schema["exclusiveMaximum"]:
        return f"{where} must be below {schema['exclusiveMaximum']}"
    return None


def _check_array(schema: dict[str, Any], value: list[Any], where: str) -> str | None:
    if len(value) < schema.get("minItems", 0):
        return f"{where} must have at least {schema['minItems']} items"
    if len(value) > schema.get("maxItems", len(value)):
        return f"{where} must have at most {schema['maxItems']} items"
    items = schema.get("items")
    if isinstance(items, dict):
        for place, item in enumerate(value):
            problem = _check(items, item, f"{where}[{place}]")
            if problem is not None:
                return problem
    return None


def _check_object(schema: dict[str, Any], value: dict[str, Any], where: str) -> str | None:
    properties = schema.get("properties", {})
    prefix = f"{where}." if where else ""
    for name in schema.get("required", ()):
        if name not in value:
            return f"missing argument {prefix}{name}"
    for name, item in value.items():
        rule = properties.get(name, schema.get("additionalProperties", True))
        if rule is False:
            known = ", ".join(properties) or "none"
            return f"unknown argument {prefix + str(name)!r:.60}; the arguments are {known}"
        problem = _check(rule, item, f"{prefix}{name}") if isinstance(rule, dict) else None
        if problem is not None:
            return problem
    return None


def _is_type(value: object, name: str) -> bool:
    if isinstance(value, bool):  # bool is an int in Python, and not in JSON.
        return name == "boolean"
    return isinstance(value, _TYPES.get(name, ()))


def _same(value: object, option: object) -> bool:
    return value == option and isinstance(value, bool) == isinstance(option, bool)


def _type_name(value: object) -> str:
    return next((name for name in _TYPES if _is_type(value, name)), type(value).__name__)
