"""What a request's `tools` and `tool_choice` ask for, as plain data: for the server and for bodies of batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nanovllm.errors import RequestError, quoted

Tools = Sequence[Mapping[str, Any]]


def check_tools(tools: Any) -> None:
    """Raise RequestError for `tools` that are not a list of functions with names."""
    if not isinstance(tools, list):
        raise RequestError(f"tools={quoted(tools)}: must be a list of functions")
    for number, tool in enumerate(tools):
        function = (
            tool.get("function") if isinstance(tool, Mapping) and tool.get("type", "function") == "function" else None
        )
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            form = "{'type': 'function', 'function': {'name': ..., 'parameters': ...}}"
            raise RequestError(f"tools.{number} must be {form}, got {quoted(tool)}")
        parameters = {} if function.get("parameters") is None else function["parameters"]
        if not isinstance(parameters, Mapping):
            raise RequestError(f"tools.{number}.function.parameters must be a JSON schema, got {quoted(tool)}")
        kind = parameters.get("type", "object")
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            raise RequestError(
                f"tools.{number}.function.parameters has the type {quoted(kind)}: the arguments of a call are a JSON "
                "object, so it must be 'object' or left out"
            )


def named_function(choice: Any) -> str | None:
    """The function that a `tool_choice` names."""
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def check_choice(tools: Tools, choice: Any) -> None:
    """Raise RequestError for a `tool_choice` that does not fit the tools."""
    name = named_function(choice)
    if choice not in (None, "none", "auto", "required") and name is None:
        raise RequestError(
            f"tool_choice={quoted(choice)}: must be 'none', 'auto', 'required' or a function, "
            "{'type': 'function', 'function': {'name': ...}}"
        )
    if choice not in (None, "none") and not tools:
        raise RequestError("tool_choice needs tools")
    if name is not None and all(tool["function"]["name"] != name for tool in tools):
        raise RequestError(f"tool_choice names the function {name!r:.100}, which is not in tools")


def forced_schema(tools: Tools, choice: Any, parallel: bool | None) -> dict[str, Any] | None:
    """The JSON schema that a `tool_choice` forces the answer into; None for "auto" and "none".

    parallel: `parallel_tool_calls`; False allows one call.
    """
    name = named_function(choice)
    if name is not None:
        return next(_parameters(tool) for tool in tools if tool["function"]["name"] == name)
    if choice != "required":
        return None
    calls = [
        {
            "type": "object",
            # With an identifier of its own, a schema's references are within itself.
            "properties": {
                "name": {"const": tool["function"]["name"]},
                "parameters": {"$id": f"tool:{number}", **_parameters(tool)},
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for number, tool in enumerate(tools)
    ]
    most = {"maxItems": 1} if parallel is False else {}
    return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **most}


def _parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments, which are an object, whatever it leaves out."""
    return {**(tool["function"].get("parameters") or {}), "type": "object"}
