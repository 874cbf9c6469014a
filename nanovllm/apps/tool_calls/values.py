"""Values of calls that are written as text, with the types that the tool's JSON schema gives them."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping
from typing import Any

INTEGER = re.compile(r"-?(?:0|[1-9]\d*)", re.ASCII)
WHOLE = re.compile(r"(-?(?:0|[1-9]\d*))\.0+", re.ASCII)
KINDS: Mapping[type, str] = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


def dumped(value: Any) -> str:
    """Strict JSON, or ValueError."""
    return encodable(json.dumps(value, ensure_ascii=False, allow_nan=False))


def encodable(text: str) -> str:
    """JSON in which half of a surrogate pair, which JSON escapes and which is no character, is an escape again."""
    return text.encode("utf-8", "backslashreplace").decode()


def escaped(text: str) -> str:
    """The text as it stands within a JSON string."""
    return dumped(text)[1:-1]


def loaded(text: str) -> Any:
    """The value of strict JSON. Raises ValueError."""
    try:
        return json.loads(text, parse_constant=_no_json)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def _no_json(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def property_types(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """JSON Schema's names of the types that a property may have; of one that the schema does not describe, string."""
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        described = properties[name]
    else:
        described = schema.get("additionalProperties")
        if not isinstance(described, Mapping) or not described:
            return frozenset({"string"})
    return frozenset(_types(described, schema, set()) or _ALL)


_ALL = ("null", "boolean", "integer", "number", "object", "array", "string")


def _types(schema: Any, root: Mapping[str, Any], seen: set[str]) -> set[str]:
    """All types that the schema and its parts name; empty if it names none. seen: the references that were followed."""
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type", [])
    types = {str(name) for name in (kind if isinstance(kind, list) else [kind])}
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if not types and isinstance(values, list):
        types = {_type_of(value) for value in values}
    reference = schema.get("$ref")
    parts = [schema.get(name) for name in ("anyOf", "oneOf", "allOf")]
    choices = [choice for part in parts if isinstance(part, list) for choice in part]
    if isinstance(reference, str) and reference not in seen:
        seen.add(reference)
        choices.append(_referred(reference, root))
    if not types:
        types = set().union(*(_types(choice, root, seen) for choice in choices))
    if not types:
        types = {"object"} if "properties" in schema else {"array"} if "items" in schema else set()
    return types | {"null"} if types and schema.get("nullable") is True else types


def _type_of(value: Any) -> str:
    return KINDS.get(type(value), "object" if isinstance(value, dict) else "array")


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    """The part of the schema that a reference like #/$defs/name stands for; None if there is none."""
    part: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        part = part.get(name) if isinstance(part, Mapping) else None
    return part


def typed(text: str, types: frozenset[str]) -> str:
    """The JSON of a value that is written as text. Text that fits none of the types is a string, unchanged."""
    if types == {"string"}:
        return dumped(text)
    word = text.strip()
    if "null" in types and word in ("null", "None"):
        return "null"
    if "boolean" in types and word.lower() in ("true", "false"):
        return word.lower()
    if types & {"integer", "number"}:
        if INTEGER.fullmatch(word):
            return word
        if "number" not in types and (whole := WHOLE.fullmatch(word)):
            return whole[1]
        if "number" in types and _is_a(word, (int, float)):
            return word
    wanted = tuple(kind for name, kind in (("object", dict), ("array", list)) if name in types)
    if wanted and word[:1] in "{[":
        if _is_a(word, wanted):
            return word
        value = python_value(word)  # templates may write Python's form
        if isinstance(value, wanted):
            return _dumped_or(value, text)
    return dumped(text)


def _is_a(text: str, kinds: tuple[type, ...]) -> bool:
    try:
        value = loaded(text)
    except ValueError:
        return False
    return isinstance(value, kinds) and not isinstance(value, bool)


def _dumped_or(value: Any, text: str) -> str:
    try:
        return dumped(value)
    except (ValueError, TypeError, RecursionError):
        return dumped(text)


class NoLiteral:
    """What `python_value` returns for text that is no literal of Python."""


class _JsonNames(ast.NodeTransformer):
    """Gives the names true, false and null the values that they have in JSON."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        names = {"true": True, "false": False, "null": None}
        return ast.copy_location(ast.Constant(names[node.id]), node) if node.id in names else node


def python_value(text: str) -> Any:
    """The value of a literal of Python, in which JSON's true, false and null are too; or NoLiteral."""
    try:
        with warnings.catch_warnings():  # of backslashes that escape nothing
            warnings.simplefilter("ignore")
            return ast.literal_eval(_JsonNames().visit(ast.parse(text.strip(), mode="eval")))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return NoLiteral
