"""Tools of a request: checked, and chosen."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lmdecode.serving.fields import shown

__all__ = ["Tool", "check_tools", "chosen_tools", "is_named"]

_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,128}")
_MAX_TOOLS = 512


class Tool(NamedTuple):
    """A tool.

    Attributes
    ----------
    name : str
        What a call names.
    parameters : dict
        The JSON schema of its arguments, an object.
    strict : bool
        Whether a keyword of the schema that cannot be kept is an error.
    """

    name: str
    parameters: dict[str, Any]
    strict: bool


def check_tools(tools: Any) -> list[Tool]:
    """Return the tools of a request.

    Parameters
    ----------
    tools : sequence of dict
        Each ``{"type": "function", "function": {"name", "parameters", "strict"}}``.

    Raises
    ------
    ValueError
        Names the field that does not fit.
    """
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise ValueError(f"tools is of type {type(tools).__name__}; expected a list")
    if len(tools) > _MAX_TOOLS:
        raise ValueError(f"tools has {len(tools)} entries; expected at most {_MAX_TOOLS}")
    found: dict[str, Tool] = {}
    for index, entry in enumerate(tools):
        where = f"tools[{index}]"
        if not isinstance(entry, Mapping):
            raise ValueError(f"{where} is of type {type(entry).__name__}; expected an object")
        if entry.get("type", "function") != "function":
            raise ValueError(f"{where}.type is {shown(entry['type'])}; expected 'function'")
        function = entry.get("function", entry)
        if not isinstance(function, Mapping):
            kind = type(function).__name__
            raise ValueError(f"{where}.function is of type {kind}; expected an object")
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(
                f"{where}.function.name is {shown(name)}; expected 1 to 128 letters, digits, _, - "
                "and ."
            )
        if name in found:
            raise ValueError(f"{where}.function.name is {name!r}, as of another tool")
        strict = function.get("strict")
        if strict is not None and not isinstance(strict, bool):
            kind = type(strict).__name__
            raise ValueError(f"{where}.function.strict is of type {kind}; expected a bool")
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, Mapping):
            kind = type(parameters).__name__
            raise ValueError(f"{where}.function.parameters is of type {kind}; expected an object")
        found[name] = Tool(name, _object_schema(parameters), bool(strict))
    return list(found.values())


def _object_schema(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the schema of arguments: an object without keys that the schema does not have."""
    schema: dict[str, Any] = dict(parameters or {"properties": {}})
    schema.setdefault("type", "object")
    if not schema.keys() & {"additionalProperties", "patternProperties", "allOf", "anyOf",
                            "oneOf", "$ref"}:  # fmt: skip
        schema["additionalProperties"] = False
    return schema


def chosen_tools(tools: Sequence[Tool], tool_choice: Any) -> tuple[list[Tool], bool]:
    """Return the tools that may be called, and whether one has to be.

    Parameters
    ----------
    tools : sequence of Tool
        Those of the request.
    tool_choice : str, dict or None
        ``"none"``, ``"auto"`` or None, ``"required"``, ``{"type": "function", "function": {"name":
        ...}}``, or ``{"type": "allowed_tools", "allowed_tools": {"mode", "tools"}}``.

    Raises
    ------
    ValueError
        Names the field that does not fit.
    """
    if tool_choice == "none":
        return [], False
    if tool_choice is None or tool_choice == "auto":
        return list(tools), False
    if not tools:
        raise ValueError(f"tool_choice is {shown(tool_choice)} without tools; expected tools")
    if tool_choice in ("required", "any"):
        return list(tools), True
    if isinstance(tool_choice, Mapping):
        if tool_choice.get("type") == "allowed_tools":
            allowed = tool_choice.get("allowed_tools", tool_choice)
            if isinstance(allowed, Mapping) and isinstance(allowed.get("tools"), list):
                named = [_named(tools, entry) for entry in allowed["tools"]]
                return _without_repeats(named), allowed.get("mode") == "required"
        elif is_named(tool_choice):
            return [_named(tools, tool_choice)], True
    raise ValueError(
        f"tool_choice is {shown(tool_choice)}; expected 'none', 'auto', 'required' or "
        "{'type': 'function', 'function': {'name': ...}}"
    )


def is_named(tool_choice: Any) -> bool:
    """Whether a tool choice names the one function to call."""
    return isinstance(tool_choice, Mapping) and tool_choice.get("type", "function") == "function"


def _named(tools: Sequence[Tool], entry: Any) -> Tool:
    function = entry.get("function", entry) if isinstance(entry, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    for tool in tools:
        if tool.name == name:
            return tool
    raise ValueError(f"tool_choice names {shown(name)}; expected one of the tools")


def _without_repeats(tools: Sequence[Tool]) -> list[Tool]:
    return list({tool.name: tool for tool in tools}.values())
